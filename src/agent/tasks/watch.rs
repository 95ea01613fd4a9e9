//! Watching a folder as a task: restart after failures, report checkpoints that are not saved.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::AGAIN_AFTER;
use super::operations::{report, spec};
use super::registry::Failures;
use crate::agent::config::Watched;
use crate::agent::state::AgentState;
use crate::agent::view::TaskKind;
use crate::error::{Error, Result};
use crate::ops::{HandoffTarget, SaveOptions, Stop, WatchEvent, WatchOptions, WatchReport};
use crate::progress::Progress;
use crate::repository::Repository;

/// Time for a watch that is cancelled to name what is not saved.
const NAMING: Duration = Duration::from_secs(1);

/// Starts to watch a folder: restores the run's latest step if asked to, then saves new checkpoints until the agent is asked to end. A watch
/// that fails is restarted. When time is short, checkpoints are handed off to `target` first. The token is cancelled once the latest step is
/// restored, or need not be.
///
/// # Errors
/// As [`Tasks::begin`](super::registry::Tasks::begin); not found, without a repository.
pub(in crate::agent) fn watch(
    state: &AgentState,
    watched: Watched,
    target: Option<Arc<dyn HandoffTarget>>,
) -> Result<CancellationToken> {
    let repository = state.repository(None)?.clone();
    let stop = state.stop.subscribe();
    let restored = CancellationToken::new();
    let watching = Watching {
        watched,
        stop,
        restored: restored.clone(),
        saved: Vec::new(),
        handoffs: BTreeMap::new(),
        failures: Failures::default(),
    };
    let spec = spec(TaskKind::Watch, &watching.watched.run, &repository);
    state.tasks.begin_lasting(spec, move |progress, failures, stopped| async move {
        let watching = Watching { failures, ..watching };
        let ending = watching.stop.clone();
        let stopped = async {
            stopped.cancelled().await;
            if *ending.borrow() != Stop::No {
                tokio::time::sleep(NAMING).await;
            }
        };
        tokio::select! {
            ended = watching.run(repository, target, progress) => ended,
            () = stopped => Err(Error::cancelled("watch was stopped")),
        }
    })?;
    Ok(restored)
}

/// A watched folder, across watches that failed.
struct Watching {
    watched: Watched,
    stop: watch::Receiver<Stop>,
    /// Cancelled once the latest step is restored, or need not be.
    restored: CancellationToken,
    saved: Vec<String>,
    /// Outcome of each handoff, by checkpoint.
    handoffs: BTreeMap<String, String>,
    /// Failures that are being retried.
    failures: Failures,
}

impl Watching {
    async fn run(
        mut self,
        repository: Repository,
        target: Option<Arc<dyn HandoffTarget>>,
        progress: Progress,
    ) -> Result<Value> {
        let Watched { folder, run, settle, restore_latest } = self.watched.clone();
        if !restore_latest {
            self.restored.cancel();
        }
        let mut stop = self.stop.clone();
        loop {
            let stopping = *stop.borrow_and_update() != Stop::No;
            let options = WatchOptions {
                settle,
                restore_latest: !stopping && !self.restored.is_cancelled(),
                once: false,
                save: SaveOptions { progress: progress.clone(), ..SaveOptions::default() },
                metrics: Vec::new(),
                handoff: target.clone(),
                stop: self.stop.clone(),
            };
            let watched = Box::pin(repository.watch(&folder, &run, &options, &mut |event| self.note(event))).await;
            match watched {
                Ok(report) => return self.end(&report),
                // Stopped during the restore: save what the folder holds, or name it.
                Err(_) if options.restore_latest && *stop.borrow() != Stop::No => {}
                Err(error) if stopping => return Err(error),
                Err(error) => {
                    tracing::warn!(folder = %folder.display(), "watch failed, starts again: {error:?}");
                    self.failures.record("", format!("watch failed, starts again: {error:?}"));
                    let _ = timeout(AGAIN_AFTER, stop.wait_for(|stop| *stop != Stop::No)).await;
                }
            }
        }
    }

    fn note(&mut self, event: WatchEvent) {
        match &event {
            WatchEvent::Failed { entry, error, retry_seconds } => {
                let message = format!("{entry} could not be saved, next try in {retry_seconds:.1} s: {error}");
                tracing::warn!(run = %self.watched.run, "{message}");
                self.failures.record(entry, message);
            }
            WatchEvent::Unreadable { error } => {
                tracing::warn!(run = %self.watched.run, "folder cannot be read: {error}");
                self.failures.record("", format!("folder cannot be read: {error}"));
            }
            WatchEvent::Saved { entry, .. } | WatchEvent::Kept { entry, .. } | WatchEvent::Gone { entry } => {
                tracing::info!(run = %self.watched.run, ?event, "watch");
                self.failures.clear(entry);
                self.failures.clear("");
            }
            _ => tracing::info!(run = %self.watched.run, ?event, "watch"),
        }
        match event {
            WatchEvent::Restored { .. } | WatchEvent::NotRestored { .. } => self.restored.cancel(),
            WatchEvent::Saved { report, .. } => self.saved.push(report.name),
            WatchEvent::HandedOff { entry, to } => {
                self.handoffs.insert(entry, format!("handed off to {to}, which saves it"));
            }
            WatchEvent::NotHandedOff { entry, error } => {
                self.handoffs.insert(entry, format!("handoff failed: {error}"));
            }
            _ => {}
        }
    }

    /// The report; an error that names what is not saved, if anything is not.
    fn end(&self, report: &WatchReport) -> Result<Value> {
        if report.unsaved.is_empty() {
            return self::report(&serde_json::json!({ "saved": self.saved }));
        }
        let described = |entry: &String| match self.handoffs.get(entry) {
            Some(outcome) => format!("{entry} ({outcome})"),
            None => entry.clone(),
        };
        let unsaved: Vec<_> = report.unsaved.iter().map(described).collect();
        Err(Error::cancelled("not all checkpoints could be saved in time")
            .at(self.watched.folder.display())
            .got(format!("not saved: {}", unsaved.join(", ")))
            .help("give the agent more `grace`"))
    }
}
