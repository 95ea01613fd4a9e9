//! Reading chunks: few ranged reads, whose chunks are verified.
//!
//! Reads of packs use the same mechanism: [`plan()`] plans the reads, [`read_pack`] reads into a budgeted buffer (raw chunks of
//! local packs go to their final memory instead: `direct.rs`), and [`deliver()`] decodes the chunks and verifies each against its id.
//! Restores write the chunks, syncs forward their encoded frames, verification only checks them.

mod deliver;
mod direct;
mod gaps;
mod near;
mod pack_read;
mod plan;
mod source;

use std::sync::Arc;
use std::time::Instant;

use futures::future::try_join_all;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use object_store::GetResultPayload;
use tracing::Instrument as _;

use self::deliver::named;
pub use self::deliver::{ChunkSink, Delivered, Fill, Stored, StoredChunk, deliver};
use self::direct::{read_direct, read_near};
pub use self::gaps::Gaps;
use self::near::NearFrames;
pub use self::pack_read::{Located, PackPart, PackRead, PlannedChunk};
pub use self::plan::{ANEW_MAX, plan, plan_anew};
pub use self::source::{ChunkSource, FramePlace, SourceBytes};
use super::layout::{self, Family};
use super::{Repository, Saved, objects};
use crate::budget::{Budget, Buffer};
use crate::chunk::Chunk;
use crate::codec::Codec;
use crate::error::{Error, ErrorKind, Result};
use crate::limits::MIB;
use crate::progress::{Progress, TimeSum};
use crate::work::blocking;

/// Maximum length of a network read, unless one frame is longer: long enough to amortize a request, short enough for many in
/// flight.
const READ_MAX: u64 = 8 * MIB;
/// Maximum length of a local read: the data is verified and written while it is in the CPU cache.
const LOCAL_READ_MAX: u64 = 2 * MIB;

/// Consumer of verified chunks, called on the thread that verified them. Every function of a chunk's index in the manifest and
/// the chunk is one.
pub trait Sink: Send + Sync {
    /// Takes a chunk.
    ///
    /// # Errors
    /// Any error ends the fetch.
    fn take(&self, index: u32, chunk: Chunk<'_>) -> Result<()>;

    /// True if [`Sink::fill`] takes most chunks.
    fn fills(&self) -> bool {
        false
    }

    /// As [`ChunkSink::fill`]: lets a chunk be decoded directly into its final memory.
    ///
    /// # Errors
    /// As `fill`.
    fn fill(&self, index: u32, len: usize, fill: Fill<'_>) -> Result<bool> {
        let _ = (index, len, fill);
        Ok(false)
    }

    /// True if [`Sink::take_stored`] takes most chunks of this codec.
    fn takes_stored(&self, codec: Codec) -> bool {
        let _ = codec;
        false
    }

    /// As [`ChunkSink::take_stored`]: lets a frame be read, unverified, to memory of a sink that decodes and verifies by itself.
    ///
    /// # Errors
    /// As `read`; errors of the sink.
    fn take_stored(&self, stored: StoredChunk, read: Fill<'_>) -> Result<bool> {
        let _ = (stored, read);
        Ok(false)
    }
}

impl<F: Fn(u32, Chunk<'_>) -> Result<()> + Send + Sync> Sink for F {
    fn take(&self, index: u32, chunk: Chunk<'_>) -> Result<()> {
        self(index, chunk)
    }
}

/// Maximum read length for `repository` within `budget`, in bytes.
#[must_use]
pub fn longest_read(repository: &Repository, budget: &Budget) -> u64 {
    let longest = if repository.store().is_local() { LOCAL_READ_MAX } else { READ_MAX };
    (budget.total() / 32).clamp(MIB, longest)
}

/// Executes `reads`, and passes each requested chunk to `sink` once it is verified; returns the stored bytes that moved.
///
/// # Errors
/// Not found, if a pack is gone; damaged, with pack and chunk, if two tries gave wrong bytes; errors of `sink`.
///
/// # Cancel safety
/// Safe: `sink` gets no more chunks after it.
pub async fn fetch(
    repository: &Repository,
    saved: &Arc<Saved>,
    reads: Vec<PackRead>,
    sink: Arc<dyn Sink>,
    progress: &Progress,
) -> Result<SourceBytes> {
    let fetches = stream::iter(reads).map(|read| {
        let (saved, sink) = (Arc::clone(saved), Arc::clone(&sink));
        let span = tracing::debug_span!("read", chunks = read.chunks.len(), bytes = read.stored_len());
        let brought = async move {
            let (len, begun) = (read.stored_len(), Instant::now());
            let delivering = Arc::new(TimeSum::default());
            let (plain, moved) = fetch_one(repository, &saved, read, sink, &delivering).await?;
            progress.read_for(begun.elapsed().saturating_sub(delivering.get()));
            progress.moved(len);
            progress.advance(plain);
            Ok::<_, Error>(moved)
        };
        brought.instrument(span)
    });
    let mut fetches = fetches.buffer_unordered(repository.parallelism());
    let mut moved = SourceBytes::default();
    while let Some(more) = fetches.try_next().await? {
        moved += more;
    }
    Ok(moved)
}

/// Executes one read of [`fetch`]; returns the plain bytes that `sink` got, and the stored bytes that moved. Adds the time of
/// delivering, which direct reads do while they read, to `delivering`.
async fn fetch_one(
    repository: &Repository,
    saved: &Arc<Saved>,
    read: PackRead,
    sink: Arc<dyn Sink>,
    delivering: &Arc<TimeSum>,
) -> Result<(u64, SourceBytes)> {
    let len = read.stored_len();
    let (tree, passed_to, spent) = (Arc::clone(saved), Arc::clone(&sink), Arc::clone(delivering));
    let work = move |read: &PackRead, buffer: Buffer| {
        let begun = Instant::now();
        let mut passing = ForwardingSink { sink: &*passed_to, plain: 0 };
        deliver(read, &buffer, |chunk| tree.locate(chunk), &mut passing)?;
        spent.add(begun.elapsed());
        Ok(passing.plain)
    };
    let begun = Instant::now();
    let Some(source) = repository.source() else {
        let direct = match read_direct(repository, saved, &read, &sink).await {
            // It may be an error of this read alone.
            Err(error) if error.kind() == ErrorKind::Damaged => None,
            direct => direct?,
        };
        let plain = match direct {
            Some(plain) => {
                delivering.add(begun.elapsed());
                plain
            }
            None => read_pack(&[repository], repository.budget(), read, work).await?,
        };
        return Ok((plain, SourceBytes::of_repository(len)));
    };
    let near = read_near(source, saved, &read, &sink).await?;
    delivering.add(begun.elapsed());
    let rest = read.of_others(&near.chunks, |chunk| saved.locate(chunk))?;
    let found = SourceBytes { cache: len - rest.stored_len(), ..SourceBytes::default() };
    if rest.chunks.is_empty() {
        return Ok((near.bytes, found));
    }
    let (plain, mut moved) = from_near(&**source, repository, saved, rest, work).await?;
    moved += found;
    Ok((near.bytes + plain, moved))
}

/// Forwards requested chunks to a sink.
struct ForwardingSink<'a> {
    sink: &'a dyn Sink,
    /// Plain bytes so far.
    plain: u64,
}

impl ChunkSink for &mut ForwardingSink<'_> {
    fn take(&mut self, delivered: Delivered<'_>) -> Result<()> {
        let chunk = delivered.chunk?;
        if !delivered.wanted {
            return Ok(());
        }
        self.plain += u64::from(delivered.located.place.plain_len);
        self.sink.take(delivered.index, chunk)
    }

    fn fill(&mut self, index: u32, len: usize, fill: Fill<'_>) -> Result<bool> {
        let filled = self.sink.fill(index, len, fill)?;
        self.plain += if filled { len as u64 } else { 0 };
        Ok(filled)
    }

    fn take_stored(&mut self, stored: StoredChunk, read: Fill<'_>) -> Result<bool> {
        let taken = self.sink.takes_stored(stored.codec) && self.sink.take_stored(stored, read)?;
        self.plain += if taken { u64::from(stored.plain_len) } else { 0 };
        Ok(taken)
    }
}

/// Reads into a buffer of `budget` and passes it to `work`, on a thread for computing. If `work` finds damage or the body breaks
/// off, the read is tried once more: the error may be one of the transfer.
///
/// # Errors
/// Not found, if a pack is gone; unreachable; errors of `work`.
///
/// # Cancel safety
/// Safe: it only reads; `work` may run for a moment longer.
pub async fn read_pack<T: Send + 'static>(
    repositories: &[&Repository],
    budget: &Budget,
    read: PackRead,
    work: impl Fn(&PackRead, Buffer) -> Result<T> + Clone + Send + 'static,
) -> Result<T> {
    let read = Arc::new(read);
    match attempt(repositories, budget, &read, work.clone()).await {
        Err(error) if matches!(error.kind(), ErrorKind::Damaged | ErrorKind::Unreachable) => {
            tracing::debug!("reading again: {error:?}");
            objects::retry(|| attempt(repositories, budget, &read, work.clone())).await
        }
        settled => settled,
    }
}

/// As [`read_pack`], but chunks from `source` are not read from the repository. If one of them is damaged, all are read from the
/// repository. Returns the bytes that moved, too.
async fn from_near<T: Send + 'static>(
    source: &dyn ChunkSource,
    repository: &Repository,
    saved: &Arc<Saved>,
    read: PackRead,
    work: impl Fn(&PackRead, Buffer) -> Result<T> + Clone + Send + 'static,
) -> Result<(T, SourceBytes)> {
    let (mut near, mut moved) = NearFrames::gather(source, repository, (saved, &read)).await?;
    if near.is_empty() {
        drop(near);
        moved.repository += read.stored_len();
        return Ok((read_pack(&[repository], repository.budget(), read, work).await?, moved));
    }
    let rest = near.rest()?;
    fetch_rest(repository, &read, &rest, &mut near.buffer).await?;
    moved.repository += rest.iter().map(|part| part.range.end - part.range.start).sum::<u64>();
    let (given, buffer) = near.into_read();
    let first = work.clone();
    match blocking(move || first(&given, buffer)).await {
        Err(error) if error.kind() == ErrorKind::Damaged => {
            tracing::warn!("a chunk from a near source is damaged, reading the repository: {error:?}");
            moved.repository += read.stored_len();
            Ok((read_pack(&[repository], repository.budget(), read, work).await?, moved))
        }
        settled => Ok((settled?, moved)),
    }
}

/// Reads the parts of `rest`, which are within those of `read`, into the buffer of `read`.
async fn fetch_rest(repository: &Repository, read: &PackRead, rest: &[PackPart], buffer: &mut Buffer) -> Result<()> {
    for part in rest {
        let slot = read.slot_of(part).and_then(|range| buffer.get_mut(range));
        let slot = slot.ok_or_else(|| Error::other("a read outgrew its buffer"))?;
        let key = layout::owned(Family::Pack, part.pack);
        objects::read_range(&**repository.store().objects(), &key, part.range.start, slot).await?;
    }
    Ok(())
}

async fn attempt<T: Send + 'static>(
    repositories: &[&Repository],
    budget: &Budget,
    read: &Arc<PackRead>,
    work: impl Fn(&PackRead, Buffer) -> Result<T> + Send + 'static,
) -> Result<T> {
    let len = usize::try_from(read.stored_len()).unwrap_or(usize::MAX);
    let mut buffer = budget.buffer(len).await?;
    let mut rest = &mut *buffer;
    let mut parts = Vec::with_capacity(read.parts.len());
    for part in &read.parts {
        let len = usize::try_from(part.range.end - part.range.start).unwrap_or(usize::MAX);
        let (here, after) = rest.split_at_mut_checked(len).ok_or_else(|| Error::other("a read outgrew its buffer"))?;
        rest = after;
        let repository = repositories.get(part.repository).ok_or_else(|| Error::other("a read of no repository"))?;
        parts.push(fetch_local(repository, part, here));
    }
    let local = try_join_all(parts).await?;
    let read = Arc::clone(read);
    let work = move || {
        let mut at = 0;
        for (part, local) in read.parts.iter().zip(local) {
            let len = usize::try_from(part.range.end - part.range.start).unwrap_or(usize::MAX);
            if let (Some((file, path)), Some(out)) = (local, buffer.get_mut(at..at + len)) {
                objects::read_file(&file, &path, part.range.start, out)?;
            }
            at += len;
        }
        work(&read, buffer)
    };
    blocking(work).await
}

/// A local pack, to be read on a thread where blocking is allowed.
type Local = (std::fs::File, std::path::PathBuf);

/// Fills `out` with a part, or returns the local file that has it.
async fn fetch_local(repository: &Repository, part: &PackPart, out: &mut [u8]) -> Result<Option<Local>> {
    let key = layout::owned(Family::Pack, part.pack);
    match objects::get_range(&**repository.store().objects(), &key, part.range.clone()).await?.payload {
        GetResultPayload::File(file, path) => Ok(Some((file, path))),
        GetResultPayload::Stream(stream) => objects::drain(stream, &key, out).await.map(|()| None),
    }
}
