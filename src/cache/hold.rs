//! Holds: what a warm has fetched stays until the warm has ended.
//!
//! New chunks otherwise enter the small queue, a tenth of the space, and the last chunks of a tree would evict its first ones. A hold is
//! not stored, and exempts from no quota. At its end, the chunks enter the main queue.

use std::sync::Arc;

use super::Cache;
use super::pins::{Pin, PinChunk, PinRequest};
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
    /// held.
    ///
    /// Blocks on the disk.
    pub fn hold(self: &Arc<Self>, chunks: &[PinChunk]) -> Option<Hold> {
        let request =
            PinRequest { owner: String::new(), reason: String::new(), expires: None, chunks: chunks.to_vec() };
        let request = request.normal().ok()?;
        self.expire();
        let (id, most) = (PinId::random(), State::pinnable(self.possible_units()));
        let hold: Pin = request.promise(id, self.clock.now());
        let held = self.state().hold(hold, &mut request.weights(), most);
        self.flush();
        held.then(|| Hold { cache: Arc::clone(self), id })
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.cache.state().end_hold(self.id);
    }
}
