//! Metadata of a file that shows whether it may have changed.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// Times, length and inode of a file; empty for a missing one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileStamp(Option<[i64; 4]>, Option<[u64; 2]>);

impl FileStamp {
    /// Metadata of the file at `path` now; links are followed. Blocking, but short.
    #[must_use]
    pub fn at(path: &Path) -> Self {
        let found = std::fs::metadata(path).ok();
        let times = |found: &Metadata| [found.mtime(), found.mtime_nsec(), found.ctime(), found.ctime_nsec()];
        Self(found.as_ref().map(times), found.as_ref().map(|found| [found.len(), found.ino()]))
    }
}
