//! GPUs of NVIDIA.
//!
//! ```text
//! driver   the functions of libcuda.so.1 that are called, loaded at run time
//! copier   copies from pinned memory, in the background
//! decoder  decoding and verification of what was copied, by kernels on the GPU
//! ```

mod copier;
mod decoder;
mod driver;

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub use self::copier::CudaCopier;
use self::driver::{Context, Driver, Event, Stream};
use crate::error::{Error, Result};

/// A GPU. Clones share it.
#[derive(Clone, Debug)]
pub struct CudaDevice(Arc<Retained>);

#[derive(Debug)]
struct Retained {
    driver: &'static Driver,
    ordinal: u32,
    device: c_int,
    name: String,
    /// The primary context, which torch uses, too: memory of one is valid for the other.
    context: Context,
    /// True once the GPU did not say whether copies have ended: memory that they may write to is not freed.
    is_lost: AtomicBool,
}

impl Drop for Retained {
    fn drop(&mut self) {
        self.driver.release(self.device);
    }
}

impl CudaDevice {
    /// The GPU `ordinal`, as CUDA counts the visible ones (`CUDA_VISIBLE_DEVICES`).
    ///
    /// # Errors
    /// Unsupported, if there is no driver, it is too old, or it finds no GPU; not found, if there are fewer.
    pub fn open(ordinal: u32) -> Result<Self> {
        let driver = Driver::get()?;
        let (device, name) = driver.find(ordinal)?;
        let context = driver.retain(device)?;
        Ok(Self(Arc::new(Retained { driver, ordinal, device, name, context, is_lost: AtomicBool::new(false) })))
    }

    /// Name of the model of the GPU `ordinal`, without a context on it.
    ///
    /// # Errors
    /// As [`CudaDevice::open`].
    pub fn name_of(ordinal: u32) -> Result<String> {
        Driver::get()?.find(ordinal).map(|(_, name)| name)
    }

    /// Number of the GPU.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        self.0.ordinal
    }

    /// Name of the model.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Allocates `len` bytes.
    ///
    /// # Errors
    /// Exhausted, with the free bytes, if they do not fit; others of the driver.
    pub fn allocate(&self, len: u64) -> Result<CudaMemory> {
        let driver = self.enter()?;
        let fits = usize::try_from(len.max(1)).map_err(|_| Error::exhausted("memory is larger than the address space"));
        let address = fits.and_then(|len| driver.allocate(len)).map_err(|error| {
            let free = driver.memory().map_or(0, |(free, _)| free);
            error
                .at(format!("cuda:{}, {}", self.ordinal(), self.name()))
                .expected(format!("{len} bytes; {free} are free"))
        })?;
        Ok(CudaMemory { device: self.clone(), address, len })
    }

    /// The driver, to free what no copy or kernel uses any more; none if that is not known.
    fn unless_lost(&self) -> Option<&'static Driver> {
        if self.0.is_lost.load(Ordering::Acquire) { None } else { self.enter().ok() }
    }

    /// The driver, for calls of this thread about this GPU.
    fn enter(&self) -> Result<&'static Driver> {
        self.0.driver.enter(self.0.context)?;
        Ok(self.0.driver)
    }
}

/// Memory of a GPU, freed on drop, unless the GPU is lost. Copies to it must have ended by then.
#[derive(Debug)]
pub struct CudaMemory {
    device: CudaDevice,
    address: u64,
    len: u64,
}

impl CudaMemory {
    /// Address of the first byte, on the GPU.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Copies the bytes from `offset` on to `out`, and waits for it.
    ///
    /// # Errors
    /// Usage, beyond the end; others of the driver.
    #[expect(unsafe_code, reason = "reads memory of the GPU")]
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        if offset.checked_add(out.len() as u64).is_none_or(|end| end > self.len) {
            return Err(Error::usage("memory of the GPU ends before that").expected(self.len).got(offset));
        }
        // SAFETY: the range is within this memory.
        unsafe { self.device.enter()?.copy_out(out, self.address + offset) }
    }
}

impl Drop for CudaMemory {
    #[expect(unsafe_code, reason = "frees memory of the GPU")]
    fn drop(&mut self) {
        if let Some(driver) = self.device.unless_lost() {
            // SAFETY: this owns the memory, and the rings that copy to it have ended.
            unsafe { driver.free(self.address) };
        }
    }
}

/// Stream of a GPU, destroyed on drop.
#[derive(Debug)]
struct OwnedStream {
    device: CudaDevice,
    stream: Stream,
}

impl OwnedStream {
    fn new(device: &CudaDevice) -> Result<Self> {
        Ok(Self { device: device.clone(), stream: device.enter()?.create_stream()? })
    }
}

impl Drop for OwnedStream {
    fn drop(&mut self) {
        if let Ok(driver) = self.device.enter() {
            driver.destroy_stream(self.stream);
        }
    }
}

/// Event of a GPU, destroyed on drop.
#[derive(Debug)]
struct OwnedEvent {
    device: CudaDevice,
    event: Event,
}

impl OwnedEvent {
    fn new(device: &CudaDevice) -> Result<Self> {
        Ok(Self { device: device.clone(), event: device.enter()?.create_event()? })
    }
}

impl Drop for OwnedEvent {
    fn drop(&mut self) {
        if let Ok(driver) = self.device.enter() {
            driver.destroy_event(self.event);
        }
    }
}
