//! The log: one ordered list of create-only objects. Its fold is all mutable state of the repository.
//!
//! A commit is one conditional create of the next number. A fold starts at the state that is known, or at a snapshot at or above the
//! boundary, and reads entries until one is missing. Then it reads the boundary: if that has moved past the start, the missing
//! entry may be a truncated one, and the fold starts over. Correctness never depends on listings; a stale one only costs requests.

mod adopt;
mod attempt;
mod audit;
mod commit;
mod entry;
mod facts;
mod fields;
mod fold;
mod history;
mod label_view;
mod labels;
mod quota;
mod removed;
mod salvage;
mod snapshot;
mod state;
mod truncate;
mod values;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use object_store::ObjectStore;

use tokio::time::Instant;

use super::layout::{self, Numbered};
use super::objects::{self, Sealed};
use super::open::read_id;
use crate::budget::{Budget, Retained};
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::format::envelope::Kind;
use crate::id::RepositoryId;

pub use attempt::{Attempt, AttemptId, Joint};
pub use audit::Audit;
pub use commit::Committed;
pub use entry::{Action, LogEntry};
pub use facts::{Measure, StepFacts};
pub use label_view::LabelView;
pub use labels::{Declassified, PolicyMark, REASON_LEN_MAX, labelled_name};
pub use quota::KeptUse;
pub use removed::{Keeping, KeptKey, KeptValue, log_forgotten};
pub use salvage::{Accepted, Salvaged};
pub use state::{Condemned, Purged, Refusal, Session, State};
pub use values::{RefValue, SegmentInfo};

/// Maximum bytes of an entry that is read again to compare it.
const COMPARED_LEN_MAX: u64 = 64 << 10;

/// One repository's log.
#[derive(Debug)]
pub struct Log {
    objects: Arc<dyn ObjectStore>,
    clock: Arc<dyn Clock>,
    budget: Budget,
    /// Repository that the log is of; None if that is not checked.
    repository: Option<RepositoryId>,
    seen: Mutex<CachedState>,
}

/// State known to this process: never wrong, possibly old.
#[derive(Debug, Default)]
struct CachedState {
    boundary: Boundary,
    state: Option<Arc<State>>,
    /// Begin of the last whole read.
    read: Option<Instant>,
    /// Memory of the state in the budget, if it is large.
    memory: Option<Retained>,
    /// Bytes of memory of the state.
    weight: u64,
    /// Time of the last check that the repository is still the same.
    checked: Option<Instant>,
    /// Last entry of the state, unless the state was read from a snapshot.
    last: Option<LastEntry>,
}

/// An entry as it was when it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LastEntry {
    number: u64,
    /// BLAKE3 of the object; none of a long one, which is not read again to compare it.
    digest: Option<blake3::Hash>,
}

impl LastEntry {
    fn of(number: u64, object: &[u8]) -> Self {
        Self { number, digest: (object.len() as u64 <= COMPARED_LEN_MAX).then(|| blake3::hash(object)) }
    }
}

/// Newest known truncation: its number, and the last entry that may be missing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Boundary {
    number: u64,
    floor: u64,
}

impl Log {
    /// The log in `objects`, read within `budget`.
    pub fn new(objects: Arc<dyn ObjectStore>, clock: Arc<dyn Clock>, budget: Budget) -> Self {
        Self { objects, clock, budget, repository: None, seen: Mutex::default() }
    }

    /// The same log, of `repository`: commits, and reads each minute, fail once another one is at its place, or an older copy of it.
    #[must_use]
    pub fn of(self, repository: RepositoryId) -> Self {
        self.seen().checked = Some(Instant::now());
        Self { repository: Some(repository), ..self }
    }

    /// The state that was read last; read now, if none was.
    ///
    /// # Errors
    /// As [`Log::refresh`].
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn latest_or_refresh(&self) -> Result<Arc<State>> {
        match self.last_seen() {
            Some(state) => Ok(state),
            None => self.refresh().await,
        }
    }

    /// The state that was read last, if that read began at `since` or later; without `since`, however old it is.
    #[must_use]
    pub fn seen_since(&self, since: Option<Instant>) -> Option<Arc<State>> {
        let seen = self.seen();
        let new_enough = since.is_none_or(|since| seen.read.is_some_and(|read| read >= since));
        seen.state.clone().filter(|_| new_enough)
    }

    /// Checks that the repository is still the one that was opened. Its log goes on at any number: an entry of this process would
    /// break that of another one.
    async fn check_repository(&self) -> Result<()> {
        let Some(expected) = self.repository else { return Ok(()) };
        let begun = Instant::now();
        tokio::try_join!(self.check_id(expected), self.check_last_entry())?;
        self.seen().checked = Some(begun);
        Ok(())
    }

    async fn check_id(&self, expected: RepositoryId) -> Result<()> {
        let key = layout::repository();
        let found = objects::get(&*self.objects, Kind::Repository, &key).await?;
        let found = found.map(|object| read_id(&object)).transpose()?;
        if found == Some(expected) {
            return Ok(());
        }
        let what = match found {
            Some(_) => "another repository is there now",
            None => "the repository is not there any more",
        };
        let found = found.map_or_else(|| "none".to_owned(), |found| found.to_string());
        Err(Error::not_found(what)
            .at(key)
            .expected(expected)
            .got(found)
            .help("put the repository back, or start this program again to use what is there"))
    }

    /// Checks that the log did not go back: that the last entry of the known state is still there, as it was.
    async fn check_last_entry(&self) -> Result<()> {
        let Some(last) = self.seen().last else { return Ok(()) };
        let found = match self.sealed_entry(last.number, COMPARED_LEN_MAX).await? {
            Sealed::Object(object) if LastEntry::of(last.number, &object) == last => return Ok(()),
            Sealed::Longer if last.digest.is_none() => return Ok(()),
            // Truncated: a snapshot has what it did.
            Sealed::Absent if self.advance_boundary().await?.floor >= last.number => return Ok(()),
            Sealed::Absent => "none",
            Sealed::Longer => "another entry",
            Sealed::Object(object) => {
                // Damage is another error.
                self.read_entry(last.number, &object).await?;
                "another entry"
            }
        };
        Err(Error::conflict("the repository went back to an older state than this program has read")
            .at(Numbered::Entry.key(last.number))
            .expected("the entry that was there")
            .got(found)
            .help(
                "start this program again to use what is there; what was saved since that state is to be saved again",
            ))
    }

    /// The state that was read last, if one was.
    #[must_use]
    pub fn last_seen(&self) -> Option<Arc<State>> {
        self.seen().state.clone()
    }

    fn seen(&self) -> MutexGuard<'_, CachedState> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
