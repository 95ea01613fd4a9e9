//! Sweeping: objects that nothing names, left by sessions that are over.
//!
//! The listing comes first and the fold after it: a key in the listing belongs to a session that was open before, so the
//! fold knows it as open, or as over for good. Nothing can come to name an object of a session that is over.

use std::collections::BTreeMap;

use futures::{StreamExt as _, TryStreamExt as _, stream};
use object_store::ObjectStoreExt as _;
use object_store::path::Path;

use super::Marks;
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

/// Objects of all sessions that a listing found unused.
#[derive(Clone, Debug, Default)]
pub struct Leftovers {
    listed: Vec<Listed>,
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
    Ok(Leftovers { listed })
}

impl Leftovers {
    /// Objects that nothing names and nothing can come to name, with their lengths.
    #[must_use]
    pub fn orphans(&self, state: &State, packs: &BTreeMap<PackId, PackRef>, marks: &Marks) -> Vec<(Path, u64)> {
        let manifests: std::collections::BTreeSet<Owned> =
            state.refs.values().map(|value| value.manifest_key).collect();
        let maps: std::collections::BTreeSet<Owned> = state.refs.values().map(|value| value.map_key).collect();
        let named = |object: &Listed| match object.family {
            Family::Pack => {
                let pending = state.purged.get(&object.id).is_some_and(|purged| !purged.deleted);
                let indexed = packs.contains_key(&object.id) && !state.purged.contains_key(&object.id);
                indexed || pending || state.condemned.contains_key(&object.id) || marks.uses(&object.id)
            }
            Family::Index => state.segments.contains_key(&object.id),
            Family::Manifest => manifests.contains(&object.id),
            Family::Map => maps.contains(&object.id),
            // They are for the session's own ranks.
            Family::Part => false,
        };
        let orphans =
            self.listed.iter().filter(|object| !state.sessions.contains_key(&object.id.session) && !named(object));
        orphans.map(|object| (layout::owned(object.family, object.id), object.len)).collect()
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
