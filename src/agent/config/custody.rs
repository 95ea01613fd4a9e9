//! What an agent keeps for others.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use super::quantity::{Bytes, Span};
use crate::pattern::Patterns;
use crate::transfer::exchange::Callers;

/// How long whoever gave a checkpoint may still save it itself: as long as the longest of the notices that clouds give
/// (<https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html>).
const WAIT: Duration = Duration::from_mins(2);

/// The section `[custody]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CustodySection {
    dir: PathBuf,
    capacity: Bytes,
    of: Patterns,
    wait: Option<Span>,
}

/// What an agent keeps for others.
#[derive(Clone, Debug)]
pub struct CustodyConfig {
    /// Where: a disk that survives the nodes of those who give.
    pub dir: PathBuf,
    /// Bytes of files, at most.
    pub capacity: u64,
    /// Who may give something, and so have steps of any run saved.
    pub of: Callers,
    /// How long they may still save it themselves.
    pub wait: Duration,
}

impl CustodySection {
    /// A path that is relative counts from `folder`.
    pub(super) fn settle(self, folder: &Path) -> CustodyConfig {
        CustodyConfig {
            dir: folder.join(self.dir),
            capacity: self.capacity.0,
            of: Callers::of(self.of),
            wait: self.wait.map_or(WAIT, |span| span.0),
        }
    }
}
