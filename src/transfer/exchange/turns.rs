//! How many reads of the repository go on at the same time in a gang.
//!
//! Others wait for each unit that an agent of a gang brings. If all that fall to it come at once over a thin line, all come at the
//! end, and the site's own lines idle until then: the first must come first. So it begins with one, and takes more while they come
//! quickly.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};

/// Reads at the same time, at most.
const MOST: usize = 24;
/// A read that took less leaves room for one more.
const QUICK: Duration = Duration::from_secs(1);
/// After one that took more there is one less.
const SLOW: Duration = Duration::from_secs(3);

/// Turns to read.
#[derive(Debug)]
pub(super) struct Turns {
    free: Semaphore,
    width: AtomicUsize,
}

/// Somebody's turn.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    turns: &'a Turns,
    permit: Option<SemaphorePermit<'a>>,
}

impl Default for Turns {
    fn default() -> Self {
        Self { free: Semaphore::new(1), width: AtomicUsize::new(1) }
    }
}

impl Turns {
    /// The next turn, in the order of those who ask.
    ///
    /// # Cancel safety
    /// Safe: who no longer waits has no turn.
    pub(super) async fn turn(&self) -> Turn<'_> {
        // Never closed.
        Turn { turns: self, permit: self.free.acquire().await.ok() }
    }

    fn change(&self, change: impl Fn(usize) -> Option<usize>) -> bool {
        self.width.fetch_update(Ordering::AcqRel, Ordering::Acquire, change).is_ok()
    }
}

impl Turn<'_> {
    /// It is over, and took so long.
    pub(super) fn took(mut self, elapsed: Duration) {
        if elapsed < QUICK && self.turns.change(|width| (width < MOST).then_some(width + 1)) {
            self.turns.free.add_permits(1);
        } else if elapsed > SLOW && self.turns.change(|width| (width > 1).then_some(width - 1)) {
            self.permit.take().into_iter().for_each(SemaphorePermit::forget);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn quick_reads_make_room_and_slow_ones_take_it() {
        let turns = Turns::default();
        for n in 1..100 {
            let turn = turns.turn().await;
            assert_eq!(turns.free.available_permits(), n.min(MOST) - 1);
            turn.took(Duration::from_millis(100));
        }
        assert_eq!(turns.free.available_permits(), MOST);
        turns.turn().await.took(Duration::from_secs(2));
        assert_eq!(turns.free.available_permits(), MOST, "neither quick nor slow");
        for _ in 0..100 {
            turns.turn().await.took(Duration::from_secs(10));
        }
        assert_eq!(turns.free.available_permits(), 1, "one always may");
    }
}
