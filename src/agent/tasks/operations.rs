//! Operations that callers ask for, or the agent does by itself, started as tasks.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;
use ulid::Ulid;

use super::registry::{Task, TaskSpec};
use crate::agent::handoff::{self, Announced, StoredCheckpoint};
use crate::agent::state::AgentState;
use crate::agent::view::TaskKind;
use crate::agent::{Pinning, WarmOptions};
use crate::error::{Error, ErrorKind, Result};
use crate::ops::{self, RestoreOptions, SaveOptions};
use crate::repository::log::State;
use crate::repository::{Name, Repository, Selector};
use crate::transfer::exchange::{Exchange, FetchPolicy, From};
use crate::transfer::identity::Identity;
use crate::transfer::protocol::Priority;
use crate::work::blocking;

/// Arguments of [`restore`].
#[derive(Debug)]
pub(in crate::agent) struct RestoreRequest {
    pub(in crate::agent) name: Selector,
    /// Only this file or folder of it.
    pub(in crate::agent) below: Option<String>,
    pub(in crate::agent) to: PathBuf,
    pub(in crate::agent) overwrite: bool,
    pub(in crate::agent) delete: bool,
    /// Only paths that these patterns match, if there are any.
    pub(in crate::agent) only: Vec<String>,
}

/// Arguments of [`warm`].
#[derive(Debug)]
pub(in crate::agent) struct WarmRequest {
    pub(in crate::agent) name: Selector,
    /// Only this file or folder of it.
    pub(in crate::agent) below: Option<String>,
    /// Fetch, if somebody waits for it; else warm.
    pub(in crate::agent) kind: TaskKind,
    /// Sources of missing chunks.
    pub(in crate::agent) from: From,
    /// Read chunks that those sources lack from the repository.
    pub(in crate::agent) or_repository: bool,
    pub(in crate::agent) pin: Option<Pinning>,
    /// Only report what is missing.
    pub(in crate::agent) dry_run: bool,
    /// Other agent that asks.
    pub(in crate::agent) caller: Option<Identity>,
}

/// Starts to fetch a name, or a part of it, into the cache. Other agents may ask for names that they may read.
///
/// # Errors
/// As [`Tasks::begin`](super::registry::Tasks::begin); not found, for an agent without a cache or the repository.
pub(in crate::agent) fn warm(state: &AgentState, repository: Option<&str>, request: WarmRequest) -> Result<Arc<Task>> {
    let WarmRequest { name, below, kind, from, or_repository, pin, dry_run, caller } = request;
    let exchange = Arc::clone(state.exchange()?);
    let repository = state.origin(repository)?.clone();
    let called = below.as_ref().map_or_else(|| name.to_string(), |below| format!("{name}:{below}"));
    let spec = TaskSpec { caller: caller.clone(), ..spec(kind, &called, &repository) };
    let priority = if kind == TaskKind::Fetch { Priority::Restore } else { Priority::Warm };
    state.tasks.begin(spec, move |progress| async move {
        let name = resolve(&exchange, &repository, caller.as_ref(), &name).await?;
        let policy = FetchPolicy { from, or_repository, priority };
        let options = WarmOptions { below: below.map(String::into_bytes), policy, pin, dry_run, progress };
        report(&Box::pin(crate::agent::warm(&exchange, &repository, &name, &options)).await?)
    })
}

/// Resolves `selector`. For another agent rights are checked before anything is looked up: a name that it may not read is reported as one
/// that is not there.
///
/// # Errors
/// Not found, for a name or run that is not there, or that another agent may not read.
///
/// # Cancel safety
/// Safe: it only reads.
pub(in crate::agent) async fn resolve(
    exchange: &Exchange,
    repository: &Repository,
    caller: Option<&Identity>,
    selector: &Selector,
) -> Result<Name> {
    let Some(caller) = caller else { return repository.resolve(selector).await };
    exchange.resolve(caller, repository, selector).await.map_err(|error| {
        let agent = caller.path();
        error.help(format!(
            "there is none, or agent {agent} may not read it: [[allow]] of the agent that was asked decides"
        ))
    })
}

/// Starts to restore.
///
/// # Errors
/// As [`warm`].
pub(in crate::agent) fn restore(
    state: &AgentState,
    repository: Option<&str>,
    request: RestoreRequest,
) -> Result<Arc<Task>> {
    let repository = state.repository(repository)?.clone();
    state.tasks.begin(spec(TaskKind::Restore, &request.name, &repository), move |progress| async move {
        let RestoreRequest { name, below, to, overwrite, delete, only } = request;
        let options = RestoreOptions { overwrite, delete, only, progress, ..RestoreOptions::default() };
        let name = repository.resolve(&name).await?;
        let below = below.as_ref().map(String::as_bytes);
        report(&Box::pin(repository.restore(&name, below, &to, &options)).await?)
    })
}

/// Starts to save the handed-off checkpoint `id` at `path`, under its name, or under another one if that name is taken. Nothing is
/// replaced.
///
/// # Errors
/// As [`warm`].
pub(in crate::agent) fn save_handoff(
    state: &AgentState,
    id: Ulid,
    stored: &StoredCheckpoint,
    path: &Path,
) -> Result<Arc<Task>> {
    let Announced { name, repository, labels, .. } = stored.what.clone();
    let repository = state.repository(Some(&repository.to_string()))?.clone();
    // The sender may not see the report, which says what the repository holds.
    let spec = spec(TaskKind::Save, &name, &repository);
    let (path, names) = (path.to_owned(), handoff::names(&name, &stored.from, id)?);
    // The folder of the record, two levels above the checkpoint.
    let folder = path.ancestors().nth(2).map(Path::to_path_buf);
    state.tasks.begin_stoppable(spec, move |progress, stop| async move {
        let modes = match folder {
            Some(folder) => blocking(move || handoff::read_modes(&folder)).await?,
            None => BTreeMap::new(),
        };
        let expected = ops::Expected::Nothing;
        let options = SaveOptions {
            labels,
            modes: Arc::new(modes),
            progress,
            stop,
            expected,
            root_link: ops::RootLink::Refuse,
            no_ignore_files: true,
            ..SaveOptions::default()
        };
        for name in &names {
            if is_taken(&*repository.state().await?, name) {
                if repository.holds(name, &path).await.unwrap_or(false) {
                    return report(&serde_json::json!({ "name": name, "saved": "already" }));
                }
                tracing::warn!("{name} holds something else: the handed-off checkpoint is saved under another name");
                continue;
            }
            match Box::pin(repository.save(&path, name, &options)).await {
                // Another writer was quicker.
                Err(error) if error.kind() == ErrorKind::Conflict => {}
                saved => return report(&saved?),
            }
        }
        Err(Error::conflict("every name for the handed-off checkpoint is taken").at(&names[0]))
    })
}

/// True if `name`, or another spelling of the same step, is there.
fn is_taken(state: &State, name: &Name) -> bool {
    let step = name.step();
    state.refs.contains_key(name) || step.is_some() && state.refs.keys().any(|other| other.step() == step)
}

/// Report of a task, as the command of that name prints it.
pub(in crate::agent) fn report(report: &impl Serialize) -> Result<Value> {
    serde_json::to_value(report).map_err(|source| Error::other("report is not JSON").source(source))
}

pub(super) fn spec(kind: TaskKind, name: &impl ToString, repository: &Repository) -> TaskSpec {
    TaskSpec { kind, name: name.to_string(), repository: Some(repository.store().location().to_string()), caller: None }
}
