//! Probe of a store's actual abilities, by single requests and by races.
//!
//! Single requests are not enough: Garage silently ignores `If-None-Match`, and s3s-fs handles sequential creates correctly but
//! lets several concurrent ones win. So creates are raced, and the stored bytes decide, not the answers.

mod judge;
mod prober;

use std::fmt;

use object_store::path::Path;
use ulid::Ulid;

use crate::error::{Error, Result};

use super::store::Store;

/// Effort of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// For `init`: 4 races of 8, some 50 requests.
    Quick,
    /// For `doctor`: 16 races of 16, some 300 requests.
    Full,
}

impl Effort {
    const fn races(self) -> (usize, usize) {
        match self {
            Self::Quick => (4, 8),
            Self::Full => (16, 16),
        }
    }
}

/// Result of the probe of one ability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Works as specified.
    Works,
    /// Reports success, but ignores the condition.
    Ignored,
    /// Refuses the request.
    Refused,
    /// Works for sequential requests only.
    Racy {
        /// Races with several winners, or without the winner's bytes.
        broken: u32,
        /// Races with a conclusive result.
        rounds: u32,
    },
    /// Inconclusive, because requests failed.
    Unclear,
    /// Not tested: this kind of store has no such operation.
    Untried,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Works => f.write_str("works"),
            Self::Ignored => f.write_str("ignored without a word"),
            Self::Refused => f.write_str("refused"),
            Self::Racy { broken, rounds } => write!(f, "broken in {broken} of {rounds} races"),
            Self::Unclear => f.write_str("unclear, requests failed"),
            Self::Untried => f.write_str("not tried"),
        }
    }
}

/// Abilities of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Create an object only if it does not exist, also in races. The log depends on it.
    pub create: Verdict,
    /// Replace an object only if it has the expected `ETag`. Not required.
    pub update: Verdict,
    /// Delete an object only if it has the expected `ETag`. Not required.
    pub delete: Verdict,
    /// Read a range of an object.
    pub ranges: Verdict,
    /// Read an object right after its write.
    pub read_after_write: Verdict,
    /// List an object right after its write.
    pub list_after_write: Verdict,
    /// True if conditions on an `ETag` work only without its quotes (Ceph RGW 16).
    pub unquoted_etags: bool,
}

impl Capabilities {
    /// Checks that several writers may share a repository; if not, an `Unsupported` error with the reason and a remedy.
    pub fn shared_writing(&self) -> Result<()> {
        let needs = [
            (self.create, "create-if-absent (If-None-Match), on which every commit stands"),
            (self.read_after_write, "reading back what was just written"),
            (self.list_after_write, "listing what was just written"),
            (self.ranges, "reading a range of an object"),
        ];
        match needs.into_iter().find(|(verdict, _)| *verdict != Verdict::Works) {
            None => Ok(()),
            Some((Verdict::Unclear, need)) => Err(Error::unreachable("store could not be probed")
                .at(need)
                .help("try again; `towline doctor` tells more")),
            Some((verdict, need)) => {
                Err(Error::unsupported("store cannot hold a shared repository").expected(need).got(verdict).help(
                    "use a store that does (AWS S3, Ceph RGW, MiniStack; docs/semantics.md lists them), or a directory",
                ))
            }
        }
    }
}

/// Unique prefix for objects of a probe.
#[must_use]
pub fn scratch() -> Path {
    Path::from(format!("probe/{}", Ulid::generate()))
}

/// Probes `store` under `probe/<ulid>/`, and removes its objects. An error means that the store could not be probed at all: it is
/// unreachable, or there is no right to write.
///
/// Not cancel safe: a cancelled probe leaves a few small objects; `collect` may delete all of `probe/`.
pub async fn probe(store: &Store, effort: Effort) -> Result<Capabilities> {
    let prober = prober::Prober::new(store);
    let found = prober.run(effort).await;
    prober.sweep().await;
    found
}
