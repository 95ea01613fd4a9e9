//! The durable home of content in one object store.
//!
//! Writing: [`Writer`] lays chunks into packs under a session and publishes a name by one commit of the [`log`].
//! Reading: [`Saved`] is a name's manifest and map; [`fetch()`] turns chunks into few ranged reads and hands out what was
//! verified. Ranks that save one step put a [`RankPart`] each. [`StoredChunks`] answers "is this chunk here already, and where". [`Run`] orders a training run's names.

pub mod collect;
mod fetch;
mod footers;
mod index;
mod joint;
pub mod layout;
pub mod log;
mod mapping;
mod mend;
mod missing;
mod name;
mod objects;
mod open;
mod presence;
mod runs;
mod saved;
mod stored_chunks;
mod taken;
mod unindexed;
mod writer;

use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use fetch::{
    Brought, ChunkSource, Delivered, Fill, FramePlace, Gaps, Located, PackPart, PackRead, Sink, SourceBytes, Stored,
    Take, deliver, fetch, longest_read, plan, read_pack,
};
pub use index::{BadSegment, Index, IndexedPacks, Segment, SegmentAudit};
pub use joint::{Completed, JointTree, Parts, RankPart, Standing};
pub use mend::Mended;
pub use missing::no_such_name;
pub use name::Name;
pub use presence::Announced;
pub use runs::{Choice, Run, Selector, Step};
pub use saved::Saved;
pub use stored_chunks::{ChunkPlace, StoredChunks};
pub use taken::Taken;
pub use writer::{Publication, Published, Writer};

use crate::budget::Budget;
use crate::clock::Clock;
use crate::error::Result;
use crate::id::RepositoryId;
use crate::storage::Store;

/// Options to open a repository with.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// The memory budget in bytes; by default from the cgroup ([`Budget::default_bytes`]).
    pub memory: Option<u64>,
    /// Folder for index segments and stat caches, which make later commands faster; by default the user's cache folder. Losing it
    /// costs time, nothing else.
    pub cache: Option<PathBuf>,
}

/// A repository. Clones share it.
#[derive(Clone, Debug)]
pub struct Repository {
    shared: Arc<Shared>,
    source: Option<Arc<dyn ChunkSource>>,
}

#[derive(Debug)]
struct Shared {
    id: RepositoryId,
    store: Store,
    log: log::Log,
    clock: Arc<dyn Clock>,
    budget: Budget,
    cache: PathBuf,
    segments: index::Loaded,
    footers: footers::Footers,
}

impl Repository {
    /// Its name for ever, whatever its address.
    #[must_use]
    pub fn id(&self) -> RepositoryId {
        self.shared.id
    }

    /// The store it lives in.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.shared.store
    }

    /// Its log.
    #[must_use]
    pub fn log(&self) -> &log::Log {
        &self.shared.log
    }

    /// The memory budget that its operations share.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.shared.budget
    }

    /// The clock it was opened with.
    #[must_use]
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.shared.clock
    }

    /// This repository's own folder in the local cache.
    #[must_use]
    pub fn cache(&self) -> &Path {
        &self.shared.cache
    }

    /// The same repository, whose chunks are taken from `source` first; what does not come from there is read from the packs.
    #[must_use]
    pub fn with_source(&self, source: Arc<dyn ChunkSource>) -> Self {
        Self { shared: Arc::clone(&self.shared), source: Some(source) }
    }

    /// Source nearer than its packs.
    #[must_use]
    pub fn source(&self) -> Option<&Arc<dyn ChunkSource>> {
        self.source.as_ref()
    }

    /// The state as of now.
    ///
    /// # Errors
    /// As [`log::Log::refresh`].
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn state(&self) -> Result<Arc<log::State>> {
        self.shared.log.refresh().await
    }

    /// Requests worth having in flight at once: a disk is kept busy by few, a network by many.
    #[must_use]
    pub fn parallelism(&self) -> usize {
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        if self.store().is_local() { 2 * cores } else { (cores * 4).max(16) }
    }
}
