//! Watch: polls a folder until it is stopped, and saves each finished checkpoint of a framework as a step of a run.
//!
//! ```text
//! scan (metadata only) -> state: finished checkpoints that the repository lacks -> save, lowest step first -> scan ...
//! ```
//!
//! `candidate` and `settle` decide what is a checkpoint and when it is complete, `state` decides the next action; they do no I/O.
//! `scan` polls the folder, and this file executes the actions.

mod candidate;
mod compare;
mod ending;
mod events;
mod handoff;
mod metrics;
mod parted;
mod pointer;
mod resume;
mod scan;
mod settle;
mod state;
#[cfg(test)]
mod tests;
mod truncated;

use std::collections::BTreeMap;
use std::future::pending;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt as _;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

pub use self::candidate::is_checkpoint;
use self::candidate::{Tracker, version};
use self::compare::{Comparison, Evidence};
use self::ending::Ending;
pub use self::ending::Stop;
pub use self::events::{WatchEvent, WatchFailure};
pub use self::handoff::{HandoffTarget, UnsavedCheckpoint};
pub use self::metrics::LoggedMetric;
pub(crate) use self::metrics::with_logged;
pub(super) use self::pointer::{POINTER_LEN_MAX, is_pointer_content};
use self::resume::{ENTRY_LABEL, TRACKER_LABEL};
use self::scan::Scanner;
use self::settle::{FileMark, Pace};
use self::state::{NextSave, WatchState};
use super::save::{RootLink, SaveOptions, SaveReport};
use super::shown;
use crate::error::{Error, ErrorKind, Result};
use crate::name::Name;
use crate::progress::Progress;
use crate::repository::Repository;
use crate::repository::log::StepFacts;
use crate::work::blocking;

/// Minimum number of polls while a checkpoint settles.
const LOOKS_TO_SETTLE: u32 = 5;
/// Longest time between two polls.
const INTERVAL_MAX: Duration = Duration::from_secs(2);

/// Time for a save to record its stored data, once it must end.
const WINDING_UP: Duration = Duration::from_secs(2);
/// Maximum lost races of the save of one checkpoint.
const RACES: usize = 5;

/// Maximum time to find saved checkpoints after a stop request.
const PROOF_MAX: Duration = Duration::from_secs(2);

/// Options of a watch.
#[derive(Clone, Debug)]
pub struct WatchOptions {
    /// Time without a change after which a checkpoint counts as complete, if its framework has no marker; a fifth of that if it
    /// has.
    pub settle: Duration,
    /// Restore the latest step first, into a folder without checkpoints.
    pub restore_latest: bool,
    /// Save finished checkpoints, then end.
    pub once: bool,
    /// Options of each save; the watch adds its own labels.
    pub save: SaveOptions,
    /// Numbers in a checkpoint's `trainer_state.json` that become metrics of its step, each with its last logged value; if empty,
    /// all that were logged at exactly this step. Metrics of `save` take precedence.
    pub metrics: Vec<LoggedMetric>,
    /// Target for checkpoints when time is short.
    pub handoff: Option<Arc<dyn HandoffTarget>>,
    /// Stop requests; a dropped sender means no request.
    pub stop: tokio::sync::watch::Receiver<Stop>,
}

/// Result of a watch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WatchReport {
    /// Checkpoints saved, including repeated saves.
    pub saved: u64,
    /// Checkpoints that were not saved before the end.
    pub unsaved: Vec<String>,
    /// Number of these that are one of several parts of a step, which no further time would save.
    pub parted: u64,
    /// Last failed save of one of these, if any.
    pub failure: Option<WatchFailure>,
}

impl WatchReport {
    /// Error for checkpoints of `dir` that are not saved, named by `described`; none if all are saved. `time` is the help if only
    /// time was missing.
    #[must_use]
    pub fn error(&self, dir: &Path, time: &'static str, described: impl Fn(&String) -> String) -> Option<Error> {
        if self.unsaved.is_empty() {
            return None;
        }
        let unsaved: Vec<_> = self.unsaved.iter().map(described).collect();
        let what = match self.failure {
            Some(_) => "not all checkpoints could be saved",
            None => "not all checkpoints could be saved in time",
        };
        let error = Error::cancelled(what).at(dir.display()).got(format!("not saved: {}", unsaved.join(", ")));
        Some(match &self.failure {
            Some(WatchFailure { error: cause, help, .. }) => {
                let help = help
                    .clone()
                    .unwrap_or_else(|| "fix the cause; checkpoints that are not saved stay in the folder".to_owned());
                error.source(cause.clone()).help(help)
            }
            None => error.help(time),
        })
    }
}

impl Repository {
    /// Watches the folder `dir`, which may appear and disappear, and saves each finished checkpoint as `run`/step-N. Reports
    /// events. Ends at a request by `options.stop`, or with `options.once`.
    ///
    /// # Errors
    /// Usage, for permanent problems. With `once`, the first error of a save, after the other checkpoints were saved; otherwise failed
    /// saves are reported and retried. Errors of `restore_latest`, so that no training starts from scratch because the store was
    /// unavailable.
    ///
    /// # Cancel safety
    /// Safe, as for a save and a restore.
    pub async fn watch(
        &self,
        dir: &Path,
        run: &Name,
        options: &WatchOptions,
        tell: &mut (dyn FnMut(WatchEvent) + Send),
    ) -> Result<WatchReport> {
        run.check_run()?;
        if dir.is_file() {
            return Err(Error::usage("this is a file: a watch needs the folder that checkpoints are written to")
                .at(dir.display())
                .help("`towline save` saves a file once"));
        }
        tell(WatchEvent::Watching { dir: dir.display().to_string(), run: run.to_string() });
        let mut ending = Ending::new(options.stop.clone(), options.settle);
        let restored = if options.restore_latest {
            tokio::select! {
                restored = self.resume(dir, run, options.settle, tell) => restored?,
                // A restored step would not be used any more.
                () = ending.begun() => return Err(Error::cancelled("interrupted while the latest step was restored")
                    .at(dir.display())
                    .help("run the same command again to resume")),
            }
        } else {
            None
        };
        let pace = Pace { quiet: options.settle, marked: options.settle / LOOKS_TO_SETTLE };
        let watching = Watching {
            watched: WatchedRun { repository: self, dir, run, options },
            state: WatchState::new(dir.display().to_string(), pace, restored),
            scanner: Some(Scanner::new(dir)),
            interval: pace.marked.clamp(Duration::from_millis(5), INTERVAL_MAX),
            begun: Instant::now(),
            first_poll: None,
            unreadable: None,
            handed_off: BTreeMap::new(),
            failures: BTreeMap::new(),
            first_error: None,
            saved: 0,
        };
        watching.rest();
        watching.run(ending, tell).await
    }
}

/// Folder that is watched, and options of its saves.
#[derive(Clone, Copy)]
struct WatchedRun<'a> {
    repository: &'a Repository,
    dir: &'a Path,
    run: &'a Name,
    options: &'a WatchOptions,
}

/// A watch in progress.
struct Watching<'a> {
    watched: WatchedRun<'a>,
    state: WatchState,
    /// Poller; taken while a poll runs on another thread.
    scanner: Option<Scanner>,
    interval: Duration,
    begun: Instant,
    /// Time of the first poll, which may come late on a loaded machine.
    first_poll: Option<Duration>,
    /// Last reported problem with the folder.
    unreadable: Option<WatchFailure>,
    /// Last reported holders of checkpoints.
    handed_off: BTreeMap<String, String>,
    /// Last failure of each checkpoint that is not saved.
    failures: BTreeMap<String, WatchFailure>,
    /// First error of a save, and its checkpoint; only with `once`.
    first_error: Option<(String, Error)>,
    saved: u64,
}

/// Callback for events.
type EventSink<'a> = &'a mut (dyn FnMut(WatchEvent) + Send);

/// Outcome of a checkpoint that was due.
enum Outcome {
    /// Saved, with these facts.
    Saved(Box<SaveReport>, StepFacts),
    /// Saved already, under this name.
    Kept(Name),
    /// Only a part of it is left.
    Remains,
    /// It was beside this entry already when that was saved as the step.
    Beside(String),
}

impl Watching<'_> {
    async fn run(mut self, mut ending: Ending, tell: EventSink<'_>) -> Result<WatchReport> {
        loop {
            let readable = self.scan(tell).await?;
            let now = self.begun.elapsed();
            let since_first = now.saturating_sub(*self.first_poll.get_or_insert(now));
            if ending.newly_asked() {
                self.announce(ending.left(), tell).await;
            }
            if let Some(due) = self.state.next(now).filter(|_| readable && !ending.is_over()) {
                // The folder may be polled during the save.
                let seen = self.state.seen(&due.entry);
                let Some(done) = self.save(&due, &mut ending, tell).await? else { continue };
                // Where only a part is left, nothing shows that a handed-off copy is saved.
                let saved = matches!(done, Ok(Outcome::Saved(..) | Outcome::Kept(_)));
                self.note(&due, seen, done, tell)?;
                if saved {
                    tokio::select! {
                        () = self.watched.release(&due) => {}
                        () = ending.over() => {}
                    }
                }
                continue;
            }
            let done = if ending.asked() {
                ending.is_over() || (ending.lingered() && self.state.pending(now).is_empty())
            } else {
                self.watched.options.once
                    && (self.state.pending(now).is_empty()
                        || since_first > self.watched.options.settle + 2 * self.interval)
            };
            if done {
                let failed = self.first_error.take();
                let report = self.end(now, tell);
                return match failed {
                    // Unless it was saved at a later try.
                    Some((entry, error)) if report.unsaved.contains(&shown(entry.as_bytes())) => Err(error),
                    _ => Ok(report),
                };
            }
            ending.pause(self.interval).await;
        }
    }

    /// Reports a stop request, and the checkpoints to save in the time that is `left`.
    async fn announce(&mut self, left: Duration, tell: EventSink<'_>) {
        let (since, now) = (Instant::now(), self.begun.elapsed());
        self.state.hurry(now);
        // Limited, because a store that does not answer must not use up the remaining time.
        let _ = timeout(PROOF_MAX.min(left / 2), self.prove(now)).await;
        let pending = self.state.pending(now).into_iter().map(|(entry, _)| entry).collect();
        tell(WatchEvent::Stopping { seconds: left.saturating_sub(since.elapsed()).as_secs_f64(), pending });
    }

    /// Finds checkpoints that are in the repository already, so that they are not reported as unsaved: first those that need not be
    /// read.
    async fn prove(&mut self, now: Duration) {
        // A save in progress has the counters.
        let options = SaveOptions { progress: Progress::default(), ..self.watched.options.save.clone() };
        for evidence in [Evidence::Recorded, Evidence::RecordedOrRead] {
            let unproven = self.state.unproven(now);
            if unproven.is_empty() {
                return;
            }
            let Ok(state) = self.watched.repository.state().await else { return };
            for (entry, step) in unproven {
                let Ok(name) = format!("{}/step-{step}", self.watched.run).parse::<Name>() else { continue };
                if !state.refs.contains_key(&name) {
                    continue;
                }
                let (seen, path) = (self.state.seen(&entry), self.watched.dir.join(&entry));
                let compared = self.watched.repository.compare(&name, path, &options, evidence).await;
                if compared.is_ok_and(|likeness| likeness == Comparison::Same) {
                    self.state.saved(&entry, seen);
                }
            }
        }
    }

    /// Polls once; false if the folder could not be read.
    async fn scan(&mut self, tell: EventSink<'_>) -> Result<bool> {
        let mut scanner = self.scanner.take().unwrap_or_else(|| Scanner::new(self.watched.dir));
        let (scanner, scanned) = blocking(move || {
            let scanned = scanner.scan();
            Ok((scanner, scanned))
        })
        .await?;
        self.scanner = Some(scanner);
        match scanned {
            Ok(None) if self.watched.options.once && !self.watched.options.restore_latest => {
                Err(Error::not_found("there is no folder to watch").at(self.watched.dir.display()))
            }
            Ok(scan) => {
                self.unreadable = None;
                self.state.update(self.begun.elapsed(), scan).into_iter().for_each(tell);
                Ok(true)
            }
            Err(error) if self.watched.options.once => Err(error),
            Err(error) => {
                let failure = WatchFailure::from(&error);
                if self.unreadable.as_ref() != Some(&failure) {
                    tell(WatchEvent::Unreadable { failure: failure.clone() });
                    self.unreadable = Some(failure);
                }
                Ok(false)
            }
        }
    }

    /// Saves a checkpoint; None if there is no time left. When time is short, finished checkpoints are handed off first, and
    /// further ones while this one is saved.
    async fn save(
        &mut self,
        due: &NextSave,
        ending: &mut Ending,
        tell: EventSink<'_>,
    ) -> Result<Option<Result<Outcome>>> {
        let watched = self.watched;
        if watched.is_short() {
            tokio::select! {
                () = self.hand_off(tell) => {}
                () = ending.over() => return Ok(None),
            }
        }
        let stop = CancellationToken::new();
        let mut saving = pin!(watched.save(due, stop.clone()));
        loop {
            tokio::select! {
                done = &mut saving => return Ok(Some(done)),
                never = self.hand_off_repeatedly(tell) => return never,
                () = ending.moved_on() => {}
            }
            if ending.is_over() {
                break;
            }
            if ending.newly_asked() {
                self.announce(ending.left(), tell).await;
            }
        }
        if ending.at_once() {
            return Ok(None);
        }
        // Records stored data, so that the next save need not send it again.
        stop.cancel();
        match timeout(WINDING_UP, saving).await {
            Ok(Ok(outcome)) => Ok(Some(Ok(outcome))),
            Ok(Err(error)) => {
                // An earlier error is more informative than the lack of time.
                if error.kind() != ErrorKind::Cancelled || !self.failures.contains_key(&due.entry) {
                    self.failures.insert(due.entry.clone(), WatchFailure::from(&error));
                }
                Ok(None)
            }
            Err(_) => Ok(None),
        }
    }

    /// Once time is short, hands off finished checkpoints periodically. Ends only with an error of the watched folder.
    async fn hand_off_repeatedly<T>(&mut self, tell: EventSink<'_>) -> Result<T> {
        let Some(target) = &self.watched.options.handoff else { return pending().await };
        target.needed().await;
        loop {
            self.hand_off(tell).await;
            sleep(self.interval).await;
            self.scan(tell).await?;
        }
    }

    /// Hands off checkpoints that are finished and not saved, the latest step first.
    async fn hand_off(&mut self, tell: EventSink<'_>) {
        let Some(target) = &self.watched.options.handoff else { return };
        for due in self.state.finished(self.begun.elapsed()).into_iter().rev() {
            let Ok((path, name, options)) = self.watched.what(&due) else { continue };
            let sent = target.send(&UnsavedCheckpoint { path: &path, name: &name, labels: &options.labels }).await;
            let (entry, outcome) = (due.entry.clone(), format!("{sent:?}"));
            if self.handed_off.insert(due.entry, outcome.clone()).as_ref() == Some(&outcome) {
                continue;
            }
            tell(match sent {
                Ok(to) => WatchEvent::HandedOff { entry, to },
                Err(error) => WatchEvent::NotHandedOff { entry, error: format!("{error:?}") },
            });
        }
    }

    /// Handles the result of saving the observation `seen`.
    fn note(&mut self, due: &NextSave, seen: Vec<FileMark>, done: Result<Outcome>, tell: EventSink<'_>) -> Result<()> {
        let now = self.begun.elapsed();
        let entry = due.entry.clone();
        self.rest();
        match done {
            Ok(outcome) => {
                self.state.saved(&entry, seen);
                self.failures.remove(&entry);
                self.scanner.iter_mut().for_each(|scanner| scanner.rest(&entry));
                tell(match outcome {
                    Outcome::Saved(report, facts) => {
                        let metrics = facts.metrics().map(|(name, value)| (name.to_owned(), value)).collect();
                        self.saved += 1;
                        WatchEvent::Saved { entry, step: due.step, by: due.by.word(), metrics, report: *report }
                    }
                    Outcome::Kept(name) => WatchEvent::Kept { entry, name: name.to_string() },
                    Outcome::Remains => {
                        let reason = "it lacks files that are saved: it is taken to be on its way out".to_owned();
                        WatchEvent::PassedOver { entry, reason }
                    }
                    Outcome::Beside(first) => {
                        let reason = format!("{first} was saved as step {} when this was there already", due.step);
                        WatchEvent::PassedOver { entry, reason }
                    }
                });
            }
            Err(error) if matches!(error.kind(), ErrorKind::Usage | ErrorKind::Unsupported) => return Err(error),
            // A file changed or disappeared: the checkpoint was not complete. The next poll shows its state.
            Err(error) if error.kind().is_conflict() || error.kind() == ErrorKind::NotFound => {
                tracing::info!("{entry} is not saved yet: {error:?}");
                if let Some(wait) = self.state.disturbed(&entry, now) {
                    self.failed(entry, &error, wait, tell);
                }
            }
            // The others are saved first.
            Err(error) if self.watched.options.once => {
                self.state.failed(&entry, now);
                self.failures.insert(entry.clone(), WatchFailure::from(&error));
                self.first_error.get_or_insert((entry, error));
            }
            Err(error) => {
                let wait = self.state.failed(&entry, now);
                self.failed(entry, &error, wait, tell);
            }
        }
        Ok(())
    }

    /// Reports a failed save that is tried again after `wait`.
    fn failed(&mut self, entry: String, error: &Error, wait: Duration, tell: EventSink<'_>) {
        let failure = WatchFailure::from(error);
        self.failures.insert(entry.clone(), failure.clone());
        tell(WatchEvent::Failed { entry, failure, retry_seconds: wait.as_secs_f64() });
    }

    /// Resets the progress, because nothing is being saved.
    fn rest(&self) {
        self.watched.options.save.progress.phase("watching", 0);
    }

    fn end(self, now: Duration, tell: EventSink<'_>) -> WatchReport {
        let mut report = WatchReport { saved: self.saved, ..WatchReport::default() };
        let WatchedRun { dir, options, .. } = self.watched;
        if options.once && self.state.is_empty() {
            let own_name = dir.file_name().and_then(|name| name.to_str());
            let is_checkpoint = own_name.is_some_and(is_checkpoint);
            tell(WatchEvent::NothingFound { dir: dir.display().to_string(), is_checkpoint });
        }
        for (entry, reason) in self.state.pending(now) {
            report.unsaved.push(shown(entry.as_bytes()));
            report.failure = self.failures.get(&entry).cloned().or(report.failure);
            tell(WatchEvent::Unsaved { entry, reason: reason.to_owned() });
        }
        for step in self.state.parted() {
            report.unsaved.push(shown(step.first().as_bytes()));
            report.parted += 1;
            report.failure.get_or_insert_with(|| step.failure());
            tell(WatchEvent::Unsaved { entry: step.first().to_owned(), reason: step.reason() });
        }
        report
    }
}

impl WatchedRun<'_> {
    /// True if time is short and there is a handoff target.
    fn is_short(self) -> bool {
        self.options.handoff.as_ref().is_some_and(|target| target.needed().now_or_never().is_some())
    }

    /// Path, name and options to save a checkpoint with.
    fn what(self, due: &NextSave) -> Result<(PathBuf, Name, SaveOptions)> {
        let name = format!("{}/step-{}", self.run, due.step).parse()?;
        // Follows no link: the owner of the folder could replace the checkpoint by one.
        let mut options = SaveOptions { root_link: RootLink::Refuse, ..self.options.save.clone() };
        options.labels.insert(ENTRY_LABEL.to_owned(), due.entry.clone());
        if let Some(tracker) = self.tracker(due) {
            options.labels.insert(TRACKER_LABEL.to_owned(), tracker.name().to_owned());
        }
        Ok((self.dir.join(&due.entry), name, options))
    }

    /// Saves a checkpoint, unless it is in the repository. Starts again if others save the same step meanwhile.
    async fn save(self, due: &NextSave, stop: CancellationToken) -> Result<Outcome> {
        let (_, name, _) = self.what(due)?;
        for _ in 1..RACES {
            let before = self.version(&name).await?;
            match self.save_once(due, &stop).await {
                Err(error) if error.kind().is_conflict() && self.version(&name).await? != before => {
                    tracing::info!("{name} was saved by others meanwhile, which this save looks at: {error:?}");
                }
                done => return done,
            }
        }
        self.save_once(due, &stop).await
    }

    /// Version of a name; none if it does not exist.
    async fn version(self, name: &Name) -> Result<Option<u64>> {
        Ok(self.repository.state().await?.refs.get(name).map(|value| value.version))
    }

    async fn save_once(self, due: &NextSave, stop: &CancellationToken) -> Result<Outcome> {
        let (path, name, mut options) = self.what(due)?;
        options.stop = stop.clone();
        let state = self.repository.state().await?;
        if !due.again && state.refs.contains_key(&name) {
            match self.repository.compare(&name, path.clone(), &options, Evidence::RecordedOrRead).await {
                Ok(Comparison::Same) => return Ok(Outcome::Kept(name)),
                Ok(Comparison::Less) => return Ok(Outcome::Remains),
                Ok(Comparison::Other | Comparison::Unread) => {
                    if let Some(first) = self.saved_beside(due, &name).await {
                        return Ok(Outcome::Beside(first));
                    }
                }
                // A file changed while it was read, or there is no time left.
                Err(error) if error.kind().is_conflict() || error.kind() == ErrorKind::Cancelled => return Err(error),
                // Saving again repairs it.
                Err(error) => tracing::info!("{name} is saved again: {error:?}"),
            }
        }
        let (folder, step, wanted) = (path.clone(), due.step, self.options.metrics.clone());
        options.facts = blocking(move || Ok(with_logged(&folder, step, &wanted, options.facts))).await?;
        let report = Box::pin(self.repository.save(&path, &name, &options)).await?;
        Ok(Outcome::Saved(Box::new(report), options.facts))
    }

    /// Entry that was saved as the step `name` when this one, which is no later version of it, was there already.
    async fn saved_beside(self, due: &NextSave, name: &Name) -> Option<String> {
        let saved = self.repository.saved(name).await.ok()?;
        let first = saved.manifest.labels.get(ENTRY_LABEL)?;
        let ((base, number), (own_base, own_number)) = (version(first), version(&due.entry));
        let is_later = base == own_base && number <= own_number;
        (!is_later && due.newest <= saved.value.saved).then(|| first.clone())
    }

    /// Tracker file by which its framework finds it, if there is one.
    fn tracker(self, due: &NextSave) -> Option<Tracker> {
        Tracker::ALL.into_iter().find(|tracker| tracker.covers(&due.entry) && self.dir.join(tracker.name()).is_file())
    }

    /// Releases the handed-off copies of a saved checkpoint.
    async fn release(self, due: &NextSave) {
        if let (Some(target), Ok((_, name, _))) = (&self.options.handoff, self.what(due)) {
            target.release(&name).await;
        }
    }
}
