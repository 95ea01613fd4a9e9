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
use tokio::time::timeout;
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

/// Who sends nothing for so long is gone.
const STALL: Duration = Duration::from_secs(30);

/// What is to be given.
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
        return Err(Error::unreachable("agent goes itself").cure("give it to another one").into());
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
    let (from, id, shelf) = (giver(&door)?.clone(), parsed(&id)?, Arc::clone(shelf(&house)?));
    let input = Box::pin(arriving(request.into_body().into_data_stream()));
    let mut input = SyncIoBridge::new(StreamReader::new(input));
    let now = house.now();
    let held = blocking(move || shelf.take(id, &from, &mut input, now)).await?;
    tracing::info!(name = %held.what.name, from = %held.from, "took a checkpoint into custody");
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

/// A body as it arrives; an error, if that takes too long.
fn arriving(body: BodyDataStream) -> impl Stream<Item = io::Result<Bytes>> + Send {
    futures::stream::unfold(body, |mut body| async {
        let next = match timeout(STALL, body.next()).await {
            Ok(next) => next?.map_err(io::Error::other),
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        };
        Some((next, body))
    })
}

fn shelf(house: &House) -> Result<&Arc<Shelf>> {
    house.shelf.as_ref().ok_or_else(|| {
        Error::not_found("this agent keeps nothing for others")
            .cure("let it: [custody] dir, capacity and of in its settings")
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
            .cure("GET /v1/custody lists what is kept")
            .source(source)
    };
    id.parse::<Ulid>().map_err(malformed)
}
