//! Work that somebody asks for, or the agent does by itself, begun as transfers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;

use super::config::Watched;
use super::custody::{Announced, Before, Held};
use super::house::House;
use super::transfers::{About, Entry};
use super::view::Kind;
use crate::error::{Error, Result};
use crate::ops::{self, Pinning, Refuge, RestoreOptions, SaveOptions, WarmOptions, WatchEvent, WatchOptions};
use crate::repository::{Name, Repository, Selector};
use crate::transfer::exchange::{Exchange, From};
use crate::transfer::identity::Identity;
use crate::transfer::protocol::Priority;

/// What to restore, and where to.
#[derive(Debug)]
pub(super) struct Restoring {
    pub(super) name: Selector,
    /// Only this file or folder of it.
    pub(super) below: Option<String>,
    pub(super) to: PathBuf,
    pub(super) overwrite: bool,
    pub(super) delete: bool,
}

/// What to warm, and how.
#[derive(Debug)]
pub(super) struct Warming {
    pub(super) name: Selector,
    /// Only this file or folder of it.
    pub(super) below: Option<String>,
    /// Whether it is for later, or somebody waits for it.
    pub(super) kind: Kind,
    pub(super) from: From,
    pub(super) pin: Option<Pinning>,
    /// Only find out what is lacking.
    pub(super) dry_run: bool,
    /// Which other agent asks, if one does.
    pub(super) caller: Option<Identity>,
}

/// Begins to bring what a name stands for, or a part of it, into the cache. Another agent may ask for what it may read.
///
/// # Errors
/// As [`Transfers::begin`](super::transfers::Transfers::begin); not found, for an agent without a cache or the repository.
pub(super) fn warm(house: &House, repository: Option<&str>, warming: Warming) -> Result<Arc<Entry>> {
    let Warming { name, below, kind, from, pin, dry_run, caller } = warming;
    let exchange = Arc::clone(house.exchange()?);
    let repository = house.origin(repository)?.clone();
    let called = below.as_ref().map_or_else(|| name.to_string(), |below| format!("{name}:{below}"));
    let about = About { caller: caller.clone(), ..about(kind, &called, &repository) };
    let priority = if kind == Kind::Fetch { Priority::Restore } else { Priority::Warm };
    house.transfers.begin(about, move |progress| async move {
        let name = repository.resolve(&name).await?;
        may_read(&exchange, caller.as_ref(), &name)?;
        let options = WarmOptions { below: below.map(String::into_bytes), priority, from, pin, dry_run, progress };
        report(&Box::pin(ops::warm(&exchange, &repository, &name, &options)).await?)
    })
}

/// What another agent asks for is what it may read; whoever is of this node may read everything.
///
/// # Errors
/// Denied, if it may not.
pub(super) fn may_read(exchange: &Exchange, caller: Option<&Identity>, name: &Name) -> Result<()> {
    match caller {
        Some(caller) if !exchange.may_read(caller, name) => {
            Err(Error::denied(format!("agent {} may not read this name here", caller.path()))
                .at(name)
                .cure("let it, in [[allow]] of the settings of the agent that was asked"))
        }
        _ => Ok(()),
    }
}

/// Begins to restore.
///
/// # Errors
/// As [`warm`].
pub(super) fn restore(house: &House, repository: Option<&str>, restoring: Restoring) -> Result<Arc<Entry>> {
    let repository = house.repository(repository)?.clone();
    house.transfers.begin(about(Kind::Restore, &restoring.name, &repository), move |progress| async move {
        let Restoring { name, below, to, overwrite, delete } = restoring;
        let options = RestoreOptions { overwrite, delete, progress, ..RestoreOptions::default() };
        let name = repository.resolve(&name).await?;
        let below = below.as_ref().map(String::as_bytes);
        report(&Box::pin(repository.restore(&name, below, &to, &options)).await?)
    })
}

/// Begins to save what another agent gave into custody, which lies at `path`: under its name, or, if somebody saved something else under
/// that meanwhile, under `custody/SITE/AGENT/NAME`, and nothing is replaced.
///
/// # Errors
/// As [`warm`].
pub(super) fn deliver(house: &House, held: &Held, path: &Path) -> Result<Arc<Entry>> {
    let Announced { name, repository, labels, .. } = held.what.clone();
    let repository = house.repository(Some(&repository.to_string()))?.clone();
    let about = About { caller: Some(held.from.clone()), ..about(Kind::Save, &name, &repository) };
    let (path, before, from) = (path.to_owned(), held.before, held.from.path());
    house.transfers.begin_stoppable(about, move |progress, stop| async move {
        let version = repository.state().await?.version(&name);
        let name = match version {
            Some(_) if repository.holds(&name, &path).await.unwrap_or(false) => {
                return report(&serde_json::json!({ "name": name, "saved": "already" }));
            }
            Some(version) if before != Before::Version(version) => {
                tracing::warn!("{name} was saved meanwhile: what was in custody is saved as custody/{from}/{name}");
                format!("custody/{from}/{name}").parse()?
            }
            _ => name,
        };
        let options = SaveOptions { labels, progress, stop, ..SaveOptions::default() };
        report(&Box::pin(repository.save(&path, &name, &options)).await?)
    })
}

/// Begins to save the checkpoints that a training writes, until the agent is asked to end. When time is short they go to `refuge` first.
///
/// # Errors
/// As [`warm`].
pub(super) fn watch(house: &House, watched: Watched, refuge: Option<Arc<dyn Refuge>>) -> Result<Arc<Entry>> {
    let repository = house.repository(None)?.clone();
    let stop = house.stop.subscribe();
    house.transfers.begin(about(Kind::Watch, &watched.run, &repository), move |progress| async move {
        let Watched { folder, run, settle } = watched;
        let save = SaveOptions { progress, ..SaveOptions::default() };
        let options =
            WatchOptions { settle, restore_latest: false, once: false, save, metrics: Vec::new(), refuge, stop };
        let (mut saved, mut fates) = (Vec::new(), BTreeMap::new());
        let mut tell = |event: WatchEvent| {
            tracing::info!(%run, ?event, "watch");
            match event {
                WatchEvent::Saved { report, .. } => saved.push(report.name),
                WatchEvent::Given { entry, to } => {
                    fates.insert(entry, format!("in the custody of {to}, which saves it"));
                }
                WatchEvent::NotGiven { entry, error } => {
                    fates.insert(entry, format!("nobody takes it into custody: {error}"));
                }
                _ => {}
            }
        };
        let watched = Box::pin(repository.watch(&folder, &run, &options, &mut tell)).await?;
        if watched.unsaved.is_empty() {
            return report(&serde_json::json!({ "saved": saved }));
        }
        let told = |entry: &String| fates.get(entry).map_or_else(|| entry.clone(), |fate| format!("{entry} ({fate})"));
        let unsaved: Vec<_> = watched.unsaved.iter().map(told).collect();
        Err(Error::cancelled("not all checkpoints could be saved in time")
            .at(folder.display())
            .got(format!("not saved: {}", unsaved.join(", ")))
            .cure("give the agent more `grace`"))
    })
}

/// What came of a transfer, as the command of that name tells it.
pub(super) fn report(report: &impl Serialize) -> Result<Value> {
    serde_json::to_value(report).map_err(|source| Error::other("report is not JSON").source(source))
}

fn about(kind: Kind, name: &impl ToString, repository: &Repository) -> About {
    About { kind, name: name.to_string(), repository: Some(repository.store().location().to_string()), caller: None }
}
