//! `/metrics`: metrics of the agent in the text format of `OpenMetrics`.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use super::counts::ClusterCounts;
use super::state::AgentState;
use super::view::TaskKind;
use crate::cache::CacheStat;
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::limits::KIB;
use crate::metrics::{self, Family, Kind, Metric};
use crate::repository::Repository;
use crate::transfer::exchange::Exchange;

/// Content type of the response (<https://prometheus.io/docs/specs/om/open_metrics_spec/>).
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// All metrics of an agent. Blocking.
///
/// # Errors
/// None in practice: writing to a string cannot fail.
pub(super) fn encode(state: &Arc<AgentState>) -> Result<String> {
    let mut registry = Registry::default();
    state.tasks.histograms().register(&mut registry);
    registry.register_collector(Box::new(AgentMetrics(Arc::clone(state))));
    let mut encoded = String::new();
    text::encode(&mut encoded, &registry).map_err(|source| Error::other("cannot encode metrics").source(source))?;
    Ok(encoded)
}

/// Counters and gauges, collected at each scrape.
#[derive(Debug)]
struct AgentMetrics(Arc<AgentState>);

impl Collector for AgentMetrics {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let (state, mut scrape) = (&*self.0, Scrape(encoder));
        scrape.family(&metrics::BUILD_INFO, [([("version", env!("CARGO_PKG_VERSION"))], 1)])?;
        scrape.one(&metrics::START_TIME, seconds(state.started))?;
        scrape.one(&metrics::READY, state.is_ready().into())?;
        scrape.one(&metrics::PROBLEMS, state.problems().len() as u64)?;
        if let Ok(credentials) = state.credentials() {
            scrape.one(&metrics::CERTIFICATE_END, seconds(credentials.certificate().not_after))?;
        }
        scrape.one(&metrics::PREEMPTION, state.is_preempted().into())?;
        if let Some(resident) = resident() {
            scrape.one(&metrics::RESIDENT, resident)?;
        }
        tasks(&mut scrape, state)?;
        scrape.one(&metrics::FILE_BYTES, state.file_bytes_sent.load(Ordering::Relaxed))?;
        for metric in Metric::ALL {
            let stores = state.stores().iter().map(Repository::store);
            let locations: Vec<_> = stores.clone().map(|store| store.location().to_string()).collect();
            let counts = stores.map(|store| store.counters().get(metric));
            let samples = locations.iter().map(|location| [("repository", location.as_str())]).zip(counts);
            scrape.family(&metric.family(), samples)?;
        }
        if let Some(store) = &state.store {
            scrape.one(&metrics::HANDOFF_BYTES, store.bytes())?;
            scrape.one(&metrics::HANDOFF_SET_ASIDE, store.aside())?;
        }
        if let Ok(cache) = state.cache() {
            cached(&mut scrape, &cache.stat())?;
            let tenants = cache.tenants();
            let bytes = tenants.iter().map(|used| ([("tenant", used.tenant.as_str())], used.bytes));
            scrape.family(&metrics::CACHE_TENANT_BYTES, bytes)?;
            let quotas = tenants.iter().filter_map(|used| Some(([("tenant", used.tenant.as_str())], used.quota?)));
            scrape.family(&metrics::CACHE_TENANT_QUOTA, quotas)?;
        }
        if let Ok(exchange) = state.exchange() {
            exchanged(&mut scrape, exchange)?;
        }
        for_cluster(&mut scrape, &state.cluster)?;
        let gate = state.gate.stat();
        scrape.one(&metrics::LINKS, gate.links as u64)?;
        scrape.one(&metrics::HANDSHAKES, gate.handshakes as u64)?;
        scrape.one(&metrics::REFUSED, gate.refused)
    }
}

/// Figures of a webhook and of controllers, if the agent has some.
fn for_cluster(scrape: &mut Scrape<'_>, counts: &ClusterCounts) -> fmt::Result {
    if let Some(webhook) = counts.webhook.get() {
        let reviews = webhook.reviews().map(|(review, count)| ([("outcome", review.word())], count));
        scrape.family(&metrics::WEBHOOK_REVIEWS, reviews)?;
        let certificates = [("issued", &webhook.certificates_issued), ("refused", &webhook.certificates_refused)];
        let certificates = certificates.map(|(outcome, count)| ([("outcome", outcome)], count.get()));
        scrape.family(&metrics::WEBHOOK_CERTIFICATES, certificates)?;
    }
    if let Some(gates) = counts.gates.get() {
        scrape.one(&metrics::GATES_LEADER, gates.leads.get())?;
        scrape.one(&metrics::GATES_WAITING, gates.waiting.get())?;
        scrape.one(&metrics::GATES_OPENED, gates.opened.get())?;
    }
    let Some(kueue) = counts.kueue.get() else { return Ok(()) };
    scrape.one(&metrics::KUEUE_LEADER, kueue.leads.get())?;
    scrape.one(&metrics::KUEUE_WAITING, kueue.waiting.get())?;
    let decisions = [("ready", &kueue.ready), ("retry", &kueue.retried), ("rejected", &kueue.rejected)];
    let decisions = decisions.map(|(state, count)| ([("state", state)], count.get()));
    scrape.family(&metrics::KUEUE_DECISIONS, decisions)?;
    scrape.one(&metrics::KUEUE_NOMINATIONS, kueue.nominated.get())
}

fn tasks(scrape: &mut Scrape<'_>, state: &AgentState) -> fmt::Result {
    let tallies = TaskKind::ALL.map(|kind| ([("kind", kind.word())], state.tasks.counts(kind)));
    scrape.family(&metrics::TASKS_RUNNING, tallies.iter().map(|(kind, tally)| (*kind, tally.running)))?;
    let ended = tallies.iter().flat_map(|([kind], tally)| {
        tally.ended.iter().map(move |(end, count)| ([*kind, ("result", end.word())], *count))
    });
    scrape.family(&metrics::TASKS, ended)?;
    scrape.family(&metrics::TASK_BYTES, tallies.iter().map(|(kind, tally)| (*kind, tally.moved)))?;
    scrape.family(&metrics::TASK_RETRIES, tallies.iter().map(|(kind, tally)| (*kind, tally.retried)))
}

fn exchanged(scrape: &mut Scrape<'_>, exchange: &Exchange) -> fmt::Result {
    let moved = exchange.stats();
    let sources = [
        ("cache", moved.from_cache),
        ("site", moved.from_site),
        ("remote", moved.from_remote),
        ("repository", moved.from_repository),
    ];
    scrape.family(&metrics::FROM_BYTES, sources.map(|(source, bytes)| ([("source", source)], bytes)))?;
    let destinations = [("local", moved.to_local), ("site", moved.to_site), ("remote", moved.to_remote)];
    scrape.family(&metrics::TO_BYTES, destinations.map(|(to, bytes)| ([("destination", to)], bytes)))?;
    scrape.one(&metrics::CORRUPT, moved.corrupt)?;
    scrape.one(&metrics::REENCODED, moved.reencoded)?;
    let peers = exchange.peers().list();
    let up = peers.iter().filter(|peer| peer.transport.is_some()).count() as u64;
    let states = [([("state", "up")], up), ([("state", "down")], peers.len() as u64 - up)];
    scrape.family(&metrics::PEERS, states)?;
    let received = peers.iter().map(|peer| ([("address", peer.address.as_str())], peer.received));
    scrape.family(&metrics::PEER_BYTES, received)
}

fn cached(scrape: &mut Scrape<'_>, stat: &CacheStat) -> fmt::Result {
    for (family, value) in [
        (metrics::CACHE_CHUNKS, stat.chunks),
        (metrics::CACHE_BYTES, stat.bytes),
        (metrics::CACHE_SLAB_BYTES, stat.slab_bytes),
        (metrics::CACHE_CAPACITY, stat.capacity),
        (metrics::CACHE_PINNED, stat.pinned_bytes),
        (metrics::CACHE_PROMISED, stat.promised_bytes),
        (metrics::CACHE_PINS, stat.pins),
        (metrics::CACHE_JOURNAL, stat.journal_bytes),
        (metrics::CACHE_HITS, stat.hits),
        (metrics::CACHE_MISSES, stat.misses),
        (metrics::CACHE_INSERTS, stat.inserts),
        (metrics::CACHE_REFUSALS, stat.refusals),
        (metrics::CACHE_EVICTIONS, stat.evictions),
        (metrics::CACHE_DAMAGED, stat.damaged),
    ] {
        scrape.one(&family, value)?;
    }
    Ok(())
}

/// Encoder of one scrape.
struct Scrape<'a>(DescriptorEncoder<'a>);

impl Scrape<'_> {
    /// Writes a family once, with each sample and its labels.
    fn family<'s, const N: usize>(
        &mut self,
        family: &Family,
        samples: impl IntoIterator<Item = ([(&'s str, &'s str); N], u64)>,
    ) -> fmt::Result {
        let (kind, help) = (family.kind, format!("{}.", family.help));
        let (name, metric) = match kind {
            // The encoder appends the suffix of a counter.
            Kind::Counter => (family.name.trim_end_matches("_total"), MetricType::Counter),
            Kind::Gauge => (family.name, MetricType::Gauge),
            Kind::Histogram => (family.name, MetricType::Histogram),
        };
        let mut encoder = self.0.encode_descriptor(name, &help, None, metric)?;
        for (labels, value) in samples {
            if labels.is_empty() {
                encode_value(&mut encoder, kind, value)?;
            } else {
                encode_value(&mut encoder.encode_family(&labels)?, kind, value)?;
            }
        }
        Ok(())
    }

    /// Writes a family with one sample.
    fn one(&mut self, family: &Family, value: u64) -> fmt::Result {
        self.family(family, [([], value)])
    }
}

fn encode_value(encoder: &mut MetricEncoder<'_>, kind: Kind, value: u64) -> fmt::Result {
    match kind {
        Kind::Counter => encoder.encode_counter::<NoLabelSet, _, u64>(&value, None),
        Kind::Gauge => encoder.encode_gauge(&value),
        // Histograms are registered separately.
        Kind::Histogram => Err(fmt::Error),
    }
}

/// Seconds since 1970.
fn seconds(time: Timestamp) -> u64 {
    u64::try_from(time.0 / 1_000_000_000).unwrap_or(0)
}

/// Resident memory of this process in bytes (<https://man7.org/linux/man-pages/man5/proc_pid_status.5.html>, `VmRSS`).
fn resident() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * KIB)
}
