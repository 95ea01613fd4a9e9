//! Bytes to codes.

use super::{Code, HEADER_LEN, STREAMS};
use crate::codec::wide;

/// Symbols between two writes: as many as fit the accumulator besides the bits that a write leaves.
const BATCH: usize = 5;
/// Bytes of one write.
const WORD: usize = 8;

/// Bytes of [`encode`]'s output for symbols with these counts, up to one byte per stream.
pub(in crate::codec) fn coded_len(code: &Code, counts: &[u32; 256]) -> usize {
    usize::try_from(code.bits(counts).div_ceil(8)).unwrap_or(usize::MAX).saturating_add(HEADER_LEN)
}

/// Appends the codes of `symbols`, which have these `counts`, and must each have a code.
pub(in crate::codec) fn encode(code: &Code, symbols: &[u8], counts: &[u32; 256], out: &mut Vec<u8>) {
    let codes = Codes::of(code);
    let header = out.len();
    out.extend_from_slice(&code.to_bytes());
    // Reserves space for the surplus bytes of the last write.
    out.resize(header + coded_len(code, counts) + STREAMS + WORD, 0);
    let part = symbols.len().div_ceil(STREAMS).max(1);
    let mut parts = symbols.chunks(part);
    let mut len = 0;
    for stream in 0..STREAMS {
        let (head, streams) = out[header..].split_at_mut(HEADER_LEN);
        let mut stream_of = Stream { out: &mut streams[len..], at: 0, acc: 0, bits: 0 };
        stream_of.append(&codes, parts.next().unwrap_or_default());
        len += stream_of.end();
        if stream + 1 < STREAMS {
            let at = HEADER_LEN - 4 * (STREAMS - 1 - stream);
            head[at..at + 4].copy_from_slice(&u32::try_from(len).unwrap_or(u32::MAX).to_le_bytes());
        }
    }
    out.truncate(header + HEADER_LEN + len);
}

/// The code of each symbol: its bits and their number.
#[derive(Debug)]
pub(in crate::codec) struct Codes {
    /// The number in the lowest byte, the bits above it.
    whole: [u32; 256],
    /// The same for [`wide`]: the lower and the upper byte of the bits, and their number.
    pub(in crate::codec) bytes: [[u8; 256]; 3],
}

impl Codes {
    fn of(code: &Code) -> Self {
        let mut codes = Self { whole: [0; 256], bytes: [[0; 256]; 3] };
        for (symbol, bits, length) in code.codes() {
            let whole = bits << 8 | length;
            let [length, low, high, _] = whole.to_le_bytes();
            codes.whole[usize::from(symbol)] = whole;
            codes.bytes.iter_mut().zip([low, high, length]).for_each(|(to, byte)| to[usize::from(symbol)] = byte);
        }
        codes
    }
}

/// Writer of a stream.
#[derive(Debug)]
pub(in crate::codec) struct Stream<'a> {
    out: &'a mut [u8],
    at: usize,
    /// Bits that are not written yet: less than eight.
    acc: u64,
    bits: u64,
}

impl Stream<'_> {
    /// Maximum bits of one push.
    pub(in crate::codec) const PUSHED: u64 = 56;

    /// Appends the lowest `bits` bits of `codes`; those above are zero.
    #[inline]
    pub(in crate::codec) fn push(&mut self, codes: u64, bits: u64) {
        self.acc |= codes << self.bits;
        self.bits += bits;
        if let Some(out) = self.out.get_mut(self.at..).and_then(<[u8]>::first_chunk_mut::<WORD>) {
            *out = self.acc.to_le_bytes();
        }
        self.at += usize::try_from(self.bits >> 3).unwrap_or(0);
        self.acc >>= self.bits & !7;
        self.bits &= 7;
    }

    fn append(&mut self, codes: &Codes, symbols: &[u8]) {
        let done = wide::append(self, codes, symbols).unwrap_or(0);
        self.append_scalar(codes, &symbols[done..]);
    }

    fn append_scalar(&mut self, codes: &Codes, symbols: &[u8]) {
        let (batches, rest) = symbols.as_chunks::<BATCH>();
        batches.iter().for_each(|batch| self.push_some(codes, batch));
        self.push_some(codes, rest);
    }

    #[inline]
    fn push_some(&mut self, codes: &Codes, symbols: &[u8]) {
        let (mut all, mut bits) = (0, 0);
        for &symbol in symbols {
            let code = codes.whole[usize::from(symbol)];
            all |= u64::from(code >> 8) << bits;
            bits += u64::from(code & 0xFF);
        }
        self.push(all, bits);
    }

    /// End of the range.
    fn end(self) -> usize {
        self.at + usize::from(self.bits > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Codes that are joined and codes that are pushed a few at a time make the same stream.
        #[test]
        fn twins_agree(bytes in proptest::collection::vec(any::<u8>(), 0..2000), deepest in 1u8..12) {
            let mut counts = [0; 256];
            (0..deepest).for_each(|symbol| counts[usize::from(symbol)] = 1 << (deepest - symbol));
            counts[255] = 1;
            let codes = Codes::of(&Code::of(&counts).unwrap());
            // All as frequent, so that long codes stand together, too.
            let symbols: Vec<u8> = bytes.iter().map(|&byte| byte % deepest).collect();
            let buffer = || vec![0; symbols.len() * 2 + WORD];
            let (mut joined, mut pushed) = (buffer(), buffer());
            let mut stream = Stream { out: &mut joined, at: 0, acc: 0, bits: 0 };
            stream.append(&codes, &symbols);
            let len = stream.end();
            let mut stream = Stream { out: &mut pushed, at: 0, acc: 0, bits: 0 };
            stream.append_scalar(&codes, &symbols);
            prop_assert_eq!(stream.end(), len);
            prop_assert_eq!(&joined[..len], &pushed[..len]);
        }
    }
}
