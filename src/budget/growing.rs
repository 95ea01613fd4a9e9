//! Memory of structures that grow and shrink, counted in the budget in steps.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{UNIT, too_much};
use crate::error::Result;
use crate::limits::KIB;

/// Steps in which it is counted.
const GROWTH_STEP: u64 = 64 * KIB;

/// Memory of a structure that grows and shrinks, such as that of [`Budget::tree_memory`](super::Budget::tree_memory); released on drop.
#[derive(Debug)]
pub struct GrowingMemory {
    pool: Arc<Semaphore>,
    max: u64,
    what: &'static str,
    bytes: u64,
    /// `bytes`, rounded up to whole steps of [`GROWTH_STEP`].
    permit: Option<OwnedSemaphorePermit>,
}

impl GrowingMemory {
    pub(super) fn of(pool: &Arc<Semaphore>, max: u64, what: &'static str) -> Self {
        Self { pool: Arc::clone(pool), max, what, bytes: 0, permit: None }
    }

    /// Maximum bytes of all structures of its kind together.
    #[must_use]
    pub fn max(&self) -> u64 {
        self.max
    }

    /// Takes `bytes` more.
    ///
    /// # Errors
    /// Exhausted, with nothing taken, if fewer are left.
    pub fn add(&mut self, bytes: u64) -> Result<()> {
        if self.try_add(bytes) { Ok(()) } else { Err(too_much(self.what, self.max, bytes)) }
    }

    /// Takes `bytes` more; false, with nothing taken, if fewer are left.
    #[must_use]
    pub fn try_add(&mut self, bytes: u64) -> bool {
        let wanted = self.bytes.saturating_add(bytes);
        let more =
            Self::units(wanted).saturating_sub(self.permit.as_ref().map_or(0, OwnedSemaphorePermit::num_permits));
        if more > 0 {
            let taken =
                u32::try_from(more).ok().and_then(|more| Arc::clone(&self.pool).try_acquire_many_owned(more).ok());
            match (taken, &mut self.permit) {
                (None, _) => return false,
                (Some(taken), Some(permit)) => permit.merge(taken),
                (Some(taken), permit) => *permit = Some(taken),
            }
        }
        self.bytes = wanted;
        true
    }

    /// Gives `bytes` back.
    pub fn subtract(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
        let units = Self::units(self.bytes);
        if let Some(permit) = &mut self.permit {
            drop(permit.split(permit.num_permits().saturating_sub(units)));
        }
    }

    fn units(bytes: u64) -> usize {
        usize::try_from(bytes.div_ceil(GROWTH_STEP).saturating_mul(GROWTH_STEP / UNIT)).unwrap_or(usize::MAX)
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
        let (mut one, mut other) = (budget.tree_memory(), budget.tree_memory());
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
        assert!(budget.tree_memory().try_add(half));
    }
}
