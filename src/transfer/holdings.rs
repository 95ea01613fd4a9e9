//! Interface of a provider to its chunks: the cache, a repository, a test's memory.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::ByteCounters;
use super::protocol::limits::AHEAD_MAX;
use super::protocol::{Asked, Grant, Supply, Survey};
use super::transport::Transport;
use crate::budget::{Budget, Room};
use crate::error::{Error, Result};
use crate::id::{ChunkId, ManifestId};
use crate::identity::Identity;
use crate::limits::KIB;
use crate::policy::Route;

/// Unit in bytes in which the memory of an agent's frames is counted.
const UNIT: u64 = 4 * KIB;

/// Chunks that can be served to peers.
#[async_trait]
pub trait Holdings: Send + Sync + 'static {
    /// Called when a connection with `identity` begins; `wire` counts its bytes.
    fn opened(&self, identity: &Identity, transport: Transport, wire: Arc<ByteCounters>) {
        let _ = (identity, transport, wire);
    }

    /// Called when `identity` makes a call; `wire` counts its bytes.
    fn called(&self, identity: &Identity, wire: Arc<ByteCounters>) {
        let _ = (identity, wire);
    }

    /// Memory share for frames of a new connection with `identity`.
    fn seat(&self, identity: &Identity) -> Seat {
        let _ = identity;
        Seat::default()
    }

    /// Chunks that `identity` may read through `manifest`; None if there is no such manifest, or none that it may read:
    /// both get the same answer, after about the same time if the implementation takes care.
    ///
    /// # Cancel safety
    /// Must be safe: a connection that ends drops it.
    async fn authorise(&self, identity: &Identity, manifest: &ManifestId) -> Result<Option<Arc<Grant>>>;

    /// [`Holdings::authorise`] for a peer whose answers take `route`.
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
    fn brought(&self) -> u64 {
        0
    }

    /// Chunks of `grant` that are held, from place `from` on. It may stop early and return where.
    ///
    /// # Cancel safety
    /// Must be safe.
    async fn survey(&self, grant: &Grant, from: u32) -> Result<Survey>;

    /// Chunk `id` in its stored form, which `asked` requests and a grant to `identity` covers; None if it is not held
    /// (any more).
    ///
    /// # Cancel safety
    /// Must be safe.
    async fn frame(&self, identity: &Identity, asked: &Asked, id: &ChunkId) -> Result<Option<Supply>>;

    /// [`Holdings::frame`] for a peer whose answers take `route`.
    ///
    /// # Cancel safety
    /// Must be safe.
    async fn frame_over(
        &self,
        identity: &Identity,
        route: Route,
        asked: &Asked,
        id: &ChunkId,
    ) -> Result<Option<Supply>> {
        let _ = route;
        self.frame(identity, asked, id).await
    }
}

/// Memory for frames that are read and not yet written to a connection. Connections with open requests have equal
/// shares to read ahead; all frames together fit the memory, and those of one agent half of it, over all of its
/// connections.
#[derive(Debug)]
pub struct Ahead {
    memory: Budget,
    asked: AtomicU64,
    agents: Mutex<HashMap<Option<Identity>, Weak<Semaphore>>>,
}

impl Ahead {
    /// Creates it with all of `memory`.
    #[must_use]
    pub fn new(memory: Budget) -> Arc<Self> {
        Arc::new(Self { memory, asked: AtomicU64::new(0), agents: Mutex::default() })
    }

    /// Share of a connection of `agent`, or of a process of this node.
    #[must_use]
    pub fn seat(self: &Arc<Self>, agent: Option<&Identity>) -> Seat {
        let mut agents = self.agents.lock().unwrap_or_else(PoisonError::into_inner);
        let own = agents.get(&agent.cloned()).and_then(Weak::upgrade).unwrap_or_else(|| {
            agents.retain(|_, semaphore| semaphore.strong_count() > 0);
            let own = Arc::new(Semaphore::new(self.units_per_agent()));
            agents.insert(agent.cloned(), Arc::downgrade(&own));
            own
        });
        Seat { ahead: Some(Arc::clone(self)), own, asked: false }
    }

    fn units_per_agent(&self) -> usize {
        usize::try_from(self.memory.total() / 2 / UNIT).unwrap_or(usize::MAX).clamp(1, Semaphore::MAX_PERMITS)
    }
}

/// Share of one connection in [`Ahead`]; the default has only the protocol's limit.
#[derive(Debug)]
pub struct Seat {
    ahead: Option<Arc<Ahead>>,
    /// Memory of all frames of its agent, in units.
    own: Arc<Semaphore>,
    asked: bool,
}

/// Memory for one frame, released on drop.
#[derive(Debug)]
struct Held {
    room: Room,
    _own: OwnedSemaphorePermit,
}

impl Default for Seat {
    fn default() -> Self {
        Self { ahead: None, own: Arc::new(Semaphore::new(0)), asked: false }
    }
}

impl Seat {
    /// Bytes that the connection may read ahead; `is_asked` is true if it has open requests for frames.
    pub(super) fn share(&mut self, is_asked: bool) -> u64 {
        let Some(ahead) = &self.ahead else { return AHEAD_MAX };
        match (std::mem::replace(&mut self.asked, is_asked), is_asked) {
            (false, true) => ahead.asked.fetch_add(1, Ordering::Relaxed),
            (true, false) => ahead.asked.fetch_sub(1, Ordering::Relaxed),
            _ => 0,
        };
        (ahead.memory.total() / ahead.asked.load(Ordering::Relaxed).max(1)).min(AHEAD_MAX)
    }

    /// Result of `read`, which makes a frame of at most `bytes` bytes; starts once there is memory for it. The frame's
    /// bytes hold that memory until their last clone is dropped.
    ///
    /// # Errors
    /// As `read`.
    ///
    /// # Cancel safety
    /// As `read`: a dropped wait holds nothing.
    pub(super) fn within<F>(&self, bytes: u64, read: F) -> impl Future<Output = Result<Option<Supply>>> + Send + use<F>
    where
        F: Future<Output = Result<Option<Supply>>> + Send,
    {
        let (ahead, own) = (self.ahead.clone(), Arc::clone(&self.own));
        async move {
            let Some(ahead) = ahead else { return read.await };
            let units = usize::try_from(bytes.div_ceil(UNIT)).unwrap_or(usize::MAX).clamp(1, ahead.units_per_agent());
            let own = own.acquire_many_owned(u32::try_from(units).unwrap_or(u32::MAX)).await;
            let own = own.map_err(|_| Error::other("memory for frames was closed"))?;
            let mut held = Held { room: ahead.memory.room(bytes).await?, _own: own };
            let found = read.await?;
            Ok(found.map(|supply| {
                held.room.shrink(supply.encoded.bytes.len() as u64);
                supply.holding(held)
            }))
        }
    }
}

impl Supply {
    /// The frame, with bytes that own `held`.
    fn holding(mut self, held: Held) -> Self {
        self.encoded.bytes = Bytes::from_owner(Holding { bytes: self.encoded.bytes, _held: held });
        self
    }
}

/// Bytes that own the memory they count as.
struct Holding {
    bytes: Bytes,
    _held: Held,
}

impl AsRef<[u8]> for Holding {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.share(false);
    }
}

#[cfg(test)]
mod tests {
    use futures::poll;

    use super::*;
    use crate::codec::{Codec, Encoded};
    use crate::limits::MEMORY_MIN;

    #[test]
    fn memory_is_divided_among_those_that_are_asked() {
        let ahead = Ahead::new(Budget::new(MEMORY_MIN).unwrap());
        let mut seats: Vec<Seat> = (0..16).map(|_| ahead.seat(None)).collect();
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

    fn supply(len: usize) -> Supply {
        let encoded = Encoded { codec: Codec::Raw, bytes: vec![0; len].into(), base: None };
        Supply { encoded, plain_len: 0 }
    }

    #[tokio::test]
    async fn frames_of_one_agent_take_half_of_the_memory_over_all_of_its_connections() {
        let ahead = Ahead::new(Budget::new(MEMORY_MIN).unwrap());
        let agent = |name: &str| Identity::new("site", name).unwrap();
        let quarter = MEMORY_MIN / 4;
        let len = usize::try_from(quarter).unwrap();
        let seats = [0, 1, 2].map(|_| ahead.seat(Some(&agent("a"))));
        let first = seats[0].within(quarter, async { Ok(Some(supply(len))) }).await.unwrap().unwrap();
        let second = seats[1].within(quarter, async { Ok(Some(supply(len))) }).await.unwrap().unwrap();
        let mut third = Box::pin(seats[2].within(1, async { Ok(Some(supply(1))) }));
        assert!(poll!(&mut third).is_pending(), "its memory is taken");
        let other = ahead.seat(Some(&agent("b")));
        let held = other.within(2 * quarter, async { Ok(Some(supply(2 * len))) }).await.unwrap();
        assert!(
            poll!(Box::pin(ahead.seat(None).within(1, async { Ok(Some(supply(1))) }))).is_pending(),
            "all memory is taken"
        );
        // A slice of the bytes owns it as well.
        let rest = first.encoded.bytes.slice(1..);
        drop(first);
        assert!(poll!(&mut third).is_pending());
        drop(rest);
        let third = third.await.unwrap();
        drop((held, second, third, seats, other));
        // A frame longer than the whole memory goes alone; one that turns out shorter releases the difference.
        let seat = ahead.seat(Some(&agent("a")));
        let short = seat.within(u64::MAX, async { Ok(Some(supply(1))) }).await.unwrap();
        let most = MEMORY_MIN - UNIT;
        assert!(poll!(Box::pin(ahead.seat(None).within(most, async { Ok(Some(supply(1))) }))).is_ready());
        drop((short, seat));
        drop(ahead.seat(None));
        assert_eq!(ahead.agents.lock().unwrap().len(), 1, "agents without a connection are forgotten");
    }
}
