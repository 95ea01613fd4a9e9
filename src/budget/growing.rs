//! Memory of structures that grow and shrink, counted in the budget in steps.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::UNIT;
use crate::error::{Error, Result};
use crate::limits::{KIB, MIB};

/// Steps in which it is counted.
const GROWTH_STEP: u64 = 64 * KIB;

/// Memory of a structure that grows and shrinks, such as that of [`Budget::tree_memory`](super::Budget::tree_memory); released on drop.
#[derive(Debug)]
pub struct GrowingMemory {
    /// Pools that count it, each of them all of it.
    pools: Vec<Arc<Semaphore>>,
    limit: Limit,
    bytes: u64,
    /// `bytes`, rounded up to whole steps of [`GROWTH_STEP`], of each pool.
    permits: Vec<OwnedSemaphorePermit>,
}

impl GrowingMemory {
    /// Memory that counts in each of `pools`; `limit` is that of the smallest.
    pub(super) fn of(pools: Vec<Arc<Semaphore>>, limit: Limit) -> Self {
        Self { pools, limit, bytes: 0, permits: Vec::new() }
    }

    /// Maximum bytes of all structures of its kind together.
    #[must_use]
    pub fn max(&self) -> u64 {
        self.limit.max
    }

    /// Name of that part of the budget, in words.
    #[must_use]
    pub fn part(&self) -> &'static str {
        self.limit.part
    }

    /// Takes `bytes` more.
    ///
    /// # Errors
    /// Exhausted, with nothing taken, if fewer are left.
    pub fn add(&mut self, bytes: u64) -> Result<()> {
        if self.try_add(bytes) { Ok(()) } else { Err(self.limit.exceeded(bytes)) }
    }

    /// Takes `bytes` more; false, with nothing taken, if fewer are left.
    #[must_use]
    pub fn try_add(&mut self, bytes: u64) -> bool {
        let wanted = self.bytes.saturating_add(bytes);
        let held = self.permits.first().map_or(0, OwnedSemaphorePermit::num_permits);
        let more = Self::units(wanted).saturating_sub(held);
        if more > 0 {
            let Ok(more) = u32::try_from(more) else { return false };
            let taken = self.pools.iter().map(|pool| Arc::clone(pool).try_acquire_many_owned(more));
            let Ok(taken) = taken.collect::<Result<Vec<_>, _>>() else { return false };
            if self.permits.is_empty() {
                self.permits = taken;
            } else {
                self.permits.iter_mut().zip(taken).for_each(|(permit, taken)| permit.merge(taken));
            }
        }
        self.bytes = wanted;
        true
    }

    /// Gives `bytes` back.
    pub fn subtract(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
        let units = Self::units(self.bytes);
        for permit in &mut self.permits {
            drop(permit.split(permit.num_permits().saturating_sub(units)));
        }
    }

    fn units(bytes: u64) -> usize {
        usize::try_from(bytes.div_ceil(GROWTH_STEP).saturating_mul(GROWTH_STEP / UNIT)).unwrap_or(usize::MAX)
    }
}

/// Limit of all structures of one kind together.
#[derive(Debug)]
pub(super) struct Limit {
    pub(super) what: &'static str,
    /// In bytes.
    pub(super) max: u64,
    /// The same as a part of the budget, in words.
    pub(super) part: &'static str,
}

impl Limit {
    /// Error of structures that would take `bytes` more than the rest of the limit.
    pub(super) fn exceeded(&self, bytes: u64) -> Error {
        Error::exhausted(format!("{} take more memory than they may", self.what))
            .expected(format!("at most {} MiB of all of them together, {}", self.max / MIB, self.part))
            .got(format!("{} MiB more", bytes.div_ceil(MIB)))
            .help("read less at a time, or raise --memory")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::Budget;
    use crate::limits::MEMORY_MIN;

    #[test]
    fn all_trees_together_take_half_of_the_budget() {
        let budget = Budget::new(MEMORY_MIN).unwrap();
        let half = budget.total() / 2;
        let (mut one, mut other) = (budget.tree_memory(None), budget.tree_memory(None));
        assert!(one.try_add(1) && one.try_add(half - GROWTH_STEP - 1) && other.try_add(1));
        assert!(
            !one.try_add(1) && !one.try_add(u64::MAX) && !other.try_add(GROWTH_STEP),
            "each has begun its last step"
        );
        assert!(other.try_add(GROWTH_STEP - 1), "what was refused is not counted");
        one.subtract(GROWTH_STEP);
        assert!(other.try_add(GROWTH_STEP) && !other.try_add(1));
        drop(one);
        assert!(other.try_add(half - 2 * GROWTH_STEP));
        drop(other);
        assert!(budget.tree_memory(None).try_add(half));
    }
}
