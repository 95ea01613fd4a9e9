//! Codes of every depth round-trip; what is no code is refused.

use super::*;
use proptest::prelude::*;

fn counts(symbols: &[u8]) -> [u32; 256] {
    let mut counts = [0; 256];
    symbols.iter().for_each(|&symbol| counts[usize::from(symbol)] += 1);
    counts
}

fn round_trip(symbols: &[u8]) -> usize {
    let counts = counts(symbols);
    let code = Code::of(&counts).unwrap();
    assert_eq!(Code::from_bytes(&code.to_bytes()).as_ref(), Some(&code), "a code must be complete");
    let mut stored = vec![7; 3];
    encode(&code, symbols, &counts, &mut stored);
    let stored = &stored[3..];
    let expected = coded_len(&code, &counts);
    assert!((expected..=expected + STREAMS).contains(&stored.len()), "{expected} {}", stored.len());
    let mut out = vec![0; symbols.len()];
    decode(stored, &mut out).unwrap();
    assert!(out == symbols);
    stored.len()
}

/// Bytes as rare as `2^-i`, in a fixed mixture.
fn skewed(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 20
    };
    (0..len).map(|_| u8::try_from((random() | 1 << 40).trailing_zeros() * 3).unwrap()).collect()
}

#[test]
fn a_skewed_plane_comes_near_its_entropy() {
    let symbols = skewed(256 << 10, 1);
    // The entropy of 1/2, 1/4, 1/8, ... is two bits, and codes of those lengths meet it exactly.
    let stored = round_trip(&symbols);
    assert!(stored < symbols.len() / 4 + 1000, "{stored}");
}

#[test]
fn few_symbols_and_deep_trees() {
    round_trip(&[1, 2]);
    round_trip(&[9, 9, 9, 9, 200]);
    let all: Vec<u8> = (0..=255).collect();
    round_trip(&all);
    // Fibonacci counts make the deepest tree: its lengths must be cut.
    let (mut a, mut b) = (1, 1);
    let mut symbols = Vec::new();
    for symbol in 0..24 {
        symbols.extend(std::iter::repeat_n(symbol, a));
        (a, b) = (b, a + b);
    }
    round_trip(&symbols);
}

#[test]
fn one_symbol_or_none_has_no_code() {
    assert_eq!(Code::of(&[0; 256]), None);
    assert_eq!(Code::of(&counts(&[5, 5, 5])), None);
}

#[test]
fn what_encode_did_not_make_is_refused() {
    let symbols = skewed(10_000, 2);
    let counts = counts(&symbols);
    let mut stored = Vec::new();
    encode(&Code::of(&counts).unwrap(), &symbols, &counts, &mut stored);
    let mut out = vec![0; symbols.len()];
    assert_eq!(decode(&stored[..stored.len() - 1], &mut out), None, "shorter");
    assert_eq!(decode(&stored, &mut out[40..]), None, "fewer symbols");
    assert_eq!(decode(&stored, &mut vec![0; symbols.len() + 40]), None, "more symbols");
    let mut longer = stored.clone();
    longer.push(0);
    assert_eq!(decode(&longer, &mut out), None, "longer");
    let mut incomplete = stored.clone();
    incomplete[0] ^= 1;
    assert_eq!(decode(&incomplete, &mut out), None, "no code");
    let mut ends = stored;
    ends[LENGTHS_LEN + 3] = 0xFF;
    assert_eq!(decode(&ends, &mut out), None, "an end beyond the end");
}

proptest! {
    #[test]
    fn whatever_is_encoded_decodes(symbols in proptest::collection::vec(any::<u8>(), 2..3000), mask in any::<u8>(), rare in 0u8..4) {
        let symbols: Vec<u8> = symbols.iter().map(|s| if s % 16 < rare { *s } else { s & mask & 3 }).collect();
        if Code::of(&counts(&symbols)).is_some() {
            round_trip(&symbols);
        }
    }

    #[test]
    fn garbage_is_refused_or_decodes_without_panic(garbage in proptest::collection::vec(any::<u8>(), 0..600), flips in 0usize..40, len in 0usize..2000) {
        let symbols = skewed(len.max(64), 3);
        let counts = counts(&symbols);
        let mut stored = Vec::new();
        encode(&Code::of(&counts).unwrap(), &symbols, &counts, &mut stored);
        for (at, byte) in garbage.iter().enumerate().take(flips) {
            let at = (at * 31 + usize::from(*byte)) % stored.len();
            stored[at] ^= byte;
        }
        let mut out = vec![0; symbols.len()];
        let _ = decode(&stored, &mut out);
        let _ = decode(&garbage, &mut out);
    }
}
