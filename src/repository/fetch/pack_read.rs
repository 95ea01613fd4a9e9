//! Reads of packs: ranges that bring some chunks into one buffer, and where each chunk is in it.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use super::gaps::GAP;
use crate::budget::Budget;
use crate::error::{Error, Result};
use crate::id::{ChunkId, PackId};
use crate::repository::{ChunkPlace, Saved};

/// Id and place of a chunk; callers refer to chunks by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Located {
    /// Id.
    pub id: ChunkId,
    /// Place.
    pub place: ChunkPlace,
    /// The number of its base, if its codec needs one.
    pub base: Option<u32>,
    /// Number of the repository that it is read from.
    pub repository: usize,
}

/// One read: parts that are read into one buffer, one after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PackRead {
    /// Ranges of packs, a request each.
    pub parts: Vec<PackPart>,
    /// Chunks in the read. Each base comes before its dependents, with only other dependents in between.
    pub chunks: Vec<PlannedChunk>,
    /// Chunks that a source gave in another form than they are stored in, and where they are in the buffer.
    pub given: BTreeMap<u32, Located>,
}

/// A range of one pack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackPart {
    /// Number of the repository that it is read from.
    pub repository: usize,
    /// The pack.
    pub pack: PackId,
    /// Range of its bytes.
    pub range: Range<u64>,
}

/// A chunk that a read brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedChunk {
    /// Number.
    pub chunk: u32,
    /// True if it was asked for; false if a requested chunk needs it.
    pub wanted: bool,
}

impl PackRead {
    /// One range of one pack, with chunks that need no base.
    #[must_use]
    pub fn of(pack: PackId, range: Range<u64>, chunks: impl IntoIterator<Item = u32>) -> Self {
        let chunks = chunks.into_iter().map(|chunk| PlannedChunk { chunk, wanted: true }).collect();
        Self { parts: vec![PackPart { repository: 0, pack, range }], chunks, given: BTreeMap::new() }
    }

    /// Bytes in all parts.
    #[must_use]
    pub fn stored_len(&self) -> u64 {
        stored_len(&self.parts)
    }

    /// Memory of `budget` to encode anew the chunks that a read of [`plan_anew`](super::plan_anew) brings: for their plain and their
    /// new form. The caller must hold no buffer of that budget.
    ///
    /// # Errors
    /// Errors of `locate`; exhausted, if a chunk takes more than a quarter of the budget.
    ///
    /// # Cancel safety
    /// Safe: a dropped wait holds nothing.
    pub async fn memory_to_encode(&self, budget: &Budget, locate: impl Fn(u32) -> Result<Located>) -> Result<Budget> {
        let mut plain = 0;
        for planned in self.chunks.iter().filter(|planned| planned.wanted) {
            plain += u64::from(locate(planned.chunk)?.place.plain_len);
        }
        budget.carve_beside_buffers(2 * plain).await
    }

    /// Range of a chunk's frame in the buffer.
    #[must_use]
    pub fn find(&self, located: &Located) -> Option<Range<usize>> {
        let place = &located.place;
        let mut before = 0;
        for part in &self.parts {
            if part.holds(located) {
                let start = usize::try_from(before + (place.offset - part.range.start)).ok()?;
                return Some(start..start + place.stored_len as usize);
            }
            before += part.range.end - part.range.start;
        }
        None
    }

    /// Parts needed for the chunks that are not `given`: of each part, the range from the first of them to the last.
    ///
    /// # Errors
    /// Errors of `locate`.
    pub(super) fn without(
        &self,
        given: impl Fn(u32) -> bool,
        locate: impl Fn(u32) -> Result<Located>,
    ) -> Result<Vec<PackPart>> {
        let mut rest: Vec<Option<Range<u64>>> = vec![None; self.parts.len()];
        for brought in self.chunks.iter().filter(|brought| !given(brought.chunk)) {
            let located = locate(brought.chunk)?;
            let at = self.parts.iter().position(|part| part.holds(&located));
            if let Some(range) = at.and_then(|at| rest.get_mut(at)) {
                let frame = frame(&located);
                *range = Some(match range.take() {
                    Some(range) => range.start.min(frame.start)..range.end.max(frame.end),
                    None => frame,
                });
            }
        }
        let parts = self.parts.iter().zip(rest);
        Ok(parts.filter_map(|(part, range)| Some(PackPart { range: range?, ..part.clone() })).collect())
    }

    /// The same read without the chunks `done`, none of which is a base of another.
    ///
    /// # Errors
    /// Errors of `locate`.
    pub(super) fn of_others(self, done: &HashSet<u32>, locate: impl Fn(u32) -> Result<Located>) -> Result<Self> {
        if done.is_empty() {
            return Ok(self);
        }
        let parts = self.without(|chunk| done.contains(&chunk), locate)?;
        let chunks = self.chunks.into_iter().filter(|planned| !done.contains(&planned.chunk)).collect();
        Ok(Self { parts, chunks, given: BTreeMap::new() })
    }

    /// Range in the buffer of the bytes of `part`, which is within one of the parts.
    pub(super) fn slot_of(&self, part: &PackPart) -> Option<Range<usize>> {
        let mut before = 0;
        for whole in &self.parts {
            let within = whole.range.start <= part.range.start && part.range.end <= whole.range.end;
            if whole.pack == part.pack && whole.repository == part.repository && within {
                let start = usize::try_from(before + (part.range.start - whole.range.start)).ok()?;
                return Some(start..start + usize::try_from(part.range.end - part.range.start).ok()?);
            }
            before += whole.range.end - whole.range.start;
        }
        None
    }

    /// Extends the parts to cover a chunk.
    pub(crate) fn cover(&mut self, located: &Located) {
        cover(&mut self.parts, located, GAP);
    }
}

impl PackPart {
    fn is_of(&self, located: &Located) -> bool {
        self.pack == located.place.pack && self.repository == located.repository
    }

    fn holds(&self, located: &Located) -> bool {
        let frame = frame(located);
        self.is_of(located) && self.range.start <= frame.start && frame.end <= self.range.end
    }
}

/// Byte range of a chunk's frame in its pack.
pub(super) fn frame(located: &Located) -> Range<u64> {
    located.place.offset..located.place.offset + u64::from(located.place.stored_len)
}

/// Bytes in all `parts`.
pub(super) fn stored_len(parts: &[PackPart]) -> u64 {
    parts.iter().map(|part| part.range.end - part.range.start).sum()
}

/// Extends a part that is at most `gap` bytes away, or adds one.
pub(super) fn cover(parts: &mut Vec<PackPart>, located: &Located, gap: u64) {
    let frame = frame(located);
    let near = |part: &&mut PackPart| {
        part.is_of(located) && frame.start <= part.range.end + gap && part.range.start <= frame.end + gap
    };
    match parts.iter_mut().rev().find(near) {
        Some(part) => part.range = part.range.start.min(frame.start)..part.range.end.max(frame.end),
        None => {
            let (repository, pack) = (located.repository, located.place.pack);
            parts.push(PackPart { repository, pack, range: frame });
        }
    }
}

impl Saved {
    /// Id and place of chunk number `chunk`. Chunks of the manifest come first, in its order, then further chunks of the map.
    ///
    /// # Errors
    /// Damaged, if the map refers to a missing entry.
    pub fn locate(&self, chunk: u32) -> Result<Located> {
        let lacking = || Error::damaged("map lacks a chunk of its manifest").got(chunk);
        let frame = self.map.frames.get(chunk as usize).ok_or_else(lacking)?;
        let (id, plain_len) = self.chunk(chunk).ok_or_else(lacking)?;
        let base = match frame.base() {
            Some(base) => Some(self.chunk(base).ok_or_else(lacking)?.0),
            None => None,
        };
        let (pack, ordinal, offset) = (self.map.pack(frame)?.id, frame.ordinal, frame.offset);
        let (stored_len, codec, alone_len) = (frame.stored_len, frame.codec, frame.alone_len);
        let place = ChunkPlace { pack, ordinal, offset, stored_len, plain_len, codec, base, alone_len };
        Ok(Located { id, place, base: frame.base(), repository: 0 })
    }

    fn chunk(&self, chunk: u32) -> Option<(ChunkId, u32)> {
        let (at, chunks) = (chunk as usize, &self.manifest.chunks);
        match chunks.ids.get(at) {
            Some(&id) => Some((id, *chunks.lens.get(at)?)),
            None => self.map.further.get(at - chunks.ids.len()).copied(),
        }
    }

    /// Chunks that [`Saved::locate`] knows.
    #[must_use]
    pub fn located_chunks(&self) -> u32 {
        u32::try_from(self.map.frames.len()).unwrap_or(u32::MAX)
    }
}
