//! `towline rm`, `cp`, `settle` and `sync`.

use serde::Serialize;

use super::args::{Cp, Rm, Settle, Sync};
use super::render::{self, counted};
use super::undelete;
use super::verbs::Context;
use crate::audit::Action;
use crate::error::{Error, ErrorKind, Result};
use crate::name::Name;
use crate::ops::{self, Existing, KeptReason, RemoveOptions, RemovePlan, Replaced, Settled, SyncOptions, SyncReport};
use crate::repository::Repository;
use crate::selector::Selector;
use crate::size::show;
use crate::storage::{self, Location, Store};

/// Names in a remark, at most.
const NAMED: usize = 5;

/// Steps of `towline settle`.
#[derive(Debug, Default, Serialize)]
struct SettleReport {
    settled: Vec<Settled>,
    failed: Vec<NotSettled>,
}

/// A step of several that was not settled.
#[derive(Debug, Serialize)]
struct NotSettled {
    name: Name,
    error: Error,
}

impl SettleReport {
    fn text(&self) -> String {
        let settled = self.settled.iter().map(|Settled { name, chunks, stored_bytes, read_bytes: [before, now] }| {
            let (stored, now) = (show(*stored_bytes), show(*now));
            if *chunks == 0 {
                return format!("{name} needs no other step: a restore reads {now}\n");
            }
            let before = show(*before);
            format!("{name}: {chunks} chunks stored again, {stored}; a restore reads {now} instead of {before}\n")
        });
        let failed =
            self.failed.iter().map(|NotSettled { name, error }| format!("{name} is stored as before: {error}\n"));
        let text: String = settled.chain(failed).collect();
        if text.is_empty() { "no run has paused for so long\n".to_owned() } else { text }
    }
}

impl Context {
    pub(super) async fn remove(&self, rm: &Rm) -> Result<()> {
        #[derive(Serialize)]
        struct Planned {
            dry_run: bool,
            #[serde(flatten)]
            plan: RemovePlan,
        }
        #[derive(Serialize)]
        struct Done {
            removed: Vec<String>,
            kept: u64,
            forgotten: u64,
        }
        let options = RemoveOptions { recursive: rm.recursive, now: rm.now };
        let repository = self.open().await?;
        if rm.dry_run {
            let plan = repository.plan_remove(&rm.names, &options).await?;
            let planned = Planned { dry_run: true, plan };
            return self.output.answer(&planned, |planned, _| render::would_remove(&planned.plan, rm.now));
        }
        let names: Vec<String> = rm.names.iter().map(ToString::to_string).collect();
        let recorded = self.record(Action::Remove, &names, &repository, None).await?;
        let report = recorded.end(repository.remove_with(&rm.names, &options).await, |_| 0).await?;
        let (kept, forgotten) = (report.kept, report.forgotten);
        let done = Done { removed: report.removed.into_iter().map(|one| one.name).collect(), kept, forgotten };
        self.output.report(&done, |done, _| {
            let mut text = format!("removed {}\n", done.removed.join("\nremoved "));
            if done.removed.is_empty() {
                text.clear();
            }
            text + &undelete::kept(done.removed.len() as u64, done.kept, done.forgotten, rm.now)
        })
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
        let recorded = self.record(Action::Copy, &[from.to_string(), name.to_string()], &repository, None).await?;
        let replaced = if cp.stand_alone {
            let line = self.line();
            let copied = repository.copy_stand_alone(&from, &name, cp.if_absent, &self.progress).await;
            drop(line);
            copied
        } else if cp.if_absent {
            repository.copy_if_absent(&from, &name).await.map(|()| None)
        } else {
            repository.copy(&from, &name).await
        };
        let replaced = recorded.end(replaced, |_| 0).await?;
        if let Some(warning) = name.step_warning() {
            self.output.remark(&format!("warning: {warning}"));
        }
        self.output.report(&Copied { name, from, replaced }, |Copied { name, from, replaced }, _| {
            format!("{name} is now what {from} is{}\n", render::replaced(replaced.as_ref()))
        })
    }

    pub(super) async fn settle(&self, settle: &Settle) -> Result<u8> {
        let repository = self.open().await?;
        let names = self.to_settle(&repository, settle).await?;
        let line = self.line();
        let mut report = SettleReport::default();
        for name in &names {
            let recorded = self.record(Action::Copy, &[name.to_string()], &repository, None).await?;
            let settled = repository.settle(name, &self.progress).await;
            match recorded.end(settled, |_| 0).await {
                Ok(settled) => report.settled.push(settled),
                Err(error) if names.len() == 1 || error.kind() == ErrorKind::Cancelled => return Err(error),
                Err(error) => report.failed.push(NotSettled { name: name.clone(), error }),
            }
        }
        drop(line);
        self.output.report(&report, |report, _| report.text())?;
        Ok(report.failed.first().map_or(0, |failed| failed.error.kind().exit_code()))
    }

    async fn to_settle(&self, repository: &Repository, settle: &Settle) -> Result<Vec<Name>> {
        let Some(paused) = settle.paused else {
            let mut names = Vec::with_capacity(settle.names.len());
            for selector in &settle.names {
                let name = self.resolve(repository, selector).await?;
                if !names.contains(&name) {
                    names.push(name);
                }
            }
            return Ok(names);
        };
        let run = |selector: &Selector| match selector {
            Selector::Name(run) => Ok(run.clone()),
            Selector::Step { .. } => Err(Error::usage("--paused chooses the latest steps itself")
                .expected("the name of a run")
                .got(selector)),
        };
        let runs = settle.names.iter().map(run).collect::<Result<Vec<_>>>()?;
        repository.paused_steps(&runs, paused).await
    }

    pub(super) async fn sync(&self, sync: &Sync) -> Result<()> {
        let Sync { from, to, what, init, as_stored, if_absent, force, forget, dry_run } = sync;
        let opened = async {
            let from = self.open_at(from, 2).await?;
            let (mut names, state) = (Vec::with_capacity(what.len()), from.state().await?);
            for selector in what {
                let name = self.resolve(&from, selector).await?;
                if !state.refs.keys().any(|other| other.is_under(&name)) {
                    from.check_name(&name).await?;
                }
                names.push(name);
            }
            let there = self.destination(to, *init).await?;
            Ok((from, there, names))
        };
        let (from, there, names) = Box::pin(self.unless_stopped(opened)).await?;
        let all =
            if names.is_empty() { vec!["**".to_owned()] } else { names.iter().map(ToString::to_string).collect() };
        let place = there.as_ref().map_or_else(|| to.to_string(), |there| there.store().location().to_string());
        let recorded = self.record(Action::Sync, if *dry_run { &[] } else { &all }, &from, Some(place)).await?;
        let line = self.line();
        let (progress, stop) = (self.progress.clone(), self.stop.clone());
        let existing = match (*if_absent, *force) {
            (true, _) => Existing::Keep,
            (false, true) => Existing::Replace,
            (false, false) => Existing::KeepNewer,
        };
        let (dry_run, as_stored, forget) = (*dry_run, *as_stored, *forget);
        let options = SyncOptions { dry_run, as_stored, existing, forget, progress, stop };
        let synced = async {
            let to = match there {
                Some(there) => there,
                None => {
                    // Nothing is made if no name may be moved.
                    let addresses = storage::addresses(to, &self.settings.store(true)).await?;
                    ops::check_new_destination(&from, &names, &addresses).await?;
                    self.make_destination(to, dry_run).await?
                }
            };
            let report = ops::sync(&from, &to, &names, &options).await?;
            Ok((to, report))
        };
        let (to, report) = recorded.end(synced.await, |(_, report)| report.moved_bytes).await?;
        drop(line);
        for name in report.replaced.iter().filter(|_| !dry_run) {
            let restores = match report.forgotten {
                0 => format!(": `towline undelete {name} --replace` there restores it"),
                _ => String::new(),
            };
            self.output.remark(&format!("replaced {name} in {}{restores}", to.store()));
        }
        if let Some(remark) = left_behind(&report, to.store()) {
            self.output.remark(&remark);
        }
        if !report.returned.is_empty() {
            let what = if dry_run { "would be there again" } else { "are there again" };
            let names = some_of(&report.returned);
            self.output.remark(&format!("removed in {} before, and {what}: {names}", to.store()));
        }
        self.output.outcome(dry_run, &report, |report, _| render::sync(report))?;
        newer_kept(&report.whole()?, to.store())
    }

    /// The repository at `location`; none, if it is to be made.
    async fn destination(&self, location: &Location, init: bool) -> Result<Option<Repository>> {
        match self.open_at(location, 2).await {
            Ok(there) => Ok(Some(there)),
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            Err(_) if init => Ok(None),
            Err(lacking) => {
                let help = format!("`towline sync --init` makes it as it syncs; or first: `towline init {location}`");
                Err(Error::not_found("there is no repository to sync to").at(location).help(help).source(lacking))
            }
        }
    }

    /// A new repository at `location`; in a dry run one in memory that stands for it.
    async fn make_destination(&self, location: &Location, dry_run: bool) -> Result<Repository> {
        let store = if dry_run { Store::memory() } else { storage::open(location, &self.settings.store(true)).await? };
        let (repository, created) = Repository::create(store, self.options(2)?).await?;
        if created {
            let made = if dry_run { "would make" } else { "made" };
            self.output.remark(&format!("{made} the repository {location}"));
        }
        Ok(repository)
    }
}

/// Remark on names that stay in the destination though the source has removed them.
fn left_behind(report: &SyncReport, there: &Store) -> Option<String> {
    if report.left_behind.is_empty() {
        return None;
    }
    let listed = some_of(&report.left_behind);
    let is_run = report.left_behind.iter().any(|name| name.step().is_some());
    let latest = if is_run { ", and may be the latest steps there" } else { "" };
    Some(format!("removed here, and still in {there}{latest}: {listed}; `towline rm NAME --repo {there}` removes one"))
}

/// The first of `names`, and the number of the others.
fn some_of(names: &[Name]) -> String {
    let listed = names.iter().take(NAMED).map(Name::to_string).collect::<Vec<_>>().join(", ");
    if names.len() > NAMED { format!("{listed} and {} more", names.len() - NAMED) } else { listed }
}

/// Error, if names were kept because they are newer in the destination: the two repositories are not equal.
fn newer_kept(report: &SyncReport, there: &Store) -> Result<()> {
    let newer = report.kept.iter().filter(|kept| kept.reason == KeptReason::Newer);
    let names: Vec<&str> = newer.map(|kept| kept.name.as_str()).collect();
    let Some(first) = names.first() else { return Ok(()) };
    let what = match names.len() - 1 {
        0 => format!("{first} is newer in the destination, and stays as it is"),
        more => {
            let more = counted(more as u64, "more name");
            format!("{first} and {more} are newer in the destination, and stay as they are")
        }
    };
    let [those, them] = if names.len() == 1 { ["that value", "it"] } else { ["those values", "them"] };
    Err(Error::conflict(what).at(there).help(format!(
        "--force replaces {those} with the source's; `towline sync` the other way copies {them} here; --if-absent keeps every name \
         that is there"
    )))
}
