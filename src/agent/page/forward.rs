//! The page of an agent that has no port: served on loopback by a process of its user, with a token of its own.
//!
//! ```text
//! browser --(loopback, token)--> PageServer --(socket)--> agent
//! ```

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, HOST};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::{IntoResponse as _, Response};
use axum::{Json, Router};
use tokio::net::TcpListener;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::{file, is_page};
use crate::agent::Client;
use crate::agent::api::{is_loopback, serve};
use crate::agent::listen;
use crate::agent::socket::random_secret;
use crate::error::{Error, ErrorKind, Result};

/// Maximum length of a request's body: a hint.
const BODY_LEN_MAX: usize = 1 << 20;
/// Time that a request's body has to arrive, on this machine.
const BODY_WITHIN: Duration = Duration::from_secs(5);
/// Only request of the page that is no GET. It changes nothing.
const HINTS: &str = "/v1/hints";

/// Serves the page of an agent on loopback, and forwards its calls to the agent's socket. It forwards only what reads.
#[derive(Debug)]
pub struct PageServer {
    listener: TcpListener,
    address: SocketAddr,
    token: String,
    agent: Client,
}

#[derive(Debug)]
struct Forwarding {
    agent: Client,
    token: blake3::Hash,
}

impl PageServer {
    /// Listens on loopback, at a port that the system chooses if `port` is 0. Needs a runtime.
    ///
    /// # Errors
    /// Conflict, if another process has the port.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn listen(agent: Client, port: u16) -> Result<Self> {
        let listener = listen(SocketAddr::from(([127, 0, 0, 1], port))).await?;
        let address = listener.local_addr().map_err(|source| Error::other("port is not known").source(source))?;
        Ok(Self { listener, address, token: random_secret(), agent })
    }

    /// Address of the page, with its token: whoever has it sees what the agent's user may see. The token is in the fragment, which a
    /// browser keeps for itself (<https://www.rfc-editor.org/rfc/rfc9110#section-4.2.5>).
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}/#token={}", self.address, self.token)
    }

    /// Serves until `ending` is cancelled.
    ///
    /// # Cancel safety
    /// Safe: connections are dropped.
    pub async fn run(self, ending: CancellationToken) {
        let forwarding = Forwarding { agent: self.agent, token: blake3::hash(self.token.as_bytes()) };
        let router = Router::new().fallback(forward).with_state(Arc::new(forwarding));
        serve(self.listener, |_| (), router, ending).await;
    }
}

async fn forward(State(forwarding): State<Arc<Forwarding>>, request: Request) -> Response {
    match forwarding.answer(request).await {
        Ok(response) => response,
        Err((status, error)) => (status, Json(serde_json::json!({ "error": error }))).into_response(),
    }
}

impl Forwarding {
    async fn answer(&self, request: Request) -> Result<Response, (StatusCode, Error)> {
        self.check(request.headers(), request.method(), request.uri().path())?;
        let (parts, body) = request.into_parts();
        // Without a token nothing is waited for, and nothing reaches the agent.
        if let Some(file) = file(parts.uri.path(), &parts.headers) {
            return Ok(file);
        }
        let target = parts.uri.path_and_query().map_or("/", |target| target.as_str()).to_owned();
        let body = if parts.method == Method::POST {
            read(body).await.map_err(|error| (StatusCode::BAD_REQUEST, error))?
        } else {
            Bytes::new()
        };
        match self.agent.forward(parts.method, &target, body).await {
            Ok(response) => Ok(response.map(Body::new)),
            Err(error) if error.kind() == ErrorKind::Denied => Err((StatusCode::FORBIDDEN, error)),
            Err(error) => Err((StatusCode::BAD_GATEWAY, error)),
        }
    }

    /// Checks that a browser of this machine asks for the page, or the page for what it may read.
    fn check(&self, headers: &HeaderMap, method: &Method, path: &str) -> Result<(), (StatusCode, Error)> {
        let mut hosts = headers.get_all(HOST).iter();
        let host = hosts.next().and_then(|host| host.to_str().ok());
        if !host.is_some_and(is_loopback) || hosts.next().is_some() {
            // A name of another site that resolves to loopback.
            return Err((StatusCode::FORBIDDEN, Error::denied("request does not name this machine").at(HOST)));
        }
        let reads = method == Method::GET || method == Method::HEAD;
        if reads && is_page(path) {
            return Ok(());
        }
        let shown = headers.get(AUTHORIZATION).and_then(|shown| shown.to_str().ok()?.strip_prefix("Bearer "));
        if !shown.is_some_and(|shown| blake3::hash(shown.trim().as_bytes()) == self.token) {
            let error = Error::denied("request has no valid token")
                .help("open the address that `towline page` has printed: it has another token each time");
            return Err((StatusCode::UNAUTHORIZED, error));
        }
        if reads || (method, path) == (&Method::POST, HINTS) {
            return Ok(());
        }
        let error = Error::denied("the page only reads").got(format!("{method} {path}"));
        Err((StatusCode::FORBIDDEN, error.help("use the command line, or the API on the agent's socket")))
    }
}

async fn read(body: Body) -> Result<Bytes> {
    let late = |_| Error::unreachable("request did not arrive in time");
    let body = timeout(BODY_WITHIN, to_bytes(body, BODY_LEN_MAX)).await.map_err(late)?;
    body.map_err(|source| {
        Error::usage("request is too long").expected(format!("at most {BODY_LEN_MAX} bytes")).source(source)
    })
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderName, HeaderValue};

    use super::*;

    #[test]
    fn only_a_browser_here_with_the_token_may_read() {
        let forwarding = Forwarding { agent: Client::at("/nowhere"), token: blake3::hash(b"secret") };
        let asked = |method: Method, path: &str, headers: &[&(HeaderName, &'static str)]| {
            let headers = headers.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value))).collect();
            forwarding.check(&headers, &method, path).map_err(|(status, _)| status.as_u16())
        };
        let (here, token) = (&(HOST, "127.0.0.1:8000"), &(AUTHORIZATION, "Bearer secret"));
        let (rebound, wrong) = (&(HOST, "rebound.example"), &(AUTHORIZATION, "Bearer other"));
        assert_eq!(asked(Method::GET, "/", &[here]), Ok(()));
        assert_eq!(asked(Method::GET, "/page/main.js", &[here]), Ok(()));
        assert_eq!(asked(Method::GET, "/", &[]), Err(403));
        assert_eq!(asked(Method::GET, "/", &[rebound, token]), Err(403));
        assert_eq!(asked(Method::GET, "/v1/pins", &[here]), Err(401));
        assert_eq!(asked(Method::GET, "/v1/pins", &[here, wrong]), Err(401));
        assert_eq!(asked(Method::POST, "/", &[here]), Err(401));
        for (method, path, expected) in [
            (Method::GET, "/v1/pins", Ok(())),
            (Method::POST, HINTS, Ok(())),
            (Method::POST, "/v1/hints/a/commit", Err(403)),
            (Method::POST, "/v1/warm", Err(403)),
            (Method::DELETE, "/v1/tasks/a", Err(403)),
        ] {
            assert_eq!(asked(method, path, &[here, token]), expected, "{path}");
        }
    }
}
