//! The exchange of an agent: chunks from its cache, else from peers of its site, from other sites, or from the repository; and
//! what it has, for processes of its node and for peers.
//!
//! ```text
//! restore, towline's processes (Local), peers (Exchange)        who asks: a ChunkSource, or Holdings
//!   gather.rs    cache? -> being fetched already? -> bring      each chunk is fetched once (in_flight.rs)
//!   plan.rs      which chunks from whom                         pure
//!   bring.rs     from peers, from packs (limiter.rs)            verify.rs verifies, and puts into the cache
//! ```
//!
//! **Nothing waits in a circle.** A chunk is brought by one task, which waits for nobody's chunk but its own: bases come first, level
//! by level, and whoever serves an agent of its site asks no other agent of the site on its behalf.

mod bring;
mod catalog;
mod figures;
mod gather;
mod holdings;
mod in_flight;
mod limit;
mod limiter;
mod named;
mod plan;
mod policy;
mod reachable;
mod rights;
mod served;
mod single_flight;
mod verify;
mod view;
mod warm;

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;

use self::catalog::Catalog;
pub use self::figures::Figures;
use self::figures::{Counts, Tally};
use self::gather::Ask;
pub use self::holdings::Local;
use self::in_flight::InFlight;
pub use self::limit::Limits;
use self::limiter::AdaptiveLimiter;
pub use self::policy::{Callers, Policy, Rule};
use self::verify::Verifier;
pub use self::warm::WarmedChunks;
use super::Ahead;
use super::identity::Identity;
use super::peers::{Peers, Rate};
use super::protocol::Priority;
use crate::budget::Budget;
use crate::cache::Cache;
use crate::error::{Error, Result};
use crate::repository::{ChunkSource, FramePlace, Repository, Saved, SourceBytes};

/// Parts of an exchange.
#[derive(Debug)]
pub struct ExchangeOptions {
    /// Identity.
    pub identity: Identity,
    /// Its cache.
    pub cache: Arc<Cache>,
    /// Memory of its buffers: its own, since those that wait for it hold others.
    pub budget: Budget,
    /// Memory of frames that are read before they are sent.
    pub ahead: Budget,
    /// Other agents.
    pub peers: Arc<Peers>,
    /// Rules of what other agents may read.
    pub policy: Policy,
    /// Rate limits.
    pub limits: Limits,
}

/// The exchange of one agent.
#[derive(Debug)]
pub struct Exchange {
    identity: Identity,
    cache: Arc<Cache>,
    budget: Budget,
    ahead: Arc<Ahead>,
    peers: Arc<Peers>,
    policy: Policy,
    limits: Limits,
    verifier: Verifier,
    catalog: Catalog,
    in_flight: InFlight,
    /// Reads of the repository for a gang.
    origin_reads: AdaptiveLimiter,
    counts: Counts,
    /// Recent rate of repositories, a group of chunks at a time.
    origin: Mutex<Rate>,
}

/// Sources of missing chunks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum From {
    /// The nearest that has them.
    #[default]
    Anywhere,
    /// The agents of a site.
    Site(String),
    /// One agent.
    Agent(Identity),
    /// The repository.
    Repository,
}

/// Options of a fetch of missing chunks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FetchPolicy {
    /// Sources.
    pub from: From,
    /// Read from the repository what that place does not give.
    pub or_repository: bool,
    /// Priority for the peers that are asked.
    pub priority: Priority,
}

impl FetchPolicy {
    /// From the nearest place, for a caller that waits.
    const FOR_READER: Self = Self { from: From::Anywhere, or_repository: true, priority: Priority::Restore };

    /// Whether the repository may be read.
    fn reads_repository(&self) -> bool {
        self.or_repository || matches!(self.from, From::Anywhere | From::Repository)
    }
}

impl Exchange {
    /// An exchange without repositories.
    #[must_use]
    pub fn new(options: ExchangeOptions) -> Arc<Self> {
        let ExchangeOptions { identity, cache, budget, ahead, peers, policy, limits } = options;
        let verifier = Verifier::new(Arc::clone(&cache));
        let (catalog, in_flight, origin_reads, counts, origin) = Default::default();
        Arc::new(Self {
            identity,
            cache,
            budget,
            ahead: Ahead::new(ahead),
            peers,
            policy,
            limits,
            verifier,
            catalog,
            in_flight,
            origin_reads,
            counts,
            origin,
        })
    }

    /// Lets peers and processes of this node ask for what the names of `repository` stand for.
    pub fn serve_repository(&self, repository: &Repository) {
        self.catalog.add(repository);
    }

    /// Identity.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Its cache.
    #[must_use]
    pub fn cache(&self) -> &Arc<Cache> {
        &self.cache
    }

    /// Other agents.
    #[must_use]
    pub fn peers(&self) -> &Arc<Peers> {
        &self.peers
    }

    /// Bytes a second that repositories gave lately for one group of chunks, once that is known.
    fn origin_rate(&self) -> Option<f64> {
        self.origin.lock().unwrap_or_else(PoisonError::into_inner).get()
    }

    /// Checks that somebody answers at the place that `policy` names.
    ///
    /// # Errors
    /// Not found, naming the known ones, for a site or agent that is not known; unreachable, if none of its agents answers and the
    /// repository must not be read instead.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn check_reachable(&self, policy: &FetchPolicy) -> Result<()> {
        let live = self.peers.live().await;
        let live: Vec<Identity> = live.iter().filter_map(|peer| peer.identity()).collect();
        let known = self.peers.list();
        let known: BTreeSet<Identity> = known.into_iter().filter_map(|peer| peer.identity).collect();
        reachable::check(policy, &live, &known)
    }

    /// Figures of what it has moved.
    #[must_use]
    pub fn figures(&self) -> Figures {
        self.counts.read()
    }
}

#[async_trait]
impl ChunkSource for Exchange {
    async fn frames(
        &self,
        repository: &Repository,
        saved: &Arc<Saved>,
        chunks: &[u32],
        place: FramePlace<'_>,
    ) -> SourceBytes {
        let tally = Tally::default();
        let ask = Ask { repository, saved, policy: &FetchPolicy::FOR_READER, through: true, tally: &tally };
        self.gather(&ask, chunks, place).await;
        tally.read()
    }
}

impl FromStr for From {
    type Err = Error;

    /// `SITE`, `SITE/AGENT` or `repository`.
    fn from_str(text: &str) -> Result<Self> {
        match text.split_once('/') {
            None if text == "repository" => Ok(Self::Repository),
            None => Ok(Self::Site(Identity::new(text, "any")?.site().to_owned())),
            Some((site, agent)) => Ok(Self::Agent(Identity::new(site, agent)?)),
        }
    }
}

impl fmt::Display for From {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Anywhere => f.write_str("anywhere"),
            Self::Site(site) => f.write_str(site),
            Self::Agent(agent) => f.write_str(&agent.path()),
            Self::Repository => f.write_str("repository"),
        }
    }
}
