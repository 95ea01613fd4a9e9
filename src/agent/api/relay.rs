//! Forwarding of requests to other agents; responses are streamed back.

use std::io;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Extension, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use futures::stream::unfold;
use http_body_util::BodyExt as _;
use hyper::body::{Bytes, Incoming};
use serde_json::Value;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::auth::ShownToken;
use super::caller::Caller;
use super::error::{ApiError, body};
use super::recorded::AccessRequest;
use crate::agent::AT;
use crate::agent::audit::outcome;
use crate::agent::dial::{Dialled, SILENCE_MAX};
use crate::agent::routing::{AgentSelector, Route, route};
use crate::agent::state::AgentState;
use crate::audit::{Action, Repeats, Request as Recorded};
use crate::error::{Error, Result};
use crate::id::RepositoryId;
use crate::identity::Identity;

/// Headers of a relayed answer.
const TOLD: [header::HeaderName; 3] = [header::CONTENT_TYPE, header::CACHE_CONTROL, header::RETRY_AFTER];

/// Paths of requests that may create a pin, and so need an owner.
const PINNING: [&str; 2] = ["/v1/pins", "/v1/warm"];

/// Inputs of a hint that an audit entry names.
const INPUTS_SHOWN: usize = 8;

/// Forwards requests for another agent; handles the others locally.
pub(super) async fn forward(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    request: Request,
    next: Next,
) -> Response {
    let answered = match wanted(request.headers()) {
        Ok(None) => return next.run(request).await,
        Ok(Some(_)) if caller.agent().is_some() => {
            Err(Error::denied("requests of other agents are not forwarded").help("call that agent directly").into())
        }
        // The other agent sees this agent's certificate, not the token's scopes.
        Ok(Some(_)) if caller.grant().is_some() => {
            Err(Error::denied("requests of tokens are not forwarded to other agents")
                .help("omit Towline-At, or send the request over the socket as the agent's user")
                .into())
        }
        Ok(Some(at)) => routed_to(&state, &at, &caller, request, next).await,
        Err(error) => Err(error.into()),
    };
    answered.unwrap_or_else(ApiError::into_response)
}

/// Agent that the request is for; None for this one.
fn wanted(headers: &HeaderMap) -> Result<Option<AgentSelector>> {
    let Some(header) = headers.get(AT) else { return Ok(None) };
    let text = header.to_str().map_err(|source| Error::usage("header Towline-At is malformed").source(source))?;
    text.trim().parse().map(Some)
}

/// Routes the request to the agent that `at` selects; the response names that agent.
async fn routed_to(
    state: &AgentState,
    at: &AgentSelector,
    caller: &Caller,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let (own, peers) = (state.credentials()?.identity(), state.exchange()?.peers());
    let (head, unread) = request.into_parts();
    let body = body(Request::from_parts(head.clone(), unread), &()).await?;
    // Waits for peers that were not tried yet.
    peers.live().await;
    let asked: Option<Value> = serde_json::from_slice(&body).ok();
    let name = asked.as_ref().and_then(|asked| asked.get("name")).and_then(Value::as_str);
    let name = name.or_else(|| hint_of(&head.uri));
    let (who, mut response) = match route(at, &own, &peers.list(), name)? {
        Route::Local => (own, next.run(Request::from_parts(head, body.into())).await),
        Route::Remote(callee, address) => {
            let recorded = recorded(state, (caller, &callee), (&head.method, &head.uri), asked.as_ref()).await?;
            let request = outgoing(&head.method, &head.uri, translated(state, owned(asked, &head.uri, caller), body)?)?;
            let token = head.extensions.get::<ShownToken>();
            let response = relay(state, token, (&callee, &address), request).await;
            if let Some(recorded) = recorded {
                recorded.end(match &response {
                    Ok(response) if response.status().is_success() => "passed on".to_owned(),
                    Ok(response) => format!("refused there: {}", response.status()),
                    Err(error) => outcome(error.error()),
                });
            }
            (callee, response?)
        }
    };
    let who = HeaderValue::try_from(who.path())
        .map_err(|source| Error::other("name is not a valid header value").source(source))?;
    response.headers_mut().insert(AT, who);
    Ok(response)
}

/// Records that another agent is asked about a name or a pin; nothing for other requests. What moves is in that agent's log.
async fn recorded(
    state: &AgentState,
    (caller, callee): (&Caller, &Identity),
    (method, uri): (&Method, &Uri),
    asked: Option<&Value>,
) -> Result<Option<Recorded>> {
    let text = |key| asked.and_then(|asked| asked.get(key)).and_then(Value::as_str);
    let pin = uri.path().strip_prefix("/v1/pins/").filter(|_| method == Method::DELETE);
    let (action, details) = match (method, uri.path(), pin) {
        (_, _, Some(pin)) => (Action::Unpin, format!("; pin {pin}")),
        (&Method::POST, "/v1/warm", None) => (Action::Warm, String::new()),
        (&Method::POST, "/v1/pins", None) => (Action::Pin, String::new()),
        (&Method::POST, _, None) => match hint_of(uri) {
            Some(hint) => (Action::Pin, hint_details(hint, asked)),
            None => return Ok(None),
        },
        _ => return Ok(None),
    };
    // The other agent may have one that this one lacks.
    let repository = state.origin(text("repository")).ok();
    let asking = AccessRequest { caller, action, repository, repeats: Repeats::Separate };
    asking.forward(state, text("name"), callee, &details).await
}

/// Hint and the first inputs of a call about a hint, for its audit entry.
fn hint_details(hint: &str, asked: Option<&Value>) -> String {
    let inputs = asked.and_then(|asked| asked.get("inputs")).and_then(Value::as_array);
    let Some(inputs) = inputs else { return format!("; hint {hint}") };
    let names: Vec<&str> = inputs.iter().filter_map(Value::as_str).take(INPUTS_SHOWN).collect();
    let more = if inputs.len() > names.len() { " and more" } else { "" };
    format!("; hint {hint}: {}{more}", names.join(", "))
}

/// Id of the hint that a call is about.
fn hint_of(uri: &Uri) -> Option<&str> {
    uri.path().strip_prefix("/v1/hints/")?.split('/').next()
}

/// Adds the requesting user as the owner of a pin if none is named: the other agent does not know the user.
fn owned(mut asked: Option<Value>, uri: &Uri, caller: &Caller) -> Option<Value> {
    if PINNING.contains(&uri.path())
        && let Some(Value::Object(asked)) = &mut asked
    {
        asked.entry("owner").or_insert_with(|| caller.owner(None).into());
    }
    asked
}

/// Body of the forwarded request: the repository is named by its id, because its location is private to this node.
fn translated(state: &AgentState, asked: Option<Value>, body: Bytes) -> Result<Bytes> {
    let Some(mut asked) = asked else { return Ok(body) };
    if let Some(Value::String(named)) = asked.get_mut("repository")
        && named.parse::<RepositoryId>().is_err()
    {
        *named = state.origin(Some(named))?.id().to_string();
    }
    let translated = serde_json::to_vec(&asked);
    translated.map(Bytes::from).map_err(|source| Error::other("request is not JSON").source(source))
}

/// Forwarded request, without the original headers: the token must not leave this node.
fn outgoing(method: &Method, uri: &Uri, body: Bytes) -> Result<Request> {
    Request::builder()
        .method(method)
        .uri(uri.path_and_query().map_or("/", |path| path.as_str()))
        .header(header::HOST, "agent")
        .header(header::CONTENT_TYPE, "application/json")
        .body(body.into())
        .map_err(|source| Error::other("cannot build the request").at(uri).source(source))
}

/// Sends a request to the agent at an address, while `token` holds. Dropping the response closes the connection.
async fn relay(
    state: &AgentState,
    token: Option<&ShownToken>,
    (callee, address): (&Identity, &str),
    request: Request,
) -> Result<Response, ApiError> {
    let failed = |error| unanswered(callee, address, error);
    let mut line = Dialled::to(state, callee, address).await.map_err(failed)?;
    // It may have ended since the request arrived.
    token.map_or(Ok(()), ShownToken::check)?;
    let answered = timeout(SILENCE_MAX, line.send(request)).await;
    let answered = answered.unwrap_or_else(|_| Err(Error::unreachable("no response in time"))).map_err(failed)?;
    let (head, body) = answered.into_parts();
    if head.status.is_informational() {
        return Err(failed(Error::unsupported("unexpected status of a response").got(head.status)).into());
    }
    let relayed = Relayed { body, leaving: state.leaving.clone(), _line: line };
    let mut response =
        Response::new(Body::from_stream(unfold(Some(relayed), |relayed| async { relayed?.next().await })));
    *response.status_mut() = head.status;
    for name in TOLD {
        if let Some(value) = head.headers.get(&name) {
            response.headers_mut().insert(name, value.clone());
        }
    }
    Ok(response)
}

/// Response that is being received.
struct Relayed {
    body: Incoming,
    leaving: CancellationToken,
    _line: Dialled,
}

impl Relayed {
    /// Next piece; None after the end or an error.
    async fn next(mut self) -> Option<(io::Result<Bytes>, Option<Self>)> {
        let frame = tokio::select! {
            frame = timeout(SILENCE_MAX, self.body.frame()) => frame,
            () = self.leaving.cancelled() => return Some((Err(io::ErrorKind::ConnectionAborted.into()), None)),
        };
        match frame {
            Ok(None) => None,
            Ok(Some(Ok(frame))) => Some((Ok(frame.into_data().unwrap_or_default()), Some(self))),
            Ok(Some(Err(error))) => Some((Err(io::Error::other(error)), None)),
            Err(_) => Some((Err(io::ErrorKind::TimedOut.into()), None)),
        }
    }
}

fn unanswered(callee: &Identity, address: &str, error: Error) -> Error {
    Error::new(error.kind(), format!("agent {} cannot be asked", callee.path()))
        .at(address)
        .help("is it running, of this version, and reachable over TCP? `towline top` shows the links to it")
        .source(error)
}
