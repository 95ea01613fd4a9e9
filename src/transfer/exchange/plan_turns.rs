//! Turns of large plans, whose memory is counted: one plan at a time, and of each caller one in the queue.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A caller with many plans delays another one by one plan.
#[derive(Debug)]
pub(super) struct PlanTurns {
    all: Arc<Semaphore>,
    /// By tenant or token; None for users of the machine.
    callers: Mutex<HashMap<Option<String>, Weak<Semaphore>>>,
}

/// A turn, which ends when it is dropped.
#[derive(Debug)]
pub(super) struct PlanTurn {
    _all: Option<OwnedSemaphorePermit>,
    _own: Option<OwnedSemaphorePermit>,
}

impl Default for PlanTurns {
    fn default() -> Self {
        Self { all: Arc::new(Semaphore::new(1)), callers: Mutex::default() }
    }
}

impl PlanTurns {
    /// Waits for a turn of `caller`. Turns are given in the order of the requests.
    ///
    /// # Cancel safety
    /// Safe: the request leaves the queue.
    pub(super) async fn take(&self, caller: Option<&str>) -> PlanTurn {
        let own = self.of(caller);
        // Neither is ever closed.
        let own = own.acquire_owned().await.ok();
        let all = Arc::clone(&self.all).acquire_owned().await.ok();
        PlanTurn { _all: all, _own: own }
    }

    fn of(&self, caller: Option<&str>) -> Arc<Semaphore> {
        let mut callers = self.callers.lock().unwrap_or_else(PoisonError::into_inner);
        callers.retain(|_, queue| queue.strong_count() > 0);
        let queue = callers.entry(caller.map(str::to_owned)).or_default();
        queue.upgrade().unwrap_or_else(|| {
            let new = Arc::new(Semaphore::new(1));
            *queue = Arc::downgrade(&new);
            new
        })
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_caller_with_many_plans_delays_another_by_one() {
        let turns = PlanTurns::default();
        let first = turns.take(Some("a")).await;
        let (mut second, mut third) = (Box::pin(turns.take(Some("a"))), Box::pin(turns.take(Some("a"))));
        assert!(second.as_mut().now_or_never().is_none() && third.as_mut().now_or_never().is_none());
        let mut other = Box::pin(turns.take(Some("b")));
        assert!(other.as_mut().now_or_never().is_none(), "one at a time");
        drop(first);
        let other = other.as_mut().now_or_never().expect("its turn comes before the others of a");
        drop(other);
        drop(second.await);
        drop(third.await);
        assert!(turns.take(None).now_or_never().is_some());
        assert_eq!(turns.callers.lock().unwrap().len(), 1, "callers who wait for nothing are forgotten");
    }
}
