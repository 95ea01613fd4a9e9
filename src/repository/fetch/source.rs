//! Sources of chunks other than the repository's packs: a cache, peers, or an agent with both.

use std::fmt;
use std::ops::AddAssign;
use std::sync::Arc;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use crate::chunk::Chunk;
use crate::codec::Encoded;
use crate::id::ChunkId;
use crate::repository::{Repository, Saved};

/// Consumer of frames: the chunk's number as [`Saved::locate`] counts, and the encoded chunk.
pub type FramePlace<'a> = &'a mut (dyn FnMut(u32, &Encoded) + Send);

/// Stored bytes by where they came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceBytes {
    /// The agent of this node, which reports separately what it fetched for that.
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

    /// Bytes of all sources.
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

/// A source of encoded chunks that is nearer than the repository. The decoder verifies its chunks like those from packs.
#[async_trait]
pub trait ChunkSource: fmt::Debug + Send + Sync {
    /// Passes the `chunks` of a tree in `repository` that it has, or can fetch, to `place`, in any order: as they are stored there, or
    /// without a base. It may pass bases, too; those that it does not pass and that a chunk needs are asked for next. All other
    /// chunks are read from the repository, so this has no errors; it only logs them.
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

    /// Reads a chunk that it has on this machine, not encoded, to `out`, and verifies it there; none, with arbitrary bytes in `out`, if
    /// it cannot. Blocks.
    fn read_raw<'a>(&self, id: &ChunkId, out: &'a mut [u8]) -> Option<Chunk<'a>> {
        let _ = (id, out);
        None
    }
}
