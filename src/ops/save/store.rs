//! The pipeline of a save: units to workers, chunks to the writer, all of it bounded.

use std::collections::HashSet;
use std::sync::Arc;

use futures::stream::FuturesOrdered;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::Saving;
use super::assemble::Assembly;
use super::looking::Looking;
use super::read::{Found, Named, ReadPart, Settler, hash, read};
use super::units::{About, Unit, make_units};
use crate::codec::{Compression, Encoded, encode};
use crate::error::{Error, Result};
use crate::id::ChunkId;
use crate::limits::MIB;
use crate::ops::blocking;
use crate::repository::{Known, Repository, Writer};
use crate::tree::Walk;

/// Bytes read and hashed in one go, at most: few enough to be hashed while they are in the processor's cache.
const WINDOW_MAX: u64 = 2 * MIB;

/// What was new.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) new_bytes: u64,
    pub(super) new_chunks: u64,
}

/// The chunks of one unit, by file.
type Hashed = Vec<(usize, Option<About>, Vec<Named>)>;
/// Chunks ready for the writer, and whether to keep their buffer.
type Ready = (Vec<(ChunkId, Encoded, u32)>, bool);

/// Reads the files `to_read` and stores what is not known; every chunk is told to `assembly` in order.
pub(super) async fn store(
    saving: &Saving<'_>,
    to_read: Vec<usize>,
    known: &mut Known,
    writer: &mut Writer,
    assembly: &mut Assembly,
    counts: &mut Counts,
) -> Result<()> {
    if to_read.is_empty() {
        return Ok(());
    }
    let mut tasks = JoinSet::new();
    let mut units = start(saving, to_read, &mut tasks);
    let mut pending: HashSet<ChunkId> = HashSet::new();
    let mut encoding = FuturesOrdered::new();
    let depth = workers();
    while let Some(hashed) = units.recv().await {
        let fresh = sift(hashed, known, &mut pending, assembly, saving, counts).await?;
        encoding.push_back(prepare(fresh, saving.options.compression));
        while encoding.len() > depth {
            write(encoding.try_next().await?, known, writer, &mut pending).await?;
        }
    }
    while let Some(ready) = encoding.try_next().await? {
        write(Some(ready), known, writer, &mut pending).await?;
    }
    while let Some(ended) = tasks.join_next().await {
        ended.map_err(|error| Error::other("a worker stopped").source(error))??;
    }
    Ok(())
}

fn workers() -> usize {
    std::thread::available_parallelism().map_or(2, usize::from)
}

/// Starts reading; what comes out is in the order of the files.
fn start(saving: &Saving<'_>, to_read: Vec<usize>, tasks: &mut JoinSet<Result<()>>) -> mpsc::Receiver<Hashed> {
    let depth = 2 * workers();
    let (unit_out, unit_in) = mpsc::channel::<Unit>(depth);
    let (hashed_out, hashed_in) = mpsc::channel::<Hashed>(depth);
    let window = (saving.repository.budget().total() / 64).clamp(MIB, WINDOW_MAX);
    let (walk, looking) = (Arc::clone(saving.walk), Arc::clone(saving.looking));
    tasks.spawn_blocking(move || {
        make_units(&walk, &to_read, &looking, window, |unit| unit_out.blocking_send(unit).is_ok())
    });
    let (walk, looking, repository) = (Arc::clone(saving.walk), Arc::clone(saving.looking), saving.repository.clone());
    tasks.spawn(async move {
        let mut settler = Settler::default();
        let units = stream::unfold(unit_in, |mut units| async move { Some((units.recv().await?, units)) });
        let hashed = units
            .map(|unit| read_unit(repository.clone(), Arc::clone(&walk), Arc::clone(&looking), unit))
            .buffered(depth)
            .map_ok(|parts| parts.into_iter().map(|part| settler.settle(part)).collect::<Vec<_>>())
            .map_ok(|parts| async move {
                if parts.iter().all(|part| matches!(part.found, Found::Chunks(_))) {
                    return Ok(parts.into_iter().map(hash).collect());
                }
                blocking(move || Ok(parts.into_iter().map(hash).collect())).await
            })
            .try_buffered(depth);
        let mut hashed = std::pin::pin!(hashed);
        while let Some(parts) = hashed.try_next().await? {
            if hashed_out.send(parts).await.is_err() {
                break;
            }
        }
        Ok(())
    });
    hashed_in
}

async fn read_unit(
    repository: Repository,
    walk: Arc<Walk>,
    looking: Arc<Looking>,
    unit: Unit,
) -> Result<Vec<ReadPart>> {
    let buffer = repository.budget().buffer(unit.len).await?;
    blocking(move || read(&walk, &looking, unit, buffer)).await
}

/// Chunks that nobody has, with the bytes of the buffer that they are slices of.
struct Fresh {
    chunks: Vec<Named>,
    read_bytes: u64,
}

/// Tells the assembly of every chunk; keeps those that are new.
async fn sift(
    hashed: Hashed,
    known: &mut Known,
    pending: &mut HashSet<ChunkId>,
    assembly: &mut Assembly,
    saving: &Saving<'_>,
    counts: &mut Counts,
) -> Result<Fresh> {
    let ids: Vec<ChunkId> = hashed.iter().flat_map(|(_, _, named)| named.iter().map(|named| named.id)).collect();
    let mut places = known.locate(&ids).await?.into_iter();
    let mut fresh = Fresh { chunks: Vec::new(), read_bytes: 0 };
    for (file, about, named) in hashed {
        if let Some(about) = about {
            assembly.describe(file, about);
        }
        for chunk in named {
            let len = chunk.bytes.len() as u64;
            fresh.read_bytes += len;
            assembly.chunk(file, chunk.start, chunk.id, u32::try_from(len).unwrap_or(u32::MAX))?;
            if places.next().flatten().is_none() && pending.insert(chunk.id) {
                counts.new_chunks += 1;
                counts.new_bytes += len;
                fresh.chunks.push(chunk);
            }
        }
    }
    saving.options.progress.advance(fresh.read_bytes);
    Ok(fresh)
}

/// Encodes on a worker, unless there is nothing to do.
async fn prepare(fresh: Fresh, compression: Compression) -> Result<Ready> {
    let fresh_bytes: u64 = fresh.chunks.iter().map(|chunk| chunk.bytes.len() as u64).sum();
    let share = fresh_bytes * 2 >= fresh.read_bytes;
    let encode_all = move || {
        let encoded = fresh.chunks.into_iter().map(|chunk| {
            let plain_len = u32::try_from(chunk.bytes.len()).unwrap_or(u32::MAX);
            (chunk.id, encode(&chunk.bytes, compression, chunk.number), plain_len)
        });
        Ok((encoded.collect(), share))
    };
    match compression {
        Compression::Off => encode_all(),
        Compression::Auto => blocking(encode_all).await,
    }
}

async fn write(
    ready: Option<Ready>,
    known: &mut Known,
    writer: &mut Writer,
    pending: &mut HashSet<ChunkId>,
) -> Result<()> {
    let Some((chunks, share)) = ready else { return Ok(()) };
    for (id, encoded, plain_len) in chunks {
        let place = writer.push(id, encoded, plain_len, share).await?;
        known.insert(id, place);
        pending.remove(&id);
    }
    Ok(())
}
