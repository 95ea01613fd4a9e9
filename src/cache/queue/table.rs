//! From a key to the number of its node: open addressing with four bytes a slot, the keys themselves lie in the nodes.

/// No node.
pub(super) const NONE: u32 = u32::MAX;
/// Slots of an empty table.
const SLOTS_MIN: usize = 16;

/// What a table has to know of the nodes it names.
pub(super) trait Keys {
    /// The key of a node.
    fn key(&self, node: u32) -> u64;
}

/// A hash table of node numbers, at most three quarters full.
///
/// Chunk ids are BLAKE3 digests, but whoever can make chunks can choose the bits of a few of them: so keys are multiplied by a
/// number of this cache's own, and nobody outside can make them meet.
#[derive(Debug)]
pub(super) struct Table {
    slots: Vec<u32>,
    used: usize,
    odd: u64,
}

impl Table {
    /// An empty table that mixes with `seed`.
    pub(super) fn new(seed: u64) -> Self {
        Self { slots: vec![NONE; SLOTS_MIN], used: 0, odd: seed | 1 }
    }

    /// Makes room for `more` nodes at once.
    pub(super) fn reserve(&mut self, more: usize, keys: &impl Keys) {
        let wanted = (self.used + more).saturating_mul(4).div_ceil(3).next_power_of_two();
        if wanted > self.slots.len() {
            let old = std::mem::replace(&mut self.slots, vec![NONE; wanted]);
            for node in old.into_iter().filter(|&node| node != NONE) {
                let at = self.vacancy(keys.key(node));
                self.put(at, node);
            }
        }
    }

    /// The node of `key`.
    pub(super) fn find(&self, key: u64, keys: &impl Keys) -> Option<u32> {
        self.probe(key, keys).map(|(_, node)| node)
    }

    /// Adds `node`, whose key is not in the table.
    pub(super) fn insert(&mut self, node: u32, keys: &impl Keys) {
        if (self.used + 1) * 4 > self.slots.len() * 3 {
            self.reserve(self.used.max(SLOTS_MIN), keys);
        }
        let at = self.vacancy(keys.key(node));
        self.put(at, node);
        self.used += 1;
    }

    /// Takes the node of `key` out, and moves what stood behind it up: no graves, so a lookup never gets slower.
    pub(super) fn remove(&mut self, key: u64, keys: &impl Keys) -> Option<u32> {
        let (mut hole, node) = self.probe(key, keys)?;
        let mask = self.slots.len() - 1;
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            let next = self.get(at);
            if next == NONE {
                break;
            }
            let home = self.home(keys.key(next));
            // It may move if the hole lies between its home and where it stands, around the end.
            if (at.wrapping_sub(home) & mask) >= (at.wrapping_sub(hole) & mask) {
                self.put(hole, next);
                hole = at;
            }
        }
        self.put(hole, NONE);
        self.used -= 1;
        Some(node)
    }

    fn probe(&self, key: u64, keys: &impl Keys) -> Option<(usize, u32)> {
        let mask = self.slots.len() - 1;
        let mut at = self.home(key);
        loop {
            let node = self.get(at);
            if node == NONE {
                return None;
            }
            if keys.key(node) == key {
                return Some((at, node));
            }
            at = (at + 1) & mask;
        }
    }

    fn vacancy(&self, key: u64) -> usize {
        let mask = self.slots.len() - 1;
        let mut at = self.home(key);
        while self.get(at) != NONE {
            at = (at + 1) & mask;
        }
        at
    }

    /// Where `key` belongs: the high bits of the product, which depend on all bits of the key.
    fn home(&self, key: u64) -> usize {
        let bits = self.slots.len().trailing_zeros();
        usize::try_from(key.wrapping_mul(self.odd) >> (64 - bits)).unwrap_or(0)
    }

    fn get(&self, at: usize) -> u32 {
        self.slots[at]
    }

    fn put(&mut self, at: usize, node: u32) {
        self.slots[at] = node;
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
