//! Deduplication of equal values in a pickle: the sizes and offsets of parts in a large checkpoint are a few thousand tuples that
//! are written a million times.

use super::{Extent, Node, Object, Pickle, Ref};

/// Maximum members of a tuple that is deduplicated.
const MEMBERS_MAX: usize = 8;
/// Maximum slots of the table.
const SLOTS_MAX: usize = 1 << 16;
/// Bytes of a pickle for each slot: a short pickle is not worth a large table.
const BYTES_PER_SLOT: usize = 64;
const NONE: u32 = u32::MAX;

/// Hash table with the last pure value of each digest: one lookup per value, and a bounded size.
pub(super) struct ValueCache {
    slots: Vec<u32>,
}

impl ValueCache {
    pub(super) fn new(bytes: usize) -> Self {
        let slots = (bytes / BYTES_PER_SLOT).next_power_of_two().clamp(16, SLOTS_MAX);
        Self { slots: vec![NONE; slots] }
    }

    /// True if a tuple of these members is pure, and short enough to be deduplicated.
    pub(super) fn is_pure(pickle: &Pickle<'_>, members: &[Ref]) -> bool {
        let pure = |member: &Ref| match member.node() {
            Some(node) => matches!(pickle.nodes.get(node as usize), Some(Node::Pure(_))),
            None => true,
        };
        members.len() <= MEMBERS_MAX && members.iter().all(pure)
    }

    /// Slot for a pure tuple of these members, and the node in it if it is equal.
    pub(super) fn tuple(&self, pickle: &Pickle<'_>, members: &[Ref]) -> (usize, Option<u32>) {
        let slot = self.slot(members.iter().map(|member| member.0));
        let found = self.found(slot, pickle, |node| match node {
            Node::Pure(Extent { start, len, .. }) => {
                let known = pickle.items.get(start as usize..(start + len) as usize);
                known.is_some_and(|known| known == members)
            }
            _ => false,
        });
        (slot, found)
    }

    /// Slot for the result of calling `class` with the pure tuple `args`, and the node in it if it is equal.
    pub(super) fn made(&self, pickle: &Pickle<'_>, class: Ref, args: Ref) -> (usize, Option<u32>) {
        let slot = self.slot([u32::MAX, class.0, args.0].into_iter());
        let found = self.found(slot, pickle, |node| match node {
            Node::Frozen(object) => {
                let known = pickle.objects.get(object as usize);
                known.is_some_and(|&Object { class: of, args: with, .. }| of == class && with == args)
            }
            _ => false,
        });
        (slot, found)
    }

    /// Stores a node in `slot`, for later equal values.
    pub(super) fn keep(&mut self, slot: usize, node: u32) {
        if let Some(kept) = self.slots.get_mut(slot) {
            *kept = node;
        }
    }

    fn found(&self, slot: usize, pickle: &Pickle<'_>, alike: impl Fn(Node) -> bool) -> Option<u32> {
        let &node = self.slots.get(slot)?;
        pickle.nodes.get(node as usize).copied().filter(|&known| alike(known)).map(|_| node)
    }

    fn slot(&self, words: impl Iterator<Item = u32>) -> usize {
        // Any multiplier works that spreads small numbers over the high bits.
        let mixed =
            words.fold(1_u64, |all, word| (all.rotate_left(23) ^ u64::from(word)).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        usize::try_from(mixed >> 32).unwrap_or_default() & (self.slots.len() - 1)
    }
}
