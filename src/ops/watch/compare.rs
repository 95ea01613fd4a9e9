//! Check without reading the files whether a checkpoint is in the repository already, after a restart of the watch.

use std::path::Path;

use crate::error::Result;
use crate::format::{EntryKind, Manifest};
use crate::tree::{Rules, WalkKind, walk};

/// Comparison of a checkpoint with its saved tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Comparison {
    /// The same files, by path, size and modification time.
    Same,
    /// The same with files missing: it was being deleted.
    Less,
    /// Anything else.
    Other,
}

/// Compares the entry at `path` with a saved tree. Blocks.
pub(super) fn compare(path: &Path, rules: &Rules, manifest: &Manifest) -> Result<Comparison> {
    let found = walk(path, rules)?.found;
    let alike = found.iter().all(|found| {
        let Some(saved) = manifest.entry(&found.path) else { return false };
        match (&found.kind, &saved.kind) {
            (WalkKind::File, EntryKind::File(content)) => {
                (found.stat.size, found.stat.mtime) == (content.size, saved.mtime)
            }
            (WalkKind::Symlink { target }, EntryKind::Symlink(saved)) => target == saved,
            (WalkKind::Folder, EntryKind::Folder) => true,
            _ => false,
        }
    });
    Ok(match alike {
        true if found.len() == manifest.entries.len() => Comparison::Same,
        true => Comparison::Less,
        false => Comparison::Other,
    })
}
