//! Checkpoints that other agents give into custody.

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

use super::guard::Door;
use super::refusal::{Asked, Refusal};
use crate::agent::custody::{Announced, Shelf};
use crate::agent::house::House;
use crate::agent::view;
use crate::error::{Error, Result};
use crate::id::RepositoryId;
use crate::transfer::identity::Identity;
use crate::work::blocking;

/// Time without a byte after which a sender is gone.
const STALL: Duration = Duration::from_secs(30);

/// Body of an announcement.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Announcement {
    name: String,
    repository: String,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    bytes: u64,
}

pub(super) async fn list(
    State(house): State<Arc<House>>,
    Extension(door): Extension<Door>,
) -> Result<Json<view::KeptList>, Refusal> {
    let kept = shelf(&house)?.list(door.caller());
    Ok(Json(view::KeptList { kept: kept.iter().map(|(id, held)| held.told(*id)).collect() }))
}

/// Promises room.
pub(super) async fn promise(
    State(house): State<Arc<House>>,
    Extension(door): Extension<Door>,
    Asked(asked): Asked<Announcement>,
) -> Result<(StatusCode, Json<view::Custody>), Refusal> {
    let from = giver(&door)?;
    door.may_name(Some(&asked.repository))?;
    house.origin(Some(&asked.repository))?;
    let malformed = |source| Error::usage("repository is no id").got(&asked.repository).source(source);
    let repository: RepositoryId = asked.repository.parse().map_err(malformed)?;
    let what = Announced { name: asked.name.parse()?, repository, labels: asked.labels, bytes: asked.bytes };
    if house.transfers.is_closed() || house.is_told_to_go() {
        return Err(Error::unreachable("agent goes itself").help("give it to another one").into());
    }
    let id = shelf(&house)?.promise(from, what)?;
    Ok((StatusCode::CREATED, Json(view::Custody { id: id.to_string() })))
}

/// Takes what room was promised to. Once this is answered, it survives the loss of the node that gave it, and a power loss here.
pub(super) async fn take(
    State(house): State<Arc<House>>,
    Extension(door): Extension<Door>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Json<view::Kept>, Refusal> {
    let (from, id) = (giver(&door)?.clone(), parsed(&id)?);
    let coming = shelf(&house)?.expect(id, &from)?;
    let input = Box::pin(arriving(request.into_body().into_data_stream(), coming.until()));
    let mut input = SyncIoBridge::new(StreamReader::new(input));
    let now = house.now();
    let held = blocking(move || coming.take(&mut input, now)).await?;
    tracing::info!(name = %held.what.name, from = %held.from, "took a checkpoint into custody");
    Ok(Json(held.told(id)))
}

/// Has what was set aside saved, at once.
pub(super) async fn retry(
    State(house): State<Arc<House>>,
    Path(id): Path<String>,
) -> Result<Json<view::Kept>, Refusal> {
    let (shelf, id) = (Arc::clone(shelf(&house)?), parsed(&id)?);
    let held = blocking(move || shelf.retry(id)).await?;
    Ok(Json(held.told(id)))
}

/// Lets go of what is kept: whoever gave it has saved it.
pub(super) async fn release(
    State(house): State<Arc<House>>,
    Extension(door): Extension<Door>,
    Path(id): Path<String>,
) -> Result<Json<view::Custody>, Refusal> {
    let (shelf, kept, from) = (Arc::clone(shelf(&house)?), parsed(&id)?, door.caller().cloned());
    blocking(move || shelf.release(kept, from.as_ref())).await?;
    Ok(Json(view::Custody { id }))
}

/// A body as it arrives; an error, if that stalls, or it is not all there when the time is `until`.
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

fn shelf(house: &House) -> Result<&Arc<Shelf>> {
    house.shelf.as_ref().ok_or_else(|| {
        Error::not_found("this agent keeps nothing for others")
            .help("let it: [custody] dir and capacity, and [[custody.accept]], in its settings")
    })
}

/// Only another agent can give: what is of this node is on its disk already.
fn giver(door: &Door) -> Result<&Identity> {
    door.caller()
        .ok_or_else(|| Error::denied("only another agent gives something into custody, over the port for peers"))
}

fn parsed(id: &str) -> Result<Ulid> {
    let malformed = |source| {
        Error::usage("id is malformed")
            .expected("26 letters and digits")
            .got(format!("{id:.64?}"))
            .help("GET /v1/custody lists what is kept")
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
