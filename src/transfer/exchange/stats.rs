//! Counters of moved bytes, by source and destination.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::repository::SourceBytes;

/// Bytes of stored frames, since the agent started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransferStats {
    /// Found in the cache.
    pub from_cache: u64,
    /// Fetched from agents of the same site.
    pub from_site: u64,
    /// Fetched from agents of other sites.
    pub from_remote: u64,
    /// Fetched from repositories, gaps between chunks included.
    pub from_repository: u64,
    /// Sent to processes of this node.
    pub to_local: u64,
    /// Sent to agents of the same site.
    pub to_site: u64,
    /// Sent to agents of other sites.
    pub to_remote: u64,
    /// Chunks from a peer that did not match their ids.
    pub corrupt: u64,
    /// Chunks of the cache that were encoded anew, without their bases, for a peer.
    pub reencoded: u64,
}

/// Source of stored bytes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source {
    Cache,
    Site,
    Remote,
    Repository,
}

/// Bytes by source, still counting.
#[derive(Debug, Default)]
pub(super) struct SourceCounters {
    cache: AtomicU64,
    site: AtomicU64,
    remote: AtomicU64,
    repository: AtomicU64,
}

impl SourceCounters {
    pub(super) fn add(&self, from: Source, bytes: u64) {
        let count = match from {
            Source::Cache => &self.cache,
            Source::Site => &self.site,
            Source::Remote => &self.remote,
            Source::Repository => &self.repository,
        };
        add(count, bytes);
    }

    pub(super) fn read(&self) -> SourceBytes {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        SourceBytes {
            agent: 0,
            cache: read(&self.cache),
            site: read(&self.site),
            remote: read(&self.remote),
            repository: read(&self.repository),
        }
    }
}

/// Figures, still counting.
#[derive(Debug, Default)]
pub(super) struct TransferCounters {
    pub(super) from: SourceCounters,
    pub(super) to_local: AtomicU64,
    pub(super) to_site: AtomicU64,
    pub(super) to_remote: AtomicU64,
    pub(super) corrupt: AtomicU64,
    pub(super) reencoded: Arc<AtomicU64>,
}

/// Adds `n`.
pub(super) fn add(count: &AtomicU64, n: u64) {
    count.fetch_add(n, Ordering::Relaxed);
}

impl TransferCounters {
    pub(super) fn read(&self) -> TransferStats {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let from = self.from.read();
        TransferStats {
            from_cache: from.cache,
            from_site: from.site,
            from_remote: from.remote,
            from_repository: from.repository,
            to_local: read(&self.to_local),
            to_site: read(&self.to_site),
            to_remote: read(&self.to_remote),
            corrupt: read(&self.corrupt),
            reencoded: read(&self.reencoded),
        }
    }
}
