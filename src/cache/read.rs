//! Reading frames.

use bytes::Bytes;

use super::allocator::{UNIT, UNIT_LEN};
use super::extent;
use super::frame::Frame;
use super::queue::{BaseKey, Resident};
use super::{Cache, count};
use crate::blocks::Block;
use crate::chunk::Chunk;
use crate::id::ChunkId;

/// Maximum reads of a chunk that is moved meanwhile.
const READS: usize = 4;

/// Content of a place.
pub(super) enum SlotContent {
    /// The frame of a chunk with the wanted key.
    Frame(Frame),
    /// Other content, in the place of this chunk.
    Wrong(Resident),
    /// A read error in the place of this chunk.
    Unreadable(Resident),
}

impl Cache {
    /// Reads and verifies the frame of a chunk; none if it is missing. A damaged or unreadable one is dropped, counted, and also
    /// none: callers could not react in any other way. Blocks on the disk.
    #[must_use]
    pub fn get(&self, id: &ChunkId) -> Option<Frame> {
        let found = self.try_get(id);
        count(if found.is_some() { &self.counters.hits } else { &self.counters.misses });
        found
    }

    /// Reads a chunk that is stored raw to `out`, and verifies it there; none, with arbitrary bytes in `out`, if it is missing, encoded,
    /// damaged, or has another length: [`Cache::get`] then does what is due. Blocks on the disk.
    #[must_use]
    pub fn read_raw<'a>(&self, id: &ChunkId, out: &'a mut [u8]) -> Option<Chunk<'a>> {
        let chunk = self.state().queue.touch(id.prefix())?;
        let mut header = [0; extent::HEADER_LEN];
        self.slabs.read(chunk.place, &mut header).ok()?;
        if !extent::is_raw(&self.identity.secret, &header, id, out.len()) {
            return None;
        }
        self.slabs.read_within(chunk.place, header.len(), out).ok()?;
        // The place may have got another chunk meanwhile.
        let chunk = Chunk::verify(*id, out).ok()?;
        count(&self.counters.hits);
        Some(chunk)
    }

    /// True if a chunk is in the index; [`Cache::get`] may still find it damaged. Only eight bytes of the id are compared: of two
    /// ids that are equal in these, the cache keeps only one.
    #[must_use]
    pub fn contains(&self, id: &ChunkId) -> bool {
        self.state().queue.peek(id.prefix()).is_some()
    }

    /// Base that a chunk is encoded with; none if the chunk is missing. Blocks on the disk, to read the header of a chunk that was in the
    /// cache when it was opened, once.
    #[must_use]
    pub fn base(&self, id: &ChunkId) -> Option<BaseKey> {
        let key = id.prefix();
        let (chunk, known) = {
            let state = self.state();
            (state.queue.peek(key)?, state.queue.base(key)?)
        };
        if known != BaseKey::UNKNOWN {
            return Some(known);
        }
        let mut header = [0; extent::HEADER_LEN];
        self.slabs.read(chunk.place, &mut header).ok()?;
        let base = extent::base(&header, id)?;
        let mut state = self.state();
        if state.queue.peek(key).is_some_and(|found| found.place == chunk.place) {
            state.queue.set_base(key, base);
        }
        Some(base)
    }

    /// Bytes that [`Cache::get`] needs for a chunk, for a memory budget; none if it is missing.
    #[must_use]
    pub fn footprint(&self, id: &ChunkId) -> Option<u64> {
        self.state().queue.peek(id.prefix()).map(|chunk| u64::from(chunk.weight) * UNIT)
    }

    fn try_get(&self, id: &ChunkId) -> Option<Frame> {
        let chunk = self.state().queue.touch(id.prefix())?;
        match self.settled(chunk)? {
            // Another chunk with the same eight bytes is not damaged.
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

    /// Reads a chunk until the index is unchanged after the read; none if the chunk was removed meanwhile.
    pub(super) fn settled(&self, chunk: Resident) -> Option<SlotContent> {
        let (mut chunk, mut suspect) = (chunk, None);
        for _ in 0..READS {
            let found = self.read_extent(chunk);
            if matches!(found, SlotContent::Frame(_)) || suspect == Some(chunk.place) {
                return Some(found);
            }
            // The chunk may have been evicted or moved, and its units reused or freed, since the lookup.
            suspect = Some(chunk.place);
            chunk = self.state().queue.peek(chunk.key)?;
        }
        None
    }

    /// Reads the place of a chunk by the index.
    fn read_extent(&self, chunk: Resident) -> SlotContent {
        match self.read_bytes(chunk).map(|bytes| extent::open(&self.identity.secret, &bytes)) {
            Some(Some(frame)) if frame.id().prefix() == chunk.key => SlotContent::Frame(frame),
            Some(_) => SlotContent::Wrong(chunk),
            None => SlotContent::Unreadable(chunk),
        }
    }

    /// Raw bytes of a chunk's units.
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

    /// Drops a damaged chunk if it is still in the same place. Unreadable units are not reused before a restart.
    pub(super) fn drop_damaged(&self, chunk: Resident, readable: bool) -> bool {
        let dropped = self.state().remove(chunk.key, chunk.place, readable);
        if dropped {
            count(&self.counters.damaged);
            self.flush();
        }
        dropped
    }
}
