//! Progress of a long operation: counters that never block the work.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Counters that an operation moves and an entry point renders. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<Counters>);

#[derive(Debug, Default)]
struct Counters {
    phase: Mutex<&'static str>,
    total: AtomicU64,
    done: AtomicU64,
    moved: AtomicU64,
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

    /// Current values.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            phase: *self.0.phase.lock().unwrap_or_else(PoisonError::into_inner),
            total: self.0.total.load(Ordering::Relaxed),
            done: self.0.done.load(Ordering::Relaxed),
            moved: self.0.moved.load(Ordering::Relaxed),
        }
    }
}

/// One reading of a [`Progress`]; all but `phase` in bytes.
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
}
