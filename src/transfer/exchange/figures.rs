//! What an exchange has moved, by where from and where to.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of stored frames, since the agent started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Found in the cache.
    pub from_cache: u64,
    /// Brought from agents of the same site.
    pub from_site: u64,
    /// Brought from agents elsewhere.
    pub from_remote: u64,
    /// Brought from repositories, with what lay between.
    pub from_repository: u64,
    /// Given to processes of this node.
    pub to_local: u64,
    /// Given to agents of the same site.
    pub to_site: u64,
    /// Given to agents elsewhere.
    pub to_remote: u64,
    /// Chunks that came from a peer and were not what they should be.
    pub untrue: u64,
}

/// Figures while they grow.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) from_cache: AtomicU64,
    pub(super) from_site: AtomicU64,
    pub(super) from_remote: AtomicU64,
    pub(super) from_repository: AtomicU64,
    pub(super) to_local: AtomicU64,
    pub(super) to_site: AtomicU64,
    pub(super) to_remote: AtomicU64,
    pub(super) untrue: AtomicU64,
}

/// Adds `n`.
pub(super) fn add(count: &AtomicU64, n: u64) {
    count.fetch_add(n, Ordering::Relaxed);
}

impl Counts {
    pub(super) fn read(&self) -> Figures {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Figures {
            from_cache: read(&self.from_cache),
            from_site: read(&self.from_site),
            from_remote: read(&self.from_remote),
            from_repository: read(&self.from_repository),
            to_local: read(&self.to_local),
            to_site: read(&self.to_site),
            to_remote: read(&self.to_remote),
            untrue: read(&self.untrue),
        }
    }
}
