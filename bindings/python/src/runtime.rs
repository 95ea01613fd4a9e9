//! Two tokio runtimes for each process, and waits in one of them that handle Python's signals.

use std::future::Future;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use pyo3::exceptions::{PyOSError, PyRuntimeError};
use pyo3::prelude::*;
use tokio::runtime::Runtime;
use tokio::time::timeout;
use towline::{Error, Result};

use crate::errors::raised;

/// Interval of checks for signals: Ctrl-C takes effect within this time.
const SIGNALS_EVERY: Duration = Duration::from_millis(50);

/// Nice value of the threads of [`background`]: on a core that a training loop uses, too, they get about a tenth of the time
/// (<https://man7.org/linux/man-pages/man7/sched.7.html>, "The nice value"); on an idle core, all of it.
const NICE: i32 = 10;

/// A runtime, and the process of its threads.
struct Owned {
    process: u32,
    runtime: Runtime,
}

/// Holder of this process's runtime of one kind. Runtimes are never freed: a forked child inherits the parent's runtime without
/// its threads, and dropping it would wait for them for ever.
struct RuntimeCell(AtomicPtr<Owned>);

static FOREGROUND: RuntimeCell = RuntimeCell::new();
static BACKGROUND: RuntimeCell = RuntimeCell::new();

impl RuntimeCell {
    const fn new() -> Self {
        Self(AtomicPtr::new(std::ptr::null_mut()))
    }

    fn get(&self, nice: i32) -> PyResult<&'static Runtime> {
        let process = std::process::id();
        let there = self.0.load(Ordering::Acquire);
        // SAFETY: the pointer is to a leaked value, which never changes.
        if let Some(owned) = unsafe { there.as_ref() }
            && owned.process == process
        {
            return Ok(&owned.runtime);
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .thread_name("towline")
            .on_thread_start(move || {
                // Affects this thread alone, on Linux. Best effort: the work is done at any priority.
                let _ = (nice > 0).then(|| rustix::process::nice(nice));
            })
            .enable_all()
            .build()
            .map_err(|error| PyOSError::new_err(format!("towline cannot start its threads: {error}")))?;
        let made: &'static Owned = Box::leak(Box::new(Owned { process, runtime }));
        let new = std::ptr::from_ref(made).cast_mut();
        match self.0.compare_exchange(there, new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(&made.runtime),
            // Another thread set it first.
            Err(_) => self.get(nice),
        }
    }
}

/// This process's runtime for operations that the caller waits for.
///
/// # Errors
/// Threads cannot be started.
pub(crate) fn runtime() -> PyResult<&'static Runtime> {
    FOREGROUND.get(0)
}

/// This process's runtime for background work, which should not slow down a training loop.
///
/// # Errors
/// Threads cannot be started.
pub(crate) fn background() -> PyResult<&'static Runtime> {
    BACKGROUND.get(NICE)
}

/// Time for stopped work to record the data that it has stored.
pub(crate) const STOPPING: Duration = Duration::from_secs(8);

/// Result of `work`, or Unreachable if it takes longer than `limit`: the work is then dropped.
///
/// # Errors
/// Unreachable; errors of the work.
pub(crate) async fn within<T>(limit: Option<Duration>, work: impl Future<Output = Result<T>>) -> Result<T> {
    let Some(limit) = limit else { return work.await };
    let silent = || Error::unreachable("store does not answer").got(format!("nothing for {} s", limit.as_secs()));
    timeout(limit, work).await.map_err(|_| silent())?
}

/// Waits for `future` with the GIL released. If the handler of a signal raises, such as that of Ctrl-C, the work is ended, and
/// the exception is raised once the work has stopped.
///
/// # Errors
/// Errors of the future, or of a signal's handler.
pub(crate) fn wait<T: Send + 'static>(
    py: Python<'_>,
    future: impl Future<Output = Result<T>> + Send + 'static,
) -> PyResult<T> {
    wait_or_stop(py, None, future)
}

/// As [`wait`], but a signal first calls `stop`, and the work has [`STOPPING`] to end in order.
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
        // The receiver is gone if a signal came first.
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
                    // Waits until the task has ended, cancelled or complete.
                    let _ = py.detach(|| runtime.block_on(task));
                    return Err(signal);
                }
            }
        }
    }
}
