//! A smoothed rate.

use std::time::Duration;

/// Weight of a new measurement, for one of this many bytes or more.
const GAIN: f64 = 0.25;
const FULL: f64 = 4.0 * (1 << 20) as f64;

/// Rate in bytes a second, smoothed over the moved bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(in crate::transfer) struct Rate {
    value: Option<f64>,
    /// Bytes measured.
    pub(in crate::transfer) bytes: u64,
    /// Duration of all measurements.
    pub(in crate::transfer) time: Duration,
}

impl Rate {
    /// Adds a measurement: `bytes` took `time`.
    pub(in crate::transfer) fn add(&mut self, bytes: u64, time: Duration) {
        if bytes == 0 || time.is_zero() {
            return;
        }
        let now = bytes as f64 / time.as_secs_f64();
        let gain = GAIN * (bytes as f64 / FULL).min(1.0);
        self.value = Some(self.value.map_or(now, |value| value + gain * (now - value)));
        self.bytes += bytes;
        self.time += time;
    }

    /// Bytes a second, once something was measured.
    pub(in crate::transfer) fn get(&self) -> Option<f64> {
        self.value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn follows_what_is_large_and_hardly_what_is_small() {
        let mut rate = Rate::default();
        assert_eq!(rate.get(), None);
        rate.add(8 << 20, Duration::from_secs(1));
        let first = rate.get().unwrap();
        rate.add(1 << 10, Duration::from_secs(1));
        assert!(rate.get().unwrap() > first * 0.99);
        for _ in 0..20 {
            rate.add(8 << 20, Duration::from_secs(4));
        }
        assert!(rate.get().unwrap() < first * 0.3);
    }
}
