//! The cache and its pins.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Extension, Path, State};
use axum::http::StatusCode;
use serde::Deserialize;
use utoipa::ToSchema;

use super::caller::Caller;
use super::error::{ApiError, JsonBody};
use super::recorded::AccessRequest;
use crate::agent::audit::outcome;
use crate::agent::config::{Bytes, Span};
use crate::agent::state::AgentState;
use crate::agent::tasks::{TaskReport, TaskSpec, resolve, without_offers};
use crate::agent::view;
use crate::agent::warm::{needed_chunks, pin_lacking};
use crate::audit::{Action, Request};
use crate::cache::{Pin, PinLimit, PinRequest, Pinned};
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::id::PinId;
use crate::name::Name;
use crate::progress::Progress;
use crate::repository::Repository;
use crate::selector::Selector;
use crate::work::blocking;

/// Body of a pin.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Pinning {
    /// A name, or RUN@CHOICE.
    name: String,
    /// Duration; without one, the pin does not expire.
    #[serde(rename = "for")]
    lasting: Option<Span>,
    /// Owner of the pin.
    owner: Option<String>,
    /// Reason for it.
    reason: Option<String>,
    /// The repository, if not the default one.
    repository: Option<String>,
}

/// Body of an eviction.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Evicting {
    /// Bytes to free.
    bytes: Bytes,
}

/// Statistics of the cache.
#[utoipa::path(
    get,
    path = "/v1/cache",
    operation_id = "showCache",
    responses((status = 200, description = "The statistics", body = view::Cache)),
)]
pub(super) async fn stat(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<view::Cache>, ApiError> {
    let cache = state.cache()?;
    let own = caller.requester().is_none();
    let dir = own.then(|| cache.dir().display().to_string());
    let tenants = if own { cache.tenants() } else { Vec::new() };
    let stat = blocking(move || Ok(view::Cache { dir, stat: cache.stat(), tenants })).await?;
    Ok(Json(stat))
}

/// Starts a check of the whole cache, which drops damaged chunks.
#[utoipa::path(
    post,
    path = "/v1/cache/check",
    operation_id = "checkCache",
    responses((status = 202, description = "The task has started", body = view::Task)),
)]
pub(super) async fn check(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
) -> Result<(StatusCode, Json<view::Task>), ApiError> {
    let cache = state.cache()?;
    let about = TaskSpec {
        kind: view::TaskKind::Check,
        name: cache.dir().display().to_string(),
        repository: None,
        caller: None,
    };
    let work = move |progress: Progress| async move {
        progress.phase("checking", 0);
        let checked = blocking(move || Ok(view::CacheChecked::from(cache.check()))).await?;
        Ok(TaskReport::CacheCheck(checked))
    };
    let begun = caller.begin(|| state.tasks.begin(about, work))?;
    Ok((StatusCode::ACCEPTED, Json(begun.view())))
}

/// Evicts chunks until the given number of bytes is free; pinned chunks stay.
#[utoipa::path(
    post,
    path = "/v1/cache/evict",
    operation_id = "evict",
    request_body = Evicting,
    responses((status = 200, description = "Bytes that were freed", body = view::Evicted)),
)]
pub(super) async fn evict(
    State(state): State<Arc<AgentState>>,
    JsonBody(Evicting { bytes }): JsonBody<Evicting>,
) -> Result<Json<view::Evicted>, ApiError> {
    let cache = state.cache()?;
    let freed_bytes = blocking(move || Ok(cache.evict(bytes.0))).await?;
    Ok(Json(view::Evicted { freed_bytes }))
}

/// Lists the pins.
#[utoipa::path(
    get,
    path = "/v1/pins",
    operation_id = "listPins",
    responses((status = 200, description = "The oldest first", body = view::PinList)),
)]
pub(super) async fn pins(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<view::PinList>, ApiError> {
    let cache = state.cache()?;
    let list = move || Ok(cache.pins().iter().filter(|pin| caller.has(pin)).map(view::Pinned::from).collect());
    let pins = blocking(list).await?;
    Ok(Json(view::PinList { pins }))
}

/// Pins the chunks of the current value of a name in the cache.
#[utoipa::path(
    post,
    path = "/v1/pins",
    operation_id = "pin",
    request_body = Pinning,
    responses((status = 201, description = "It is pinned, which survives a power loss", body = view::Pinned)),
)]
pub(super) async fn pin(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    JsonBody(body): JsonBody<Pinning>,
) -> Result<(StatusCode, Json<view::Pinned>), ApiError> {
    let selector: Selector = body.name.parse()?;
    caller.check_repository_name(body.repository.as_deref())?;
    let repository = state.repository(body.repository.as_deref())?.for_caller(caller.local());
    let requester = caller.requester();
    let recorded = AccessRequest::separate(&caller, Action::Pin, Some(&repository));
    let name = match resolve(state.exchange()?, &repository, requester.as_ref(), &selector).await {
        Ok(name) => name,
        Err(error) => return Err(recorded.refuse(&state, &selector, error).await.into()),
    };
    let lasting = body.lasting.map(|span| span.0);
    let (expires, limit) = match state.pin_bounds(requester.as_ref(), lasting) {
        Ok(bounds) => bounds,
        Err(error) => return Err(recorded.refuse(&state, &name, error).await.into()),
    };
    let request = recorded.allow(&state, &name).await?;
    let pinned = pin_whole(&state, (&repository, &name), (&caller, &body), (expires, limit));
    match record_outcome(request.as_ref(), pinned.await) {
        Ok(pin) => Ok((StatusCode::CREATED, Json(view::Pinned::from(&pin)))),
        Err(error) if requester.is_some() => Err(without_offers(&repository, &name, error).await.into()),
        Err(error) => Err(error.into()),
    }
}

/// Pins all chunks that a restore of `name` needs.
async fn pin_whole(
    state: &AgentState,
    (repository, name): (&Repository, &Name),
    (caller, body): (&Caller, &Pinning),
    (expires, limit): (Option<Timestamp>, Option<PinLimit>),
) -> Result<Pin> {
    let requester = caller.requester();
    // Lists of chunks take memory until the pin is made, also while it waits for its turn.
    let place = state.large_trees.place_of_pin(repository, std::slice::from_ref(name), requester.as_ref()).await?;
    let (cache, tree) = (state.cache()?, state.open_trees.open(repository, name).await?);
    let owner = caller.owner(body.owner.clone());
    let reason = body.reason.clone().unwrap_or_else(|| name.to_string());
    let chunks = needed_chunks(state.exchange()?, repository, &[Arc::clone(&tree)]).await?.concat();
    drop(tree);
    let _turn = cache.limit_turn(limit.as_ref()).await;
    let (pinning, caller) = (Arc::clone(&cache), caller.clone());
    let pinned = blocking(move || {
        // Held until the pin is made, also if the request is dropped.
        let _place = place;
        let request = PinRequest { owner, reason, expires, chunks };
        caller.holding(|| pinning.pin_within(request, limit.as_ref()))
    });
    match pinned.await? {
        Pinned::Kept(pin) => Ok(pin),
        Pinned::Lacking { bytes, disk_full } => Err(pin_lacking(name, bytes, disk_full)),
    }
}

/// Records the outcome of a pin in its audit entry.
fn record_outcome(request: Option<&Request>, pinned: Result<Pin>) -> Result<Pin> {
    if let Some(request) = request {
        request.end(match &pinned {
            Ok(pin) => format!("done: pin {}", pin.id),
            Err(error) => outcome(error),
        });
    }
    pinned
}

/// Ends a pin.
#[utoipa::path(
    delete,
    path = "/v1/pins/{id}",
    operation_id = "unpin",
    params(("id" = String, Path, description = "Id of the pin")),
    responses((status = 200, description = "It has ended", body = view::Unpinned)),
)]
pub(super) async fn unpin(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<view::Unpinned>, ApiError> {
    let cache = state.cache()?;
    let unknown = || Error::not_found("no such pin").at(&id).help("`towline pins` lists them");
    let pin: PinId = id.parse().map_err(|_| unknown())?;
    let (looked, holder) = (Arc::clone(&cache), caller.clone());
    let find = move || Ok(looked.pins().into_iter().find(|kept| kept.id == pin && holder.has(kept)));
    let recorded = AccessRequest::separate(&caller, Action::Unpin, None);
    let Some(found) = blocking(find).await? else {
        return Err(recorded.refuse(&state, format!("pin {pin}"), unknown()).await.into());
    };
    let request = recorded.end_pin(&state, &found).await?;
    let ended = blocking(move || cache.unpin(pin)).await;
    if let (Some(request), Err(error)) = (&request, &ended) {
        request.end(outcome(error));
    }
    if ended? { Ok(Json(view::Unpinned { unpinned: id })) } else { Err(unknown().into()) }
}
