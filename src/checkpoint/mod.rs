//! What checkpoint files hold: their tensors, read from their headers without executing anything.

use crate::chunker::Span;

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
