//! Decision how chunks travel, each with its base or without: the fewest bytes in all.

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

/// A chunk of a plan: one that is wanted, or that others need.
#[derive(Clone, Copy, Debug)]
pub struct TravelNode {
    /// Index of its base.
    pub base: Option<u32>,
    /// Chunks to decode before it; its base has fewer.
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
            (_, false) => without.saturating_add(without / NEARLY),
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

/// Maximum hops of the chunks.
pub(super) fn hops_max(nodes: &[TravelNode]) -> u8 {
    nodes.iter().map(|node| node.hops).max().unwrap_or(0)
}

/// Tolerance: a base travels if that takes at most one part in this many more bytes than its dependents without it. It need not be encoded
/// anew, and later chunks may need it. A bundle that is stored whole takes about as many bytes as its parts.
const NEARLY: u64 = 1024;

/// Decides how each of `nodes` travels, with the fewest bytes in all; and whether it is at the destination afterwards.
#[must_use]
pub fn decide(nodes: &[TravelNode]) -> Vec<(Travel, bool)> {
    let mut dependents = vec![Dependents::default(); nodes.len()];
    let hops_max = hops_max(nodes);
    for hops in (1..=hops_max).rev() {
        for (at, node) in nodes.iter().enumerate().filter(|(_, node)| node.hops == hops) {
            let own = dependents[at];
            if let Some(base) = node.base.and_then(|base| dependents.get_mut(base as usize)) {
                base.with = base.with.saturating_add(node.choose(own, true).0);
                base.without = base.without.saturating_add(node.choose(own, false).0);
            }
        }
    }
    let mut decided = vec![(Travel::Stays, false); nodes.len()];
    for hops in 0..=hops_max {
        for (at, node) in nodes.iter().enumerate().filter(|(_, node)| node.hops == hops) {
            let has_base = node.base.is_none_or(|base| decided.get(base as usize).is_some_and(|(_, there)| *there));
            let (_, way) = node.choose(dependents[at], has_base);
            decided[at] = (way, node.is_there(way, has_base));
        }
    }
    decided
}
