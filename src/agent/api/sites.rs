//! Sites, the links between them, and the usage of a month, as an advisor knows them.

#![expect(unused_qualifications, reason = "utoipa names the parameters' types so")]

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Extension, Query, State};
use serde::Deserialize;
use utoipa::IntoParams;

use super::caller::Caller;
use super::error::{ApiError, parse_query};
use crate::agent::advisor::{Advisor, HintDetail};
use crate::agent::state::AgentState;
use crate::agent::view;
use crate::error::Result;
use crate::placement::UsageBy;
use crate::repository::Repository;

/// Query parameters of sites and links.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct AdvisorQuery {
    /// Repository; the default one if absent.
    repository: Option<String>,
}

impl AdvisorQuery {
    /// Repository and its advisor.
    fn resolve<'a>(&self, state: &'a AgentState, caller: &Caller) -> Result<(&'a Repository, &'a Advisor)> {
        caller.check_repository_name(self.repository.as_deref())?;
        let origin = state.origin(self.repository.as_deref())?;
        Ok((origin, state.advisor(origin)?))
    }
}

/// Measured links between sites, and how well hints have predicted the transfers over them.
#[utoipa::path(
    get,
    path = "/v1/calibration",
    operation_id = "readCalibration",
    params(AdvisorQuery),
    responses((status = 200, description = "By the ends of the links", body = view::Calibration)),
)]
pub(super) async fn calibration(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    query: Result<Query<AdvisorQuery>, QueryRejection>,
) -> Result<Json<view::Calibration>, ApiError> {
    let (_, advisor) = parse_query(query)?.resolve(&state, &caller)?;
    let epoch = advisor.epoch().await?;
    Ok(Json(view::Calibration { generated_at: epoch.at().to_string(), links: epoch.calibration() }))
}

/// Sites, the agents whose inventories are known, and the links between them.
#[utoipa::path(
    get,
    path = "/v1/sites",
    operation_id = "listSites",
    params(AdvisorQuery),
    responses((status = 200, description = "By name", body = view::SiteList)),
)]
pub(super) async fn list(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    query: Result<Query<AdvisorQuery>, QueryRejection>,
) -> Result<Json<view::SiteList>, ApiError> {
    let (origin, advisor) = parse_query(query)?.resolve(&state, &caller)?;
    let detail = if caller.requester().is_some() { HintDetail::Little } else { HintDetail::All };
    Ok(Json(advisor.epoch().await?.site_list(origin, detail)))
}

/// Query parameters of a month's usage.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct UsageQuery {
    /// Repository; the default one if absent.
    repository: Option<String>,
    /// Month in UTC, such as `2026-11`; this one if absent.
    month: Option<String>,
    /// Grouping: `link`, `site`, `run` or `tenant`; `tenant` if absent.
    #[param(inline)]
    by: Option<UsageBy>,
}

/// Usage of a month: what agents have moved, and what it cost.
#[utoipa::path(
    get,
    path = "/v1/usage",
    operation_id = "readUsage",
    params(UsageQuery),
    responses((status = 200, description = "By name of the grouping", body = view::MonthUsage)),
)]
pub(super) async fn usage(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    query: Result<Query<UsageQuery>, QueryRejection>,
) -> Result<Json<view::MonthUsage>, ApiError> {
    let UsageQuery { repository, month, by } = parse_query(query)?;
    let (_, advisor) = AdvisorQuery { repository }.resolve(&state, &caller)?;
    let month = month.as_deref().map(str::parse).transpose()?;
    Ok(Json(advisor.usage(month, by.unwrap_or(UsageBy::Tenant)).await?))
}
