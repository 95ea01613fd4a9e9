//! Checkpoint formats: tensors, read from headers without executing anything.

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

/// The tensors of one file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// The tensors, sorted by where they start. Those of a torch file may overlap: several may be views of one storage.
    pub tensors: Vec<Tensor>,
    /// Ranges of elements, sorted, nothing twice: those of tensors, and elements that belong to no tensor here, such as those of
    /// a storage whose tensors are not row-major.
    pub elements: Vec<Elements>,
}

/// A stretch of a file that is elements of one type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Elements {
    /// Offset in the file of its first byte.
    pub start: u64,
    /// Offset in the file after its last byte.
    pub end: u64,
    /// Their type.
    pub dtype: Dtype,
    /// Bytes in one row of the first dimension; 0 where there are no rows.
    pub row: u64,
}

/// One tensor in a file, row-major.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its name: unique in its file, but for parts of one tensor.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Elements along each dimension; empty for a scalar.
    pub shape: Box<[u64]>,
    /// Offset in the file of its first byte.
    pub start: u64,
    /// Offset in the file after its last byte.
    pub end: u64,
    /// Of which tensor of the same name, kept in several files, it is a part; none where it is whole.
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

/// Why a file that looks like a checkpoint is not understood: it is then bytes like any other.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NotUnderstood {
    /// Its first bytes could not be read.
    #[error("its first bytes cannot be read")]
    Read(#[source] io::Error),
    /// It looks like safetensors.
    #[error("it looks like safetensors")]
    Safetensors(#[source] safetensors::ParseError),
    /// It looks like a torch file.
    #[error("it looks like a torch file")]
    Torch(#[source] torch::ParseError),
    /// A manifest cannot hold what it holds.
    #[error("a tensor's name of {name} bytes, or that of its type of {dtype}, is too long")]
    LongName {
        /// Bytes in its name.
        name: usize,
        /// Bytes in the name of its type.
        dtype: usize,
    },
}

/// Looks into a file of `len` bytes, whatever it is called. None if it is no checkpoint of a format that is read here.
///
/// Reads what it needs and no more: the first bytes, then the header of a safetensors file, or the directory, the pickle and
/// the records' headers of a torch file.
///
/// # Errors
/// It looks like a checkpoint and cannot be understood.
pub fn understand(read: ReadAt<'_>, len: u64) -> Result<Option<Layout>, NotUnderstood> {
    let mut first = [0; 16];
    let seen = usize::try_from(len).unwrap_or(usize::MAX).min(first.len());
    let first = first.get_mut(..seen).unwrap_or_default();
    read(0, first).map_err(NotUnderstood::Read)?;
    let layout = if let Some(header_len) = safetensors::header_len(first, len) {
        let mut header = vec![0; usize::try_from(header_len).unwrap_or(usize::MAX)];
        read(0, &mut header).map_err(NotUnderstood::Read)?;
        safetensors::parse(&header, len).map_err(NotUnderstood::Safetensors)?
    } else if torch::may_be(first) {
        match torch::parse(&mut in_blocks(read, len), len) {
            Ok(layout) => layout,
            // Some other archive.
            Err(torch::ParseError::NotTorch) => return Ok(None),
            Err(error) => return Err(NotUnderstood::Torch(error)),
        }
    } else {
        return Ok(None);
    };
    let long = |tensor: &&Tensor| tensor.name.len() > TENSOR_NAME_MAX || tensor.dtype.word().len() > DTYPE_NAME_MAX;
    match layout.tensors.iter().find(long) {
        Some(tensor) => Err(NotUnderstood::LongName { name: tensor.name.len(), dtype: tensor.dtype.word().len() }),
        None => Ok(Some(layout)),
    }
}

/// Bytes in a block of [`in_blocks`].
const BLOCK: u64 = 4096;
/// Blocks that are kept: the structures of a torch file stand at its beginning and its end.
const BLOCKS_KEPT: usize = 4;

/// Reads a file of `len` bytes through the blocks that were read last: a torch file is found out about by many short reads,
/// and a small one stands in one block.
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
    /// `tensors`, and `others`, which are elements that no tensor covers. Of tensors that overlap, the first and of those the
    /// longest says what its bytes are, then the next that starts after its end.
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

    /// Element type in `range` of the file; none unless all elements are of one type, and whole.
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
