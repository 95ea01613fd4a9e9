//! The HTTP API: what is asked, of whom, and how it is answered.
//!
//! Requests and answers are JSON ([`view`](super::view)); `openapi.json` describes them, and a test holds it to the routes here.

mod auth;
mod cache;
mod error;
mod files;
mod handoff;
mod names;
mod open;
mod peers;
mod relay;
mod serve;
mod slots;
#[cfg(test)]
mod tests;
mod work;

use std::path::Path;
use std::sync::Arc;

use axum::Router;
use axum::http::{Method, StatusCode};
use axum::middleware::from_fn_with_state;
use axum::routing::{MethodRouter, delete, get, post, put};

use self::auth::{Auth, check};
pub(super) use self::auth::{Caller, Callers};
use self::error::{ApiError, body_limit};
use self::relay::pass_on;
pub(super) use self::serve::{Local, serve};
use super::state::AgentState;
use crate::error::Error;
use crate::transfer::identity::Credentials;

/// A path, and what can be done there.
type Route = (&'static str, &'static [Method], MethodRouter<Arc<AgentState>>);

/// Every path of the API.
fn routes() -> Vec<Route> {
    const GET: &[Method] = &[Method::GET];
    const POST: &[Method] = &[Method::POST];
    const GET_POST: &[Method] = &[Method::GET, Method::POST];
    const GET_DELETE: &[Method] = &[Method::GET, Method::DELETE];
    const PUT_DELETE: &[Method] = &[Method::PUT, Method::DELETE];
    const DELETE: &[Method] = &[Method::DELETE];
    vec![
        ("/health", GET, get(open::health)),
        ("/ready", GET, get(open::ready)),
        ("/metrics", GET, get(open::metrics)),
        ("/openapi.json", GET, get(open::description)),
        ("/v1/save", POST, post(work::save)),
        ("/v1/restore", POST, post(work::restore)),
        ("/v1/fetch", POST, post(work::fetch)),
        ("/v1/warm", POST, post(work::warm)),
        ("/v1/tasks", GET, get(work::list)),
        ("/v1/tasks/{id}", GET_DELETE, get(work::one).delete(work::stop)),
        ("/v1/tasks/{id}/events", GET, get(work::events)),
        ("/v1/pins", GET_POST, get(cache::pins).post(cache::pin)),
        ("/v1/pins/{id}", DELETE, delete(cache::unpin)),
        ("/v1/cache", GET, get(cache::stat)),
        ("/v1/cache/check", POST, post(cache::check)),
        ("/v1/cache/evict", POST, post(cache::evict)),
        ("/v1/handoffs", GET_POST, get(handoff::list).post(handoff::promise)),
        ("/v1/handoffs/{id}", PUT_DELETE, put(handoff::take).delete(handoff::release)),
        ("/v1/handoffs/{id}/retry", POST, post(handoff::retry)),
        ("/v1/peers", GET, get(peers::list)),
        ("/v1/ledger", GET, get(peers::ledger)),
        ("/v1/chunks", GET, get(peers::chunks)),
        ("/v1/names", GET, get(names::list)),
        ("/v1/files/{reference}/", GET, get(files::file)),
        ("/v1/files/{reference}/{*path}", GET, get(files::file)),
    ]
}

/// The API of `state`; on loopback it wants a token, which stands in a file, for the figures too unless `open_metrics`, and other
/// agents are let in as `callers` says.
pub(super) fn router(
    state: Arc<AgentState>,
    token: Option<(&str, &Path)>,
    open_metrics: bool,
    callers: Callers,
) -> Router {
    let own = state.credentials().ok().map(Credentials::identity);
    let auth = Auth::new(token, callers, own.as_ref()).open_metrics(open_metrics);
    let paths = routes().into_iter().fold(Router::new(), |router, (path, _, methods)| router.route(path, methods));
    let nowhere = || async {
        ApiError::from(Error::not_found("the API has no such path").help("GET /openapi.json lists its paths"))
    };
    let otherwise = || async {
        let error = Error::usage("this cannot be done at this path").help("GET /openapi.json lists what can");
        ApiError::new(StatusCode::METHOD_NOT_ALLOWED, error)
    };
    paths
        .fallback(nowhere)
        .method_not_allowed_fallback(otherwise)
        .layer(from_fn_with_state(Arc::clone(&state), pass_on))
        .layer(body_limit())
        .layer(from_fn_with_state(Arc::new(auth), check))
        .with_state(state)
}
