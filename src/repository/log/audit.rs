//! Audit of the log: reads all of its objects, like a program without any cached state.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use futures::{StreamExt as _, stream};
use object_store::path::Path;

use super::fold::Listed;
use super::{Log, State};
use crate::error::{Error, ErrorKind, Result};
use crate::repository::layout::Numbered;

/// Help for a snapshot that does not belong to the log.
const PLANTED: &str = "delete it with the store's own tool: readers start from an older one then";
/// Objects read at once.
const AHEAD: usize = 8;
/// Maximum number of replays.
const ATTEMPTS: usize = 32;

/// Result of an audit.
#[derive(Debug)]
pub struct Audit {
    /// Newest state that can be computed.
    pub state: Arc<State>,
    /// True if other readers can compute it, too.
    pub folds: bool,
    /// Damaged objects.
    pub damaged: Vec<(Path, Error)>,
}

impl Log {
    /// Reads all of the log that is still stored: boundaries, entries and snapshots; replays it, and compares the snapshots.
    ///
    /// # Errors
    /// Unreachable, if the store is. Damage is not an error here.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn audit(&self) -> Result<Audit> {
        let stranger = Self::new(Arc::clone(&self.objects), Arc::clone(&self.clock), self.budget.clone());
        let mut damaged = Vec::new();
        let floor = stranger.audit_boundaries(&mut damaged).await?;
        let folded = match stranger.refresh().await {
            Ok(state) => Some(state),
            Err(error) if is_damage(&error) => {
                tracing::debug!("the log does not fold: {error:?}");
                None
            }
            Err(error) => return Err(error),
        };
        let replayed = stranger.replay_settled(floor, &mut damaged).await?;
        if let Some(state) = folded {
            return Ok(Audit { state, folds: true, damaged });
        }
        let known = self.seen().state.clone();
        let state = known.filter(|known| known.seq >= replayed.seq).unwrap_or_else(|| Arc::new(replayed));
        if damaged.is_empty() {
            let error = Error::damaged("log cannot be read from its start").at(Numbered::Entry.prefix());
            damaged.push((Numbered::Entry.prefix(), error));
        }
        Ok(Audit { state, folds: false, damaged })
    }

    /// Reads every boundary; returns the highest floor in them.
    async fn audit_boundaries(&self, damaged: &mut Vec<(Path, Error)>) -> Result<u64> {
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
    async fn replay_settled(&self, mut floor: u64, damaged: &mut Vec<(Path, Error)>) -> Result<State> {
        for _ in 0..ATTEMPTS {
            let mut found = Vec::new();
            if let Some(state) = self.replay(floor, &mut found).await? {
                damaged.append(&mut found);
                return Ok(state);
            }
            floor = floor.max(self.seen().boundary.floor);
        }
        Err(Error::unreachable("the store lists log entries later than it has them").help("try again"))
    }

    /// Applies every entry above `floor` in order; returns the last state. None if the listing lacked an entry.
    async fn replay(&self, floor: u64, damaged: &mut Vec<(Path, Error)>) -> Result<Option<State>> {
        let snapshots = self.numbers(Numbered::Snapshot).await?;
        let Listed { entries, strays } = self.entries_above(floor, &snapshots).await?;
        let last = entries.last().copied().unwrap_or(floor);
        for &number in snapshots.iter().filter(|&&number| number > last) {
            self.check_reached(number, damaged).await?;
        }
        let snapshots: BTreeSet<u64> =
            snapshots.into_iter().filter(|&number| number > floor && number <= last).collect();
        let mut replay = Replay { state: (floor == 0).then(State::default), last: State::default() };
        if floor > 0 {
            replay.compare(self, floor, damaged).await?;
        }
        // Gaps between listed numbers, kept as ranges: they may be of any length.
        let mut missing: Vec<Range<u64>> = Vec::new();
        let mut next = floor.saturating_add(1);
        let read = stream::iter(&entries | &snapshots);
        let read = read.map(|number| async move { (number, self.sealed_entry_ahead(number).await) });
        let mut read = read.buffered(AHEAD).boxed();
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
                Some(Some(entry)) => replay.apply(&entry, key, damaged),
                _ => replay.lose(),
            }
            if snapshots.contains(&number) {
                replay.compare(self, number, damaged).await?;
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
            damaged.extend(lacking(gap));
        }
        damaged.extend(strays.into_iter().map(|number| stray(number, last)));
        replay.lose();
        Ok(Some(replay.last))
    }

    /// Reports a snapshot after an entry that does not exist: every fold would start from it.
    async fn check_reached(&self, number: u64, damaged: &mut Vec<(Path, Error)>) -> Result<()> {
        let entry = note(Numbered::Entry.key(number), self.entry(number).await, damaged)?;
        if matches!(entry, Some(None)) && self.advance_boundary().await?.floor < number {
            let key = Numbered::Snapshot.key(number);
            let read = self.exact_snapshot(number).await.map_err(unreadable);
            let Some(Some(_)) = note(key.clone(), read, damaged)? else { return Ok(()) };
            let error = Error::damaged("snapshot is after an entry that is not there").at(&key).help(PLANTED);
            damaged.push((key, error));
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
struct Replay {
    /// The state so far; none after an entry that cannot be read, until the next snapshot.
    state: Option<State>,
    /// The last state before that.
    last: State,
}

impl Replay {
    /// Marks the state as unknown from here on.
    fn lose(&mut self) {
        if let Some(state) = self.state.take() {
            self.last = state;
        }
    }

    /// Marks the state as unknown if entries before `number` are missing.
    fn lose_unless_before(&mut self, number: u64) {
        if self.state.as_ref().is_some_and(|state| state.seq + 1 != number) {
            self.lose();
        }
    }

    fn apply(&mut self, entry: &super::LogEntry, key: Path, damaged: &mut Vec<(Path, Error)>) {
        let Some(state) = &mut self.state else { return };
        if let Err(refusal) = state.apply(entry) {
            let error = Error::damaged("log entry does not follow from the state before it").at(&key).got(refusal);
            damaged.push((key, error));
            self.lose();
        }
    }

    async fn compare(&mut self, log: &Log, number: u64, damaged: &mut Vec<(Path, Error)>) -> Result<()> {
        let key = Numbered::Snapshot.key(number);
        let read = log.exact_snapshot(number).await.map_err(unreadable);
        let Some(Some(found)) = note(key.clone(), read, damaged)? else { return Ok(()) };
        match &self.state {
            Some(state) if *state != found => {
                let error = Error::damaged("snapshot does not follow from the log").at(&key).help(PLANTED);
                damaged.push((key, error));
            }
            Some(_) => {}
            None => self.state = Some(found),
        }
        Ok(())
    }
}

/// Records damage and returns none; other errors end the audit.
fn note<T>(key: Path, read: Result<T>, damaged: &mut Vec<(Path, Error)>) -> Result<Option<T>> {
    match read {
        Ok(value) => Ok(Some(value)),
        Err(error) if is_damage(&error) => {
            damaged.push((key, error));
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn is_damage(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Damaged | ErrorKind::Unsupported)
}
