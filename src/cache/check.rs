//! Check of the cache: reads all chunks, to find damaged ones early.

use super::Cache;
use super::allocator::UNIT;
use super::queue::Resident;
use super::read::SlotContent;

/// Result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Chunks read.
    pub chunks: u64,
    /// Bytes on disk.
    pub bytes: u64,
    /// Chunks that were dropped.
    pub damaged: Vec<Damage>,
}

/// A damaged chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Damage {
    /// First eight bytes of its id, as in the index.
    pub prefix: u64,
    /// Slab of the chunk.
    pub slab: usize,
    /// Offset in the slab, in bytes.
    pub offset: u64,
}

impl Cache {
    /// Reads every chunk and drops damaged ones. Blocks until all are read; other threads can use the cache meanwhile.
    #[must_use]
    pub fn check(&self) -> Checked {
        let mut checked = Checked::default();
        let mut slab = 0;
        loop {
            let places = {
                let state = self.state();
                if slab == state.allocator.numbers() {
                    return checked;
                }
                state.allocator.places_of(slab)
            };
            for chunk in self.chunks_in(&places) {
                checked.chunks += 1;
                checked.bytes += u64::from(chunk.weight) * UNIT;
                let (chunk, readable) = match self.settled(chunk) {
                    Some(SlotContent::Frame(_)) | None => continue,
                    Some(SlotContent::Wrong(chunk)) => (chunk, true),
                    Some(SlotContent::Unreadable(chunk)) => (chunk, false),
                };
                // Not dropped if it was evicted meanwhile.
                if self.drop_damaged(chunk, readable) {
                    checked.damaged.push(self.damage(chunk));
                }
            }
            slab += 1;
        }
    }

    fn damage(&self, chunk: Resident) -> Damage {
        let (byte, slab_len) = (u64::from(chunk.place) * UNIT, self.identity.slab_len);
        let slab = usize::try_from(byte / slab_len).unwrap_or(usize::MAX);
        Damage { prefix: chunk.key, slab, offset: byte % slab_len }
    }
}
