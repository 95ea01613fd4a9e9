//! Deduplication: finds chunks that are stored already.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use futures::{StreamExt as _, stream};

use super::log::State;
use super::{Index, Repository, Saved};
use crate::codec::Codec;
use crate::error::Result;
use crate::format::{FooterEntry, PackRef};
use crate::id::{ChunkId, PackId};

/// Footers read at once.
const FOOTERS: usize = 16;
/// Maximum number of places of one chunk that are looked up.
const CANDIDATES_MAX: usize = 64;

/// Place of a stored chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkPlace {
    /// The pack.
    pub pack: PackId,
    /// Number of the chunk in the pack.
    pub ordinal: u32,
    /// Start of its frame.
    pub offset: u64,
    /// Bytes of the frame.
    pub stored_len: u32,
    /// Bytes of the chunk.
    pub plain_len: u32,
    /// Codec.
    pub codec: Codec,
    /// Base, if its codec needs one.
    pub base: Option<ChunkId>,
    /// Bytes of the chunk if it were stored without its base, up to some; 0, if it has none, or that is unknown.
    pub alone_len: u32,
}

impl ChunkPlace {
    /// From the entry in a pack's footer.
    #[must_use]
    pub fn of(pack: PackId, ordinal: u32, entry: &FooterEntry) -> Self {
        let FooterEntry { offset, stored_len, plain_len, codec, base, .. } = *entry;
        Self { pack, ordinal, offset, stored_len, plain_len, codec, base, alone_len: 0 }
    }
}

/// Chunks in the live packs of a state: first those of trees that were added, then those of the index.
#[derive(Debug)]
pub struct StoredChunks {
    repository: Repository,
    state: Arc<State>,
    index: Index,
    near: HashMap<ChunkId, ChunkPlace>,
    packs: HashMap<PackId, PackRef>,
    /// Chunks with a base are not taken from the index.
    plain_only: bool,
    /// Chunks with a base that were added meanwhile.
    with_base: Vec<ChunkId>,
}

impl StoredChunks {
    /// Loads the current state and index.
    ///
    /// # Errors
    /// As [`Repository::indexed_state`].
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn load(repository: &Repository) -> Result<Self> {
        let (state, index) = repository.indexed_state().await?;
        let (near, packs, with_base) = Default::default();
        Ok(Self { repository: repository.clone(), state, index, near, packs, plain_only: false, with_base })
    }

    /// The same without chunks that are found in the index and stored with a base.
    #[must_use]
    pub fn without_differences(mut self) -> Self {
        self.forget_differences();
        self
    }

    /// Forgets the chunks that are stored with a base, and takes none from the index any more.
    pub fn forget_differences(&mut self) {
        if !std::mem::replace(&mut self.plain_only, true) {
            self.near.retain(|_, place| place.base.is_none());
        }
        for id in std::mem::take(&mut self.with_base) {
            if self.near.get(&id).is_some_and(|place| place.base.is_some()) {
                self.near.remove(&id);
            }
        }
    }

    /// True if it takes no chunks with a base from the index.
    #[must_use]
    pub fn takes_no_differences(&self) -> bool {
        self.plain_only
    }

    /// State that it was loaded from; a commit that relies on it must vouch for the packs with this state.
    #[must_use]
    pub fn state(&self) -> &Arc<State> {
        &self.state
    }

    /// Adds all chunks of a tree, so that finding them needs no footers.
    pub fn add(&mut self, saved: &Saved) {
        let live = saved.map.packs.iter().filter(|pack| self.state.is_target(&pack.id));
        self.packs.extend(live.map(|pack| (pack.id, *pack)));
        let hops = |chunk: &u32| saved.map.frames.get(*chunk as usize).map_or(0, |frame| frame.codec.hops());
        let mut chunks: Vec<u32> = (0..saved.located_chunks()).collect();
        // Bases before their dependents.
        chunks.sort_by_key(hops);
        for chunk in chunks {
            if let Ok(located) = saved.locate(chunk)
                && self.state.is_target(&located.place.pack)
            {
                self.insert(located.id, located.place);
            }
        }
    }

    /// Number of chunks in memory, to which the memory use is proportional.
    #[must_use]
    pub fn near(&self) -> usize {
        self.near.len()
    }

    /// Adds a chunk that was just stored. Replaces another place, unless that has fewer hops and all of its bases: it may be the base of
    /// chunks that cannot have this one.
    pub fn stored(&mut self, id: ChunkId, place: ChunkPlace) {
        let is_better = |known: &ChunkPlace| known.codec.hops() < place.codec.hops() && self.is_whole(known);
        if !self.near.get(&id).is_some_and(is_better) {
            self.put(id, place);
        }
    }

    /// Adds the place of a chunk. Of several places the one with the fewest hops is kept, but none that lacks a base instead of one
    /// that has all: other chunks may rely on that.
    fn insert(&mut self, id: ChunkId, place: ChunkPlace) {
        let is_better = |known: &ChunkPlace| {
            place.codec.hops() < known.codec.hops() && (self.is_whole(&place) || !self.is_whole(known))
        };
        if self.near.get(&id).is_none_or(is_better) {
            self.put(id, place);
        }
    }

    /// Sets the place of a chunk.
    fn put(&mut self, id: ChunkId, place: ChunkPlace) {
        if self.plain_only && place.base.is_some() {
            self.with_base.push(id);
        }
        self.near.insert(id, place);
    }

    /// Base of a chunk at `place`, and the place of that, which has fewer hops than the chunk; none if it needs no base, or if that or
    /// one of its bases is not stored.
    #[must_use]
    pub fn base(&self, place: &ChunkPlace) -> Option<(ChunkId, ChunkPlace)> {
        self.known_base(place).filter(|(_, base)| self.is_whole(base))
    }

    /// As [`StoredChunks::base`], but that may lack a base itself.
    fn known_base(&self, place: &ChunkPlace) -> Option<(ChunkId, ChunkPlace)> {
        let base = place.base?;
        let found = self.near.get(&base).filter(|found| place.codec.may_have_base(found.codec))?;
        Some((base, *found))
    }

    /// True if `id` is stored without a base, so that it can be the base of any other chunk.
    #[must_use]
    pub fn is_plain(&self, id: &ChunkId) -> bool {
        self.near.get(id).is_some_and(|place| place.codec.hops() == 0)
    }

    /// Hops of the chunk `id`; None if it, or one of its bases, is not stored.
    #[must_use]
    pub fn hops(&self, id: &ChunkId) -> Option<u8> {
        self.near.get(id).filter(|place| self.is_whole(place)).map(|place| place.codec.hops())
    }

    /// True if all bases of the chunk at `place` are stored.
    fn is_whole(&self, place: &ChunkPlace) -> bool {
        place.base.is_none() || self.base(place).is_some()
    }

    /// The pack `id`, if a place in it was returned.
    #[must_use]
    pub fn pack(&self, id: PackId) -> Option<PackRef> {
        self.packs.get(&id).copied()
    }

    /// Finds the place of each of `ids` that is stored together with its bases. A pack with an unreadable footer counts as empty:
    /// its chunks are stored again.
    ///
    /// # Errors
    /// Unreachable, if the store is.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn locate(&mut self, ids: &[ChunkId]) -> Result<Vec<Option<ChunkPlace>>> {
        let far: Vec<ChunkId> = ids.iter().filter(|id| !self.near.contains_key(id)).copied().collect();
        for (id, place) in self.search(&far).await? {
            self.insert(id, place);
        }
        self.search_bases(ids.iter().filter_map(|id| self.near.get(id)).copied().collect()).await?;
        self.exchange(ids).await?;
        let whole = |id| self.near.get(id).copied().filter(|place| self.is_whole(place));
        Ok(ids.iter().map(whole).collect())
    }

    /// Finds and adds the bases of `needing`, and their bases.
    async fn search_bases(&mut self, mut needing: Vec<ChunkPlace>) -> Result<()> {
        while !needing.is_empty() {
            needing.retain(|place| place.base.is_some());
            let unknown = needing.iter().filter(|place| self.known_base(place).is_none());
            let unknown: BTreeSet<ChunkId> = unknown.filter_map(|place| place.base).collect();
            for (id, place) in self.search(&unknown.into_iter().collect::<Vec<_>>()).await? {
                self.insert(id, place);
            }
            needing = needing.iter().filter_map(|place| Some(self.known_base(place)?.1)).collect();
        }
        Ok(())
    }

    /// Replaces places whose base is missing by other places of the chunk whose base exists.
    async fn exchange(&mut self, ids: &[ChunkId]) -> Result<()> {
        let mut broken: BTreeSet<ChunkId> = BTreeSet::new();
        for &id in ids {
            let mut next = Some(id);
            while let Some((id, place)) = next.and_then(|id| Some((id, self.near.get(&id)?))) {
                if self.is_whole(place) || !broken.insert(id) {
                    break;
                }
                next = place.base;
            }
        }
        let mut copies = self.search(&broken.into_iter().collect::<Vec<_>>()).await?;
        self.search_bases(copies.iter().map(|(_, place)| *place).collect()).await?;
        // Bases before their dependents.
        copies.sort_by_key(|(_, place)| place.codec.hops());
        for (id, place) in copies {
            if self.is_whole(&place) && !self.near.get(&id).is_some_and(|place| self.is_whole(place)) {
                self.put(id, place);
            }
        }
        Ok(())
    }

    /// Places of `ids` in the index and the pack footers: a limited number of each, since whoever may save can list any number.
    async fn search(&mut self, ids: &[ChunkId]) -> Result<Vec<(ChunkId, ChunkPlace)>> {
        let mut by_pack: BTreeMap<PackRef, Vec<(ChunkId, u32)>> = BTreeMap::new();
        for &id in ids {
            for (pack, ordinal) in self.index.candidates(id).take(CANDIDATES_MAX) {
                if self.state.is_target(&pack.id) {
                    by_pack.entry(pack).or_default().push((id, ordinal));
                }
            }
        }
        let repository = self.repository.clone();
        let footers = stream::iter(by_pack).map(|(pack, listed)| {
            let repository = repository.clone();
            async move { (pack, listed, repository.footer(&pack).await) }
        });
        // In order, so that of equal places the same one is taken each time.
        let mut footers = std::pin::pin!(footers.buffered(FOOTERS));
        let mut places = Vec::new();
        while let Some((pack, listed, footer)) = footers.next().await {
            let footer = match footer {
                Ok(footer) => footer,
                Err(error) => {
                    tracing::warn!("pack {} is skipped: {error:?}", pack.id);
                    continue;
                }
            };
            for (id, ordinal) in listed {
                let entry = footer.entries.get(ordinal as usize).filter(|entry| entry.id == id);
                if let Some(entry) = entry.filter(|entry| !self.plain_only || entry.base.is_none()) {
                    places.push((id, ChunkPlace::of(pack.id, ordinal, entry)));
                    self.packs.insert(pack.id, pack);
                }
            }
        }
        Ok(places)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Owned, SessionId};
    use crate::repository::OpenOptions;
    use crate::storage::Store;

    fn place(codec: Codec, base: Option<&[u8]>) -> ChunkPlace {
        let pack = Owned::fresh(SessionId::random());
        let base = base.map(ChunkId::of);
        ChunkPlace { pack, ordinal: 0, offset: 16, stored_len: 8, plain_len: 8, codec, base, alone_len: 0 }
    }

    #[tokio::test]
    async fn a_place_that_has_its_bases_is_not_replaced_by_one_that_lacks_one() {
        let (repository, _) = Repository::create(Store::memory(), OpenOptions::default()).await.unwrap();
        let mut known = StoredChunks::load(&repository).await.unwrap();
        let id = ChunkId::of(b"a");
        known.insert(ChunkId::of(b"base"), place(Codec::Raw, None));
        known.insert(id, place(Codec::Bundle(3), Some(b"base")));
        known.insert(id, place(Codec::Difference, Some(b"gone")));
        assert_eq!(known.hops(&id), Some(3), "others rely on it");
        known.insert(id, place(Codec::Difference, Some(b"base")));
        assert_eq!(known.hops(&id), Some(1));
    }

    #[tokio::test]
    async fn differences_are_forgotten_each_time() {
        let (repository, _) = Repository::create(Store::memory(), OpenOptions::default()).await.unwrap();
        let mut known = StoredChunks::load(&repository).await.unwrap();
        known.stored(ChunkId::of(b"base"), place(Codec::Raw, None));
        for _ in 0..2 {
            known.stored(ChunkId::of(b"a"), place(Codec::Difference, Some(b"base")));
            assert_eq!(known.near(), 2);
            known.forget_differences();
            assert!(known.near() == 1 && known.is_plain(&ChunkId::of(b"base")));
        }
    }
}
