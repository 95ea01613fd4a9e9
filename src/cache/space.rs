//! Growing and shrinking by slabs, within what the disk has.

use std::ops::Range;
use std::sync::PoisonError;

use super::Cache;
use super::extent;
use super::queue::{Resident, Standing};
use super::read::SlotContent;

/// Nodes of the queue that are looked through in one go: less than a millisecond.
const NODES: usize = 64 << 10;

impl Cache {
    /// Evicts until at least `bytes` are free that were not before, or nothing evictable is left; returns how many came free. The
    /// slabs stay.
    pub fn evict(&self, bytes: u64) -> u64 {
        let mut freed = 0;
        while freed < bytes {
            let Some(gone) = self.state().evict() else { break };
            freed += u64::from(gone.weight) * super::UNIT;
        }
        self.flush();
        freed
    }

    /// Gives slabs back to the disk while there are more than the capacity allows, or the disk has less free than the floor; what is
    /// evictable in them goes, what is pinned moves. Ends pins whose time is over, too. Inserts do this now and then; an agent may do
    /// it whenever the disk is somebody else's too. Returns how many bytes it gave back.
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

    /// Units that there are or could be: what slabs hold, and those that the capacity and the disk still allow.
    pub(super) fn possible_units(&self) -> u64 {
        let spare = u64::try_from(self.spare().unwrap_or(0)).unwrap_or(0) / self.identity.slab_len;
        let state = self.state();
        let more = spare.min(self.slabs_max.saturating_sub(state.allocator.count()) as u64);
        state.allocator.total() + more * u64::from(state.allocator.slab_units())
    }

    /// Adds a slab, if the disk has room for it above the floor. `total` is what there was when it was wanted: if that has changed,
    /// somebody else was quicker.
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

    /// Makes one free run of a region: moves what is in it elsewhere, or evicts it.
    pub(super) fn clear(&self, places: &Range<u32>) {
        let _work = self.slab_work.lock().unwrap_or_else(PoisonError::into_inner);
        self.empty(places);
        self.state().allocator.set_open(places, true);
    }

    /// Takes the emptiest slab away; false if it cannot be emptied.
    fn shrink(&self) -> bool {
        let _work = self.slab_work.lock().unwrap_or_else(PoisonError::into_inner);
        let (slab, places) = {
            let state = self.state();
            let Some(slab) = state.allocator.emptiest_slab() else { return false };
            (slab, state.allocator.places_of(slab))
        };
        self.empty(&places);
        {
            let mut state = self.state();
            // A write may be in progress there, or a pinned chunk had nowhere to go.
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

    /// The chunks at these places, in the order in which they lie.
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

    /// Closes the regions of these places and brings what is in them away.
    fn empty(&self, places: &Range<u32>) {
        self.state().allocator.set_open(places, false);
        self.chunks_in(places).into_iter().for_each(|chunk| self.bring_away(chunk));
        self.flush();
    }

    /// Moves a chunk to free room elsewhere. Where there is none, an evictable chunk goes, and others go for a pinned one.
    fn bring_away(&self, chunk: Resident) {
        let Resident { key, place, weight, .. } = chunk;
        let to = {
            let mut state = self.state();
            let mut to = state.allocator.take(weight);
            let held = state.queue.peek(key).is_some_and(|now| now.standing == Standing::Held);
            while to.is_none() && held && state.evict().is_some() {
                to = state.allocator.take(weight);
            }
            if to.is_none() && !held {
                state.evictions += u64::from(state.remove(key, place, true));
            }
            to
        };
        let Some(to) = to else { return };
        self.flush();
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
