//! Reading frames.

use bytes::Bytes;

use super::allocator::{UNIT, UNIT_LEN};
use super::extent;
use super::frame::Frame;
use super::queue::Resident;
use super::{Cache, count};
use crate::blocks::Block;
use crate::id::ChunkId;

/// Reads of a chunk, at most, while it is moved.
const READS: usize = 4;

/// Content of a place.
pub(super) enum SlotContent {
    /// The frame of a chunk with the wanted key.
    Frame(Frame),
    /// Something else, where this chunk should be.
    Wrong(Resident),
    /// The disk does not give what this chunk should be.
    Unreadable(Resident),
}

impl Cache {
    /// The frame of a chunk, checked; none if it is not there. One that turns out to be damaged, or cannot be read, is dropped and
    /// counted, and is a miss: there is nothing else that a caller could do about it. Blocks on the disk.
    #[must_use]
    pub fn get(&self, id: &ChunkId) -> Option<Frame> {
        let found = self.try_get(id);
        count(if found.is_some() { &self.counters.hits } else { &self.counters.misses });
        found
    }

    /// Is a chunk there? Without looking at its bytes: [`Cache::get`] may still find that they are damaged. Eight bytes of the id are
    /// compared; so of two ids that agree in these, the cache keeps only one.
    #[must_use]
    pub fn contains(&self, id: &ChunkId) -> bool {
        self.state().queue.peek(id.prefix()).is_some()
    }

    /// Bytes that [`Cache::get`] would take for a chunk, for whoever has a budget; none if it is not there.
    #[must_use]
    pub fn footprint(&self, id: &ChunkId) -> Option<u64> {
        self.state().queue.peek(id.prefix()).map(|chunk| u64::from(chunk.weight) * UNIT)
    }

    fn try_get(&self, id: &ChunkId) -> Option<Frame> {
        let chunk = self.state().queue.touch(id.prefix())?;
        match self.settled(chunk)? {
            // Another chunk with the same eight bytes is a sound one.
            SlotContent::Frame(frame) => Some(frame).filter(|frame| frame.id() == *id),
            SlotContent::Wrong(chunk) => {
                self.drop_damaged(chunk, true);
                None
            }
            SlotContent::Unreadable(chunk) => {
                self.drop_damaged(chunk, false);
                None
            }
        }
    }

    /// Reads a chunk until what was read is what the index said both before and after; none if it went away meanwhile.
    pub(super) fn settled(&self, chunk: Resident) -> Option<SlotContent> {
        let (mut chunk, mut suspect) = (chunk, None);
        for _ in 0..READS {
            let found = self.read_extent(chunk);
            if matches!(found, SlotContent::Frame(_)) || suspect == Some(chunk.place) {
                return Some(found);
            }
            // It may have been evicted or moved, and its units used again or given back, since the index was asked.
            suspect = Some(chunk.place);
            chunk = self.state().queue.peek(chunk.key)?;
        }
        None
    }

    /// Reads what lies where the index says that a chunk does.
    fn read_extent(&self, chunk: Resident) -> SlotContent {
        match self.read_bytes(chunk).map(|bytes| extent::open(&self.identity.secret, &bytes)) {
            Some(Some(frame)) if frame.id().prefix() == chunk.key => SlotContent::Frame(frame),
            Some(_) => SlotContent::Wrong(chunk),
            None => SlotContent::Unreadable(chunk),
        }
    }

    /// The units of a chunk, as they are.
    fn read_bytes(&self, chunk: Resident) -> Option<Bytes> {
        let mut block = Block::new(usize::from(chunk.weight) * UNIT_LEN);
        match self.slabs.read(chunk.place, &mut block) {
            Ok(()) => Some(block.freeze()),
            Err(error) => {
                tracing::warn!("an extent of the cache {} cannot be read: {error}", self.dir.display());
                None
            }
        }
    }

    /// Forgets a chunk if it still lies where it was found damaged. Units that the disk does not give are not used again before
    /// a restart.
    pub(super) fn drop_damaged(&self, chunk: Resident, readable: bool) -> bool {
        let dropped = self.state().remove(chunk.key, chunk.place, readable);
        if dropped {
            count(&self.counters.damaged);
            self.flush();
        }
        dropped
    }
}
