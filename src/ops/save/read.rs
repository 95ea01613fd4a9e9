//! Reading of a unit: reads bytes, returns hashed chunks. Runs on workers; only content-defined boundaries are settled in
//! order.

use std::ops::Range;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use super::CutChoice;
use super::detect::Formats;
use super::source::{check_unchanged, open};
use super::units::{Cuts, FileDetails, FilePart, Unit, details};
use crate::budget::Buffer;
use crate::checkpoint::{Layout, in_memory};
use crate::chunker::{content, fixed, tensor};
use crate::codec::Element;
use crate::error::{Error, Result};
use crate::id::ChunkId;
use crate::ops::shown;
use crate::tree::{self, Opened, Walk};

/// A part that was read.
#[derive(Debug)]
pub(super) struct ReadPart {
    pub(super) file: usize,
    pub(super) details: Option<FileDetails>,
    pub(super) found: PartContent,
}

/// Result of reading a part.
#[derive(Debug)]
pub(super) enum PartContent {
    /// Its chunks.
    Chunks(Vec<HashedChunk>),
    /// Window with candidates for content-defined boundaries.
    Window { first: bool, last: bool, start: u64, bytes: Bytes, candidates: Vec<u32> },
    /// Bytes between settled boundaries, not hashed yet.
    Cut(Vec<(u64, Bytes)>),
}

/// A chunk with its place in the file.
#[derive(Clone, Debug)]
pub(super) struct HashedChunk {
    pub(super) id: ChunkId,
    pub(super) start: u64,
    pub(super) bytes: Bytes,
    /// Element type, if it is known.
    pub(super) number: Option<Element>,
}

/// Reads a unit; if its boundaries are known, also splits and hashes it.
pub(super) fn read(walk: &Walk, formats: &Formats, unit: Unit, mut buffer: Buffer) -> Result<Vec<ReadPart>> {
    let mut at = 0;
    for part in &unit.parts {
        let len = usize::try_from(part.range.end - part.range.start).unwrap_or(usize::MAX);
        let out = buffer.get_mut(at..at + len).ok_or_else(|| Error::other("a unit outgrew its buffer"))?;
        read_part(walk, part, out)?;
        at += len;
    }
    let whole = buffer.freeze();
    let mut start = 0;
    let parts = unit.parts.into_iter().map(|part| {
        let len = usize::try_from(part.range.end - part.range.start).unwrap_or(usize::MAX);
        let bytes = whole.slice(start..start + len);
        start += len;
        cut(formats, part, bytes)
    });
    Ok(parts.collect())
}

/// As [`read`], of files in memory: nothing is read, and hardly anything copied.
pub(super) fn view(walk: &Walk, formats: &Formats, unit: Unit) -> Result<Vec<ReadPart>> {
    let view = |part: FilePart| {
        let (found, file) = opened(walk, &part)?;
        let bytes = file.in_memory(part.range.clone());
        let bytes = bytes.ok_or_else(|| Error::other("a file is not in memory").at(shown(&found.path)))?;
        Ok(cut(formats, part, bytes))
    };
    unit.parts.into_iter().map(view).collect()
}

/// File of a part: its walk entry, and the open file, which parts of long files carry.
fn opened<'w>(walk: &'w Walk, part: &FilePart) -> Result<(&'w tree::WalkEntry, Arc<Opened>)> {
    let found = walk.found.get(part.file).ok_or_else(|| Error::other("a part names no file"))?;
    let file = part.open.clone().map_or_else(|| open(walk, found).map(Arc::new), Ok)?;
    Ok((found, file))
}

fn read_part(walk: &Walk, part: &FilePart, out: &mut [u8]) -> Result<()> {
    let (found, file) = opened(walk, part)?;
    // A file that shrank reads short; the check below detects the change.
    let read = file.read_exact_at(out, part.range.start);
    check_unchanged(&file, found)?;
    read.map_err(|source| Error::other("read a file to save").at(shown(&found.path)).source(source))
}

fn cut(formats: &Formats, part: FilePart, bytes: Bytes) -> ReadPart {
    let FilePart { file, range, cuts, layout, details: said, .. } = part;
    let (details, found) = match cuts {
        Cuts::Known(ends) => (said, PartContent::Chunks(name(&bytes, range.start, &ends, layout.as_deref()))),
        Cuts::Look => {
            formats.look_for_pointer(file, &bytes);
            let (layout, ends) = parse_and_cut(formats, file, &bytes);
            let chunks = name(&bytes, range.start, &ends, layout.as_ref());
            (Some(details(formats.choice, layout.as_ref())), PartContent::Chunks(chunks))
        }
        Cuts::Window { first, last } => {
            let mut candidates = Vec::new();
            content::candidates(&[], &bytes, &mut candidates);
            (said, PartContent::Window { first, last, start: range.start, bytes, candidates })
        }
    };
    ReadPart { file, details, found }
}

/// Layout and cuts of a whole file in memory.
fn parse_and_cut(formats: &Formats, file: usize, bytes: &Bytes) -> (Option<Layout>, Vec<u64>) {
    let len = bytes.len() as u64;
    let layout = formats.layout(file, &mut in_memory(bytes), len);
    let ends = match (layout.as_ref().map(Layout::spans), formats.choice) {
        (Some(spans), _) => tensor::cuts(&spans, len).collect(),
        (None, CutChoice::Fixed) => fixed::cuts(len).collect(),
        (None, _) => content::cuts(bytes),
    };
    (layout, ends)
}

/// Hashes the chunks that end at `ends` (offsets in the file); `bytes` starts at offset `start`.
fn name(bytes: &Bytes, start: u64, ends: &[u64], layout: Option<&Layout>) -> Vec<HashedChunk> {
    let mut from = start;
    let chunk = |&end: &u64| {
        let range: Range<u64> = from..end;
        from = end;
        let at = |offset: u64| usize::try_from(offset - start).unwrap_or(usize::MAX);
        let bytes = bytes.slice(at(range.start)..at(range.end));
        let number = layout.and_then(|layout| layout.number_in(&range));
        HashedChunk { id: ChunkId::of(&bytes), start: range.start, bytes, number }
    };
    ends.iter().map(chunk).collect()
}

/// Settles the boundaries of windows, in the order of the file.
#[derive(Debug, Default)]
pub(super) struct Settler {
    resolver: content::Resolver,
    /// Start of the extent in the file.
    origin: u64,
    /// Bytes before the current window that belong to the unfinished chunk.
    carried: Bytes,
    /// Last bytes before the current window, which the rolling hash still covers.
    lookback: Vec<u8>,
}

impl Settler {
    /// Adds the next part; a window is replaced by the chunks that it completes.
    pub(super) fn settle(&mut self, part: ReadPart) -> ReadPart {
        let ReadPart { file, details, found } = part;
        let PartContent::Window { first, last, start, bytes, candidates } = found else {
            return ReadPart { file, details, found };
        };
        if first {
            *self = Self { origin: start, ..Self::default() };
        }
        let candidates = self.with_lookback(&bytes, candidates);
        let mut cuts = Vec::new();
        self.resolver.push(&candidates, bytes.len() as u64, &mut cuts);
        if last {
            std::mem::take(&mut self.resolver).finish(&mut cuts);
        }
        let keep = bytes.len().saturating_sub(content::LOOKBACK);
        self.lookback = bytes.slice(keep..).to_vec();
        let cut = self.divide(start, &bytes, &cuts);
        ReadPart { file, details, found: PartContent::Cut(cut) }
    }

    /// Windows are searched without their predecessor, so the start is searched again with it.
    fn with_lookback(&self, bytes: &Bytes, mut candidates: Vec<u32>) -> Vec<u32> {
        if self.lookback.is_empty() {
            return candidates;
        }
        let head = bytes.slice(..content::LOOKBACK.min(bytes.len()));
        let mut again = Vec::new();
        content::candidates(&self.lookback, &head, &mut again);
        candidates.retain(|&at| at as usize > head.len());
        again.extend(candidates);
        again
    }

    /// Completes the chunks that end at `cuts` (offsets in the extent); the rest is carried over.
    fn divide(&mut self, start: u64, bytes: &Bytes, cuts: &[u64]) -> Vec<(u64, Bytes)> {
        let mut chunks = Vec::with_capacity(cuts.len());
        let mut from = 0;
        for cut in cuts {
            let to = usize::try_from(self.origin + cut - start).unwrap_or(usize::MAX);
            let tail = bytes.slice(from..to);
            let begun = std::mem::take(&mut self.carried);
            let chunk = if begun.is_empty() { tail } else { joined(&begun, &tail) };
            chunks.push((self.origin + cut - chunk.len() as u64, chunk));
            from = to;
        }
        let rest = bytes.slice(from..);
        self.carried = if self.carried.is_empty() { rest } else { joined(&self.carried, &rest) };
        chunks
    }
}

fn joined(a: &Bytes, b: &Bytes) -> Bytes {
    let mut both = BytesMut::with_capacity(a.len() + b.len());
    both.extend_from_slice(a);
    both.extend_from_slice(b);
    both.freeze()
}

/// Hashes chunks between settled boundaries.
pub(super) fn hash(part: ReadPart) -> (usize, Option<FileDetails>, Vec<HashedChunk>) {
    let named = match part.found {
        PartContent::Chunks(named) => named,
        PartContent::Cut(cut) => cut
            .into_iter()
            .map(|(start, bytes)| HashedChunk { id: ChunkId::of(&bytes), start, bytes, number: None })
            .collect(),
        PartContent::Window { .. } => Vec::new(),
    };
    (part.file, part.details, named)
}
