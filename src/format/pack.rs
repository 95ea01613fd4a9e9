//! A pack: a header, frames, a columnar footer, a trailer. One ranged read of its end opens it.
//!
//! ```text
//! 0          16     header: envelope header of kind 'K', compression 0, length 0
//! ..                frames, zero bytes between them where alignment asks for it
//! end-48-f   f      footer: n (4), then columns: id 32n, offset 8n, stored length 4n, plain length 4n, codec n,
//!                   length of parameters n; parameters
//! end-48     4      f
//! end-44     4      zero
//! end-40     32     BLAKE3 of footer and the eight bytes above
//! end-8      8      magic "TWLN" 'k', version 1, encryption 0, zero
//! ```
//!
//! A raw frame of 64 KiB or more starts at a multiple of 4096, so that it can be read straight into place; any other
//! starts at a multiple of 8. The only parameter there is: the id of the base, where a codec needs one.

use super::envelope::{HEADER_LEN, Kind, MAGIC, VERSION, header};
use super::wire::{Malformed, Read, Reader, Writer};
use crate::codec::Codec;
use crate::error::{Error, Result};
use crate::id::ChunkId;
use crate::limits::{CHUNK_LEN_MAX, PACK_CHUNKS_MAX, PACK_LEN_MAX};

/// Bytes after the footer.
pub const TRAILER_LEN: u64 = 48;

const PAGE: u64 = 4096;
const PAGED_FROM: u64 = 64 << 10;
const WORD: u64 = 8;
/// Bytes of the only parameter: the id of a base.
const BASE_LEN: u8 = 32;

/// Maximum bytes of the footer of a pack of `chunks`, without the trailer, with the longest parameters.
pub(super) const fn footer_len_max(chunks: u32) -> u32 {
    chunks.saturating_mul(32 + 8 + 4 + 4 + 1 + 1 + u8::MAX as u32).saturating_add(4)
}

/// One stored chunk, as in the pack's footer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FooterEntry {
    /// Id.
    pub id: ChunkId,
    /// Start of its frame in the pack.
    pub offset: u64,
    /// Bytes of the frame.
    pub stored_len: u32,
    /// Bytes of the chunk.
    pub plain_len: u32,
    /// Codec.
    pub codec: Codec,
    /// Base, if its codec needs one.
    pub base: Option<ChunkId>,
}

/// Content of a pack, in the order of its frames.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PackFooter {
    /// All chunks; a chunk's index in this list is its ordinal.
    pub entries: Vec<FooterEntry>,
}

/// The bytes before the first frame.
#[must_use]
pub fn pack_header() -> [u8; HEADER_LEN] {
    header(Kind::Pack, 0, 0)
}

/// Lays frames out one after the other.
#[derive(Clone, Debug, Default)]
pub struct PackLayout {
    footer: PackFooter,
    end: u64,
}

impl PackLayout {
    /// An empty pack.
    #[must_use]
    pub fn new() -> Self {
        Self { footer: PackFooter::default(), end: HEADER_LEN as u64 }
    }

    /// True if one more frame of `stored_len` bytes fits into a pack, whatever its codec.
    #[must_use]
    pub fn has_room(&self, stored_len: u64) -> bool {
        let chunks = u32::try_from(self.chunks() + 1).unwrap_or(u32::MAX);
        let tail = u64::from(footer_len_max(chunks)) + TRAILER_LEN;
        let end = self.end.saturating_add(PAGE).saturating_add(stored_len);
        u64::from(chunks) <= PACK_CHUNKS_MAX && end.saturating_add(tail) <= PACK_LEN_MAX
    }

    /// Adds the frame of the chunk `id` with its codec and base; returns the number of zero bytes before it.
    pub fn push(
        &mut self,
        id: ChunkId,
        (codec, base): (Codec, Option<ChunkId>),
        stored_len: u32,
        plain_len: u32,
    ) -> u64 {
        let paged = codec == Codec::Raw && u64::from(stored_len) >= PAGED_FROM;
        let offset = self.end.next_multiple_of(if paged { PAGE } else { WORD });
        let padding = offset - self.end;
        self.footer.entries.push(FooterEntry { id, offset, stored_len, plain_len, codec, base });
        self.end = offset + u64::from(stored_len);
        padding
    }

    /// Bytes so far, without the footer.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.end
    }

    /// True if there is no frame yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.footer.entries.is_empty()
    }

    /// Chunks so far.
    #[must_use]
    pub fn chunks(&self) -> usize {
        self.footer.entries.len()
    }

    /// Footer of the pack, and the bytes that end it (footer and trailer).
    #[must_use]
    pub fn finish(self) -> (PackFooter, Vec<u8>) {
        let tail = self.footer.encode();
        (self.footer, tail)
    }
}

impl PackFooter {
    fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new();
        out.u32(u32::try_from(self.entries.len()).unwrap_or(u32::MAX));
        out.each(&self.entries, |out, e| out.bytes(e.id.as_bytes()));
        out.each(&self.entries, |out, e| out.u64(e.offset));
        out.each(&self.entries, |out, e| out.u32(e.stored_len));
        out.each(&self.entries, |out, e| out.u32(e.plain_len));
        out.each(&self.entries, |out, e| out.u8(e.codec.byte()));
        out.each(&self.entries, |out, e| out.u8(if e.base.is_some() { BASE_LEN } else { 0 }));
        for base in self.entries.iter().filter_map(|e| e.base) {
            out.bytes(base.as_bytes());
        }
        let len = u32::try_from(out.len()).unwrap_or(u32::MAX);
        out.u32(len).u32(0);
        let mut bytes = out.into_bytes();
        let digest = blake3::hash(&bytes);
        bytes.extend_from_slice(digest.as_bytes());
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&[b'k', VERSION, 0, 0]);
        bytes
    }

    /// Length of the footer (without the trailer), read from the last [`TRAILER_LEN`] bytes of a pack.
    ///
    /// # Errors
    /// Damaged, if these bytes are no end of a pack; unsupported, if a later version wrote them.
    pub fn len_from_trailer(trailer: &[u8]) -> Result<u64> {
        let mut reader = Reader::new(trailer);
        let fields = (|| {
            let (len, zero) = (reader.u32()?, reader.u32()?);
            reader.take(32)?;
            Ok::<_, Malformed>((len, zero, reader.array::<4>()?, reader.array::<4>()?))
        })();
        let (len, zero, magic, [kind, version, encryption, reserved]) = fields?;
        if magic != MAGIC || kind != b'k' || zero != 0 {
            return Err(Error::damaged("pack does not end with a trailer"));
        }
        if version != VERSION {
            let error = Error::unsupported("pack was written by another version of the format");
            return Err(error.expected(VERSION).got(version).help("use a newer towline"));
        }
        if encryption != 0 || reserved != 0 {
            let error = Error::unsupported("pack is encrypted at rest, or uses what is reserved");
            return Err(error.got(format!("{encryption}, {reserved}")).help("use a newer towline"));
        }
        Ok(len.into())
    }

    /// Reads a footer and trailer: the last bytes of a pack of `pack_len` bytes.
    ///
    /// # Errors
    /// Damaged, if they have changed; unsupported, if a later version wrote them.
    pub fn decode(tail: &[u8], pack_len: u64) -> Result<Self> {
        let split = tail.len().checked_sub(usize::try_from(TRAILER_LEN).unwrap_or(usize::MAX));
        let split = split.ok_or_else(|| Error::damaged("pack is too short").got(pack_len))?;
        let (footer, trailer) = tail.split_at(split);
        let len = Self::len_from_trailer(trailer)?;
        if len != footer.len() as u64 {
            return Err(Error::damaged("pack footer has another length").expected(footer.len()).got(len));
        }
        let signed = tail.get(..footer.len() + 8).unwrap_or_default();
        if trailer.get(8..40) != Some(blake3::hash(signed).as_bytes().as_slice()) {
            return Err(Error::damaged("pack footer does not match its digest"));
        }
        if pack_len > PACK_LEN_MAX {
            return Err(Error::damaged("pack is impossibly long").got(pack_len));
        }
        let columns = Columns::parse(footer)?;
        columns.check(pack_len.saturating_sub(tail.len() as u64))
    }
}

/// Columns of an encoded footer.
struct Columns<'a> {
    n: usize,
    ids: &'a [u8],
    offsets: &'a [u8],
    stored: &'a [u8],
    plain: &'a [u8],
    codecs: &'a [u8],
    parameter_lens: &'a [u8],
    parameters: &'a [u8],
}

impl<'a> Columns<'a> {
    fn parse(footer: &'a [u8]) -> Read<Self> {
        let mut reader = Reader::new(footer);
        let n = reader.u32()?;
        if u64::from(n) > PACK_CHUNKS_MAX {
            return Err(reader.malformed("pack holds too many chunks"));
        }
        let n = n as usize;
        let (ids, offsets) = (reader.take(32 * n)?, reader.take(8 * n)?);
        let (stored, plain, codecs) = (reader.take(4 * n)?, reader.take(4 * n)?, reader.take(n)?);
        let parameter_lens = reader.take(n)?;
        let parameters = reader.take(parameter_lens.iter().map(|&len| usize::from(len)).sum())?;
        reader.finish()?;
        Ok(Self { n, ids, offsets, stored, plain, codecs, parameter_lens, parameters })
    }

    fn check(&self, frames_end: u64) -> Result<PackFooter> {
        let mut entries = Vec::with_capacity(self.n);
        let mut end = HEADER_LEN as u64;
        let numbers = self.stored.as_chunks::<4>().0.iter().zip(self.plain.as_chunks::<4>().0);
        let rows = self.ids.as_chunks::<32>().0.iter().zip(self.offsets.as_chunks::<8>().0).zip(numbers);
        let mut parameters = self.parameters;
        for (((id, offset), (stored, plain)), (&codec, &len)) in rows.zip(self.codecs.iter().zip(self.parameter_lens)) {
            let (parameter, others) = parameters.split_at_checked(len.into()).unwrap_or_default();
            parameters = others;
            let codec = Codec::from_byte(codec)?;
            let entry = FooterEntry {
                id: ChunkId::from_bytes(*id),
                offset: u64::from_le_bytes(*offset),
                stored_len: u32::from_le_bytes(*stored),
                plain_len: u32::from_le_bytes(*plain),
                codec,
                base: base(codec, parameter)?,
            };
            let frame_end = entry.offset.checked_add(entry.stored_len.into());
            match frame_end {
                Some(frame_end) if entry.offset >= end && frame_end <= frames_end => end = frame_end,
                _ => return Err(Error::damaged("frame lies outside its pack").got(entry.offset)),
            }
            if entry.plain_len == 0 || u64::from(entry.plain_len) > CHUNK_LEN_MAX {
                return Err(Error::damaged("chunk's length is impossible").got(entry.plain_len));
            }
            if entry.stored_len > entry.plain_len {
                return Err(Error::damaged("frame is longer than its chunk")
                    .expected(format!("at most {} bytes", entry.plain_len))
                    .got(entry.stored_len));
            }
            entries.push(entry);
        }
        Ok(PackFooter { entries })
    }
}

/// The base that a chunk's parameter names.
fn base(codec: Codec, parameter: &[u8]) -> Result<Option<ChunkId>> {
    match (codec.has_base(), <[u8; BASE_LEN as usize]>::try_from(parameter)) {
        (true, Ok(id)) => Ok(Some(ChunkId::from_bytes(id))),
        (false, _) if parameter.is_empty() => Ok(None),
        _ => Err(Error::unsupported("pack holds codec parameters that this program does not know")
            .got(format!("{} bytes for {}", parameter.len(), codec.word()))
            .help("use a newer towline")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> (PackFooter, Vec<u8>, u64) {
        let mut layout = PackLayout::new();
        for (i, len) in [10u32, 70_000, 5, 200_000].into_iter().enumerate() {
            layout.push(ChunkId::of(&[u8::try_from(i).unwrap()]), (Codec::Raw, None), len, len);
        }
        layout.push(ChunkId::of(b"a step later"), (Codec::Difference, Some(ChunkId::of(&[3]))), 900, 200_000);
        let frames = layout.len();
        let (footer, tail) = layout.finish();
        let len = frames + tail.len() as u64;
        (footer, tail, len)
    }

    #[test]
    fn big_raw_frames_start_at_pages_and_small_ones_at_words() {
        let (footer, ..) = sample();
        let offsets: Vec<u64> = footer.entries.iter().map(|e| e.offset).collect();
        assert_eq!(offsets, [16, 4096, 74_096, 77_824, 277_824]);
    }

    #[test]
    fn a_footer_survives_and_any_flipped_bit_is_found() {
        let (footer, tail, len) = sample();
        assert_eq!(PackFooter::decode(&tail, len).unwrap(), footer);
        for bit in 0..tail.len() * 8 {
            let mut bent = tail.clone();
            bent[bit / 8] ^= 1 << (bit % 8);
            assert!(PackFooter::decode(&bent, len).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_frame_that_is_longer_than_its_chunk_is_refused() {
        let decoded = |stored_len| {
            let mut layout = PackLayout::new();
            layout.push(ChunkId::of(b"a"), (Codec::Zstd, None), stored_len, 8);
            let frames = layout.len();
            let (_, tail) = layout.finish();
            PackFooter::decode(&tail, frames + tail.len() as u64)
        };
        assert_eq!(decoded(8).unwrap().entries.len(), 1);
        let error = decoded(9).unwrap_err();
        assert!(error.to_string().contains("longer than its chunk"), "{error}");
    }

    #[test]
    fn parameters_are_for_a_later_version() {
        let (_, tail, len) = sample();
        let end = tail.len() - 48;
        let mut longer = tail[..end].to_vec();
        longer[end - 33] = 33;
        longer.push(7);
        longer.extend_from_slice(&u32::try_from(end + 1).unwrap().to_le_bytes());
        longer.extend_from_slice(&[0; 4]);
        longer.extend_from_slice(blake3::hash(&longer).as_bytes());
        longer.extend_from_slice(&tail[tail.len() - 8..]);
        let error = PackFooter::decode(&longer, len + 1).unwrap_err();
        assert_eq!(error.kind(), crate::error::ErrorKind::Unsupported);
    }
}
