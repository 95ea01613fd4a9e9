//! Work that somebody asks for, or the agent does by itself, begun as transfers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use ulid::Ulid;

use super::config::Watched;
use super::custody::{self, Announced, Held};
use super::house::House;
use super::transfers::{About, Entry, Trouble};
use super::view::Kind;
use crate::error::{Error, ErrorKind, Result};
use crate::ops::{self, Pinning, Refuge, RestoreOptions, SaveOptions, Stop, WarmOptions};
use crate::ops::{WatchEvent, WatchOptions, WatchReport};
use crate::progress::Progress;
use crate::repository::{Name, Repository, Selector};
use crate::transfer::exchange::{Exchange, FetchPolicy, From};
use crate::transfer::identity::Identity;
use crate::transfer::protocol::Priority;
use crate::work::blocking;

/// Pause before the agent's own work is tried again after it failed.
pub(super) const AGAIN_AFTER: Duration = Duration::from_secs(5);

/// Time for a watch that is cut off to name what is not saved.
const NAMING: Duration = Duration::from_secs(1);

/// Name to restore, and its destination.
#[derive(Debug)]
pub(super) struct Restoring {
    pub(super) name: Selector,
    /// Only this file or folder of it.
    pub(super) below: Option<String>,
    pub(super) to: PathBuf,
    pub(super) overwrite: bool,
    pub(super) delete: bool,
    /// Only what these patterns take of it, if there are any.
    pub(super) only: Vec<String>,
}

/// Name to warm, and how.
#[derive(Debug)]
pub(super) struct Warming {
    pub(super) name: Selector,
    /// Only this file or folder of it.
    pub(super) below: Option<String>,
    /// Whether it is for later, or somebody waits for it.
    pub(super) kind: Kind,
    /// Sources of missing chunks.
    pub(super) from: From,
    /// Read from the repository what that place lacks.
    pub(super) or_repository: bool,
    pub(super) pin: Option<Pinning>,
    /// Only find out what is lacking.
    pub(super) dry_run: bool,
    /// The other agent that asks, if one does.
    pub(super) caller: Option<Identity>,
}

/// Begins to bring what a name stands for, or a part of it, into the cache. Another agent may ask for what it may read.
///
/// # Errors
/// As [`Transfers::begin`](super::transfers::Transfers::begin); not found, for an agent without a cache or the repository.
pub(super) fn warm(house: &House, repository: Option<&str>, warming: Warming) -> Result<Arc<Entry>> {
    let Warming { name, below, kind, from, or_repository, pin, dry_run, caller } = warming;
    let exchange = Arc::clone(house.exchange()?);
    let repository = house.origin(repository)?.clone();
    let called = below.as_ref().map_or_else(|| name.to_string(), |below| format!("{name}:{below}"));
    let about = About { caller: caller.clone(), ..about(kind, &called, &repository) };
    let priority = if kind == Kind::Fetch { Priority::Restore } else { Priority::Warm };
    house.transfers.begin(about, move |progress| async move {
        let name = resolve(&exchange, &repository, caller.as_ref(), &name).await?;
        let policy = FetchPolicy { from, or_repository, priority };
        let options = WarmOptions { below: below.map(String::into_bytes), policy, pin, dry_run, progress };
        report(&Box::pin(ops::warm(&exchange, &repository, &name, &options)).await?)
    })
}

/// The name that `selector` stands for. Another agent chooses among what it may read: rights are decided before anything is looked
/// up, so what it may not read is to it what is not there.
///
/// # Errors
/// Not found, for a name or run that is not there, or that another agent may not read.
///
/// # Cancel safety
/// Safe: it only reads.
pub(super) async fn resolve(
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

/// Begins to restore.
///
/// # Errors
/// As [`warm`].
pub(super) fn restore(house: &House, repository: Option<&str>, restoring: Restoring) -> Result<Arc<Entry>> {
    let repository = house.repository(repository)?.clone();
    house.transfers.begin(about(Kind::Restore, &restoring.name, &repository), move |progress| async move {
        let Restoring { name, below, to, overwrite, delete, only } = restoring;
        let options = RestoreOptions { overwrite, delete, only, progress, ..RestoreOptions::default() };
        let name = repository.resolve(&name).await?;
        let below = below.as_ref().map(String::as_bytes);
        report(&Box::pin(repository.restore(&name, below, &to, &options)).await?)
    })
}

/// Begins to save what another agent gave into custody as `id`, which lies at `path`: under its name, or, if somebody saved something else
/// under that, under another one. Nothing is replaced.
///
/// # Errors
/// As [`warm`].
pub(super) fn deliver(house: &House, id: Ulid, held: &Held, path: &Path) -> Result<Arc<Entry>> {
    let Announced { name, repository, labels, .. } = held.what.clone();
    let repository = house.repository(Some(&repository.to_string()))?.clone();
    // The giver may not see the report: it would tell what the repository holds.
    let about = about(Kind::Save, &name, &repository);
    let (path, names) = (path.to_owned(), custody::names(&name, &held.from, id)?);
    // The files are in a folder beside what is said of them.
    let folder = path.ancestors().nth(2).map(Path::to_path_buf);
    house.transfers.begin_stoppable(about, move |progress, stop| async move {
        let modes = match folder {
            Some(folder) => blocking(move || custody::read_modes(&folder)).await?,
            None => BTreeMap::new(),
        };
        let expected = ops::Expected::Nothing;
        let options =
            SaveOptions { labels, modes: Arc::new(modes), progress, stop, expected, ..SaveOptions::default() };
        for name in &names {
            if repository.state().await?.refs.contains_key(name) {
                if repository.holds(name, &path).await.unwrap_or(false) {
                    return report(&serde_json::json!({ "name": name, "saved": "already" }));
                }
                tracing::warn!("{name} is something else already: what was in custody is saved under another name");
                continue;
            }
            match Box::pin(repository.save(&path, name, &options)).await {
                // Somebody was quicker.
                Err(error) if error.kind() == ErrorKind::Conflict => {}
                saved => return report(&saved?),
            }
        }
        Err(Error::conflict("every name for what was in custody is taken").at(&names[0]))
    })
}

/// Starts to watch a folder: restores the run's latest step if asked to, then saves the checkpoints that a training writes, until the agent
/// is asked to end. A watch that fails starts again. When time is short checkpoints go to `refuge` first. The token is cancelled once the
/// latest step is restored, or nothing needs to be.
///
/// # Errors
/// As [`warm`].
pub(super) fn watch(house: &House, watched: Watched, refuge: Option<Arc<dyn Refuge>>) -> Result<CancellationToken> {
    let repository = house.repository(None)?.clone();
    let stop = house.stop.subscribe();
    let restored = CancellationToken::new();
    let watching = Watching {
        watched,
        stop,
        restored: restored.clone(),
        saved: Vec::new(),
        fates: BTreeMap::new(),
        trouble: Trouble::default(),
    };
    let about = about(Kind::Watch, &watching.watched.run, &repository);
    house.transfers.begin_lasting(about, move |progress, trouble, stopped| async move {
        let watching = Watching { trouble, ..watching };
        let ending = watching.stop.clone();
        let stopped = async {
            stopped.cancelled().await;
            if *ending.borrow() != Stop::No {
                tokio::time::sleep(NAMING).await;
            }
        };
        tokio::select! {
            ended = watching.run(repository, refuge, progress) => ended,
            () = stopped => Err(Error::cancelled("watch was stopped")),
        }
    })?;
    Ok(restored)
}

/// A watched folder, across watches that failed.
struct Watching {
    watched: Watched,
    stop: watch::Receiver<Stop>,
    /// Cancelled once the latest step is restored, or nothing needs to be.
    restored: CancellationToken,
    saved: Vec<String>,
    /// Fates of checkpoints that were handed off, or refused, when time was short.
    fates: BTreeMap<String, String>,
    /// Failures after which it tries again.
    trouble: Trouble,
}

impl Watching {
    async fn run(
        mut self,
        repository: Repository,
        refuge: Option<Arc<dyn Refuge>>,
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
                refuge: refuge.clone(),
                stop: self.stop.clone(),
            };
            let watched = Box::pin(repository.watch(&folder, &run, &options, &mut |event| self.note(event))).await;
            match watched {
                Ok(report) => return self.end(&report),
                // It ended while it restored: what the folder holds is still to be saved, or named.
                Err(_) if options.restore_latest && *stop.borrow() != Stop::No => {}
                Err(error) if stopping => return Err(error),
                Err(error) => {
                    tracing::warn!(folder = %folder.display(), "watch failed, starts again: {error:?}");
                    self.trouble.add("", format!("watch failed, starts again: {error:?}"));
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
                self.trouble.add(entry, message);
            }
            WatchEvent::Unreadable { error } => {
                tracing::warn!(run = %self.watched.run, "folder cannot be read: {error}");
                self.trouble.add("", format!("folder cannot be read: {error}"));
            }
            WatchEvent::Saved { entry, .. } | WatchEvent::Kept { entry, .. } | WatchEvent::Gone { entry } => {
                tracing::info!(run = %self.watched.run, ?event, "watch");
                self.trouble.over(entry);
                self.trouble.over("");
            }
            _ => tracing::info!(run = %self.watched.run, ?event, "watch"),
        }
        match event {
            WatchEvent::Restored { .. } | WatchEvent::NotRestored { .. } => self.restored.cancel(),
            WatchEvent::Saved { report, .. } => self.saved.push(report.name),
            WatchEvent::Given { entry, to } => {
                self.fates.insert(entry, format!("in the custody of {to}, which saves it"));
            }
            WatchEvent::NotGiven { entry, error } => {
                self.fates.insert(entry, format!("nobody takes it into custody: {error}"));
            }
            _ => {}
        }
    }

    /// The report; an error that names what is not saved, if anything is not.
    fn end(&self, report: &WatchReport) -> Result<Value> {
        if report.unsaved.is_empty() {
            return self::report(&serde_json::json!({ "saved": self.saved }));
        }
        let told = |entry: &String| match self.fates.get(entry) {
            Some(fate) => format!("{entry} ({fate})"),
            None => entry.clone(),
        };
        let unsaved: Vec<_> = report.unsaved.iter().map(told).collect();
        Err(Error::cancelled("not all checkpoints could be saved in time")
            .at(self.watched.folder.display())
            .got(format!("not saved: {}", unsaved.join(", ")))
            .help("give the agent more `grace`"))
    }
}

/// Report of a transfer, as the command of that name prints it.
pub(super) fn report(report: &impl Serialize) -> Result<Value> {
    serde_json::to_value(report).map_err(|source| Error::other("report is not JSON").source(source))
}

fn about(kind: Kind, name: &impl ToString, repository: &Repository) -> About {
    About { kind, name: name.to_string(), repository: Some(repository.store().location().to_string()), caller: None }
}
