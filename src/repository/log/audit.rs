//! Audit of the log: reads all of its objects, like a program without any cached state.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use futures::{StreamExt as _, future, stream};
use object_store::path::Path;

use super::fold::Growth;
use super::{Log, LogEntry, State};
use crate::budget::Retained;
use crate::error::{Error, ErrorKind, Result};
use crate::repository::layout::Numbered;

/// Help for a snapshot that does not belong to the log.
pub(super) const PLANTED: &str = "delete it with the store's own tool: readers start from an older one then";
/// Objects read at once.
const AHEAD: usize = 8;
/// Maximum number of replays.
const ATTEMPTS: usize = 32;
/// Maximum number of damaged objects that are told; the others are counted.
const TOLD_MAX: usize = 1_000;

/// Result of an audit.
#[derive(Debug)]
pub struct Audit {
    /// Newest state that can be computed.
    pub state: Arc<State>,
    /// True if other readers can compute it, too.
    pub folds: bool,
    /// Damaged objects; of very many the first ones, and one error for the others.
    pub damaged: Vec<(Path, Error)>,
    /// Approximate bytes of memory of the state.
    pub weight: u64,
    _memory: Option<Retained>,
}

/// Damaged objects: the first ones, and the number of the others.
#[derive(Debug, Default)]
struct DamagedObjects {
    told: Vec<(Path, Error)>,
    more: u64,
}

impl DamagedObjects {
    fn push(&mut self, key: Path, error: Error) {
        if self.told.len() < TOLD_MAX {
            self.told.push((key, error));
        } else {
            self.more += 1;
        }
    }

    fn append(&mut self, other: Self) {
        self.more += other.more;
        for (key, error) in other.told {
            self.push(key, error);
        }
    }

    fn is_empty(&self) -> bool {
        self.told.is_empty()
    }

    fn into_told(mut self) -> Vec<(Path, Error)> {
        if self.more > 0 {
            let key = Numbered::Entry.prefix();
            let error = Error::damaged(format!("{} more objects of the log are damaged", self.more)).at(&key);
            self.told.push((key, error));
        }
        self.told
    }
}

impl Log {
    /// Reads all of the log that is still stored: boundaries, entries and snapshots; replays it, and compares the snapshots.
    ///
    /// # Errors
    /// Unreachable, if the store is; exhausted, if a state of the log takes more memory than it may. Damage is not an error here.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn audit(&self) -> Result<Audit> {
        let stranger = Self::new(Arc::clone(&self.objects), Arc::clone(&self.clock), self.budget.clone());
        let mut damaged = DamagedObjects::default();
        let floor = stranger.audit_boundaries(&mut damaged).await?;
        let folded = match stranger.refresh().await {
            Ok(state) => Some(state.seq),
            Err(error) if is_damage(&error) => {
                tracing::debug!("the log does not fold: {error:?}");
                None
            }
            Err(error) => return Err(error),
        };
        // The replay has a state of its own: only one of them at a time is in memory.
        stranger.forget_state();
        let replayed = stranger.replay_settled(floor, &mut damaged).await?;
        let state = match folded {
            Some(seq) if damaged.is_empty() && replayed.seq >= seq => Arc::new(replayed),
            Some(_) => {
                drop(replayed);
                stranger.refresh().await?
            }
            None => {
                let known = self.seen().state.clone();
                known.filter(|known| known.seq >= replayed.seq).unwrap_or_else(|| Arc::new(replayed))
            }
        };
        stranger.forget_state();
        if folded.is_none() && damaged.is_empty() {
            let error = Error::damaged("log cannot be read from its start").at(Numbered::Entry.prefix());
            damaged.push(Numbered::Entry.prefix(), error);
        }
        let weight = state.weight();
        let memory = self.reserve(weight)?;
        Ok(Audit { state, folds: folded.is_some(), damaged: damaged.into_told(), weight, _memory: memory })
    }

    /// Reads every boundary; returns the highest floor in them.
    async fn audit_boundaries(&self, damaged: &mut DamagedObjects) -> Result<u64> {
        let mut found = stream::iter(1..)
            .map(|number| async move { (number, self.boundary(number).await) })
            .buffered(AHEAD)
            .boxed();
        let mut floor = 0;
        while let Some((number, boundary)) = found.next().await {
            match note(Numbered::Boundary.key(number), boundary, damaged)? {
                Some(Some(boundary)) => floor = floor.max(boundary.floor),
                Some(None) => break,
                None => {}
            }
        }
        Ok(floor)
    }

    /// Replays until a listing shows all entries above the boundary: a listing may lag behind a truncation and later entries.
    async fn replay_settled(&self, mut floor: u64, damaged: &mut DamagedObjects) -> Result<State> {
        for _ in 0..ATTEMPTS {
            let mut found = DamagedObjects::default();
            if let Some(state) = self.replay(floor, &mut found).await? {
                damaged.append(found);
                return Ok(state);
            }
            floor = floor.max(self.seen().boundary.floor);
        }
        Err(Error::unreachable("the store lists log entries later than it has them").help("try again"))
    }

    /// Applies every entry above `floor` in order; returns the last state. None if the listing lacked an entry.
    async fn replay(&self, floor: u64, damaged: &mut DamagedObjects) -> Result<Option<State>> {
        let snapshots = self.numbers(Numbered::Snapshot).await?;
        let listed = self.entries_above(floor, &snapshots).await?;
        let (entries, strays) = (&listed.entries, &listed.strays);
        let last = entries.last().copied().unwrap_or(floor);
        for &number in snapshots.iter().filter(|&&number| number > last) {
            self.check_reached(number, damaged).await?;
        }
        let snapshots: BTreeSet<u64> =
            snapshots.into_iter().filter(|&number| number > floor && number <= last).collect();
        let mut replay = Replay::new(self, floor);
        if floor > 0 {
            replay.compare(floor, damaged).await?;
        }
        // Gaps between listed numbers, kept as ranges: they may be of any length.
        let mut missing: Vec<Range<u64>> = Vec::new();
        let mut next = floor.saturating_add(1);
        let read = stream::iter(entries.union(&snapshots).copied());
        let read = read.map(|number| async move { (number, self.sealed_entry_ahead(number).await) });
        // Each lot is read to its end: a request that is not polled holds memory, and decoding would wait for that.
        let mut read = read.chunks(AHEAD).then(future::join_all).flat_map(stream::iter).boxed();
        while let Some((number, found)) = read.next().await {
            let entry = match found {
                Ok(found) => self.opened_entry(number, found).await,
                Err(error) => Err(error),
            };
            let key = Numbered::Entry.key(number);
            replay.lose_unless_before(number);
            let entry = note(key.clone(), entry, damaged)?;
            if !matches!(entry, Some(None)) {
                if next < number {
                    missing.push(next..number);
                }
                next = number + 1;
            }
            match entry {
                Some(Some((entry, _memory))) => replay.apply(&entry, key, damaged)?,
                _ => replay.lose(),
            }
            if snapshots.contains(&number) {
                replay.compare(number, damaged).await?;
            }
        }
        drop(read);
        if next <= last {
            missing.push(next..last.saturating_add(1));
        }
        // Entries that a concurrent truncation deleted are not missing.
        let floor = match self.advance_boundary().await {
            Ok(boundary) => boundary.floor,
            Err(error) if is_damage(&error) => floor,
            Err(error) => return Err(error),
        };
        for gap in missing {
            let gap = gap.start.max(floor.saturating_add(1))..gap.end;
            if !gap.is_empty() && self.entry_exists(gap.start).await? {
                return Ok(None);
            }
            if let Some((key, error)) = lacking(gap) {
                damaged.push(key, error);
            }
        }
        for &number in strays {
            let (key, error) = stray(number, last);
            damaged.push(key, error);
        }
        replay.lose();
        Ok(Some(replay.last))
    }

    /// Reports a snapshot after an entry that does not exist: every fold would start from it.
    async fn check_reached(&self, number: u64, damaged: &mut DamagedObjects) -> Result<()> {
        let entry = note(Numbered::Entry.key(number), self.entry(number).await, damaged)?;
        if matches!(entry, Some(None)) && self.advance_boundary().await?.floor < number {
            let key = Numbered::Snapshot.key(number);
            let read = self.exact_snapshot(number).await.map_err(unreadable);
            let Some(Some(_)) = note(key.clone(), read, damaged)? else { return Ok(()) };
            let error = Error::damaged("snapshot is after an entry that is not there").at(&key).help(PLANTED);
            damaged.push(key, error);
        }
        Ok(())
    }
}

/// Damage of missing entries, reported for the first of them.
fn lacking(gap: Range<u64>) -> Option<(Path, Error)> {
    let key = Numbered::Entry.key(gap.start);
    let error = match gap.end.saturating_sub(gap.start) {
        0 => return None,
        1 => Error::damaged("log entry is missing").at(&key),
        count => Error::damaged(format!("{count} log entries are missing, this one first")).at(&key),
    };
    Some((key, error))
}

/// Damage of an object among the entries that is no entry.
fn stray(number: u64, last: u64) -> (Path, Error) {
    let key = Numbered::Entry.key(number);
    let error = Error::damaged("object among the log's entries is not an entry")
        .at(&key)
        .expected(format!("no entry far above the last one, {last}"))
        .got(number)
        .help("readers ignore it: delete it with the store's own tool");
    (key, error)
}

/// An error of reading a snapshot, with what to do.
fn unreadable(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Damaged => error.help("`towline verify --repair` sets it aside: readers pass over it"),
        _ => error,
    }
}

/// A replay in progress.
struct Replay<'a> {
    log: &'a Log,
    /// The state so far; none after an entry that cannot be read, until the next snapshot.
    state: Option<State>,
    /// The last state before that.
    last: State,
    /// Memory of both.
    growth: Growth,
}

impl<'a> Replay<'a> {
    /// A replay of the entries above `floor`.
    fn new(log: &'a Log, floor: u64) -> Self {
        let state = (floor == 0).then(State::default);
        Self { log, state, last: State::default(), growth: Growth::default() }
    }

    /// Marks the state as unknown from here on.
    fn lose(&mut self) {
        if let Some(mut state) = self.state.take() {
            state.drop_places();
            self.last = state;
        }
    }

    /// Marks the state as unknown if entries before `number` are missing.
    fn lose_unless_before(&mut self, number: u64) {
        if self.state.as_ref().is_some_and(|state| state.seq + 1 != number) {
            self.lose();
        }
    }

    fn apply(&mut self, entry: &LogEntry, key: Path, damaged: &mut DamagedObjects) -> Result<()> {
        let Some(state) = &mut self.state else { return Ok(()) };
        self.growth.expect(self.log, state, entry.weight())?;
        match state.apply_weighed(entry) {
            Ok(kept) => self.growth.expect(self.log, state, kept),
            Err(refusal) => {
                let error = Error::damaged("log entry does not follow from the state before it").at(&key).got(refusal);
                damaged.push(key, error);
                self.lose();
                Ok(())
            }
        }
    }

    async fn compare(&mut self, number: u64, damaged: &mut DamagedObjects) -> Result<()> {
        let key = Numbered::Snapshot.key(number);
        let read = self.log.held_snapshot(number).await.map_err(unreadable);
        let Some(Some((found, _memory))) = note(key.clone(), read, damaged)? else { return Ok(()) };
        match &self.state {
            Some(state) if *state != found => {
                let error = Error::damaged("snapshot does not follow from the log").at(&key).help(PLANTED);
                damaged.push(key, error);
            }
            Some(_) => {}
            None => {
                self.last = State::default();
                self.growth.grow(self.log, &found, 0)?;
                self.state = Some(found);
            }
        }
        Ok(())
    }
}

/// Records damage and returns none; other errors end the audit.
fn note<T>(key: Path, read: Result<T>, damaged: &mut DamagedObjects) -> Result<Option<T>> {
    match read {
        Ok(value) => Ok(Some(value)),
        Err(error) if is_damage(&error) => {
            damaged.push(key, error);
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn is_damage(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Damaged | ErrorKind::Unsupported)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use object_store::ObjectStoreExt as _;
    use object_store::memory::InMemory;
    use object_store::throttle::{ThrottleConfig, ThrottledStore};

    use super::*;
    use crate::budget::Budget;
    use crate::clock::{SystemClock, Timestamp};
    use crate::format::envelope::{Kind, seal};
    use crate::id::WriteId;
    use crate::limits::{MEMORY_MIN, MIB};
    use crate::name::Name;
    use crate::repository::log::{Action, RefValue, StepFacts};
    use crate::repository::runs::tests::value;

    /// Entries that make a large state, and as many that make it small again; readers start from the snapshot after them.
    #[tokio::test]
    async fn the_memory_of_replayed_states_counts() {
        let objects = Arc::new(InMemory::new());
        let facts =
            (0..64).fold(StepFacts::default(), |facts, nth| facts.metric(&format!("{nth:0>120}"), 0.0).unwrap());
        let count = 60;
        let name = |number: u64, nth: u64| -> Name { format!("run/{number}-{nth}").parse().unwrap() };
        let put = async |number: u64, actions: Vec<Action>| {
            let entry = LogEntry { write: WriteId::random(), session: None, at: Timestamp(0), actions };
            let object = seal(Kind::Entry, &entry.encode(), true);
            objects.put(&Numbered::Entry.key(number), object.into()).await.unwrap();
            entry.weight()
        };
        let mut weight = 0;
        for number in 1..=count {
            let set = |nth| {
                let value = RefValue { facts: facts.clone(), ..value(0, &[]) };
                Action::SetRef { name: name(number, nth), expected: None, value }
            };
            weight += put(number, (0..75).map(set).collect()).await;
        }
        assert!(weight > MEMORY_MIN / 2);
        for number in 1..=count {
            let remove = |nth| Action::RemoveRef { name: name(number, nth), expected: number };
            put(count + number, (0..75).map(remove).collect()).await;
        }
        let snapshot = State { seq: 2 * count, ..State::default() };
        objects.put(&Numbered::Snapshot.key(snapshot.seq), snapshot.seal().into()).await.unwrap();
        let log = Log::new(Arc::clone(&objects) as _, Arc::new(SystemClock), Budget::new(MEMORY_MIN).unwrap());
        assert_eq!(log.refresh().await.unwrap().refs.len(), 0);
        let error = log.audit().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Exhausted, "{error}");
        assert!(log.budget.keep_state(MEMORY_MIN / 2).is_ok(), "what was refused is given back");
        let roomy = Log::new(objects, Arc::new(SystemClock), Budget::new(8 * MEMORY_MIN).unwrap());
        let audit = roomy.audit().await.unwrap();
        assert!(audit.folds && audit.damaged.is_empty(), "{:?}", audit.damaged);
        assert_eq!(*audit.state, snapshot);
    }

    /// Each decoding takes all of the memory, or half of it, while entries behind are on their way from a slow store.
    #[tokio::test]
    async fn what_takes_all_of_the_memory_is_read_beside_entries_that_are_on_their_way() {
        let objects = InMemory::new();
        for number in 1..=20 {
            let entry = LogEntry { write: WriteId::random(), session: None, at: Timestamp(0), actions: Vec::new() };
            objects.put(&Numbered::Entry.key(number), seal(Kind::Entry, &entry.encode(), true).into()).await.unwrap();
            let snapshot = State { seq: number, ..State::default() };
            objects.put(&Numbered::Snapshot.key(number), snapshot.seal().into()).await.unwrap();
        }
        let slow = ThrottleConfig { wait_get_per_byte: Duration::from_micros(20), ..ThrottleConfig::default() };
        let small = Budget::new(MEMORY_MIN).unwrap().carve(MIB).await.unwrap();
        let log = Log::new(Arc::new(ThrottledStore::new(objects, slow)), Arc::new(SystemClock), small);
        let audit = tokio::time::timeout(Duration::from_mins(1), log.audit()).await.expect("it waits for itself");
        let audit = audit.unwrap();
        assert!(audit.folds && audit.damaged.is_empty() && audit.state.seq == 20, "{:?}", audit.damaged);
    }

    #[tokio::test]
    async fn very_many_objects_that_are_no_entries_are_counted() {
        let objects = Arc::new(InMemory::new());
        let count = TOLD_MAX as u64 + 500;
        for number in 0..count {
            objects.put(&Numbered::Entry.key(u64::MAX - number), "".into()).await.unwrap();
        }
        let log = Log::new(objects, Arc::new(SystemClock), Budget::new(MEMORY_MIN).unwrap());
        let damaged = log.audit().await.unwrap().damaged;
        assert_eq!(damaged.len(), TOLD_MAX + 1);
        let error = damaged[TOLD_MAX].1.to_string();
        assert!(error.contains("500 more objects of the log are damaged"), "{error}");
    }
}
