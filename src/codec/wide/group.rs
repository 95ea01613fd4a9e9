//! Conversion of bytes to short codes, several in a byte, and back.

use super::kernel;

/// Fills `groups` with the `codes` of the bytes in `plane`, 2, 4 or 8 in a byte as `log` says, and `escaped` with the bytes whose
/// code is the last one; both with room for [`BLOCK`](super::BLOCK) bytes too many. Says how many bytes were coded and how many
/// of them escaped.
pub(in crate::codec) fn group(
    plane: &[u8],
    codes: &[u8; 256],
    log: u8,
    groups: &mut [u8],
    escaped: &mut [u8],
) -> Option<(usize, usize)> {
    kernel!(group(plane, codes, log, groups, escaped))
}

/// The reverse: fills `plane` with what the codes in `groups` stand for, the bytes of `frequent` or, one after another, the
/// `escaped` ones; `groups` and `escaped` as long as [`group`] wants them. Says how many bytes it filled and how many of them
/// escaped: if that is more than there are, what was filled is not what was coded.
pub(in crate::codec) fn expand(
    groups: &[u8],
    escaped: &[u8],
    frequent: &[u8],
    log: u8,
    plane: &mut [u8],
) -> Option<(usize, usize)> {
    kernel!(expand(groups, escaped, frequent, log, plane))
}

#[cfg(target_arch = "x86_64")]
mod kernel {
    use std::arch::x86_64::{
        __m512i, _mm512_and_si512, _mm512_castsi512_si128, _mm512_castsi512_si256, _mm512_cmpeq_epi8_mask,
        _mm512_cvtepu8_epi16, _mm512_cvtepu8_epi32, _mm512_cvtepu8_epi64, _mm512_mask_expand_epi8, _mm512_or_si512,
        _mm512_set1_epi8, _mm512_shuffle_epi8, _mm512_slli_epi16, _mm512_slli_epi32, _mm512_slli_epi64,
        _mm512_srli_epi16, _mm512_srli_epi32, _mm512_srli_epi64,
    };

    use crate::codec::wide::BLOCK;
    use crate::codec::wide::parts::{Table, keep, load, store};

    #[target_feature(enable = "avx512bw,avx512vbmi,avx512vbmi2,popcnt")]
    pub(super) fn group(
        plane: &[u8],
        codes: &[u8; 256],
        log: u8,
        groups: &mut [u8],
        escaped: &mut [u8],
    ) -> (usize, usize) {
        let escape = _mm512_set1_epi8(((1u8 << (8 >> log)) - 1).cast_signed());
        let table = Table::of(codes);
        let (mut at, mut out) = (0, 0);
        let blocks = plane.as_chunks::<BLOCK>().0;
        for block in blocks {
            let block = load(block);
            let codes = table.at(block);
            keep(_mm512_cmpeq_epi8_mask(codes, escape), block, escaped, &mut at);
            let (joined, whole) = join(codes, log);
            keep(whole, joined, groups, &mut out);
        }
        (blocks.len() * BLOCK, at)
    }

    #[target_feature(enable = "avx512bw,avx512vbmi2,popcnt")]
    pub(super) fn expand(groups: &[u8], escaped: &[u8], frequent: &[u8], log: u8, plane: &mut [u8]) -> (usize, usize) {
        let mut bytes = [0; BLOCK];
        // Each sixteen bytes of a register are looked up in sixteen of another.
        for (byte, at) in bytes.iter_mut().zip((0..16).cycle()) {
            *byte = frequent.get(at).copied().unwrap_or_default();
        }
        let (table, escape) = (load(&bytes), _mm512_set1_epi8(((1u8 << (8 >> log)) - 1).cast_signed()));
        let mut at = 0;
        let blocks = plane.as_chunks_mut::<BLOCK>().0;
        let filled = blocks.len() * BLOCK;
        for (block, groups) in blocks.iter_mut().zip((0..).step_by(BLOCK >> log).map(|from| groups.get(from..))) {
            let (Some(groups), Some(escaped)) = (groups.and_then(first), escaped.get(at..).and_then(first)) else {
                return (filled, usize::MAX);
            };
            let codes = part(load(groups), log);
            let holes = _mm512_cmpeq_epi8_mask(codes, escape);
            store(_mm512_mask_expand_epi8(_mm512_shuffle_epi8(table, codes), holes, load(escaped)), block);
            at += holes.count_ones() as usize;
        }
        (filled, at)
    }

    fn first(of: &[u8]) -> Option<&[u8; BLOCK]> {
        of.first_chunk()
    }

    /// The codes in the first groups, each in a byte of its own.
    #[inline]
    #[target_feature(enable = "avx512bw")]
    fn part(groups: __m512i, log: u8) -> __m512i {
        let mask = _mm512_set1_epi8(((1u8 << (8 >> log)) - 1).cast_signed());
        let two = |of| _mm512_or_si512(of, _mm512_slli_epi16::<4>(of));
        let spread = match log {
            1 => two(_mm512_cvtepu8_epi16(_mm512_castsi512_si256(groups))),
            2 => {
                let four = _mm512_cvtepu8_epi32(_mm512_castsi512_si128(groups));
                let pairs = _mm512_or_si512(four, _mm512_slli_epi32::<12>(four));
                _mm512_or_si512(pairs, _mm512_slli_epi16::<6>(pairs))
            }
            _ => {
                let eight = _mm512_cvtepu8_epi64(_mm512_castsi512_si128(groups));
                let fours = _mm512_or_si512(eight, _mm512_slli_epi64::<28>(eight));
                let pairs = _mm512_or_si512(fours, _mm512_slli_epi32::<14>(fours));
                _mm512_or_si512(pairs, _mm512_slli_epi16::<7>(pairs))
            }
        };
        _mm512_and_si512(spread, mask)
    }

    /// The codes of neighbours in one byte of them, and which byte that is.
    #[inline]
    #[target_feature(enable = "avx512bw")]
    fn join(codes: __m512i, log: u8) -> (__m512i, u64) {
        let pairs = |of| _mm512_or_si512(of, _mm512_srli_epi16::<4>(of));
        let fours = |of| _mm512_or_si512(of, _mm512_srli_epi16::<6>(of));
        match log {
            1 => (pairs(codes), 0x5555_5555_5555_5555),
            2 => {
                let pairs = fours(codes);
                (_mm512_or_si512(pairs, _mm512_srli_epi32::<12>(pairs)), 0x1111_1111_1111_1111)
            }
            _ => {
                let pairs = _mm512_or_si512(codes, _mm512_srli_epi16::<7>(codes));
                let fours = _mm512_or_si512(pairs, _mm512_srli_epi32::<14>(pairs));
                (_mm512_or_si512(fours, _mm512_srli_epi64::<28>(fours)), 0x0101_0101_0101_0101)
            }
        }
    }
}
