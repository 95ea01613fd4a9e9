//! Two tokio runtimes for each process, and waiting in one while Python's signals are heard.

use std::future::Future;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use pyo3::exceptions::{PyOSError, PyRuntimeError};
use pyo3::prelude::*;
use tokio::runtime::Runtime;
use tokio::time::timeout;
use towline::Result;

use crate::errors::raised;

/// Interval of looks for signals: a Ctrl-C is answered within this.
const SIGNALS_EVERY: Duration = Duration::from_millis(50);

/// How much the threads of [`background`] yield to others: of a core that a training loop wants as well they get about a tenth
/// (<https://man7.org/linux/man-pages/man7/sched.7.html>, "The nice value"), of one that is idle all.
const NICE: i32 = 10;

/// A runtime, and the process that its threads live in.
struct Owned {
    process: u32,
    runtime: Runtime,
}

/// Where this process's runtime of one kind is kept. Never freed: a forked child has the parent's, whose threads it has not,
/// and dropping that would wait for them.
struct Kept(AtomicPtr<Owned>);

static FOREGROUND: Kept = Kept::new();
static BACKGROUND: Kept = Kept::new();

impl Kept {
    const fn new() -> Self {
        Self(AtomicPtr::new(std::ptr::null_mut()))
    }

    fn get(&self, nice: i32) -> PyResult<&'static Runtime> {
        let process = std::process::id();
        let there = self.0.load(Ordering::Acquire);
        // SAFETY: what the pointer names was leaked, and is never changed.
        if let Some(owned) = unsafe { there.as_ref() }
            && owned.process == process
        {
            return Ok(&owned.runtime);
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .thread_name("towline")
            .on_thread_start(move || {
                // Of this thread alone, on Linux. A wish: the work is done at any priority.
                let _ = (nice > 0).then(|| rustix::process::nice(nice));
            })
            .enable_all()
            .build()
            .map_err(|error| PyOSError::new_err(format!("towline cannot start its threads: {error}")))?;
        let made: &'static Owned = Box::leak(Box::new(Owned { process, runtime }));
        let new = std::ptr::from_ref(made).cast_mut();
        match self.0.compare_exchange(there, new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(&made.runtime),
            // Another thread was faster.
            Err(_) => self.get(nice),
        }
    }
}

/// This process's runtime for what somebody waits for.
///
/// # Errors
/// Threads cannot be started.
pub(crate) fn runtime() -> PyResult<&'static Runtime> {
    FOREGROUND.get(0)
}

/// This process's runtime for what goes on beside a training loop, and should not slow it down.
///
/// # Errors
/// Threads cannot be started.
pub(crate) fn background() -> PyResult<&'static Runtime> {
    BACKGROUND.get(NICE)
}

/// Time that stopped work has to record what it has stored.
pub(crate) const STOPPING: Duration = Duration::from_secs(8);

/// Waits for `future` with the GIL released. A signal whose handler raises, such as Ctrl-C's, ends the work and is raised
/// once nothing of it runs any more.
///
/// # Errors
/// Errors of the future, or of a signal's handler.
pub(crate) fn wait<T: Send + 'static>(
    py: Python<'_>,
    future: impl Future<Output = Result<T>> + Send + 'static,
) -> PyResult<T> {
    wait_or_stop(py, None, future)
}

/// As [`wait`]; but a signal calls `stop`, and the work has [`STOPPING`] to end by itself.
///
/// # Errors
/// As [`wait`].
pub(crate) fn wait_or_stop<T: Send + 'static>(
    py: Python<'_>,
    stop: Option<Box<dyn FnOnce() + Send>>,
    future: impl Future<Output = Result<T>> + Send + 'static,
) -> PyResult<T> {
    let runtime = runtime()?;
    let (sender, mut receiver) = sync_channel(1);
    let mut task = runtime.spawn(async move {
        // Nobody listens if a signal came first.
        let _ = sender.send(future.await);
    });
    loop {
        match py.detach(|| {
            let receiver = &mut receiver;
            receiver.recv_timeout(SIGNALS_EVERY)
        }) {
            Ok(outcome) => return outcome.map_err(|error| raised(py, &error)),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(PyRuntimeError::new_err("towline: a task ended without a result; its panic is on stderr"));
            }
            Err(RecvTimeoutError::Timeout) => {
                if let Err(signal) = py.check_signals() {
                    if let Some(stop) = stop {
                        stop();
                        let ending = py.detach(|| runtime.block_on(async { timeout(STOPPING, &mut task).await }));
                        if ending.is_ok() {
                            return Err(signal);
                        }
                    }
                    task.abort();
                    // Cancelled, or done after all: it has ended either way.
                    let _ = py.detach(|| runtime.block_on(task));
                    return Err(signal);
                }
            }
        }
    }
}
