//! A restore as long as threads of it may change its target: work that blocks goes on after the future is dropped.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::error::{Error, Result};
use crate::storage::enclosing_repository;
use crate::tree::{Durability, Target};
use crate::work::blocking;

/// A restore. On drop its threads stop changing the target.
#[derive(Debug)]
pub(super) struct Running {
    stop: CancellationToken,
    /// Counts the target, which all work that changes it shares.
    targets: TaskTracker,
}

impl Running {
    /// A restore that `stop` stops.
    pub(super) fn new(stop: &CancellationToken) -> Self {
        Self { stop: stop.child_token(), targets: TaskTracker::new() }
    }

    /// Opens the folder to restore to; for a dry run, none if it is not there.
    ///
    /// # Errors
    /// As [`Target::open`]; conflict, in a repository; cancelled, after a stop.
    pub(super) async fn target(&self, folder: PathBuf, dry_run: bool) -> Result<Option<Arc<Target>>> {
        let (stop, counted) = (self.stop.clone(), self.targets.token());
        let open = move || {
            check_outside(&folder)?;
            if stop.is_cancelled() {
                return Err(Error::cancelled("interrupted"));
            }
            let target = if dry_run {
                Target::there(&folder, Durability::Process)?
            } else {
                Some(Target::open(&folder, Durability::Process)?)
            };
            Ok(target.map(|target| Arc::new(target.until(stop, counted))))
        };
        blocking(open).await
    }

    /// Stops what is left of it, and waits until nothing changes the target any more. The rest of the restore must be dropped.
    ///
    /// # Cancel safety
    /// Safe.
    pub(super) async fn ended(&self) {
        self.stop.cancel();
        self.targets.close();
        self.targets.wait().await;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Refuses a destination in the folder of a repository, where files would be among its own, or replace them.
fn check_outside(folder: &Path) -> Result<()> {
    let Some(repository) = enclosing_repository(folder) else { return Ok(()) };
    Err(Error::conflict("destination lies in a repository")
        .at(folder.display())
        .got(repository.display())
        .help("restore to another folder"))
}
