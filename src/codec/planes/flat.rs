//! Bytes stored one by one: as they are, as one that stands for all, or Huffman-coded.

use super::GAIN;
use crate::codec::huffman;

/// Encodings of plain bytes. The numbers are part of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Flat {
    /// As they are.
    Raw = 0,
    /// One byte, of which there are as many as wanted.
    One = 1,
    /// By [`huffman`].
    Huffman = 2,
}

impl Flat {
    /// The way that a stored byte stands for.
    pub(super) fn of(byte: u8) -> Option<Self> {
        [Self::Raw, Self::One, Self::Huffman].into_iter().find(|how| *how as u8 == byte)
    }

    /// About how many bytes [`Flat::encode`] will append for `len` bytes that occur as often as `counts` says.
    pub(super) fn len(counts: &[u32; 256], len: usize) -> usize {
        match huffman::Code::of(counts) {
            None => len.min(1),
            Some(code) => huffman::coded_len(&code, counts).min(len),
        }
    }

    /// Appends `bytes`, which occur as often as `counts` says, in the shortest way that pays.
    pub(super) fn encode(bytes: &[u8], counts: &[u32; 256], out: &mut Vec<u8>) -> Self {
        let code = huffman::Code::of(counts);
        match (code, bytes) {
            (None, [first, ..]) => {
                out.push(*first);
                Self::One
            }
            (Some(code), _) if huffman::coded_len(&code, counts) < bytes.len() - bytes.len() / GAIN => {
                huffman::encode(&code, bytes, counts, out);
                Self::Huffman
            }
            _ => {
                out.extend_from_slice(bytes);
                Self::Raw
            }
        }
    }

    /// Decodes `stored` to as many bytes as `out` has; none if it is not that.
    pub(super) fn decode(self, stored: &[u8], out: &mut [u8]) -> Option<()> {
        match self {
            Self::Raw => (stored.len() == out.len()).then(|| out.copy_from_slice(stored)),
            Self::One => {
                let &[byte] = stored else { return None };
                out.fill(byte);
                Some(())
            }
            Self::Huffman => huffman::decode(stored, out),
        }
    }
}
