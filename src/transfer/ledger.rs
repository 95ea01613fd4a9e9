//! Ledger of the bytes exchanged with other agents, and of the bytes on the sockets.
//!
//! An *entry* sums up one tree's chunks, from or to one agent; a *link* sums up the bytes of all connections with that
//! agent: those of its entries, and the overhead of the protocol, TLS and QUIC. Calls ([`calls`](super::calls)) have
//! connections of their own, and so a link of their own.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Serialize;

use super::byte_counters::ByteCounters;
use super::transport::Transport;
use crate::id::ManifestId;
use crate::identity::Identity;

/// Maximum number of entries; the least recently changed one is dropped first.
const ENTRIES_MAX: usize = 4096;
/// Transport name of calls.
const CALLS: &str = "calls";

/// Direction of chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// Received.
    In,
    /// Sent.
    Out,
}

/// Bytes of one tree that moved in one direction, with one agent.
#[derive(Clone, Debug, PartialEq, Serialize, utoipa::ToSchema)]
pub struct LedgerEntry {
    /// The other agent.
    pub peer: String,
    /// Direction.
    pub way: Direction,
    /// The tree's manifest.
    pub manifest: String,
    /// Chunks.
    pub chunks: u64,
    /// Stored bytes of the chunks.
    pub bytes: u64,
    /// Total time that requests for them were open, in seconds.
    pub seconds: f64,
}

/// Bytes of the connections with one agent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct LinkEntry {
    /// The other agent.
    pub peer: String,
    /// Transport: `quic`, `tcp`, or `calls`.
    pub transport: String,
    /// Connections so far.
    pub connections: u64,
    /// Bytes that their sockets sent.
    pub sent: u64,
    /// Bytes that they received.
    pub received: u64,
}

/// Ledger of one agent.
#[derive(Debug, Default)]
pub struct Ledger(Mutex<LedgerState>);

#[derive(Debug, Default)]
struct LedgerState {
    entries: BTreeMap<(Identity, Direction, ManifestId), MovedTotals>,
    links: BTreeMap<(Identity, &'static str), LinkTotals>,
    turn: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct MovedTotals {
    chunks: u64,
    bytes: u64,
    time: Duration,
    turn: u64,
}

#[derive(Debug, Default)]
struct LinkTotals {
    open: Vec<Arc<ByteCounters>>,
    connections: u64,
    sent: u64,
    received: u64,
}

/// Chunks of one tree, in one direction.
#[derive(Clone, Copy, Debug)]
pub struct MovedChunks {
    /// Direction.
    pub way: Direction,
    /// Tree that they belong to.
    pub manifest: ManifestId,
    /// Number of chunks.
    pub chunks: u64,
    /// Stored bytes.
    pub bytes: u64,
    /// Time that the requests were open.
    pub time: Duration,
}

impl Ledger {
    /// Records a new connection with `peer`; `wire` counts its bytes.
    pub fn opened(&self, peer: &Identity, transport: Transport, wire: Arc<ByteCounters>) {
        self.connection_opened(peer, transport.word(), wire);
    }

    /// Records a call with `peer`, from either side; `wire` counts its bytes.
    pub fn called(&self, peer: &Identity, wire: Arc<ByteCounters>) {
        self.connection_opened(peer, CALLS, wire);
    }

    fn connection_opened(&self, peer: &Identity, over: &'static str, wire: Arc<ByteCounters>) {
        let mut lock = self.lock();
        let link = lock.links.entry((peer.clone(), over)).or_default();
        link.fold();
        link.connections += 1;
        link.open.push(wire);
    }

    /// Counts chunks sent to or received from `peer`.
    pub fn moved(&self, peer: &Identity, moved: &MovedChunks) {
        let &MovedChunks { way, manifest, chunks, bytes, time } = moved;
        let mut lock = self.lock();
        lock.turn += 1;
        let turn = lock.turn;
        let entry = lock.entries.entry((peer.clone(), way, manifest)).or_default();
        entry.chunks += chunks;
        entry.bytes += bytes;
        entry.time += time;
        entry.turn = turn;
        if lock.entries.len() > ENTRIES_MAX {
            let oldest = lock.entries.iter().min_by_key(|(_, moved)| moved.turn).map(|(key, _)| key.clone());
            oldest.and_then(|key| lock.entries.remove(&key));
        }
    }

    /// The entries, by agent.
    #[must_use]
    pub fn entries(&self) -> Vec<LedgerEntry> {
        let entry = |((peer, way, manifest), moved): (&(Identity, Direction, ManifestId), &MovedTotals)| LedgerEntry {
            peer: peer.to_string(),
            way: *way,
            manifest: manifest.to_string(),
            chunks: moved.chunks,
            bytes: moved.bytes,
            seconds: moved.time.as_secs_f64(),
        };
        self.lock().entries.iter().map(entry).collect()
    }

    /// The links, by agent.
    #[must_use]
    pub fn links(&self) -> Vec<LinkEntry> {
        let mut lock = self.lock();
        let link = |((peer, transport), carried): (&(Identity, &'static str), &mut LinkTotals)| {
            carried.fold();
            LinkEntry {
                peer: peer.to_string(),
                transport: (*transport).to_owned(),
                connections: carried.connections,
                sent: carried.sent + carried.open.iter().map(|wire| wire.sent()).sum::<u64>(),
                received: carried.received + carried.open.iter().map(|wire| wire.received()).sum::<u64>(),
            }
        };
        lock.links.iter_mut().map(link).collect()
    }

    fn lock(&self) -> MutexGuard<'_, LedgerState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LinkTotals {
    /// Adds up closed connections.
    fn fold(&mut self) {
        let (sent, received) = (&mut self.sent, &mut self.received);
        self.open.retain(|wire| {
            let open = Arc::strong_count(wire) > 1;
            if !open {
                *sent += wire.sent();
                *received += wire.received();
            }
            open
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_add_up_when_they_are_over() {
        let (ledger, peer) = (Ledger::default(), Identity::new("west", "a").unwrap());
        let (first, second) = (Arc::new(ByteCounters::default()), Arc::new(ByteCounters::default()));
        first.set(10, 100);
        ledger.opened(&peer, Transport::Tcp, Arc::clone(&first));
        drop(first);
        second.set(1, 2);
        ledger.opened(&peer, Transport::Tcp, Arc::clone(&second));
        second.set(5, 7);
        let links = ledger.links();
        assert_eq!((links[0].connections, links[0].sent, links[0].received), (2, 15, 107));
        assert_eq!(links, ledger.links());
    }

    #[test]
    fn a_tree_has_one_entry_for_each_way() {
        let (ledger, peer) = (Ledger::default(), Identity::new("west", "a").unwrap());
        let manifest = ManifestId::of(b"tree");
        for way in [Direction::In, Direction::Out, Direction::In] {
            let time = Duration::from_secs(1);
            ledger.moved(&peer, &MovedChunks { way, manifest, chunks: 2, bytes: 50, time });
        }
        let entries = ledger.entries();
        assert_eq!(entries.len(), 2);
        assert_eq!((entries[0].chunks, entries[0].bytes, entries[0].seconds), (4, 100, 2.0));
    }
}
