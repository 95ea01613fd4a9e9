//! Interface of a provider to its chunks: the cache, a repository, a test's memory.

use std::sync::Arc;

use async_trait::async_trait;

use super::protocol::{AskedChunk, FrameRequest, Grant, OutgoingFrame, Survey};
use super::transport::Transport;
use super::{ByteCounters, ReadAheadShare};
use crate::error::Result;
use crate::id::ManifestId;
use crate::identity::Identity;
use crate::policy::Route;

/// Chunks that can be served to peers.
#[async_trait]
pub trait ServedChunks: Send + Sync + 'static {
    /// Called when a connection with `identity` begins; `wire` counts its bytes.
    fn opened(&self, identity: &Identity, transport: Transport, wire: Arc<ByteCounters>) {
        let _ = (identity, transport, wire);
    }

    /// Called when `identity` makes a call; `wire` counts its bytes.
    fn called(&self, identity: &Identity, wire: Arc<ByteCounters>) {
        let _ = (identity, wire);
    }

    /// Memory share for frames of a new connection with `identity`.
    fn read_ahead_share(&self, identity: &Identity) -> ReadAheadShare {
        let _ = identity;
        ReadAheadShare::default()
    }

    /// Chunks that `identity` may read through `manifest`; None if there is no such manifest, or none that it may read:
    /// both get the same answer, after about the same time if the implementation takes care.
    ///
    /// # Cancel safety
    /// Must be safe: a connection that ends drops it.
    async fn authorise(&self, identity: &Identity, manifest: &ManifestId) -> Result<Option<Arc<Grant>>>;

    /// [`ServedChunks::authorise`] for a peer whose answers take `route`.
    ///
    /// # Cancel safety
    /// Must be safe.
    async fn authorise_over(
        &self,
        identity: &Identity,
        route: Route,
        manifest: &ManifestId,
    ) -> Result<Option<Arc<Grant>>> {
        let _ = route;
        self.authorise(identity, manifest).await
    }

    /// Bytes received from further away so far: while that grows, waiting peers need not give up.
    fn bytes_received(&self) -> u64 {
        0
    }

    /// Chunks of `grant` that are held, from place `from` on. It may stop early and return where.
    ///
    /// # Cancel safety
    /// Must be safe.
    async fn survey(&self, grant: &Grant, from: u32) -> Result<Survey>;

    /// Stored form of `chunk`, which `asked` requests and a grant to `identity` covers; None if it is not held (any more), or cannot be
    /// had without its base and must.
    ///
    /// # Cancel safety
    /// Must be safe.
    async fn frame(
        &self,
        identity: &Identity,
        asked: &FrameRequest,
        chunk: AskedChunk,
    ) -> Result<Option<OutgoingFrame>>;

    /// [`ServedChunks::frame`] for a peer whose answers take `route`.
    ///
    /// # Cancel safety
    /// Must be safe.
    async fn frame_over(
        &self,
        identity: &Identity,
        route: Route,
        asked: &FrameRequest,
        chunk: AskedChunk,
    ) -> Result<Option<OutgoingFrame>> {
        let _ = route;
        self.frame(identity, asked, chunk).await
    }
}
