//! The log: one ordered list of create-only objects whose fold is the repository's whole mutable state.
//!
//! A commit is one conditional create of the next number. A fold starts at a snapshot at or above the boundary, reads
//! entries until there is none, and ends by reading the boundary again: had it moved past the start, a missing entry
//! would say nothing, so the fold starts over. No listing is believed: a stale one only costs requests.

mod attempt;
mod audit;
mod commit;
mod entry;
mod facts;
mod fold;
mod salvage;
mod state;
mod truncate;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use object_store::ObjectStore;

use crate::budget::Budget;
use crate::clock::Clock;

pub use attempt::{Attempt, AttemptId, Joint};
pub use audit::Audit;
pub use commit::Committed;
pub use entry::{Action, LogEntry};
pub use facts::{Measure, StepFacts, is_metric_name};
pub use salvage::Salvaged;
pub use state::{Condemned, Purged, RefValue, Refusal, SegmentInfo, Session, State};

/// One repository's log.
#[derive(Debug)]
pub struct Log {
    objects: Arc<dyn ObjectStore>,
    clock: Arc<dyn Clock>,
    budget: Budget,
    seen: Mutex<Seen>,
}

/// Knowledge of this process; never wrong, at most old.
#[derive(Clone, Debug, Default)]
struct Seen {
    boundary: Boundary,
    state: Option<Arc<State>>,
}

/// The newest truncation known: its number and the last entry it allows to be missing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Boundary {
    number: u64,
    floor: u64,
}

impl Log {
    /// The log in `objects`, read within `budget`.
    pub fn new(objects: Arc<dyn ObjectStore>, clock: Arc<dyn Clock>, budget: Budget) -> Self {
        Self { objects, clock, budget, seen: Mutex::default() }
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
