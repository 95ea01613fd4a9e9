//! Pinned memory from which a device copies, in slots that are used again and again.
//!
//! ```text
//! free --acquire--> filled by a thread --submit--> copied by the device --(its event)--> free
//! ```
//!
//! Threads fill slots while the device copies others. A thread that finds no free slot takes that of a copy that has ended, or adds
//! memory, up to a limit, or waits for the first copy that nobody else waits for.
#![expect(unsafe_code, reason = "a device reads the memory in the background")]

use std::collections::VecDeque;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use memmap2::{Advice, MmapMut};

use crate::error::{Error, Result};

/// Minimum bytes that are pinned at a time, unless the limit is less: each time has a fixed cost.
const BLOCK_MIN: usize = 16 << 20;

/// Copies from host memory to a device, in the background.
pub trait CopyEngine: Send + Sync {
    /// A copy that may still run.
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

    /// Starts a copy. After an error it may have begun.
    ///
    /// # Safety
    /// Until [`CopyEngine::finish`] has returned success, the bytes of `from` stay as they are, and the device's memory at `to` stays
    /// allocated.
    ///
    /// # Errors
    /// Errors of the device.
    unsafe fn start(&self, from: &[u8], to: u64) -> Result<Self::Copy>;

    /// Waits for the end of a copy. Returns the time that it took on the device.
    ///
    /// # Errors
    /// Errors of the device; the copy may then still run.
    fn finish(&self, copy: Self::Copy) -> Result<Duration>;

    /// True if [`CopyEngine::finish`] would not wait.
    fn has_ended(&self, copy: &Self::Copy) -> bool;

    /// Waits until no copy runs, also none whose start or end was an error.
    ///
    /// # Errors
    /// Errors of the device; copies may then still run.
    fn settle(&self) -> Result<()>;
}

/// Called at the end of a copy, with the number that it was submitted with, its bytes, and its time on the device.
pub type Landed = Box<dyn Fn(usize, usize, Duration) + Send + Sync>;

/// Pinned memory in slots of one length.
pub struct PinnedRing<E: CopyEngine> {
    engine: E,
    slot_len: usize,
    state: Mutex<State<E::Copy>>,
    changed: Condvar,
    landed: Landed,
}

struct State<C> {
    blocks: Vec<MmapMut>,
    /// Addresses of free slots.
    free: Vec<Slot>,
    /// Copies in the order of their start.
    flying: VecDeque<Flying<C>>,
    /// Slots that there may be; fewer, once the system has refused to pin more.
    slots_max: usize,
    /// Slots that there are, or that a thread is adding.
    slots: usize,
    /// Slots to add at a time.
    block_slots: usize,
    /// Copies that threads wait for.
    awaited: usize,
    /// First error of the device. Nothing is copied any more.
    failed: Option<String>,
}

/// First byte of a slot.
#[derive(Clone, Copy)]
struct Slot(*mut u8);

// SAFETY: an address of memory that belongs to no thread; who has the slot alone uses it.
unsafe impl Send for Slot {}

struct Flying<C> {
    slot: Slot,
    copy: C,
    number: usize,
    len: usize,
}

impl<E: CopyEngine> fmt::Debug for PinnedRing<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedRing").field("slot_len", &self.slot_len).finish_non_exhaustive()
    }
}

impl<E: CopyEngine> PinnedRing<E> {
    /// Slots of `slot_len` bytes, in at most `memory` bytes (at least one slot). Memory is pinned when it is first needed.
    pub fn new(engine: E, slot_len: usize, memory: u64, landed: Landed) -> Self {
        let slot_len = slot_len.max(1).next_multiple_of(4096);
        let slots_max = usize::try_from(memory).unwrap_or(usize::MAX).checked_div(slot_len).unwrap_or(0).max(1);
        let state = State {
            blocks: Vec::new(),
            free: Vec::new(),
            flying: VecDeque::new(),
            slots_max,
            slots: 0,
            block_slots: (BLOCK_MIN / slot_len).max(1),
            awaited: 0,
            failed: None,
        };
        Self { engine, slot_len, state: Mutex::new(state), changed: Condvar::new(), landed }
    }

    /// Bytes of a slot.
    #[must_use]
    pub fn slot_len(&self) -> usize {
        self.slot_len
    }

    /// Waits for a free slot. Its bytes are arbitrary.
    ///
    /// # Errors
    /// Exhausted, if not even one slot can be pinned; other, if an earlier copy failed.
    pub fn acquire(&self) -> Result<FreeSlot<'_, E>> {
        let mut state = self.lock();
        loop {
            if let Some(failed) = &state.failed {
                return Err(Error::other("an earlier copy to the device failed").got(failed.clone()));
            }
            if let Some(slot) = state.free.pop() {
                return Ok(FreeSlot { ring: self, slot });
            }
            let ended = state.flying.front().is_some_and(|first| self.engine.has_ended(&first.copy));
            if !ended && state.slots < state.slots_max {
                state = self.grow(state)?;
                continue;
            }
            state = match state.flying.pop_front() {
                Some(flying) => self.land(state, flying)?,
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// Waits for the end of all copies, also after an error.
    ///
    /// # Errors
    /// The first error of the device: nothing that was copied may be used.
    pub fn finish(&self) -> Result<()> {
        let mut state = self.lock();
        loop {
            state = match state.flying.pop_front() {
                // An error is in `failed`, too.
                Some(flying) => self.land(state, flying).unwrap_or_else(|_| self.lock()),
                None if state.awaited == 0 => break,
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
        let Some(failed) = state.failed.clone() else { return Ok(()) };
        drop(state);
        let error = Error::other("a copy to the device failed").got(failed);
        match self.engine.settle() {
            Ok(()) => Err(error),
            Err(lost) => Err(error.source(lost)),
        }
    }

    /// Waits for one copy, without the lock, and frees its slot.
    fn land<'s>(
        &'s self,
        mut state: MutexGuard<'s, State<E::Copy>>,
        flying: Flying<E::Copy>,
    ) -> Result<MutexGuard<'s, State<E::Copy>>> {
        state.awaited += 1;
        drop(state);
        let Flying { slot, copy, number, len } = flying;
        let finished = self.engine.finish(copy);
        if let Ok(took) = &finished {
            (self.landed)(number, len, *took);
        }
        let mut state = self.lock();
        state.awaited -= 1;
        match finished {
            // The device may still read the slot, which is therefore not used again.
            Err(error) => {
                state.failed.get_or_insert_with(|| error.to_string());
                self.changed.notify_all();
                Err(error)
            }
            Ok(_) => {
                state.free.push(slot);
                self.changed.notify_all();
                Ok(state)
            }
        }
    }

    /// Adds slots, without the lock. If the system refuses, fewer are tried, and then the existing slots have to do.
    fn grow<'s>(&'s self, mut state: MutexGuard<'s, State<E::Copy>>) -> Result<MutexGuard<'s, State<E::Copy>>> {
        let count = state.block_slots.min(state.slots_max - state.slots);
        state.slots += count;
        drop(state);
        let block = self.block(count);
        let mut state = self.lock();
        match block {
            Ok(mut block) => {
                let slots = block.chunks_exact_mut(self.slot_len).map(|slot| Slot(slot.as_mut_ptr()));
                state.free.extend(slots);
                state.blocks.push(block);
            }
            Err(error) => {
                state.slots -= count;
                if count > 1 {
                    state.block_slots = count / 2;
                } else if state.slots > 0 {
                    state.slots_max = state.slots;
                    tracing::debug!("no more pinned memory: {error}");
                } else {
                    // Threads that wait for this slot try for themselves.
                    self.changed.notify_all();
                    return Err(error);
                }
            }
        }
        self.changed.notify_all();
        Ok(state)
    }

    fn block(&self, slots: usize) -> Result<MmapMut> {
        let len = slots.saturating_mul(self.slot_len);
        let failed = |source| Error::exhausted("cannot get memory for copies to a device").got(len).source(source);
        let mut block = MmapMut::map_anon(len).map_err(failed)?;
        // A child of this process must not share the pages: the one that writes first gets a copy, while the device reads the original.
        block.advise(Advice::DontFork).map_err(failed)?;
        // Best effort: pages are otherwise allocated one by one while they are pinned.
        let _ = block.advise(Advice::HugePage).and_then(|()| block.advise(Advice::PopulateWrite));
        // SAFETY: the block is unmapped after `unpin`, or never.
        unsafe { self.engine.pin(block.as_mut_ptr(), len) }?;
        Ok(block)
    }

    fn lock(&self) -> MutexGuard<'_, State<E::Copy>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<E: CopyEngine> Drop for PinnedRing<E> {
    /// Waits for all copies. Memory of a device that does not answer stays mapped and pinned: it may still read it.
    fn drop(&mut self) {
        let idle = self.finish().is_ok() || self.engine.settle().is_ok();
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        for mut block in std::mem::take(&mut state.blocks) {
            if idle {
                // SAFETY: no copy runs.
                unsafe { self.engine.unpin(block.as_mut_ptr()) };
            } else {
                let _ = ManuallyDrop::new(block);
            }
        }
    }
}

/// A slot that nobody else uses, freed on drop if it was not submitted.
pub struct FreeSlot<'r, E: CopyEngine> {
    ring: &'r PinnedRing<E>,
    slot: Slot,
}

impl<E: CopyEngine> fmt::Debug for FreeSlot<'_, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FreeSlot").field(&self.slot.0).finish()
    }
}

impl<E: CopyEngine> FreeSlot<'_, E> {
    /// Copies the first `len` bytes to the device's address `to`; the slot is free again when that has ended. `number` is that of
    /// [`Landed`].
    ///
    /// # Safety
    /// The `len` bytes at `to` are memory of the device that stays allocated until [`PinnedRing::finish`] has returned, or the ring is
    /// dropped.
    ///
    /// # Errors
    /// Errors of the device.
    pub unsafe fn submit(self, len: usize, to: u64, number: usize) -> Result<()> {
        let (ring, this) = (self.ring, ManuallyDrop::new(self));
        let slot = this.slot;
        // Copies run in the order of the queue.
        let mut state = ring.lock();
        // SAFETY: a slot is that long, and nobody writes to it until it is free again.
        let bytes = unsafe { std::slice::from_raw_parts(slot.0, len.min(ring.slot_len)) };
        // SAFETY: as the caller says; the slot is kept until the copy has ended.
        match unsafe { ring.engine.start(bytes, to) } {
            Ok(copy) => {
                state.flying.push_back(Flying { slot, copy, number, len: bytes.len() });
                drop(state);
                ring.changed.notify_all();
                Ok(())
            }
            // The slot is not used again: the copy may have begun.
            Err(error) => {
                state.failed.get_or_insert_with(|| error.to_string());
                drop(state);
                ring.changed.notify_all();
                Err(error)
            }
        }
    }
}

impl<E: CopyEngine> Deref for FreeSlot<'_, E> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the slot belongs to this alone, and its block lives as long as the ring.
        unsafe { std::slice::from_raw_parts(self.slot.0, self.ring.slot_len) }
    }
}

impl<E: CopyEngine> DerefMut for FreeSlot<'_, E> {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.slot.0, self.ring.slot_len) }
    }
}

impl<E: CopyEngine> Drop for FreeSlot<'_, E> {
    fn drop(&mut self) {
        self.ring.lock().free.push(self.slot);
        self.ring.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread::{JoinHandle, sleep, spawn};

    use super::*;
    use crate::error::ErrorKind;

    /// Copies within host memory, on a thread for each, some of them late.
    struct Threads {
        /// Bytes that may be pinned.
        limit: usize,
        pinned: AtomicUsize,
        started: AtomicUsize,
    }

    impl Threads {
        fn new(limit: usize) -> Self {
            Self { limit, pinned: AtomicUsize::new(0), started: AtomicUsize::new(0) }
        }
    }

    impl CopyEngine for Threads {
        type Copy = JoinHandle<()>;

        unsafe fn pin(&self, _: *mut u8, len: usize) -> Result<()> {
            let before = self.pinned.fetch_add(len, Ordering::Relaxed);
            if before + len <= self.limit {
                return Ok(());
            }
            self.pinned.fetch_sub(len, Ordering::Relaxed);
            Err(Error::exhausted("no more"))
        }

        unsafe fn unpin(&self, _: *mut u8) {}

        unsafe fn start(&self, from: &[u8], to: u64) -> Result<JoinHandle<()>> {
            let late = self.started.fetch_add(1, Ordering::Relaxed).is_multiple_of(7);
            let (from, len) = (from.as_ptr() as usize, from.len());
            Ok(spawn(move || {
                sleep(Duration::from_micros(if late { 500 } else { 0 }));
                // SAFETY: both stay as they are until the copy has ended.
                unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, len) };
            }))
        }

        fn finish(&self, copy: JoinHandle<()>) -> Result<Duration> {
            copy.join().map_err(|_| Error::other("a copy panicked"))?;
            Ok(Duration::from_micros(1))
        }

        fn has_ended(&self, copy: &JoinHandle<()>) -> bool {
            copy.is_finished()
        }

        fn settle(&self) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn many_threads_share_few_slots() {
        const PIECE: usize = 4096;
        let target: Vec<u8> = vec![0; 400 * PIECE];
        let (address, landed) = (target.as_ptr() as u64, Arc::new(AtomicUsize::new(0)));
        let counted = Arc::clone(&landed);
        let count = move |_, len, _| {
            counted.fetch_add(len, Ordering::Relaxed);
        };
        let ring = PinnedRing::new(Threads::new(5 * PIECE), PIECE, 5 * PIECE as u64, Box::new(count));
        std::thread::scope(|scope| {
            for thread in 0..8_u8 {
                let ring = &ring;
                scope.spawn(move || {
                    for at in 0..50_u64 {
                        let mut slot = ring.acquire().unwrap();
                        if at % 9 == 0 {
                            // Not submitted.
                            drop(slot);
                            slot = ring.acquire().unwrap();
                        }
                        slot.fill(thread + 1);
                        let piece = u64::from(thread) * 50 + at;
                        // SAFETY: the target outlives the ring.
                        unsafe { slot.submit(PIECE, address + piece * PIECE as u64, 0).unwrap() };
                    }
                });
            }
        });
        ring.finish().unwrap();
        assert_eq!(landed.load(Ordering::Relaxed), target.len());
        drop(ring);
        assert!(target.chunks(50 * PIECE).zip(1..).all(|(part, thread)| part.iter().all(|&byte| byte == thread)));
    }

    /// Threads that wait for the memory of another one, which gets none, end too.
    #[test]
    fn without_pinned_memory_every_thread_ends() {
        for _ in 0..50 {
            let ring = PinnedRing::new(Threads::new(0), 1 << 20, 64 << 20, Box::new(|_, _, _| {}));
            std::thread::scope(|scope| {
                for _ in 0..6 {
                    scope.spawn(|| assert_eq!(ring.acquire().unwrap_err().kind(), ErrorKind::Exhausted));
                }
            });
        }
    }
}
