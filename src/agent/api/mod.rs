//! The HTTP API: routes, authorisation, responses.
//!
//! Requests and answers are JSON ([`view`](super::view)). The API's description is made from the handlers and types.

mod answers;
mod audit;
mod auth;
mod cache;
mod caller;
mod commitments;
mod description;
mod ending;
mod error;
mod files;
mod handoff;
mod hints;
mod kube;
mod names;
mod open;
mod peers;
mod recorded;
mod relay;
mod rights;
mod save_scopes;
mod serve;
mod sites;
mod skypilot;
mod slots;
mod staged;
#[cfg(test)]
mod tests;
mod tokens;
mod transit;
mod unauthenticated;
mod work;

use std::path::Path;
use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::StatusCode;
use axum::middleware::from_fn_with_state;
use utoipa::OpenApi as _;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use self::auth::{Auth, check};
pub(super) use self::auth::{Callers, OpenPaths, is_loopback};
pub(super) use self::caller::Caller;
use self::description::Base;
use self::error::{ApiError, body_limit};
use self::kube::KUBE_BODY_LEN_MAX;
use self::relay::forward;
pub(super) use self::serve::{Local, serve};
use self::skypilot::SKYPILOT_BODY_LEN_MAX;
pub(super) use self::unauthenticated::hint_for_caller;
use super::page;
use super::state::AgentState;
use crate::error::Error;
use crate::transfer::identity::Credentials;

/// Every path of the API, described. What each needs of a token is in `rights.rs`.
fn routes() -> OpenApiRouter<Arc<AgentState>> {
    OpenApiRouter::with_openapi(Base::openapi())
        .routes(routes!(open::health))
        .routes(routes!(open::ready))
        .routes(routes!(open::metrics))
        .routes(routes!(open::description))
        .routes(routes!(work::save))
        .routes(routes!(work::restore))
        .routes(routes!(work::fetch))
        .routes(routes!(work::warm))
        .routes(routes!(work::list))
        .routes(routes!(work::one, work::stop))
        .routes(routes!(work::events))
        .routes(routes!(cache::pins, cache::pin))
        .routes(routes!(cache::unpin))
        .routes(routes!(cache::stat))
        .routes(routes!(cache::check))
        .routes(routes!(cache::evict))
        .routes(routes!(handoff::list, handoff::promise))
        .routes(routes!(handoff::take, handoff::release))
        .routes(routes!(handoff::retry))
        .routes(routes!(audit::latest))
        .routes(routes!(audit::sign, audit::publish))
        .routes(routes!(staged::begin))
        .routes(routes!(staged::list, staged::clear))
        .routes(routes!(staged::take))
        .routes(routes!(peers::list))
        .routes(routes!(peers::ledger))
        .routes(routes!(peers::chunks))
        .routes(routes!(names::list))
        .routes(routes!(names::runs))
        .routes(routes!(names::tree))
        .routes(routes!(commitments::list, hints::hint))
        .routes(routes!(sites::list))
        .routes(routes!(sites::calibration))
        .routes(routes!(sites::usage))
        .routes(routes!(commitments::show))
        .routes(routes!(commitments::commit))
        .routes(routes!(commitments::outcome))
        .routes(routes!(files::top))
        .routes(routes!(files::file))
        .routes(routes!(tokens::list, tokens::make))
        .routes(routes!(tokens::revoke))
        .merge(kube_routes())
        .merge(skypilot_routes())
}

/// Path of `SkyPilot`, whose requests have whole tasks.
fn skypilot_routes() -> OpenApiRouter<Arc<AgentState>> {
    OpenApiRouter::new().routes(routes!(skypilot::policy)).layer(DefaultBodyLimit::max(SKYPILOT_BODY_LEN_MAX))
}

/// Paths of a scheduler, whose requests list nodes.
fn kube_routes() -> OpenApiRouter<Arc<AgentState>> {
    OpenApiRouter::new()
        .routes(routes!(kube::filter))
        .routes(routes!(kube::prioritize))
        .layer(DefaultBodyLimit::max(KUBE_BODY_LEN_MAX))
}

/// Router of the API. `token` and its file are required on loopback, except for the paths in `open`; `callers` selects the other
/// agents that may call.
pub(super) fn router(
    state: Arc<AgentState>,
    token: Option<(&str, &Path)>,
    open: OpenPaths,
    callers: Callers,
) -> Router {
    let own = state.credentials().ok().map(Credentials::identity);
    let auth = Auth::new(token, callers, own.as_ref()).open(open).tokens(state.tokens().ok().cloned());
    let nowhere = || async {
        ApiError::from(Error::not_found("the API has no such path").help("GET /openapi.json lists its paths"))
    };
    let otherwise = || async {
        let error = Error::usage("path does not support this method").help("GET /openapi.json lists the methods");
        ApiError::new(StatusCode::METHOD_NOT_ALLOWED, error)
    };
    Router::from(routes())
        .merge(page::routes())
        .fallback(nowhere)
        .method_not_allowed_fallback(otherwise)
        .layer(from_fn_with_state(Arc::clone(&state), forward))
        .layer(body_limit())
        .layer(from_fn_with_state((Arc::new(auth), Arc::clone(&state)), check))
        .with_state(state)
}
