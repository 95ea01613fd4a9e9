//! Reading the log: the state that is known, or boundary and snapshot; entries; boundary.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use object_store::ObjectMeta;
use tokio::time::Instant;

use super::{Boundary, LastEntry, Log, LogEntry, State};
use crate::budget::{Charge, Retained};
use crate::error::{Error, ErrorKind, Result};
use crate::format::envelope::{Kind, open, version};
use crate::format::wire::Reader;
use crate::limits::MIB;
use crate::repository::layout::Numbered;
use crate::repository::listing::listed;
use crate::repository::objects::{self, Sealed};

/// Entries requested at once.
const AHEAD: u64 = 8;
/// Maximum bytes of an entry that is fetched before it is its turn.
const AHEAD_LEN_MAX: u64 = MIB;
/// Minimum bytes of states and entries that are counted in the memory budget.
const COUNTED_FROM: u64 = MIB;
/// Maximum folds that a moving boundary may interrupt; more are an error.
const ATTEMPTS: usize = 32;
/// Maximum gap between two numbers in the log. An object further ahead was not written by a correct writer, which always writes
/// the next number.
const GAP_MAX: u64 = 1 << 20;
/// Bytes of memory of the number of an entry: in its set, and of the gap before it.
const NUMBER_WEIGHT: usize = 48;
/// Largest number of an entry: a million entries per second for a hundred thousand years.
pub(super) const NUMBER_MAX: u64 = 1 << 62;
/// Time after which a read of the log checks that it is still that of the same repository.
const CHECKED_EVERY: Duration = Duration::from_mins(1);
/// Damaged snapshots of which the log says a line each, per fold.
const WARNINGS_MAX: usize = 4;

/// Memory of a state while entries are applied to it. Many small entries make a large state.
#[derive(Default)]
pub(super) struct Growth {
    /// Bytes in the budget, those of the state that was known before included.
    counted: u64,
    reserved: Vec<Retained>,
    /// Bytes of the state; too many, where an entry replaces what an earlier one set.
    estimate: u64,
}

impl Growth {
    /// Reserves memory for an entry of `bytes` that will be applied to `state`.
    pub(super) fn expect(&mut self, log: &Log, state: &State, bytes: u64) -> Result<()> {
        self.estimate = self.estimate.saturating_add(bytes);
        // Weighing a state takes time in proportion to it.
        if self.estimate < self.counted + COUNTED_FROM.max(self.counted / 8) {
            Ok(())
        } else {
            self.grow(log, state, bytes)
        }
    }

    /// Weighs `state`, and reserves what it has grown by, and `more`.
    pub(super) fn grow(&mut self, log: &Log, state: &State, more: u64) -> Result<()> {
        self.estimate = state.weight().saturating_add(more);
        let reserved = log.reserve(self.estimate.saturating_sub(self.counted))?;
        if reserved.is_some() {
            self.counted = self.estimate;
        }
        self.reserved.extend(reserved);
        Ok(())
    }
}

impl Log {
    /// Current state: at least as new as any commit that finished before the call.
    ///
    /// # Errors
    /// Damaged, if the log is; not found, if the repository is gone; unreachable, if the store is.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn refresh(&self) -> Result<Arc<State>> {
        let checked = self.seen().checked;
        if checked.is_some_and(|checked| checked.elapsed() > CHECKED_EVERY) {
            return Box::pin(self.refresh_checked()).await;
        }
        self.read().await
    }

    /// As [`Self::refresh`], of a repository that is still the same.
    pub(super) async fn refresh_checked(&self) -> Result<Arc<State>> {
        let (state, ()) = tokio::try_join!(Box::pin(self.read()), Box::pin(self.check_repository()))?;
        Ok(state)
    }

    async fn read(&self) -> Result<Arc<State>> {
        for _ in 0..ATTEMPTS {
            if let Some(state) = self.fold().await? {
                return Ok(state);
            }
        }
        Err(Error::unreachable("log is truncated faster than it can be read").help("try again"))
    }

    /// One fold; `None` if the boundary moved past its start.
    async fn fold(&self) -> Result<Option<Arc<State>>> {
        let begun = Instant::now();
        let mut growth = Growth::default();
        // The read of the boundary after the entries finds out if this state is too old.
        let known = {
            let seen = self.seen();
            growth.estimate = seen.weight;
            if seen.memory.is_some() {
                growth.counted = seen.weight;
            }
            seen.state.clone().filter(|state| state.seq >= seen.boundary.floor)
        };
        let start = match known {
            Some(state) => state,
            None => {
                let (boundary, snapshots) =
                    tokio::try_join!(self.advance_boundary(), self.numbers(Numbered::Snapshot))?;
                match self.newest_of(snapshots, boundary).await? {
                    Some(state) => {
                        growth = Growth::default();
                        growth.grow(self, &state, 0)?;
                        Arc::new(state)
                    }
                    None if self.advance_boundary().await? == boundary => {
                        return Err(Error::damaged("the snapshot that the log begins with is missing")
                            .at(Numbered::Snapshot.key(boundary.floor)));
                    }
                    None => return Ok(None),
                }
            }
        };
        let from = start.seq;
        let followed = self.follow(start, growth).await;
        if self.advance_boundary().await?.floor > from {
            return Ok(None);
        }
        // Errors count only after the second read of the boundary: below a moved boundary, strays among the entries are no
        // damage.
        let (state, last) = followed?;
        let mut seen = self.seen();
        seen.read = seen.read.max(Some(begun));
        if seen.state.as_ref().is_none_or(|old| old.seq < state.seq) {
            // The previous state no longer counts.
            (seen.memory, seen.weight) = (None, 0);
            seen.weight = state.weight();
            seen.memory = self.reserve(seen.weight)?;
            seen.state = Some(Arc::clone(&state));
            seen.last = last;
        }
        Ok(Some(state))
    }

    /// Reserves memory in the budget for a state of `bytes`; none if it is small.
    pub(super) fn reserve(&self, bytes: u64) -> Result<Option<Retained>> {
        if bytes < COUNTED_FROM {
            return Ok(None);
        }
        let help = "raise --memory; or check who may write there: somebody wrote very many names or sessions";
        self.budget
            .keep_state(bytes)
            .map(Some)
            .map_err(|error| error.at("the repository's names and sessions").help(help))
    }

    /// Applies every entry after `state`, whose memory is that of `growth`; returns the last one, too.
    async fn follow(&self, mut state: Arc<State>, mut growth: Growth) -> Result<(Arc<State>, Option<LastEntry>)> {
        let mut last = None;
        loop {
            // Requests only one entry first: usually there is none.
            let ahead = if Arc::strong_count(&state) > 1 { 1 } else { AHEAD };
            let numbers = state.seq + 1..=state.seq + ahead;
            let (entries, end) = self.sealed_entries(numbers).await?;
            // Others share the state: it is copied only if it changes.
            if entries.is_empty() && end {
                return Ok((state, last));
            }
            let mut next = Arc::unwrap_or_clone(state);
            for object in entries {
                let number = next.seq + 1;
                // One at a time: a small object may decompress to a large entry.
                let (entry, _memory) = self.read_entry(number, &object).await?;
                growth.expect(self, &next, entry.weight())?;
                let kept = next.apply_weighed(&entry).map_err(|refusal| {
                    Error::damaged("log entry does not follow from the state before it")
                        .at(Numbered::Entry.key(number))
                        .got(refusal)
                        .help("a faulty program wrote it: `towline verify --repair` keeps what follows without it")
                })?;
                growth.expect(self, &next, kept)?;
                last = Some(LastEntry::of(number, &object));
            }
            if end {
                next.drop_places();
                return Ok((Arc::new(next), last));
            }
            state = Arc::new(next);
        }
    }

    /// Entries of `numbers` as they are stored, up to a large one after the first, and whether the log ends before the last of these
    /// numbers.
    ///
    /// None of them is decoded meanwhile: a request that is not polled may hold memory for which decoding would wait.
    async fn sealed_entries(&self, numbers: RangeInclusive<u64>) -> Result<(Vec<Bytes>, bool)> {
        let first = *numbers.start();
        let most = move |number| if number == first { u64::MAX } else { AHEAD_LEN_MAX };
        let requests = stream::iter(numbers).map(|number| self.sealed_entry(number, most(number)));
        let mut requests = requests.buffered(usize::try_from(AHEAD).unwrap_or(1));
        let mut entries = Vec::new();
        while let Some(found) = requests.try_next().await? {
            match found {
                Sealed::Object(object) => entries.push(object),
                Sealed::Absent => return Ok((entries, true)),
                Sealed::Longer => break,
            }
        }
        Ok((entries, false))
    }

    /// Forgets the state that is known, and its memory.
    pub(super) fn forget_state(&self) {
        let mut seen = self.seen();
        (seen.state, seen.memory, seen.weight) = (None, None, 0);
    }

    /// Entry `number`, if there is one.
    pub(super) async fn entry(&self, number: u64) -> Result<Option<LogEntry>> {
        Ok(self.held_entry(number).await?.map(|(entry, _)| entry))
    }

    /// As [`Self::entry`], with its memory.
    pub(super) async fn held_entry(&self, number: u64) -> Result<Option<(LogEntry, Charge)>> {
        let found = self.sealed_entry(number, u64::MAX).await?;
        self.opened_entry(number, found).await
    }

    /// Entry `number` as it is stored, if it has no more than `most` bytes.
    pub(super) async fn sealed_entry(&self, number: u64, most: u64) -> Result<Sealed> {
        let key = Numbered::Entry.key(number);
        objects::sealed_within(&*self.objects, &self.budget, Kind::Entry, &key, most).await.map_err(unreadable)
    }

    /// Entry `number` as it is stored, to be [opened](Self::opened_entry) when those before it are: large ones are fetched only then.
    pub(super) async fn sealed_entry_ahead(&self, number: u64) -> Result<Sealed> {
        self.sealed_entry(number, AHEAD_LEN_MAX).await
    }

    /// Decodes entry `number`, found before. Its memory is reserved until the charge is dropped.
    pub(super) async fn opened_entry(&self, number: u64, found: Sealed) -> Result<Option<(LogEntry, Charge)>> {
        let found = match found {
            Sealed::Longer => self.sealed_entry(number, u64::MAX).await?,
            found => found,
        };
        match found {
            Sealed::Object(object) => self.read_entry(number, &object).await.map(Some),
            Sealed::Absent | Sealed::Longer => Ok(None),
        }
    }

    /// Decodes entry `number`, which takes at most half of the memory. It is reserved until the charge is dropped.
    pub(super) async fn read_entry(&self, number: u64, object: &Bytes) -> Result<(LogEntry, Charge)> {
        let key = Numbered::Entry.key(number);
        let body = objects::unseal(&self.budget, Kind::Entry, &key, object).await.map_err(unreadable)?;
        let most = self.budget.total() / 2;
        let entry = objects::decode_held(&self.budget, most, &body, LogEntry::decode_within).await;
        entry.map_err(|error| unreadable(error.at(key)))
    }

    /// Finds the last boundary object by exponential search from the last known one. Their numbers have no gaps, and they are
    /// never deleted.
    pub(super) async fn advance_boundary(&self) -> Result<Boundary> {
        let mut last = self.seen().boundary;
        let mut step = 1;
        loop {
            // A boundary that no log can reach was planted: the search passes it by, and comes back with smaller steps.
            let next = last.number.saturating_add(step);
            let found = if next > NUMBER_MAX { None } else { self.boundary(next).await? };
            match found {
                Some(found) => (last, step) = (found, step.saturating_mul(2)),
                None if step == 1 => break,
                None => step = 1,
            }
        }
        let mut seen = self.seen();
        if last.number > seen.boundary.number {
            seen.boundary = last;
        }
        Ok(last)
    }

    pub(super) async fn boundary(&self, number: u64) -> Result<Option<Boundary>> {
        let key = Numbered::Boundary.key(number);
        let Some(object) = objects::get(&*self.objects, Kind::Boundary, &key).await? else { return Ok(None) };
        let body = open(Kind::Boundary, &object).map_err(|error| error.at(&key))?;
        let mut reader = Reader::new(&body);
        let floor = reader.varint().and_then(|floor| reader.finish().map(|()| floor));
        let floor = floor.map_err(|malformed| Error::from(malformed).at(&key))?;
        Ok(Some(Boundary { number, floor }))
    }

    /// Newest snapshot at or above the boundary, of the snapshots `numbers`, which a listing gave, and that of the boundary. The empty
    /// state if nothing was truncated yet; `None` if the boundary's own snapshot is gone, which means that the boundary has moved.
    async fn newest_of(&self, mut numbers: Vec<u64>, boundary: Boundary) -> Result<Option<State>> {
        numbers.push(boundary.floor);
        // A snapshot that no log can reach was planted.
        numbers.retain(|&number| number >= boundary.floor && (1..=NUMBER_MAX).contains(&number));
        numbers.sort_unstable_by(|a, b| b.cmp(a));
        let mut damaged = 0;
        for number in numbers {
            match self.exact_snapshot(number).await {
                Ok(Some(state)) => return Ok(Some(state)),
                Ok(None) => {}
                Err(error) if error.kind() == ErrorKind::Damaged && self.seen().boundary.floor < number => {
                    damaged += 1;
                    match damaged {
                        ..WARNINGS_MAX => tracing::warn!("a snapshot is damaged, reading an older one: {error:?}"),
                        WARNINGS_MAX => tracing::warn!("more snapshots are damaged: `towline verify` names them"),
                        _ => {}
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok((boundary.floor == 0).then(State::default))
    }

    /// The snapshot after entry `number`, if there is one.
    pub(super) async fn exact_snapshot(&self, number: u64) -> Result<Option<State>> {
        Ok(self.held_snapshot(number).await?.map(|(state, _)| state))
    }

    /// As [`Self::exact_snapshot`], with its memory.
    pub(super) async fn held_snapshot(&self, number: u64) -> Result<Option<(State, Charge)>> {
        let key = Numbered::Snapshot.key(number);
        let Some(object) = objects::sealed(&*self.objects, &self.budget, Kind::Snapshot, &key).await? else {
            return Ok(None);
        };
        let body = objects::unseal(&self.budget, Kind::Snapshot, &key, &object).await?;
        let decode = |body: &[u8], memory| State::decode_within(version(&object), body, memory);
        match objects::decode_held(&self.budget, self.budget.total(), &body, decode).await {
            Ok(held) if held.0.seq == number => Ok(Some(held)),
            Ok((state, _)) => {
                Err(Error::damaged("snapshot is of another entry").at(key).expected(number).got(state.seq))
            }
            Err(error) => Err(error.at(key)),
        }
    }

    /// Entries above `floor`: those in a listing, and those before them that it lacked. `snapshots` are the listed ones, up to
    /// which entries must exist; behind a gap that no writer leaves, only if the snapshot can be read.
    pub(super) async fn entries_above(&self, floor: u64, snapshots: &[u64]) -> Result<Listed> {
        let is_above = |number: &u64| *number > floor;
        let listed = self.numbers(Numbered::Entry).await?;
        let memory = self.budget.keep((listed.len() * NUMBER_WEIGHT) as u64)?;
        let mut entries: BTreeSet<u64> = listed.into_iter().filter(is_above).collect();
        let mut snapshots: BTreeSet<u64> = snapshots.iter().copied().filter(is_above).collect();
        let (mut last, mut stray) = (floor, None);
        for &number in entries.union(&snapshots) {
            let vouched = number - last <= GAP_MAX || (snapshots.contains(&number) && self.is_snapshot(number).await?);
            if number > NUMBER_MAX || !vouched {
                stray = Some(number);
                break;
            }
            last = number;
        }
        let strays = stray.map(|first| entries.split_off(&first)).unwrap_or_default();
        if let Some(first) = stray {
            snapshots.split_off(&first);
        }
        let (mut next, mut unlisted) = (floor.saturating_add(1), Vec::new());
        for &number in entries.union(&snapshots) {
            while next < number && self.entry_exists(next).await? {
                unlisted.push(next);
                next += 1;
            }
            next = number.saturating_add(1);
        }
        entries.extend(unlisted);
        Ok(Listed { entries, strays, _memory: memory })
    }

    /// True if the snapshot after entry `number` can be read.
    async fn is_snapshot(&self, number: u64) -> Result<bool> {
        match self.exact_snapshot(number).await {
            Ok(found) => Ok(found.is_some()),
            Err(error) if error.kind() == ErrorKind::Damaged => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Checks by a request without body whether an entry exists.
    pub(super) async fn entry_exists(&self, number: u64) -> Result<bool> {
        objects::exists(&*self.objects, &Numbered::Entry.key(number)).await
    }

    /// Listed numbers of the objects of one kind, unsorted. Their memory counts in the budget while they are listed.
    pub(super) async fn numbers(&self, kind: Numbered) -> Result<Vec<u64>> {
        let pick = |meta: ObjectMeta| kind.number(&meta.location);
        let (numbers, _memory) = listed(&*self.objects, &self.budget, &kind.prefix(), pick, |_| 0).await?;
        Ok(numbers)
    }
}

/// Result of a listing of entries.
pub(super) struct Listed {
    /// Numbers of entries.
    pub(super) entries: BTreeSet<u64>,
    /// Numbers too far ahead to be entries.
    pub(super) strays: BTreeSet<u64>,
    _memory: Retained,
}

/// Adds a help text to the error of a damaged entry, which stops every reader.
fn unreadable(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Damaged => error.help("`towline verify --repair` sets it aside, and reports what is lost"),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use object_store::ObjectStoreExt as _;
    use object_store::memory::InMemory;

    use super::*;
    use crate::budget::Budget;
    use crate::clock::{SystemClock, Timestamp};
    use crate::format::envelope::seal;
    use crate::id::{RepositoryId, WriteId};
    use crate::limits::MEMORY_MIN;
    use crate::repository::log::{Accepted, Action, RefValue, StepFacts};
    use crate::repository::runs::tests::value;

    fn set(name: &str, facts: &StepFacts) -> Action {
        let value = RefValue { facts: facts.clone(), ..value(0, &[]) };
        Action::SetRef { name: name.parse().unwrap(), expected: None, value }
    }

    #[tokio::test]
    async fn many_small_entries_are_charged_while_they_are_read() {
        let objects = Arc::new(InMemory::new());
        let facts =
            (0..64).fold(StepFacts::default(), |facts, nth| facts.metric(&format!("{nth:0>120}"), 0.0).unwrap());
        let mut number = 0;
        let mut weight = 0;
        while weight < 2 * MEMORY_MIN {
            number += 1;
            let actions = (0..75).map(|nth| set(&format!("run/{number}-{nth}"), &facts)).collect();
            let entry = LogEntry { write: WriteId::random(), session: None, at: Timestamp(0), actions };
            assert!(entry.weight() < COUNTED_FROM, "none of them counts by itself");
            weight += entry.weight();
            let object = seal(Kind::Entry, &entry.encode(), true);
            objects.put(&Numbered::Entry.key(number), object.into()).await.unwrap();
        }
        // Whoever builds all of the state before it counts it gets as far as this.
        objects.put(&Numbered::Entry.key(number + 1), "garbage".into()).await.unwrap();
        let log = Log::new(Arc::clone(&objects) as _, Arc::new(SystemClock), Budget::new(MEMORY_MIN).unwrap());
        for _ in 0..2 {
            let error = log.refresh().await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Exhausted, "{error}");
        }
        let error = log.salvage(Accepted::default()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Exhausted, "{error}");
        assert!(log.budget.keep_state(MEMORY_MIN / 2).is_ok(), "what was refused is given back");
    }

    #[tokio::test]
    async fn names_are_read_while_plans_and_caches_take_all_that_they_may() {
        let objects = Arc::new(InMemory::new());
        let budget = Budget::new(MEMORY_MIN).unwrap();
        let log = Log::new(Arc::clone(&objects) as _, Arc::new(SystemClock), budget.clone());
        let facts = (0..64).fold(StepFacts::default(), |facts, nth| facts.metric(&format!("{nth}"), 0.0).unwrap());
        let _plans = budget.keep(budget.kept_max()).unwrap();
        for number in 1..=20_u64 {
            let actions = (0..50).map(|nth| set(&format!("run/{number}-{nth}"), &facts)).collect();
            let entry = LogEntry { write: WriteId::random(), session: None, at: Timestamp(0), actions };
            let object = seal(Kind::Entry, &entry.encode(), true);
            objects.put(&Numbered::Entry.key(number), object.into()).await.unwrap();
            assert_eq!(log.refresh().await.unwrap().seq, number);
        }
        assert!(log.seen().weight > 2 * COUNTED_FROM && log.seen().memory.is_some());
    }

    #[tokio::test]
    async fn a_read_notices_within_a_minute_that_the_repository_is_gone() {
        let objects = Arc::new(InMemory::new());
        let budget = Budget::new(MEMORY_MIN).unwrap();
        let log = Log::new(objects, Arc::new(SystemClock), budget).of(RepositoryId::random());
        log.refresh().await.unwrap();
        log.seen().checked = Instant::now().checked_sub(CHECKED_EVERY + Duration::from_secs(1));
        let error = log.refresh().await.unwrap_err();
        assert!(
            error.kind() == ErrorKind::NotFound && error.to_string().contains("is not there any more"),
            "{error:?}"
        );
    }

    /// F7: "A repository that is put back to an older state, as from a backup, is noticed in the same way, with exit 5".
    #[tokio::test]
    async fn a_log_that_went_back_is_noticed_and_a_truncated_one_did_not() {
        let objects = Arc::new(InMemory::new());
        let log = Log::new(Arc::clone(&objects) as _, Arc::new(SystemClock), Budget::new(MEMORY_MIN).unwrap());
        let put = async |number: u64, name: &str| {
            let actions = vec![set(name, &StepFacts::default())];
            let entry = LogEntry { write: WriteId::random(), session: None, at: Timestamp(0), actions };
            let object = seal(Kind::Entry, &entry.encode(), true);
            objects.put(&Numbered::Entry.key(number), object.clone().into()).await.unwrap();
            object
        };
        put(1, "run/1").await;
        let second = put(2, "run/2").await;
        log.refresh().await.unwrap();
        log.check_last_entry().await.unwrap();
        let key = Numbered::Entry.key(2);
        objects.delete(&key).await.unwrap();
        let error = log.check_last_entry().await.unwrap_err();
        assert!(error.kind() == ErrorKind::Conflict && error.to_string().contains("got none"), "{error:?}");
        put(2, "run/2").await;
        let error = log.check_last_entry().await.unwrap_err();
        assert!(error.to_string().contains("got another entry"), "{error:?}");
        let mut damaged = second.to_vec();
        damaged[20] ^= 1;
        objects.put(&key, damaged.into()).await.unwrap();
        let error = log.check_last_entry().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Damaged, "{error:?}");
        objects.put(&key, second.into()).await.unwrap();
        log.check_last_entry().await.unwrap();
        // Truncated.
        objects.delete(&key).await.unwrap();
        log.raise(Boundary { number: 1, floor: 2 }).await.unwrap();
        log.check_last_entry().await.unwrap();
    }

    #[tokio::test]
    async fn a_read_that_finds_nothing_new_copies_no_state() {
        let objects = Arc::new(InMemory::new());
        let log = Log::new(Arc::clone(&objects) as _, Arc::new(SystemClock), Budget::new(MEMORY_MIN).unwrap());
        let put = async |number: u64| {
            let actions = vec![set(&format!("run/{number}"), &StepFacts::default())];
            let entry = LogEntry { write: WriteId::random(), session: None, at: Timestamp(0), actions };
            objects.put(&Numbered::Entry.key(number), seal(Kind::Entry, &entry.encode(), true).into()).await.unwrap();
        };
        put(1).await;
        let (first, again) = (log.refresh().await.unwrap(), log.refresh().await.unwrap());
        assert!(Arc::ptr_eq(&first, &again));
        put(2).await;
        let next = log.refresh().await.unwrap();
        assert_eq!((first.seq, next.seq), (1, 2), "who holds a state keeps it");
    }
}
