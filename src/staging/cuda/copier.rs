//! Copies from pinned memory to a GPU, on a stream of their own.
#![expect(unsafe_code, reason = "copies that run in the background")]

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::decoder::{self, Decoder, Jobs};
use super::driver::{Driver, Event, foreign_stream};
use super::{CudaDevice, OwnedStream};
use crate::error::{Error, Result};
use crate::staging::ring::{CopyEngine, DecodeSizes, Part, PartTarget, SlotLimits, joined};

/// Copies to one GPU, one after the other in the order of their start.
#[derive(Debug)]
pub struct CudaCopier {
    device: CudaDevice,
    /// Decodes and verifies what was copied, if the GPU can.
    decoder: Option<Decoder>,
    stream: OwnedStream,
    /// Events that nobody uses.
    events: Mutex<Vec<Event>>,
}

/// Copies that may still run.
#[derive(Debug)]
pub struct CudaCopy {
    begun: Event,
    ended: Event,
}

impl CudaCopier {
    /// Copies to `device`.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn new(device: &CudaDevice) -> Result<Self> {
        Ok(Self { device: device.clone(), decoder: None, stream: OwnedStream::new(device)?, events: Mutex::default() })
    }

    /// Lets all copies wait for what is queued in `stream` now, which may still use the memory that they write to.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of this process for this GPU; 0 is the legacy default stream.
    ///
    /// # Errors
    /// Errors of the driver.
    pub unsafe fn wait_for_stream(&self, stream: usize) -> Result<()> {
        let driver = self.device.enter()?;
        let event = self.event(driver)?;
        // SAFETY: as the caller says.
        let stream = unsafe { foreign_stream(stream) };
        let waits = driver.record(event, stream).and_then(|()| driver.wait_in_stream(self.stream.stream, event));
        self.keep(event);
        waits
    }

    fn event(&self, driver: &Driver) -> Result<Event> {
        let free = self.events.lock().unwrap_or_else(PoisonError::into_inner).pop();
        match free {
            Some(event) => Ok(event),
            None => driver.create_event(),
        }
    }

    fn keep(&self, event: Event) {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).push(event);
    }
}

impl Drop for CudaCopier {
    fn drop(&mut self) {
        // Waits for copies and kernels, whose memory is freed after this. An error marks the GPU as lost.
        let _ = self.settle();
        let Ok(driver) = self.device.enter() else { return };
        for event in self.events.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            driver.destroy_event(event);
        }
    }
}

impl CopyEngine for CudaCopier {
    type Copy = CudaCopy;

    fn prepare_to_decode(&mut self, sizes: DecodeSizes) -> bool {
        match Decoder::new(&self.device, sizes, self.stream.stream) {
            Ok(decoder) => self.decoder = Some(decoder),
            Err(error) => tracing::warn!("the GPU cannot decode chunks, the CPU does: {error}"),
        }
        self.decoder.is_some()
    }

    fn limits(&self) -> SlotLimits {
        match &self.decoder {
            Some(decoder) => decoder.limits(),
            None => SlotLimits { parts: usize::MAX, scratch: usize::MAX },
        }
    }

    fn scratch_len(&self, plain_len: u32, is_encoded: bool) -> usize {
        decoder::scratch_len(plain_len as usize, is_encoded)
    }

    unsafe fn pin(&self, memory: *mut u8, len: usize) -> Result<()> {
        // SAFETY: as the caller says.
        unsafe { self.device.enter()?.register(memory, len) }
    }

    unsafe fn unpin(&self, memory: *mut u8) {
        if let Ok(driver) = self.device.enter() {
            // SAFETY: as the caller says.
            unsafe { driver.unregister(memory) };
        }
    }

    unsafe fn start(&self, slot: &[u8], parts: &[Part]) -> Result<CudaCopy> {
        let driver = self.device.enter()?;
        let stream = self.stream.stream;
        let jobs = match &self.decoder {
            Some(decoder) if has_chunks(parts) => Some((decoder, decoder.prepare(driver, parts, stream)?)),
            _ => None,
        };
        let copies = copies(parts, jobs.as_ref().map(|(_, jobs)| jobs))?;
        let copy = CudaCopy { begun: self.event(driver)?, ended: self.event(driver)? };
        driver.record(copy.begun, stream)?;
        for (range, to) in copies {
            // SAFETY: as the caller says; frames have room in the memory of their jobs.
            unsafe { driver.copy_in(to, slot.get(range).unwrap_or_default(), stream)? };
        }
        driver.record(copy.ended, stream)?;
        if let Some((decoder, jobs)) = &jobs {
            // SAFETY: as the caller says; the frames are copied before `ended`.
            unsafe { decoder.launch(driver, jobs, copy.ended)? };
        }
        Ok(copy)
    }

    fn finish(&self, copy: CudaCopy) -> Result<Duration> {
        let driver = self.device.enter()?;
        driver.wait(copy.ended)?;
        // Only the clock lacks it.
        let milliseconds = driver.elapsed(copy.begun, copy.ended).unwrap_or(0.0);
        self.keep(copy.begun);
        self.keep(copy.ended);
        Ok(Duration::try_from_secs_f32(milliseconds / 1000.0).unwrap_or_default())
    }

    fn has_ended(&self, copy: &CudaCopy) -> bool {
        self.device.enter().is_ok_and(|driver| driver.has_happened(copy.ended))
    }

    fn verified(&self) -> Result<u64> {
        self.decoder.as_ref().map_or(Ok(0), Decoder::mismatches)
    }

    fn settle(&self) -> Result<()> {
        let settled = self.device.enter().and_then(|driver| {
            let copies = driver.settle(self.stream.stream);
            self.decoder.as_ref().map_or(Ok(()), |decoder| decoder.settle(driver)).and(copies)
        });
        if settled.is_err() {
            self.device.0.is_lost.store(true, Ordering::Release);
        }
        settled
    }
}

fn has_chunks(parts: &[Part]) -> bool {
    parts.iter().any(|part| matches!(part.target, PartTarget::Chunk(_)))
}

/// Copies of `parts` to their targets, and of frames to the memory of their jobs.
///
/// # Errors
/// Other, for a frame without a job.
fn copies(parts: &[Part], jobs: Option<&Jobs>) -> Result<Vec<(Range<usize>, u64)>> {
    let copy = |part: &Part| {
        let to = match &part.target {
            PartTarget::Copy(to) => *to,
            PartTarget::Chunk(chunk) => {
                let jobs = jobs.ok_or_else(|| Error::other("this device decodes nothing"))?;
                if chunk.planes.is_some() { jobs.frame_at(part.range.start) } else { chunk.to }
            }
        };
        Ok((part.range.clone(), to))
    };
    Ok(joined(parts.iter().map(copy).collect::<Result<Vec<_>>>()?))
}
