//! Repacking: live chunks of mostly dead packs move to new packs; the maps that named the old ones are replaced, and the
//! old packs condemned, in one commit.
//!
//! A map is the word of whoever wrote it. A tree is moved only if its map says the same of the packs as their footers do. A
//! pack that another map is wrong about stays. Trees are read once to copy their chunks, and again to write their new maps:
//! only one is in memory at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use futures::{StreamExt as _, TryStreamExt as _, stream};

use super::Marks;
use super::judge::is_mostly_unused;
use super::live::LiveChunks;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{PackFooter, PackRef};
use crate::id::{MapKey, Owned, PackId};
use crate::name::Name;
use crate::progress::Progress;
use crate::repository::log::{Action, RefValue, State};
use crate::repository::mapping::moved;
use crate::repository::repair::put_map;
use crate::repository::{Gaps, PackRead, Repository, Saved, Stored, Writer, longest_read, plan, read_pack};

/// Reason for which packs are left.
pub const NO_SPACE: &str = "the disk has too little space to rewrite them";

/// Outcome of a repack.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Repacked {
    /// Bytes of the packs that it condemned.
    pub freed: u64,
    /// Packs that were not condemned, and why.
    pub left: BTreeMap<PackId, String>,
}

/// A name with one of its values.
type Root<'a> = (&'a Name, &'a RefValue);

/// Rewrites `packs`; if the disk of the repository is full, or the quota of its user, all of them are left.
///
/// # Errors
/// Damaged, if a live chunk is damaged or missing: the packs are then left unchanged.
///
/// # Cancel safety
/// Safe: nothing changes for readers before the one commit; the next collect deletes objects uploaded before.
pub async fn repack(
    repository: &Repository,
    state: &State,
    marks: &Marks,
    packs: &[PackRef],
    progress: &Progress,
) -> Result<Repacked> {
    if packs.is_empty() {
        return Ok(Repacked::default());
    }
    let roots: BTreeMap<MapKey, Root<'_>> = state.roots().map(|root| (root.1.map_key, root)).collect();
    let mut repacking = Repacking {
        repository,
        progress,
        marks,
        writer: Writer::new(repository, progress),
        live: LiveChunks::new(repository.budget()),
        old: BTreeMap::new(),
        left: BTreeMap::new(),
    };
    match repacking.rewrite(state, packs, &roots).await {
        Err(error) if error.is_of_full_disk() => repacking.leave(packs, &error).await,
        rewritten => rewritten,
    }
}

/// Copy of live chunks to new packs.
struct Repacking<'a> {
    repository: &'a Repository,
    progress: &'a Progress,
    marks: &'a Marks,
    writer: Writer,
    live: LiveChunks,
    old: BTreeMap<PackId, PackRef>,
    left: BTreeMap<PackId, String>,
}

impl Repacking<'_> {
    async fn rewrite(
        &mut self,
        state: &State,
        packs: &[PackRef],
        roots: &BTreeMap<MapKey, Root<'_>>,
    ) -> Result<Repacked> {
        for pack in packs {
            self.take(pack, roots, state.purged.contains_key(&pack.id)).await?;
        }
        let keys: BTreeSet<MapKey> = self.old.keys().flat_map(|id| self.marks.maps_of(*id)).collect();
        let mut copied = Vec::new();
        for root in keys.iter().filter_map(|key| roots.get(key).copied()) {
            if self.copy(root).await? {
                copied.push(root);
            }
        }
        self.publish(&copied).await
    }

    /// Leaves `packs`, and ends the session.
    async fn leave(mut self, packs: &[PackRef], error: &Error) -> Result<Repacked> {
        tracing::info!("{} packs are not rewritten: {error:?}", packs.len());
        self.writer.discard().await?;
        Ok(Repacked { freed: 0, left: packs.iter().map(|pack| (pack.id, NO_SPACE.to_owned())).collect() })
    }

    /// Takes a pack to rewrite, with its live chunks, or leaves it. One that was `purged` must be rewritten, however much of it
    /// is used.
    async fn take(&mut self, pack: &PackRef, roots: &BTreeMap<MapKey, Root<'_>>, purged: bool) -> Result<()> {
        let count = self.marks.used_chunks(&pack.id);
        if !self.live.reserve(count) {
            self.left
                .insert(pack.id, "there is no memory for more at a time: collect again, or raise --memory".to_owned());
            return Ok(());
        }
        let left = match self.repository.footer_uncached(pack).await {
            Ok(footer) if purged || is_mostly_unused(pack, self.used_bytes(pack.id, &footer)) => {
                for ordinal in self.marks.ordinals(&pack.id) {
                    if let Some(entry) = footer.entries.get(ordinal as usize) {
                        self.live.add(pack.id, ordinal, *entry);
                    }
                }
                self.old.insert(pack.id, *pack);
                return Ok(());
            }
            Ok(_) => format!("a map says less of pack {} than is used", pack.id),
            Err(error) => match error.kind() {
                // If other trees use it, the next marking pardons it.
                ErrorKind::NotFound => {
                    let maps = self.marks.maps_of(pack.id).collect();
                    if let Some(map) = self.still_needed(&maps).await?
                        && let Some(root) = roots.get(&map)
                    {
                        return Err(incomplete(*root, error));
                    }
                    error.to_string()
                }
                ErrorKind::Damaged | ErrorKind::Unsupported | ErrorKind::Exhausted => error.to_string(),
                _ => return Err(error),
            },
        };
        self.live.release(count);
        self.left.insert(pack.id, left);
        Ok(())
    }

    /// Stored bytes of the used chunks of a pack, by its footer.
    fn used_bytes(&self, pack: PackId, footer: &PackFooter) -> u64 {
        let used = self.marks.ordinals(&pack).filter_map(|ordinal| footer.entries.get(ordinal as usize));
        used.map(|entry| u64::from(entry.stored_len)).sum()
    }

    /// Opens a tree, if all that its map says of the old packs is right; else these stay, unless the tree has moved on. The same
    /// holds for a tree that cannot be read: whoever wrote it must not stop the collect of all others.
    async fn open(&mut self, (name, value): Root<'_>) -> Result<Option<Arc<Saved>>> {
        let wrong = match self.repository.saved_as(name, value).await {
            Ok(saved) => match self.disagreement(&saved) {
                None => return Ok(Some(saved.shared())),
                Some(wrong) => wrong,
            },
            Err(error) => match error.kind() {
                ErrorKind::NotFound | ErrorKind::Damaged | ErrorKind::Unsupported | ErrorKind::Exhausted => error,
                _ => return Err(error),
            },
        };
        if self.still_needed(&BTreeSet::from([value.map_key])).await?.is_none() {
            tracing::debug!("{name} moved on while it was repacked: {wrong:?}");
            return Ok(None);
        }
        let (marks, left) = (self.marks, &mut self.left);
        for pack in self.old.keys().filter(|pack| marks.is_used_by(**pack, value.map_key)) {
            left.entry(*pack).or_insert_with(|| format!("{name} cannot be moved: {wrong}"));
        }
        Ok(None)
    }

    /// The first chunk of which the map says anything else than the footer of its pack, as an error.
    fn disagreement(&self, saved: &Saved) -> Option<Error> {
        (0..saved.located_chunks()).find_map(|chunk| match saved.locate(chunk) {
            Ok(located) if !self.old.contains_key(&located.place.pack) || self.live.has(&located) => None,
            Ok(located) => {
                let place = located.place;
                Some(
                    Error::damaged("map and pack disagree about a chunk")
                        .got(format!("another in pack {}, chunk {}", place.pack, place.ordinal)),
                )
            }
            Err(error) => Some(error),
        })
    }

    /// Copies the chunks of a tree out of the old packs; false, if the tree is left or has moved on.
    async fn copy(&mut self, root: Root<'_>) -> Result<bool> {
        let Some(saved) = self.open(root).await? else { return Ok(false) };
        match self.copy_chunks(&saved).await {
            Ok(()) => Ok(true),
            // If other trees use these packs, the next marking pardons them.
            Err(error) if error.kind() == ErrorKind::NotFound => {
                if self.still_needed(&BTreeSet::from([root.1.map_key])).await?.is_some() {
                    return Err(incomplete(root, error));
                }
                tracing::debug!("{} moved on while it was repacked: {error:?}", root.0);
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    async fn copy_chunks(&mut self, saved: &Arc<Saved>) -> Result<()> {
        let is_missing = |chunk: &u32| saved.locate(*chunk).is_ok_and(|located| self.live.is_missing(&located.place));
        let missing = (0..saved.located_chunks()).filter(is_missing);
        let budget = self.repository.budget();
        let reads = plan(|chunk| saved.locate(chunk), missing, longest_read(self.repository, budget), Gaps::Wide)?;
        let repositories = [self.repository];
        let frames = reads.into_iter().map(|read| {
            let saved = Arc::clone(saved);
            let take = move |read: &PackRead, buffer| Stored::take(|chunk| saved.locate(chunk), read, buffer);
            read_pack(&repositories, budget, read, take)
        });
        // Collected first: a stream over a closure's futures would not be known to be `Send`.
        let mut frames = stream::iter(frames.collect::<Vec<_>>()).buffered(self.repository.parallelism());
        while let Some(stored) = frames.try_next().await? {
            let share = stored.is_mostly_used();
            for (id, place, frame) in stored.frames() {
                // Two chunks of a tree may share a frame.
                if self.live.is_missing(&place) {
                    self.progress.advance(u64::from(place.stored_len));
                    let new = self.writer.push(id, frame, place.plain_len, share).await?;
                    self.live.copied(&place, new);
                }
            }
        }
        Ok(())
    }

    /// The first of `maps` that a name still needs: what is missing of its tree is damage.
    async fn still_needed(&self, maps: &BTreeSet<MapKey>) -> Result<Option<MapKey>> {
        let state = self.repository.state().await?;
        Ok(state.roots().map(|(_, value)| value.map_key).find(|map| maps.contains(map)))
    }

    /// Writes the new maps of the `copied` trees and commits the swap.
    async fn publish(&mut self, copied: &[Root<'_>]) -> Result<Repacked> {
        self.writer.settle().await?;
        let mut swaps = Vec::new();
        for root in copied {
            swaps.extend(self.put_new_map(*root).await?);
        }
        let Self { writer, old, left, .. } = self;
        let condemned = Arc::new(Mutex::new(0));
        let freed = Arc::clone(&condemned);
        let close = writer.close(|state| {
            let mut all = swaps.clone();
            let mut bytes = 0;
            for pack in old.values().filter(|pack| !left.contains_key(&pack.id) && state.is_target(&pack.id)) {
                all.push(Action::Condemn { pack: pack.id, len: pack.len, damaged: false });
                bytes += pack.len;
            }
            *freed.lock().unwrap_or_else(PoisonError::into_inner) = bytes;
            Ok(all)
        });
        close.await?;
        let freed = *condemned.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Repacked { freed, left: std::mem::take(left) })
    }

    /// Writes a map with the new places of a tree's chunks; returns the swap of its old one.
    async fn put_new_map(&mut self, root: Root<'_>) -> Result<Option<Action>> {
        let Some(saved) = self.open(root).await? else { return Ok(None) };
        let chunks = 0..saved.located_chunks();
        let places = chunks.map(|chunk| Ok(self.live.place(saved.locate(chunk)?.place))).collect::<Result<Vec<_>>>()?;
        let kept = |id: PackId| saved.map.packs.iter().find(|pack| pack.id == id).copied();
        let map = moved(&saved.map, &places, |id| self.writer.pack(id).or_else(|| kept(id)))?;
        let (old, new) = (root.1.map_key, Owned::fresh(self.writer.session().await?));
        put_map(self.repository, new, &map).await?;
        Ok(Some(Action::SwapMap { old, new }))
    }
}

/// Error of a tree that needs what does not exist.
fn incomplete((name, _): Root<'_>, error: Error) -> Error {
    Error::damaged("a saved tree cannot be repacked: part of it is missing").at(name).source(error)
}
