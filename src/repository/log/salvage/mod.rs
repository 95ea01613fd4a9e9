//! Repair of a log with unreadable entries: intact entries stay in force, unreadable ones are set aside.
//!
//! Unreadable objects are copied to `aside/`. No entry is deleted or changed: a snapshot of the resulting state is written after
//! the last entry, and the boundary is moved there, so that every fold starts from that snapshot. The next truncation deletes the
//! older objects as usual. An unreadable snapshot is deleted once it is copied: readers pass over it, and audits fail on it.

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use object_store::ObjectStoreExt as _;
use object_store::path::Path;

use super::adopt::{adopt, pass_over};
use super::audit::PLANTED;
use super::fold::{Growth, NUMBER_MAX};
use super::{Action, Boundary, Log, LogEntry, State};
use crate::budget::{Charge, GrowingMemory};
use crate::error::{Error, ErrorKind, Result};
use crate::format::envelope::{DIGEST_LEN, Kind};
use crate::name::Name;
use crate::repository::layout::{self, Numbered};
use crate::repository::objects;

/// Bytes of memory of an object in a list, with its copy, and of the lines about it in a report.
const OBJECT_WEIGHT: usize = 512;
/// Bytes of memory of a name beside its text, in the nodes of its tree, and of the line about it in a report.
const NAME_WEIGHT: usize = 2 * size_of::<Name>() + 64;

/// Losses that a repair of the log may cause, and a snapshot that it may trust, because somebody said so.
#[derive(Clone, Copy, Debug, Default)]
pub struct Accepted {
    /// Labels or a policy may be lost with entries that cannot be used.
    pub lost_labels: bool,
    /// Snapshot that is trusted, although entries before it cannot be used.
    pub snapshot: Option<u64>,
}

/// Result of a salvage.
#[derive(Debug)]
pub struct Salvaged {
    /// Snapshot that folds now start from.
    pub snapshot: u64,
    /// Unreadable entries, and the copy of each; the first of a range of missing entries has no copy.
    pub unreadable: Vec<(Path, Option<Path>)>,
    /// Entries that do not follow from those before them, although all of those are there, and the copy of each.
    pub refused: Vec<(Path, Path)>,
    /// As `unreadable` and `refused`, but before the accepted snapshot, which has what they committed.
    pub covered: Vec<(Path, Option<Path>)>,
    /// Snapshot that was accepted without a check.
    pub accepted: Option<u64>,
    /// Unreadable snapshots, and the copy of each. Nothing is lost with them, as the state follows from the entries.
    pub snapshots: Vec<(Path, Path)>,
    /// Names that later entries changed in a way that is inconsistent without the unreadable entries.
    pub names: BTreeSet<Name>,
    /// Entries with other actions that are no longer in force.
    pub partial: Vec<Path>,
    /// Memory of these lists.
    memory: GrowingMemory,
}

impl Salvaged {
    fn new(memory: GrowingMemory) -> Self {
        Self {
            snapshot: 0,
            unreadable: Vec::new(),
            refused: Vec::new(),
            covered: Vec::new(),
            accepted: None,
            snapshots: Vec::new(),
            names: BTreeSet::new(),
            partial: Vec::new(),
            memory,
        }
    }

    /// True if entries are lost, wholly or in part.
    fn loses(&self) -> bool {
        !self.unreadable.is_empty() || !self.refused.is_empty() || !self.partial.is_empty()
    }

    /// Marks what was lost so far as covered by the accepted snapshot `number`.
    fn cover(&mut self, number: u64) {
        self.accepted = Some(number);
        self.covered.append(&mut self.unreadable);
        self.covered.extend(self.refused.drain(..).map(|(key, copy)| (key, Some(copy))));
        self.names.clear();
        self.partial.clear();
    }

    /// Adds an object to one of the lists.
    fn note<T>(&mut self, list: impl FnOnce(&mut Self) -> &mut Vec<T>, object: T) -> Result<()> {
        self.reserve(OBJECT_WEIGHT)?;
        list(self).push(object);
        Ok(())
    }

    /// Adds an entry of which a part is no longer in force.
    pub(super) fn note_partial(&mut self, key: Path) -> Result<()> {
        self.note(|salvaged| &mut salvaged.partial, key)
    }

    /// Adds a name with a change that is no longer in force.
    pub(super) fn note_name(&mut self, name: &Name) -> Result<()> {
        if !self.names.contains(name) {
            self.reserve(NAME_WEIGHT + 2 * name.as_str().len())?;
            self.names.insert(name.clone());
        }
        Ok(())
    }

    fn reserve(&mut self, bytes: usize) -> Result<()> {
        self.memory.add(bytes as u64).map_err(|error| error.at("what a repair of the log reports"))
    }
}

impl Log {
    /// Sets aside unreadable entries above the boundary, and keeps the others; none if the log is consistent. Commits of unreadable
    /// entries are lost; their chunks may still exist, and saving the content again finds them.
    ///
    /// Run it while nobody writes: a writer that read the log before the damage still relies on lost entries, and is refused.
    ///
    /// Unreadable entries may have had labels or a policy: if the others have any, they are not set aside without
    /// [`Accepted::lost_labels`]. Readers start from the newest snapshot, which anybody may have planted: unless it is what the entries
    /// make of the state at the boundary, the log does not go on from it without [`Accepted::snapshot`].
    ///
    /// # Errors
    /// Conflict, for labels that may be lost, or a snapshot that cannot be checked, and are not accepted; damaged, if there is no snapshot
    /// to start from, the newest one contradicts the entries, or a boundary is damaged; unsupported, if a later version wrote an entry;
    /// unreachable, if the store is.
    ///
    /// # Cancel safety
    /// Safe: a second salvage does the same. The snapshot that the first one may have left is what the second one computes, too.
    pub async fn salvage(&self, accepted: Accepted) -> Result<Option<Salvaged>> {
        let boundary = self.advance_boundary().await?;
        let mut snapshots = self.numbers(Numbered::Snapshot).await?;
        snapshots.push(boundary.floor);
        // A snapshot that no log can reach was planted.
        snapshots.retain(|&number| number >= boundary.floor && (1..=NUMBER_MAX).contains(&number));
        snapshots.sort_unstable();
        let start = self.first_state(boundary, &snapshots).await?;
        let mut salvage = Salvage::of(self, start, boundary, accepted)?;
        salvage.follow_all(&snapshots).await?;
        let restarts = salvage.restarts();
        if restarts || salvage.differing.is_some_and(|differing| differing.incomplete) {
            salvage.check_snapshot()?;
        }
        if restarts {
            salvage.check_labels()?;
            if self.advance_boundary().await? != boundary {
                return Err(changed_meanwhile());
            }
        }
        let Salvage { mut state, mut salvaged, growth: _memory, .. } = salvage;
        state.drop_places();
        salvaged.snapshot = state.seq;
        for (key, copy) in salvaged.unreadable.iter().chain(&salvaged.covered) {
            if let Some(copy) = copy {
                self.set_aside(Kind::Entry, key, copy).await?;
            }
        }
        for (key, copy) in &salvaged.refused {
            self.set_aside(Kind::Entry, key, copy).await?;
        }
        if restarts {
            self.restart_from(boundary, &state).await?;
        }
        self.set_snapshots_aside(boundary.floor, &mut salvaged).await?;
        Ok((restarts || !salvaged.snapshots.is_empty()).then_some(salvaged))
    }

    /// State at the boundary; if its snapshot cannot be read, that of the first one of `snapshots` that can.
    async fn first_state(&self, boundary: Boundary, snapshots: &[u64]) -> Result<State> {
        if boundary.floor == 0 {
            return Ok(State::default());
        }
        for &number in snapshots {
            if let Some((state, _memory)) = self.intact_snapshot(number).await? {
                return Ok(state);
            }
        }
        Err(Error::damaged("no intact snapshot is left to read the log from")
            .at(Numbered::Snapshot.key(boundary.floor))
            .help("restore that object from a backup of the store"))
    }

    /// Snapshot `number` with its memory, unless it is gone or unreadable.
    async fn intact_snapshot(&self, number: u64) -> Result<Option<(State, Charge)>> {
        match twice_if_damaged(|| self.held_snapshot(number)).await {
            Err(error) if self.is_garbage(Kind::Snapshot, &Numbered::Snapshot.key(number), &error).await? => Ok(None),
            read => read,
        }
    }

    /// Moves unreadable snapshots from `floor` on to `aside/`. The state must be known without them.
    async fn set_snapshots_aside(&self, floor: u64, salvaged: &mut Salvaged) -> Result<()> {
        for number in self.numbers(Numbered::Snapshot).await? {
            if number < floor {
                continue;
            }
            let Err(error) = twice_if_damaged(|| self.exact_snapshot(number)).await else { continue };
            let (key, copy) = (Numbered::Snapshot.key(number), layout::aside_snapshot(number));
            if !self.is_garbage(Kind::Snapshot, &key, &error).await? {
                return Err(error);
            }
            self.set_aside(Kind::Snapshot, &key, &copy).await?;
            objects::retry(|| async { Ok(self.objects.delete(&key).await?) }).await?;
            salvaged.note(|salvaged| &mut salvaged.snapshots, (key, copy))?;
        }
        Ok(())
    }

    /// True if the object `key` with this read error is damaged, in contrast to one of a later version, or one too large for the
    /// memory now.
    async fn is_garbage(&self, kind: Kind, key: &Path, error: &Error) -> Result<bool> {
        if error.kind() == ErrorKind::Damaged {
            return Ok(true);
        }
        if error.kind() != ErrorKind::Unsupported {
            return Ok(false);
        }
        // An object of a later version matches its digest.
        let object = objects::get_required(&*self.objects, kind, key).await?;
        let Some((signed, digest)) = object.split_at_checked(object.len().saturating_sub(DIGEST_LEN)) else {
            return Ok(true);
        };
        Ok(blake3::hash(signed).as_bytes()[..] != *digest)
    }

    /// Copies the object `key` to `copy`, below `aside/`, which no fold reads.
    async fn set_aside(&self, kind: Kind, key: &Path, copy: &Path) -> Result<()> {
        match objects::get_required(&*self.objects, kind, key).await {
            Ok(object) => objects::put(&*self.objects, copy, object.into()).await,
            // The object is longer than one of its kind can be, or the store refuses to read it.
            Err(error) if error.kind() == ErrorKind::Damaged => {
                let copied = objects::retry(|| async { Ok(self.objects.copy(key, copy).await?) }).await;
                copied.map_err(|error: Error| {
                    error.at(key).help(
                        "check that the store is reachable; if it refuses to copy this object alone, delete the object with the \
                         store's own tool, and run the command again: what the object records is lost",
                    )
                })
            }
            Err(error) => Err(error),
        }
    }

    /// Makes every fold start from `state`.
    async fn restart_from(&self, boundary: Boundary, state: &State) -> Result<()> {
        self.write_snapshot(state).await?;
        self.raise(Boundary { number: boundary.number + 1, floor: state.seq }).await?;
        self.forget_state();
        // The outcome of the create may be unknown.
        if self.advance_boundary().await?.floor < state.seq {
            return Err(Error::unreachable("the repair of the log is not finished: its boundary did not move")
                .at(Numbered::Boundary.key(boundary.number + 1))
                .help("run the command again"));
        }
        // Renews open sessions: the entries that show their age may be truncated now.
        let renew = self.commit(None, |state| Ok(state.sessions.keys().map(|id| Action::Renew(*id)).collect())).await?;
        if renew.state.seq < state.seq {
            return Err(changed_meanwhile());
        }
        Ok(())
    }
}

/// Error for a boundary or an entry of somebody else.
fn changed_meanwhile() -> Error {
    Error::conflict("somebody else changed the log meanwhile").help("run the command again")
}

/// A salvage in progress.
struct Salvage<'a> {
    log: &'a Log,
    accepted: Accepted,
    state: State,
    /// Memory of the state.
    growth: Growth,
    salvaged: Salvaged,
    /// Snapshot with the first state, if that is above the boundary: no entries before it are known.
    late: Option<u64>,
    /// Last snapshot with another state than the entries before it make, unless one after it has the same.
    differing: Option<Differing>,
}

/// A snapshot that does not follow from the entries before it.
#[derive(Clone, Copy)]
struct Differing {
    number: u64,
    /// True if entries before it cannot be used, so that it may be right.
    incomplete: bool,
}

impl<'a> Salvage<'a> {
    fn of(log: &'a Log, state: State, boundary: Boundary, accepted: Accepted) -> Result<Self> {
        let mut growth = Growth::default();
        growth.grow(log, &state, 0)?;
        let mut salvaged = Salvaged::new(log.budget.keep_growing());
        let mut late = (state.seq > boundary.floor).then_some(state.seq);
        if late.is_some() && late == accepted.snapshot {
            salvaged.accepted = late.take();
        }
        Ok(Self { log, accepted, state, growth, salvaged, late, differing: None })
    }

    /// Applies all entries after the state, and compares the snapshots among them; `snapshots` are the listed ones, sorted.
    async fn follow_all(&mut self, snapshots: &[u64]) -> Result<()> {
        let start = self.state.seq;
        let listed = self.log.entries_above(start, snapshots).await?;
        let last = listed.entries.last().copied().unwrap_or(start);
        let snapshots: BTreeSet<u64> = snapshots.iter().copied().filter(|&number| number > start).collect();
        for &number in listed.entries.union(&snapshots) {
            if listed.entries.contains(&number) {
                self.follow(number).await?;
            }
            if snapshots.contains(&number) {
                self.compare(number, last).await?;
            }
        }
        Ok(())
    }

    /// Compares the state with the snapshot after entry `number`, and goes on from that if it is accepted. `last` is the last entry.
    async fn compare(&mut self, number: u64, last: u64) -> Result<()> {
        let Some((found, _memory)) = self.log.intact_snapshot(number).await? else { return Ok(()) };
        let accepted = self.accepted.snapshot == Some(number);
        if number <= last || accepted {
            self.miss_through(number)?;
        }
        let incomplete = self.late.is_some() || self.salvaged.loses() || self.state.seq < number;
        if incomplete && accepted {
            self.growth.grow(self.log, &found, 0)?;
            self.state = found;
            self.salvaged.cover(number);
            (self.late, self.differing) = (None, None);
        } else if self.state == found {
            self.differing = None;
        } else {
            self.differing = Some(Differing { number, incomplete });
        }
        Ok(())
    }

    /// True if folds must start from the state, as something before it cannot be used.
    fn restarts(&self) -> bool {
        self.salvaged.loses() || self.salvaged.accepted.is_some() || self.late.is_some()
    }

    /// Refuses to go on after a snapshot that is neither what the entries make nor accepted: it may be planted.
    fn check_snapshot(&self) -> Result<()> {
        let number = match (self.differing, self.late) {
            (Some(Differing { number, incomplete: false }), _) => {
                let key = Numbered::Snapshot.key(number);
                return Err(Error::damaged("snapshot does not follow from the log").at(key).help(PLANTED));
            }
            (Some(Differing { number, incomplete: true }), _) | (None, Some(number)) => number,
            (None, None) => return Ok(()),
        };
        Err(Error::conflict("snapshot cannot be checked: not all that the log has before it can be used")
            .at(Numbered::Snapshot.key(number))
            .help(format!(
                "restore the objects that `towline verify` names from a backup of the store; else, if only trusted programs may \
                 have written this snapshot, give --accept-snapshot {number}: what it says then counts; else delete it with the \
                 store's own tool, and run the command again: what the damaged objects say is lost then",
            )))
    }

    /// Refuses to lose labels or a policy with entries, unless that is accepted.
    fn check_labels(&self) -> Result<()> {
        let restricts = self.state.policy.is_some() || !self.state.labels.is_empty();
        if self.accepted.lost_labels || !restricts || !self.salvaged.loses() {
            return Ok(());
        }
        let Salvaged { unreadable, refused, partial, .. } = &self.salvaged;
        let mut lost = unreadable.iter().map(|(key, _)| key).chain(refused.iter().map(|(key, _)| key));
        let first = lost.next().or_else(|| partial.first());
        Err(Error::conflict("labels or a policy may be lost with entries of the log that cannot be used")
            .at(first.map_or_else(|| Numbered::Entry.prefix(), Path::clone))
            .help(
                "restore the object from a backup of the store; else give --accept-lost-labels, and then check the labels of \
                 each name (`towline label NAME`): some may be less restricted than before",
            ))
    }

    /// Counts the entries up to `number` that are not there.
    fn miss_through(&mut self, number: u64) -> Result<()> {
        if number > self.state.seq {
            let first = Numbered::Entry.key(self.state.seq + 1);
            self.salvaged.note(|salvaged| &mut salvaged.unreadable, (first, None))?;
            self.state.seq = number;
        }
        Ok(())
    }

    /// Applies entry `number` as far as possible.
    async fn follow(&mut self, number: u64) -> Result<()> {
        let (log, key) = (self.log, Numbered::Entry.key(number));
        self.miss_through(number - 1)?;
        let copy = match twice_if_damaged(|| log.held_entry(number)).await {
            Ok(Some((entry, _memory))) => return self.apply(&entry, key),
            Ok(None) => None,
            Err(error) if log.is_garbage(Kind::Entry, &key, &error).await? => Some(Numbered::Aside.key(number)),
            Err(error) => return Err(error),
        };
        self.salvaged.note(|salvaged| &mut salvaged.unreadable, (key, copy))?;
        pass_over(&mut self.state);
        Ok(())
    }

    fn apply(&mut self, entry: &LogEntry, key: Path) -> Result<()> {
        let (log, number) = (self.log, self.state.seq + 1);
        self.growth.expect(log, &self.state, entry.weight())?;
        let kept = if self.salvaged.unreadable.is_empty() {
            match self.state.apply_weighed(entry) {
                Ok(kept) => kept,
                // Nothing that it needs is lost: a faulty program wrote it.
                Err(_) => {
                    self.salvaged.note(|salvaged| &mut salvaged.refused, (key, Numbered::Aside.key(number)))?;
                    pass_over(&mut self.state);
                    0
                }
            }
        } else {
            // Its actions are copied.
            let _memory = log.reserve(entry.weight())?;
            adopt(&mut self.state, entry, &mut self.salvaged)?
        };
        self.growth.expect(log, &self.state, kept)
    }
}

/// Reads an object, and once more if it seems to be damaged or gone.
///
/// # Cancel safety
/// Safe, as it only reads.
async fn twice_if_damaged<T, F: Future<Output = Result<Option<T>>>>(read: impl Fn() -> F) -> Result<Option<T>> {
    let doubtful = |answer: &Result<Option<T>>| match answer {
        Ok(found) => found.is_none(),
        Err(error) => error.kind() == ErrorKind::Damaged,
    };
    objects::twice_if(doubtful, read).await
}
