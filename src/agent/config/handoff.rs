//! Section `[handoff]`: the store of checkpoints that other agents hand off.

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use super::accept::{AcceptSection, Accepts};
use super::quantity::{Bytes, Span};
use crate::error::Result;

/// Default time in which a sender may still save a checkpoint itself: the longest notice that clouds give
/// (<https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html>).
const WAIT: Duration = Duration::from_mins(2);
/// Default limit of the time from the promise to the last byte.
const DEADLINE: Duration = Duration::from_hours(1);
/// Default number of failed saves before a checkpoint is set aside: with the pauses between them a quarter of an hour.
const TRIES: u32 = 20;

/// The section `[handoff]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HandoffSection {
    dir: PathBuf,
    capacity: Bytes,
    #[serde(default)]
    accept: Vec<AcceptSection>,
    wait: Option<Span>,
    deadline: Option<Span>,
    tries: Option<NonZeroU32>,
}

/// Settings of the handoff store.
#[derive(Clone, Debug)]
pub struct HandoffConfig {
    /// Its folder, on a disk that survives the senders' nodes.
    pub dir: PathBuf,
    /// Limit of the files, in bytes.
    pub capacity: u64,
    /// Agents that may hand off checkpoints, with names and quotas.
    pub accept: Accepts,
    /// Time in which a sender may still save a checkpoint itself.
    pub wait: Duration,
    /// Limit of the time from the promise to the last byte.
    pub deadline: Duration,
    /// Failed saves before a checkpoint is set aside.
    pub tries: u32,
}

impl HandoffSection {
    /// Resolves relative paths from `folder`.
    pub(super) fn settle(self, folder: &Path) -> Result<HandoffConfig> {
        Ok(HandoffConfig {
            dir: folder.join(self.dir),
            capacity: self.capacity.0,
            accept: Accepts::of(self.accept, self.capacity.0)?,
            wait: self.wait.map_or(WAIT, |span| span.0),
            deadline: self.deadline.map_or(DEADLINE, |span| span.0),
            tries: self.tries.map_or(TRIES, NonZeroU32::get),
        })
    }
}
