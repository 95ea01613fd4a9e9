//! The audit log: the last entries of this agent's own, and the heads of others, which are those of the command line on this node
//! and of agents that may not write to the repository.

#![expect(unused_qualifications, reason = "utoipa names the parameters' types so")]

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Extension, Query, State};
use serde::Deserialize;
use utoipa::{IntoParams, ToSchema};

use super::caller::Caller;
use super::error::{ApiError, JsonBody, parse_query};
use crate::agent::audit::{ByPeers, CLI_ORIGIN, signer};
use crate::agent::state::AgentState;
use crate::agent::view;
use crate::audit::{Entry, EntryKind, Head, LatestEntries, SignedHead, Verdict, latest_entries, publish_head};
use crate::error::{Error, Result};
use crate::id::EntryHash;
use crate::transfer::identity::{Context, Signature, from_hex};
use crate::work::blocking;

/// Maximum length of a signed head of another agent, with its certificates.
const SIGNED_LEN_MAX: usize = 16 << 10;

/// Default and maximum number of entries in one response.
const ENTRIES: usize = 100;
const ENTRIES_MAX: usize = 1000;

/// Query parameters of the last entries.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Latest {
    /// Only entries with numbers below this one: the value of `next` in the previous response.
    before: Option<u64>,
    /// Entries in the answer, at most.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<usize>,
    /// Only refusals.
    #[serde(default)]
    denied: bool,
}

/// The last entries of this agent's audit log. They are not verified: `towline audit verify` does that.
#[utoipa::path(
    get,
    path = "/v1/audit",
    operation_id = "readAudit",
    params(Latest),
    responses((status = 200, description = "The latest first; with `next` if there may be more", body = view::AuditTrail)),
)]
pub(super) async fn latest(
    State(state): State<Arc<AgentState>>,
    query: Result<Query<Latest>, QueryRejection>,
) -> Result<Json<view::AuditTrail>, ApiError> {
    let Latest { before, limit, denied } = parse_query(query)?;
    let limit = limit.unwrap_or(ENTRIES).clamp(1, ENTRIES_MAX);
    let recorder = state.recorder.as_ref().ok_or_else(|| {
        Error::not_found("this agent has no audit log").help("set [audit] dir in its settings (docs/security.md)")
    })?;
    let folder = recorder.folder().to_owned();
    let wanted = move |entry: &Entry| match &entry.what {
        EntryKind::Decision(decision) => !denied || decision.verdict == Verdict::Deny,
        _ => !denied,
    };
    let found = blocking(move || latest_entries(&folder, before, limit, wanted)).await?;
    let LatestEntries { entries, next, unreadable } = found;
    Ok(Json(view::AuditTrail { entries, next, unreadable }))
}

/// Head of the audit log of the command line.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct HeadOfCommands {
    /// Id of the log.
    log: String,
    /// Whose log it is: `cli:USER`.
    origin: String,
    /// Number of its last entry.
    seq: u64,
    /// Hash of that, in hexadecimal digits.
    hash: String,
}

/// Head of the audit log of another agent.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct HeadOfAgent {
    /// Body of its object (docs/format.md), in hexadecimal digits.
    signed: String,
    /// Id of the repository to put it into, if not the default one.
    repository: Option<String>,
}

/// Signs the head of the command line's audit log with this agent's key, and publishes it. Only for callers of this node.
#[utoipa::path(
    post,
    path = "/v1/audit/heads",
    operation_id = "signAuditHead",
    request_body = HeadOfCommands,
    responses((status = 201, description = "It is in the repository", body = view::AuditHead)),
)]
pub(super) async fn sign(
    State(state): State<Arc<AgentState>>,
    JsonBody(body): JsonBody<HeadOfCommands>,
) -> Result<(axum::http::StatusCode, Json<view::AuditHead>), ApiError> {
    let HeadOfCommands { log, origin, seq, hash } = body;
    // Callers must not get a signature for the agent's own name.
    if !origin.starts_with(CLI_ORIGIN) {
        let error = Error::usage("this is not the command line's audit log").expected("cli:USER").got(origin);
        return Err(error.into());
    }
    let credentials = state.credentials()?;
    let malformed = || Error::usage("head of an audit log is malformed");
    let hash = from_hex(&hash).and_then(|bytes| <[u8; 32]>::try_from(bytes).ok()).map(EntryHash::from_bytes);
    let log = log.parse().map_err(|source| malformed().source(source))?;
    let head = Head { log, origin, seq, hash: hash.ok_or_else(malformed)?, time: state.now() };
    let by_peers = ByPeers(Arc::clone(&state));
    let sign = signer(credentials);
    publish_head(state.origin(None)?, &credentials.identity(), head, &sign, Some(&by_peers)).await?;
    Ok((axum::http::StatusCode::CREATED, Json(view::AuditHead { seq })))
}

/// Publishes the head of another agent's audit log, which that agent has signed; only for that agent.
#[utoipa::path(
    put,
    path = "/v1/audit/heads",
    operation_id = "publishAuditHead",
    request_body = HeadOfAgent,
    responses((status = 201, description = "It is in the repository", body = view::AuditHead)),
)]
pub(super) async fn publish(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    JsonBody(body): JsonBody<HeadOfAgent>,
) -> Result<(axum::http::StatusCode, Json<view::AuditHead>), ApiError> {
    caller.check_repository_name(body.repository.as_deref())?;
    let by = caller.agent().ok_or_else(|| Error::denied("this publishes heads of other agents only"))?;
    let malformed = || Error::usage("head of an audit log is malformed").expected("hexadecimal digits");
    if body.signed.len() > 2 * SIGNED_LEN_MAX {
        return Err(Error::exhausted("head of an audit log is too long")
            .expected(SIGNED_LEN_MAX)
            .got(body.signed.len() / 2)
            .into());
    }
    let signed = SignedHead::decode(&from_hex(&body.signed).ok_or_else(malformed)?)?;
    let SignedHead { head, signature } = &signed;
    let trusted = state.credentials()?.trusted();
    let signer = trusted.verify(&Signature::decode(signature)?, Context::AuditHead, &head.encode(), state.now())?;
    if signer.agent()? != by || head.origin != by.to_string() && !head.origin.starts_with(CLI_ORIGIN) {
        return Err(Error::denied("head belongs to another agent").expected(by).got(&head.origin).into());
    }
    state.head_limits.admit(by, head, state.now())?;
    let repository = state.origin(body.repository.as_deref())?;
    repository.put_audit_head(by, head.time, &signed.encode()).await?;
    Ok((axum::http::StatusCode::CREATED, Json(view::AuditHead { seq: head.seq })))
}
