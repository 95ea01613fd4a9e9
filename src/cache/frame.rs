//! A frame: a verified chunk in its encoded form, as it is stored and sent.

use bytes::Bytes;

use crate::chunk::Chunk;
use crate::codec::{self, Codec, Encoded};
use crate::error::{Error, Result};
use crate::id::ChunkId;
use crate::limits::CHUNK_LEN_MAX;

/// An encoded chunk. Every frame was decoded and verified against its id once: by its creator, or before it was inserted into the
/// cache that it was read from.
#[derive(Clone, PartialEq, Eq)]
pub struct Frame {
    id: ChunkId,
    codec: Codec,
    plain_len: u32,
    base: Option<ChunkId>,
    bytes: Bytes,
}

impl Frame {
    /// Accepts `encoded` only if it decodes to `plain_len` bytes that are the chunk `id`. `base` is its base, if its codec needs
    /// one.
    ///
    /// # Errors
    /// Damaged, if it does not; also if `base` is missing or wrong.
    pub fn verify(id: ChunkId, encoded: Encoded, plain_len: u32, base: Option<Chunk<'_>>) -> Result<Self> {
        if encoded.base != base.map(|base| base.id()) {
            let shown = |id: Option<ChunkId>| id.map_or_else(|| "none".to_owned(), |id| format!("{id:.16}"));
            return Err(Error::damaged("frame is taken to another base")
                .at(format!("{id:.16}"))
                .expected(shown(encoded.base))
                .got(shown(base.map(|base| base.id()))));
        }
        let base = base.map(|base| base.bytes());
        let plain = codec::decode(encoded.codec, &encoded.bytes, base, plain_len)?;
        Self::decoded(Chunk::verify(id, &plain)?, encoded)
    }

    /// Frame that the caller has just decoded to `chunk`; for a fetch, which decodes it anyway.
    ///
    /// # Errors
    /// Damaged, if no encoder creates such a frame: longer than a chunk may be, with a missing or superfluous base, or raw and
    /// different from the chunk.
    pub fn decoded(chunk: Chunk<'_>, encoded: Encoded) -> Result<Self> {
        let Encoded { codec, bytes, base } = encoded;
        let longest = chunk.bytes().len().max(bytes.len()) as u64;
        let plain_len = u32::try_from(chunk.bytes().len()).unwrap_or(u32::MAX);
        if longest > CHUNK_LEN_MAX {
            let error = Error::damaged("frame is too long").at(format!("{:.16}", chunk.id()));
            return Err(error.expected(format!("at most {CHUNK_LEN_MAX} bytes")).got(longest));
        }
        let is_chunk = || std::ptr::eq(bytes.as_ref(), chunk.bytes()) || bytes == chunk.bytes();
        if base.is_some() != codec.has_base() || codec == Codec::Raw && !is_chunk() {
            return Err(Error::damaged("frame is not of its codec")
                .at(format!("{:.16}", chunk.id()))
                .got(codec.word()));
        }
        Ok(Self { id: chunk.id(), codec, plain_len, base, bytes })
    }

    /// Frame that a cache has verified.
    pub(super) fn kept(id: ChunkId, encoded: Encoded, plain_len: u32) -> Self {
        let Encoded { codec, bytes, base } = encoded;
        Self { id, codec, plain_len, base, bytes }
    }

    /// The chunk's id.
    #[must_use]
    pub fn id(&self) -> ChunkId {
        self.id
    }

    /// Codec.
    #[must_use]
    pub fn codec(&self) -> Codec {
        self.codec
    }

    /// Bytes of the chunk once it is decoded.
    #[must_use]
    pub fn plain_len(&self) -> u32 {
        self.plain_len
    }

    /// Base of the chunk, if its codec needs one.
    #[must_use]
    pub fn base(&self) -> Option<ChunkId> {
        self.base
    }

    /// Encoded bytes.
    #[must_use]
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Codec, bytes and base as an [`Encoded`].
    #[must_use]
    pub fn encoded(&self) -> Encoded {
        Encoded { codec: self.codec, bytes: self.bytes.clone(), base: self.base }
    }
}

impl std::fmt::Debug for Frame {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Frame({:.16}, {}, {} bytes)", self.id, self.codec.word(), self.bytes.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::{Compression, Element, Width, encode, encode_difference};
    use crate::error::ErrorKind;

    #[test]
    fn only_what_decodes_to_its_chunk_is_a_frame() {
        let plain = Bytes::from("towline ".repeat(9000));
        let (id, len) = (ChunkId::of(&plain), u32::try_from(plain.len()).unwrap());
        let encoded = encode(&plain, Compression::Auto, None);
        assert_eq!(Frame::verify(id, encoded.clone(), len, None).unwrap().plain_len(), len);
        let mut bent = encoded.bytes.to_vec();
        *bent.last_mut().unwrap() ^= 1;
        let bent = Encoded { bytes: bent.into(), ..encoded.clone() };
        for wrong in [
            Frame::verify(ChunkId::of(b"other"), encoded.clone(), len, None),
            Frame::verify(id, encoded.clone(), len - 1, None),
            Frame::verify(id, bent, len, None),
            Frame::decoded(Chunk::new(b"other"), Encoded { codec: Codec::Raw, ..encoded }),
        ] {
            assert_eq!(wrong.unwrap_err().kind(), ErrorKind::Damaged);
        }
    }

    #[test]
    fn a_difference_is_verified_with_its_base_alone() {
        let numbers =
            |step: u32| (0..60_000u32).flat_map(|n| (n * 7 + n % (step + 2)).to_le_bytes()).collect::<Vec<u8>>();
        let (base, plain) = (numbers(0), numbers(1));
        let base = Chunk::new(&base);
        let element = Element::Integer(Width::of(4).unwrap());
        let encoded = encode_difference(&plain, base.id(), base.bytes(), element).unwrap();
        let (id, len) = (ChunkId::of(&plain), u32::try_from(plain.len()).unwrap());
        assert_eq!(Frame::verify(id, encoded.clone(), len, Some(base)).unwrap().base(), Some(base.id()));
        assert!(Frame::verify(id, encoded.clone(), len, None).is_err());
        assert!(Frame::verify(id, encoded, len, Some(Chunk::new(&plain))).is_err());
    }
}
