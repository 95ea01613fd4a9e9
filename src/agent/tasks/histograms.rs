//! Durations and sizes of ended tasks.

use std::time::Duration;

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::agent::view::{TaskKind, TaskState};
use crate::limits::MIB;
use crate::metrics::{TASK_SECONDS, TASK_SIZE};

type Histograms<const N: usize> = Family<[(&'static str, &'static str); N], Histogram, fn() -> Histogram>;

/// Histograms of ended tasks. Clones share them.
#[derive(Clone, Debug)]
pub(in crate::agent) struct TaskHistograms {
    /// By kind and result.
    seconds: Histograms<2>,
    /// Stored bytes that were moved, by kind.
    bytes: Histograms<1>,
}

impl Default for TaskHistograms {
    fn default() -> Self {
        Self {
            // From 0.1 s to 1.8 h.
            seconds: Family::new_with_constructor(|| Histogram::new(exponential_buckets(0.1, 4.0, 9))),
            // From 1 MiB to 4 TiB.
            bytes: Family::new_with_constructor(|| Histogram::new(exponential_buckets(MIB as f64, 8.0, 8))),
        }
    }
}

impl TaskHistograms {
    /// Counts a task that ended as `end`, after `took`, and moved `bytes`.
    pub(super) fn observe(&self, kind: TaskKind, end: TaskState, took: Duration, bytes: u64) {
        let kind = ("kind", kind.word());
        self.seconds.get_or_create(&[kind, ("result", end.word())]).observe(took.as_secs_f64());
        self.bytes.get_or_create(&[kind]).observe(bytes as f64);
    }

    pub(in crate::agent) fn register(&self, registry: &mut Registry) {
        registry.register(TASK_SECONDS.name, TASK_SECONDS.help, self.seconds.clone());
        registry.register(TASK_SIZE.name, TASK_SIZE.help, self.bytes.clone());
    }
}
