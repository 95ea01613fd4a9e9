//! What is here already: the one answer to "must this chunk be stored, or where is it".

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use futures::{StreamExt as _, stream};

use super::log::State;
use super::{Index, Repository, Saved};
use crate::codec::Codec;
use crate::error::Result;
use crate::format::PackRef;
use crate::id::{ChunkId, PackId};

/// Footers read at once.
const FOOTERS: usize = 16;

/// Where a stored chunk lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// In which pack.
    pub pack: PackId,
    /// Which of its chunks.
    pub ordinal: u32,
    /// Where its frame starts.
    pub offset: u64,
    /// Bytes of the frame.
    pub stored_len: u32,
    /// Bytes of the chunk.
    pub plain_len: u32,
    /// How it is stored.
    pub codec: Codec,
}

/// The chunks that a state's live packs hold: first those of trees known in full, then those of the index.
#[derive(Debug)]
pub struct Known {
    repository: Repository,
    state: Arc<State>,
    index: Index,
    near: HashMap<ChunkId, Place>,
    packs: HashMap<PackId, PackRef>,
}

impl Known {
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
        let lens = &saved.manifest.chunks.lens;
        for ((id, pack, frame), &plain_len) in saved.map.locate(&saved.manifest.chunks.ids).zip(lens) {
            if self.state.is_target(&pack.id) {
                let (ordinal, offset, stored_len) = (frame.ordinal, frame.offset, frame.stored_len);
                let place = Place { pack: pack.id, ordinal, offset, stored_len, plain_len, codec: frame.codec };
                self.near.insert(id, place);
                self.packs.insert(pack.id, *pack);
            }
        }
    }

    /// Chunks known near at hand: what the memory it takes grows with.
    #[must_use]
    pub fn near(&self) -> usize {
        self.near.len()
    }

    /// Takes in a chunk that was just stored.
    pub fn insert(&mut self, id: ChunkId, place: Place) {
        self.near.insert(id, place);
    }

    /// The pack called `id`, if a place in it was handed out.
    #[must_use]
    pub fn pack(&self, id: PackId) -> Option<PackRef> {
        self.packs.get(&id).copied()
    }

    /// Where each of `ids` is, if it is. A pack whose footer cannot be read holds nothing: its chunks are stored again.
    ///
    /// # Errors
    /// Unreachable, if the store is.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn locate(&mut self, ids: &[ChunkId]) -> Result<Vec<Option<Place>>> {
        let far = ids.iter().filter(|id| !self.near.contains_key(id));
        let mut candidates: Vec<(ChunkId, PackRef, u32)> = Vec::new();
        for &id in far {
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
        for (id, pack, ordinal) in candidates {
            match footers.get(&pack.id) {
                Some(Ok(footer)) => {
                    let entry = footer.entries.get(ordinal as usize).filter(|entry| entry.id == id);
                    if let Some(e) = entry {
                        let (offset, stored_len, plain_len) = (e.offset, e.stored_len, e.plain_len);
                        let place = Place { pack: pack.id, ordinal, offset, stored_len, plain_len, codec: e.codec };
                        self.near.entry(id).or_insert(place);
                        self.packs.insert(pack.id, pack);
                    }
                }
                Some(Err(error)) => tracing::warn!("pack {} is passed over: {error:?}", pack.id),
                None => {}
            }
        }
        Ok(ids.iter().map(|id| self.near.get(id).copied()).collect())
    }
}
