//! Copies from pinned memory to a device.
#![expect(unsafe_code, reason = "a device reads the memory in the background")]

use std::time::Duration;

use crate::error::Result;

/// Copies from host memory to a device, in the background.
pub trait CopyEngine: Send + Sync {
    /// Copies that may still run.
    type Copy: Send;

    /// Lets the device read memory.
    ///
    /// # Safety
    /// The memory stays mapped until [`CopyEngine::unpin`].
    ///
    /// # Errors
    /// Exhausted, if no more memory can be pinned.
    unsafe fn pin(&self, memory: *mut u8, len: usize) -> Result<()>;

    /// Ends [`CopyEngine::pin`].
    ///
    /// # Safety
    /// No copy from the memory is pending.
    unsafe fn unpin(&self, memory: *mut u8);

    /// Starts the copies of all `pieces`. After an error some may have begun.
    ///
    /// # Safety
    /// Until [`CopyEngine::finish`] has returned success, the bytes of each piece stay as they are, and the device's memory at its target
    /// stays allocated.
    ///
    /// # Errors
    /// Errors of the device.
    unsafe fn start(&self, pieces: &[Piece<'_>]) -> Result<Self::Copy>;

    /// Waits for the end of copies. Returns the time that they took on the device.
    ///
    /// # Errors
    /// Errors of the device; the copies may then still run.
    fn finish(&self, copy: Self::Copy) -> Result<Duration>;

    /// True if [`CopyEngine::finish`] would not wait.
    fn has_ended(&self, copy: &Self::Copy) -> bool;

    /// Waits until no copy runs, also none whose start or end was an error.
    ///
    /// # Errors
    /// Errors of the device; copies may then still run.
    fn settle(&self) -> Result<()>;
}

/// Bytes to copy, and their target.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// The bytes.
    pub from: &'a [u8],
    /// Address of the device.
    pub to: u64,
}
