//! Needs: data that pods need at a site. What many workloads need is looked up, fetched and held once.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::sync::Semaphore;
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, timeout, timeout_at};

use super::decision::{Finding, Progress, SiteFinding};
use crate::agent::api::hint_for_caller;
use crate::agent::client::Client;
use crate::agent::pods::{AccountRights, PodAnnotations, PodNames, ServiceAccount};
use crate::agent::routing::AgentSelector;
use crate::agent::state::AgentState;
use crate::agent::view::{Commitment, Task, TaskState};
use crate::backoff::Backoff;
use crate::error::{Error, ErrorKind, Result};
use crate::identity::Identity;
use crate::name::Name;
use crate::placement::{Candidate, HintCandidate, HintRequest, HintVerdict};
use crate::span;

/// Needs that are looked up at a time.
const LOOKED_UP: usize = 16;
/// Time for one look: a commit reads the maps of all trees.
const LOOK_MAX: Duration = Duration::from_mins(1);
/// Time that a pass waits for what is looked up.
const MOMENT: Duration = Duration::from_millis(200);
/// Time that a hint waits for the chunks of inputs that are new to this agent.
const HINT_WAIT: Duration = Duration::from_secs(2);
/// Interval at which a warm is asked for its progress.
const PROGRESS_EVERY: Duration = Duration::from_secs(2);
/// Interval at which a need that waits for others is looked up again.
const QUEUE_EVERY: Duration = Duration::from_secs(10);
/// Time for which a finding that nothing will change soon is kept.
const SETTLED_FOR: Duration = Duration::from_secs(10);
/// Pauses between the tries of a warm that fails.
const PAUSES: Backoff = Backoff::new(Duration::from_secs(2), Duration::from_secs(30));
/// Lease of what is held for workloads: time for their pods to start.
const LEASE: Duration = Duration::from_mins(30);
/// Interval at which a lease is renewed.
const RENEW_EVERY: Duration = Duration::from_mins(10);
/// Progress from which on its own pace tells how long the rest takes.
const PACE_AFTER: Duration = Duration::from_secs(5);

/// Data that pods need.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Need {
    pub(super) account: ServiceAccount,
    /// Annotations of the pods that name the data.
    pub(super) annotations: BTreeMap<String, String>,
    pub(super) site: String,
}

/// Last finding about a need, and what follows from it.
#[derive(Clone, Debug)]
struct State {
    finding: Finding,
    notes: Vec<String>,
    /// Time from which on it is looked up again.
    due: Instant,
    held: Option<Held>,
    /// Since when it fails without a pause.
    failing: Option<Instant>,
    pauses: Backoff,
}

/// Commitment of an agent of the site.
#[derive(Clone, Debug)]
struct Held {
    agent: Client,
    /// Path of the commitment.
    path: String,
    begun: Instant,
    /// Missing bytes at the beginning.
    missing: u64,
    /// Seconds by the hint: median and 90th percentile.
    estimate: (f64, f64),
    renewed: Instant,
    ready: bool,
}

/// Needs, looked up in the background: an agent that does not answer holds up nobody else.
pub(super) struct Needs {
    lookup: Arc<Lookup>,
    warms: usize,
    known: BTreeMap<Need, State>,
    looking: BTreeSet<Need>,
    looks: JoinSet<(Need, State)>,
    /// Releases of what is not needed any more.
    releases: JoinSet<()>,
}

/// Looks a need up, and has an agent fetch and hold what is missing.
struct Lookup {
    agent: Arc<AgentState>,
    client: Client,
    rights: AccountRights,
    holders: Vec<Identity>,
    at_a_time: Semaphore,
}

impl Needs {
    /// Warms go through `client`, the agent itself, to the `holders`: at most `warms` at a time.
    pub(super) fn new(
        agent: Arc<AgentState>,
        client: Client,
        rights: AccountRights,
        (holders, warms): (Vec<Identity>, usize),
    ) -> Self {
        let lookup = Lookup { agent, client, rights, holders, at_a_time: Semaphore::new(LOOKED_UP) };
        Self {
            lookup: Arc::new(lookup),
            warms,
            known: BTreeMap::new(),
            looking: BTreeSet::new(),
            looks: JoinSet::new(),
            releases: JoinSet::new(),
        }
    }

    /// Looks up those of `needs` that are due, in their order, and waits a moment for what is found; what nothing needs any more is
    /// released.
    ///
    /// # Cancel safety
    /// Safe: leases run out, and a repetition finds what is held already.
    pub(super) async fn look_up(&mut self, needs: &[Need]) {
        self.release_others(needs);
        let now = Instant::now();
        let mut slots = self.warms.saturating_sub(self.under_way());
        for need in needs {
            if self.looking.contains(need) {
                continue;
            }
            let state = self.known.get(need).cloned().unwrap_or_else(|| State::new(now));
            if state.due > now {
                continue;
            }
            // One that asks for a slot and does not need it leaves it to others in the next round.
            let may_begin = state.held.is_some() || slots > 0;
            if state.held.is_none() {
                slots = slots.saturating_sub(1);
            }
            let (lookup, need) = (Arc::clone(&self.lookup), need.clone());
            self.looking.insert(need.clone());
            self.looks.spawn(async move {
                let state = lookup.next(&need, state, may_begin).await;
                (need, state)
            });
        }
        let moment = Instant::now() + MOMENT;
        while let Ok(Some(found)) = timeout_at(moment, self.looks.join_next()).await {
            self.take(found);
        }
    }

    fn take(&mut self, found: Result<(Need, State), JoinError>) {
        // One that panicked would never be looked up again, so the panic goes on.
        let (need, state) = found.unwrap_or_else(|error| resume_unwind(error.into_panic()));
        self.looking.remove(&need);
        self.known.insert(need, state);
    }

    /// Finding about a need; none before the first look.
    pub(super) fn finding(&self, need: &Need) -> Option<SiteFinding> {
        let State { finding, notes, failing, .. } = self.known.get(need)?;
        let finding = match (finding, failing) {
            (Finding::Failing(_, text), Some(since)) => Finding::Failing(since.elapsed(), text.clone()),
            (other, _) => other.clone(),
        };
        Some(SiteFinding { site: need.site.clone(), finding, notes: notes.clone() })
    }

    /// Time of the next look that is due.
    pub(super) fn due(&self) -> Option<Instant> {
        if !self.looking.is_empty() {
            return Some(Instant::now());
        }
        self.known.values().map(|state| state.due).min()
    }

    fn under_way(&self) -> usize {
        let fetches = |need: &Need| {
            let held = self.known.get(need).and_then(|state| state.held.as_ref());
            held.is_some_and(|held| !held.ready)
        };
        let new = self.looking.iter().filter(|need| !fetches(need)).count();
        self.known.keys().filter(|need| fetches(need)).count() + new
    }

    /// Forgets all but `needs`. What is there is held on until its lease ends: pods that start now read it.
    fn release_others(&mut self, needs: &[Need]) {
        while self.releases.try_join_next().is_some() {}
        let needed: BTreeSet<&Need> = needs.iter().collect();
        let others = self.known.keys().filter(|need| !needed.contains(need) && !self.looking.contains(need));
        let gone: Vec<Need> = others.cloned().collect();
        for need in gone {
            let Some(held) = self.known.remove(&need).and_then(|state| state.held).filter(|held| !held.ready) else {
                continue;
            };
            self.releases.spawn(async move {
                let ended: Result<Commitment> = held.agent.post(&format!("{}/outcome", held.path), &json!({})).await;
                if let Err(error) = ended {
                    tracing::debug!("what no workload waits for any more is held until its lease ends: {error:?}");
                }
            });
        }
    }
}

impl Lookup {
    /// State of a need after another look.
    async fn next(&self, need: &Need, mut state: State, may_begin: bool) -> State {
        let _permit = self.at_a_time.acquire().await;
        let now = Instant::now();
        let look = async {
            match state.held.take() {
                Some(held) => self.progress(held).await,
                None => self.begin(need, may_begin, &mut state.notes).await,
            }
        };
        let late = || Err(Error::unreachable("no answer in time").at(&need.site));
        let found = timeout(LOOK_MAX, look).await.unwrap_or_else(|_| late());
        match found {
            Ok((finding, held)) => {
                let (every, settled) = match (&finding, &state.finding) {
                    (Finding::Warming(now), Finding::Warming(before)) => (PROGRESS_EVERY, now.missing < before.missing),
                    (Finding::Warming(_), _) => (PROGRESS_EVERY, false),
                    (Finding::Queued(_), _) => (QUEUE_EVERY, true),
                    _ => (SETTLED_FOR, true),
                };
                if settled {
                    (state.failing, state.pauses) = (None, PAUSES);
                }
                State { finding, held, due: now + every, ..state }
            }
            Err(error) => {
                let since = *state.failing.get_or_insert(now);
                let finding = Finding::Failing(now.duration_since(since), text_of(&error));
                State { finding, held: None, due: now + state.pauses.pause(), ..state }
            }
        }
    }

    /// Looks up a need of which nothing is held, and begins a warm if data is missing.
    async fn begin(&self, need: &Need, may_begin: bool, notes: &mut Vec<String>) -> Result<(Finding, Option<Held>)> {
        let wanted = match PodAnnotations::of(&need.annotations) {
            Ok(wanted) => wanted,
            Err(error) => return Ok((Finding::Malformed(text_of(&error)), None)),
        };
        let PodNames { names, warnings } = match self.rights.names(&self.agent, &need.account, &wanted).await {
            Ok(found) => found,
            Err(error) if error.kind() == ErrorKind::Denied => return Ok((Finding::Absent(text_of(&error)), None)),
            Err(error) => return Err(error),
        };
        *notes = warnings;
        if names.is_empty() {
            return Ok((Finding::Nothing, None));
        }
        // A name that was just saved may be new to the advisor, which tells soon.
        let (candidate, complete) = match self.candidate(need, &names).await {
            Ok(candidate) => candidate,
            // The data may not even be looked at here.
            Err(error)
                if error.kind() == ErrorKind::Denied && need.site == self.agent.credentials()?.identity().site() =>
            {
                return Ok((Finding::Denied(error.to_string()), None));
            }
            Err(error) => return Err(error),
        };
        match candidate.verdict {
            HintVerdict::Allow => {}
            HintVerdict::Deny => return Ok((Finding::Denied(denial(&candidate)), None)),
            HintVerdict::Unknown => return Err(Error::denied("no policy can be read that decides on the data")),
        }
        let bytes = candidate.bytes;
        if bytes.missing == 0 && bytes.in_flight == 0 && complete {
            return Ok((Finding::There(bytes.present), None));
        }
        if !may_begin {
            return Ok((Finding::Queued(bytes.missing + bytes.in_flight), None));
        }
        let held = self.commit(need, &names, &candidate).await?;
        self.progress(held).await
    }

    /// The hint about the site of a need, and whether it is complete.
    async fn candidate(&self, need: &Need, names: &[Name]) -> Result<(Candidate, bool)> {
        let about =
            HintRequest { candidates: vec![HintCandidate { site: need.site.clone() }], ..HintRequest::about(names) };
        let may = |name: &Name| self.rights.allow(&need.account, name);
        let hint = hint_for_caller(&self.agent, &about, may, HINT_WAIT).await?;
        let complete = hint.complete;
        let candidate = hint.candidates.into_iter().next();
        let candidate = candidate.ok_or_else(|| Error::other("hint has no candidate").at(&need.site))?;
        Ok((candidate, complete))
    }

    /// Has an agent of the site fetch and hold `names`.
    async fn commit(&self, need: &Need, names: &[Name], candidate: &Candidate) -> Result<Held> {
        let id = commitment_id(&need.site, names);
        let agent = self.client.clone().routed_to(Some(self.holder(&need.site, &id)?));
        let path = format!("/v1/hints/{id}");
        let inputs: BTreeSet<&Name> = names.iter().collect();
        let body = json!({
            "site": need.site,
            "inputs": inputs,
            "lease": span::show(LEASE),
            "repository": self.agent.origin(None)?.id().to_string(),
        });
        let (commit, outcome) = (format!("{path}/commit"), format!("{path}/outcome"));
        let committed: Result<(Commitment, Client)> = match agent.begin(&commit, &body).await {
            // One of the names is that of another tree since.
            Err(error) if error.kind() == ErrorKind::Conflict => {
                let _ended: Commitment = agent.post(&outcome, &json!({})).await?;
                agent.begin(&commit, &body).await
            }
            committed => committed,
        };
        let (commitment, agent) = committed?;
        let now = Instant::now();
        Ok(Held {
            agent,
            path,
            begun: now,
            missing: commitment.missing_bytes,
            estimate: (candidate.eta_s.p50, candidate.eta_s.p90),
            renewed: now,
            ready: false,
        })
    }

    /// Agent that holds what the id stands for: always the same one, so that a new controller finds it.
    fn holder(&self, site: &str, id: &str) -> Result<AgentSelector> {
        let own = self.holders.iter().filter(|holder| holder.site() == site);
        let weight = |holder: &&Identity| *blake3::hash(format!("{} {id}", holder.path()).as_bytes()).as_bytes();
        match own.max_by_key(weight) {
            Some(holder) => Ok(AgentSelector::Agent(holder.clone())),
            None => site.parse(),
        }
    }

    /// Asks how far a warm is, and renews its lease.
    async fn progress(&self, mut held: Held) -> Result<(Finding, Option<Held>)> {
        let commitment: Commitment = if held.renewed.elapsed() >= RENEW_EVERY {
            held.renewed = Instant::now();
            held.agent.post(&format!("{}/outcome", held.path), &json!({ "lease": span::show(LEASE) })).await?
        } else {
            held.agent.get(&held.path).await?
        };
        if commitment.ready {
            held.ready = true;
            return Ok((Finding::There(commitment.bytes), Some(held)));
        }
        held.ready = false;
        // Another commit fetches the rest.
        if let Some(task) = &commitment.task {
            self.check_runs(&held, task).await?;
        }
        let seconds = held.seconds_left(commitment.missing_bytes);
        let progress = Progress { missing: commitment.missing_bytes, bytes: commitment.bytes, seconds };
        Ok((Finding::Warming(progress), Some(held)))
    }

    /// Checks that the task of a warm still runs.
    ///
    /// # Errors
    /// The task's error.
    async fn check_runs(&self, held: &Held, task: &str) -> Result<()> {
        let task: Task = held.agent.get(&format!("/v1/tasks/{task}")).await?;
        if task.state == TaskState::Running {
            return Ok(());
        }
        // It may have ended since.
        let now: Commitment = held.agent.get(&held.path).await?;
        if now.ready {
            return Ok(());
        }
        let message = task.error.as_ref().and_then(|error| error.get("message")).and_then(|text| text.as_str());
        let text = message.unwrap_or("no source has all of it, or the cache is full");
        Err(Error::unreachable("warm has ended").got(text.to_owned()))
    }
}

impl State {
    fn new(now: Instant) -> Self {
        Self { finding: Finding::Nothing, notes: Vec::new(), due: now, held: None, failing: None, pauses: PAUSES }
    }
}

impl Held {
    /// Seconds until `missing` bytes are there, in the median and at the 90th percentile: by the pace so far, else by the hint.
    fn seconds_left(&self, missing: u64) -> Option<(u64, u64)> {
        let (elapsed, fetched) = (self.begun.elapsed(), self.missing.saturating_sub(missing));
        let (median, most) = self.estimate;
        let part = missing as f64 / self.missing.max(1) as f64;
        let whole = |seconds: f64| Duration::try_from_secs_f64(seconds.ceil()).ok().map(|time| time.as_secs());
        if fetched > 0 && elapsed >= PACE_AFTER {
            let left = whole(elapsed.as_secs_f64() * missing as f64 / fetched as f64)?;
            return Some((left, left));
        }
        Some((whole(median * part)?, whole(most * part)?)).filter(|(left, _)| *left > 0)
    }
}

/// Id under which `names` are held at a site.
fn commitment_id(site: &str, names: &[Name]) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(site.as_bytes());
    let sorted: BTreeSet<&Name> = names.iter().collect();
    for name in sorted {
        hasher.update(b"\n").update(name.as_str().as_bytes());
    }
    format!("h_{}", &hasher.finalize().to_hex()[..32])
}

fn denial(candidate: &Candidate) -> String {
    let Some((first, others)) = candidate.deny.split_first() else { return "its data".to_owned() };
    let more = if others.is_empty() { "" } else { ", and other inputs" };
    format!("{:.100}: {:.200}{more}", first.input, first.rule)
}

/// Error with its help, in one line.
fn text_of(error: &Error) -> String {
    let help = error.help_text().map(|help| format!(" ({help})")).unwrap_or_default();
    format!("{error}{help}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<Name> {
        names.iter().map(|name| name.parse().unwrap()).collect()
    }

    #[test]
    fn the_same_data_at_a_site_is_held_once() {
        let id = commitment_id("home", &names(&["a", "b"]));
        crate::placement::check_hint_id(&id).unwrap();
        assert_eq!(id, commitment_id("home", &names(&["b", "a", "a"])));
        for (site, other) in [("cloud", &["a", "b"][..]), ("home", &["a"]), ("home", &["a/b"])] {
            assert_ne!(id, commitment_id(site, &names(other)));
        }
    }
}
