//! Copies of ordinary host memory to a device, by several threads, through pinned memory.
#![expect(unsafe_code, reason = "a device writes to memory that the caller names")]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use super::ring::{CopyEngine, PartTarget, Piece, PinnedRing};
use crate::error::{Error, Result};

/// Threads that fill pinned memory: a few saturate the memory bus.
const THREADS_MAX: usize = 4;

/// Copies all `pieces`, and waits for it.
///
/// # Safety
/// Each target is memory of the ring's device for that many bytes, which stays allocated until this returns, and which nobody else uses.
///
/// # Errors
/// As [`PinnedRing::reserve`]; errors of the device. The targets then have arbitrary bytes, and no copy runs.
pub unsafe fn upload<E: CopyEngine>(ring: &PinnedRing<E>, pieces: &[Piece<'_>]) -> Result<()> {
    let longest = ring.part_max();
    let parts = pieces.iter().enumerate().flat_map(|(number, piece)| {
        let targets = (piece.to..).step_by(longest);
        piece.from.chunks(longest).zip(targets).map(move |(from, to)| (number, Piece { from, to }))
    });
    let parts: Vec<(usize, Piece<'_>)> = parts.collect();
    let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let work = || -> Result<()> {
        while !stop.load(Ordering::Relaxed) {
            let Some(&(number, part)) = parts.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
            let mut reserved = ring.reserve(part.from.len(), 0)?;
            reserved.copy_from_slice(part.from);
            // SAFETY: as the caller says: this returns after `finish`.
            unsafe { reserved.commit(PartTarget::Copy(part.to), number)? };
        }
        Ok(())
    };
    let stopping = || work().inspect_err(|_| stop.store(true, Ordering::Relaxed));
    let threads = thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX).min(parts.len());
    let outcome = thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(stopping)).collect();
        let mut outcome = stopping();
        for other in others {
            outcome = outcome.and(other.join().unwrap_or_else(|_| Err(Error::other("a copying thread panicked"))));
        }
        outcome
    });
    outcome.and(ring.finish().map(drop))
}
