//! Sweeping: objects that nothing names, left by sessions that are over.
//!
//! The listing comes first and the fold after it: a key in the listing belongs to a session that was open before, so the
//! fold knows it as open, or as over for good. Nothing can come to name an object of a session that is over.

use std::collections::{BTreeMap, BTreeSet};

use futures::{StreamExt as _, TryStreamExt as _, stream};
use object_store::ObjectStoreExt as _;
use object_store::path::Path;

use super::Marks;
use super::tombstones::{self, Item, Tombstone};
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::format::PackRef;
use crate::id::{Owned, PackId, SessionId};
use crate::repository::Repository;
use crate::repository::layout::{self, Family, Numbered};
use crate::repository::log::{Session, State};
use crate::repository::objects;

/// One object as a listing showed it.
#[derive(Clone, Debug)]
struct Listed {
    family: Family,
    id: Owned,
    len: u64,
    modified: Timestamp,
}

/// Objects of all sessions as a listing showed them, and lists of those that collects found unneeded.
#[derive(Clone, Debug, Default)]
pub struct Leftovers {
    /// Sorted by what they are and their ids.
    listed: Vec<Listed>,
    /// The oldest first.
    tombstones: Vec<Tombstone>,
}

/// Time before which an object must have been found unneeded to be deleted.
#[derive(Clone, Copy, Debug)]
pub enum Cutoff {
    /// None: the caller asked for no grace.
    NoGrace,
    /// By the store's clock.
    Before(Timestamp),
}

/// Listed objects that nothing needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unneeded {
    /// To be deleted now: keys and bytes.
    pub due: BTreeMap<Item, u64>,
    /// To be deleted once their grace is over, or once they are purged.
    pub waiting: BTreeMap<Item, u64>,
}

/// Lists what sessions have written. Call it before the fold that judges it.
///
/// # Errors
/// Unreachable, if the store is.
///
/// # Cancel safety
/// Safe: it only reads.
pub async fn leftovers(repository: &Repository) -> Result<Leftovers> {
    let mut listed = Vec::new();
    for family in Family::ALL {
        let prefix = layout::family(family);
        let found: Vec<Listed> = objects::retry(|| async {
            let all = repository.store().objects().list(Some(&prefix)).map_err(Error::from);
            let known = all.try_filter_map(|meta| async move {
                let modified = Timestamp(meta.last_modified.timestamp_nanos_opt().unwrap_or(i64::MAX));
                let id = layout::owner(family, &meta.location);
                Ok(id.map(|id| Listed { family, id, len: meta.size, modified }))
            });
            known.try_collect().await
        })
        .await?;
        listed.extend(found);
    }
    listed.sort_unstable_by_key(Listed::item);
    let mut leftovers = Leftovers { listed, tombstones: Vec::new() };
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

impl Leftovers {
    /// Was `item` there when this was listed?
    #[must_use]
    pub fn has(&self, item: &Item) -> bool {
        self.listed.binary_search_by_key(item, Listed::item).is_ok()
    }

    /// Packs that were found unneeded before `cutoff`.
    pub fn packs_due(&self, cutoff: Cutoff) -> impl Fn(&PackId) -> bool {
        let since = self.unneeded_since();
        move |pack| cutoff.is_past(since.get(&(Family::Pack, *pack)).copied())
    }

    /// When each object was first found unneeded.
    fn unneeded_since(&self) -> BTreeMap<Item, Timestamp> {
        let mut since = BTreeMap::new();
        for tombstone in &self.tombstones {
            for item in &tombstone.items {
                since.entry(*item).or_insert(tombstone.written);
            }
        }
        since
    }

    /// Objects that nothing names and nothing can come to name. A pack that a map uses is never one, whatever the log says of it.
    #[must_use]
    pub fn unneeded(
        &self,
        state: &State,
        packs: &BTreeMap<PackId, PackRef>,
        marks: &Marks,
        cutoff: Cutoff,
    ) -> Unneeded {
        let manifests: BTreeSet<Owned> = state.refs.values().map(|value| value.manifest_key).collect();
        let maps: BTreeSet<Owned> = state.refs.values().map(|value| value.map_key).collect();
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
                // They are for the session's own ranks.
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

    /// Lists what is `unneeded` and not listed yet, and deletes lists that are not needed any more: all that they listed is
    /// deleted, or some of it is needed again, whose grace must begin anew. Call it once `unneeded.due` is deleted.
    ///
    /// # Errors
    /// Unreachable, if the store is.
    ///
    /// # Cancel safety
    /// Safe: the next collect goes on.
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

    /// When the session last wrote anything, by the store's clock.
    fn last_written(&self, session: SessionId) -> Option<Timestamp> {
        self.listed.iter().filter(|object| object.id.session == session).map(|object| object.modified).max()
    }

    /// Open sessions that have neither written nor committed anything since `limit`, by the store's own clock, with the
    /// entries that touched them last. A session of which nothing can be told is let be.
    ///
    /// # Errors
    /// Unreachable, if the store is.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn stalled(
        &self,
        repository: &Repository,
        state: &State,
        limit: Timestamp,
    ) -> Result<Vec<(SessionId, u64)>> {
        let mut stalled = Vec::new();
        for (&id, session) in &state.sessions {
            if self.last_alive(repository, (id, session)).await?.is_some_and(|newest| newest < limit) {
                stalled.push((id, session.touched));
            }
        }
        Ok(stalled)
    }

    /// Packs of open sessions that no name uses and that are kept all the same. Sessions without any are left out.
    ///
    /// # Errors
    /// Unreachable, if the store is.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn held(&self, repository: &Repository, state: &State, marks: &Marks) -> Result<Vec<Held>> {
        let mut all = Vec::new();
        for (&id, session) in &state.sessions {
            let own = self.listed.iter().filter(|object| object.family == Family::Pack && object.id.session == id);
            let lens: Vec<u64> = own.filter(|object| !marks.uses(&object.id)).map(|object| object.len).collect();
            if !lens.is_empty() {
                let alive = self.last_alive(repository, (id, session)).await?;
                all.push(Held { session: id, packs: lens.len() as u64, bytes: lens.iter().sum(), alive });
            }
        }
        Ok(all)
    }

    /// When a session last wrote or committed anything, by the store's clock.
    async fn last_alive(
        &self,
        repository: &Repository,
        (id, session): (SessionId, &Session),
    ) -> Result<Option<Timestamp>> {
        let touched = store_time(repository, session.touched).await?;
        Ok([touched, self.last_written(id)].into_iter().flatten().max())
    }
}

/// Packs that one open session keeps from being freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// Which.
    pub session: SessionId,
    /// Its packs that no name uses.
    pub packs: u64,
    /// Their bytes.
    pub bytes: u64,
    /// When it last wrote or committed anything, by the store's clock, if that can be told.
    pub alive: Option<Timestamp>,
}

/// When the store says that log entry `number` was written.
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
/// The first that is not "not found"; the others were tried all the same.
///
/// # Cancel safety
/// Safe: the next collect goes on.
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
