//! Counts of what the agent does for a cluster of Kubernetes, for its metrics.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts of an agent; none of what it does not do.
#[derive(Debug, Default)]
pub(super) struct ClusterCounts {
    pub(super) webhook: OnceLock<WebhookCounts>,
    pub(super) kueue: OnceLock<KueueCounts>,
    pub(super) gates: OnceLock<GateCounts>,
}

/// Counts of the webhook.
#[derive(Debug, Default)]
pub(super) struct WebhookCounts {
    reviews: [Count; ReviewOutcome::ALL.len()],
    pub(super) certificates_issued: Count,
    pub(super) certificates_refused: Count,
}

/// Outcome of a review.
#[derive(Clone, Copy, Debug)]
pub(super) enum ReviewOutcome {
    /// The pod was changed.
    Patched,
    /// It was left as it is.
    Unchanged,
    /// It was refused.
    Refused,
    /// The review failed, and the creator tries again.
    Failed,
}

/// Counts of the controller for Kueue.
#[derive(Debug, Default)]
pub(super) struct KueueCounts {
    /// 1 while this agent decides.
    pub(super) leads: Count,
    /// Workloads that wait for their data.
    pub(super) waiting: Count,
    pub(super) ready: Count,
    pub(super) retried: Count,
    pub(super) rejected: Count,
    pub(super) nominated: Count,
}

/// Counts of the controller of scheduling gates.
#[derive(Debug, Default)]
pub(super) struct GateCounts {
    /// 1 while this agent opens gates.
    pub(super) leads: Count,
    /// Pods that wait for their data.
    pub(super) waiting: Count,
    pub(super) opened: Count,
}

/// A number that threads share.
#[derive(Debug, Default)]
pub(super) struct Count(AtomicU64);

impl Count {
    pub(super) fn add_one(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl ReviewOutcome {
    pub(super) const ALL: [Self; 4] = [Self::Patched, Self::Unchanged, Self::Refused, Self::Failed];

    /// Name in metrics.
    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::Patched => "patched",
            Self::Unchanged => "unchanged",
            Self::Refused => "refused",
            Self::Failed => "failed",
        }
    }
}

impl WebhookCounts {
    pub(super) fn reviewed(&self, review: ReviewOutcome) {
        self.reviews[review as usize].add_one();
    }

    pub(super) fn reviews(&self) -> [(ReviewOutcome, u64); ReviewOutcome::ALL.len()] {
        ReviewOutcome::ALL.map(|review| (review, self.reviews[review as usize].get()))
    }
}
