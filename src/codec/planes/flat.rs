//! Bytes stored individually: raw, as a single repeated byte, or Huffman-coded.

use super::GAIN;
use crate::codec::huffman;

/// Encodings of plain bytes. The numbers are part of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Flat {
    /// Raw.
    Raw = 0,
    /// One repeated byte.
    One = 1,
    /// Coded by [`huffman`].
    Huffman = 2,
}

impl Flat {
    /// Encoding of a stored byte.
    pub(super) fn of(byte: u8) -> Option<Self> {
        [Self::Raw, Self::One, Self::Huffman].into_iter().find(|how| *how as u8 == byte)
    }

    /// Approximate bytes that [`Flat::encode`] appends for `len` bytes with these counts.
    pub(super) fn len(counts: &[u32; 256], len: usize) -> usize {
        match huffman::Code::of(counts) {
            None => len.min(1),
            Some(code) => huffman::coded_len(&code, counts).min(len),
        }
    }

    /// Appends `bytes`, with these counts, in the shortest worthwhile encoding.
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

    /// Decodes `stored` to fill `out`; none if it is invalid.
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
