//! Progress that Python reads while an operation goes on in another of its threads.

use pyo3::prelude::*;
use towline::progress::Progress;

/// The phase, plain bytes done and in all (0: not known), and stored bytes moved.
pub(crate) type Counters = (&'static str, u64, u64, u64);

/// Counters that an operation moves.
#[pyclass(frozen, name = "Progress", module = "towline._towline")]
#[derive(Debug, Default)]
pub(crate) struct Watched(Progress);

impl Watched {
    /// Progress for the operation; shares the counters.
    pub(crate) fn progress(&self) -> Progress {
        self.0.clone()
    }
}

#[pymethods]
impl Watched {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// The current counters.
    fn snapshot(&self) -> Counters {
        counters(&self.0)
    }
}

/// The current counters of `progress`.
pub(crate) fn counters(progress: &Progress) -> Counters {
    let now = progress.snapshot();
    (now.phase, now.done, now.total, now.moved)
}
