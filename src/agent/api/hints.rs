//! Hints for schedulers.

#![expect(unused_qualifications, reason = "utoipa names the parameters' types so")]

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Extension, Query, State};
use serde::Deserialize;
use utoipa::IntoParams;

use super::caller::Caller;
use super::error::{ApiError, JsonBody, parse_query};
use super::recorded::AccessRequest;
use crate::agent::advisor::{Epoch, HintCaller, WAIT};
use crate::agent::config::Span;
use crate::agent::requester::Requester;
use crate::agent::state::AgentState;
use crate::agent::tasks::{not_readable, resolve};
use crate::audit::{Action, Repeats};
use crate::error::{Error, ErrorKind, Result};
use crate::name::Name;
use crate::placement::{Hint, HintRequest};
use crate::repository::{ReadableNames, Repository};
use crate::selector::Selector;
use crate::work::blocking;

/// Maximum time that a request waits for the chunks of its inputs.
const WAIT_MAX: Duration = Duration::from_mins(1);

/// Query parameters of a hint.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct HintQuery {
    /// Repository; the default one if absent.
    repository: Option<String>,
    /// Time to wait for the chunks of inputs that are new to this agent, such as `2s`, at most a minute; a few milliseconds if absent.
    /// After it, the hint counts all of their bytes as missing, and is not complete.
    #[param(value_type = Option<String>)]
    wait: Option<Span>,
}

/// Compares sites for a job: bytes, time and dollars until its inputs are there, and whether they may go there.
#[utoipa::path(
    post,
    path = "/v1/hints",
    operation_id = "hint",
    params(HintQuery),
    request_body = HintRequest,
    responses((status = 200, description = "The sites, the best first", body = Hint)),
)]
pub(super) async fn hint(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    query: Result<Query<HintQuery>, QueryRejection>,
    JsonBody(request): JsonBody<HintRequest>,
) -> Result<Json<Hint>, ApiError> {
    let HintQuery { repository, wait } = parse_query(query)?;
    caller.check_repository_name(repository.as_deref())?;
    request.check()?;
    let origin = state.origin(repository.as_deref())?;
    let advisor = state.advisor(origin)?;
    let reader = origin.for_caller(caller.local());
    let selectors = selectors_of(&request)?;
    let asked =
        AccessRequest { caller: &caller, action: Action::Read, repository: Some(origin), repeats: Repeats::Merged };
    let mut epoch = advisor.epoch().await?;
    let mut found = resolve_in(&state, &caller, &reader, &epoch, &selectors).await;
    if found.as_ref().is_err_and(|(_, error)| error.kind() == ErrorKind::NotFound) {
        // It may have been saved since the epoch.
        epoch = advisor.later_epoch(&epoch).await?;
        found = resolve_in(&state, &caller, &reader, &epoch, &selectors).await;
    }
    let names = match found {
        Ok(names) => names,
        Err((at, error)) => return Err(asked.refuse(&state, &selectors[at], error).await.into()),
    };
    let wait = wait.map_or(WAIT, |span| span.0.min(WAIT_MAX));
    let requester = caller.requester();
    let by = requester.map_or(HintCaller::User, |one| HintCaller::other("requester", &one.limited_owners()));
    match advisor.hint(&epoch, &reader, &request, &names, (wait, by)).await {
        Ok(hint) => Ok(Json(hint)),
        Err(error) if error.kind() == ErrorKind::Denied && !selectors.is_empty() => {
            Err(asked.refuse(&state, &selectors[0], error).await.into())
        }
        Err(error) => Err(error.into()),
    }
}

/// Selectors of the inputs, each once.
fn selectors_of(request: &HintRequest) -> Result<Vec<Selector>> {
    let mut selectors = Vec::with_capacity(request.inputs.len());
    for input in &request.inputs {
        let selector: Selector = input.reference.parse()?;
        if !selectors.contains(&selector) {
            selectors.push(selector);
        }
    }
    Ok(selectors)
}

/// Names that `selectors` stand for in `epoch`, among those that the caller may read; an error with the place of its selector.
async fn resolve_in(
    state: &AgentState,
    caller: &Caller,
    reader: &Repository,
    epoch: &Epoch,
    selectors: &[Selector],
) -> Result<Vec<Name>, (usize, Error)> {
    let requester = caller.requester();
    if let Some(Requester::Agent(_)) = &requester {
        let exchange = state.exchange().map_err(|error| (0, error))?;
        let mut names = Vec::with_capacity(selectors.len());
        for (at, selector) in selectors.iter().enumerate() {
            names.push(resolve(exchange, reader, requester.as_ref(), selector).await.map_err(|error| (at, error))?);
        }
        return Ok(names);
    }
    let grant = caller.grant().cloned();
    let place = match &grant {
        Some(_) => format!("repository {}", reader.id()),
        None => reader.store().location().to_string(),
    };
    let (log, selectors) = (Arc::clone(epoch.log()), selectors.to_vec());
    // A run may have many steps.
    let chosen = blocking(move || {
        let may = |name: &Name| grant.as_ref().is_none_or(|grant| grant.scopes().may_read(name));
        let chosen = ReadableNames::of(&log, may).choose_all(&selectors, place);
        let limited = grant.is_some();
        Ok(chosen.map_err(|(at, error)| (at, if limited { not_readable(error) } else { error })))
    });
    chosen.await.unwrap_or_else(|error| Err((0, error)))
}
