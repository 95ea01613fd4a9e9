//! Saves: conversion of their options from Python, and background work.

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tokio_util::sync::CancellationToken;
use towline::audit::Action;
use towline::checkpoint::Dtype;
use towline::checkpoint::header::{self, NewTensor};
use towline::name::Name;
use towline::ops::{Existing, Expected, PartOptions, SaveOptions, SaveSource};
use towline::progress::Progress;
use towline::repository::Repository;
use towline::repository::log::StepFacts;
use towline::tree::MemoryFile;
use towline::{Error, Result};

use crate::audited::record;
use crate::errors::raised;
use crate::memory::{Latch, MemoryRange};
use crate::progress_counters::{Counters, ProgressCounters, counters};
use crate::runtime::{STOPPING, background, wait_or_stop};
use crate::stage::StagingBuffer;

/// Interval of checks for signals.
const SIGNALS_EVERY: Duration = Duration::from_millis(50);

/// Options of a save from Python: a dict with `metrics` and optionally the other keys.
#[derive(Debug, FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct SaveArguments {
    metrics: HashMap<String, f64>,
    #[pyo3(default)]
    world_size: Option<u32>,
    #[pyo3(default)]
    framework: Option<String>,
    #[pyo3(default)]
    labels: BTreeMap<String, String>,
    #[pyo3(default)]
    exclude: Vec<String>,
    #[pyo3(default)]
    compression: Option<String>,
    #[pyo3(default)]
    key_every: Option<u32>,
    #[pyo3(default)]
    base: Option<String>,
    /// Number of the part, and the attempt, if this save is a part of a step.
    #[pyo3(default)]
    part: Option<(u32, String)>,
    /// Number of parts, if it is not that of the ranks.
    #[pyo3(default)]
    parts: Option<u32>,
    /// Version that the name must have when the save begins; 0: the name must not exist.
    #[pyo3(default)]
    version: Option<u64>,
    #[pyo3(default)]
    progress: Option<Py<ProgressCounters>>,
}

impl SaveArguments {
    /// Converts to the engine's options for a save as `name`.
    fn read(self, name: &str) -> Result<(Name, SaveOptions, Option<PartOptions>)> {
        let count = |what: &'static str, number: u32| {
            NonZeroU32::new(number).ok_or_else(|| Error::usage(what).expected("at least 1").got(0))
        };
        let world_size = self.world_size.map(|ranks| count("invalid world_size", ranks)).transpose()?;
        let facts =
            self.metrics.iter().try_fold(StepFacts::default(), |facts, (name, &value)| facts.metric(name, value))?;
        let facts = match &self.framework {
            Some(framework) => facts.framework(framework)?,
            None => facts,
        };
        let facts = world_size.map_or(facts.clone(), |ranks| facts.world_size(ranks));
        let part = match self.part {
            Some((rank, attempt)) => {
                let parts = self.parts.map(|parts| count("invalid number of parts", parts)).transpose()?;
                let ranks = parts
                    .or(world_size)
                    .ok_or_else(|| Error::usage("a part of a step needs the number of ranks").expected("world_size"))?;
                Some(PartOptions { rank, ranks, attempt: attempt.parse()? })
            }
            None => None,
        };
        let expected = match self.version {
            None => Expected::Anything,
            Some(0) => Expected::Nothing,
            Some(version) => Expected::Version(version),
        };
        let options = SaveOptions {
            base: self.base.map(|base| base.parse()).transpose()?,
            labels: self.labels,
            facts,
            exclude: self.exclude,
            compression: self.compression.as_deref().map(str::parse).transpose()?.unwrap_or_default(),
            key_every: self.key_every.map(|every| count("invalid key_every", every)).transpose()?,
            expected,
            progress: self.progress.map(|counters| counters.get().progress()).unwrap_or_default(),
            ..SaveOptions::default()
        };
        Ok((name.parse()?, options, part))
    }
}

/// Raises `UsageError` for an invalid name or invalid options of a save.
#[pyfunction]
pub(crate) fn check_save(py: Python<'_>, name: &str, arguments: SaveArguments) -> PyResult<()> {
    arguments.read(name).map(drop).map_err(|error| raised(py, &error))
}

/// Raises `UsageError` for a name that no run may have.
#[pyfunction]
pub(crate) fn check_run(py: Python<'_>, name: &str) -> PyResult<()> {
    name.parse().and_then(|name: Name| name.check_run()).map_err(|error| raised(py, &error))
}

/// A save as the engine takes it.
#[derive(Debug)]
pub(crate) struct Job {
    repository: Repository,
    source: SaveSource,
    name: Name,
    options: SaveOptions,
    part: Option<PartOptions>,
}

impl Job {
    pub(crate) fn new(
        repository: Repository,
        source: SaveSource,
        name: &str,
        arguments: SaveArguments,
    ) -> Result<Self> {
        let (name, options, part) = arguments.read(name)?;
        Ok(Self { repository, source, name, options, part })
    }

    /// Repository, name and options without a source.
    pub(crate) fn into_options(self) -> (Repository, Name, SaveOptions) {
        (self.repository, self.name, self.options)
    }

    /// Saves, and blocks Python until it is done. Ctrl-C stops the save; the next one uses what was stored by then.
    pub(crate) fn wait(self, py: Python<'_>) -> PyResult<String> {
        let stop = self.options.stop.clone();
        wait_or_stop(py, Some(Box::new(move || stop.cancel())), self.run())
    }

    /// Saves; returns the report as JSON.
    pub(crate) async fn run(self) -> Result<String> {
        let Self { repository, source, name, options, part } = self;
        let recorded = record(&repository, Action::Save, name.as_str()).await?;
        let report = if let Some(part) = part {
            let report = repository.save_part(source, &name, &part, &options).await;
            serde_json::to_string(&recorded.end(report, |report| report.part.logical_bytes).await?)
        } else {
            let report = repository.save(source, &name, &options).await;
            serde_json::to_string(&recorded.end(report, |report| report.logical_bytes).await?)
        };
        report.map_err(|error| Error::other("cannot write the report as JSON").source(error))
    }
}

/// A piece of a file: bytes; a staging buffer, which the save owns from then on; or `(address, length)` of memory that must not
/// change until the save is done.
#[derive(FromPyObject)]
pub(crate) enum Piece<'py> {
    /// Copied.
    Bytes(Bound<'py, PyBytes>),
    /// Moved.
    StagingBuffer(Bound<'py, StagingBuffer>),
    /// Borrowed.
    Memory((usize, usize)),
}

/// Files in memory as a source of a save, and a latch that opens when none of the memory is in use any more.
pub(crate) fn files(files: Vec<(String, Vec<Piece<'_>>)>) -> PyResult<(SaveSource, Arc<Latch>)> {
    let latch = Arc::new(Latch::default());
    let piece = |piece: Piece<'_>| match piece {
        Piece::Bytes(bytes) => Ok(Bytes::copy_from_slice(bytes.as_bytes())),
        Piece::StagingBuffer(stage) => stage.get().move_out(),
        Piece::Memory((address, len)) => Ok(MemoryRange::new(address, len).lend(&latch)),
    };
    let file = |(path, pieces): (String, Vec<Piece<'_>>)| {
        let pieces: Vec<Bytes> = pieces.into_iter().map(piece).collect::<PyResult<_>>()?;
        Ok(MemoryFile::new(path, pieces))
    };
    let files: Vec<MemoryFile> = files.into_iter().map(file).collect::<PyResult<_>>()?;
    Ok((SaveSource::Memory(files), latch))
}

/// A background save or collect.
#[pyclass(frozen, module = "towline._towline")]
#[derive(Debug)]
pub(crate) struct Task {
    outcome: Arc<Outcome>,
    progress: Progress,
    /// Asks a save to record the data that it stored, and to end.
    stop: Option<CancellationToken>,
    abort: tokio::task::AbortHandle,
    process: u32,
}

#[derive(Debug, Default)]
struct Outcome {
    result: Mutex<Option<Result<String>>>,
    changed: Condvar,
}

impl Outcome {
    fn set(&self, outcome: Result<String>) {
        let mut result = self.result.lock().unwrap_or_else(PoisonError::into_inner);
        result.get_or_insert(outcome);
        self.changed.notify_all();
    }
}

/// Sets the outcome of work that is dropped before it ends.
struct Guard {
    outcome: Arc<Outcome>,
    what: &'static str,
}

impl Drop for Guard {
    fn drop(&mut self) {
        let (text, help) =
            (format!("the {} was stopped before it was done", self.what), format!("{} again", self.what));
        self.outcome.set(Err(Error::cancelled(text).help(help)));
    }
}

impl Task {
    pub(crate) fn begin(job: Job) -> PyResult<Self> {
        let stop = Some(job.options.stop.clone());
        Ok(Self { stop, ..Self::start("save", job.options.progress.clone(), job.run())? })
    }

    /// Starts `work` in the background; `what` names it in errors.
    pub(crate) fn start(
        what: &'static str,
        progress: Progress,
        work: impl Future<Output = Result<String>> + Send + 'static,
    ) -> PyResult<Self> {
        let outcome = Arc::new(Outcome::default());
        let guard = Guard { outcome: Arc::clone(&outcome), what };
        let task = background()?.spawn(async move { guard.outcome.set(work.await) });
        Ok(Self { outcome, progress, stop: None, abort: task.abort_handle(), process: std::process::id() })
    }

    fn check_process(&self) -> PyResult<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        Err(PyRuntimeError::new_err(
            "towline: this save or collect belongs to the process that was forked; its child cannot wait for it",
        ))
    }
}

#[pymethods]
impl Task {
    /// Waits until the work has ended, at most `timeout` seconds; returns false after that. Handles signals.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        self.check_process()?;
        let until = timeout.map(|seconds| Instant::now() + Duration::from_secs_f64(seconds.max(0.0)));
        loop {
            let step =
                until.map_or(SIGNALS_EVERY, |until| until.saturating_duration_since(Instant::now()).min(SIGNALS_EVERY));
            let over = py.detach(|| {
                let result = self.outcome.result.lock().unwrap_or_else(PoisonError::into_inner);
                let waited = self.outcome.changed.wait_timeout_while(result, step, |result| result.is_none());
                waited.unwrap_or_else(PoisonError::into_inner).0.is_some()
            });
            if over {
                return Ok(true);
            }
            py.check_signals()?;
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(false);
            }
        }
    }

    /// True once the work has ended.
    fn done(&self) -> PyResult<bool> {
        self.check_process()?;
        Ok(self.outcome.result.lock().unwrap_or_else(PoisonError::into_inner).is_some())
    }

    /// Report as JSON; none while the work runs. Raises its error.
    fn result(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.check_process()?;
        match &*self.outcome.result.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(Ok(report)) => Ok(Some(report.clone())),
            Some(Err(error)) => Err(raised(py, error)),
            None => Ok(None),
        }
    }

    /// `(phase, bytes done, total bytes, stored bytes moved)`; the total is 0 while unknown.
    fn progress(&self) -> Counters {
        counters(&self.progress)
    }

    /// Stops the work within seconds, unless it is about to commit. A stopped save never becomes visible; the next save uses the
    /// data that it stored.
    fn cancel(&self) -> PyResult<()> {
        self.check_process()?;
        let Some(stop) = &self.stop else {
            self.abort.abort();
            return Ok(());
        };
        stop.cancel();
        let abort = self.abort.clone();
        background()?.spawn(async move {
            tokio::time::sleep(STOPPING).await;
            abort.abort();
        });
        Ok(())
    }
}

/// Lays out a safetensors file of tensors `(name, dtype, shape, bytes)` and metadata. Returns its header, the offset of each
/// tensor, and its length.
#[pyfunction]
#[pyo3(signature = (tensors, metadata=BTreeMap::new()))]
pub(crate) fn lay_out(
    py: Python<'_>,
    tensors: Vec<(String, String, Vec<u64>, u64)>,
    metadata: BTreeMap<String, String>,
) -> PyResult<(Bound<'_, PyBytes>, Vec<u64>, u64)> {
    let dtypes: Vec<Dtype> = tensors.iter().map(|tensor| Dtype::from_word(&tensor.1)).collect();
    for ((name, _, shape, len), dtype) in tensors.iter().zip(&dtypes) {
        if dtype.tensor_len(shape) != Some(*len) {
            return Err(PyValueError::new_err(format!("{name}: {dtype} {shape:?} is not {len} bytes")));
        }
    }
    let tensors = tensors.iter().zip(&dtypes);
    let tensors: Vec<NewTensor<'_>> =
        tensors.map(|((name, _, shape, len), dtype)| NewTensor { name, dtype, shape, len: *len }).collect();
    let file = header::lay_out(&tensors, &metadata).map_err(|error| raised(py, &error))?;
    Ok((PyBytes::new(py, &file.header), file.starts, file.len))
}

/// Source of a save at a path.
pub(crate) fn at_path(path: PathBuf) -> SaveSource {
    SaveSource::Path(path)
}

/// Treatment of existing names by a sync, by the word of the Python package.
pub(crate) fn treatment(word: &str) -> Existing {
    match word {
        "replace" => Existing::Replace,
        "keep" => Existing::Keep,
        _ => Existing::KeepNewer,
    }
}
