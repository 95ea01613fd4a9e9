//! A map: where each chunk of one manifest lies, so that a restore never reads the index.
//!
//! The body of an envelope of kind 'P':
//!
//! ```text
//! manifest id (32); packs: count, each: session (16), object (16), length, footer length, chunks
//! n, the manifest's chunks; m, further chunks that these are differences to (version 1 writes none)
//! m x: id (32), plain length
//! n+m x: pack, ordinal, offset, stored length, codec (1), base (0: none, else 1 + index of a chunk)
//! ```

use super::wire::{Read, Reader, Writer};
use crate::codec::Codec;
use crate::error::{Error, Result};
use crate::id::{ChunkId, ManifestId, ObjectId, Owned, PackId, SessionId};

/// A pack, with what is needed to open it in one ranged read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PackRef {
    /// Its name.
    pub id: PackId,
    /// Its length in bytes.
    pub len: u64,
    /// The length of its footer in bytes, without the trailer.
    pub footer_len: u32,
    /// How many chunks it holds.
    pub chunks: u32,
}

/// Where one chunk lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Which of the map's packs.
    pub pack: u32,
    /// Which chunk of that pack.
    pub ordinal: u32,
    /// Where the frame starts in the pack.
    pub offset: u64,
    /// Bytes of the frame.
    pub stored_len: u32,
    /// How it is stored.
    pub codec: Codec,
}

/// Where the chunks of one manifest lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Map {
    /// Whose chunks.
    pub manifest: ManifestId,
    /// The packs that hold them.
    pub packs: Vec<PackRef>,
    /// One frame for each chunk of the manifest, in its order.
    pub frames: Vec<Frame>,
}

impl Map {
    /// The body's bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new();
        out.bytes(self.manifest.as_bytes()).count(self.packs.len());
        for pack in &self.packs {
            out.bytes(&pack.id.session.to_bytes()).bytes(&pack.id.object.to_bytes());
            out.varint(pack.len).varint(pack.footer_len.into()).varint(pack.chunks.into());
        }
        out.count(self.frames.len()).count(0);
        for frame in &self.frames {
            out.varint(frame.pack.into()).varint(frame.ordinal.into()).varint(frame.offset);
            out.varint(frame.stored_len.into()).u8(frame.codec as u8).varint(0);
        }
        out.into_bytes()
    }

    /// Reads a body.
    ///
    /// # Errors
    /// Damaged or unsupported.
    pub fn decode(body: &[u8]) -> Result<Self> {
        let mut reader = Reader::new(body);
        let manifest = ManifestId::from_bytes(reader.array()?);
        let packs = reader.count(35)?;
        let packs = (0..packs).map(|_| pack(&mut reader)).collect::<Read<Vec<_>>>()?;
        let chunks = reader.count(6)?;
        if reader.count(33)? != 0 {
            return Err(Error::unsupported("map has chunks stored as differences").cure("use a newer towline"));
        }
        let frames = (0..chunks).map(|_| frame(&mut reader, &packs)).collect::<Result<Vec<_>>>()?;
        reader.finish()?;
        Ok(Self { manifest, packs, frames })
    }

    /// The pack that holds `frame`.
    ///
    /// # Errors
    /// Damaged, if the frame is of another map.
    pub fn pack(&self, frame: &Frame) -> Result<&PackRef> {
        self.packs.get(frame.pack as usize).ok_or_else(|| Error::damaged("map names a pack that it does not list"))
    }

    /// Which chunk is where, given the manifest's chunk ids.
    pub fn locate<'a>(&'a self, ids: &'a [ChunkId]) -> impl Iterator<Item = (ChunkId, &'a PackRef, &'a Frame)> + 'a {
        ids.iter().zip(&self.frames).filter_map(|(id, frame)| Some((*id, self.packs.get(frame.pack as usize)?, frame)))
    }
}

fn pack(reader: &mut Reader<'_>) -> Read<PackRef> {
    let session = SessionId::from_bytes(reader.array()?);
    let object = ObjectId::from_bytes(reader.array()?);
    let (len, footer_len, chunks) = (reader.varint()?, reader.varint32()?, reader.varint32()?);
    Ok(PackRef { id: Owned { session, object }, len, footer_len, chunks })
}

fn frame(reader: &mut Reader<'_>, packs: &[PackRef]) -> Result<Frame> {
    let (pack, ordinal) = (reader.varint32()?, reader.varint32()?);
    let (offset, stored_len) = (reader.varint()?, reader.varint32()?);
    let (codec, base) = (Codec::from_byte(reader.u8()?)?, reader.varint()?);
    if base != 0 {
        return Err(Error::unsupported("map has a chunk stored as a difference").cure("use a newer towline"));
    }
    let home = packs.get(pack as usize).ok_or_else(|| reader.malformed("frame names no pack"))?;
    let fits = offset.checked_add(stored_len.into()).is_some_and(|end| end <= home.len) && ordinal < home.chunks;
    if !fits {
        return Err(reader.malformed("frame lies outside its pack").into());
    }
    Ok(Frame { pack, ordinal, offset, stored_len, codec })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Map {
        let id = Owned::fresh(SessionId::random());
        let pack = PackRef { id, len: 5000, footer_len: 99, chunks: 2 };
        let frame = |ordinal, offset, codec| Frame { pack: 0, ordinal, offset, stored_len: 100, codec };
        let frames = vec![frame(0, 16, Codec::Raw), frame(1, 120, Codec::Zstd)];
        Map { manifest: ManifestId::of(b"m"), packs: vec![pack], frames }
    }

    #[test]
    fn a_map_survives() {
        let map = sample();
        assert_eq!(Map::decode(&map.encode()).unwrap(), map);
    }

    #[test]
    fn a_frame_outside_its_pack_is_refused() {
        let mut map = sample();
        map.frames[1].offset = 4950;
        assert!(Map::decode(&map.encode()).is_err());
        map.frames[1] = Frame { pack: 7, ..map.frames[0] };
        assert!(Map::decode(&map.encode()).is_err());
    }
}
