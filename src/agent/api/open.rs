//! Liveness, readiness, metrics, and the API's description.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Json;
use axum::extract::{Extension, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::auth::Visibility;
use super::error::ApiError;
use crate::agent::state::AgentState;
use crate::agent::view::{self, TaskKind};
use crate::cache::CacheStat;
use crate::error::Result;
use crate::limits::KIB;
use crate::metrics::{self, Exposition, Metric};
use crate::transfer::exchange::Exchange;
use crate::work::blocking;

/// The API, described (<https://spec.openapis.org/oas/v3.1.0>).
pub(super) const DESCRIPTION: &str = include_str!("openapi.json");

pub(super) async fn health(
    State(state): State<Arc<AgentState>>,
    Extension(visibility): Extension<Visibility>,
) -> Response {
    match visibility {
        Visibility::Vitals => Json(state.vitals()).into_response(),
        Visibility::Remote => Json(without_locations(state.health())).into_response(),
        Visibility::All => Json(state.health()).into_response(),
    }
}

pub(super) async fn ready(state: State<Arc<AgentState>>, visibility: Extension<Visibility>) -> Response {
    let ready = state.is_ready();
    let mut response = health(state, visibility).await;
    if !ready {
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    }
    response
}

/// As other agents are told: where repositories are, and what is wrong with the agent's files, is this node's own affair.
fn without_locations(mut health: view::Health) -> view::Health {
    health.repositories.iter_mut().for_each(|place| place.location = None);
    health.problems.clear();
    health
}

pub(super) async fn description() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], DESCRIPTION)
}

pub(super) async fn metrics(State(state): State<Arc<AgentState>>) -> Result<impl IntoResponse, ApiError> {
    let text = blocking(move || Ok(figures(&state).to_string())).await?;
    Ok(([(header::CONTENT_TYPE, Exposition::CONTENT_TYPE)], text))
}

/// All that is counted and measured.
fn figures(state: &AgentState) -> Exposition {
    let mut text = Exposition::default();
    text.family(&metrics::BUILD_INFO).sample(&[("version", env!("CARGO_PKG_VERSION"))], 1);
    text.one(&metrics::START_TIME, u64::try_from(state.started.0 / 1_000_000_000).unwrap_or(0));
    text.one(&metrics::READY, state.is_ready().into());
    text.one(&metrics::PREEMPTION, state.is_preempted().into());
    if let Some(resident) = resident() {
        text.one(&metrics::RESIDENT, resident);
    }
    let tallies = TaskKind::ALL.map(|kind| (kind.word(), state.tasks.tally(kind)));
    let mut running = text.family(&metrics::TASKS_RUNNING);
    for (kind, tally) in &tallies {
        running.sample(&[("kind", kind)], tally.running);
    }
    let mut ended = text.family(&metrics::TASKS);
    for (kind, tally) in &tallies {
        for (end, count) in &tally.ended {
            ended.sample(&[("kind", kind), ("result", end.word())], *count);
        }
    }
    let mut moved = text.family(&metrics::TASK_BYTES);
    for (kind, tally) in &tallies {
        moved.sample(&[("kind", kind)], tally.moved);
    }
    let mut retries = text.family(&metrics::TASK_RETRIES);
    for (kind, tally) in &tallies {
        retries.sample(&[("kind", kind)], tally.retried);
    }
    text.one(&metrics::FILE_BYTES, state.handed_out.load(Ordering::Relaxed));
    for metric in Metric::ALL {
        let mut counts = text.family(&metric.family());
        for repository in state.stores() {
            let store = repository.store();
            counts.sample(&[("repository", &store.location().to_string())], store.counters().get(metric));
        }
    }
    if let Some(store) = &state.store {
        text.one(&metrics::HANDOFF_BYTES, store.bytes());
        text.one(&metrics::HANDOFF_SET_ASIDE, store.aside());
    }
    if let Ok(cache) = state.cache() {
        cached(&mut text, &cache.stat());
    }
    if let Ok(exchange) = state.exchange() {
        exchanged(&mut text, exchange);
    }
    let gate = state.gate.stat();
    text.one(&metrics::LINKS, gate.links as u64);
    text.one(&metrics::HANDSHAKES, gate.handshakes as u64);
    text.one(&metrics::REFUSED, gate.refused);
    text
}

fn exchanged(text: &mut Exposition, exchange: &Exchange) {
    let moved = exchange.figures();
    text.family(&metrics::FROM_BYTES)
        .sample(&[("source", "cache")], moved.from_cache)
        .sample(&[("source", "site")], moved.from_site)
        .sample(&[("source", "remote")], moved.from_remote)
        .sample(&[("source", "repository")], moved.from_repository);
    text.family(&metrics::TO_BYTES)
        .sample(&[("destination", "local")], moved.to_local)
        .sample(&[("destination", "site")], moved.to_site)
        .sample(&[("destination", "remote")], moved.to_remote);
    text.one(&metrics::UNTRUE, moved.untrue);
    let peers = exchange.peers().list();
    let up = peers.iter().filter(|peer| peer.transport.is_some()).count() as u64;
    text.family(&metrics::PEERS).sample(&[("state", "up")], up).sample(&[("state", "down")], peers.len() as u64 - up);
    let mut received = text.family(&metrics::PEER_BYTES);
    for peer in &peers {
        received.sample(&[("address", &peer.address)], peer.received);
    }
}

fn cached(text: &mut Exposition, stat: &CacheStat) {
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
        text.one(&family, value);
    }
}

/// Memory of this process in bytes (<https://man7.org/linux/man-pages/man5/proc_pid_status.5.html>, `VmRSS`).
fn resident() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * KIB)
}
