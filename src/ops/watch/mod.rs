//! Watch: looks at a folder until it is told to stop, and saves each checkpoint that a framework has finished as a step of a
//! run.
//!
//! ```text
//! look (metadata only) -> board: which are finished, which of them the repository lacks -> save, lowest step first -> look ...
//! ```
//!
//! `candidate` and `settle` say what is a checkpoint and when it is whole, `board` what to do next; they do no I/O. `look`
//! looks, and this file carries out.

mod board;
mod candidate;
mod ending;
mod events;
mod handoff;
mod look;
mod metrics;
mod resume;
mod same;
mod settle;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::future::pending;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt as _;
use tokio::time::{sleep, timeout};

use self::board::{Board, Due};
use self::candidate::Tracker;
pub use self::candidate::is_checkpoint;
use self::ending::Ending;
pub use self::ending::Stop;
pub use self::events::WatchEvent;
pub use self::handoff::{HandoffTarget, Unsaved};
use self::look::Looker;
pub use self::metrics::LoggedMetric;
use self::metrics::with_logged;
use self::resume::{ENTRY_LABEL, TRACKER_LABEL};
use self::same::{Likeness, compare};
use self::settle::{FileMark, Pace};
use super::save::{RootLink, SaveOptions, SaveReport};
use super::shown;
use crate::error::{Error, ErrorKind, Result};
use crate::repository::log::StepFacts;
use crate::repository::{Name, Repository};
use crate::tree::Rules;
use crate::work::blocking;

/// Looks while a checkpoint settles, at least.
const LOOKS_TO_SETTLE: u32 = 5;
/// The longest time between two looks.
const INTERVAL_MAX: Duration = Duration::from_secs(2);

/// The longest time to find out what is saved already once it is asked to stop.
const PROOF_MAX: Duration = Duration::from_secs(2);

/// Options of a watch.
#[derive(Clone, Debug)]
pub struct WatchOptions {
    /// Time without any change after which a checkpoint is taken as complete, where its framework has no marker; a fifth of that
    /// where it does.
    pub settle: Duration,
    /// Restore the latest step first, into a folder that holds no checkpoint.
    pub restore_latest: bool,
    /// Save what is finished, then end.
    pub once: bool,
    /// Options of each save; labels of the watch's own are added.
    pub save: SaveOptions,
    /// Numbers of a checkpoint's `trainer_state.json` that become metrics of its step, each as it was logged last; if none, all
    /// that were logged at this very step. Metrics of `save` take precedence.
    pub metrics: Vec<LoggedMetric>,
    /// Target for checkpoints when time is short.
    pub handoff: Option<Arc<dyn HandoffTarget>>,
    /// Says when to stop; a sender that is dropped never does.
    pub stop: tokio::sync::watch::Receiver<Stop>,
}

/// Result of a watch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WatchReport {
    /// Checkpoints saved, counting those that were saved again.
    pub saved: u64,
    /// Checkpoints that it would have saved, had it not ended.
    pub unsaved: Vec<String>,
}

impl Repository {
    /// Watches the folder `dir`, which may come and go, and saves each finished checkpoint in it as `run`/step-N. Tells what
    /// it does. Ends when `options.stop` says so, or with `options.once`.
    ///
    /// # Errors
    /// Usage, for what no waiting can change. With `once`, whatever a save fails with; otherwise a save that fails is told
    /// and tried again. Whatever `restore_latest` fails with: nothing must train from the start because a store was away.
    ///
    /// # Cancel safety
    /// Safe: as a save's and a restore's.
    pub async fn watch(
        &self,
        dir: &Path,
        run: &Name,
        options: &WatchOptions,
        tell: &mut (dyn FnMut(WatchEvent) + Send),
    ) -> Result<WatchReport> {
        tell(WatchEvent::Watching { dir: dir.display().to_string(), run: run.to_string() });
        let mut ending = Ending::new(options.stop.clone(), options.settle);
        let restored = if options.restore_latest {
            tokio::select! {
                restored = self.resume(dir, run, tell) => restored?,
                // Nothing that is brought back now would be used.
                () = ending.begun() => return Err(Error::cancelled("interrupted while the latest step was restored")
                    .at(dir.display())
                    .help("run the same command again to resume")),
            }
        } else {
            None
        };
        let pace = Pace { quiet: options.settle, marked: options.settle / LOOKS_TO_SETTLE };
        let watching = Watching {
            scene: Scene { repository: self, dir, run, options },
            board: Board::new(dir.display().to_string(), pace, restored),
            looker: Some(Looker::new(dir)),
            interval: pace.marked.clamp(Duration::from_millis(5), INTERVAL_MAX),
            begun: Instant::now(),
            unreadable: None,
            handed_off: BTreeMap::new(),
            saved: 0,
        };
        watching.go_on(ending, tell).await
    }
}

/// Folder that is watched, and options of its saves.
#[derive(Clone, Copy)]
struct Scene<'a> {
    repository: &'a Repository,
    dir: &'a Path,
    run: &'a Name,
    options: &'a WatchOptions,
}

/// A watch under way.
struct Watching<'a> {
    scene: Scene<'a>,
    board: Board,
    /// Elsewhere while it looks.
    looker: Option<Looker>,
    interval: Duration,
    begun: Instant,
    /// The trouble with the folder that was told last.
    unreadable: Option<String>,
    /// Last reported holders of checkpoints.
    handed_off: BTreeMap<String, String>,
    saved: u64,
}

/// Callback for events.
type Tell<'a> = &'a mut (dyn FnMut(WatchEvent) + Send);

/// Outcome of a checkpoint that was due.
enum Outcome {
    /// With these facts.
    Saved(Box<SaveReport>, StepFacts),
    /// It is there already, under this name.
    Kept(Name),
    /// Only remains of it are there.
    Remains,
}

impl Watching<'_> {
    async fn go_on(mut self, mut ending: Ending, tell: Tell<'_>) -> Result<WatchReport> {
        loop {
            let readable = self.look(tell).await?;
            let now = self.begun.elapsed();
            if ending.newly_asked() {
                self.board.hurry(now);
                // A store that does not answer must not take the time that is left.
                let _ = timeout(PROOF_MAX, self.prove(now)).await;
                let pending = self.board.pending(now).into_iter().map(|(entry, _)| entry).collect();
                tell(WatchEvent::Stopping { seconds: ending.left().as_secs_f64(), pending });
            }
            if let Some(due) = self.board.next(now).filter(|_| readable && !ending.is_over()) {
                // It may be looked at again while it is saved.
                let seen = self.board.seen(&due.entry);
                let Some(done) = self.save(&due, &mut ending, tell).await? else { continue };
                let saved = done.is_ok();
                self.note(&due, (seen, done), tell)?;
                if saved {
                    tokio::select! {
                        () = self.scene.release(&due) => {}
                        () = ending.over() => {}
                    }
                }
                continue;
            }
            let done = if ending.asked() {
                ending.is_over() || (ending.lingered() && self.board.pending(now).is_empty())
            } else {
                self.scene.options.once
                    && (self.board.pending(now).is_empty() || now > self.scene.options.settle + 2 * self.interval)
            };
            if done {
                return Ok(self.end(now, tell));
            }
            ending.pause(self.interval).await;
        }
    }

    /// Finds checkpoints that the repository holds already, though their turn has not come, so that they are not named as unsaved.
    async fn prove(&mut self, now: Duration) {
        let unproven = self.board.unproven(now);
        if unproven.is_empty() {
            return;
        }
        let Ok(state) = self.scene.repository.state().await else { return };
        for (entry, step) in unproven {
            let Ok(name) = format!("{}/step-{step}", self.scene.run).parse::<Name>() else { continue };
            if !state.refs.contains_key(&name) {
                continue;
            }
            let (seen, path) = (self.board.seen(&entry), self.scene.dir.join(&entry));
            let compared = self.scene.repository.compare(&name, path, &self.scene.options.save.exclude).await;
            if compared.is_ok_and(|likeness| likeness == Likeness::Same) {
                self.board.saved(&entry, seen);
            }
        }
    }

    /// Looks once; false if the folder could not be read.
    async fn look(&mut self, tell: Tell<'_>) -> Result<bool> {
        let mut looker = self.looker.take().unwrap_or_else(|| Looker::new(self.scene.dir));
        let (looker, looked) = blocking(move || {
            let looked = looker.look();
            Ok((looker, looked))
        })
        .await?;
        self.looker = Some(looker);
        match looked {
            Ok(None) if self.scene.options.once && !self.scene.options.restore_latest => {
                Err(Error::not_found("there is no folder to watch").at(self.scene.dir.display()))
            }
            Ok(look) => {
                self.unreadable = None;
                self.board.look(self.begun.elapsed(), look).into_iter().for_each(tell);
                Ok(true)
            }
            Err(error) if self.scene.options.once => Err(error),
            Err(error) => {
                let error = format!("{error:?}");
                if self.unreadable.as_ref() != Some(&error) {
                    tell(WatchEvent::Unreadable { error: error.clone() });
                    self.unreadable = Some(error);
                }
                Ok(false)
            }
        }
    }

    /// Saves a checkpoint; None if there is no time left. When time is short, finished checkpoints are handed off first, and further ones
    /// while this one is saved.
    async fn save(&mut self, due: &Due, ending: &mut Ending, tell: Tell<'_>) -> Result<Option<Result<Outcome>>> {
        let scene = self.scene;
        if scene.is_short() {
            tokio::select! {
                () = self.hand_off(tell) => {}
                () = ending.over() => return Ok(None),
            }
        }
        let saving = scene.save(due);
        tokio::select! {
            done = saving => Ok(Some(done)),
            never = self.hand_off_repeatedly(tell) => never,
            () = ending.over() => Ok(None),
        }
    }

    /// Once time is short, hands off finished checkpoints periodically. Ends only with an error of the watched folder.
    async fn hand_off_repeatedly<T>(&mut self, tell: Tell<'_>) -> Result<T> {
        let Some(target) = &self.scene.options.handoff else { return pending().await };
        target.needed().await;
        loop {
            self.hand_off(tell).await;
            sleep(self.interval).await;
            self.look(tell).await?;
        }
    }

    /// Hands off checkpoints that are finished and not saved, the latest step first.
    async fn hand_off(&mut self, tell: Tell<'_>) {
        let Some(target) = &self.scene.options.handoff else { return };
        for due in self.board.finished(self.begun.elapsed()).into_iter().rev() {
            let Ok((path, name, options)) = self.scene.what(&due) else { continue };
            let sent = target.send(&Unsaved { path: &path, name: &name, labels: &options.labels }).await;
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

    /// Takes in what came of saving what was `seen`.
    fn note(&mut self, due: &Due, (seen, done): (Vec<FileMark>, Result<Outcome>), tell: Tell<'_>) -> Result<()> {
        let now = self.begun.elapsed();
        let entry = due.entry.clone();
        match done {
            Ok(outcome) => {
                self.board.saved(&entry, seen);
                self.looker.iter_mut().for_each(|looker| looker.rest(&entry));
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
                });
            }
            Err(error) if matches!(error.kind(), ErrorKind::Usage | ErrorKind::Unsupported) => return Err(error),
            // A file changed or vanished: its writer was not done after all. The next look tells.
            Err(error) if matches!(error.kind(), ErrorKind::Conflict | ErrorKind::NotFound) => {
                tracing::info!("{entry} is not saved yet: {error:?}");
                if let Some(wait) = self.board.disturbed(&entry, now) {
                    tell(failed(entry, &error, wait));
                }
            }
            Err(error) if self.scene.options.once => return Err(error),
            Err(error) => {
                let wait = self.board.failed(&entry, now);
                tell(failed(entry, &error, wait));
            }
        }
        Ok(())
    }

    fn end(self, now: Duration, tell: Tell<'_>) -> WatchReport {
        let mut report = WatchReport { saved: self.saved, unsaved: Vec::new() };
        for (entry, reason) in self.board.pending(now) {
            report.unsaved.push(shown(entry.as_bytes()));
            tell(WatchEvent::Unsaved { entry, reason: reason.to_owned() });
        }
        report
    }
}

impl Scene<'_> {
    /// True if time is short and there is a handoff target.
    fn is_short(self) -> bool {
        self.options.handoff.as_ref().is_some_and(|target| target.needed().now_or_never().is_some())
    }

    /// Path, name and options to save a checkpoint with.
    fn what(self, due: &Due) -> Result<(PathBuf, Name, SaveOptions)> {
        let name = format!("{}/step-{}", self.run, due.step).parse()?;
        // The owner of the folder may put a link in the place of the checkpoint.
        let mut options = SaveOptions { root_link: RootLink::Refuse, ..self.options.save.clone() };
        options.labels.insert(ENTRY_LABEL.to_owned(), due.entry.clone());
        if let Some(tracker) = self.tracker(due) {
            options.labels.insert(TRACKER_LABEL.to_owned(), tracker.name().to_owned());
        }
        Ok((self.dir.join(&due.entry), name, options))
    }

    /// Saves a checkpoint, unless the repository holds it.
    async fn save(self, due: &Due) -> Result<Outcome> {
        let (path, name, mut options) = self.what(due)?;
        let state = self.repository.state().await?;
        if !due.again && state.refs.contains_key(&name) {
            match self.repository.compare(&name, path.clone(), &options.exclude).await {
                Ok(Likeness::Same) => return Ok(Outcome::Kept(name)),
                Ok(Likeness::Less) => return Ok(Outcome::Remains),
                Ok(Likeness::Other) => {}
                // Saving again is what heals it.
                Err(error) => tracing::info!("{name} is saved again: {error:?}"),
            }
        }
        let (folder, step, wanted) = (path.clone(), due.step, self.options.metrics.clone());
        options.facts = blocking(move || Ok(with_logged(&folder, step, &wanted, options.facts))).await?;
        let report = Box::pin(self.repository.save(&path, &name, &options)).await?;
        Ok(Outcome::Saved(Box::new(report), options.facts))
    }

    /// The file that its framework will look for to find it, if there is one.
    fn tracker(self, due: &Due) -> Option<Tracker> {
        Tracker::ALL.into_iter().find(|tracker| tracker.covers(&due.entry) && self.dir.join(tracker.name()).is_file())
    }

    /// Releases the handed-off copies of a saved checkpoint.
    async fn release(self, due: &Due) {
        if let (Some(target), Ok((_, name, _))) = (&self.options.handoff, self.what(due)) {
            target.release(&name).await;
        }
    }
}

impl Repository {
    /// Whether the checkpoint at `path` is what `name` stands for, by sizes and modification times.
    ///
    /// # Errors
    /// Not found, if there is no such name; the store's, the file system's.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn holds(&self, name: &Name, path: &Path) -> Result<bool> {
        Ok(self.compare(name, path.to_path_buf(), &[]).await? == Likeness::Same)
    }

    async fn compare(&self, name: &Name, path: PathBuf, excludes: &[String]) -> Result<Likeness> {
        let saved = self.saved(name).await?;
        let skip = self.store().directory().map(Path::to_path_buf).into_iter().collect();
        let rules = Rules { excludes: excludes.to_vec(), skip, no_follow: true, ..Rules::default() };
        blocking(move || compare(&path, &rules, &saved.manifest)).await
    }
}

fn failed(entry: String, error: &Error, wait: Duration) -> WatchEvent {
    WatchEvent::Failed { entry, error: format!("{error:?}"), retry_seconds: wait.as_secs_f64() }
}
