//! Pins: a pin keeps chunks in the cache until it is released or expires.
//!
//! Each pin is a file in `pins/`, named by its id, and synced before the pin is confirmed:
//!
//! ```text
//! 0  8  magic "TWLCPIN1"    owner, reason: strings    created, expires (0: never): signed
//! n: varint, then for each chunk its id (32) and stored length (4)    BLAKE3 of all before (32)
//! ```
//!
//! In memory a pin keeps eight bytes for each chunk, and each pinned chunk about thirty, whether it is there already or not.

mod ledger;

use std::path::{Path, PathBuf};

pub(super) use self::ledger::Ledger;
use super::allocator::UNIT;
use super::extent;
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::format::wire::{Malformed, Reader, Writer};
use crate::id::{ChunkId, PinId};

const MAGIC: &[u8; 8] = b"TWLCPIN1";
const DIGEST_LEN: usize = 32;
/// Bytes of a chunk in the file.
const CHUNK_LEN: usize = ChunkId::LEN + 4;
/// Maximum bytes before the chunks: magic, two texts, and numbers.
const HEAD_LEN_MAX: u64 = 4096;
/// Chunks that are passed at a time.
const BATCH: usize = 4096;
/// Maximum bytes of an owner's name, and of a reason.
const TEXT_LEN_MAX: usize = 1024;

/// A chunk to keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PinChunk {
    /// Id of the chunk.
    pub id: ChunkId,
    /// Bytes of its frame by the map, which estimate the size of a chunk that is not present yet.
    pub stored_len: u32,
}

/// Request for a pin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinRequest {
    /// Requester, for display.
    pub owner: String,
    /// Purpose: a name, a job.
    pub reason: String,
    /// Time of expiry; none for a pin that does not expire.
    pub expires: Option<Timestamp>,
    /// Chunks to keep, present or not. Duplicates count once.
    pub chunks: Vec<PinChunk>,
}

/// A pin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pin {
    /// Id of the pin.
    pub id: PinId,
    /// Requester.
    pub owner: String,
    /// Purpose.
    pub reason: String,
    /// Time of creation.
    pub created: Timestamp,
    /// Time of expiry, if it expires.
    pub expires: Option<Timestamp>,
    /// Chunks it keeps.
    pub chunks: u64,
    /// Bytes on the disk for these, by the lengths that the map tells; what several pins keep counts for each.
    pub bytes: u64,
}

/// Limit of the pins of some owners together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinLimit {
    /// Prefix of the owners' names.
    pub owners: String,
    /// Maximum bytes on the disk; a chunk with several pins counts once.
    pub bytes: u64,
    /// Maximum number of pins.
    pub pins: usize,
    /// Maximum number of chunks in all of these pins; a chunk counts for each pin, because its id is stored for each.
    pub chunks: u64,
}

/// The answer to a [`PinRequest`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Pinned {
    /// The pin exists, and survives a power loss.
    Kept(Pin),
    /// There is not enough space, and nothing was changed.
    Lacking {
        /// Bytes missing, which ending other pins or more capacity would provide.
        bytes: u64,
        /// True if the disk has less space than the capacity allows.
        disk_full: bool,
    },
}

impl PinRequest {
    /// Sorted, each chunk once.
    pub(super) fn normal(mut self) -> Result<Self> {
        if self.owner.len().max(self.reason.len()) > TEXT_LEN_MAX {
            return Err(Error::usage("owner or reason of a pin is too long")
                .expected(format!("at most {TEXT_LEN_MAX} bytes"))
                .got(self.owner.len().max(self.reason.len())));
        }
        self.chunks.sort_unstable_by_key(|chunk| chunk.id);
        self.chunks.dedup_by_key(|chunk| chunk.id);
        Ok(self)
    }

    /// Converts to a pin.
    pub(super) fn promise(&self, id: PinId, created: Timestamp) -> Pin {
        let (owner, reason) = (self.owner.clone(), self.reason.clone());
        let units: u64 = self.weights().iter().map(|(_, weight)| u64::from(*weight)).sum();
        let chunks = self.chunks.len() as u64;
        Pin { id, owner, reason, created, expires: self.expires, chunks, bytes: units * UNIT }
    }

    /// Index key and space of each chunk.
    pub(super) fn weights(&self) -> Vec<(u64, u16)> {
        self.chunks.iter().map(|chunk| (chunk.id.prefix(), extent::weight(chunk.stored_len.into()))).collect()
    }

    /// The pin's file.
    pub(super) fn encode(&self, created: Timestamp) -> Vec<u8> {
        let mut out = Writer::new();
        out.bytes(MAGIC).string(self.owner.as_bytes()).string(self.reason.as_bytes());
        out.signed(created.0).u8(u8::from(self.expires.is_some())).signed(self.expires.map_or(0, |at| at.0));
        out.count(self.chunks.len());
        out.each(&self.chunks, |out, chunk| out.bytes(chunk.id.as_bytes()).u32(chunk.stored_len));
        let mut bytes = out.into_bytes();
        let digest = blake3::hash(&bytes);
        bytes.extend_from_slice(digest.as_bytes());
        bytes
    }

    /// Reads a pin's file: the request and its time.
    pub(super) fn decode(bytes: &[u8]) -> Result<(Self, Timestamp)> {
        let end = bytes.len().saturating_sub(DIGEST_LEN);
        if blake3::hash(&bytes[..end]).as_bytes()[..] != bytes[end..] {
            return Err(Error::damaged("pin does not match its digest"));
        }
        let mut reader = Reader::new(&bytes[..end]);
        let fields = (|| {
            if reader.array::<8>()? != *MAGIC {
                return Err(reader.malformed("not a pin"));
            }
            let (owner, reason) = (reader.text(TEXT_LEN_MAX)?.to_owned(), reader.text(TEXT_LEN_MAX)?.to_owned());
            let (created, expires) = (Timestamp(reader.signed()?), reader.flag()?);
            let expires = Some(Timestamp(reader.signed()?)).filter(|_| expires);
            let count = reader.count(ChunkId::LEN + 4)?;
            let mut chunks = Vec::with_capacity(count);
            for _ in 0..count {
                chunks.push(PinChunk { id: ChunkId::from_bytes(reader.array()?), stored_len: reader.u32()? });
            }
            reader.finish()?;
            Ok::<_, Malformed>((Self { owner, reason, expires, chunks }, created))
        })();
        Ok(fields?)
    }
}

/// Passes the chunks of a pin's file of `len` bytes in batches. The digest is checked at the end.
///
/// # Errors
/// Errors of `read`; damaged, if the file is.
pub(super) fn each_chunk(
    len: u64,
    mut read: impl FnMut(&mut [u8], u64) -> Result<()>,
    mut each: impl FnMut(&[PinChunk]),
) -> Result<()> {
    let damaged = || Error::damaged("pin does not match its digest");
    let end = len.checked_sub(DIGEST_LEN as u64).ok_or_else(damaged)?;
    let size = |bytes: u64| usize::try_from(bytes).map_err(|_| damaged());
    let mut head = vec![0; size(end.min(HEAD_LEN_MAX))?];
    read(&mut head, 0)?;
    let (count, mut at) = read_head(&head)?;
    if count.checked_mul(CHUNK_LEN as u64) != end.checked_sub(at) {
        return Err(damaged());
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update(&head[..size(at)?]);
    let (mut buffer, mut batch) = (Vec::new(), Vec::with_capacity(BATCH));
    while at < end {
        buffer.resize(size((end - at).min((BATCH * CHUNK_LEN) as u64))?, 0);
        read(&mut buffer, at)?;
        hasher.update(&buffer);
        let mut reader = Reader::new(&buffer);
        batch.clear();
        for _ in 0..buffer.len() / CHUNK_LEN {
            batch.push(PinChunk { id: ChunkId::from_bytes(reader.array()?), stored_len: reader.u32()? });
        }
        each(&batch);
        at += buffer.len() as u64;
    }
    let mut digest = [0; DIGEST_LEN];
    read(&mut digest, end)?;
    if *hasher.finalize().as_bytes() == digest { Ok(()) } else { Err(damaged()) }
}

/// Number of chunks of a pin whose file begins with `head`, and where they begin.
fn read_head(head: &[u8]) -> Result<(u64, u64)> {
    let mut reader = Reader::new(head);
    let fields = (|| {
        if reader.array::<8>()? != *MAGIC {
            return Err(reader.malformed("not a pin"));
        }
        reader.text(TEXT_LEN_MAX)?;
        reader.text(TEXT_LEN_MAX)?;
        reader.signed()?;
        reader.flag()?;
        reader.signed()?;
        let count = reader.varint()?;
        Ok::<_, Malformed>((count, head.len() - reader.remaining()))
    })();
    let (count, at) = fields?;
    Ok((count, at as u64))
}

/// The folder of pins.
pub(super) fn folder(dir: &Path) -> PathBuf {
    dir.join("pins")
}

/// Path of a pin.
pub(super) fn path(dir: &Path, id: PinId) -> PathBuf {
    folder(dir).join(id.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pin_survives_its_file_and_no_flipped_bit_does() {
        let chunk = |n: u32| PinChunk { id: ChunkId::of(&n.to_le_bytes()), stored_len: n };
        let chunks = [3, 1, 2, 1].map(chunk).to_vec();
        let request =
            PinRequest { owner: "me".into(), reason: "run/step-1".into(), expires: Some(Timestamp(-5)), chunks };
        let request = request.normal().unwrap();
        assert_eq!(request.chunks.len(), 3);
        let bytes = request.encode(Timestamp(9));
        assert_eq!(PinRequest::decode(&bytes).unwrap(), (request, Timestamp(9)));
        for bit in 0..bytes.len() * 8 {
            let mut bent = bytes.clone();
            bent[bit / 8] ^= 1 << (bit % 8);
            assert!(PinRequest::decode(&bent).is_err());
        }
        (0..bytes.len()).for_each(|cut| assert!(PinRequest::decode(&bytes[..cut]).is_err()));
    }

    #[test]
    fn the_chunks_of_a_file_are_read_in_batches() {
        let chunks: Vec<_> =
            (0..10_000_u32).map(|n| PinChunk { id: ChunkId::of(&n.to_le_bytes()), stored_len: n }).collect();
        let request = PinRequest { owner: "me".into(), reason: "r".repeat(1000), expires: None, chunks };
        let request = request.normal().unwrap();
        let read_all = |bytes: &[u8]| {
            let mut all = Vec::new();
            let read = |buffer: &mut [u8], at: u64| {
                let at = usize::try_from(at).unwrap();
                buffer.copy_from_slice(bytes.get(at..at + buffer.len()).ok_or_else(|| Error::other("too short"))?);
                Ok(())
            };
            each_chunk(bytes.len() as u64, read, |batch| all.extend_from_slice(batch)).map(|()| all)
        };
        let bytes = request.encode(Timestamp(9));
        assert_eq!(read_all(&bytes).unwrap(), request.chunks);
        let empty = PinRequest { chunks: Vec::new(), ..request }.encode(Timestamp(9));
        assert!(read_all(&empty).unwrap().is_empty());
        for cut in [0, 8, 31, 40, 1000, bytes.len() / 2, bytes.len() - 1] {
            assert!(read_all(&bytes[..cut]).is_err(), "{cut}");
        }
        for at in [3, 500, 1030, 5000, bytes.len() - 5] {
            let mut bent = bytes.clone();
            bent[at] ^= 1;
            assert!(read_all(&bent).is_err(), "{at}");
        }
    }
}
