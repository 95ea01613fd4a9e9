//! Limit of the connections of one listener. If all slots are taken, a new connection replaces the one that has been idle
//! longest. A connection is idle while it has no request in progress.
//!
//! Where clients are told apart, by their addresses or certificates, it replaces one of the client with the most, so that none takes
//! the slots of another.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use axum::body::{Body, HttpBody};
use axum::response::Response;
use hyper::body::{Bytes, Frame, SizeHint};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::caller::Caller;
use crate::identity::Identity;

/// Origin whose connections count together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(in crate::agent) enum Origin {
    /// An address.
    Address(IpAddr),
    /// Another agent.
    Agent(Identity),
}

/// Client of a connection.
pub(in crate::agent) trait Client {
    /// Its origin; none: clients cannot be told apart.
    fn origin(&self) -> Option<Origin> {
        None
    }
}

impl Client for SocketAddr {
    fn origin(&self) -> Option<Origin> {
        Some(Origin::Address(self.ip().to_canonical()))
    }
}

impl Client for Caller {
    fn origin(&self) -> Option<Origin> {
        self.agent().cloned().map(Origin::Agent)
    }
}

impl Client for () {}

/// The slots of one listener. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct ConnectionSlots(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    most: usize,
    slots: Mutex<Slots>,
    /// Notified when a connection ends or becomes idle.
    changed: Notify,
}

#[derive(Debug, Default)]
struct Slots {
    /// Counter for ids of connections and for the order in which they became idle.
    next: u64,
    connections: BTreeMap<u64, Connection>,
}

#[derive(Debug)]
struct Connection {
    from: Option<Origin>,
    /// Order in which it became idle; None while a request is in progress.
    idle_since: Option<u64>,
    end: CancellationToken,
}

/// Slot of one connection, released on drop.
#[derive(Debug)]
pub(super) struct ConnectionSlot {
    slots: ConnectionSlots,
    number: u64,
    end: CancellationToken,
}

/// Handle that ends the connection of a request.
#[derive(Clone, Debug)]
pub(super) struct ConnectionEnd(CancellationToken);

impl ConnectionEnd {
    /// Ends the connection, also in the middle of an answer.
    pub(super) fn end(&self) {
        self.0.cancel();
    }
}

/// Request in progress, until this is dropped.
#[derive(Debug)]
pub(super) struct Busy(Arc<ConnectionSlot>);

/// Response body with a guard that is dropped once the body has been read or dropped.
struct Guarded<G> {
    body: Body,
    _guard: G,
}

/// Keeps `guard` until the body of `response` has been read or dropped.
pub(super) fn with_guard<G: Send + Unpin + 'static>(response: Response, guard: G) -> Response {
    response.map(|body| Body::new(Guarded { body, _guard: guard }))
}

impl ConnectionSlots {
    /// Creates `most` slots.
    pub(super) fn new(most: usize) -> Self {
        Self(Arc::new(Shared { most, slots: Mutex::default(), changed: Notify::new() }))
    }

    /// Takes a slot for a new connection from `from`. If all are taken, one connection of the origin with the most must close: the one
    /// that has been idle longest. If none of these is idle, its oldest one must, unless the new connection is of that origin itself:
    /// then there is no slot for it (None). Without origins, the call waits until a connection is idle.
    ///
    /// Only one task of a listener may call it at a time.
    ///
    /// # Cancel safety
    /// Safe.
    pub(super) async fn take(&self, from: Option<Origin>) -> Option<ConnectionSlot> {
        loop {
            let slot = self.try_take(from.as_ref());
            if slot.is_some() || from.is_some() {
                return slot;
            }
            self.0.changed.notified().await;
        }
    }

    fn try_take(&self, from: Option<&Origin>) -> Option<ConnectionSlot> {
        let mut slots = self.slots();
        if slots.connections.len() >= self.0.most {
            let displaced = slots.displaced_for(from)?;
            slots.connections.remove(&displaced)?.end.cancel();
        }
        let (number, idle_since) = (slots.tick(), slots.tick());
        let end = CancellationToken::new();
        let connection = Connection { from: from.cloned(), idle_since: Some(idle_since), end: end.clone() };
        slots.connections.insert(number, connection);
        Some(ConnectionSlot { slots: self.clone(), number, end })
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.0.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Slots {
    fn tick(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Number of the connection that gives way to a new one from `from`.
    fn displaced_for(&self, from: Option<&Origin>) -> Option<u64> {
        let mut counts: HashMap<Option<&Origin>, usize> = HashMap::from([(from, 1)]);
        self.connections.values().for_each(|one| *counts.entry(one.from.as_ref()).or_default() += 1);
        let (own, most) = (counts[&from], counts.values().copied().max()?);
        let of_most = || self.connections.iter().filter(|(_, one)| counts[&one.from.as_ref()] == most);
        let idle = of_most().filter_map(|(number, one)| Some((one.idle_since?, *number))).min();
        let oldest = || of_most().next().filter(|_| own < most).map(|(number, _)| *number);
        idle.map(|(_, number)| number).or_else(oldest)
    }
}

impl ConnectionSlot {
    /// Returns when the connection must close for a new one.
    ///
    /// # Cancel safety
    /// Safe.
    pub(super) async fn displaced(&self) {
        self.end.cancelled().await;
    }

    /// Handle that ends this connection.
    pub(super) fn ending(&self) -> ConnectionEnd {
        ConnectionEnd(self.end.clone())
    }

    /// Marks the start of a request.
    pub(super) fn busy(self: &Arc<Self>) -> Busy {
        if let Some(own) = self.slots.slots().connections.get_mut(&self.number) {
            own.idle_since = None;
        }
        Busy(Arc::clone(self))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let ConnectionSlot { slots: all, number, .. } = &*self.0;
        let mut slots = all.slots();
        let now = slots.tick();
        if let Some(own) = slots.connections.get_mut(number) {
            own.idle_since = Some(now);
        }
        all.0.changed.notify_one();
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.slots.slots().connections.remove(&self.number);
        self.slots.0.changed.notify_one();
    }
}

impl<G: Unpin> HttpBody for Guarded<G> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn who_has_been_silent_longest_gives_way_and_who_is_served_does_not() {
        let slots = ConnectionSlots::new(3);
        let held: Vec<_> = [slots.take(None).await, slots.take(None).await, slots.take(None).await]
            .map(|slot| Arc::new(slot.unwrap()))
            .into();
        let gone = |slot: &ConnectionSlot| slot.end.is_cancelled();
        let (first, second) = (held[0].busy(), held[1].busy());
        // Of these the second has been silent longer, though it came before the third.
        drop(second);
        let third = Arc::new(slots.take(None).await.unwrap());
        assert_eq!([gone(&held[0]), gone(&held[1]), gone(&held[2])], [false, false, true]);
        held[2].displaced().await;
        let fourth = Arc::new(slots.take(None).await.unwrap());
        assert_eq!([gone(&held[0]), gone(&held[1])], [false, true]);
        // A displaced connection no longer counts, whenever it is dropped.
        drop(held[2].busy());
        let busy = (third.busy(), fourth.busy());
        assert!(slots.take(None).now_or_never().is_none(), "all are served");
        // An answer counts until its body is taken.
        let response = with_guard(Response::new(Body::from("all of it")), first);
        assert!(slots.take(None).now_or_never().is_none());
        drop(response);
        assert!(slots.take(None).now_or_never().is_some() && gone(&held[0]));
        drop(busy);
        drop((held, third, fourth));
        assert_eq!(slots.slots().connections.len(), 0);
    }

    #[tokio::test]
    async fn no_address_takes_the_slots_of_another() {
        let address = |last: u8| Some(Origin::Address(IpAddr::from([10, 0, 0, last])));
        let slots = ConnectionSlots::new(4);
        let take = async |last| slots.take(address(last)).await.map(Arc::new);
        let gone = |slot: &Option<Arc<ConnectionSlot>>| slot.as_ref().unwrap().end.is_cancelled();
        let mut held = Vec::new();
        let mut busy = Vec::new();
        for _ in 0..4 {
            held.push(take(1).await);
            busy.push(held.last().unwrap().as_ref().unwrap().busy());
        }
        // All are served, and of one address: its next one is refused, that of another replaces its oldest.
        assert!(take(1).await.is_none());
        let other = take(2).await;
        assert_eq!(held.iter().map(gone).collect::<Vec<_>>(), [true, false, false, false]);
        // The other is the only idle one, and stays, however many come.
        for _ in 0..8 {
            assert!(take(1).await.is_none());
        }
        assert!(!gone(&other));
        // An idle one of the address with the most gives way, to its own next one, too.
        drop(busy.pop());
        let next = take(1).await;
        assert_eq!([gone(&held[3]), gone(&held[2]), gone(&other)], [true, false, false]);
        // Addresses with as many as this one would have lose none that is served.
        let (third, fourth) = (take(3).await, take(4).await);
        busy.extend([&other, &third, &fourth].map(|slot| slot.as_ref().unwrap().busy()));
        assert_eq!([gone(&next), gone(&held[1]), gone(&held[2])], [true, true, false]);
        assert!(take(5).await.is_none());
        assert!(![&other, &third, &fourth].into_iter().any(gone));
    }
}
