//! Adaptive limit of concurrent reads of the repository by an agent of a gang.
//!
//! Other agents wait for each unit that this one reads. Over a slow line, many concurrent reads all finish at the end,
//! and the links of the site idle until then. So the limit starts at one, grows while reads are fast, and shrinks when
//! they are slow.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};

/// Highest limit.
const MOST: usize = 24;
/// A read faster than this raises the limit by one.
const QUICK: Duration = Duration::from_secs(1);
/// A read slower than this lowers the limit by one.
const SLOW: Duration = Duration::from_secs(3);

/// Adaptive concurrency limiter.
#[derive(Debug)]
pub(super) struct AdaptiveLimiter {
    free: Semaphore,
    width: AtomicUsize,
}

/// Permit for one read.
#[derive(Debug)]
pub(super) struct Permit<'a> {
    limiter: &'a AdaptiveLimiter,
    permit: Option<SemaphorePermit<'a>>,
}

impl Default for AdaptiveLimiter {
    fn default() -> Self {
        Self { free: Semaphore::new(1), width: AtomicUsize::new(1) }
    }
}

impl AdaptiveLimiter {
    /// Waits for a permit; first come, first served.
    ///
    /// # Cancel safety
    /// Safe: a dropped waiter gets no permit.
    pub(super) async fn acquire(&self) -> Permit<'_> {
        // Never closed.
        Permit { limiter: self, permit: self.free.acquire().await.ok() }
    }

    fn change(&self, change: impl Fn(usize) -> Option<usize>) -> bool {
        self.width.fetch_update(Ordering::AcqRel, Ordering::Acquire, change).is_ok()
    }
}

impl Permit<'_> {
    /// Reports the duration of the read, which may change the limit.
    pub(super) fn finished(mut self, elapsed: Duration) {
        if elapsed < QUICK && self.limiter.change(|width| (width < MOST).then_some(width + 1)) {
            self.limiter.free.add_permits(1);
        } else if elapsed > SLOW && self.limiter.change(|width| (width > 1).then_some(width - 1)) {
            self.permit.take().into_iter().for_each(SemaphorePermit::forget);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn quick_reads_make_room_and_slow_ones_take_it() {
        let limiter = AdaptiveLimiter::default();
        for n in 1..100 {
            let permit = limiter.acquire().await;
            assert_eq!(limiter.free.available_permits(), n.min(MOST) - 1);
            permit.finished(Duration::from_millis(100));
        }
        assert_eq!(limiter.free.available_permits(), MOST);
        limiter.acquire().await.finished(Duration::from_secs(2));
        assert_eq!(limiter.free.available_permits(), MOST, "neither quick nor slow");
        for _ in 0..100 {
            limiter.acquire().await.finished(Duration::from_secs(10));
        }
        assert_eq!(limiter.free.available_permits(), 1, "one always may");
    }
}
