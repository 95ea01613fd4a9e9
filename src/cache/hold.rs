//! Holds: what a warm has fetched stays until the warm has ended.
//!
//! New chunks otherwise enter the small queue, a tenth of the space, and the last chunks of a tree would evict its first ones. A hold is
//! not stored, exempts from no quota, and counts in the limit of its caller's pins. At its end, the chunks enter the main queue.

use std::sync::Arc;

use super::Cache;
use super::allocator::UNIT;
use super::pins::{PinChunk, PinLimit, PinRequest};
use super::state::State;
use crate::id::PinId;

/// A hold, which ends when this is dropped.
#[derive(Debug)]
#[must_use]
pub struct Hold {
    cache: Arc<Cache>,
    id: PinId,
}

impl Cache {
    /// Holds chunks, present ones and others as soon as they are inserted. None if not all of them fit beside those that are pinned or
    /// held, or if what the owners of `limit` pin and hold would have more bytes than it allows. Blocks on the disk.
    pub fn hold(self: &Arc<Self>, chunks: &[PinChunk], limit: Option<&PinLimit>) -> Option<Hold> {
        let owner = limit.map_or_else(String::new, |limit| limit.owners.clone());
        let request = PinRequest { owner, reason: String::new(), expires: None, chunks: chunks.to_vec() };
        let request = request.normal().ok()?;
        self.expire();
        let (id, most) = (PinId::random(), State::pinnable(self.possible_units()));
        let (hold, mut weights) = (request.promise(id, self.clock.now()), request.weights());
        let held = {
            let _limited = self.limited(limit);
            let is_allowed = |limit: &PinLimit| self.units_with(&limit.owners, chunks) * UNIT <= limit.bytes;
            limit.is_none_or(is_allowed) && {
                let mut state = self.state();
                state.weigh(&mut weights);
                state.hold(hold, &weights, most)
            }
        };
        self.flush();
        held.then(|| Hold { cache: Arc::clone(self), id })
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.cache.state().end_hold(self.id);
    }
}
