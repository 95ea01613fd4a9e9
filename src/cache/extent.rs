//! An extent: a frame on the disk with a header that identifies and authenticates it.
//!
//! ```text
//! 0   4  magic "TWLF"      4  1  version (2)      5  1  codec      6  1  has a base (0, 1)      7  1  zero
//! 8   4  plain length      12  4  n               16  32  id       48  32  id of the base, or zero
//! 80  32 BLAKE3, keyed with the cache's secret, of the 80 bytes before and, unless it is a raw one, the frame
//! 112 n  the frame, then zeros to the next unit
//! ```
//!
//! A raw frame is the chunk itself: its bytes must hash to the id, which the digest covers. So they are hashed only once on the
//! way from a peer to the disk.
//!
//! The content of a place is returned only if it is complete and its header names the wanted chunk, independent of the journal.
//! Because the digest is keyed, bytes chosen by others cannot pass as an extent, not even the inside of another chunk if a
//! damaged journal points there. Verifying the digest of the frame is enough, without decoding it, because only verified frames
//! are inserted. The digest is computed once per write and read, at several GB/s, and needs no base.

use bytes::Bytes;

use super::allocator::UNIT;
use super::frame::Frame;
use super::queue::BaseKey;
use crate::codec::{Codec, Encoded};
use crate::id::ChunkId;
use crate::limits::CHUNK_LEN_MAX;

/// Bytes before the frame.
pub(super) const HEADER_LEN: usize = 112;
const SEALED_LEN: usize = 80;
const MAGIC: [u8; 5] = *b"TWLF\x02";

/// Key for the digests of one cache.
pub(super) type Secret = [u8; 32];

/// Space of a frame of `len` bytes, in units.
pub(super) fn weight(len: u64) -> u16 {
    let units = (HEADER_LEN as u64 + len.min(CHUNK_LEN_MAX)).div_ceil(UNIT);
    u16::try_from(units).unwrap_or(u16::MAX)
}

/// Header of a frame.
pub(super) fn header(secret: &Secret, frame: &Frame) -> [u8; HEADER_LEN] {
    let mut out = [0; HEADER_LEN];
    out[..5].copy_from_slice(&MAGIC);
    out[5] = frame.codec().byte();
    out[6] = u8::from(frame.base().is_some());
    out[8..12].copy_from_slice(&frame.plain_len().to_le_bytes());
    out[12..16].copy_from_slice(&u32::try_from(frame.bytes().len()).unwrap_or(u32::MAX).to_le_bytes());
    out[16..48].copy_from_slice(frame.id().as_bytes());
    if let Some(base) = frame.base() {
        out[48..80].copy_from_slice(base.as_bytes());
    }
    // A `Frame` exists only after its id was verified.
    let frame = if frame.codec() == Codec::Raw { &[] } else { &frame.bytes()[..] };
    let digest = digest(secret, &out[..SEALED_LEN], frame);
    out[SEALED_LEN..].copy_from_slice(digest.as_bytes());
    out
}

/// Frame at the start of `bytes`, if it is complete and undamaged.
pub(super) fn open(secret: &Secret, bytes: &Bytes) -> Option<Frame> {
    let header: &[u8; HEADER_LEN] = bytes.first_chunk()?;
    if header[..5] != MAGIC {
        return None;
    }
    let number = |at: usize| Some(u32::from_le_bytes(*header.get(at..)?.first_chunk()?));
    let name = |at: usize| Some(ChunkId::from_bytes(*header.get(at..)?.first_chunk()?));
    let end = HEADER_LEN.checked_add(number(12)? as usize)?;
    let (codec, id) = (Codec::from_byte(header[5]).ok()?, name(16)?);
    let frame = bytes.get(HEADER_LEN..end)?;
    let (sealed, proven) = if codec == Codec::Raw { (&[][..], ChunkId::of(frame) == id) } else { (frame, true) };
    if !proven || digest(secret, &header[..SEALED_LEN], sealed).as_bytes()[..] != header[SEALED_LEN..] {
        return None;
    }
    let base = if header[6] == 1 { Some(name(48)?) } else { None };
    let encoded = Encoded { codec, bytes: bytes.slice(HEADER_LEN..end), base };
    Some(Frame::kept(id, encoded, number(8)?))
}

/// True if `header` is the undamaged header of the chunk `id`, stored raw in `len` bytes, which follow it. They are not verified.
pub(super) fn is_raw(secret: &Secret, header: &[u8; HEADER_LEN], id: &ChunkId, len: usize) -> bool {
    let Some(len) = u32::try_from(len).ok().map(u32::to_le_bytes) else { return false };
    header[..5] == MAGIC
        && header[5..8] == [Codec::Raw.byte(), 0, 0]
        && header[8..12] == len
        && header[12..16] == len
        && header[16..48] == *id.as_bytes()
        && digest(secret, &header[..SEALED_LEN], &[]).as_bytes()[..] == header[SEALED_LEN..]
}

/// Base that `header` names, if it is of the chunk `id`. Its digest is not verified.
pub(super) fn base(header: &[u8; HEADER_LEN], id: &ChunkId) -> Option<BaseKey> {
    if header[..5] != MAGIC || header[16..48] != *id.as_bytes() {
        return None;
    }
    let base = header.get(48..80)?.first_chunk().map(|bytes| ChunkId::from_bytes(*bytes))?;
    Some(BaseKey::of((header[6] == 1).then_some(&base)))
}

fn digest(secret: &Secret, sealed: &[u8], frame: &[u8]) -> blake3::Hash {
    blake3::Hasher::new_keyed(secret).update(sealed).update(frame).finalize()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunk::Chunk;
    use crate::codec::{Compression, encode};

    fn sealed(secret: &Secret, encoded: Encoded, plain: &[u8]) -> (Frame, Vec<u8>) {
        let frame = Frame::decoded(Chunk::new(plain), encoded).unwrap();
        let bytes = [&header(secret, &frame)[..], frame.bytes(), &[0; 40]].concat();
        (frame, bytes)
    }

    fn raw(plain: &'static [u8]) -> Encoded {
        Encoded { codec: Codec::Raw, bytes: plain.into(), base: None }
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_found() {
        let words = Bytes::from("some bytes of a chunk, ".repeat(50));
        let plain = b"some bytes of a chunk";
        let compressed = encode(&words, Compression::Auto, None);
        assert_ne!(compressed.codec, Codec::Raw);
        for (encoded, plain) in [(raw(plain), &plain[..]), (compressed, &words[..])] {
            let codec = encoded.codec.word();
            let (frame, bytes) = sealed(&[1; 32], encoded, plain);
            let open = |bytes: Vec<u8>| open(&[1; 32], &bytes.into());
            assert_eq!(open(bytes.clone()), Some(frame));
            let whole = bytes.len() - 40;
            for bit in 0..whole * 8 {
                let mut bent = bytes.clone();
                bent[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(open(bent), None, "{codec}, bit {bit}");
            }
            (0..whole).for_each(|cut| assert_eq!(open(bytes[..cut].to_vec()), None));
        }
    }

    #[test]
    fn only_the_header_of_that_raw_chunk_is_taken_for_it() {
        let plain = b"some bytes of a chunk";
        let (frame, bytes) = sealed(&[1; 32], raw(plain), plain);
        let is_raw = |header: &[u8], id, len| is_raw(&[1; 32], header.first_chunk().unwrap(), &id, len);
        assert!(is_raw(&bytes, frame.id(), plain.len()));
        assert!(!is_raw(&bytes, ChunkId::of(b"other"), plain.len()) && !is_raw(&bytes, frame.id(), plain.len() + 1));
        for bit in 0..HEADER_LEN * 8 {
            let mut bent = bytes.clone();
            bent[bit / 8] ^= 1 << (bit % 8);
            assert!(!is_raw(&bent, frame.id(), plain.len()), "bit {bit}");
        }
        let words = Bytes::from("some bytes of a chunk, ".repeat(50));
        let (frame, bytes) = sealed(&[1; 32], encode(&words, Compression::Auto, None), &words);
        assert!(!is_raw(&bytes, frame.id(), words.len()));
    }

    #[test]
    fn what_another_wrote_is_nothing() {
        let plain = b"forged: it looks like an extent, inside of a chunk";
        let (_, bytes) = sealed(&[1; 32], raw(plain), plain);
        assert_eq!(open(&[2; 32], &bytes.into()), None);
    }

    #[test]
    fn a_frame_wastes_less_than_a_unit() {
        assert_eq!((weight(0), weight(UNIT - 112), weight(UNIT - 111)), (1, 1, 2));
        assert_eq!(weight(CHUNK_LEN_MAX), 4097);
    }
}
