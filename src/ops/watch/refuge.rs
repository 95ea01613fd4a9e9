//! Where a checkpoint goes when there may be no time to save it.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use async_trait::async_trait;

use crate::error::Result;
use crate::repository::Name;

/// A finished checkpoint that is not saved yet.
#[derive(Clone, Copy, Debug)]
pub struct Unsaved<'a> {
    /// A folder or a file.
    pub path: &'a Path,
    /// Name to save it as.
    pub name: &'a Name,
    /// Labels that it is to have.
    pub labels: &'a BTreeMap<String, String>,
}

/// Somebody who has checkpoints sooner than the repository, and saves them if nobody says that they are saved.
#[async_trait]
pub trait Refuge: fmt::Debug + Send + Sync {
    /// Until time is short: from then on a checkpoint goes there first.
    ///
    /// # Cancel safety
    /// Must be safe.
    async fn needed(&self);

    /// Gives it `checkpoint`, unless it has that already; says who has it.
    ///
    /// # Cancel safety
    /// Must be safe: nothing that is not whole is kept.
    async fn give(&self, checkpoint: &Unsaved<'_>) -> Result<String>;

    /// `name` is saved: whatever was given for it need not be kept. It may take a few seconds, and never fails: what is kept in vain is
    /// saved once more, which stores nothing.
    async fn release(&self, name: &Name);
}
