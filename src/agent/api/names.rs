//! Names, runs, and how their trees are stored.

#![expect(unused_qualifications, reason = "utoipa names the parameters' types so")]

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Extension, Path, Query, State};
use serde::Deserialize;
use utoipa::IntoParams;

use super::caller::Caller;
use super::error::{ApiError, parse_query};
use super::recorded::{AccessRequest, check_read};
use crate::agent::state::AgentState;
use crate::agent::tasks::resolve_for;
use crate::agent::view;
use crate::audit::{Action, Repeats};
use crate::error::{Error, Result};
use crate::name::Name;
use crate::ops::{NameRange, TreeStorage};
use crate::selector::Selector;

/// Default and maximum number of entries in one response.
const LISTED: usize = 1000;
const LISTED_MAX: usize = 10_000;

/// Query parameters of a list of names.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Names {
    /// Only this name and those below it.
    prefix: Option<String>,
    /// Only names after this one: the value of `next` in the previous response.
    after: Option<String>,
    /// Names in the answer, at most.
    #[param(minimum = 1, maximum = 10000, default = 1000)]
    limit: Option<usize>,
    /// Repository; the default one if absent.
    repository: Option<String>,
}

/// Lists saved names, one page at a time; to a token, those that it may read.
#[utoipa::path(
    get,
    path = "/v1/names",
    operation_id = "listNames",
    params(Names),
    responses((status = 200, description = "Sorted; with `next` if there are more", body = view::NameList)),
)]
pub(super) async fn list(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    query: Result<Query<Names>, QueryRejection>,
) -> Result<Json<view::NameList>, ApiError> {
    let Names { prefix, after, limit, repository } = parse_query(query)?;
    caller.check_repository_name(repository.as_deref())?;
    let repository = state.repository(repository.as_deref())?;
    let range = NameRange {
        prefix: prefix
            .filter(|prefix| !prefix.is_empty())
            .map(|prefix| prefix.trim_end_matches('/').parse())
            .transpose()?,
        after: after.map(|after| after.parse()).transpose()?,
        limit: bounded(limit)?,
    };
    let may = |name: &Name| caller.grant().is_none_or(|grant| grant.scopes().may_read(name));
    let (names, more) = repository.list_readable(&range, may).await?;
    let next = names.last().filter(|_| more).map(|last| last.name.clone());
    Ok(Json(view::NameList { names, next }))
}

/// Query parameters of a list of runs.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Runs {
    /// Only this run, with its steps, or the runs below it.
    prefix: Option<String>,
    /// Repository; the default one if absent.
    repository: Option<String>,
}

/// Lists runs; to a token, of the steps that it may read.
#[utoipa::path(
    get,
    path = "/v1/runs",
    operation_id = "listRuns",
    params(Runs),
    responses((status = 200, description = "By name", body = view::RunList)),
)]
pub(super) async fn runs(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    query: Result<Query<Runs>, QueryRejection>,
) -> Result<Json<view::RunList>, ApiError> {
    let Runs { prefix, repository } = parse_query(query)?;
    caller.check_repository_name(repository.as_deref())?;
    let repository = state.repository(repository.as_deref())?;
    let prefix: Option<Name> = prefix.filter(|prefix| !prefix.is_empty()).map(|prefix| prefix.parse()).transpose()?;
    let may = caller.grant().map(|grant| |name: &Name| grant.scopes().may_read(name));
    Ok(Json(view::RunList { runs: repository.readable_runs(prefix.as_ref(), may).await? }))
}

/// Query parameters of a saved tree.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct TreeQuery {
    /// Repository; the default one if absent.
    repository: Option<String>,
}

/// Shows how a saved tree is stored.
#[utoipa::path(
    get,
    path = "/v1/trees/{reference}",
    operation_id = "showTree",
    params(("reference" = String, Path, description = "A name, or RUN@CHOICE; its slashes are written %2F"), TreeQuery),
    responses((status = 200, description = "Its chunks, by codec", body = TreeStorage)),
)]
pub(super) async fn tree(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    Path(reference): Path<String>,
    query: Result<Query<TreeQuery>, QueryRejection>,
) -> Result<Json<TreeStorage>, ApiError> {
    let TreeQuery { repository } = parse_query(query)?;
    caller.check_repository_name(repository.as_deref())?;
    let served = state.repository(repository.as_deref())?;
    let selector: Selector = reference.parse()?;
    let asked =
        AccessRequest { caller: &caller, action: Action::Read, repository: Some(served), repeats: Repeats::Merged };
    let reader = served.for_caller(caller.local());
    let saved = async {
        let name = resolve_for(&reader, caller.grant(), &selector).await?;
        state.open_trees.open_for(&reader, &name, caller.grant().is_some()).await
    };
    match saved.await {
        Ok(saved) => {
            check_read(&state, &caller, &saved.name)?;
            asked.allow(&state, &saved.name).await?;
            Ok(Json(TreeStorage::of(&saved)))
        }
        Err(error) => Err(asked.refuse(&state, &selector, error).await.into()),
    }
}

/// Page size: `limit`, or the default.
///
/// # Errors
/// Usage, for 0.
pub(super) fn bounded(limit: Option<usize>) -> Result<usize> {
    match limit.unwrap_or(LISTED) {
        0 => Err(Error::usage("limit of a list is 0").expected(format!("limit from 1 to {LISTED_MAX}")).got(0)),
        limit => Ok(limit.min(LISTED_MAX)),
    }
}
