//! Tensors in memory for the processes of this node.

use std::pin::Pin;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Extension, Path, Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::net::UnixStream;
use tokio_io_timeout::TimeoutStream;
use ulid::Ulid;
use utoipa::ToSchema;

use super::caller::Caller;
use super::error::{ApiError, JsonBody};
use super::peers::wants_upgrade;
use super::recorded::AccessRequest;
use super::work::below;
use crate::agent::audit::follow;
use crate::agent::staged::{StageOrder, pass, stage};
use crate::agent::state::AgentState;
use crate::agent::{PROTOCOL, view};
use crate::audit::Action;
use crate::error::{Error, Result};
use crate::ops::TensorSelector;
use crate::work::blocking;

/// Body of a request to stage tensors.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Stage {
    /// A name, or RUN@CHOICE.
    name: String,
    /// Only this file or folder of it.
    path: Option<String>,
    /// Repository; the default one if absent.
    repository: Option<String>,
    /// Selectors of tensors, `[PATH:]GLOB[BOX]`; all tensors, if there are none.
    #[serde(default)]
    tensors: Vec<String>,
    /// Hold the memory for a process that takes it within a minute (`GET /v1/staged/{id}`).
    #[serde(default)]
    hold: bool,
}

/// Starts to read tensors into memory; tensors that are in memory are not read again.
#[utoipa::path(
    post,
    path = "/v1/stage",
    operation_id = "stage",
    request_body = Stage,
    responses((status = 202, description = "The task has started", body = view::Task)),
)]
pub(super) async fn begin(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    JsonBody(body): JsonBody<Stage>,
) -> Result<(StatusCode, Json<view::Task>), ApiError> {
    let order = StageOrder {
        name: body.name.parse()?,
        below: below(body.path)?,
        selectors: body.tensors.iter().map(|text| text.parse()).collect::<Result<Vec<TensorSelector>>>()?,
        hold: body.hold,
        by: caller.local(),
    };
    state.staged()?;
    let repository = state.repository(body.repository.as_deref())?;
    let recorded = AccessRequest::separate(&caller, Action::Restore, Some(repository));
    let request = recorded.allow(&state, &order.name).await?;
    let begun = follow(request, caller.begin(|| stage(&state, body.repository.as_deref(), order)))?;
    Ok((StatusCode::ACCEPTED, Json(begun.view())))
}

/// Lists the tensors in memory.
#[utoipa::path(
    get,
    path = "/v1/staged",
    operation_id = "listStaged",
    responses((status = 200, description = "The oldest first", body = view::StagedList)),
)]
pub(super) async fn list(State(state): State<Arc<AgentState>>) -> Result<Json<view::StagedList>, ApiError> {
    Ok(Json(state.staged()?.view()))
}

/// Frees the memory of tensors that no process uses.
#[utoipa::path(
    delete,
    path = "/v1/staged",
    operation_id = "clearStaged",
    responses((status = 200, description = "It is freed", body = view::Evicted)),
)]
pub(super) async fn clear(State(state): State<Arc<AgentState>>) -> Result<Json<view::Evicted>, ApiError> {
    let trees = Arc::clone(state.staged()?);
    let freed_bytes = blocking(move || Ok(trees.clear())).await?;
    Ok(Json(view::Evicted { freed_bytes }))
}

/// Passes the memory that a task of `POST /v1/stage` reports to a process of this node, as a file descriptor. Only on the socket,
/// with `Upgrade: towline`; the process sends one byte when it is ready, and stays connected while it uses the memory.
#[utoipa::path(
    get,
    path = "/v1/staged/{id}",
    operation_id = "takeStaged",
    params(("id" = String, Path, description = "Id of the memory, from the report of the task")),
    responses((status = 101, description = "The memory follows")),
)]
pub(super) async fn take(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Response, ApiError> {
    if !matches!(caller, Caller::Socket(_)) {
        return Err(Error::denied("memory is passed over the agent's socket only").into());
    }
    if !wants_upgrade(request.headers()) {
        let error = Error::usage("request has no upgrade header").expected(format!("Upgrade: {PROTOCOL}"));
        return Err(ApiError::new(StatusCode::UPGRADE_REQUIRED, error));
    }
    let malformed = |source| Error::usage("id is malformed").got(&id).source(source);
    let id: Ulid = id.parse().map_err(malformed)?;
    let trees = state.staged()?;
    if state.tasks.is_closed() {
        return Err(Error::unreachable("agent is shutting down").into());
    }
    let slot = Arc::clone(&state.staged_users).try_acquire_owned();
    let slot = slot.map_err(|_| {
        Error::exhausted("processes hold too many trees in memory")
            .help("keep fewer loads at a time, or load a tree at once")
    })?;
    let lease = trees.take(id)?;
    let (upgrade, leaving) = (hyper::upgrade::on(request), state.leaving.clone());
    state.local_readers.spawn(leaving.run_until_cancelled_owned(async move {
        let _slot = slot;
        let passed = async {
            let upgraded = upgrade.await.map_err(std::io::Error::other)?;
            let parts = upgraded.downcast::<TokioIo<Pin<Box<TimeoutStream<UnixStream>>>>>();
            let parts = parts.map_err(|_| std::io::ErrorKind::Unsupported)?;
            pass(parts.io.inner().get_ref(), &lease).await
        };
        if let Err(error) = passed.await {
            tracing::debug!("a process that uses staged tensors disconnected: {error}");
        }
    }));
    let headers = [(header::CONNECTION, "upgrade"), (header::UPGRADE, PROTOCOL)];
    Ok((StatusCode::SWITCHING_PROTOCOLS, headers).into_response())
}
