//! Live chunks of the packs to rewrite, as the footers of these packs have them. Whoever may put objects can write a map: what it
//! says of a pack counts only where the footer says the same.

use std::collections::HashMap;

use crate::budget::{Budget, GrowingMemory};
use crate::format::FooterEntry;
use crate::id::PackId;
use crate::repository::{ChunkPlace, Located};

/// Maximum memory of a chunk: its entry in a table that may be half empty, and in the smaller one that it grew from.
const CHUNK_SHARE: u64 = 3 * size_of::<((PackId, u32), LiveChunk)>() as u64;

/// Live chunks by pack and ordinal.
#[derive(Debug)]
pub(super) struct LiveChunks {
    chunks: HashMap<(PackId, u32), LiveChunk>,
    memory: GrowingMemory,
    /// Bytes of `memory` that are taken.
    taken: u64,
}

#[derive(Debug)]
struct LiveChunk {
    entry: FooterEntry,
    /// Place that it was copied to.
    new: Option<ChunkPlace>,
}

impl LiveChunks {
    /// None yet, counted in `budget`.
    pub(super) fn new(budget: &Budget) -> Self {
        Self { chunks: HashMap::new(), memory: budget.keep_growing(), taken: 0 }
    }

    /// Takes memory for `count` more chunks; false, with nothing taken, if all would take more than half of what plans and marks
    /// may.
    pub(super) fn reserve(&mut self, count: u64) -> bool {
        let more = count.saturating_mul(CHUNK_SHARE);
        let fits = self.taken.saturating_add(more) <= self.memory.max() / 2 && self.memory.try_add(more);
        self.taken += if fits { more } else { 0 };
        fits
    }

    /// Gives the memory of `count` chunks back that were not added.
    pub(super) fn release(&mut self, count: u64) {
        let less = count.saturating_mul(CHUNK_SHARE);
        self.memory.subtract(less);
        self.taken = self.taken.saturating_sub(less);
    }

    /// Adds a chunk, whose memory is reserved.
    pub(super) fn add(&mut self, pack: PackId, ordinal: u32, entry: FooterEntry) {
        self.chunks.insert((pack, ordinal), LiveChunk { entry, new: None });
    }

    /// True if the footer of its pack has this very chunk at this very place.
    pub(super) fn has(&self, located: &Located) -> bool {
        let Located { id, place, .. } = located;
        self.chunks.get(&(place.pack, place.ordinal)).is_some_and(|LiveChunk { entry, .. }| {
            let there = ChunkPlace { alone_len: place.alone_len, ..ChunkPlace::of(place.pack, place.ordinal, entry) };
            entry.id == *id && there == *place
        })
    }

    /// True if the chunk is live and was not copied yet.
    pub(super) fn is_missing(&self, place: &ChunkPlace) -> bool {
        self.chunks.get(&(place.pack, place.ordinal)).is_some_and(|chunk| chunk.new.is_none())
    }

    /// Records where the chunk at `old` was copied to.
    pub(super) fn copied(&mut self, old: &ChunkPlace, new: ChunkPlace) {
        if let Some(chunk) = self.chunks.get_mut(&(old.pack, old.ordinal)) {
            chunk.new = Some(new);
        }
    }

    /// Place of the chunk that was at `old`.
    pub(super) fn place(&self, old: ChunkPlace) -> ChunkPlace {
        let new = self.chunks.get(&(old.pack, old.ordinal)).and_then(|chunk| chunk.new);
        new.map_or(old, |new| ChunkPlace { alone_len: old.alone_len, ..new })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Codec;
    use crate::id::{ChunkId, Owned, SessionId};
    use crate::limits::MEMORY_MIN;

    #[test]
    fn a_chunk_counts_only_as_the_footer_has_it() {
        let pack = Owned::fresh(SessionId::random());
        let mut live = LiveChunks::new(&Budget::new(MEMORY_MIN).unwrap());
        let (id, base) = (ChunkId::of(b"a"), Some(ChunkId::of(b"b")));
        let entry = FooterEntry { id, offset: 16, stored_len: 5, plain_len: 9, codec: Codec::Difference, base };
        assert!(live.reserve(1));
        live.add(pack, 3, entry);
        let place = ChunkPlace { alone_len: 7, ..ChunkPlace::of(pack, 3, &entry) };
        let right = Located { id, place, base: Some(0), repository: 0 };
        assert!(live.has(&right));
        let wrong = |change: fn(&mut Located)| {
            let mut located = right;
            change(&mut located);
            !live.has(&located)
        };
        assert!(wrong(|it| it.id = ChunkId::of(b"c")));
        assert!(wrong(|it| it.place.ordinal = 2));
        assert!(wrong(|it| it.place.offset = 8));
        assert!(wrong(|it| it.place.stored_len = 4));
        assert!(wrong(|it| it.place.plain_len = 8));
        assert!(wrong(|it| it.place.codec = Codec::Derived));
        assert!(wrong(|it| it.place.base = Some(it.id)));

        let new = ChunkPlace { offset: 800, ordinal: 0, alone_len: 0, ..place };
        assert!(live.is_missing(&place));
        live.copied(&place, new);
        assert!(!live.is_missing(&place));
        assert_eq!(live.place(place), ChunkPlace { alone_len: 7, ..new });
    }

    #[test]
    fn no_more_chunks_are_taken_than_there_is_memory_for() {
        let mut live = LiveChunks::new(&Budget::new(MEMORY_MIN).unwrap());
        let most = MEMORY_MIN / 4 / CHUNK_SHARE;
        assert!(live.reserve(most) && !live.reserve(1));
        live.release(1);
        assert!(live.reserve(1) && !live.reserve(u64::MAX));
    }
}
