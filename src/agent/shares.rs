//! Memory that callers with limited rights share: each takes at most as much as it leaves to others.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::Notify;

/// Bytes to share. Clones share them, too.
#[derive(Clone, Debug)]
pub(super) struct Shares(Arc<Pool>);

#[derive(Debug)]
struct Pool {
    total: u64,
    /// Bytes held, by caller.
    held: Mutex<HashMap<String, u64>>,
    freed: Notify,
    waiting: AtomicUsize,
}

/// Bytes held by one caller, until this is dropped.
#[derive(Debug)]
pub(super) struct Share {
    pool: Arc<Pool>,
    caller: String,
    bytes: u64,
}

/// Counts one waiter until it is dropped.
struct Waiting<'a>(&'a AtomicUsize);

/// Bytes in memory, and the share that ends with the last of them.
struct Shared {
    bytes: Bytes,
    _share: Share,
}

impl Shares {
    /// `total` bytes.
    pub(super) fn new(total: u64) -> Self {
        let (held, freed, waiting) = Default::default();
        Self(Arc::new(Pool { total, held, freed, waiting }))
    }

    /// Takes `bytes` for `caller`, if it leaves as much free; the first of a caller only has to fit. More than all is all.
    pub(super) fn try_take(&self, caller: &str, bytes: u64) -> Option<Share> {
        let bytes = bytes.min(self.0.total);
        let mut held = self.0.held();
        let own = held.get(caller).copied().unwrap_or(0);
        let free_of_others = self.0.total - (held.values().sum::<u64>() - own);
        let fits = if own == 0 { bytes <= free_of_others } else { own + bytes <= free_of_others / 2 };
        fits.then(|| {
            *held.entry(caller.to_owned()).or_default() += bytes;
            Share { pool: Arc::clone(&self.0), caller: caller.to_owned(), bytes }
        })
    }

    /// As [`Shares::try_take`], when there is room.
    ///
    /// # Cancel safety
    /// Safe: a dropped wait holds nothing.
    pub(super) async fn take(&self, caller: &str, bytes: u64) -> Share {
        self.0.waiting.fetch_add(1, Ordering::Relaxed);
        let _waiting = Waiting(&self.0.waiting);
        loop {
            let mut freed = std::pin::pin!(self.0.freed.notified());
            freed.as_mut().enable();
            if let Some(share) = self.try_take(caller, bytes) {
                return share;
            }
            freed.await;
        }
    }

    /// True if somebody waits for room.
    pub(super) fn is_wanted(&self) -> bool {
        self.0.waiting.load(Ordering::Relaxed) > 0
    }
}

impl Share {
    /// `bytes`, whose last slice ends the share.
    pub(super) fn of(self, bytes: Bytes) -> Bytes {
        Bytes::from_owner(Shared { bytes, _share: self })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut held = self.pool.held();
        if let Some(own) = held.get_mut(&self.caller) {
            *own -= self.bytes;
            if *own == 0 {
                held.remove(&self.caller);
            }
        }
        drop(held);
        self.pool.freed.notify_waiters();
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Pool {
    fn held(&self) -> MutexGuard<'_, HashMap<String, u64>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;

    #[tokio::test]
    async fn a_caller_leaves_as_much_as_it_takes() {
        let shares = Shares::new(64);
        let first: Vec<_> = std::iter::from_fn(|| shares.try_take("a", 8)).collect();
        assert_eq!(first.len(), 4);
        let second: Vec<_> = std::iter::from_fn(|| shares.try_take("b", 8)).collect();
        assert_eq!(second.len(), 2);
        let third = shares.try_take("c", 16).expect("the first of a caller only has to fit");
        let mut fourth = pin!(shares.take("d", 1));
        assert!(futures::poll!(&mut fourth).is_pending() && shares.is_wanted());
        drop(second);
        drop(fourth.await);
        assert!(!shares.is_wanted());
        let bytes = third.of(Bytes::from_static(b"sent"));
        let last = bytes.slice(3..);
        drop((first, bytes));
        assert_eq!(*shares.0.held(), HashMap::from([("c".to_owned(), 16)]), "a piece is still being sent");
        drop(last);
        assert!(shares.try_take("e", 1000).is_some(), "more than all is all");
        assert!(shares.0.held().is_empty());
    }
}
