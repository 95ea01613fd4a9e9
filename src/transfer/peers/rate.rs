//! A smoothed rate.

use std::time::Duration;

use tokio::time::Instant;

/// Time after which a rate is taken while requests follow each other.
const MEASURED_FOR: Duration = Duration::from_secs(1);
/// Time after which a rate is taken when no request is left.
const SHORT: Duration = Duration::from_millis(100);
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

/// Rate of all requests together, over the time in which there was one. A single request among many gets a part of it.
#[derive(Debug, Default)]
pub(super) struct BusyRate {
    rate: Rate,
    /// Requests in progress.
    open: u32,
    /// Last look at the time, while there are requests.
    since: Option<Instant>,
    /// Time with requests before that which is not measured yet.
    busy: Duration,
    /// Bytes that are not measured yet.
    bytes: u64,
}

impl BusyRate {
    /// Counts a request that begins.
    pub(super) fn begin(&mut self, now: Instant) {
        self.since.get_or_insert(now);
        self.open += 1;
    }

    /// Counts `bytes` of a request when they come: at its end they would count for the time since another one ended.
    pub(super) fn came(&mut self, bytes: u64, now: Instant) {
        self.bytes += bytes;
        self.measure(now);
    }

    /// Counts a request that ends.
    pub(super) fn end(&mut self, now: Instant) {
        self.open = self.open.saturating_sub(1);
        self.measure(now);
    }

    fn measure(&mut self, now: Instant) {
        let Some(since) = self.since else { return };
        self.busy += now.duration_since(since);
        self.since = (self.open > 0).then_some(now);
        // A rest of a few milliseconds says nothing for itself.
        let is_long = self.busy >= MEASURED_FOR || (self.open == 0 && self.busy >= SHORT);
        if is_long || (self.open == 0 && self.rate.get().is_none()) {
            self.rate.add(std::mem::take(&mut self.bytes), std::mem::take(&mut self.busy));
        }
    }

    /// Bytes a second, once something was measured.
    pub(super) fn get(&self) -> Option<f64> {
        self.rate.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_at_the_same_time_add_up() {
        let (mut rate, start) = (BusyRate::default(), Instant::now());
        let at = |millis| start + Duration::from_millis(millis);
        (0..4).for_each(|_| rate.begin(at(0)));
        (0..4).for_each(|_| rate.came(2 << 20, at(500)));
        (0..4).for_each(|_| rate.end(at(500)));
        assert!(rate.get().is_some_and(|rate| (rate / f64::from(16 << 20) - 1.0).abs() < 0.01), "{rate:?}");
        // Nothing is measured while nobody asks.
        rate.begin(at(60_000));
        rate.came(8 << 20, at(60_500));
        rate.end(at(60_500));
        assert!(rate.get().is_some_and(|rate| (rate / f64::from(16 << 20) - 1.0).abs() < 0.01), "{rate:?}");
        // Nor lost while somebody always asks.
        rate.begin(at(70_000));
        rate.begin(at(70_900));
        rate.came(64 << 20, at(71_000));
        assert!(rate.get().is_some_and(|rate| rate > f64::from(20 << 20)), "{rate:?}");
    }

    /// Long requests that end one shortly after the other: the last one did not bring its bytes in that time.
    #[test]
    fn requests_that_end_one_after_the_other_do_not_raise_the_rate() {
        let (mut rate, start) = (BusyRate::default(), Instant::now());
        let at = |millis| start + Duration::from_millis(millis);
        (0..3).for_each(|_| rate.begin(at(0)));
        for tick in 1..=50 {
            (0..3).for_each(|_| rate.came(1 << 20, at(tick * 100)));
        }
        (1..=3).for_each(|request| rate.end(at(5_000 + request)));
        assert!(rate.get().is_some_and(|rate| (rate / f64::from(30 << 20) - 1.0).abs() < 0.05), "{rate:?}");
    }

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
