//! Memory for frames that are read and not yet written to a connection, shared by all connections.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::protocol::OutgoingFrame;
use super::protocol::limits::READ_AHEAD_MAX;
use crate::budget::{Budget, Reservation};
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::limits::KIB;

/// Unit in bytes in which the memory of an agent's frames is counted.
const UNIT: u64 = 4 * KIB;

/// Memory for frames that are read and not yet written to a connection. Connections with open requests have equal
/// shares to read ahead; all frames together fit the memory, and those of one agent half of it, over all of its
/// connections.
#[derive(Debug)]
pub struct ReadAhead {
    memory: Budget,
    busy_connections: AtomicU64,
    agents: Mutex<HashMap<Option<Identity>, Weak<Semaphore>>>,
}

impl ReadAhead {
    /// Creates it with all of `memory`.
    #[must_use]
    pub fn new(memory: Budget) -> Arc<Self> {
        Arc::new(Self { memory, busy_connections: AtomicU64::new(0), agents: Mutex::default() })
    }

    /// Share of a connection of `agent`, or of a process of this node.
    #[must_use]
    pub fn share(self: &Arc<Self>, agent: Option<&Identity>) -> ReadAheadShare {
        let mut agents = self.agents.lock().unwrap_or_else(PoisonError::into_inner);
        let own = agents.get(&agent.cloned()).and_then(Weak::upgrade).unwrap_or_else(|| {
            agents.retain(|_, semaphore| semaphore.strong_count() > 0);
            let own = Arc::new(Semaphore::new(self.units_per_agent()));
            agents.insert(agent.cloned(), Arc::downgrade(&own));
            own
        });
        ReadAheadShare { ahead: Some(Arc::clone(self)), own, counted: false }
    }

    fn units_per_agent(&self) -> usize {
        usize::try_from(self.memory.total() / 2 / UNIT).unwrap_or(usize::MAX).clamp(1, Semaphore::MAX_PERMITS)
    }
}

/// Share of one connection in [`ReadAhead`]; the default has only the protocol's limit.
#[derive(Debug)]
pub struct ReadAheadShare {
    ahead: Option<Arc<ReadAhead>>,
    /// Memory of all frames of its agent, in units.
    own: Arc<Semaphore>,
    counted: bool,
}

/// Memory for one frame, released on drop.
#[derive(Debug)]
struct FrameMemory {
    reservation: Reservation,
    _own: OwnedSemaphorePermit,
}

impl Default for ReadAheadShare {
    fn default() -> Self {
        Self { ahead: None, own: Arc::new(Semaphore::new(0)), counted: false }
    }
}

impl ReadAheadShare {
    /// Bytes that the connection may read ahead; `has_requests` is true if it has open requests for frames.
    pub(super) fn limit(&mut self, has_requests: bool) -> u64 {
        let Some(ahead) = &self.ahead else { return READ_AHEAD_MAX };
        match (std::mem::replace(&mut self.counted, has_requests), has_requests) {
            (false, true) => ahead.busy_connections.fetch_add(1, Ordering::Relaxed),
            (true, false) => ahead.busy_connections.fetch_sub(1, Ordering::Relaxed),
            _ => 0,
        };
        (ahead.memory.total() / ahead.busy_connections.load(Ordering::Relaxed).max(1)).min(READ_AHEAD_MAX)
    }

    /// Result of `read`, which makes a frame of at most `bytes` bytes; starts once there is memory for it. The frame's
    /// bytes hold that memory until their last clone is dropped.
    ///
    /// # Errors
    /// As `read`.
    ///
    /// # Cancel safety
    /// As `read`: a dropped wait holds nothing.
    pub(super) fn within<F>(
        &self,
        bytes: u64,
        read: F,
    ) -> impl Future<Output = Result<Option<OutgoingFrame>>> + Send + use<F>
    where
        F: Future<Output = Result<Option<OutgoingFrame>>> + Send,
    {
        let (ahead, own) = (self.ahead.clone(), Arc::clone(&self.own));
        async move {
            let Some(ahead) = ahead else { return read.await };
            let units = usize::try_from(bytes.div_ceil(UNIT)).unwrap_or(usize::MAX).clamp(1, ahead.units_per_agent());
            let own = own.acquire_many_owned(u32::try_from(units).unwrap_or(u32::MAX)).await;
            let own = own.map_err(|_| Error::other("memory for frames was closed"))?;
            let mut held = FrameMemory { reservation: ahead.memory.reserve(bytes).await?, _own: own };
            let found = read.await?;
            Ok(found.map(|supply| {
                held.reservation.shrink(supply.encoded.bytes.len() as u64);
                supply.holding(held)
            }))
        }
    }
}

impl OutgoingFrame {
    /// The frame, with bytes that own `held`.
    fn holding(mut self, held: FrameMemory) -> Self {
        self.encoded.bytes = Bytes::from_owner(FrameBytes { bytes: self.encoded.bytes, _held: held });
        self
    }
}

/// Bytes that own the memory they count as.
struct FrameBytes {
    bytes: Bytes,
    _held: FrameMemory,
}

impl AsRef<[u8]> for FrameBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for ReadAheadShare {
    fn drop(&mut self) {
        self.limit(false);
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
        let ahead = ReadAhead::new(Budget::new(MEMORY_MIN).unwrap());
        let mut shares: Vec<ReadAheadShare> = (0..16).map(|_| ahead.share(None)).collect();
        assert_eq!(shares[0].limit(true), READ_AHEAD_MAX, "no other has requests");
        let limits: Vec<u64> = shares.iter_mut().map(|share| share.limit(true)).collect();
        assert_eq!((limits[1], limits[15]), (READ_AHEAD_MAX, MEMORY_MIN / 16));
        shares.truncate(10);
        shares[9].limit(false);
        assert_eq!(shares[0].limit(true), MEMORY_MIN / 9);
        drop(shares);
        assert_eq!(ahead.busy_connections.load(Ordering::Relaxed), 0);
        assert_eq!(ReadAheadShare::default().limit(true), READ_AHEAD_MAX);
    }

    fn supply(len: usize) -> OutgoingFrame {
        let encoded = Encoded { codec: Codec::Raw, bytes: vec![0; len].into(), base: None };
        OutgoingFrame { encoded, plain_len: 0 }
    }

    #[tokio::test]
    async fn frames_of_one_agent_take_half_of_the_memory_over_all_of_its_connections() {
        let ahead = ReadAhead::new(Budget::new(MEMORY_MIN).unwrap());
        let agent = |name: &str| Identity::new("site", name).unwrap();
        let quarter = MEMORY_MIN / 4;
        let len = usize::try_from(quarter).unwrap();
        let shares = [0, 1, 2].map(|_| ahead.share(Some(&agent("a"))));
        let first = shares[0].within(quarter, async { Ok(Some(supply(len))) }).await.unwrap().unwrap();
        let second = shares[1].within(quarter, async { Ok(Some(supply(len))) }).await.unwrap().unwrap();
        let mut third = Box::pin(shares[2].within(1, async { Ok(Some(supply(1))) }));
        assert!(poll!(&mut third).is_pending(), "its memory is taken");
        let other = ahead.share(Some(&agent("b")));
        let held = other.within(2 * quarter, async { Ok(Some(supply(2 * len))) }).await.unwrap();
        assert!(
            poll!(Box::pin(ahead.share(None).within(1, async { Ok(Some(supply(1))) }))).is_pending(),
            "all memory is taken"
        );
        // A slice of the bytes owns it as well.
        let rest = first.encoded.bytes.slice(1..);
        drop(first);
        assert!(poll!(&mut third).is_pending());
        drop(rest);
        let third = third.await.unwrap();
        drop((held, second, third, shares, other));
        // A frame longer than the whole memory goes alone; one that turns out shorter releases the difference.
        let share = ahead.share(Some(&agent("a")));
        let short = share.within(u64::MAX, async { Ok(Some(supply(1))) }).await.unwrap();
        let most = MEMORY_MIN - UNIT;
        assert!(poll!(Box::pin(ahead.share(None).within(most, async { Ok(Some(supply(1))) }))).is_ready());
        drop((short, share));
        drop(ahead.share(None));
        assert_eq!(ahead.agents.lock().unwrap().len(), 1, "agents without a connection are forgotten");
    }
}
