//! Repair of a log with unreadable entries: intact entries stay in force, unreadable ones are set aside.
//!
//! Unreadable objects are copied to `aside/`. No entry is deleted or changed: a snapshot of the resulting state is written after
//! the last entry, and the boundary is moved there, so that every fold starts from that snapshot. The next truncation deletes the
//! older objects as usual. An unreadable snapshot is deleted once it is copied: readers pass over it, and audits fail on it.

use std::collections::BTreeSet;

use object_store::ObjectStoreExt as _;
use object_store::path::Path;

use super::adopt::{adopt, pass_over};
use super::fold::Growth;
use super::{Action, Boundary, Log, LogEntry, State};
use crate::budget::GrowingMemory;
use crate::error::{Error, ErrorKind, Result};
use crate::format::envelope::{DIGEST_LEN, Kind};
use crate::name::Name;
use crate::repository::layout::{self, Numbered};
use crate::repository::objects;

/// Bytes of memory of an object in a list, with its copy, and of the lines about it in a report.
const OBJECT_WEIGHT: usize = 512;
/// Bytes of memory of a name beside its text, in the nodes of its tree, and of the line about it in a report.
const NAME_WEIGHT: usize = 2 * size_of::<Name>() + 64;

/// Result of a salvage.
#[derive(Debug)]
pub struct Salvaged {
    /// Snapshot that folds now start from.
    pub snapshot: u64,
    /// Unreadable entries, and the copy of each; the first of a range of missing entries has no copy.
    pub unreadable: Vec<(Path, Option<Path>)>,
    /// Entries that do not follow from those before them, although all of those are there, and the copy of each.
    pub refused: Vec<(Path, Path)>,
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
    /// Sets aside unreadable entries above the newest intact snapshot, and keeps the others; none if the log is consistent.
    /// Commits of unreadable entries are lost; their chunks may still exist, and saving the content again finds them.
    ///
    /// Run it while nobody writes: a writer that read the log before the damage still relies on lost entries, and is refused.
    ///
    /// Unreadable entries may have had labels or a policy: if the others have any, they are not set aside without
    /// `accept_lost_labels`.
    ///
    /// # Errors
    /// Conflict, for labels that may be lost and are not accepted to be; damaged, if there is no snapshot to start from, or a boundary is
    /// damaged; unsupported, if a later version wrote an entry; unreachable, if the store is.
    ///
    /// # Cancel safety
    /// Safe: until the boundary moves nothing is changed, and a second salvage does the same.
    pub async fn salvage(&self, accept_lost_labels: bool) -> Result<Option<Salvaged>> {
        let boundary = self.advance_boundary().await?;
        let start = self.newest_snapshot(boundary).await?;
        let state = start.ok_or_else(|| {
            Error::damaged("no intact snapshot is left to read the log from")
                .at(Numbered::Snapshot.key(boundary.floor))
                .help("restore that object from a backup of the store")
        })?;
        let listed = self.entries_above(state.seq, &self.numbers(Numbered::Snapshot).await?).await?;
        let mut salvage = Salvage::of(self, state)?;
        for &number in &listed.entries {
            salvage.follow(number).await?;
        }
        let Salvage { mut state, mut salvaged, growth: _memory, .. } = salvage;
        state.drop_places();
        salvaged.snapshot = state.seq;
        let restricts = state.policy.is_some() || !state.labels.is_empty();
        let restarts = salvaged.loses() || !salvaged.names.is_empty();
        if !accept_lost_labels && restricts && salvaged.loses() {
            let Salvaged { unreadable, refused, partial, .. } = &salvaged;
            let mut lost = unreadable.iter().map(|(key, _)| key).chain(refused.iter().map(|(key, _)| key));
            let first = lost.next().or_else(|| partial.first());
            return Err(Error::conflict("labels or a policy may be lost with entries of the log that cannot be used")
                .at(first.map_or_else(|| Numbered::Entry.prefix(), Path::clone))
                .help(
                    "restore the object from a backup of the store; else give --accept-lost-labels, and then check the labels \
                     of each name (`towline label NAME`): some may be less restricted than before",
                ));
        }
        for (key, copy) in &salvaged.unreadable {
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
            // The object is longer than one of its kind can be.
            Err(error) if error.kind() == ErrorKind::Damaged => {
                objects::retry(|| async { Ok(self.objects.copy(key, copy).await?) }).await
            }
            Err(error) => Err(error),
        }
    }

    /// Makes every fold start from `state`.
    async fn restart_from(&self, boundary: Boundary, state: &State) -> Result<()> {
        self.write_snapshot(state).await?;
        self.raise(Boundary { number: boundary.number + 1, floor: state.seq }).await?;
        self.forget_state();
        // Renews open sessions: the entries that show their age may be truncated now.
        let renew = self.commit(None, |state| Ok(state.sessions.keys().map(|id| Action::Renew(*id)).collect())).await?;
        if renew.state.seq < state.seq {
            return Err(Error::conflict("somebody else changed the log meanwhile").help("run the command again"));
        }
        Ok(())
    }
}

/// A salvage in progress.
struct Salvage<'a> {
    log: &'a Log,
    state: State,
    /// Memory of the state.
    growth: Growth,
    salvaged: Salvaged,
}

impl<'a> Salvage<'a> {
    fn of(log: &'a Log, state: State) -> Result<Self> {
        let mut growth = Growth::default();
        growth.grow(log, &state, 0)?;
        Ok(Self { log, state, growth, salvaged: Salvaged::new(log.budget.keep_growing()) })
    }

    /// Applies entry `number` as far as possible.
    async fn follow(&mut self, number: u64) -> Result<()> {
        let (log, key) = (self.log, Numbered::Entry.key(number));
        if number > self.state.seq + 1 {
            let first = Numbered::Entry.key(self.state.seq + 1);
            self.salvaged.note(|salvaged| &mut salvaged.unreadable, (first, None))?;
            self.state.seq = number - 1;
        }
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

/// Reads an object, and once more if it seems to be damaged or gone: one bad answer of the store must not cost an intact object.
///
/// # Cancel safety
/// Safe, as it only reads.
async fn twice_if_damaged<T, F: Future<Output = Result<Option<T>>>>(read: impl Fn() -> F) -> Result<Option<T>> {
    match read().await {
        Ok(None) => read().await,
        Err(error) if error.kind() == ErrorKind::Damaged => read().await,
        once => once,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use object_store::memory::InMemory;

    use super::*;
    use crate::budget::Budget;
    use crate::clock::{SystemClock, Timestamp};
    use crate::id::{ManifestId, Owned, SessionId};
    use crate::limits::{MEMORY_MIN, MIB};
    use crate::policy::Labels;
    use crate::repository::log::fold::NUMBER_MAX;
    use crate::repository::log::{RefValue, State, StepFacts};

    fn log(objects: &Arc<InMemory>) -> Log {
        Log::new(Arc::clone(objects) as _, Arc::new(SystemClock), Budget::new(MEMORY_MIN).unwrap())
    }

    async fn set(objects: &Arc<InMemory>, name: &str) {
        let session = SessionId::random();
        let key = Owned::fresh(session);
        let value = RefValue {
            version: 0,
            manifest: ManifestId::of(name.as_bytes()),
            manifest_key: key,
            map_key: key,
            saved: Timestamp(0),
            logical_bytes: 0,
            files: 0,
            chunks: 0,
            behind: 0,
            facts: StepFacts::default(),
            attempt: None,
        };
        let log = log(objects);
        log.commit(Some(session), |_| Ok(vec![Action::Open(session)])).await.unwrap();
        let name: Name = name.parse().unwrap();
        let commit = log.commit(Some(session), |state| {
            let expected = state.version(&name);
            Ok(vec![Action::SetRef { name: name.clone(), expected, value: value.clone() }])
        });
        commit.await.unwrap();
        log.commit(Some(session), |_| Ok(vec![Action::Close(session)])).await.unwrap();
    }

    async fn names(objects: &Arc<InMemory>) -> Vec<String> {
        log(objects).refresh().await.unwrap().refs.keys().map(ToString::to_string).collect()
    }

    #[tokio::test]
    async fn a_snapshot_that_no_log_reaches_is_not_read() {
        let objects = Arc::new(InMemory::new());
        set(&objects, "a").await;
        for planted in [u64::MAX, u64::MAX - 3] {
            let state = State { seq: planted, ..State::default() };
            let key = Numbered::Snapshot.key(planted);
            objects.put(&key, state.seal().into()).await.unwrap();
        }
        assert_eq!(names(&objects).await, ["a"]);
        set(&objects, "b").await;
        assert_eq!(names(&objects).await, ["a", "b"]);
    }

    #[tokio::test]
    async fn garbage_with_numbers_far_ahead_is_left_aside_by_a_repair() {
        for planted in [NUMBER_MAX - 1, NUMBER_MAX, NUMBER_MAX + 1, u64::MAX] {
            let objects = Arc::new(InMemory::new());
            set(&objects, "a").await;
            for kind in [Numbered::Entry, Numbered::Snapshot] {
                objects.put(&kind.key(planted), "x".into()).await.unwrap();
            }
            let damaged = log(&objects).audit().await.unwrap().damaged;
            assert!(damaged.iter().any(|(key, _)| *key == Numbered::Entry.key(planted)), "{planted}: {damaged:?}");
            let salvaged = log(&objects).salvage(false).await.unwrap().unwrap();
            assert!(salvaged.unreadable.is_empty(), "{planted}: nothing of the log is lost");
            assert_eq!(salvaged.snapshots.len(), 1, "{planted}");
            set(&objects, "b").await;
            log(&objects).truncate(0, None).await.unwrap();
            assert_eq!(names(&objects).await, ["a", "b"], "{planted}");
        }
    }

    /// Whatever number it has: of an entry, of the next one, of one far ahead.
    #[tokio::test]
    async fn a_repair_sets_unreadable_snapshots_aside() {
        for planted in [1, 3, 4, 5, 900_000] {
            let objects = Arc::new(InMemory::new());
            set(&objects, "a").await;
            let key = Numbered::Snapshot.key(planted);
            objects.put(&key, "x".into()).await.unwrap();
            let damaged = log(&objects).audit().await.unwrap().damaged;
            let [(found, error)] = damaged.as_slice() else { panic!("{planted}: {damaged:?}") };
            assert_eq!(*found, key);
            assert!(error.help_text().is_some_and(|help| help.contains("towline verify --repair")), "{error:?}");
            let salvaged = log(&objects).salvage(false).await.unwrap().unwrap();
            let copy = layout::aside_snapshot(planted);
            assert_eq!((salvaged.unreadable, salvaged.snapshots), (Vec::new(), vec![(key, copy.clone())]));
            assert_eq!(objects.get(&copy).await.unwrap().bytes().await.unwrap(), "x");
            assert!(log(&objects).audit().await.unwrap().damaged.is_empty(), "{planted}");
            assert!(log(&objects).salvage(false).await.unwrap().is_none(), "once is enough");
            assert_eq!(names(&objects).await, ["a"]);
        }
    }

    /// A snapshot with a valid body is read, and named by the audit. Nothing is written behind the last number.
    #[tokio::test]
    async fn a_snapshot_at_the_last_number_does_no_lasting_harm() {
        let objects = Arc::new(InMemory::new());
        set(&objects, "a").await;
        let key = Numbered::Snapshot.key(NUMBER_MAX);
        objects.put(&key, State { seq: NUMBER_MAX, ..State::default() }.seal().into()).await.unwrap();
        let open = log(&objects).commit(None, |_| Ok(vec![Action::Open(SessionId::random())])).await;
        let error = open.unwrap_err();
        assert_eq!((error.kind(), error.place()), (ErrorKind::Damaged, Some(key.as_ref())), "{error:?}");
        let damaged = log(&objects).audit().await.unwrap().damaged;
        assert!(damaged.iter().any(|(found, _)| *found == key), "{damaged:?}");
        assert_eq!(log(&objects).truncate(0, None).await.unwrap_err().kind(), ErrorKind::Damaged);
        objects.delete(&key).await.unwrap();
        assert_eq!(names(&objects).await, ["a"], "nothing was deleted");
    }

    /// Three names, three entries each. If any entry is garbage or missing, the others stay in force.
    #[tokio::test]
    async fn whichever_entry_is_lost_the_others_stay_in_force() {
        for (lost, gone) in (1..=9).flat_map(|lost| [(lost, false), (lost, true)]) {
            let objects = Arc::new(InMemory::new());
            for name in ["a", "b", "c"] {
                set(&objects, name).await;
            }
            let key = Numbered::Entry.key(lost);
            if gone {
                objects.delete(&key).await.unwrap();
            } else {
                objects.put(&key, "garbage".into()).await.unwrap();
                let error = log(&objects).refresh().await.unwrap_err();
                assert!(error.help_text().is_some_and(|help| help.contains("towline verify --repair")), "{error:?}");
            }
            let salvaged = log(&objects).salvage(false).await.unwrap();
            // The last entry leaves no trace if it is missing.
            let Some(salvaged) = salvaged else {
                assert!(gone && lost == 9);
                continue;
            };
            assert_eq!(salvaged.unreadable.len(), 1, "{lost}");
            assert_eq!(salvaged.unreadable[0].0, key);
            assert_eq!(salvaged.unreadable[0].1, (!gone).then(|| Numbered::Aside.key(lost)));
            if !gone {
                let aside = objects.get(&Numbered::Aside.key(lost)).await.unwrap().bytes().await.unwrap();
                assert_eq!(aside, "garbage", "it is kept as it was");
            }
            let expected: Vec<&str> =
                [("a", 2), ("b", 5), ("c", 8)].iter().filter(|(_, set)| *set != lost).map(|(name, _)| *name).collect();
            assert_eq!(names(&objects).await, expected, "entry {lost}, gone: {gone}");
            assert!(log(&objects).salvage(false).await.unwrap().is_none(), "once is enough");
            set(&objects, "d").await;
            assert!(names(&objects).await.contains(&"d".to_owned()), "it goes on");
        }
    }

    /// A name is set (2), removed and kept (4), and its kept value forgotten (5). If any entry is lost, the rest
    /// follows.
    #[tokio::test]
    async fn what_is_kept_of_names_survives_the_loss_of_other_entries() {
        for (lost, kept_after_4, names_lost) in [(1, 1, 0), (2, 0, 1), (3, 1, 0), (4, 0, 0)] {
            for forgets in [false, true] {
                let objects = Arc::new(InMemory::new());
                set(&objects, "a").await;
                let a: Name = "a".parse().unwrap();
                let take = log(&objects);
                let taken = take.commit(None, |state| {
                    let gone = Action::RemoveRef { name: a.clone(), expected: 2 };
                    Ok(state.keep([&a]).into_iter().chain([gone]).collect())
                });
                taken.await.unwrap();
                let forget = Action::Forget { name: a.clone(), version: 2, at: 4 };
                log(&objects).commit(None, |_| Ok(if forgets { vec![forget.clone()] } else { vec![] })).await.unwrap();
                set(&objects, "b").await;
                objects.put(&Numbered::Entry.key(lost), "garbage".into()).await.unwrap();
                let salvaged = log(&objects).salvage(false).await.unwrap().unwrap();
                assert_eq!((salvaged.names.len(), salvaged.partial.len()), (names_lost, 0), "{lost}: {salvaged:?}");
                let state = log(&objects).refresh().await.unwrap();
                assert_eq!(state.removed.len(), if forgets { 0 } else { kept_after_4 }, "{lost}");
                assert_eq!(state.refs.contains_key(&a), lost == 4, "{lost}");
            }
        }
    }

    /// Object number 2^64 - 1 below `log/`, as anybody may put one there.
    #[tokio::test]
    async fn a_number_far_ahead_is_no_entry_and_is_not_counted_up_to() {
        let objects = Arc::new(InMemory::new());
        set(&objects, "a").await;
        let stray = Numbered::Entry.key(u64::MAX);
        objects.put(&stray, "stray".into()).await.unwrap();
        let audit = log(&objects).audit().await.unwrap();
        assert!(audit.folds);
        let [(key, error)] = audit.damaged.as_slice() else { panic!("{:?}", audit.damaged) };
        assert_eq!(*key, stray);
        assert!(error.help_text().is_some_and(|help| help.contains("delete it")), "{error:?}");
        assert!(log(&objects).salvage(false).await.unwrap().is_none(), "nothing of the log is lost");
        // A real gap beside it.
        objects.delete(&Numbered::Entry.key(2)).await.unwrap();
        let salvaged = log(&objects).salvage(false).await.unwrap().unwrap();
        assert_eq!((salvaged.snapshot, salvaged.unreadable), (3, vec![(Numbered::Entry.key(2), None)]));
        set(&objects, "b").await;
        assert_eq!(names(&objects).await, ["b"]);
    }

    #[tokio::test]
    async fn what_is_lost_counts_in_the_memory_before_anything_is_done() {
        let objects = Arc::new(InMemory::new());
        let small = Budget::new(MEMORY_MIN).unwrap().carve(MIB).await.unwrap();
        let most = small.kept_max() / OBJECT_WEIGHT as u64;
        for number in 1..=most {
            objects.put(&Numbered::Entry.key(number), "garbage".into()).await.unwrap();
        }
        let tight = Log::new(Arc::clone(&objects) as _, Arc::new(SystemClock), small.clone());
        let error = tight.salvage(false).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Exhausted, "{error:?}");
        assert!(small.keep(small.kept_max()).is_ok(), "what was refused is given back");
        assert!(objects.head(&Numbered::Aside.key(1)).await.is_err(), "nothing was done");
        let salvaged = log(&objects).salvage(false).await.unwrap().unwrap();
        assert_eq!(salvaged.unreadable.len() as u64, most);
    }

    #[tokio::test]
    async fn labels_are_not_lost_without_a_word() {
        let objects = Arc::new(InMemory::new());
        set(&objects, "a").await;
        for (name, label) in [("a", ("tenant", "t")), ("b", ("sensitivity", "secret"))] {
            let labels = Labels::default().with(label.0, label.1).unwrap();
            let name: Name = name.parse().unwrap();
            let give = |state: &State| Ok(state.label(&name, &labels)?.into_iter().collect());
            log(&objects).commit(None, give).await.unwrap();
        }
        // The label of `b`.
        objects.put(&Numbered::Entry.key(5), "garbage".into()).await.unwrap();
        let error = log(&objects).salvage(false).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict, "{error:?}");
        assert!(error.help_text().is_some_and(|help| help.contains("--accept-lost-labels")), "{error:?}");
        assert!(objects.get(&Numbered::Aside.key(5)).await.is_err(), "nothing was done");
        let salvaged = log(&objects).salvage(true).await.unwrap().unwrap();
        assert_eq!(salvaged.unreadable.len(), 1);
        let state = log(&objects).refresh().await.unwrap();
        assert_eq!(state.labels.keys().map(ToString::to_string).collect::<Vec<_>>(), ["a"]);
    }

    #[tokio::test]
    async fn an_entry_of_another_log_is_left_out() {
        let (old, objects) = (Arc::new(InMemory::new()), Arc::new(InMemory::new()));
        for name in ["a", "b"] {
            set(&old, name).await;
        }
        set(&objects, "kept").await;
        // Sets `b` in a session that this log does not know.
        let entry = old.get(&Numbered::Entry.key(5)).await.unwrap().bytes().await.unwrap();
        objects.put(&Numbered::Entry.key(4), entry.clone().into()).await.unwrap();
        assert_eq!(log(&objects).refresh().await.unwrap_err().kind(), ErrorKind::Damaged);
        let salvaged = log(&objects).salvage(false).await.unwrap().unwrap();
        assert_eq!(salvaged.refused, [(Numbered::Entry.key(4), Numbered::Aside.key(4))]);
        assert_eq!(objects.get(&Numbered::Aside.key(4)).await.unwrap().bytes().await.unwrap(), entry);
        assert!(log(&objects).audit().await.unwrap().damaged.is_empty());
        set(&objects, "later").await;
        assert_eq!(names(&objects).await, ["kept", "later"]);
    }

    #[tokio::test]
    async fn a_long_gap_is_told_once_and_the_log_goes_on_above_it() {
        let objects = Arc::new(InMemory::new());
        set(&objects, "a").await;
        let entry = objects.get(&Numbered::Entry.key(1)).await.unwrap().bytes().await.unwrap();
        let far = 900_000;
        objects.put(&Numbered::Entry.key(far), entry.into()).await.unwrap();
        let audit = log(&objects).audit().await.unwrap();
        let [(key, error)] = audit.damaged.as_slice() else { panic!("{} are told", audit.damaged.len()) };
        assert_eq!(*key, Numbered::Entry.key(4));
        assert!(error.to_string().contains(&format!("{} log entries", far - 4)), "{error}");
        let salvaged = log(&objects).salvage(false).await.unwrap().unwrap();
        assert_eq!((salvaged.snapshot, salvaged.unreadable.len()), (far, 1));
        assert_eq!(names(&objects).await, ["a"]);
    }

    #[tokio::test]
    async fn an_entry_of_a_later_version_is_not_garbage() {
        let objects = Arc::new(InMemory::new());
        set(&objects, "a").await;
        let key = Numbered::Entry.key(2);
        let mut bytes = objects.get(&key).await.unwrap().bytes().await.unwrap().to_vec();
        bytes.truncate(bytes.len() - DIGEST_LEN);
        bytes[5] = 2;
        let digest = blake3::hash(&bytes);
        bytes.extend_from_slice(digest.as_bytes());
        objects.put(&key, bytes.into()).await.unwrap();
        assert_eq!(log(&objects).salvage(false).await.unwrap_err().kind(), ErrorKind::Unsupported);
    }

    #[tokio::test]
    async fn one_bad_answer_condemns_nothing() {
        let read = async |answers: Vec<Result<Option<u8>>>| {
            let left = std::cell::RefCell::new(answers.into_iter());
            let read =
                twice_if_damaged(|| std::future::ready(left.borrow_mut().next().expect("it is read at most twice")))
                    .await;
            (read.map_err(|error| error.kind()), left.borrow().len())
        };
        let damaged = || Err(Error::damaged("entry"));
        assert_eq!(read(vec![damaged(), Ok(Some(1))]).await, (Ok(Some(1)), 0));
        assert_eq!(read(vec![Ok(None), Ok(Some(1))]).await, (Ok(Some(1)), 0));
        assert_eq!(read(vec![damaged(), damaged()]).await, (Err(ErrorKind::Damaged), 0));
        assert_eq!(read(vec![Ok(None), damaged()]).await, (Err(ErrorKind::Damaged), 0));
        assert_eq!(read(vec![damaged(), Err(Error::unreachable("store"))]).await, (Err(ErrorKind::Unreachable), 0));
        assert_eq!(read(vec![Err(Error::unreachable("store")), Ok(Some(1))]).await, (Err(ErrorKind::Unreachable), 1));
    }
}
