//! Decoding and verification of chunks on a GPU, by the kernels of kernels.cu.
//!
//! The chunks of a slot are jobs of one decode stream, which has memory for their frames, and scratch memory. The streams are used in
//! turn, so that the kernels of several slots run at the same time: a Huffman code is decoded by four threads only, which takes several
//! times as long as the copy of its frame.
#![expect(unsafe_code, reason = "kernels read and write memory of the GPU")]

mod job;

use std::ffi::CStr;
use std::mem::ManuallyDrop;
use std::sync::{Mutex, PoisonError};

use memmap2::{Advice, MmapMut};

pub(super) use self::job::scratch_len;
use self::job::{ALIGNMENT, Job, LEAF, PLANES, ScratchMemory};
use super::driver::{Driver, Event, Grid, Kernel, Module, Stream};
use super::{CudaDevice, CudaMemory, OwnedEvent, OwnedStream};
use crate::error::{Error, Result};
use crate::staging::ring::{DecodeSizes, Part, PartTarget, SlotLimits};

/// The kernels, for GPUs since compute capability 7.5.
const KERNELS: &str = concat!(include_str!("kernels.ptx"), "\0");
/// Maximum number of decode streams: enough for the time in which a slot is decoded.
const STREAMS_MAX: usize = 12;
/// Minimum number of decode streams: one is filled while another is decoded.
const STREAMS_MIN: usize = 2;
/// Maximum jobs of a decode stream.
const JOBS_MAX: usize = 256;
/// Scratch memory for a slot, as a multiple of the slot's length.
const SCRATCH_FACTOR: usize = 2;
/// Threads of a block.
const THREADS: u32 = 128;
/// Threads of a block that decodes a Huffman code: a warp.
const CODE_THREADS: u32 = 32;
/// Blocks that decode the planes of a chunk, one each.
const PLANE_BLOCKS: u32 = 8;
const _: () = assert!(PLANE_BLOCKS as usize == PLANES);
/// Blocks that write the numbers of a chunk.
const MERGE_BLOCKS: u32 = 8;

/// Decodes and verifies chunks.
#[derive(Debug)]
pub(super) struct Decoder {
    device: CudaDevice,
    kernels: Kernels,
    streams: Mutex<DecodeStreams>,
    /// Memory for frames of a decode stream, in bytes.
    frames_len: usize,
    /// Scratch memory of a decode stream, in bytes.
    scratch_len: usize,
    /// Number of chunks that are not what their ids say.
    mismatches: CudaMemory,
}

#[derive(Debug)]
struct Kernels {
    device: CudaDevice,
    module: Module,
    unpack: Kernel,
    merge: Kernel,
    leaves: Kernel,
    roots: Kernel,
}

/// The decode streams, in the order of their use.
#[derive(Debug)]
struct DecodeStreams {
    all: Vec<DecodeStream>,
    next: usize,
    /// Pinned memory for the jobs of each stream.
    tables: PinnedTables,
}

/// A stream of kernels, with the memory of its jobs.
#[derive(Debug)]
struct DecodeStream {
    stream: OwnedStream,
    /// The jobs were copied.
    copied: OwnedEvent,
    /// The jobs are done.
    done: OwnedEvent,
    /// Memory for frames, then jobs, then scratch memory.
    memory: CudaMemory,
    is_used: bool,
}

/// Jobs whose frames are being copied.
#[derive(Debug)]
pub(super) struct Jobs {
    stream: usize,
    /// Address for the slot's frames.
    frames: u64,
    /// Address of the jobs.
    table: u64,
    count: u32,
    /// Plain bytes of the longest chunk.
    longest: u32,
    is_encoded: bool,
    has_codes: bool,
}

impl Decoder {
    /// Prepares to decode what is queued in the stream `copies`.
    ///
    /// # Errors
    /// Unsupported, if the driver or the GPU is too old; exhausted, if the GPU has too little memory; others of the driver.
    pub(super) fn new(device: &CudaDevice, sizes: DecodeSizes, copies: Stream) -> Result<Self> {
        let kernels = Kernels::load(device)?;
        // Kernels read the words around a frame.
        let frames_len = sizes.slot.next_multiple_of(ALIGNMENT) + ALIGNMENT;
        let scratch_len = (sizes.slot * SCRATCH_FACTOR).max(scratch_len(sizes.chunk, true));
        let slots = usize::try_from(sizes.total / sizes.slot.max(1) as u64).unwrap_or(usize::MAX).saturating_add(1);
        let wanted = slots.clamp(STREAMS_MIN, STREAMS_MAX);
        let mut all = Vec::with_capacity(wanted);
        while all.len() < wanted {
            match DecodeStream::new(device, (frames_len + Job::LEN * JOBS_MAX + scratch_len) as u64) {
                Ok(stream) => all.push(stream),
                Err(_) if all.len() >= STREAMS_MIN => break,
                Err(error) => return Err(error),
            }
        }
        let tables = PinnedTables::new(device, all.len())?;
        let mismatches = device.allocate(4)?;
        // SAFETY: the memory is kept until this is dropped, which waits for `copies`.
        unsafe { device.enter()?.clear(mismatches.address(), 1, copies)? };
        let streams = Mutex::new(DecodeStreams { all, next: 0, tables });
        Ok(Self { device: device.clone(), kernels, streams, frames_len, scratch_len, mismatches })
    }

    pub(super) fn limits(&self) -> SlotLimits {
        SlotLimits { parts: JOBS_MAX, scratch: self.scratch_len }
    }

    /// Makes the chunks of `parts` jobs of the next decode stream, queues the copy of the jobs in the stream `copies`, and lets it
    /// wait until that stream's memory is free.
    ///
    /// # Errors
    /// Errors of the driver; other, if there are more chunks than [`Decoder::limits`] says.
    pub(super) fn prepare(&self, driver: &Driver, parts: &[Part], copies: Stream) -> Result<Jobs> {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let DecodeStreams { all, next, tables } = &mut *streams;
        let index = *next;
        *next = (index + 1) % all.len();
        let stream = all.get_mut(index).ok_or_else(|| Error::other("no memory to decode on the GPU"))?;
        if stream.is_used {
            // Other jobs may still be copied from the pinned memory.
            driver.wait(stream.copied.event)?;
            driver.wait_in_stream(copies, stream.done.event)?;
        }
        stream.is_used = true;
        let frames = stream.memory.address();
        let table = frames + self.frames_len as u64;
        let mut jobs = Jobs { stream: index, frames, table, count: 0, longest: 0, is_encoded: false, has_codes: false };
        let mut memory = ScratchMemory { free: table + (Job::LEN * JOBS_MAX) as u64, left: self.scratch_len };
        let pinned = tables.of(index);
        let mut slots = pinned.as_chunks_mut::<{ Job::LEN }>().0.iter_mut();
        for part in parts {
            let PartTarget::Chunk(chunk) = &part.target else { continue };
            let too_many = || Error::other("more chunks than the GPU can decode at once");
            if part.range.end + ALIGNMENT > self.frames_len {
                return Err(too_many());
            }
            let job = Job::of(chunk, frames + part.range.start as u64, &mut memory).ok_or_else(too_many)?;
            slots.next().ok_or_else(too_many)?.copy_from_slice(&job.to_bytes());
            jobs.count += 1;
            jobs.longest = jobs.longest.max(job.len);
            jobs.is_encoded |= job.width > 0;
            jobs.has_codes |= job.has_codes();
        }
        let filled = pinned.get(..Job::LEN * jobs.count as usize).unwrap_or_default();
        // SAFETY: the table is not written before `copied` has happened, and the memory is kept until the stream has ended.
        unsafe { driver.copy_in(table, filled, copies)? };
        driver.record(stream.copied.event, copies)?;
        Ok(jobs)
    }

    /// Launches the kernels of `jobs` once `copied` has happened.
    ///
    /// # Safety
    /// The frames are copied to the stream's memory by then. The targets stay memory of the GPU until [`Decoder::mismatches`] has returned, and
    /// nobody else writes to them.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(super) unsafe fn launch(&self, driver: &Driver, jobs: &Jobs, copied: Event) -> Result<()> {
        let streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(of_jobs) = streams.all.get(jobs.stream) else { return Ok(()) };
        let (stream, mismatches) = (of_jobs.stream.stream, self.mismatches.address());
        let &Jobs { table, count, longest, is_encoded, has_codes, .. } = jobs;
        driver.wait_in_stream(stream, copied)?;
        let Kernels { unpack, merge, leaves, roots, .. } = self.kernels;
        if has_codes {
            let grid = Grid { blocks: (count, PLANE_BLOCKS), threads: CODE_THREADS };
            // SAFETY: a kernel writes only to the memory of its jobs, as kernels.cu says, and reads only that, the jobs and the frames.
            unsafe { driver.launch(unpack, grid, [table, mismatches], stream)? };
        }
        if is_encoded {
            let grid = Grid { blocks: (MERGE_BLOCKS, count), threads: THREADS };
            // SAFETY: as above.
            unsafe { driver.launch(merge, grid, [table], stream)? };
        }
        let leaf_blocks = longest.div_ceil(LEAF).div_ceil(THREADS);
        // SAFETY: as above.
        unsafe { driver.launch(leaves, Grid { blocks: (leaf_blocks, count), threads: THREADS }, [table], stream)? };
        // SAFETY: as above.
        unsafe { driver.launch(roots, Grid { blocks: (count, 1), threads: THREADS }, [table, mismatches], stream)? };
        driver.record(of_jobs.done.event, stream)
    }

    /// Waits until all jobs are done; returns the number of chunks that are not what their ids say.
    ///
    /// # Errors
    /// Errors of the driver: then kernels may still run.
    pub(super) fn mismatches(&self) -> Result<u64> {
        self.settle(self.device.enter()?)?;
        let mut count = [0; 4];
        self.mismatches.read(0, &mut count)?;
        Ok(u64::from(u32::from_le_bytes(count)))
    }

    /// Waits until no kernel runs.
    ///
    /// # Errors
    /// Errors of the driver: then kernels may still run.
    pub(super) fn settle(&self, driver: &Driver) -> Result<()> {
        let streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.all.iter().try_for_each(|one| driver.settle(one.stream.stream))
    }
}

impl Jobs {
    /// Address for the bytes of the slot from `at` on.
    pub(super) fn frame_at(&self, at: usize) -> u64 {
        self.frames + at as u64
    }
}

impl Kernels {
    fn load(device: &CudaDevice) -> Result<Self> {
        let driver = device.enter()?;
        let text = CStr::from_bytes_with_nul(KERNELS.as_bytes());
        let module = driver.load(text.map_err(|source| Error::other("kernels are not text").source(source))?)?;
        let find = |name| driver.kernel(module, name);
        let found = find(c"unpack").and_then(|unpack| {
            let (merge, leaves, roots) = (find(c"merge")?, find(c"leaves")?, find(c"roots")?);
            Ok(Self { device: device.clone(), module, unpack, merge, leaves, roots })
        });
        found.inspect_err(|_| driver.unload(module))
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        if let Some(driver) = self.device.unless_lost() {
            driver.unload(self.module);
        }
    }
}

impl DecodeStream {
    fn new(device: &CudaDevice, len: u64) -> Result<Self> {
        Ok(Self {
            stream: OwnedStream::new(device)?,
            copied: OwnedEvent::new(device)?,
            done: OwnedEvent::new(device)?,
            memory: device.allocate(len)?,
            is_used: false,
        })
    }
}

/// Pinned memory for jobs. It stays pinned if the GPU is lost, which may still read it.
#[derive(Debug)]
struct PinnedTables {
    device: CudaDevice,
    memory: ManuallyDrop<MmapMut>,
}

impl PinnedTables {
    /// Tables for `count` streams.
    fn new(device: &CudaDevice, count: usize) -> Result<Self> {
        let len = (Job::LEN * JOBS_MAX * count).next_multiple_of(4096);
        let failed = |source| Error::exhausted("cannot get memory for jobs of a GPU").got(len).source(source);
        let mut memory = MmapMut::map_anon(len).map_err(failed)?;
        // As for all pinned memory: a child of this process must not share the pages.
        memory.advise(Advice::DontFork).map_err(failed)?;
        // SAFETY: it is unmapped after it was unpinned, or never.
        unsafe { device.enter()?.register(memory.as_mut_ptr(), len)? };
        Ok(Self { device: device.clone(), memory: ManuallyDrop::new(memory) })
    }

    /// Table of the stream `index`.
    fn of(&mut self, index: usize) -> &mut [u8] {
        let len = Job::LEN * JOBS_MAX;
        self.memory.get_mut(index * len..(index + 1) * len).unwrap_or_default()
    }
}

impl Drop for PinnedTables {
    fn drop(&mut self) {
        let Some(driver) = self.device.unless_lost() else { return };
        // SAFETY: the decoder's streams have ended: no copy from it is pending.
        unsafe { driver.unregister(self.memory.as_mut_ptr()) };
        // SAFETY: it is not used any more.
        unsafe { ManuallyDrop::drop(&mut self.memory) };
    }
}

#[cfg(test)]
mod tests;
