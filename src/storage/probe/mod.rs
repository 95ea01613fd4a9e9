//! Finds out what a store really does, by trying it and by racing it.
//!
//! Asking is not enough: Garage ignores `If-None-Match` without a word, and s3s-fs passes one create after the other
//! and then lets several racers win. So creates are raced, and the stored bytes decide, not the answers.

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
    /// It does what it should.
    Works,
    /// It says yes and does not do it.
    Ignored,
    /// It says no.
    Refused,
    /// It does it for one caller at a time only.
    Racy {
        /// Races in which more than one won, or the winner's bytes were not there.
        broken: u32,
        /// Races that could be judged.
        rounds: u32,
    },
    /// Requests failed; nothing can be said.
    Unclear,
    /// Not tried: this kind of store has no such thing.
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
    /// Create an object only if it is not there, also when raced. What the log stands on.
    pub create: Verdict,
    /// Replace an object only if it is the one expected. Not needed.
    pub update: Verdict,
    /// Delete an object only if it is the one expected. Not needed.
    pub delete: Verdict,
    /// Read a range of an object.
    pub ranges: Verdict,
    /// See what was just written.
    pub read_after_write: Verdict,
    /// List what was just written.
    pub list_after_write: Verdict,
    /// Whether conditions on an `ETag` hold only if it is sent without its quotes (Ceph RGW 16).
    pub unquoted_etags: bool,
}

impl Capabilities {
    /// Whether several writers may share a repository here; if not, an `Unsupported` error with the reason and the way
    /// out.
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

/// A prefix that nobody else uses, for objects that are written only to see what happens.
#[must_use]
pub fn scratch() -> Path {
    Path::from(format!("probe/{}", Ulid::generate()))
}

/// Tries `store` under `probe/<ulid>/`, and cleans up after itself. An error means that the store could not be probed at
/// all: not reached, or no right to write.
///
/// Not cancel safe in that a cancelled probe leaves its few small objects; `collect` may delete all of `probe/`.
pub async fn probe(store: &Store, effort: Effort) -> Result<Capabilities> {
    let prober = prober::Prober::new(store);
    let found = prober.run(effort).await;
    prober.sweep().await;
    found
}
