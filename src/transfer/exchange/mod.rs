//! The exchange of an agent: gets chunks from its cache, else from peers of its site, from other sites, or from the
//! repository; and serves them to processes of its node and to peers.
//!
//! ```text
//! restore (ChunkSource), processes of the node (Local), peers (ServedChunks)
//!   get.rs       cache? -> being fetched already? -> fetch      each chunk is fetched once (in_flight.rs)
//!   plan.rs      selects a source for each chunk                pure
//!   fetch.rs     from peers, from packs (limiter.rs)            verify.rs verifies, and puts into the cache
//! ```
//!
//! **No circular waits.** One task fetches a chunk and waits for no other task's chunk: bases come first, level by
//! level, and an agent that serves another one of its site asks no third agent of the site on its behalf.

mod audited;
mod catalog;
mod fetch;
mod get;
mod in_flight;
mod limit;
mod limiter;
mod named;
mod permits;
mod plan;
mod reachable;
mod reencoded;
mod rights;
mod served;
mod serving;
mod stats;
mod travel;
mod turns;
mod verify;
mod view;
mod warm;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::available_parallelism;
use std::time::Duration;

use async_trait::async_trait;

use self::audited::Audited;
use self::catalog::Catalog;
use self::get::ChunkRequest;
use self::in_flight::InFlight;
pub use self::limit::Limits;
use self::limiter::AdaptiveLimiter;
pub use self::named::NameView;
use self::reencoded::Reencoded;
pub use self::serving::Local;
use self::serving::{GrantKey, GrantedAt};
pub use self::stats::TransferStats;
use self::stats::{SourceCounters, TransferCounters};
pub use self::travel::{WantedTree, is_held};
use self::turns::Turns;
use self::verify::Verifier;
pub use self::warm::WarmedChunks;
use super::ReadAhead;
use super::link_rates::{LinkRates, MeasuredTransfer};
use super::peers::{Peers, Rate};
use super::policy::Policies;
use super::protocol::Priority;
use crate::budget::Budget;
use crate::cache::Cache;
use crate::chunk::Chunk;
use crate::error::{Error, ErrorKind, Result};
use crate::fair_turns::FairTurns;
use crate::format::LinkRate;
use crate::id::ChunkId;
use crate::identity::Identity;
use crate::log_limit::LogLimit;
use crate::name::Name;
use crate::policy::AllowList;
use crate::repository::{ChunkSource, FramePlace, Repository, Saved, SourceBytes};

/// Parts of an exchange.
#[derive(Debug)]
pub struct ExchangeOptions {
    /// Identity.
    pub identity: Identity,
    /// Cache.
    pub cache: Arc<Cache>,
    /// Memory budget of its own buffers, separate from the budgets of the tasks that wait for them.
    pub budget: Budget,
    /// Memory budget of frames that are read before they are sent.
    pub ahead: Budget,
    /// Other agents.
    pub peers: Arc<Peers>,
    /// Rules of what other agents may read.
    pub allow: AllowList,
    /// Signed policies of the repositories.
    pub policies: Arc<Policies>,
    /// Rate limits.
    pub limits: Limits,
    /// Time limit of a source that a tenant or token named, besides that for its bytes at 64 KiB/s; usually [`NAMED_PATIENCE`].
    pub named_patience: Duration,
}

/// Usual time limit of a source that a tenant or token named, besides that for its bytes.
pub const NAMED_PATIENCE: Duration = Duration::from_mins(1);

/// Exchange of an agent.
#[derive(Debug)]
pub struct Exchange {
    identity: Identity,
    cache: Arc<Cache>,
    budget: Budget,
    ahead: Arc<ReadAhead>,
    peers: Arc<Peers>,
    allow: AllowList,
    policies: Arc<Policies>,
    grants: Mutex<HashMap<GrantKey, GrantedAt>>,
    limits: Limits,
    named_patience: Duration,
    verifier: Verifier,
    /// Turns to encode chunks for peers without their bases: half of the cores.
    transcoding: Arc<Turns>,
    /// Chunks that were encoded without their bases recently.
    reencoded: Reencoded,
    /// Turns to plan large trees.
    planning: FairTurns<Option<String>>,
    catalog: Catalog,
    in_flight: InFlight,
    /// Limit of reads of the repository for other agents of the site.
    origin_reads: AdaptiveLimiter,
    counts: TransferCounters,
    audited: Audited,
    /// Recent rate of repositories, by groups of chunks.
    origin: Mutex<Rate>,
    /// Rates of links to here.
    link_rates: Arc<LinkRates>,
}

/// Warnings about chunks that cannot be had, which peers can cause.
static UNAVAILABLE: LogLimit = LogLimit::new();

/// Logs `error`, which is about chunks of `name`.
fn warn_about(name: &Name, what: &str, error: &Error) {
    if let Some(kept_back) = UNAVAILABLE.may() {
        tracing::warn!(%name, kept_back, "{what}: {error:?}");
    }
}

/// Sources of missing chunks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum From {
    /// Nearest source.
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
    /// Reads from the repository what the source lacks.
    pub or_repository: bool,
    /// Priority of the requests to peers.
    pub priority: Priority,
    /// Names no other agent in errors about the source: the caller may not know them.
    pub hides_agents: bool,
}

impl FetchPolicy {
    /// Fetch from the nearest source, for a caller that waits.
    const FOR_READER: Self =
        Self { from: From::Anywhere, or_repository: true, priority: Priority::Restore, hides_agents: false };

    /// True if the repository may be read.
    fn reads_repository(&self) -> bool {
        self.or_repository || matches!(self.from, From::Anywhere | From::Repository)
    }
}

impl Exchange {
    /// Creates an exchange without repositories.
    #[must_use]
    pub fn new(options: ExchangeOptions) -> Arc<Self> {
        let ExchangeOptions { identity, cache, budget, ahead, peers, allow, policies, limits, named_patience } =
            options;
        let verifier = Verifier::new(Arc::clone(&cache));
        let reencoded = Reencoded::new(&budget);
        let (catalog, in_flight, origin_reads, counts, audited, origin, link_rates) = Default::default();
        Arc::new(Self {
            identity,
            cache,
            budget,
            ahead: ReadAhead::new(ahead),
            peers,
            allow,
            policies,
            grants: Mutex::default(),
            limits,
            named_patience,
            verifier,
            reencoded,
            planning: FairTurns::new(1, 1),
            transcoding: Arc::new(Turns::new(available_parallelism().map_or(1, usize::from).div_ceil(2))),
            catalog,
            in_flight,
            origin_reads,
            counts,
            audited,
            origin,
            link_rates,
        })
    }

    /// Serves the names of `repository` to peers and processes of this node.
    pub fn serve_repository(&self, repository: &Repository) {
        self.catalog.add(repository, &self.policies);
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

    /// Measured rates of links from other sites and from repositories.
    #[must_use]
    pub fn link_rates(&self) -> Vec<LinkRate> {
        self.link_rates.all()
    }

    /// Begins a transfer whose time is to be held against what a hint would have said, from the request to the last byte.
    #[must_use]
    pub fn begin_transfer(&self) -> MeasuredTransfer {
        self.link_rates.begin_transfer()
    }

    /// Records the outcome of a transfer that has ended, unless it was short or came over several links.
    pub fn end_transfer(&self, transfer: &MeasuredTransfer) {
        self.link_rates.end_transfer(transfer);
    }

    /// Continues with rates that this agent published before it was restarted.
    pub fn restore_link_rates(&self, rates: &[LinkRate]) {
        self.link_rates.restore(rates);
    }

    /// Recent rate of repositories for one group of chunks, in bytes a second, if known.
    fn origin_rate(&self) -> Option<f64> {
        self.origin.lock().unwrap_or_else(PoisonError::into_inner).get()
    }

    /// Checks that the source that `policy` names answers. Agents without a link are tried once more.
    ///
    /// # Errors
    /// Not found, naming the known ones, for an unknown site or agent; unreachable, if none of its agents answers and
    /// the repository must not be read instead.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn check_reachable(&self, policy: &FetchPolicy) -> Result<()> {
        match self.check_live(policy).await {
            Err(error) if error.kind() == ErrorKind::Unreachable => {
                self.peers.retry().await;
                self.check_live(policy).await
            }
            checked => checked,
        }
    }

    async fn check_live(&self, policy: &FetchPolicy) -> Result<()> {
        let live = self.peers.live().await;
        let live: Vec<Identity> = live.iter().filter_map(|peer| peer.identity()).collect();
        let (mut known, mut nameless) = (BTreeSet::new(), Vec::new());
        for peer in self.peers.list() {
            match peer.identity {
                Some(identity) => {
                    known.insert(identity);
                }
                None => nameless.push(match peer.error {
                    Some(error) => format!("{}: {error}", peer.address),
                    None => peer.address,
                }),
            }
        }
        reachable::check(policy, &live, (&known, &nameless))
    }

    /// Counters of moved bytes.
    #[must_use]
    pub fn stats(&self) -> TransferStats {
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
        let (counters, none) = (SourceCounters::default(), HashSet::new());
        let request = ChunkRequest {
            repository,
            saved,
            alone: &none,
            policy: &FetchPolicy::FOR_READER,
            through: true,
            counters: &counters,
            tenant: None,
        };
        self.get_planned(&request, chunks, place).await;
        counters.read()
    }

    fn read_raw<'a>(&self, id: &ChunkId, out: &'a mut [u8]) -> Option<Chunk<'a>> {
        self.cache.read_raw(id, out)
    }
}

impl FromStr for From {
    type Err = Error;

    /// Parses `SITE`, `SITE/AGENT` or `repository`.
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
