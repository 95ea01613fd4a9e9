//! Limit of work that takes a core and runs on threads that may block.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Counting semaphore for blocking threads. A holder must wait for neither memory nor another thread: waiters hold both.
#[derive(Debug)]
pub(super) struct Turns {
    free: Mutex<usize>,
    freed: Condvar,
}

/// A turn, which ends when it is dropped.
#[derive(Debug)]
pub(super) struct Turn<'a>(&'a Turns);

impl Turns {
    pub(super) fn new(count: usize) -> Self {
        Self { free: Mutex::new(count), freed: Condvar::new() }
    }

    /// Waits for a turn. Blocking.
    pub(super) fn take(&self) -> Turn<'_> {
        let waited = self.freed.wait_while(self.lock(), |free| *free == 0);
        *waited.unwrap_or_else(PoisonError::into_inner) -= 1;
        Turn(self)
    }

    fn lock(&self) -> MutexGuard<'_, usize> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.lock() += 1;
        self.0.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn only_so_many_run_at_a_time() {
        let (turns, running, most) = (Turns::new(2), AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..16 {
                scope.spawn(|| {
                    let _turn = turns.take();
                    most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    std::thread::yield_now();
                    running.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        assert!((1..=2).contains(&most.load(Ordering::SeqCst)));
        assert_eq!(*turns.lock(), 2);
    }
}
