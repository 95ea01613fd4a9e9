//! Auditing the log: every object of it is read again, as a program would that knows nothing yet.

use std::collections::BTreeSet;
use std::sync::Arc;

use futures::{StreamExt as _, stream};
use object_store::path::Path;

use super::{Log, State};
use crate::error::{Error, ErrorKind, Result};
use crate::repository::layout::Numbered;

/// Objects read at once.
const AHEAD: usize = 8;

/// What an audit found.
#[derive(Debug)]
pub struct Audit {
    /// The newest state that can be told.
    pub state: Arc<State>,
    /// Whether everybody else can tell it too.
    pub folds: bool,
    /// Objects that are not as they were written.
    pub damaged: Vec<(Path, Error)>,
}

impl Log {
    /// Reads the whole log that is still kept: boundaries, entries, snapshots; replays it and compares the snapshots.
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
        let replayed = stranger.replay(floor, &mut damaged).await?;
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

    /// Reads every boundary; returns the highest floor that they tell.
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

    /// Applies every entry above `floor` in order; returns the last state that this tells.
    async fn replay(&self, floor: u64, damaged: &mut Vec<(Path, Error)>) -> Result<State> {
        let snapshots: BTreeSet<u64> = self.numbers(Numbered::Snapshot).await?.into_iter().collect();
        let entries: BTreeSet<u64> = self.numbers(Numbered::Entry).await?.into_iter().filter(|&n| n > floor).collect();
        let last = entries.last().copied().unwrap_or(floor);
        let mut replay = Replay { state: (floor == 0).then(State::default), last: State::default() };
        if floor > 0 {
            replay.compare(self, floor, damaged).await?;
        }
        let mut missing = Vec::new();
        let read = stream::iter(floor + 1..=last).map(|number| async move { (number, self.entry(number).await) });
        let mut read = read.buffered(AHEAD).boxed();
        while let Some((number, entry)) = read.next().await {
            let key = Numbered::Entry.key(number);
            match note(key.clone(), entry, damaged)? {
                Some(Some(entry)) => replay.apply(&entry, key, damaged),
                Some(None) => {
                    missing.push(number);
                    replay.lose();
                }
                None => replay.lose(),
            }
            if snapshots.contains(&number) {
                replay.compare(self, number, damaged).await?;
            }
        }
        drop(read);
        // What a truncation took meanwhile is not missing.
        let floor = match self.advance_boundary().await {
            Ok(boundary) => boundary.floor,
            Err(error) if is_damage(&error) => floor,
            Err(error) => return Err(error),
        };
        let missing = missing.into_iter().filter(|&number| number > floor).map(|number| Numbered::Entry.key(number));
        damaged.extend(missing.map(|key| (key.clone(), Error::damaged("log entry is missing").at(key))));
        replay.lose();
        Ok(replay.last)
    }
}

/// A replay under way.
struct Replay {
    /// The state so far; none after an entry that cannot be read, until the next snapshot.
    state: Option<State>,
    /// The last state before that.
    last: State,
}

impl Replay {
    /// From here on nothing can be told.
    fn lose(&mut self) {
        if let Some(state) = self.state.take() {
            self.last = state;
        }
    }

    fn apply(&mut self, entry: &super::Entry, key: Path, damaged: &mut Vec<(Path, Error)>) {
        let Some(state) = &mut self.state else { return };
        if let Err(refusal) = state.apply(entry) {
            let error = Error::damaged("log entry does not follow from the state before it").at(&key).got(refusal);
            damaged.push((key, error));
            self.lose();
        }
    }

    async fn compare(&mut self, log: &Log, number: u64, damaged: &mut Vec<(Path, Error)>) -> Result<()> {
        let key = Numbered::Snapshot.key(number);
        let Some(Some(found)) = note(key.clone(), log.exact_snapshot(number).await, damaged)? else { return Ok(()) };
        match &self.state {
            Some(state) if *state != found => {
                let error = Error::damaged("snapshot does not follow from the log").at(&key);
                damaged.push((key, error));
            }
            Some(_) => {}
            None => self.state = Some(found),
        }
        Ok(())
    }
}

/// Damage is taken down, and nothing comes of it; other errors end the audit.
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
