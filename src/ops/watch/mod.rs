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
mod look;
mod resume;
mod same;
mod settle;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use self::board::{Board, Due};
use self::candidate::Tracker;
use self::ending::Ending;
pub use self::ending::Stop;
pub use self::events::WatchEvent;
use self::look::Looker;
use self::resume::{ENTRY_LABEL, TRACKER_LABEL};
use self::same::{Likeness, compare};
use self::settle::Pace;
use super::save::{SaveOptions, SaveReport};
use super::shown;
use crate::error::{Error, ErrorKind, Result};
use crate::repository::{Name, Repository};
use crate::tree::Rules;
use crate::work::blocking;

/// Looks while a checkpoint settles, at least.
const LOOKS_TO_SETTLE: u32 = 5;
/// The longest time between two looks.
const INTERVAL_MAX: Duration = Duration::from_secs(2);

/// How to watch.
#[derive(Clone, Debug)]
pub struct WatchOptions {
    /// How long nothing in a checkpoint may change before it is taken to be whole, where its framework does not say so; a
    /// fifth of that where it does.
    pub settle: Duration,
    /// Restore the latest step first, into a folder that holds no checkpoint.
    pub restore_latest: bool,
    /// Save what is finished, then end.
    pub once: bool,
    /// How each step is saved; labels of the watch's own are added.
    pub save: SaveOptions,
    /// Says when to stop; a sender that is dropped never does.
    pub stop: tokio::sync::watch::Receiver<Stop>,
}

/// What a watch did.
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
                () = ending.over() => return Err(Error::cancelled("interrupted while the latest step was restored")
                    .at(dir.display())
                    .cure("run the same command again to resume")),
            }
        } else {
            None
        };
        let pace = Pace { quiet: options.settle, marked: options.settle / LOOKS_TO_SETTLE };
        let watching = Watching {
            repository: self,
            dir,
            run,
            options,
            board: Board::new(dir.display().to_string(), pace, restored),
            looker: Some(Looker::new(dir)),
            interval: pace.marked.clamp(Duration::from_millis(5), INTERVAL_MAX),
            begun: Instant::now(),
            unreadable: None,
            saved: 0,
        };
        watching.go_on(ending, tell).await
    }
}

/// A watch under way.
struct Watching<'a> {
    repository: &'a Repository,
    dir: &'a Path,
    run: &'a Name,
    options: &'a WatchOptions,
    board: Board,
    /// Elsewhere while it looks.
    looker: Option<Looker>,
    interval: Duration,
    begun: Instant,
    /// The trouble with the folder that was told last.
    unreadable: Option<String>,
    saved: u64,
}

/// Where what is told goes.
type Tell<'a> = &'a mut (dyn FnMut(WatchEvent) + Send);

/// What came of a checkpoint that was due.
enum Outcome {
    Saved(SaveReport),
    /// It is there already, under this name.
    Kept(Name),
    /// What is there is what is left of it.
    Remains,
}

impl Watching<'_> {
    async fn go_on(mut self, mut ending: Ending, tell: Tell<'_>) -> Result<WatchReport> {
        loop {
            let readable = self.look(tell).await?;
            let now = self.begun.elapsed();
            if ending.newly_asked() {
                self.board.hurry(now);
                let pending = self.board.pending(now).into_iter().map(|(entry, _)| entry).collect();
                tell(WatchEvent::Stopping { seconds: ending.left().as_secs_f64(), pending });
            }
            if let Some(due) = self.board.next(now).filter(|_| readable && !ending.is_over()) {
                tokio::select! {
                    done = self.save(&due) => self.note(&due, done, tell)?,
                    () = ending.over() => {}
                }
                continue;
            }
            let done = if ending.asked() {
                ending.is_over() || (ending.lingered() && self.board.pending(now).is_empty())
            } else {
                self.options.once
                    && (self.board.pending(now).is_empty() || now > self.options.settle + 2 * self.interval)
            };
            if done {
                return Ok(self.end(now, tell));
            }
            ending.pause(self.interval).await;
        }
    }

    /// Looks once; false if the folder could not be read.
    async fn look(&mut self, tell: Tell<'_>) -> Result<bool> {
        let mut looker = self.looker.take().unwrap_or_else(|| Looker::new(self.dir));
        let (looker, looked) = blocking(move || {
            let looked = looker.look();
            Ok((looker, looked))
        })
        .await?;
        self.looker = Some(looker);
        match looked {
            Ok(None) if self.options.once && !self.options.restore_latest => {
                Err(Error::not_found("there is no folder to watch").at(self.dir.display()))
            }
            Ok(look) => {
                self.unreadable = None;
                self.board.look(self.begun.elapsed(), look).into_iter().for_each(tell);
                Ok(true)
            }
            Err(error) if self.options.once => Err(error),
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

    /// Saves a checkpoint, unless the repository holds it.
    async fn save(&self, due: &Due) -> Result<Outcome> {
        let path = self.dir.join(&due.entry);
        let state = self.repository.state().await?;
        let name: Name = format!("{}/step-{}", self.run, due.step).parse()?;
        if !due.again && state.refs.contains_key(&name) {
            match self.compare(&name, path.clone()).await {
                Ok(Likeness::Same) => return Ok(Outcome::Kept(name)),
                Ok(Likeness::Less) => return Ok(Outcome::Remains),
                Ok(Likeness::Other) => {}
                // Saving again is what heals it.
                Err(error) => tracing::info!("{name} is saved again: {error:?}"),
            }
        }
        let mut options = self.options.save.clone();
        options.labels.insert(ENTRY_LABEL.to_owned(), due.entry.clone());
        if let Some(tracker) = self.tracker(due) {
            options.labels.insert(TRACKER_LABEL.to_owned(), tracker.name().to_owned());
        }
        Box::pin(self.repository.save(&path, &name, &options)).await.map(Outcome::Saved)
    }

    async fn compare(&self, name: &Name, path: PathBuf) -> Result<Likeness> {
        let saved = self.repository.saved(name).await?;
        let skip = self.repository.store().directory().map(Path::to_path_buf).into_iter().collect();
        let rules = Rules { excludes: self.options.save.exclude.clone(), skip };
        blocking(move || compare(&path, &rules, &saved.manifest)).await
    }

    /// The file that its framework will look for to find it, if there is one.
    fn tracker(&self, due: &Due) -> Option<Tracker> {
        Tracker::ALL.into_iter().find(|tracker| tracker.covers(&due.entry) && self.dir.join(tracker.name()).is_file())
    }

    /// Takes in what came of a save.
    fn note(&mut self, due: &Due, done: Result<Outcome>, tell: Tell<'_>) -> Result<()> {
        let now = self.begun.elapsed();
        let entry = due.entry.clone();
        match done {
            Ok(outcome) => {
                self.board.saved(&entry);
                self.looker.iter_mut().for_each(|looker| looker.rest(&entry));
                tell(match outcome {
                    Outcome::Saved(report) => {
                        self.saved += 1;
                        WatchEvent::Saved { entry, step: due.step, by: due.by.word(), report }
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
            Err(error) if self.options.once => return Err(error),
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

fn failed(entry: String, error: &Error, wait: Duration) -> WatchEvent {
    WatchEvent::Failed { entry, error: format!("{error:?}"), retry_seconds: wait.as_secs_f64() }
}
