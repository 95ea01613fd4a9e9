//! What an agent keeps for others.

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use super::accept::{AcceptSection, Accepts};
use super::quantity::{Bytes, Span};
use crate::error::Result;

/// How long whoever gave a checkpoint may still save it itself: as long as the longest of the notices that clouds give
/// (<https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html>).
const WAIT: Duration = Duration::from_mins(2);
/// Default limit of the time from the promise of room to the last byte.
const DEADLINE: Duration = Duration::from_hours(1);
/// Saves that may fail before a checkpoint is set aside: with the pauses between them a quarter of an hour.
const TRIES: u32 = 20;

/// The section `[custody]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CustodySection {
    dir: PathBuf,
    capacity: Bytes,
    #[serde(default)]
    accept: Vec<AcceptSection>,
    wait: Option<Span>,
    deadline: Option<Span>,
    tries: Option<NonZeroU32>,
}

/// Limits on what an agent keeps for others.
#[derive(Clone, Debug)]
pub struct CustodyConfig {
    /// Where: a disk that survives the nodes of those who give.
    pub dir: PathBuf,
    /// Bytes of files, at most.
    pub capacity: u64,
    /// Agents that may hand over checkpoints, with names and quotas.
    pub accept: Accepts,
    /// Time in which they may still save it themselves.
    pub wait: Duration,
    /// Limit of the time from the promise of room to the last byte.
    pub deadline: Duration,
    /// Failed saves before a checkpoint is set aside.
    pub tries: u32,
}

impl CustodySection {
    /// A path that is relative counts from `folder`.
    pub(super) fn settle(self, folder: &Path) -> Result<CustodyConfig> {
        Ok(CustodyConfig {
            dir: folder.join(self.dir),
            capacity: self.capacity.0,
            accept: Accepts::of(self.accept, self.capacity.0)?,
            wait: self.wait.map_or(WAIT, |span| span.0),
            deadline: self.deadline.map_or(DEADLINE, |span| span.0),
            tries: self.tries.map_or(TRIES, NonZeroU32::get),
        })
    }
}
