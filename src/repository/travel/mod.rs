//! Which chunks travel to a place that lacks some: as stored, without their base, or not at all. Pure.
//!
//! A chunk that is stored with a base needs that base where it is decoded. A base that is not wanted itself travels only if it has no
//! more bytes than its dependents save by it, within 0.1 %; else these travel without it. Chunks and their bases form trees; for each
//! the fewest bytes are found by adding up, from its leaves, what it costs with and without each base.

mod decide;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use self::decide::hops_max;
pub use self::decide::{Held, Travel, TravelNode, decide};
use super::Saved;
use crate::codec::alone_len_max;
use crate::error::Result;
use crate::id::ChunkId;

/// Bytes of memory for each chunk that is planned.
pub const TRAVEL_WEIGHT: u64 = 192;

/// Chunks that travel, each ascending.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TravelPlan {
    /// As they are stored, bases included.
    pub as_stored: Vec<u32>,
    /// Without the base that they are stored with.
    pub alone: Vec<u32>,
    /// Chunks that the destination needs to decode the wanted ones, those included.
    pub needed: Vec<u32>,
    /// Bytes of all that travel.
    pub bytes: u64,
    /// False if the length of one of those without a base is an estimate.
    pub exact: bool,
}

/// Length of a chunk without its base.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AloneLen {
    /// Bytes.
    pub bytes: u32,
    /// False if it is an estimate: the save did not record it.
    pub exact: bool,
}

impl AloneLen {
    /// Maximum bytes of a chunk of `plain_len` bytes that is encoded without its base. More than that was not foreseen.
    #[must_use]
    pub fn most(self, plain_len: u32) -> u32 {
        let tolerance = if self.exact { 0 } else { self.bytes / 4 };
        alone_len_max(self.bytes.saturating_add(tolerance), plain_len)
    }
}

/// Chunks of a tree that are wanted at one place.
pub struct TravelTree<'a> {
    /// Tree.
    pub saved: &'a Saved,
    /// Its wanted chunks.
    pub wanted: &'a [u32],
    /// True for a chunk that may travel without its base.
    pub may_come_alone: &'a dyn Fn(u32) -> bool,
    /// State of a chunk at the destination.
    pub held: &'a dyn Fn(u32) -> Held,
}

impl fmt::Debug for TravelTree<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TravelTree").field("name", &self.saved.name).field("wanted", &self.wanted.len()).finish()
    }
}

/// Plans how the wanted chunks of `trees` travel to one place with the fewest bytes in all: a plan for each tree, in which shared chunks
/// are repeated.
///
/// # Errors
/// Damaged, if a map lacks a chunk.
pub fn plan_travel(trees: &[TravelTree<'_>]) -> Result<Vec<TravelPlan>> {
    if let [tree] = trees
        && let Some(plan) = plan_without_bases(tree)?
    {
        return Ok(vec![plan]);
    }
    let (mut forest, mut grown) = Forest::of(trees, Prefer::FewerBytes)?;
    if !forest.is_ordered() {
        (forest, grown) = Forest::of(trees, Prefer::FewerHops)?;
    }
    let decided = decide(&forest.nodes);
    let needed = needed(&forest.nodes, &decided);
    let mut plans = Vec::with_capacity(trees.len());
    for (tree, chunks) in trees.iter().zip(grown) {
        let mut plan = TravelPlan { exact: true, ..TravelPlan::default() };
        for (chunk, at) in chunks {
            if needed[at] {
                plan.needed.push(chunk);
            }
            let node = &forest.nodes[at];
            match decided[at].0 {
                Travel::Stays => {}
                Travel::AsStored => {
                    plan.as_stored.push(chunk);
                    plan.bytes += u64::from(node.stored);
                }
                Travel::Alone => {
                    plan.alone.push(chunk);
                    plan.bytes += u64::from(node.alone);
                    plan.exact &= tree.saved.alone_len(chunk)?.exact;
                }
            }
        }
        plans.push(plan);
    }
    Ok(plans)
}

/// Plan for a tree none of whose wanted chunks has a base.
fn plan_without_bases(tree: &TravelTree<'_>) -> Result<Option<TravelPlan>> {
    let mut needed = tree.wanted.to_vec();
    needed.sort_unstable();
    needed.dedup();
    let mut plan = TravelPlan { exact: true, ..TravelPlan::default() };
    for &chunk in &needed {
        let located = tree.saved.locate(chunk)?;
        if located.base.is_some() {
            return Ok(None);
        }
        if (tree.held)(chunk) == Held::No {
            plan.as_stored.push(chunk);
            plan.bytes += u64::from(located.place.stored_len);
        }
    }
    Ok(Some(TravelPlan { needed, ..plan }))
}

/// Which of two forms of a chunk counts, that two trees store it in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Prefer {
    FewerBytes,
    /// Then each chunk has more hops than its base, whatever the maps of the trees say.
    FewerHops,
}

/// Chunks of some trees, each once.
struct Forest {
    nodes: Vec<TravelNode>,
    places: HashMap<ChunkId, usize>,
    prefer: Prefer,
}

/// Chunks of a tree, ascending, and where each is among the nodes.
type ChunkPlaces = Vec<(u32, usize)>;

impl Forest {
    /// The chunks of `trees`, and the places of each tree's.
    fn of(trees: &[TravelTree<'_>], prefer: Prefer) -> Result<(Self, Vec<ChunkPlaces>)> {
        let mut forest = Self { nodes: Vec::new(), places: HashMap::new(), prefer };
        let grown = trees.iter().map(|tree| forest.add(tree)).collect::<Result<Vec<_>>>()?;
        Ok((forest, grown))
    }

    /// True if each chunk has more hops than its base, so that no chunk is its own base. Forms of several trees can contradict that:
    /// X is a difference to Y in one, and Y to X in another.
    fn is_ordered(&self) -> bool {
        self.nodes.iter().all(|node| {
            let base = node.base.and_then(|base| self.nodes.get(base as usize));
            base.is_none_or(|base| base.hops < node.hops)
        })
    }

    /// Adds the wanted chunks of a tree and their bases; returns where these are.
    fn add(&mut self, tree: &TravelTree<'_>) -> Result<ChunkPlaces> {
        let mut chunks = BTreeMap::new();
        for &chunk in tree.wanted {
            let at = self.node(tree, chunk, &mut chunks)?;
            self.nodes[at].wanted = true;
        }
        Ok(chunks.into_iter().collect())
    }

    /// Index of a chunk, which is added with its bases.
    fn node(&mut self, tree: &TravelTree<'_>, chunk: u32, chunks: &mut BTreeMap<u32, usize>) -> Result<usize> {
        if let Some(&at) = chunks.get(&chunk) {
            return Ok(at);
        }
        let located = tree.saved.locate(chunk)?;
        let base = located.base.map(|base| self.node(tree, base, chunks)).transpose()?;
        let node = TravelNode {
            base: base.and_then(|base| u32::try_from(base).ok()),
            hops: located.place.codec.hops(),
            held: (tree.held)(chunk),
            may_come_alone: (tree.may_come_alone)(chunk),
            alone: tree.saved.alone_len(chunk)?.bytes,
            ..TravelNode::new(located.place.stored_len)
        };
        let at = *self.places.entry(located.id).or_insert(self.nodes.len());
        match self.nodes.get_mut(at) {
            None => self.nodes.push(node),
            Some(there) => {
                let is_better = match self.prefer {
                    Prefer::FewerBytes => node.stored < there.stored,
                    Prefer::FewerHops => (node.hops, node.stored) < (there.hops, there.stored),
                };
                if is_better {
                    *there = TravelNode { wanted: there.wanted, ..node };
                }
            }
        }
        chunks.insert(chunk, at);
        Ok(at)
    }
}

/// For each chunk, true if it is wanted, or the base of a needed chunk that does not travel alone.
fn needed(nodes: &[TravelNode], decided: &[(Travel, bool)]) -> Vec<bool> {
    let mut needed: Vec<bool> = nodes.iter().map(|node| node.wanted).collect();
    for hops in (1..=hops_max(nodes)).rev() {
        for at in 0..nodes.len() {
            let is_alone = decided[at].0 == Travel::Alone;
            if nodes[at].hops != hops || !needed[at] || is_alone {
                continue;
            }
            // A chunk that is there without its base was kept so.
            if let Some(base) = nodes[at].base.filter(|&base| decided[base as usize].1) {
                needed[base as usize] = true;
            }
        }
    }
    needed
}

impl TravelPlan {
    /// True if a base travels that is not among the `wanted` chunks, which ascend.
    #[must_use]
    pub fn has_bases(&self, wanted: &[u32]) -> bool {
        self.as_stored.iter().any(|chunk| wanted.binary_search(chunk).is_err())
    }

    /// Bytes of a needed chunk of `saved` at its destination.
    ///
    /// # Errors
    /// Damaged, if the map lacks the chunk.
    pub fn len_of(&self, saved: &Saved, chunk: u32) -> Result<u32> {
        let located = saved.locate(chunk)?;
        // A chunk that is there without its base was kept so.
        let is_alone = located.base.is_some_and(|base| self.needed.binary_search(&base).is_err());
        if is_alone || self.alone.binary_search(&chunk).is_ok() {
            return Ok(saved.alone_len(chunk)?.bytes);
        }
        Ok(located.place.stored_len)
    }

    /// Chunks that travel, ascending.
    #[must_use]
    pub fn travelling(&self) -> Vec<u32> {
        let mut all = [self.as_stored.as_slice(), &self.alone].concat();
        all.sort_unstable();
        all
    }
}

impl Saved {
    /// Length of a chunk without the base that it is stored with; its stored length if it has none.
    ///
    /// # Errors
    /// Damaged, if the map lacks the chunk.
    pub fn alone_len(&self, chunk: u32) -> Result<AloneLen> {
        let located = self.locate(chunk)?;
        let place = located.place;
        let Some(base) = located.base else { return Ok(AloneLen { bytes: place.stored_len, exact: true }) };
        if place.alone_len > 0 {
            // Whoever saves records any number; no encoding is longer than the chunk.
            return Ok(AloneLen { bytes: place.alone_len.min(place.plain_len), exact: true });
        }
        let (of_base, base) = (u64::from(self.alone_len(base)?.bytes), self.locate(base)?.place);
        let plain = u64::from(place.plain_len);
        let bytes = if base.plain_len == place.plain_len {
            // Numbers of the same tensor, some steps before.
            of_base
        } else {
            // Rounded from numbers twice as long, of which it has the upper half, and hardly anything is saved in the lower.
            of_base.saturating_sub(plain)
        };
        Ok(AloneLen { bytes: u32::try_from(bytes.clamp(1, plain.max(1))).unwrap_or(u32::MAX), exact: false })
    }
}
