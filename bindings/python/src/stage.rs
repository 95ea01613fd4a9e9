//! Staging memory: a state is copied to it, so that the training loop can continue while the copy is saved.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use memmap2::{Advice, MmapMut};
use pyo3::exceptions::{PyMemoryError, PyValueError};
use pyo3::prelude::*;

use crate::memory::copy_all;

/// Interval of checks for signals.
const SIGNALS_EVERY: Duration = Duration::from_millis(50);

/// Owner of the one reusable region that states are staged in. A loop that saves faster than saves complete has to wait, so
/// memory does not grow.
#[pyclass(frozen, module = "towline._towline")]
#[derive(Debug)]
pub(crate) struct Stager(Arc<Pool>);

#[derive(Debug, Default)]
struct Pool {
    state: Mutex<State>,
    returned: Condvar,
}

#[derive(Debug, Default)]
struct State {
    idle: Option<MmapMut>,
    /// Process that uses the region; none if the region is free.
    out: Option<u32>,
}

/// A region in use; it returns to the pool when the last reference is dropped.
#[derive(Debug)]
struct Region {
    memory: Option<MmapMut>,
    len: usize,
    pool: Arc<Pool>,
}

impl Drop for Region {
    fn drop(&mut self) {
        let mut state = self.pool.state.lock().unwrap_or_else(PoisonError::into_inner);
        (state.idle, state.out) = (self.memory.take(), None);
        self.pool.returned.notify_one();
    }
}

impl AsRef<[u8]> for Region {
    fn as_ref(&self) -> &[u8] {
        self.memory.as_deref().and_then(|memory| memory.get(..self.len)).unwrap_or_default()
    }
}

#[pymethods]
impl Stager {
    #[new]
    fn new() -> Self {
        Self(Arc::default())
    }

    /// Waits until the memory is free, and returns a buffer of `len` bytes; none after `timeout` seconds.
    #[pyo3(signature = (len, timeout=None))]
    fn take(&self, py: Python<'_>, len: usize, timeout: Option<f64>) -> PyResult<Option<StagingBuffer>> {
        let until = timeout.map(|seconds| Instant::now() + Duration::from_secs_f64(seconds.max(0.0)));
        loop {
            let step =
                until.map_or(SIGNALS_EVERY, |until| until.saturating_duration_since(Instant::now()).min(SIGNALS_EVERY));
            if py.detach(|| self.0.wait(step)) {
                let memory = py.detach(|| self.0.region(len))?;
                let region = Region { memory: Some(memory), len, pool: Arc::clone(&self.0) };
                return Ok(Some(StagingBuffer(Mutex::new(Some(Arc::new(region))))));
            }
            py.check_signals()?;
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(None);
            }
        }
    }

    /// True if the region is free.
    fn idle(&self) -> bool {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner).out.is_none()
    }
}

impl Pool {
    /// Marks the region as in use, if it becomes free in time. A forked child never gets back a region that its parent uses, and
    /// creates its own.
    fn wait(&self, time: Duration) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let process = std::process::id();
        let waited = self.returned.wait_timeout_while(state, time, |state| state.out == Some(process));
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if state.out == Some(process) {
            return false;
        }
        state.out = Some(process);
        true
    }

    /// Existing region, if it is large enough and not much too large; else a new one.
    fn region(&self, len: usize) -> PyResult<MmapMut> {
        let idle = self.state.lock().unwrap_or_else(PoisonError::into_inner).idle.take();
        if let Some(idle) = idle.filter(|idle| idle.len() >= len && idle.len() / 4 <= len.max(1 << 20)) {
            return Ok(idle);
        }
        let made = MmapMut::map_anon(len.max(1));
        let memory = made.map_err(|error| {
            self.state.lock().unwrap_or_else(PoisonError::into_inner).out = None;
            PyMemoryError::new_err(format!("cannot stage {len} bytes: {error}"))
        })?;
        // Best effort: without huge pages it is only slower.
        let _ = memory.advise(Advice::HugePage);
        Ok(memory)
    }
}

/// Staging memory of one state, until it is passed to a save. The lock is never held while waiting for the GIL.
#[pyclass(frozen, module = "towline._towline")]
#[derive(Debug)]
pub(crate) struct StagingBuffer(Mutex<Option<Arc<Region>>>);

/// A region that a save owns.
struct OwnedRegion(Arc<Region>);

impl AsRef<[u8]> for OwnedRegion {
    fn as_ref(&self) -> &[u8] {
        (*self.0).as_ref()
    }
}

#[pymethods]
impl StagingBuffer {
    /// Address in memory.
    #[getter]
    fn address(&self) -> PyResult<usize> {
        Ok((*self.region()?).as_ref().as_ptr() as usize)
    }

    /// Copies ranges `(offset in the buffer, address, length)` on several threads, with the GIL released.
    fn fill(&self, py: Python<'_>, copies: Vec<(usize, usize, usize)>) -> PyResult<()> {
        let region = self.region()?;
        let base = (*region).as_ref().as_ptr() as usize;
        let fits =
            |&(offset, _, len): &(usize, usize, usize)| offset.checked_add(len).is_some_and(|end| end <= region.len);
        if !copies.iter().all(fits) {
            return Err(PyValueError::new_err("a copy does not fit the staging buffer"));
        }
        let copies: Vec<_> = copies.into_iter().map(|(offset, from, len)| (base + offset, from, len)).collect();
        py.detach(|| copy_all(&copies));
        Ok(())
    }

    /// Returns the region unused.
    fn release(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

impl StagingBuffer {
    fn region(&self) -> PyResult<Arc<Region>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone().ok_or_else(moved_away)
    }

    /// Moves the bytes to a save: the buffer cannot be filled any more.
    pub(crate) fn move_out(&self) -> PyResult<Bytes> {
        let region = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        region.map(OwnedRegion).map(Bytes::from_owner).ok_or_else(moved_away)
    }
}

fn moved_away() -> PyErr {
    PyValueError::new_err("this staging buffer already belongs to a save")
}
