//! Copies from pinned memory to a device.
#![expect(unsafe_code, reason = "a device reads the memory in the background")]

use std::ops::Range;
use std::time::Duration;

use crate::codec::planes::Outline;
use crate::error::Result;
use crate::id::ChunkId;

/// Copies from host memory to a device, in the background.
pub trait CopyEngine: Send + Sync {
    /// Copies that may still run.
    type Copy: Send;

    /// Prepares to decode and verify chunks on the device. Returns false if it cannot, or the device has too little memory.
    fn prepare_to_decode(&mut self, sizes: DecodeSizes) -> bool {
        let _ = sizes;
        false
    }

    /// Limits of a slot beside its length.
    fn limits(&self) -> SlotLimits {
        SlotLimits { parts: usize::MAX, scratch: usize::MAX }
    }

    /// Memory of the device, in bytes, that it needs to decode and verify a chunk of `plain_len` bytes.
    fn scratch_len(&self, plain_len: u32, is_encoded: bool) -> usize {
        let _ = (plain_len, is_encoded);
        0
    }

    /// Lets the device read memory.
    ///
    /// # Safety
    /// The memory stays mapped until [`CopyEngine::unpin`].
    ///
    /// # Errors
    /// Exhausted, if no more memory can be pinned.
    unsafe fn pin(&self, memory: *mut u8, len: usize) -> Result<()>;

    /// Ends [`CopyEngine::pin`].
    ///
    /// # Safety
    /// No copy from the memory is pending.
    unsafe fn unpin(&self, memory: *mut u8);

    /// Starts the copies of all `parts` of `slot`, which are in the order of their places there. After an error some may have begun.
    ///
    /// # Safety
    /// Until [`CopyEngine::finish`] has returned success, the bytes of the slot stay as they are. Until [`CopyEngine::verified`] has, the
    /// device's memory at the targets stays allocated.
    ///
    /// # Errors
    /// Errors of the device.
    unsafe fn start(&self, slot: &[u8], parts: &[Part]) -> Result<Self::Copy>;

    /// Waits for the end of copies. Returns the time that they took on the device.
    ///
    /// # Errors
    /// Errors of the device; the copies may then still run.
    fn finish(&self, copy: Self::Copy) -> Result<Duration>;

    /// True if [`CopyEngine::finish`] would not wait.
    fn has_ended(&self, copy: &Self::Copy) -> bool;

    /// Waits until all chunks that were copied are decoded and verified. Returns the number of those so far that are not what their ids
    /// say.
    ///
    /// # Errors
    /// Errors of the device.
    fn verified(&self) -> Result<u64> {
        Ok(0)
    }

    /// Waits until no copy runs, also none whose start or end was an error.
    ///
    /// # Errors
    /// Errors of the device; copies may then still run.
    fn settle(&self) -> Result<()>;
}

/// Sizes of what is to be decoded, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct DecodeSizes {
    /// Length of a slot, unless the system pins less memory than that.
    pub slot: usize,
    /// Longest chunk.
    pub chunk: usize,
    /// All chunks.
    pub total: u64,
}

/// Limits of what is copied from one slot.
#[derive(Clone, Copy, Debug)]
pub struct SlotLimits {
    /// Maximum parts.
    pub parts: usize,
    /// Maximum bytes of the device's memory for decoding, unless one part needs more.
    pub scratch: usize,
}

/// A filled part of a slot.
#[derive(Clone, Debug)]
pub struct Part {
    /// Its bytes in the slot.
    pub range: Range<usize>,
    /// Use of them on the device.
    pub target: PartTarget,
}

impl Part {
    /// Plain bytes.
    #[must_use]
    pub fn plain_len(&self) -> usize {
        match &self.target {
            PartTarget::Copy(_) => self.range.len(),
            PartTarget::Chunk(chunk) => chunk.plain_len as usize,
        }
    }
}

/// Use of a part's bytes on the device.
#[derive(Clone, Debug)]
pub enum PartTarget {
    /// Copied to an address.
    Copy(u64),
    /// Decoded to an address, and verified there.
    Chunk(Box<ChunkTarget>),
}

/// A chunk that the device decodes and verifies.
#[derive(Clone, Debug)]
pub struct ChunkTarget {
    /// Address of the plain bytes.
    pub to: u64,
    /// Length of the plain bytes.
    pub plain_len: u32,
    /// Id.
    pub id: ChunkId,
    /// Its planes in the part; none if that has the plain bytes.
    pub planes: Option<Outline>,
}

/// Copies of ranges of a slot to addresses, those joined that follow each other in both.
pub(in crate::staging) fn joined(copies: impl IntoIterator<Item = (Range<usize>, u64)>) -> Vec<(Range<usize>, u64)> {
    let mut all: Vec<(Range<usize>, u64)> = Vec::new();
    for (range, to) in copies {
        match all.last_mut() {
            Some((last, first)) if last.end == range.start && first.checked_add(last.len() as u64) == Some(to) => {
                last.end = range.end;
            }
            _ => all.push((range, to)),
        }
    }
    all
}

/// Bytes to copy, and their target.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// The bytes.
    pub from: &'a [u8],
    /// Address of the device.
    pub to: u64,
}
