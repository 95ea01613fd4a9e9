//! The agent's audit log: opened with it, written before a request goes on, published every minute and at the end.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use axum::body::Body;
use axum::http::{Method, header};
use hyper::Request as HttpRequest;
use rustix::process::getuid;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::SHUTDOWN_MAX;
use super::config::AuditConfig;
use super::dial::Dialled;
use super::state::AgentState;
use super::tasks::Task;
use super::user::user_name;
use super::view::TaskState;
use crate::audit::{
    Decision, FallbackPublisher, PUBLISH_EVERY, Publisher, Recorder, RecorderOptions, Repeats, Request, SignedHead,
    Signer,
};
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::transfer::identity::{Context, Credentials, hex};
use crate::work::blocking;

/// Beginning of the origin of a command line's log.
pub(super) const CLI_ORIGIN: &str = "cli:";
/// Time that another agent has to publish a head.
const ANSWER_WITHIN: Duration = Duration::from_secs(20);

/// Opens the log that `config` names, if it names one.
///
/// # Errors
/// As [`Recorder::open`].
pub(super) async fn open_log(
    config: Option<&AuditConfig>,
    credentials: Option<&Credentials>,
    clock: Arc<dyn Clock>,
) -> Result<Option<Recorder>> {
    let Some(config) = config else { return Ok(None) };
    let origin = match credentials {
        Some(credentials) => credentials.identity().to_string(),
        None => format!("user:{}", user_name(getuid())),
    };
    let options = RecorderOptions::new(config.dir.clone(), origin);
    blocking(move || Recorder::open(options, clock)).await.map(Some)
}

/// Signs heads with the agent's key.
pub(super) fn signer(credentials: &Credentials) -> Signer {
    let credentials = credentials.clone();
    Arc::new(move |head: &[u8]| credentials.sign(Context::AuditHead, head)?.encode())
}

/// Publication by other agents, for an agent whose credentials do not permit writing to the repository.
pub(super) struct ByPeers(pub(super) Arc<AgentState>);

#[async_trait]
impl FallbackPublisher for ByPeers {
    async fn publish(&self, head: &SignedHead) -> Result<()> {
        let Self(state) = self;
        let (own, peers) = (state.credentials()?.identity(), state.exchange()?.peers());
        let repository = state.origin(None)?.id().to_string();
        let body = json!({ "signed": hex(&head.encode()), "repository": repository }).to_string();
        let mut refused = Vec::new();
        for peer in peers.list() {
            let Some(who) = peer.identity.filter(|who| *who != own) else { continue };
            match timeout(ANSWER_WITHIN, send_head(state, (&who, &peer.address), body.clone())).await {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(error)) => refused.push(format!("{}: {error}", who.path())),
                Err(_) => refused.push(format!("{}: no answer in time", who.path())),
            }
        }
        let got = if refused.is_empty() { "no other agent is known".to_owned() } else { refused.join("; ") };
        Err(Error::unreachable("no agent publishes the head of the audit log")
            .got(got)
            .help("give the agent the right to put objects below audit/, or add it to `callers` of one that has it"))
    }
}

/// Sends a head to another agent.
async fn send_head(state: &AgentState, (who, address): (&Identity, &str), body: String) -> Result<()> {
    let request = HttpRequest::builder()
        .method(Method::PUT)
        .uri("/v1/audit/heads")
        .header(header::HOST, "agent")
        .header(header::CONTENT_TYPE, "application/json")
        .body(Body::from(body))
        .map_err(|source| Error::other("request cannot be made").source(source))?;
    let (status, answer) = Dialled::to(state, who, address).await?.ask(request).await?;
    if status.is_success() {
        return Ok(());
    }
    let said: Option<Value> = serde_json::from_slice(&answer).ok();
    let message = said.as_ref().and_then(|said| said["error"]["message"].as_str()).unwrap_or("no reason is given");
    Err(Error::denied("agent refuses to publish it").got(format!("{status}: {message:.200}")))
}

/// Publication of the log's heads while the agent runs.
#[derive(Debug)]
pub(super) struct Publication {
    recorder: Recorder,
    /// The task that publishes, if heads are published.
    publishing: JoinSet<Publisher>,
    ending: CancellationToken,
}

impl Publication {
    /// Begins to publish the heads of `state`'s log, if it has one and `config` says so. Within a runtime.
    pub(super) fn begin(state: &Arc<AgentState>, config: Option<&AuditConfig>) -> Option<Self> {
        let (recorder, config) = state.recorder.clone().zip(config)?;
        let (mut publishing, ending) = (JoinSet::new(), CancellationToken::new());
        if let Some((credentials, repository)) = state.credentials().ok().zip(state.stores().first())
            && config.publish
        {
            let (sign, identity) = (signer(credentials), credentials.identity());
            let publisher = Publisher::new(recorder.clone(), repository.clone(), identity, sign);
            let publisher = publisher.or_by(Arc::new(ByPeers(Arc::clone(state))));
            publishing.spawn(publisher.run(PUBLISH_EVERY, ending.clone()));
        }
        Some(Self { recorder, publishing, ending })
    }

    /// Closes the log, and publishes its last head.
    ///
    /// # Cancel safety
    /// The log is closed in any case.
    pub(super) async fn end(mut self) {
        self.ending.cancel();
        let publishing = &mut self.publishing;
        let published = async {
            match publishing.join_next().await {
                Some(Ok(publisher)) => publisher.finish().await.map(drop),
                _ => Ok(()),
            }
        };
        let problem = match timeout(SHUTDOWN_MAX, published).await {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(format!("{error:?}")),
            Err(_) => Some("the store does not answer in time".to_owned()),
        };
        if let Some(problem) = problem {
            tracing::error!("last head of the audit log is not published, until the agent runs again: {problem}");
        }
        // It is closed already, unless its head is not published.
        let _ = timeout(SHUTDOWN_MAX, self.recorder.close()).await;
    }
}

impl AgentState {
    /// Records `decision`, if there is an audit log. After an error the caller must refuse the request.
    ///
    /// # Errors
    /// As [`Recorder::record`].
    ///
    /// # Cancel safety
    /// Safe: it may be recorded or not.
    pub(super) async fn record(&self, decision: Decision, repeats: Repeats) -> Result<Option<Request>> {
        match &self.recorder {
            Some(recorder) => recorder.record(decision, repeats).await.map(Some),
            None => Ok(None),
        }
    }
}

/// Follows the started task `begun`, so that the end entry of `request` has its bytes and its outcome. Needs a runtime.
///
/// # Errors
/// The task's own, if it was not begun.
pub(super) fn follow(request: Option<Request>, begun: Result<Arc<Task>>) -> Result<Arc<Task>> {
    follow_with(request, Vec::new(), begun)
}

/// As [`follow`]; `beside` are other requests that the same task carries out; no bytes are counted for them.
///
/// # Errors
/// The task's own, if it was not begun.
pub(super) fn follow_with(
    request: Option<Request>,
    beside: Vec<Request>,
    begun: Result<Arc<Task>>,
) -> Result<Arc<Task>> {
    let Some(request) = request else { return begun };
    let end = move |request: &Request, outcome: &str| {
        beside.iter().for_each(|beside| beside.end(outcome));
        request.end(outcome);
    };
    let task = begun.inspect_err(|error| end(&request, &outcome(error)))?;
    let followed = Arc::clone(&task);
    tokio::spawn(async move {
        followed.ended().await;
        let view = followed.view();
        let _ = request.moved(view.progress.done);
        let message = view.error.as_ref().and_then(|error| error.get("message")).and_then(|message| message.as_str());
        end(
            &request,
            match view.state {
                TaskState::Done => "done",
                _ => message.unwrap_or("stopped"),
            },
        );
    });
    Ok(task)
}

/// Outcome of a request that failed.
pub(super) fn outcome(error: &Error) -> String {
    format!("{}: {error}", error.kind().word())
}
