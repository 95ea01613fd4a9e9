//! Sweeping: finds objects of ended sessions that nothing refers to.
//!
//! The listing comes before the fold. So each listed key belongs to a session that the fold knows as open or as ended. No later
//! commit can refer to an object of an ended session.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use futures::{StreamExt as _, TryStreamExt as _, stream};
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStoreExt as _};

use super::Marks;
use super::tombstones::{self, Item, Tombstone};
use crate::budget::GrowingMemory;
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::format::PackRef;
use crate::id::{Owned, PackId, SessionId};
use crate::repository::Repository;
use crate::repository::layout::{self, Family, Numbered};
use crate::repository::listing::listed;
use crate::repository::log::State;
use crate::repository::objects;

/// One object as a listing showed it.
#[derive(Clone, Debug)]
struct Listed {
    family: Family,
    id: Owned,
    len: u64,
    modified: Timestamp,
}

/// Listed objects of all sessions, and tombstones: lists of objects that earlier collects found unneeded.
#[derive(Debug, Default)]
pub struct SweepCandidates {
    /// Sorted by kind and id.
    listed: Vec<Listed>,
    /// The oldest first.
    tombstones: Vec<Tombstone>,
    /// Memory of `listed`.
    _memory: Vec<GrowingMemory>,
}

/// Cutoff: objects found unneeded before it are deleted.
#[derive(Clone, Copy, Debug)]
pub enum Cutoff {
    /// No grace: delete at once.
    NoGrace,
    /// Time by the store's clock.
    Before(Timestamp),
}

/// Listed objects that nothing needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unneeded {
    /// Objects to delete now, and their bytes.
    pub due: BTreeMap<Item, u64>,
    /// Objects to delete once their grace is over, or once they are purged.
    pub waiting: BTreeMap<Item, u64>,
}

/// Lists the objects of all sessions. Call it before the fold.
///
/// # Errors
/// Unreachable, if the store is; unsupported, if it lists without end; exhausted, if the lists do not fit into the memory budget.
///
/// # Cancel safety
/// Safe: it only reads.
pub async fn leftovers(repository: &Repository) -> Result<SweepCandidates> {
    let (mut all, mut memory) = (Vec::new(), Vec::new());
    for family in Family::ALL {
        let pick = |meta: ObjectMeta| {
            let modified = Timestamp(meta.last_modified.timestamp_nanos_opt().unwrap_or(i64::MAX));
            let id = layout::owner(family, &meta.location)?;
            Some(Listed { family, id, len: meta.size, modified })
        };
        let (found, counted) =
            listed(&**repository.store().objects(), repository.budget(), &layout::family(family), pick, |_| 0).await?;
        all.extend(found);
        memory.push(counted);
    }
    all.sort_unstable_by_key(Listed::item);
    let mut leftovers = SweepCandidates { listed: all, tombstones: Vec::new(), _memory: memory };
    leftovers.tombstones = tombstones::read(repository, |item| leftovers.has(item)).await?;
    leftovers.tombstones.sort_by_key(|tombstone| tombstone.written);
    Ok(leftovers)
}

impl Listed {
    fn item(&self) -> Item {
        (self.family, self.id)
    }
}

impl Cutoff {
    /// The time, if there is one.
    #[must_use]
    pub fn limit(self) -> Option<Timestamp> {
        match self {
            Self::NoGrace => None,
            Self::Before(limit) => Some(limit),
        }
    }

    fn is_past(self, since: Option<Timestamp>) -> bool {
        match self {
            Self::NoGrace => true,
            Self::Before(limit) => since.is_some_and(|since| since <= limit),
        }
    }
}

impl SweepCandidates {
    /// True if `item` existed at the time of the listing.
    #[must_use]
    pub fn has(&self, item: &Item) -> bool {
        self.listed.binary_search_by_key(item, Listed::item).is_ok()
    }

    /// Bytes of the object of a pack; none if the listing does not have it.
    #[must_use]
    pub fn pack_len(&self, pack: PackId) -> Option<u64> {
        let at = self.listed.binary_search_by_key(&(Family::Pack, pack), Listed::item).ok()?;
        self.listed.get(at).map(|object| object.len)
    }

    /// Packs that were found unneeded before `cutoff`.
    pub fn packs_due(&self, cutoff: Cutoff) -> impl Fn(&PackId) -> bool {
        let since = self.unneeded_since();
        move |pack| cutoff.is_past(since.get(&(Family::Pack, *pack)).copied())
    }

    /// Time at which each object was first found unneeded.
    fn unneeded_since(&self) -> BTreeMap<Item, Timestamp> {
        let mut since = BTreeMap::new();
        for tombstone in &self.tombstones {
            for item in &tombstone.items {
                since.entry(*item).or_insert(tombstone.written);
            }
        }
        since
    }

    /// Objects that nothing refers to, now or later. A pack in use by a map is never among them, whatever the log says.
    #[must_use]
    pub fn unneeded(
        &self,
        state: &State,
        packs: &BTreeMap<PackId, PackRef>,
        marks: &Marks,
        cutoff: Cutoff,
    ) -> Unneeded {
        let manifests: BTreeSet<Owned> = state.roots().map(|(_, value)| value.manifest_key).collect();
        let maps: BTreeSet<Owned> = state.roots().map(|(_, value)| value.map_key).collect();
        let since = self.unneeded_since();
        let mut unneeded = Unneeded::default();
        for object in &self.listed {
            let open = state.sessions.contains_key(&object.id.session);
            let purged = state.purged.get(&object.id);
            let (needed, condemned) = match object.family {
                Family::Pack if marks.uses(&object.id) => (true, false),
                Family::Pack if state.condemned.contains_key(&object.id) => (false, true),
                Family::Pack if purged.is_some_and(|purged| !purged.deleted) => (false, false),
                Family::Pack => (open || packs.contains_key(&object.id) && purged.is_none(), false),
                Family::Index => (open || state.segments.contains_key(&object.id), false),
                Family::Manifest => (open || manifests.contains(&object.id), false),
                Family::Map => (open || maps.contains(&object.id), false),
                // Parts are read only by ranks of the session.
                Family::Part => (open, false),
            };
            if needed {
                continue;
            }
            let is_due = !condemned && cutoff.is_past(since.get(&object.item()).copied());
            let kind = if is_due { &mut unneeded.due } else { &mut unneeded.waiting };
            kind.insert(object.item(), object.len);
        }
        unneeded
    }

    /// Writes a tombstone of newly `unneeded` objects, and deletes obsolete tombstones: those whose objects are all deleted, and
    /// those with an object that is needed again, whose grace must start anew. Call it once `unneeded.due` is deleted.
    ///
    /// # Errors
    /// Unreachable, if the store is.
    ///
    /// # Cancel safety
    /// Safe: the next collect continues.
    pub async fn list_unneeded(&self, repository: &Repository, session: SessionId, unneeded: &Unneeded) -> Result<()> {
        let is_kept = |tombstone: &&Tombstone| {
            let is_unneeded = |item: &Item| unneeded.waiting.contains_key(item) || unneeded.due.contains_key(item);
            tombstone.items.iter().all(is_unneeded)
                && tombstone.items.iter().any(|item| unneeded.waiting.contains_key(item))
        };
        let (kept, over): (Vec<&Tombstone>, Vec<&Tombstone>) = self.tombstones.iter().partition(is_kept);
        let listed: BTreeSet<&Item> = kept.iter().flat_map(|tombstone| &tombstone.items).collect();
        let new: Vec<Item> = unneeded.waiting.keys().filter(|item| !listed.contains(item)).copied().collect();
        tombstones::write(repository, session, &new).await?;
        delete_all(repository, over.iter().map(|tombstone| tombstone.key.clone()).collect()).await.map(drop)
    }

    /// Time of the last write of each session that is open in `state`, by the store's clock.
    fn last_written(&self, state: &State) -> HashMap<SessionId, Timestamp> {
        let mut written: HashMap<SessionId, Timestamp> = HashMap::new();
        for object in self.listed.iter().filter(|object| state.sessions.contains_key(&object.id.session)) {
            let newest = written.entry(object.id.session).or_insert(object.modified);
            *newest = object.modified.max(*newest);
        }
        written
    }

    /// Open sessions without a write or commit since `limit`, by the store's clock, with the entries that touched them last.
    /// Sessions whose last activity is unknown are not included.
    ///
    /// # Errors
    /// Unreachable, if the store is.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn stalled(
        &self,
        times: &mut EntryTimes<'_>,
        state: &State,
        limit: Timestamp,
    ) -> Result<Vec<(SessionId, u64)>> {
        let written = self.last_written(state);
        let is_silent = |id: &SessionId| written.get(id).is_none_or(|&newest| newest < limit);
        let silent: Vec<(SessionId, u64)> =
            state.sessions.iter().filter(|(id, _)| is_silent(id)).map(|(id, session)| (*id, session.touched)).collect();
        times.read(silent.iter().map(|(_, touched)| *touched)).await?;
        let newest = |(id, touched): &(SessionId, u64)| times.get(*touched).max(written.get(id).copied());
        Ok(silent.into_iter().filter(|session| newest(session).is_some_and(|newest| newest < limit)).collect())
    }

    /// Unused packs that are kept because their session is open, by session.
    ///
    /// # Errors
    /// Unreachable, if the store is.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn held(&self, times: &mut EntryTimes<'_>, state: &State, marks: &Marks) -> Result<Vec<SessionPacks>> {
        let mut all: BTreeMap<SessionId, SessionPacks> = BTreeMap::new();
        for object in self.listed.iter().filter(|object| object.family == Family::Pack && !marks.uses(&object.id)) {
            let session = object.id.session;
            if state.sessions.contains_key(&session) {
                let held = all.entry(session).or_insert(SessionPacks { session, packs: 0, bytes: 0, alive: None });
                held.packs += 1;
                held.bytes += object.len;
            }
        }
        let touched = |session: &SessionId| state.sessions.get(session).map(|session| session.touched);
        times.read(all.keys().filter_map(touched)).await?;
        let written = self.last_written(state);
        let alive = |session: &SessionId| {
            let committed = touched(session).and_then(|entry| times.get(entry));
            committed.max(written.get(session).copied())
        };
        Ok(all.into_values().map(|held| SessionPacks { alive: alive(&held.session), ..held }).collect())
    }
}

/// Times at which log entries were written, by the store's clock. Each is asked for once: an entry may touch very many sessions.
#[derive(Debug)]
pub struct EntryTimes<'a> {
    repository: &'a Repository,
    /// By number; none for an entry whose time the store does not tell.
    known: HashMap<u64, Option<Timestamp>>,
}

impl<'a> EntryTimes<'a> {
    /// Times of none yet.
    #[must_use]
    pub fn new(repository: &'a Repository) -> Self {
        Self { repository, known: HashMap::new() }
    }

    /// Asks for the times of `entries` that are not known yet, several at once.
    async fn read(&mut self, entries: impl Iterator<Item = u64>) -> Result<()> {
        let unknown: BTreeSet<u64> = entries.filter(|entry| !self.known.contains_key(entry)).collect();
        let repository = self.repository;
        let mut told = stream::iter(unknown)
            .map(|entry| async move { Ok::<_, Error>((entry, store_time(repository, entry).await?)) })
            .buffer_unordered(repository.parallelism());
        while let Some((entry, time)) = told.try_next().await? {
            self.known.insert(entry, time);
        }
        Ok(())
    }

    fn get(&self, entry: u64) -> Option<Timestamp> {
        self.known.get(&entry).copied().flatten()
    }
}

/// Packs that one open session keeps from being freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionPacks {
    /// The session.
    pub session: SessionId,
    /// Number of its packs that no name uses.
    pub packs: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Time of its last write or commit, by the store's clock, if known.
    pub alive: Option<Timestamp>,
}

/// Time at which log entry `number` was written, by the store's clock.
///
/// # Errors
/// Unreachable, if the store is.
///
/// # Cancel safety
/// Safe: it only reads.
pub async fn store_time(repository: &Repository, number: u64) -> Result<Option<Timestamp>> {
    let key = Numbered::Entry.key(number);
    let head = objects::retry(|| async {
        match repository.store().objects().head(&key).await {
            Ok(meta) => Ok(Some(meta)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    });
    Ok(head.await?.and_then(|meta| meta.last_modified.timestamp_nanos_opt()).map(Timestamp))
}

/// Deletes objects; those that are gone already count as deleted. Returns how many requests the store took.
///
/// # Errors
/// The first error other than "not found"; all objects are tried first.
///
/// # Cancel safety
/// Safe: the next collect continues.
pub async fn delete_all(repository: &Repository, keys: Vec<Path>) -> Result<u64> {
    let mut failed = None;
    let mut deleted = 0;
    let mut results = repository.store().objects().delete_stream(stream::iter(keys.into_iter().map(Ok)).boxed());
    while let Some(result) = results.next().await {
        match result {
            Ok(_) => deleted += 1,
            Err(object_store::Error::NotFound { .. }) => {}
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    match failed {
        None => Ok(deleted),
        Some(error) => Err(error.into()),
    }
}
