//! Each command: open what it needs, call one verb, show what came of it.

use std::collections::BTreeMap;

use serde::Serialize;
use tokio_util::sync::CancellationToken;

use super::args::{Expire, Restore, Save, SaveFlags, Verb};
use super::config::{Route, Settings};
use super::output::Output;
use super::progress::Line;
use super::render;
use super::target::Target;
use crate::audit::Action;
use crate::budget::Budget;
use crate::error::{Error, ErrorKind, Result};
use crate::format::EntryKind;
use crate::limits::MEMORY_MIN;
use crate::name::Name;
use crate::ops::{
    self, CollectOptions, Diagnosis, Expected, ExpirePlan, ExpirePolicy, Outcome, PartOptions, RemoveOptions,
    RestoreOptions, RestoreTensorsOptions, SaveOptions, SaveReport, TensorSelector, VerifyOptions,
};
use crate::policy::{LABEL_KEYS, Labels, LocalCaller};
use crate::progress::Progress;
#[cfg(feature = "agent")]
use crate::repository::Guard;
use crate::repository::log::{Accepted, StepFacts};
use crate::repository::{OpenOptions, Repository};
use crate::selector::Selector;
use crate::size::{self, ByteRange};
use crate::storage::{self, Location, Sharing, StoreOptions};

/// Context of every command.
#[derive(Clone, Debug)]
pub(super) struct Context {
    pub(super) settings: Settings,
    pub(super) output: Output,
    pub(super) progress: Progress,
    /// Whether how far it is may be drawn.
    pub(super) draw: bool,
    /// `--memory`, in bytes.
    #[cfg(feature = "agent")]
    pub(super) memory: Option<u64>,
    /// Cancelled when the command is to stop.
    pub(super) stop: CancellationToken,
}

/// `repository` with the agent of this node as its first source of chunks, if one runs.
#[cfg_attr(not(feature = "agent"), expect(clippy::unused_async, reason = "there are no agents to ask"))]
pub(super) async fn attached(repository: Repository) -> Repository {
    #[cfg(feature = "agent")]
    let repository = crate::agent::Client::attached(repository).await;
    repository
}

impl Context {
    /// Carries out `verb`; gives the exit code.
    ///
    /// # Cancel safety
    /// As the verb's: what was committed stays, what was uploaded is used by the next run.
    pub(super) async fn execute(self, verb: Verb) -> Result<u8> {
        match verb {
            Verb::Init { url, shared } => self.init(url.as_deref(), shared).await?,
            Verb::Save(save) => Box::pin(self.save(save)).await?,
            Verb::Watch(watch) => return self.watch(watch).await,
            Verb::Restore(restore) => self.restore(restore).await?,
            Verb::Ls { prefix, long } => self.list(prefix.as_ref(), long).await?,
            Verb::Runs { prefix } => self.runs(prefix.as_ref()).await?,
            Verb::Expire(expire) => self.expire(expire).await?,
            Verb::Show(show) => self.show(show).await?,
            Verb::Tensors { name, only } => self.tensors(&name, &only).await?,
            Verb::Diff { a, b } => self.diff(&a, &b).await?,
            Verb::Cat { file, range } => self.cat(&file, range).await?,
            Verb::Rm(rm) => self.remove(&rm).await?,
            Verb::Undelete(undelete) => self.undelete(undelete).await?,
            Verb::History { name } => self.history(&name).await?,
            Verb::Cp(cp) => self.copy(&cp).await?,
            Verb::Settle(settle) => return self.settle(&settle).await,
            Verb::Sync(sync) => self.sync(&sync).await?,
            Verb::Verify { name, data, repair, accept_lost_labels, accept_snapshot } => {
                let accepted = Accepted { lost_labels: accept_lost_labels, snapshot: accept_snapshot };
                let progress = self.progress.clone();
                return self.verify(name.as_ref(), VerifyOptions { data, repair, accepted, progress }).await;
            }
            Verb::Collect { dry_run, grace, keep_removed } => {
                let repository = self.open().await?;
                let line = self.line();
                let options = CollectOptions { dry_run, grace, keep_removed, progress: self.progress.clone() };
                let report = repository.collect(&options).await?;
                drop(line);
                self.output.outcome(dry_run, &report, |report, _| render::collect(report, dry_run))?;
            }
            Verb::Doctor { url } => return self.doctor(url.as_deref()).await,
            #[cfg(feature = "agent")]
            Verb::Agents(verb) => return self.execute_agent_verb(verb).await,
            Verb::Label { name, labels } => self.label(&name, &labels).await?,
            #[cfg(not(feature = "agent"))]
            Verb::Other(words) => return Err(super::lacking(&words)),
            Verb::Config { what } => self.config(&what)?,
            Verb::Completions { shell } => self.output.print(&super::completions(shell))?,
        }
        Ok(0)
    }

    async fn init(&self, url: Option<&str>, shared: Option<Sharing>) -> Result<()> {
        #[derive(Serialize)]
        struct InitReport {
            repository: String,
            id: String,
            created: bool,
            bucket_created: bool,
        }
        if let (Some(word @ ("group" | "all")), Some(_)) = (url, shared) {
            return Err(Error::usage("the kind of sharing is taken for the folder of the repository")
                .got(format!("--shared {word}"))
                .help(format!("write --shared={word}; a folder of that name is ./{word}")));
        }
        let location = self.location(url)?;
        let how = StoreOptions { shared, ..self.settings.store(true) };
        let connected = storage::connect(&location, &how).await?;
        let bucket_created = match connected.bucket() {
            Some(bucket) => bucket.create_if_missing().await?,
            None => false,
        };
        let store = storage::open(&location, &how).await?;
        let (repository, created) = Repository::create(store, self.options(1)?).await?;
        let made =
            InitReport { repository: location.to_string(), id: repository.id().to_string(), created, bucket_created };
        self.output.report(&made, |made, _| {
            let what = if made.created { "made the repository" } else { "the repository is there already:" };
            let bucket = if made.bucket_created { "; its bucket did not exist and was created" } else { "" };
            format!("{what} {} ({}){bucket}\n", made.repository, made.id)
        })
    }

    async fn save(&self, save: Save) -> Result<()> {
        let ranks = save.manner.world_size;
        let options = manner(save.manner)?;
        let add_metric = |facts: StepFacts, (name, value): &(String, f64)| facts.metric(name, *value);
        let facts = save.metrics.iter().try_fold(options.facts, add_metric)?;
        let opened = async {
            let repository = self.open_to_save().await?;
            let base = match &save.base {
                Some(base) => Some(self.resolve(&repository, base).await?),
                None => None,
            };
            Ok((repository, base))
        };
        let (repository, base) = Box::pin(self.unless_stopped(opened)).await?;
        let progress = self.progress.clone();
        let Save { reread, explain, if_absent, .. } = save;
        let stop = self.stop.clone();
        let expected = if if_absent { Expected::Nothing } else { Expected::Anything };
        let options = SaveOptions { base, facts, reread, explain, expected, progress, stop, ..options };
        let recorded = self.record(Action::Save, &[save.name.to_string()], &repository, None).await?;
        let line = self.line();
        if let (Some(rank), Some(ranks)) = (save.rank, ranks) {
            let part = PartOptions { rank, ranks, attempt: save.attempt.unwrap_or_default() };
            let report = repository.save_part(&save.path, &save.name, &part, &options).await;
            let report = recorded.end(report, |report| report.part.logical_bytes).await?;
            drop(line);
            self.remark_on(&report.part);
            return self.output.report(&report, |report, _| render::save_part(report));
        }
        let report = repository.save(&save.path, &save.name, &options).await;
        let report = recorded.end(report, |report| report.logical_bytes).await?;
        drop(line);
        self.remark_on(&report);
        if explain && report.explained.is_empty() {
            self.output.remark("nothing to explain: no file has changed, so none was read (--reread reads them)");
        }
        self.output.report(&report, |report, _| render::save(report))
    }

    /// Warns about files that were left out of a save, or may not be what they seem.
    fn remark_on(&self, report: &SaveReport) {
        for skipped in &report.skipped {
            self.output.remark(&format!("left out {}", super::output::printable(skipped)));
        }
        for warning in &report.warnings {
            self.output.remark(&format!("warning: {}", super::output::printable(warning)));
        }
    }

    async fn restore(&self, restore: Restore) -> Result<()> {
        let Restore { from, dest, overwrite, delete, yes, dry_run, only, keep_setuid, tensors, shard } = restore;
        let progress = self.progress.clone();
        let options = RestoreOptions {
            overwrite,
            delete,
            may_empty: yes,
            dry_run,
            only,
            keep_setuid,
            progress,
            ..RestoreOptions::default()
        };
        let repository = attached(self.open().await?).await;
        let name = self.resolve(&repository, &from.name).await?;
        let names = if dry_run { Vec::new() } else { vec![name.to_string()] };
        let recorded = self.record(Action::Restore, &names, &repository, None).await?;
        if !tensors.is_empty() {
            let selectors: Vec<_> = match shard {
                Some(shard) => tensors.into_iter().map(|selector| selector.shard(shard)).collect(),
                None => tensors,
            };
            let options = RestoreTensorsOptions { overwrite, dry_run, progress: self.progress.clone() };
            let line = self.line();
            let below = from.path.as_deref();
            let report = repository.restore_tensors(&name, below, &selectors, &dest, &options).await;
            let report = recorded.end(report, |report| report.bytes).await?;
            drop(line);
            return self.output.outcome(dry_run, &report, |report, _| render::restored_tensors(report));
        }
        let line = self.line();
        let report = repository.restore(&name, from.path.as_deref(), &dest, &options).await;
        let report = recorded.end(report, |report| report.bytes).await?;
        drop(line);
        self.output.outcome(dry_run, &report, |report, _| render::restore(report))
    }

    async fn tensors(&self, name: &Selector, only: &[TensorSelector]) -> Result<()> {
        #[derive(Serialize)]
        struct Tensors {
            name: Name,
            tensors: Vec<ops::TensorListed>,
        }
        if let Some(boxed) = only.iter().find(|selector| !selector.is_whole()) {
            return Err(Error::usage("a list of tensors takes no box").got(boxed));
        }
        let repository = self.open().await?;
        let name = self.resolve(&repository, name).await?;
        let tensors = repository.tensors(&name, only).await?;
        if tensors.is_empty() {
            self.output.remark("no file was understood as a checkpoint when it was saved");
        }
        self.output.answer(&Tensors { name, tensors }, |list, _| render::tensors(&list.tensors))
    }

    async fn list(&self, prefix: Option<&Name>, long: bool) -> Result<()> {
        #[derive(Serialize)]
        struct Refs {
            refs: Vec<ops::Listed>,
        }
        let opened = self.open_if_made().await?;
        let refs = match (&opened, prefix) {
            (Some(repository), _) => repository.list(prefix).await?,
            (None, Some(_)) => self.open().await?.list(prefix).await?,
            (None, None) => Vec::new(),
        };
        if opened.is_none() {
            let location = self.location(None)?;
            self.output.remark(&format!(
                "there is no repository yet at {location}: `towline save` makes it, --repo names another"
            ));
        } else if refs.is_empty() {
            self.output.remark("the repository holds no names");
        }
        self.output.answer(&Refs { refs }, |list, _| render::refs(&list.refs, long))
    }

    async fn runs(&self, prefix: Option<&Name>) -> Result<()> {
        #[derive(Serialize)]
        struct Runs {
            runs: Vec<ops::RunListed>,
        }
        let runs = match (self.open_if_made().await?, prefix) {
            (Some(repository), _) => repository.runs(prefix).await?,
            (None, Some(_)) => self.open().await?.runs(prefix).await?,
            (None, None) => Vec::new(),
        };
        if runs.is_empty() {
            self.output.remark("no name is a step of a run: RUN/step-N");
        }
        self.output.answer(&Runs { runs }, |list, _| render::runs(&list.runs))
    }

    async fn expire(&self, expire: Expire) -> Result<()> {
        #[derive(Serialize)]
        struct Expired {
            dry_run: bool,
            #[serde(flatten)]
            plan: ExpirePlan,
            #[serde(skip_serializing_if = "Option::is_none")]
            freed_bytes: Option<u64>,
        }
        let Expire { run, keep_last, keep_every, keep_min, keep_max, keep_removed, dry_run } = expire;
        let policy = ExpirePolicy { keep_last, keep_every, keep_min, keep_max, ..ExpirePolicy::default() };
        let repository = self.open().await?;
        let plan = repository.plan_expire(&run, &policy).await?;
        let mut freed_bytes = None;
        let names: Vec<Name> = plan.removed.iter().map(|step| step.name.clone()).collect();
        if dry_run {
            freed_bytes = repository.plan_remove(&names, &RemoveOptions::default()).await?.freed_bytes;
        } else if !names.is_empty() {
            let names: Vec<String> = names.iter().map(ToString::to_string).collect();
            let recorded = self.record(Action::Remove, &names, &repository, None).await?;
            let expired = if keep_removed {
                repository.expire_keeping(&plan).await.map(drop)
            } else {
                repository.expire(&plan).await.map(drop)
            };
            recorded.end(expired, |()| 0).await?;
        }
        let expired = Expired { dry_run, plan, freed_bytes };
        let render = |expired: &Expired, _| render::expired(&expired.plan, dry_run, keep_removed, expired.freed_bytes);
        self.output.outcome(dry_run, &expired, render)
    }

    async fn diff(&self, a: &Selector, b: &Selector) -> Result<()> {
        let repository = self.open().await?;
        let (a, b) = (self.resolve(&repository, a).await?, self.resolve(&repository, b).await?);
        let compared = repository.diff(&a, &b).await?;
        if compared.changes().next().is_none() {
            self.output.remark("nothing differs");
        }
        self.output.stream(&compared, |compared, _, out| render::changes(out, || compared.changes()))
    }

    async fn cat(&self, file: &Target, range: Option<ByteRange>) -> Result<()> {
        let repository = attached(self.open().await?).await;
        let name = self.resolve(&repository, &file.name).await?;
        let path = match &file.path {
            Some(path) => path.clone(),
            None => only_file(&repository, &name).await?,
        };
        let range = match range {
            None => None,
            Some(ByteRange::Between(first, last)) => Some(first..=last),
            Some(ByteRange::From(first)) => Some(first..=u64::MAX),
            Some(ByteRange::Last(count)) => match len_of(&repository, &name, &path).await? {
                // The last bytes of nothing are nothing.
                0 => return Ok(()),
                len => Some(len.saturating_sub(count)..=len - 1),
            },
        };
        let recorded = self.record(Action::Read, &[name.to_string()], &repository, None).await?;
        let mut out = self.output.raw()?;
        let written = repository.cat(&name, &path, range, &mut out).await;
        recorded.end(written, |bytes| *bytes).await.map(drop)
    }

    async fn verify(&self, name: Option<&Selector>, options: VerifyOptions) -> Result<u8> {
        #[derive(Serialize)]
        struct Verified {
            #[serde(skip_serializing_if = "Option::is_none")]
            name: Option<Name>,
            #[serde(flatten)]
            report: ops::VerifyReport,
        }
        let VerifyOptions { data, repair, .. } = options;
        let repository = self.open().await?;
        let name = match name {
            Some(name) => Some(self.resolve(&repository, name).await?),
            None => None,
        };
        let line = self.line();
        let report = repository.verify(name.as_ref(), &options).await?;
        drop(line);
        let verified = Verified { name, report };
        let render = |verified: &Verified, paint| render::verify(&verified.report, data, paint);
        let ops::VerifyReport { damaged, left, lost, .. } = &verified.report;
        if damaged.is_empty() || repair && left.is_empty() && lost.is_empty() {
            self.output.report(&verified, render)?;
            return Ok(0);
        }
        self.output.answer(&verified, render)?;
        // Damage in bytes is found again only by reading them.
        let data = if data { " --data" } else { "" };
        if !repair {
            self.output.remark(&format!(
                "`towline verify{data} --repair` sets what is damaged aside; save the same content, under any name, and repair again"
            ));
        } else if !left.is_empty() {
            self.output.remark(&format!(
                "save the same content, under any name, and run `towline verify{data} --repair` again"
            ));
        }
        Ok(ErrorKind::Damaged.exit_code())
    }

    async fn doctor(&self, url: Option<&str>) -> Result<u8> {
        let location = self.location(url)?;
        let embedded = url.is_none() && matches!(self.settings.repository()?, Route::Embedded(_));
        let line = self.line();
        let (options, mut diagnosis) = (self.settings.store(embedded), Diagnosis::default());
        let outcome = tokio::select! {
            done = ops::doctor(&location, &options, &self.progress, |check| diagnosis.checks.push(check)) => done,
            () = self.stop.cancelled() => Err(Error::cancelled("interrupted")),
        };
        drop(line);
        // Checks that ended before an error may explain it.
        if outcome.is_ok() || !diagnosis.checks.is_empty() {
            self.output.answer(&diagnosis, render::diagnosis)?;
        }
        outcome?;
        Ok(u8::from(diagnosis.checks.iter().any(|check| check.outcome == Outcome::Bad)))
    }

    /// The name that `selector` stands for now; says so where that took choosing.
    pub(super) async fn resolve(&self, repository: &Repository, selector: &Selector) -> Result<Name> {
        let name = repository.resolve(selector).await?;
        if matches!(selector, Selector::Step { .. }) {
            self.output.remark(&format!("{selector} is {name}"));
        }
        Ok(name)
    }

    /// Carries out `work`, which writes nothing that is worth keeping, until the command is to stop.
    pub(super) async fn unless_stopped<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::select! {
            done = work => done,
            () = self.stop.cancelled() => Err(Error::cancelled("interrupted before anything was stored")),
        }
    }

    /// Draws progress until the answer is dropped.
    pub(super) fn line(&self) -> Option<Line> {
        self.draw.then(|| Line::draw(self.progress.clone()))
    }

    /// `url`, or the repository that was chosen.
    fn location(&self, url: Option<&str>) -> Result<Location> {
        match url {
            Some(url) => url.parse(),
            None => self.settings.repository().map(|(Route::Named(location) | Route::Embedded(location))| location),
        }
    }

    /// One of `sharers` repositories, which share the memory.
    ///
    /// # Errors
    /// Usage, if what was asked for is too little for as many.
    pub(super) fn options(&self, sharers: u64) -> Result<OpenOptions> {
        let share = match self.settings.memory {
            None if sharers == 1 => None,
            None => Some((Budget::default_bytes() / sharers).max(MEMORY_MIN)),
            Some(memory) if sharers > 1 && memory / sharers < MEMORY_MIN => {
                return Err(Error::usage(format!("memory budget is too small for {sharers} repositories"))
                    .expected(format!("at least {}", size::show(MEMORY_MIN * sharers)))
                    .got(size::show(memory))
                    .help("raise --memory"));
            }
            Some(memory) => Some(memory / sharers),
        };
        #[cfg(feature = "agent")]
        let guard: Option<std::sync::Arc<dyn Guard>> = Some(crate::transfer::policy::machine_guard()?);
        #[cfg(not(feature = "agent"))]
        let guard = None;
        Ok(OpenOptions { memory: share, guard, ..OpenOptions::default() })
    }

    /// The repository that was chosen, which must be there.
    pub(super) async fn open(&self) -> Result<Repository> {
        match self.open_if_made().await? {
            Some(repository) => Ok(repository),
            None => Err(Error::not_found("there is no repository yet")
                .at(self.location(None)?)
                .help("`towline save` makes it; --repo names another")),
        }
    }

    /// The repository that was chosen; none if that is the embedded one and nothing has been saved yet.
    pub(super) async fn open_if_made(&self) -> Result<Option<Repository>> {
        match self.settings.repository()? {
            Route::Named(location) => self.open_at(&location, 1).await.map(Some),
            Route::Embedded(location) => {
                let found = Repository::at_if_any(&location, &self.settings.store(false), self.options(1)?).await?;
                Ok(found.map(|repository| repository.for_caller(caller())))
            }
        }
    }

    /// The repository that was chosen, to save to; the embedded one is made if it is lacking.
    pub(super) async fn open_to_save(&self) -> Result<Repository> {
        match self.settings.repository()? {
            Route::Named(location) => self.open_at(&location, 1).await,
            Route::Embedded(location) => {
                let store = self.settings.store(true);
                let (repository, created) = Repository::at_or_create(&location, &store, self.options(1)?).await?;
                if created {
                    self.output.remark(&format!("made the repository {location}; --repo names another"));
                }
                Ok(repository.for_caller(caller()))
            }
        }
    }

    /// The repository at `location`, which must be there.
    pub(super) async fn open_at(&self, location: &Location, sharers: u64) -> Result<Repository> {
        let repository = Repository::at(location, &self.settings.store(false), self.options(sharers)?).await?;
        Ok(repository.for_caller(caller()))
    }
}

/// The user of this command, for rules of a policy about callers.
fn caller() -> Option<LocalCaller> {
    #[cfg(feature = "agent")]
    let caller = Some(LocalCaller::user(&crate::agent::user_name(rustix::process::getuid())));
    #[cfg(not(feature = "agent"))]
    let caller = None;
    caller
}

/// Save options of the command line.
pub(super) fn manner(manner: SaveFlags) -> Result<SaveOptions> {
    let mut facts = StepFacts::default();
    if let Some(ranks) = manner.world_size {
        facts = facts.world_size(ranks);
    }
    if let Some(framework) = &manner.framework {
        facts = facts.framework(framework)?;
    }
    Ok(SaveOptions {
        cut: manner.cut.into(),
        labels: joined_labels(manner.labels)?,
        facts,
        exclude: manner.exclude,
        compression: manner.compression.into(),
        key_every: manner.key_every,
        ..SaveOptions::default()
    })
}

/// Labels given one by one. Those that bind are joined, as `towline label` joins them: none is lost.
fn joined_labels(given: Vec<(String, String)>) -> Result<BTreeMap<String, String>> {
    let (mut binding, mut others) = (Labels::default(), BTreeMap::new());
    for (key, value) in given {
        if LABEL_KEYS.contains(&&*key) {
            binding = binding.with(&key, &value)?;
        } else if let Some(before) = others.insert(key.clone(), value.clone()) {
            return Err(Error::usage("label is given twice")
                .at(key)
                .got(format!("{before:?} and {value:?}"))
                .help("give each label one value; residency, sensitivity, tenant and purpose may be repeated"));
        }
    }
    others.extend(binding.pairs().into_iter().map(|(key, value)| (key.to_owned(), value)));
    Ok(others)
}

/// Path of the file of a tree that holds only one.
async fn only_file(repository: &Repository, name: &Name) -> Result<Vec<u8>> {
    let saved = repository.saved(name).await?;
    let mut files = saved.manifest.files();
    match (files.next(), files.next()) {
        (Some((file, _)), None) => Ok(file.path.clone()),
        (first, _) => Err(Error::usage(if first.is_some() { "tree has several files" } else { "tree has no file" })
            .expected("NAME:PATH")
            .got(name)
            .help(format!("`towline show {name} --files` lists its files"))),
    }
}

/// The length of the file at `path`, which only a range that counts from its end needs to know.
async fn len_of(repository: &Repository, name: &Name, path: &[u8]) -> Result<u64> {
    let saved = repository.saved(name).await?;
    match saved.manifest.entry(path).map(|entry| &entry.kind) {
        Some(EntryKind::File(content)) => Ok(content.size),
        _ => Err(Error::not_found("there is no such file")
            .at(format!("{name}:{}", String::from_utf8_lossy(path)))
            .help(format!("`towline show {name} --files` lists its files"))),
    }
}
