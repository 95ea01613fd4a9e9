//! Forgetting: old values of removed and replaced names, once they were kept for long enough.
//!
//! The age of a kept value is measured by the store alone: by its time of the log entry that kept the value, or, once
//! that entry is truncated, of the first boundary above it, which was written later. So nothing is forgotten too early.

use std::collections::BTreeMap;
use std::time::Duration;

use super::store_time;
use crate::clock::Timestamp;
use crate::error::Result;
use crate::repository::Repository;
use crate::repository::log::{Action, State};

/// Default time for which values of removed and replaced names are kept.
pub const KEEP_REMOVED: Duration = Duration::from_hours(7 * 24);

/// Limit of the age of kept values.
#[derive(Clone, Copy, Debug)]
pub enum KeepUntil {
    /// Forget all, at the caller's request.
    Now,
    /// Forget values kept before this time, by the store's clock.
    TakenBefore(Timestamp),
}

/// Actions that forget the values of `state` that are old enough.
///
/// # Errors
/// Unreachable, if the store is; damaged, if a boundary is.
///
/// # Cancel safety
/// Safe: it only reads.
pub async fn outlived(repository: &Repository, state: &State, until: KeepUntil) -> Result<Vec<Action>> {
    let limit = match until {
        KeepUntil::Now => return Ok(state.removed.iter().map(|(key, removed)| removed.forget(key)).collect()),
        KeepUntil::TakenBefore(limit) => limit,
    };
    let mut by_entry: BTreeMap<u64, Vec<Action>> = BTreeMap::new();
    for (key, removed) in &state.removed {
        by_entry.entry(removed.at).or_default().push(removed.forget(key));
    }
    let mut due = Vec::new();
    // Entries come in order: after the first that is too young the rest need not be checked.
    for (at, actions) in by_entry {
        if kept_since(repository, at).await?.is_none_or(|taken| taken > limit) {
            break;
        }
        due.extend(actions);
    }
    Ok(due)
}

/// Time when entry `at` kept a value, by the store's clock, or a later time; none if the store has no time for it.
///
/// # Errors
/// As [`outlived`].
///
/// # Cancel safety
/// Safe: it only reads.
pub async fn kept_since(repository: &Repository, at: u64) -> Result<Option<Timestamp>> {
    match store_time(repository, at).await? {
        None => repository.log().passed(at).await,
        told => Ok(told),
    }
}
