//! The operations, as methods of an open [`Repository`](crate::repository::Repository).

mod amend;
mod cat;
mod collect;
mod diff;
mod doctor;
mod expire;
mod freeing;
mod in_place;
mod label;
mod names;
mod recorded;
mod remove;
mod restore;
mod runs;
mod save;
mod settle;
mod show;
mod stand_alone;
mod stopping;
mod subpath;
mod sync;
mod tensors;
mod undelete;
mod verify;
mod watch;

use std::borrow::Cow;

pub use amend::{AmendReport, Changes, Graft};
pub use cat::RangeSink;
pub use collect::{CollectOptions, CollectReport, HeldSession};
pub use diff::{Change, Comparison};
pub use doctor::{Check, Diagnosis, Outcome, diagnose, doctor};
pub use expire::{ExpirePlan, ExpirePolicy, PlannedStep, Reason};
pub use freeing::{PlannedRemoval, RemovePlan};
pub use label::Labelled;
#[cfg(feature = "agent")]
pub(crate) use label::all_labels;
pub use names::{Listed, NameRange, Replaced};
pub use remove::{RemoveOptions, RemoveReport};
pub use restore::{RemovedFiles, RestoreOptions, RestoreReport};
pub use runs::{RunListed, StepListed};
pub use save::{
    CutChoice, Expected, Explained, PartOptions, PartReport, RootLink, SaveOptions, SaveReport, SaveSource,
};
pub use settle::Settled;
pub use show::{CodecUse, ShownEntry, ShownTensor, ShownTensors, ShownTree, TreeStorage, TreeSummary};
#[cfg(feature = "agent")]
pub(crate) use subpath::chunks_below;
pub use sync::{
    Existing, FailedName, KeptName, KeptReason, PlannedName, SyncOptions, SyncReport, check_new_destination, sync,
};
pub use tensors::{
    DecodeOn, DeviceRange, DeviceRead, DeviceTensors, PINNED_MAX, RestoreTensorsOptions, RestoreTensorsReport,
    TENSORS_FILE, TensorListed, TensorReading, TensorSelector, TensorSink, TensorsRead, WantedTensor,
};
pub use undelete::{
    NameHistory, NameValue, RemovalCause, RemovalEvent, RemovedValue, UndeleteOptions, UndeleteReport, UndeletedNames,
};
pub use verify::{Damage, VerifyOptions, VerifyReport};
#[cfg(feature = "agent")]
pub(crate) use watch::with_logged;
pub use watch::{
    HandoffTarget, LoggedMetric, Stop, UnsavedCheckpoint, WatchEvent, WatchFailure, WatchOptions, WatchReport,
    is_checkpoint,
};

/// A path within a tree, as text for display.
pub(crate) fn shown(path: &[u8]) -> String {
    path_text(path).into_owned()
}

/// As [`shown`], without a copy where the path is UTF-8.
fn path_text(path: &[u8]) -> Cow<'_, str> {
    if path.is_empty() { ".".into() } else { String::from_utf8_lossy(path) }
}
