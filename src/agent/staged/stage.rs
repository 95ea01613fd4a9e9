//! Staging: tensors of a saved tree, read into memory unless they are there.

use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::trees::{ALL, Lease, StagedKey, StagedTrees};
use crate::agent::state::AgentState;
use crate::agent::tasks::{Task, TaskReport, TaskSpec};
use crate::agent::view::{self, TaskKind};
use crate::error::{Error, Result};
use crate::name::Name;
use crate::ops::TensorSelector;
use crate::policy::LocalCaller;
use crate::progress::Progress;
use crate::repository::{Repository, SourceBytes};
use crate::selector::Selector;
use crate::staging::StageTimes;

/// Tries for a name that is replaced meanwhile.
const ATTEMPTS: usize = 4;

/// Arguments of [`stage`].
#[derive(Debug)]
pub(in crate::agent) struct StageOrder {
    pub(in crate::agent) name: Selector,
    /// Only this file or folder of it.
    pub(in crate::agent) below: Option<String>,
    /// Only these tensors; all, if there are none.
    pub(in crate::agent) selectors: Vec<TensorSelector>,
    /// Hold the memory for a process, which takes it within a minute.
    pub(in crate::agent) hold: bool,
    /// Local caller that requested it, for the policy.
    pub(in crate::agent) by: Option<LocalCaller>,
}

/// Result of staging.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StageReport {
    /// The name.
    pub name: String,
    /// Tensors in memory.
    pub tensors: u64,
    /// Bytes of the memory.
    pub bytes: u64,
    /// True if they were in memory before.
    pub reused: bool,
    /// Id under which a process of this node takes the memory within a minute, once; none, if it is not held for one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<String>,
    /// Stored bytes that were fetched.
    pub fetched_bytes: u64,
    /// The same, by where they came from.
    pub sources: SourceBytes,
    /// Duration in seconds.
    pub seconds: f64,
    /// Times of the stages; none, if the tensors were in memory before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub times: Option<StageTimes>,
}

impl StageReport {
    /// Report of a task that has ended.
    ///
    /// # Errors
    /// Unsupported, if it is not understood.
    pub(crate) fn of(task: &view::Task) -> Result<Self> {
        let report = task.report.clone().unwrap_or_default();
        serde_json::from_value(report)
            .map_err(|source| Error::unsupported("report of the agent is not understood").at(&task.id).source(source))
    }
}

/// Starts to read tensors into memory.
///
/// # Errors
/// Unsupported, for an agent without memory for them; not found, for the repository; as
/// [`Tasks::begin`](crate::agent::tasks::Tasks::begin).
pub(in crate::agent) fn stage(state: &AgentState, repository: Option<&str>, order: StageOrder) -> Result<Arc<Task>> {
    let trees = Arc::clone(state.staged()?);
    let repository = state.repository(repository)?.for_caller(order.by.clone());
    let spec = TaskSpec {
        kind: TaskKind::Stage,
        name: order.name.to_string(),
        repository: Some(repository.store().location().to_string()),
        caller: None,
    };
    state.tasks.begin(spec, move |progress| async move {
        let begun = Instant::now();
        let name = repository.resolve(&order.name).await?;
        let staged = Box::pin(staged(&trees, &repository, &name, &order, &progress)).await?;
        let tree = staged.lease.tree();
        Ok(TaskReport::Stage(Box::new(StageReport {
            name: name.to_string(),
            tensors: tree.tensors(),
            bytes: tree.memory().len(),
            reused: staged.times.is_none(),
            fetched_bytes: staged.sources.total(),
            sources: staged.sources,
            memory: order.hold.then(|| trees.offer(staged.lease).to_string()),
            seconds: begun.elapsed().as_secs_f64(),
            times: staged.times,
        })))
    })
}

/// A tree in memory, and what it took to read it.
struct Staged {
    lease: Lease,
    sources: SourceBytes,
    /// None, if they were in memory before.
    times: Option<StageTimes>,
}

/// The tensors of `name`, from memory if they are there.
async fn staged(
    trees: &Arc<StagedTrees>,
    repository: &Repository,
    name: &Name,
    order: &StageOrder,
    progress: &Progress,
) -> Result<Staged> {
    let selectors = match order.selectors.as_slice() {
        [] => vec![TensorSelector::new(ALL)?],
        chosen => chosen.to_vec(),
    };
    for _ in 0..ATTEMPTS {
        repository.check_name(name).await?;
        let state = repository.state().await?;
        let value = state.refs.get(name).ok_or_else(|| Error::not_found("name was removed meanwhile").at(name))?;
        let key = StagedKey {
            repository: repository.id(),
            manifest: value.manifest,
            below: order.below.clone().unwrap_or_default(),
            selectors: selectors.iter().map(ToString::to_string).collect(),
        };
        let lock = trees.lock_of(&key);
        let _reading = lock.lock().await;
        // The caller's rights are checked each time, after any wait.
        repository.check_readable(name, &key.manifest).await?;
        if let Some(lease) = trees.find(&key) {
            return Ok(Staged { lease, sources: SourceBytes::default(), times: None });
        }
        progress.phase("opening", 0);
        let below = order.below.as_ref().map(String::as_bytes);
        let reading = Arc::new(repository.choose_tensors(name, below, &selectors).await?);
        if reading.manifest() != key.manifest {
            // The name was replaced meanwhile.
            continue;
        }
        let table = reading.table()?;
        let reservation = trees.reserve(table.memory_len())?;
        let (memory, read, times) = repository.stage_tensors(&reading, &table, progress).await?;
        let count = table.tensors().len() as u64;
        let lease = trees.keep(reservation, key, name.to_string(), count, memory);
        return Ok(Staged { lease, sources: read.sources, times: Some(times) });
    }
    Err(Error::busy("name moves faster than it can be read").at(name).help("try again"))
}
