//! Client of the API over the Unix socket, for the command line and other processes of the node.

mod events;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::HeaderValue;
use hyper::upgrade::Upgraded;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::TokioIo;
use rustix::process::{Uid, geteuid};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::net::UnixStream;
use tokio::time::error::Elapsed;
use tokio::time::timeout;

use self::events::Events;
use super::socket::{may_answer, well_known};
use super::view::{Health, Task, TaskState};
use super::{AT, AgentSelector, PROTOCOL};
use crate::error::{Error, ErrorKind, Result};
use crate::limits::MIB;
use crate::repository::Repository;
use crate::transfer::local::LocalSource;
use crate::tree::check_private_folder;

/// Environment variable with the agent's socket.
const VARIABLE: &str = "TOWLINE_AGENT";
/// Limit of a response, in bytes.
const ANSWER_LEN_MAX: usize = 64 << 20;
/// Limit of a response of another agent, in bytes. A parsed response takes several times its length.
const RELAYED_LEN_MAX: usize = 8 << 20;
/// Timeout for the connection to an agent on this machine.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// Time limit for an agent on this machine to tell its state.
const HEALTH_WITHIN: Duration = Duration::from_secs(10);
/// Time after which a client that waits for its response asks whether the agent still answers.
const DOUBT_AFTER: Duration = Duration::from_secs(5);
/// Time without a sign of a request, after which its agent is taken to hang: beside events of a task comes a comment every 15 seconds.
pub(super) const STUCK_AFTER: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 60 });
/// Time for which an agent that was silent is not asked again by those who can do without it.
const SILENCE: Duration = Duration::from_mins(1);
/// Number of connections over which a process reads chunks.
const STREAMS: usize = 2;
/// Divisor of the repository's memory that gives the window of each connection, up to a limit beyond which a larger window is
/// of no use on one machine.
const WINDOW_SHARE: u64 = 8;
const WINDOW_MAX: u64 = 16 * MIB;
/// Path at which a connection switches to the peer protocol.
const CHUNKS: &str = "/v1/chunks";
/// Help for a missing agent.
const START: &str = "start one: towline agent --config FILE; if one runs, set TOWLINE_AGENT to its socket";

/// Agents that did not answer this process, by their sockets, and when.
static SILENT: Mutex<BTreeMap<PathBuf, Instant>> = Mutex::new(BTreeMap::new());

/// Agent of this machine, by its socket, or another agent that it forwards requests to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
    socket: PathBuf,
    at: Option<AgentSelector>,
    /// False for requests of data that this process does not verify.
    is_verified: bool,
}

impl Client {
    /// Agent at `socket`; connects on the first request.
    #[must_use]
    pub fn at(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), at: None, is_verified: true }
    }

    /// The agent `at`, reached through this one; this one if None.
    #[must_use]
    pub fn routed_to(self, at: Option<AgentSelector>) -> Self {
        Self { at, ..self }
    }

    /// The same agent, for data that this process does not verify: root takes none from an agent of another user.
    pub(super) fn unverified(&self) -> Self {
        Self { is_verified: false, ..self.clone() }
    }

    /// Other agent that requests are forwarded to, if any.
    #[must_use]
    pub fn selector(&self) -> Option<&AgentSelector> {
        self.at.as_ref()
    }

    /// Agent for this process: the one that `TOWLINE_AGENT` names, else the one at the default socket. None if there is none,
    /// or if `TOWLINE_AGENT=none`.
    ///
    /// # Errors
    /// Denied, if another user could have created the socket.
    pub fn find() -> Result<Option<Self>> {
        Self::route(std::env::var_os(VARIABLE), well_known())
    }

    fn route(named: Option<OsString>, usual: PathBuf) -> Result<Option<Self>> {
        match named.filter(|named| !named.is_empty()) {
            Some(named) if named == "none" => Ok(None),
            Some(named) => Ok(Some(Self::at(named))),
            None if std::fs::symlink_metadata(&usual).is_ok_and(|found| found.file_type().is_socket()) => {
                check_private_folder(usual.parent().unwrap_or(Path::new("/")))?;
                Ok(Some(Self::at(usual)))
            }
            None => Ok(None),
        }
    }

    /// As [`Client::find`], for operations that need an agent.
    ///
    /// # Errors
    /// Unreachable, if there is none; it says how to start one.
    pub fn required() -> Result<Self> {
        Self::find()?.ok_or_else(|| none(std::env::var_os(VARIABLE)))
    }

    /// `repository`, reading chunks through the agent of [`Client::find`] if there is one and it has the repository. Otherwise
    /// it reads from the store directly, and the log has the reason.
    ///
    /// # Cancel safety
    /// Safe: the connections are dropped.
    pub async fn attached(repository: Repository) -> Repository {
        let attached = async {
            match Self::find()? {
                Some(agent) => agent.attach(&repository).await.map(Some),
                None => Ok(None),
            }
        };
        match attached.await {
            Ok(Some(attached)) => attached,
            Ok(None) => repository,
            Err(error) => {
                tracing::info!("no agent is used: {error:?}");
                repository
            }
        }
    }

    /// Its socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Gets the resource at `path`.
    ///
    /// # Errors
    /// Unreachable, if no agent answers, or it stops answering; else the error that the agent returns.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        self.while_it_answers(self.ask(Method::GET, path, Bytes::new())).await
    }

    /// Sends a request.
    ///
    /// # Errors
    /// As [`Client::get`].
    ///
    /// # Cancel safety
    /// Not safe: the request may have been executed.
    pub async fn post<T: DeserializeOwned>(&self, path: &str, asked: &impl Serialize) -> Result<T> {
        Ok(self.begin(path, asked).await?.0)
    }

    /// As [`Client::post`]; also returns the client for further requests about it: of a site's agents, the one that answered.
    ///
    /// # Errors
    /// As [`Client::get`].
    ///
    /// # Cancel safety
    /// Not safe: the request may have been executed.
    pub async fn begin<T: DeserializeOwned>(&self, path: &str, asked: &impl Serialize) -> Result<(T, Self)> {
        let body = serde_json::to_vec(asked).map_err(|source| Error::other("request is not JSON").source(source))?;
        let answer = async {
            let response = self.check_status(self.send(Method::POST, path, body.into()).await?).await?;
            let answered = response.headers().get(AT).and_then(|who| who.to_str().ok()?.parse().ok());
            let at = self.at.as_ref().and(answered).or_else(|| self.at.clone());
            Ok((self.read(response).await?, self.clone().routed_to(at)))
        };
        self.while_it_answers(answer).await
    }

    /// Deletes the resource at `path`.
    ///
    /// # Errors
    /// As [`Client::get`].
    ///
    /// # Cancel safety
    /// Not safe: the request may have been executed.
    pub async fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        self.while_it_answers(self.ask(Method::DELETE, path, Bytes::new())).await
    }

    /// Follows a task until it has ended; `tell` receives its progress.
    ///
    /// # Errors
    /// The task's error; cancelled, if it was stopped; unreachable, if the agent stopped meanwhile, or says nothing of the task for a
    /// minute.
    ///
    /// # Cancel safety
    /// Safe: the task goes on.
    pub async fn follow(&self, id: &str, mut tell: impl FnMut(&Task)) -> Result<Task> {
        let path = format!("/v1/tasks/{id}/events");
        let begun = async { self.check_status(self.send(Method::GET, &path, Bytes::new()).await?).await };
        let mut events = Events::of(self.while_it_answers(begun).await?.into_body());
        let mut next = async || {
            events.next().await.map_err(|source| if source.is::<Elapsed>() { self.stuck() } else { self.lost(source) })
        };
        while let Some(view) = self.while_it_answers(next()).await? {
            tell(&view);
            match view.state {
                TaskState::Running => {}
                TaskState::Done => return Ok(view),
                TaskState::Failed => return Err(error_of(view.error.as_ref())),
                TaskState::Cancelled => {
                    return Err(Error::cancelled("task was stopped before it was done")
                        .at(id)
                        .got("a stop request, or the agent's shutdown")
                        .help("run the same command again: it resumes"));
                }
            }
        }
        Err(self.lost("its response ended"))
    }

    /// State of this agent, which it tells from memory: one that is stopped or hangs is noticed soon, and the log has a warning.
    ///
    /// # Errors
    /// As [`Client::get`]; unreachable, if it does not answer within 10 seconds.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn health(&self) -> Result<Health> {
        let answered = timeout(HEALTH_WITHIN, self.ask(Method::GET, "/health", Bytes::new())).await;
        if self.at.is_none() {
            let mut silent = SILENT.lock().unwrap_or_else(PoisonError::into_inner);
            match &answered {
                Ok(_) => silent.remove(&self.socket),
                Err(_) => silent.insert(self.socket.clone(), Instant::now()),
            };
        }
        answered.unwrap_or_else(|_| {
            tracing::warn!("the agent at {} does not answer", self.socket.display());
            Err(self.silent())
        })
    }

    /// As [`Client::health`], for those who can do without the agent: one that was silent within the last minute is not waited for.
    ///
    /// # Errors
    /// As [`Client::health`].
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub(super) async fn health_unless_silent(&self) -> Result<Health> {
        let silent = SILENT.lock().unwrap_or_else(PoisonError::into_inner).get(&self.socket).copied();
        match silent {
            Some(since) if since.elapsed() < SILENCE => Err(self.silent()),
            _ => self.health().await,
        }
    }

    fn silent(&self) -> Error {
        Error::unreachable("agent does not answer")
            .at(self.socket.display())
            .expected(format!("an answer within {HEALTH_WITHIN:?}"))
            .got("silence")
            .help("start it again, or set TOWLINE_AGENT=none to work without it")
    }

    /// Error for an agent that tells its state, but does not go on with a request.
    pub(super) fn stuck(&self) -> Error {
        let error = Error::unreachable("agent does not go on with a request")
            .expected(format!("a sign of it within {STUCK_AFTER:?}"))
            .got("silence, though it tells its state")
            .help("see its log and restart it, or set TOWLINE_AGENT=none to work without it");
        match &self.at {
            None => error.at(self.socket.display()),
            Some(at) => error.at(at),
        }
    }

    /// The result of `request`. While it takes long, the agent of this node must tell its state: one that is stopped or hangs does
    /// not hold its clients up. It may fail to once, as on an overloaded machine.
    async fn while_it_answers<T>(&self, request: impl Future<Output = Result<T>>) -> Result<T> {
        let (mut request, local) = (pin!(request), self.clone().routed_to(None));
        let mut was_silent = false;
        loop {
            if let Ok(answered) = timeout(DOUBT_AFTER, &mut request).await {
                return answered;
            }
            let health = tokio::select! {
                answered = &mut request => return answered,
                health = local.health() => health,
            };
            match health {
                Err(error) if was_silent => return Err(error),
                health => was_silent = health.is_err(),
            }
        }
    }

    /// `repository`, reading its chunks through the agent first: from its cache, other agents or the repository, once for all
    /// processes of the node. It uses a few connections, whose windows are taken from the repository's memory.
    ///
    /// # Errors
    /// Not found, if the agent does not have the repository or has no cache; unreachable, if no agent answers within 20 seconds.
    ///
    /// # Cancel safety
    /// Safe: the connections are dropped.
    pub async fn attach(&self, repository: &Repository) -> Result<Repository> {
        let health = self.health_unless_silent().await?;
        timeout(HEALTH_WITHIN, self.attach_to(&health, repository)).await.unwrap_or_else(|_| {
            tracing::warn!("the agent at {} sends no chunks", self.socket.display());
            Err(self.silent())
        })
    }

    async fn attach_to(&self, health: &Health, repository: &Repository) -> Result<Repository> {
        let id = repository.id().to_string();
        if health.repositories.iter().all(|place| place.id != id) {
            return Err(Error::not_found("this agent does not have the repository").at(repository.store().location()));
        }
        let mut streams = Vec::with_capacity(STREAMS);
        for _ in 0..STREAMS {
            streams.push(TokioIo::new(self.upgraded(CHUNKS).await?));
        }
        let window = (repository.budget().total() / WINDOW_SHARE).min(WINDOW_MAX);
        let source = LocalSource::new(streams, repository.budget(), window).await?;
        Ok(repository.with_source(Arc::new(source)))
    }

    /// A connection that is upgraded to the protocol of `path`.
    pub(super) async fn upgraded(&self, path: &str) -> Result<Upgraded> {
        let mut request = self.request(Method::GET, path, Bytes::new())?;
        let headers = request.headers_mut();
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static(PROTOCOL));
        let response = self.while_it_answers(self.deliver(request)).await?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            self.check_status(response).await?;
            return Err(Error::unsupported("agent does not know this request").at(path).help(SAME_VERSION));
        }
        hyper::upgrade::on(response).await.map_err(|source| self.lost(source))
    }

    /// Sends the request of a page on; the response may be an error.
    ///
    /// # Errors
    /// Unreachable, if no agent answers; denied, if it is of another user.
    ///
    /// # Cancel safety
    /// Not safe: the request may have been executed.
    pub(super) async fn forward(&self, method: Method, path: &str, body: Bytes) -> Result<Response<Incoming>> {
        self.deliver(self.request(method, path, body)?).await
    }

    async fn ask<T: DeserializeOwned>(&self, method: Method, path: &str, body: Bytes) -> Result<T> {
        let response = self.send(method, path, body).await?;
        self.read(self.check_status(response).await?).await
    }

    async fn read<T: DeserializeOwned>(&self, response: Response<Incoming>) -> Result<T> {
        let body = self.read_body(response).await?;
        serde_json::from_slice(&body)
            .map_err(|source| Error::unsupported("cannot parse the agent's response").help(SAME_VERSION).source(source))
    }

    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<Response<Incoming>> {
        self.deliver(self.request(method, path, body)?).await
    }

    fn request(&self, method: Method, path: &str, body: Bytes) -> Result<Request<Full<Bytes>>> {
        let mut request = Request::builder().method(method).uri(path).header(header::HOST, "localhost");
        if let Some(at) = &self.at {
            request = request.header(AT, at.to_string());
        }
        request
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(|source| Error::other("cannot build the request").at(path).source(source))
    }

    /// Sends `request` over a connection of its own, which ends when the body of the response is dropped.
    async fn deliver(&self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>> {
        let connected = async {
            let stream = UnixStream::connect(&self.socket).await?;
            let user = Uid::from_raw(stream.peer_cred()?.uid());
            Ok((http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?, user))
        };
        let connected = timeout(CONNECT_WITHIN, connected).await;
        let connected = connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        let ((mut sender, connection), user) = connected.map_err(|source| self.absent(source))?;
        if !may_answer(user, self.is_verified) {
            return Err(Error::denied("agent at the socket belongs to another user")
                .at(self.socket.display())
                .expected(format!("an agent of user {} or root", geteuid().as_raw()))
                .got(format!("user {}", user.as_raw()))
                .help("set TOWLINE_AGENT to the socket of your own agent, or to none"));
        }
        tokio::spawn(connection.with_upgrades());
        sender.send_request(request).await.map_err(|source| self.lost(source))
    }

    /// The response, unless it is an error.
    async fn check_status(&self, response: Response<Incoming>) -> Result<Response<Incoming>> {
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let body = self.read_body(response).await?;
        let body = serde_json::from_slice::<Value>(&body).ok();
        Err(match body.as_ref().and_then(|body| body.get("error")) {
            Some(error) => error_of(Some(error)),
            None => Error::other("agent returned an error").at(self.socket.display()).got(status),
        })
    }

    async fn read_body(&self, response: Response<Incoming>) -> Result<Bytes> {
        let longest = if self.at.is_some() { RELAYED_LEN_MAX } else { ANSWER_LEN_MAX };
        let body = Limited::new(response.into_body(), longest).collect().await;
        body.map(http_body_util::Collected::to_bytes).map_err(|source| self.lost(source))
    }

    fn absent(&self, source: io::Error) -> Error {
        let error = match source.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Error::unreachable("no agent answers"),
            io::ErrorKind::PermissionDenied => Error::denied("agent belongs to another user"),
            _ => Error::unreachable("cannot connect to the agent"),
        };
        let help = if source.kind() == io::ErrorKind::PermissionDenied { OWN } else { START };
        error.at(self.socket.display()).help(help).source(source)
    }

    fn lost(&self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
        let error = Error::unreachable("agent stopped meanwhile").source(source);
        match &self.at {
            None => error.at(self.socket.display()).help(START),
            Some(at) => error.at(at).help("repeat the command when it runs again: cached chunks are not fetched again"),
        }
    }
}

/// Help about an agent of another user.
const OWN: &str = "run as its user, or set TOWLINE_AGENT=none to work without it";
/// Help about an agent of another version.
const SAME_VERSION: &str =
    "use the same version of towline on both sides, or set TOWLINE_AGENT=none to work without it";

/// Error that the agent returned.
fn error_of(body: Option<&Value>) -> Error {
    let text = |name: &str| body.and_then(|body| body.get(name)).and_then(Value::as_str).map(str::to_owned);
    let kind = text("kind").map_or(ErrorKind::Other, |word| ErrorKind::from_word(&word));
    let message = text("message").unwrap_or_else(|| "agent returned an error without a message".to_owned());
    let error = Error::new(kind, message);
    let error = match text("help") {
        Some(help) => error.help(help),
        None => error,
    };
    let causes = body.and_then(|body| body.get("causes")).and_then(Value::as_array).into_iter().flatten();
    let causes: Vec<_> = causes.filter_map(Value::as_str).collect();
    if causes.is_empty() { error } else { error.source(causes.join(": ")) }
}

/// Error for a missing agent; `named` is the value of `TOWLINE_AGENT`.
fn none(named: Option<OsString>) -> Error {
    if named.is_some_and(|named| named == "none") {
        return Error::not_found("no agent is used: TOWLINE_AGENT is `none`")
            .help(format!("unset TOWLINE_AGENT, or set it to the socket of an agent; {START}"));
    }
    Error::unreachable("no agent is running here").at(well_known().display()).help(START)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn that_none_is_wanted_is_told() {
        assert!(none(Some("none".into())).to_string().contains("TOWLINE_AGENT is `none`"));
        assert!(none(None).to_string().contains("no agent is running here"));
    }

    #[test]
    fn the_variable_goes_before_the_usual_socket() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        let usual = dir.path().join("agent.sock");
        let route = |named: Option<&str>| Client::route(named.map(OsString::from), usual.clone());
        assert_eq!(route(None).unwrap(), None);
        let _listener = std::os::unix::net::UnixListener::bind(&usual).unwrap();
        assert_eq!(route(None).unwrap(), Some(Client::at(&usual)));
        assert_eq!(route(Some("")).unwrap(), Some(Client::at(&usual)));
        assert_eq!(route(Some("/run/a.sock")).unwrap(), Some(Client::at("/run/a.sock")));
        assert_eq!(route(Some("none")).unwrap(), None);
        std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        assert_eq!(route(None).unwrap_err().kind(), ErrorKind::Denied);
    }

    #[tokio::test]
    async fn nobody_there_is_said_with_the_cure() {
        let dir = tempfile::tempdir().unwrap();
        let error = Client::at(dir.path().join("none.sock")).get::<Value>("/health").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable);
        assert!(error.help_text().unwrap().contains("towline agent --config"));
    }

    #[test]
    fn an_error_comes_back_as_it_went() {
        let error = Error::conflict("name moved").at("run/1").help("try again").source("somebody was quicker");
        let again = error_of(Some(&serde_json::to_value(&error).unwrap()));
        assert_eq!(again.kind(), ErrorKind::Conflict);
        assert_eq!(again.to_string(), error.to_string());
        assert_eq!((again.help_text(), again.causes()), (error.help_text(), error.causes()));
        assert_eq!(error_of(None).kind(), ErrorKind::Other);
    }
}
