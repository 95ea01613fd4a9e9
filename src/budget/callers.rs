//! Memory of saves for callers with limited rights: pools of their own, of which each caller has a share.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::Semaphore;

use super::growing::Limit;
use super::{Budget, GrowingMemory, UNIT, saturating_len};

/// Part of the budget that saves of one caller may take for trees.
const TREE_SHARE: u64 = 8;

/// A pool of all callers, and half of it for each that uses it.
pub(super) struct CallerPools {
    all: Arc<Semaphore>,
    /// Units of one caller.
    share: usize,
    shares: Mutex<HashMap<String, Weak<Semaphore>>>,
}

impl CallerPools {
    pub(super) fn new(units: usize) -> Self {
        Self { all: Arc::new(Semaphore::new(units)), share: units / 2, shares: Mutex::default() }
    }

    /// The pool of one caller, and that of all.
    fn of(&self, caller: &str) -> [Arc<Semaphore>; 2] {
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        let known = shares.get(caller).and_then(Weak::upgrade);
        let own = known.unwrap_or_else(|| {
            shares.retain(|_, share| share.strong_count() > 0);
            let own = Arc::new(Semaphore::new(self.share));
            shares.insert(caller.to_owned(), Arc::downgrade(&own));
            own
        });
        [own, Arc::clone(&self.all)]
    }
}

impl Budget {
    /// Memory, none yet, for what a save knows about its files: their paths, the tensors in them. That of all saves together is
    /// at most half of the budget; that of all saves for callers with limited rights half of this, and that of one `caller` half
    /// again. Like [`Budget::keep`] it never waits, and takes nothing from buffers.
    #[must_use]
    pub fn tree_memory(&self, caller: Option<&str>) -> GrowingMemory {
        let all = Arc::clone(&self.0.trees);
        let Some(caller) = caller else { return GrowingMemory::of([all].into(), self.half("files of saves")) };
        let max = self.0.total / TREE_SHARE;
        let limit = Limit { what: "files of a caller's saves", max, part: "an eighth of the memory budget" };
        let [own, callers] = self.0.trees_of_callers.of(caller);
        GrowingMemory::of([own, callers, all].into(), limit)
    }

    /// Bytes that [`Budget::carve_for_caller`] gives one caller, at most.
    #[must_use]
    pub fn carved_for_caller_max(&self) -> u64 {
        self.0.beside_of_callers.share as u64 * UNIT
    }

    /// As [`Budget::carve_beside_buffers`], for work of a `caller` with limited rights, who may make it last for any time: it
    /// never waits, and leaves to others all that those wait for. Such budgets of all callers together take at most a quarter of
    /// this one, those of one caller half of that. None if too little is left.
    #[must_use]
    pub fn carve_for_caller(&self, caller: &str, bytes: u64) -> Option<Self> {
        let units = self.units(saturating_len(bytes)).ok()?;
        let take = |pool: &Arc<Semaphore>| Arc::clone(pool).try_acquire_many_owned(units).ok();
        let [own, callers] = self.0.beside_of_callers.of(caller);
        let (own, callers) = (take(&own)?, take(&callers)?);
        let carved = take(&self.0.permits).or_else(|| {
            // Buffers that wait for their next use.
            self.0.lock().free.clear();
            take(&self.0.permits)
        })?;
        Some(Self::of(u64::from(units) * UNIT, units as usize, vec![carved, own, callers]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::MEMORY_MIN;

    #[test]
    fn callers_leave_half_of_the_memory_for_trees_to_the_user_and_each_leaves_half_of_theirs() {
        let budget = Budget::new(MEMORY_MIN).unwrap();
        let (half, share) = (budget.total() / 2, budget.total() / 8);
        let mut first = budget.tree_memory(Some("token:a/"));
        assert!(first.try_add(share) && !first.try_add(1));
        assert!(!budget.tree_memory(Some("token:a/")).try_add(1), "all saves of a caller share it");
        let error = first.add(1).unwrap_err().to_string();
        assert!(error.contains("an eighth of the memory budget"), "{error}");
        let (mut second, mut third) = (budget.tree_memory(Some("token:b/")), budget.tree_memory(Some("gpu/c/")));
        assert!(second.try_add(share) && !third.try_add(1), "callers together have half");
        let mut own = budget.tree_memory(None);
        assert!(own.try_add(half / 2) && !own.try_add(1));
        drop((first, own));
        assert!(third.try_add(share), "what was refused is not counted");
        drop(second);
        assert!(budget.tree_memory(Some("token:a/")).try_add(share), "a share is there again once it is given back");
    }

    #[test]
    fn a_caller_gets_its_share_of_any_budget() {
        for more in [0, 1, UNIT, 15 * UNIT, 17 * UNIT] {
            let budget = Budget::new(MEMORY_MIN + more).unwrap();
            assert!(budget.carve_for_caller("token:a/", budget.carved_for_caller_max()).is_some(), "{more}");
        }
    }

    #[tokio::test]
    async fn what_callers_carve_out_is_none_that_others_wait_for() {
        let budget = Budget::new(MEMORY_MIN).unwrap();
        let share = budget.carved_for_caller_max();
        let first = budget.carve_for_caller("token:a/", share).unwrap();
        assert!(budget.carve_for_caller("token:a/", 1).is_none(), "it has its share");
        let second = budget.carve_for_caller("gpu/b/", share).unwrap();
        assert!(budget.carve_for_caller("token:c/", 1).is_none(), "callers have theirs");
        let half = futures::FutureExt::now_or_never(budget.carve_beside_buffers(budget.total() / 2));
        let half = half.expect("it is there").unwrap();
        drop(first);
        assert!(budget.carve_for_caller("token:c/", share).is_some(), "they do not wait for others either");
        drop((second, half));
        let whole = usize::try_from(budget.total()).unwrap();
        let buffer = budget.buffer(whole).await.unwrap();
        assert!(budget.carve_for_caller("token:a/", 1).is_none());
        drop(buffer);
        assert!(budget.carve_for_caller("token:a/", share).is_some(), "free buffers make room");
        budget.buffer(whole).await.unwrap();
    }
}
