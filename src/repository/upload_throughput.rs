//! Upload rate of a store: bytes accepted, and the time without idle times.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::clock::Timestamp;

/// Bytes that a store acknowledged, and the time in which at least one upload was in progress.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UploadThroughput {
    /// Bytes.
    pub bytes: u64,
    /// Time. A clock that is set back adds none.
    pub busy: Duration,
}

/// Counter of overlapping uploads.
#[derive(Debug, Default)]
pub(super) struct Uploads(Mutex<Totals>);

#[derive(Debug, Default)]
struct Totals {
    throughput: UploadThroughput,
    /// Number of packs in progress.
    under_way: usize,
    since: Timestamp,
}

impl Uploads {
    /// Records the start of an upload.
    pub(super) fn begin(&self, now: Timestamp) {
        let mut counted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counted.count(now);
        counted.under_way += 1;
    }

    /// Records the end of an upload, of which `bytes` were acknowledged.
    pub(super) fn end(&self, now: Timestamp, bytes: u64) {
        let mut counted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counted.count(now);
        counted.under_way = counted.under_way.saturating_sub(1);
        counted.throughput.bytes += bytes;
    }

    /// Totals up to the last start or end of an upload.
    pub(super) fn throughput(&self) -> UploadThroughput {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).throughput
    }
}

impl Totals {
    fn count(&mut self, now: Timestamp) {
        if self.under_way > 0 {
            self.throughput.busy += now.since(self.since);
        }
        self.since = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_counts_once_and_only_while_something_is_on_its_way() {
        let uploads = Uploads::default();
        let at = |seconds: i64| Timestamp(seconds * 1_000_000_000);
        let throughput = |bytes, seconds| UploadThroughput { bytes, busy: Duration::from_secs(seconds) };
        uploads.begin(at(100));
        uploads.begin(at(102));
        uploads.end(at(105), 10);
        assert_eq!(uploads.throughput(), throughput(10, 5));
        uploads.end(at(106), 20);
        assert_eq!(uploads.throughput(), throughput(30, 6));
        // Idle for long; then one that fails, while the clock is set back.
        uploads.begin(at(500));
        uploads.end(at(498), 0);
        assert_eq!(uploads.throughput(), throughput(30, 6));
    }
}
