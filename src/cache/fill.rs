//! Insertion of frames.

use std::sync::atomic::Ordering;

use super::allocator::{UNIT, UNIT_LEN};
use super::extent::{self, HEADER_LEN};
use super::frame::Frame;
use super::queue::BaseKey;
use super::quotas::TenantNumber;
use super::state::{Admission, TenantCharge};
use super::{Cache, count};
use crate::limits::MIB;

/// Bytes of insertions after which the free space of the disk is checked again.
const WATCH_EVERY: u64 = 16 * MIB;
/// Maximum number of regions that are cleared for one frame.
const CLEARED_MOST: usize = 2;

/// Outcome of an insertion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Inserted {
    /// Inserted.
    Kept,
    /// The chunk is in the cache already.
    Known,
    /// Not inserted. The caller continues without it.
    Refused(Refusal),
}

/// Reason why a frame is not inserted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It does not fit in a slab.
    TooLong,
    /// All space is pinned, or being written.
    Full,
    /// All that its tenant may have is pinned or being written, or it is larger than that.
    Quota,
    /// The disk has less free space than the floor, and the cache has no slab.
    DiskFull,
    /// The write, or that of the journal, failed; the log has the error.
    Unwritable,
}

impl Cache {
    /// Inserts a frame, and evicts others if needed. A chunk that a pin expects stays as long as the pin. Blocks on the disk.
    pub fn insert(&self, frame: &Frame) -> Inserted {
        self.insert_for(frame, None)
    }

    /// The same, for a tenant, if tenants have quotas. The chunk counts for it as long as it is in the cache; one that is there already
    /// stays as it is. A tenant that has used up its quota makes way itself; nothing of another is evicted for it. Blocks on the disk.
    pub fn insert_for(&self, frame: &Frame, tenant: Option<&str>) -> Inserted {
        let inserted = match tenant.filter(|_| self.has_quotas()).map(|tenant| self.tenant_number(tenant)) {
            None => self.try_insert(frame, None),
            Some(Ok(number)) => self.try_insert(frame, Some(number)),
            Some(Err(error)) => {
                tracing::warn!("a chunk is not kept, as its tenant cannot be recorded: {error}");
                Inserted::Refused(Refusal::Unwritable)
            }
        };
        match inserted {
            Inserted::Kept => count(&self.counters.inserts),
            Inserted::Refused(_) => count(&self.counters.refusals),
            Inserted::Known => {}
        }
        inserted
    }

    /// Replaces `old`, a frame that was read here, by `new`, another frame of the chunk, or drops it. `old` stays if the cache
    /// refuses `new`. The chunk counts for the same tenant. Does nothing if the chunk has another base meanwhile. Blocks on the disk.
    pub fn replace(&self, old: &Frame, new: Option<&Frame>) {
        let key = old.id().prefix();
        let tenant = {
            let mut state = self.state();
            let (Some(chunk), Some(base)) = (state.queue.peek(key), state.queue.base(key)) else { return };
            if base != BaseKey::UNKNOWN && base != BaseKey::of(old.base().as_ref()) {
                return;
            }
            let tenant = state.quotas.holder(key);
            state.remove(key, chunk.place, true);
            tenant
        };
        self.flush();
        if let Some(new) = new
            && matches!(self.try_insert(new, tenant), Inserted::Refused(_))
        {
            // If another insert has taken its room, the chunk is missing, as after an eviction.
            let _ = self.try_insert(old, tenant);
        }
    }

    fn try_insert(&self, frame: &Frame, tenant: Option<TenantNumber>) -> Inserted {
        let (key, len) = (frame.id().prefix(), frame.bytes().len() as u64);
        let weight = extent::weight(len);
        // Nothing is evicted for what could not be written.
        let has_journal = self.writing().journal.is_some();
        if !has_journal && !self.flush() {
            return Inserted::Refused(Refusal::Unwritable);
        }
        let place = match self.admit(key, weight, TenantCharge::to(tenant)) {
            Ok(place) => place,
            Err(inserted) => return inserted,
        };
        // Evictions must be in the journal before their extents are overwritten.
        let may_write = self.flush();
        if !may_write {
            self.state().allocator.give(place, weight);
        }
        if !may_write || !self.write(place, weight, &[&extent::header(&self.identity.secret, frame), frame.bytes()]) {
            if let Some(tenant) = tenant {
                self.state().quotas.release(tenant, weight);
            }
            return Inserted::Refused(Refusal::Unwritable);
        }
        let fresh = {
            let mut state = self.state();
            let fresh = state.publish_for(key, place, weight, tenant);
            if fresh {
                state.queue.set_base(key, BaseKey::of(frame.base().as_ref()));
            }
            fresh
        };
        self.flush();
        let written = u64::from(weight) * UNIT;
        if self.unwatched.fetch_add(written, Ordering::Relaxed) > WATCH_EVERY {
            self.unwatched.store(0, Ordering::Relaxed);
            self.trim();
        }
        if fresh { Inserted::Kept } else { Inserted::Known }
    }

    fn admit(&self, key: u64, weight: u16, mut charge: TenantCharge) -> Result<u32, Inserted> {
        if u64::from(weight) * UNIT > self.identity.slab_len {
            return Err(Inserted::Refused(Refusal::TooLong));
        }
        let (mut may_grow, mut cleared) = (true, 0);
        loop {
            let (admission, total) = {
                let mut state = self.state();
                let may_grow = may_grow && state.allocator.count() < self.slabs_max;
                (state.admit_for(key, weight, may_grow, &mut charge), state.allocator.total())
            };
            match admission {
                Admission::Known => return Err(Inserted::Known),
                Admission::At(place) => return Ok(place),
                Admission::Grow => may_grow = self.grow(total),
                Admission::Clear(places) if cleared < CLEARED_MOST => {
                    cleared += 1;
                    self.clear(&places);
                }
                Admission::Clear(_) | Admission::Full | Admission::OverQuota if self.expire() => {}
                Admission::OverQuota => {
                    self.flush();
                    return Err(Inserted::Refused(Refusal::Quota));
                }
                Admission::Full if total == 0 => return Err(Inserted::Refused(Refusal::DiskFull)),
                Admission::Clear(_) | Admission::Full => {
                    self.flush();
                    return Err(Inserted::Refused(Refusal::Full));
                }
            }
        }
    }

    /// Writes an extent to its units, padded with zeros, because a page that is written completely need not be read first. If the
    /// write fails, the units are freed, unless they may be defective.
    pub(super) fn write(&self, place: u32, weight: u16, parts: &[&[u8]; 2]) -> bool {
        const ZEROS: [u8; UNIT_LEN] = [0; UNIT_LEN];
        let len = parts.iter().map(|part| part.len()).sum::<usize>().max(HEADER_LEN);
        let rest = (usize::from(weight) * ZEROS.len()).saturating_sub(len).min(ZEROS.len());
        let Err(error) = self.slabs.write(place, &[parts[0], parts[1], &ZEROS[..rest]]) else { return true };
        tracing::warn!("an extent of the cache {} cannot be written: {error}", self.dir.display());
        if matches!(error.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded) {
            self.state().allocator.give(place, weight);
        }
        false
    }
}
