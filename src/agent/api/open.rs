//! Liveness, readiness, metrics, and the API's description.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Extension, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use super::auth::Visibility;
use super::description::DESCRIPTION;
use super::error::ApiError;
use crate::agent::metrics;
use crate::agent::state::AgentState;
use crate::agent::view;
use crate::work::blocking;

/// Response of `/health` and `/ready`; without the token on loopback, only a summary.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum HealthAnswer {
    /// Full description.
    Health(view::Health),
    /// Part that any process of this machine may see.
    HealthSummary(view::HealthSummary),
}

/// Liveness, version and identity. Without the token on loopback: only whether the agent is alive and ready.
#[utoipa::path(
    get,
    path = "/health",
    operation_id = "health",
    responses((status = 200, description = "It is alive", body = HealthAnswer)),
)]
pub(super) async fn health(
    State(state): State<Arc<AgentState>>,
    Extension(visibility): Extension<Visibility>,
) -> Response {
    let answer = match visibility {
        Visibility::HealthSummary => HealthAnswer::HealthSummary(state.health_summary()),
        Visibility::Remote => HealthAnswer::Health(without_locations(state.health())),
        Visibility::All => HealthAnswer::Health(state.health()),
    };
    Json(answer).into_response()
}

/// Readiness: true once the configured inputs are prepared.
#[utoipa::path(
    get,
    path = "/ready",
    operation_id = "ready",
    responses(
        (status = 200, description = "They are", body = HealthAnswer),
        (status = 503, description = "Not yet, or not any more", body = HealthAnswer),
    ),
)]
pub(super) async fn ready(state: State<Arc<AgentState>>, visibility: Extension<Visibility>) -> Response {
    let ready = state.is_ready();
    let mut response = health(state, visibility).await;
    if !ready {
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    }
    response
}

/// Health as other agents see it, without locations of repositories and problems of this node's files.
fn without_locations(mut health: view::Health) -> view::Health {
    health.repositories.iter_mut().for_each(|place| place.location = None);
    health.problems.clear();
    health
}

/// Description of this API, as an `OpenAPI` document.
#[utoipa::path(
    get,
    path = "/openapi.json",
    operation_id = "describe",
    responses((status = 200, description = "The description", body = Object)),
)]
pub(super) async fn description() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], &**DESCRIPTION)
}

/// Metrics for Prometheus. With the setting `open_metrics`, every process of this machine may read them.
#[utoipa::path(
    get,
    path = "/metrics",
    operation_id = "metrics",
    responses((status = 200, description = "The metrics", body = String, content_type = "application/openmetrics-text")),
)]
pub(super) async fn metrics(State(state): State<Arc<AgentState>>) -> Result<impl IntoResponse, ApiError> {
    let text = blocking(move || metrics::encode(&state)).await?;
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text))
}
