//! From chunks to few ranged reads, and from reads to verified chunks.
//!
//! One mechanism for all who read packs: [`read_pack`] brings a range into a budgeted buffer, [`deliver`] takes the
//! chunks out of it, each proven to be what its id says. Restores place the chunks, syncs pass on their stored bytes,
//! verification only wants to know.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use object_store::GetResultPayload;

use super::layout::{self, Family};
use super::{Place, Repository, Saved, objects};
use crate::budget::{Budget, Buffer};
use crate::chunk::Chunk;
use crate::codec::{self, Codec, Encoded};
use crate::error::{Error, ErrorKind, Result};
use crate::id::{ChunkId, PackId};
use crate::limits::{KIB, MIB};
use crate::progress::Progress;

/// Bytes between two frames that are read rather than skipped: a request costs about as much as this takes to pass.
const GAP: u64 = 256 * KIB;

/// No read over a network is longer than this, unless one frame is: long enough for a request's cost not to show, short
/// enough for many to be in flight.
const READ_MAX: u64 = 8 * MIB;
/// No read of a local disk is longer: what was read is verified and written while it is in the processor's cache.
const LOCAL_READ_MAX: u64 = 2 * MIB;

/// One ranged read of a pack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackRead {
    /// Of which pack.
    pub pack: PackId,
    /// Which of its bytes.
    pub range: Range<u64>,
    /// Which chunks lie there, by offset: numbers that whoever asked for the read can tell the places of.
    pub chunks: Vec<u32>,
}

/// Takes verified chunks, on whatever thread they were verified: the chunk's index in the manifest, and the chunk.
pub type Sink = Arc<dyn Fn(u32, Chunk<'_>) -> Result<()> + Send + Sync>;

/// One chunk of a read.
#[derive(Debug)]
pub struct Delivered<'a> {
    /// Its number in the read.
    pub index: u32,
    /// Its id.
    pub id: ChunkId,
    /// Where it lies.
    pub place: Place,
    /// Where its frame lies in the buffer.
    pub stored: Range<usize>,
    /// The chunk, or why the frame is not it.
    pub chunk: Result<Chunk<'a>>,
}

impl Saved {
    /// The manifest's chunk number `chunk`, and where the map says that it lies.
    ///
    /// # Errors
    /// Damaged, if the map names what is not there.
    pub fn place(&self, chunk: u32) -> Result<(ChunkId, Place)> {
        let (at, chunks) = (chunk as usize, &self.manifest.chunks);
        let (Some(frame), Some(&id), Some(&plain_len)) =
            (self.map.frames.get(at), chunks.ids.get(at), chunks.lens.get(at))
        else {
            return Err(Error::damaged("map lacks a chunk of its manifest").got(chunk));
        };
        let (pack, ordinal, offset) = (self.map.pack(frame)?.id, frame.ordinal, frame.offset);
        Ok((id, Place { pack, ordinal, offset, stored_len: frame.stored_len, plain_len, codec: frame.codec }))
    }
}

/// The longest read worth asking `repository` for under `budget`, in bytes.
#[must_use]
pub fn longest_read(repository: &Repository, budget: &Budget) -> u64 {
    let longest = if repository.store().is_local() { LOCAL_READ_MAX } else { READ_MAX };
    (budget.total() / 32).clamp(MIB, longest)
}

/// The reads that bring the `wanted` chunks of a tree, none longer than `longest` unless one frame is. Pure.
///
/// # Errors
/// Damaged, if the map names what is not there.
pub fn plan(saved: &Saved, wanted: impl IntoIterator<Item = u32>, longest: u64) -> Result<Vec<PackRead>> {
    let mut frames = Vec::new();
    for chunk in wanted {
        let frame = saved.map.frames.get(chunk as usize);
        let frame = frame.ok_or_else(|| Error::damaged("map lacks a chunk of its manifest").got(chunk))?;
        frames.push((frame.pack, frame.offset, chunk));
    }
    frames.sort_unstable();
    frames.dedup();
    let mut reads: Vec<PackRead> = Vec::new();
    for (_, offset, chunk) in frames {
        let (_, place) = saved.place(chunk)?;
        let end = offset + u64::from(place.stored_len);
        match reads.last_mut() {
            Some(last)
                if last.pack == place.pack
                    && offset <= last.range.end + GAP
                    && end.max(last.range.end) - last.range.start <= longest =>
            {
                last.range.end = last.range.end.max(end);
                last.chunks.push(chunk);
            }
            _ => reads.push(PackRead { pack: place.pack, range: offset..end, chunks: vec![chunk] }),
        }
    }
    Ok(reads)
}

/// Carries out `reads`, handing each chunk to `sink` once it is verified; returns the bytes read.
///
/// # Errors
/// Not found, if a pack is gone; damaged, naming pack and chunk, if two tries gave wrong bytes; what `sink` returns.
///
/// # Cancel safety
/// Safe: what `sink` was not given yet, it will not get.
pub async fn fetch(
    repository: &Repository,
    saved: &Arc<Saved>,
    reads: Vec<PackRead>,
    sink: Sink,
    progress: &Progress,
) -> Result<u64> {
    let fetches = stream::iter(reads).map(|read| {
        let (saved, sink) = (Arc::clone(saved), Arc::clone(&sink));
        async move {
            let len = read.range.end - read.range.start;
            let work = move |read: &PackRead, buffer: Buffer| {
                let mut plain = 0;
                deliver(
                    read,
                    &buffer,
                    |chunk| saved.place(chunk),
                    |delivered| {
                        plain += u64::from(delivered.place.plain_len);
                        sink(delivered.index, delivered.chunk?)
                    },
                )?;
                Ok(plain)
            };
            let plain = read_pack(repository, repository.budget(), read, work).await?;
            progress.moved(len);
            progress.advance(plain);
            Ok(len)
        }
    });
    fetches.buffer_unordered(repository.parallelism()).try_fold(0, |sum, len| async move { Ok(sum + len) }).await
}

/// Brings one read into a buffer of `budget` and hands it to `work`, on a thread where computing is fine. If `work` finds
/// damage or the body breaks, it gets a second chance: it may have been the way and not the store.
///
/// # Errors
/// Not found, if the pack is gone; unreachable; what `work` returns.
///
/// # Cancel safety
/// Safe: it only reads; `work` may go on for a moment.
pub async fn read_pack<T: Send + 'static>(
    repository: &Repository,
    budget: &Budget,
    read: PackRead,
    work: impl Fn(&PackRead, Buffer) -> Result<T> + Clone + Send + 'static,
) -> Result<T> {
    let read = Arc::new(read);
    match attempt(repository, budget, &read, work.clone()).await {
        Err(error) if matches!(error.kind(), ErrorKind::Damaged | ErrorKind::Unreachable) => {
            tracing::debug!("reading again: {error:?}");
            objects::retry(|| attempt(repository, budget, &read, work.clone())).await
        }
        settled => settled,
    }
}

async fn attempt<T: Send + 'static>(
    repository: &Repository,
    budget: &Budget,
    read: &Arc<PackRead>,
    work: impl Fn(&PackRead, Buffer) -> Result<T> + Send + 'static,
) -> Result<T> {
    let len = usize::try_from(read.range.end - read.range.start).unwrap_or(usize::MAX);
    let mut buffer = budget.buffer(len).await?;
    let key = layout::owned(Family::Pack, read.pack);
    let payload = objects::get_range(&**repository.store().objects(), &key, read.range.clone()).await?.payload;
    let local = match payload {
        GetResultPayload::File(file, path) => Some((file, path)),
        GetResultPayload::Stream(stream) => {
            objects::drain(stream, &key, &mut buffer).await?;
            None
        }
    };
    let read = Arc::clone(read);
    let work = move || {
        if let Some((file, path)) = local {
            objects::read_file(&file, &path, read.range.start, &mut buffer)?;
        }
        work(&read, buffer)
    };
    tokio::task::spawn_blocking(work).await.map_err(|error| Error::other("a worker stopped").source(error))?
}

/// Decodes and verifies each chunk of a read and hands it to `take`; `place` tells where a chunk lies, and its id.
///
/// # Errors
/// What `place` and `take` return: it is for `take` to say whether a damaged chunk ends the matter.
pub fn deliver(
    read: &PackRead,
    buffer: &[u8],
    place: impl Fn(u32) -> Result<(ChunkId, Place)>,
    mut take: impl FnMut(Delivered<'_>) -> Result<()>,
) -> Result<()> {
    let mut scratch = Vec::new();
    for &index in &read.chunks {
        let (id, place) = place(index)?;
        let start = usize::try_from(place.offset.saturating_sub(read.range.start)).unwrap_or(usize::MAX);
        let stored = start..start.saturating_add(place.stored_len as usize);
        let frame = buffer.get(stored.clone()).unwrap_or_default();
        let chunk = verified(id, &place, frame, &mut scratch);
        take(Delivered { index, id, place, stored, chunk })?;
    }
    Ok(())
}

/// The frames of one read as they are stored, each verified, and the buffer that they lie in.
#[derive(Debug)]
pub struct Stored {
    bytes: Bytes,
    frames: Vec<(ChunkId, Place, Range<usize>)>,
}

impl Stored {
    /// The frames of a read of the tree `saved`, once every one of them is proven to be its chunk.
    ///
    /// # Errors
    /// Damaged, naming pack and chunk, if one is not.
    pub fn take(saved: &Saved, read: &PackRead, buffer: Buffer) -> Result<Self> {
        let mut frames = Vec::with_capacity(read.chunks.len());
        deliver(
            read,
            &buffer,
            |chunk| saved.place(chunk),
            |delivered| {
                frames.push((delivered.chunk?.id(), delivered.place, delivered.stored));
                Ok(())
            },
        )?;
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
        frames
            .into_iter()
            .map(move |(id, place, range)| (id, place, Encoded { codec: place.codec, bytes: bytes.slice(range) }))
    }
}

/// The chunk `id`, if that is what `frame` decodes to.
fn verified<'a>(id: ChunkId, place: &Place, frame: &'a [u8], scratch: &'a mut Vec<u8>) -> Result<Chunk<'a>> {
    let named = |error: Error| {
        let key = layout::owned(Family::Pack, place.pack);
        error
            .at(format!("{key}, chunk {} at byte {}", place.ordinal, place.offset))
            .cure("towline verify --data --repair condemns the pack; saving the same content again heals what used it")
    };
    let plain = if place.codec == Codec::Raw && frame.len() == place.plain_len as usize {
        frame
    } else {
        scratch.resize(place.plain_len as usize, 0);
        codec::decode_into(place.codec, frame, scratch).map_err(named)?;
        scratch
    };
    Chunk::verify(id, plain).map_err(named)
}
