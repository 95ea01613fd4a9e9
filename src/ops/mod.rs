//! The verbs: each one thing a user can ask, as methods of an opened [`Repository`](crate::repository::Repository).

mod amend;
mod cat;
mod collect;
mod diff;
mod doctor;
mod expire;
mod freeing;
mod names;
mod restore;
mod runs;
mod save;
mod show;
mod stand_alone;
mod stopping;
mod subpath;
mod sync;
mod tensors;
mod verify;
mod watch;

pub use amend::{AmendReport, Changes};
pub use cat::RangeSink;
pub use collect::{CollectOptions, CollectReport, HeldSession};
pub use diff::Change;
pub use doctor::{Check, Diagnosis, Outcome, diagnose, doctor};
pub use expire::{ExpirePlan, ExpirePolicy, PlannedStep, Reason};
pub use freeing::{PlannedRemoval, RemovePlan};
pub use names::{Listed, NameRange, Replaced};
pub use restore::{Removed, RestoreOptions, RestoreReport};
pub use runs::{RunListed, StepListed};
pub use save::{
    CutChoice, Expected, Explained, PartOptions, PartReport, RootLink, SaveOptions, SaveReport, SaveSource,
};
pub use show::{Shown, ShownEntry, ShownTensor};
#[cfg(feature = "agent")]
pub(crate) use subpath::chunks_below;
pub use sync::{PlannedName, SyncOptions, SyncReport, sync};
pub use tensors::{
    RestoreTensorsOptions, RestoreTensorsReport, TENSORS_FILE, TensorListed, TensorReading, TensorSelector, TensorSink,
    TensorsRead, WantedTensor,
};
pub use verify::{Damage, VerifyOptions, VerifyReport};
pub use watch::{HandoffTarget, LoggedMetric, Stop, Unsaved, WatchEvent, WatchOptions, WatchReport, is_checkpoint};

/// A path within a tree, as people read it.
pub(crate) fn shown(path: &[u8]) -> String {
    if path.is_empty() { ".".to_owned() } else { String::from_utf8_lossy(path).into_owned() }
}
