//! Sends checkpoints to another agent for handoff.

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
use tokio::sync::OnceCell;
use tokio::time::{sleep, timeout};
use tokio_util::io::{ReaderStream, SyncIoBridge};

use super::archive::Contents;
use crate::agent::audit::outcome;
use crate::agent::dial::Dialled;
use crate::agent::routing::{AgentSelector, others};
use crate::agent::state::AgentState;
use crate::agent::view::{Handoff, HandoffId};
use crate::audit::{Action, Actor, Decision, Repeats, Request as Recorded, Verdict};
use crate::error::{Error, ErrorKind, Result};
use crate::id::RepositoryId;
use crate::identity::Identity;
use crate::name::Name;
use crate::ops::{HandoffTarget, UnsavedCheckpoint, all_labels};
use crate::policy::Labels;
use crate::repository::log::State;
use crate::repository::{Access, Destination};
use crate::work::{blocking, on_own_thread};

/// Buffer between disk and connection, in bytes.
const WINDOW: usize = 1 << 20;
/// Time without progress after which a receiver counts as gone.
const STALL: Duration = Duration::from_secs(30);
/// Timeouts of the promise of space, and of the response after the last byte, which waits for a sync.
const PROMISE_WITHIN: Duration = Duration::from_secs(10);
const ANSWER_WITHIN: Duration = Duration::from_mins(5);
/// Time limit to read the labels of a name from the log.
const LABELS_WITHIN: Duration = Duration::from_secs(1);
/// Timeout of a release. If it is lost, the receiver saves the checkpoint once more, which stores nothing.
const RELEASE_WITHIN: Duration = Duration::from_secs(5);

/// Sends checkpoints to agents that `to` selects.
#[derive(Debug)]
pub(in crate::agent) struct Sender {
    state: Arc<AgentState>,
    to: AgentSelector,
    /// Repository of the saves.
    repository: RepositoryId,
    /// State of the repository, if this agent has not read its log yet: read once, because the store may be unreachable.
    log_state: OnceCell<Option<Arc<State>>>,
    /// Copies sent, by name, the latest last. Earlier ones are released once a later one is complete.
    sent: Mutex<BTreeMap<Name, Vec<SentCopy>>>,
    refusals: Refusals,
}

/// Refusals that the log has, by checkpoint and receiver. Each is tried again several times a second.
#[derive(Debug, Default)]
struct Refusals(Mutex<BTreeMap<Name, BTreeMap<String, ErrorKind>>>);

impl Refusals {
    /// Notes that `receiver` did not take `name`; true unless it said so before, for an error of the same kind.
    fn is_new(&self, name: &Name, receiver: String, kind: ErrorKind) -> bool {
        let mut noted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        noted.entry(name.clone()).or_default().insert(receiver, kind) != Some(kind)
    }

    /// Forgets those of `name`, which an agent or the repository has.
    fn forget(&self, name: &Name) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
    }
}

/// Copy that another agent has, or may have.
#[derive(Clone, Debug)]
struct SentCopy {
    fingerprint: blake3::Hash,
    receiver: Receiver,
    id: String,
    /// The receiver confirmed all of it.
    complete: bool,
}

/// Receiving agent and its address.
#[derive(Clone, Debug)]
struct Receiver {
    who: Identity,
    address: String,
}

impl Sender {
    pub(in crate::agent) fn new(state: Arc<AgentState>, to: AgentSelector) -> Result<Self> {
        let repository = state.repository(None)?.id();
        Ok(Self {
            state,
            to,
            repository,
            log_state: OnceCell::new(),
            sent: Mutex::default(),
            refusals: Refusals::default(),
        })
    }

    /// Sends `contents` to `receiver`.
    async fn send_to(
        &self,
        receiver: &Receiver,
        checkpoint: &UnsavedCheckpoint<'_>,
        contents: &Arc<Contents>,
    ) -> Result<()> {
        let labels = self.labels_for(receiver, checkpoint).await;
        let recorded = self.recorded(receiver, checkpoint, labels.as_ref().err()).await?;
        let sent = self.send_labelled(receiver, checkpoint, contents, (labels?, recorded.as_ref())).await;
        if let Some(recorded) = recorded {
            recorded.end(sent.as_ref().err().map_or_else(|| "done".to_owned(), outcome));
        }
        sent
    }

    /// Records that `checkpoint` goes to `receiver`, or why not.
    async fn recorded(
        &self,
        receiver: &Receiver,
        checkpoint: &UnsavedCheckpoint<'_>,
        refused: Option<&Error>,
    ) -> Result<Option<Recorded>> {
        let denied = refused.filter(|error| error.kind() == ErrorKind::Denied);
        if refused.is_some() && denied.is_none() {
            return Ok(None);
        }
        let decision = Decision {
            actor: Actor::Agent(self.state.credentials()?.identity()),
            action: Action::Handoff,
            name: Some(checkpoint.name.to_string()),
            manifest: None,
            repository: Some(self.repository.to_string()),
            to: Some(receiver.who.site().to_owned()),
            asked: Some(receiver.who.to_string()),
            verdict: if denied.is_some() { Verdict::Deny } else { Verdict::Allow },
            rule: denied.map_or_else(|| "handoff_to".to_owned(), ToString::to_string),
        };
        self.state.record(decision, Repeats::Separate).await
    }

    /// Sends `contents` to `receiver` with these labels; its bytes are counted for the entry of the audit log.
    async fn send_labelled(
        &self,
        receiver: &Receiver,
        checkpoint: &UnsavedCheckpoint<'_>,
        contents: &Arc<Contents>,
        (labels, recorded): (BTreeMap<String, String>, Option<&Recorded>),
    ) -> Result<()> {
        let announced = json!({
            "name": checkpoint.name.to_string(),
            "repository": self.repository.to_string(),
            "labels": labels,
            "bytes": contents.space(),
        });
        let announcing = self.ask(receiver, asking(Method::POST, "/v1/handoffs", Some(&announced))?);
        let promised: HandoffId = timeout(PROMISE_WITHIN, announcing).await.map_err(|_| silent(receiver))??;
        // Remembered before anything is sent: it is released once the step is saved, even if sending fails.
        self.remember(checkpoint.name, contents, receiver, &promised.id);
        let (reader, writer) = tokio::io::duplex(WINDOW);
        let (moved, complete) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (count, recorded) = (Arc::clone(&moved), recorded.cloned());
        let body = ReaderStream::with_capacity(reader, WINDOW).inspect(move |piece| {
            let len = piece.as_ref().map_or(0, Bytes::len) as u64;
            count.fetch_add(len, Ordering::Relaxed);
            if let Some(recorded) = &recorded {
                let _ = recorded.moved(len);
            }
        });
        let path = format!("/v1/handoffs/{}", promised.id);
        let put = request(Method::PUT, &path, "application/octet-stream", Body::from_stream(body))?;
        let (contents, bridge, sent) = (Arc::clone(contents), SyncIoBridge::new(writer), Arc::clone(&complete));
        // It waits for the receiver, which may be slow.
        let sending = on_own_thread("handoff-send", move || {
            let mut bridge = BufWriter::with_capacity(WINDOW, bridge);
            contents.send(&mut bridge)?;
            sent.store(true, Ordering::Relaxed);
            Ok(())
        });
        // Giving up drops the connection, which ends the sending.
        let answer = async {
            tokio::select! {
                answer = self.ask::<Handoff>(receiver, put) => answer,
                () = stalled(&moved, &complete) => Err(silent(receiver)),
            }
        };
        match tokio::join!(sending, answer) {
            // A changed file cuts off the request: that is the cause, not the receiver's error.
            (Err(error), _) if error.kind() == ErrorKind::Conflict => Err(error),
            (sent, answer) => answer.and(sent),
        }
    }

    /// All labels of `checkpoint`, including those that bind its name, if the policy permits sending it to `receiver`.
    async fn labels_for(
        &self,
        receiver: &Receiver,
        checkpoint: &UnsavedCheckpoint<'_>,
    ) -> Result<BTreeMap<String, String>> {
        let repository = self.state.repository(None)?;
        let (given, free) = Labels::split(checkpoint.labels)?;
        let first_look = || async { timeout(LABELS_WITHIN, repository.state()).await.ok()?.ok() };
        let state = match repository.log().last_seen() {
            Some(state) => Some(state),
            None => self.log_state.get_or_init(first_look).await.clone(),
        };
        let Some(state) = state else {
            // Without a policy nothing has labels that restrict, and this machine has never seen one.
            repository.guard().check_version(repository.id(), None)?;
            if given.restrict() {
                return Err(Error::denied("labels cannot be read while the store is unreachable").at(checkpoint.name));
            }
            return Ok(checkpoint.labels.clone());
        };
        let labels = repository.labels_in(&state, checkpoint.name, None).joined(&given);
        let to = Destination::Agent(&receiver.who);
        let access = Access { repository: repository.id(), name: checkpoint.name, labels: &labels, to };
        repository.check_access(&state, &access).await?;
        Ok(all_labels(&free, &labels))
    }

    /// Sends `request` to `receiver` over a new connection; returns its answer.
    async fn ask<T: DeserializeOwned>(&self, receiver: &Receiver, request: Request<Body>) -> Result<T> {
        let mut line = Dialled::to(&self.state, &receiver.who, &receiver.address).await?;
        let (status, body) = line.ask(request).await?;
        parse_answer(status, &body)
    }

    fn remember(&self, name: &Name, contents: &Contents, receiver: &Receiver, id: &str) {
        let (fingerprint, receiver, id) = (contents.fingerprint(), receiver.clone(), id.to_owned());
        self.sent().entry(name.clone()).or_default().push(SentCopy { fingerprint, receiver, id, complete: false });
    }

    fn sent(&self) -> MutexGuard<'_, BTreeMap<Name, Vec<SentCopy>>> {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks the last copy of `name` as complete; returns the earlier ones.
    fn complete(&self, name: &Name) -> Vec<SentCopy> {
        let mut sent = self.sent();
        let all = sent.entry(name.clone()).or_default();
        let last = all.pop();
        let before = std::mem::take(all);
        all.extend(last.map(|last| SentCopy { complete: true, ..last }));
        before
    }

    /// Releases `copies` at their receivers. Errors are logged.
    async fn release_copies(&self, name: &Name, copies: Vec<SentCopy>) {
        for SentCopy { receiver, id, .. } in copies {
            let released = async {
                self.ask::<HandoffId>(&receiver, asking(Method::DELETE, &format!("/v1/handoffs/{id}"), None)?).await
            };
            match timeout(RELEASE_WITHIN, released).await {
                Ok(Ok(_)) => {}
                // It never arrived.
                Ok(Err(error)) if error.kind() == ErrorKind::NotFound => {}
                Ok(Err(error)) => tracing::info!("{} still stores {name}: {error:?}", receiver.who.path()),
                Err(_) => tracing::info!("{} still stores {name}: no answer in time", receiver.who.path()),
            }
        }
    }
}

#[async_trait]
impl HandoffTarget for Sender {
    async fn needed(&self) {
        self.state.until_stopping().await;
    }

    async fn send(&self, checkpoint: &UnsavedCheckpoint<'_>) -> Result<String> {
        let path: PathBuf = checkpoint.path.to_owned();
        let budget = self.state.origin(None).ok().map(|origin| origin.budget().clone());
        let contents = Arc::new(blocking(move || Contents::find(&path, budget)).await?);
        let fingerprint = contents.fingerprint();
        if let Some(copy) = self.sent().get(checkpoint.name).and_then(|copies| copies.last())
            && copy.complete
            && copy.fingerprint == fingerprint
        {
            return Ok(copy.receiver.who.path());
        }
        let (own, peers) = (self.state.credentials()?.identity(), self.state.exchange()?.peers());
        peers.live().await;
        let mut refused = Vec::new();
        for (who, address) in others(&self.to, &own, &peers.list(), checkpoint.name.as_str()) {
            let receiver = Receiver { who, address };
            match self.send_to(&receiver, checkpoint, &contents).await {
                Ok(()) => {
                    self.refusals.forget(checkpoint.name);
                    let before = self.complete(checkpoint.name);
                    self.release_copies(checkpoint.name, before).await;
                    return Ok(receiver.who.path());
                }
                Err(error) if error.kind() == ErrorKind::Conflict => return Err(error),
                Err(error) => {
                    let who = receiver.who.path();
                    if self.refusals.is_new(checkpoint.name, who.clone(), error.kind()) {
                        tracing::warn!("{who} did not take {}, and is asked again: {error:?}", checkpoint.name);
                    } else {
                        tracing::debug!("{who} did not take {} again: {error:?}", checkpoint.name);
                    }
                    refused.push(format!("{who}: {error}"));
                }
            }
        }
        let got = if refused.is_empty() { "no known agent matches".to_owned() } else { refused.join("; ") };
        Err(Error::unreachable("no agent takes this checkpoint")
            .at(&self.to)
            .got(got)
            .help("see `handoff_to` in [sidecar] of this agent's settings, and [handoff] in the receiver's"))
    }

    async fn release(&self, name: &Name) {
        self.refusals.forget(name);
        let copies = self.sent().remove(name).unwrap_or_default();
        self.release_copies(name, copies).await;
    }
}

/// Returns once nothing moved for [`STALL`], or no answer came [`ANSWER_WITHIN`] after the last byte.
async fn stalled(moved: &AtomicU64, complete: &AtomicBool) {
    let mut before = 0;
    loop {
        if complete.load(Ordering::Relaxed) {
            return sleep(ANSWER_WITHIN).await;
        }
        sleep(STALL).await;
        let now = moved.load(Ordering::Relaxed);
        if now == before && !complete.load(Ordering::Relaxed) {
            return;
        }
        before = now;
    }
}

fn silent(receiver: &Receiver) -> Error {
    Error::unreachable("other agent does not read or respond").at(&receiver.address)
}

fn asking(method: Method, path: &str, json: Option<&Value>) -> Result<Request<Body>> {
    let body = json.map_or_else(Body::empty, |json| Body::from(json.to_string()));
    request(method, path, "application/json", body)
}

fn request(method: Method, path: &str, kind: &str, body: Body) -> Result<Request<Body>> {
    let request =
        Request::builder().method(method).uri(path).header(header::HOST, "agent").header(header::CONTENT_TYPE, kind);
    request.body(body).map_err(|source| Error::other("cannot build the request").at(path).source(source))
}

/// Answer of the other agent.
///
/// # Errors
/// As the receiver reports; unsupported, for a malformed answer.
fn parse_answer<T: DeserializeOwned>(status: StatusCode, body: &[u8]) -> Result<T> {
    let malformed = |source| Error::unsupported("cannot parse the other agent's response").source(source);
    if status.is_success() {
        return serde_json::from_slice(body).map_err(malformed);
    }
    let json: Value = serde_json::from_slice(body).map_err(malformed)?;
    let of = |field: &str| json["error"][field].as_str().map(str::to_owned);
    let kind = of("kind").map_or(ErrorKind::Other, |kind| ErrorKind::from_word(&kind));
    let error = Error::new(kind, of("message").unwrap_or_else(|| "refused without a message".to_owned()));
    Err(of("help").into_iter().fold(error, Error::help))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_logged_once_until_it_changes() {
        let (refusals, step) = (Refusals::default(), "run/step-1".parse().unwrap());
        let is_new = |who: &str, kind| refusals.is_new(&step, who.to_owned(), kind);
        assert!(is_new("cloud/a", ErrorKind::Exhausted) && is_new("cloud/b", ErrorKind::Exhausted));
        assert!(!is_new("cloud/a", ErrorKind::Exhausted) && !is_new("cloud/b", ErrorKind::Exhausted));
        assert!(is_new("cloud/a", ErrorKind::Denied) && is_new("cloud/a", ErrorKind::Exhausted));
        refusals.forget(&step);
        assert!(is_new("cloud/a", ErrorKind::Exhausted));
    }
}
