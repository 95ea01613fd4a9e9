//! Copies from pinned memory to a GPU, on a stream of their own.
#![expect(unsafe_code, reason = "copies that run in the background")]

use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::CudaDevice;
use super::driver::{Driver, Event, Stream, foreign_stream};
use crate::error::Result;
use crate::staging::ring::{CopyEngine, Piece};

/// Copies to one GPU, one after the other in the order of their start.
#[derive(Debug)]
pub struct CudaCopier {
    device: CudaDevice,
    stream: Stream,
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
        let stream = device.enter()?.create_stream()?;
        Ok(Self { device: device.clone(), stream, events: Mutex::default() })
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
        let waits = driver.record(event, stream).and_then(|()| driver.wait_in_stream(self.stream, event));
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
        let Ok(driver) = self.device.enter() else { return };
        driver.destroy_stream(self.stream);
        for event in self.events.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            driver.destroy_event(event);
        }
    }
}

impl CopyEngine for CudaCopier {
    type Copy = CudaCopy;

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

    unsafe fn start(&self, pieces: &[Piece<'_>]) -> Result<CudaCopy> {
        let driver = self.device.enter()?;
        let copy = CudaCopy { begun: self.event(driver)?, ended: self.event(driver)? };
        driver.record(copy.begun, self.stream)?;
        for piece in pieces {
            // SAFETY: as the caller says.
            unsafe { driver.copy_in(piece.to, piece.from, self.stream)? };
        }
        driver.record(copy.ended, self.stream)?;
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

    fn settle(&self) -> Result<()> {
        let settled = self.device.enter().and_then(|driver| driver.settle(self.stream));
        if settled.is_err() {
            self.device.0.is_lost.store(true, Ordering::Release);
        }
        settled
    }
}
