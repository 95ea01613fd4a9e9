//! Section `[staging]`: memory for tensors that the processes of the node share.

use std::time::Duration;

use serde::Deserialize;

use super::quantity::{Bytes, Span};

/// Default time for which tensors stay in memory after their last use.
const KEEP: Duration = Duration::from_mins(10);

/// The section `[staging]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StagingSection {
    memory: Bytes,
    keep: Option<Span>,
}

/// Memory for staged tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagingConfig {
    /// Limit of the tensors in memory, in bytes. It is not part of the agent's `memory`.
    pub memory: u64,
    /// Time for which tensors that nobody uses stay in memory.
    pub keep: Duration,
}

impl StagingSection {
    pub(super) fn settle(self) -> StagingConfig {
        StagingConfig { memory: self.memory.0, keep: self.keep.map_or(KEEP, |span| span.0) }
    }
}
