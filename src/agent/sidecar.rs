//! Sidecar: prepares the inputs of a training, saves its checkpoints, polls for preemption notices.

use std::sync::Arc;

use rustix::process::getuid;
use tokio::task::JoinSet;

use super::config::{RestoredInput, SidecarConfig};
use super::handoff::Sender;
use super::preemption::await_notice;
use super::staged::{StageOrder, stage};
use super::state::AgentState;
use super::tasks::{self, AGAIN_AFTER, Outcome, RestoreRequest, Task, TaskReport, WarmRequest};
use super::user::user_name;
use super::view::TaskKind;
use super::warm::Pinning;
use crate::error::{Error, ErrorKind, Result};
use crate::name::Name;
use crate::ops::{HandoffTarget, RemovedFiles};
use crate::policy::LocalCaller;
use crate::selector::Selector;
use crate::transfer::exchange::From;
use crate::work::blocking;

/// Owner of the pins of warmed inputs.
const PIN_OWNER: &str = "sidecar";
/// Paths beside a restored step that a warning names, at most.
const OTHERS_NAMED: usize = 3;

/// Starts the background jobs of `config` in `api`.
///
/// # Errors
/// Not found, if names are to be warmed and there is no cache; unsupported, if names are to be staged and there is no memory for
/// tensors; unreachable, if the agent is shutting down.
pub(super) fn begin(state: &Arc<AgentState>, config: SidecarConfig, api: &mut JoinSet<()>) -> Result<()> {
    let SidecarConfig { warm, stage, restore, watch, handoff_to, preemption } = config;
    if !warm.is_empty() {
        state.exchange()?;
    }
    if !stage.is_empty() {
        state.staged()?;
    }
    if let Some(provider) = preemption {
        let state = Arc::clone(state);
        api.spawn(async move {
            tokio::select! {
                notice = await_notice(provider) => state.preempt(notice),
                () = state.leaving.cancelled() => {}
            }
        });
    }
    if warm.is_empty() && stage.is_empty() && restore.is_empty() && watch.is_empty() {
        let state_of_pins = Arc::clone(state);
        api.spawn(async move { release_pins(&state_of_pins).await });
        state.mark_prepared();
        return Ok(());
    }
    // Caller of what the settings ask for: this agent's user.
    let by = Some(LocalCaller::user(&user_name(getuid())));
    let target: Option<Arc<dyn HandoffTarget>> = match handoff_to {
        Some(to) => Some(Arc::new(Sender::new(Arc::clone(state), to)?)),
        None => None,
    };
    // Starts watches first: from now on finished checkpoints are saved, or reported, even if an input fails.
    let mut restored = Vec::with_capacity(watch.len());
    for watched in watch {
        restored.push(tasks::watch(state, watched, target.clone())?);
    }
    let state = Arc::clone(state);
    api.spawn(async move {
        let prepared = async {
            release_pins(&state).await;
            for name in warm {
                let start = || {
                    let request = WarmRequest {
                        name: name.clone(),
                        below: None,
                        kind: TaskKind::Warm,
                        from: From::Anywhere,
                        or_repository: true,
                        // One input must not evict another one.
                        pin: Some(Pinning::new(PIN_OWNER, None)),
                        dry_run: false,
                        caller: None,
                        by: by.clone(),
                    };
                    tasks::warm(&state, None, request)
                };
                run_until_done(&state, &name, start).await;
            }
            for name in stage {
                stage_once(&state, name, by.clone()).await;
            }
            for input in restore {
                restore_input(&state, &input, by.as_ref()).await;
            }
            for restored in restored {
                restored.cancelled().await;
            }
            state.mark_prepared();
        };
        tokio::select! {
            () = prepared => {}
            () = state.leaving.cancelled() => {}
        }
    });
    Ok(())
}

/// Ends the pins of the inputs of an earlier process, which may be others than those of now.
async fn release_pins(state: &AgentState) {
    let Ok(exchange) = state.exchange() else { return };
    let cache = Arc::clone(exchange.cache());
    let released = blocking(move || {
        let mut pins = cache.pins().into_iter().filter(|pin| pin.owner == PIN_OWNER);
        pins.try_for_each(|pin| cache.unpin(pin.id).map(drop))
    });
    if let Err(error) = released.await {
        tracing::warn!("pins of the inputs of an earlier process stay: {error:?}");
    }
}

/// Reads the tensors of `name` into memory. A failure delays nothing: processes then read them themselves.
async fn stage_once(state: &AgentState, name: Selector, by: Option<LocalCaller>) {
    if has_no_step(state, &name).await {
        tracing::info!("{name} has no step yet: nothing to stage");
        return;
    }
    let order = StageOrder { name: name.clone(), below: None, selectors: Vec::new(), hold: false, by };
    let failed = match stage(state, None, order) {
        Ok(task) => failure(&name, &task.ended().await),
        Err(error) => Some(error),
    };
    if let Some(failed) = failed {
        tracing::warn!("not staged: {failed:?}");
    }
}

/// Restores `input`, and warns of what stays beside a step.
async fn restore_input(state: &AgentState, input: &RestoredInput, by: Option<&LocalCaller>) {
    let start = || tasks::restore(state, None, restore_request(input, by));
    if let Some(outcome) = run_until_done(state, &input.name, start).await {
        warn_of_others(state, input, &outcome, by.cloned()).await;
    }
}

/// Restore of all of `input`.
fn restore_request(input: &RestoredInput, by: Option<&LocalCaller>) -> RestoreRequest {
    RestoreRequest {
        name: input.name.clone(),
        below: None,
        to: input.to.clone(),
        overwrite: input.overwrite,
        delete: input.delete,
        only: Vec::new(),
        by: by.cloned(),
    }
}

/// Warns of files beside a restored step that it lacks: they may be an earlier step's, which a reader would take for one with it.
async fn warn_of_others(state: &AgentState, input: &RestoredInput, outcome: &Outcome, by: Option<LocalCaller>) {
    let Outcome::Done(report) = outcome else { return };
    let (Selector::Step { .. }, false, TaskReport::Restore(restored)) = (&input.name, input.delete, &**report) else {
        return;
    };
    let (Ok(name), Ok(repository)) = (restored.name.parse::<Name>(), state.repository(None)) else { return };
    let to = input.to.display();
    match repository.for_caller(by).surplus_of(&name, &input.to).await {
        Ok(RemovedFiles { files: 0, .. }) => {}
        Ok(others) => {
            let first: Vec<String> = others.paths.iter().take(OTHERS_NAMED).map(|path| format!("{path:?}")).collect();
            tracing::warn!(
                "{to}: files that {name} lacks stay there, as those of an earlier step would: {}, such as {}; \
                 `delete = true` in this `restore` of [sidecar] removes them",
                others.files,
                first.join(", ")
            );
        }
        Err(error) => tracing::warn!("{to}: files that {name} lacks are not known: {error:?}"),
    }
}

/// True if `name` chooses among the steps of a run that has none yet.
async fn has_no_step(state: &AgentState, name: &Selector) -> bool {
    let (Selector::Step { .. }, Ok(repository)) = (name, state.repository(None)) else { return false };
    repository.resolve(name).await.is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

/// Runs tasks for `name` until one succeeds, and returns its outcome. A run without the selected step has not begun yet, so there is
/// nothing to prepare.
async fn run_until_done(state: &AgentState, name: &Selector, start: impl Fn() -> Result<Arc<Task>>) -> Option<Outcome> {
    while !has_no_step(state, name).await {
        let failed = match start() {
            Ok(task) => {
                let outcome = task.ended().await;
                match failure(name, &outcome) {
                    None => return Some(outcome),
                    Some(failed) => failed,
                }
            }
            Err(error) => error,
        };
        tracing::warn!("not ready yet: {failed:?}");
        tokio::time::sleep(AGAIN_AFTER).await;
    }
    tracing::info!("{name} has no step yet: nothing to prepare");
    None
}

/// Error of a task that has not prepared all of `name`; None if it has.
fn failure(name: &Selector, outcome: &Outcome) -> Option<Error> {
    match outcome {
        Outcome::Done(report) => match **report {
            TaskReport::Warm(ref warmed) if warmed.missing > 0 => {
                Some(Error::unreachable(format!("{} chunks could not be fetched", warmed.missing)).at(name))
            }
            _ => None,
        },
        Outcome::Cancelled(_) => None,
        Outcome::Failed(error) => Some(Error::new(error.kind(), format!("cannot prepare an input: {error}")).at(name)),
    }
}
