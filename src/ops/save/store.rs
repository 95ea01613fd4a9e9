//! Pipeline of a save: units to workers, chunks to the writer, with bounded queues.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures::stream::FuturesOrdered;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tracing::Instrument as _;

use super::Saving;
use super::assemble::Assembly;
use super::contents::{Contents, Relations};
use super::detect::Formats;
use super::encode::{Batch, Encoding, NewChunk, StoredForm};
use super::encode_bundle::{
    BundleMemory, NewBundle, ParentBundle, SHARE as BUNDLES_SHARE, bundling_bytes, changed_file,
};
use super::explain::{Explained, Explanation};
use super::hard_links::HardLinks;
use super::if_faster::{EncodeChoice, IfFaster};
use super::parent::{BaseCandidate, Pairs, Parent};
use super::read::{HashedChunk, PartContent, ReadPart, Settler, hash, read, view};
use super::short_list::ShortList;
use super::units::{FileDetails, Unit, make_units};
use crate::budget::{Budget, GrowingMemory};
use crate::codec::{Codec, Compression, STEPS_MAX};
use crate::error::{Error, Result};
use crate::id::ChunkId;
use crate::limits::MIB;
use crate::repository::{ChunkPlace, Repository, StoredChunks, Writer};
use crate::tree::{Walk, WalkEntry};
use crate::work::{blocking, on_own_thread};

/// Limit of bytes that are read and hashed at once: they should fit in the processor's cache.
const WINDOW_MAX: u64 = 2 * MIB;
/// Part of the memory that a save of the user may take for bases.
const BASES_SHARE: u64 = 8;

/// Counts of new chunks.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) new_bytes: u64,
    pub(super) new_chunks: u64,
    /// Explanation of each tensor, if requested.
    pub(super) explanation: Option<Explanation>,
    pub(super) explained: Vec<Explained>,
    /// Files that indexes of sharded checkpoints name and the tree lacks.
    pub(super) lacking: ShortList,
    /// Reason why nothing is predicted, though that was asked for.
    pub(super) unpredicted: Option<String>,
    /// Memory of the pieces of hard links, where the assembly counts none.
    pub(super) links_memory: Option<GrowingMemory>,
}

/// The chunks of one unit, by file.
type Hashed = Vec<(usize, Option<FileDetails>, Vec<HashedChunk>)>;
/// Chunks for the writer, and whether to keep their buffer.
type Ready = (Batch, bool);

/// Reads the files `to_read` and stores unknown chunks; `assembly` receives every chunk in order.
pub(super) async fn store(
    saving: &Saving<'_>,
    to_read: Vec<usize>,
    known: &mut StoredChunks,
    writer: &mut Writer,
    assembly: &mut Assembly,
    counts: &mut Counts,
) -> Result<()> {
    if to_read.is_empty() {
        return Ok(());
    }
    let (to_read, links) = HardLinks::find(saving, to_read).await?;
    let depth = workers();
    let encode = begin(saving, &to_read, depth).await?;
    counts.unpredicted = encode.unpredicted(saving.repository.budget(), saving.options.caller.is_some());
    let mut tasks = JoinSet::new();
    let mut units = start(saving, to_read, Arc::clone(&encode.contents), &mut tasks);
    let mut deduplicator = Deduplicator::new(saving, &encode);
    let mut if_faster = (encode.compression == Compression::IfFaster).then(|| IfFaster::new(depth));
    let mut encoding = FuturesOrdered::new();
    let mut reading = true;
    loop {
        // Reading may wait for buffers that encoding holds, so both are always polled.
        tokio::select! {
            biased;
            Some(ready) = encoding.next() => {
                let ready: Ready = ready?;
                if let Some(if_faster) = &mut if_faster {
                    if_faster.done(ready.0.encoded, saving.repository.clock().now());
                }
                Box::pin(write(ready, known, writer, &mut deduplicator.pending, (assembly, counts))).await?;
            }
            hashed = units.recv(), if reading && encoding.len() <= depth => match hashed {
                Some(hashed) => {
                    let fresh = deduplicator.separate_new(hashed, known, assembly, counts).await?;
                    let choice = if_faster.as_mut().map(|if_faster| if_faster.next(fresh.bytes(), writer.throughput()));
                    encoding.push_back(prepare(encode.clone(), fresh, choice.unwrap_or(EncodeChoice::Encode)));
                }
                None => reading = false,
            },
            else => break,
        }
    }
    while let Some(ended) = tasks.join_next().await {
        ended.map_err(|error| Error::other("a worker stopped").source(error))??;
    }
    // A chunk that was to come with its bundle did not: its file changed after the bundle was read.
    match deduplicator.pending.values().next() {
        Some(&file) => Err(changed_file(&saving.walk, file)),
        None => links.add(saving, known.near(), assembly, counts).await,
    }
}

/// Parses the files before any of them is read.
async fn begin(saving: &Saving<'_>, to_read: &[usize], depth: usize) -> Result<Encoding> {
    let (walk, formats, to_read) = (Arc::clone(&saving.walk), Arc::clone(&saving.formats), to_read.to_vec());
    let compression = saving.options.compression;
    let derive = compression != Compression::Off && saving.derive.load(Ordering::Relaxed);
    let stop = saving.options.stop.child_token();
    // A dropped save stops the thread, too.
    let _stops = stop.clone().drop_guard();
    let relations = Relations { derived: derive, bundles: compression == Compression::Predict };
    let contents = blocking(move || Contents::parse(&walk, &formats, (&to_read, relations), &stop)).await?;
    let parent = saving.parent.as_ref().ok().cloned();
    let (budget, bundle_memory) = encoding_memory(saving, &contents, depth).await?;
    let (repository, walk, contents) = (saving.repository.clone(), Arc::clone(&saving.walk), Arc::new(contents));
    Ok(Encoding { repository, walk, contents, compression, derive, parent, budget, bundle_memory })
}

/// Memory for bases, and memory for bundles, as far as the save needs any. A save for a caller with limited rights, which may
/// last for any time, has none if too little is left for callers.
async fn encoding_memory(
    saving: &Saving<'_>,
    contents: &Contents,
    depth: usize,
) -> Result<(Option<Budget>, Option<BundleMemory>)> {
    let (whole, caller) = (saving.repository.budget(), saving.options.caller.as_deref());
    let (bases_max, bundles_max) = match caller {
        None => (whole.total() / BASES_SHARE, whole.total() / BUNDLES_SHARE),
        Some(_) => (whole.carved_for_caller_max(), whole.carved_for_caller_max()),
    };
    let bundles = if contents.has_bundles() { bundling_bytes(bundles_max, depth) } else { 0 };
    // Memory for each concurrent encoding: a base, and the chunk that needs it.
    let most = if caller.is_some() { bases_max - bundles } else { bases_max };
    let bases = ((depth as u64 + 1) * 2 * WINDOW_MAX).min(most);
    let bases = if saving.parent.is_ok() && bases >= 2 * WINDOW_MAX { bases } else { 0 };
    let both = match (bases + bundles, caller) {
        (0, _) => return Ok((None, None)),
        (bytes, None) => whole.carve_beside_buffers(bytes).await?,
        (bytes, Some(caller)) => {
            let Some(both) = whole.carve_for_caller(caller, bytes) else {
                tracing::info!("chunks are stored without bases: other saves for callers take the memory for these");
                return Ok((None, None));
            };
            both
        }
    };
    if bundles == 0 {
        return Ok((Some(both), None));
    }
    let budget = if bases > 0 { Some(both.carve(bases).await?) } else { None };
    Ok((budget, Some(BundleMemory::carve(&both, bundles).await?)))
}

/// Encodes on workers.
async fn prepare(encoding: Encoding, fresh: NewChunks, choice: EncodeChoice) -> Result<Ready> {
    let share = fresh.bytes() * 2 >= fresh.read_bytes;
    Ok((encoding.encode(fresh.chunks, choice).await?, share))
}

fn workers() -> usize {
    std::thread::available_parallelism().map_or(2, usize::from)
}

/// Starts reading; the output keeps the order of the files.
fn start(
    saving: &Saving<'_>,
    to_read: Vec<usize>,
    contents: Arc<Contents>,
    tasks: &mut JoinSet<Result<()>>,
) -> mpsc::Receiver<Hashed> {
    let depth = 2 * workers();
    let (unit_out, unit_in) = mpsc::channel::<Unit>(depth);
    let (hashed_out, hashed_in) = mpsc::channel::<Hashed>(depth);
    let window = (saving.repository.budget().total() / 64).clamp(MIB, WINDOW_MAX);
    let (walk, formats) = (Arc::clone(&saving.walk), Arc::clone(&saving.formats));
    // It waits until units are read, which needs the threads for blocking work.
    tasks.spawn(on_own_thread("save-units", move || {
        make_units(&walk, &to_read, (&formats, &contents), window, |unit| unit_out.blocking_send(unit).is_ok())
    }));
    let (walk, formats, repository) =
        (Arc::clone(&saving.walk), Arc::clone(&saving.formats), saving.repository.clone());
    let reading = async move {
        let mut settler = Settler::default();
        let units = stream::unfold(unit_in, |mut units| async move { Some((units.recv().await?, units)) });
        let hashed = units
            .map(|unit| read_unit(repository.clone(), Arc::clone(&walk), Arc::clone(&formats), unit))
            .buffered(depth)
            .map_ok(|parts| parts.into_iter().map(|part| settler.settle(part)).collect::<Vec<_>>())
            .map_ok(|parts| async move {
                if parts.iter().all(|part| matches!(part.found, PartContent::Chunks(_))) {
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
    };
    tasks.spawn(reading.in_current_span());
    hashed_in
}

async fn read_unit(
    repository: Repository,
    walk: Arc<Walk>,
    formats: Arc<Formats>,
    unit: Unit,
) -> Result<Vec<ReadPart>> {
    if walk.is_in_memory() {
        return blocking(move || view(&walk, &formats, unit)).await;
    }
    let buffer = repository.budget().buffer(unit.len).await?;
    blocking(move || read(&walk, &formats, unit, buffer)).await
}

/// Chunks that are not in the repository, with the buffer that holds their bytes.
struct NewChunks {
    chunks: Vec<NewChunk>,
    read_bytes: u64,
}

impl NewChunks {
    fn bytes(&self) -> u64 {
        self.chunks.iter().map(|new| new.chunk.bytes.len() as u64).sum()
    }
}

/// Separates new chunks from known ones, and finds their possible bases.
struct Deduplicator<'a> {
    saving: &'a Saving<'a>,
    parent: Option<Arc<Parent>>,
    /// Files whose chunks may make bundles.
    contents: Option<Arc<Contents>>,
    /// Chunks on their way to the writer, with a file of each.
    pending: HashMap<ChunkId, usize>,
    /// File and start of chunks that are on their way with another chunk of their bundle.
    bundled: HashSet<(usize, u64)>,
    /// Current file, and the places of its tensors in the parent.
    pairs: (usize, Pairs),
}

impl<'a> Deduplicator<'a> {
    fn new(saving: &'a Saving<'a>, encoding: &Encoding) -> Self {
        let contents = encoding.bundle_memory.is_some().then(|| Arc::clone(&encoding.contents));
        let (pending, bundled, pairs) = (HashMap::new(), HashSet::new(), (0, Pairs::default()));
        Self { saving, parent: encoding.parent.clone(), contents, pending, bundled, pairs }
    }

    /// Passes every chunk to the assembly; returns the new ones.
    async fn separate_new(
        &mut self,
        hashed: Hashed,
        known: &mut StoredChunks,
        assembly: &mut Assembly,
        counts: &mut Counts,
    ) -> Result<NewChunks> {
        let ids: Vec<ChunkId> = hashed.iter().flat_map(|(_, _, named)| named.iter().map(|named| named.id)).collect();
        assembly.count(known.near(), ids.len())?;
        let mut places = known.locate(&ids).await?.into_iter();
        let mut fresh = NewChunks { chunks: Vec::new(), read_bytes: 0 };
        for (file, details, named) in hashed {
            if let Some(details) = details {
                self.pairs = (file, self.pair(file, &details));
                assembly.describe(file, details);
            }
            for chunk in named {
                let len = chunk.bytes.len() as u64;
                fresh.read_bytes += len;
                assembly.chunk(file, chunk.start, chunk.id, u32::try_from(len).unwrap_or(u32::MAX))?;
                let is_here = places.next().flatten().is_some();
                if self.bundled.remove(&(file, chunk.start)) {
                    // It may have been stored by now.
                    if !is_here {
                        self.pending.insert(chunk.id, file);
                    }
                    if let Some(explanation) = &mut counts.explanation {
                        explanation.bundled(assembly, file, chunk.start, len);
                    }
                } else if !is_here && self.pending.insert(chunk.id, file).is_none() {
                    counts.new_chunks += 1;
                    counts.new_bytes += len;
                    let base = self.base(file, &chunk, known);
                    let bundle = self.bundle(file, &chunk, known);
                    fresh.chunks.push(NewChunk { chunk, file, base, bundle });
                } else if let Some(explanation) = &mut counts.explanation {
                    explanation.present(assembly, file, chunk.start, len);
                }
            }
        }
        self.saving.options.progress.advance(fresh.read_bytes);
        Ok(fresh)
    }

    fn pair(&self, file: usize, details: &FileDetails) -> Pairs {
        let found = self.saving.walk.found.get(file);
        let pair = |(parent, found): (&Arc<Parent>, &WalkEntry)| parent.pair(&found.path, &details.tensors);
        self.parent.as_ref().zip(found).map(pair).unwrap_or_default()
    }

    /// Bundle to store a chunk in; its other chunks then come with it. None between key steps, if the parent has no bundle of it.
    fn bundle(&mut self, file: usize, chunk: &HashedChunk, known: &StoredChunks) -> Option<NewBundle> {
        let range = chunk.start..chunk.start + chunk.bytes.len() as u64;
        let pieces = self.contents.as_ref()?.bundle(file, &range)?;
        let base = match &self.parent {
            Some(parent) => {
                let (of, pairs) = &self.pairs;
                let (chunk, id) = parent.bundle(pairs, &range).filter(|_| *of == file)?;
                let steps = known.hops(&id).filter(|steps| *steps < STEPS_MAX);
                steps.map(|steps| ParentBundle { chunk, steps })
            }
            None => None,
        };
        self.bundled.extend(pieces.iter().map(|(file, range)| (*file, range.start)));
        self.bundled.remove(&(file, chunk.start));
        Some(NewBundle { pieces, base })
    }

    /// Possible base of a chunk; only chunks in live packs qualify.
    fn base(&self, file: usize, chunk: &HashedChunk, known: &StoredChunks) -> BaseCandidate {
        let (of, pairs) = &self.pairs;
        let Some(parent) = self.parent.as_ref().filter(|_| *of == file) else { return BaseCandidate::NoTensor };
        let base = parent.base_candidate(pairs, &(chunk.start..chunk.start + chunk.bytes.len() as u64), chunk.number);
        match base {
            BaseCandidate::Chunk(base) if !parent.saved.locate(base).is_ok_and(|base| known.is_plain(&base.id)) => {
                BaseCandidate::Unusable
            }
            base => base,
        }
    }
}

/// Writes a bundle, unless its bytes are stored already, in any way that its parts can have as a base.
async fn write_bundle(form: StoredForm, known: &mut StoredChunks, writer: &mut Writer) -> Result<()> {
    let stored = known.locate(&[form.id]).await?.pop().flatten();
    if stored.is_some_and(|place| Codec::Part.may_have_base(place.codec)) {
        return Ok(());
    }
    write_form(form, false, known, writer).await
}

/// Writes a chunk, unless it is stored already: for another place, or by an attempt that failed. Returns whether it was written.
async fn write_new(form: StoredForm, known: &mut StoredChunks, writer: &mut Writer) -> Result<bool> {
    if known.locate(&[form.id]).await? != [None] {
        return Ok(false);
    }
    write_form(form, false, known, writer).await?;
    Ok(true)
}

/// Writes a chunk; with `share`, without a copy.
async fn write_form(form: StoredForm, share: bool, known: &mut StoredChunks, writer: &mut Writer) -> Result<()> {
    let place = writer.push(form.id, form.encoded, form.plain_len, share).await?;
    known.stored(form.id, ChunkPlace { alone_len: form.alone_len, ..place });
    Ok(())
}

async fn write(
    (batch, share): Ready,
    known: &mut StoredChunks,
    writer: &mut Writer,
    pending: &mut HashMap<ChunkId, usize>,
    (assembly, counts): (&Assembly, &mut Counts),
) -> Result<()> {
    for done in batch.done {
        if let Some(explanation) = &mut counts.explanation {
            explanation.done(assembly, &done);
        }
        if let Some(bundle) = done.bundle {
            if let Some(whole) = bundle.whole {
                write_bundle(whole, known, writer).await?;
            }
            for other in bundle.others {
                pending.remove(&other.id);
                let len = other.plain_len;
                if write_new(other, known, writer).await? {
                    counts.new_chunks += 1;
                    counts.new_bytes += u64::from(len);
                }
            }
        }
        pending.remove(&done.form.id);
        write_form(done.form, share, known, writer).await?;
    }
    Ok(())
}
