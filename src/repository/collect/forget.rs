//! Forgetting: old values of removed and replaced names, once they were kept for long enough.
//!
//! The age of a kept value is measured by the store alone: by its time of the log entry that kept the value, or, once
//! that entry is truncated, of the first boundary above it, which was written later. So nothing is forgotten too early.

use std::time::Duration;

use super::store_time;
use crate::clock::Timestamp;
use crate::error::Result;
use crate::repository::Repository;
use crate::repository::log::State;

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

/// Newest entry of `state` whose kept values are old enough to be forgotten, with all that earlier entries kept; none if no value is.
/// It takes a few requests for any number of entries.
///
/// # Errors
/// Unreachable, if the store is; damaged, if a boundary is.
///
/// # Cancel safety
/// Safe: it only reads.
pub async fn outlived(repository: &Repository, state: &State, until: KeepUntil) -> Result<Option<u64>> {
    let mut entries: Vec<u64> = state.removed.values().map(|removed| removed.at).collect();
    entries.sort_unstable();
    entries.dedup();
    let limit = match until {
        KeepUntil::Now => return Ok(entries.last().copied()),
        KeepUntil::TakenBefore(limit) => limit,
    };
    // Entries come in order: what is kept by one was taken no later than what is kept by those after it.
    let (mut old, mut young) = (0, entries.len());
    while old < young {
        let middle = old + (young - old) / 2;
        let Some(&at) = entries.get(middle) else { break };
        if kept_since(repository, at).await?.is_some_and(|taken| taken <= limit) {
            old = middle + 1;
        } else {
            young = middle;
        }
    }
    Ok(old.checked_sub(1).and_then(|last| entries.get(last).copied()))
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
