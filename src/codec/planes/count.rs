//! Byte counts.

use crate::codec::wide;

/// Minimum bytes for a sample of their distribution.
const LOOKED_AT_FROM: usize = 8 << 10;
/// Bytes in the sample, and its number of places.
const PLACES: usize = 8;
const PLACE: usize = 64;

/// Occurrences of each byte in `plane`.
pub(super) fn counts(plane: &[u8]) -> [u32; 256] {
    let mut counts = [0; 256];
    let done = match common(plane).as_slice() {
        [] => None,
        common => wide::counts(plane, common, &mut counts),
    };
    one_by_one(&plane[done.unwrap_or(0)..], &mut counts);
    counts
}

/// Frequent bytes of `plane` for [`wide::counts`] to compare with: 1, 2, 4 or 8; or none.
fn common(plane: &[u8]) -> Vec<u8> {
    let mut seen = [0u32; 256];
    let sampled = plane.len() / PLACES;
    if plane.len() < LOOKED_AT_FROM {
        return Vec::new();
    }
    for place in plane.chunks_exact(sampled) {
        one_by_one(&place[..PLACE], &mut seen);
    }
    let mut bytes: Vec<u8> = (0..=u8::MAX).filter(|&byte| seen[usize::from(byte)] > 0).collect();
    bytes.sort_unstable_by_key(|&byte| std::cmp::Reverse(seen[usize::from(byte)]));
    // Measured cycles per block of 64 bytes: one for each byte that is counted alone, some for each one compared with.
    let cost = |number: usize| {
        let found: u32 = bytes.iter().take(number).map(|&byte| seen[usize::from(byte)]).sum();
        let others = 1.0 - f64::from(found) / (PLACES * PLACE) as f64;
        if number == 0 { 64.0 } else { 10.0 + 1.5 * number as f64 + 64.0 * others }
    };
    let numbers = [0, 1, 2, 4, wide::COMMON].into_iter().filter(|&number| number <= bytes.len());
    let number = numbers.min_by(|&one, &other| cost(one).total_cmp(&cost(other))).unwrap_or(0);
    bytes.truncate(number);
    bytes
}

/// Counts all bytes one by one, in eight tables, so that equal neighbours do not wait for each other.
fn one_by_one(plane: &[u8], counts: &mut [u32; 256]) {
    let mut tables = [[0u32; 256]; 8];
    let (words, rest) = plane.as_chunks::<8>();
    for word in words {
        for (table, &byte) in tables.iter_mut().zip(word) {
            table[usize::from(byte)] += 1;
        }
    }
    rest.iter().for_each(|&byte| counts[usize::from(byte)] += 1);
    for table in tables {
        counts.iter_mut().zip(table).for_each(|(sum, count)| *sum += count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever is expected of a plane, its bytes are all counted.
        #[test]
        fn every_byte_is_counted(len in 0usize..40_000, seed in any::<u64>(), skew in 0u32..12) {
            let mut state = seed;
            let mut random = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 32) as u32
            };
            // From all bytes alike to nearly all one.
            let plane: Vec<u8> = (0..len).map(|_| (random() >> 24 >> (random() % (skew + 1))) as u8).collect();
            let mut wanted = [0u32; 256];
            plane.iter().for_each(|&byte| wanted[usize::from(byte)] += 1);
            prop_assert_eq!(counts(&plane), wanted);
            for number in [1, 2, 4, wide::COMMON] {
                let expected: Vec<u8> = (0..=u8::MAX).take(number).collect();
                let mut seen = [0; 256];
                if let Some(done) = wide::counts(&plane, &expected, &mut seen) {
                    one_by_one(&plane[done..], &mut seen);
                    prop_assert_eq!(seen, wanted);
                }
            }
        }
    }
}
