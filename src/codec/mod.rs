//! Codecs: a reversible transform per chunk, chosen by a probe of a sample, never larger than raw.
//!
//! Some of them need the plain bytes of another chunk, the *base*: the difference to the same numbers of an earlier step, chunks
//! derived from a base by rounding, and bundles, which are predicted from the step before, with their parts.

mod alone;
mod bundle;
mod derived;
mod difference;
mod huffman;
pub mod planes;
pub(crate) mod scratch;
mod wide;

use std::str::FromStr;

use bytes::Bytes;

pub use self::alone::{alone_len, alone_len_max, encode_alone};
pub use self::bundle::{BUNDLE_LEN_MAX, STEPS_MAX};
pub use self::derived::rounded;
pub use self::planes::{Element, Width};
use crate::blocks::Block;
use crate::error::{Error, Result};
use crate::id::ChunkId;
use crate::limits::CHUNK_LEN_MAX;

/// The transform of one stored chunk. The numbers are part of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codec {
    /// 0: the plain bytes.
    Raw,
    /// 1: one zstd frame (<https://www.rfc-editor.org/rfc/rfc8878>) that states its content size.
    Zstd,
    /// 2: byte planes: [`planes`].
    Planes,
    /// 3: the difference to the base, number by number, in byte planes.
    Difference,
    /// 4: the base with its numbers rounded.
    Derived,
    /// 5: a range of the plain bytes of the base, those of a bundle.
    Part,
    /// 6 to 13: a bundle this many steps (at most [`STEPS_MAX`]) after one that is stored whole; each of them is predicted from its
    /// base, the bundle of the step before.
    Bundle(u8),
}

/// Stored number of [`Codec::Bundle`] of no steps.
const BUNDLE: u8 = 6;
/// Stored number of [`Codec::Bundle`] of most steps.
const BUNDLE_LAST: u8 = BUNDLE + STEPS_MAX;
/// Maximum number of other chunks to decode for one: [`Codec::hops`] of the codec that has most.
pub const HOPS_MAX: u8 = STEPS_MAX + 2;

impl Codec {
    /// The number by which the codec is stored.
    #[must_use]
    pub const fn byte(self) -> u8 {
        match self {
            Self::Raw => 0,
            Self::Zstd => 1,
            Self::Planes => 2,
            Self::Difference => 3,
            Self::Derived => 4,
            Self::Part => 5,
            Self::Bundle(steps) => BUNDLE + steps,
        }
    }

    /// The codec stored as `byte`.
    ///
    /// # Errors
    /// Unsupported, for a number that a later version may know.
    pub fn from_byte(byte: u8) -> Result<Self> {
        match byte {
            0 => Ok(Self::Raw),
            1 => Ok(Self::Zstd),
            2 => Ok(Self::Planes),
            3 => Ok(Self::Difference),
            4 => Ok(Self::Derived),
            5 => Ok(Self::Part),
            BUNDLE..=BUNDLE_LAST => Ok(Self::Bundle(byte - BUNDLE)),
            _ => Err(Error::unsupported("chunk is stored with an unknown codec")
                .expected("0 (raw), 1 (zstd), 2 (planes), 3 (difference), 4 (derived), 5 (part) or 6 to 13 (bundle)")
                .got(byte)
                .help("use a newer towline")),
        }
    }

    /// The codec's name, as `show` prints it.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Zstd => "zstd",
            Self::Planes => "planes",
            Self::Difference => "difference",
            Self::Derived => "derived",
            Self::Part => "part",
            Self::Bundle(_) => "bundle",
        }
    }

    /// Maximum number of other chunks to decode first. A base always has fewer hops, which bounds a read.
    #[must_use]
    pub const fn hops(self) -> u8 {
        match self {
            Self::Raw | Self::Zstd | Self::Planes => 0,
            Self::Difference => 1,
            Self::Bundle(steps) => steps,
            Self::Part => STEPS_MAX + 1,
            Self::Derived => HOPS_MAX,
        }
    }

    /// True if a chunk that is stored so may have a base that is stored as `base`. Only the hops count: the same bytes may be stored in
    /// several ways, by others too, and each is as good a base.
    #[must_use]
    pub const fn may_have_base(self, base: Self) -> bool {
        base.hops() < self.hops()
    }

    /// True if it needs a base.
    #[must_use]
    pub const fn has_base(self) -> bool {
        self.hops() > 0
    }
}

/// Compression setting of a save.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// As small as possible, by a test on a sample of each chunk. The default, even if the target is faster than the codecs: data
    /// is kept for long, and read and copied more often than it is written.
    #[default]
    Auto,
    /// As [`Compression::Auto`], but only while that makes a save end sooner: chunks are stored raw while the target takes them
    /// clearly faster than they are encoded. For short saves rather than little space.
    IfFaster,
    /// As [`Compression::Auto`], and weights are predicted from the step before by the optimizer's moments, with which they are stored
    /// in bundles. For runs that save each step: those steps take less than half the space. Whoever reads weights alone reads their
    /// moments, too, and both of the steps since the key step.
    Predict,
    /// Store every chunk raw.
    Off,
}

impl FromStr for Compression {
    type Err = Error;

    /// `auto`, `if-faster`, `predict` or `off`.
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "if-faster" => Ok(Self::IfFaster),
            "predict" => Ok(Self::Predict),
            "off" => Ok(Self::Off),
            other => {
                Err(Error::usage("there is no such compression").expected("auto, if-faster, predict or off").got(other))
            }
        }
    }
}

/// An encoded chunk.
#[derive(Clone, Debug)]
pub struct Encoded {
    /// Codec.
    pub codec: Codec,
    /// Encoded bytes, at most as many as the plain ones.
    pub bytes: Bytes,
    /// Base, if its codec needs one.
    pub base: Option<ChunkId>,
}

impl Encoded {
    /// Encoded chunk without a base.
    fn alone(codec: Codec, bytes: impl Into<Bytes>) -> Self {
        Self { codec, bytes: bytes.into(), base: None }
    }
}

/// zstd's fastest regular level.
const LEVEL: i32 = 1;
/// Maximum length of chunks that are compressed without a probe.
const PROBE_FROM: usize = 64 << 10;
/// Three samples of this length, spread over the chunk, make the probe.
const SAMPLE: usize = 8 << 10;
/// Minimum saving of a codec, as a fraction of the bytes (1/32), to be worth the decoding.
const GAIN: usize = 32;

/// Encodes `plain` as small as `compression` allows; `element` is the type of its numbers, if known. The caller, who knows the
/// target, decides which is faster.
#[must_use]
pub fn encode(plain: &Bytes, compression: Compression, element: Option<Element>) -> Encoded {
    if compression != Compression::Off {
        let worth = plain.len() - plain.len() / GAIN;
        let planes = element.and_then(|element| planes::encode(plain, element, worth));
        // Exponents of floats are similar; integers may repeat as a whole.
        let zstd = match (&planes, element) {
            (Some(_), Some(Element::Float(_))) => None,
            _ => zstd(plain, planes.as_ref().map_or(worth, Vec::len)),
        };
        if let Some(frame) = zstd {
            return Encoded::alone(Codec::Zstd, frame);
        }
        if let Some(planes) = planes {
            return Encoded::alone(Codec::Planes, planes);
        }
    }
    Encoded::alone(Codec::Raw, plain.clone())
}

/// Encodes `plain` as the difference to `base`, the chunk `id`, if that saves an eighth compared to planes, because each read of
/// it must read the base, too. Also none if the lengths differ.
#[must_use]
pub fn encode_difference(plain: &[u8], id: ChunkId, base: &[u8], element: Element) -> Option<Encoded> {
    let frame = difference::encode(plain, base, element)?;
    Some(Encoded { codec: Codec::Difference, bytes: frame.into(), base: Some(id) })
}

/// A chunk that is [`rounded`] from the chunk `base`.
#[must_use]
pub fn encode_derived(base: ChunkId) -> Encoded {
    Encoded { codec: Codec::Derived, bytes: Bytes::from_static(derived::FRAME), base: Some(base) }
}

/// Encodes the bundle `plain`, the pieces of `count` tensors (weights, first moments and, with three, second moments) of 32-bit
/// floats. `base` is the bundle of the step before; without one it is stored whole. None if the lengths do not fit, the base has
/// [`STEPS_MAX`] steps, or the frame would be longer than the plain bytes.
#[must_use]
pub fn encode_bundle(plain: &[u8], count: usize, base: Option<BundleBase<'_>>) -> Option<Encoded> {
    let steps = base.map_or(0, |base| base.steps + 1);
    if steps > STEPS_MAX || plain.len() as u64 > BUNDLE_LEN_MAX {
        return None;
    }
    let frame = bundle::encode(plain, count, base.map(|base| base.plain)).filter(|frame| frame.len() <= plain.len())?;
    Some(Encoded { codec: Codec::Bundle(steps), bytes: frame.into(), base: base.map(|base| base.id) })
}

/// Chunk with the bytes of a bundle, that another bundle is predicted from.
#[derive(Clone, Copy, Debug)]
pub struct BundleBase<'a> {
    /// Id.
    pub id: ChunkId,
    /// Its hops, usually those of a bundle: the predicted bundles from the one that is stored whole up to this one.
    pub steps: u8,
    /// Plain bytes.
    pub plain: &'a [u8],
}

/// Maximum bytes in a pack from the end of a frame to that of a part that follows closely: a part has four bytes.
pub const PART_STRIDE: u64 = 64;

/// A chunk that is the part of the bundle `base` from `offset`.
#[must_use]
pub fn encode_part(base: ChunkId, offset: u32) -> Encoded {
    Encoded { codec: Codec::Part, bytes: Bytes::copy_from_slice(&offset.to_le_bytes()), base: Some(base) }
}

/// Decodes a part of the bundle `base`: one of its two or three members; none if it is none.
fn decode_part(stored: &[u8], base: &[u8], plain: &mut [u8]) -> Option<()> {
    let offset = usize::try_from(u32::from_le_bytes(stored.try_into().ok()?)).ok()?;
    let is_member = [2, 3].map(|count| plain.len() * count).contains(&base.len())
        && offset.is_multiple_of(plain.len())
        && base.len() as u64 <= BUNDLE_LEN_MAX;
    plain.copy_from_slice(base.get(offset..offset.checked_add(plain.len())?).filter(|_| is_member)?);
    Some(())
}

/// One zstd frame, if a sample predicts that it is shorter than `limit`, and it is.
fn zstd(plain: &[u8], limit: usize) -> Option<Vec<u8>> {
    let frame = probe(plain).then(|| zstd::bulk::compress(plain, LEVEL).ok()).flatten();
    frame.filter(|frame| frame.len() < limit)
}

/// Decodes `stored` into `plain`, whose length is the chunk's plain length; `base` holds the plain bytes of the chunk's base,
/// if its codec needs one.
///
/// # Errors
/// Damaged, if the frame does not decode to exactly that many bytes, or the base is missing.
pub fn decode_into(codec: Codec, stored: &[u8], base: Option<&[u8]>, plain: &mut [u8]) -> Result<()> {
    let given = || base.ok_or_else(|| Error::damaged("chunk needs a base, and none is told").got(codec.word()));
    let checked =
        |decoded: Option<()>| decoded.ok_or_else(|| Error::damaged("chunk does not decode").got(codec.word()));
    let got = match codec {
        Codec::Raw if stored.len() == plain.len() => {
            plain.copy_from_slice(stored);
            return Ok(());
        }
        Codec::Raw => stored.len(),
        Codec::Zstd => zstd::bulk::decompress_to_buffer(stored, plain)
            .map_err(|source| Error::damaged("zstd frame does not decode").source(source))?,
        Codec::Planes => {
            return checked(planes::decode(stored, plain));
        }
        Codec::Difference => return checked(difference::decode(stored, given()?, plain)),
        Codec::Derived => return checked(derived::decode(stored, given()?, plain)),
        Codec::Part => return checked(decode_part(stored, given()?, plain)),
        Codec::Bundle(_) if plain.len() as u64 > BUNDLE_LEN_MAX => return checked(None),
        Codec::Bundle(0) => return checked(bundle::decode(stored, None, plain)),
        Codec::Bundle(_) => return checked(bundle::decode(stored, Some(given()?), plain)),
    };
    if got == plain.len() {
        return Ok(());
    }
    Err(Error::damaged("chunk decodes to another length").expected(plain.len()).got(got))
}

/// Decodes `stored` to `plain_len` bytes; a raw frame is shared, not copied.
///
/// # Errors
/// Damaged, as [`decode_into`]; also for a `plain_len` above [`CHUNK_LEN_MAX`].
pub fn decode(codec: Codec, stored: &Bytes, base: Option<&[u8]>, plain_len: u32) -> Result<Bytes> {
    if u64::from(plain_len) > CHUNK_LEN_MAX {
        return Err(Error::damaged("chunk is too long").expected(format!("at most {CHUNK_LEN_MAX}")).got(plain_len));
    }
    if codec == Codec::Raw && stored.len() == plain_len as usize {
        return Ok(stored.clone());
    }
    let mut plain = Block::new(plain_len as usize);
    decode_into(codec, stored, base, &mut plain)?;
    Ok(plain.freeze())
}

/// True if a sample is compressible. It is spread over the chunk, so that a compressible header alone does not decide.
fn probe(plain: &[u8]) -> bool {
    if plain.len() <= PROBE_FROM {
        return true;
    }
    let step = (plain.len() - SAMPLE) / 2;
    let samples: Vec<u8> = (0..3).filter_map(|i| plain.get(i * step..i * step + SAMPLE)).flatten().copied().collect();
    zstd::bulk::compress(&samples, LEVEL).is_ok_and(|small| small.len() < samples.len() - samples.len() / GAIN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn noise(len: usize) -> Bytes {
        let mut out = vec![0; len];
        blake3::Hasher::new().update(&len.to_le_bytes()).finalize_xof().fill(&mut out);
        out.into()
    }

    #[test]
    fn noise_stays_raw_and_text_shrinks() {
        assert_eq!(encode(&noise(300_000), Compression::Auto, None).codec, Codec::Raw);
        let text = Bytes::from("towline ".repeat(40_000));
        let small = encode(&text, Compression::Auto, None);
        assert_eq!(small.codec, Codec::Zstd);
        assert!(small.bytes.len() < text.len() / 10);
        assert_eq!(encode(&text, Compression::Off, None).codec, Codec::Raw);
    }

    #[test]
    fn a_part_is_a_member_of_a_bundle() {
        let bundle: Vec<u8> = (0..24).collect();
        let part = |offset: u32, len: u32| {
            decode(Codec::Part, &encode_part(ChunkId::of(&[]), offset).bytes, Some(&bundle), len)
        };
        assert_eq!(part(8, 8).unwrap(), bundle[8..16]);
        assert_eq!(part(12, 12).unwrap(), bundle[12..]);
        for (offset, len) in [(4, 8), (24, 8), (u32::MAX, 8), (0, 24), (0, 4), (0, 1)] {
            assert!(part(offset, len).is_err(), "{offset} {len}");
        }
        let longer = vec![0; usize::try_from(BUNDLE_LEN_MAX + 8).unwrap()];
        let half = u32::try_from(longer.len() / 2).unwrap();
        assert!(decode(Codec::Part, &encode_part(ChunkId::of(&[]), 0).bytes, Some(&longer), half).is_err());
    }

    /// The bytes of a bundle may be stored in any way.
    #[test]
    fn a_base_has_fewer_hops() {
        for base in [Codec::Raw, Codec::Zstd, Codec::Planes, Codec::Bundle(0)] {
            assert!([Codec::Difference, Codec::Bundle(1), Codec::Part].iter().all(|codec| codec.may_have_base(base)));
            assert!(!Codec::Bundle(0).may_have_base(base));
        }
        assert!(Codec::Part.may_have_base(Codec::Bundle(7)) && Codec::Bundle(2).may_have_base(Codec::Bundle(1)));
        assert!(
            Codec::Bundle(2).may_have_base(Codec::Difference) && !Codec::Bundle(1).may_have_base(Codec::Difference)
        );
        assert!(!Codec::Bundle(1).may_have_base(Codec::Bundle(1)) && !Codec::Part.may_have_base(Codec::Derived));
    }

    proptest! {
        #[test]
        fn what_is_encoded_decodes_and_is_never_larger(
            seed in any::<u8>(),
            len in 0usize..200_000,
            period in 1usize..5000,
            element in proptest::option::of((0u32..4, any::<bool>())),
        ) {
            let element = element.map(|(log, float)| {
                let width = Width::of(1 << log).unwrap();
                if float { Element::Float(width) } else { Element::Integer(width) }
            });
            let base = noise(period);
            let plain: Bytes = base.iter().cycle().take(len).map(|b| b ^ seed).collect::<Vec<_>>().into();
            let encoded = encode(&plain, Compression::Auto, element);
            prop_assert!(encoded.bytes.len() <= plain.len());
            prop_assert_eq!(decode(encoded.codec, &encoded.bytes, None, u32::try_from(len).unwrap()).unwrap(), plain);
        }

        #[test]
        fn garbage_is_damage_not_panic(
            stored in proptest::collection::vec(any::<u8>(), 0..300),
            base in proptest::collection::vec(any::<u8>(), 0..5000),
            len in 0u32..5000,
        ) {
            let stored = Bytes::from(stored);
            let _ = (decode(Codec::Zstd, &stored, None, len), decode(Codec::Planes, &stored, None, len));
            for codec in [Codec::Difference, Codec::Derived, Codec::Part, Codec::Bundle(0), Codec::Bundle(1)] {
                let _ = decode(codec, &stored, Some(&base), len);
            }
            prop_assert!(decode(Codec::Difference, &stored, None, len).is_err());
        }
    }
}
