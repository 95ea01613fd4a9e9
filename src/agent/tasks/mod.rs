//! Background tasks of an agent: saves, restores, warms and watches, with progress, outcome and a way to stop each.
//!
//! ```text
//! operations, watch (what each kind does) -> registry (runs them, counts them, remembers the last)
//! ```

mod failures;
mod histograms;
mod large_trees;
mod operations;
mod outcome;
mod registry;
mod watch;

use std::time::Duration;

pub(super) use self::large_trees::LargeTrees;
pub(super) use self::operations::{
    RestoreRequest, WarmRequest, not_readable, resolve, resolve_for, restore, save_handoff, warm, warm_commitment,
    without_offers,
};
pub(super) use self::outcome::{Outcome, TaskReport};
pub(super) use self::registry::{Task, TaskSpec, Tasks};
pub(super) use self::watch::watch;

/// Pause before the agent retries its own work.
pub(super) const AGAIN_AFTER: Duration = Duration::from_secs(5);
