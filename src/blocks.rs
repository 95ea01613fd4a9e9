//! Blocks of memory that are used again. What the system gives out fresh it clears and maps page by page, which takes about as long as
//! filling it from the page cache.

use std::collections::VecDeque;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use memmap2::MmapMut;

/// Larger ones are mapped by themselves, and gone when they are freed. glibc keeps freed blocks of up to 32 MiB, once it has seen
/// such a one (`M_MMAP_THRESHOLD`, mallopt(3)): an agent of 256 MiB with 64 readers (tests/it/agent/memory.rs) took 370
/// of anonymous memory at its peak, and takes 235 so.
const MAPPED_MIN: usize = 1 << 20;
/// Smaller ones are not worth keeping.
const SPARE_MIN: usize = 64 << 10;
/// Bytes of blocks that are kept while nobody uses them, at most: no budget counts them.
const SPARE_MAX: usize = 32 << 20;

/// Blocks that nobody uses, the one freed last at the end.
static SPARE: Mutex<FreeBlocks> = Mutex::new(FreeBlocks { blocks: VecDeque::new(), bytes: 0 });

struct FreeBlocks {
    blocks: VecDeque<Memory>,
    bytes: usize,
}

/// Some bytes, whose memory others had before and will have again.
#[derive(Default)]
pub(crate) struct Block {
    memory: Memory,
    len: usize,
}

impl Block {
    /// `len` bytes with arbitrary contents.
    pub(crate) fn new(len: usize) -> Self {
        let memory = if len < SPARE_MIN { None } else { take(len) };
        Self { memory: memory.unwrap_or_else(|| Memory::new(rounded(len))), len }
    }

    /// Shares the bytes; slices of them keep the whole block.
    pub(crate) fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

/// A spare block for `len` bytes, of which little is wasted.
fn take(len: usize) -> Option<Memory> {
    let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
    let at = spare.blocks.iter().rposition(|block| block.len() >= len && block.len() / 4 * 3 <= len)?;
    let found = spare.blocks.remove(at)?;
    spare.bytes -= found.len();
    Some(found)
}

/// Lengths that differ a little are made alike, so that one block does for the other.
fn rounded(len: usize) -> usize {
    len.next_multiple_of((len.next_power_of_two() / 16).max(1))
}

impl Drop for Block {
    fn drop(&mut self) {
        let memory = std::mem::take(&mut self.memory);
        if memory.len() < SPARE_MIN {
            return;
        }
        let mut unwanted = Vec::new();
        let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
        spare.bytes += memory.len();
        spare.blocks.push_back(memory);
        // Lengths that nobody asks for any more make room for those of now.
        while spare.bytes > SPARE_MAX
            && let Some(oldest) = spare.blocks.pop_front()
        {
            spare.bytes -= oldest.len();
            unwanted.push(oldest);
        }
        drop(spare);
    }
}

impl Deref for Block {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.memory.get(..self.len).unwrap_or(&self.memory)
    }
}

impl DerefMut for Block {
    fn deref_mut(&mut self) -> &mut [u8] {
        let len = self.len.min(self.memory.len());
        &mut self.memory[..len]
    }
}

impl AsRef<[u8]> for Block {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block({} bytes)", self.len)
    }
}

/// Memory of a block.
pub(crate) enum Memory {
    Allocated(Vec<u8>),
    Mapped(MmapMut),
}

impl Memory {
    /// `len` bytes, all of them zero.
    pub(crate) fn new(len: usize) -> Self {
        let mapped = if len < MAPPED_MIN { None } else { MmapMut::map_anon(len).ok() };
        mapped.map_or_else(|| Self::Allocated(vec![0; len]), Self::Mapped)
    }
}

impl Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Allocated(bytes) => bytes,
            Self::Mapped(bytes) => bytes,
        }
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Allocated(bytes) => bytes,
            Self::Mapped(bytes) => bytes,
        }
    }
}

impl Default for Memory {
    fn default() -> Self {
        Self::Allocated(Vec::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_as_long_as_it_was_asked_for_whoever_had_it_before() {
        // Others take and give meanwhile: only what holds in any case is asserted.
        for len in [0, 1, SPARE_MIN - 1, SPARE_MIN, 100_000, MAPPED_MIN, MAPPED_MIN + 1, SPARE_MAX + 1] {
            for _ in 0..3 {
                let mut block = Block::new(len);
                assert_eq!(block.len(), len);
                block.fill(7);
                let frozen = block.freeze();
                assert!(frozen.len() == len && frozen.iter().all(|&byte| byte == 7));
            }
        }
        let spare = SPARE.lock().unwrap();
        assert!(spare.bytes <= SPARE_MAX);
        assert_eq!(spare.bytes, spare.blocks.iter().map(|block| block.len()).sum::<usize>());
    }

    #[test]
    fn little_is_wasted() {
        for len in (1..5_000_000).step_by(997) {
            let rounded = rounded(len);
            assert!(rounded >= len && rounded - len <= len / 8, "{len}: {rounded}");
        }
    }
}
