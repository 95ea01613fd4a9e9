//! Delivering: taking chunks out of what was read, each decoded, and proven to be what its id says.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;

use bytes::Bytes;

use super::pack_read::{Located, PackRead};
use crate::budget::Buffer;
use crate::chunk::Chunk;
use crate::codec::scratch::KEPT_MAX;
use crate::codec::{self, Codec, Encoded};
use crate::error::{Error, Result};
use crate::id::ChunkId;
use crate::repository::ChunkPlace;
use crate::repository::layout::{self, Family};

/// One chunk of a read.
#[derive(Debug)]
pub struct Delivered<'a> {
    /// Number of the chunk, as `locate` counts.
    pub index: u32,
    /// True if it was asked for; false if another chunk needs it.
    pub wanted: bool,
    /// The chunk, and its place.
    pub located: Located,
    /// Range of its frame in the buffer.
    pub stored: Range<usize>,
    /// The chunk, or the error of decoding it.
    pub chunk: Result<Chunk<'a>>,
}

/// Decodes a chunk to the given memory and verifies it there. After an error the memory has arbitrary bytes.
pub type Fill<'a> = &'a mut dyn FnMut(&mut [u8]) -> Result<()>;

/// A chunk as it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredChunk {
    /// Number of the chunk, as `locate` counts.
    pub index: u32,
    /// Id.
    pub id: ChunkId,
    /// Codec, which needs no base.
    pub codec: Codec,
    /// Bytes of the frame.
    pub stored_len: u32,
    /// Bytes of the chunk.
    pub plain_len: u32,
}

/// Takes the chunks of one read, in order. Any function of a [`Delivered`] does.
pub trait ChunkSink {
    /// Takes a chunk.
    ///
    /// # Errors
    /// Any error ends the delivery. The implementation decides whether a damaged chunk is one.
    fn take(&mut self, delivered: Delivered<'_>) -> Result<()>;

    /// Lets the requested chunk `index` be decoded directly into its final memory of `len` bytes. Returns false to get it by
    /// `take` instead.
    ///
    /// # Errors
    /// As `fill`.
    fn fill(&mut self, index: u32, len: usize, fill: Fill<'_>) -> Result<bool> {
        let _ = (index, len, fill);
        Ok(false)
    }

    /// Lets `read` write the frame of a chunk, unverified, to memory of a sink that decodes and verifies by itself. Returns false to get
    /// the chunk by `fill` or `take` instead.
    ///
    /// # Errors
    /// As `read`; errors of the sink.
    fn take_stored(&mut self, stored: StoredChunk, read: Fill<'_>) -> Result<bool> {
        let _ = (stored, read);
        Ok(false)
    }
}

impl<F: FnMut(Delivered<'_>) -> Result<()>> ChunkSink for F {
    fn take(&mut self, delivered: Delivered<'_>) -> Result<()> {
        self(delivered)
    }
}

/// A decoded chunk that may be the base of others.
struct Decoded {
    index: u32,
    plain: Vec<u8>,
    sound: bool,
}

thread_local! {
    /// Reusable buffers of this thread: fresh memory would cause page faults and be cleared each time.
    static SCRATCH: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}
/// Buffers that a thread keeps.
const SCRATCH_MAX: usize = 2;

/// Decodes and verifies each chunk of a read and passes it to `to`; `locate` gives the place and id of a chunk. Chunks whose base
/// is damaged count as damaged, too.
///
/// # Errors
/// Errors of `locate` and `to`.
pub fn deliver(
    read: &PackRead,
    buffer: &[u8],
    locate: impl Fn(u32) -> Result<Located>,
    mut to: impl ChunkSink,
) -> Result<()> {
    // Bases of the current chunk, and free buffers.
    let mut above: Vec<Decoded> = Vec::new();
    let mut spare = SCRATCH.take();
    let locate = |chunk: u32| read.given.get(&chunk).copied().map_or_else(|| locate(chunk), Ok);
    let last_uses = last_uses(read, locate)?;
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
        let next = read.chunks.get(at + 1).map(|next| locate(next.chunk)).transpose()?;
        let is_base = next.is_some_and(|next| next.base == Some(brought.chunk));
        if brought.wanted && !is_base && located.is_whole(frame) {
            let mut copy = |slot: &mut [u8]| {
                slot.copy_from_slice(frame);
                Ok(())
            };
            if to.take_stored(located.stored(brought.chunk), &mut copy)? {
                continue;
            }
        }
        if brought.wanted && !is_base && located.place.codec != Codec::Raw {
            let mut fill = |slot: &mut [u8]| verified_in(&located, base, frame, slot).map(drop);
            if to.fill(brought.chunk, located.place.plain_len as usize, &mut fill)? {
                continue;
            }
        }
        let mut scratch = spare.pop().unwrap_or_default();
        let chunk = verified(&located, base, frame, &mut scratch);
        let sound = chunk.is_ok();
        // A raw base is still in the read buffer: it is copied.
        let copied = chunk.as_ref().ok().filter(|_| is_base && located.place.codec == Codec::Raw);
        let copied = copied.map(|chunk| chunk.bytes().to_vec());
        to.take(Delivered { index: brought.chunk, wanted: brought.wanted, located, stored, chunk })?;
        // No later chunk needs this base: its buffer is used again, so that a chain takes two of them.
        if located.base.is_some_and(|base| last_uses.get(&base) == Some(&at)) {
            spare.extend(above.pop().map(|base| base.plain));
        }
        if is_base {
            above.push(Decoded { index: brought.chunk, plain: copied.unwrap_or(scratch), sound });
        } else {
            spare.push(scratch);
        }
    }
    spare.extend(above.into_iter().map(|base| base.plain));
    spare.retain(|buffer| buffer.capacity() <= KEPT_MAX);
    spare.truncate(SCRATCH_MAX);
    SCRATCH.set(spare);
    Ok(())
}

/// Index of the last chunk of `read` that needs each base.
fn last_uses(read: &PackRead, locate: impl Fn(u32) -> Result<Located>) -> Result<HashMap<u32, usize>> {
    let mut last = HashMap::new();
    for (at, planned) in read.chunks.iter().enumerate() {
        if let Some(base) = locate(planned.chunk)?.base {
            last.insert(base, at);
        }
    }
    Ok(last)
}

impl Located {
    /// The chunk as it is stored, with the number `index`.
    pub(super) fn stored(&self, index: u32) -> StoredChunk {
        let ChunkPlace { codec, stored_len, plain_len, .. } = self.place;
        StoredChunk { index, id: self.id, codec, stored_len, plain_len }
    }

    /// True if `frame` is as long as the chunk's, and needs no base.
    fn is_whole(&self, frame: &[u8]) -> bool {
        self.base.is_none() && frame.len() == self.place.stored_len as usize
    }
}

/// Decodes `frame` and verifies the chunk.
fn verified<'a>(
    located: &Located,
    base: Option<&Decoded>,
    frame: &'a [u8],
    scratch: &'a mut Vec<u8>,
) -> Result<Chunk<'a>> {
    let place = &located.place;
    if place.codec == Codec::Raw && frame.len() == place.plain_len as usize {
        return Chunk::verify(located.id, frame).map_err(|error| named(place, error));
    }
    scratch.resize(place.plain_len as usize, 0);
    verified_in(located, base, frame, scratch)
}

/// Decodes `frame`, which needs no base, to `out`, and verifies the chunk.
pub(super) fn verified_alone<'a>(located: &Located, frame: &[u8], out: &'a mut [u8]) -> Result<Chunk<'a>> {
    verified_in(located, None, frame, out)
}

/// Decodes `frame` to `out` and verifies the chunk.
fn verified_in<'a>(located: &Located, base: Option<&Decoded>, frame: &[u8], out: &'a mut [u8]) -> Result<Chunk<'a>> {
    let sound = base.is_none_or(|base| base.sound);
    let decoded = if sound {
        codec::decode_into(located.place.codec, frame, base.map(|base| base.plain.as_slice()), out)
    } else {
        Err(Error::damaged("the base of this chunk is damaged"))
    };
    decoded.and_then(|()| Chunk::verify(located.id, out)).map_err(|error| named(&located.place, error))
}

/// Adds the chunk's place and a help text to `error`.
pub(super) fn named(place: &ChunkPlace, error: Error) -> Error {
    let key = layout::owned(Family::Pack, place.pack);
    error
        .at(format!("{key}, chunk {} at byte {}", place.ordinal, place.offset))
        .help("`towline verify --data --repair` sets the pack aside; save the same content, under any name, and run it again: it heals what used it")
}

/// Encoded frames of one read, each verified, and their buffer.
#[derive(Debug)]
pub struct Stored {
    bytes: Bytes,
    frames: Vec<(ChunkId, ChunkPlace, StoredFrame)>,
}

/// A frame of [`Stored`].
#[derive(Debug)]
enum StoredFrame {
    /// Range of the buffer, for a frame that is kept as it was read.
    Read(Range<usize>),
    /// Encoded anew.
    Anew(Encoded),
}

impl Stored {
    /// Verifies every requested frame of a read, and returns them.
    ///
    /// # Errors
    /// Damaged, with pack and chunk, if one is damaged.
    pub fn take(locate: impl Fn(u32) -> Result<Located>, read: &PackRead, buffer: Buffer) -> Result<Self> {
        Self::take_with(locate, read, buffer, |_, _, _| None)
    }

    /// As [`Stored::take`], but with those frames that `anew` makes of a chunk's number, the chunk and its frame.
    ///
    /// # Errors
    /// As [`Stored::take`].
    pub fn take_with(
        locate: impl Fn(u32) -> Result<Located>,
        read: &PackRead,
        buffer: Buffer,
        anew: impl Fn(u32, Chunk<'_>, &Encoded) -> Option<Encoded>,
    ) -> Result<Self> {
        let bytes = buffer.freeze();
        let mut frames = Vec::with_capacity(read.chunks.len());
        deliver(read, &bytes, locate, |delivered: Delivered<'_>| {
            let chunk = delivered.chunk?;
            if delivered.wanted {
                let (id, place, range) = (chunk.id(), delivered.located.place, delivered.stored);
                let stored = Encoded { codec: place.codec, bytes: bytes.slice(range.clone()), base: place.base };
                let anew = anew(delivered.index, chunk, &stored).map(StoredFrame::Anew);
                frames.push((id, place, anew.unwrap_or(StoredFrame::Read(range))));
            }
            Ok(())
        })?;
        Ok(Self { bytes, frames })
    }

    /// True if most of the buffer is requested frames, so that it is worth keeping without a copy.
    #[must_use]
    pub fn is_mostly_used(&self) -> bool {
        let used = self.frames.iter().map(|(.., frame)| match frame {
            StoredFrame::Read(range) => range.len(),
            StoredFrame::Anew(_) => 0,
        });
        used.sum::<usize>() * 2 >= self.bytes.len()
    }

    /// Each frame, with its chunk's id and where it came from.
    pub fn frames(self) -> impl Iterator<Item = (ChunkId, ChunkPlace, Encoded)> {
        let Self { bytes, frames } = self;
        frames.into_iter().map(move |(id, place, frame)| match frame {
            StoredFrame::Read(range) => {
                (id, place, Encoded { codec: place.codec, bytes: bytes.slice(range), base: place.base })
            }
            StoredFrame::Anew(encoded) => (id, place, encoded),
        })
    }
}
