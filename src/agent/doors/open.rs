//! Liveness, readiness, metrics, and the API's description.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Json;
use axum::extract::{Extension, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::guard::Told;
use super::refusal::Refusal;
use crate::agent::house::House;
use crate::agent::view::{self, Kind};
use crate::cache::CacheStat;
use crate::error::Result;
use crate::limits::KIB;
use crate::metrics::{self, Exposition, Metric};
use crate::transfer::exchange::Exchange;
use crate::work::blocking;

/// The API, described (<https://spec.openapis.org/oas/v3.1.0>).
pub(super) const DESCRIPTION: &str = include_str!("openapi.json");

pub(super) async fn health(State(house): State<Arc<House>>, Extension(told): Extension<Told>) -> Response {
    match told {
        Told::Vitals => Json(house.vitals()).into_response(),
        Told::Remote => Json(without_locations(house.health())).into_response(),
        Told::All => Json(house.health()).into_response(),
    }
}

pub(super) async fn ready(state: State<Arc<House>>, told: Extension<Told>) -> Response {
    let ready = state.is_ready();
    let mut response = health(state, told).await;
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

pub(super) async fn metrics(State(house): State<Arc<House>>) -> Result<impl IntoResponse, Refusal> {
    let text = blocking(move || Ok(figures(&house).to_string())).await?;
    Ok(([(header::CONTENT_TYPE, Exposition::CONTENT_TYPE)], text))
}

/// All that is counted and measured.
fn figures(house: &House) -> Exposition {
    let mut text = Exposition::default();
    text.family(&metrics::BUILD_INFO).sample(&[("version", env!("CARGO_PKG_VERSION"))], 1);
    text.one(&metrics::START_TIME, u64::try_from(house.started.0 / 1_000_000_000).unwrap_or(0));
    text.one(&metrics::READY, house.is_ready().into());
    text.one(&metrics::NOTICE, house.is_told_to_go().into());
    if let Some(resident) = resident() {
        text.one(&metrics::RESIDENT, resident);
    }
    let tallies = Kind::ALL.map(|kind| (kind.word(), house.transfers.tally(kind)));
    let mut running = text.family(&metrics::TRANSFERS_RUNNING);
    for (kind, tally) in &tallies {
        running.sample(&[("kind", kind)], tally.running);
    }
    let mut ended = text.family(&metrics::TRANSFERS);
    for (kind, tally) in &tallies {
        for (end, count) in &tally.ended {
            ended.sample(&[("kind", kind), ("result", end.word())], *count);
        }
    }
    let mut moved = text.family(&metrics::TRANSFER_BYTES);
    for (kind, tally) in &tallies {
        moved.sample(&[("kind", kind)], tally.moved);
    }
    let mut retries = text.family(&metrics::TRANSFER_RETRIES);
    for (kind, tally) in &tallies {
        retries.sample(&[("kind", kind)], tally.retried);
    }
    text.one(&metrics::FILE_BYTES, house.handed_out.load(Ordering::Relaxed));
    for metric in Metric::ALL {
        let mut counts = text.family(&metric.family());
        for repository in house.stores() {
            let store = repository.store();
            counts.sample(&[("repository", &store.location().to_string())], store.counters().get(metric));
        }
    }
    if let Some(shelf) = &house.shelf {
        text.one(&metrics::CUSTODY_BYTES, shelf.bytes());
        text.one(&metrics::CUSTODY_ASIDE, shelf.aside());
    }
    if let Ok(cache) = house.cache() {
        cached(&mut text, &cache.stat());
    }
    if let Ok(exchange) = house.exchange() {
        exchanged(&mut text, exchange);
    }
    let gate = house.gate.stat();
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
    let up = peers.iter().filter(|peer| peer.carrier.is_some()).count() as u64;
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
