//! Repacking: live chunks of mostly dead packs move to new packs; the maps that named the old ones are replaced, and the
//! old packs condemned, in one commit.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use futures::{StreamExt as _, TryStreamExt as _, stream};

use super::Marks;
use crate::error::{Error, ErrorKind, Result};
use crate::format::PackRef;
use crate::id::{MapKey, Owned, PackId};
use crate::name::Name;
use crate::progress::Progress;
use crate::repository::log::{Action, RefValue, State};
use crate::repository::mapping::moved;
use crate::repository::repair::put_map;
use crate::repository::{ChunkPlace, Gaps, PackRead, Repository, Saved, Stored, Writer, longest_read, plan, read_pack};

/// Rewrites `packs`; returns the bytes of the packs that this condemned.
///
/// # Errors
/// Damaged, if a live chunk is damaged: the pack is then left unchanged.
///
/// # Cancel safety
/// Safe: nothing changes for readers before the one commit; the next collect deletes objects uploaded before.
pub async fn repack(
    repository: &Repository,
    state: &State,
    marks: &Marks,
    packs: &[PackRef],
    progress: &Progress,
) -> Result<u64> {
    if packs.is_empty() {
        return Ok(0);
    }
    let old: BTreeMap<PackId, PackRef> = packs.iter().map(|pack| (pack.id, *pack)).collect();
    let keys: BTreeSet<MapKey> = old.keys().flat_map(|id| marks.maps_of(*id)).collect();
    let names: BTreeMap<MapKey, _> = state.roots().map(|(name, value)| (value.map_key, (name, value))).collect();
    let mut repacking =
        Repacking { repository, progress, old: &old, writer: Writer::new(repository, progress), moved: HashMap::new() };
    let mut swaps = Vec::new();
    for key in keys {
        let Some((name, value)) = names.get(&key) else { continue };
        match repacking.tree(name, value).await {
            Ok((saved, places)) => swaps.push((key, saved, places)),
            // If other trees use these packs, the next marking pardons them.
            Err(error) if error.kind() == ErrorKind::NotFound => repacking.outpaced(name, value, error).await?,
            Err(error) => return Err(error),
        }
    }
    publish(repository, &mut repacking.writer, swaps, &old).await
}

/// Copy of live chunks to new packs.
struct Repacking<'a> {
    repository: &'a Repository,
    progress: &'a Progress,
    old: &'a BTreeMap<PackId, PackRef>,
    writer: Writer,
    moved: HashMap<(PackId, u32), ChunkPlace>,
}

impl Repacking<'_> {
    /// Copies the chunks of one tree out of the old packs; returns the tree and the new places of its chunks.
    async fn tree(&mut self, name: &Name, value: &RefValue) -> Result<(Arc<Saved>, Vec<ChunkPlace>)> {
        let saved = Arc::new(self.repository.saved_as(name, value).await?);
        let chunks = 0..saved.located_chunks();
        let mut places = chunks.map(|chunk| Ok(saved.locate(chunk)?.place)).collect::<Result<Vec<ChunkPlace>>>()?;
        let missing = (0..).zip(&places).filter(|(_, place)| self.is_missing(place)).map(|(chunk, _)| chunk);
        let budget = self.repository.budget();
        let reads = plan(|chunk| saved.locate(chunk), missing, longest_read(self.repository, budget), Gaps::Wide)?;
        let repositories = [self.repository];
        let frames = reads.into_iter().map(|read| {
            let saved = Arc::clone(&saved);
            let take = move |read: &PackRead, buffer| Stored::take(|chunk| saved.locate(chunk), read, buffer);
            read_pack(&repositories, budget, read, take)
        });
        // Collected first: a stream over a closure's futures would not be known to be `Send`.
        let mut frames = stream::iter(frames.collect::<Vec<_>>()).buffered(self.repository.parallelism());
        while let Some(stored) = frames.try_next().await? {
            let share = stored.is_mostly_used();
            for (id, place, frame) in stored.frames() {
                // Two chunks of a tree may share a frame.
                if let Entry::Vacant(entry) = self.moved.entry((place.pack, place.ordinal)) {
                    self.progress.advance(u64::from(place.stored_len));
                    let new = self.writer.push(id, frame, place.plain_len, share).await?;
                    entry.insert(ChunkPlace { alone_len: place.alone_len, ..new });
                }
            }
        }
        for place in &mut places {
            if let Some(new) = self.moved.get(&(place.pack, place.ordinal)) {
                *place = *new;
            }
        }
        Ok((saved, places))
    }

    fn is_missing(&self, place: &ChunkPlace) -> bool {
        self.old.contains_key(&place.pack) && !self.moved.contains_key(&(place.pack, place.ordinal))
    }

    /// Handles a missing object of a tree: no error if the name has changed, or another collector moved it first.
    async fn outpaced(&self, name: &Name, value: &RefValue, error: Error) -> Result<()> {
        let state = self.repository.state().await?;
        if state.roots().any(|(other, now)| other == name && now.map_key == value.map_key) {
            return Err(Error::damaged("a saved tree cannot be repacked: part of it is missing")
                .at(name)
                .source(error));
        }
        tracing::debug!("{name} moved on while it was repacked: {error:?}");
        Ok(())
    }
}

/// A map to replace, its tree, and the new places of the tree's chunks.
type MapSwap = (MapKey, Arc<Saved>, Vec<ChunkPlace>);

/// Writes the new maps and commits the swap.
async fn publish(
    repository: &Repository,
    writer: &mut Writer,
    swaps: Vec<MapSwap>,
    old: &BTreeMap<PackId, PackRef>,
) -> Result<u64> {
    writer.settle().await?;
    let session = writer.session().await?;
    let mut actions = Vec::new();
    for (key, saved, places) in swaps {
        let kept = |id: PackId| saved.map.packs.iter().find(|pack| pack.id == id).copied();
        let map = moved(&saved.map, &places, |id| writer.pack(id).or_else(|| kept(id)))?;
        let new = Owned::fresh(session);
        put_map(repository, new, &map).await?;
        actions.push(Action::SwapMap { old: key, new });
    }
    let condemned = Arc::new(Mutex::new(0));
    let freed = Arc::clone(&condemned);
    writer
        .close(|state| {
            let mut all = actions.clone();
            let mut bytes = 0;
            for pack in old.values().filter(|pack| state.is_target(&pack.id)) {
                all.push(Action::Condemn { pack: pack.id, len: pack.len, damaged: false });
                bytes += pack.len;
            }
            *freed.lock().unwrap_or_else(PoisonError::into_inner) = bytes;
            Ok(all)
        })
        .await?;
    let freed = *condemned.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(freed)
}
