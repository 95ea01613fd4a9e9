//! `towline top`: what the agent does, drawn anew each second.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, IsTerminal as _};
use std::time::{Duration, Instant};

use chrono::DateTime;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::signal::unix::SignalKind;

use super::agent::pinned;
use super::args::AtOption;
use super::listen;
use super::output::{Output, harmless, printable, table};
use super::verbs::Context;
use crate::agent::Client;
use crate::agent::view::{
    Cache, Commitment, CommitmentList, Health, Peer, PeerList, PinList, Pinned, Site, SiteAgent, SiteList, Task,
    TaskList, TaskState,
};
use crate::error::{Error, ErrorKind, Result};
use crate::size::show;
use crate::span;

/// Interval of drawing.
const EVERY: Duration = Duration::from_secs(1);
/// Tasks that ended and are shown, and pins, at most.
const SHOWN_MAX: usize = 8;
/// Cells of a bar.
const BAR: usize = 20;
/// To the other screen, without a cursor and without breaking long lines; and back.
/// (<https://invisible-island.net/xterm/ctlseqs/ctlseqs.html>)
const ENTER: &[u8] = b"\x1b[?1049h\x1b[?25l\x1b[?7l";
const LEAVE: &[u8] = b"\x1b[?7h\x1b[?25h\x1b[?1049l";

/// One look at an agent.
#[derive(Debug, Serialize)]
struct Reading {
    health: Health,
    #[serde(flatten)]
    tasks: TaskList,
    /// None, if the agent has no cache.
    cache: Option<Cache>,
    pins: Vec<Pinned>,
    peers: Vec<Peer>,
    /// Hints that are committed there.
    hints: Vec<Commitment>,
    /// Sites; none, if the agent is no advisor.
    sites: Option<SiteList>,
}

impl Reading {
    async fn take(agent: &Client) -> Result<Self> {
        let health = agent.health().await?;
        let tasks = agent.get("/v1/tasks").await?;
        let sites = if_there(agent, "/v1/sites").await?;
        let cache = if_there(agent, "/v1/cache").await?;
        let mut reading = Self { health, tasks, cache, pins: Vec::new(), peers: Vec::new(), hints: Vec::new(), sites };
        if reading.cache.is_some() {
            reading.pins = agent.get::<PinList>("/v1/pins").await?.pins;
            reading.peers = agent.get::<PeerList>("/v1/peers").await?.peers;
            reading.hints = if_there::<CommitmentList>(agent, "/v1/hints").await?.unwrap_or_default().commitments;
        }
        Ok(reading)
    }
}

/// Answer of the agent; none, if it has no such part, or shows it to its own node alone.
async fn if_there<T: DeserializeOwned>(agent: &Client, path: &str) -> Result<Option<T>> {
    match agent.get(path).await {
        Ok(found) => Ok(Some(found)),
        Err(error) if [ErrorKind::NotFound, ErrorKind::Denied].contains(&error.kind()) => Ok(None),
        Err(error) => Err(error),
    }
}

impl Context {
    /// Whether the agent is ready.
    pub(super) async fn ready(&self, at: AtOption) -> Result<()> {
        let away = |error: Error| match error.kind() {
            ErrorKind::NotFound => Error::unreachable("agent is not ready").source(error),
            _ => error,
        };
        let agent = at.agent().map_err(away)?;
        let health = agent.health().await.map_err(away)?;
        if health.ready {
            return Ok(());
        }
        Err(Error::unreachable("agent is not ready")
            .at(agent.socket().display())
            .help("`towline top` shows what it does; its log says what is lacking"))
    }

    /// Draws until Ctrl-C; once, if that was asked for or nobody watches.
    pub(super) async fn top(&self, once: bool, at: AtOption) -> Result<()> {
        let agent = at.agent()?;
        let (mut interrupt, mut terminate) = (listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?);
        let mut rates = Rates::default();
        if once || !self.draw || !io::stdout().is_terminal() {
            let reading = Reading::take(&agent).await?;
            return self.output.answer(&reading, |reading, _| shown(reading, &mut rates));
        }
        let screen = Screen::enter(&self.output)?;
        let mut last = None;
        let mut ticks = tokio::time::interval(EVERY);
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                _ = interrupt.recv() => return Ok(()),
                _ = terminate.recv() => return Ok(()),
            }
            let text = match Reading::take(&agent).await {
                Ok(reading) => {
                    let text = shown(&reading, &mut rates);
                    last = Some(reading.health);
                    text
                }
                // It may come back.
                Err(error) => unseen(last.as_ref(), &error),
            };
            screen.draw(&clipped(text, rows()))?;
        }
    }
}

/// The other screen of the terminal, until it is dropped.
struct Screen<'a>(&'a Output);

impl<'a> Screen<'a> {
    fn enter(output: &'a Output) -> Result<Self> {
        output.print(ENTER)?;
        Ok(Self(output))
    }

    /// Each line over the one that was there, then nothing.
    fn draw(&self, text: &str) -> Result<()> {
        let lines = harmless(text).replace('\n', "\x1b[K\n");
        self.0.print(format!("\x1b[H{lines}\x1b[J").as_bytes())
    }
}

impl Drop for Screen<'_> {
    fn drop(&mut self) {
        // A terminal that is gone needs nothing.
        let _ = self.0.print(LEAVE);
    }
}

/// Rate of each task, from one look to the next.
#[derive(Debug, Default)]
struct Rates(BTreeMap<String, (Instant, u64, f64)>);

impl Rates {
    /// Bytes a second, smoothed over some seconds; none at first sight.
    fn observe(&mut self, task: &Task, now: Instant) -> Option<u64> {
        let done = task.progress.done;
        let Some((before, had, rate)) = self.0.get(&task.id).copied() else {
            self.0.insert(task.id.clone(), (now, done, 0.0));
            return None;
        };
        let seconds = now.duration_since(before).as_secs_f64();
        if seconds > 0.0 {
            let fresh = done.saturating_sub(had) as f64 / seconds;
            let rate = if rate > 0.0 { rate + (fresh - rate) * 0.4 } else { fresh };
            self.0.insert(task.id.clone(), (now, done, rate));
        }
        let rate = self.0.get(&task.id)?.2;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a figure for people, saturating")]
        Some(rate as u64).filter(|&rate| rate > 0)
    }

    fn forget(&mut self, running: &[&Task]) {
        self.0.retain(|id, _| running.iter().any(|task| task.id == *id));
    }
}

/// Screen for an agent that does not answer: its last header, and the error.
fn unseen(last: Option<&Health>, error: &Error) -> String {
    let head = match last {
        Some(health) => head(health, "down"),
        None => "towline agent: down\n".to_owned(),
    };
    format!("{head}\n{}\n{}\n", printable(&error.to_string()), printable(error.help_text().unwrap_or_default()))
}

/// Lines of the terminal, if it is one.
fn rows() -> Option<usize> {
    rustix::termios::tcgetwinsize(io::stdout()).ok().map(|size| usize::from(size.ws_row)).filter(|rows| *rows > 1)
}

/// `text`, with as many lines as the screen has: one more would push the first out of sight.
fn clipped(text: String, rows: Option<usize>) -> String {
    let count = text.lines().count();
    let Some(rows) = rows.filter(|rows| count >= *rows) else { return text };
    let kept = rows.saturating_sub(2);
    let lines: Vec<&str> = text.lines().take(kept).collect();
    format!("{}\n... {} more lines; `towline top --once` shows all\n", lines.join("\n"), count - kept)
}

/// Header: the agent and its state.
fn head(health: &Health, state: &str) -> String {
    let (version, pid, started) = (printable(&health.version), health.pid, &health.started);
    let identity = health.identity.as_ref().map_or_else(String::new, |identity| format!(" {}", printable(identity)));
    let mut text = format!("towline agent{identity} {version}, process {pid}, since {started}: {state}\n");
    if let Some(notice) = &health.preemption {
        let _ = writeln!(text, "  the machine will be taken away: {}", printable(notice));
    }
    for repository in &health.repositories {
        let _ = writeln!(text, "  {}", printable(repository.location.as_ref().unwrap_or(&repository.id)));
    }
    for problem in &health.problems {
        let _ = writeln!(text, "  problem: {}", printable(problem));
    }
    text
}

/// All of it, as text.
fn shown(reading: &Reading, rates: &mut Rates) -> String {
    let Reading { health, tasks, cache, pins, peers, hints, sites } = reading;
    let state = match (health.leaving, health.ready) {
        (true, _) => "ending",
        (_, true) => "ready",
        (_, false) => "not ready",
    };
    let mut text = head(health, state);
    let (running, ended): (Vec<_>, Vec<_>) = tasks.tasks.iter().partition(|task| task.state == TaskState::Running);
    let now = Instant::now();
    rates.forget(&running);
    let _ = writeln!(text, "\nTasks: {} running", running.len());
    let recent = ended.iter().rev().take(SHOWN_MAX).copied();
    let rows: Vec<_> = running.iter().copied().chain(recent).map(|task| row(task, rates.observe(task, now))).collect();
    if !rows.is_empty() {
        text += &table(
            &["KIND", "NAME", "STATE", ">RAW DONE", ">OF RAW", ">RATE", ">LEFT", ">STORED MOVED", ">TOOK", ""],
            &rows,
        );
    }
    rates.forget(&running);
    if let Some(Cache { stat, .. }) = cache {
        let _ = writeln!(
            text,
            "\nCache: {} {} of {}; pinned {}; {} chunks; chunk reads: {} hits, {} misses; {} chunks evicted",
            bar(stat.bytes, stat.capacity),
            show(stat.bytes),
            show(stat.capacity),
            show(stat.promised_bytes),
            stat.chunks,
            stat.hits,
            stat.misses,
            stat.evictions,
        );
        let _ = writeln!(text, "\nPins: {}", pins.len());
        if !pins.is_empty() {
            text += &pinned(&pins[..pins.len().min(SHOWN_MAX)]);
        }
    }
    if !peers.is_empty() {
        let _ = writeln!(text, "\nPeers: {}", peers.len());
        let rows: Vec<_> = peers.iter().map(linked).collect();
        text += &table(&["AGENT", "ADDRESS", "LINK", ">DELAY", ">RATE", ">RECEIVED", ""], &rows);
    }
    if !hints.is_empty() {
        let _ = writeln!(text, "\nCommitted hints: {}", hints.len());
        let rows: Vec<_> = hints.iter().take(SHOWN_MAX).map(committed).collect();
        text += &table(&["INPUTS", "OWNER", "STATE", ">MISSING", ">OF", "UNTIL"], &rows);
    }
    if let Some(sites) = sites {
        let _ = writeln!(text, "\nSites: {}", sites.sites.len());
        let rows: Vec<_> = sites.sites.iter().map(|site| placed(site, &sites.generated_at)).collect();
        text += &table(&["SITE", "WHERE", ">AGENTS", ">USED", ">OF CACHE", ">PINNED", ">CHUNKS", ">TOLD AGO"], &rows);
        for note in &sites.notes {
            let _ = writeln!(text, "  note: {}", printable(note));
        }
    }
    text
}

fn committed(hint: &Commitment) -> Vec<String> {
    let state = match (hint.ready, &hint.task) {
        (true, _) => "ready",
        (false, Some(_)) => "fetching",
        (false, None) => "waiting",
    };
    vec![
        printable(&hint.inputs.join(", ")),
        printable(&hint.owner),
        state.to_owned(),
        show(hint.missing_bytes),
        show(hint.bytes),
        hint.expires.as_deref().map_or_else(|| "-".to_owned(), printable),
    ]
}

/// Row of a site, as it was known at the time `now`.
fn placed(site: &Site, now: &str) -> Vec<String> {
    let sum = |of: fn(&SiteAgent) -> u64| site.agents.iter().map(of).fold(0, u64::saturating_add);
    let place = [&site.provider, &site.region].into_iter().filter(|text| !text.is_empty());
    vec![
        printable(&site.name),
        printable(&place.map(String::as_str).collect::<Vec<_>>().join("/")),
        site.agents.len().to_string(),
        show(sum(|agent| agent.used)),
        show(sum(|agent| agent.capacity)),
        show(sum(|agent| agent.promised)),
        sum(|agent| agent.chunks).to_string(),
        oldest(site, now).map_or_else(|| "-".to_owned(), span::show),
    ]
}

/// Age of the oldest inventory of a site, at the time `now`.
fn oldest(site: &Site, now: &str) -> Option<Duration> {
    let time = |text: &str| DateTime::parse_from_rfc3339(text).ok();
    let oldest = site.agents.iter().filter_map(|agent| time(&agent.at)).min()?;
    // Clocks differ.
    Some((time(now)? - oldest).to_std().unwrap_or_default())
}

fn linked(peer: &Peer) -> Vec<String> {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a figure for people, saturating")]
    let rate = peer.rate.map_or_else(|| "-".to_owned(), |rate| format!("{}/s", show(rate as u64)));
    // Agents of before say what carried a link that is down, too.
    let up = peer.transport.as_ref().filter(|_| peer.connections > 0);
    let up = up.map(|transport| format!("{transport} x{}", peer.connections));
    vec![
        peer.identity.as_deref().map_or_else(|| "?".to_owned(), printable),
        printable(&peer.address),
        up.as_deref().map_or_else(|| "down".to_owned(), printable),
        peer.rtt_ms.map_or_else(|| "-".to_owned(), |rtt| format!("{rtt:.1} ms")),
        rate,
        show(peer.received),
        peer.error.as_deref().filter(|_| up.is_none()).map(printable).unwrap_or_default(),
    ]
}

fn row(task: &Task, rate: Option<u64>) -> Vec<String> {
    let Task { progress, .. } = task;
    let running = task.state == TaskState::Running;
    let left = rate.and_then(|rate| progress.total.saturating_sub(progress.done).checked_div(rate));
    let left = left.filter(|_| running && progress.total > 0).map(|seconds| format!("{seconds}s"));
    let bytes = |bytes: u64| if bytes == 0 { "-".to_owned() } else { show(bytes) };
    let state = match task.state {
        TaskState::Running => printable(&progress.phase),
        TaskState::Done if task.is_incomplete() => "incomplete".to_owned(),
        state => state.word().to_owned(),
    };
    vec![
        task.kind.word().to_owned(),
        printable(&task.name),
        state,
        bytes(progress.done),
        bytes(progress.total),
        rate.filter(|_| running).map_or_else(|| "-".to_owned(), |rate| format!("{}/s", show(rate))),
        left.unwrap_or_else(|| "-".to_owned()),
        bytes(progress.moved),
        format!("{:.0}s", task.seconds),
        trouble(task),
    ]
}

/// Why a task failed or is incomplete; empty for others.
fn trouble(task: &Task) -> String {
    if task.is_incomplete() {
        return format!("{} missing", show(task.reported("missing_bytes")));
    }
    let message = task.error.as_ref().and_then(|error| error.get("message")).and_then(|message| message.as_str());
    message.map(printable).unwrap_or_default()
}

/// `[=====     ]`
fn bar(part: u64, whole: u64) -> String {
    let cells = u128::from(part) * BAR as u128 / u128::from(whole.max(1));
    let cells = usize::try_from(cells).unwrap_or(BAR).min(BAR);
    format!("[{:<BAR$}]", "=".repeat(cells))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::view::{ServedRepository, TaskKind, TaskProgress};

    fn task(state: TaskState, done: u64) -> Task {
        let progress = TaskProgress { phase: "saving".into(), total: 4 << 20, done, moved: 1 << 10 };
        Task {
            id: "a".into(),
            kind: TaskKind::Save,
            name: "run/step-1\x1b[2J".into(),
            repository: None,
            caller: None,
            state,
            started: "2026-01-01T00:00:00Z".into(),
            seconds: 2.4,
            progress,
            report: None,
            error: (state == TaskState::Failed).then(|| serde_json::json!({ "message": "no room" })),
        }
    }

    fn sites() -> SiteList {
        let site = Site {
            name: "cloud".into(),
            provider: "aws".into(),
            region: "us-east-1".into(),
            jurisdictions: Vec::new(),
            has_repository: false,
            gpus: Vec::new(),
            agents: vec![SiteAgent {
                agent: "cloud/a".into(),
                at: "2025-12-31T23:58:30Z".into(),
                capacity: 4 << 20,
                used: 1 << 20,
                promised: 0,
                chunks: 2,
                is_false: false,
            }],
        };
        SiteList {
            generated_at: "2026-01-01T00:00:00Z".into(),
            sites: vec![site],
            links: Vec::new(),
            measured: Vec::new(),
            notes: vec!["the inventory of cloud/a cannot be used\x1b".into()],
        }
    }

    fn hint() -> Commitment {
        Commitment {
            hint_id: "h".into(),
            owner: "me".into(),
            inputs: vec!["run/step-1".into()],
            bytes: 2 << 20,
            missing_bytes: 1 << 20,
            ready: false,
            pin: "p".into(),
            expires: None,
            gpus: 8,
            task: Some("t".into()),
        }
    }

    #[test]
    fn the_view_says_what_goes_on() {
        let health = Health {
            version: "1".into(),
            pid: 7,
            started: "2026-01-01T00:00:00Z".into(),
            ready: true,
            leaving: false,
            preemption: None,
            identity: None,
            repositories: vec![ServedRepository { location: Some("/repo".into()), id: "A".into() }],
            problems: vec!["revoked, line 3: malformed\x1b".into()],
        };
        let tasks = TaskList { tasks: vec![task(TaskState::Failed, 0), task(TaskState::Running, 1 << 20)] };
        let stat = crate::cache::CacheStat { bytes: 1 << 29, capacity: 1 << 30, ..Default::default() };
        let cache = Cache { dir: None, stat, tenants: Vec::new() };
        let peers = vec![Peer {
            address: "b:7071".into(),
            identity: None,
            transport: None,
            connections: 0,
            rtt_ms: None,
            rate: None,
            received: 0,
            error: Some("certificate expired".into()),
        }];
        let reading = Reading {
            health,
            tasks,
            cache: Some(cache),
            pins: Vec::new(),
            peers,
            hints: vec![hint()],
            sites: Some(sites()),
        };
        let text = shown(&reading, &mut Rates::default());
        for expected in [
            "ready",
            "/repo",
            "1 running",
            "saving",
            "1.0 MiB",
            "no room",
            "certificate expired",
            "  problem: revoked, line 3: malformed",
            "[==========          ]",
            "Committed hints: 1",
            "fetching",
            "aws/us-east-1",
            "1m 30s",
            "  note: the inventory of cloud/a cannot be used",
        ] {
            assert!(text.contains(expected), "{expected}: {text}");
        }
        assert!(!text.contains('\x1b'), "names are made harmless");
    }

    #[test]
    fn a_warm_without_some_chunks_is_incomplete() {
        let mut warm = task(TaskState::Done, 0);
        assert_eq!(row(&warm, None)[2], "done");
        warm.report = Some(serde_json::json!({ "missing": 3, "missing_bytes": 3 << 20 }));
        let row = row(&warm, None);
        assert_eq!((row[2].as_str(), row[9].as_str()), ("incomplete", "3.0 MiB missing"));
    }

    #[test]
    fn a_dead_peer_is_down() {
        let peer = |connections| Peer {
            address: "b:7071".into(),
            identity: Some("towline://home/b".into()),
            transport: Some("quic".into()),
            connections,
            rtt_ms: None,
            rate: None,
            received: 7,
            error: Some("peer cannot be reached".into()),
        };
        assert_eq!(linked(&peer(2))[2], "quic x2");
        let row = linked(&peer(0));
        assert_eq!((row[2].as_str(), row[6].as_str()), ("down", "peer cannot be reached"));
    }

    #[test]
    fn the_head_stays_when_the_agent_does_not() {
        let health = Health {
            version: "1".into(),
            pid: 7,
            started: "then".into(),
            ready: true,
            leaving: false,
            preemption: None,
            identity: Some("towline://home/a".into()),
            repositories: Vec::new(),
            problems: Vec::new(),
        };
        let error = Error::unreachable("agent does not answer").help("start one");
        let text = unseen(Some(&health), &error);
        assert_eq!(
            text,
            "towline agent towline://home/a 1, process 7, since then: down\n\nagent does not answer\nstart one\n"
        );
        assert!(unseen(None, &error).starts_with("towline agent: down\n"));
    }

    #[test]
    fn the_head_stays_when_the_screen_is_small() {
        let text = (1..=10).fold(String::new(), |text, line| format!("{text}line {line}\n"));
        assert_eq!(clipped(text.clone(), None), text);
        assert_eq!(clipped(text.clone(), Some(11)), text);
        let small = clipped(text, Some(5));
        assert_eq!(small, "line 1\nline 2\nline 3\n... 7 more lines; `towline top --once` shows all\n");
    }

    #[test]
    fn a_rate_needs_two_looks() {
        let (mut rates, begun) = (Rates::default(), Instant::now());
        assert_eq!(rates.observe(&task(TaskState::Running, 0), begun), None);
        let rate = rates.observe(&task(TaskState::Running, 1 << 20), begun + Duration::from_secs(2));
        assert_eq!(rate, Some(1 << 19));
        rates.forget(&[]);
        assert!(rates.0.is_empty());
    }

    #[test]
    fn a_bar_never_overflows() {
        assert_eq!(bar(0, 0), format!("[{}]", " ".repeat(BAR)));
        assert_eq!(bar(u64::MAX, 1), format!("[{}]", "=".repeat(BAR)));
    }
}
