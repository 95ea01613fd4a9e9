//! Gives checkpoints into the custody of another agent.

use std::collections::BTreeMap;
use std::io::BufWriter;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use axum::body::Body;
use axum::http::{Method, header};
use bytes::Bytes;
use futures::StreamExt as _;
use hyper::{Request, StatusCode};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};
use tokio_util::io::{ReaderStream, SyncIoBridge};

use super::parcel::Contents;
use crate::agent::dial::Dialled;
use crate::agent::elsewhere::{At, others};
use crate::agent::house::House;
use crate::agent::view::{Custody, Kept};
use crate::error::{Error, ErrorKind, Result};
use crate::id::RepositoryId;
use crate::ops::{Refuge, Unsaved};
use crate::repository::Name;
use crate::transfer::identity::Identity;
use crate::work::blocking;

/// Bytes on their way between the disk and the connection.
const WINDOW: usize = 1 << 20;
/// Time without a byte taken after which a receiver is gone.
const STALL: Duration = Duration::from_secs(30);
/// Time in which an agent must promise room, and answer once it has all: it syncs the last of it.
const PROMISE_WITHIN: Duration = Duration::from_secs(10);
const ANSWER_WITHIN: Duration = Duration::from_mins(5);
/// Time in which a release must be answered: if it does not arrive, the checkpoint is saved once more, which stores nothing.
const RELEASE_WITHIN: Duration = Duration::from_secs(5);

/// Gives checkpoints to agents that `to` means.
#[derive(Debug)]
pub(in crate::agent) struct Giver {
    house: Arc<House>,
    to: At,
    /// Repository of the saves.
    repository: RepositoryId,
    /// The last is what counts; what was given before is let go of with it.
    given: Mutex<BTreeMap<Name, Vec<Given>>>,
}

/// Copy that another agent has, or may have.
#[derive(Clone, Debug)]
struct Given {
    likeness: blake3::Hash,
    keeper: Keeper,
    id: String,
    /// It said that it has all of it.
    whole: bool,
}

/// An agent, and where it is.
#[derive(Clone, Debug)]
struct Keeper {
    who: Identity,
    address: String,
}

impl Giver {
    pub(in crate::agent) fn new(house: Arc<House>, to: At) -> Result<Self> {
        let repository = house.repository(None)?.id();
        Ok(Self { house, to, repository, given: Mutex::default() })
    }

    /// Has `keeper` take `contents`.
    async fn give_to(&self, keeper: &Keeper, checkpoint: &Unsaved<'_>, contents: &Arc<Contents>) -> Result<()> {
        let announced = json!({
            "name": checkpoint.name.to_string(),
            "repository": self.repository.to_string(),
            "labels": checkpoint.labels,
            "bytes": contents.room(),
        });
        let announcing = self.ask(keeper, asking(Method::POST, "/v1/custody", Some(&announced))?);
        let promised: Custody = timeout(PROMISE_WITHIN, announcing).await.map_err(|_| silent(keeper))??;
        // Whatever becomes of it, it is let go of once the step is saved.
        self.remember(checkpoint.name, contents, keeper, &promised.id);
        let (reader, writer) = tokio::io::duplex(WINDOW);
        let (moved, whole) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let count = Arc::clone(&moved);
        let body = ReaderStream::with_capacity(reader, WINDOW).inspect(move |piece| {
            let len = piece.as_ref().map_or(0, Bytes::len) as u64;
            count.fetch_add(len, Ordering::Relaxed);
        });
        let path = format!("/v1/custody/{}", promised.id);
        let giving = request(Method::PUT, &path, "application/octet-stream", Body::from_stream(body))?;
        let (contents, bridge, sent) = (Arc::clone(contents), SyncIoBridge::new(writer), Arc::clone(&whole));
        let sending = blocking(move || {
            let mut bridge = BufWriter::with_capacity(WINDOW, bridge);
            contents.send(&mut bridge)?;
            sent.store(true, Ordering::Relaxed);
            Ok(())
        });
        // Giving up drops the connection, and so ends the sending.
        let kept = async {
            tokio::select! {
                kept = self.ask::<Kept>(keeper, giving) => kept,
                () = stalled(&moved, &whole) => Err(silent(keeper)),
            }
        };
        match tokio::join!(sending, kept) {
            // A file that changed breaks the request off: that is the cause, and what the other side says of it is not.
            (Err(error), _) if error.kind() == ErrorKind::Conflict => Err(error),
            (sent, kept) => kept.and(sent),
        }
    }

    /// Answer of `keeper` to `request`, over a connection of its own.
    async fn ask<T: DeserializeOwned>(&self, keeper: &Keeper, request: Request<Body>) -> Result<T> {
        let mut line = Dialled::to(&self.house, &keeper.who, &keeper.address).await?;
        let (status, body) = line.ask(request).await?;
        said(status, &body)
    }

    fn remember(&self, name: &Name, contents: &Contents, keeper: &Keeper, id: &str) {
        let (likeness, keeper, id) = (contents.likeness(), keeper.clone(), id.to_owned());
        self.given().entry(name.clone()).or_default().push(Given { likeness, keeper, id, whole: false });
    }

    fn given(&self) -> MutexGuard<'_, BTreeMap<Name, Vec<Given>>> {
        self.given.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks the last copy given for `name` as complete; returns the earlier ones.
    fn settled(&self, name: &Name) -> Vec<Given> {
        let mut given = self.given();
        let all = given.entry(name.clone()).or_default();
        let last = all.pop();
        let before = std::mem::take(all);
        all.extend(last.map(|last| Given { whole: true, ..last }));
        before
    }

    /// Says of `given` that they need not be kept.
    async fn let_go(&self, name: &Name, given: Vec<Given>) {
        for Given { keeper, id, .. } in given {
            let released = async {
                self.ask::<Custody>(&keeper, asking(Method::DELETE, &format!("/v1/custody/{id}"), None)?).await
            };
            match timeout(RELEASE_WITHIN, released).await {
                Ok(Ok(_)) => {}
                // It did not come that far.
                Ok(Err(error)) if error.kind() == ErrorKind::NotFound => {}
                Ok(Err(error)) => tracing::info!("{} goes on to keep {name}: {error:?}", keeper.who.path()),
                Err(_) => tracing::info!("{} goes on to keep {name}: no answer in time", keeper.who.path()),
            }
        }
    }
}

#[async_trait]
impl Refuge for Giver {
    async fn needed(&self) {
        self.house.short_of_time().await;
    }

    async fn give(&self, checkpoint: &Unsaved<'_>) -> Result<String> {
        let path: PathBuf = checkpoint.path.to_owned();
        let contents = Arc::new(blocking(move || Contents::find(&path)).await?);
        let likeness = contents.likeness();
        let has = |given: &&Given| given.whole && given.likeness == likeness;
        if let Some(given) = self.given().get(checkpoint.name).and_then(|given| given.last()).filter(has) {
            return Ok(given.keeper.who.path());
        }
        let (own, peers) = (self.house.credentials()?.identity(), self.house.exchange()?.peers());
        peers.live().await;
        let mut refused = Vec::new();
        for (who, address) in others(&self.to, &own, &peers.list(), checkpoint.name.as_str()) {
            let keeper = Keeper { who, address };
            match self.give_to(&keeper, checkpoint, &contents).await {
                Ok(()) => {
                    let before = self.settled(checkpoint.name);
                    self.let_go(checkpoint.name, before).await;
                    return Ok(keeper.who.path());
                }
                Err(error) if error.kind() == ErrorKind::Conflict => return Err(error),
                Err(error) => {
                    tracing::warn!("{} does not keep {}: {error:?}", keeper.who.path(), checkpoint.name);
                    refused.push(format!("{}: {error}", keeper.who.path()));
                }
            }
        }
        let got = if refused.is_empty() { "nobody that is known here fits".to_owned() } else { refused.join("; ") };
        Err(Error::unreachable("no agent keeps this checkpoint")
            .at(&self.to)
            .got(got)
            .help("see `entrust` in [sidecar] of this agent's settings, and [custody] in the other's"))
    }

    async fn release(&self, name: &Name) {
        let given = self.given().remove(name).unwrap_or_default();
        self.let_go(name, given).await;
    }
}

/// Once nothing moved for too long; what is on its way, or the answer once all is sent.
async fn stalled(moved: &AtomicU64, whole: &AtomicBool) {
    let mut before = 0;
    loop {
        if whole.load(Ordering::Relaxed) {
            return sleep(ANSWER_WITHIN).await;
        }
        sleep(STALL).await;
        let now = moved.load(Ordering::Relaxed);
        if now == before && !whole.load(Ordering::Relaxed) {
            return;
        }
        before = now;
    }
}

fn silent(keeper: &Keeper) -> Error {
    Error::unreachable("the other agent takes nothing, or does not answer").at(&keeper.address)
}

fn asking(method: Method, path: &str, told: Option<&Value>) -> Result<Request<Body>> {
    let body = told.map_or_else(Body::empty, |told| Body::from(told.to_string()));
    request(method, path, "application/json", body)
}

fn request(method: Method, path: &str, kind: &str, body: Body) -> Result<Request<Body>> {
    let request =
        Request::builder().method(method).uri(path).header(header::HOST, "agent").header(header::CONTENT_TYPE, kind);
    request.body(body).map_err(|source| Error::other("request cannot be made").at(path).source(source))
}

/// Answer of the other agent.
///
/// # Errors
/// What it says is wrong; unsupported, if that makes no sense.
fn said<T: DeserializeOwned>(status: StatusCode, body: &[u8]) -> Result<T> {
    let malformed = |source| Error::unsupported("answer of the other agent makes no sense").source(source);
    if status.is_success() {
        return serde_json::from_slice(body).map_err(malformed);
    }
    let told: Value = serde_json::from_slice(body).map_err(malformed)?;
    let of = |field: &str| told["error"][field].as_str().map(str::to_owned);
    let kind = of("kind").map_or(ErrorKind::Other, |kind| ErrorKind::from_word(&kind));
    let error = Error::new(kind, of("message").unwrap_or_else(|| "it is refused".to_owned()));
    Err(of("help").into_iter().fold(error, Error::help))
}
