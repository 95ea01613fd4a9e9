//! Turns at what several callers share.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Counting semaphore that serves requests in their order, with a limit of those of one caller: one with many requests delays another
/// by its share alone.
#[derive(Debug)]
pub(crate) struct FairTurns<K> {
    all: Arc<Semaphore>,
    /// Turns and requests in the queue of one caller, at most.
    share: usize,
    callers: Mutex<HashMap<K, Weak<Semaphore>>>,
}

/// A turn, which ends when it is dropped.
#[derive(Debug)]
pub(crate) struct FairTurn {
    _all: Option<OwnedSemaphorePermit>,
    _own: Option<OwnedSemaphorePermit>,
}

/// Reason why a caller gets no turn now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// The caller has its whole share.
    Share,
    /// All turns are taken.
    All,
}

impl<K: Eq + Hash> FairTurns<K> {
    /// `count` turns at a time, of which a caller has `share` at most.
    pub(crate) fn new(count: usize, share: usize) -> Self {
        Self { all: Arc::new(Semaphore::new(count)), share, callers: Mutex::default() }
    }

    /// Waits for a turn of `caller`.
    ///
    /// # Cancel safety
    /// Safe: the request leaves the queue.
    pub(crate) async fn take(&self, caller: K) -> FairTurn {
        let own = self.of(caller);
        // Neither is ever closed.
        let own = own.acquire_owned().await.ok();
        let all = Arc::clone(&self.all).acquire_owned().await.ok();
        FairTurn { _all: all, _own: own }
    }

    /// A turn of `caller`, if there is one now.
    ///
    /// # Errors
    /// The reason why there is none.
    pub(crate) fn try_take(&self, caller: K) -> Result<FairTurn, Taken> {
        let own = self.of(caller).try_acquire_owned().map_err(|_| Taken::Share)?;
        let all = Arc::clone(&self.all).try_acquire_owned().map_err(|_| Taken::All)?;
        Ok(FairTurn { _all: Some(all), _own: Some(own) })
    }

    fn of(&self, caller: K) -> Arc<Semaphore> {
        let mut callers = self.callers.lock().unwrap_or_else(PoisonError::into_inner);
        callers.retain(|_, own| own.strong_count() > 0);
        let own = callers.entry(caller).or_default();
        own.upgrade().unwrap_or_else(|| {
            let new = Arc::new(Semaphore::new(self.share));
            *own = Arc::downgrade(&new);
            new
        })
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_caller_with_many_requests_delays_another_by_one() {
        let turns = FairTurns::new(1, 1);
        let first = turns.take("a").await;
        let (mut second, mut third) = (Box::pin(turns.take("a")), Box::pin(turns.take("a")));
        assert!(second.as_mut().now_or_never().is_none() && third.as_mut().now_or_never().is_none());
        let mut other = Box::pin(turns.take("b"));
        assert!(other.as_mut().now_or_never().is_none(), "one at a time");
        drop(first);
        let other = other.as_mut().now_or_never().expect("its turn comes before the others of a");
        drop(other);
        drop(second.await);
        drop(third.await);
        assert!(turns.take("c").now_or_never().is_some());
        assert_eq!(turns.callers.lock().unwrap().len(), 1, "callers who wait for nothing are forgotten");
    }

    #[tokio::test]
    async fn a_caller_has_its_share_and_cancelled_requests_leave_the_queue() {
        let turns = FairTurns::new(4, 2);
        let held = [turns.take("a").await, turns.take("a").await];
        let mut third = Box::pin(turns.take("a"));
        assert!(third.as_mut().now_or_never().is_none());
        let others = [turns.take("b").await, turns.take("b").await];
        drop(third);
        drop(held);
        assert!(turns.take("c").now_or_never().is_some());
        drop(others);
    }
}
