//! The repository, as Python holds it.

use std::mem::ManuallyDrop;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde::Serialize;
use towline::agent::Client;
use towline::ops::{
    Changes, CollectOptions, ExpirePolicy, RestoreOptions, SaveSource, SyncOptions, TensorSelector, VerifyOptions, sync,
};
use towline::progress::Progress;
use towline::repository::{Name, OpenOptions, Repository as Engine, Selector};
use towline::storage::{Location, StoreOptions, open};
use towline::{Error, Result};

use crate::errors::raised;
use crate::reading::{Want, read};
use crate::runtime::wait;
use crate::saving::{Job, Piece, SaveArguments, Saving, at_path, files};
use crate::tree::Tree;
use crate::watched::Watched;

/// Options to open one with: a dict with `create` and some of the other keys.
#[derive(Clone, Debug, FromPyObject)]
#[pyo3(from_item_all)]
struct Opening {
    #[pyo3(default)]
    memory: Option<u64>,
    #[pyo3(default)]
    cache: Option<PathBuf>,
    #[pyo3(default)]
    endpoint: Option<String>,
    #[pyo3(default)]
    region: Option<String>,
    #[pyo3(default)]
    allow_http: bool,
    create: bool,
}

impl Opening {
    async fn open(self, location: Location) -> Result<Engine> {
        let Self { memory, cache, endpoint, region, allow_http, create } = self;
        let store = StoreOptions { endpoint, region, allow_http, create, ..StoreOptions::default() };
        let (store, options) = (open(&location, &store).await?, OpenOptions { memory, cache });
        let engine =
            if create { Engine::create(store, options).await?.0 } else { Engine::open(store, options).await? };
        // What an agent of this node holds need not be fetched.
        Ok(Client::attached(engine).await)
    }
}

/// A repository, opened. Reports come as JSON.
#[pyclass(frozen, module = "towline._towline")]
#[derive(Debug)]
pub(crate) struct Repository {
    location: Location,
    opening: Opening,
    /// The process that opened it, and what it opened: in a forked child, whose runtime is another, it is opened again, and
    /// what the parent had is left alone.
    opened: Mutex<(u32, ManuallyDrop<Engine>)>,
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
        let again = Opening { create: false, ..self.opening.clone() };
        let engine = wait(py, again.open(self.location.clone()))?;
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
            // SAFETY: it is dropped here and nowhere else, and not used after.
            unsafe { ManuallyDrop::drop(&mut opened.1) };
        }
    }
}

#[pymethods]
impl Repository {
    #[new]
    fn new(py: Python<'_>, location: &str, opening: Opening) -> PyResult<Self> {
        let location: Location = location.parse().map_err(|error: Error| raised(py, &error))?;
        let engine = wait(py, opening.clone().open(location.clone()))?;
        Ok(Self { location, opening, opened: Mutex::new((std::process::id(), ManuallyDrop::new(engine))) })
    }

    /// Its address.
    #[getter]
    fn location(&self) -> String {
        self.location.to_string()
    }

    /// Its name for ever, whatever its address.
    fn id(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.engine(py)?.id().to_string())
    }

    /// The folder in which this machine keeps what makes the next command faster.
    fn cache(&self, py: Python<'_>) -> PyResult<PathBuf> {
        Ok(self.engine(py)?.cache().to_path_buf())
    }

    /// Name of the folder in which checkpoints wait on this disk for this repository.
    fn spool_name(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.engine(py)?.spool_name())
    }

    /// Is it a folder of this machine's?
    fn is_local(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.engine(py)?.store().is_local())
    }

    /// Bytes that its buffers may take together.
    fn memory(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.engine(py)?.budget().total())
    }

    /// Saves the file or folder at `path`.
    fn save(&self, py: Python<'_>, path: PathBuf, name: &str, arguments: SaveArguments) -> PyResult<String> {
        let job = Job::new(self.engine(py)?, at_path(path), name, arguments);
        job.map_err(|error| raised(py, &error))?.wait(py)
    }

    /// Saves files in memory: `(path, pieces)` each.
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

    /// As `save_files`, of bytes and stages only, and goes on by itself.
    fn begin_save_files(
        &self,
        py: Python<'_>,
        tree: Vec<(String, Vec<Piece<'_>>)>,
        name: &str,
        arguments: SaveArguments,
    ) -> PyResult<Saving> {
        let engine = self.engine(py)?;
        let lent = |piece: &Piece<'_>| matches!(piece, Piece::Memory(_));
        if tree.iter().any(|(_, pieces)| pieces.iter().any(lent)) {
            return Err(pyo3::exceptions::PyValueError::new_err(
                "memory cannot be lent to a save that goes on by itself",
            ));
        }
        let job = Job::new(engine, files(tree)?.0, name, arguments);
        Saving::begin(job.map_err(|error| raised(py, &error))?)
    }

    /// As `save`, and goes on by itself.
    fn begin_save(&self, py: Python<'_>, path: PathBuf, name: &str, arguments: SaveArguments) -> PyResult<Saving> {
        let job = Job::new(self.engine(py)?, at_path(path), name, arguments);
        Saving::begin(job.map_err(|error| raised(py, &error))?)
    }

    /// Changes some paths of a tree, or of an empty one: `put` files `(path, pieces)`, `remove` paths, `rename` `(from, to)`.
    #[pyo3(signature = (name, put, remove, rename, arguments))]
    #[expect(clippy::too_many_arguments, reason = "the keywords of the Python method")]
    fn amend(
        &self,
        py: Python<'_>,
        name: &str,
        put: Vec<(String, Vec<Piece<'_>>)>,
        remove: Vec<String>,
        rename: Vec<(String, String)>,
        arguments: SaveArguments,
    ) -> PyResult<String> {
        let engine = self.engine(py)?;
        let (put, latch) = files(put)?;
        let job = Job::new(engine, SaveSource::default(), name, arguments).map_err(|error| raised(py, &error))?;
        let (engine, name, options) = job.into_options();
        let remove = remove.into_iter().map(String::into_bytes).collect();
        let rename = rename.into_iter().map(|(from, to)| (from.into_bytes(), to.into_bytes())).collect();
        let outcome = wait(py, async move {
            let report = engine.amend(&name, &Changes { put, remove, rename }, &options).await?;
            json(&report)
        });
        py.detach(|| latch.wait());
        outcome
    }

    /// The longest name that `path` begins with, with its version; none if there is none.
    fn find(&self, py: Python<'_>, path: &str) -> PyResult<Option<(String, u64)>> {
        let (engine, path) = (self.engine(py)?, path.to_owned());
        wait(py, async move {
            let state = engine.state().await?;
            let mut ends: Vec<usize> = path.match_indices('/').map(|(at, _)| at).chain([path.len()]).collect();
            ends.reverse();
            let names = ends.into_iter().filter_map(|end| path.get(..end)?.parse::<Name>().ok());
            let mut found = names.filter_map(|name| Some((name.to_string(), state.refs.get(&name)?.version)));
            Ok(found.next())
        })
    }

    /// The names below `path`, or all, with their versions.
    fn names(&self, py: Python<'_>, path: &str) -> PyResult<Vec<(String, u64)>> {
        let (engine, start) = (self.engine(py)?, if path.is_empty() { String::new() } else { format!("{path}/") });
        wait(py, async move {
            let state = engine.state().await?;
            let below = state.refs.iter().filter(|(name, _)| name.as_str().starts_with(&start));
            Ok(below.map(|(name, value)| (name.to_string(), value.version)).collect())
        })
    }

    /// A tree, opened as it is now.
    fn open_tree(slf: &Bound<'_, Self>, name: &str) -> PyResult<Tree> {
        let py = slf.py();
        let (engine, selector) = (slf.get().engine(py)?, parsed::<Selector>(py, name)?);
        let saved = wait(py, async move {
            let name = engine.resolve(&selector).await?;
            Ok(engine.saved(&name).await?.shared())
        })?;
        Ok(Tree::new(slf.clone().unbind(), saved))
    }

    /// Restores a tree, or what lies at `subpath` of it.
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
        progress: Option<Py<Watched>>,
    ) -> PyResult<String> {
        let selector = parsed::<Selector>(py, name)?;
        let progress = watched(progress);
        self.report(py, |engine| async move {
            let name = engine.resolve(&selector).await?;
            let options =
                RestoreOptions { overwrite, delete, may_empty, dry_run, progress, ..RestoreOptions::default() };
            engine.restore(&name, subpath.as_ref().map(String::as_bytes), &dest, &options).await
        })
    }

    /// The name that a name or `RUN@CHOICE` stands for.
    fn resolve(&self, py: Python<'_>, name: &str) -> PyResult<String> {
        let (engine, selector) = (self.engine(py)?, parsed::<Selector>(py, name)?);
        wait(py, async move { Ok(engine.resolve(&selector).await?.to_string()) })
    }

    /// The names under `prefix`.
    #[pyo3(signature = (prefix=None))]
    fn ls(&self, py: Python<'_>, prefix: Option<&str>) -> PyResult<String> {
        let prefix = prefix.map(|prefix| parsed::<Name>(py, prefix)).transpose()?;
        self.report(py, |engine| async move { engine.list(prefix.as_ref()).await })
    }

    /// The runs under `prefix`.
    #[pyo3(signature = (prefix=None))]
    fn runs(&self, py: Python<'_>, prefix: Option<&str>) -> PyResult<String> {
        let prefix = prefix.map(|prefix| parsed::<Name>(py, prefix)).transpose()?;
        self.report(py, |engine| async move { engine.runs(prefix.as_ref()).await })
    }

    /// Content of a tree.
    fn show(&self, py: Python<'_>, name: &str) -> PyResult<String> {
        let selector = parsed::<Selector>(py, name)?;
        self.report(py, |engine| async move { engine.show(&engine.resolve(&selector).await?).await })
    }

    /// Takes a name away.
    fn remove(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        let (engine, name) = (self.engine(py)?, parsed::<Name>(py, name)?);
        wait(py, async move { engine.remove(&name).await })
    }

    /// Gives a tree a second name.
    fn copy(&self, py: Python<'_>, from: &str, to: &str) -> PyResult<()> {
        let (engine, from, to) = (self.engine(py)?, parsed::<Selector>(py, from)?, parsed::<Name>(py, to)?);
        wait(py, async move { engine.copy(&engine.resolve(&from).await?, &to).await.map(drop) })
    }

    /// Takes away the steps of a run that the rules do not keep.
    #[pyo3(signature = (run, keep_last=None, keep_every=None, keep_min=Vec::new(), keep_max=Vec::new(), dry_run=false))]
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
    ) -> PyResult<String> {
        let run = parsed::<Name>(py, run)?;
        let policy = ExpirePolicy { keep_last, keep_every, keep_min, keep_max };
        self.report(py, |engine| async move {
            let plan = engine.plan_expire(&run, &policy).await?;
            if !dry_run {
                engine.expire(&plan).await?;
            }
            Ok(plan)
        })
    }

    /// Deletes what no name needs and has been set aside for `grace`, or only says what it would delete.
    fn collect(&self, py: Python<'_>, dry_run: bool, grace: Duration) -> PyResult<String> {
        self.report(py, |engine| async move {
            let options = CollectOptions { dry_run, grace, ..CollectOptions::default() };
            engine.collect(&options).await
        })
    }

    /// As `collect`, and goes on by itself.
    fn begin_collect(&self, py: Python<'_>, grace: Duration) -> PyResult<Saving> {
        let (engine, progress) = (self.engine(py)?, Progress::default());
        let options = CollectOptions { grace, progress: progress.clone(), ..CollectOptions::default() };
        Saving::start("collect", progress, async move {
            let report = engine.collect(&options).await?;
            json(&report)
        })
    }

    /// Gives the repository `to` what this one has under `names`, or under all names; a dry run only reports what would move.
    #[pyo3(signature = (to, names, dry_run=false))]
    fn sync(&self, py: Python<'_>, to: &Bound<'_, Self>, names: Vec<String>, dry_run: bool) -> PyResult<String> {
        let to = to.get().engine(py)?;
        let selectors = names.iter().map(|name| parsed::<Selector>(py, name)).collect::<PyResult<Vec<_>>>()?;
        self.report(py, |from| async move {
            let mut names = Vec::with_capacity(selectors.len());
            for selector in &selectors {
                names.push(from.resolve(selector).await?);
            }
            sync(&from, &to, &names, &SyncOptions { dry_run, ..SyncOptions::default() }).await
        })
    }

    /// Looks for damage.
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

    /// The tensors of a tree.
    #[pyo3(signature = (name, selectors=Vec::new()))]
    fn tensors(&self, py: Python<'_>, name: &str, selectors: Vec<String>) -> PyResult<String> {
        let selector = parsed::<Selector>(py, name)?;
        let selectors =
            selectors.iter().map(|text| parsed::<TensorSelector>(py, text)).collect::<PyResult<Vec<_>>>()?;
        self.report(py, |engine| async move { engine.tensors(&engine.resolve(&selector).await?, &selectors).await })
    }

    /// Reads tensors into memory; `(stored bytes read, chunks, bytes)`.
    #[pyo3(signature = (name, wants, progress=None))]
    fn read_tensors(
        &self,
        py: Python<'_>,
        name: &str,
        wants: Vec<Want>,
        progress: Option<Py<Watched>>,
    ) -> PyResult<(u64, u64, u64)> {
        let (engine, selector) = (self.engine(py)?, parsed::<Selector>(py, name)?);
        let progress = watched(progress);
        wait(py, async move {
            let name = engine.resolve(&selector).await?;
            let read = read(engine, name, wants, progress).await?;
            Ok((read.fetched_bytes, read.chunks, read.bytes))
        })
    }

    /// Bytes `start..end` of a saved file, or all.
    #[pyo3(signature = (name, path, start=None, end=None))]
    fn cat<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        path: &str,
        start: Option<u64>,
        end: Option<u64>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let (engine, selector) = (self.engine(py)?, parsed::<Selector>(py, name)?);
        let path = path.as_bytes().to_vec();
        if start.zip(end).is_some_and(|(start, end)| start >= end) || end == Some(0) {
            return Ok(PyBytes::new(py, b""));
        }
        let range = (start.is_some() || end.is_some())
            .then(|| start.unwrap_or(0)..=end.map_or(u64::MAX, |end| end.saturating_sub(1)));
        let bytes = wait(py, async move {
            let (name, mut out) = (engine.resolve(&selector).await?, Vec::new());
            engine.cat(&name, &path, range, &mut out).await?;
            Ok(out)
        })?;
        Ok(PyBytes::new(py, &bytes))
    }
}

/// A report as JSON.
fn json(report: &impl Serialize) -> Result<String> {
    serde_json::to_string(report).map_err(|error| Error::other("cannot write the report as JSON").source(error))
}

/// Progress counters of an operation: those that were passed in, else nobody's.
fn watched(progress: Option<Py<Watched>>) -> Progress {
    progress.map(|watched| watched.get().progress()).unwrap_or_default()
}

/// Value of a text, or the exception that it has none.
fn parsed<T: std::str::FromStr<Err = Error>>(py: Python<'_>, text: &str) -> PyResult<T> {
    text.parse().map_err(|error| raised(py, &error))
}
