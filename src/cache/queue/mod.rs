//! Eviction order by S3-FIFO, weighted by bytes, without I/O; it is also the index of the cache.
//!
//! "FIFO queues are all you need for cache eviction" (SOSP '23, <https://s3fifo.com>, algorithm 1). New chunks enter a small
//! queue, a tenth of the space. At its end, chunks that were read at least twice move to the main queue; the others are evicted,
//! and recorded as *ghosts* for as long as the main queue would have held them. A chunk with a ghost enters the main queue
//! directly. At the end of the main queue, chunks that were read since go around once more, at most three times. So data that is
//! read once (a scan) passes through a tenth of the space and does not displace the rest.
//!
//! *Held* chunks are in no queue and are never evicted: pinned ones, and those of a warm that runs, which enter the main queue at its
//! end.
//!
//! A node takes 32 bytes and 7 to 13 in the table: about 42 bytes a chunk, and as much a ghost, of which there are about as many
//! as chunks in the main queue. Ten million chunks take 420 MB, and up to 380 MB for ghosts.

mod table;
#[cfg(test)]
mod tests;

use self::table::{Keys, NONE, Table};
use crate::id::ChunkId;

/// Largest counted frequency of a chunk's reads.
const FREQUENCY_MAX: u8 = 3;
/// Reads in the small queue that lead into the main one.
const PROMOTED_FROM: u8 = 2;
/// The small queue's share of the room: one part in this many.
const SMALL_PART: u64 = 10;

/// Queue of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueueKind {
    /// In the small queue.
    Small,
    /// In the main queue.
    Main,
    /// In no queue: pinned, or a part of a warm that runs.
    Held,
}

/// A chunk that the cache has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Resident {
    /// The first eight bytes of its id.
    pub(crate) key: u64,
    /// Place.
    pub(crate) place: u32,
    /// Space, in units.
    pub(crate) weight: u16,
    /// Queue.
    pub(crate) standing: QueueKind,
    /// Reads, up to three.
    pub(crate) frequency: u8,
}

/// Base that a cached chunk is encoded with: the first eight bytes of its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BaseKey(u64);

impl BaseKey {
    /// None: the chunk is encoded for itself.
    pub const NONE: Self = Self(0);
    /// Not read since the cache was opened.
    pub(crate) const UNKNOWN: Self = Self(1);

    /// Key of `base`.
    #[must_use]
    pub fn of(base: Option<&ChunkId>) -> Self {
        // Two ids of 2^64 look like others.
        base.map_or(Self::NONE, |base| Self(base.prefix().max(2)))
    }
}

/// The queue that a node is linked into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum NodeList {
    Small,
    Main,
    Held,
    Ghost,
    /// Not in use.
    Free,
}

/// 32 bytes.
#[derive(Clone, Copy, Debug)]
struct Node {
    key: u64,
    base: BaseKey,
    place: u32,
    /// Link towards the newest.
    newer: u32,
    /// Link towards the one that is evicted next.
    older: u32,
    weight: u16,
    line: NodeList,
    frequency: u8,
}

#[derive(Clone, Copy, Debug)]
struct Ends {
    newest: u32,
    oldest: u32,
    weight: u64,
    count: u64,
}

impl Default for Ends {
    fn default() -> Self {
        Self { newest: NONE, oldest: NONE, weight: 0, count: 0 }
    }
}

#[derive(Debug, Default)]
struct Nodes(Vec<Node>);

/// All chunks of a cache, and the order of eviction.
#[derive(Debug)]
pub(crate) struct Queue {
    nodes: Nodes,
    table: Table,
    lines: [Ends; 5],
    capacity: u64,
}

impl Keys for Nodes {
    fn key(&self, node: u32) -> u64 {
        self.at(node).key
    }
}

impl Nodes {
    fn at(&self, node: u32) -> &Node {
        &self.0[node as usize]
    }

    fn at_mut(&mut self, node: u32) -> &mut Node {
        &mut self.0[node as usize]
    }
}

impl Node {
    fn resident(&self) -> Option<Resident> {
        let standing = match self.line {
            NodeList::Small => QueueKind::Small,
            NodeList::Main => QueueKind::Main,
            NodeList::Held => QueueKind::Held,
            NodeList::Ghost | NodeList::Free => return None,
        };
        let Self { key, place, weight, frequency, .. } = *self;
        Some(Resident { key, place, weight, standing, frequency })
    }
}

impl Queue {
    /// Creates an empty index; `seed` is secret.
    pub(crate) fn new(seed: u64) -> Self {
        Self { nodes: Nodes::default(), table: Table::new(seed), lines: [Ends::default(); 5], capacity: 0 }
    }

    /// Sets the units for both queues together, of which each queue has a share. Does not evict.
    pub(crate) fn set_capacity(&mut self, units: u64) {
        self.capacity = units;
    }

    /// Reserves memory for `more` chunks.
    pub(crate) fn reserve(&mut self, more: usize) {
        self.nodes.0.reserve(more);
        self.table.reserve(more, &self.nodes);
    }

    /// Prefetches the table slots of these keys into the CPU cache, all at once rather than one after the other.
    pub(crate) fn approach(&self, keys: impl Iterator<Item = u64>) {
        self.table.approach(keys);
    }

    /// Chunks in the cache.
    pub(crate) fn len(&self) -> u64 {
        [NodeList::Small, NodeList::Main, NodeList::Held].into_iter().map(|line| self.ends(line).count).sum()
    }

    /// Space of held chunks, in units.
    pub(crate) fn held_weight(&self) -> u64 {
        self.ends(NodeList::Held).weight
    }

    /// Space of chunks in the queues, in units.
    #[cfg(test)]
    pub(crate) fn evictable_weight(&self) -> u64 {
        self.ends(NodeList::Small).weight + self.ends(NodeList::Main).weight
    }

    /// Finds the chunk of `key`; does not count as a read.
    pub(crate) fn peek(&self, key: u64) -> Option<Resident> {
        self.nodes.at(self.table.find(key, &self.nodes)?).resident()
    }

    /// Finds the chunk of `key`, and counts a read.
    pub(crate) fn touch(&mut self, key: u64) -> Option<Resident> {
        let node = self.table.find(key, &self.nodes)?;
        let node = self.nodes.at_mut(node);
        let found = node.resident()?;
        node.frequency = (node.frequency + 1).min(FREQUENCY_MAX);
        Some(found)
    }

    /// Base of the chunk of `key`; none if it is missing.
    pub(crate) fn base(&self, key: u64) -> Option<BaseKey> {
        let node = self.nodes.at(self.table.find(key, &self.nodes)?);
        node.resident().map(|_| node.base)
    }

    /// Records the base of a chunk.
    pub(crate) fn set_base(&mut self, key: u64, base: BaseKey) {
        if let Some(at) = self.table.find(key, &self.nodes) {
            self.nodes.at_mut(at).base = base;
        }
    }

    /// Adds a missing chunk as the newest: to the main queue if it has a ghost, else to the small one. Returns the queue.
    pub(crate) fn admit(&mut self, key: u64, place: u32, weight: u16) -> QueueKind {
        let ghost = self.forget(key);
        let standing = if ghost { QueueKind::Main } else { QueueKind::Small };
        self.put(Resident { key, place, weight, standing, frequency: 0 });
        standing
    }

    /// Adds a missing chunk as the newest of its own queue.
    pub(crate) fn put(&mut self, chunk: Resident) {
        self.forget(chunk.key);
        let line = match chunk.standing {
            QueueKind::Small => NodeList::Small,
            QueueKind::Main => NodeList::Main,
            QueueKind::Held => NodeList::Held,
        };
        let Resident { key, place, weight, frequency, .. } = chunk;
        let (newer, older, base) = (NONE, NONE, BaseKey::UNKNOWN);
        let node = Node { key, base, place, weight, line: NodeList::Free, frequency, newer, older };
        let at = self.fresh(node);
        self.link(at, line);
        self.table.insert(at, &self.nodes);
    }

    /// Removes a chunk without leaving a ghost.
    pub(crate) fn remove(&mut self, key: u64) -> Option<Resident> {
        let at = self.table.find(key, &self.nodes)?;
        let found = self.nodes.at(at).resident()?;
        self.discard(at);
        Some(found)
    }

    /// Counts one read of a chunk less, if it has any; none if it is missing or held.
    pub(crate) fn demote(&mut self, key: u64) -> Option<bool> {
        let at = self.table.find(key, &self.nodes)?;
        let node = self.nodes.at_mut(at);
        let was_read = node.frequency > 0;
        node.frequency = node.frequency.saturating_sub(1);
        matches!(node.line, NodeList::Small | NodeList::Main).then_some(was_read)
    }

    /// Holds a chunk: removes it from the queues, so that it is not evicted. False if it is missing.
    pub(crate) fn hold(&mut self, key: u64) -> bool {
        self.move_to(key, |line| matches!(line, NodeList::Small | NodeList::Main), NodeList::Held)
    }

    /// Moves a held chunk to the small queue, like a new one.
    pub(crate) fn release(&mut self, key: u64) -> bool {
        self.move_to(key, |line| line == NodeList::Held, NodeList::Small)
    }

    /// Moves a held chunk to the main queue, as its newest.
    pub(crate) fn release_to_main(&mut self, key: u64) -> bool {
        self.move_to(key, |line| line == NodeList::Held, NodeList::Main)
    }

    /// Moves a chunk from the small queue to the main one.
    pub(crate) fn promote(&mut self, key: u64) -> bool {
        self.move_to(key, |line| line == NodeList::Small, NodeList::Main)
    }

    /// Records the new place of a chunk.
    pub(crate) fn relocate(&mut self, key: u64, place: u32) {
        if let Some(at) = self.table.find(key, &self.nodes) {
            self.nodes.at_mut(at).place = place;
        }
    }

    /// Evicts the next chunk; none if all are held. Reports each chunk that moved to the main queue meanwhile.
    pub(crate) fn evict(&mut self, mut promoted: impl FnMut(u64)) -> Option<Resident> {
        if self.ends(NodeList::Small).weight >= self.small_share() || self.ends(NodeList::Main).count == 0 {
            while let Some(at) = self.oldest(NodeList::Small) {
                let found = self.nodes.at(at).resident();
                if self.nodes.at(at).frequency < PROMOTED_FROM {
                    self.make_ghost(at);
                    return found;
                }
                self.nodes.at_mut(at).frequency = 0;
                self.unlink(at);
                self.link(at, NodeList::Main);
                promoted(self.nodes.at(at).key);
                if self.ends(NodeList::Main).weight > self.main_share() {
                    break;
                }
            }
        }
        self.evict_main()
    }

    /// All chunks in order of eviction, the main queue first.
    pub(crate) fn in_order(&self) -> impl Iterator<Item = Resident> + '_ {
        let walk = move |line| {
            let next = |at: u32| Some(at).filter(|&at| at != NONE);
            std::iter::successors(next(self.ends(line).oldest), move |&at| next(self.nodes.at(at).newer))
        };
        let nodes = [NodeList::Main, NodeList::Small, NodeList::Held].into_iter().flat_map(walk);
        nodes.filter_map(|at| self.nodes.at(at).resident())
    }

    /// Number of all nodes, used or not.
    pub(crate) fn nodes(&self) -> usize {
        self.nodes.0.len()
    }

    /// Chunks in a range of nodes, unordered; a fast way to list all chunks in batches.
    pub(crate) fn among(&self, nodes: std::ops::Range<usize>) -> impl Iterator<Item = Resident> + '_ {
        let end = nodes.end.min(self.nodes());
        self.nodes.0.get(nodes.start..end).unwrap_or_default().iter().filter_map(Node::resident)
    }

    fn evict_main(&mut self) -> Option<Resident> {
        while let Some(at) = self.oldest(NodeList::Main) {
            let node = self.nodes.at_mut(at);
            if node.frequency == 0 {
                let found = node.resident();
                self.discard(at);
                return found;
            }
            node.frequency -= 1;
            self.unlink(at);
            self.link(at, NodeList::Main);
        }
        None
    }

    fn small_share(&self) -> u64 {
        self.capacity / SMALL_PART
    }

    fn main_share(&self) -> u64 {
        self.capacity - self.small_share()
    }

    /// Adds a ghost, and drops the oldest ghosts while they weigh more than the main queue's share.
    fn make_ghost(&mut self, at: u32) {
        self.unlink(at);
        self.link(at, NodeList::Ghost);
        while self.ends(NodeList::Ghost).weight > self.main_share()
            && let Some(oldest) = self.oldest(NodeList::Ghost)
        {
            self.discard(oldest);
        }
    }

    /// Removes the ghost of `key`; true if there was one.
    fn forget(&mut self, key: u64) -> bool {
        let found = self.table.find(key, &self.nodes).filter(|&at| self.nodes.at(at).line == NodeList::Ghost);
        if let Some(at) = found {
            self.discard(at);
        }
        found.is_some()
    }

    fn move_to(&mut self, key: u64, from: impl Fn(NodeList) -> bool, to: NodeList) -> bool {
        let Some(at) = self.table.find(key, &self.nodes).filter(|&at| from(self.nodes.at(at).line)) else {
            return false;
        };
        self.unlink(at);
        self.nodes.at_mut(at).frequency = 0;
        self.link(at, to);
        true
    }

    fn discard(&mut self, at: u32) {
        self.table.remove(self.nodes.at(at).key, &self.nodes);
        self.unlink(at);
        self.link(at, NodeList::Free);
    }

    /// A free node, or a new one.
    fn fresh(&mut self, node: Node) -> u32 {
        if let Some(at) = self.oldest(NodeList::Free) {
            self.unlink(at);
            *self.nodes.at_mut(at) = node;
            return at;
        }
        self.nodes.0.push(node);
        u32::try_from(self.nodes.0.len() - 1).unwrap_or(NONE)
    }

    fn oldest(&self, line: NodeList) -> Option<u32> {
        Some(self.ends(line).oldest).filter(|&at| at != NONE)
    }

    fn ends(&self, line: NodeList) -> &Ends {
        &self.lines[line as usize]
    }

    fn ends_mut(&mut self, line: NodeList) -> &mut Ends {
        &mut self.lines[line as usize]
    }

    /// Adds an unlinked node to a queue as its newest.
    fn link(&mut self, at: u32, line: NodeList) {
        let newest = self.ends(line).newest;
        let node = self.nodes.at_mut(at);
        (node.line, node.newer, node.older) = (line, NONE, newest);
        let weight = u64::from(node.weight);
        if newest != NONE {
            self.nodes.at_mut(newest).newer = at;
        }
        let ends = self.ends_mut(line);
        if ends.oldest == NONE {
            ends.oldest = at;
        }
        ends.newest = at;
        ends.weight += weight;
        ends.count += 1;
    }

    fn unlink(&mut self, at: u32) {
        let Node { newer, older, weight, line, .. } = *self.nodes.at(at);
        if newer != NONE {
            self.nodes.at_mut(newer).older = older;
        }
        if older != NONE {
            self.nodes.at_mut(older).newer = newer;
        }
        let ends = self.ends_mut(line);
        if ends.newest == at {
            ends.newest = older;
        }
        if ends.oldest == at {
            ends.oldest = newer;
        }
        ends.weight -= u64::from(weight);
        ends.count -= 1;
    }
}
