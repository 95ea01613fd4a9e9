//! Kernels for AVX-512, which process 64 bytes at a time. Each returns none if the CPU lacks these instructions; its caller,
//! which has the scalar version, then uses that.
//!
//! All need the same features, those of AMD's Zen 4 and Intel's Ice Lake or newer.

#![expect(unsafe_code, reason = "a function compiled for AVX-512 may only be called where there is AVX-512")]

mod count;
mod group;
mod join;
mod sort;

pub(super) use self::count::{COMMON, counts};
pub(super) use self::group::{expand, group};
pub(super) use self::join::append;
pub(super) use self::sort::{lens, sort, unsort};

/// Bytes in a register.
pub(super) const BLOCK: usize = 64;

/// Calls a kernel of the module `kernel`, if the CPU has the features that all of them need.
macro_rules! kernel {
    ($name:ident($($argument:expr),*)) => {{
        #[cfg(target_arch = "x86_64")]
        if $crate::codec::wide::is_there() {
            // SAFETY: the processor has all that kernels ask for.
            return Some(unsafe { kernel::$name($($argument),*) });
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = ($($argument),*);
        None
    }};
}
use kernel;

/// True if the processor has the instructions that the kernels need.
#[cfg(target_arch = "x86_64")]
fn is_there() -> bool {
    is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vbmi")
        && is_x86_feature_detected!("avx512vbmi2")
        && is_x86_feature_detected!("bmi2")
        && is_x86_feature_detected!("popcnt")
}

/// Building blocks of kernels.
#[cfg(target_arch = "x86_64")]
mod parts {
    use std::arch::x86_64::{
        __m512i, _mm512_loadu_si512, _mm512_mask_blend_epi8, _mm512_maskz_compress_epi8, _mm512_movepi8_mask,
        _mm512_permutex2var_epi8, _mm512_storeu_si512,
    };

    use super::BLOCK;

    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn load(from: &[u8; BLOCK]) -> __m512i {
        // SAFETY: there are 64 bytes, and they may lie anywhere.
        unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn store(bytes: __m512i, to: &mut [u8; BLOCK]) {
        // SAFETY: there is room for 64 bytes, and it may lie anywhere.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), bytes) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn words(of: __m512i) -> [u64; BLOCK / 8] {
        let mut words = [0; BLOCK / 8];
        // SAFETY: there is room for 64 bytes, and it may lie anywhere.
        unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), of) }
        words
    }

    /// Writes the bytes with a bit in `members`, and arbitrary bytes after them, to `to` from `at` on, if there is space for all
    /// 64; moves `at` after the members.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512vbmi2,popcnt")]
    pub(super) fn keep(members: u64, bytes: __m512i, to: &mut [u8], at: &mut usize) {
        if let Some(to) = to.get_mut(*at..).and_then(<[u8]>::first_chunk_mut) {
            // Compresses in a register first: directly to memory, it takes many times as long on Zen 4.
            // https://uops.info/html-instr/VPCOMPRESSB_M512_K_ZMM.html
            store(_mm512_maskz_compress_epi8(members, bytes), to);
        }
        *at += members.count_ones() as usize;
    }

    /// Table of 256 bytes, looked up by byte.
    pub(super) struct Table([__m512i; 4]);

    impl Table {
        #[inline]
        #[target_feature(enable = "avx512f")]
        pub(super) fn of(bytes: &[u8; 256]) -> Self {
            let (quarters, _) = bytes.as_chunks::<BLOCK>();
            Self([load(&quarters[0]), load(&quarters[1]), load(&quarters[2]), load(&quarters[3])])
        }

        #[inline]
        #[target_feature(enable = "avx512bw,avx512vbmi")]
        pub(super) fn at(&self, bytes: __m512i) -> __m512i {
            let [a, b, c, d] = self.0;
            let (lower, upper) = (_mm512_permutex2var_epi8(a, bytes, b), _mm512_permutex2var_epi8(c, bytes, d));
            _mm512_mask_blend_epi8(_mm512_movepi8_mask(bytes), lower, upper)
        }
    }
}
