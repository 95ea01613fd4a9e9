//! What a provider needs of whoever holds chunks: the cache, a repository, a test's memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;

use super::Wire;
use super::identity::Identity;
use super::peers::Carrier;
use super::protocol::limits::AHEAD_MAX;
use super::protocol::{Asked, Grant, Supply, Survey};
use crate::budget::Budget;
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

    /// What a connection that begins may read ahead.
    fn seat(&self) -> Seat {
        Seat::default()
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

/// Memory for what is read ahead of what is sent, divided evenly among the connections that are asked for something.
#[derive(Debug)]
pub struct Ahead {
    memory: Budget,
    asked: AtomicU64,
}

impl Ahead {
    /// All of `memory`.
    #[must_use]
    pub fn new(memory: Budget) -> Arc<Self> {
        Arc::new(Self { memory, asked: AtomicU64::new(0) })
    }

    /// For a connection that is not asked for anything yet.
    #[must_use]
    pub fn seat(self: &Arc<Self>) -> Seat {
        Seat { ahead: Some(Arc::clone(self)), asked: false }
    }
}

/// One connection's part of it; without one, as much as the protocol allows.
#[derive(Debug, Default)]
pub struct Seat {
    ahead: Option<Arc<Ahead>>,
    asked: bool,
}

impl Seat {
    /// Bytes that it may have read ahead, now that it `is_asked` for something, or is not.
    pub(super) fn share(&mut self, is_asked: bool) -> u64 {
        let Some(ahead) = &self.ahead else { return AHEAD_MAX };
        match (std::mem::replace(&mut self.asked, is_asked), is_asked) {
            (false, true) => ahead.asked.fetch_add(1, Ordering::Relaxed),
            (true, false) => ahead.asked.fetch_sub(1, Ordering::Relaxed),
            _ => 0,
        };
        (ahead.memory.total() / ahead.asked.load(Ordering::Relaxed).max(1)).min(AHEAD_MAX)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.share(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::MEMORY_MIN;

    #[test]
    fn memory_is_divided_among_those_that_are_asked() {
        let ahead = Ahead::new(Budget::new(MEMORY_MIN).unwrap());
        let mut seats: Vec<Seat> = (0..16).map(|_| ahead.seat()).collect();
        assert_eq!(seats[0].share(true), AHEAD_MAX, "nobody else is asked");
        let shares: Vec<u64> = seats.iter_mut().map(|seat| seat.share(true)).collect();
        assert_eq!((shares[1], shares[15]), (AHEAD_MAX, MEMORY_MIN / 16));
        seats.truncate(10);
        seats[9].share(false);
        assert_eq!(seats[0].share(true), MEMORY_MIN / 9);
        drop(seats);
        assert_eq!(ahead.asked.load(Ordering::Relaxed), 0);
        assert_eq!(Seat::default().share(true), AHEAD_MAX);
    }
}
