//! What checkpoint files hold: their tensors, read from their headers without executing anything.

use std::ops::Range;

use crate::chunker::Span;
use crate::codec::Element;

mod dtype;
pub mod safetensors;

pub use dtype::Dtype;

/// The tensors of one file, sorted by where they start; they do not overlap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Bytes before the tensors' own.
    pub header_len: u64,
    /// The tensors. Several may start at the same offset only if all but the last of them are empty.
    pub tensors: Vec<Tensor>,
}

/// One tensor in a file, row-major.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its name: unique in its file.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Elements along each dimension; empty for a scalar.
    pub shape: Box<[u64]>,
    /// Offset in the file of its first byte.
    pub start: u64,
    /// Offset in the file after its last byte.
    pub end: u64,
}

impl Layout {
    /// What the cutter needs to know: a span for each tensor that is not empty.
    #[must_use]
    pub fn spans(&self) -> Vec<Span> {
        self.tensors.iter().filter(|tensor| tensor.start < tensor.end).map(Tensor::span).collect()
    }

    /// What numbers fill `range` of the file; none unless they are all of one kind, and whole.
    #[must_use]
    pub fn number_in(&self, range: &Range<u64>) -> Option<Element> {
        let from = self.tensors.partition_point(|tensor| tensor.end <= range.start);
        let within = self.tensors.iter().skip(from).take_while(|tensor| tensor.start < range.end);
        let (mut covered, mut number) = (range.start, None);
        for tensor in within.filter(|tensor| tensor.start < tensor.end) {
            let found = tensor.dtype.number()?;
            let phase = tensor.start.abs_diff(range.start);
            let whole = phase.is_multiple_of(found.width().bytes() as u64);
            if tensor.start > covered || !whole || number.is_some_and(|number| number != found) {
                return None;
            }
            (covered, number) = (tensor.end, Some(found));
        }
        number.filter(|_| covered >= range.end)
    }
}

impl Tensor {
    fn span(&self) -> Span {
        let len = self.end - self.start;
        let row = match self.shape.first() {
            Some(&rows) if rows > 0 && len.is_multiple_of(rows) => len / rows,
            _ => 0,
        };
        Span { start: self.start, end: self.end, element: self.dtype.whole_bytes().unwrap_or(0), row }
    }
}

#[cfg(test)]
mod tests;
