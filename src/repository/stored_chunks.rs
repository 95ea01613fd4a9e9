//! Deduplication: whether a chunk is stored already, and where.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
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

/// Place of a stored chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkPlace {
    /// In which pack.
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
    /// The chunk that it cannot be decoded without, if its codec needs one.
    pub base: Option<ChunkId>,
}

impl ChunkPlace {
    /// As a pack's footer tells it.
    #[must_use]
    pub fn of(pack: PackId, ordinal: u32, entry: &FooterEntry) -> Self {
        let FooterEntry { offset, stored_len, plain_len, codec, base, .. } = *entry;
        Self { pack, ordinal, offset, stored_len, plain_len, codec, base }
    }
}

/// The chunks that a state's live packs hold: first those of trees known in full, then those of the index.
#[derive(Debug)]
pub struct StoredChunks {
    repository: Repository,
    state: Arc<State>,
    index: Index,
    near: HashMap<ChunkId, ChunkPlace>,
    packs: HashMap<PackId, PackRef>,
}

impl StoredChunks {
    /// Knowledge as of now.
    ///
    /// # Errors
    /// As [`Repository::indexed_state`].
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn load(repository: &Repository) -> Result<Self> {
        let (state, index) = repository.indexed_state().await?;
        let (near, packs) = Default::default();
        Ok(Self { repository: repository.clone(), state, index, near, packs })
    }

    /// The state it was read from: what a commit that relies on it has to vouch with.
    #[must_use]
    pub fn state(&self) -> &Arc<State> {
        &self.state
    }

    /// Takes in all chunks of a tree, so that finding them needs no footers.
    pub fn add(&mut self, saved: &Saved) {
        let live = saved.map.packs.iter().filter(|pack| self.state.is_target(&pack.id));
        self.packs.extend(live.map(|pack| (pack.id, *pack)));
        for chunk in 0..saved.located_chunks() {
            if let Ok(located) = saved.locate(chunk)
                && self.state.is_target(&located.place.pack)
            {
                self.insert(located.id, located.place);
            }
        }
    }

    /// Chunks known near at hand: what the memory it takes grows with.
    #[must_use]
    pub fn near(&self) -> usize {
        self.near.len()
    }

    /// Takes in where a chunk was just stored, because it was not here as a whole: what else is known of it does not count.
    pub fn stored(&mut self, id: ChunkId, place: ChunkPlace) {
        self.near.insert(id, place);
    }

    /// Takes in where a chunk is. Of several places it remembers the one from which it is read with the fewest hops.
    fn insert(&mut self, id: ChunkId, place: ChunkPlace) {
        match self.near.entry(id) {
            Entry::Vacant(entry) => drop(entry.insert(place)),
            Entry::Occupied(mut entry) if place.codec.hops() < entry.get().codec.hops() => drop(entry.insert(place)),
            Entry::Occupied(_) => {}
        }
    }

    /// The base of a chunk at `place` and its place, if it needs one: stored with fewer hops than the chunk.
    #[must_use]
    pub fn base(&self, place: &ChunkPlace) -> Option<(ChunkId, ChunkPlace)> {
        let base = place.base?;
        let found = self.near.get(&base).filter(|found| found.codec.hops() < place.codec.hops())?;
        Some((base, *found))
    }

    /// True if `id` is known as a stand-alone chunk, which can be a base of any other.
    #[must_use]
    pub fn is_plain(&self, id: &ChunkId) -> bool {
        self.near.get(id).is_some_and(|place| place.codec.hops() == 0)
    }

    /// True if all bases of the chunk at `place` are stored.
    fn is_whole(&self, place: &ChunkPlace) -> bool {
        place.base.is_none() || self.base(place).is_some_and(|(_, base)| self.is_whole(&base))
    }

    /// The pack called `id`, if a place in it was handed out.
    #[must_use]
    pub fn pack(&self, id: PackId) -> Option<PackRef> {
        self.packs.get(&id).copied()
    }

    /// Place of each of `ids` that is known, with all that it is decoded from. A pack whose footer cannot be read holds nothing:
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

    /// Takes in where the bases of `needing` are, and their bases.
    async fn search_bases(&mut self, mut needing: Vec<ChunkPlace>) -> Result<()> {
        while !needing.is_empty() {
            needing.retain(|place| place.base.is_some());
            let unknown = needing.iter().filter(|place| self.base(place).is_none());
            let unknown: BTreeSet<ChunkId> = unknown.filter_map(|place| place.base).collect();
            for (id, place) in self.search(&unknown.into_iter().collect::<Vec<_>>()).await? {
                self.insert(id, place);
            }
            needing = needing.iter().filter_map(|place| Some(self.base(place)?.1)).collect();
        }
        Ok(())
    }

    /// A chunk whose base is gone may be here once more, with a base that is not: such a place is taken instead.
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
        // Bases before what needs them.
        copies.sort_by_key(|(_, place)| place.codec.hops());
        for (id, place) in copies {
            if self.is_whole(&place) && !self.near.get(&id).is_some_and(|place| self.is_whole(place)) {
                self.near.insert(id, place);
            }
        }
        Ok(())
    }

    /// Every place of `ids` that the index and the footers that it names tell.
    async fn search(&mut self, ids: &[ChunkId]) -> Result<Vec<(ChunkId, ChunkPlace)>> {
        let mut candidates: Vec<(ChunkId, PackRef, u32)> = Vec::new();
        for &id in ids {
            let hits = self.index.candidates(id).filter(|(pack, _)| self.state.is_target(&pack.id));
            candidates.extend(hits.map(|(pack, ordinal)| (id, pack, ordinal)));
        }
        let packs: BTreeSet<PackRef> = candidates.iter().map(|(_, pack, _)| *pack).collect();
        let repository = self.repository.clone();
        let footers: HashMap<PackId, _> = stream::iter(packs)
            .map(|pack| {
                let repository = repository.clone();
                async move { (pack.id, repository.footer(&pack).await) }
            })
            .buffer_unordered(FOOTERS)
            .collect()
            .await;
        let mut places = Vec::with_capacity(candidates.len());
        for (id, pack, ordinal) in candidates {
            match footers.get(&pack.id) {
                Some(Ok(footer)) => {
                    if let Some(entry) = footer.entries.get(ordinal as usize).filter(|entry| entry.id == id) {
                        places.push((id, ChunkPlace::of(pack.id, ordinal, entry)));
                        self.packs.insert(pack.id, pack);
                    }
                }
                Some(Err(error)) => tracing::warn!("pack {} is passed over: {error:?}", pack.id),
                None => {}
            }
        }
        Ok(places)
    }
}
