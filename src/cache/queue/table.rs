//! Hash table from keys to node numbers: open addressing with five bytes per slot; the keys are in the nodes.

/// No node.
pub(super) const NONE: u32 = u32::MAX;
/// Slots of an empty table.
const SLOTS_MIN: usize = 16;
/// The tag of a slot without a node.
const VACANT: u8 = 0;

/// Access to the keys of nodes.
pub(super) trait Keys {
    /// The key of a node.
    fn key(&self, node: u32) -> u64;
}

/// A hash table of node numbers, at most three quarters full. A tag of seven bits in each slot excludes most other keys without
/// an access to their node, which in a large cache would wait for memory.
///
/// Chunk ids are BLAKE3 digests, but an attacker can choose some bits of them by trying many chunks. So keys are multiplied by a
/// secret number of this cache, to prevent deliberate collisions.
#[derive(Debug)]
pub(super) struct Table {
    tags: Vec<u8>,
    nodes: Vec<u32>,
    used: usize,
    odd: u64,
}

impl Table {
    /// Creates an empty table with the secret `seed`.
    pub(super) fn new(seed: u64) -> Self {
        Self { tags: vec![VACANT; SLOTS_MIN], nodes: vec![NONE; SLOTS_MIN], used: 0, odd: seed | 1 }
    }

    /// Reserves slots for `more` nodes.
    pub(super) fn reserve(&mut self, more: usize, keys: &impl Keys) {
        let wanted = (self.used + more).saturating_mul(4).div_ceil(3).next_power_of_two();
        if wanted > self.tags.len() {
            let old = std::mem::replace(&mut self.nodes, vec![NONE; wanted]);
            let tags = std::mem::replace(&mut self.tags, vec![VACANT; wanted]);
            for (node, _) in old.into_iter().zip(tags).filter(|(_, tag)| *tag != VACANT) {
                self.place(node, keys.key(node));
            }
        }
    }

    /// Prefetches the slots of these keys into the CPU cache; independent loads overlap.
    pub(super) fn approach(&self, keys: impl Iterator<Item = u64>) {
        let seen = keys.fold(0, |seen, key| {
            let (at, _) = self.home(key);
            seen ^ u32::from(self.tags[at]) ^ self.nodes[at]
        });
        std::hint::black_box(seen);
    }

    /// The node of `key`.
    pub(super) fn find(&self, key: u64, keys: &impl Keys) -> Option<u32> {
        self.probe(key, keys).map(|at| self.nodes[at])
    }

    /// Adds `node`, whose key is not in the table.
    pub(super) fn insert(&mut self, node: u32, keys: &impl Keys) {
        if (self.used + 1) * 4 > self.tags.len() * 3 {
            self.reserve(self.used.max(SLOTS_MIN), keys);
        }
        self.place(node, keys.key(node));
        self.used += 1;
    }

    /// Removes the node of `key` and moves later entries up. Without tombstones, lookups do not become slower.
    pub(super) fn remove(&mut self, key: u64, keys: &impl Keys) -> Option<u32> {
        let mut hole = self.probe(key, keys)?;
        let (node, mask) = (self.nodes[hole], self.tags.len() - 1);
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            if self.tags[at] == VACANT {
                break;
            }
            let (home, _) = self.home(keys.key(self.nodes[at]));
            // An entry may move if the hole is between its home slot and its slot, with wraparound.
            if (at.wrapping_sub(home) & mask) >= (at.wrapping_sub(hole) & mask) {
                (self.nodes[hole], self.tags[hole]) = (self.nodes[at], self.tags[at]);
                hole = at;
            }
        }
        (self.nodes[hole], self.tags[hole]) = (NONE, VACANT);
        self.used -= 1;
        Some(node)
    }

    /// The slot of `key`.
    fn probe(&self, key: u64, keys: &impl Keys) -> Option<usize> {
        let (mut at, tag) = self.home(key);
        loop {
            let found = self.tags[at];
            if found == VACANT {
                return None;
            }
            if found == tag && keys.key(self.nodes[at]) == key {
                return Some(at);
            }
            at = (at + 1) & (self.tags.len() - 1);
        }
    }

    /// Puts a node into the first free slot from its home slot on.
    fn place(&mut self, node: u32, key: u64) {
        let (mut at, tag) = self.home(key);
        while self.tags[at] != VACANT {
            at = (at + 1) & (self.tags.len() - 1);
        }
        (self.nodes[at], self.tags[at]) = (node, tag);
    }

    /// Home slot of `key`, from the high bits of the product, which depend on all bits of the key; and its tag, from other bits,
    /// never zero.
    fn home(&self, key: u64) -> (usize, u8) {
        let product = key.wrapping_mul(self.odd);
        let bits = self.tags.len().trailing_zeros();
        let [_, _, tag, ..] = product.to_le_bytes();
        (usize::try_from(product >> (64 - bits)).unwrap_or(0), tag | 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    impl Keys for Vec<u64> {
        fn key(&self, node: u32) -> u64 {
            self[node as usize]
        }
    }

    proptest! {
        /// Keys that all begin at few homes, so that they stand in each other's way.
        #[test]
        fn it_agrees_with_a_map(steps in proptest::collection::vec((any::<bool>(), 0u64..60), 0..400)) {
            let nodes: Vec<u64> = (0..60).map(|n| (n % 3) << 60 | n).collect();
            let (mut table, mut model) = (Table::new(0), HashMap::new());
            for (add, n) in steps {
                let (key, node) = (nodes[usize::try_from(n).unwrap()], u32::try_from(n).unwrap());
                if add && !model.contains_key(&key) {
                    table.insert(node, &nodes);
                    model.insert(key, node);
                } else if !add {
                    prop_assert_eq!(table.remove(key, &nodes), model.remove(&key));
                }
                for &key in &nodes {
                    prop_assert_eq!(table.find(key, &nodes), model.get(&key).copied());
                }
            }
        }
    }
}
