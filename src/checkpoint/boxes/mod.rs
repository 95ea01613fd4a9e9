//! Boxes of tensors: requested elements, elements of parts, and the bytes that they share.

mod cover;
mod runs;
mod slices;
#[cfg(test)]
mod tests;

use std::fmt;

pub use cover::{Uncovered, cover};
pub use runs::{Run, Runs};
pub use slices::{Shard, Slices};

/// A box of a tensor: offset and length along each dimension; without dimensions, a scalar.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TensorBox {
    /// Offsets along each dimension.
    pub offsets: Vec<u64>,
    /// Elements along each dimension; as many as offsets.
    pub shape: Vec<u64>,
}

impl TensorBox {
    /// All of a tensor of `shape`.
    #[must_use]
    pub fn whole(shape: &[u64]) -> Self {
        Self { offsets: vec![0; shape.len()], shape: shape.to_vec() }
    }

    /// True if it has no element.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// True if it contains all elements of `other`.
    #[must_use]
    pub fn contains(&self, other: &Self) -> bool {
        other.is_empty() || self.intersection(other).is_some_and(|common| common == *other)
    }

    /// Intersection of the two; none if it has no element, or if they are of different ranks.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Option<Self> {
        if self.shape.len() != other.shape.len() {
            return None;
        }
        let mut common = Self::default();
        for ((start, len), (other_start, other_len)) in self.dimensions().zip(other.dimensions()) {
            let from = start.max(other_start);
            let to = start.saturating_add(len).min(other_start.saturating_add(other_len));
            if from >= to {
                return None;
            }
            common.offsets.push(from);
            common.shape.push(to - from);
        }
        Some(common)
    }

    /// Elements outside of `inner`, a box inside of it, as disjoint boxes: at most two for each dimension.
    fn without(&self, inner: &Self) -> Vec<Self> {
        let (mut rest, mut outside) = (self.clone(), Vec::new());
        for (dimension, (from, len)) in inner.dimensions().enumerate() {
            let (Some(&start), Some(&own)) = (self.offsets.get(dimension), self.shape.get(dimension)) else { break };
            for (from, to) in [(start, from), (from + len, start + own)] {
                if from < to {
                    let mut beside = rest.clone();
                    beside.set(dimension, from, to - from);
                    outside.push(beside);
                }
            }
            rest.set(dimension, from, len);
        }
        outside
    }

    fn set(&mut self, dimension: usize, from: u64, len: u64) {
        if let (Some(offset), Some(shape)) = (self.offsets.get_mut(dimension), self.shape.get_mut(dimension)) {
            (*offset, *shape) = (from, len);
        }
    }

    /// Start and length along each dimension.
    fn dimensions(&self) -> impl DoubleEndedIterator<Item = (u64, u64)> + ExactSizeIterator + '_ {
        self.offsets.iter().copied().zip(self.shape.iter().copied())
    }
}

/// Displayed as slices: `[0:128, 3:5]`.
impl fmt::Display for TensorBox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (at, (from, len)) in self.dimensions().enumerate() {
            write!(f, "{}{from}:{}", if at == 0 { "" } else { ", " }, from.saturating_add(len))?;
        }
        f.write_str("]")
    }
}
