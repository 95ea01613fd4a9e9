//! Metrics: the one list of their names.

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

impl Metric {
    /// As an agent tells it.
    #[must_use]
    pub const fn family(self) -> Family {
        let help = match self {
            Self::GetRequests => "Requests to a repository's store that read",
            Self::GetBytes => "Bytes read from a repository's store",
            Self::PutRequests => "Requests to a repository's store that write",
            Self::PutBytes => "Bytes written to a repository's store",
            Self::ListRequests => "Requests to a repository's store that list",
            Self::DeleteRequests => "Requests to a repository's store that delete",
        };
        Family { name: self.name(), kind: Kind::Counter, help }
    }
}

/// Kind of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It only grows while the agent runs.
    Counter,
    /// It is what it is now.
    Gauge,
    /// Counts by size, with their sum.
    Histogram,
}

/// Numbers of one name, told apart by labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Family {
    /// The public name.
    pub name: &'static str,
    /// Kind of the numbers.
    pub kind: Kind,
    /// Help text.
    pub help: &'static str,
}

/// Declares the families of an agent.
macro_rules! families {
    ($($constant:ident = $kind:ident $name:literal $help:literal;)*) => {
        $(
            #[doc = concat!("`", $name, "`: ", $help, ".")]
            pub const $constant: Family = Family { name: $name, kind: Kind::$kind, help: $help };
        )*
        /// Every family of an agent, besides those of [`Metric`].
        pub const FAMILIES: &[Family] = &[$($constant),*];
    };
}

families! {
    BUILD_INFO = Gauge "towline_build_info" "1, with the agent's version";
    START_TIME = Gauge "towline_start_time_seconds" "When the agent began, in seconds since 1970";
    READY = Gauge "towline_ready" "Whether the agent is ready: 1 or 0";
    PROBLEMS = Gauge "towline_problems" "Files that the agent could not read again or write: settings, certificates, audit log";
    CERTIFICATE_END = Gauge "towline_certificate_expiry_time_seconds" "When the agent's certificate expires, in seconds since 1970";
    PREEMPTION = Gauge "towline_preemption_notice" "1 once a preemption notice arrived, else 0";
    RESIDENT = Gauge "process_resident_memory_bytes" "Memory of the process";
    TASKS_RUNNING = Gauge "towline_tasks_running" "Running tasks, by kind";
    TASKS = Counter "towline_tasks_total" "Ended tasks, by kind and result";
    TASK_BYTES = Counter "towline_task_bytes_total" "Stored bytes that tasks moved, by kind";
    TASK_RETRIES = Counter "towline_task_retries_total" "Failures that tasks retried, by kind";
    TASK_SECONDS = Histogram "towline_task_seconds" "Durations of ended tasks, by kind and result";
    TASK_SIZE = Histogram "towline_task_size_bytes" "Stored bytes that ended tasks moved, by kind";
    FILE_BYTES = Counter "towline_file_bytes_total" "Bytes of files handed out over HTTP";
    FROM_BYTES = Counter "towline_chunk_from_bytes_total" "Bytes of chunks that were had, by source: cache, site, remote, repository";
    TO_BYTES = Counter "towline_chunk_to_bytes_total" "Bytes of chunks given, by destination: local, site, remote";
    CORRUPT = Counter "towline_chunk_corrupt_total" "Chunks from other agents that failed verification";
    REENCODED = Counter "towline_chunk_reencoded_total" "Chunks of the cache that were encoded without their bases for other agents";
    PEERS = Gauge "towline_peers" "Other agents that are known, by state: up, down";
    PEER_BYTES = Counter "towline_peer_received_bytes_total" "Bytes of chunks that came from another agent, by its address";
    LINKS = Gauge "towline_links" "Connections of other agents that have shown their certificates, calls included";
    HANDSHAKES = Gauge "towline_handshakes" "Connections whose other side has not shown a certificate yet";
    REFUSED = Counter "towline_refused_total" "Connections that gave way in their handshake, or were too many of one agent or in all";
    HANDOFF_BYTES = Gauge "towline_handoff_bytes" "Bytes of checkpoints stored for other agents";
    HANDOFF_SET_ASIDE = Gauge "towline_handoff_set_aside" "Checkpoints of other agents set aside because they could not be saved";
    CACHE_CHUNKS = Gauge "towline_cache_chunks" "Chunks in the cache";
    CACHE_BYTES = Gauge "towline_cache_bytes" "Bytes that the cache's chunks take on the disk";
    CACHE_SLAB_BYTES = Gauge "towline_cache_slab_bytes" "Bytes of the cache's slabs";
    CACHE_CAPACITY = Gauge "towline_cache_capacity_bytes" "Bytes that the cache may grow to";
    CACHE_PINNED = Gauge "towline_cache_pinned_bytes" "Bytes that pinned chunks take";
    CACHE_PROMISED = Gauge "towline_cache_promised_bytes" "Bytes that pinned chunks take once all are there";
    CACHE_PINS = Gauge "towline_cache_pins" "Pins";
    CACHE_JOURNAL = Gauge "towline_cache_journal_bytes" "Bytes of the cache's journal";
    CACHE_HITS = Counter "towline_cache_hits_total" "Reads of the cache that found their chunk";
    CACHE_MISSES = Counter "towline_cache_misses_total" "Reads of the cache that did not";
    CACHE_INSERTS = Counter "towline_cache_inserts_total" "Chunks put into the cache";
    CACHE_REFUSALS = Counter "towline_cache_refusals_total" "Chunks that the cache could not store: it was full, or a write failed";
    CACHE_EVICTIONS = Counter "towline_cache_evictions_total" "Chunks evicted from the cache";
    CACHE_TENANT_BYTES = Gauge "towline_cache_tenant_bytes" "Bytes that count for a tenant, where tenants have quotas";
    CACHE_TENANT_QUOTA = Gauge "towline_cache_tenant_quota_bytes" "Bytes that a tenant may take in the cache";
    WEBHOOK_REVIEWS = Counter "towline_webhook_reviews_total" "Reviews of pods by the webhook, by outcome: patched, unchanged, refused, failed";
    WEBHOOK_CERTIFICATES = Counter "towline_webhook_certificates_total" "Certificates that sidecars asked for, by outcome: issued, refused";
    KUEUE_LEADER = Gauge "towline_kueue_leader" "1 while this agent decides the admission checks of Kueue, else 0";
    KUEUE_WAITING = Gauge "towline_kueue_waiting_workloads" "Workloads of Kueue that wait for their data";
    KUEUE_DECISIONS = Counter "towline_kueue_decisions_total" "Decisions on workloads of Kueue, by state: ready, retry, rejected";
    KUEUE_NOMINATIONS = Counter "towline_kueue_nominations_total" "Clusters nominated for workloads of MultiKueue";
    GATES_LEADER = Gauge "towline_gates_leader" "1 while this agent opens the scheduling gates of pods, else 0";
    GATES_WAITING = Gauge "towline_gates_waiting_pods" "Pods with a scheduling gate that wait for their data";
    GATES_OPENED = Counter "towline_gates_opened_total" "Scheduling gates of pods opened";
    CACHE_DAMAGED = Counter "towline_cache_damaged_total" "Chunks of the cache found damaged or lost, and dropped";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_keep_the_rules_of_prometheus() {
        let mut names: Vec<_> = FAMILIES.iter().copied().chain(Metric::ALL.map(Metric::family)).collect();
        for family in &names {
            assert_eq!(family.name.ends_with("_total"), family.kind == Kind::Counter, "{}", family.name);
            assert!(family.name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{}", family.name);
        }
        let all = names.len();
        names.sort_by_key(|family| family.name);
        names.dedup_by_key(|family| family.name);
        assert_eq!(names.len(), all, "each name once");
    }
}
