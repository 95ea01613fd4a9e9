//! Token bucket with a rate, and a burst of two seconds' worth. Pure.

use std::time::Duration;

/// Seconds' worth of tokens in a full bucket.
const BURST: f64 = 2.0;

/// A token bucket (<https://www.rfc-editor.org/rfc/rfc2697>, with one rate and one size).
#[derive(Clone, Copy, Debug)]
pub(super) struct Bucket {
    rate: f64,
    left: f64,
    at: Duration,
}

impl Bucket {
    /// Full bucket at `now`, with `rate` tokens a second.
    pub(super) fn new(rate: u32, now: Duration) -> Self {
        let rate = f64::from(rate);
        Self { rate, left: rate * BURST, at: now }
    }

    /// Takes a token, if there is one.
    pub(super) fn take(&mut self, now: Duration) -> bool {
        self.fill(now);
        if self.left < 1.0 {
            return false;
        }
        self.left -= 1.0;
        true
    }

    /// True if it is full again.
    pub(super) fn is_full(&mut self, now: Duration) -> bool {
        self.fill(now);
        self.left >= self.rate * BURST
    }

    fn fill(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.at).as_secs_f64();
        self.left = (self.left + passed * self.rate).min(self.rate * BURST);
        self.at = self.at.max(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_then_the_rate() {
        let at = Duration::from_millis;
        let mut bucket = Bucket::new(10, at(0));
        assert_eq!((0..100).filter(|_| bucket.take(at(0))).count(), 20);
        assert_eq!((0..100).filter(|_| bucket.take(at(500))).count(), 5);
        assert!(!bucket.is_full(at(1000)));
        assert!(bucket.is_full(at(9000)));
        assert_eq!((0..100).filter(|_| bucket.take(at(8000))).count(), 20, "time never goes back");
    }
}
