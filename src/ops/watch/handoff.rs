//! Handoff of checkpoints that may not be saved in time.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use async_trait::async_trait;

use crate::error::Result;
use crate::name::Name;

/// A finished checkpoint that is not saved yet.
#[derive(Clone, Copy, Debug)]
pub struct UnsavedCheckpoint<'a> {
    /// A folder or a file.
    pub path: &'a Path,
    /// Name to save it as.
    pub name: &'a Name,
    /// Labels to save it with.
    pub labels: &'a BTreeMap<String, String>,
}

/// Destination of checkpoints that may not be saved in time. It stores them faster than the repository, and saves them to the
/// repository unless it is told that they are saved.
#[async_trait]
pub trait HandoffTarget: fmt::Debug + Send + Sync {
    /// Waits until time is short: checkpoints are then sent here first.
    ///
    /// # Cancel safety
    /// Must be safe.
    async fn needed(&self);

    /// Sends `checkpoint`, unless the target has it already; returns the agent that has it.
    ///
    /// # Cancel safety
    /// Must be safe: an incomplete checkpoint is not kept.
    async fn send(&self, checkpoint: &UnsavedCheckpoint<'_>) -> Result<String>;

    /// Releases all copies of `name`, which is saved. Takes a few seconds at most and never fails: a copy that is not released is
    /// saved once more, which stores nothing.
    async fn release(&self, name: &Name);
}
