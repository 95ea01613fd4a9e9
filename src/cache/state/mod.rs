//! State of a cache and all decisions about it: pure, so it is tested without a disk.

#[cfg(test)]
mod tests;

use std::ops::Range;

use super::allocator::Allocator;
use super::journal::Record;
use super::pins::{Ledger, Pin};
use super::queue::{Queue, Resident, Standing};
use crate::id::PinId;

/// Free runs are looked for until this many times what is wanted was evicted; then a region is cleared.
const EVICTED_MOST: u64 = 16;
/// Pins may take all but one part in this many: the rest is what makes it possible to move chunks about.
const UNPINNED_PART: u64 = 20;

/// Admission of a new chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// It is there already.
    Known,
    /// To this place, which is taken now.
    At(u32),
    /// Another slab would make room.
    Grow,
    /// There would be room, but in no one piece: these places have to be cleared.
    Clear(Range<u32>),
    /// All that is there is pinned, or being written.
    Full,
}

/// All that changes.
#[derive(Debug)]
pub(super) struct State {
    /// Chunks, in order of eviction.
    pub(super) queue: Queue,
    /// Allocator.
    pub(super) allocator: Allocator,
    /// Pinned chunks.
    pub(super) ledger: Ledger,
    /// Records that are not written to the journal yet.
    pub(super) pending: Vec<Record>,
    /// Chunks evicted since the start.
    pub(super) evictions: u64,
}

impl State {
    /// An empty one.
    pub(super) fn new(slab_units: u32, seed: u64) -> Self {
        let (queue, allocator) = (Queue::new(seed), Allocator::new(slab_units));
        Self { queue, allocator, ledger: Ledger::default(), pending: Vec::new(), evictions: 0 }
    }

    /// Finds a place for a chunk, evicting others if need be and no slab may be added.
    pub(super) fn admit(&mut self, key: u64, weight: u16, may_grow: bool) -> Admission {
        if self.queue.peek(key).is_some() {
            return Admission::Known;
        }
        if let Some(place) = self.allocator.take(weight) {
            return Admission::At(place);
        }
        if may_grow {
            return Admission::Grow;
        }
        let mut evicted = 0;
        while let Some(gone) = self.evict() {
            evicted += u64::from(gone.weight);
            if let Some(place) = self.allocator.take(weight) {
                return Admission::At(place);
            }
            if evicted > EVICTED_MOST * u64::from(weight) {
                break;
            }
        }
        let free = self.allocator.total() - self.allocator.taken();
        match self.allocator.emptiest_region() {
            Some(places) if free > u64::from(weight) && u32::from(weight) <= places.end - places.start => {
                Admission::Clear(places)
            }
            _ => Admission::Full,
        }
    }

    /// Takes the next chunk out.
    pub(super) fn evict(&mut self) -> Option<Resident> {
        self.queue.set_capacity(self.allocator.total().saturating_sub(self.queue.held_weight()));
        let (queue, pending) = (&mut self.queue, &mut self.pending);
        let gone = queue.evict(|key| pending.push(Record::Promote(key)))?;
        self.evictions += 1;
        self.gone(gone);
        Some(gone)
    }

    /// Makes an admitted chunk visible, once it has been written to its place. False if another one was quicker: the place is
    /// free again.
    pub(super) fn publish(&mut self, key: u64, place: u32, weight: u16) -> bool {
        if self.queue.peek(key).is_some() {
            self.allocator.give(place, weight);
            return false;
        }
        let standing = if self.ledger.wants(key) {
            self.ledger.arrived(key, weight);
            let standing = Standing::Held;
            self.queue.put(Resident { key, place, weight, standing, frequency: 0 });
            standing
        } else {
            self.queue.admit(key, place, weight)
        };
        self.pending.push(Record::Insert(Resident { key, place, weight, standing, frequency: 0 }));
        true
    }

    /// Takes out the chunk of `key` if it still lies at `place`; its units are given back if they are `sound`.
    pub(super) fn remove(&mut self, key: u64, place: u32, sound: bool) -> bool {
        if self.queue.peek(key).is_none_or(|found| found.place != place) {
            return false;
        }
        let Some(gone) = self.queue.remove(key) else { return false };
        if sound {
            self.gone(gone);
        } else {
            self.pending.push(Record::Remove(key));
        }
        true
    }

    /// Says that a chunk lies at `to` now, which was taken for it. False, and `to` is free again, if it has gone.
    pub(super) fn relocate(&mut self, chunk: Resident, to: u32) -> bool {
        let Resident { key, place, weight, .. } = chunk;
        let Some(found) = self.queue.peek(key).filter(|found| (found.place, found.weight) == (place, weight)) else {
            self.allocator.give(to, weight);
            return false;
        };
        self.queue.relocate(key, to);
        self.allocator.give(place, weight);
        self.pending.extend([Record::Remove(key), Record::Insert(Resident { place: to, ..found })]);
        true
    }

    /// Puts records of the journal into effect; false at one that cannot be true.
    pub(super) fn replay_all(&mut self, records: &[Record]) -> bool {
        self.queue.approach(records.iter().map(|record| match record {
            Record::Insert(chunk) => chunk.key,
            Record::Remove(key) | Record::Promote(key) => *key,
        }));
        records.iter().all(|record| self.replay(*record))
    }

    /// Puts a record of the journal into effect; false if it cannot be true.
    pub(super) fn replay(&mut self, record: Record) -> bool {
        match record {
            Record::Insert(chunk) => {
                // Which slabs there are is looked at when all is known.
                let slab = self.allocator.slab_of(chunk.place);
                let there = self.allocator.has(slab) || self.allocator.add(slab);
                let fresh =
                    there && self.queue.peek(chunk.key).is_none() && self.allocator.mark(chunk.place, chunk.weight);
                if fresh {
                    self.queue.put(chunk);
                }
                fresh
            }
            Record::Remove(key) => match self.queue.remove(key) {
                Some(gone) => {
                    self.allocator.give(gone.place, gone.weight);
                    true
                }
                None => false,
            },
            Record::Promote(key) => {
                // One that was pinned for a while may stand there already.
                self.queue.promote(key);
                self.queue.peek(key).is_some()
            }
        }
    }

    /// The shortest journal that leads to this state.
    pub(super) fn snapshot(&self) -> Vec<Record> {
        self.queue.in_order().map(Record::Insert).collect()
    }

    /// Forgets what lies in slabs that are not among `present`, and adds those that are. Returns how many chunks that were.
    pub(super) fn keep_slabs(&mut self, present: &[usize]) -> u64 {
        let gone = |slab: usize| !present.contains(&slab);
        let missing: Vec<usize> =
            (0..self.allocator.numbers()).filter(|slab| self.allocator.has(*slab) && gone(*slab)).collect();
        let mut lost = 0;
        for slab in missing {
            let places = self.allocator.places_of(slab);
            let keys: Vec<u64> = self.residents_in(&places, 0..usize::MAX).map(|chunk| chunk.key).collect();
            lost += keys.len() as u64;
            for key in keys {
                self.queue.remove(key);
            }
            self.allocator.drop_slab(slab);
        }
        for &slab in present {
            if !self.allocator.has(slab) {
                self.allocator.add(slab);
            }
        }
        lost
    }

    /// The chunks at these places, as far as they are among some nodes of the queue.
    pub(super) fn residents_in(&self, places: &Range<u32>, nodes: Range<usize>) -> impl Iterator<Item = Resident> {
        self.queue.among(nodes).filter(|chunk| places.contains(&chunk.place))
    }

    /// Units that pins may take, if the slabs may come to hold `total` altogether.
    pub(super) fn pinnable(total: u64) -> u64 {
        total - total / UNPINNED_PART
    }

    /// Gives a promise, whether there is room or not; weights are those of chunks that are still to come.
    pub(super) fn pin(&mut self, pin: Pin, chunks: &mut [(u64, u16)]) {
        self.weigh(chunks);
        self.ledger.add(pin, chunks);
        for (key, _) in chunks {
            self.queue.hold(*key);
        }
    }

    /// Replaces the weights of chunks that are there by what they really take.
    pub(super) fn weigh(&self, chunks: &mut [(u64, u16)]) {
        for (key, weight) in chunks {
            *weight = self.queue.peek(*key).map_or(*weight, |chunk| chunk.weight);
        }
    }

    /// Ends a promise; false if there is none of that name.
    pub(super) fn unpin(&mut self, id: PinId) -> bool {
        let Some(free) = self.ledger.remove(id) else { return false };
        for key in free {
            self.queue.release(key);
        }
        true
    }

    fn gone(&mut self, chunk: Resident) {
        self.allocator.give(chunk.place, chunk.weight);
        self.pending.push(Record::Remove(chunk.key));
    }
}
