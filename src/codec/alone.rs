//! Chunks without the base that they are stored with: for places that lack the base.

use bytes::Bytes;

use super::{Codec, Element, Encoded, GAIN, Width, difference, planes};

/// Maximum difference of a length to what was foreseen: four bytes for each of eight planes.
const OFF_MAX: u32 = 32;

/// Encodes `plain`, which is stored as `stored` with a base, in byte planes; raw, if that gains too little.
#[must_use]
pub fn encode_alone(plain: &[u8], stored: &Encoded) -> Encoded {
    let planes = element(stored).and_then(|element| planes::encode(plain, element, worth(plain.len())));
    match planes {
        Some(planes) => Encoded::alone(Codec::Planes, planes),
        None => Encoded::alone(Codec::Raw, Bytes::copy_from_slice(plain)),
    }
}

/// Bytes that [`encode_alone`] makes of them, up to four for each plane of its numbers.
#[must_use]
pub fn alone_len(plain: &[u8], stored: &Encoded) -> u32 {
    let planes = element(stored).and_then(|element| planes::encoded_len(plain, element));
    let planes = planes.filter(|&len| len < worth(plain.len()));
    u32::try_from(planes.unwrap_or(plain.len())).unwrap_or(u32::MAX)
}

/// Maximum bytes that [`encode_alone`] makes of `plain_len`, where [`alone_len`] was `foreseen`.
#[must_use]
pub const fn alone_len_max(foreseen: u32, plain_len: u32) -> u32 {
    let most = foreseen.saturating_add(OFF_MAX);
    if (most as usize) < worth(plain_len as usize) { most } else { plain_len }
}

/// Type of the numbers in a chunk that is stored with a base.
fn element(stored: &Encoded) -> Option<Element> {
    match stored.codec {
        Codec::Difference => difference::element(&stored.bytes),
        Codec::Derived => Some(Element::Float(Width::W2)),
        Codec::Part | Codec::Bundle(_) => Some(Element::Float(Width::W4)),
        Codec::Raw | Codec::Zstd | Codec::Planes => None,
    }
}

/// Length below which planes are worth the decoding.
const fn worth(plain_len: usize) -> usize {
    plain_len - plain_len / GAIN
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::{decode, encode_derived, encode_difference, rounded};
    use crate::id::ChunkId;

    /// Weights, and the same a little later.
    fn trained(count: usize) -> [Vec<u8>; 2] {
        let weight = |n: usize| (n as f32 * 0.618).sin() * 0.03;
        let later = |n: usize| weight(n) * (1.0 + ((n * 7 % 100) as f32 - 50.0) * 1e-6);
        let bytes = |of: &dyn Fn(usize) -> f32| (0..count).flat_map(|n| of(n).to_le_bytes()).collect();
        [bytes(&weight), bytes(&later)]
    }

    #[test]
    fn chunks_of_every_kind_lose_their_base_and_their_length_is_foreseen() {
        let [base, later] = trained(100_003);
        let difference = encode_difference(&later, ChunkId::of(&base), &base, Element::Float(Width::W4)).unwrap();
        let halves = rounded(&later);
        for (plain, stored) in [(later, difference), (halves, encode_derived(ChunkId::of(b"master")))] {
            let plain = Bytes::from(plain);
            let alone = encode_alone(&plain, &stored);
            assert_eq!((alone.codec, alone.base), (Codec::Planes, None), "{:?}", stored.codec);
            let len = u32::try_from(plain.len()).unwrap();
            assert_eq!(decode(alone.codec, &alone.bytes, None, len).unwrap(), plain);
            let foreseen = alone_len(&plain, &stored);
            assert!(alone.bytes.len().abs_diff(foreseen as usize) <= 16, "{} is not {foreseen}", alone.bytes.len());
            assert!(alone.bytes.len() <= alone_len_max(foreseen, len) as usize && alone_len_max(foreseen, len) < len);
            assert_eq!(
                alone_len_max(len - len / 32 - 8, len),
                len,
                "planes that just miss what they should save are raw"
            );
        }
    }

    #[test]
    fn what_gains_nothing_is_raw() {
        let mut noise = vec![0; 40_000];
        blake3::Hasher::new().finalize_xof().fill(&mut noise);
        let (noise, stored) = (Bytes::from(noise), encode_derived(ChunkId::of(b"master")));
        assert_eq!(encode_alone(&noise, &stored).codec, Codec::Raw);
        assert_eq!(alone_len(&noise, &stored), 40_000);
        // A frame that says nothing of its numbers is one that does not decode either.
        let broken = Encoded { codec: Codec::Difference, bytes: Bytes::new(), base: stored.base };
        assert_eq!(encode_alone(&noise, &broken).codec, Codec::Raw);
    }
}
