//! Pauses between the tries of one thing: each about twice as long as the last, with jitter, so that those who failed together do
//! not try again together.

use std::time::Duration;

use crate::id::WriteId;

/// Exponential backoff with jitter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backoff {
    max: Duration,
    next: Duration,
}

impl Backoff {
    /// Pauses of about `first`, then twice as long each time, up to `max`.
    pub(crate) const fn new(first: Duration, max: Duration) -> Self {
        Self { max, next: first }
    }

    /// The next pause: between half and all of the current length.
    pub(crate) fn pause(&mut self) -> Duration {
        let length = self.next;
        self.next = length.saturating_mul(2).min(self.max);
        let [.., random] = WriteId::random().to_bytes();
        length / 2 + length / 2 * u32::from(random) / 256
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_differ() {
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_millis(350));
        for length in [100, 200, 350, 350] {
            let length = Duration::from_millis(length);
            let pause = backoff.pause();
            assert!(pause >= length / 2 && pause <= length, "{pause:?} of {length:?}");
        }
        let second = || Backoff::new(Duration::from_secs(1), Duration::from_secs(1)).pause();
        assert!((0..10).any(|_| second() != second()));
    }
}
