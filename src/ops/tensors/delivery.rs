//! Carrying out a reading: fetch -> decode + verify -> place, into destinations that the caller gives.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use super::reading::{Segment, TensorReading};
use crate::checkpoint::boxes::Run;
use crate::error::{Error, ErrorKind, Result};
use crate::ops::blocking;
use crate::ops::restore::ATTEMPTS;
use crate::progress::Progress;
use crate::repository::{Gaps, Repository, Saved, Sink, fetch, longest_read, plan};

/// Runs shorter than this are gathered where they follow each other in what was asked for, such as those of a column.
const SHORT: usize = 4 << 10;
/// Bytes gathered, at most.
const GATHERED: usize = 256 << 10;
/// Zeros placed at a time.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
/// Damaged tensors that an error names.
const NAMED: usize = 8;

/// Where the bytes of tensors go. Any function of these arguments is one.
pub trait TensorSink: Send + Sync {
    /// Takes verified `bytes` of the tensor `tensor` (a number of [`TensorReading::tensors`]), to stand from byte `offset`
    /// of its box on. Called from many threads at once, in any order; the same bytes may come twice. It must not wait for
    /// whoever drops the reading: that waits for it.
    fn place(&self, tensor: usize, offset: u64, bytes: &[u8]) -> Result<()>;
}

impl<F: Fn(usize, u64, &[u8]) -> Result<()> + Send + Sync> TensorSink for F {
    fn place(&self, tensor: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        self(tensor, offset, bytes)
    }
}

/// What a reading took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TensorsRead {
    /// Stored bytes read from the repository.
    pub fetched_bytes: u64,
    /// Chunks that hold what was wanted; each was fetched once.
    pub chunks: u64,
    /// Bytes that were wanted.
    pub bytes: u64,
}

impl Repository {
    /// Reads what was chosen into `sink`, which gets every byte of every box of `reading`.
    ///
    /// # Errors
    /// Damaged, naming the tensors that are hit, if stored bytes are not as written: the others have been placed by then;
    /// conflict or not found, if the name was replaced and its old content collected meanwhile; what `sink` returns.
    ///
    /// # Cancel safety
    /// Safe: once this returns or is dropped, `sink` is not called any more.
    pub async fn read_tensors(
        &self,
        reading: &Arc<TensorReading>,
        sink: Arc<dyn TensorSink>,
        progress: &Progress,
    ) -> Result<TensorsRead> {
        let delivery = Arc::new(Delivery::new(reading, sink));
        let _closing = Closing(&delivery);
        progress.phase("restoring", plain_bytes(&reading.saved, reading.chunks()));
        let zeros = Arc::clone(&delivery);
        blocking(move || zeros.place_zeros()).await?;
        let mut fetched = 0;
        match self.deliver(&delivery, reading.chunks(), progress).await {
            Ok(read) => fetched += read,
            Err(error) if error.kind() == ErrorKind::Damaged => {
                fetched += self.deliver_one_by_one(&delivery, error, progress).await?;
            }
            Err(error) => return Err(error),
        }
        Ok(TensorsRead { fetched_bytes: fetched, chunks: reading.chunk_count(), bytes: reading.bytes() })
    }

    /// Fetches those of `chunks` that are not placed yet; returns the stored bytes read.
    async fn deliver(&self, delivery: &Arc<Delivery>, chunks: &[u32], progress: &Progress) -> Result<u64> {
        let mut current = Arc::clone(&delivery.reading.saved);
        let mut fetched = 0;
        for _ in 0..ATTEMPTS {
            let missing = delivery.missing(chunks);
            if missing.is_empty() {
                return Ok(fetched);
            }
            let reads = plan(|chunk| current.locate(chunk), missing, longest_read(self, self.budget()), Gaps::Spare)?;
            let sink: Sink = {
                let delivery = Arc::clone(delivery);
                Arc::new(move |chunk, bytes| delivery.place(chunk, bytes.bytes()))
            };
            match fetch(self, &current, reads, sink, progress).await {
                Ok(read) => fetched += read,
                Err(error) if error.kind() == ErrorKind::NotFound => current = self.newer(&current, error).await?,
                Err(error) => return Err(error),
            }
        }
        let name = &delivery.reading.saved.name;
        Err(Error::conflict("packs are repacked faster than they can be read").at(name).cure("try again"))
    }

    /// Something is damaged: places what is not, and tells which tensors are hit. Fine if none is after all.
    async fn deliver_one_by_one(&self, delivery: &Arc<Delivery>, first: Error, progress: &Progress) -> Result<u64> {
        let (mut fetched, mut hit) = (0, Vec::new());
        for (tensor, chunks) in delivery.reading.chunks_by_tensor().iter().enumerate() {
            match self.deliver(delivery, chunks, progress).await {
                Ok(read) => fetched += read,
                Err(error) if error.kind() == ErrorKind::Damaged => hit.push(tensor),
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
            .cure("name the others to restore them; `towline verify --data --repair`, then saving the same content again, heals")
            .source(first))
    }
}

/// A reading under way.
struct Delivery {
    reading: Arc<TensorReading>,
    sink: Arc<dyn TensorSink>,
    /// For each chunk of the reading, whether all that is needed of it is placed.
    placed: Vec<AtomicBool>,
    /// Whether the sink may be called; held for reading meanwhile.
    open: RwLock<bool>,
}

impl Delivery {
    fn new(reading: &Arc<TensorReading>, sink: Arc<dyn TensorSink>) -> Self {
        let placed = reading.chunks().iter().map(|_| AtomicBool::new(false)).collect();
        Self { reading: Arc::clone(reading), sink, placed, open: RwLock::new(true) }
    }

    fn is_placed(&self, chunk: u32) -> Option<&AtomicBool> {
        self.placed.get(self.reading.chunks().binary_search(&chunk).ok()?)
    }

    fn missing(&self, chunks: &[u32]) -> Vec<u32> {
        let placed = |chunk| self.is_placed(chunk).is_some_and(|placed| placed.load(Ordering::Acquire));
        chunks.iter().copied().filter(|&chunk| !placed(chunk)).collect()
    }

    /// Hands on what is needed of a chunk. A chunk counts as placed once that is done, so one that comes twice at once is
    /// placed twice.
    fn place(&self, chunk: u32, bytes: &[u8]) -> Result<()> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        let Some(placed) = self.is_placed(chunk).filter(|placed| *open && !placed.load(Ordering::Acquire)) else {
            return Ok(());
        };
        for one in self.reading.uses(chunk) {
            if let Some(segment) = self.reading.segment(one.segment) {
                self.hand_on(segment, one.at, bytes)?;
            }
        }
        placed.store(true, Ordering::Release);
        Ok(())
    }

    /// Hands on what a segment needs of `bytes`, which stand at `at` in its file.
    fn hand_on(&self, segment: &Segment, at: u64, bytes: &[u8]) -> Result<()> {
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

    /// What lies in the holes of files.
    fn place_zeros(&self) -> Result<()> {
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

/// Ends the calls of the sink: work on other threads may outlive a reading that failed or was dropped.
struct Closing<'a>(&'a Delivery);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        *self.0.open.write().unwrap_or_else(PoisonError::into_inner) = false;
    }
}

fn plain_bytes(saved: &Saved, chunks: &[u32]) -> u64 {
    let lens = &saved.manifest.chunks.lens;
    chunks.iter().filter_map(|&chunk| lens.get(chunk as usize)).map(|&len| u64::from(len)).sum()
}
