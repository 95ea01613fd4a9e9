//! Hints: for each candidate site what the data of a job would cost there, in bytes, time and dollars, and whether it may go there.
//! Pure: the same snapshot and request give the same hint, wherever it is computed.

use std::collections::{BTreeMap, BTreeSet};
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use super::holdings::{Holding, Holdings};
use super::objective::{Burden, millionths};
use super::price_book::PriceBook;
use super::request::{API_VERSION, HintRequest};
use super::sites::{Link, Site, Sites};
use super::sources::{SourceOption, SourcePlan, SourceShare, TimeBasis, TimeEstimate};
use super::verdict::{self, DENIALS_SHOWN, Denial, HintVerdict, Placed};
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::name::Name;
use crate::policy::{Labels, PolicyRules};
use crate::span;

/// Bytes that one request to a store brings.
const READ_LEN: u64 = 8 << 20;
/// Time for which a hint is good: the interval at which agents publish inventories.
const VALID_FOR: Duration = Duration::from_mins(1);
/// Digits of the id of a hint.
const ID_DIGITS: usize = 32;

/// State of the world that a hint is computed from.
#[derive(Debug)]
pub struct Snapshot<'a> {
    /// Time of the snapshot.
    pub at: Timestamp,
    /// Position of the repository's log.
    pub log: u64,
    /// Location of the repository, and its id as text, to find the site that it is at.
    pub repository: [String; 2],
    /// Sites and links.
    pub sites: &'a Sites,
    /// Prices.
    pub book: &'a PriceBook,
    /// Agents that have told what they hold.
    pub agents: Vec<Identity>,
    /// Sites of agents whose inventories were found to be false: what they hold is unknown.
    pub unknown: BTreeSet<String>,
    /// Policy in force, if there is one.
    pub policy: Option<&'a PolicyRules>,
    /// Reasons why the snapshot does not have everything that a hint needs.
    pub gaps: Vec<String>,
    /// Bytes of the month so far, by meter.
    pub month_so_far: Arc<BTreeMap<String, u64>>,
    /// Hash of the inputs that are not in here: sites file, prices and inventories.
    pub hash: blake3::Hash,
}

/// An input, as the snapshot's log has it.
#[derive(Debug)]
pub struct Input {
    /// Name.
    pub name: Name,
    /// Labels of its content.
    pub labels: Labels,
    /// Time at which it was saved.
    pub saved: Timestamp,
    /// Seconds for a step, between the step of the run before it and this one; none if it is no step, or unknown.
    pub step_seconds: Option<f64>,
}

/// Answer to a request.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
#[serde(rename_all = "camelCase")]
pub struct Hint {
    /// [`API_VERSION`].
    pub api_version: String,
    /// Hash of snapshot and request.
    #[serde(rename = "hint_id")]
    pub id: String,
    /// Time of the snapshot.
    #[serde(rename = "generated_at")]
    pub generated_at: String,
    /// Time at which a new one should be asked for: by then, agents have told what changed.
    #[serde(rename = "valid_until")]
    pub valid_until: String,
    /// Position of the repository's log; for tokens and other agents, that of the input that was saved last.
    pub epoch: u64,
    /// False if something is missing that would change the answer; `notes` says what.
    pub complete: bool,
    /// Names that the inputs stood for.
    pub inputs: Vec<String>,
    /// Work that a run would lose if it were preempted at the time of the snapshot, of inputs that are steps of one.
    pub at_risk: Vec<AtRisk>,
    /// Verdict on places that the sites file does not describe.
    pub elsewhere: HintVerdict,
    /// Candidates, the best first.
    pub candidates: Vec<Candidate>,
    /// Remarks on the whole.
    pub notes: Vec<String>,
}

/// Work of a run since a step was saved: what is lost if it is preempted, and goes on from there.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
pub struct AtRisk {
    /// Name of the step.
    pub input: String,
    /// Seconds since it was saved.
    pub seconds: u64,
    /// Steps in that time, at the pace between the step before and this one; none if there is no step before.
    pub steps: Option<f64>,
}

/// One site in a hint.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
pub struct Candidate {
    /// Site.
    pub site: String,
    /// Place in the order, from 1.
    pub rank: usize,
    /// 0 to 100: 100 is the best allowed site, 0 one that is not allowed.
    pub score: u64,
    /// Verdict of the policy.
    pub verdict: HintVerdict,
    /// Denials, by input: the first eight.
    pub deny: Vec<Denial>,
    /// Bytes.
    pub bytes: CandidateBytes,
    /// Seconds until all bytes are there.
    pub eta_s: CandidateTime,
    /// Dollars, in millionths.
    pub usd_micro: CandidateDollars,
    /// Space in the caches of the site.
    pub capacity: CandidateCapacity,
    /// Where the missing bytes come from.
    pub sources: Vec<SourceShare>,
    /// Seconds since the oldest inventory of the site; none: it has none.
    pub inventory_age_s: Option<u64>,
    /// Reasons, for people.
    pub reasons: Vec<String>,
}

/// Bytes of the inputs at a site. `in_flight + missing` travel: chunks come without a base that nobody else there needs, if that is less
/// and an agent sends them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
pub struct CandidateBytes {
    /// Plain bytes of the files.
    pub logical: u64,
    /// Plain bytes of the distinct chunks.
    pub unique: u64,
    /// Stored bytes of the chunks that caches of the site hold.
    pub present: u64,
    /// Those of them that are pinned.
    pub pinned: u64,
    /// Bytes that pins of the site expect and that are not there yet, as they travel.
    pub in_flight: u64,
    /// Bytes that the site lacks, as they travel.
    pub missing: u64,
}

/// Time until the inputs are at a site.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
pub struct CandidateTime {
    /// 10th percentile.
    pub p10: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// Weakest basis of the sources, unknown if an inventory of the site is false; none if nothing moves.
    pub basis: Option<TimeBasis>,
    /// Fewest measurements of a source.
    pub samples: u32,
    /// Source that takes the longest.
    pub bottleneck: Option<String>,
}

/// Dollars at a site, in millionths.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
pub struct CandidateDollars {
    /// Egress of the missing bytes.
    pub egress: u64,
    /// Requests to the repository's store.
    pub requests: u64,
    /// Egress of the job's checkpoints to where they return.
    #[serde(rename = "return")]
    pub way_back: u64,
    /// GPUs that wait for the bytes, at the median time.
    pub stall: u64,
    /// Sum.
    pub total: u64,
    /// False if a price is not known; its part is counted as 0.
    pub complete: bool,
    /// Date of the prices.
    pub price_book: String,
}

/// Space in the caches of a site.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
pub struct CandidateCapacity {
    /// Bytes that are free; none: unknown.
    pub free: Option<u64>,
    /// True if the missing bytes fit beside what is pinned; none: unknown.
    pub fits: Option<bool>,
    /// Bytes that must be evicted for them.
    pub must_evict: u64,
}

/// Checks that `id` can be that of a hint.
///
/// # Errors
/// Usage, if not.
pub fn check_hint_id(id: &str) -> Result<()> {
    let digits = id.strip_prefix("h_").filter(|digits| digits.len() == ID_DIGITS);
    if digits.is_some_and(|digits| digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))) {
        return Ok(());
    }
    Err(Error::usage("id of a hint is malformed")
        .expected(format!("h_ and {ID_DIGITS} hexadecimal digits"))
        .got(format!("{id:.64?}")))
}

/// Computes the hint for `request`, whose inputs are `inputs` with the chunks of `holdings`.
///
/// # Errors
/// Usage, for a malformed request, or a site that the sites file does not describe.
pub fn hint(snapshot: &Snapshot<'_>, request: &HintRequest, inputs: &[Input], holdings: &Holdings) -> Result<Hint> {
    request.check()?;
    let question = HintQuestion {
        snapshot,
        request,
        inputs,
        holdings,
        repository_site: snapshot.sites.site_of(&snapshot.repository),
        id: id(snapshot, request, holdings)?,
    };
    let names = question.candidates()?;
    let mut candidates: Vec<(Candidate, Burden)> =
        names.iter().map(|name| question.candidate(name)).collect::<Result<_>>()?;
    rank(snapshot.at, request, &mut candidates);
    let mut notes = snapshot.gaps.clone();
    let unpriced = candidates.iter().filter(|(candidate, _)| !candidate.usd_micro.complete);
    let unpriced: Vec<&str> = unpriced.map(|(candidate, _)| candidate.site.as_str()).collect();
    if !unpriced.is_empty() {
        notes.push(format!("a price is not known for: {}", unpriced.join(", ")));
    }
    Ok(Hint {
        api_version: API_VERSION.to_owned(),
        id: question.id,
        generated_at: snapshot.at.to_string(),
        valid_until: snapshot.at.after(VALID_FOR).to_string(),
        epoch: snapshot.log,
        complete: notes.is_empty(),
        inputs: inputs.iter().map(|input| input.name.to_string()).collect(),
        at_risk: inputs.iter().filter_map(|input| at_risk(input, snapshot.at)).collect(),
        elsewhere: verdict::rule(snapshot, inputs, "").verdict,
        candidates: candidates.into_iter().map(|(candidate, _)| candidate).collect(),
        notes,
    })
}

/// Work since `input` was saved; none if it is no step of a run.
fn at_risk(input: &Input, now: Timestamp) -> Option<AtRisk> {
    input.name.step()?;
    let since = now.since(input.saved);
    let steps = input.step_seconds.map(|seconds| since.as_secs_f64() / seconds);
    Some(AtRisk { input: input.name.to_string(), seconds: since.as_secs(), steps })
}

/// Orders `candidates`: allowed ones within the limits, allowed ones beyond them, unknown ones, denied ones; in each group by the
/// objective. Sets rank and score.
fn rank(now: Timestamp, request: &HintRequest, candidates: &mut [(Candidate, Burden)]) {
    let objective = &request.objective;
    let runtime = Duration::from_secs(request.workload.runtime_s);
    let deadline = request.workload.deadline();
    let exceeded = |burden: Burden| {
        let mut reasons = objective.exceeded(burden);
        let end = now.after(Duration::from_millis(burden.ms).saturating_add(runtime));
        if deadline.is_some_and(|deadline| end > deadline) {
            reasons.push("would end after the deadline".to_owned());
        }
        reasons
    };
    candidates.sort_by_cached_key(|(candidate, burden)| {
        let group = match candidate.verdict {
            HintVerdict::Allow => usize::from(!exceeded(*burden).is_empty()),
            HintVerdict::Unknown => 2,
            HintVerdict::Deny => 3,
        };
        (group, objective.value(*burden), candidate.site.clone())
    });
    let allowed = candidates.iter().filter(|(candidate, _)| candidate.verdict == HintVerdict::Allow);
    let best = allowed.map(|(_, burden)| objective.value(*burden).0).min().unwrap_or_default();
    for (place, (candidate, burden)) in candidates.iter_mut().enumerate() {
        candidate.rank = place + 1;
        candidate.reasons.extend(exceeded(*burden));
        if candidate.verdict == HintVerdict::Allow {
            candidate.score = objective.score(objective.value(*burden).0, best);
        }
    }
}

struct HintQuestion<'a> {
    snapshot: &'a Snapshot<'a>,
    request: &'a HintRequest,
    inputs: &'a [Input],
    holdings: &'a Holdings,
    /// Site that the repository is at.
    repository_site: Option<&'a str>,
    id: String,
}

impl HintQuestion<'_> {
    /// Names of the candidates, each once.
    fn candidates(&self) -> Result<BTreeSet<&str>> {
        let sites = self.snapshot.sites;
        let listed = self.request.candidates.iter().map(|candidate| candidate.site.as_str());
        let returns = self.request.outputs.iter().map(|output| output.return_to.as_str());
        for name in listed.clone().chain(returns) {
            if sites.site(name).is_none() {
                let known: Vec<&str> = sites.sites().map(|(name, _)| name).collect();
                return Err(Error::not_found("the sites file does not describe the site")
                    .at(name)
                    .expected(format!("one of {}", known.join(", "))));
            }
        }
        if self.request.candidates.is_empty() {
            return Ok(sites.sites().map(|(name, _)| name).collect());
        }
        Ok(listed.collect())
    }

    fn candidate(&self, name: &str) -> Result<(Candidate, Burden)> {
        let site = self.snapshot.sites.site(name).ok_or_else(|| Error::not_found("no such site").at(name))?;
        let held = self.holdings.at(name);
        let ruled = verdict::rule(self.snapshot, self.inputs, name);
        let plan = self.plan(name, site, &ruled);
        let bytes = self.bytes(held, &plan);
        let time = plan.time();
        let dollars = self.dollars(name, site, &plan, time);
        let quantile = match self.request.objective.quantile {
            low if low < 0.3 => time.p10,
            middle if middle < 0.7 => time.p50,
            _ => time.p90,
        };
        let burden = Burden { ms: quantile, micro_usd: dollars.total };
        let bottleneck = plan.bottleneck().map(|share| {
            let from = share.site.as_deref().unwrap_or("the repository");
            share.path.as_ref().map_or_else(|| from.to_owned(), |path| format!("{path}:{from}>{name}"))
        });
        let inventory_age_s = held.map(|held| self.snapshot.at.since(held.oldest).as_secs());
        let capacity = capacity(site, held, &bytes);
        let seconds = |ms: u64| ms as f64 / 1000.0;
        let is_unknown = self.snapshot.unknown.contains(name);
        let mut reasons = reasons(&bytes, held.map(|held| self.snapshot.at.since(held.oldest)), &plan, &capacity);
        if held.is_some_and(|held| held.running == 0) {
            reasons.push(
                "no agent of it runs: what its caches hold is there when one runs again, and goes nowhere else"
                    .to_owned(),
            );
        }
        if is_unknown {
            reasons.push("an inventory of it is false: what that lists counts as missing".to_owned());
        }
        let mut deny = ruled.denials;
        if let Some(more @ 1..) = deny.len().checked_sub(DENIALS_SHOWN) {
            deny.truncate(DENIALS_SHOWN);
            reasons.push(format!("{more} more inputs are denied"));
        }
        let candidate = Candidate {
            site: name.to_owned(),
            rank: 0,
            score: 0,
            verdict: ruled.verdict,
            reasons,
            deny,
            bytes,
            eta_s: CandidateTime {
                p10: seconds(time.p10),
                p50: seconds(time.p50),
                p90: seconds(time.p90),
                basis: if is_unknown { Some(TimeBasis::Unknown) } else { plan.basis() },
                samples: plan.shares.iter().map(|share| share.samples).min().unwrap_or_default(),
                bottleneck,
            },
            usd_micro: dollars,
            capacity,
            sources: plan.shares,
            inventory_age_s,
        };
        Ok((candidate, burden))
    }

    /// Bytes at a site.
    fn bytes(&self, held: Option<&Holding>, plan: &SourcePlan) -> CandidateBytes {
        let closure = self.holdings.closure();
        let mut bytes =
            CandidateBytes { logical: closure.logical(), unique: closure.unique(), ..CandidateBytes::default() };
        if let Some(held) = held {
            bytes.present = held.held_bytes;
            bytes.pinned = held.pinned_bytes;
        }
        bytes.in_flight = plan.in_flight;
        bytes.missing = plan.bytes() - bytes.in_flight;
        bytes
    }

    /// Sources of the chunks that the site `name` lacks.
    fn plan(&self, name: &str, site: &Site, ruled: &Placed) -> SourcePlan {
        let mut options = Vec::new();
        let measured = |from: &str| self.holdings.at(name).and_then(|held| held.links.get(from));
        for from in self.holdings.senders().filter(|from| *from != name) {
            let links = self.links(from, name);
            // The measured rate is that of the link that is used without a choice.
            let usual = Link::usual(links.iter().copied());
            options.extend(links.iter().filter(|link| ruled.may_use(link)).map(|&link| SourceOption {
                site: Some(from),
                link: Some(link),
                repository: false,
                by_agents: false,
                within: false,
                measured: measured(from).filter(|_| usual.is_some_and(|usual| std::ptr::eq(usual, link))),
            }));
        }
        if ruled.from_store {
            let at = self.repository_site;
            let within = site.repositories.iter().any(|there| self.snapshot.repository.contains(there));
            let links = at.filter(|_| !within).map(|at| self.links(at, name)).unwrap_or_default();
            let usual = Link::usual(links.iter().copied());
            let by_agents = self.is_folder_elsewhere(name);
            let option = |link: Option<&'_ Link>| SourceOption {
                site: at,
                link: link.and_then(|link| links.iter().find(|known| std::ptr::eq(**known, link)).copied()),
                repository: true,
                by_agents,
                within,
                measured: measured("").filter(|_| match (link, usual) {
                    (Some(link), Some(usual)) => std::ptr::eq(usual, link),
                    _ => link.is_none(),
                }),
            };
            if links.is_empty() {
                options.push(option(None));
            } else {
                options.extend(links.iter().map(|link| option(Some(link))));
            }
        }
        let so_far = |meter: &str| self.snapshot.month_so_far.get(meter).copied().unwrap_or_default();
        SourcePlan::choose(self.holdings, name, options, self.request.objective.micro_usd_per_hour(), &so_far)
    }

    /// True if the repository is a folder that lies at another site than `name`, by the policy: only agents there read it from a disk.
    fn is_folder_elsewhere(&self, name: &str) -> bool {
        let [location, id] = &self.snapshot.repository;
        let Some((policy, id)) = self.snapshot.policy.zip(id.parse().ok()) else { return false };
        !location.contains("://") && policy.site_of(slice::from_ref(location), id).is_some_and(|site| site != name)
    }

    /// Links between two sites, in the order of the file.
    fn links(&self, from: &str, to: &str) -> Vec<&Link> {
        self.snapshot.sites.links_between(from, to).collect()
    }

    fn dollars(&self, name: &str, site: &Site, plan: &SourcePlan, time: TimeEstimate) -> CandidateDollars {
        let (egress, requests) = (plan.egress_micro_usd(), self.requests(plan));
        let way_back = self.way_back(name);
        let workload = &self.request.workload;
        let hourly = match workload.gpu_usd_h {
            Some(usd) => millionths(usd),
            None => site.gpus.first().map_or(0, |gpus| gpus.micro_usd_hour),
        };
        let stall = u128::from(workload.gpus) * u128::from(hourly) * u128::from(time.p50) / 3_600_000;
        let stall = u64::try_from(stall).unwrap_or(u64::MAX);
        let complete = egress.is_some() && requests.is_some() && way_back.is_some();
        let parts = [egress.unwrap_or(0), requests.unwrap_or(0), way_back.unwrap_or(0), stall];
        CandidateDollars {
            egress: parts[0],
            requests: parts[1],
            way_back: parts[2],
            stall,
            total: parts.iter().fold(0, |sum, part| sum.saturating_add(*part)),
            complete,
            price_book: self.snapshot.book.dated().to_owned(),
        }
    }

    /// Micro-dollars of the requests to the repository's store; none if they have a price that is not known.
    fn requests(&self, plan: &SourcePlan) -> Option<u64> {
        let bytes = plan.repository_bytes();
        let Some(at) = self.repository_site.and_then(|name| self.snapshot.sites.site(name)) else {
            return (bytes == 0).then_some(0);
        };
        let Some(storage) = &at.storage else { return Some(0) };
        let price = self.snapshot.book.storage(storage, &at.provider, &at.region).ok()?;
        let requests = u128::from(bytes.div_ceil(READ_LEN));
        u64::try_from((requests * u128::from(price.micro_usd_million_gets)).div_ceil(1_000_000)).ok()
    }

    /// Micro-dollars of sending the job's checkpoints back; none if a price is not known.
    fn way_back(&self, name: &str) -> Option<u64> {
        let mut sum = 0_u64;
        for output in self.request.outputs.iter().filter(|output| output.return_to != name) {
            let count = self.request.workload.runtime_s / output.every_s;
            let bytes = count.saturating_mul(output.bytes);
            let prices = self.snapshot.sites.links_between(name, &output.return_to).map(|link| {
                let so_far = |meter: &str| self.snapshot.month_so_far.get(meter).copied().unwrap_or_default();
                link.cost.marginal(so_far, bytes)
            });
            sum = sum.saturating_add(prices.min()?);
        }
        Some(sum)
    }
}

/// Hash of the snapshot and the request.
fn id(snapshot: &Snapshot<'_>, request: &HintRequest, holdings: &Holdings) -> Result<String> {
    let mut hasher = blake3::Hasher::new();
    let request = serde_json::to_vec(request).map_err(|source| Error::other("request is not JSON").source(source))?;
    hasher.update(snapshot.hash.as_bytes()).update(holdings.closure().hash().as_bytes());
    hasher.update(&snapshot.log.to_le_bytes()).update(&snapshot.at.0.to_le_bytes());
    hasher.update(&snapshot.policy.map_or(0, PolicyRules::version).to_le_bytes());
    for (meter, bytes) in &*snapshot.month_so_far {
        hasher.update(meter.as_bytes()).update(&[0]).update(&bytes.to_le_bytes());
    }
    hasher.update(&request);
    Ok(format!("h_{}", &hasher.finalize().to_hex()[..ID_DIGITS]))
}

fn capacity(site: &Site, held: Option<&Holding>, bytes: &CandidateBytes) -> CandidateCapacity {
    let Some(space) = held.map(|held| held.space) else {
        let fits = site.cache.map(|cache| cache >= bytes.missing);
        return CandidateCapacity { free: None, fits, must_evict: 0 };
    };
    let free = space.capacity.saturating_sub(space.used);
    CandidateCapacity {
        free: Some(free),
        fits: Some(bytes.missing <= space.capacity.saturating_sub(space.promised)),
        must_evict: bytes.missing.saturating_sub(free),
    }
}

fn reasons(
    bytes: &CandidateBytes,
    age: Option<Duration>,
    plan: &SourcePlan,
    capacity: &CandidateCapacity,
) -> Vec<String> {
    let mut reasons = Vec::new();
    match age {
        Some(age) => reasons.push(format!("its caches hold {} % (inventory {} old)", percent(bytes), span::show(age))),
        None => reasons.push("no agent of it has published an inventory: taken to hold nothing".to_owned()),
    }
    if plan.nowhere > 0 {
        reasons.push(format!("{} bytes are in no place that it may read", plan.nowhere));
    }
    if capacity.fits == Some(false) {
        reasons.push("its caches have no room for them beside what is pinned".to_owned());
    }
    reasons
}

/// Share of the stored bytes that is present, in whole percent, rounded down.
fn percent(bytes: &CandidateBytes) -> u64 {
    let all = bytes.present + bytes.in_flight + bytes.missing;
    if all == 0 { 100 } else { u64::try_from(u128::from(bytes.present) * 100 / u128::from(all)).unwrap_or(100) }
}
