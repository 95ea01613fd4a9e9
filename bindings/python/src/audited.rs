//! The audit log of what Python reads and saves, where `TOWLINE_AUDIT` names a folder: the same as the command line's.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use pyo3::prelude::*;
use towline::Result;
use towline::agent::command_log;
use towline::audit::{Action, Recorded};
use towline::repository::Repository;

use crate::runtime::runtime;

/// Environment variable with the folder of the log.
const VARIABLE: &str = "TOWLINE_AUDIT";

/// Open trees, whose entries in the log have no end yet.
static OPEN: Mutex<Vec<Weak<Reading>>> = Mutex::new(Vec::new());

/// Records that `action` on `name` of `repository` begins, by this process's user, if there is a log.
///
/// # Errors
/// It cannot be recorded: the action must not begin.
pub(crate) async fn record(repository: &Repository, action: Action, name: &str) -> Result<Recorded> {
    record_all(repository, action, &[name.to_owned()], None).await
}

/// As [`record`], for several names; `to` is the destination.
///
/// # Errors
/// As [`record`].
pub(crate) async fn record_all(
    repository: &Repository,
    action: Action,
    names: &[String],
    to: Option<String>,
) -> Result<Recorded> {
    match std::env::var_os(VARIABLE).filter(|folder| !folder.is_empty()) {
        Some(folder) => command_log(PathBuf::from(folder)).record(repository, action, names, to).await,
        None => Ok(Recorded::default()),
    }
}

/// Entry of a tree that is read by range: its end, when the tree is freed or Python exits, has the bytes of all reads.
#[derive(Debug)]
pub(crate) struct Reading {
    recorded: Mutex<Option<Recorded>>,
    bytes: AtomicU64,
    process: u32,
}

impl Reading {
    /// Counts the reads of an entry that was recorded.
    pub(crate) fn begin(recorded: Recorded) -> Arc<Self> {
        let reading =
            Self { recorded: Mutex::new(Some(recorded)), bytes: AtomicU64::new(0), process: std::process::id() };
        let reading = Arc::new(reading);
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|other| other.strong_count() > 0);
        open.push(Arc::downgrade(&reading));
        reading
    }

    /// Counts bytes that were read.
    pub(crate) fn count(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Records the end, and publishes the head of the log in the background. In a forked child the parent's entries stay as
    /// they are.
    fn end(&self, wait: bool) {
        if self.process != std::process::id() {
            return;
        }
        let recorded = self.recorded.lock().unwrap_or_else(PoisonError::into_inner).take();
        let ended = recorded.and_then(|recorded| recorded.end_with(self.bytes.load(Ordering::Relaxed), "done"));
        let (Some(ended), Ok(runtime)) = (ended, runtime()) else { return };
        let publishing = runtime.spawn(async move { ended.publish().await });
        if wait {
            let _ = runtime.block_on(publishing);
        }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.end(false);
    }
}

/// Ends the entries of trees that are still open, when Python ends.
#[pyfunction]
pub(crate) fn end_audit(py: Python<'_>) {
    py.detach(|| {
        let open = std::mem::take(&mut *OPEN.lock().unwrap_or_else(PoisonError::into_inner));
        open.iter().filter_map(Weak::upgrade).for_each(|reading| reading.end(true));
    });
}
