//! Jobs of the kernels, as they lie in the GPU's memory, and the memory that each needs.

use std::ops::Range;

use crate::codec::planes::Encoding;
use crate::staging::ring::ChunkTarget;

/// Bytes that one thread hashes, to a chaining value.
pub(super) const LEAF: u32 = 1024;
/// Bytes of a chaining value.
const VALUE_LEN: usize = 32;
/// Streams of a Huffman code.
const STREAMS: usize = 4;
/// Maximum planes of a chunk.
pub(super) const PLANES: usize = 8;
/// Alignment of memory for a job, in bytes.
pub(super) const ALIGNMENT: usize = 16;
/// Encoding of a plane by a Huffman code.
const CODED: u32 = 2;

/// Scratch memory, in bytes, to decode and verify a chunk of `plain_len` bytes.
pub(in crate::staging::cuda) fn scratch_len(plain_len: usize, is_encoded: bool) -> usize {
    let planes = if is_encoded { plain_len + PLANES * STREAMS * 2 * ALIGNMENT } else { 0 };
    planes + values_len(plain_len) + 2 * ALIGNMENT
}

/// Bytes for the chaining values of a chunk, on two levels of its tree.
fn values_len(plain_len: usize) -> usize {
    let leaves = plain_len.div_ceil(LEAF as usize);
    VALUE_LEN * (leaves + leaves.div_ceil(2))
}

/// Scratch memory that is not given out yet.
pub(super) struct ScratchMemory {
    /// Its first byte.
    pub(super) free: u64,
    /// Its length.
    pub(super) left: usize,
}

impl ScratchMemory {
    fn take(&mut self, len: usize) -> Option<u64> {
        let len = len.next_multiple_of(ALIGNMENT);
        self.left = self.left.checked_sub(len)?;
        let taken = self.free;
        self.free += len as u64;
        Some(taken)
    }
}

/// `struct Job` of kernels.cu, which says what the fields are.
pub(super) struct Job {
    frame: u64,
    target: u64,
    planes: u64,
    values: u64,
    pub(super) len: u32,
    pub(super) width: u32,
    rotated: u32,
    rest: u32,
    encodings: [u32; PLANES],
    starts: [u32; PLANES],
    ends: [u32; PLANES],
    id: [u8; 32],
}

impl Job {
    /// Bytes of a job.
    pub(super) const LEN: usize = 176;

    /// The job of a chunk with its frame at `frame`. None, if there is not enough memory.
    pub(super) fn of(chunk: &ChunkTarget, frame: u64, memory: &mut ScratchMemory) -> Option<Self> {
        let plain_len = chunk.plain_len as usize;
        let mut job = Self {
            frame,
            target: chunk.to,
            planes: 0,
            values: memory.take(values_len(plain_len))?,
            len: chunk.plain_len,
            width: 0,
            rotated: 0,
            rest: 0,
            encodings: [0; PLANES],
            starts: [0; PLANES],
            ends: [0; PLANES],
            id: *chunk.id.as_bytes(),
        };
        let Some(outline) = &chunk.planes else { return Some(job) };
        let width = outline.width.bytes();
        job.width = u32::try_from(width).ok()?;
        job.rotated = u32::from(outline.rotated);
        job.rest = u32::try_from(outline.rest).ok()?;
        let places = job.encodings.iter_mut().zip(&mut job.starts).zip(&mut job.ends);
        for (((encoding, start), end), (how, Range { start: first, end: last })) in places.zip(&outline.planes) {
            *encoding = match how {
                Encoding::Raw => 0,
                Encoding::One => 1,
                Encoding::Huffman => CODED,
            };
            (*start, *end) = (u32::try_from(*first).ok()?, u32::try_from(*last).ok()?);
        }
        let coded = job.encodings.iter().filter(|&&encoding| encoding == CODED).count();
        let part = (plain_len / width).div_ceil(STREAMS);
        job.planes = memory.take(coded * STREAMS * (part + ALIGNMENT).next_multiple_of(ALIGNMENT))?;
        Some(job)
    }

    pub(super) fn has_codes(&self) -> bool {
        self.encodings.contains(&CODED)
    }

    pub(super) fn to_bytes(&self) -> [u8; Self::LEN] {
        let addresses = [self.frame, self.target, self.planes, self.values].map(u64::to_le_bytes);
        let numbers = [self.len, self.width, self.rotated, self.rest].map(u32::to_le_bytes);
        let planes = [self.encodings, self.starts, self.ends].map(|words| words.map(u32::to_le_bytes));
        let mut bytes = [0; Self::LEN];
        let all = addresses.as_flattened().iter().chain(numbers.as_flattened());
        let all = all.chain(planes.as_flattened().as_flattened()).chain(&self.id);
        bytes.iter_mut().zip(all).for_each(|(to, byte)| *to = *byte);
        bytes
    }
}
