//! Python class of a repository.

use std::collections::BTreeSet;
use std::mem::ManuallyDrop;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde::Serialize;
use towline::audit::Action;
use towline::name::Name;
use towline::ops::{
    Changes, CollectOptions, ExpirePolicy, RemoveOptions, RestoreOptions, SaveSource, SyncOptions, TensorSelector,
    UndeleteOptions, VerifyOptions, sync,
};
use towline::progress::Progress;
use towline::repository::Repository as Engine;
use towline::selector::Selector;
use towline::storage::Location;
use towline::{Error, Result};

use crate::audited::{Reading, record, record_all};
use crate::errors::raised;
use crate::json::{json, json_within};
use crate::opening::Opening;
use crate::progress_counters::ProgressCounters;
use crate::reading::{ReadRequest, read};
use crate::runtime::{wait, within};
use crate::saving::{Job, Piece, SaveArguments, Task, at_path, files, treatment};
use crate::staged::{StagedTensors, stage};
use crate::tree::Tree;

/// An open repository. Reports are returned as JSON.
#[pyclass(frozen, module = "towline._towline")]
#[derive(Debug)]
pub(crate) struct Repository {
    location: Location,
    opening: Opening,
    /// Process that opened the repository, and its engine. A forked child has another runtime: it opens its own engine, and never
    /// touches the parent's.
    opened: Mutex<(u32, ManuallyDrop<Engine>)>,
    created: bool,
}

impl Repository {
    pub(crate) fn engine(&self, py: Python<'_>) -> PyResult<Engine> {
        let process = std::process::id();
        {
            let opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
            if opened.0 == process {
                return Ok(Engine::clone(&opened.1));
            }
        }
        let again = Opening { create: Some(false), ..self.opening.clone() };
        let (engine, _) = wait(py, again.open(self.location.clone()))?;
        *self.opened.lock().unwrap_or_else(PoisonError::into_inner) = (process, ManuallyDrop::new(engine.clone()));
        Ok(engine)
    }

    /// Waits for the report of `work`, as JSON.
    fn report<T, F>(&self, py: Python<'_>, work: impl FnOnce(Engine) -> F) -> PyResult<String>
    where
        T: Serialize + Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let engine = self.engine(py)?;
        let work = work(engine);
        wait(py, async move {
            let report = work.await?;
            json(&report)
        })
    }
}

impl Drop for Repository {
    fn drop(&mut self) {
        let opened = self.opened.get_mut().unwrap_or_else(PoisonError::into_inner);
        if opened.0 == std::process::id() {
            // SAFETY: this is the only drop, and the value is not used after it.
            unsafe { ManuallyDrop::drop(&mut opened.1) };
        }
    }
}

#[pymethods]
impl Repository {
    #[new]
    fn new(py: Python<'_>, location: &str, opening: Opening) -> PyResult<Self> {
        let location: Location = location.parse().map_err(|error: Error| raised(py, &error))?;
        let (engine, created) = wait(py, opening.clone().open(location.clone()))?;
        let opened = Mutex::new((std::process::id(), ManuallyDrop::new(engine)));
        Ok(Self { location, opening, opened, created })
    }

    /// URL of the repository.
    #[getter]
    fn location(&self) -> String {
        self.location.to_string()
    }

    /// True if there was no repository, and this object created it.
    #[getter]
    fn created(&self) -> bool {
        self.created
    }

    /// Permanent id of the repository, independent of its URL.
    fn id(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.engine(py)?.id().to_string())
    }

    /// Folder on this machine for cached data of the repository.
    fn cache(&self, py: Python<'_>) -> PyResult<PathBuf> {
        Ok(self.engine(py)?.cache().to_path_buf())
    }

    /// Name of this repository's folder in the spool.
    fn spool_name(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.engine(py)?.spool_name())
    }

    /// True if the repository is a folder on this machine.
    fn is_local(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.engine(py)?.store().is_local())
    }

    /// Memory budget of all buffers, in bytes.
    pub(crate) fn memory(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.engine(py)?.budget().total())
    }

    /// Saves the file or folder at `path`.
    fn save(&self, py: Python<'_>, path: PathBuf, name: &str, arguments: SaveArguments) -> PyResult<String> {
        let job = Job::new(self.engine(py)?, at_path(path), name, arguments);
        job.map_err(|error| raised(py, &error))?.wait(py)
    }

    /// Saves files `(path, pieces)` that are in memory.
    fn save_files(
        &self,
        py: Python<'_>,
        tree: Vec<(String, Vec<Piece<'_>>)>,
        name: &str,
        arguments: SaveArguments,
    ) -> PyResult<String> {
        let engine = self.engine(py)?;
        let (source, latch) = files(tree)?;
        let job = Job::new(engine, source, name, arguments);
        let outcome = job.map_err(|error| raised(py, &error)).and_then(|job| job.wait(py));
        py.detach(|| latch.wait());
        outcome
    }

    /// As `save_files`, in the background; pieces are bytes and stages only.
    fn begin_save_files(
        &self,
        py: Python<'_>,
        tree: Vec<(String, Vec<Piece<'_>>)>,
        name: &str,
        arguments: SaveArguments,
    ) -> PyResult<Task> {
        let engine = self.engine(py)?;
        let lent = |piece: &Piece<'_>| matches!(piece, Piece::Memory(_));
        if tree.iter().any(|(_, pieces)| pieces.iter().any(lent)) {
            return Err(pyo3::exceptions::PyValueError::new_err(
                "a background save takes bytes and staging buffers, not addresses of memory",
            ));
        }
        let job = Job::new(engine, files(tree)?.0, name, arguments);
        Task::begin(job.map_err(|error| raised(py, &error))?)
    }

    /// As `save`, in the background.
    fn begin_save(&self, py: Python<'_>, path: PathBuf, name: &str, arguments: SaveArguments) -> PyResult<Task> {
        let job = Job::new(self.engine(py)?, at_path(path), name, arguments);
        Task::begin(job.map_err(|error| raised(py, &error))?)
    }

    /// Changes paths of an existing or new tree: `put` files `(path, pieces)`, `remove` paths, `rename` pairs `(from, to)`. With
    /// `keep`, `undelete` can restore the old tree.
    #[pyo3(signature = (name, put, remove, rename, arguments, keep=false))]
    #[expect(clippy::too_many_arguments, reason = "the keywords of the Python method")]
    fn amend(
        &self,
        py: Python<'_>,
        name: &str,
        put: Vec<(String, Vec<Piece<'_>>)>,
        remove: Vec<String>,
        rename: Vec<(String, String)>,
        arguments: SaveArguments,
        keep: bool,
    ) -> PyResult<String> {
        let engine = self.engine(py)?;
        let (put, latch) = files(put)?;
        let job = Job::new(engine, SaveSource::default(), name, arguments).map_err(|error| raised(py, &error))?;
        let (engine, name, options) = job.into_options();
        let remove = remove.into_iter().map(String::into_bytes).collect();
        let rename = rename.into_iter().map(|(from, to)| (from.into_bytes(), to.into_bytes())).collect();
        let outcome = wait(py, async move {
            let recorded = record(&engine, Action::Save, name.as_str()).await?;
            let changes = Changes { put, remove, rename, keep, ..Changes::default() };
            let report = engine.amend(&name, &changes, &options).await;
            let report = recorded.end(report, |_| 0).await?;
            json(&report)
        });
        py.detach(|| latch.wait());
        outcome
    }

    /// Adds the entry at `path` of the tree `from`, with its content, to the tree `to` as `inner`; an empty path is the tree itself.
    fn graft(&self, py: Python<'_>, from: &str, path: &str, to: &str, inner: &str) -> PyResult<String> {
        let (from, to) = (parsed::<Name>(py, from)?, parsed::<Name>(py, to)?);
        let (path, inner) = (path.as_bytes().to_vec(), inner.as_bytes().to_vec());
        self.report(py, |engine| async move {
            let names = [from.to_string(), to.to_string()];
            let recorded = record_all(&engine, Action::Copy, &names, None).await?;
            recorded.end(engine.graft((&from, &path), (&to, &inner)).await, |_| 0).await
        })
    }

    /// Longest saved name that `path` begins with, and its version; none if there is none. Unreachable, if the store has not answered
    /// within `limit`.
    #[pyo3(signature = (path, limit=None))]
    fn find(&self, py: Python<'_>, path: &str, limit: Option<Duration>) -> PyResult<Option<(String, u64)>> {
        let (engine, path) = (self.engine(py)?, path.to_owned());
        wait(py, async move {
            let state = within(limit, engine.state()).await?;
            let mut ends: Vec<usize> = path.match_indices('/').map(|(at, _)| at).chain([path.len()]).collect();
            ends.reverse();
            let names = ends.into_iter().filter_map(|end| path.get(..end)?.parse::<Name>().ok());
            let mut found = names.filter_map(|name| Some((name.to_string(), state.refs.get(&name)?.version)));
            Ok(found.next())
        })
    }

    /// Names below `path`, or all, with their versions. Unreachable, if the store has not answered within `limit`.
    #[pyo3(signature = (path, limit=None))]
    fn names(&self, py: Python<'_>, path: &str, limit: Option<Duration>) -> PyResult<Vec<(String, u64)>> {
        let (engine, start) = (self.engine(py)?, if path.is_empty() { String::new() } else { format!("{path}/") });
        wait(py, async move {
            let state = within(limit, engine.state()).await?;
            let below = state.refs.iter().filter(|(name, _)| name.as_str().starts_with(&start));
            Ok(below.map(|(name, value)| (name.to_string(), value.version)).collect())
        })
    }

    /// Opens a snapshot of a tree.
    fn open_tree(slf: &Bound<'_, Self>, name: &str) -> PyResult<Tree> {
        let py = slf.py();
        let (engine, selector) = (slf.get().engine(py)?, parsed::<Selector>(py, name)?);
        let (saved, reading) = wait(py, async move {
            let name = engine.resolve(&selector).await?;
            let recorded = record(&engine, Action::Read, name.as_str()).await?;
            match engine.saved(&name).await {
                Ok(saved) => Ok((saved.shared(), Reading::begin(recorded))),
                Err(error) => recorded.end(Err(error), |_| 0).await,
            }
        })?;
        Ok(Tree::new(slf.clone().unbind(), saved, reading))
    }

    /// Restores a tree, or the file or folder `subpath` in it.
    #[pyo3(signature = (name, dest, subpath=None, overwrite=false, delete=false, may_empty=false, dry_run=false, progress=None))]
    #[expect(
        clippy::too_many_arguments,
        clippy::fn_params_excessive_bools,
        reason = "the keywords of the Python method"
    )]
    fn restore(
        &self,
        py: Python<'_>,
        name: &str,
        dest: PathBuf,
        subpath: Option<String>,
        overwrite: bool,
        delete: bool,
        may_empty: bool,
        dry_run: bool,
        progress: Option<Py<ProgressCounters>>,
    ) -> PyResult<String> {
        let selector = parsed::<Selector>(py, name)?;
        let progress = progress_of(progress);
        self.report(py, |engine| async move {
            let name = engine.resolve(&selector).await?;
            let options =
                RestoreOptions { overwrite, delete, may_empty, dry_run, progress, ..RestoreOptions::default() };
            let names = if dry_run { Vec::new() } else { vec![name.to_string()] };
            let recorded = record_all(&engine, Action::Restore, &names, None).await?;
            let report = engine.restore(&name, subpath.as_ref().map(String::as_bytes), &dest, &options).await;
            recorded.end(report, |report| report.bytes).await
        })
    }

    /// Resolves a name or `RUN@CHOICE` to a saved name.
    fn resolve(&self, py: Python<'_>, name: &str) -> PyResult<String> {
        let (engine, selector) = (self.engine(py)?, parsed::<Selector>(py, name)?);
        wait(py, async move { Ok(engine.resolve(&selector).await?.to_string()) })
    }

    /// Names under `prefix`.
    #[pyo3(signature = (prefix=None))]
    fn ls(&self, py: Python<'_>, prefix: Option<&str>) -> PyResult<String> {
        let prefix = prefix.map(|prefix| parsed::<Name>(py, prefix)).transpose()?;
        self.report(py, |engine| async move { engine.list(prefix.as_ref()).await })
    }

    /// Runs under `prefix`.
    #[pyo3(signature = (prefix=None))]
    fn runs(&self, py: Python<'_>, prefix: Option<&str>) -> PyResult<String> {
        let prefix = prefix.map(|prefix| parsed::<Name>(py, prefix)).transpose()?;
        self.report(py, |engine| async move { engine.runs(prefix.as_ref()).await })
    }

    /// Content of a tree: at most a quarter of the memory as JSON, as Python's objects for it take several times that. Unreachable, if
    /// the store has not answered within `limit`.
    #[pyo3(signature = (name, limit=None))]
    fn show(&self, py: Python<'_>, name: &str, limit: Option<Duration>) -> PyResult<String> {
        let (engine, selector) = (self.engine(py)?, parsed::<Selector>(py, name)?);
        wait(py, async move {
            let shown = within(limit, async { engine.show(&engine.resolve(&selector).await?).await }).await?;
            json_within(&shown, engine.budget().total() / 4).map_err(|error| error.at(selector))
        })
    }

    /// Removes a name; with `now` it cannot be undeleted. Unreachable, if that takes longer than `limit`: it may be removed then.
    #[pyo3(signature = (name, now=false, limit=None))]
    fn remove(&self, py: Python<'_>, name: &str, now: bool, limit: Option<Duration>) -> PyResult<()> {
        let (engine, name) = (self.engine(py)?, parsed::<Name>(py, name)?);
        let options = RemoveOptions { recursive: false, now };
        wait(py, async move {
            let recorded = record(&engine, Action::Remove, name.as_str()).await?;
            let removed = within(limit, engine.remove_with(&[name], &options)).await;
            recorded.end(removed, |_| 0).await.map(drop)
        })
    }

    /// Removes the names in one commit; with `recursive` those below them, too.
    fn remove_all(&self, py: Python<'_>, names: Vec<String>, recursive: bool) -> PyResult<()> {
        let engine = self.engine(py)?;
        let removed = names.iter().map(|name| parsed::<Name>(py, name)).collect::<PyResult<Vec<_>>>()?;
        let options = RemoveOptions { recursive, now: false };
        wait(py, async move {
            let recorded = record_all(&engine, Action::Remove, &names, None).await?;
            recorded.end(engine.remove_with(&removed, &options).await, |_| 0).await.map(drop)
        })
    }

    /// Restores the tree that a name had before.
    #[pyo3(signature = (name, version=None, to=None, replace=false))]
    fn undelete(
        &self,
        py: Python<'_>,
        name: &str,
        version: Option<u64>,
        to: Option<&str>,
        replace: bool,
    ) -> PyResult<String> {
        let name = parsed::<Name>(py, name)?;
        let to = to.map(|to| parsed::<Name>(py, to)).transpose()?;
        let options = UndeleteOptions { version, to, replace };
        self.report(py, |engine| async move {
            let recorded = record(&engine, Action::Copy, name.as_str()).await?;
            recorded.end(engine.undelete(&name, &options).await, |_| 0).await
        })
    }

    /// Tree of a name, and the earlier ones that can be undeleted.
    fn history(&self, py: Python<'_>, name: &str) -> PyResult<String> {
        let name = parsed::<Name>(py, name)?;
        self.report(py, |engine| async move { engine.history(&name).await })
    }

    /// Gives a name the labels that bind another, from which content is copied to it.
    fn inherit_labels(&self, py: Python<'_>, from: &str, to: &str) -> PyResult<()> {
        let (engine, from, to) = (self.engine(py)?, parsed::<Selector>(py, from)?, parsed::<Name>(py, to)?);
        wait(py, async move { engine.inherit_labels(&engine.resolve(&from).await?, &to).await })
    }

    /// Gives a tree an additional name.
    fn copy(&self, py: Python<'_>, from: &str, to: &str) -> PyResult<()> {
        let (engine, from, to) = (self.engine(py)?, parsed::<Selector>(py, from)?, parsed::<Name>(py, to)?);
        wait(py, async move {
            let from = engine.resolve(&from).await?;
            let names = [from.to_string(), to.to_string()];
            let recorded = record_all(&engine, Action::Copy, &names, None).await?;
            recorded.end(engine.copy(&from, &to).await, |_| 0).await.map(drop)
        })
    }

    /// Removes the steps of a run that no rule keeps. Unreachable, if that takes longer than `limit`: they may be removed then.
    #[pyo3(signature = (run, keep_last=None, keep_every=None, keep_min=Vec::new(), keep_max=Vec::new(), dry_run=false, keep_removed=false, given_up=BTreeSet::new(), limit=None))]
    #[expect(clippy::too_many_arguments, reason = "the keywords of the Python method")]
    fn expire(
        &self,
        py: Python<'_>,
        run: &str,
        keep_last: Option<NonZeroU64>,
        keep_every: Option<NonZeroU64>,
        keep_min: Vec<String>,
        keep_max: Vec<String>,
        dry_run: bool,
        keep_removed: bool,
        given_up: BTreeSet<u64>,
        limit: Option<Duration>,
    ) -> PyResult<String> {
        let run = parsed::<Name>(py, run)?;
        let policy = ExpirePolicy { keep_last, keep_every, keep_min, keep_max, given_up };
        self.report(py, |engine| {
            within(limit, async move {
                let plan = engine.plan_expire(&run, &policy).await?;
                match (dry_run, keep_removed) {
                    (true, _) => {}
                    (false, true) => engine.expire_keeping(&plan).await?,
                    (false, false) => engine.expire(&plan).await?,
                }
                Ok(plan)
            })
        })
    }

    /// Garbage collection; a dry run only reports it. Trees of removed names are kept for `keep_removed`, and unneeded data for
    /// `grace` after that.
    fn collect(&self, py: Python<'_>, dry_run: bool, grace: Duration, keep_removed: Duration) -> PyResult<String> {
        self.report(py, |engine| async move {
            let options = CollectOptions { dry_run, grace, keep_removed, ..CollectOptions::default() };
            engine.collect(&options).await
        })
    }

    /// As `collect`, in the background.
    fn begin_collect(&self, py: Python<'_>, grace: Duration) -> PyResult<Task> {
        let (engine, progress) = (self.engine(py)?, Progress::default());
        let options = CollectOptions { grace, progress: progress.clone(), ..CollectOptions::default() };
        Task::start("collect", progress, async move {
            let report = engine.collect(&options).await?;
            json(&report)
        })
    }

    /// Copies the trees under `names`, by default all, to `to`; a dry run only reports them. `existing` is as for `treatment`,
    /// and whether names may be replaced for which `to` forgets kept values.
    #[pyo3(signature = (to, names, dry_run=false, existing=("", false)))]
    fn sync(
        &self,
        py: Python<'_>,
        to: &Bound<'_, Self>,
        names: Vec<String>,
        dry_run: bool,
        existing: (&str, bool),
    ) -> PyResult<String> {
        let (to, existing, forget) = (to.get().engine(py)?, treatment(existing.0), existing.1);
        let selectors = names.iter().map(|name| parsed::<Selector>(py, name)).collect::<PyResult<Vec<_>>>()?;
        self.report(py, |from| async move {
            let mut names = Vec::with_capacity(selectors.len());
            for selector in &selectors {
                names.push(from.resolve(selector).await?);
            }
            let all = match (dry_run, names.is_empty()) {
                (true, _) => Vec::new(),
                (false, true) => vec!["**".to_owned()],
                (false, false) => names.iter().map(ToString::to_string).collect(),
            };
            let place = Some(to.store().location().to_string());
            let recorded = record_all(&from, Action::Sync, &all, place).await?;
            let options = SyncOptions { dry_run, existing, forget, ..SyncOptions::default() };
            let report = sync(&from, &to, &names, &options).await;
            recorded.end(report, |report| report.moved_bytes).await?.whole()
        })
    }

    /// Stores a tree without the steps that it is stored as differences to.
    #[pyo3(signature = (name, progress=None))]
    fn settle(&self, py: Python<'_>, name: &str, progress: Option<Py<ProgressCounters>>) -> PyResult<String> {
        let (selector, progress) = (parsed::<Selector>(py, name)?, progress_of(progress));
        self.report(py, |engine| async move {
            let name = engine.resolve(&selector).await?;
            let recorded = record_all(&engine, Action::Copy, &[name.to_string()], None).await?;
            recorded.end(engine.settle(&name, &progress).await, |_| 0).await
        })
    }

    /// Checks for damage, and optionally repairs it.
    #[pyo3(signature = (name=None, data=false, repair=false))]
    fn verify(&self, py: Python<'_>, name: Option<&str>, data: bool, repair: bool) -> PyResult<String> {
        let selector = name.map(|name| parsed::<Selector>(py, name)).transpose()?;
        self.report(py, |engine| async move {
            let name = match &selector {
                Some(selector) => Some(engine.resolve(selector).await?),
                None => None,
            };
            let options = VerifyOptions { data, repair, ..VerifyOptions::default() };
            engine.verify(name.as_ref(), &options).await
        })
    }

    /// Tensors of a tree.
    #[pyo3(signature = (name, selectors=Vec::new()))]
    fn tensors(&self, py: Python<'_>, name: &str, selectors: Vec<String>) -> PyResult<String> {
        let selector = parsed::<Selector>(py, name)?;
        let selectors =
            selectors.iter().map(|text| parsed::<TensorSelector>(py, text)).collect::<PyResult<Vec<_>>>()?;
        let engine = self.engine(py)?;
        wait(py, async move {
            let tensors = engine.tensors(&engine.resolve(&selector).await?, &selectors).await?;
            json_within(&tensors, engine.budget().total() / 4).map_err(|error| error.at(selector))
        })
    }

    /// Tensors that `selectors` select, or all, of the tree or its file or folder `path`, in memory of this node's agent; none if no
    /// agent can have them there. They are verified once, by the agent.
    #[pyo3(signature = (name, path=None, selectors=Vec::new(), progress=None))]
    fn stage(
        &self,
        py: Python<'_>,
        name: &str,
        path: Option<String>,
        selectors: Vec<String>,
        progress: Option<Py<ProgressCounters>>,
    ) -> PyResult<Option<StagedTensors>> {
        let (engine, selector) = (self.engine(py)?, parsed::<Selector>(py, name)?);
        let progress = progress_of(progress);
        wait(py, async move {
            let name = engine.resolve(&selector).await?;
            // The agent records the access, before it passes the memory; a log of this process has it, too.
            let Some(staged) = stage(&engine, &name, path, selectors, &progress).await? else { return Ok(None) };
            let recorded = record(&engine, Action::Read, name.as_str()).await?;
            recorded.end(Ok(Some(staged)), |staged| staged.as_ref().map_or(0, StagedTensors::bytes)).await
        })
    }

    /// Reads tensors into memory; returns `(stored bytes read, chunks, bytes)`.
    #[pyo3(signature = (name, requests, progress=None))]
    fn read_tensors(
        &self,
        py: Python<'_>,
        name: &str,
        requests: Vec<ReadRequest>,
        progress: Option<Py<ProgressCounters>>,
    ) -> PyResult<(u64, u64, u64)> {
        let (engine, selector) = (self.engine(py)?, parsed::<Selector>(py, name)?);
        let progress = progress_of(progress);
        wait(py, async move {
            let name = engine.resolve(&selector).await?;
            let recorded = record(&engine, Action::Read, name.as_str()).await?;
            let read = read(engine, name, requests, progress).await;
            let read = recorded.end(read, |read| read.bytes).await?;
            Ok((read.fetched_bytes, read.chunks, read.bytes))
        })
    }

    /// Bytes `start..end` of a saved file, or all. Unreachable, if that takes longer than `limit`.
    #[pyo3(signature = (name, path, start=None, end=None, limit=None))]
    #[expect(clippy::too_many_arguments, reason = "the keywords of the Python method")]
    fn cat<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        path: &str,
        start: Option<u64>,
        end: Option<u64>,
        limit: Option<Duration>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let (engine, selector) = (self.engine(py)?, parsed::<Selector>(py, name)?);
        let path = path.as_bytes().to_vec();
        if start.zip(end).is_some_and(|(start, end)| start >= end) || end == Some(0) {
            return Ok(PyBytes::new(py, b""));
        }
        let range = (start.is_some() || end.is_some())
            .then(|| start.unwrap_or(0)..=end.map_or(u64::MAX, |end| end.saturating_sub(1)));
        let bytes = wait(py, async move {
            let (name, mut out) = (within(limit, engine.resolve(&selector)).await?, Vec::new());
            let recorded = record(&engine, Action::Read, name.as_str()).await?;
            let read = within(limit, engine.cat(&name, &path, range, &mut out)).await.map(|_| ());
            recorded.end(read, |()| out.len() as u64).await?;
            Ok(out)
        })?;
        Ok(PyBytes::new(py, &bytes))
    }
}

/// Progress counters of an operation: those passed in, else unused ones.
fn progress_of(progress: Option<Py<ProgressCounters>>) -> Progress {
    progress.map(|counters| counters.get().progress()).unwrap_or_default()
}

/// Parses text to a value, or raises the exception.
fn parsed<T: std::str::FromStr<Err = Error>>(py: Python<'_>, text: &str) -> PyResult<T> {
    text.parse().map_err(|error| raised(py, &error))
}
