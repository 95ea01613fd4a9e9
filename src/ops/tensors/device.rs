//! Reading tensors into the memory of a GPU, all stages at the same time: fetch -> pinned slot -> device -> decode + verify there, or
//! fetch -> decode + verify -> pinned slot -> device.
#![expect(unsafe_code, reason = "a device writes to memory that the caller names")]

use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::delivery::{TensorSink, TensorsRead};
use super::reading::TensorReading;
use crate::budget::Budget;
use crate::codec::Codec;
use crate::codec::planes::Outline;
use crate::error::{Error, Result};
use crate::limits::MIB;
use crate::progress::Progress;
use crate::repository::{Fill, Repository, StoredChunk};
use crate::staging::cuda::{CudaCopier, CudaDevice, CudaMemory};
use crate::staging::{
    ChunkTarget, CopiedPart, CopyEngine, DecodeSizes, PartTarget, PinnedRing, SlotLens, StageClock, StageTimes,
    slot_bytes,
};
use crate::work::blocking;

/// Maximum pinned memory, in bytes: the fastest bus copies it in about a millisecond. Pinning took about a quarter of a millisecond for
/// each mebibyte (with an H200, docs/staging.md), which delays the first tensor, and more memory made no load faster.
pub const PINNED_MAX: u64 = 64 * MIB;
/// Bytes that are copied at a time, at most, unless one chunk is longer: some calls of the driver for each copy of this length take much
/// less time than the copy.
const SLOT_MAX: u64 = 8 * MIB;
/// Minimum length of the longest part of a slot, in bytes: chunks may be tiny.
const PART_MIN: u64 = 64 << 10;
/// Minimum number of slots of pinned memory, unless one chunk is longer: threads fill some while others are copied.
const SLOTS_MIN: u64 = 8;
/// Plain bytes that the device may decline to decode before it is asked less often: each is read twice.
const DECLINED_MIN: u64 = 32 * MIB;
/// Alignment of tensors in memory that is allocated here, in bytes: that of torch's allocator.
const ALIGNMENT: u64 = 512;

/// Memory of a device for one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceRange {
    /// First byte.
    pub address: u64,
    /// Bytes.
    pub len: u64,
}

/// Where chunks are decoded and verified on their way to a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DecodeOn {
    /// On the CPU. The default, until the kernels have run on real GPUs.
    #[default]
    Cpu,
    /// On the device, if it can, and knows their codec; the others on the CPU.
    Device,
}

impl FromStr for DecodeOn {
    type Err = Error;

    /// `cpu` or `gpu`.
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "cpu" => Ok(Self::Cpu),
            "gpu" => Ok(Self::Device),
            other => Err(Error::usage("nothing decodes there").expected("cpu or gpu").got(format!("{other:?}"))),
        }
    }
}

/// Tensors in new memory of a GPU.
#[derive(Debug)]
pub struct DeviceTensors {
    /// The memory.
    pub memory: CudaMemory,
    /// First byte of each tensor there, in the order of the reading.
    pub starts: Vec<u64>,
    /// Cost of the reading.
    pub cost: DeviceRead,
}

/// Cost of a reading to a device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceRead {
    /// Cost of the reading.
    pub read: TensorsRead,
    /// Times of the stages.
    pub times: StageTimes,
    /// Plain bytes that the device has decoded and verified; the CPU did so for all others.
    pub on_device: u64,
}

impl Repository {
    /// Reads all boxes of `reading` into new memory of `device`. Every byte is verified: before it is copied, or there.
    ///
    /// # Errors
    /// As [`Repository::read_tensors`]; exhausted, if the device has too little memory, or none can be pinned; others of the device.
    ///
    /// # Cancel safety
    /// Safe: the memory is freed, once no copy runs.
    pub async fn read_tensors_to_new(
        &self,
        reading: &Arc<TensorReading>,
        device: &CudaDevice,
        decode_on: DecodeOn,
        progress: &Progress,
    ) -> Result<DeviceTensors> {
        let (mut starts, mut end) = (Vec::with_capacity(reading.tensors().len()), 0_u64);
        for tensor in reading.tensors() {
            starts.push(end);
            let next = end.checked_add(tensor.bytes).and_then(|end| end.checked_next_multiple_of(ALIGNMENT));
            end = next.ok_or_else(|| Error::exhausted("tensors are too large for any device"))?;
        }
        let opening = device.clone();
        let (memory, copier) = blocking(move || Ok((opening.allocate(end)?, CudaCopier::new(&opening)?))).await?;
        let first = memory.address();
        let ranges = reading.tensors().iter().zip(&starts);
        let ranges = ranges.map(|(tensor, start)| vec![DeviceRange { address: first + start, len: tensor.bytes }]);
        // SAFETY: the memory outlives the call, and is freed after it.
        let cost = unsafe { self.read_tensors_to(reading, copier, decode_on, ranges.collect(), progress).await? };
        Ok(DeviceTensors { memory, starts, cost })
    }

    /// Reads all boxes of `reading` to `targets`: for each tensor one or more ranges of the device to which `engine` copies. If the device
    /// finds chunks that are not what their ids say, all are read once more, and verified by the CPU.
    ///
    /// # Safety
    /// The targets are memory of the device that stays allocated, and is used by nobody else, until this has returned or was dropped.
    ///
    /// # Errors
    /// As [`Repository::read_tensors`]; errors of the device. The targets then have arbitrary bytes.
    ///
    /// # Cancel safety
    /// Safe: on drop it waits until no copy runs, unless the device is lost.
    pub async unsafe fn read_tensors_to<E: CopyEngine + 'static>(
        &self,
        reading: &Arc<TensorReading>,
        mut engine: E,
        decode_on: DecodeOn,
        targets: Vec<Vec<DeviceRange>>,
        progress: &Progress,
    ) -> Result<DeviceRead> {
        let clock = Arc::new(StageClock::start(reading.tensors().iter().map(|tensor| tensor.bytes)));
        let read_before = progress.snapshot().reading;
        let slot = slot_len(self.budget(), reading.bytes(), longest_part(reading));
        let pinned = pinned_bytes(self.budget(), slot).min(slots_bytes(reading, slot));
        let _memory = self.budget().carve_beside_buffers(pinned).await?;
        let (wanted, min) = (to_usize(slot), to_usize(longest_part(reading)));
        let mut decodes = false;
        if decode_on == DecodeOn::Device {
            let sizes = DecodeSizes { slot: slot_bytes(wanted.max(min)), chunk: min, total: reading.bytes() };
            (engine, decodes) = blocking(move || {
                let decodes = engine.prepare_to_decode(sizes);
                Ok((engine, decodes))
            })
            .await?;
        }
        let landing = Arc::clone(&clock);
        let landed = move |parts: &[CopiedPart], took| {
            landing.copied(took);
            parts.iter().for_each(|part| landing.arrived(part.number, part.len));
        };
        let ring = Arc::new(PinnedRing::new(engine, SlotLens { wanted, min }, pinned, Box::new(landed)));
        // Dropped after the reading, and so after the last copy was started.
        let idle = IdleOnDrop(&ring);
        let sink = DeviceSink::new(&ring, targets, &clock, decodes);
        let mut read = self.read_tensors(reading, Arc::clone(&sink) as Arc<dyn TensorSink>, progress).await?;
        let mut on_device = sink.taken.load(Ordering::Relaxed);
        let damaged = finish(&ring).await?;
        if damaged > 0 {
            tracing::warn!("the GPU found {damaged} chunks damaged: all are read again, and verified by the CPU");
            let sink = DeviceSink::new(&ring, sink.targets.clone(), &clock, false);
            let again = self.read_tensors(reading, sink, progress).await?;
            read = TensorsRead { fetched_bytes: read.fetched_bytes + again.fetched_bytes, ..again };
            finish(&ring).await?;
            on_device = 0;
        }
        drop(idle);
        let times = clock.times(progress.snapshot().reading.saturating_sub(read_before));
        Ok(DeviceRead { read, times, on_device })
    }
}

/// Waits until all that was copied is verified; returns the number of damaged chunks.
async fn finish<E: CopyEngine + 'static>(ring: &Arc<PinnedRing<E>>) -> Result<u64> {
    let ring = Arc::clone(ring);
    blocking(move || ring.finish()).await
}

impl DeviceTensors {
    /// Reads the tensors once more, and compares each byte with what the GPU has.
    ///
    /// # Errors
    /// Other, with the tensor, if they differ; as [`Repository::read_tensors`]; others of the device.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn compare(
        self: &Arc<Self>,
        repository: &Repository,
        reading: &Arc<TensorReading>,
        progress: &Progress,
    ) -> Result<()> {
        let (there, names) = (Arc::clone(self), Arc::clone(reading));
        let compare = move |tensor: usize, offset: u64, bytes: &[u8]| {
            let mut found = vec![0; bytes.len()];
            let start = there.starts.get(tensor).copied().unwrap_or(u64::MAX);
            there.memory.read(start.saturating_add(offset), &mut found)?;
            if found == bytes {
                return Ok(());
            }
            let name = names.tensors().get(tensor).map_or("", |wanted| &wanted.name);
            Err(Error::other("memory of the GPU differs from what was copied there")
                .at(format!("{name}, byte {offset}")))
        };
        repository.read_tensors(reading, Arc::new(compare), progress).await.map(drop)
    }
}

/// Bytes of the longest part of a slot: a whole chunk.
fn longest_part(reading: &TensorReading) -> u64 {
    reading.longest_chunk().max(PART_MIN)
}

/// Bytes of a slot to copy `bytes`, in parts of at most `longest_part`.
fn slot_len(budget: &Budget, bytes: u64, longest_part: u64) -> u64 {
    (budget.total() / 4 / SLOTS_MIN).min(SLOT_MAX).min(bytes).max(longest_part)
}

fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// Pinned memory for slots of `slot` bytes: a quarter of the budget, but at least two slots if half of it has room.
fn pinned_bytes(budget: &Budget, slot: u64) -> u64 {
    let wanted = (budget.total() / 4).min(PINNED_MAX).max(2 * slot);
    wanted.min(budget.total() / 2).max(slot)
}

/// Bytes of all slots of `slot` bytes that the copies of `reading` can fill: two neighbours have more than one slot's bytes together.
fn slots_bytes(reading: &TensorReading, slot: u64) -> u64 {
    reading.bytes().saturating_mul(2).saturating_add(slot)
}

/// Waits on drop until no copy runs.
struct IdleOnDrop<'r, E: CopyEngine>(&'r PinnedRing<E>);

impl<E: CopyEngine> Drop for IdleOnDrop<'_, E> {
    fn drop(&mut self) {
        // Errors were reported, or nobody waits for them.
        let _ = self.0.finish();
    }
}

/// Copies tensors to a device.
struct DeviceSink<E: CopyEngine> {
    ring: Arc<PinnedRing<E>>,
    /// Targets of each tensor, which the caller of [`Repository::read_tensors_to`] vouches for.
    targets: Vec<Vec<DeviceRange>>,
    clock: Arc<StageClock>,
    /// True if the device decodes and verifies chunks.
    decodes: bool,
    /// Plain bytes of the chunks that the device decodes.
    taken: AtomicU64,
    /// Plain bytes of chunks with planes that it cannot decode.
    declined: AtomicU64,
}

impl<E: CopyEngine> DeviceSink<E> {
    fn new(
        ring: &Arc<PinnedRing<E>>,
        targets: Vec<Vec<DeviceRange>>,
        clock: &Arc<StageClock>,
        decodes: bool,
    ) -> Arc<Self> {
        let (taken, declined) = Default::default();
        Arc::new(Self { ring: Arc::clone(ring), targets, clock: Arc::clone(clock), decodes, taken, declined })
    }

    fn targets(&self, tensor: usize) -> &[DeviceRange] {
        self.targets.get(tensor).map(Vec::as_slice).unwrap_or_default()
    }

    /// Lets `fill` write `len` bytes to pinned memory, and copies them to `target`, from its byte `offset` on.
    fn copy(
        &self,
        tensor: usize,
        target: DeviceRange,
        offset: u64,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        if offset.checked_add(len as u64).is_none_or(|end| end > target.len) {
            return Err(Error::other("more bytes than a tensor has room for").got(offset));
        }
        let mut part = self.clock.waiting(|| self.ring.reserve(len, 0))?;
        self.clock.decoding(|| fill(&mut part))?;
        // SAFETY: the range is within a target.
        unsafe { part.commit(PartTarget::Copy(target.address + offset), tensor) }
    }
}

impl<E: CopyEngine> TensorSink for DeviceSink<E> {
    fn place(&self, tensor: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        for &target in self.targets(tensor) {
            let mut at = offset;
            for piece in bytes.chunks(self.ring.part_max()) {
                self.copy(tensor, target, at, piece.len(), |bytes| {
                    bytes.copy_from_slice(piece);
                    Ok(())
                })?;
                at += piece.len() as u64;
            }
        }
        Ok(())
    }

    fn fills(&self) -> bool {
        true
    }

    fn fill(&self, tensor: usize, offset: u64, len: usize, fill: Fill<'_>) -> Result<bool> {
        match self.targets(tensor) {
            &[target] if len <= self.ring.part_max() => self.copy(tensor, target, offset, len, fill).map(|()| true),
            // Several targets need the bytes.
            _ => Ok(false),
        }
    }

    fn takes_stored(&self, codec: Codec) -> bool {
        let decodes_most =
            || self.declined.load(Ordering::Relaxed) <= self.taken.load(Ordering::Relaxed) + DECLINED_MIN;
        self.decodes && (codec == Codec::Raw || codec == Codec::Planes && decodes_most())
    }

    fn take_stored(&self, tensor: usize, offset: u64, stored: StoredChunk, read: Fill<'_>) -> Result<bool> {
        let StoredChunk { codec, id, plain_len, stored_len, .. } = stored;
        let (len, is_encoded) = (stored_len as usize, codec == Codec::Planes);
        let &[target] = self.targets(tensor) else { return Ok(false) };
        let is_within = offset.checked_add(plain_len.into()).is_some_and(|end| end <= target.len);
        let is_raw = codec == Codec::Raw && stored_len == plain_len;
        if !is_within || plain_len == 0 || len > self.ring.part_max() || !(is_encoded || is_raw) {
            return Ok(false);
        }
        let scratch = self.ring.engine().scratch_len(plain_len, is_encoded);
        let mut part = self.clock.waiting(|| self.ring.reserve(len, scratch))?;
        self.clock.decoding(|| read(&mut part))?;
        let planes = if is_encoded { Outline::of(&part, plain_len as usize) } else { None };
        if is_encoded && planes.is_none() {
            self.declined.fetch_add(plain_len.into(), Ordering::Relaxed);
            return Ok(false);
        }
        self.taken.fetch_add(plain_len.into(), Ordering::Relaxed);
        let chunk = ChunkTarget { to: target.address + offset, plain_len, id, planes };
        // SAFETY: the range is within a target.
        unsafe { part.commit(PartTarget::Chunk(Box::new(chunk)), tensor) }?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinned_memory_stays_within_the_budget() {
        let of = |budget: u64, slot: u64| pinned_bytes(&Budget::new(budget * MIB).unwrap(), slot * MIB) / MIB;
        assert_eq!((of(64, 1), of(64, 16), of(1024, 1), of(8192, 16)), (16, 32, 64, 64));
        assert_eq!(of(64, 20), 32);
        let slot = |budget: u64, bytes: u64, longest: u64| {
            slot_len(&Budget::new(budget * MIB).unwrap(), bytes * MIB, longest * MIB) / MIB
        };
        assert_eq!((slot(64, 100, 1), slot(64, 100, 16), slot(1024, 100, 1), slot(8192, 100, 16)), (2, 16, 8, 16));
        assert_eq!(slot(1024, 3, 1), 3, "no more than what is copied");
    }
}
