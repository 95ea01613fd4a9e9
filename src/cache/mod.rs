//! The cache: chunks on this node's disk, pinned or evictable, as the frames that they are stored and travel as.
//!
//! ```text
//! DIR/cache          what this cache is: unit, length of a slab, id, secret (identity.rs)
//! DIR/lock           whose it is now
//! DIR/slab-000000..  preallocated files of one length, in which extents lie: a header and a frame each (extent.rs)
//! DIR/journal        which chunk lies where: records of 20 bytes (journal/)
//! DIR/pins/ULID      one promise each (pins/)
//! ```
//!
//! **No wrong byte.** An extent proves by itself that it is whole and which chunk it is, so the journal is only a hint: whatever
//! is lost, torn, stale or damaged, the worst is a miss. Going in, a [`Frame`] has been decoded to its chunk; coming out, the
//! digest over it is checked on every read. A damaged one is dropped, counted, and a miss.
//!
//! **Order.** An insert takes units, tells the journal what was evicted for them, writes the extent, then enters it in the index
//! and the journal. So when the process is killed at any moment, everything in the journal is on the disk, unless it was being
//! evicted. Nothing is synced on the way: a power loss costs what was written last, as misses; [`Cache::sync`] is for whoever
//! wants more. Pins are synced before they are promised.
//!
//! **Who waits for whom.** Every function here blocks on the disk: call it from a blocking thread. All of them may be called by any
//! number of threads. The index has one lock, held for lookups and decisions (microseconds), never during I/O. The journal is
//! rewritten once for as many changes as there are chunks: inserts wait for all of that, reads while the chunks are listed (about
//! 0.05 s for each million).
//!
//! **Full.** What goes is decided by S3-FIFO (queue/) and where what comes goes by first fit (room/). A disk that is full, or has
//! less than the floor free, makes the cache smaller, never an error.

mod allocator;
mod check;
mod extent;
mod fill;
mod frame;
mod identity;
mod journal;
mod medium;
mod open;
mod pin;
mod pins;
mod queue;
mod read;
mod slabs;
mod space;
mod state;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use self::allocator::UNIT;
pub use self::check::{Checked, Damage};
pub use self::fill::{Inserted, Refusal};
pub use self::frame::Frame;
use self::identity::Identity;
use self::journal::Journal;
use self::medium::Medium;
pub use self::pins::{Pin, PinChunk, PinLimit, PinRequest, Pinned};
use self::slabs::Slabs;
use self::state::State;
use crate::clock::{Clock, SystemClock};
use crate::limits::GIB;

/// Size limits of a cache.
#[derive(Clone, Debug)]
pub struct CacheOptions {
    /// Bytes on the disk, at most, besides the journal and pins; used in whole slabs, and up to 16 TiB.
    pub capacity: u64,
    /// Bytes that stay free on the disk whatever the capacity; 1 GiB by default.
    pub free_floor: u64,
    /// Bytes in a slab of a cache that is new: by default a 128th of the capacity, as a power of two from 32 MiB to 16 GiB.
    pub slab_len: Option<u64>,
    /// Clock for the expiry of pins.
    pub clock: Arc<dyn Clock>,
}

impl CacheOptions {
    /// Up to `capacity` bytes.
    #[must_use]
    pub fn new(capacity: u64) -> Self {
        Self { capacity, free_floor: GIB, slab_len: None, clock: Arc::new(SystemClock) }
    }
}

/// Figures of a cache; those of events count since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheStat {
    /// Chunks in it.
    pub chunks: u64,
    /// Bytes they take on the disk, with what is being written.
    pub bytes: u64,
    /// Bytes of the slabs that there are.
    pub slab_bytes: u64,
    /// Bytes that it may grow to, unless the disk is short.
    pub capacity: u64,
    /// Bytes that pinned chunks take.
    pub pinned_bytes: u64,
    /// Bytes that pinned chunks will take once all are there.
    pub promised_bytes: u64,
    /// Pins.
    pub pins: u64,
    /// Bytes of the journal.
    pub journal_bytes: u64,
    /// Reads that found their chunk.
    pub hits: u64,
    /// Reads that did not.
    pub misses: u64,
    /// Chunks put in.
    pub inserts: u64,
    /// Chunks that there was no room for, or that could not be written.
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

/// The journal, or nothing while it cannot be written: it then is behind, and has to be rewritten before it is continued.
#[derive(Debug)]
struct Writing {
    journal: Option<Journal>,
    /// Flushes since it could not be written.
    failed: u64,
}

/// Chunks on this node's disk. One process has it open at a time; see the module for what it promises.
#[derive(Debug)]
pub struct Cache {
    dir: PathBuf,
    identity: Identity,
    medium: Arc<dyn Medium>,
    slabs: Slabs,
    slabs_max: usize,
    free_floor: u64,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
    /// Taken before the state where both are needed.
    writing: Mutex<Writing>,
    /// Held while slabs are added, cleared or taken away; before both others.
    slab_work: Mutex<()>,
    /// Bytes put in since the floor was last looked at.
    unwatched: AtomicU64,
    counters: Counters,
    _lock: File,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Cache {
    /// Its folder.
    #[must_use]
    pub fn dir(&self) -> &std::path::Path {
        &self.dir
    }

    /// Its figures.
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
