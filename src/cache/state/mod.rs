//! State of a cache, and all decisions on it. Pure, so that it can be tested without a disk.

#[cfg(test)]
mod tests;

use std::ops::Range;

use super::allocator::Allocator;
use super::journal::Record;
use super::pins::{Ledger, Pin};
use super::queue::{Queue, QueueKind, Resident};
use super::quotas::{Quotas, TenantNumber};
use crate::id::PinId;

/// Multiple of the wanted space that is evicted in search of a free run; after that, a region is cleared.
pub(super) const EVICTED_MOST: u64 = 16;
/// Share of the space (one part in this many) that pins must leave free, so that chunks can be moved.
const UNPINNED_PART: u64 = 20;

/// Admission of a new chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// The chunk is present already.
    Known,
    /// Place for the chunk, which is allocated now.
    At(u32),
    /// Another slab is needed.
    Grow,
    /// The free space is fragmented: these places must be cleared.
    Clear(Range<u32>),
    /// All space is pinned, or being written.
    Full,
    /// The tenant's quota is used up: its chunks are pinned, or being written.
    OverQuota,
}

/// The tenant that a new chunk counts for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TenantCharge {
    /// None: it counts for nobody.
    pub(super) tenant: Option<TenantNumber>,
    /// The quota was used up: only chunks of the tenant make way.
    beyond: bool,
}

impl TenantCharge {
    pub(super) fn to(tenant: Option<TenantNumber>) -> Self {
        Self { tenant, beyond: false }
    }
}

/// Mutable state.
#[derive(Debug)]
pub(super) struct State {
    /// Chunks, in order of eviction.
    pub(super) queue: Queue,
    /// Allocator.
    pub(super) allocator: Allocator,
    /// Pinned chunks.
    pub(super) ledger: Ledger,
    /// Chunks of warms that run.
    pub(super) holds: Ledger,
    /// Whose chunks they are.
    pub(super) quotas: Quotas,
    /// The journal names tenants that are not known.
    pub(super) has_unknown_tenants: bool,
    /// Records that are not in the journal yet.
    pub(super) pending: Vec<Record>,
    /// Chunks evicted since the start.
    pub(super) evictions: u64,
}

impl State {
    /// An empty one.
    pub(super) fn new(slab_units: u32, seed: u64) -> Self {
        let (queue, allocator) = (Queue::new(seed), Allocator::new(slab_units));
        let (ledger, holds, quotas, pending) = Default::default();
        Self { queue, allocator, ledger, holds, quotas, has_unknown_tenants: false, pending, evictions: 0 }
    }

    /// Finds a place for a chunk; evicts others if needed and if no slab may be added.
    #[cfg(test)]
    pub(super) fn admit(&mut self, key: u64, weight: u16, may_grow: bool) -> Admission {
        self.admit_for(key, weight, may_grow, &mut TenantCharge::default())
    }

    /// The same, for a tenant. One whose quota is used up lets go of its own chunks, and never of another's; a chunk that a pin expects
    /// is admitted beyond it. The units count for the tenant from now on.
    pub(super) fn admit_for(&mut self, key: u64, weight: u16, may_grow: bool, charge: &mut TenantCharge) -> Admission {
        if self.queue.peek(key).is_some() {
            return Admission::Known;
        }
        let bounded = charge.tenant.filter(|_| !self.ledger.wants(key));
        if let Some(tenant) = bounded {
            while self.quotas.excess(tenant, weight) > 0 {
                charge.beyond = true;
                if self.evict_of(tenant).is_none() {
                    return Admission::OverQuota;
                }
            }
        }
        let admission = match bounded.filter(|_| charge.beyond) {
            Some(tenant) => self.place_within(tenant, weight, may_grow),
            None => self.place(weight, may_grow),
        };
        if let (Admission::At(_), Some(tenant)) = (&admission, charge.tenant) {
            self.quotas.reserve(tenant, weight);
        }
        admission
    }

    /// A place for a chunk of `tenant`, for which only its own make way.
    fn place_within(&mut self, tenant: TenantNumber, weight: u16, may_grow: bool) -> Admission {
        let mut evicted = 0;
        loop {
            if let Some(place) = self.allocator.take(weight) {
                return Admission::At(place);
            }
            if may_grow {
                return Admission::Grow;
            }
            match self.evict_of(tenant) {
                Some(gone) if evicted <= EVICTED_MOST * u64::from(weight) => evicted += u64::from(gone.weight),
                _ => return Admission::OverQuota,
            }
        }
    }

    /// A place for a chunk, for which any other may make way.
    fn place(&mut self, weight: u16, may_grow: bool) -> Admission {
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

    /// Evicts the next chunk.
    pub(super) fn evict(&mut self) -> Option<Resident> {
        self.queue.set_capacity(self.allocator.total().saturating_sub(self.queue.held_weight()));
        let (queue, pending) = (&mut self.queue, &mut self.pending);
        let gone = queue.evict(|key| pending.push(Record::Promote(key)))?;
        self.evictions += 1;
        self.evicted(gone);
        Some(gone)
    }

    /// Evicts the next chunk of a tenant: its oldest that is not pinned and was not read since it came round. Pinned ones leave its
    /// queue until they are pinned no longer.
    fn evict_of(&mut self, tenant: TenantNumber) -> Option<Resident> {
        loop {
            let key = self.quotas.next(tenant)?;
            match self.queue.demote(key) {
                Some(true) => self.quotas.queue(key, tenant),
                Some(false) => {
                    let gone = self.queue.remove(key)?;
                    self.evictions += 1;
                    self.evicted(gone);
                    return Some(gone);
                }
                None => {}
            }
        }
    }

    /// Makes an admitted chunk visible, once it is written to its place. False if another thread was first; the place is then
    /// free again.
    #[cfg(test)]
    pub(super) fn publish(&mut self, key: u64, place: u32, weight: u16) -> bool {
        self.publish_for(key, place, weight, None)
    }

    /// The same, for a tenant that it was admitted for.
    pub(super) fn publish_for(&mut self, key: u64, place: u32, weight: u16, tenant: Option<TenantNumber>) -> bool {
        if let Some(tenant) = tenant {
            self.quotas.release(tenant, weight);
        }
        if self.queue.peek(key).is_some() {
            self.allocator.give(place, weight);
            return false;
        }
        let is_pinned = self.ledger.wants(key);
        let standing = if is_pinned || self.holds.wants(key) {
            self.ledger.arrived(key, weight);
            self.holds.arrived(key, weight);
            self.queue.put(Resident { key, place, weight, standing: QueueKind::Held, frequency: 0 });
            // Its queue after a restart.
            if is_pinned { QueueKind::Held } else { QueueKind::Main }
        } else {
            self.queue.admit(key, place, weight)
        };
        self.pending.push(Record::Insert(Resident { key, place, weight, standing, frequency: 0 }));
        if let Some(tenant) = tenant
            && self.quotas.charge(key, tenant, weight)
        {
            self.pending.push(Record::TenantCharge(key, tenant));
        }
        true
    }

    /// Removes the chunk of `key` if it is still at `place`; frees its units if they are `sound`.
    pub(super) fn remove(&mut self, key: u64, place: u32, sound: bool) -> bool {
        if self.queue.peek(key).is_none_or(|found| found.place != place) {
            return false;
        }
        let Some(gone) = self.queue.remove(key) else { return false };
        if sound {
            self.evicted(gone);
        } else {
            self.quotas.discharge(key, gone.weight);
            self.pending.push(Record::Remove(key));
        }
        true
    }

    /// Records the move of a chunk to `to`, which was allocated for it. False if the chunk was removed; `to` is then free again.
    pub(super) fn relocate(&mut self, chunk: Resident, to: u32) -> bool {
        let Resident { key, place, weight, .. } = chunk;
        let Some(found) = self.queue.peek(key).filter(|found| (found.place, found.weight) == (place, weight)) else {
            self.allocator.give(to, weight);
            return false;
        };
        self.queue.relocate(key, to);
        self.allocator.give(place, weight);
        self.pending.extend([Record::Remove(key), Record::Insert(Resident { place: to, ..found })]);
        self.pending.extend(self.quotas.holder(key).map(|tenant| Record::TenantCharge(key, tenant)));
        true
    }

    /// Applies records of the journal; false at an impossible one.
    pub(super) fn replay_all(&mut self, records: &[Record]) -> bool {
        self.queue.approach(records.iter().map(|record| match record {
            Record::Insert(chunk) => chunk.key,
            Record::Remove(key) | Record::Promote(key) | Record::TenantCharge(key, _) => *key,
        }));
        records.iter().all(|record| self.replay(*record))
    }

    /// Applies a record of the journal; false if it is impossible.
    pub(super) fn replay(&mut self, record: Record) -> bool {
        match record {
            Record::Insert(chunk) => {
                // Missing slabs are handled after the replay.
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
                    self.quotas.discharge(key, gone.weight);
                    true
                }
                None => false,
            },
            Record::Promote(key) => {
                // A chunk that was pinned meanwhile may be in that queue already.
                self.queue.promote(key);
                self.queue.peek(key).is_some()
            }
            Record::TenantCharge(key, tenant) => {
                let found = self.queue.peek(key);
                self.has_unknown_tenants |= found.is_some_and(|chunk| !self.quotas.charge(key, tenant, chunk.weight));
                found.is_some()
            }
        }
    }

    /// Shortest journal that yields this state.
    pub(super) fn snapshot(&self) -> Vec<Record> {
        let records = self.queue.in_order().flat_map(|chunk| {
            let charge = self.quotas.holder(chunk.key).map(|tenant| Record::TenantCharge(chunk.key, tenant));
            [Some(Record::Insert(chunk)), charge]
        });
        records.flatten().collect()
    }

    /// Drops chunks in slabs that are not `present`, and adds the slabs that are. Returns the number of dropped chunks.
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
                if let Some(gone) = self.queue.remove(key) {
                    self.quotas.discharge(key, gone.weight);
                }
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

    /// Chunks at these places, within a range of nodes of the queue.
    pub(super) fn residents_in(&self, places: &Range<u32>, nodes: Range<usize>) -> impl Iterator<Item = Resident> {
        self.queue.among(nodes).filter(|chunk| places.contains(&chunk.place))
    }

    /// Units that pins may take, if the slabs may come to hold `total` altogether.
    pub(super) fn pinnable(total: u64) -> u64 {
        total - total / UNPINNED_PART
    }

    /// Adds a pin without a check of the space; weights are estimates for chunks that are not present yet.
    pub(super) fn pin(&mut self, pin: Pin, chunks: &mut [(u64, u16)]) {
        self.weigh(chunks);
        self.ledger.add(pin, chunks);
        for (key, _) in chunks {
            self.queue.hold(*key);
        }
    }

    /// Replaces the weights of present chunks by their real sizes.
    pub(super) fn weigh(&self, chunks: &mut [(u64, u16)]) {
        for (key, weight) in chunks {
            *weight = self.queue.peek(*key).map_or(*weight, |chunk| chunk.weight);
        }
    }

    /// Ends a pin; false if there is no such pin.
    pub(super) fn unpin(&mut self, id: PinId) -> bool {
        let Some(free) = self.ledger.remove(id) else { return false };
        for key in free {
            if self.holds.wants(key) {
                continue;
            }
            self.queue.release(key);
            self.make_evictable(key);
        }
        true
    }

    /// Holds the chunks of a warm, present or not, if all of them fit beside the pinned and the held ones: of two warms that only fit
    /// alone, one is to be complete. `most` are the units that may be kept altogether. False if they do not fit.
    pub(super) fn hold(&mut self, hold: Pin, chunks: &[(u64, u16)], most: u64) -> bool {
        let new = chunks.iter().filter(|(key, _)| !self.ledger.wants(*key) && !self.holds.wants(*key));
        let added: u64 = new.map(|(_, weight)| u64::from(*weight)).sum();
        if self.ledger.weight() + self.holds.weight() + added > most {
            return false;
        }
        self.holds.add(hold, chunks);
        for &(key, _) in chunks {
            if self.queue.peek(key).is_some_and(|chunk| chunk.standing == QueueKind::Small) {
                self.pending.push(Record::Promote(key));
            }
            self.queue.hold(key);
        }
        true
    }

    /// Ends a hold: its chunks are the newest of the main queue, unless they are pinned or held otherwise.
    pub(super) fn end_hold(&mut self, id: PinId) {
        for key in self.holds.remove(id).unwrap_or_default() {
            if !self.ledger.wants(key) {
                self.queue.release_to_main(key);
                self.make_evictable(key);
            }
        }
    }

    /// Puts a chunk back into the order in which its tenant, if it has one, lets go of chunks.
    fn make_evictable(&mut self, key: u64) {
        if let Some(tenant) = self.quotas.holder(key) {
            self.quotas.queue(key, tenant);
        }
    }

    fn evicted(&mut self, chunk: Resident) {
        self.allocator.give(chunk.place, chunk.weight);
        self.quotas.discharge(chunk.key, chunk.weight);
        self.pending.push(Record::Remove(chunk.key));
    }
}
