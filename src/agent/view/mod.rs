//! Types of the API, for client and server.

mod audit;
mod peers;
mod sites;
mod tokens;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

pub use self::audit::{AuditHead, AuditTrail};
pub use self::peers::{Ledger, Peer, PeerList};
pub use self::sites::{Calibration, Gpus, MonthUsage, Site, SiteAgent, SiteLink, SiteList};
pub use self::tokens::{MadeToken, RevokedToken, Token, TokenList};
use crate::cache::{CacheStat, Checked, Pin, TenantUse};
use crate::error::ErrorKind;
use crate::ops::{Listed, RunListed};
use crate::progress::Snapshot;

/// State of an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Health {
    /// The agent's version.
    pub version: String,
    /// Process id.
    pub pid: u32,
    /// Start time, RFC 3339.
    #[schema(format = DateTime)]
    pub started: String,
    /// True once its inputs are prepared.
    pub ready: bool,
    /// True if it is shutting down and accepts no new tasks.
    pub leaving: bool,
    /// Text of the preemption notice, if one came.
    #[schema(required)]
    pub preemption: Option<String>,
    /// Identity towards other agents, if it has a certificate.
    #[schema(required)]
    pub identity: Option<String>,
    /// Repositories, the default one first.
    pub repositories: Vec<ServedRepository>,
    /// Problems of reloaded files, such as the rules or the list of revoked certificates; the previous version stays in force.
    /// Only over the socket.
    #[serde(default)]
    #[schema(required)]
    pub problems: Vec<String>,
}

/// Response of `/health` and `/ready` without the token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HealthSummary {
    /// Always true.
    pub alive: bool,
    /// True once its inputs are prepared.
    pub ready: bool,
}

/// Page of the names of a repository.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct NameList {
    /// Sorted names.
    pub names: Vec<Listed>,
    /// Value of `after` for the next page, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// Runs of a repository.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct RunList {
    /// Runs, by name.
    pub runs: Vec<RunListed>,
}

/// Page of the direct entries of a folder of a saved tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Folder {
    /// Name of the tree.
    pub name: String,
    /// Id of its manifest.
    pub manifest: String,
    /// Path of the folder; empty for the root.
    pub path: String,
    /// Entries, sorted by name.
    pub entries: Vec<FolderEntry>,
    /// Value of `after` for the next page, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// A file, folder or link of a saved tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FolderEntry {
    /// Name in the folder; bytes that are not UTF-8 are replaced.
    pub name: String,
    /// `file`, `folder` or `link`.
    pub kind: String,
    /// Path of this entry in the API; it encodes names that are not UTF-8.
    pub url: String,
    /// Bytes of a file.
    pub bytes: u64,
    /// Permission bits, octal.
    pub mode: String,
    /// Last modification, RFC 3339.
    #[schema(format = DateTime)]
    pub mtime: String,
    /// Target of a link.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
}

/// A repository of an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ServedRepository {
    /// Location; absent for other agents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub location: Option<String>,
    /// Permanent id.
    pub id: String,
}

/// Kind of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum TaskKind {
    /// Save files to a repository.
    Save,
    /// Restore files from a repository.
    Restore,
    /// Fetch chunks into the cache for a waiting reader.
    Fetch,
    /// Fetch chunks into the cache for later use.
    Warm,
    /// Save checkpoints while a training writes them.
    Watch,
    /// Read and verify the whole cache.
    Check,
    /// Read tensors into memory.
    Stage,
}

impl TaskKind {
    /// Every kind.
    pub const ALL: [Self; 7] =
        [Self::Save, Self::Restore, Self::Fetch, Self::Warm, Self::Watch, Self::Check, Self::Stage];

    /// Word in the API and the metrics.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Save => "save",
            Self::Restore => "restore",
            Self::Fetch => "fetch",
            Self::Warm => "warm",
            Self::Watch => "watch",
            Self::Check => "check",
            Self::Stage => "stage",
        }
    }
}

/// State of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
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

    /// Word in the API and the metrics.
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

/// Checkpoint stored for another agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Handoff {
    /// Id.
    pub id: String,
    /// Agent that sent it.
    pub from: String,
    /// Time of arrival, RFC 3339.
    #[schema(format = DateTime)]
    pub since: String,
    /// Name to save it as unless the sender saves it.
    pub name: String,
    /// Id of the repository to save it in.
    pub repository: String,
    /// Labels to save it with.
    pub labels: BTreeMap<String, String>,
    /// Bytes of its files.
    pub bytes: u64,
    /// Failure for which it was set aside, if it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub aside: Option<SetAside>,
}

/// The failure for which a checkpoint was set aside. It is saved only on request, and counts toward the quota until it is dropped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SetAside {
    /// Time when it was set aside, RFC 3339.
    #[schema(format = DateTime)]
    pub since: String,
    /// Number of failed saves.
    pub tries: u32,
    /// Kind of the last error.
    pub kind: String,
    /// Message of the last error.
    pub error: String,
    /// Help of the last error.
    pub help: String,
}

/// Checkpoints stored for other agents, the oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HandoffList {
    /// One entry per checkpoint.
    pub handoffs: Vec<Handoff>,
}

/// Id of an announced or deleted checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HandoffId {
    /// Id.
    pub id: String,
}

/// Progress of a task; all but `phase` in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TaskProgress {
    /// Current phase.
    pub phase: String,
    /// Plain bytes in total; 0 while unknown.
    pub total: u64,
    /// Plain bytes processed.
    pub done: u64,
    /// Stored bytes moved.
    pub moved: u64,
}

impl From<Snapshot> for TaskProgress {
    fn from(now: Snapshot) -> Self {
        Self { phase: now.phase.to_owned(), total: now.total, done: now.done, moved: now.moved }
    }
}

/// One task of the agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Task {
    /// Id of the task.
    pub id: String,
    /// Kind.
    pub kind: TaskKind,
    /// Name of the saved tree.
    pub name: String,
    /// Location of the repository, if the task uses one; absent for other agents.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repository: Option<String>,
    /// Other agent that requested it (`SITE/AGENT`), or a token (`token:TENANT/ID`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub caller: Option<String>,
    /// State.
    pub state: TaskState,
    /// Start time, RFC 3339.
    #[schema(format = DateTime)]
    pub started: String,
    /// Duration in seconds.
    pub seconds: f64,
    /// Progress.
    pub progress: TaskProgress,
    /// Report of a successful task, as the command of that name prints it with `--json`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub report: Option<Value>,
    /// Error of a failed task; of a running one, the last failure that is being retried.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Failure>)]
    pub error: Option<Value>,
}

impl Task {
    /// A number of its report; 0 without a report or without this number.
    #[must_use]
    pub fn reported(&self, number: &str) -> u64 {
        self.report.as_ref().and_then(|report| report.get(number)).and_then(Value::as_u64).unwrap_or(0)
    }

    /// True for a warm that ended without some of its chunks.
    #[must_use]
    pub fn is_incomplete(&self) -> bool {
        self.reported("missing") > 0
    }
}

/// Error response.
#[derive(Clone, Debug, PartialEq, Eq, ToSchema)]
pub struct Failed {
    /// The error.
    error: Failure,
}

/// An error, as `towline --json` prints it.
#[derive(Clone, Debug, PartialEq, Eq, ToSchema)]
pub struct Failure {
    /// Kind, which tells what the caller can do.
    kind: ErrorKind,
    /// Message.
    message: String,
    /// Place of the error.
    #[schema(required)]
    place: Option<String>,
    /// Help.
    #[schema(required)]
    help: Option<String>,
    /// Causes, outermost first.
    causes: Vec<String>,
}

/// Tasks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TaskList {
    /// Running tasks and the last ones that ended, the oldest first.
    pub tasks: Vec<Task>,
}

/// Statistics of the cache; counters start with the agent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Cache {
    /// Directory; absent for other agents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dir: Option<String>,
    /// Statistics.
    #[serde(flatten)]
    pub stat: CacheStat,
    /// Bytes of each tenant, if tenants have quotas; absent for other agents and tokens.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tenants: Vec<TenantUse>,
}

/// Result of a check of the cache.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CacheChecked {
    /// Chunks read.
    pub chunks: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Chunks that were damaged and dropped.
    pub damaged: Vec<CacheDamage>,
}

/// A chunk of the cache that was damaged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CacheDamage {
    /// First eight bytes of its id, in hexadecimal.
    pub chunk: String,
    /// Slab that held it.
    pub slab: usize,
    /// Offset in the slab, in bytes.
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Evicted {
    /// Bytes freed.
    pub freed_bytes: u64,
}

/// Tensors in memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StagedList {
    /// Limit of their bytes.
    pub memory: u64,
    /// The trees that they are of, the oldest first.
    pub trees: Vec<Staged>,
}

/// Tensors of one tree in memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Staged {
    /// Name under which they were staged.
    pub name: String,
    /// File or folder of the tree, if they are not of all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub below: Option<String>,
    /// Selectors of the tensors.
    pub selectors: Vec<String>,
    /// Digest of the tree.
    pub manifest: String,
    /// Number of tensors.
    pub tensors: u64,
    /// Bytes.
    pub bytes: u64,
    /// Processes that use them, or that they are held for.
    pub users: u64,
    /// Time of the last use, if nobody uses them.
    pub last_used: String,
}

/// One pin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Pinned {
    /// Id of the pin.
    pub id: String,
    /// Owner.
    pub owner: String,
    /// Reason.
    pub reason: String,
    /// Time of creation, RFC 3339.
    #[schema(format = DateTime)]
    pub created: String,
    /// Time of expiry, RFC 3339; none if it does not expire.
    #[schema(format = DateTime, required)]
    pub expires: Option<String>,
    /// Number of chunks.
    pub chunks: u64,
    /// Bytes that these take in the cache, once they are there; what several pins keep counts for each.
    #[serde(default)]
    pub bytes: u64,
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
            bytes: pin.bytes,
        }
    }
}

/// Hints that are committed here.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CommitmentList {
    /// Commitments, by hint and owner.
    pub commitments: Vec<Commitment>,
}

/// Hint that was committed here: its inputs are pinned and fetched.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Commitment {
    /// Id of the hint.
    pub hint_id: String,
    /// Owner of what it holds.
    #[serde(default)]
    pub owner: String,
    /// Names of its inputs.
    pub inputs: Vec<String>,
    /// Stored bytes of the distinct chunks of its inputs, bases included.
    pub bytes: u64,
    /// Stored bytes of the chunks that are not in the cache yet.
    pub missing_bytes: u64,
    /// True once nothing is missing.
    pub ready: bool,
    /// Id of the pin that holds them.
    pub pin: String,
    /// End of the lease, RFC 3339; none if it does not end.
    #[schema(format = DateTime, required)]
    pub expires: Option<String>,
    /// GPUs of the job, if the commit told them.
    #[serde(default)]
    pub gpus: u64,
    /// Id of the task that fetches what is missing; none, until it is started again after a restart.
    #[schema(required)]
    pub task: Option<String>,
}

/// List of pins.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PinList {
    /// Pins, the oldest first.
    pub pins: Vec<Pinned>,
}

/// Id of an ended pin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Unpinned {
    /// Id of the pin.
    pub unpinned: String,
}
