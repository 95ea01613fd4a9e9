//! Where a file is cut into chunks: at tensor pieces, at content boundaries, or at fixed lengths.
//!
//! All three are pure and deterministic: the same bytes (or the same spans) give the same cuts on every machine, whatever
//! the number of threads. A cut is the offset of a chunk's end; the cuts of a file increase strictly and the last one is
//! the file's length, so an empty file has none. What is said here is part of the format in one sense only: a writer that
//! cuts otherwise makes a valid repository that shares less.

use std::fmt;

pub mod content;
pub mod fixed;
pub mod tensor;

pub use tensor::Span;

/// Cutting of a file: recorded for each file in its manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Cut {
    /// At tensor starts and ends, and pieces of an equal number of elements between them: [`tensor`].
    Tensor = 1,
    /// At boundaries that the content itself chooses: [`content`].
    Content = 2,
    /// In pieces of equal length: [`fixed`].
    Fixed = 3,
}

impl Cut {
    /// Every way to cut, in the order of their bytes.
    pub const ALL: [Self; 3] = [Self::Tensor, Self::Content, Self::Fixed];

    /// The way that a manifest's byte stands for; none for a byte of a later version.
    #[must_use]
    pub const fn from_u8(byte: u8) -> Option<Self> {
        match byte {
            1 => Some(Self::Tensor),
            2 => Some(Self::Content),
            3 => Some(Self::Fixed),
            _ => None,
        }
    }

    /// The byte in a manifest.
    #[must_use]
    pub const fn to_u8(self) -> u8 {
        self as u8
    }

    /// The word on the command line and in JSON.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Tensor => "tensor",
            Self::Content => "content",
            Self::Fixed => "fixed",
        }
    }

    /// The way that goes by this word.
    #[must_use]
    pub fn from_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|cut| cut.word() == word)
    }
}

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.word())
    }
}

#[cfg(test)]
mod tests;
