//! A map: the place of each chunk of one manifest, so that a restore never reads the index.
//!
//! The body of an envelope of kind 'P':
//!
//! ```text
//! manifest id (32); packs: count, each: session (16), object (16), length, footer length, chunks
//! n: chunks of the manifest; m: further chunks, their bases
//! m x: id (32), plain length
//! n+m x: pack, ordinal, offset, stored length, codec (1), base (0: none, else 1 + index of a chunk)
//! version 2: for each frame with a base, in order: its length if it were stored without one (0: unknown); not all are 0
//! ```

use std::num::NonZeroU32;

use bytes::Bytes;

use super::envelope::{HEADER_LEN, Kind, VERSION, VERSION_MAX, seal_version};
use super::pack::{TRAILER_LEN, footer_len_max};
use super::wire::{Read, Reader, Writer};
use crate::codec::Codec;
use crate::error::{Error, Result};
use crate::id::{ChunkId, ManifestId, ObjectId, Owned, PackId, SessionId};
use crate::limits::{CHUNK_LEN_MAX, PACK_CHUNKS_MAX, PACK_LEN_MAX};

/// A pack, with the data to open it in one ranged read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PackRef {
    /// Id.
    pub id: PackId,
    /// Length in bytes.
    pub len: u64,
    /// The length of its footer in bytes, without the trailer.
    pub footer_len: u32,
    /// Number of chunks.
    pub chunks: u32,
}

impl PackRef {
    /// Bytes of its stored chunks and their alignment, without header and footer.
    #[must_use]
    pub fn content_len(&self) -> u64 {
        self.len.saturating_sub(HEADER_LEN as u64 + u64::from(self.footer_len) + TRAILER_LEN)
    }
}

/// Place of one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Pack of the map.
    pub pack: u32,
    /// Chunk of that pack.
    pub ordinal: u32,
    /// Start of the frame in the pack.
    pub offset: u64,
    /// Bytes of the frame.
    pub stored_len: u32,
    /// Codec.
    pub codec: Codec,
    /// One more than the number of its base among the map's frames, if its codec needs one.
    pub base: Option<NonZeroU32>,
    /// Bytes of the chunk if it were stored without its base, up to some; 0, if it has none, or that is unknown.
    pub alone_len: u32,
}

/// Places of the chunks of one manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Map {
    /// Manifest of the chunks.
    pub manifest: ManifestId,
    /// The packs that hold them.
    pub packs: Vec<PackRef>,
    /// One frame for each chunk of the manifest, in its order, then for each of the further ones.
    pub frames: Vec<Frame>,
    /// Bases that are not in the manifest, with their plain lengths.
    pub further: Vec<(ChunkId, u32)>,
}

impl Frame {
    /// The map's frame that is its base, if its codec needs one.
    #[must_use]
    pub fn base(&self) -> Option<u32> {
        self.base.map(|base| base.get() - 1)
    }

    /// End in the pack.
    fn end(&self) -> u64 {
        self.offset.saturating_add(self.stored_len.into())
    }

    /// True if `next`, which does not begin before it, is in part the same bytes; two chunks may have the same frame.
    fn overlaps(&self, next: &Self) -> bool {
        let is_same = Self { alone_len: next.alone_len, ..*self } == *next;
        self.pack == next.pack && next.offset < self.end() && !is_same
    }
}

impl Map {
    /// Approximate bytes of memory.
    #[must_use]
    pub fn weight(&self) -> u64 {
        (size_of_val(&*self.packs) + size_of_val(&*self.frames) + size_of_val(&*self.further)) as u64
    }

    /// Version of the format that it needs: version 1 whenever possible, for older programs.
    #[must_use]
    pub fn version(&self) -> u8 {
        if self.frames.iter().any(|frame| frame.alone_len > 0) { VERSION_MAX } else { VERSION }
    }

    /// The object, as it is stored.
    #[must_use]
    pub fn seal(&self) -> Bytes {
        seal_version(self.version(), Kind::Map, &self.encode(), true)
    }

    /// The body's bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new();
        out.bytes(self.manifest.as_bytes()).count(self.packs.len());
        for pack in &self.packs {
            out.bytes(&pack.id.session.to_bytes()).bytes(&pack.id.object.to_bytes());
            out.varint(pack.len).varint(pack.footer_len.into()).varint(pack.chunks.into());
        }
        out.count(self.chunks()).count(self.further.len());
        for (id, plain_len) in &self.further {
            out.bytes(id.as_bytes()).varint((*plain_len).into());
        }
        for frame in &self.frames {
            out.varint(frame.pack.into()).varint(frame.ordinal.into()).varint(frame.offset);
            out.varint(frame.stored_len.into()).u8(frame.codec.byte());
            out.varint(frame.base.map_or(0, NonZeroU32::get).into());
        }
        if self.version() == VERSION_MAX {
            for frame in self.frames.iter().filter(|frame| frame.base.is_some()) {
                out.varint(frame.alone_len.into());
            }
        }
        out.into_bytes()
    }

    /// Reads a body of this version of the format.
    ///
    /// # Errors
    /// Damaged or unsupported.
    pub fn decode(version: u8, body: &[u8]) -> Result<Self> {
        Self::decode_within(version, body, u64::MAX)
    }

    /// Reads a body, with at most `memory` bytes of memory.
    ///
    /// # Errors
    /// Damaged or unsupported; exhausted, if `memory` is too little.
    pub fn decode_within(version: u8, body: &[u8], memory: u64) -> Result<Self> {
        let mut reader = Reader::within(body, memory);
        let manifest = ManifestId::from_bytes(reader.array()?);
        let packs = reader.count(35)?;
        let packs = reader.kept_list(packs, pack)?;
        let chunks = reader.count(6)?;
        let further = reader.count(33)?;
        let further = reader.kept_list(further, further_chunk)?;
        let mut frames = reader.kept_list(chunks + further.len(), |reader| frame(reader, &packs))?;
        if version == VERSION_MAX {
            for frame in frames.iter_mut().filter(|frame| frame.base.is_some()) {
                frame.alone_len = reader.varint32()?;
            }
        }
        reader.finish()?;
        let map = Self { manifest, packs, frames, further };
        if map.version() != version {
            return Err(Error::damaged("map of version 2 has nothing that needs it"));
        }
        map.check_bases()?;
        map.check_repeated()?;
        Ok(map)
    }

    /// Checks that no pack and no further chunk is listed twice: overlaps would not be seen, and each would be read again.
    fn check_repeated(&self) -> Result<()> {
        let mut packs: Vec<&PackId> = self.packs.iter().map(|pack| &pack.id).collect();
        packs.sort_unstable();
        if let Some([pack, _]) = packs.array_windows().find(|[pack, next]| pack == next) {
            return Err(Error::damaged("map lists a pack twice").got(pack));
        }
        let mut further: Vec<&ChunkId> = self.further.iter().map(|(id, _)| id).collect();
        further.sort_unstable();
        match further.array_windows().find(|[chunk, next]| chunk == next) {
            Some([chunk, _]) => Err(Error::damaged("map lists a further chunk twice").got(chunk)),
            None => Ok(()),
        }
    }

    /// Chunks of the manifest.
    #[must_use]
    pub fn chunks(&self) -> usize {
        self.frames.len() - self.further.len()
    }

    /// Checks the frames by the plain lengths of the manifest's chunks: none is longer than its chunk, and two that overlap are the same.
    /// So a tree takes at most what its packs hold, wherever it is read to.
    ///
    /// # Errors
    /// Damaged, with the chunk or the pack.
    pub fn check_frames(&self, lens: &[u32]) -> Result<()> {
        let lens = lens.iter().chain(self.further.iter().map(|(_, len)| len));
        for ((chunk, frame), len) in self.frames.iter().enumerate().zip(lens) {
            if frame.stored_len > *len {
                return Err(Error::damaged(format!("map has a frame that is longer than its chunk {chunk}"))
                    .expected(format!("at most {len} bytes"))
                    .got(frame.stored_len));
            }
        }
        let mut ordered: Vec<&Frame> = self.frames.iter().collect();
        ordered.sort_unstable_by_key(|frame| (frame.pack, frame.offset, frame.stored_len));
        let overlap = ordered.array_windows().find(|[frame, next]| frame.overlaps(next));
        match overlap {
            None => Ok(()),
            Some([frame, next]) => Err(Error::damaged("map has frames that overlap in a pack")
                .expected(format!("chunk {} of the pack to end at {} or before", frame.ordinal, next.offset))
                .got(frame.end())),
        }
    }

    /// Checks that exactly the frames whose codec needs it have a base, with fewer hops than the frame, which excludes cycles.
    fn check_bases(&self) -> Result<()> {
        let sound = |frame: &Frame| match frame.base() {
            None => !frame.codec.has_base(),
            Some(base) => self.frames.get(base as usize).is_some_and(|base| frame.codec.may_have_base(base.codec)),
        };
        match self.frames.iter().position(|frame| !sound(frame)) {
            None => Ok(()),
            Some(chunk) => Err(Error::damaged("map has a chunk whose base is not one").got(format!("chunk {chunk}"))),
        }
    }

    /// The pack that holds `frame`.
    ///
    /// # Errors
    /// Damaged, if the frame is of another map.
    pub fn pack(&self, frame: &Frame) -> Result<&PackRef> {
        self.packs.get(frame.pack as usize).ok_or_else(|| Error::damaged("map names a pack that it does not list"))
    }
}

fn pack(reader: &mut Reader<'_>) -> Read<PackRef> {
    let session = SessionId::from_bytes(reader.array()?);
    let object = ObjectId::from_bytes(reader.array()?);
    let (len, footer_len, chunks) = (reader.varint()?, reader.varint32()?, reader.varint32()?);
    if len > PACK_LEN_MAX || u64::from(chunks) > PACK_CHUNKS_MAX || footer_len > footer_len_max(chunks) {
        return Err(reader.malformed("pack is impossibly long, or holds too many chunks"));
    }
    Ok(PackRef { id: Owned { session, object }, len, footer_len, chunks })
}

fn further_chunk(reader: &mut Reader<'_>) -> Read<(ChunkId, u32)> {
    let (id, plain_len) = (ChunkId::from_bytes(reader.array()?), reader.varint32()?);
    if plain_len == 0 || u64::from(plain_len) > CHUNK_LEN_MAX {
        return Err(reader.malformed("chunk's length is impossible"));
    }
    Ok((id, plain_len))
}

fn frame(reader: &mut Reader<'_>, packs: &[PackRef]) -> Result<Frame> {
    let (pack, ordinal) = (reader.varint32()?, reader.varint32()?);
    let (offset, stored_len) = (reader.varint()?, reader.varint32()?);
    let (codec, base) = (Codec::from_byte(reader.u8()?)?, NonZeroU32::new(reader.varint32()?));
    let home = packs.get(pack as usize).ok_or_else(|| reader.malformed("frame names no pack"))?;
    let fits = offset.checked_add(stored_len.into()).is_some_and(|end| end <= home.len) && ordinal < home.chunks;
    if !fits {
        return Err(reader.malformed("frame lies outside its pack").into());
    }
    Ok(Frame { pack, ordinal, offset, stored_len, codec, base, alone_len: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Map {
        let id = Owned::fresh(SessionId::random());
        let pack = PackRef { id, len: 5000, footer_len: 99, chunks: 4 };
        let frame = |ordinal, offset, codec, base| Frame {
            pack: 0,
            ordinal,
            offset,
            stored_len: 100,
            codec,
            base: NonZeroU32::new(base),
            alone_len: 0,
        };
        let frames = vec![
            frame(0, 16, Codec::Raw, 0),
            frame(1, 120, Codec::Difference, 4),
            frame(2, 220, Codec::Derived, 2),
            frame(3, 320, Codec::Zstd, 0),
        ];
        let further = vec![(ChunkId::of(b"base"), 500)];
        Map { manifest: ManifestId::of(b"m"), packs: vec![pack], frames, further }
    }

    #[test]
    fn a_map_survives_and_needs_version_2_only_for_lengths_without_a_base() {
        let mut map = sample();
        assert_eq!((map.version(), Map::decode(1, &map.encode()).unwrap()), (1, map.clone()));
        assert!(Map::decode(2, &map.encode()).is_err(), "lengths are missing");
        map.frames[1].alone_len = 300;
        assert_eq!((map.version(), Map::decode(2, &map.encode()).unwrap()), (2, map.clone()));
        assert!(Map::decode(1, &map.encode()).is_err(), "lengths are superfluous");
        let unneeded = [sample().encode(), vec![0, 0]].concat();
        assert!(Map::decode(2, &unneeded).is_err(), "all are unknown");
    }

    #[test]
    fn a_frame_outside_its_pack_is_refused() {
        let mut map = sample();
        map.frames[1].offset = 4950;
        assert!(Map::decode(1, &map.encode()).is_err());
        map.frames[1] = Frame { pack: 7, ..map.frames[0] };
        assert!(Map::decode(1, &map.encode()).is_err());
    }

    #[test]
    fn a_frame_that_is_longer_than_its_chunk_is_refused() {
        let mut map = sample();
        map.check_frames(&[100, 200, 200]).unwrap();
        let error = map.check_frames(&[100, 99, 200]).unwrap_err();
        assert!(error.to_string().contains("longer than its chunk 1"), "{error}");
        map.further[0].1 = 99;
        assert!(map.check_frames(&[100, 200, 200]).is_err(), "a base");
    }

    #[test]
    fn packs_and_further_chunks_that_are_listed_twice_are_refused() {
        let mut map = sample();
        map.packs.push(map.packs[0]);
        assert!(Map::decode(map.version(), &map.encode()).unwrap_err().to_string().contains("a pack twice"));
        let mut map = sample();
        map.further.push(map.further[0]);
        map.frames.push(map.frames[map.frames.len() - 1]);
        assert!(Map::decode(map.version(), &map.encode()).unwrap_err().to_string().contains("further chunk twice"));
    }

    #[test]
    fn frames_that_overlap_are_refused() {
        let check = |change: fn(&mut Map)| {
            let mut map = sample();
            change(&mut map);
            map.check_frames(&[500; 3])
        };
        check(|map| map.frames[1].alone_len = 7).unwrap();
        let error = check(|map| map.frames[1].offset = 115).unwrap_err();
        assert!(error.to_string().contains("overlap"), "{error}");
        assert!(check(|map| map.frames[0].stored_len = 500).is_err(), "all others");
        check(|map| map.frames[0] = map.frames[3]).unwrap();
        let other = |map: &mut Map| map.frames[0] = Frame { ordinal: 0, ..map.frames[3] };
        assert!(check(other).is_err(), "another chunk of the pack");
    }

    #[test]
    fn a_pack_beyond_the_limits_is_refused() {
        let mut map = sample();
        map.packs[0].len = PACK_LEN_MAX + 1;
        assert!(Map::decode(1, &map.encode()).is_err());
        (map.packs[0].len, map.packs[0].chunks) = (PACK_LEN_MAX, u32::MAX);
        assert!(Map::decode(1, &map.encode()).is_err(), "marking would take memory for each of them");
    }

    #[test]
    fn a_base_that_is_none_is_refused() {
        let broken = |frame: usize, base: u32| {
            let mut map = sample();
            map.frames[frame].base = NonZeroU32::new(base);
            Map::decode(1, &map.encode()).is_err()
        };
        assert!(broken(1, 0), "a difference without a base");
        assert!(broken(0, 4), "a raw chunk with one");
        assert!(broken(1, 5), "a base that the map lacks");
        assert!(broken(1, 2), "a difference to itself");
        assert!(broken(1, 3), "a difference to what is derived");
        assert!(!broken(2, 1), "derived from a raw chunk");
    }
}
