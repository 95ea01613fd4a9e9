//! Sources of chunks besides a repository's packs: a cache, peers, an agent that has both.

use std::fmt;
use std::ops::AddAssign;
use std::sync::Arc;

use async_trait::async_trait;
use serde::Serialize;

use crate::codec::Encoded;
use crate::repository::{Repository, Saved};

/// Takes a frame: the chunk's number as [`Saved::locate`] counts, and the chunk as it is stored there.
pub type FramePlace<'a> = &'a mut (dyn FnMut(u32, &Encoded) + Send);

/// Stored bytes by where they came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SourceBytes {
    /// The agent of this node, which reports by itself what it brought for that.
    pub agent: u64,
    /// The cache of this process.
    pub cache: u64,
    /// Agents of the same site.
    pub site: u64,
    /// Agents of other sites.
    pub remote: u64,
    /// The repository, gaps between chunks included.
    pub repository: u64,
}

impl SourceBytes {
    /// Bytes of the repository alone.
    #[must_use]
    pub fn of_repository(repository: u64) -> Self {
        Self { repository, ..Self::default() }
    }

    /// All of them.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.agent + self.cache + self.site + self.remote + self.repository
    }
}

impl AddAssign for SourceBytes {
    fn add_assign(&mut self, more: Self) {
        self.agent += more.agent;
        self.cache += more.cache;
        self.site += more.site;
        self.remote += more.remote;
        self.repository += more.repository;
    }
}

/// A place that holds stored chunks, or can bring them from somewhere near. What it gives is verified like what a pack gives, by
/// whoever decodes it.
#[async_trait]
pub trait ChunkSource: fmt::Debug + Send + Sync {
    /// Hands those of `chunks`, of a tree in `repository`, that it has or can bring to `place`, in any order, each at most once.
    /// Chunks that it does not give, or gives stored in another way than the map of `saved` says, are read from the repository;
    /// so it has no errors, only a log. Bases are among `chunks` where they are needed.
    ///
    /// # Cancel safety
    /// Must be safe.
    async fn frames(
        &self,
        repository: &Repository,
        saved: &Arc<Saved>,
        chunks: &[u32],
        place: FramePlace<'_>,
    ) -> SourceBytes;
}
