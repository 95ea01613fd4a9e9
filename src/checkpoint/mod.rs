//! Checkpoint formats: finds tensors from headers, without executing code.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;

use thiserror::Error;

use crate::chunker::Span;
use crate::codec::Element;
use crate::limits::{DTYPE_NAME_MAX, TENSOR_NAME_MAX};

pub mod boxes;
pub mod dcp;
mod dtype;
pub mod header;
pub mod pickle;
pub mod safetensors;
pub mod sharded;
pub mod torch;

pub use dtype::Dtype;

/// Reads a file: fills the slice with the bytes from an offset on, or fails.
pub type ReadAt<'a> = &'a mut (dyn FnMut(u64, &mut [u8]) -> io::Result<()> + 'a);

/// Reserves bytes of memory for what is found in a file; false if there are no more. A short file may list a tensor very often.
pub type ReserveMemory<'a> = &'a mut (dyn FnMut(u64) -> bool + 'a);

/// Memory of a structure that grows, reserved in steps.
struct Growth<'r> {
    reserve: ReserveMemory<'r>,
    reserved: usize,
}

impl<'r> Growth<'r> {
    const STEP: usize = 64 << 10;

    fn new(reserve: ReserveMemory<'r>) -> Self {
        Self { reserve, reserved: 0 }
    }

    /// Reserves what `bytes` of memory lack; false if there are no more.
    fn is_reserved(&mut self, bytes: usize) -> bool {
        if bytes <= self.reserved {
            return true;
        }
        let lacking = (bytes - self.reserved).next_multiple_of(Self::STEP);
        self.reserved += lacking;
        (self.reserve)(lacking as u64)
    }
}

/// The tensors of one file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// Tensors, sorted by start. Those of a torch file may overlap, as views of one storage.
    pub tensors: Vec<Tensor>,
    /// Ranges of elements, sorted and disjoint: those of tensors, and those of no listed tensor, such as storages of tensors that
    /// are not row-major.
    pub elements: Vec<Elements>,
}

impl Layout {
    /// Approximate bytes of memory.
    #[must_use]
    pub fn weight(&self) -> u64 {
        let within = |tensor: &Tensor| {
            let slice = tensor.part.as_ref().map_or(0, |part| size_of_val(&*part.shape) + size_of_val(&*part.offsets));
            tensor.name.len() + size_of_val(&*tensor.shape) + slice
        };
        let within: usize = self.tensors.iter().map(within).sum();
        (within + size_of_val(&*self.tensors) + size_of_val(&*self.elements)) as u64
    }
}

/// A range of a file with elements of one type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Elements {
    /// Offset in the file of its first byte.
    pub start: u64,
    /// Offset in the file after its last byte.
    pub end: u64,
    /// Their type.
    pub dtype: Dtype,
    /// Bytes in one row of the first dimension; 0 if there are no rows.
    pub row: u64,
}

/// One tensor in a file, row-major.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Name, unique in its file except for parts of one tensor.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Elements along each dimension; empty for a scalar.
    pub shape: Box<[u64]>,
    /// Offset in the file of its first byte.
    pub start: u64,
    /// Offset in the file after its last byte.
    pub end: u64,
    /// Place in the whole tensor of the same name, if it is a part; none for a complete tensor.
    pub part: Option<TensorSlice>,
}

/// The place of a part in the whole tensor: a box of the part's own shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSlice {
    /// Elements of the whole tensor along each dimension.
    pub shape: Box<[u64]>,
    /// Offsets of the part along each dimension.
    pub offsets: Box<[u64]>,
}

/// Reason why a file that looks like a checkpoint is not parsed; it is then treated as plain bytes.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NotParsed {
    /// Its first bytes could not be read.
    #[error("its first bytes cannot be read")]
    Read(#[source] io::Error),
    /// It looks like safetensors.
    #[error("it looks like safetensors")]
    Safetensors(#[source] safetensors::ParseError),
    /// It looks like a torch file.
    #[error("it looks like a torch file")]
    Torch(#[source] torch::ParseError),
    /// No memory is left for its header.
    #[error("its header takes too much memory (--memory)")]
    Memory,
    /// A manifest cannot hold what it holds.
    #[error("a tensor's name of {name} bytes, or that of its type of {dtype}, is too long")]
    LongName {
        /// Bytes in its name.
        name: usize,
        /// Bytes in the name of its type.
        dtype: usize,
    },
}

/// Parses a file of `len` bytes, independent of its name. None if it is no checkpoint in a known format.
///
/// Reads what it needs and no more: the first bytes, then the header of a safetensors file, or the directory, the pickle and
/// the records' headers of a torch file.
///
/// Memory is reserved before it is taken: for the header, what is parsed from it, and the tensors.
///
/// # Errors
/// It looks like a checkpoint, but cannot be parsed.
pub fn parse_layout(read: ReadAt<'_>, len: u64, reserve: ReserveMemory<'_>) -> Result<Option<Layout>, NotParsed> {
    let mut first = [0; 16];
    let seen = usize::try_from(len).unwrap_or(usize::MAX).min(first.len());
    let first = first.get_mut(..seen).unwrap_or_default();
    read(0, first).map_err(NotParsed::Read)?;
    let layout = if let Some(header_len) = safetensors::header_len(first, len) {
        if !reserve(header_len.saturating_mul(HEADER_MEMORY)) {
            return Err(NotParsed::Memory);
        }
        let mut header = vec![0; usize::try_from(header_len).unwrap_or(usize::MAX)];
        read(0, &mut header).map_err(NotParsed::Read)?;
        safetensors::parse(&header, len).map_err(NotParsed::Safetensors)?
    } else if torch::may_be(first) {
        match torch::parse(&mut in_blocks(read, len), len, reserve) {
            Ok(layout) => layout,
            // Some other archive.
            Err(torch::ParseError::NotTorch) => return Ok(None),
            Err(error) => return Err(NotParsed::Torch(error)),
        }
    } else {
        return Ok(None);
    };
    let long = |tensor: &&Tensor| tensor.name.len() > TENSOR_NAME_MAX || tensor.dtype.word().len() > DTYPE_NAME_MAX;
    match layout.tensors.iter().find(long) {
        Some(tensor) => Err(NotParsed::LongName { name: tensor.name.len(), dtype: tensor.dtype.word().len() }),
        None => Ok(Some(layout)),
    }
}

/// Bytes of memory for one byte of a safetensors header, at most, while it is parsed. The shortest entry that lists a tensor has 51
/// bytes, and is a [`Tensor`] in two lists and an [`Elements`].
const HEADER_MEMORY: u64 = 10;

/// Bytes in a block of [`in_blocks`].
const BLOCK: u64 = 4096;
/// Blocks that are cached: the structures of a torch file are at its beginning and end.
const BLOCKS_KEPT: usize = 4;

/// Reads a file of `len` bytes through a small cache of blocks, because parsing a torch file needs many short reads.
fn in_blocks(read: ReadAt<'_>, len: u64) -> impl FnMut(u64, &mut [u8]) -> io::Result<()> + '_ {
    let mut kept: VecDeque<(u64, Vec<u8>)> = VecDeque::with_capacity(BLOCKS_KEPT);
    move |at, out| {
        let end = at.checked_add(out.len() as u64).filter(|&end| end <= len).ok_or(io::ErrorKind::UnexpectedEof)?;
        let start = at - at % BLOCK;
        if out.is_empty() || end - start > BLOCK {
            return read(at, out);
        }
        let place = match kept.iter().position(|(known, _)| *known == start) {
            Some(place) => place,
            None => {
                let mut block = if kept.len() == BLOCKS_KEPT { kept.pop_front() } else { None }.unwrap_or_default().1;
                block.resize(usize::try_from(BLOCK.min(len - start)).unwrap_or(usize::MAX), 0);
                read(start, &mut block)?;
                kept.push_back((start, block));
                kept.len() - 1
            }
        };
        let from = usize::try_from(at - start).unwrap_or(usize::MAX);
        let found = kept.get(place).and_then(|(_, block)| block.get(from..from + out.len()));
        out.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// Reads `bytes` as [`ReadAt`] wants it.
pub fn in_memory(bytes: &[u8]) -> impl FnMut(u64, &mut [u8]) -> io::Result<()> + '_ {
    |at, out| {
        let rest = usize::try_from(at).ok().and_then(|at| bytes.get(at..));
        let found = rest.and_then(|rest| rest.get(..out.len())).ok_or(io::ErrorKind::UnexpectedEof)?;
        out.copy_from_slice(found);
        Ok(())
    }
}

impl Layout {
    /// Creates it from `tensors`, and `others`: elements that no tensor covers. For overlapping tensors, the first one (the
    /// longest of those with the same start) determines the spans, then the next one that starts after its end.
    fn new(mut tensors: Vec<Tensor>, others: Vec<Elements>) -> Self {
        tensors.sort_unstable_by(|a, b| (a.start, a.end, &a.name).cmp(&(b.start, b.end, &b.name)));
        tensors.shrink_to_fit();
        let mut elements = others;
        elements.extend(tensors.iter().filter(|tensor| tensor.start < tensor.end).map(Tensor::elements));
        elements.sort_by_key(|one| (one.start, Reverse(one.end)));
        let mut end = 0;
        elements.retain(|one| {
            let apart = one.start >= end;
            end = if apart { one.end } else { end };
            apart
        });
        Self { tensors, elements }
    }

    /// Spans for the cutter.
    #[must_use]
    pub fn spans(&self) -> Vec<Span> {
        let span = |one: &Elements| {
            let element = one.dtype.whole_bytes().unwrap_or(0);
            Span { start: one.start, end: one.end, element, row: one.row }
        };
        self.elements.iter().map(span).collect()
    }

    /// Element type in `range` of the file; none unless all elements are complete and of one type.
    #[must_use]
    pub fn number_in(&self, range: &Range<u64>) -> Option<Element> {
        let from = self.elements.partition_point(|one| one.end <= range.start);
        let within = self.elements.iter().skip(from).take_while(|one| one.start < range.end);
        let (mut covered, mut number) = (range.start, None);
        for one in within {
            let found = one.dtype.number()?;
            let phase = one.start.abs_diff(range.start);
            let whole = phase.is_multiple_of(found.width().bytes() as u64);
            if one.start > covered || !whole || number.is_some_and(|number| number != found) {
                return None;
            }
            (covered, number) = (one.end, Some(found));
        }
        number.filter(|_| covered >= range.end)
    }
}

impl Tensor {
    fn elements(&self) -> Elements {
        let len = self.end - self.start;
        let row = match self.shape.first() {
            Some(&rows) if rows > 0 && len.is_multiple_of(rows) => len / rows,
            _ => 0,
        };
        Elements { start: self.start, end: self.end, dtype: self.dtype.clone(), row }
    }
}

#[cfg(test)]
mod golden;
#[cfg(test)]
mod tests;
