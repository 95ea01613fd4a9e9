//! Work that somebody asks for, or the agent does by itself, begun as transfers.

use std::path::PathBuf;
use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;

use super::config::Watched;
use super::house::House;
use super::transfers::{About, Entry};
use super::view::Kind;
use crate::error::{Error, Result};
use crate::ops::{self, Pinning, RestoreOptions, SaveOptions, WarmOptions, WatchEvent, WatchOptions};
use crate::repository::{Name, Repository, Selector};
use crate::transfer::exchange::{Exchange, From};
use crate::transfer::identity::Identity;

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
    pub(super) from: From,
    pub(super) pin: Option<Pinning>,
    /// Which other agent asks, if one does.
    pub(super) caller: Option<Identity>,
}

/// Begins to bring what a name stands for into the cache. Another agent may ask for what it may read.
///
/// # Errors
/// As [`Transfers::begin`](super::transfers::Transfers::begin); not found, for an agent without a cache or the repository.
pub(super) fn warm(house: &House, repository: Option<&str>, warming: Warming) -> Result<Arc<Entry>> {
    let Warming { name, from, pin, caller } = warming;
    let exchange = Arc::clone(house.exchange()?);
    let repository = house.origin(repository)?.clone();
    let about = About { caller: caller.clone(), ..about(Kind::Warm, &name, &repository) };
    house.transfers.begin(about, move |progress| async move {
        let name = repository.resolve(&name).await?;
        may_read(&exchange, caller.as_ref(), &name)?;
        let options = WarmOptions { from, pin, progress };
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
        let options = RestoreOptions { overwrite, delete, progress };
        let name = repository.resolve(&name).await?;
        let below = below.as_ref().map(String::as_bytes);
        report(&Box::pin(repository.restore(&name, below, &to, &options)).await?)
    })
}

/// Begins to save the checkpoints that a training writes, until the agent is asked to end.
///
/// # Errors
/// As [`warm`].
pub(super) fn watch(house: &House, watched: Watched) -> Result<Arc<Entry>> {
    let repository = house.repository(None)?.clone();
    let stop = house.stop.subscribe();
    house.transfers.begin(about(Kind::Watch, &watched.run, &repository), move |progress| async move {
        let Watched { folder, run, settle } = watched;
        let save = SaveOptions { progress, ..SaveOptions::default() };
        let options = WatchOptions { settle, restore_latest: false, once: false, save, stop };
        let mut saved = Vec::new();
        let mut tell = |event: WatchEvent| {
            tracing::info!(%run, ?event, "watch");
            if let WatchEvent::Saved { report, .. } = event {
                saved.push(report.name);
            }
        };
        let watched = Box::pin(repository.watch(&folder, &run, &options, &mut tell)).await?;
        if watched.unsaved.is_empty() {
            return report(&serde_json::json!({ "saved": saved }));
        }
        Err(Error::cancelled("not all checkpoints could be saved in time")
            .at(folder.display())
            .got(format!("not saved: {}", watched.unsaved.join(", ")))
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
