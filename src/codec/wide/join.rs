//! Joins Huffman codes to longer ones, so that the writing loop has fewer to write.

use super::kernel;
use crate::codec::huffman::{Codes, Stream};

/// Appends the codes of as many first `symbols` as can be joined; returns their number.
pub(in crate::codec) fn append(stream: &mut Stream<'_>, codes: &Codes, symbols: &[u8]) -> Option<usize> {
    kernel!(append(stream, codes, symbols))
}

#[cfg(target_arch = "x86_64")]
mod kernel {
    use std::arch::x86_64::{
        _mm512_add_epi16, _mm512_add_epi32, _mm512_add_epi64, _mm512_and_si512, _mm512_andnot_si512,
        _mm512_cmpgt_epu64_mask, _mm512_or_si512, _mm512_set1_epi16, _mm512_set1_epi32, _mm512_set1_epi64,
        _mm512_slli_epi16, _mm512_sllv_epi32, _mm512_sllv_epi64, _mm512_srli_epi16, _mm512_srli_epi32,
        _mm512_srli_epi64,
    };

    use crate::codec::huffman::{Codes, Stream};
    use crate::codec::wide::BLOCK;
    use crate::codec::wide::parts::{Table, load, words};

    /// Joins two neighbours to one of 22 bits, two of those to one of 44 bits, and two of those if they are short.
    #[target_feature(enable = "avx512bw,avx512vbmi,bmi2")]
    pub(super) fn append(stream: &mut Stream<'_>, codes: &Codes, symbols: &[u8]) -> usize {
        let [low, high, lengths] = &codes.bytes;
        let (low, high, lengths) = (Table::of(low), Table::of(high), Table::of(lengths));
        let byte = _mm512_set1_epi16(0xFF);
        let half = _mm512_set1_epi32(0xFFFF);
        let word = _mm512_set1_epi64(0xFFFF_FFFF);
        let blocks = symbols.as_chunks::<BLOCK>().0;
        for block in blocks {
            let symbols = load(block);
            let (low, high, lengths) = (low.at(symbols), high.at(symbols), lengths.at(symbols));
            // In 16 bits, the first and the second of two.
            let first = _mm512_or_si512(_mm512_and_si512(low, byte), _mm512_slli_epi16::<8>(high));
            let second = _mm512_or_si512(_mm512_srli_epi16::<8>(low), _mm512_andnot_si512(byte, high));
            let shift = _mm512_and_si512(lengths, byte);
            let bits = _mm512_add_epi16(shift, _mm512_srli_epi16::<8>(lengths));
            // In 32 bits, the first and the second two of four.
            let join = |first, second, shift| _mm512_or_si512(first, _mm512_sllv_epi32(second, shift));
            let lower = |of| _mm512_and_si512(of, half);
            let upper = |of| _mm512_srli_epi32::<16>(of);
            let one = join(lower(first), lower(second), lower(shift));
            let two = join(upper(first), upper(second), upper(shift));
            let (shift, bits) = (lower(bits), _mm512_add_epi32(lower(bits), upper(bits)));
            // In 64 bits, the first and the second four of eight.
            let join = |first, second, shift| _mm512_or_si512(first, _mm512_sllv_epi64(second, shift));
            let lower = |of| _mm512_and_si512(of, word);
            let upper = |of| _mm512_srli_epi64::<32>(of);
            let (one, two) = (join(lower(one), lower(two), lower(shift)), join(upper(one), upper(two), upper(shift)));
            let (shift, bits) = (lower(bits), _mm512_add_epi64(lower(bits), upper(bits)));
            if _mm512_cmpgt_epu64_mask(bits, _mm512_set1_epi64(Stream::PUSHED.cast_signed())) == 0 {
                for (codes, bits) in words(join(one, two, shift)).into_iter().zip(words(bits)) {
                    stream.push(codes, bits);
                }
            } else {
                let (one, two, shift, bits) = (words(one), words(two), words(shift), words(bits));
                for ((one, two), (shift, bits)) in one.into_iter().zip(two).zip(shift.into_iter().zip(bits)) {
                    stream.push(one, shift);
                    stream.push(two, bits - shift);
                }
            }
        }
        blocks.len() * BLOCK
    }
}
