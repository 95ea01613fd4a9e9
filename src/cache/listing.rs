//! Lists of what a cache holds, for inventories.

use super::Cache;
use super::queue::QueueKind;

/// Nodes that are listed while the lock is held once: some 100 microseconds.
const BATCH: usize = 1 << 15;

/// First eight bytes of the ids of a cache's chunks, ascending, each once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheListing {
    /// Chunks that it holds.
    pub held: Vec<u64>,
    /// Those of them that are pinned.
    pub pinned: Vec<u64>,
    /// Pinned chunks that it does not hold yet.
    pub promised: Vec<u64>,
}

impl Cache {
    /// Lists its chunks. What comes or goes meanwhile may be listed or not. Takes 8 bytes of memory a chunk. Blocks on the disk,
    /// where expired pins end.
    #[must_use]
    pub fn listing(&self) -> CacheListing {
        self.expire();
        let mut listing = CacheListing::default();
        let mut at = 0;
        loop {
            let state = self.state();
            if at >= state.queue.nodes() {
                break;
            }
            for chunk in state.queue.among(at..at + BATCH) {
                listing.held.push(chunk.key);
                if chunk.standing == QueueKind::Held && state.ledger.wants(chunk.key) {
                    listing.pinned.push(chunk.key);
                }
            }
            at += BATCH;
        }
        let pins: Vec<_> = self.state().ledger.pins().map(|pin| pin.id).collect();
        for pin in pins {
            let state = self.state();
            let keys = state.ledger.keys(pin).unwrap_or_default();
            listing.promised.extend(keys.iter().filter(|&&key| state.queue.peek(key).is_none()));
        }
        for list in [&mut listing.held, &mut listing.pinned, &mut listing.promised] {
            list.sort_unstable();
            list.dedup();
        }
        listing
    }
}
