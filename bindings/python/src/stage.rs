//! Staged memory: where a state is copied to, so that the training loop may go on while the copy is saved.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use memmap2::{Advice, MmapMut};
use pyo3::exceptions::{PyMemoryError, PyValueError};
use pyo3::prelude::*;

use crate::memory::copy_all;

/// Interval of looks for signals.
const SIGNALS_EVERY: Duration = Duration::from_millis(50);

/// Hands out the one region that states are staged in, again and again: a loop that saves faster than saves end waits
/// instead of growing.
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
    /// The region, while it is in use, and for which process.
    out: Option<u32>,
}

/// A region in use; it goes back when nothing refers to it any more.
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

    /// A stage of `len` bytes, once the last one is free; none after `timeout` seconds without one.
    #[pyo3(signature = (len, timeout=None))]
    fn take(&self, py: Python<'_>, len: usize, timeout: Option<f64>) -> PyResult<Option<Stage>> {
        let until = timeout.map(|seconds| Instant::now() + Duration::from_secs_f64(seconds.max(0.0)));
        loop {
            let step =
                until.map_or(SIGNALS_EVERY, |until| until.saturating_duration_since(Instant::now()).min(SIGNALS_EVERY));
            if py.detach(|| self.0.wait(step)) {
                let memory = py.detach(|| self.0.region(len))?;
                let region = Region { memory: Some(memory), len, pool: Arc::clone(&self.0) };
                return Ok(Some(Stage(Mutex::new(Some(Arc::new(region))))));
            }
            py.check_signals()?;
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(None);
            }
        }
    }

    /// Is the region free?
    fn idle(&self) -> bool {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner).out.is_none()
    }
}

impl Pool {
    /// Marks the region as in use, if it becomes free in time. What a parent process has in use, a forked child never gets
    /// back: it makes its own.
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

    /// The region that there is, if it suffices without holding much more, else a new one.
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
        // A wish: without huge pages it is slower, nothing else.
        let _ = memory.advise(Advice::HugePage);
        Ok(memory)
    }
}

/// A state's staged bytes, while they are filled. The lock is never held while waiting for Python's.
#[pyclass(frozen, module = "towline._towline")]
#[derive(Debug)]
pub(crate) struct Stage(Mutex<Option<Arc<Region>>>);

/// A region that was given away.
struct Given(Arc<Region>);

impl AsRef<[u8]> for Given {
    fn as_ref(&self) -> &[u8] {
        (*self.0).as_ref()
    }
}

#[pymethods]
impl Stage {
    /// Address in memory.
    #[getter]
    fn address(&self) -> PyResult<usize> {
        Ok((*self.region()?).as_ref().as_ptr() as usize)
    }

    /// Copies `(offset here, address, length)` each, on several threads, with the GIL released.
    fn fill(&self, py: Python<'_>, copies: Vec<(usize, usize, usize)>) -> PyResult<()> {
        let region = self.region()?;
        let base = (*region).as_ref().as_ptr() as usize;
        let fits =
            |&(offset, _, len): &(usize, usize, usize)| offset.checked_add(len).is_some_and(|end| end <= region.len);
        if !copies.iter().all(fits) {
            return Err(PyValueError::new_err("a copy does not fit the stage"));
        }
        let copies: Vec<_> = copies.into_iter().map(|(offset, from, len)| (base + offset, from, len)).collect();
        py.detach(|| copy_all(&copies));
        Ok(())
    }

    /// Gives the region back unused.
    fn release(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

impl Stage {
    fn region(&self) -> PyResult<Arc<Region>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone().ok_or_else(given_away)
    }

    /// The bytes, for good: nobody fills the stage after this.
    pub(crate) fn give_away(&self) -> PyResult<Bytes> {
        let region = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        region.map(Given).map(Bytes::from_owner).ok_or_else(given_away)
    }
}

fn given_away() -> PyErr {
    PyValueError::new_err("this stage was given away already")
}
