//! Sorts a plane by the classes of its numbers, with the compress instruction, and reverses that with expand.

use super::kernel;

/// Moves the bytes of `plane` to the position `at` of their class; `of` are the classes. Up to [`BLOCK`](super::BLOCK) surplus
/// bytes are written after each class, if `sorted` has space for them. Returns the number of bytes moved, and advances `at`.
pub(in crate::codec) fn sort<const N: usize>(
    plane: &[u8],
    of: &[u8],
    at: &mut [usize; N],
    sorted: &mut [u8],
) -> Option<usize> {
    kernel!(sort(plane, of, at, sorted))
}

/// Reverses the sort.
pub(in crate::codec) fn unsort<const N: usize>(
    sorted: &[u8],
    of: &[u8],
    at: &mut [usize; N],
    plane: &mut [u8],
) -> Option<usize> {
    kernel!(unsort(sorted, of, at, plane))
}

/// Adds to `lens` how many of `of` are each class, save for a rest, and says how many were counted.
pub(in crate::codec) fn lens<const N: usize>(of: &[u8], lens: &mut [usize; N]) -> Option<usize> {
    kernel!(lens(of, lens))
}

#[cfg(target_arch = "x86_64")]
mod kernel {
    use std::arch::x86_64::{
        __m512i, _mm512_cmpeq_epi8_mask, _mm512_mask_expand_epi8, _mm512_set1_epi8, _mm512_setzero_si512,
    };

    use crate::codec::wide::BLOCK;
    use crate::codec::wide::parts::{keep, load, store};

    #[inline]
    #[target_feature(enable = "avx512bw")]
    fn members(of: __m512i, class: i8) -> u64 {
        _mm512_cmpeq_epi8_mask(of, _mm512_set1_epi8(class))
    }

    #[target_feature(enable = "avx512bw,popcnt")]
    pub(super) fn lens<const N: usize>(of: &[u8], lens: &mut [usize; N]) -> usize {
        let blocks = of.as_chunks().0;
        for block in blocks {
            let of = load(block);
            for (class, len) in (0..).zip(&mut *lens) {
                *len += members(of, class).count_ones() as usize;
            }
        }
        blocks.len() * BLOCK
    }

    #[target_feature(enable = "avx512bw,avx512vbmi2,popcnt")]
    pub(super) fn sort<const N: usize>(plane: &[u8], of: &[u8], at: &mut [usize; N], sorted: &mut [u8]) -> usize {
        let blocks = plane.as_chunks::<BLOCK>().0;
        for (block, of) in blocks.iter().zip(of.as_chunks().0) {
            let (block, of) = (load(block), load(of));
            for (class, at) in (0..).zip(&mut *at) {
                keep(members(of, class), block, sorted, at);
            }
        }
        blocks.len() * BLOCK
    }

    #[target_feature(enable = "avx512bw,avx512vbmi2,popcnt")]
    pub(super) fn unsort<const N: usize>(sorted: &[u8], of: &[u8], at: &mut [usize; N], plane: &mut [u8]) -> usize {
        let blocks = plane.as_chunks_mut::<BLOCK>().0;
        let done = blocks.len() * BLOCK;
        for (block, of) in blocks.iter_mut().zip(of.as_chunks().0) {
            let of = load(of);
            let mut found = _mm512_setzero_si512();
            for (class, at) in (0..).zip(&mut *at) {
                let members = members(of, class);
                if let Some(from) = sorted.get(*at..).and_then(<[u8]>::first_chunk) {
                    found = _mm512_mask_expand_epi8(found, members, load(from));
                }
                *at += members.count_ones() as usize;
            }
            store(found, block);
        }
        done
    }
}
