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
pub use crate::format::Direction;
use crate::format::UsageTotals;
use crate::id::{ManifestId, RepositoryId};
use crate::identity::Identity;
use crate::name::Name;

/// Maximum number of entries; the least recently changed one is dropped first.
const ENTRIES_MAX: usize = 4096;
/// Maximum number of trees whose names are remembered, and of kinds of bytes that wait to be reported; further ones are counted
/// without a name.
const TREES_MAX: usize = 4096;
/// Transport name of calls.
const CALLS: &str = "calls";

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
    /// Bytes of the chunks as they moved.
    pub bytes: u64,
    /// Bytes that the repository stores for the same chunks: fewer, if chunks moved without their bases.
    pub stored_bytes: u64,
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
    trees: BTreeMap<ManifestId, NamedTree>,
    unreported: BTreeMap<MovedKey, UsageTotals>,
}

/// Name of a tree, and its repository.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NamedTree {
    /// Repository.
    pub repository: RepositoryId,
    /// Name by which it was opened, or saved.
    pub name: Name,
}

/// Kind of bytes that moved.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MovedKey {
    /// Tree; none: not known, or one of too many.
    pub tree: Option<NamedTree>,
    /// Direction.
    pub way: Direction,
    /// Site of the other agent; none: the repository's store.
    pub site: Option<String>,
}

#[derive(Clone, Copy, Debug, Default)]
struct MovedTotals {
    chunks: u64,
    bytes: u64,
    stored: u64,
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
    /// Bytes of them as they moved.
    pub bytes: u64,
    /// Bytes that the repository stores for them.
    pub stored: u64,
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
        let &MovedChunks { way, manifest, chunks, bytes, stored, time } = moved;
        let mut lock = self.lock();
        lock.turn += 1;
        let turn = lock.turn;
        let entry = lock.entries.entry((peer.clone(), way, manifest)).or_default();
        entry.chunks += chunks;
        entry.bytes += bytes;
        entry.stored += stored;
        entry.time += time;
        entry.turn = turn;
        if lock.entries.len() > ENTRIES_MAX {
            let oldest = lock.entries.iter().min_by_key(|(_, moved)| moved.turn).map(|(key, _)| key.clone());
            oldest.and_then(|key| lock.entries.remove(&key));
        }
        let tree = lock.trees.get(&manifest).cloned();
        lock.report(MovedKey { tree, way, site: Some(peer.site().to_owned()) }, of_bytes(bytes));
    }

    /// Remembers the name by which the tree of `manifest` was opened.
    pub fn named(&self, manifest: ManifestId, repository: RepositoryId, name: &Name) {
        let mut lock = self.lock();
        if lock.trees.get(&manifest).is_some_and(|tree| tree.name == *name && tree.repository == repository) {
            return;
        }
        if lock.trees.len() >= TREES_MAX {
            lock.trees.clear();
        }
        lock.trees.insert(manifest, NamedTree { repository, name: name.clone() });
    }

    /// Counts a read of `bytes` of `tree` from the repository's store.
    pub fn read(&self, tree: NamedTree, bytes: u64) {
        let totals = UsageTotals { requests: 1, ..of_bytes(bytes) };
        self.lock().report(MovedKey { tree: Some(tree), way: Direction::In, site: None }, totals);
    }

    /// Counts GPU seconds that did not idle, as the data of a job, `tree` among it, came before the job had its GPUs.
    pub fn gpus_did_not_idle(&self, tree: NamedTree, gpu_seconds: u64) {
        let totals = UsageTotals { gpu_seconds, ..UsageTotals::default() };
        self.lock().report(MovedKey { tree: Some(tree), way: Direction::In, site: None }, totals);
    }

    /// Counts `bytes` of `tree` that were written to the repository's store.
    pub fn written(&self, tree: NamedTree, bytes: u64) {
        self.lock().report(MovedKey { tree: Some(tree), way: Direction::Out, site: None }, of_bytes(bytes));
    }

    /// Takes what moved since the last call: chunks of trees only.
    #[must_use]
    pub fn take_unreported(&self) -> BTreeMap<MovedKey, UsageTotals> {
        std::mem::take(&mut self.lock().unreported)
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
            stored_bytes: moved.stored,
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

impl LedgerState {
    fn report(&mut self, mut key: MovedKey, more: UsageTotals) {
        if self.unreported.len() >= TREES_MAX && !self.unreported.contains_key(&key) {
            key.tree = None;
        }
        self.unreported.entry(key).or_default().add(more);
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

fn of_bytes(bytes: u64) -> UsageTotals {
    UsageTotals { bytes, ..UsageTotals::default() }
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
            ledger.moved(&peer, &MovedChunks { way, manifest, chunks: 2, bytes: 50, stored: 40, time });
        }
        let entries = ledger.entries();
        assert_eq!(entries.len(), 2);
        assert_eq!((entries[0].chunks, entries[0].bytes, entries[0].seconds), (4, 100, 2.0));
    }

    #[test]
    fn what_moved_is_reported_once_by_the_name_of_its_tree() {
        let (ledger, peer) = (Ledger::default(), Identity::new("west", "a").unwrap());
        let (manifest, repository) = (ManifestId::of(b"tree"), RepositoryId::from_bytes([1; 16]));
        let tree = NamedTree { repository, name: "run-7/step-1".parse().unwrap() };
        let moved =
            MovedChunks { way: Direction::Out, manifest, chunks: 1, bytes: 50, stored: 50, time: Duration::ZERO };
        ledger.moved(&peer, &moved);
        ledger.named(manifest, repository, &tree.name);
        ledger.moved(&peer, &moved);
        ledger.moved(&peer, &moved);
        ledger.read(tree.clone(), 7);
        let key = |tree: Option<&NamedTree>, way, site: Option<&str>| MovedKey {
            tree: tree.cloned(),
            way,
            site: site.map(str::to_owned),
        };
        let expected = [
            (key(None, Direction::Out, Some("west")), of_bytes(50)),
            (key(Some(&tree), Direction::In, None), UsageTotals { requests: 1, ..of_bytes(7) }),
            (key(Some(&tree), Direction::Out, Some("west")), of_bytes(100)),
        ];
        assert_eq!(ledger.take_unreported(), BTreeMap::from(expected));
        assert!(ledger.take_unreported().is_empty());
        for n in 0..2 * TREES_MAX {
            ledger.read(NamedTree { repository, name: format!("tree-{n}").parse().unwrap() }, 1);
        }
        let taken = ledger.take_unreported();
        assert_eq!(taken[&key(None, Direction::In, None)].bytes, TREES_MAX as u64);
        assert_eq!(taken.len(), TREES_MAX + 1);
    }
}
