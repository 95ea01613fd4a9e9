//! Watching a folder as a task: restarts after failures, reports checkpoints that are not saved.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::AGAIN_AFTER;
use super::failures::Failures;
use super::operations::spec;
use super::outcome::TaskReport;
use crate::agent::config::WatchedFolder;
use crate::agent::state::AgentState;
use crate::agent::usage::count_saved;
use crate::agent::view::TaskKind;
use crate::error::{Error, Result};
use crate::ops::{HandoffTarget, SaveOptions, SaveReport, Stop, WatchEvent, WatchOptions, WatchReport};
use crate::progress::Progress;
use crate::repository::Repository;
use crate::transfer::ledger::Ledger;

/// Time in which a cancelled watch reports unsaved checkpoints.
const NAMING: Duration = Duration::from_secs(1);

/// Starts to watch a folder: restores the run's latest step if configured, then saves new checkpoints until shutdown. A failed
/// watch is restarted. When time is short, checkpoints are handed off to `target` first. The returned token is cancelled when
/// the latest step is restored, or when no restore is needed.
///
/// # Errors
/// As [`Tasks::begin`](super::registry::Tasks::begin); not found, without a repository.
pub(in crate::agent) fn watch(
    state: &AgentState,
    watched: WatchedFolder,
    target: Option<Arc<dyn HandoffTarget>>,
) -> Result<CancellationToken> {
    let repository = state.repository(None)?.clone();
    let stop = state.stop.subscribe();
    let restored = CancellationToken::new();
    let watching = Watching {
        ledger: state.ledger(),
        repository: repository.clone(),
        watched,
        stop,
        restored: restored.clone(),
        saved: Vec::new(),
        handoffs: Handoffs::default(),
        failures: Failures::default(),
    };
    let spec = spec(TaskKind::Watch, &watching.watched.run, &repository);
    state.tasks.begin_lasting(spec, move |progress, failures, stopped| async move {
        let watching = Watching { failures, ..watching };
        let handoffs = watching.handoffs.clone();
        let ending = watching.stop.clone();
        let stopped = async {
            stopped.cancelled().await;
            if *ending.borrow() != Stop::No {
                tokio::time::sleep(NAMING).await;
            }
        };
        tokio::select! {
            ended = watching.run(target, progress) => ended,
            () = stopped => Err(handoffs.stopped()),
        }
    })?;
    Ok(restored)
}

/// State of a watched folder that survives restarts of the watch.
struct Watching {
    /// Ledger that counts what was saved, if the agent has one.
    ledger: Option<Arc<Ledger>>,
    repository: Repository,
    watched: WatchedFolder,
    stop: watch::Receiver<Stop>,
    /// Cancelled when the latest step is restored, or when no restore is needed.
    restored: CancellationToken,
    saved: Vec<String>,
    handoffs: Handoffs,
    /// Failures that are being retried.
    failures: Failures,
}

/// Outcome of each handoff, by checkpoint, as long as that is not saved. Clones share it.
#[derive(Clone, Debug, Default)]
struct Handoffs(Arc<Mutex<BTreeMap<String, String>>>);

impl Handoffs {
    fn outcomes(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Error of a watch that was stopped before it could report what is not saved.
    fn stopped(&self) -> Error {
        let error = Error::cancelled("watch was stopped");
        let handed_off: Vec<_> = self.outcomes().iter().map(|(entry, how)| format!("{entry} ({how})")).collect();
        if handed_off.is_empty() { error } else { error.got(format!("not saved: {}", handed_off.join(", "))) }
    }
}

impl Watching {
    async fn run(mut self, target: Option<Arc<dyn HandoffTarget>>, progress: Progress) -> Result<TaskReport> {
        let WatchedFolder { folder, run, settle, restore_latest, compression } = self.watched.clone();
        let repository = self.repository.clone();
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
                save: SaveOptions { compression, progress: progress.clone(), ..SaveOptions::default() },
                metrics: Vec::new(),
                handoff: target.clone(),
                stop: self.stop.clone(),
            };
            let watched = Box::pin(repository.watch(&folder, &run, &options, &mut |event| self.note(event))).await;
            match watched {
                Ok(report) => return self.end(&report),
                // Stopped during the restore: saves the checkpoints in the folder, or reports them.
                Err(_) if options.restore_latest && *stop.borrow() != Stop::No => {}
                Err(error) if stopping => return Err(error),
                Err(error) => {
                    tracing::warn!(folder = %folder.display(), "watch failed, starts again: {error:?}");
                    self.failures.record("", error.kind(), format!("watch failed, starts again: {error:?}"));
                    let _ = timeout(AGAIN_AFTER, stop.wait_for(|stop| *stop != Stop::No)).await;
                }
            }
        }
    }

    fn note(&mut self, event: WatchEvent) {
        match &event {
            WatchEvent::Failed { entry, failure, retry_seconds } => {
                let error = &failure.error;
                let message = format!("{entry} could not be saved, next try in {retry_seconds:.1} s: {error}");
                tracing::warn!(run = %self.watched.run, "{message}");
                self.failures.record(entry, failure.kind, message);
            }
            WatchEvent::Unreadable { failure } => {
                let message = format!("cannot read the folder: {}", failure.error);
                tracing::warn!(run = %self.watched.run, "{message}");
                self.failures.record("", failure.kind, message);
            }
            WatchEvent::Saved { entry, report: SaveReport { name, replaced: Some(old), .. }, .. } => {
                tracing::warn!(run = %self.watched.run, "{name} was replaced: it held what was saved {}", old.saved);
                self.failures.clear(entry);
                self.failures.clear("");
            }
            WatchEvent::Saved { entry, .. } | WatchEvent::Kept { entry, .. } | WatchEvent::Gone { entry } => {
                tracing::info!(run = %self.watched.run, ?event, "watch");
                self.failures.clear(entry);
                self.failures.clear("");
            }
            WatchEvent::NotRestored { reason, later: Some(later) } => {
                tracing::warn!(run = %self.watched.run, "nothing restored: {reason}; the run has a later step, {later}");
            }
            _ => tracing::info!(run = %self.watched.run, ?event, "watch"),
        }
        match event {
            WatchEvent::Restored { .. } | WatchEvent::NotRestored { .. } => self.restored.cancel(),
            WatchEvent::Saved { entry, report, .. } => {
                self.handoffs.outcomes().remove(&entry);
                if let Some(ledger) = &self.ledger {
                    count_saved(ledger, &self.repository, &report);
                }
                self.saved.push(report.name);
            }
            WatchEvent::HandedOff { entry, to } => {
                self.handoffs.outcomes().insert(entry, format!("handed off to {to}, which saves it"));
            }
            WatchEvent::NotHandedOff { entry, error } => {
                self.handoffs.outcomes().insert(entry, format!("handoff failed: {error}"));
            }
            _ => {}
        }
    }

    /// Report of the watch; an error that names unsaved checkpoints if there are any.
    fn end(self, report: &WatchReport) -> Result<TaskReport> {
        let handoffs = self.handoffs.outcomes().clone();
        let described = |entry: &String| match handoffs.get(entry) {
            Some(outcome) => format!("{entry} ({outcome})"),
            None => entry.clone(),
        };
        match report.error(&self.watched.folder, "raise `grace` in the agent's settings", described) {
            Some(error) => Err(error),
            None => Ok(TaskReport::Watch { saved: self.saved }),
        }
    }
}
