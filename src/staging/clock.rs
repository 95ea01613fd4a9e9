//! Clock of one staging: the time that each stage took, and when the first tensor was complete.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::progress::TimeSum;

/// Counts the bytes of tensors as they arrive, and the time of the stages.
#[derive(Debug)]
pub struct StageClock {
    begun: Instant,
    /// Bytes of each tensor that have not arrived yet.
    missing: Vec<AtomicU64>,
    /// Nanoseconds; 0 until the first tensor is complete.
    first_tensor: AtomicU64,
    decode: TimeSum,
    wait: TimeSum,
    copy: TimeSum,
}

/// Times of one staging, in seconds. Stages run at the same time on several threads, so their sum is larger than `total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StageTimes {
    /// From the start to the last byte.
    pub total: f64,
    /// From the start until all bytes of one tensor were there.
    pub first_tensor: f64,
    /// Reading from the repository, the cache or peers, summed over all reads.
    pub read: f64,
    /// Decoding and verifying, summed over all threads. For raw chunks in a local file this includes reading them.
    pub decode: f64,
    /// Waiting for pinned memory, summed over all threads.
    pub wait: f64,
    /// Copying to the device, by its own clock.
    pub copy: f64,
}

impl StageTimes {
    /// Sum of the stages over the total: how many of them ran at a time, on average, those of several threads counted each.
    #[must_use]
    pub fn overlap(&self) -> f64 {
        if self.total > 0.0 { (self.read + self.decode + self.copy) / self.total } else { 0.0 }
    }
}

impl StageClock {
    /// Starts the clock, for tensors of `lens` bytes.
    pub fn start(lens: impl IntoIterator<Item = u64>) -> Self {
        Self {
            begun: Instant::now(),
            missing: lens.into_iter().map(AtomicU64::new).collect(),
            first_tensor: AtomicU64::new(0),
            decode: TimeSum::default(),
            wait: TimeSum::default(),
            copy: TimeSum::default(),
        }
    }

    /// Runs `decode`, and counts its time.
    pub fn decoding<T>(&self, decode: impl FnOnce() -> T) -> T {
        self.decode.measure(decode)
    }

    /// Runs `wait`, and counts its time.
    pub fn waiting<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.wait.measure(wait)
    }

    /// Counts the time of a copy.
    pub fn copied(&self, took: Duration) {
        self.copy.add(took);
    }

    /// Counts `len` bytes of a tensor that have arrived.
    pub fn arrived(&self, tensor: usize, len: usize) {
        let Some(missing) = self.missing.get(tensor) else { return };
        // The same bytes may come twice, after an error.
        let len = len as u64;
        let was = missing.fetch_update(Ordering::AcqRel, Ordering::Acquire, |was| Some(was.saturating_sub(len)));
        if was.is_ok_and(|was| 0 < was && was <= len) {
            let now = nanoseconds(self.begun.elapsed()).max(1);
            let _ = self.first_tensor.compare_exchange(0, now, Ordering::AcqRel, Ordering::Acquire);
        }
    }

    /// Times until now; reads took `read` together.
    #[must_use]
    pub fn times(&self, read: Duration) -> StageTimes {
        let first = Duration::from_nanos(self.first_tensor.load(Ordering::Acquire));
        StageTimes {
            total: self.begun.elapsed().as_secs_f64(),
            first_tensor: first.as_secs_f64(),
            read: read.as_secs_f64(),
            decode: self.decode.get().as_secs_f64(),
            wait: self.wait.get().as_secs_f64(),
            copy: self.copy.get().as_secs_f64(),
        }
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_complete_tensor_counts() {
        let clock = StageClock::start([10, 4, 0]);
        clock.arrived(0, 6);
        clock.arrived(7, 6);
        assert!(clock.times(Duration::ZERO).first_tensor <= 0.0);
        clock.arrived(1, 4);
        let first = clock.times(Duration::ZERO).first_tensor;
        assert!(first > 0.0);
        clock.arrived(0, 4);
        clock.arrived(0, 4);
        assert!(clock.times(Duration::ZERO).first_tensor <= first);
    }

    #[test]
    fn stages_add_up() {
        let clock = StageClock::start([1]);
        clock.decoding(|| std::thread::sleep(Duration::from_millis(2)));
        clock.waiting(|| std::thread::sleep(Duration::from_millis(2)));
        clock.copied(Duration::from_secs(4));
        let times = clock.times(Duration::from_secs(2));
        assert!(times.decode >= 0.002 && times.wait >= 0.002 && times.copy >= 4.0 && times.read >= 2.0);
        let times = StageTimes { total: 4.0, read: 2.0, decode: 3.0, wait: 9.0, copy: 3.0, first_tensor: 1.0 };
        assert!((times.overlap() - 2.0).abs() < 1e-9);
        assert!(StageTimes::default().overlap().abs() < 1e-9);
    }
}
