//! Heads of audit logs that are not this agent's own: of the command line on this node, and of agents that may not write to the
//! repository.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Extension, State};
use serde::Deserialize;
use utoipa::ToSchema;

use super::caller::Caller;
use super::error::{ApiError, JsonBody};
use crate::agent::audit::{ByPeers, CLI_ORIGIN, signer};
use crate::agent::state::AgentState;
use crate::agent::view;
use crate::audit::{Head, SignedHead, publish_head};
use crate::error::{Error, Result};
use crate::id::EntryHash;
use crate::transfer::identity::{Context, Signature, from_hex};

/// Maximum length of a signed head of another agent, with its certificates.
const SIGNED_LEN_MAX: usize = 16 << 10;

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
