//! Decides by a series of observations whether a checkpoint is finished. Pure: observations, and the running time of the watch,
//! are inputs.

use std::time::Duration;

use super::candidate::Marker;
use crate::clock::Timestamp;

/// Maximum difference between the clocks of a checkpoint's writers.
const SKEW: Duration = Duration::from_secs(2);

/// One observed file of a checkpoint: digests of its path, and of metadata that changes when it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FileMark {
    pub(super) path: u64,
    pub(super) stat: u64,
}

/// One observation of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Observation {
    /// Device and inode of the file or folder itself, which a rename does not change.
    pub(super) identity: (u64, u64),
    /// Files except those with temporary names, sorted.
    pub(super) files: Vec<FileMark>,
    /// Bytes in them.
    pub(super) bytes: u64,
    /// Digest of files with temporary names.
    pub(super) temporary: u64,
    /// The latest modification of any file.
    pub(super) newest: Timestamp,
    /// Marker of its framework.
    pub(super) marker: Marker,
}

impl Observation {
    /// True if nothing is in it, or if it lacks a marker or an end: its writer left off, or is still writing.
    pub(super) fn is_incomplete(&self) -> bool {
        self.bytes == 0 || matches!(self.marker, Marker::Missing(_))
    }
}

/// Required times without a change.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// Without a marker of the framework.
    pub(super) quiet: Duration,
    /// With a marker: other ranks may lag.
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
pub(super) enum CheckpointState {
    /// Incomplete, or not unchanged for long enough.
    Writing,
    /// Complete.
    Finished(By),
    /// Unchanged for long, but without this marker of its framework.
    Unmarked(&'static str),
    /// Being deleted: files were removed, and nothing was written since.
    Shrunk,
}

/// All observations of one checkpoint.
#[derive(Clone, Debug)]
pub(super) struct ObservationHistory {
    last: Observation,
    /// Time of the first of the equal observations.
    since: Duration,
    /// True if it had a temporary name earlier, and has not changed since its rename.
    renamed: bool,
    shrunk: bool,
}

impl ObservationHistory {
    /// Creates it from the first observation.
    pub(super) fn begin(now: Duration, first: Observation, renamed: bool) -> Self {
        Self { last: first, since: now, renamed, shrunk: false }
    }

    /// Adds another observation of the same file or folder.
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

    /// Records that it changed while it was read.
    pub(super) fn disturb(&mut self, now: Duration) {
        self.since = now;
        self.renamed = false;
    }

    /// Current state.
    pub(super) fn state_at(&self, now: Duration, pace: Pace) -> CheckpointState {
        let quiet = now.saturating_sub(self.since);
        if self.last.bytes == 0 {
            return if quiet < pace.quiet {
                CheckpointState::Writing
            } else {
                CheckpointState::Unmarked("anything in it")
            };
        }
        if self.shrunk {
            return if quiet < pace.quiet { CheckpointState::Writing } else { CheckpointState::Shrunk };
        }
        match self.last.marker {
            Marker::Missing(name) if quiet >= pace.quiet => CheckpointState::Unmarked(name),
            Marker::Missing(_) => CheckpointState::Writing,
            _ if self.renamed => CheckpointState::Finished(By::Rename),
            // A marker older than the files is from before the step was written again.
            Marker::Present(at) if self.last.newest.since(at) <= SKEW && quiet >= pace.marked => {
                CheckpointState::Finished(By::Marker)
            }
            _ if quiet >= pace.quiet => CheckpointState::Finished(By::Quiet),
            _ => CheckpointState::Writing,
        }
    }

    /// Files of the last observation.
    pub(super) fn files(&self) -> &[FileMark] {
        &self.last.files
    }

    /// The latest modification of any file in the last observation.
    pub(super) fn newest(&self) -> Timestamp {
        self.last.newest
    }

    /// Device and inode of the last observation.
    pub(super) fn identity(&self) -> (u64, u64) {
        self.last.identity
    }
}

/// True if `now` is `before` with some files missing and no other difference. Both are sorted.
pub(super) fn is_less(now: &[FileMark], before: &[FileMark]) -> bool {
    now.len() < before.len() && now.iter().all(|file| before.binary_search(file).is_ok())
}
