//! Events of a watch.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::ops::{RestoreReport, SaveReport};

/// Something that a watch did or found.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum WatchEvent {
    /// It began.
    Watching {
        /// The folder.
        dir: String,
        /// The run.
        run: String,
    },
    /// The latest step was brought back.
    Restored {
        /// The entry in the folder.
        entry: String,
        /// Report of the restore.
        report: RestoreReport,
    },
    /// Nothing was brought back.
    NotRestored {
        /// Why.
        reason: String,
    },
    /// A checkpoint was saved.
    Saved {
        /// The entry in the folder.
        entry: String,
        /// Its step.
        step: u64,
        /// Reason to take it as complete: `marker`, `rename` or `quiet`.
        by: &'static str,
        /// The metrics that are told of the step.
        metrics: BTreeMap<String, f64>,
        /// Report of the save.
        report: SaveReport,
    },
    /// A checkpoint is in the repository as it is in the folder, by sizes and modification times.
    Kept {
        /// The entry in the folder.
        entry: String,
        /// The name that holds it.
        name: String,
    },
    /// An entry is not saved.
    PassedOver {
        /// The entry in the folder.
        entry: String,
        /// Why.
        reason: String,
    },
    /// A checkpoint went away before it was saved.
    Gone {
        /// The entry that was in the folder.
        entry: String,
    },
    /// A save failed and will be tried again.
    Failed {
        /// The entry in the folder.
        entry: String,
        /// Error message.
        error: String,
        /// In how many seconds it is tried again at the earliest.
        retry_seconds: f64,
    },
    /// Time is short, and another agent has a checkpoint: it saves it unless this one does.
    HandedOff {
        /// The entry in the folder.
        entry: String,
        /// Receiving agent.
        to: String,
    },
    /// Time is short, and nobody takes a checkpoint.
    NotHandedOff {
        /// The entry in the folder.
        entry: String,
        /// Why not.
        error: String,
    },
    /// The folder is not there.
    DirGone {
        /// The folder.
        dir: String,
    },
    /// The folder is there again.
    DirBack {
        /// The folder.
        dir: String,
    },
    /// The folder cannot be read.
    Unreadable {
        /// Error message.
        error: String,
    },
    /// It was asked to stop.
    Stopping {
        /// Time left, in seconds.
        seconds: f64,
        /// Checkpoints that are not saved yet.
        pending: Vec<String>,
    },
    /// It ended without saving this.
    Unsaved {
        /// The entry in the folder.
        entry: String,
        /// Why.
        reason: String,
    },
}
