//! `towline rm`, `cp` and `sync`.

use serde::Serialize;

use super::args::{Cp, Rm, Sync};
use super::render;
use super::verbs::Context;
use crate::error::{Error, ErrorKind, Result};
use crate::ops::{self, RemovePlan, Replaced, SyncOptions};
use crate::repository::{Name, Repository};
use crate::storage::{self, Location, Store};

impl Context {
    pub(super) async fn remove(&self, rm: &Rm) -> Result<()> {
        #[derive(Serialize)]
        struct Planned {
            dry_run: bool,
            #[serde(flatten)]
            plan: RemovePlan,
        }
        #[derive(Serialize)]
        struct Removed {
            removed: Vec<String>,
        }
        let repository = self.open().await?;
        if rm.dry_run {
            let plan = repository.plan_remove(&rm.names, rm.recursive).await?;
            return self
                .output
                .answer(&Planned { dry_run: true, plan }, |planned, _| render::would_remove(&planned.plan));
        }
        let removed = repository.remove_all(&rm.names, rm.recursive).await?;
        let removed = Removed { removed: removed.into_iter().map(|one| one.name).collect() };
        self.output.report(&removed, |all, _| format!("removed {}\n", all.removed.join("\nremoved ")))
    }

    pub(super) async fn copy(&self, cp: &Cp) -> Result<()> {
        #[derive(Serialize)]
        struct Copied {
            name: Name,
            from: Name,
            #[serde(skip_serializing_if = "Option::is_none")]
            replaced: Option<Replaced>,
        }
        let repository = self.open().await?;
        let (from, name) = (self.resolve(&repository, &cp.name).await?, cp.new.clone());
        let replaced = if cp.stand_alone {
            let line = self.line();
            let copied = repository.copy_stand_alone(&from, &name, cp.if_absent, &self.progress).await?;
            drop(line);
            copied
        } else if cp.if_absent {
            repository.copy_if_absent(&from, &name).await.map(|()| None)?
        } else {
            repository.copy(&from, &name).await?
        };
        if let Some(warning) = name.step_warning() {
            self.output.remark(&format!("warning: {warning}"));
        }
        self.output.report(&Copied { name, from, replaced }, |Copied { name, from, replaced }, _| {
            format!("{name} is now what {from} is{}\n", render::replaced(replaced.as_ref()))
        })
    }

    pub(super) async fn sync(&self, sync: &Sync) -> Result<()> {
        let Sync { from, to, what, init, dry_run } = sync;
        let opened = async {
            let from = self.open_at(from, 2).await?;
            let to = self.destination(to, *init, *dry_run).await?;
            let mut names = Vec::with_capacity(what.len());
            for selector in what {
                names.push(self.resolve(&from, selector).await?);
            }
            Ok((from, to, names))
        };
        let (from, to, names) = Box::pin(self.unless_stopped(opened)).await?;
        let line = self.line();
        let options = SyncOptions { dry_run: *dry_run, progress: self.progress.clone(), stop: self.stop.clone() };
        let report = ops::sync(&from, &to, &names, &options).await?;
        drop(line);
        self.output.outcome(*dry_run, &report, |report, _| render::sync(report))
    }

    /// The repository at `location`. With `init` it is made if there is none; in a dry run an empty one in memory stands for it.
    async fn destination(&self, location: &Location, init: bool, dry_run: bool) -> Result<Repository> {
        let lacking = match self.open_at(location, 2).await {
            Err(error) if error.kind() == ErrorKind::NotFound => error,
            opened => return opened,
        };
        if !init {
            let help = format!("`towline sync --init` makes it as it syncs; or first: towline init {location}");
            return Err(Error::not_found("there is no repository to sync to").at(location).help(help).source(lacking));
        }
        let store = if dry_run { Store::memory() } else { storage::open(location, &self.settings.store(true)).await? };
        let (repository, created) = Repository::create(store, self.options(2)?).await?;
        if created {
            let made = if dry_run { "would make" } else { "made" };
            self.output.remark(&format!("{made} the repository {location}"));
        }
        Ok(repository)
    }
}
