//! What a provider needs of whoever holds chunks: the cache, a repository, a test's memory.

use std::sync::Arc;

use async_trait::async_trait;

use super::Wire;
use super::identity::Identity;
use super::peers::Carrier;
use super::protocol::{Asked, Grant, Supply, Survey};
use crate::error::Result;
use crate::id::{ChunkId, ManifestId};

/// Chunks that can be served to peers.
#[async_trait]
pub trait Holdings: Send + Sync + 'static {
    /// A connection with `identity` begins; `wire` counts what it carries.
    fn opened(&self, identity: &Identity, carrier: Carrier, wire: Arc<Wire>) {
        let _ = (identity, carrier, wire);
    }

    /// `identity` calls; `wire` counts what that carries.
    fn called(&self, identity: &Identity, wire: Arc<Wire>) {
        let _ = (identity, wire);
    }

    /// The chunks that `identity` may read by way of `manifest`; None if there is no such manifest here, or none that it
    /// may read: who asks gets the same answer to both, and after about the same time if this takes care.
    ///
    /// # Cancel safety
    /// Must be safe: a connection that ends drops it.
    async fn authorise(&self, identity: &Identity, manifest: &ManifestId) -> Result<Option<Arc<Grant>>>;

    /// Bytes of chunks that have come from further away so far: while that grows, whoever waits for one need not give up.
    fn brought(&self) -> u64 {
        0
    }

    /// Which chunks of `grant` are held, from place `from` on. It may stop early and say where.
    ///
    /// # Cancel safety
    /// Must be safe.
    async fn survey(&self, grant: &Grant, from: u32) -> Result<Survey>;

    /// The chunk `id`, which `asked` wants and a grant to `identity` covers, as it is stored; None if it is not held (any more).
    ///
    /// # Cancel safety
    /// Must be safe.
    async fn frame(&self, identity: &Identity, asked: &Asked, id: &ChunkId) -> Result<Option<Supply>>;
}
