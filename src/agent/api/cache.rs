//! The cache and its pins.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Extension, Path, State};
use axum::http::StatusCode;
use serde::Deserialize;

use super::auth::Caller;
use super::error::{ApiError, JsonBody};
use crate::agent::config::{Bytes, Span};
use crate::agent::state::AgentState;
use crate::agent::tasks::TaskSpec;
use crate::agent::tasks::{report, resolve};
use crate::agent::view;
use crate::cache::{PinChunk, PinRequest, Pinned};
use crate::error::{Error, Result};
use crate::id::PinId;
use crate::repository::{Saved, Selector};
use crate::size;
use crate::work::blocking;

/// Body of a pin.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Pinning {
    name: String,
    #[serde(rename = "for")]
    lasting: Option<Span>,
    owner: Option<String>,
    reason: Option<String>,
    repository: Option<String>,
}

/// Body of an eviction.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Evicting {
    bytes: Bytes,
}

pub(super) async fn stat(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<view::Cache>, ApiError> {
    let cache = state.cache()?;
    let dir = caller.agent().is_none().then(|| cache.dir().display().to_string());
    let stat = blocking(move || Ok(view::Cache { dir, stat: cache.stat() })).await?;
    Ok(Json(stat))
}

pub(super) async fn check(State(state): State<Arc<AgentState>>) -> Result<(StatusCode, Json<view::Task>), ApiError> {
    let cache = state.cache()?;
    let about = TaskSpec {
        kind: view::TaskKind::Check,
        name: cache.dir().display().to_string(),
        repository: None,
        caller: None,
    };
    let begun = state.tasks.begin(about, move |progress| async move {
        progress.phase("checking", 0);
        let checked = blocking(move || Ok(view::CacheChecked::from(cache.check()))).await?;
        report(&checked)
    })?;
    Ok((StatusCode::ACCEPTED, Json(begun.view())))
}

pub(super) async fn evict(
    State(state): State<Arc<AgentState>>,
    JsonBody(Evicting { bytes }): JsonBody<Evicting>,
) -> Result<Json<view::Evicted>, ApiError> {
    let cache = state.cache()?;
    let freed_bytes = blocking(move || Ok(cache.evict(bytes.0))).await?;
    Ok(Json(view::Evicted { freed_bytes }))
}

pub(super) async fn pins(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<view::PinList>, ApiError> {
    let cache = state.cache()?;
    let list = move || Ok(cache.pins().iter().filter(|pin| caller.has(pin)).map(view::Pinned::from).collect());
    let pins = blocking(list).await?;
    Ok(Json(view::PinList { pins }))
}

pub(super) async fn pin(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    JsonBody(asked): JsonBody<Pinning>,
) -> Result<(StatusCode, Json<view::Pinned>), ApiError> {
    let cache = state.cache()?;
    let selector: Selector = asked.name.parse()?;
    caller.may_name(asked.repository.as_deref())?;
    let repository = state.repository(asked.repository.as_deref())?;
    let name = resolve(state.exchange()?, repository, caller.agent(), &selector).await?;
    let saved = state.opened.open(repository, &name).await?;
    let lasting = asked.lasting.map(|span| span.0);
    let (expires, limit) = state.caller_pins.bounds(caller.agent(), lasting, |span| state.after(span))?;
    let owner = caller.owner(asked.owner);
    let reason = asked.reason.unwrap_or_else(|| name.to_string());
    let pinned = blocking(move || {
        let request = PinRequest { owner, reason, expires, chunks: chunks(&saved) };
        cache.pin_within(request, limit.as_ref())
    });
    match pinned.await? {
        Pinned::Kept(pin) => Ok((StatusCode::CREATED, Json(view::Pinned::from(&pin)))),
        Pinned::Lacking { bytes } => Err(Error::exhausted("pin does not fit into the cache")
            .at(&name)
            .expected(format!("{bytes} bytes more ({})", size::show(bytes)))
            .help("end other pins, or raise the cache's capacity")
            .into()),
    }
}

pub(super) async fn unpin(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<view::Unpinned>, ApiError> {
    let cache = state.cache()?;
    let unknown = || Error::not_found("there is no such pin").at(&id).help("`towline pins` lists them");
    let pin: PinId = id.parse().map_err(|_| unknown())?;
    let end = move || {
        let own = cache.pins().iter().any(|kept| kept.id == pin && caller.has(kept));
        Ok(own && cache.unpin(pin)?)
    };
    if blocking(end).await? {
        return Ok(Json(view::Unpinned { unpinned: id }));
    }
    Err(unknown().into())
}

/// All that a restore of the tree needs: its chunks, and what they are differences to.
fn chunks(saved: &Saved) -> Vec<PinChunk> {
    let further = saved.map.further.iter().map(|(id, _)| id);
    let ids = saved.manifest.chunks.ids.iter().chain(further);
    ids.zip(&saved.map.frames).map(|(id, frame)| PinChunk { id: *id, stored_len: frame.stored_len }).collect()
}
