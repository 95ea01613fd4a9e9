//! Plan for reading selected tensors: the chunks needed, and the targets of their bytes.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use serde::{Serialize, Serializer};

use super::globals::{Global, TensorPlace, globals};
use super::selector::{Index, TensorSelector};
use crate::budget::{Budget, Retained};
use crate::checkpoint::Dtype;
use crate::checkpoint::boxes::{Runs, TensorBox, cover};
use crate::error::{Error, Result};
use crate::format::EntryKind;
use crate::id::ManifestId;
use crate::limits::MIB;
use crate::name::Name;
use crate::ops::shown;
use crate::repository::{Repository, Saved};
use crate::work::blocking;

/// Result of [`Repository::choose_tensors`].
#[derive(Debug)]
pub struct TensorReading {
    pub(super) saved: Arc<Saved>,
    tensors: Vec<WantedTensor>,
    segments: Vec<Segment>,
    /// Sorted by chunk.
    uses: Vec<Use>,
    /// The chunks of `uses`, each once.
    chunks: Vec<u32>,
    /// Ranges in holes of files: the segment, and bytes of its file.
    zeros: Vec<Zeros>,
    /// Counts what `segments`, `uses`, `chunks` and `zeros` take.
    _kept: Retained,
}

/// Zeros in a segment's file: the segment, and the byte range.
type Zeros = (usize, Range<u64>);

/// A tensor, or a box of one, that will be read; its bytes are the elements of the box in row-major order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WantedTensor {
    /// The tensor's name.
    pub name: String,
    /// File, or the folder of the files with its parts; bytes that are not UTF-8 are replaced.
    pub path: String,
    /// Element type.
    #[serde(serialize_with = "as_word")]
    pub dtype: Dtype,
    /// Elements of the whole tensor along each dimension.
    pub whole: Vec<u64>,
    /// Offsets of the box along each dimension.
    pub offsets: Vec<u64>,
    /// Elements of the box along each dimension.
    pub shape: Vec<u64>,
    /// Bytes of the box.
    pub bytes: u64,
}

fn as_word<S: Serializer>(dtype: &Dtype, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.serialize_str(dtype.word())
}

/// Bytes of one part for one requested tensor.
#[derive(Debug)]
pub(super) struct Segment {
    /// Number of the tensor.
    pub(super) tensor: usize,
    /// Bytes of the part's file, with their targets.
    pub(super) runs: Runs,
}

/// A chunk with bytes of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Use {
    pub(super) chunk: u32,
    pub(super) segment: usize,
    /// Start of the chunk in the segment's file.
    pub(super) at: u64,
}

impl Repository {
    /// Finds the tensors that `selectors` select in the tree `name`, or below its path `below`, and their chunks. Tensors are in
    /// the order of the selectors, then of files; the same box of a tensor is included only once.
    ///
    /// # Errors
    /// Not found, if there is no such name, a selector selects nothing, or a part of a tensor is missing; usage, if a
    /// box is outside of its tensor; unsupported, for a box of elements that are not whole bytes; exhausted, if the list of the
    /// chunks of all tensors needs more than half of the memory budget.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn choose_tensors(
        &self,
        name: &Name,
        below: Option<&[u8]>,
        selectors: &[TensorSelector],
    ) -> Result<TensorReading> {
        let saved = self.saved(name).await?.shared();
        let (below, selectors, budget) = (below.map(<[u8]>::to_vec), selectors.to_vec(), self.budget().clone());
        // It takes long for a tree of very many tensors.
        blocking(move || TensorReading::choose(&saved, below.as_deref(), &selectors, &budget)).await
    }

    /// As [`Repository::choose_tensors`], in a tree that is open.
    ///
    /// # Errors
    /// As [`Repository::choose_tensors`], but for the name.
    pub fn choose_tensors_in(
        &self,
        saved: &Arc<Saved>,
        below: Option<&[u8]>,
        selectors: &[TensorSelector],
    ) -> Result<TensorReading> {
        TensorReading::choose(saved, below, selectors, self.budget())
    }
}

impl TensorReading {
    /// Digest of the tree.
    #[must_use]
    pub fn manifest(&self) -> ManifestId {
        self.saved.value.manifest
    }

    /// Tensors to read, in order; their indexes are the numbers that a sink gets.
    #[must_use]
    pub fn tensors(&self) -> &[WantedTensor] {
        &self.tensors
    }

    /// Bytes of all wanted boxes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().fold(0, |sum, tensor| sum.saturating_add(tensor.bytes))
    }

    /// Chunks to fetch, each once.
    #[must_use]
    pub fn chunk_count(&self) -> u64 {
        self.chunks.len() as u64
    }

    /// Bytes of each tensor that come from chunks; the others are in holes of files.
    #[must_use]
    pub(super) fn bytes_in_chunks(&self) -> Vec<u64> {
        let mut bytes: Vec<u64> = self.tensors.iter().map(|tensor| tensor.bytes).collect();
        for (segment, hole) in self.zeros() {
            let zeros = segment.runs.bytes_within(hole);
            if let Some(bytes) = bytes.get_mut(segment.tensor) {
                *bytes = bytes.saturating_sub(zeros);
            }
        }
        bytes
    }

    /// Bytes of the longest chunk to fetch.
    #[must_use]
    pub fn longest_chunk(&self) -> u64 {
        let lens = &self.saved.manifest.chunks.lens;
        self.chunks.iter().filter_map(|&chunk| lens.get(chunk as usize)).copied().max().unwrap_or(0).into()
    }

    fn choose(saved: &Arc<Saved>, below: Option<&[u8]>, selectors: &[TensorSelector], budget: &Budget) -> Result<Self> {
        let globals = globals(&saved.manifest);
        let mut draft = Draft {
            saved,
            tensors: Vec::new(),
            segments: Vec::new(),
            by_file: BTreeMap::new(),
            memory: PlanMemory { taken: 0, most: budget.kept_max() },
        };
        let (mut index, mut chosen) = (Index::default(), HashMap::new());
        for selector in selectors {
            for at in index.matching(&globals, selector, &saved.name, below)? {
                let Some(global) = globals.get(at) else { continue };
                let named = |error: Error| error.at(place(saved, global));
                let wanted = selector.box_of(global.shape).map_err(named)?;
                let boxes: &mut Vec<TensorBox> = chosen.entry(at).or_default();
                if !boxes.contains(&wanted) {
                    draft.add(global, &wanted).map_err(named)?;
                    boxes.push(wanted);
                }
            }
        }
        draft.finish(budget).map_err(|error| error.at(&saved.name))
    }

    /// The chunks that are needed, each once.
    pub(super) fn chunks(&self) -> &[u32] {
        &self.chunks
    }

    /// Uses of the chunk `chunk`.
    pub(super) fn uses(&self, chunk: u32) -> &[Use] {
        let from = self.uses.partition_point(|one| one.chunk < chunk);
        let to = self.uses.partition_point(|one| one.chunk <= chunk);
        self.uses.get(from..to).unwrap_or_default()
    }

    /// The segment of a use.
    pub(super) fn segment(&self, number: usize) -> Option<&Segment> {
        self.segments.get(number)
    }

    /// Segments, and bytes of their files that are zeros.
    pub(super) fn zeros(&self) -> impl Iterator<Item = (&Segment, Range<u64>)> {
        self.zeros.iter().filter_map(|(segment, range)| Some((self.segments.get(*segment)?, range.clone())))
    }

    /// The tensors' chunks: each pair of a tensor and a chunk of it once, sorted.
    pub(super) fn chunks_by_tensor(&self) -> Vec<(usize, u32)> {
        let pair = |one: &Use| Some((self.segments.get(one.segment)?.tensor, one.chunk));
        let mut pairs = Vec::with_capacity(self.uses.len());
        pairs.extend(self.uses.iter().filter_map(pair));
        pairs.sort_unstable();
        pairs.dedup();
        pairs
    }
}

/// Memory for the lists of a reading. A manifest may have any number of tensors over the same chunks, so memory is counted before
/// it is allocated.
#[derive(Clone, Copy)]
struct PlanMemory {
    taken: u64,
    most: u64,
}

impl PlanMemory {
    fn take(&mut self, bytes: usize) -> Result<()> {
        self.taken = self.taken.saturating_add(bytes as u64);
        if self.taken <= self.most {
            return Ok(());
        }
        Err(Error::exhausted("list of the chunks of these tensors takes too much memory")
            .expected(format!("at most {} MiB, half of the memory budget", self.most / MIB))
            .got("more than that")
            .help("choose fewer tensors at a time, or raise --memory"))
    }
}

/// Bytes for each dimension of a tensor in a list.
const DIMENSION: usize = 4 * size_of::<u64>();

/// Bytes for a tensor in a list, with its path, which the manifest has only once for all tensors of a file. Counted twice: lists are
/// also written, to staged memory or as text.
pub(super) fn listed_len(global: &Global<'_>) -> usize {
    let text = global.path.len().saturating_add(global.name.len());
    2 * (size_of::<WantedTensor>() + text + DIMENSION * global.shape.len())
}

/// Bytes for a use: itself, its chunk in the list of chunks, and its pair of [`TensorReading::chunks_by_tensor`].
const USE: usize = size_of::<Use>() + size_of::<u32>() + size_of::<(usize, u32)>();
/// Bytes for a segment with its number below its file, and for each dimension of it.
const SEGMENT: (usize, usize) = (size_of::<Segment>() + size_of::<usize>(), 3 * size_of::<u64>());

/// Builder of a reading.
struct Draft<'m> {
    saved: &'m Arc<Saved>,
    tensors: Vec<WantedTensor>,
    segments: Vec<Segment>,
    /// Segments by the manifest's entry that holds them.
    by_file: BTreeMap<usize, Vec<usize>>,
    memory: PlanMemory,
}

/// Bytes that a segment needs: from a chunk, or zeros.
enum Need {
    Chunk(Use),
    Zeros(Zeros),
}

impl Draft<'_> {
    fn add(&mut self, global: &Global<'_>, wanted: &TensorBox) -> Result<()> {
        check_lengths(global)?;
        let pieces = match global.dtype.whole_bytes() {
            Some(element) => pieces(global, wanted, element.into())?,
            None => vec![contiguous_runs(global, wanted)?],
        };
        let (fixed, dimension) = SEGMENT;
        self.memory.take((fixed + dimension * global.shape.len()).saturating_mul(pieces.len()))?;
        self.memory.take(listed_len(global))?;
        let tensor = self.tensors.len();
        let bytes = match global.dtype.tensor_len(&wanted.shape) {
            Some(bytes) => bytes,
            None => pieces.iter().map(|(_, runs)| runs.span().end - runs.span().start).sum(),
        };
        for (entry, runs) in pieces {
            self.by_file.entry(entry).or_default().push(self.segments.len());
            self.segments.push(Segment { tensor, runs });
        }
        self.tensors.push(WantedTensor {
            name: global.name.to_owned(),
            path: shown(global.path),
            dtype: global.dtype.clone(),
            whole: global.shape.to_vec(),
            offsets: wanted.offsets.clone(),
            shape: wanted.shape.clone(),
            bytes,
        });
        Ok(())
    }

    /// Finds the chunks of every segment: first counts them, then lists them.
    fn finish(self, budget: &Budget) -> Result<TensorReading> {
        let (mut memory, mut counts) = (self.memory, (0, 0));
        self.each_need(|need| match need {
            Need::Chunk(_) => {
                counts.0 += 1;
                memory.take(USE)
            }
            Need::Zeros(_) => {
                counts.1 += 1;
                memory.take(size_of::<Zeros>())
            }
        })?;
        let kept = budget.keep(memory.taken)?;
        let (mut uses, mut zeros) = (Vec::with_capacity(counts.0), Vec::with_capacity(counts.1));
        self.each_need(|need| {
            match need {
                Need::Chunk(one) => uses.push(one),
                Need::Zeros(one) => zeros.push(one),
            }
            Ok(())
        })?;
        uses.sort_unstable();
        let mut chunks: Vec<u32> = uses.iter().map(|one: &Use| one.chunk).collect();
        chunks.dedup();
        chunks.shrink_to_fit();
        let Self { saved, tensors, segments, .. } = self;
        Ok(TensorReading { saved: Arc::clone(saved), tensors, segments, uses, chunks, zeros, _kept: kept })
    }

    /// Calls `take` with the needs of every segment, one file after the other.
    fn each_need(&self, mut take: impl FnMut(Need) -> Result<()>) -> Result<()> {
        let manifest = &self.saved.manifest;
        for (&entry, held) in &self.by_file {
            let Some(EntryKind::File(content)) = manifest.entries.get(entry).map(|entry| &entry.kind) else {
                continue;
            };
            let placed: Vec<(u32, Range<u64>)> = content.placed(&manifest.chunks).collect();
            for &number in held {
                let Some(segment) = self.segments.get(number) else { continue };
                let end = segment.runs.span().end;
                let mut at = segment.runs.span().start;
                // From one needed byte to the next: a box may need few of the chunks between its first and its last byte.
                while let Some(run) = segment.runs.within(at..end).next() {
                    let first = run.source.start;
                    let next = placed.partition_point(|(_, range)| range.end <= first);
                    match placed.get(next) {
                        Some((chunk, range)) if range.start <= first => {
                            take(Need::Chunk(Use { chunk: *chunk, segment: number, at: range.start }))?;
                            at = range.end;
                        }
                        after => {
                            at = after.map_or(end, |(_, range)| range.start.min(end));
                            take(Need::Zeros((number, first..at)))?;
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

/// Checks lengths in a manifest, which is untrusted, before offsets are computed from them.
fn check_lengths(global: &Global<'_>) -> Result<()> {
    if global.dtype.bits().is_none() {
        return Ok(());
    }
    let lies = |part: &TensorPlace<'_>| {
        let range = &part.tensor.range;
        global.dtype.tensor_len(&part.tensor.shape) != Some(range.end - range.start)
    };
    if global.dtype.tensor_len(global.shape).is_none() || global.parts.iter().any(lies) {
        return Err(Error::damaged("tensor is not as long as its type and shape make it").help("save it again"));
    }
    Ok(())
}

/// Byte ranges of entries that form the box `wanted`.
fn pieces(global: &Global<'_>, wanted: &TensorBox, element: u64) -> Result<Vec<(usize, Runs)>> {
    let places: Vec<TensorBox> = global.parts.iter().map(TensorPlace::place).collect();
    let covered = cover(wanted, &places).map_err(|why| {
        Error::not_found(format!("some of the tensor was not saved: {why}"))
            .got(format!("{} parts of {:?}", places.len(), global.shape))
            .help("save the files of all ranks under one name, or ask for a box that is there")
    })?;
    let piece = |(at, common): (usize, TensorBox)| {
        let (part, place) = (global.parts.get(at)?, places.get(at)?);
        Some((part.entry, Runs::new(&common, place, wanted, element, part.tensor.range.start)))
    };
    Ok(covered.into_iter().filter_map(piece).collect())
}

/// Bytes of a tensor whose elements are not whole bytes: all of them, as one range.
fn contiguous_runs(global: &Global<'_>, wanted: &TensorBox) -> Result<(usize, Runs)> {
    let whole = TensorBox::whole(global.shape);
    let part = global.parts.iter().find(|part| *wanted == whole && part.place() == whole);
    let part = part.ok_or_else(|| {
        Error::new(crate::ErrorKind::Unsupported, "its elements do not fill whole bytes, or their size is unknown")
            .expected("all of a tensor that lies in one piece")
            .got(format!("{wanted} of {} {:?}", global.dtype, global.shape))
            .help("ask for the tensor without a box, or restore the files that hold it")
    })?;
    let range = &part.tensor.range;
    Ok((part.entry, Runs::plain(range.start, range.end - range.start)))
}

/// `NAME:PATH, TENSOR`, for messages.
fn place(saved: &Saved, global: &Global<'_>) -> String {
    format!("{}:{}, {}", saved.name, shown(global.path), global.name)
}
