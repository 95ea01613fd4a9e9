//! `towline hint`.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueHint};
use serde::Serialize;
use serde_json::{Value, json};

use super::output::{printable, table};
use super::sites::{bits, dollars, or_dash};
use super::verbs::Context;
use super::warm::Lack;
use crate::agent::Client;
use crate::agent::advisor::{Advisor, Authority, HintCaller, SitesPaths};
use crate::agent::view::{Commitment, Task};
use crate::error::{Error, Result};
use crate::placement::{
    Candidate, CandidateBytes, CandidateDollars, Hint, HintCandidate, HintOutput, HintRequest, HintVerdict, Mode,
    Objective, SourceShare, Workload, check_hint_id,
};
use crate::repository::Repository;
use crate::selector::Selector;
use crate::transfer::identity::Trusted;
use crate::transfer::policy::{config_folder, machine, machine_guard};
use crate::work::blocking;
use crate::{size, span};

/// Interval between looks at a commitment that is not fetched at the time.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// `towline hint`.
#[derive(Debug, Args)]
pub(super) struct HintArgs {
    /// Names that the job reads, or choices such as run-7@latest
    #[arg(value_name = "NAME", required_unless_present_any = ["end", "awaited"])]
    names: Vec<Selector>,
    /// Sites to compare; default: all in the sites file
    #[arg(long, value_name = "SITE")]
    at: Vec<String>,
    /// The sites file (docs/placement.md)
    #[arg(long, value_name = "FILE", default_value = "sites.toml", value_hint = ValueHint::FilePath)]
    sites: PathBuf,
    /// Price book whose entries replace those that ship with the program
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    prices: Option<PathBuf>,
    /// GPUs that wait until the data is there
    #[arg(long, value_name = "N", default_value_t = 0)]
    gpus: u64,
    /// Dollars for a GPU and an hour; default: the price of the first GPUs of each site
    #[arg(long, value_name = "USD")]
    gpu_usd_h: Option<f64>,
    /// Expected duration of the job, for --returns
    #[arg(long, value_name = "TIME", value_parser = span::parse, default_value = "0s")]
    runtime: Duration,
    /// Time at which the job must have ended, after --runtime: such as 2026-12-01T08:00:00Z
    #[arg(long, value_name = "TIME")]
    deadline: Option<String>,
    /// Checkpoints that the job sends back: SITE:BYTES:EVERY, such as home:140G:30m
    #[arg(long, value_name = "SITE:BYTES:EVERY", value_parser = output)]
    returns: Vec<HintOutput>,
    /// Measure by which sites are ordered: time, cost or weighted
    #[arg(long, value_name = "MODE", default_value = "time")]
    objective: Mode,
    /// Dollars that an hour of waiting is worth, for --objective weighted
    #[arg(long, value_name = "USD", default_value_t = 0.0)]
    usd_per_hour: f64,
    /// Quantile of the time that counts: 0.1, 0.5 or 0.9
    #[arg(long, value_name = "Q", default_value_t = 0.5)]
    quantile: f64,
    /// Sites that cost more rank behind the others
    #[arg(long, value_name = "USD")]
    max_usd: Option<f64>,
    /// Sites that take longer rank behind the others
    #[arg(long, value_name = "TIME", value_parser = span::parse)]
    max_time: Option<Duration>,
    /// Show each term: sources, dollars and reasons
    #[arg(long)]
    explain: bool,
    /// Have an agent of this site, or of the best allowed one, hold the names and fetch them now
    #[arg(long, value_name = "SITE", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    commit: Option<String>,
    /// Time that the names are held; another command holds them for itself
    #[arg(long, value_name = "TIME", value_parser = span::parse, default_value = "1h", requires = "commit")]
    lease: Duration,
    /// Wait until all of it is there
    #[arg(long, requires = "commit")]
    wait: bool,
    /// Wait until everything of this hint's commitment is there: its site is that of --at
    #[arg(long = "await", value_name = "HINT", conflicts_with_all = ["names", "commit"], requires = "at")]
    awaited: Option<String>,
    /// End the commitment of this hint: its site is that of --at
    #[arg(long, value_name = "HINT", conflicts_with_all = ["names", "commit", "awaited"], requires = "at")]
    end: Option<String>,
}

fn output(text: &str) -> Result<HintOutput, String> {
    let parts: Vec<&str> = text.split(':').collect();
    let [site, bytes, every] = parts.as_slice() else {
        return Err("expected SITE:BYTES:EVERY, such as home:140G:30m".to_owned());
    };
    let bytes = size::parse(bytes).map_err(|error| error.to_string())?;
    let every_s = span::parse(every).map_err(|error| error.to_string())?.as_secs();
    Ok(HintOutput { bytes, every_s, return_to: (*site).to_owned() })
}

impl HintArgs {
    fn request(&self) -> HintRequest {
        HintRequest {
            workload: Workload {
                gpus: self.gpus,
                gpu_usd_h: self.gpu_usd_h,
                runtime_s: self.runtime.as_secs(),
                deadline: self.deadline.clone(),
            },
            outputs: self.returns.clone(),
            candidates: self.at.iter().map(|site| HintCandidate { site: site.clone() }).collect(),
            objective: Objective {
                mode: self.objective,
                usd_per_hour: self.usd_per_hour,
                quantile: self.quantile,
                max_usd: self.max_usd,
                max_seconds: self.max_time.map(|time| time.as_secs_f64()),
            },
            ..HintRequest::about(&self.names)
        }
    }
}

impl Context {
    /// Compares sites for a job that reads some names.
    pub(super) async fn hint(&self, args: &HintArgs) -> Result<()> {
        if let Some(id) = &args.end {
            return self.end_commitment(id, &args.at).await;
        }
        if let Some(id) = &args.awaited {
            return self.await_commitment(id, &args.at).await;
        }
        if args.commit.is_some() && args.lease.is_zero() {
            return Err(Error::usage("lease would have run out already")
                .got("--lease 0")
                .help("give a longer time, such as --lease 1h"));
        }
        let request = args.request();
        request.check()?;
        let paths = SitesPaths { sites: args.sites.clone(), prices: args.prices.clone() };
        let repository = self.open().await?;
        let advisor =
            Advisor::new(repository.clone(), paths, machine_guard()?, self.authority_of_agents(&repository).await?)?;
        let epoch = advisor.epoch().await?;
        let mut names = Vec::with_capacity(args.names.len());
        for selector in &args.names {
            names.push(self.resolve(&repository, selector).await?);
        }
        let found = advisor.hint(&epoch, &repository, &request, &names, (Duration::MAX, HintCaller::User)).await?;
        for note in &found.notes {
            self.output.remark(&printable(note));
        }
        let Some(site) = &args.commit else {
            return self.output.answer(&found, |found, _| shown(found, args.explain));
        };
        let committed = self.commit_hint(&found, chosen(&found, site)?, args, &repository).await?;
        let answer = CommittedHint { hint: found, commitment: committed };
        self.output.answer(&answer, |answer, _| shown(&answer.hint, args.explain) + &committed_line(answer))?;
        answer.commitment.fetched.as_ref().map_or(Ok(()), |task| check_ready(&answer.commitment.commitment, task))
    }

    /// Ends the commitment of the hint `id` at its site.
    async fn end_commitment(&self, id: &str, at: &[String]) -> Result<()> {
        let (agent, path) = commitment(id, at)?;
        let ended: Commitment = agent.post(&format!("{path}/outcome"), &json!({})).await?;
        self.output.report(&ended, |ended, _| format!("{} is released\n", ended.hint_id))
    }

    /// Waits until everything of the commitment of the hint `id` is there.
    async fn await_commitment(&self, id: &str, at: &[String]) -> Result<()> {
        let (agent, path) = commitment(id, at)?;
        let mut followed: Option<Task> = None;
        loop {
            let now: Commitment = agent.get(&path).await?;
            if now.ready {
                tell_start(&agent, &path, &now).await?;
                return self.output.report(&now, |now, _| format!("{} is there\n", size::show(now.bytes)));
            }
            match (&now.task, &followed) {
                (Some(task), Some(ended)) if ended.id == *task => check_ready(&now, ended)?,
                (Some(task), _) => {
                    let line = self.line();
                    // Its error is the reason why it never will be.
                    followed = Some(agent.follow(task, |view| self.relay(view)).await?);
                    drop(line);
                }
                (None, _) => tokio::time::sleep(LOOK_EVERY).await,
            }
        }
    }

    /// Commits `hint` at the site of `candidate`, through the local agent.
    async fn commit_hint(
        &self,
        hint: &Hint,
        candidate: &Candidate,
        args: &HintArgs,
        repository: &Repository,
    ) -> Result<CommittedAt> {
        let mut body = json!({
            "site": candidate.site,
            "inputs": hint.inputs,
            "lease": span::show(args.lease),
            "repository": repository.id().to_string(),
        });
        if args.gpus > 0 {
            body["gpus"] = args.gpus.into();
        }
        let agent = Client::required()?.routed_to(Some(candidate.site.parse()?));
        let path = format!("/v1/hints/{}", hint.id);
        let (mut commitment, agent): (Commitment, _) = agent.begin(&format!("{path}/commit"), &body).await?;
        let (mut seconds, mut fetched_bytes, mut moved_bytes, mut fetched) = (None, None, None, None);
        if let Some(task) = commitment.task.clone().filter(|_| args.wait) {
            let line = self.line();
            let ended = agent.follow(&task, |view| self.relay(view)).await?;
            drop(line);
            seconds = Some(ended.seconds);
            fetched_bytes = ended.report.as_ref().map(fetched_by);
            moved_bytes = ended.report.as_ref().map(moved_by);
            commitment = agent.get(&path).await?;
            tell_start(&agent, &path, &commitment).await?;
            fetched = Some(ended);
        }
        Ok(CommittedAt { site: candidate.site.clone(), commitment, seconds, fetched_bytes, moved_bytes, fetched })
    }

    /// Authority of this machine, which confirms what agents have signed: that of its certificate, or the one that its user set.
    pub(super) async fn authority_of_agents(&self, repository: &Repository) -> Result<Box<Authority>> {
        if let Some(credentials) = machine(config_folder().as_deref())? {
            return Ok(Box::new(move || Ok(Some(credentials.trusted()))));
        }
        let trusted = match self.settings.authority() {
            Ok(folder) if folder.exists() => {
                let (folder, now) = (folder.to_owned(), repository.clock().now());
                Some(blocking(move || Trusted::read(&folder, now)).await?)
            }
            _ => None,
        };
        Ok(Box::new(move || Ok(trusted.clone())))
    }
}

/// Client of the agents of the one site in `at`, and the path of the commitment of the hint `id`.
fn commitment(id: &str, at: &[String]) -> Result<(Client, String)> {
    check_hint_id(id)?;
    let [site] = at else {
        return Err(Error::usage("a commitment is at one site").got(at.join(", ")).help("name it once: --at SITE"));
    };
    Ok((Client::required()?.routed_to(Some(site.parse()?)), format!("/v1/hints/{id}")))
}

/// Tells that the job of a commitment starts, once everything is there: whoever waits for it has not used the GPUs meanwhile.
async fn tell_start(agent: &Client, path: &str, now: &Commitment) -> Result<()> {
    if now.ready && now.gpus > 0 {
        let _: Commitment = agent.post(&format!("{path}/outcome"), &json!({ "started": true })).await?;
    }
    Ok(())
}

/// Error, if the inputs are not all there although `fetch` has ended.
fn check_ready(now: &Commitment, fetch: &Task) -> Result<()> {
    if now.ready {
        return Ok(());
    }
    let why = Lack::of(fetch).map_or("they were evicted again", Lack::words);
    Err(Error::unreachable("inputs could not all be fetched")
        .at(&now.hint_id)
        .got(format!("{} missing", size::show(now.missing_bytes)))
        .help(format!("{why}; commit the hint again to go on")))
}

/// Hint, and what came of its commit.
#[derive(Serialize)]
struct CommittedHint {
    #[serde(flatten)]
    hint: Hint,
    commitment: CommittedAt,
}

#[derive(Serialize)]
struct CommittedAt {
    site: String,
    #[serde(flatten)]
    commitment: Commitment,
    /// Duration of the fetch, if it was waited for.
    seconds: Option<f64>,
    /// Bytes of the chunks that it fetched, as the hint counts them, if it was waited for.
    fetched_bytes: Option<u64>,
    /// Bytes that other agents and the repository sent for them.
    moved_bytes: Option<u64>,
    /// The task that fetched, if it was waited for.
    #[serde(skip)]
    fetched: Option<Task>,
}

/// The candidate `site`, or the best one if that is empty. Only one that the policy allows.
fn chosen<'h>(hint: &'h Hint, site: &str) -> Result<&'h Candidate> {
    let mut candidates = hint.candidates.iter();
    let found = candidates.find(|candidate| site.is_empty() || candidate.site == site).ok_or_else(|| {
        let compared: Vec<&str> = hint.candidates.iter().map(|candidate| candidate.site.as_str()).take(8).collect();
        Error::not_found("site is not among those that are compared")
            .at(site)
            .expected(format!("a site such as {}", compared.join(", ")))
            .help("add it with --at, or leave out --at")
    })?;
    if found.verdict == HintVerdict::Allow {
        return Ok(found);
    }
    let rules: Vec<&str> = found.deny.iter().map(|denial| denial.rule.as_str()).collect();
    Err(Error::denied("hint is not committed: its data may not go there").at(&found.site).got(if rules.is_empty() {
        found.verdict.word().to_owned()
    } else {
        rules.join("; ")
    }))
}

/// Bytes of the chunks that the task of a commitment fetched, by its report.
fn fetched_by(report: &Value) -> u64 {
    let inputs = report["inputs"].as_array().into_iter().flatten();
    inputs.filter_map(|input| input["fetched_bytes"].as_u64()).sum()
}

/// Bytes that came for it from other machines.
fn moved_by(report: &Value) -> u64 {
    let inputs = report["inputs"].as_array().into_iter().flatten();
    let sources = ["site", "remote", "repository"];
    inputs.map(|input| sources.iter().filter_map(|from| input["sources"][from].as_u64()).sum::<u64>()).sum()
}

fn committed_line(answer: &CommittedHint) -> String {
    let CommittedAt { site, commitment, seconds, fetched_bytes, .. } = &answer.commitment;
    let Commitment { bytes, missing_bytes, expires, .. } = commitment;
    let until = expires.as_ref().map_or_else(String::new, |until| format!(" until {until}"));
    let state = match seconds {
        Some(seconds) if *missing_bytes == 0 => {
            format!("all of it is there: {} in {seconds:.1} s", size::show(fetched_bytes.unwrap_or_default()))
        }
        _ => format!("{} to come", size::show(*missing_bytes)),
    };
    let (site, id) = (printable(site), printable(&answer.hint.id));
    format!(
        "committed at {site}: {} held{until}; {state}\n  `towline hint --end {id} --at {site}` releases it\n",
        size::show(*bytes)
    )
}

fn shown(hint: &Hint, explain: bool) -> String {
    let row = |candidate: &Candidate| {
        let Candidate { bytes, eta_s, usd_micro, .. } = candidate;
        let time = |seconds: f64| {
            Duration::try_from_secs_f64(seconds).map_or_else(|_| "-".to_owned(), |time| span::show(rounded(time)))
        };
        let from: Vec<String> = candidate.sources.iter().map(|source| from(source, &candidate.site)).collect();
        let verdict = match candidate.verdict {
            HintVerdict::Allow => "allow".to_owned(),
            HintVerdict::Unknown => "unknown".to_owned(),
            HintVerdict::Deny => {
                let codes: Vec<&str> = candidate.deny.iter().map(|denial| denial.code).collect();
                format!("deny: {}", codes.first().copied().unwrap_or("policy"))
            }
        };
        let moves = candidate.verdict == HintVerdict::Allow;
        let or_none = |text: String| if moves { text } else { "-".to_owned() };
        vec![
            candidate.rank.to_string(),
            printable(&candidate.site),
            verdict,
            candidate.score.to_string(),
            size::show(bytes.present),
            size::show(bytes.in_flight + bytes.missing),
            or_none(time(eta_s.p50)),
            or_none(time(eta_s.p90)),
            or_none(dollars(usd_micro.total)),
            or_none(or_dash(&from.join(", "))),
        ]
    };
    let rows: Vec<_> = hint.candidates.iter().map(row).collect();
    let head = ["RANK", "SITE", "VERDICT", ">SCORE", ">PRESENT", ">TO MOVE", ">P50", ">P90", ">USD", "FROM"];
    let mut text = table(&head, &rows);
    if explain {
        for risk in &hint.at_risk {
            let steps = risk.steps.map_or_else(String::new, |steps| format!(", about {steps:.0} steps"));
            let (input, age) = (printable(&risk.input), span::show(Duration::from_secs(risk.seconds)));
            let _ = writeln!(text, "\nlost if preempted now: {age} of work since {input}{steps}");
        }
        for candidate in &hint.candidates {
            text.push_str(&explained(candidate));
        }
    }
    text
}

/// Place that bytes come from, seen from `site`.
fn from(source: &SourceShare, site: &str) -> String {
    let place = match (&source.site, source.repository) {
        (Some(at), true) if at == site => "its repository".to_owned(),
        (Some(at), true) => format!("{} (repository)", printable(at)),
        (Some(at), false) => printable(at),
        (None, _) => "the repository".to_owned(),
    };
    match &source.path {
        Some(path) if path != "internet" => format!("{place} by {}", printable(path)),
        _ => place,
    }
}

/// Each term of a candidate, so that the sums can be checked by hand.
fn explained(candidate: &Candidate) -> String {
    let Candidate { bytes, usd_micro, eta_s, capacity, .. } = candidate;
    let mut text = format!("\n{}: {}\n", printable(&candidate.site), candidate.verdict.word());
    let mut line = |what: &str, value: String| {
        let _ = writeln!(text, "  {what:<10} {value}");
    };
    for denial in &candidate.deny {
        line("denied", format!("{}: {}", printable(&denial.input), printable(&denial.rule)));
    }
    let CandidateBytes { logical, unique, present, pinned, in_flight, missing } = *bytes;
    line("files", format!("{logical} bytes, {unique} in distinct chunks"));
    line("stored", format!("{present} present ({pinned} pinned) + {in_flight} in flight + {missing} missing bytes"));
    for source in &candidate.sources {
        let egress = source.egress_micro_usd.map_or_else(|| "price not known".to_owned(), dollars);
        let times = if source.samples == 0 { String::new() } else { format!(" {} times", source.samples) };
        let rate = format!("{}, {}{times}", bits(source.rate), source.basis.word());
        let month = source.month_bytes.map_or_else(String::new, |bytes| format!(" after {bytes} bytes this month"));
        line(
            "from",
            format!("{}: {} bytes at {rate}, egress {egress}{month}", from(source, &candidate.site), source.bytes),
        );
    }
    line("time", format!("p10 {} s, p50 {} s, p90 {} s", eta_s.p10, eta_s.p50, eta_s.p90));
    let CandidateDollars { egress, requests, way_back, stall, total, .. } = usd_micro;
    let parts = [("egress", egress), ("requests", requests), ("return", way_back), ("GPUs waiting", stall)];
    let parts: Vec<String> = parts.iter().map(|(what, micro)| format!("{what} {}", dollars(**micro))).collect();
    line("dollars", format!("{} = {}", parts.join(" + "), dollars(*total)));
    if let Some(free) = capacity.free {
        line("cache", format!("{free} bytes free, {} to evict", capacity.must_evict));
    }
    for reason in &candidate.reasons {
        line("note", printable(reason));
    }
    text
}

/// A time without more places than matter.
fn rounded(time: Duration) -> Duration {
    match time.as_millis() {
        0..1_000 => time,
        1_000..10_000 => Duration::from_millis(u64::try_from(time.as_millis() / 100 * 100).unwrap_or(u64::MAX)),
        _ => Duration::from_secs(time.as_secs()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn a_fetch_that_leaves_inputs_missing_is_an_error() {
        let mut now: Commitment = serde_json::from_value(json!({
            "hint_id": "h", "inputs": ["run/1"], "bytes": 2048, "missing_bytes": 512, "ready": false, "pin": "p",
        }))
        .unwrap();
        let fetch: Task = serde_json::from_value(json!({
            "id": "A", "kind": "warm", "name": "run/1", "state": "done", "started": "", "seconds": 1.0,
            "progress": { "phase": "", "total": 0, "done": 0, "moved": 0 },
            "report": { "missing": 3, "missing_bytes": 512, "fetched_bytes": 1024 },
        }))
        .unwrap();
        let error = check_ready(&now, &fetch).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable);
        assert!(error.to_string().contains("512 B missing"), "{error}");
        now.ready = true;
        check_ready(&now, &fetch).unwrap();
    }
}
