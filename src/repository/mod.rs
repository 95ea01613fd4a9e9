//! Repository: durable storage of content in one object store.
//!
//! Writing: [`Writer`] writes chunks to packs under a session, and publishes a name by one commit of the [`log`]. Reading:
//! [`Saved`] is a name's manifest and map; [`fetch()`] reads chunks by few ranged reads and verifies them. Each rank that saves a
//! step together with others writes a [`RankPart`]. [`StoredChunks`] finds chunks that are stored already. [`Run`] orders the
//! steps of a training run.

mod audit_heads;
pub mod collect;
#[cfg(test)]
pub(crate) mod faults;
mod fetch;
mod filling;
mod footers;
mod guard;
mod index;
mod inventories;
mod joint;
pub mod layout;
mod listing;
pub mod log;
mod mapping;
mod missing;
mod name_scope;
mod objects;
mod open;
mod policy;
mod presence;
mod readable;
mod repair;
mod runs;
mod saved;
mod stored_chunks;
pub(crate) mod travel;
mod unindexed;
mod upload_throughput;
#[cfg(feature = "agent")]
mod usage;
mod writer;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tokio::time::Instant;

pub use fetch::{
    ANEW_MAX, ChunkSink, ChunkSource, Delivered, Fill, FramePlace, Gaps, Located, PackPart, PackRead, PlannedChunk,
    Sink, SourceBytes, Stored, StoredChunk, deliver, fetch, longest_read, plan, plan_anew, read_pack,
};
pub(crate) use guard::is_open;
pub use guard::{Access, Destination, Guard, Unidentified};
pub use index::{BadSegment, Index, IndexedPacks, Segment, SegmentAudit};
pub use joint::{AttemptState, Completed, JointTree, Parts, RankPart};
pub(crate) use missing::absent_name;
pub use missing::no_such_name;
pub use name_scope::NameScope;
pub(crate) use objects::twice_if;
pub use repair::RepairedTree;

#[cfg(feature = "agent")]
pub use inventories::StoredInventory;
pub use mapping::PlacedTree;
pub(crate) use open::default_cache;
pub use policy::PolicyText;
pub use presence::Announced;
pub use readable::{ReadableNames, choose_readable};
pub use runs::{Run, Step};
pub use saved::Saved;
pub use stored_chunks::{ChunkPlace, StoredChunks};
pub use travel::{AloneLen, Held, TRAVEL_WEIGHT, Travel, TravelNode, TravelPlan, TravelTree, decide, plan_travel};
pub use upload_throughput::UploadThroughput;
#[cfg(feature = "agent")]
pub use usage::StoredUsage;
pub use writer::{Publication, Published, Writer};

use crate::budget::Budget;
use crate::clock::Clock;
use crate::error::Result;
use crate::id::RepositoryId;
use crate::policy::LocalCaller;
use crate::single_flight::SingleFlight;
use crate::storage::Store;

/// Options to open a repository with.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// Memory budget in bytes; by default from the cgroup ([`Budget::default_bytes`]).
    pub memory: Option<u64>,
    /// Folder for index segments and stat caches, which make later commands faster; by default the user's cache folder. It may be
    /// deleted at any time.
    pub cache: Option<PathBuf>,
    /// Decides what may move; by default [`Unidentified`]: content with labels stays.
    pub guard: Option<Arc<dyn Guard>>,
}

/// An open repository. Clones share its state.
#[derive(Clone, Debug)]
pub struct Repository {
    shared: Arc<Shared>,
    source: Option<Arc<dyn ChunkSource>>,
    caller: Option<Arc<LocalCaller>>,
}

#[derive(Debug)]
struct Shared {
    id: RepositoryId,
    store: Store,
    log: log::Log,
    log_reads: SingleFlight<(), (Instant, Arc<log::State>)>,
    clock: Arc<dyn Clock>,
    budget: Budget,
    cache: PathBuf,
    /// Set after the warning that the local cache cannot be written.
    uncached: AtomicBool,
    segments: index::Loaded,
    footers: footers::Footers,
    guard: Arc<dyn Guard>,
    policy: policy::PolicyCache,
}

impl Repository {
    /// Permanent id, independent of its location.
    #[must_use]
    pub fn id(&self) -> RepositoryId {
        self.shared.id
    }

    /// Store of the repository.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.shared.store
    }

    /// Log of the repository.
    #[must_use]
    pub fn log(&self) -> &log::Log {
        &self.shared.log
    }

    /// Memory budget that all operations share.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.shared.budget
    }

    /// Clock that it was opened with.
    #[must_use]
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.shared.clock
    }

    /// Folder of this repository in the local cache.
    #[must_use]
    pub fn cache(&self) -> &Path {
        &self.shared.cache
    }

    /// The same repository with a nearer `source` of chunks; chunks that the source lacks are read from the packs.
    #[must_use]
    pub fn with_source(&self, source: Arc<dyn ChunkSource>) -> Self {
        Self { source: Some(source), ..self.clone() }
    }

    /// The same repository, for requests of `caller`: rules of the policy may be about whoever asks on this machine.
    #[must_use]
    pub fn for_caller(&self, caller: Option<LocalCaller>) -> Self {
        Self { caller: caller.map(Arc::new), ..self.clone() }
    }

    /// Whoever asks, if that is known.
    #[must_use]
    pub fn caller(&self) -> Option<&LocalCaller> {
        self.caller.as_deref()
    }

    /// Source of chunks that is nearer than the packs.
    #[must_use]
    pub fn source(&self) -> Option<&Arc<dyn ChunkSource>> {
        self.source.as_ref()
    }

    /// Current state.
    ///
    /// # Errors
    /// As [`log::Log::refresh`].
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn state(&self) -> Result<Arc<log::State>> {
        self.shared.log.refresh().await
    }

    /// State as of `since` or later; without `since`, the state that was read last. All who wait share a read of the log: for callers
    /// whose number and rate nobody bounds. Needs a runtime.
    ///
    /// # Errors
    /// As [`Repository::state`].
    ///
    /// # Cancel safety
    /// Safe: a read that has begun goes on.
    pub async fn state_since(&self, since: Option<Instant>) -> Result<Arc<log::State>> {
        if let Some(state) = self.log().seen_since(since) {
            return Ok(state);
        }
        loop {
            let repository = self.clone();
            let read = || async move {
                let began = Instant::now();
                Ok((began, repository.state().await?))
            };
            let (began, state) = self.shared.log_reads.get(&(), read).await?;
            // The shared read may have begun before `since`.
            if since.is_none_or(|since| began >= since) {
                return Ok(state);
            }
        }
    }

    /// Number of concurrent requests: few for a disk, many for a network.
    #[must_use]
    pub fn parallelism(&self) -> usize {
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        if self.store().is_local() { 2 * cores } else { (cores * 4).max(16) }
    }
}
