//! Tree of maxima: finds the first of many numbers that is at least a given one.

/// Numbers, all zero at first.
#[derive(Clone, Debug)]
pub(super) struct MaxTree {
    /// Binary tree: the root is node 1, the children of node i are 2i and 2i + 1, the leaves are the numbers.
    nodes: Vec<u32>,
}

impl MaxTree {
    /// Creates the tree for `count` numbers.
    pub(super) fn new(count: usize) -> Self {
        Self { nodes: vec![0; count.next_power_of_two() * 2] }
    }

    /// Makes room for `count` numbers.
    pub(super) fn grow(&mut self, count: usize) {
        let leaves = self.nodes.len() / 2;
        if count > leaves {
            let old = std::mem::replace(self, Self::new(count));
            (0..leaves).for_each(|at| self.set(at, old.nodes[leaves + at]));
        }
    }

    /// Number `at`.
    #[cfg(test)]
    pub(super) fn get(&self, at: usize) -> u32 {
        self.nodes[self.nodes.len() / 2 + at]
    }

    /// Sets number `at`.
    pub(super) fn set(&mut self, at: usize, height: u32) {
        let mut node = self.nodes.len() / 2 + at;
        self.nodes[node] = height;
        while node > 1 {
            node /= 2;
            let highest = self.nodes[2 * node].max(self.nodes[2 * node + 1]);
            if self.nodes[node] == highest {
                break;
            }
            self.nodes[node] = highest;
        }
    }

    /// Index of the first number that is at least `height`.
    pub(super) fn first(&self, height: u32) -> Option<usize> {
        let leaves = self.nodes.len() / 2;
        let mut node = 1;
        if self.nodes[node] < height {
            return None;
        }
        while node < leaves {
            node *= 2;
            if self.nodes[node] < height {
                node += 1;
            }
        }
        Some(node - leaves)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_agrees_with_a_list(steps in proptest::collection::vec((0usize..70, 0u32..50, 1u32..50), 1..200)) {
            let (mut tree, mut model) = (MaxTree::new(1), vec![0; 70]);
            for (at, height, wanted) in steps {
                tree.grow(at + 1);
                tree.set(at, height);
                model[at] = height;
                prop_assert_eq!(tree.get(at), height);
                prop_assert_eq!(tree.first(wanted), model.iter().position(|height| *height >= wanted));
            }
        }
    }
}
