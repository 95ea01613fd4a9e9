//! Execution of a reading: fetch -> decode + verify -> place, into destinations of the caller.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use super::reading::{Segment, TensorReading};
use crate::checkpoint::boxes::Run;
use crate::chunk::Chunk;
use crate::codec::Codec;
use crate::error::{Error, ErrorKind, Result};
use crate::ops::restore::ATTEMPTS;
use crate::progress::Progress;
use crate::repository::{
    Fill, Gaps, PackRead, Repository, Saved, Sink, SourceBytes, StoredChunk, fetch, longest_read, plan,
};
use crate::work::blocking;

/// Runs shorter than this are buffered if they are adjacent in the target, such as those of a column.
const SHORT: usize = 4 << 10;
/// Maximum bytes in the buffer.
const GATHERED: usize = 256 << 10;
/// Zeros placed at a time.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
/// Maximum number of damaged tensors in an error message.
const NAMED: usize = 8;

/// Target for the bytes of tensors. Every function of these arguments is one.
pub trait TensorSink: Send + Sync {
    /// Takes verified `bytes` of the tensor `tensor` (a number of [`TensorReading::tensors`]) for byte `offset` of its box.
    /// Called from many threads, in any order; the same bytes may come twice. It must not wait for the thread that drops the
    /// reading, which waits for this call.
    fn place(&self, tensor: usize, offset: u64, bytes: &[u8]) -> Result<()>;

    /// Passes the memory for the `len` bytes of the tensor from byte `offset` on to `fill`, which writes verified bytes there.
    /// Returns false to get them by [`TensorSink::place`] instead. While `fill` runs, and after an error, the memory has
    /// arbitrary bytes, so it must not be used before the reading has ended. Called under the same conditions as
    /// [`TensorSink::place`].
    ///
    /// # Errors
    /// As `fill`; or errors of the sink.
    fn fill(&self, tensor: usize, offset: u64, len: usize, fill: Fill<'_>) -> Result<bool> {
        let _ = (tensor, offset, len, fill);
        Ok(false)
    }

    /// True if [`TensorSink::fill`] takes most bytes.
    fn fills(&self) -> bool {
        false
    }

    /// Passes memory for the frame of a chunk to `read`, which writes it there, unverified; the sink decodes it to the tensor from byte
    /// `offset` on, and verifies it. Returns false to get it by [`TensorSink::fill`] or [`TensorSink::place`] instead. Called under the
    /// same conditions as [`TensorSink::place`].
    ///
    /// # Errors
    /// As `read`; or errors of the sink.
    fn take_stored(&self, tensor: usize, offset: u64, stored: StoredChunk, read: Fill<'_>) -> Result<bool> {
        let _ = (tensor, offset, stored, read);
        Ok(false)
    }

    /// True if [`TensorSink::take_stored`] takes most chunks of this codec.
    fn takes_stored(&self, codec: Codec) -> bool {
        let _ = codec;
        false
    }

    /// True if all bytes are zeros until they are placed: holes of saved files are then skipped, at no cost for any length.
    fn is_zeroed(&self) -> bool {
        false
    }
}

impl<F: Fn(usize, u64, &[u8]) -> Result<()> + Send + Sync> TensorSink for F {
    fn place(&self, tensor: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        self(tensor, offset, bytes)
    }
}

/// Cost of a reading.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TensorsRead {
    /// Stored bytes that were fetched.
    pub fetched_bytes: u64,
    /// The same, by where they came from.
    pub sources: SourceBytes,
    /// Chunks with requested bytes; each was fetched once.
    pub chunks: u64,
    /// Requested bytes.
    pub bytes: u64,
}

impl Repository {
    /// Reads all boxes of `reading` into `sink`.
    ///
    /// # Errors
    /// Damaged, with the affected tensors, if stored bytes are damaged; all others are placed first. Conflict or not
    /// found, if the name was replaced and its old content collected meanwhile. Errors of `sink`.
    ///
    /// # Cancel safety
    /// Safe: once this returns or is dropped, `sink` is not called any more.
    #[tracing::instrument(skip_all)]
    pub async fn read_tensors(
        &self,
        reading: &Arc<TensorReading>,
        sink: Arc<dyn TensorSink>,
        progress: &Progress,
    ) -> Result<TensorsRead> {
        let delivery = Arc::new(Delivery::new(reading, sink));
        let _closing = CloseOnDrop(&delivery);
        progress.phase("restoring", plain_bytes(&reading.saved, reading.chunks()));
        let zeros = Arc::clone(&delivery);
        blocking(move || zeros.place_zeros()).await?;
        let mut fetched = SourceBytes::default();
        match self.deliver(&delivery, reading.chunks(), progress).await {
            Ok(read) => fetched += read,
            Err(error) if error.kind() == ErrorKind::Damaged => {
                fetched += self.deliver_one_by_one(&delivery, error, progress).await?;
            }
            Err(error) => return Err(error),
        }
        Ok(TensorsRead {
            fetched_bytes: fetched.total(),
            sources: fetched,
            chunks: reading.chunk_count(),
            bytes: reading.bytes(),
        })
    }

    /// Stored bytes that `reading` would fetch.
    pub(super) fn plan_tensors(&self, reading: &TensorReading) -> Result<u64> {
        let (saved, longest) = (&reading.saved, longest_read(self, self.budget()));
        let reads = plan(|chunk| saved.locate(chunk), reading.chunks().iter().copied(), longest, Gaps::Spare)?;
        Ok(reads.iter().map(PackRead::stored_len).sum())
    }

    /// Fetches those of `chunks` that are not placed yet; returns the stored bytes that were fetched.
    async fn deliver(&self, delivery: &Arc<Delivery>, chunks: &[u32], progress: &Progress) -> Result<SourceBytes> {
        let mut current = Arc::clone(&delivery.reading.saved);
        let mut fetched = SourceBytes::default();
        for _ in 0..ATTEMPTS {
            let missing = delivery.missing(chunks);
            if missing.is_empty() {
                return Ok(fetched);
            }
            let reads = plan(|chunk| current.locate(chunk), missing, longest_read(self, self.budget()), Gaps::Spare)?;
            match fetch(self, &current, reads, Arc::clone(delivery) as Arc<dyn Sink>, progress).await {
                Ok(read) => fetched += read,
                Err(error) if error.kind() == ErrorKind::NotFound => current = self.newer(&current, error).await?,
                Err(error) => return Err(error),
            }
        }
        let name = &delivery.reading.saved.name;
        Err(Error::busy("packs are repacked faster than they can be read").at(name).help("try again"))
    }

    /// After damage: places the undamaged chunks, and returns an error with the affected tensors, if there are any.
    async fn deliver_one_by_one(
        &self,
        delivery: &Arc<Delivery>,
        first: Error,
        progress: &Progress,
    ) -> Result<SourceBytes> {
        let (mut fetched, mut hit) = (SourceBytes::default(), Vec::new());
        for pairs in delivery.reading.chunks_by_tensor().chunk_by(|one, next| one.0 == next.0) {
            let chunks: Vec<u32> = pairs.iter().map(|&(_, chunk)| chunk).collect();
            match self.deliver(delivery, &chunks, progress).await {
                Ok(read) => fetched += read,
                Err(error) if error.kind() == ErrorKind::Damaged => {
                    hit.extend(pairs.first().map(|&(tensor, _)| tensor));
                }
                Err(error) => return Err(error),
            }
        }
        let wanted = delivery.reading.tensors();
        let names: Vec<_> = hit.iter().filter_map(|&tensor| Some(wanted.get(tensor)?.name.as_str())).collect();
        if names.is_empty() {
            return Ok(fetched);
        }
        let more = names.len().saturating_sub(NAMED);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let shown = names.iter().take(NAMED).copied().collect::<Vec<_>>().join(", ");
        Err(Error::damaged(format!("{} of {} tensors cannot be read", names.len(), wanted.len()))
            .at(&delivery.reading.saved.name)
            .got(format!("damage in {shown}{more}"))
            .help("name the others to restore them; `towline verify --data --repair`, saving the same content again and repairing again heals")
            .source(first))
    }
}

/// A reading in progress.
struct Delivery {
    reading: Arc<TensorReading>,
    sink: Arc<dyn TensorSink>,
    /// Progress of each chunk of the reading.
    progress: Vec<Placing>,
    /// True while the sink may be called; read-locked during a call.
    open: RwLock<bool>,
}

impl Delivery {
    fn new(reading: &Arc<TensorReading>, sink: Arc<dyn TensorSink>) -> Self {
        let progress = reading.chunks().iter().map(|_| Placing::default()).collect();
        Self { reading: Arc::clone(reading), sink, progress, open: RwLock::new(true) }
    }

    fn placing(&self, chunk: u32) -> Option<&Placing> {
        self.progress.get(self.reading.chunks().binary_search(&chunk).ok()?)
    }

    fn missing(&self, chunks: &[u32]) -> Vec<u32> {
        chunks.iter().copied().filter(|&chunk| !self.placing(chunk).is_some_and(Placing::is_over)).collect()
    }

    /// Target of a complete chunk of `len` bytes, if that is one contiguous range of one tensor.
    fn stretch(&self, chunk: u32, len: usize) -> Option<(usize, u64)> {
        let [one] = self.reading.uses(chunk) else { return None };
        let segment = self.reading.segment(one.segment)?;
        let whole = one.at..one.at.checked_add(len as u64)?;
        let run = segment.runs.within(whole.clone()).next()?;
        (run.source == whole).then_some((segment.tensor, run.target))
    }

    /// Passes on the part of `bytes`, at `at` in the file, that a segment needs.
    fn write_segment(&self, segment: &Segment, at: u64, bytes: &[u8]) -> Result<()> {
        let (mut gathered, mut begins) = (Vec::new(), 0);
        for Run { source, target } in segment.runs.within(at..at.saturating_add(bytes.len() as u64)) {
            let index = |offset: u64| usize::try_from(offset - at).unwrap_or(usize::MAX);
            let piece = bytes.get(index(source.start)..index(source.end)).unwrap_or_default();
            let follows = begins + gathered.len() as u64 == target && gathered.len() < GATHERED;
            if !gathered.is_empty() && (!follows || piece.len() >= SHORT) {
                self.sink.place(segment.tensor, begins, &gathered)?;
                gathered.clear();
            }
            if piece.len() >= SHORT {
                self.sink.place(segment.tensor, target, piece)?;
                continue;
            }
            if gathered.is_empty() {
                begins = target;
            }
            gathered.extend_from_slice(piece);
        }
        if gathered.is_empty() { Ok(()) } else { self.sink.place(segment.tensor, begins, &gathered) }
    }

    /// Places zeros for holes of files.
    fn place_zeros(&self) -> Result<()> {
        if self.sink.is_zeroed() {
            return Ok(());
        }
        for (segment, hole) in self.reading.zeros() {
            for run in segment.runs.within(hole) {
                let (mut target, mut left) = (run.target, run.source.end - run.source.start);
                while left > 0 {
                    let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
                    let zeros = ZEROS.get(..usize::try_from(left).unwrap_or(usize::MAX)).unwrap_or(&ZEROS);
                    if !*open {
                        return Ok(());
                    }
                    self.sink.place(segment.tensor, target, zeros)?;
                    (target, left) = (target + zeros.len() as u64, left - zeros.len() as u64);
                }
            }
        }
        Ok(())
    }
}

/// Each chunk is placed once, although it may be read twice at the same time, while an earlier try still runs.
impl Sink for Delivery {
    /// Passes on the needed parts of a chunk.
    fn take(&self, index: u32, chunk: Chunk<'_>) -> Result<()> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        let Some(claim) = self.placing(index).filter(|_| *open).and_then(Placing::claim) else { return Ok(()) };
        for one in self.reading.uses(index) {
            if let Some(segment) = self.reading.segment(one.segment) {
                self.write_segment(segment, one.at, chunk.bytes())?;
            }
        }
        claim.end();
        Ok(())
    }

    fn fills(&self) -> bool {
        self.sink.fills()
    }

    fn fill(&self, index: u32, len: usize, fill: Fill<'_>) -> Result<bool> {
        let Some((tensor, offset)) = self.stretch(index, len) else { return Ok(false) };
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        let Some(claim) = self.placing(index).filter(|_| *open).and_then(Placing::claim) else { return Ok(true) };
        let filled = self.sink.fill(tensor, offset, len, fill)?;
        if filled {
            claim.end();
        }
        Ok(filled)
    }

    fn takes_stored(&self, codec: Codec) -> bool {
        self.sink.takes_stored(codec)
    }

    fn take_stored(&self, stored: StoredChunk, read: Fill<'_>) -> Result<bool> {
        let StoredChunk { index, plain_len, .. } = stored;
        let Some((tensor, offset)) = self.stretch(index, plain_len as usize) else { return Ok(false) };
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        let Some(claim) = self.placing(index).filter(|_| *open).and_then(Placing::claim) else { return Ok(true) };
        let taken = self.sink.take_stored(tensor, offset, stored, read)?;
        if taken {
            claim.end();
        }
        Ok(taken)
    }
}

/// Progress of a chunk on its way to its targets.
#[derive(Debug, Default)]
struct Placing(AtomicU8);

const TO_DO: u8 = 0;
const CLAIMED: u8 = 1;
const OVER: u8 = 2;

impl Placing {
    fn is_over(&self) -> bool {
        self.0.load(Ordering::Acquire) == OVER
    }

    /// Waits for the right to place the chunk; none if it is placed already.
    fn claim(&self) -> Option<Claim<'_>> {
        loop {
            match self.0.compare_exchange(TO_DO, CLAIMED, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(Claim(self)),
                Err(OVER) => return None,
                // The holder decodes a chunk, which takes a millisecond; to a device it may first wait for an earlier copy.
                Err(_) => std::thread::yield_now(),
            }
        }
    }
}

/// The right to place a chunk, released on drop if it was not placed.
struct Claim<'a>(&'a Placing);

impl Claim<'_> {
    /// Marks the chunk as placed.
    fn end(self) {
        self.0.0.store(OVER, Ordering::Release);
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let _ = self.0.0.compare_exchange(CLAIMED, TO_DO, Ordering::AcqRel, Ordering::Acquire);
    }
}

/// Ends calls of the sink on drop, because work on other threads may outlive a reading that failed or was dropped.
struct CloseOnDrop<'a>(&'a Delivery);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        *self.0.open.write().unwrap_or_else(PoisonError::into_inner) = false;
    }
}

fn plain_bytes(saved: &Saved, chunks: &[u32]) -> u64 {
    let lens = &saved.manifest.chunks.lens;
    chunks.iter().filter_map(|&chunk| lens.get(chunk as usize)).map(|&len| u64::from(len)).sum()
}
