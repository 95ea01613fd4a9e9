//! From a series of looks at one checkpoint to whether it is finished. Pure: time is how long the watch has run, and what a
//! look saw is handed in.

use std::time::Duration;

use super::candidate::Marker;
use crate::clock::Timestamp;

/// By how much the clocks of a checkpoint's writers may differ.
const SKEW: Duration = Duration::from_secs(2);

/// One file of a checkpoint, as one look saw it: digests of its path, and of all that changes when it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FileMark {
    pub(super) path: u64,
    pub(super) stat: u64,
}

/// One checkpoint, as one look saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Observation {
    /// Device and inode of the file or folder itself: they stay when it is renamed.
    pub(super) identity: (u64, u64),
    /// Its files but those with temporary names, sorted.
    pub(super) files: Vec<FileMark>,
    /// Bytes in them.
    pub(super) bytes: u64,
    /// Digest of what has temporary names.
    pub(super) temporary: u64,
    /// The latest modification of any file.
    pub(super) newest: Timestamp,
    /// Marker of its framework.
    pub(super) marker: Marker,
}

/// Times without a change that are required.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// Without a word from the framework.
    pub(super) quiet: Duration,
    /// After it said that it is done: other ranks may lag.
    pub(super) marked: Duration,
}

/// Evidence that a checkpoint is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    Marker,
    Rename,
    Quiet,
}

impl By {
    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::Marker => "marker",
            Self::Rename => "rename",
            Self::Quiet => "quiet",
        }
    }
}

/// State of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Not whole yet, or not long enough.
    Writing,
    /// Whole.
    Finished(By),
    /// Quiet for long, but its framework has not said that it is done: it lacks this.
    Unmarked(&'static str),
    /// Files went away and nothing was written since: it is being deleted.
    Shrunk,
}

/// All observations of one checkpoint.
#[derive(Clone, Debug)]
pub(super) struct Series {
    last: Observation,
    /// When the first of the looks that saw the same was.
    since: Duration,
    /// It had a temporary name in an earlier look, and has not changed since it was renamed.
    renamed: bool,
    shrunk: bool,
}

impl Series {
    /// Begins with a first look.
    pub(super) fn begin(now: Duration, first: Observation, renamed: bool) -> Self {
        Self { last: first, since: now, renamed, shrunk: false }
    }

    /// Takes in another look at the same file or folder.
    pub(super) fn observe(&mut self, now: Duration, next: Observation) {
        if next == self.last {
            return;
        }
        let grown = next.files.iter().any(|file| self.last.files.binary_search(file).is_err());
        self.shrunk = !grown && (self.shrunk || is_less(&next.files, &self.last.files));
        // A change of the tracker beside it is no change of the checkpoint.
        if next.files != self.last.files || next.temporary != self.last.temporary {
            self.since = now;
            self.renamed = false;
        }
        self.last = next;
    }

    /// It was found to change while it was read.
    pub(super) fn disturb(&mut self, now: Duration) {
        self.since = now;
        self.renamed = false;
    }

    /// Current state.
    pub(super) fn standing(&self, now: Duration, pace: Pace) -> Standing {
        let quiet = now.saturating_sub(self.since);
        if self.last.bytes == 0 {
            return if quiet < pace.quiet { Standing::Writing } else { Standing::Unmarked("anything in it") };
        }
        if self.shrunk {
            return if quiet < pace.quiet { Standing::Writing } else { Standing::Shrunk };
        }
        match self.last.marker {
            Marker::Missing(name) if quiet >= pace.quiet => Standing::Unmarked(name),
            Marker::Missing(_) => Standing::Writing,
            _ if self.renamed => Standing::Finished(By::Rename),
            // A marker that is older than the files is that of the step before it was written again.
            Marker::Present(at) if self.last.newest.since(at) <= SKEW && quiet >= pace.marked => {
                Standing::Finished(By::Marker)
            }
            _ if quiet >= pace.quiet => Standing::Finished(By::Quiet),
            _ => Standing::Writing,
        }
    }

    /// The files of the last look.
    pub(super) fn files(&self) -> &[FileMark] {
        &self.last.files
    }

    /// The device and inode of the last look.
    pub(super) fn identity(&self) -> (u64, u64) {
        self.last.identity
    }
}

/// Whether `now` is `before` with files missing, and no other difference. Both are sorted.
pub(super) fn is_less(now: &[FileMark], before: &[FileMark]) -> bool {
    now.len() < before.len() && now.iter().all(|file| before.binary_search(file).is_ok())
}
