//! What is counted, by name: the one list of metric names.

use std::sync::atomic::{AtomicU64, Ordering};

/// Requests and bytes that one store has seen from this process.
#[derive(Debug, Default)]
pub struct StoreCounters {
    counts: [AtomicU64; Metric::ALL.len()],
}

/// A counter of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// `towline_store_get_requests_total`
    GetRequests,
    /// `towline_store_get_bytes_total`
    GetBytes,
    /// `towline_store_put_requests_total`
    PutRequests,
    /// `towline_store_put_bytes_total`
    PutBytes,
    /// `towline_store_list_requests_total`
    ListRequests,
    /// `towline_store_delete_requests_total`
    DeleteRequests,
}

impl Metric {
    /// Every counter, in the order of the enum.
    pub const ALL: [Self; 6] = [
        Self::GetRequests,
        Self::GetBytes,
        Self::PutRequests,
        Self::PutBytes,
        Self::ListRequests,
        Self::DeleteRequests,
    ];

    /// The public name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::GetRequests => "towline_store_get_requests_total",
            Self::GetBytes => "towline_store_get_bytes_total",
            Self::PutRequests => "towline_store_put_requests_total",
            Self::PutBytes => "towline_store_put_bytes_total",
            Self::ListRequests => "towline_store_list_requests_total",
            Self::DeleteRequests => "towline_store_delete_requests_total",
        }
    }
}

impl StoreCounters {
    /// Counts `n` more.
    pub fn add(&self, metric: Metric, n: u64) {
        if let Some(count) = self.counts.get(metric as usize) {
            count.fetch_add(n, Ordering::Relaxed);
        }
    }

    /// The count so far.
    #[must_use]
    pub fn get(&self, metric: Metric) -> u64 {
        self.counts.get(metric as usize).map_or(0, |count| count.load(Ordering::Relaxed))
    }
}
