//! Byte counts for planes with few dominant values, which are counted by comparison; the others one by one.

use super::kernel;

/// Maximum number of dominant values.
pub(in crate::codec) const COMMON: usize = 8;

/// Adds to `counts` how often each byte of `plane` occurs, save for a rest; `common` are bytes to be expected, the most
/// frequent first. Says how many were counted.
pub(in crate::codec) fn counts(plane: &[u8], common: &[u8], counts: &mut [u32; 256]) -> Option<usize> {
    kernel!(counts(plane, common, counts))
}

#[cfg(target_arch = "x86_64")]
mod kernel {
    use std::arch::x86_64::{
        __m512i, _mm512_cmpeq_epi8_mask, _mm512_mask_add_epi8, _mm512_reduce_add_epi64, _mm512_sad_epu8,
        _mm512_set1_epi8, _mm512_setzero_si512,
    };

    use crate::codec::wide::BLOCK;
    use crate::codec::wide::parts::{keep, load};

    /// Blocks after which a sum of ones may overflow a byte.
    const BLOCKS: usize = 255;

    #[target_feature(enable = "avx512bw,avx512vbmi2,popcnt")]
    pub(super) fn counts(plane: &[u8], common: &[u8], counts: &mut [u32; 256]) -> usize {
        match *common {
            [a] => count([a], plane, counts),
            [a, b] => count([a, b], plane, counts),
            [a, b, c, d] => count([a, b, c, d], plane, counts),
            [a, b, c, d, e, f, g, h] => count([a, b, c, d, e, f, g, h], plane, counts),
            _ => 0,
        }
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512vbmi2,popcnt")]
    fn count<const N: usize>(common: [u8; N], plane: &[u8], counts: &mut [u32; 256]) -> usize {
        let blocks = plane.as_chunks::<BLOCK>().0;
        let mut others = [0; (BLOCKS + 1) * BLOCK];
        let mut tables = [[0u32; 256]; 4];
        for blocks in blocks.chunks(BLOCKS) {
            let mut sums = [_mm512_setzero_si512(); N];
            let mut at = 0;
            for block in blocks {
                let block = load(block);
                let mut other = u64::MAX;
                for (byte, sum) in common.iter().zip(&mut sums) {
                    let equal = _mm512_cmpeq_epi8_mask(block, _mm512_set1_epi8(byte.cast_signed()));
                    *sum = _mm512_mask_add_epi8(*sum, equal, *sum, _mm512_set1_epi8(1));
                    other &= !equal;
                }
                keep(other, block, &mut others, &mut at);
            }
            for (byte, sum) in common.iter().zip(sums) {
                counts[usize::from(*byte)] += total(sum);
            }
            for some in others[..at].chunks(4) {
                for (byte, table) in some.iter().zip(&mut tables) {
                    table[usize::from(*byte)] += 1;
                }
            }
        }
        for table in tables {
            counts.iter_mut().zip(table).for_each(|(count, more)| *count += more);
        }
        blocks.len() * BLOCK
    }

    #[inline]
    #[target_feature(enable = "avx512bw")]
    fn total(sum: __m512i) -> u32 {
        u32::try_from(_mm512_reduce_add_epi64(_mm512_sad_epu8(sum, _mm512_setzero_si512()))).unwrap_or(0)
    }
}
