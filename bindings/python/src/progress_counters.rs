//! Progress counters that Python reads while another thread runs the operation.

use pyo3::prelude::*;
use towline::progress::Progress;

/// Phase, plain bytes done and in total (0: not known), and stored bytes moved.
pub(crate) type Counters = (&'static str, u64, u64, u64);

/// Counters that an operation updates.
#[pyclass(frozen, name = "Progress", module = "towline._towline")]
#[derive(Debug, Default)]
pub(crate) struct ProgressCounters(Progress);

impl ProgressCounters {
    /// Handle for the operation that shares the counters.
    pub(crate) fn progress(&self) -> Progress {
        self.0.clone()
    }
}

#[pymethods]
impl ProgressCounters {
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
