//! Numbers shrink as they should, come back as they were, and nothing stored makes the decoder panic.

use super::*;
use proptest::prelude::*;

/// Numbers that look like weights: a normal distribution, from a fixed generator.
fn weights(count: usize) -> Vec<f32> {
    let mut state = 7u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 + 0.5) / (1u64 << 24) as f32
    };
    (0..count).map(|_| 0.02 * (-2.0 * random().ln()).sqrt() * (std::f32::consts::TAU * random()).cos()).collect()
}

fn round_trip(plain: &[u8], element: Element) -> Option<usize> {
    let stored = encode(plain, element, usize::MAX)?;
    let mut out = vec![0x55; plain.len()];
    decode(&stored, &mut out).unwrap();
    assert!(out == plain);
    Some(stored.len())
}

#[test]
fn weights_shrink_by_their_exponents() {
    let weights = weights(256 << 10);
    let fp32: Vec<u8> = weights.iter().flat_map(|w| w.to_le_bytes()).collect();
    let bf16: Vec<u8> = weights.iter().flat_map(|w| ((w.to_bits() >> 16) as u16).to_le_bytes()).collect();
    let ratio = |plain: &[u8], width| plain.len() as f64 / round_trip(plain, Element::Float(width)).unwrap() as f64;
    // The entropy of a normal distribution's exponents allows about 1.20 and 1.5 (design.md 4, "planes").
    let (fp32, bf16) = (ratio(&fp32, Width::W4), ratio(&bf16, Width::W2));
    assert!(fp32 > 1.18 && fp32 < 1.25, "{fp32}");
    assert!(bf16 > 1.45 && bf16 < 1.60, "{bf16}");
}

#[test]
fn constant_planes_take_a_byte() {
    let zeros = vec![0; 1 << 20];
    assert!(round_trip(&zeros, Element::Float(Width::W4)).unwrap() < 64);
    let mostly: Vec<u8> = (0..1 << 18).flat_map(|n: u32| u32::from(n.is_multiple_of(100)).to_le_bytes()).collect();
    assert!(round_trip(&mostly, Element::Integer(Width::W4)).unwrap() < mostly.len() / 100);
}

#[test]
fn bits_that_mean_nothing_are_zero() {
    // Nine elements in groups of eight, of which the last holds one; nothing escaped.
    let grouped = |last: u8| [3, 7, Flat::Raw as u8, 2, 0, 0, 0, 0, last, 0, 0, 0, 0, Flat::Raw as u8];
    let mut plane = [0; 9];
    assert_eq!(grouped::decode(&grouped(0), Level::Plane, &mut plane), Some(()));
    assert_eq!(plane, [7; 9]);
    assert_eq!(grouped::decode(&grouped(2), Level::Plane, &mut plane), None, "a code of no element");

    let single = |kind: u8| [kind, Flat::One as u8, 1, 0, 0, 0, 5];
    assert_eq!(decode(&single(0), &mut plane), Some(()));
    assert_eq!(plane, [5; 9]);
    assert_eq!(decode(&single(ROTATED), &mut plane), None, "single bytes are not rotated");
}

#[test]
fn noise_is_refused() {
    let mut noise = vec![0; 1 << 20];
    blake3::Hasher::new().finalize_xof().fill(&mut noise);
    for width in [Width::W1, Width::W2, Width::W4, Width::W8] {
        assert_eq!(encode(&noise, Element::Float(width), noise.len()), None);
    }
}

proptest! {
    #[test]
    fn whatever_is_encoded_decodes(
        seed in proptest::collection::vec(any::<u8>(), 0..300),
        repeat in 1usize..40,
        log in 0u32..4,
        float in any::<bool>(),
    ) {
        let plain = seed.repeat(repeat);
        let width = Width::of(1 << log).unwrap();
        let _ = round_trip(&plain, if float { Element::Float(width) } else { Element::Integer(width) });
    }

    #[test]
    fn garbage_never_panics(mut stored in proptest::collection::vec(any::<u8>(), 0..400), how in 0u8..4, len in 0usize..3000) {
        let mut plain = vec![0; len];
        let _ = decode(&stored, &mut plain);
        if let Some(kind) = stored.first_mut() {
            *kind &= 7;
        }
        for at in 0..8 {
            if let Some(header) = stored.get_mut(1 + at * PLANE_HEADER..1 + (at + 1) * PLANE_HEADER) {
                header.copy_from_slice(&[how, 30, 0, 0, 0]);
            }
        }
        let _ = decode(&stored, &mut plain);
    }

    #[test]
    fn a_flipped_bit_never_panics(at in any::<usize>(), bit in 0u32..8, log in 0u32..4) {
        let plain: Vec<u8> = weights(600).iter().flat_map(|w| w.to_le_bytes()).collect();
        let width = Width::of(1 << log).unwrap();
        if let Some(mut stored) = encode(&plain, Element::Float(width), usize::MAX) {
            let at = at % stored.len();
            stored[at] ^= 1 << bit;
            let _ = decode(&stored, &mut vec![0; plain.len()]);
        }
    }
}

proptest! {
    /// An outline names bytes of the frame, and what it says decodes to the same length.
    #[test]
    fn outlines_stay_within_the_frame(
        frame in proptest::collection::vec(any::<u8>(), 0..60),
        lens in proptest::collection::vec(0u32..20, 8),
        how in proptest::collection::vec(0u8..6, 8),
        log in 0usize..4,
        plain_len in 0usize..100,
    ) {
        let mut frame = frame;
        frame.insert(0, u8::try_from(log).unwrap());
        for (header, (len, how)) in frame[1..].chunks_exact_mut(PLANE_HEADER).zip(lens.iter().zip(&how)).take(1 << log) {
            header[0] = *how;
            header[1..].copy_from_slice(&len.to_le_bytes());
        }
        let Some(outline) = Outline::of(&frame, plain_len) else { return Ok(()) };
        prop_assert_eq!(outline.planes.len(), outline.width.bytes());
        let mut at = 1 + outline.planes.len() * PLANE_HEADER;
        for (_, range) in &outline.planes {
            prop_assert!(range.start == at && range.end <= frame.len());
            at = range.end;
        }
        prop_assert_eq!((outline.rest, frame.len() - outline.rest), (at, plain_len % outline.width.bytes()));
    }
}
