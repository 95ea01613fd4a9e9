//! Huffman coding of bytes, made for the exponent planes of floats: short codes, four streams, several symbols a lookup.
//!
//! ```text
//! lengths: 128 bytes, two symbols each (the even one in the low half): bits of the symbol's code, 0 if it does not occur
//! ends:    3 x u32 (little-endian): where the first three streams end, counted from the first one's start
//! streams: 4; stream i holds the symbols from i * ceil(n / 4) on
//! ```
//!
//! Codes are canonical (shorter first, then by symbol), at most [`BITS_MAX`] bits long, and complete. A stream holds them one
//! after another, the first bit of a code in the lowest free bit; what is left of the last byte is zero.

mod code;
mod decode;
mod encode;
mod lanes;

pub(super) use decode::decode;
pub(super) use encode::{Codes, Stream, coded_len, encode};

pub(super) use code::Code;

/// Bits in a code, at most: a table of all windows of this many bits stays in the first-level cache.
const BITS_MAX: u32 = 11;
/// Streams, so that a processor can decode as many at once.
const STREAMS: usize = 4;
/// Bytes of the lengths.
const LENGTHS_LEN: usize = 128;
/// Bytes before the streams.
const HEADER_LEN: usize = LENGTHS_LEN + 4 * (STREAMS - 1);

#[cfg(test)]
mod tests;
