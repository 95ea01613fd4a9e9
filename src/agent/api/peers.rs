//! Peers, and processes of this node that read chunks.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Extension, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use hyper_util::rt::TokioIo;

use super::caller::Caller;
use super::error::ApiError;
use crate::agent::state::AgentState;
use crate::agent::{PROTOCOL, view};
use crate::error::Error;
use crate::transfer::exchange::Local;
use crate::transfer::local::serve_local;

/// Lists known peers and their state.
#[utoipa::path(
    get,
    path = "/v1/peers",
    operation_id = "listPeers",
    responses((status = 200, description = "By address", body = view::PeerList)),
)]
pub(super) async fn list(State(state): State<Arc<AgentState>>) -> Result<Json<view::PeerList>, ApiError> {
    let peers = state.exchange()?.peers().list();
    Ok(Json(view::PeerList { peers: peers.into_iter().map(view::Peer::from).collect() }))
}

/// Bytes moved between this agent and others, and bytes on the wire.
#[utoipa::path(
    get,
    path = "/v1/ledger",
    operation_id = "readLedger",
    responses((status = 200, description = "Since the agent started", body = view::Ledger)),
)]
pub(super) async fn ledger(State(state): State<Arc<AgentState>>) -> Result<Json<view::Ledger>, ApiError> {
    let ledger = state.exchange()?.peers().ledger();
    Ok(Json(view::Ledger { entries: ledger.entries(), links: ledger.links() }))
}

/// Upgrades the connection to the peer protocol (docs/protocol.md), for a process of this node. Only on the socket, with
/// `Upgrade: towline`.
#[utoipa::path(
    get,
    path = "/v1/chunks",
    operation_id = "takeChunks",
    responses((status = 101, description = "It has become one")),
)]
pub(super) async fn chunks(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let (Caller::Socket(_), Some(user)) = (&caller, caller.local()) else {
        return Err(Error::denied("chunks are served over the agent's socket only").into());
    };
    if !wants_upgrade(request.headers()) {
        let error = Error::usage("request has no upgrade header").expected(format!("Upgrade: {PROTOCOL}"));
        return Err(ApiError::new(StatusCode::UPGRADE_REQUIRED, error));
    }
    let exchange = Arc::clone(state.exchange()?);
    if state.tasks.is_closed() {
        return Err(Error::unreachable("agent is shutting down").into());
    }
    let slot = Arc::clone(&state.local_reader_slots).try_acquire_owned();
    let slot = slot.map_err(|_| Error::exhausted("too many processes read chunks").help("wait until one has ended"))?;
    let (upgrade, leaving) = (hyper::upgrade::on(request), state.leaving.clone());
    state.local_readers.spawn(async move {
        let _slot = slot;
        let served = async {
            let stream = upgrade.await.map_err(|source| Error::other("connection was not upgraded").source(source))?;
            serve_local(TokioIo::new(stream), Arc::new(Local::new(exchange, user)), leaving).await
        };
        match served.await {
            Ok(closed) => tracing::debug!(?closed, "a process has read its chunks"),
            Err(error) => tracing::warn!("cannot serve chunks to a process: {error:?}"),
        }
    });
    let headers = [(header::CONNECTION, "upgrade"), (header::UPGRADE, PROTOCOL)];
    Ok((StatusCode::SWITCHING_PROTOCOLS, headers).into_response())
}

pub(super) fn wants_upgrade(headers: &HeaderMap) -> bool {
    let wanted = headers.get(header::UPGRADE).and_then(|value| value.to_str().ok());
    wanted.is_some_and(|wanted| wanted.eq_ignore_ascii_case(PROTOCOL))
}
