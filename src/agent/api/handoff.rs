//! Handoff of checkpoints by other agents.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::BodyDataStream;
use axum::extract::{Extension, Path, Request, State};
use axum::http::StatusCode;
use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use serde::Deserialize;
use tokio::time::{Instant, timeout_at};
use tokio_util::io::{StreamReader, SyncIoBridge};
use ulid::Ulid;
use utoipa::ToSchema;

use super::caller::Caller;
use super::error::{ApiError, JsonBody};
use super::recorded::AccessRequest;
use crate::agent::handoff::{Announced, HandoffStore};
use crate::agent::redact::without_locations;
use crate::agent::state::AgentState;
use crate::agent::view;
use crate::audit::{Action, Repeats};
use crate::error::{Error, ErrorKind, Result};
use crate::id::RepositoryId;
use crate::identity::Identity;
use crate::policy::Labels;
use crate::selector::Selector;
use crate::work::{blocking, on_own_thread};

/// Time without a byte after which a sender counts as gone.
const STALL: Duration = Duration::from_secs(30);

/// Body of an announcement.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Announcement {
    /// Name to save it as.
    name: String,
    /// Id of the repository to save it in.
    repository: String,
    /// Labels to save it with.
    #[serde(default)]
    labels: BTreeMap<String, String>,
    /// Bytes of its files.
    bytes: u64,
}

/// Checkpoints stored for other agents.
#[utoipa::path(
    get,
    path = "/v1/handoffs",
    operation_id = "listHandoffs",
    responses((status = 200, description = "The oldest first", body = view::HandoffList)),
)]
pub(super) async fn list(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<view::HandoffList>, ApiError> {
    let stored = store(&state)?.list(caller.agent());
    let mut handoffs: Vec<_> = stored.iter().map(|(id, stored)| stored.view(*id)).collect();
    if caller.agent().is_some() {
        for aside in handoffs.iter_mut().filter_map(|handoff| handoff.aside.as_mut()) {
            aside.error = without_locations(&aside.error);
            aside.help = without_locations(&aside.help);
        }
    }
    Ok(Json(view::HandoffList { handoffs }))
}

/// Promises space for a checkpoint, for a minute; only for other agents.
#[utoipa::path(
    post,
    path = "/v1/handoffs",
    operation_id = "announceHandoff",
    request_body = Announcement,
    responses((status = 201, description = "Space is promised", body = view::HandoffId)),
)]
pub(super) async fn promise(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    JsonBody(body): JsonBody<Announcement>,
) -> Result<(StatusCode, Json<view::HandoffId>), ApiError> {
    let from = sender(&caller)?;
    caller.check_repository_name(Some(&body.repository))?;
    state.origin(Some(&body.repository))?;
    let malformed = |source| Error::usage("repository is not an id").got(&body.repository).source(source);
    let repository: RepositoryId = body.repository.parse().map_err(malformed)?;
    let what = Announced { name: body.name.parse()?, repository, labels: body.labels, bytes: body.bytes };
    if state.tasks.is_closed() || state.is_preempted() {
        return Err(Error::unreachable("agent is shutting down").help("hand it off to another one").into());
    }
    let recorded = AccessRequest {
        caller: &caller,
        action: Action::Handoff,
        repository: Some(state.origin(Some(&body.repository))?),
        repeats: Repeats::Separate,
    };
    let name = what.name.clone();
    let promised = match check_origins(&state, from, &what).await {
        Ok(()) => store(&state)?.promise(from, what),
        Err(error) => Err(error),
    };
    let id = match promised {
        Ok(id) => id,
        Err(error) => return Err(recorded.refuse(&state, &name, error).await.into()),
    };
    match recorded.allow(&state, &name).await {
        Ok(request) => store(&state)?.record(id, request),
        Err(error) => {
            store(&state)?.withdraw(id);
            return Err(error.into());
        }
    }
    Ok((StatusCode::CREATED, Json(view::HandoffId { id: id.to_string() })))
}

/// Receives a checkpoint as an archive (docs/protocol.md); only from other agents.
/// After the response, the checkpoint survives the loss of its sender, and a power loss here.
#[utoipa::path(
    put,
    path = "/v1/handoffs/{id}",
    operation_id = "sendHandoff",
    params(("id" = String, Path, description = "Id of the promise")),
    request_body(content = String, content_type = "application/octet-stream"),
    responses(
        (status = 200, description = "All of it is on disk, and survives a power loss", body = view::Handoff),
    ),
)]
pub(super) async fn take(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Json<view::Handoff>, ApiError> {
    let (from, id) = (sender(&caller)?.clone(), parsed(&id)?);
    let incoming = store(&state)?.expect(id, &from)?;
    let recorded = incoming.recorded();
    let count = move |piece: &io::Result<Bytes>| {
        if let (Some(recorded), Ok(piece)) = (&recorded, piece) {
            let _ = recorded.moved(piece.len() as u64);
        }
    };
    let input = Box::pin(arriving(request.into_body().into_data_stream(), incoming.until()).inspect(count));
    let mut input = SyncIoBridge::new(StreamReader::new(input));
    let now = state.now();
    // It waits for the sender, which may be slow.
    let stored = on_own_thread("handoff-take", move || incoming.take(&mut input, now)).await?;
    tracing::info!(name = %stored.what.name, from = %stored.from, "stored a handed-off checkpoint");
    Ok(Json(stored.view(id)))
}

/// Saves a checkpoint that was set aside now.
#[utoipa::path(
    post,
    path = "/v1/handoffs/{id}/retry",
    operation_id = "retryHandoff",
    params(("id" = String, Path, description = "Id of the handoff")),
    responses((status = 200, description = "It is no longer set aside", body = view::Handoff)),
)]
pub(super) async fn retry(
    State(state): State<Arc<AgentState>>,
    Path(id): Path<String>,
) -> Result<Json<view::Handoff>, ApiError> {
    let (store, id) = (Arc::clone(store(&state)?), parsed(&id)?);
    let stored = blocking(move || store.retry(id)).await?;
    Ok(Json(stored.view(id)))
}

/// Deletes a checkpoint: its sender has saved it, or it is not wanted.
#[utoipa::path(
    delete,
    path = "/v1/handoffs/{id}",
    operation_id = "releaseHandoff",
    params(("id" = String, Path, description = "Id of the handoff")),
    responses((status = 200, description = "It is deleted", body = view::HandoffId)),
)]
pub(super) async fn release(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<view::HandoffId>, ApiError> {
    let (store, kept, from) = (Arc::clone(store(&state)?), parsed(&id)?, caller.agent().cloned());
    blocking(move || store.release(kept, from.as_ref())).await?;
    Ok(Json(view::HandoffId { id }))
}

/// Body of a request; ends with an error if it stalls, or is incomplete at `until`.
fn arriving(body: BodyDataStream, until: Instant) -> impl Stream<Item = io::Result<Bytes>> + Send {
    futures::stream::unfold(body, move |mut body| async move {
        if Instant::now() >= until {
            return Some((Err(io::ErrorKind::TimedOut.into()), body));
        }
        let next = match timeout_at(until.min(Instant::now() + STALL), body.next()).await {
            Ok(next) => next?.map_err(io::Error::other),
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        };
        Some((next, body))
    })
}

fn store(state: &AgentState) -> Result<&Arc<HandoffStore>> {
    state.store.as_ref().ok_or_else(|| {
        Error::not_found("agent accepts no handoffs")
            .help("set [handoff] dir and capacity, and [[handoff.accept]], in its settings")
    })
}

/// Agent that calls. Callers of this node cannot hand off: their checkpoints are on its disk already.
/// Checks that the sender may read the names in the label `derived-from` of its checkpoint: their labels, which the checkpoint gets,
/// would reveal them.
///
/// # Errors
/// Denied, whether the name exists or not; usage, for malformed labels.
async fn check_origins(state: &AgentState, from: &Identity, what: &Announced) -> Result<()> {
    let (labels, _) = Labels::split(&what.labels)?;
    let repository = state.origin(Some(&what.repository.to_string()))?;
    for origin in labels.origins() {
        let read = state.exchange()?.resolve(from, repository, &Selector::Name(origin.clone())).await;
        if let Err(error) = read {
            if error.kind() != ErrorKind::NotFound {
                return Err(error);
            }
            return Err(Error::denied("sender may not read a name in the label `derived-from`").got(origin));
        }
    }
    Ok(())
}

fn sender(caller: &Caller) -> Result<&Identity> {
    caller.agent().ok_or_else(|| Error::denied("only other agents hand off checkpoints, over the port for peers"))
}

fn parsed(id: &str) -> Result<Ulid> {
    let malformed = |source| {
        Error::usage("id is malformed")
            .expected("26 letters and digits")
            .got(format!("{id:.64?}"))
            .help("`towline handoff list` and GET /v1/handoffs list them")
            .source(source)
    };
    id.parse::<Ulid>().map_err(malformed)
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    #[tokio::test]
    async fn what_arrives_after_its_time_is_not_taken() {
        let whole = || Body::from("all of it").into_data_stream();
        let hour = Duration::from_hours(1);
        let mut in_time = Box::pin(arriving(whole(), Instant::now() + hour));
        assert_eq!(in_time.next().await.unwrap().unwrap(), "all of it");
        let mut late = Box::pin(arriving(whole(), Instant::now()));
        assert_eq!(late.next().await.unwrap().unwrap_err().kind(), io::ErrorKind::TimedOut);
        // One that stands still is not waited for beyond its time, either.
        let still = Body::from_stream(futures::stream::pending::<io::Result<Bytes>>()).into_data_stream();
        let mut still = Box::pin(arriving(still, Instant::now() + Duration::from_millis(1)));
        assert_eq!(still.next().await.unwrap().unwrap_err().kind(), io::ErrorKind::TimedOut);
    }
}
