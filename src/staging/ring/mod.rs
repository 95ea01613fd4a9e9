//! Pinned memory from which a device copies, in slots that are used again and again.
//!
//! ```text
//! free --> open: threads reserve and fill parts of it --full, all parts committed--> copied by the device --(its event)--> free
//! ```
//!
//! Threads fill parts of the open slot while the device copies others. It is copied when it is full, or as soon as no thread fills a
//! part and no copy runs: a busy device gets few large copies, and an idle one does not wait. A thread that needs a new slot takes that
//! of copies that have ended, or adds memory, up to a limit, or waits for the first copies that nobody else waits for.
#![expect(unsafe_code, reason = "a device reads the memory in the background")]

mod engine;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use memmap2::{Advice, MmapMut};

pub(super) use self::engine::joined;
pub use self::engine::{ChunkTarget, CopyEngine, DecodeSizes, Part, PartTarget, Piece, SlotLimits};
use crate::error::{Error, Result};

/// Minimum bytes that are pinned at a time, unless the limit is less: each time has a fixed cost.
const BLOCK_MIN: usize = 16 << 20;

/// Part of a slot that the device has copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopiedPart {
    /// The number that it was committed with.
    pub number: usize,
    /// Its bytes, plain.
    pub len: usize,
}

/// Called when the parts of a slot have been copied, with the time that it took on the device.
pub type Landed = Box<dyn Fn(&[CopiedPart], Duration) + Send + Sync>;

/// Lengths of slots, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct SlotLens {
    /// The length, unless the system pins less memory than that.
    pub wanted: usize,
    /// The minimum length: that of the longest part.
    pub min: usize,
}

/// Pinned memory in slots.
pub struct PinnedRing<E: CopyEngine> {
    engine: E,
    limits: SlotLimits,
    /// Bytes of the longest part.
    part_max: usize,
    /// Maximum pinned bytes, unless one slot has more.
    memory: usize,
    state: Mutex<State<E::Copy>>,
    changed: Condvar,
    landed: Landed,
}

struct State<C> {
    blocks: Vec<MmapMut>,
    free: Vec<Slot>,
    /// Slot whose bytes are reserved next.
    open: Option<Filling>,
    /// Full slots with parts that threads still fill.
    full: Vec<Filling>,
    /// Copies in the order of their start.
    flying: VecDeque<Flying<C>>,
    /// Bytes of slots that are added.
    slot_len: usize,
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

#[derive(Clone, Copy, PartialEq, Eq)]
struct Slot {
    first: *mut u8,
    len: usize,
}

// SAFETY: memory in which each byte belongs to at most one thread, the one that has reserved it.
unsafe impl Send for Slot {}

/// A slot whose parts are being filled.
struct Filling {
    slot: Slot,
    /// Bytes reserved so far.
    reserved: usize,
    /// Parts reserved so far.
    parts: usize,
    /// Bytes of the device's memory to decode them.
    scratch: usize,
    /// Parts that threads still fill.
    writers: usize,
    committed: Vec<(Part, usize)>,
}

struct Flying<C> {
    slot: Slot,
    copy: C,
    parts: Vec<CopiedPart>,
}

impl<E: CopyEngine> fmt::Debug for PinnedRing<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedRing").field("part_max", &self.part_max).finish_non_exhaustive()
    }
}

impl<E: CopyEngine> PinnedRing<E> {
    /// Slots of the given lengths, in at most `memory` bytes (at least one slot). Memory is pinned when it is first needed.
    pub fn new(engine: E, lens: SlotLens, memory: u64, landed: Landed) -> Self {
        let memory = usize::try_from(memory).unwrap_or(usize::MAX);
        let mut state = State {
            blocks: Vec::new(),
            free: Vec::new(),
            open: None,
            full: Vec::new(),
            flying: VecDeque::new(),
            slot_len: 0,
            slots_max: 0,
            slots: 0,
            block_slots: 0,
            awaited: 0,
            failed: None,
        };
        state.plan_slots(lens.wanted.max(lens.min), memory);
        let (limits, part_max) = (engine.limits(), lens.min);
        Self { engine, limits, part_max, memory, state: Mutex::new(state), changed: Condvar::new(), landed }
    }

    /// The device.
    #[must_use]
    pub fn engine(&self) -> &E {
        &self.engine
    }

    /// Bytes of the longest part.
    #[must_use]
    pub fn part_max(&self) -> usize {
        self.part_max
    }

    /// Waits for `len` bytes to fill. They are arbitrary. `scratch` is the device's memory to decode them ([`CopyEngine::scratch_len`]). A thread
    /// that has a part already must not wait for another one: the ring may wait for the first.
    ///
    /// # Errors
    /// Exhausted, if not even one slot can be pinned; other, if an earlier copy failed, or the part is too long.
    pub fn reserve(&self, len: usize, scratch: usize) -> Result<ReservedPart<'_, E>> {
        if len > self.part_max {
            let error = Error::other("part is too long for pinned memory");
            return Err(error.expected(format!("at most {} bytes", self.part_max)).got(len));
        }
        let mut state = self.lock();
        loop {
            if let Some(failed) = &state.failed {
                return Err(Error::other("an earlier copy to the device failed").got(failed.clone()));
            }
            if let Some(open) = &mut state.open {
                if let Some(at) = open.reserve(len, scratch, self.limits) {
                    return Ok(ReservedPart { ring: self, slot: open.slot, at, len });
                }
                self.close(&mut state)?;
            }
            if let Some(slot) = state.free.pop() {
                state.open = Some(Filling::new(slot));
                continue;
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

    /// Waits for the end of all copies, of decoding and of verification, also after an error. Returns the number of chunks so far that the
    /// device has found not to be what their ids say.
    ///
    /// # Errors
    /// The first error of the device: nothing that was copied may be used.
    pub fn finish(&self) -> Result<u64> {
        let mut state = self.lock();
        loop {
            // Errors of the device are in `failed`, too.
            let _ = self.close(&mut state);
            state = match state.flying.pop_front() {
                Some(flying) => self.land(state, flying).unwrap_or_else(|_| self.lock()),
                None if state.awaited == 0 && state.full.is_empty() => break,
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
        let failed = match state.failed.clone() {
            Some(failed) => failed,
            None => match self.engine.verified() {
                Ok(damaged) => return Ok(damaged),
                Err(error) => state.failed.insert(error.to_string()).clone(),
            },
        };
        drop(state);
        let error = Error::other("a copy to the device failed").got(failed);
        match self.engine.settle() {
            Ok(()) => Err(error),
            Err(lost) => Err(error.source(lost)),
        }
    }

    /// Closes the open slot, if there is one: nothing more is reserved there. It is copied once all of its parts are filled.
    fn close(&self, state: &mut State<E::Copy>) -> Result<()> {
        match state.open.take() {
            Some(filled) if filled.writers == 0 => self.start(state, filled),
            still_filling => {
                state.full.extend(still_filling);
                Ok(())
            }
        }
    }

    /// Ends the filling of a part of `slot`; None is one that is not copied.
    fn end_part(&self, slot: Slot, part: Option<(Part, usize)>) -> Result<()> {
        let mut state = self.lock();
        let started = self.ended_part(&mut state, slot, part);
        drop(state);
        self.changed.notify_all();
        started
    }

    fn ended_part(&self, state: &mut State<E::Copy>, slot: Slot, part: Option<(Part, usize)>) -> Result<()> {
        if let Some(open) = state.open.as_mut().filter(|open| open.slot == slot) {
            let is_filled = open.end_part(part) && open.has_parts();
            return if is_filled && self.is_idle(state) { self.close(state) } else { Ok(()) };
        }
        let Some(index) = state.full.iter().position(|filling| filling.slot == slot) else { return Ok(()) };
        let ended = state.full.get_mut(index).is_some_and(|filling| filling.end_part(part));
        if !ended {
            return Ok(());
        }
        let filled = state.full.swap_remove(index);
        self.start(state, filled)
    }

    /// True if no copy runs.
    fn is_idle(&self, state: &State<E::Copy>) -> bool {
        state.awaited == 0 && state.flying.back().is_none_or(|last| self.engine.has_ended(&last.copy))
    }

    /// Starts the copies of all parts of a slot.
    fn start(&self, state: &mut State<E::Copy>, filled: Filling) -> Result<()> {
        let Filling { slot, mut committed, .. } = filled;
        if committed.is_empty() || state.failed.is_some() {
            state.free.push(slot);
            return Ok(());
        }
        committed.sort_unstable_by_key(|(part, _)| part.range.start);
        let (parts, numbers): (Vec<Part>, Vec<usize>) = committed.into_iter().unzip();
        // SAFETY: the slot is kept until the copies have ended, and nobody writes to it before: no part is being filled.
        let bytes = unsafe { std::slice::from_raw_parts(slot.first, slot.len) };
        // SAFETY: the threads that committed the parts vouch for the targets.
        match unsafe { self.engine.start(bytes, &parts) } {
            Ok(copy) => {
                let parts =
                    parts.iter().zip(numbers).map(|(part, number)| CopiedPart { number, len: part.plain_len() });
                state.flying.push_back(Flying { slot, copy, parts: parts.collect() });
                Ok(())
            }
            // The slot is not used again: a copy may have begun.
            Err(error) => {
                state.failed.get_or_insert_with(|| error.to_string());
                Err(error)
            }
        }
    }

    /// Waits for the copies of one slot, without the lock, and frees it.
    fn land<'s>(
        &'s self,
        mut state: MutexGuard<'s, State<E::Copy>>,
        flying: Flying<E::Copy>,
    ) -> Result<MutexGuard<'s, State<E::Copy>>> {
        state.awaited += 1;
        drop(state);
        let Flying { slot, copy, parts } = flying;
        let finished = self.engine.finish(copy);
        if let Ok(took) = &finished {
            (self.landed)(&parts, *took);
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
        let slot_len = state.slot_len;
        state.slots += count;
        drop(state);
        let block = self.block(count * slot_len);
        let mut state = self.lock();
        match block {
            Ok(mut block) => {
                let slots =
                    block.chunks_exact_mut(slot_len).map(|slot| Slot { first: slot.as_mut_ptr(), len: slot_len });
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
                } else if slot_len > slot_bytes(self.part_max) {
                    // Another thread may have made them shorter.
                    let shorter = (slot_len / 2).max(self.part_max).min(state.slot_len);
                    state.plan_slots(shorter, self.memory);
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

    fn block(&self, len: usize) -> Result<MmapMut> {
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

impl<C> State<C> {
    /// Sets the length of slots that are added from now on, and how many there may be in `memory` bytes.
    fn plan_slots(&mut self, len: usize, memory: usize) {
        self.slot_len = slot_bytes(len);
        self.slots_max = (memory / self.slot_len).max(1);
        self.block_slots = (BLOCK_MIN / self.slot_len).max(1);
    }
}

/// Bytes of a slot that is to have at least `len`: whole pages.
#[must_use]
pub fn slot_bytes(len: usize) -> usize {
    len.max(1).next_multiple_of(4096)
}

impl Filling {
    fn new(slot: Slot) -> Self {
        Self { slot, reserved: 0, parts: 0, scratch: 0, writers: 0, committed: Vec::new() }
    }

    /// Reserves `len` bytes; returns the first, or None if there are fewer, or the device could not decode as much.
    fn reserve(&mut self, len: usize, scratch: usize, limits: SlotLimits) -> Option<usize> {
        let at = self.reserved;
        let end = at.checked_add(len).filter(|&end| end <= self.slot.len)?;
        let scratch = self.scratch.saturating_add(scratch);
        if self.parts > 0 && (self.parts >= limits.parts || scratch > limits.scratch) {
            return None;
        }
        (self.reserved, self.scratch) = (end, scratch);
        self.parts += 1;
        self.writers += 1;
        Some(at)
    }

    /// Ends the filling of a part. True if it was the last that was being filled.
    fn end_part(&mut self, part: Option<(Part, usize)>) -> bool {
        self.committed.extend(part);
        self.writers -= 1;
        self.writers == 0
    }

    fn has_parts(&self) -> bool {
        !self.committed.is_empty()
    }
}

/// Part of a slot that nobody else uses. What is dropped without [`ReservedPart::commit`] is not copied.
pub struct ReservedPart<'r, E: CopyEngine> {
    ring: &'r PinnedRing<E>,
    slot: Slot,
    /// First byte in the slot.
    at: usize,
    len: usize,
}

impl<E: CopyEngine> fmt::Debug for ReservedPart<'_, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReservedPart").field("at", &self.at).field("len", &self.len).finish_non_exhaustive()
    }
}

impl<E: CopyEngine> ReservedPart<'_, E> {
    /// Lets the device copy or decode these bytes, soon. `number` is that of [`CopiedPart`].
    ///
    /// # Safety
    /// As many bytes at the target are memory of the device that stays allocated until [`PinnedRing::finish`] has returned, or the ring is
    /// dropped.
    ///
    /// # Errors
    /// Errors of the device.
    pub unsafe fn commit(self, target: PartTarget, number: usize) -> Result<()> {
        let this = ManuallyDrop::new(self);
        let part = Part { range: this.at..this.at + this.len, target };
        this.ring.end_part(this.slot, Some((part, number)))
    }
}

impl<E: CopyEngine> Deref for ReservedPart<'_, E> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes are reserved for this alone, and their block lives as long as the ring.
        unsafe { std::slice::from_raw_parts(self.slot.first.wrapping_add(self.at), self.len) }
    }
}

impl<E: CopyEngine> DerefMut for ReservedPart<'_, E> {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.slot.first.wrapping_add(self.at), self.len) }
    }
}

impl<E: CopyEngine> Drop for ReservedPart<'_, E> {
    fn drop(&mut self) {
        // An error of the device is told to the next thread that reserves, and by `finish`.
        let _ = self.ring.end_part(self.slot, None);
    }
}
