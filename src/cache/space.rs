//! Growing and shrinking by slabs, within the free space of the disk.

use std::ops::Range;
use std::sync::PoisonError;

use super::Cache;
use super::extent;
use super::queue::{QueueKind, Resident};
use super::read::SlotContent;
use super::state::EVICTED_MOST;

/// Nodes of the queue that are searched at once: less than a millisecond.
const NODES: usize = 64 << 10;

/// Treatment of other chunks where one that is not held must move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Others {
    /// They are evicted in the order of eviction: a region that is cleared costs those that are read least.
    MakeRoom,
    /// They stay, and it is evicted: a slab that is removed frees space at once.
    Stay,
}

impl Cache {
    /// Evicts chunks until at least `bytes` are freed, or nothing evictable is left; returns the bytes freed. The slabs stay.
    pub fn evict(&self, bytes: u64) -> u64 {
        let mut freed = 0;
        while freed < bytes {
            let Some(gone) = self.state().evict() else { break };
            freed += u64::from(gone.weight) * super::UNIT;
        }
        self.flush();
        freed
    }

    /// Removes slabs while there are more than the capacity allows, or the disk has less free space than the floor. Evictable
    /// chunks in them are evicted, pinned ones moved. Also ends expired pins. Insertions call this regularly; an agent calls it
    /// if other programs use the disk, too. Returns the bytes freed.
    pub fn trim(&self) -> u64 {
        self.expire();
        let mut given = 0;
        while self.state().allocator.count() > self.slabs_max || self.spare().is_some_and(|spare| spare < 0) {
            if !self.shrink() {
                break;
            }
            given += self.identity.slab_len;
        }
        given
    }

    /// Units of all slabs, including further ones that the capacity and the disk allow.
    pub(super) fn possible_units(&self) -> u64 {
        let spare = u64::try_from(self.spare().unwrap_or(0)).unwrap_or(0) / self.identity.slab_len;
        let state = self.state();
        let more = spare.min(self.slabs_max.saturating_sub(state.allocator.count()) as u64);
        state.allocator.total() + more * u64::from(state.allocator.slab_units())
    }

    /// Adds a slab, if the disk has space for it above the floor. `total` is the number of units at the time of the decision: if
    /// it has changed, another thread has added one.
    pub(super) fn grow(&self, total: u64) -> bool {
        let _work = self.slab_work.lock().unwrap_or_else(PoisonError::into_inner);
        let number = {
            let state = self.state();
            if state.allocator.total() != total {
                return true;
            }
            state.allocator.vacant_number()
        };
        let needed = i64::try_from(self.identity.slab_len).unwrap_or(i64::MAX);
        if self.spare().is_none_or(|spare| spare < needed) {
            return false;
        }
        match self.slabs.add(&*self.medium, number) {
            Ok(()) => self.state().allocator.add(number),
            Err(error) => {
                tracing::warn!("no slab was added to the cache {}: {error}", self.dir.display());
                false
            }
        }
    }

    /// Clears a region: moves its chunks elsewhere, or evicts them.
    pub(super) fn clear(&self, places: &Range<u32>) {
        let _work = self.slab_work.lock().unwrap_or_else(PoisonError::into_inner);
        self.empty(places, Others::MakeRoom);
        self.state().allocator.set_open(places, true);
    }

    /// Removes the emptiest slab; false if it cannot be emptied.
    fn shrink(&self) -> bool {
        let _work = self.slab_work.lock().unwrap_or_else(PoisonError::into_inner);
        let (slab, places) = {
            let state = self.state();
            let Some(slab) = state.allocator.emptiest_slab() else { return false };
            (slab, state.allocator.places_of(slab))
        };
        self.empty(&places, Others::Stay);
        {
            let mut state = self.state();
            // A write may be in progress there, or a pinned chunk could not be moved.
            if state.allocator.taken_in(slab) > 0 {
                state.allocator.set_open(&places, true);
                return false;
            }
            state.allocator.drop_slab(slab);
        }
        self.flush();
        match self.slabs.remove(&*self.medium, slab) {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!("slab {} of the cache cannot be taken away: {error}", self.slabs.path(slab).display());
                self.state().allocator.add(slab);
                false
            }
        }
    }

    /// Chunks at these places, in order of place.
    pub(super) fn chunks_in(&self, places: &Range<u32>) -> Vec<Resident> {
        let (mut found, mut from) = (Vec::new(), 0);
        loop {
            let state = self.state();
            if from >= state.queue.nodes() {
                break;
            }
            found.extend(state.residents_in(places, from..from + NODES));
            from += NODES;
        }
        found.sort_unstable_by_key(|chunk| chunk.place);
        found
    }

    /// Closes the regions of these places, and moves or evicts their chunks.
    fn empty(&self, places: &Range<u32>, others: Others) {
        self.state().allocator.set_open(places, false);
        self.chunks_in(places).into_iter().for_each(|chunk| self.relocate_chunk(chunk, others));
        self.flush();
    }

    /// Moves a chunk to free space elsewhere. If there is none, others are evicted for it if it is held or they make room, in the
    /// order of eviction. A chunk that is not held is evicted in its turn, or if too many others would be.
    fn relocate_chunk(&self, chunk: Resident, others: Others) {
        let Resident { key, place, weight, .. } = chunk;
        let to = {
            let mut state = self.state();
            let (mut to, mut evicted, most) = (state.allocator.take(weight), 0, EVICTED_MOST * u64::from(weight));
            while to.is_none()
                && let Some(now) = state.queue.peek(key).filter(|now| now.place == place)
                && (now.standing == QueueKind::Held || (others == Others::MakeRoom && evicted <= most))
                && let Some(gone) = state.evict()
            {
                evicted += u64::from(gone.weight);
                to = state.allocator.take(weight);
            }
            let is_held = state.queue.peek(key).is_some_and(|now| now.standing == QueueKind::Held);
            if to.is_none() && !is_held {
                state.evictions += u64::from(state.remove(key, place, true));
            }
            to
        };
        let Some(to) = to else { return };
        if !self.flush() {
            self.state().allocator.give(to, weight);
            return;
        }
        let moved = match self.settled(chunk) {
            Some(SlotContent::Frame(frame)) if extent::weight(frame.bytes().len() as u64) == weight => {
                let header = extent::header(&self.identity.secret, &frame);
                self.write(to, weight, &[&header, frame.bytes()])
            }
            found => {
                self.state().allocator.give(to, weight);
                match found {
                    Some(SlotContent::Wrong(chunk)) => self.drop_damaged(chunk, true),
                    Some(SlotContent::Unreadable(chunk)) => self.drop_damaged(chunk, false),
                    Some(SlotContent::Frame(_)) | None => false,
                };
                false
            }
        };
        if moved {
            self.state().relocate(chunk, to);
            self.flush();
        }
    }

    /// Free bytes of the disk above the floor; none if unknown.
    fn spare(&self) -> Option<i64> {
        let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        match self.medium.available(&self.dir) {
            Ok(free) => Some(signed(free) - signed(self.free_floor)),
            Err(error) => {
                tracing::debug!("no free space is told of {}: {error}", self.dir.display());
                None
            }
        }
    }
}
