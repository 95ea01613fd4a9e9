//! Files in the target that the tree lacks: found before anything is written, removed after everything is in place.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use serde::Serialize;

use super::is_zero;
use super::items::Items;
use crate::budget::{Budget, GrowingMemory};
use crate::error::{Error, Result};
use crate::ops::shown;
use crate::size::show;
use crate::tree::{Target, TargetEntries, WalkKind};

/// Files that a restore removed, or would remove, because the tree lacks them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RemovedFiles {
    /// Number of entries other than folders.
    pub files: u64,
    /// Bytes in the files.
    pub bytes: u64,
    /// Paths below the destination; a folder that is removed completely is one path.
    pub paths: Vec<String>,
    /// Other files and folders that stay, because ignore files leave them out of a save; the content of a folder does not count.
    #[serde(skip_serializing_if = "is_zero")]
    pub ignored: u64,
}

/// The entries to remove.
#[derive(Clone, Debug, Default)]
pub(super) struct Surplus {
    paths: Vec<Vec<u8>>,
    files: u64,
    bytes: u64,
    ignored: u64,
    _memory: Option<Arc<GrowingMemory>>,
}

impl Surplus {
    /// Finds entries of `target` that are not in `items`, except the folders `keep` and their content, and what the
    /// ignore files there leave out.
    pub(super) fn find(items: &Items, target: &Target, keep: &[PathBuf], budget: &Budget) -> Result<Self> {
        let wanted: BTreeSet<&[u8]> = items.list.iter().map(|item| item.path.as_slice()).collect();
        let TargetEntries { list, ignored, memory } = target.entries(keep, &wanted, budget)?;
        let mut surplus = Self { ignored, _memory: memory.map(Arc::new), ..Self::default() };
        for entry in list.into_iter().filter(|entry| !wanted.contains(entry.path.as_slice())) {
            surplus.files += u64::from(entry.kind != Some(WalkKind::Folder));
            surplus.bytes += entry.bytes;
            let above = surplus.paths.last();
            let within = above.is_some_and(|above| {
                entry.path.strip_prefix(above.as_slice()).is_some_and(|rest| rest.first() == Some(&b'/'))
            });
            if !within {
                surplus.paths.push(entry.path);
            }
        }
        Ok(surplus)
    }

    /// Refuses to empty a folder for a tree without files.
    pub(super) fn check(&self, items: &Items, nothing_wanted: bool) -> Result<()> {
        if !nothing_wanted || self.paths.is_empty() {
            return Ok(());
        }
        Err(Error::conflict("restoring this empty tree would empty the folder")
            .at(items.folder.display())
            .got(format!("{} files with {} there", self.files, show(self.bytes)))
            .help("--yes empties it all the same; --dry-run shows what would go"))
    }

    /// Removes the entries.
    pub(super) fn remove(&self, target: &Target) -> Result<()> {
        self.paths.iter().try_for_each(|path| target.remove(path))
    }

    /// The entries for a report. Paths that are UTF-8 are not copied: there may be very many.
    pub(super) fn into_removed(self) -> RemovedFiles {
        let text = |path: Vec<u8>| String::from_utf8(path).unwrap_or_else(|error| shown(error.as_bytes()));
        let paths = self.paths.into_iter().map(text).collect();
        RemovedFiles { files: self.files, bytes: self.bytes, paths, ignored: self.ignored }
    }
}
