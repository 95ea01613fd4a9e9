//! Tensor cutting: pieces of an equal number of elements, so that what is the same in two checkpoints is the same chunk.
//!
//! The rule depends on the spans and the file's length alone:
//!
//! 1. *Spans.* Each tensor is cut off from what stands before and after it. What no tensor covers (the header, padding,
//!    a tail) is cut in pieces of 256 KiB and never shares a chunk with a tensor.
//! 2. *Pieces.* A tensor is cut, from its own start, in pieces of at most 256 Ki elements and at most 2 MiB. Counting
//!    elements makes the pieces of a bf16 copy those of its fp32 master. An element of unknown size counts as one byte.
//! 3. *Rows.* Where the row length is known and a row fits a piece, a piece holds a power of two of rows: the largest that
//!    fits. Tensors are sharded by their first dimension in equal parts, mostly by powers of two; so the parts start at
//!    multiples of a piece, and their pieces are those of the whole tensor. (The largest *multiple* would fill a piece
//!    better and hardly ever line up: 23 rows do not divide a shard of 512.)
//! 4. *Long rows.* A row longer than a piece is cut by itself, in the fewest equal pieces that fit (in elements; the last
//!    may be shorter by less than the number of pieces). So a row of 256 Ki + 64 elements leaves no crumb of 64.
//! 5. *Small tensors.* Neighbours that touch and are each shorter than 32 KiB (biases, norms) share a chunk, as many as
//!    come whole to at most 256 KiB. A longer tensor or a gap ends such a run.

use std::iter::FusedIterator;

use crate::limits::{KIB, MIB};

/// Elements in a piece, at most.
pub const PIECE_ELEMENTS: u64 = 256 * KIB;
/// Bytes in a piece, at most: 256 Ki elements of 8 bytes.
pub const PIECE_LEN_MAX: u64 = 2 * MIB;
/// A tensor of fewer bytes may share a chunk with its neighbours.
pub const SMALL_LEN: u64 = 32 * KIB;
/// Bytes in a chunk that small tensors share, at most.
pub const SHARED_LEN_MAX: u64 = 256 * KIB;

/// One tensor in a file, as far as cutting cares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Offset in the file of its first byte.
    pub start: u64,
    /// Offset after its last byte.
    pub end: u64,
    /// Bytes in an element; 0 or 1 where that is unknown or makes no sense.
    pub element: u32,
    /// Bytes in one row of the first dimension; 0 where unknown.
    pub row: u64,
}

impl Span {
    const fn len(&self) -> u64 {
        self.end - self.start
    }

    const fn is_small(&self) -> bool {
        self.len() < SMALL_LEN
    }
}

/// The chunk ends of a file of `len` bytes that holds `spans`, which are in file order and do not overlap.
///
/// A span that breaks this (or is empty, or ends after the file) is passed over: its bytes are cut as if it were not there.
pub fn cuts(spans: &[Span], len: u64) -> Cuts<'_> {
    Cuts { spans, len, at: 0, region: Region { start: 0, end: 0, row: 1, step: 1 } }
}

/// The chunk ends of one file, in order; made by [`cuts`]. Takes no memory, however long the file is.
#[derive(Clone, Debug)]
pub struct Cuts<'a> {
    /// Spans that were not reached yet.
    spans: &'a [Span],
    len: u64,
    /// The latest cut.
    at: u64,
    /// Region that is being cut.
    region: Region,
}

/// A stretch cut by one rule: each row from its own start, in steps.
#[derive(Clone, Copy, Debug)]
struct Region {
    start: u64,
    end: u64,
    row: u64,
    step: u64,
}

impl Region {
    const fn whole(start: u64, end: u64) -> Self {
        Self { start, end, row: end - start, step: end - start }
    }

    const fn opaque(start: u64, end: u64) -> Self {
        Self { start, end, row: end - start, step: PIECE_ELEMENTS }
    }

    fn tensor(span: &Span) -> Self {
        let element = match u64::from(span.element) {
            known @ 2..=PIECE_LEN_MAX => known,
            _ => 1,
        };
        let piece = PIECE_ELEMENTS.min(PIECE_LEN_MAX / element);
        let row_known = span.row > 0 && span.len().is_multiple_of(span.row) && span.row.is_multiple_of(element);
        let row = if row_known { span.row / element } else { 1 };
        if row <= piece {
            let rows = 1 << (piece / row).ilog2();
            return Self { start: span.start, end: span.end, row: span.len(), step: rows * row * element };
        }
        let step = row.div_ceil(row.div_ceil(piece));
        Self { start: span.start, end: span.end, row: span.row, step: step * element }
    }

    /// The first cut after `at`, which lies in the region, before its end.
    fn cut_after(&self, at: u64) -> u64 {
        let row_left = self.row - (at - self.start) % self.row;
        at + self.step.min(row_left).min(self.end - at)
    }
}

impl Cuts<'_> {
    /// The next span that can be cut, if it starts at `at` or later.
    fn peek(&mut self, at: u64) -> Option<Span> {
        while let [span, rest @ ..] = self.spans {
            if span.start >= at && span.start < span.end && span.end <= self.len {
                return Some(*span);
            }
            self.spans = rest;
        }
        None
    }

    /// Region from the latest cut on.
    fn next_region(&mut self) -> Region {
        let start = self.at;
        let Some(span) = self.peek(start) else { return Region::opaque(start, self.len) };
        if span.start > start {
            return Region::opaque(start, span.start);
        }
        if !span.is_small() {
            return Region::tensor(&span);
        }
        let mut end = span.end;
        while let Some(next) = self.peek(end) {
            if next.start != end || !next.is_small() || next.end - start > SHARED_LEN_MAX {
                break;
            }
            end = next.end;
        }
        Region::whole(start, end)
    }
}

impl Iterator for Cuts<'_> {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        if self.at >= self.len {
            return None;
        }
        if self.at == self.region.end {
            self.region = self.next_region();
        }
        self.at = self.region.cut_after(self.at);
        Some(self.at)
    }
}

impl FusedIterator for Cuts<'_> {}
