//! Promises of all three chunkers, and their names.

use proptest::prelude::*;

use super::*;
use crate::limits::MIB;

mod content;
mod tensor;

/// Pseudo-random bytes that are the same on every machine: BLAKE3's output stream.
fn random(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

/// Fails unless `cuts` increase strictly, end at `len`, and leave no chunk above `max`.
fn assert_covers(cuts: &[u64], len: u64, max: u64) {
    let mut at = 0;
    for &cut in cuts {
        assert!(cut > at && cut - at <= max, "chunk {at}..{cut} of {len} bytes");
        at = cut;
    }
    assert_eq!(at, len);
}

#[test]
fn a_cut_survives_its_byte_and_its_word() {
    for cut in Cut::ALL {
        assert_eq!(Cut::from_u8(cut.to_u8()), Some(cut));
        assert_eq!(Cut::from_word(&cut.to_string()), Some(cut));
    }
    assert_eq!(Cut::from_u8(0), None);
    assert_eq!(Cut::from_u8(4), None);
    assert_eq!(Cut::from_word("Tensor"), None);
}

#[test]
fn fixed_pieces_are_equal_but_for_the_last() {
    assert_eq!(fixed::cuts(0).count(), 0);
    for from in [0, 1, MIB - 1, MIB, MIB + 1, 2 * MIB, 2 * MIB + 7] {
        let after: Vec<u64> = fixed::cuts(2 * MIB + 7).filter(|&end| end > from).collect();
        assert_eq!(fixed::cuts_after(2 * MIB + 7, from).collect::<Vec<_>>(), after, "{from}");
    }
    assert_eq!(fixed::cuts_after(u64::MAX, u64::MAX - 1).collect::<Vec<_>>(), [u64::MAX]);
    assert_eq!(fixed::cuts(1).collect::<Vec<_>>(), [1]);
    assert_eq!(fixed::cuts(2 * MIB).collect::<Vec<_>>(), [MIB, 2 * MIB]);
    assert_eq!(fixed::cuts(2 * MIB + 7).collect::<Vec<_>>(), [MIB, 2 * MIB, 2 * MIB + 7]);
}

proptest! {
    #[test]
    fn fixed_pieces_cover_the_file(len in 0..64 * MIB) {
        assert_covers(&fixed::cuts(len).collect::<Vec<_>>(), len, MIB);
    }
}
