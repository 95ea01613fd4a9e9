//! Repair: rebuilds index segments from pack footers, and replaces maps by ones that use only intact packs.

use std::collections::{BTreeSet, HashMap};

use super::layout::{self, Family};
use super::log::{Action, State};
use super::mapping::{PlacedTree, map_of};
use super::writer::put_segment;
use super::{ChunkPlace, Repository, StoredChunks, Writer, objects};
use crate::error::{Error, ErrorKind, Result};
use crate::format::{Map, PackRef, Row};
use crate::id::{ChunkId, ManifestId, MapKey, Owned, PackId, SegmentId, SessionId};

/// Approximate number of chunks in a rebuilt segment: 64 MiB of entries in memory.
const SEGMENT_CHUNKS: usize = 4 << 20;

/// A tree whose chunks were found in intact packs.
#[derive(Clone, Copy, Debug)]
pub struct RepairedTree<'a> {
    /// Manifest.
    pub manifest: ManifestId,
    /// The manifest's chunks.
    pub chunks: &'a [ChunkId],
    /// Current place of each of them.
    pub places: &'a [ChunkPlace],
    /// Unchanged places of their bases.
    pub bases: &'a HashMap<ChunkId, ChunkPlace>,
    /// Unchanged packs.
    pub packs: &'a [PackRef],
}

impl RepairedTree<'_> {
    fn pack(&self, id: PackId) -> Option<PackRef> {
        self.packs.iter().find(|pack| pack.id == id).copied()
    }

    fn base(&self, place: &ChunkPlace) -> Option<(ChunkId, ChunkPlace)> {
        let base = place.base?;
        self.bases.get(&base).filter(|found| place.codec.may_have_base(found.codec)).map(|found| (base, *found))
    }
}

impl Repository {
    /// Length of a pack in the store; none if it does not exist, or the store refuses it.
    ///
    /// # Errors
    /// Unreachable, if the store is.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn stored_len(&self, pack: PackId) -> Result<Option<u64>> {
        match objects::len(&**self.store().objects(), &layout::owned(Family::Pack, pack)).await {
            Ok(len) => Ok(Some(len)),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Damaged) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Replaces the segments `old` by new ones over all `packs` with a readable footer, except packs that are purged in `state`;
    /// returns the number of these packs.
    ///
    /// # Errors
    /// Conflict, if another process replaced one of `old` meanwhile.
    ///
    /// # Cancel safety
    /// Safe: one commit decides; a collect ends the session that was opened for it.
    pub async fn reindex(&self, state: &State, old: &[SegmentId], packs: &BTreeSet<PackRef>) -> Result<usize> {
        let session = SessionId::random();
        self.log().commit(Some(session), |_| Ok(vec![Action::Open(session)])).await?;
        let (mut new, mut listed, mut rows, mut sound) = (Vec::new(), Vec::new(), Vec::new(), 0);
        for pack in packs.iter().filter(|pack| !state.purged.contains_key(&pack.id)) {
            let footer = match self.footer_uncached(pack).await {
                Ok(footer) => footer,
                Err(error) => {
                    tracing::warn!("pack {} is left out of the index: {error:?}", pack.id);
                    continue;
                }
            };
            let number = u32::try_from(listed.len()).map_err(|_| Error::exhausted("too many packs in one segment"))?;
            let ids = (0u32..).zip(&footer.entries);
            rows.extend(ids.map(|(ordinal, entry)| Row { prefix: entry.id.prefix(), pack: number, ordinal }));
            listed.push(*pack);
            sound += 1;
            if rows.len() >= SEGMENT_CHUNKS {
                new.push(put_segment(self, session, &listed, std::mem::take(&mut rows)).await?);
                listed.clear();
            }
        }
        if !listed.is_empty() {
            new.push(put_segment(self, session, &listed, rows).await?);
        }
        let (old, built) = (old.to_vec(), state.seq);
        let commit = self.log().commit(Some(session), |_| {
            let replace = Action::ReplaceSegments { old: old.clone(), new: new.clone(), built };
            Ok(vec![replace, Action::Close(session)])
        });
        commit.await?;
        Ok(sound)
    }

    /// Replaces the map `old` in all names by a new one with the places in `tree`, and ends the writer's session.
    ///
    /// # Errors
    /// Conflict, if one of the packs was purged meanwhile.
    ///
    /// # Cancel safety
    /// Not safe: the swap may have happened; read the names to find out.
    pub async fn remap(
        &self,
        writer: &mut Writer,
        known: &StoredChunks,
        old: MapKey,
        tree: &RepairedTree<'_>,
    ) -> Result<()> {
        writer.settle().await?;
        let session = writer.session().await?;
        let pack = |id| writer.pack(id).or_else(|| known.pack(id)).or_else(|| tree.pack(id));
        let base = |place: &ChunkPlace| known.base(place).or_else(|| tree.base(place));
        let map = map_of(PlacedTree { manifest: tree.manifest, chunks: tree.chunks, places: tree.places }, pack, base)?;
        let new = Owned::fresh(session);
        put_map(self, new, &map).await?;
        let foreign: BTreeSet<PackId> =
            map.packs.iter().map(|pack| pack.id).filter(|id| id.session != session).collect();
        let seq = known.state().seq;
        let swap = writer.close(|state| match state.check_packs(&foreign, seq) {
            Ok(mut actions) => {
                actions.push(Action::SwapMap { old, new });
                Ok(actions)
            }
            Err(lost) => Err(Error::conflict("packs were purged while a map was repaired")
                .got(format!("{} packs", lost.len()))
                .help("run the command again")),
        });
        swap.await
    }
}

/// Writes a map under a new key.
pub(super) async fn put_map(repository: &Repository, key: MapKey, map: &Map) -> Result<()> {
    objects::put(&**repository.store().objects(), &layout::owned(Family::Map, key), map.seal().into()).await
}
