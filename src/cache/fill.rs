//! Putting frames in.

use std::sync::atomic::Ordering;

use super::allocator::{UNIT, UNIT_LEN};
use super::extent::{self, HEADER_LEN};
use super::frame::Frame;
use super::state::Admission;
use super::{Cache, count};
use crate::limits::MIB;

/// The floor is looked at again whenever this much was put in.
const WATCH_EVERY: u64 = 16 * MIB;
/// Times that a region may be cleared for one frame.
const CLEARED_MOST: usize = 2;

/// Outcome of an insertion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Inserted {
    /// It is in the cache now.
    Kept,
    /// Its chunk was there already.
    Known,
    /// It is not in the cache. The caller goes on without.
    Refused(Refusal),
}

/// Why a frame is not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It does not fit in a slab.
    TooLong,
    /// All room is pinned, or being written to.
    Full,
    /// The disk has less than the floor free, and the cache no slab.
    DiskFull,
    /// It could not be written; the log says why.
    Unwritable,
}

impl Cache {
    /// Keeps a frame, evicting others if need be. What is pinned and expected stays as long as its pin. Blocks on the disk.
    pub fn insert(&self, frame: &Frame) -> Inserted {
        let inserted = self.try_insert(frame);
        match inserted {
            Inserted::Kept => count(&self.counters.inserts),
            Inserted::Refused(_) => count(&self.counters.refusals),
            Inserted::Known => {}
        }
        inserted
    }

    fn try_insert(&self, frame: &Frame) -> Inserted {
        let (key, len) = (frame.id().prefix(), frame.bytes().len() as u64);
        let weight = extent::weight(len);
        let place = match self.admit(key, weight) {
            Ok(place) => place,
            Err(inserted) => return inserted,
        };
        // Evicted extents must be out of the journal before they are overwritten.
        self.flush();
        if !self.write(place, weight, &[&extent::header(&self.identity.secret, frame), frame.bytes()]) {
            return Inserted::Refused(Refusal::Unwritable);
        }
        let fresh = self.state().publish(key, place, weight);
        self.flush();
        let written = u64::from(weight) * UNIT;
        if self.unwatched.fetch_add(written, Ordering::Relaxed) > WATCH_EVERY {
            self.unwatched.store(0, Ordering::Relaxed);
            self.trim();
        }
        if fresh { Inserted::Kept } else { Inserted::Known }
    }

    fn admit(&self, key: u64, weight: u16) -> Result<u32, Inserted> {
        if u64::from(weight) * UNIT > self.identity.slab_len {
            return Err(Inserted::Refused(Refusal::TooLong));
        }
        let (mut may_grow, mut cleared) = (true, 0);
        loop {
            let (admission, total) = {
                let mut state = self.state();
                let may_grow = may_grow && state.allocator.count() < self.slabs_max;
                (state.admit(key, weight, may_grow), state.allocator.total())
            };
            match admission {
                Admission::Known => return Err(Inserted::Known),
                Admission::At(place) => return Ok(place),
                Admission::Grow => may_grow = self.grow(total),
                Admission::Clear(places) if cleared < CLEARED_MOST => {
                    cleared += 1;
                    self.clear(&places);
                }
                Admission::Clear(_) | Admission::Full if self.expire() => {}
                Admission::Full if total == 0 => return Err(Inserted::Refused(Refusal::DiskFull)),
                Admission::Clear(_) | Admission::Full => {
                    self.flush();
                    return Err(Inserted::Refused(Refusal::Full));
                }
            }
        }
    }

    /// Writes an extent to units that were taken for it, with zeros to the end of the last: a page that is written whole need not
    /// be read first. If that fails the units are given back, unless they may be what failed.
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
