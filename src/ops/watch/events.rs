//! Events of a watch.

use std::collections::BTreeMap;

use serde::{Serialize, Serializer};

use crate::error::{Error, ErrorKind};
use crate::ops::{RestoreReport, SaveReport};

/// An error that a watch survives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WatchFailure {
    /// Error message, with its causes.
    pub error: String,
    /// Kind of error.
    #[serde(serialize_with = "as_word")]
    pub kind: ErrorKind,
    /// Help for the user.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub help: Option<String>,
}

impl From<&Error> for WatchFailure {
    fn from(error: &Error) -> Self {
        Self { error: format!("{error:?}"), kind: error.kind(), help: error.help_text().map(str::to_owned) }
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn as_word<S: Serializer>(kind: &ErrorKind, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(kind.word())
}

/// An event of a watch.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum WatchEvent {
    /// The watch began.
    Watching {
        /// The folder.
        dir: String,
        /// The run.
        run: String,
    },
    /// The latest step was restored.
    Restored {
        /// The entry in the folder.
        entry: String,
        /// Report of the restore.
        report: RestoreReport,
    },
    /// Nothing was restored.
    NotRestored {
        /// Reason.
        reason: String,
        /// Step of the run that is later than the checkpoints in the folder, perhaps of another machine that went on with the run.
        #[serde(skip_serializing_if = "Option::is_none")]
        later: Option<String>,
    },
    /// The folder holds no checkpoint; only with `once`.
    NothingFound {
        /// The folder.
        dir: String,
        /// True if the folder itself is named as a checkpoint is.
        is_checkpoint: bool,
    },
    /// A checkpoint was saved.
    Saved {
        /// The entry in the folder.
        entry: String,
        /// Step.
        step: u64,
        /// Reason to take it as complete: `marker`, `rename` or `quiet`.
        by: &'static str,
        /// Metrics of the step.
        metrics: BTreeMap<String, f64>,
        /// Report of the save.
        report: SaveReport,
    },
    /// A checkpoint is in the repository already, with the same content.
    Kept {
        /// The entry in the folder.
        entry: String,
        /// Name.
        name: String,
    },
    /// An entry is not saved.
    PassedOver {
        /// The entry in the folder.
        entry: String,
        /// Reason.
        reason: String,
    },
    /// A checkpoint was removed before it was saved.
    Gone {
        /// The entry that was in the folder.
        entry: String,
    },
    /// A save failed and will be tried again.
    Failed {
        /// The entry in the folder.
        entry: String,
        /// Error.
        #[serde(flatten)]
        failure: WatchFailure,
        /// Seconds until the next try, at the earliest.
        retry_seconds: f64,
    },
    /// Time is short, and another agent has a copy of a checkpoint, which it saves unless this agent does.
    HandedOff {
        /// The entry in the folder.
        entry: String,
        /// Receiving agent.
        to: String,
    },
    /// Time is short, and no agent accepts a checkpoint.
    NotHandedOff {
        /// The entry in the folder.
        entry: String,
        /// Reason.
        error: String,
    },
    /// The folder does not exist.
    DirGone {
        /// The folder.
        dir: String,
    },
    /// The folder exists again.
    DirBack {
        /// The folder.
        dir: String,
    },
    /// The folder cannot be read.
    Unreadable {
        /// Error.
        #[serde(flatten)]
        failure: WatchFailure,
    },
    /// A stop request has come.
    Stopping {
        /// Time left, in seconds.
        seconds: f64,
        /// Checkpoints that are not saved yet.
        pending: Vec<String>,
    },
    /// The watch ended without saving a checkpoint.
    Unsaved {
        /// The entry in the folder.
        entry: String,
        /// Reason.
        reason: String,
    },
}
