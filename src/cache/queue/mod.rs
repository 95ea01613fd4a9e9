//! Which chunk goes next: S3-FIFO, by bytes, without any I/O; it is the cache's index as well.
//!
//! "FIFO queues are all you need for cache eviction" (SOSP '23, <https://s3fifo.com>, algorithm 1). What is new enters a small
//! queue, a tenth of the room. What was read at least twice when it comes to its end moves on to the main queue; what was not
//! leaves, and is remembered as a *ghost* for as long as the main queue would have held it. What comes back as a ghost enters
//! the main queue at once. At the main queue's end, what was read since goes around once more, at most three times. So what is
//! read once (a scan) passes through a tenth of the room and leaves the rest alone.
//!
//! Beside the queues stand the *held* chunks: pinned ones, which no eviction sees.
//!
//! A node takes 24 bytes and 7 to 13 in the table: about 34 bytes a chunk, and as much a ghost, of which there are about as many
//! as chunks in the main queue. Ten million chunks take 340 MB, and up to 300 MB for ghosts.

mod table;
#[cfg(test)]
mod tests;

use self::table::{Keys, NONE, Table};

/// Largest counted frequency of a chunk's reads.
const FREQUENCY_MAX: u8 = 3;
/// Reads in the small queue that lead into the main one.
const PROMOTED_FROM: u8 = 2;
/// The small queue's share of the room: one part in this many.
const SMALL_PART: u64 = 10;

/// Queue of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// In the small queue.
    Small,
    /// In the main queue.
    Main,
    /// Pinned: in no queue.
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
    pub(crate) standing: Standing,
    /// Reads, up to three.
    pub(crate) frequency: u8,
}

/// The queue that a node is linked into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Line {
    Small,
    Main,
    Held,
    Ghost,
    /// Not in use.
    Free,
}

/// 24 bytes.
#[derive(Clone, Copy, Debug)]
struct Node {
    key: u64,
    place: u32,
    /// Towards the newest.
    newer: u32,
    /// Towards the one that leaves next.
    older: u32,
    weight: u16,
    line: Line,
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

/// Every chunk of a cache, and the order in which they leave.
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
            Line::Small => Standing::Small,
            Line::Main => Standing::Main,
            Line::Held => Standing::Held,
            Line::Ghost | Line::Free => return None,
        };
        let Self { key, place, weight, frequency, .. } = *self;
        Some(Resident { key, place, weight, standing, frequency })
    }
}

impl Queue {
    /// An empty one; `seed` is the cache's own secret.
    pub(crate) fn new(seed: u64) -> Self {
        Self { nodes: Nodes::default(), table: Table::new(seed), lines: [Ends::default(); 5], capacity: 0 }
    }

    /// Sets how many units the chunks in both queues may take together: what the shares of the queues are parts of. It evicts
    /// nothing by itself.
    pub(crate) fn set_capacity(&mut self, units: u64) {
        self.capacity = units;
    }

    /// Makes room in the tables for `more` chunks at once.
    pub(crate) fn reserve(&mut self, more: usize) {
        self.nodes.0.reserve(more);
        self.table.reserve(more, &self.nodes);
    }

    /// Brings what lookups of these keys begin with near to the processor: all at once, where one after the other would wait.
    pub(crate) fn approach(&self, keys: impl Iterator<Item = u64>) {
        self.table.approach(keys);
    }

    /// Chunks in the cache.
    pub(crate) fn len(&self) -> u64 {
        [Line::Small, Line::Main, Line::Held].into_iter().map(|line| self.ends(line).count).sum()
    }

    /// Space of held chunks, in units.
    pub(crate) fn held_weight(&self) -> u64 {
        self.ends(Line::Held).weight
    }

    /// Space of chunks in the queues, in units.
    #[cfg(test)]
    pub(crate) fn evictable_weight(&self) -> u64 {
        self.ends(Line::Small).weight + self.ends(Line::Main).weight
    }

    /// The chunk of `key`, without counting that as a read.
    pub(crate) fn peek(&self, key: u64) -> Option<Resident> {
        self.nodes.at(self.table.find(key, &self.nodes)?).resident()
    }

    /// The chunk of `key`, read once more.
    pub(crate) fn touch(&mut self, key: u64) -> Option<Resident> {
        let node = self.table.find(key, &self.nodes)?;
        let node = self.nodes.at_mut(node);
        let found = node.resident()?;
        node.frequency = (node.frequency + 1).min(FREQUENCY_MAX);
        Some(found)
    }

    /// Adds a chunk that is not there, as the newest: into the main queue if it is a ghost, else into the small one. Tells which.
    pub(crate) fn admit(&mut self, key: u64, place: u32, weight: u16) -> Standing {
        let ghost = self.forget(key);
        let standing = if ghost { Standing::Main } else { Standing::Small };
        self.put(Resident { key, place, weight, standing, frequency: 0 });
        standing
    }

    /// Adds a chunk that is not there, as the newest of where it says that it stands.
    pub(crate) fn put(&mut self, chunk: Resident) {
        self.forget(chunk.key);
        let line = match chunk.standing {
            Standing::Small => Line::Small,
            Standing::Main => Line::Main,
            Standing::Held => Line::Held,
        };
        let Resident { key, place, weight, frequency, .. } = chunk;
        let node = Node { key, place, weight, line: Line::Free, frequency, newer: NONE, older: NONE };
        let at = self.fresh(node);
        self.link(at, line);
        self.table.insert(at, &self.nodes);
    }

    /// Takes a chunk out, wherever it stands; it leaves no ghost.
    pub(crate) fn remove(&mut self, key: u64) -> Option<Resident> {
        let at = self.table.find(key, &self.nodes)?;
        let found = self.nodes.at(at).resident()?;
        self.discard(at);
        Some(found)
    }

    /// Takes a chunk out of the queues, so that no eviction sees it. False if it is not there.
    pub(crate) fn hold(&mut self, key: u64) -> bool {
        self.restand(key, |line| matches!(line, Line::Small | Line::Main), Line::Held)
    }

    /// Puts a held chunk into the small queue, as if it were new: what was pinned has yet to prove itself.
    pub(crate) fn release(&mut self, key: u64) -> bool {
        self.restand(key, |line| line == Line::Held, Line::Small)
    }

    /// A chunk that stands in the small queue moves to the main one.
    pub(crate) fn promote(&mut self, key: u64) -> bool {
        self.restand(key, |line| line == Line::Small, Line::Main)
    }

    /// Says that a chunk lies elsewhere now.
    pub(crate) fn relocate(&mut self, key: u64, place: u32) {
        if let Some(at) = self.table.find(key, &self.nodes) {
            self.nodes.at_mut(at).place = place;
        }
    }

    /// Takes out the chunk whose turn it is; none if all are held. Tells of each that moved to the main queue on the way.
    pub(crate) fn evict(&mut self, mut promoted: impl FnMut(u64)) -> Option<Resident> {
        if self.ends(Line::Small).weight >= self.small_share() || self.ends(Line::Main).count == 0 {
            while let Some(at) = self.oldest(Line::Small) {
                let found = self.nodes.at(at).resident();
                if self.nodes.at(at).frequency < PROMOTED_FROM {
                    self.bury(at);
                    return found;
                }
                self.nodes.at_mut(at).frequency = 0;
                self.unlink(at);
                self.link(at, Line::Main);
                promoted(self.nodes.at(at).key);
                if self.ends(Line::Main).weight > self.main_share() {
                    break;
                }
            }
        }
        self.evict_main()
    }

    /// Every chunk, from what leaves next to the newest, the main queue first.
    pub(crate) fn in_order(&self) -> impl Iterator<Item = Resident> + '_ {
        let walk = move |line| {
            let next = |at: u32| Some(at).filter(|&at| at != NONE);
            std::iter::successors(next(self.ends(line).oldest), move |&at| next(self.nodes.at(at).newer))
        };
        let nodes = [Line::Main, Line::Small, Line::Held].into_iter().flat_map(walk);
        nodes.filter_map(|at| self.nodes.at(at).resident())
    }

    /// Nodes that there are, whatever they are used for.
    pub(crate) fn nodes(&self) -> usize {
        self.nodes.0.len()
    }

    /// The chunks among some of the nodes: all, in no order, quickly, and if need be a few at a time.
    pub(crate) fn among(&self, nodes: std::ops::Range<usize>) -> impl Iterator<Item = Resident> + '_ {
        let end = nodes.end.min(self.nodes());
        self.nodes.0.get(nodes.start..end).unwrap_or_default().iter().filter_map(Node::resident)
    }

    fn evict_main(&mut self) -> Option<Resident> {
        while let Some(at) = self.oldest(Line::Main) {
            let node = self.nodes.at_mut(at);
            if node.frequency == 0 {
                let found = node.resident();
                self.discard(at);
                return found;
            }
            node.frequency -= 1;
            self.unlink(at);
            self.link(at, Line::Main);
        }
        None
    }

    fn small_share(&self) -> u64 {
        self.capacity / SMALL_PART
    }

    fn main_share(&self) -> u64 {
        self.capacity - self.small_share()
    }

    /// Leaves the ghost of a chunk, and forgets the oldest ones while they weigh more than the main queue may.
    fn bury(&mut self, at: u32) {
        self.unlink(at);
        self.link(at, Line::Ghost);
        while self.ends(Line::Ghost).weight > self.main_share()
            && let Some(oldest) = self.oldest(Line::Ghost)
        {
            self.discard(oldest);
        }
    }

    /// Was there a ghost of `key`? There is none now.
    fn forget(&mut self, key: u64) -> bool {
        let found = self.table.find(key, &self.nodes).filter(|&at| self.nodes.at(at).line == Line::Ghost);
        if let Some(at) = found {
            self.discard(at);
        }
        found.is_some()
    }

    fn restand(&mut self, key: u64, from: impl Fn(Line) -> bool, to: Line) -> bool {
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
        self.link(at, Line::Free);
    }

    /// A node to use: one that is free, or another one.
    fn fresh(&mut self, node: Node) -> u32 {
        if let Some(at) = self.oldest(Line::Free) {
            self.unlink(at);
            *self.nodes.at_mut(at) = node;
            return at;
        }
        self.nodes.0.push(node);
        u32::try_from(self.nodes.0.len() - 1).unwrap_or(NONE)
    }

    fn oldest(&self, line: Line) -> Option<u32> {
        Some(self.ends(line).oldest).filter(|&at| at != NONE)
    }

    fn ends(&self, line: Line) -> &Ends {
        &self.lines[line as usize]
    }

    fn ends_mut(&mut self, line: Line) -> &mut Ends {
        &mut self.lines[line as usize]
    }

    /// Makes a node that is in no line the newest of one.
    fn link(&mut self, at: u32, line: Line) {
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
