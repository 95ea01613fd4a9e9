//! Listings of names and folders, page by page.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use serde::Deserialize;

use super::error::{ApiError, parse_query};
use crate::agent::state::AgentState;
use crate::agent::view;
use crate::error::{Error, Result};
use crate::ops::NameRange;

/// Entries of a list in one answer: as many as nobody said otherwise, and at most.
const LISTED: usize = 1000;
const LISTED_MAX: usize = 10_000;

/// Query of names.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Names {
    prefix: Option<String>,
    after: Option<String>,
    limit: Option<usize>,
    repository: Option<String>,
}

pub(super) async fn list(
    State(state): State<Arc<AgentState>>,
    query: Result<Query<Names>, QueryRejection>,
) -> Result<Json<view::NameList>, ApiError> {
    let Names { prefix, after, limit, repository } = parse_query(query)?;
    let repository = state.repository(repository.as_deref())?;
    let range = NameRange {
        prefix: prefix
            .filter(|prefix| !prefix.is_empty())
            .map(|prefix| prefix.trim_end_matches('/').parse())
            .transpose()?,
        after: after.map(|after| after.parse()).transpose()?,
        limit: bounded(limit)?,
    };
    let (names, more) = repository.list_range(&range).await?;
    let next = names.last().filter(|_| more).map(|last| last.name.clone());
    Ok(Json(view::NameList { names, next }))
}

/// Entries of one answer.
///
/// # Errors
/// Usage, for none.
pub(super) fn bounded(limit: Option<usize>) -> Result<usize> {
    match limit.unwrap_or(LISTED) {
        0 => {
            Err(Error::usage("a list of nothing is asked for").expected(format!("limit from 1 to {LISTED_MAX}")).got(0))
        }
        limit => Ok(limit.min(LISTED_MAX)),
    }
}
