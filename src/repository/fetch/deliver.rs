//! Delivering: taking chunks out of what was read, each decoded, and proven to be what its id says.

use std::ops::Range;

use bytes::Bytes;

use super::plan::{Located, PackRead};
use crate::budget::Buffer;
use crate::chunk::Chunk;
use crate::codec::{self, Codec, Encoded};
use crate::error::{Error, Result};
use crate::id::ChunkId;
use crate::repository::Place;
use crate::repository::layout::{self, Family};

/// One chunk of a read.
#[derive(Debug)]
pub struct Delivered<'a> {
    /// Its number in the read.
    pub index: u32,
    /// Was it asked for?
    pub wanted: bool,
    /// What it is, and where.
    pub located: Located,
    /// Where its frame lies in the buffer.
    pub stored: Range<usize>,
    /// The chunk, or why the frame is not it.
    pub chunk: Result<Chunk<'a>>,
}

/// A chunk that others may be differences to.
struct Decoded {
    index: u32,
    plain: Vec<u8>,
    sound: bool,
}

/// Decodes and verifies each chunk of a read and hands it to `take`; `locate` tells where a chunk lies, and its id. What a
/// damaged chunk is the base of is told as damaged too.
///
/// # Errors
/// What `locate` and `take` return: it is for `take` to say whether a damaged chunk ends the matter.
pub fn deliver(
    read: &PackRead,
    buffer: &[u8],
    locate: impl Fn(u32) -> Result<Located>,
    mut take: impl FnMut(Delivered<'_>) -> Result<()>,
) -> Result<()> {
    // The bases above the present chunk, and scratch that is free again.
    let mut above: Vec<Decoded> = Vec::new();
    let mut spare: Vec<Vec<u8>> = Vec::new();
    for (at, brought) in read.chunks.iter().enumerate() {
        let located = locate(brought.chunk)?;
        while above.last().is_some_and(|base| located.base != Some(base.index)) {
            spare.extend(above.pop().map(|base| base.plain));
        }
        let base = above.last();
        if located.base.is_some() && base.is_none() {
            return Err(Error::other("a chunk was read without its base").at(located.id));
        }
        let stored = read.find(&located).unwrap_or_default();
        let frame = buffer.get(stored.clone()).unwrap_or_default();
        let mut scratch = spare.pop().unwrap_or_default();
        let chunk = verified(&located, base, frame, &mut scratch);
        let next = read.chunks.get(at + 1).map(|next| locate(next.chunk)).transpose()?;
        let is_base = next.is_some_and(|next| next.base == Some(brought.chunk));
        let sound = chunk.is_ok();
        // What lies in the buffer as it is has not been copied yet.
        let copied = chunk.as_ref().ok().filter(|_| is_base && located.place.codec == Codec::Raw);
        let copied = copied.map(|chunk| chunk.bytes().to_vec());
        take(Delivered { index: brought.chunk, wanted: brought.wanted, located, stored, chunk })?;
        if is_base {
            above.push(Decoded { index: brought.chunk, plain: copied.unwrap_or(scratch), sound });
        } else {
            spare.push(scratch);
        }
    }
    Ok(())
}

/// The chunk, if that is what `frame` decodes to.
fn verified<'a>(
    located: &Located,
    base: Option<&Decoded>,
    frame: &'a [u8],
    scratch: &'a mut Vec<u8>,
) -> Result<Chunk<'a>> {
    let place = &located.place;
    let named = |error: Error| {
        let key = layout::owned(Family::Pack, place.pack);
        error
            .at(format!("{key}, chunk {} at byte {}", place.ordinal, place.offset))
            .cure("towline verify --data --repair condemns the pack; saving the same content again heals what used it")
    };
    if base.is_some_and(|base| !base.sound) {
        return Err(named(Error::damaged("the chunk that this one is a difference to is damaged")));
    }
    let plain = if place.codec == Codec::Raw && frame.len() == place.plain_len as usize {
        frame
    } else {
        scratch.resize(place.plain_len as usize, 0);
        let base = base.map(|base| base.plain.as_slice());
        codec::decode_into(place.codec, frame, base, scratch).map_err(named)?;
        scratch
    };
    Chunk::verify(located.id, plain).map_err(named)
}

/// The frames of one read as they are stored, each verified, and the buffer that they lie in.
#[derive(Debug)]
pub struct Stored {
    bytes: Bytes,
    frames: Vec<(ChunkId, Place, Range<usize>)>,
}

impl Stored {
    /// The frames of a read that were asked for, once every one of them is proven to be its chunk.
    ///
    /// # Errors
    /// Damaged, naming pack and chunk, if one is not.
    pub fn take(locate: impl Fn(u32) -> Result<Located>, read: &PackRead, buffer: Buffer) -> Result<Self> {
        let mut frames = Vec::with_capacity(read.chunks.len());
        deliver(read, &buffer, locate, |delivered| {
            let id = delivered.chunk?.id();
            if delivered.wanted {
                frames.push((id, delivered.located.place, delivered.stored));
            }
            Ok(())
        })?;
        Ok(Self { bytes: buffer.freeze(), frames })
    }

    /// Is most of the buffer frames that were asked for, and so worth keeping as it is?
    #[must_use]
    pub fn is_mostly_used(&self) -> bool {
        self.frames.iter().map(|(_, _, range)| range.len()).sum::<usize>() * 2 >= self.bytes.len()
    }

    /// Each frame, with its chunk's id and where it came from.
    pub fn frames(self) -> impl Iterator<Item = (ChunkId, Place, Encoded)> {
        let Self { bytes, frames } = self;
        frames.into_iter().map(move |(id, place, range)| {
            (id, place, Encoded { codec: place.codec, bytes: bytes.slice(range), base: place.base })
        })
    }
}
