//! Types of the API, for client and server.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::cache::{CacheStat, Checked, Pin};
use crate::ops::Listed;
use crate::progress::Snapshot;
use crate::transfer::ledger::{LedgerEntry, LinkEntry};
use crate::transfer::peers::PeerStat;

/// State of an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// The agent's version.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Since when it runs, RFC 3339.
    pub started: String,
    /// True once its inputs are there.
    pub ready: bool,
    /// Whether it is ending: it takes nothing new.
    pub leaving: bool,
    /// Text of the preemption notice, if one came.
    pub preemption: Option<String>,
    /// Identity towards other agents, if it has a certificate.
    pub identity: Option<String>,
    /// Repositories that it saves to and restores from, the usual one first.
    pub repositories: Vec<ServedRepository>,
    /// Problems of reloaded files, such as the rules or the list of revoked certificates: the version before stays in force.
    /// Told over the socket only.
    #[serde(default)]
    pub problems: Vec<String>,
}

/// Answer of `/health` and `/ready` without the token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vitals {
    /// Always: it answers.
    pub alive: bool,
    /// True once its inputs are there.
    pub ready: bool,
}

/// Some of the names of a repository.
#[derive(Clone, Debug, Serialize)]
pub struct NameList {
    /// Sorted.
    pub names: Vec<Listed>,
    /// Value of `after` for the next page, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// Some of what lies right in a folder of a saved tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Folder {
    /// The tree's name.
    pub name: String,
    /// Its manifest's id.
    pub manifest: String,
    /// The folder; empty for the tree's own.
    pub path: String,
    /// In the order of their names.
    pub entries: Vec<FolderEntry>,
    /// Value of `after` for the next page, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// A file, folder or link of a saved tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FolderEntry {
    /// Its name in the folder; bytes that are not UTF-8 are replaced.
    pub name: String,
    /// `file`, `folder` or `link`.
    pub kind: String,
    /// The path by which this API gives it, whatever bytes its name has.
    pub url: String,
    /// Bytes of a file.
    pub bytes: u64,
    /// Permission bits, octal.
    pub mode: String,
    /// Last modification, RFC 3339.
    pub mtime: String,
    /// Target of a link.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
}

/// A repository of an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedRepository {
    /// Its location; left out for other agents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub location: Option<String>,
    /// Its name for ever.
    pub id: String,
}

/// Kind of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TaskKind {
    /// Files into a repository.
    Save,
    /// Files out of one.
    Restore,
    /// Chunks into the cache, for somebody who waits.
    Fetch,
    /// Chunks into the cache, for later.
    Warm,
    /// Checkpoints into a repository, as a training writes them.
    Watch,
    /// A reading of all of the cache.
    Check,
}

impl TaskKind {
    /// Every kind.
    pub const ALL: [Self; 6] = [Self::Save, Self::Restore, Self::Fetch, Self::Warm, Self::Watch, Self::Check];

    /// As the API and the metrics say it.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Save => "save",
            Self::Restore => "restore",
            Self::Fetch => "fetch",
            Self::Warm => "warm",
            Self::Watch => "watch",
            Self::Check => "check",
        }
    }
}

/// State of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TaskState {
    /// Running.
    Running,
    /// Succeeded.
    Done,
    /// Failed.
    Failed,
    /// Stopped on request.
    Cancelled,
}

impl TaskState {
    /// All final states.
    pub const ENDS: [Self; 3] = [Self::Done, Self::Failed, Self::Cancelled];

    /// As the API and the metrics say it.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

/// A checkpoint that is kept for another agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handoff {
    /// Id.
    pub id: String,
    /// Agent that sent it.
    pub from: String,
    /// Since when, RFC 3339.
    pub since: String,
    /// Name to save it as, if nobody else does.
    pub name: String,
    /// The id of the repository where.
    pub repository: String,
    /// Labels that it gets.
    pub labels: BTreeMap<String, String>,
    /// Bytes of its files.
    pub bytes: u64,
    /// The failure for which it was set aside, if it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub aside: Option<SetAside>,
}

/// The failure for which a checkpoint was set aside. It is saved only on request, and counts toward the quota until it is dropped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetAside {
    /// Since when, RFC 3339.
    pub since: String,
    /// Saves that failed.
    pub tries: u32,
    /// The kind of the last error, as errors have it.
    pub kind: String,
    /// Its message.
    pub error: String,
    /// Help.
    pub help: String,
}

/// All that is kept for others, the oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandoffList {
    /// Each of them.
    pub handoffs: Vec<Handoff>,
}

/// Room for a checkpoint, or the end of that.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandoffId {
    /// Id.
    pub id: String,
}

/// Progress of a task; all but `phase` in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskProgress {
    /// Current phase.
    pub phase: String,
    /// Plain bytes to deal with; 0 while unknown.
    pub total: u64,
    /// Plain bytes dealt with.
    pub done: u64,
    /// Stored bytes moved.
    pub moved: u64,
}

impl From<Snapshot> for TaskProgress {
    fn from(now: Snapshot) -> Self {
        Self { phase: now.phase.to_owned(), total: now.total, done: now.done, moved: now.moved }
    }
}

/// One task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Task {
    /// Its name.
    pub id: String,
    /// Kind.
    pub kind: TaskKind,
    /// Name that is saved or restored.
    pub name: String,
    /// Where the repository is, if one has part in it; other agents are not told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repository: Option<String>,
    /// Agent that asked for it, if another one did: `SITE/AGENT`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub caller: Option<String>,
    /// State.
    pub state: TaskState,
    /// When it began, RFC 3339.
    pub started: String,
    /// Duration in seconds.
    pub seconds: f64,
    /// Progress.
    pub progress: TaskProgress,
    /// Report, once it is done: as the command of that name prints with `--json`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub report: Option<Value>,
    /// The error, if it failed; while it runs, the last failure that is being retried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<Value>,
}

/// Tasks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TaskList {
    /// Running tasks and the last ones that ended, the oldest first.
    pub tasks: Vec<Task>,
}

/// The cache's figures; those of events count since the agent began.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cache {
    /// Where it lies; other agents are not told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dir: Option<String>,
    /// Its figures.
    #[serde(flatten)]
    pub stat: CacheStat,
}

/// Result of a check of the cache.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheChecked {
    /// Chunks read.
    pub chunks: u64,
    /// Bytes they take.
    pub bytes: u64,
    /// Chunks that were damaged and dropped.
    pub damaged: Vec<CacheDamage>,
}

/// A chunk of the cache that was damaged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheDamage {
    /// The first eight bytes of its id, in hexadecimal digits.
    pub chunk: String,
    /// The slab that it lay in.
    pub slab: usize,
    /// Its offset there, in bytes.
    pub offset: u64,
}

impl From<Checked> for CacheChecked {
    fn from(checked: Checked) -> Self {
        let damaged = checked.damaged.iter();
        let damaged = damaged.map(|damage| CacheDamage {
            chunk: format!("{:016x}", damage.prefix),
            slab: damage.slab,
            offset: damage.offset,
        });
        Self { chunks: checked.chunks, bytes: checked.bytes, damaged: damaged.collect() }
    }
}

/// Result of an eviction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evicted {
    /// Bytes that came free.
    pub freed_bytes: u64,
}

/// One pin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pinned {
    /// Its name.
    pub id: String,
    /// Requester.
    pub owner: String,
    /// Purpose.
    pub reason: String,
    /// When, RFC 3339.
    pub created: String,
    /// When it ends by itself, RFC 3339, if it does.
    pub expires: Option<String>,
    /// Chunks it keeps.
    pub chunks: u64,
}

impl From<&Pin> for Pinned {
    fn from(pin: &Pin) -> Self {
        Self {
            id: pin.id.to_string(),
            owner: pin.owner.clone(),
            reason: pin.reason.clone(),
            created: pin.created.to_string(),
            expires: pin.expires.map(|at| at.to_string()),
            chunks: pin.chunks,
        }
    }
}

/// Several pins.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinList {
    /// The oldest first.
    pub pins: Vec<Pinned>,
}

/// A pin that was ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unpinned {
    /// Its name.
    pub unpinned: String,
}

/// Another agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Peer {
    /// Configured or announced address.
    pub address: String,
    /// Identity, once it has shown its certificate.
    pub identity: Option<String>,
    /// Transport of its link, if that is up: `quic` or `tcp`.
    pub transport: Option<String>,
    /// Connections of the link.
    pub connections: usize,
    /// The delay there and back, in milliseconds.
    pub rtt_ms: Option<f64>,
    /// Bytes a second that came from it lately.
    pub rate: Option<f64>,
    /// Bytes of frames that came from it.
    pub received: u64,
    /// Last error.
    pub error: Option<String>,
}

impl From<PeerStat> for Peer {
    fn from(stat: PeerStat) -> Self {
        Self {
            address: stat.address,
            identity: stat.identity.map(|identity| identity.to_string()),
            transport: stat.transport.map(|transport| transport.to_string()),
            connections: stat.connections,
            rtt_ms: stat.rtt.map(|rtt| rtt.as_secs_f64() * 1000.0),
            rate: stat.rate,
            received: stat.received,
            error: stat.error,
        }
    }
}

/// Bytes that moved between this agent and others.
#[derive(Clone, Debug, Serialize)]
pub struct Ledger {
    /// By agent, way and tree.
    pub entries: Vec<LedgerEntry>,
    /// Bytes of sockets, by agent and transport.
    pub links: Vec<LinkEntry>,
}

/// Several agents.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PeerList {
    /// By address.
    pub peers: Vec<Peer>,
}
