//! Who may use the API. The Unix socket can be reached by its user alone; on loopback any process can connect, and a browser can be
//! made to.

use std::sync::Arc;

use axum::extract::{Extension, Request, State};
use axum::http::{HeaderMap, StatusCode, header, uri::Authority};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

use super::refusal::Refusal;
use crate::error::Error;

/// What anybody on this machine may ask.
pub(super) const OPEN: [&str; 4] = ["/health", "/ready", "/metrics", "/openapi.json"];

/// Which door a request came through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::agent) enum Door {
    /// The Unix socket.
    Socket,
    /// The loopback address.
    Loopback,
}

/// What a request on loopback must show.
#[derive(Clone, Debug)]
pub(super) struct Guard(Option<blake3::Hash>);

impl Guard {
    /// The token that is asked for; without one, nothing but what is open is answered.
    pub(super) fn new(token: Option<&str>) -> Self {
        Self(token.map(|token| blake3::hash(token.as_bytes())))
    }

    /// # Errors
    /// What is wrong with the request.
    fn judge(&self, door: Door, path: &str, headers: &HeaderMap) -> Result<(), Refusal> {
        if door == Door::Socket {
            return Ok(());
        }
        // A page from elsewhere whose name was made to mean this machine still tells that name.
        if !headers.get(header::HOST).and_then(|host| host.to_str().ok()).is_some_and(is_loopback) {
            let error = Error::denied("request is for another host").expected("localhost, 127.0.0.1 or [::1]");
            return Err(Refusal::new(StatusCode::FORBIDDEN, error));
        }
        if OPEN.contains(&path) || self.is_shown(headers) {
            return Ok(());
        }
        let error = Error::denied("request shows no token, or a wrong one")
            .expected("Authorization: Bearer TOKEN")
            .cure("the token is in the file .token beside the agent's socket; the socket itself needs none");
        Err(Refusal::new(StatusCode::UNAUTHORIZED, error))
    }

    fn is_shown(&self, headers: &HeaderMap) -> bool {
        let shown = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let shown =
            shown.and_then(|value| value.split_once(' ')).filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
        // Hashes are compared in constant time.
        shown.zip(self.0).is_some_and(|((_, token), expected)| blake3::hash(token.trim().as_bytes()) == expected)
    }
}

fn is_loopback(host: &str) -> bool {
    host.parse::<Authority>().is_ok_and(|host| ["localhost", "127.0.0.1", "[::1]"].contains(&host.host()))
}

/// Lets a request pass, or not.
pub(super) async fn check(
    State(guard): State<Arc<Guard>>,
    Extension(door): Extension<Door>,
    request: Request,
    next: Next,
) -> Response {
    match guard.judge(door, request.uri().path(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(refusal) => refusal.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(door: Door, path: &str, headers: &[(header::HeaderName, &str)]) -> bool {
        let headers = headers.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect();
        Guard::new(Some("secret")).judge(door, path, &headers).is_ok()
    }

    #[test]
    fn loopback_wants_the_host_and_the_token() {
        use header::{AUTHORIZATION, HOST};
        assert!(judged(Door::Socket, "/v1/pins", &[]));
        for host in ["localhost", "127.0.0.1:7070", "[::1]:7070"] {
            assert!(judged(Door::Loopback, "/health", &[(HOST, host)]), "{host}");
            assert!(judged(Door::Loopback, "/v1/pins", &[(HOST, host), (AUTHORIZATION, "Bearer secret")]), "{host}");
            for shown in ["Bearer wrong", "Bearer", "secret", "Basic secret", "Bearer secret2"] {
                assert!(!judged(Door::Loopback, "/v1/pins", &[(HOST, host), (AUTHORIZATION, shown)]), "{shown}");
            }
            assert!(!judged(Door::Loopback, "/v1/pins", &[(HOST, host)]));
        }
        for host in ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "10.0.0.1:7070"] {
            assert!(!judged(Door::Loopback, "/health", &[(HOST, host)]), "{host}");
        }
        assert!(!judged(Door::Loopback, "/health", &[]));
        assert!(!judged(Door::Loopback, "/health/", &[(HOST, "localhost")]));
    }

    #[test]
    fn without_a_token_nothing_is_let_through() {
        let headers = [(header::HOST, "localhost"), (header::AUTHORIZATION, "Bearer ")];
        let headers = headers.into_iter().map(|(name, value)| (name, value.parse().unwrap())).collect();
        assert!(Guard::new(None).judge(Door::Loopback, "/v1/pins", &headers).is_err());
    }
}
