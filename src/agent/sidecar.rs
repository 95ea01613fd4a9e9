//! Sidecar: prepare a training's inputs, save what it writes, watch for preemption.

use std::sync::Arc;

use tokio::task::JoinSet;

use super::config::SidecarConfig;
use super::handoff::Sender;
use super::preemption::await_notice;
use super::state::AgentState;
use super::tasks::{self, AGAIN_AFTER, RestoreRequest, Task, WarmRequest};
use super::view::{self, TaskKind, TaskState};
use crate::error::{Error, ErrorKind, Result};
use crate::ops::HandoffTarget;
use crate::repository::Selector;
use crate::transfer::exchange::From;

/// Starts the work of `config` as background jobs in `api`.
///
/// # Errors
/// Not found, if something is to be warmed and there is no cache; unreachable, if the agent is ending already.
pub(super) fn begin(state: &Arc<AgentState>, config: SidecarConfig, api: &mut JoinSet<()>) -> Result<()> {
    let SidecarConfig { warm, restore, watch, handoff_to, preemption } = config;
    if !warm.is_empty() {
        state.exchange()?;
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
    if warm.is_empty() && restore.is_empty() && watch.is_empty() {
        state.prepared();
        return Ok(());
    }
    let target: Option<Arc<dyn HandoffTarget>> = match handoff_to {
        Some(to) => Some(Arc::new(Sender::new(Arc::clone(state), to)?)),
        None => None,
    };
    // Watches start first: checkpoints that finish from now on are saved, or named, even if an input fails.
    let mut restored = Vec::with_capacity(watch.len());
    for watched in watch {
        restored.push(tasks::watch(state, watched, target.clone())?);
    }
    let state = Arc::clone(state);
    api.spawn(async move {
        let prepared = async {
            for name in warm {
                let start = || {
                    let request = WarmRequest {
                        name: name.clone(),
                        below: None,
                        kind: TaskKind::Warm,
                        from: From::Anywhere,
                        or_repository: true,
                        pin: None,
                        dry_run: false,
                        caller: None,
                    };
                    tasks::warm(&state, None, request)
                };
                bring(&name, start).await;
            }
            for (name, to) in restore {
                let start = || {
                    let (name, to) = (name.clone(), to.clone());
                    tasks::restore(
                        &state,
                        None,
                        RestoreRequest { name, below: None, to, overwrite: false, delete: false, only: Vec::new() },
                    )
                };
                bring(&name, start).await;
            }
            for restored in restored {
                restored.cancelled().await;
            }
            state.prepared();
        };
        tokio::select! {
            () = prepared => {}
            () = state.leaving.cancelled() => {}
        }
    });
    Ok(())
}

/// Starts a task for `name` until it succeeds. A run without the selected step has not begun: there is nothing to prepare.
async fn bring(name: &Selector, start: impl Fn() -> Result<Arc<Task>>) {
    loop {
        let failed = match start() {
            Ok(task) => {
                task.ended().await;
                match failure(name, &task.view()) {
                    None => return,
                    Some(failed) => failed,
                }
            }
            Err(error) => error,
        };
        tracing::warn!("not ready yet: {failed:?}");
        tokio::time::sleep(AGAIN_AFTER).await;
    }
}

/// Error for a task that has not prepared all of `name`.
fn failure(name: &Selector, view: &view::Task) -> Option<Error> {
    let field = |of: Option<&serde_json::Value>, field: &str| of.and_then(|of| of.get(field)).cloned();
    match view.state {
        TaskState::Done => {
            let missing = field(view.report.as_ref(), "missing").and_then(|missing| missing.as_u64()).unwrap_or(0);
            (missing > 0).then(|| Error::unreachable(format!("{missing} chunks could not be fetched")).at(name))
        }
        TaskState::Cancelled => None,
        TaskState::Running | TaskState::Failed => {
            let kind = field(view.error.as_ref(), "kind");
            let kind = kind.and_then(|kind| kind.as_str().map(ErrorKind::from_word)).unwrap_or(ErrorKind::Other);
            if kind == ErrorKind::NotFound && matches!(name, Selector::Step { .. }) {
                tracing::info!("{name} has no step yet: nothing to prepare");
                return None;
            }
            let message = field(view.error.as_ref(), "message").unwrap_or_default();
            Some(Error::new(kind, format!("cannot prepare an input: {message}")).at(name))
        }
    }
}
