//! Progress of a long operation: counters that never block the work.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Counters that an operation moves and an entry point renders. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<Counters>);

#[derive(Debug, Default)]
struct Counters {
    phase: Mutex<&'static str>,
    total: AtomicU64,
    done: AtomicU64,
    moved: AtomicU64,
    reading: TimeSum,
}

/// A sum of times that threads add to.
#[derive(Debug, Default)]
pub struct TimeSum(AtomicU64);

impl TimeSum {
    /// Adds `time`.
    pub fn add(&self, time: Duration) {
        self.0.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// The sum until now.
    #[must_use]
    pub fn get(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }

    /// Runs `work`, and adds its time.
    pub fn measure<T>(&self, work: impl FnOnce() -> T) -> T {
        let begun = Instant::now();
        let done = work();
        self.add(begun.elapsed());
        done
    }
}

impl Progress {
    /// Starts a phase of `total` bytes (0: not known yet).
    pub fn phase(&self, name: &'static str, total: u64) {
        *self.0.phase.lock().unwrap_or_else(PoisonError::into_inner) = name;
        self.0.done.store(0, Ordering::Relaxed);
        self.0.total.store(total, Ordering::Relaxed);
    }

    /// More work has come to light.
    pub fn grow(&self, bytes: u64) {
        self.0.total.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Plain bytes were dealt with, whatever it took.
    pub fn advance(&self, bytes: u64) {
        self.0.done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Stored bytes went over the wire or to disk.
    pub fn moved(&self, bytes: u64) {
        self.0.moved.fetch_add(bytes, Ordering::Relaxed);
    }

    /// A read of stored bytes took `time`, beside others.
    pub fn read_for(&self, time: Duration) {
        self.0.reading.add(time);
    }

    /// Current values.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            phase: *self.0.phase.lock().unwrap_or_else(PoisonError::into_inner),
            total: self.0.total.load(Ordering::Relaxed),
            done: self.0.done.load(Ordering::Relaxed),
            moved: self.0.moved.load(Ordering::Relaxed),
            reading: self.0.reading.get(),
        }
    }
}

/// One reading of a [`Progress`]; counts are in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Current phase: "reading", "fetching", ...
    pub phase: &'static str,
    /// Plain bytes to deal with; 0 while unknown.
    pub total: u64,
    /// Plain bytes dealt with.
    pub done: u64,
    /// Stored bytes moved.
    pub moved: u64,
    /// Time of reading stored bytes, summed over reads that ran at the same time.
    pub reading: Duration,
}
