//! Reads of which a source gives some chunks: as they are stored, or without their bases, which then need not be read.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::pack_read::{Located, PackPart, PackRead, PlannedChunk};
use super::source::{ChunkSource, SourceBytes};
use crate::budget::{Budget, Buffer};
use crate::codec::{Encoded, HOPS_MAX};
use crate::error::Result;
use crate::id::{ObjectId, Owned, PackId, SessionId};
use crate::repository::{ChunkPlace, Repository, Saved};

/// Maximum number of questions: for the requested chunks, and for the bases of what came.
const ROUNDS: usize = HOPS_MAX as usize + 1;
/// Share of the budget (one part in this many) that chunks of one read may take in another form.
const OTHERS_PART: u64 = 16;

/// Frames of a read from a source, in a buffer that has room for those that come in another form.
pub(super) struct NearFrames<'a> {
    saved: &'a Saved,
    read: &'a PackRead,
    pub(super) buffer: Buffer,
    /// Chunks that came as they are stored.
    as_stored: BTreeSet<u32>,
    /// Chunks that came in another form, and where they are.
    others: BTreeMap<u32, Located>,
    /// Bytes of the chunks in another form.
    used: usize,
}

impl<'a> NearFrames<'a> {
    /// Asks `source` for the requested chunks of `read`, and for the bases that these need. Returns the bytes that moved, too.
    pub(super) async fn gather(
        source: &dyn ChunkSource,
        repository: &Repository,
        (saved, read): (&'a Arc<Saved>, &'a PackRead),
    ) -> Result<(Self, SourceBytes)> {
        let budget = repository.budget();
        let len = usize::try_from(read.stored_len() + room(saved, read, budget)?).unwrap_or(usize::MAX);
        let buffer = budget.buffer(len).await?;
        let (as_stored, others) = Default::default();
        let mut near = Self { saved, read, buffer, as_stored, others, used: 0 };
        let mut wanted: Vec<u32> =
            read.chunks.iter().filter(|planned| planned.wanted).map(|planned| planned.chunk).collect();
        let mut moved = SourceBytes::default();
        for _ in 0..ROUNDS {
            moved += source.frames(repository, saved, &wanted, &mut |chunk, encoded| near.place(chunk, encoded)).await;
            let asked = wanted;
            wanted = near.missing_bases();
            if wanted.is_empty() || wanted == asked {
                break;
            }
        }
        Ok((near, moved))
    }

    /// Copies a frame to its place in the buffer: the one that it has in its pack, or, without a base, one behind all of these.
    fn place(&mut self, chunk: u32, encoded: &Encoded) {
        let Ok(located) = self.saved.locate(chunk) else { return };
        let Some(range) = self.read.find(&located).filter(|_| !self.is_given(chunk)) else { return };
        let place = &located.place;
        let is_same = (place.codec, place.base, range.len()) == (encoded.codec, encoded.base, encoded.bytes.len());
        if is_same && let Some(slot) = self.buffer.get_mut(range) {
            slot.copy_from_slice(&encoded.bytes);
            self.as_stored.insert(chunk);
            return;
        }
        let start = self.stored_len() + self.used;
        let slot = self.buffer.get_mut(start..start + encoded.bytes.len()).filter(|_| encoded.base.is_none());
        if let (Some(slot), Ok(stored_len)) = (slot, u32::try_from(encoded.bytes.len())) {
            slot.copy_from_slice(&encoded.bytes);
            let (pack, offset) = (others_pack(), self.used as u64);
            let place = ChunkPlace { pack, offset, stored_len, codec: encoded.codec, base: None, ..*place };
            self.others.insert(chunk, Located { place, base: None, repository: 0, ..located });
            self.used += encoded.bytes.len();
        }
    }

    fn stored_len(&self) -> usize {
        usize::try_from(self.read.stored_len()).unwrap_or(usize::MAX)
    }

    fn is_given(&self, chunk: u32) -> bool {
        self.as_stored.contains(&chunk) || self.others.contains_key(&chunk)
    }

    /// True if nothing came.
    pub(super) fn is_empty(&self) -> bool {
        self.as_stored.is_empty() && self.others.is_empty()
    }

    /// Base of a chunk in the form in which it came.
    fn base(&self, chunk: u32) -> Option<u32> {
        if self.others.contains_key(&chunk) { None } else { self.saved.locate(chunk).ok()?.base }
    }

    /// Bases of chunks that came which did not come.
    fn missing_bases(&self) -> Vec<u32> {
        let bases: BTreeSet<u32> = self.as_stored.iter().filter_map(|&chunk| self.base(chunk)).collect();
        bases.into_iter().filter(|&base| !self.is_given(base)).collect()
    }

    /// Requested chunks and the bases that they need, each base before its dependents.
    fn needed(&self) -> Vec<PlannedChunk> {
        let mut needed: BTreeSet<u32> = BTreeSet::new();
        for planned in self.read.chunks.iter().filter(|planned| planned.wanted) {
            let mut next = Some(planned.chunk);
            while let Some(chunk) = next.filter(|&chunk| needed.insert(chunk)) {
                next = self.base(chunk);
            }
        }
        let (mut roots, mut branches) = (Vec::new(), HashMap::<u32, Vec<PlannedChunk>>::new());
        for planned in self.read.chunks.iter().filter(|planned| needed.contains(&planned.chunk)) {
            match self.base(planned.chunk) {
                Some(base) => branches.entry(base).or_default().push(*planned),
                None => roots.push(*planned),
            }
        }
        let mut ordered = Vec::with_capacity(needed.len());
        let mut left: Vec<PlannedChunk> = roots.into_iter().rev().collect();
        while let Some(planned) = left.pop() {
            ordered.push(planned);
            left.extend(branches.remove(&planned.chunk).unwrap_or_default().into_iter().rev());
        }
        ordered
    }

    /// Parts of the packs that are needed for the chunks that did not come.
    ///
    /// # Errors
    /// Damaged, if the map lacks a chunk.
    pub(super) fn rest(&self) -> Result<Vec<PackPart>> {
        let needed: BTreeSet<u32> = self.needed().iter().map(|planned| planned.chunk).collect();
        let is_spared = |chunk| self.is_given(chunk) || !needed.contains(&chunk);
        self.read.without(is_spared, |chunk| self.saved.locate(chunk))
    }

    /// The read that the buffer holds, once the rest is read, and the buffer.
    pub(super) fn into_read(self) -> (PackRead, Buffer) {
        let mut read = PackRead { chunks: self.needed(), parts: self.read.parts.clone(), given: self.others };
        let range = 0..self.used as u64;
        read.parts.push(PackPart { repository: 0, pack: others_pack(), range });
        (read, self.buffer)
    }
}

/// Bytes for chunks of `read` that may come without their bases.
fn room(saved: &Saved, read: &PackRead, budget: &Budget) -> Result<u64> {
    let mut bytes = 0;
    for planned in &read.chunks {
        let located = saved.locate(planned.chunk)?;
        bytes += if located.base.is_some() { u64::from(located.place.plain_len) } else { 0 };
    }
    Ok(bytes.min(budget.total() / OTHERS_PART))
}

/// Stands for the part of a buffer that is of no pack.
fn others_pack() -> PackId {
    Owned { session: SessionId::from_bytes([0; 16]), object: ObjectId::from_bytes([0; 16]) }
}
