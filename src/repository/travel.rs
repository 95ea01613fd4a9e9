//! Which chunks travel to a place that lacks some: as stored, without their base, or not at all. Pure.
//!
//! A chunk that is stored with a base needs that base where it is decoded. A base that is not wanted itself travels only if it has
//! fewer bytes than its dependents save by it; else these travel without it. Chunks and their bases form trees, at most three
//! deep; for each the fewest bytes are found by adding up, from its leaves, what it costs with and without each base.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use super::Saved;
use crate::error::Result;
use crate::id::ChunkId;

/// Cost of what is not possible.
const IMPOSSIBLE: u64 = 1 << 48;

/// State of a chunk at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// It is not there.
    No,
    /// It can be decoded there.
    Whole,
    /// It is there, but lacks its base.
    WithoutBase,
}

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

/// A chunk of a plan: one that is wanted, or that others need.
#[derive(Clone, Copy, Debug)]
pub struct TravelNode {
    /// Index of its base.
    pub base: Option<u32>,
    /// Chunks to decode before it, at most 2; its base has fewer.
    pub hops: u8,
    /// True if it is wanted itself.
    pub wanted: bool,
    /// State at the destination.
    pub held: Held,
    /// True if it may travel without its base.
    pub may_come_alone: bool,
    /// Bytes as it is stored.
    pub stored: u32,
    /// Bytes without its base.
    pub alone: u32,
}

/// Bytes of all dependents of a chunk.
#[derive(Clone, Copy, Debug, Default)]
struct Dependents {
    /// While it is there.
    with: u64,
    /// While it is not.
    without: u64,
}

/// How a chunk travels, in the order of preference between equals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Travel {
    /// Not at all: it is there, or nobody needs it.
    Stays,
    /// In its stored form: a base that it needs is at the destination.
    AsStored,
    /// Without its base.
    Alone,
}

/// Number of hops that no chunk has.
const HOPS_MAX: u8 = 3;

/// Bytes of memory for each chunk that is planned.
pub const TRAVEL_WEIGHT: u64 = 192;

impl TravelNode {
    /// A chunk of `stored` bytes without a base, that is not wanted, and nowhere.
    #[must_use]
    pub fn new(stored: u32) -> Self {
        Self { base: None, hops: 0, wanted: false, held: Held::No, may_come_alone: false, stored, alone: stored }
    }

    /// Fewest bytes for it and its dependents, and how it travels then. `has_base`: its base is at the destination, or it has none.
    fn choose(&self, dependents: Dependents, has_base: bool) -> (u64, Travel) {
        let Dependents { with, without } = dependents;
        let stays = match (self.held, self.wanted) {
            (Held::Whole, _) => return (with, Travel::Stays),
            (Held::WithoutBase, _) if has_base => return (with, Travel::Stays),
            (_, false) => without,
            (_, true) => IMPOSSIBLE,
        };
        let as_stored = if has_base { u64::from(self.stored) } else { IMPOSSIBLE };
        // A chunk that is there already, with a base, is not replaced.
        let may = self.may_come_alone && self.base.is_some() && self.held == Held::No;
        let alone = if may { u64::from(self.alone) } else { IMPOSSIBLE };
        let ways = [
            (stays, Travel::Stays),
            (as_stored.saturating_add(with), Travel::AsStored),
            (alone.saturating_add(with), Travel::Alone),
        ];
        ways.into_iter().min().unwrap_or((stays, Travel::Stays))
    }

    /// True if the chunk is at the destination once everything has travelled.
    fn is_there(&self, way: Travel, has_base: bool) -> bool {
        way != Travel::Stays || self.held == Held::Whole || self.held == Held::WithoutBase && has_base
    }
}

/// Decides how each of `nodes` travels, with the fewest bytes in all; and whether it is at the destination afterwards.
#[must_use]
pub fn decide(nodes: &[TravelNode]) -> Vec<(Travel, bool)> {
    let mut dependents = vec![Dependents::default(); nodes.len()];
    for hops in (1..HOPS_MAX).rev() {
        for (at, node) in nodes.iter().enumerate().filter(|(_, node)| node.hops == hops) {
            let own = dependents[at];
            if let Some(base) = node.base.and_then(|base| dependents.get_mut(base as usize)) {
                base.with = base.with.saturating_add(node.choose(own, true).0);
                base.without = base.without.saturating_add(node.choose(own, false).0);
            }
        }
    }
    let mut decided = vec![(Travel::Stays, false); nodes.len()];
    for hops in 0..HOPS_MAX {
        for (at, node) in nodes.iter().enumerate().filter(|(_, node)| node.hops == hops) {
            let has_base = node.base.is_none_or(|base| decided.get(base as usize).is_some_and(|(_, there)| *there));
            let (_, way) = node.choose(dependents[at], has_base);
            decided[at] = (way, node.is_there(way, has_base));
        }
    }
    decided
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
    let mut forest = Forest::default();
    let grown = trees.iter().map(|tree| forest.add(tree)).collect::<Result<Vec<_>>>()?;
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

/// Chunks of some trees, each once.
#[derive(Default)]
struct Forest {
    nodes: Vec<TravelNode>,
    places: HashMap<ChunkId, usize>,
}

impl Forest {
    /// Adds the wanted chunks of a tree and their bases; returns these, ascending, and where each is.
    fn add(&mut self, tree: &TravelTree<'_>) -> Result<Vec<(u32, usize)>> {
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
            // Of two forms, the smaller one counts.
            Some(there) if node.stored < there.stored => *there = TravelNode { wanted: there.wanted, ..node },
            Some(_) => {}
        }
        chunks.insert(chunk, at);
        Ok(at)
    }
}

/// For each chunk, true if it is wanted, or the base of a needed chunk that does not travel alone.
fn needed(nodes: &[TravelNode], decided: &[(Travel, bool)]) -> Vec<bool> {
    let mut needed: Vec<bool> = nodes.iter().map(|node| node.wanted).collect();
    for hops in (1..HOPS_MAX).rev() {
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

#[cfg(test)]
pub(crate) mod tests {
    use std::num::NonZeroU32;

    use proptest::prelude::*;

    use super::*;
    use crate::codec::Codec;
    use crate::format::{ChunkList, Frame, Manifest, Map, PackRef};
    use crate::id::{ChunkId, Owned, SessionId};
    use crate::name::Name;
    use crate::repository::runs::tests::value;

    /// A chunk of a test: base, stored length, length without the base (0: unknown).
    pub(crate) type Row = (Option<u32>, u32, u32);

    const PLAIN: u32 = 1000;

    /// A tree of `listed` chunks, and bases outside of it.
    pub(crate) fn tree(rows: &[Row], listed: usize) -> Saved {
        let codec = |row: &Row| match row.0 {
            None => Codec::Raw,
            Some(base) if rows[base as usize].0.is_none() => Codec::Difference,
            Some(_) => Codec::Derived,
        };
        let frame = |(nth, row): (usize, &Row)| Frame {
            pack: 0,
            ordinal: u32::try_from(nth).unwrap(),
            offset: 0,
            stored_len: row.1,
            codec: codec(row),
            base: row.0.and_then(|base| NonZeroU32::new(base + 1)),
            alone_len: row.2,
        };
        let ids: Vec<ChunkId> = (0..rows.len()).map(|nth| ChunkId::of(&nth.to_le_bytes())).collect();
        let pack = PackRef { id: Owned::fresh(SessionId::random()), len: 1 << 20, footer_len: 9, chunks: 100 };
        let map = Map {
            manifest: crate::id::ManifestId::of(b"tree"),
            packs: vec![pack],
            frames: rows.iter().enumerate().map(frame).collect(),
            further: ids[listed..].iter().map(|id| (*id, PLAIN)).collect(),
        };
        let chunks = ChunkList { ids: ids[..listed].to_vec(), lens: vec![PLAIN; listed] };
        let manifest = Manifest { chunks, ..Manifest::default() };
        let name: Name = "run/step-1".parse().unwrap();
        Saved::ruled_now(name, value(1, &[]), manifest, map)
    }

    /// Plan for a place that has some chunks, with all that they need.
    pub(crate) fn plan_for(saved: &Saved, wanted: &[u32], senders: &[u32], held: &[u32]) -> TravelPlan {
        let held = |chunk| if held.contains(&chunk) { Held::Whole } else { Held::No };
        plan_where(saved, wanted, &|chunk| senders.contains(&chunk), &held)
    }

    fn plan_where(
        saved: &Saved,
        wanted: &[u32],
        may_come_alone: &dyn Fn(u32) -> bool,
        held: &dyn Fn(u32) -> Held,
    ) -> TravelPlan {
        plan_travel(&[TravelTree { saved, wanted, may_come_alone, held }]).unwrap().remove(0)
    }

    fn plan(saved: &Saved, wanted: &[u32], held: &[u32]) -> (Vec<u32>, Vec<u32>, u64) {
        let all: Vec<u32> = (0..saved.located_chunks()).collect();
        let plan = plan_for(saved, wanted, &all, held);
        (plan.as_stored, plan.alone, plan.bytes)
    }

    #[test]
    fn a_base_travels_only_where_it_pays() {
        // A difference to a base outside of the tree.
        let one = tree(&[(Some(1), 500, 800), (None, 800, 0)], 1);
        assert_eq!(plan(&one, &[0], &[]), (vec![], vec![0], 800));
        assert_eq!(plan(&one, &[0], &[1]), (vec![0], vec![], 500), "the base is there");
        assert_eq!(plan(&one, &[0], &[0]), (vec![], vec![], 0), "all is there");
        assert_eq!(plan(&one, &[0, 1], &[]), (vec![0, 1], vec![], 1300), "the base is wanted");
        let as_stored = plan_for(&one, &[0], &[], &[]);
        assert_eq!((as_stored.as_stored, as_stored.bytes), (vec![0, 1], 1300));
        // Three dependents save more than the base has.
        let three = tree(&[(Some(3), 500, 800), (Some(3), 500, 800), (Some(3), 500, 800), (None, 800, 0)], 3);
        assert_eq!(plan(&three, &[0, 1, 2], &[]), (vec![0, 1, 2, 3], vec![], 2300));
        assert_eq!(plan(&three, &[0, 1], &[]), (vec![], vec![0, 1], 1600));
        assert_eq!(plan(&three, &[0, 1, 2], &[1, 2]), (vec![], vec![0], 800));
    }

    #[test]
    fn trees_that_go_together_share_a_base() {
        // Two differences to the same base, which pays for both and not for one.
        let both = tree(&[(Some(2), 500, 1000), (Some(2), 450, 1000), (None, 800, 0)], 2);
        let (held, may): (&dyn Fn(u32) -> Held, &dyn Fn(u32) -> bool) = (&|_| Held::No, &|_| true);
        let of = |wanted| TravelTree { saved: &both, wanted, may_come_alone: may, held };
        assert_eq!(plan(&both, &[0], &[]), (vec![], vec![0], 1000));
        let plans = plan_travel(&[of(&[0]), of(&[1])]).unwrap();
        let as_stored: Vec<&[u32]> = plans.iter().map(|plan| plan.as_stored.as_slice()).collect();
        assert_eq!(as_stored, [[0, 2], [1, 2]]);
        assert_eq!(plans.iter().map(|plan| plan.needed.len()).collect::<Vec<_>>(), [2, 2]);
    }

    #[test]
    fn chains_are_decided_as_a_whole() {
        // Half the bytes derived from a difference to a base: weights beside their masters.
        let chain = tree(&[(Some(1), 1, 400), (Some(2), 500, 800), (None, 800, 0)], 2);
        assert_eq!(plan(&chain, &[0, 1], &[]), (vec![0], vec![1], 801), "the master alone, and what derives from it");
        assert_eq!(plan(&chain, &[0], &[]), (vec![], vec![0], 400), "nothing but the derived");
        assert_eq!(plan(&chain, &[0], &[2]), (vec![], vec![0], 400), "the master would be more");
        assert_eq!(plan(&chain, &[0], &[1, 2]), (vec![0], vec![], 1));
        assert_eq!(plan(&chain, &[1], &[2]), (vec![1], vec![], 500));
    }

    #[test]
    fn what_is_there_with_a_base_gets_it_and_is_not_sent_again() {
        let one = tree(&[(Some(1), 500, 800), (None, 800, 0)], 1);
        let held = |chunk| if chunk == 0 { Held::WithoutBase } else { Held::No };
        let plan = plan_where(&one, &[0], &|_| true, &held);
        assert_eq!((plan.as_stored, plan.alone, plan.bytes), (vec![1], vec![], 800));
        let held = |chunk| if chunk == 0 { Held::WithoutBase } else { Held::Whole };
        assert_eq!(plan_where(&one, &[0], &|_| true, &held).bytes, 0);
    }

    #[test]
    fn lengths_that_were_not_recorded_are_estimated() {
        let mut saved = tree(&[(Some(1), 500, 0), (None, 700, 0)], 1);
        assert_eq!(saved.alone_len(0).unwrap(), AloneLen { bytes: 700, exact: false });
        assert_eq!(saved.alone_len(1).unwrap(), AloneLen { bytes: 700, exact: true });
        assert!(!plan_for(&saved, &[0], &[0], &[]).exact);
        // Numbers of two bytes, rounded from numbers of four.
        saved.map.further[0].1 = 2 * PLAIN;
        saved.map.frames[1].stored_len = 1700;
        assert_eq!(saved.alone_len(0).unwrap(), AloneLen { bytes: 700, exact: false });
        saved.map.frames[1].stored_len = 2000;
        assert_eq!(saved.alone_len(0).unwrap(), AloneLen { bytes: PLAIN, exact: false });
        // A recorded length is no longer than the chunk, whatever was recorded.
        saved.map.frames[0].alone_len = u32::MAX;
        assert_eq!(saved.alone_len(0).unwrap(), AloneLen { bytes: PLAIN, exact: true });
    }

    /// Fewest bytes, by trying every choice.
    fn fewest(saved: &Saved, wanted: &[u32], held: &[u32]) -> u64 {
        let chunks = saved.located_chunks();
        let mut best = u64::MAX;
        'choices: for mut choice in 0..3_u32.pow(chunks) {
            let mut choices = Vec::new();
            for chunk in 0..chunks {
                let (sent, alone) = (!choice.is_multiple_of(3), choice % 3 == 2);
                choices.push((sent || held.contains(&chunk), sent, alone));
                choice /= 3;
            }
            let mut bytes = 0;
            for (chunk, (there, sent, alone)) in (0..).zip(&choices) {
                let located = saved.locate(chunk).unwrap();
                let needs = *sent && !alone && located.base.is_some_and(|base| !choices[base as usize].0);
                if needs || *alone && located.base.is_none() || wanted.contains(&chunk) && !there {
                    continue 'choices;
                }
                let stored = if *alone { saved.alone_len(chunk).unwrap().bytes } else { located.place.stored_len };
                bytes += if *sent { u64::from(stored) } else { 0 };
            }
            best = best.min(bytes);
        }
        best
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// No other choice has fewer bytes, and everything that is wanted can be decoded.
        #[test]
        fn no_plan_has_fewer_bytes(
            lens in proptest::collection::vec((1u32..900, 1u32..900, 0usize..7), 6),
            wanted in proptest::collection::btree_set(0u32..6, 1..6),
            held in proptest::collection::btree_set(0u32..6, 0..3),
        ) {
            // Two roots, two differences, two derived: the later ones need one of the earlier.
            let base = |nth: usize, pick: usize| match nth {
                0 | 1 => None,
                2 | 3 => Some(u32::try_from(pick % 2).unwrap()),
                _ => Some(u32::try_from(2 + pick % 2).unwrap()),
            };
            let rows: Vec<Row> =
                lens.iter().enumerate().map(|(nth, &(stored, alone, pick))| (base(nth, pick), stored, alone)).collect();
            let saved = tree(&rows, 6);
            // Held chunks are held with their bases.
            let whole = |chunk: &u32| saved.locate(*chunk).unwrap().base.is_none();
            let held: Vec<u32> = held.into_iter().filter(whole).collect();
            let wanted: Vec<u32> = wanted.into_iter().collect();
            let (as_stored, alone, bytes) = plan(&saved, &wanted, &held);
            prop_assert_eq!(bytes, fewest(&saved, &wanted, &held));
            let there = |chunk: &u32| as_stored.contains(chunk) || alone.contains(chunk) || held.contains(chunk);
            prop_assert!(wanted.iter().all(there));
            let needed = plan_for(&saved, &wanted, &[0, 1, 2, 3, 4, 5], &held).needed;
            prop_assert!(needed.iter().all(there) && wanted.iter().all(|chunk| needed.contains(chunk)));
            for chunk in &as_stored {
                prop_assert!(saved.locate(*chunk).unwrap().base.is_none_or(|base| there(&base)));
            }
        }
    }
}
