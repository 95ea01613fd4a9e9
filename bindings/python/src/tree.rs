//! A saved tree that is opened once and read by range, for the fsspec file system.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use towline::format::{EntryKind, Manifest, TreeEntry};
use towline::ops::{RangeSink, TensorSelector};
use towline::repository::Saved;
use towline::{Error, size};

use crate::audited::Reading;
use crate::cuda;
use crate::errors::raised;
use crate::json::json_within;
use crate::memory::{Latch, MemoryRange};
use crate::progress_counters::ProgressCounters;
use crate::reading::{ReadRequest, read_in};
use crate::repository::Repository;
use crate::runtime::wait;

/// Snapshot of a tree: it does not change with its name.
#[pyclass(frozen, module = "towline._towline")]
#[derive(Debug)]
pub(crate) struct Tree {
    repository: Py<Repository>,
    saved: Arc<Saved>,
    /// Its entry in the audit log.
    reading: Arc<Reading>,
}

impl Tree {
    pub(crate) fn new(repository: Py<Repository>, saved: Arc<Saved>, reading: Arc<Reading>) -> Self {
        Self { repository, saved, reading }
    }
}

/// Path, kind, length, permissions, modification time in nanoseconds, and target of a link.
type Entry<'a> = (Cow<'a, str>, &'static str, u64, u32, i64, Option<Cow<'a, str>>);

fn listed(entry: &TreeEntry) -> Entry<'_> {
    let text = String::from_utf8_lossy;
    let (kind, size, target) = match &entry.kind {
        EntryKind::File(content) => ("file", content.size, None),
        EntryKind::Folder => ("directory", 0, None),
        EntryKind::Symlink(target) => ("link", 0, Some(text(target))),
    };
    (text(&entry.path), kind, size, entry.mode, entry.mtime.0, target)
}

/// Approximate bytes that the entries of a tree take as objects of Python: a tuple, numbers and texts, each in a dictionary and a
/// list. Text beyond ASCII takes up to four bytes for each character (<https://peps.python.org/pep-0393/>).
fn listed_weight(manifest: &Manifest) -> u64 {
    const OBJECTS: usize = 700;
    let text = |bytes: &[u8]| if bytes.is_ascii() { bytes.len() } else { 4 * bytes.len() };
    let weight = |entry: &TreeEntry| match &entry.kind {
        EntryKind::Symlink(target) => OBJECTS + text(&entry.path) + text(target),
        _ => OBJECTS + text(&entry.path),
    };
    manifest.entries.iter().map(weight).sum::<usize>() as u64
}

#[pymethods]
impl Tree {
    /// Name of the tree.
    #[getter]
    fn name(&self) -> &str {
        self.saved.name.as_str()
    }

    /// Version of the name when the tree was opened.
    #[getter]
    fn version(&self) -> u64 {
        self.saved.value.version
    }

    /// Id of the manifest.
    #[getter]
    fn manifest(&self) -> String {
        self.saved.value.manifest.to_string()
    }

    /// Approximate bytes of memory of the tree, its entries as objects of Python included.
    #[getter]
    fn weight(&self) -> u64 {
        self.saved.weight() + listed_weight(&self.saved.manifest)
    }

    /// Entries by path. Bytes of names that are not UTF-8 are replaced.
    ///
    /// # Errors
    /// Exhausted, if they would take more than half of the memory.
    fn entries<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let (weight, limit) = (listed_weight(&self.saved.manifest), self.repository.get().memory(py)? / 2);
        if weight > limit {
            let error = Error::exhausted("list of the tree is too long for memory")
                .at(self.saved.name.as_str())
                .expected(format!("at most {}, half of the memory", size::show(limit)))
                .got(format!("about {}", size::show(weight)))
                .help("open it with more `memory`");
            return Err(raised(py, &error));
        }
        PyList::new(py, self.saved.manifest.entries.iter().map(listed))
    }

    /// Reads ranges `(path, start, end)` of files. Every byte is verified, and each chunk is fetched once.
    fn read<'py>(&self, py: Python<'py>, ranges: Vec<(String, u64, u64)>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let len =
            |&(_, start, end): &(String, u64, u64)| usize::try_from(end.saturating_sub(start)).unwrap_or(usize::MAX);
        let made: Vec<Bound<'py, PyBytes>> =
            ranges.iter().map(|range| PyBytes::new_with(py, len(range), |_| Ok(()))).collect::<PyResult<_>>()?;
        // No other code has these objects before this returns.
        let places =
            made.iter().map(|bytes| MemoryRange::new(bytes.as_bytes().as_ptr() as usize, bytes.as_bytes().len()));
        self.fill(py, ranges, places.collect())?;
        Ok(made)
    }

    /// Tensors, or boxes of them, that `selectors` select, or all, of the tree or its file or folder `path`: a JSON list in their order.
    #[pyo3(signature = (path=None, selectors=Vec::new()))]
    fn choose_tensors(&self, py: Python<'_>, path: Option<String>, selectors: Vec<String>) -> PyResult<String> {
        let (engine, saved) = (self.repository.get().engine(py)?, Arc::clone(&self.saved));
        wait(py, async move {
            let mut chosen =
                selectors.iter().map(|text| text.parse()).collect::<Result<Vec<TensorSelector>, Error>>()?;
            if chosen.is_empty() {
                chosen.push(TensorSelector::new("**")?);
            }
            let reading = engine.choose_tensors_in(&saved, path.as_ref().map(String::as_bytes), &chosen)?;
            json_within(&reading.tensors(), engine.budget().total() / 4).map_err(|error| error.at(&saved.name))
        })
    }

    /// Reads tensors into memory; with `gpu`, its number and a stream of it, into its memory.
    #[pyo3(signature = (requests, progress=None, gpu=None))]
    fn read_tensors(
        &self,
        py: Python<'_>,
        requests: Vec<ReadRequest>,
        progress: Option<Py<ProgressCounters>>,
        gpu: Option<cuda::Target>,
    ) -> PyResult<()> {
        let (engine, saved) = (self.repository.get().engine(py)?, Arc::clone(&self.saved));
        let progress = progress.map(|counters| counters.get().progress()).unwrap_or_default();
        let read = wait(py, async move { read_in(&engine, &saved, requests, gpu, &progress).await })?;
        self.reading.count(read.bytes);
        Ok(())
    }

    /// Reads `start..end` of a file into memory of that length.
    fn read_into(&self, py: Python<'_>, path: String, start: u64, end: u64, address: usize) -> PyResult<()> {
        let place = MemoryRange::new(address, usize::try_from(end.saturating_sub(start)).unwrap_or(0));
        py.detach(|| place.clear());
        self.fill(py, vec![(path, start, end)], vec![place])
    }
}

impl Tree {
    /// Reads ranges into memory. After an error or a signal, no thread writes there any more.
    fn fill(&self, py: Python<'_>, ranges: Vec<(String, u64, u64)>, places: Vec<MemoryRange>) -> PyResult<()> {
        let range = |(path, start, end): (String, u64, u64)| (path.into_bytes(), Range { start, end });
        let ranges: Vec<(Vec<u8>, Range<u64>)> = ranges.into_iter().map(range).collect();
        let (engine, saved) = (self.repository.get().engine(py)?, Arc::clone(&self.saved));
        let bytes: u64 = ranges.iter().map(|(_, range)| range.end.saturating_sub(range.start)).sum();
        let latch = Arc::new(Latch::default());
        let held = MemoryRange::new(0, 0).lend(&latch);
        let sink: RangeSink = Arc::new(move |number, at, bytes| {
            // Keeps the latch closed while a thread may write.
            let _ = &held;
            match places.get(number) {
                Some(place) if place.place(at, bytes) => Ok(()),
                _ => Err(Error::other("more bytes than a range has room for").got(at)),
            }
        });
        let outcome = wait(py, async move { engine.read_ranges(&saved, &ranges, sink).await });
        // If another read failed, a worker may still be writing.
        py.detach(|| latch.wait());
        if outcome.is_ok() {
            self.reading.count(bytes);
        }
        outcome
    }
}
