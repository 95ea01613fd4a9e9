//! From chunks to few ranged reads, and from reads to verified chunks.

use std::ops::Range;
use std::sync::Arc;

use futures::{StreamExt as _, TryStreamExt as _, stream};
use object_store::GetResultPayload;

use super::layout::{self, Family};
use super::{Repository, Saved, objects};
use crate::budget::Buffer;
use crate::chunk::Chunk;
use crate::codec::{self, Codec};
use crate::error::{Error, ErrorKind, Result};
use crate::format::PackRef;
use crate::limits::KIB;
use crate::progress::Progress;

/// Bytes between two frames that are read rather than skipped: a request costs about as much as this takes to pass.
const GAP: u64 = 256 * KIB;

/// One ranged read of a pack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackRead {
    /// Of which pack.
    pub pack: PackRef,
    /// Which of its bytes.
    pub range: Range<u64>,
    /// Which of the manifest's chunks lie there, by offset.
    pub chunks: Vec<u32>,
}

/// Takes verified chunks, on whatever thread they were verified: the chunk's index in the manifest, and the chunk.
pub type Sink = Arc<dyn Fn(u32, Chunk<'_>) -> Result<()> + Send + Sync>;

/// The reads that bring the `wanted` chunks of a tree, none longer than `longest` unless one frame is. Pure.
///
/// # Errors
/// Damaged, if the map names what is not there.
pub fn plan(saved: &Saved, wanted: impl IntoIterator<Item = u32>, longest: u64) -> Result<Vec<PackRead>> {
    let frame = |chunk: u32| saved.map.frames.get(chunk as usize).map(|frame| (frame.pack, frame.offset, chunk));
    let mut frames = Vec::new();
    for chunk in wanted {
        frames.push(frame(chunk).ok_or_else(|| Error::damaged("map lacks a chunk of its manifest").got(chunk))?);
    }
    frames.sort_unstable();
    frames.dedup();
    let mut reads: Vec<PackRead> = Vec::new();
    for (pack, offset, chunk) in frames {
        let pack = saved.map.packs.get(pack as usize).ok_or_else(|| Error::damaged("map lacks a pack"))?;
        let stored = saved.map.frames.get(chunk as usize).map_or(0, |frame| u64::from(frame.stored_len));
        let end = offset + stored;
        match reads.last_mut() {
            Some(last)
                if last.pack.id == pack.id
                    && offset <= last.range.end + GAP
                    && end.max(last.range.end) - last.range.start <= longest =>
            {
                last.range.end = last.range.end.max(end);
                last.chunks.push(chunk);
            }
            _ => reads.push(PackRead { pack: *pack, range: offset..end, chunks: vec![chunk] }),
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
    let parallelism = repository.parallelism();
    let fetches = stream::iter(reads).map(|read| {
        let (saved, sink) = (Arc::clone(saved), Arc::clone(&sink));
        async move {
            let len = read.range.end - read.range.start;
            let plain = fetch_one(repository, &saved, read, &sink).await?;
            progress.moved(len);
            progress.advance(plain);
            Ok(len)
        }
    });
    fetches.buffer_unordered(parallelism).try_fold(0, |sum, len| async move { Ok(sum + len) }).await
}

/// One read; a wrong byte or a broken body gets a second chance, since it may have been the way and not the store.
async fn fetch_one(repository: &Repository, saved: &Arc<Saved>, read: PackRead, sink: &Sink) -> Result<u64> {
    let read = Arc::new(read);
    match attempt(repository, saved, &read, sink).await {
        Err(error) if matches!(error.kind(), ErrorKind::Damaged | ErrorKind::Unreachable) => {
            tracing::debug!("reading again: {error:?}");
            objects::retry(|| attempt(repository, saved, &read, sink)).await
        }
        settled => settled,
    }
}

async fn attempt(repository: &Repository, saved: &Arc<Saved>, read: &Arc<PackRead>, sink: &Sink) -> Result<u64> {
    let len = usize::try_from(read.range.end - read.range.start).unwrap_or(usize::MAX);
    let mut buffer = repository.budget().buffer(len).await?;
    let key = layout::owned(Family::Pack, read.pack.id);
    let payload = objects::get_range(&**repository.store().objects(), &key, read.range.clone()).await?;
    let (saved, read, sink) = (Arc::clone(saved), Arc::clone(read), Arc::clone(sink));
    let local = match payload {
        GetResultPayload::File(file, path) => Some((file, path)),
        GetResultPayload::Stream(stream) => {
            objects::drain(stream, &key, &mut buffer).await?;
            None
        }
    };
    let work = move || {
        if let Some((file, path)) = local {
            objects::read_file(&file, &path, read.range.start, &mut buffer)?;
        }
        deliver(&saved, &read, &buffer, &*sink)
    };
    tokio::task::spawn_blocking(work).await.map_err(|error| Error::other("a worker stopped").source(error))?
}

/// Decodes, verifies and hands on each chunk of a read; returns their plain bytes.
fn deliver(
    saved: &Saved,
    read: &PackRead,
    buffer: &Buffer,
    sink: &(dyn Fn(u32, Chunk<'_>) -> Result<()> + Send + Sync),
) -> Result<u64> {
    let mut scratch = Vec::new();
    let mut plain_bytes = 0;
    for &index in &read.chunks {
        let at = index as usize;
        let chunks = &saved.manifest.chunks;
        let (Some(frame), Some(&id), Some(&plain_len)) =
            (saved.map.frames.get(at), chunks.ids.get(at), chunks.lens.get(at))
        else {
            return Err(Error::damaged("map lacks a chunk of its manifest").got(index));
        };
        let start = usize::try_from(frame.offset - read.range.start).unwrap_or(usize::MAX);
        let stored = buffer.get(start..start.saturating_add(frame.stored_len as usize)).unwrap_or_default();
        let place = |error: Error| {
            let key = layout::owned(Family::Pack, read.pack.id);
            error.at(format!("{key}, chunk {} at byte {}", frame.ordinal, frame.offset)).cure(
                "towline verify --data --repair condemns the pack; saving the same content again heals what used it",
            )
        };
        let plain = if frame.codec == Codec::Raw && stored.len() == plain_len as usize {
            stored
        } else {
            scratch.resize(plain_len as usize, 0);
            codec::decode_into(frame.codec, stored, &mut scratch).map_err(place)?;
            &scratch
        };
        sink(index, Chunk::verify(id, plain).map_err(place)?)?;
        plain_bytes += u64::from(plain_len);
    }
    Ok(plain_bytes)
}
