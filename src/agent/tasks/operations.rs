//! Operations that callers request or the agent starts by itself, run as tasks.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::time::Instant;
use ulid::Ulid;

use super::outcome::{Already, TaskReport};
use super::registry::{Task, TaskSpec};
use crate::agent::commitments::CommittedInput;
use crate::agent::handoff::{self, Announced, StoredCheckpoint};
use crate::agent::requester::Requester;
use crate::agent::state::AgentState;
use crate::agent::tokens::Grant;
use crate::agent::usage::count_saved;
use crate::agent::view::TaskKind;
use crate::agent::warm::plan_whole;
use crate::agent::{Pinning, WarmOptions};
use crate::clock::Timestamp;
use crate::error::{Error, ErrorKind, Result};
use crate::format::EntryKind;
use crate::name::Name;
use crate::ops::{self, RestoreOptions, SaveOptions};
use crate::policy::{LocalCaller, Scope};
use crate::repository::log::{State, StepFacts, labelled_name};
use crate::repository::{NameScope, Repository, TravelPlan};
use crate::selector::Selector;
use crate::transfer::exchange::{Exchange, FetchPolicy, From};
use crate::transfer::protocol::Priority;
use crate::tree::{Rules, WalkKind, walk};
use crate::work::blocking;

/// End of the warnings about a name that the checkpoint does not get.
const ELSEWHERE: &str = ": the handed-off checkpoint is saved under another name";

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
    /// Local caller that requested it, for the policy.
    pub(in crate::agent) by: Option<LocalCaller>,
}

/// Arguments of [`warm`].
#[derive(Debug)]
pub(in crate::agent) struct WarmRequest {
    pub(in crate::agent) name: Selector,
    /// Only this file or folder of it.
    pub(in crate::agent) below: Option<String>,
    /// Priority: fetch if a reader waits for the data, else warm.
    pub(in crate::agent) kind: TaskKind,
    /// Sources of missing chunks.
    pub(in crate::agent) from: From,
    /// Read chunks that those sources lack from the repository.
    pub(in crate::agent) or_repository: bool,
    pub(in crate::agent) pin: Option<Pinning>,
    /// Only report what is missing.
    pub(in crate::agent) dry_run: bool,
    /// Other agent or token that requested it, if any.
    pub(in crate::agent) caller: Option<Requester>,
    /// Local caller that requested it, for the policy; None if that was another agent.
    pub(in crate::agent) by: Option<LocalCaller>,
}

/// Starts to fetch a name, or a part of it, into the cache. Other agents and tokens may request names that they may read.
///
/// # Errors
/// As [`Tasks::begin`](super::registry::Tasks::begin); not found, for an agent without a cache or the repository.
pub(in crate::agent) fn warm(state: &AgentState, repository: Option<&str>, request: WarmRequest) -> Result<Arc<Task>> {
    let WarmRequest { name, below, kind, from, or_repository, pin, dry_run, caller, by } = request;
    let exchange = Arc::clone(state.exchange()?);
    let repository = state.origin(repository)?.for_caller(by);
    let called = below.as_ref().map_or_else(|| name.to_string(), |below| format!("{name}:{below}"));
    let spec = TaskSpec { caller: caller.clone(), ..spec(kind, &called, &repository) };
    let priority = if kind == TaskKind::Fetch { Priority::Restore } else { Priority::Warm };
    let (_, limit) = state.pin_bounds(caller.as_ref(), None)?;
    let hides_agents = match &caller {
        Some(Requester::Token(grant)) => !grant.scopes().has(Scope::Metrics),
        Some(Requester::Agent(_)) | None => false,
    };
    let large_trees = Arc::clone(&state.large_trees);
    state.tasks.begin(spec, move |progress| async move {
        let begun = Instant::now();
        let name = resolve(&exchange, &repository, caller.as_ref(), &name).await?;
        let warmed = async {
            let (tree, _place) = large_trees.opened(&repository, &name, (kind, caller.as_ref()), begun).await?;
            let policy = FetchPolicy { from, or_repository, priority, hides_agents };
            let (below, tree) = (below.map(String::into_bytes), Some(tree));
            let options = WarmOptions { below, tree, policy, pin, limit, plan: None, dry_run, progress };
            Box::pin(crate::agent::warm(&exchange, &repository, &name, &options)).await
        };
        match warmed.await {
            Ok(warmed) => Ok(TaskReport::Warm(Box::new(warmed))),
            Err(error) if caller.is_some() => Err(without_offers(&repository, &name, error).await),
            Err(error) => Err(error),
        }
    })
}

/// Starts to fetch the trees of a commitment, one after the other.
///
/// # Errors
/// As [`warm`].
pub(in crate::agent) fn warm_commitment(
    state: &AgentState,
    repository: &Repository,
    (hint, inputs): (&str, Vec<CommittedInput>),
    caller: Option<Requester>,
) -> Result<Arc<Task>> {
    let (exchange, repository) = (Arc::clone(state.exchange()?), repository.clone());
    let spec = TaskSpec { caller: caller.clone(), ..spec(TaskKind::Warm, &format!("hint {hint}"), &repository) };
    let (hint_id, large_trees) = (hint.to_owned(), Arc::clone(&state.large_trees));
    state.tasks.begin(spec, move |progress| async move {
        let names = inputs.iter().map(CommittedInput::name).collect::<Result<Vec<_>>>()?;
        let _place = large_trees.place_of_all(&repository, &names, (TaskKind::Warm, caller.as_ref())).await?;
        let policy = FetchPolicy { priority: Priority::Warm, ..FetchPolicy::default() };
        let plans = plan_commitment(&exchange, &repository, &inputs, &policy).await?;
        let mut warmed = Vec::with_capacity(inputs.len());
        for (input, plan) in inputs.into_iter().zip(plans) {
            let name = input.name()?;
            let current = repository.state().await?.refs.get(&name).map(|value| value.manifest);
            if current.is_none_or(|manifest| !input.is_tree(manifest)) {
                return Err(replaced(&name));
            }
            let (policy, progress) = (policy.clone(), progress.clone());
            let options = WarmOptions { policy, progress, plan: Some(Arc::new(plan)), ..WarmOptions::default() };
            match Box::pin(crate::agent::warm(&exchange, &repository, &name, &options)).await {
                Ok(one) => warmed.push(one),
                Err(error) if caller.is_some() => return Err(without_offers(&repository, &name, error).await),
                Err(error) => return Err(error),
            }
        }
        Ok(TaskReport::Committed { hint_id, inputs: warmed })
    })
}

/// Plans together how the trees of a commitment come: what a base saves counts once for all of them.
async fn plan_commitment(
    exchange: &Exchange,
    repository: &Repository,
    inputs: &[CommittedInput],
    policy: &FetchPolicy,
) -> Result<Vec<TravelPlan>> {
    let mut trees = Vec::with_capacity(inputs.len());
    for input in inputs {
        let name = input.name()?;
        match repository.saved(&name).await {
            Ok(saved) if input.is_tree(saved.value.manifest) => trees.push(saved.shared()),
            Ok(_) => return Err(replaced(&name)),
            Err(error) if error.kind() == ErrorKind::NotFound => return Err(replaced(&name)),
            Err(error) => return Err(error),
        }
    }
    plan_whole(exchange, repository, &trees, policy).await
}

fn replaced(name: &Name) -> Error {
    Error::conflict("name was removed or replaced after the hint was committed")
        .at(name)
        .help("end the commitment, and ask for a new hint")
}

/// Resolves `selector`. For another agent or a token, rights are checked before any lookup: a forbidden name is reported like an
/// absent one.
///
/// # Errors
/// Not found, for an absent name or run, or one that the caller may not read.
///
/// # Cancel safety
/// Safe: it only reads.
pub(in crate::agent) async fn resolve(
    exchange: &Exchange,
    repository: &Repository,
    caller: Option<&Requester>,
    selector: &Selector,
) -> Result<Name> {
    match caller {
        None => repository.resolve(selector).await,
        Some(Requester::Token(grant)) => resolve_for(repository, Some(grant), selector).await,
        Some(Requester::Agent(agent)) => exchange.resolve(agent, repository, selector).await.map_err(|error| {
            let agent = agent.path();
            error
                .help(format!("the name is absent, or agent {agent} may not read it: see [[allow]] of the other agent"))
        }),
    }
}

/// `error` of opening `name`, for a caller whose rights were checked when it was resolved. The error about a name that was removed
/// since then offers others, which the caller may not read.
///
/// # Cancel safety
/// Safe: it only reads.
pub(in crate::agent) async fn without_offers(repository: &Repository, name: &Name, error: Error) -> Error {
    if error.kind() != ErrorKind::NotFound {
        return error;
    }
    match repository.state().await {
        Ok(state) if state.refs.contains_key(name) => error,
        _ => Error::not_found("name was removed meanwhile").at(name),
    }
}

/// As [`resolve`], for the user of this node or a token.
///
/// # Errors
/// As [`resolve`].
///
/// # Cancel safety
/// Safe: it only reads.
pub(in crate::agent) async fn resolve_for(
    repository: &Repository,
    grant: Option<&Arc<Grant>>,
    selector: &Selector,
) -> Result<Name> {
    let Some(grant) = grant else { return repository.resolve(selector).await };
    let grant = Arc::clone(grant);
    let resolved = repository.resolve_readable(selector, move |name| grant.scopes().may_read(name)).await;
    resolved.map_err(not_readable)
}

/// Adds to an error of resolving a name for a token that its scopes may be the reason.
pub(in crate::agent) fn not_readable(error: Error) -> Error {
    match error.kind() {
        ErrorKind::NotFound => {
            error.help("the name is absent, or the token may not read it: its scopes read=PATTERN decide")
        }
        _ => error,
    }
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
    let repository = state.repository(repository)?.for_caller(request.by.clone());
    state.tasks.begin_stoppable(spec(TaskKind::Restore, &request.name, &repository), move |progress, stop| async move {
        let RestoreRequest { name, below, to, overwrite, delete, only, by: _ } = request;
        let resolved = stop.run_until_cancelled(repository.resolve(&name)).await;
        let name = resolved.ok_or_else(|| Error::cancelled("interrupted"))??;
        let options = RestoreOptions { overwrite, delete, only, progress, stop, ..RestoreOptions::default() };
        let below = below.as_ref().map(String::as_bytes);
        let restored = Box::pin(repository.restore(&name, below, &to, &options)).await?;
        Ok(TaskReport::Restore(Box::new(restored)))
    })
}

/// `options` of a save under another name than `original`, whose labels bind it all the same, now and later.
fn derived(options: &SaveOptions, original: &Name) -> SaveOptions {
    let mut labels = options.labels.clone();
    let origins = labels.entry("derived-from".to_owned()).or_default();
    *origins = if origins.is_empty() { original.to_string() } else { format!("{origins},{original}") };
    SaveOptions { labels, ..options.clone() }
}

/// Starts to save the handed-off checkpoint `id` at `path` under its name, or under another name if that one is taken or the run
/// has gone on from an earlier step. Never replaces a name.
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
    // The sender must not see the report, which describes the repository.
    let spec = spec(TaskKind::Save, &name, &repository);
    let (path, names) = (path.to_owned(), handoff::names(&name, &stored.from, id)?);
    let caller = Some(Arc::from(Requester::Agent(stored.from.clone()).limited_owners()));
    // The folder of the record, two levels above the checkpoint.
    let folder = path.ancestors().nth(2).map(Path::to_path_buf);
    let ledger = state.ledger();
    state.tasks.begin_stoppable(spec, move |progress, stop| async move {
        let modes = match folder {
            Some(folder) => blocking(move || handoff::read_modes(&folder)).await?,
            None => BTreeMap::new(),
        };
        let (logged, step) = (path.clone(), name.step().map_or(0, |(_, step)| step));
        let facts = blocking(move || Ok(ops::with_logged(&logged, step, &[], StepFacts::default()))).await?;
        let expected = ops::Expected::Nothing;
        // The run, and the other names that the step may get.
        let own = names.each_ref().map(labelled_name);
        let options = SaveOptions {
            labels,
            facts,
            modes: Arc::new(modes),
            progress,
            stop,
            expected,
            root_link: ops::RootLink::Refuse,
            no_ignore_files: true,
            label_scope: NameScope::only(move |other| own.iter().any(|own| other.is_under(own))),
            caller,
            ..SaveOptions::default()
        };
        let written = last_written(&path, &repository, &options).await?;
        for name in &names {
            if is_taken(&*repository.state().await?, name) {
                // By content: others know the sizes and times of this checkpoint.
                match repository.holds(name, &path, &options).await {
                    Ok(true) => return Ok(TaskReport::AlreadySaved { name: name.clone(), saved: Already::Already }),
                    Err(error) if error.kind() == ErrorKind::Cancelled => return Err(error),
                    Ok(false) => tracing::warn!("{name} holds something else{ELSEWHERE}"),
                    Err(error) => tracing::warn!("{name} cannot be compared{ELSEWHERE}: {error:?}"),
                }
                continue;
            }
            if let Some(other) = written_later(&repository, name, written).await? {
                tracing::warn!("{other} was written after {name}, so its run has gone on without it{ELSEWHERE}");
                continue;
            }
            let options = if *name == names[0] { options.clone() } else { derived(&options, &names[0]) };
            match Box::pin(repository.save(&path, name, &options)).await {
                // Another writer took the name first.
                Err(error) if error.kind().is_conflict() && is_taken(&*repository.state().await?, name) => {}
                saved => {
                    let saved = saved?;
                    if let Some(ledger) = &ledger {
                        count_saved(ledger, &repository, &saved);
                    }
                    return Ok(TaskReport::Save(Box::new(saved)));
                }
            }
        }
        Err(Error::conflict("every name for the handed-off checkpoint is taken").at(&names[0]))
    })
}

/// True if `name`, or another spelling of the same step, exists.
fn is_taken(state: &State, name: &Name) -> bool {
    let step = name.step();
    state.refs.contains_key(name) || step.is_some() && state.refs.keys().any(|other| other.step() == step)
}

/// Time of the last write to a file of the handed-off checkpoint at `path`; none without files.
async fn last_written(path: &Path, repository: &Repository, options: &SaveOptions) -> Result<Option<Timestamp>> {
    let (memory, caller) = (Some(repository.budget().clone()), options.caller.clone());
    let rules = Rules { no_follow: true, no_ignore_files: true, memory, caller, ..Rules::default() };
    let path = path.to_owned();
    let walked = blocking(move || walk(&path, &rules)).await?;
    Ok(walked.found.iter().filter(|entry| entry.kind == WalkKind::File).map(|entry| entry.stat.mtime).max())
}

/// An earlier step of the run of `name` with a file that was written after `written`. A training writes its steps in order: such
/// a step is of one that resumed the run before `name`.
async fn written_later(repository: &Repository, name: &Name, written: Option<Timestamp>) -> Result<Option<Name>> {
    let (Some((run, number)), Some(written)) = (name.step(), written) else { return Ok(None) };
    let state = repository.state().await?;
    let is_earlier = |other: &Name| other.step().is_some_and(|(of, step)| of == run && step < number);
    // Steps that were saved before were written before, too.
    for (other, _) in state.refs.iter().filter(|(other, value)| value.saved > written && is_earlier(other)) {
        let entries = match repository.saved(other).await {
            Ok(saved) => saved.manifest.entries,
            // Removed meanwhile.
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        if entries.iter().any(|entry| matches!(entry.kind, EntryKind::File(_)) && entry.mtime > written) {
            return Ok(Some(other.clone()));
        }
    }
    Ok(None)
}

pub(super) fn spec(kind: TaskKind, name: &impl ToString, repository: &Repository) -> TaskSpec {
    TaskSpec { kind, name: name.to_string(), repository: Some(repository.store().location().to_string()), caller: None }
}
