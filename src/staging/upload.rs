//! Copies of ordinary host memory to a device, by several threads, through pinned memory.
#![expect(unsafe_code, reason = "a device writes to memory that the caller names")]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use super::ring::{CopyEngine, PinnedRing};
use crate::error::{Error, Result};

/// Threads that fill pinned memory: a few saturate the memory bus.
const THREADS_MAX: usize = 4;

/// Bytes to copy, and their target.
#[derive(Clone, Copy, Debug)]
pub struct Upload<'a> {
    /// The bytes.
    pub from: &'a [u8],
    /// Address of the device.
    pub to: u64,
}

/// Copies all of `uploads`, and waits for it.
///
/// # Safety
/// Each target is memory of the ring's device for that many bytes, which stays allocated until this returns, and which nobody else uses.
///
/// # Errors
/// As [`PinnedRing::acquire`]; errors of the device. The targets then have arbitrary bytes, and no copy runs.
pub unsafe fn upload<E: CopyEngine>(ring: &PinnedRing<E>, uploads: &[Upload<'_>]) -> Result<()> {
    let slot = ring.slot_len();
    let pieces = uploads.iter().enumerate().flat_map(|(number, one)| {
        let targets = (one.to..).step_by(slot);
        one.from.chunks(slot).zip(targets).map(move |(from, to)| (number, Upload { from, to }))
    });
    let pieces: Vec<(usize, Upload<'_>)> = pieces.collect();
    let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let work = || -> Result<()> {
        while !stop.load(Ordering::Relaxed) {
            let Some(&(number, piece)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
            let mut free = ring.acquire()?;
            let room = free.get_mut(..piece.from.len()).ok_or_else(|| Error::other("a piece is longer than a slot"))?;
            room.copy_from_slice(piece.from);
            // SAFETY: as the caller says: this returns after `finish`.
            unsafe { free.submit(piece.from.len(), piece.to, number)? };
        }
        Ok(())
    };
    let stopping = || work().inspect_err(|_| stop.store(true, Ordering::Relaxed));
    let threads = thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX).min(pieces.len());
    let outcome = thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(stopping)).collect();
        let mut outcome = stopping();
        for other in others {
            outcome = outcome.and(other.join().unwrap_or_else(|_| Err(Error::other("a copying thread panicked"))));
        }
        outcome
    });
    outcome.and(ring.finish())
}
