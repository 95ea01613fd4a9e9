//! Tokens: create, list, revoke.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Extension, Path, State};
use axum::http::StatusCode;
use serde::Deserialize;
use utoipa::ToSchema;

use super::caller::Caller;
use super::error::{ApiError, JsonBody};
use crate::agent::config::Span;
use crate::agent::state::AgentState;
use crate::agent::tokens::TokenSpec;
use crate::agent::view;
use crate::cache::Cache;
use crate::error::Result;
use crate::policy::Scopes;
use crate::work::blocking;

/// Body of a request for a token.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct TokenRequest {
    /// `read=PATTERN`, `save=PATTERN`, `folder=DIR`, `warm`, `pins`, `metrics`, `admin`.
    scopes: Vec<String>,
    /// Label for people.
    name: Option<String>,
    /// Tenant whose quota its pins count against; without one it has a quota of its own.
    tenant: Option<String>,
    /// Time after which it expires; without one, it is valid until it is revoked.
    expires: Option<Span>,
}

/// Lists the tokens, without their secrets.
#[utoipa::path(
    get,
    path = "/v1/tokens",
    operation_id = "listTokens",
    responses((status = 200, description = "The oldest first", body = view::TokenList)),
)]
pub(super) async fn list(State(state): State<Arc<AgentState>>) -> Result<Json<view::TokenList>, ApiError> {
    Ok(Json(view::TokenList { tokens: state.tokens()?.list() }))
}

/// Creates a token for the API on loopback. Only this response contains its secret.
#[utoipa::path(
    post,
    path = "/v1/tokens",
    operation_id = "makeToken",
    request_body = TokenRequest,
    responses((status = 201, description = "The token was created, which survives a power loss", body = view::MadeToken)),
)]
pub(super) async fn make(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    JsonBody(asked): JsonBody<TokenRequest>,
) -> Result<(StatusCode, Json<view::MadeToken>), ApiError> {
    let tokens = Arc::clone(state.tokens()?);
    let TokenRequest { scopes, name, tenant, expires } = asked;
    let spec = TokenSpec { scopes: Scopes::of(&scopes)?, name, tenant, lasting: expires.map(|span| span.0) };
    let made = blocking(move || tokens.make(caller.token().map(|by| &**by), spec)).await?;
    tracing::info!(id = %made.token.id, scopes = ?made.token.scopes, "created a token");
    Ok((StatusCode::CREATED, Json(made)))
}

/// Ends a token, its tasks and its pins. Requests with it are refused, and responses in progress are cut off.
#[utoipa::path(
    delete,
    path = "/v1/tokens/{id}",
    operation_id = "revokeToken",
    params(("id" = String, Path, description = "Id of the token")),
    responses((status = 200, description = "The token has ended", body = view::RevokedToken)),
)]
pub(super) async fn revoke(
    State(state): State<Arc<AgentState>>,
    Path(id): Path<String>,
) -> Result<Json<view::RevokedToken>, ApiError> {
    let (tokens, revoked, cache) = (Arc::clone(state.tokens()?), id.clone(), state.cache().ok());
    let token = blocking(move || {
        let token = tokens.revoke(&revoked)?;
        if let Some(cache) = cache {
            end_pins(&cache, &token);
        }
        Result::Ok(token)
    })
    .await?;
    // A save of it may be about to commit: none does once this has been answered.
    state.tasks.ended_of(&token).await;
    tracing::info!(%id, "revoked a token");
    Ok(Json(view::RevokedToken { revoked: id }))
}

/// Ends the pins of `token`, also those of the hints that it has committed. One that cannot be ended ends when it expires. Blocking.
fn end_pins(cache: &Cache, token: &str) {
    let owners = format!("{token}/");
    for pin in cache.pins().into_iter().filter(|pin| pin.owner.starts_with(&owners)) {
        if let Err(error) = cache.unpin(pin.id) {
            tracing::warn!(id = %pin.id, "a pin of a revoked token lasts until it expires: {error}");
        }
    }
}
