//! What is nearer than a repository's packs: a cache, peers, an agent that has both.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;

use crate::codec::Encoded;
use crate::repository::{Repository, Saved};

/// Takes a frame: the chunk's number as [`Saved::locate`] counts, and the chunk as it is stored there.
pub type Place<'a> = &'a mut (dyn FnMut(u32, &Encoded) + Send);

/// A place that holds stored chunks, or can bring them from somewhere near. What it gives is verified like what a pack gives, by
/// whoever decodes it.
#[async_trait]
pub trait ChunkSource: fmt::Debug + Send + Sync {
    /// Hands those of `chunks`, of a tree in `repository`, that it has or can bring to `place`, in any order, each at most once.
    /// What it does not give, and what it gives stored in another way than the map of `saved` says, is read from the repository;
    /// so it has no errors, only a log. Bases are among `chunks` where they are needed.
    ///
    /// # Cancel safety
    /// Must be safe.
    async fn frames(&self, repository: &Repository, saved: &Arc<Saved>, chunks: &[u32], place: Place<'_>);
}
