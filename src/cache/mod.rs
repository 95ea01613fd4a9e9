//! The cache: chunks on this node's disk, pinned or evictable, stored as frames.
//!
//! ```text
//! DIR/cache          description of this cache: unit, length of a slab, id, secret (identity.rs)
//! DIR/lock           lock of the process that has it open
//! DIR/slab-000000..  preallocated files of one length, in which extents lie: a header and a frame each (extent.rs)
//! DIR/journal        places of the chunks: records of 20 bytes (journal/)
//! DIR/pins/ULID      one pin each (pins/)
//! DIR/tenants        whom chunks count for, if tenants have quotas (tenants.rs)
//! ```
//!
//! **Integrity.** An extent has a digest and the id of its chunk, so the journal is only a hint: data that is lost, torn, stale
//! or damaged causes at worst a miss. A [`Frame`] was decoded and verified before it is inserted, and its digest is verified on
//! every read. A damaged one is dropped, counted, and a miss.
//!
//! **Order.** An insertion takes units, records the evictions for them in the journal, writes the extent, then adds it to the
//! index and the journal. So if the process is killed at any moment, everything in the journal is on the disk, except chunks that
//! were being evicted. Insertions are not synced: after a power loss the last ones are misses, unless [`Cache::sync`] was called.
//! Pins are synced before they are confirmed.
//!
//! **Locking.** Every function here blocks on the disk: call it from a blocking thread. All of them are thread-safe. The index
//! has one lock, held for lookups and decisions (microseconds), never during I/O. The journal is rewritten after as many changes
//! as there are chunks. Insertions wait for the whole rewrite, reads only while the chunks are listed (about 0.05 s per million).
//!
//! **Eviction.** S3-FIFO decides what is evicted (queue/). What a running warm has fetched is not (hold.rs). First fit decides the place
//! of a new extent (allocator/). A tenant beyond its quota makes way itself (quotas.rs). A disk that is full, or has less free space
//! than the floor, makes the cache smaller; this is never an error.

mod allocator;
mod check;
mod extent;
mod fill;
mod frame;
mod hold;
mod identity;
mod journal;
mod listing;
mod medium;
mod open;
mod pin;
mod pins;
mod queue;
mod quotas;
mod read;
mod slabs;
mod space;
mod state;
mod tenants;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;

use self::allocator::UNIT;
pub use self::check::{Checked, Damage};
pub use self::fill::{Inserted, Refusal};
pub use self::frame::Frame;
pub use self::hold::Hold;
use self::identity::Identity;
use self::journal::Journal;
pub use self::listing::CacheListing;
use self::medium::Medium;
pub use self::pins::{Pin, PinChunk, PinLimit, PinRequest, Pinned};
pub use self::queue::BaseKey;
pub use self::quotas::TenantQuotas;
use self::slabs::Slabs;
use self::state::State;
pub use self::tenants::TenantUse;
use crate::clock::{Clock, SystemClock};
use crate::limits::GIB;

/// Size limits of a cache.
#[derive(Clone, Debug)]
pub struct CacheOptions {
    /// Maximum bytes on the disk, besides the journal and pins; used in whole slabs, up to 16 TiB.
    pub capacity: u64,
    /// Bytes that stay free on the disk, independent of the capacity; 1 GiB by default.
    pub free_floor: u64,
    /// Bytes in a slab of a cache that is new: by default a 128th of the capacity, as a power of two from 32 MiB to 16 GiB.
    pub slab_len: Option<u64>,
    /// Quotas of tenants.
    pub quotas: TenantQuotas,
    /// Clock for the expiry of pins.
    pub clock: Arc<dyn Clock>,
}

impl CacheOptions {
    /// Options for a cache of up to `capacity` bytes.
    #[must_use]
    pub fn new(capacity: u64) -> Self {
        let quotas = TenantQuotas::default();
        Self { capacity, free_floor: GIB, slab_len: None, quotas, clock: Arc::new(SystemClock) }
    }
}

/// Figures of a cache; those of events count since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
pub struct CacheStat {
    /// Chunks in it.
    pub chunks: u64,
    /// Bytes that they use on the disk, including those being written.
    pub bytes: u64,
    /// Bytes of all slabs.
    pub slab_bytes: u64,
    /// Maximum bytes, unless the disk is too full.
    pub capacity: u64,
    /// Bytes of pinned chunks that are there, and of those that running warms hold.
    pub pinned_bytes: u64,
    /// Bytes of pinned chunks, including those not present yet.
    pub promised_bytes: u64,
    /// Pins.
    pub pins: u64,
    /// Bytes of the journal.
    pub journal_bytes: u64,
    /// Reads that found their chunk.
    pub hits: u64,
    /// Reads that did not find their chunk.
    pub misses: u64,
    /// Chunks inserted.
    pub inserts: u64,
    /// Chunks that were not inserted for lack of space, or by a write error.
    pub refusals: u64,
    /// Chunks evicted.
    pub evictions: u64,
    /// Chunks that were found damaged or lost, and dropped.
    pub damaged: u64,
}

/// Counters of events.
#[derive(Debug, Default)]
struct Counters {
    hits: AtomicU64,
    misses: AtomicU64,
    inserts: AtomicU64,
    refusals: AtomicU64,
    damaged: AtomicU64,
}

/// The journal; none while it cannot be written: it must then be rewritten before it is continued.
#[derive(Debug)]
struct Writing {
    journal: Option<Journal>,
    /// Time of the last failure to write it, if it could not be written since.
    failed: Option<Instant>,
}

/// A cache on this node's disk, open in one process at a time; see the module for its guarantees.
#[derive(Debug)]
pub struct Cache {
    dir: PathBuf,
    identity: Identity,
    medium: Arc<dyn Medium>,
    slabs: Slabs,
    slabs_max: usize,
    free_floor: u64,
    tenant_quotas: TenantQuotas,
    /// Held while a tenant gets its number. Lock order: before the state.
    tenant_work: Mutex<()>,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
    /// Lock order: before the state.
    writing: Mutex<Writing>,
    /// Held while slabs are added, cleared or removed. Lock order: before both others.
    slab_work: Mutex<()>,
    /// Held while the file of an existing pin changes.
    pin_work: Mutex<()>,
    /// Held while the limit of a caller's pins is checked and used.
    limit_work: Mutex<()>,
    /// Turn of those who wait for that.
    limit_turns: Arc<Semaphore>,
    /// Bytes inserted since the last check of the free space.
    unwatched: AtomicU64,
    counters: Counters,
    lock: File,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Cache {
    /// Folder.
    #[must_use]
    pub fn dir(&self) -> &std::path::Path {
        &self.dir
    }

    /// Problem of the folder: it was removed, or another one is in its place, and chunks and pins are kept nowhere once this process
    /// ends. Blocking.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        let identity = |found: std::fs::Metadata| (found.dev(), found.ino());
        let there = std::fs::metadata(self.dir.join("lock")).map(identity);
        if there.is_ok_and(|there| self.lock.metadata().is_ok_and(|own| identity(own) == there)) {
            return None;
        }
        Some(format!(
            "the folder {} was removed or replaced: pins cannot be written, and a restart finds no chunk; put it back, or restart",
            self.dir.display()
        ))
    }

    /// Figures.
    #[must_use]
    pub fn stat(&self) -> CacheStat {
        let journal_bytes = self.writing().journal.as_ref().map_or(0, Journal::len);
        let counted = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let state = self.state();
        CacheStat {
            chunks: state.queue.len(),
            bytes: state.allocator.taken() * UNIT,
            slab_bytes: state.allocator.total() * UNIT,
            capacity: self.slabs_max as u64 * self.identity.slab_len,
            pinned_bytes: state.queue.held_weight() * UNIT,
            promised_bytes: state.ledger.weight() * UNIT,
            pins: state.ledger.pins().count() as u64,
            journal_bytes,
            hits: counted(&self.counters.hits),
            misses: counted(&self.counters.misses),
            inserts: counted(&self.counters.inserts),
            refusals: counted(&self.counters.refusals),
            evictions: state.evictions,
            damaged: counted(&self.counters.damaged),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn writing(&self) -> MutexGuard<'_, Writing> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
