//! `towline warm`: asks an agent to fetch names into its cache.

use serde::Serialize;
use serde_json::Value;

use super::agent::{AgentAnswer, user};
use super::args::Warm;
use super::output::printable;
use super::render::{by_source, counted};
use super::target::Target;
use super::verbs::Context;
use crate::agent::Client;
use crate::agent::view::{Cache, Task};
use crate::error::{Error, ErrorKind, Result};
use crate::repository::SourceBytes;
use crate::selector::Selector;
use crate::size::show;
use crate::span;
use crate::transfer::exchange;

/// The request to the agent.
#[derive(Clone, Serialize)]
struct WarmRequest {
    name: String,
    // Agents of before do not know it.
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<String>,
    from: Option<String>,
    or_repository: bool,
    pin: Option<String>,
    owner: String,
    repository: Option<String>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    dry_run: bool,
}

#[derive(Serialize)]
struct All {
    tasks: Vec<AgentAnswer<Task>>,
}

/// A task that was begun, with the agent that runs it.
struct Begun {
    task: Task,
    agent: Client,
    request: WarmRequest,
}

impl Begun {
    /// The name that is warmed.
    fn chosen(&self) -> &str {
        self.task.name.split(':').next().unwrap_or_default()
    }
}

impl Context {
    /// Begins to warm each name; follows them if asked to. What fails for one name does not keep the others from being warmed and
    /// reported; then it is the error of the command.
    pub(super) async fn warm(&self, warm: Warm) -> Result<u8> {
        if warm.wait && warm.dry_run {
            return Err(Error::usage("--wait and --dry-run exclude each other: a dry run fetches nothing to wait for")
                .help("drop --wait to see what would be fetched, or drop --dry-run to fetch it"));
        }
        if warm.pin.is_some_and(|lasting| lasting.is_zero()) {
            return Err(Error::usage("pin would have run out already")
                .got("--pin 0")
                .help("give a longer time, such as --pin 24h, or leave --pin out"));
        }
        let agent = warm.at.clone().agent()?;
        let (mut begun, mut failed) = (Vec::with_capacity(warm.what.len()), Vec::new());
        for what in &warm.what {
            match self.begin_warm(&agent, self.warm_request(&warm, what)?, what, begun.is_empty()).await {
                Ok(task) => begun.push(task),
                Err(error) => failed.push(error),
            }
        }
        if warm.wait || warm.dry_run {
            begun = self.followed(begun, &mut failed).await;
        }
        let said = begun.iter().map(|one| AgentAnswer::by(&one.agent, one.task.clone()));
        let (all, only_from) = (All { tasks: said.collect() }, warm.from.as_ref().filter(|_| !warm.or_repository));
        let only_from = only_from.filter(|from| **from != exchange::From::Repository).map(ToString::to_string);
        if !all.tasks.is_empty() {
            self.output.outcome(warm.dry_run, &all, |all, _| {
                all.tasks.iter().map(|task| warmed(task, only_from.as_deref())).collect()
            })?;
        }
        let mut failed = failed.into_iter();
        if let Some(error) = failed.next() {
            failed.for_each(|other| self.output.remark(&printable(&other.to_string())));
            return Err(error);
        }
        let evicted = warm.wait && !warm.dry_run && self.evicted(&begun).await?;
        let lacks: Vec<Lack> = all.tasks.iter().filter_map(|said| Lack::of(&said.what)).collect();
        Ok(if lacks.contains(&Lack::Source) {
            ErrorKind::Unreachable.exit_code()
        } else if evicted || !lacks.is_empty() {
            ErrorKind::Exhausted.exit_code()
        } else {
            0
        })
    }

    fn warm_request(&self, warm: &Warm, what: &Target) -> Result<WarmRequest> {
        let path = what.path.clone().map(String::from_utf8).transpose();
        Ok(WarmRequest {
            name: what.name.to_string(),
            path: path.map_err(|source| {
                let error = Error::usage("path is not UTF-8, as an agent takes it").at(&what.name).source(source);
                error.help("warm the folder that it is in")
            })?,
            from: warm.from.as_ref().map(ToString::to_string),
            or_repository: warm.or_repository,
            pin: warm.pin.map(span::show),
            owner: warm.owner.clone().unwrap_or_else(user),
            repository: self.named_repository()?,
            dry_run: warm.dry_run,
        })
    }

    async fn begin_warm(&self, agent: &Client, request: WarmRequest, what: &Target, is_first: bool) -> Result<Begun> {
        let (task, agent) = agent.begin::<Task>("/v1/warm", &request).await?;
        // Other commands read the one of the settings or the default one, which may be another.
        if let Some(repository) = &task.repository
            && request.repository.is_none()
            && is_first
        {
            self.output.remark(&format!("repository of the agent: {}", printable(repository)));
        }
        let begun = Begun { task, agent, request };
        if matches!(what.name, Selector::Step { .. }) {
            self.output.remark(&format!("{} is {}", what.name, printable(begun.chosen())));
        }
        Ok(begun)
    }

    /// The tasks at their ends; `failed` gets the errors of the others.
    async fn followed(&self, begun: Vec<Begun>, failed: &mut Vec<Error>) -> Vec<Begun> {
        let line = self.line();
        let mut ended = Vec::with_capacity(begun.len());
        for one in begun {
            match one.agent.follow(&one.task.id, |view| self.relay(view)).await {
                Ok(task) => ended.push(Begun { task, ..one }),
                Err(error) => failed.push(error),
            }
        }
        drop(line);
        ended
    }

    /// True if chunks of one name were evicted by those of another one, which is told. It looks only if all names together may be more
    /// than a cache holds; pinned ones are not evicted.
    async fn evicted(&self, begun: &[Begun]) -> Result<bool> {
        let mut any = false;
        let bytes: u64 = begun.iter().map(|one| one.task.reported("bytes")).sum();
        for one in begun.iter().filter(|one| begun.len() > 1 && one.request.pin.is_none() && !one.task.is_incomplete())
        {
            let cache: Cache = one.agent.get("/v1/cache").await?;
            if bytes <= cache.stat.capacity / 10 * 9 {
                continue;
            }
            // The step that was chosen, whatever is the latest by now.
            let name = one.chosen().to_owned();
            let request = WarmRequest { name, dry_run: true, ..one.request.clone() };
            let (look, agent) = one.agent.begin::<Task>("/v1/warm", &request).await?;
            let lacking = agent.follow(&look.id, |_| {}).await?.reported("lacking_bytes");
            if lacking > 0 {
                any = true;
                let (name, lacking) = (printable(&one.task.name), show(lacking));
                self.output.remark(&format!(
                    "{name}: {lacking} were evicted again by the other names: the cache is too small for all"
                ));
            }
        }
        Ok(any)
    }
}

/// Reason why chunks are missing at the end of a warm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lack {
    /// The cache had no room for them.
    Room,
    /// They came, and were evicted again.
    Evicted,
    /// Nobody gave them.
    Source,
}

impl Lack {
    /// None if nothing is missing.
    pub(super) fn of(task: &Task) -> Option<Self> {
        if !task.is_incomplete() {
            return None;
        }
        let SourceBytes { agent, cache, site, remote, repository } = sources(task);
        let came = agent + cache + site + remote + repository;
        Some(if task.report.as_ref().is_some_and(|report| report["full"] == true) {
            Self::Room
        } else if came >= task.reported("fetched_bytes") + task.reported("missing_bytes") {
            Self::Evicted
        } else {
            Self::Source
        })
    }

    pub(super) fn words(self) -> &'static str {
        match self {
            Self::Room => "the cache is full (capacity, free_floor); see the log of the agent",
            Self::Evicted => {
                "they came and were evicted again: more than the cache, or the quota of their tenant, keeps"
            }
            Self::Source => {
                "no source that answers has them (`towline top` shows the agents), none may give them ([[allow]] of other agents, the \
                 policy, --from), or they are damaged in the repository (`towline verify NAME --data`)"
            }
        }
    }
}

/// The outcome of a warm. `only_from` is its only source, if it named one.
fn warmed(said: &AgentAnswer<Task>, only_from: Option<&str>) -> String {
    let task = &said.what;
    let name = format!("{}{}", printable(&task.name), said.place());
    if task.report.is_none() {
        return format!("warming {name}: {}\n", printable(&task.id));
    }
    let sum = |chunks: &str, bytes: &str| {
        let chunks = counted(task.reported(chunks), "chunk");
        format!("{} in {chunks}", show(task.reported(bytes)))
    };
    let missing = match Lack::of(task) {
        None => String::new(),
        Some(lack) => {
            let more = only_from.filter(|_| lack == Lack::Source).map_or_else(String::new, |from| {
                format!("\n  only {from} was asked (--from): --or-repository reads the rest from the repository")
            });
            format!("\n  missing: {}: {}{more}", sum("missing", "missing_bytes"), lack.words())
        }
    };
    if task.report.as_ref().is_some_and(|report| report["dry_run"] == true) {
        let (all, lacking) = (sum("chunks", "bytes"), sum("lacking", "lacking_bytes"));
        let shortfall = match task.reported("shortfall_bytes") {
            0 => String::new(),
            bytes => format!("\n  it does not fit: the cache has {} too few (capacity, free_floor, pins)", show(bytes)),
        };
        let about = if task.report.as_ref().is_some_and(|report| report["estimated"] == true) { "about " } else { "" };
        let alone = match task.reported("alone") {
            0 => String::new(),
            chunks => format!(", {chunks} of them without the bases that they are stored with"),
        };
        return format!("would warm: {name}, {all}; would fetch {about}{lacking}{alone}{shortfall}\n");
    }
    let pin = task.report.as_ref().and_then(|report| report["pin"].as_str());
    let pin = pin.map_or_else(String::new, |pin| format!("\n  pinned: {pin}"));
    format!(
        "warm: {name}, {}, {:.1} s\n  there already: {}; fetched: {}{}{missing}{pin}\n",
        sum("chunks", "bytes"),
        task.seconds,
        sum("hits", "hit_bytes"),
        sum("fetched", "fetched_bytes"),
        by_source(&sources(task)),
    )
}

/// Sources of the bytes that a task moved, gaps between chunks included; empty if none moved.
fn sources(task: &Task) -> SourceBytes {
    let sources = task.report.as_ref().and_then(|report| report.get("sources")).cloned().unwrap_or_default();
    let bytes = |source: &str| sources.get(source).and_then(Value::as_u64).unwrap_or(0);
    SourceBytes {
        agent: bytes("agent"),
        cache: bytes("cache"),
        site: bytes("site"),
        remote: bytes("remote"),
        repository: bytes("repository"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_warm_is_told_with_what_is_missing() {
        let task: Task = serde_json::from_value(serde_json::json!({
            "id": "A", "kind": "warm", "name": "run/1", "state": "running", "started": "", "seconds": 1.0,
            "progress": { "phase": "", "total": 0, "done": 0, "moved": 0 },
        }))
        .unwrap();
        let mut begun = AgentAnswer { at: None, what: task };
        assert_eq!(warmed(&begun, None), "warming run/1: A\n");
        let sources = serde_json::json!({ "agent": 0, "cache": 0, "site": 0, "remote": 768, "repository": 256 });
        begun.what.report = Some(serde_json::json!({
            "chunks": 6, "bytes": 2048, "hits": 1, "hit_bytes": 512, "fetched": 2, "fetched_bytes": 1024, "missing": 3,
            "missing_bytes": 512, "sources": sources,
        }));
        let text = warmed(&begun, None);
        let expected = "warm: run/1, 2.0 KiB in 6 chunks, 1.0 s\n  there already: 512 B in 1 chunk; fetched: 1.0 KiB in 2 chunks \
                        (other sites: 768 B, repository: 256 B)\n  missing: 512 B in 3 chunks: no source that answers has \
                        them (`towline top` shows the agents), none may give them ([[allow]] of other agents, the policy, --from), \
                        or they are damaged in the repository (`towline verify NAME --data`)\n";
        assert_eq!(text, expected);
        let only = warmed(&begun, Some("cloud"));
        assert!(
            only.ends_with("only cloud was asked (--from): --or-repository reads the rest from the repository\n"),
            "{only}"
        );
        begun.what.report.as_mut().unwrap()["full"] = true.into();
        assert!(
            warmed(&begun, None).contains("512 B in 3 chunks: the cache is full (capacity, free_floor)"),
            "{}",
            warmed(&begun, None)
        );
        begun.what.report.as_mut().unwrap()["full"] = false.into();
        begun.what.report.as_mut().unwrap()["sources"]["remote"] = 1536.into();
        assert!(
            warmed(&begun, None).contains("512 B in 3 chunks: they came and were evicted again"),
            "{}",
            warmed(&begun, None)
        );
        begun.at = Some("cloud/b".into());
        assert!(warmed(&begun, None).starts_with("warm: run/1 at cloud/b, 2.0 KiB"));
    }
}
