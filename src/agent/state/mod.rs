//! State of an agent: repositories, cache, links to other agents, tasks.

mod parts;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::parts::{advisors, exchange, handoff_store, open_cache, open_commitments, repositories, share, tokens};
use super::advisor::Advisor;
use super::audit::open_log;
use super::commitments::Commitments;
use super::config::{CallerPins, Config, PeersConfig};
use super::counts::ClusterCounts;
use super::file_windows::FileWindows;
use super::handoff::HandoffStore;
use super::head_limits::HeadLimits;
use super::kube::KubeRules;
use super::open_trees::OpenTrees;
use super::preemption::Notice;
use super::problems::Problems;
use super::requester::Requester;
use super::rules::Rules;
use super::shares::Shares;
use super::staged::StagedTrees;
use super::tasks::{LargeTrees, Tasks};
use super::tokens::Tokens;
use super::user_rules::UserRules;
use super::view;
use crate::audit::{ActorLimit, DENIED_NAMES, RECORDED_REQUESTS, Recorder};
use crate::cache::{Cache, PinLimit};
use crate::clock::{Clock, SystemClock, Timestamp};
use crate::error::{Error, Result};
use crate::id::RepositoryId;
use crate::ops::Stop;
use crate::repository::Repository;
use crate::storage::Location;
use crate::transfer::Gate;
use crate::transfer::exchange::Exchange;
use crate::transfer::identity::Credentials;
use crate::transfer::ledger::Ledger;
use crate::transfer::peers::Discovery;
use crate::transfer::policy::{Policies, seen_folder};

/// Limit of processes of this node that read chunks at the same time.
const LOCAL_READERS_MAX: usize = 256;
/// Limit of the trees in memory that processes use at the same time; each takes a connection.
const STAGED_USERS_MAX: usize = 4096;

/// Shared state of the agent, used by the API and the background jobs.
#[derive(Debug)]
pub(super) struct AgentState {
    /// Repositories that read from their stores only.
    origins: Vec<Repository>,
    /// The same repositories, reading through the exchange if there is one.
    repositories: Vec<Repository>,
    /// Advisors of the repositories, in their order, if it gives hints.
    advisors: Vec<Advisor>,
    cache: Option<Arc<Cache>>,
    commitments: Option<Arc<Commitments>>,
    exchange: Option<Arc<Exchange>>,
    credentials: Option<Credentials>,
    /// The audit log, if decisions are recorded.
    pub(super) recorder: Option<Recorder>,
    /// Processes of this node that read chunks.
    pub(super) local_readers: TaskTracker,
    pub(super) local_reader_slots: Arc<Semaphore>,
    /// Shutdown signal for watchers.
    pub(super) stop: watch::Sender<Stop>,
    /// True once the configured inputs are prepared.
    prepared: AtomicBool,
    /// Preemption notice.
    notice: OnceLock<Notice>,
    /// Cancelled when a preemption notice arrives.
    preempted: CancellationToken,
    /// Rights of other agents, reloaded when the settings change.
    pub(super) rules: Arc<Rules>,
    /// Rules for the pods of a scheduler that asks.
    pub(super) kube: KubeRules,
    /// Rules for tasks of `SkyPilot`.
    pub(super) skypilot: UserRules,
    /// Store of checkpoints that other agents hand off, if enabled.
    pub(super) store: Option<Arc<HandoffStore>>,
    /// Limits of the pins of other agents, and of those of tokens.
    caller_pins: CallerPins,
    token_pins: CallerPins,
    /// Tokens for its API, if configured.
    tokens: Option<Arc<Tokens>>,
    /// Cancelled at shutdown: connections must end.
    pub(super) leaving: CancellationToken,
    pub(super) tasks: Tasks,
    /// Limits of connections of other agents.
    pub(super) gate: Gate,
    /// Memory for parts of files that are being sent.
    pub(super) windows: FileWindows,
    /// Memory of long answers to tenants, tokens and other agents.
    pub(super) answers: Shares,
    /// Recently used trees.
    pub(super) open_trees: OpenTrees,
    /// Places of the large trees that are warmed.
    pub(super) large_trees: Arc<LargeTrees>,
    /// Tensors in memory for the processes of this node, if there is memory for them.
    staged: Option<Arc<StagedTrees>>,
    /// Connections of processes that use these tensors.
    pub(super) staged_users: Arc<Semaphore>,
    /// Bytes of files sent.
    pub(super) file_bytes_sent: AtomicU64,
    /// Limits of the heads of audit logs that are published for other agents.
    pub(super) head_limits: HeadLimits,
    /// Limit of the denied names in the audit log.
    pub(super) denied_names: ActorLimit,
    /// Limit of requests that the audit log records one by one.
    pub(super) recorded_requests: ActorLimit,
    /// Problems of background work.
    pub(super) background: Problems,
    /// Counts of what it does for a cluster.
    pub(super) cluster: ClusterCounts,
    clock: Arc<dyn Clock>,
    pub(super) started: Timestamp,
}

impl AgentState {
    /// Opens everything that `config` names.
    ///
    /// # Errors
    /// Not found, for a missing repository or certificate; damaged or denied, for unusable certificates; conflict, for a cache
    /// that another process uses; usage, for too little memory; else errors of the store or the file system.
    pub(super) async fn open(config: &Config) -> Result<Self> {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let credentials = parts::credentials(config, &clock)?;
        let share = share(config)?;
        let recorder = open_log(config.audit.as_ref(), credentials.as_ref(), Arc::clone(&clock)).await?;
        let cache = match &config.cache {
            None => None,
            Some(settings) => Some(open_cache(settings.clone()).await?),
        };
        let (store, tokens) = (handoff_store(config).await?, tokens(config, &clock).await?);
        let policies = Policies::new(credentials.clone(), seen_folder());
        let origins = repositories(config, share, &policies).await?;
        let commitments = open_commitments(cache.as_ref(), &origins, &clock).await?;
        let advisors = match &config.advisor {
            Some(paths) => advisors(paths, &origins, credentials.as_ref(), &policies).await?,
            None => Vec::new(),
        };
        let exchange = match &cache {
            Some(cache) => Some(exchange(config, share, cache, (credentials.as_ref(), policies)).await?),
            None => None,
        };
        if let Some(exchange) = &exchange {
            recorder.iter().for_each(|recorder| exchange.record_in(recorder.clone()));
            origins.iter().for_each(|repository| exchange.serve_repository(repository));
        }
        let repositories = match &exchange {
            Some(exchange) => origins.iter().map(|one| one.with_source(Arc::<Exchange>::clone(exchange))).collect(),
            None => origins.clone(),
        };
        Ok(Self {
            origins,
            repositories,
            advisors,
            cache,
            commitments,
            exchange,
            credentials,
            recorder,
            local_readers: TaskTracker::new(),
            local_reader_slots: Arc::new(Semaphore::new(LOCAL_READERS_MAX)),
            stop: watch::Sender::new(Stop::No),
            prepared: AtomicBool::new(false),
            notice: OnceLock::new(),
            preempted: CancellationToken::new(),
            rules: Arc::new(Rules::of(config)),
            kube: config.kube.clone(),
            skypilot: config.skypilot.clone(),
            store,
            caller_pins: config.caller_pins,
            token_pins: config.token_pins,
            tokens,
            leaving: CancellationToken::new(),
            tasks: Tasks::new(Arc::clone(&clock)),
            gate: Gate::new(config.admission),
            windows: FileWindows::new(share)?,
            answers: Shares::new(share / 8),
            open_trees: OpenTrees::default(),
            large_trees: Arc::new(LargeTrees::new(share)),
            staged: config.staging.map(|settings| Arc::new(StagedTrees::new(settings, Arc::clone(&clock)))),
            file_bytes_sent: AtomicU64::new(0),
            staged_users: Arc::new(Semaphore::new(STAGED_USERS_MAX)),
            head_limits: HeadLimits::default(),
            denied_names: ActorLimit::new(DENIED_NAMES),
            recorded_requests: ActorLimit::new(RECORDED_REQUESTS),
            started: clock.now(),
            background: Problems::default(),
            cluster: ClusterCounts::default(),
            clock,
        })
    }

    /// Repository with the location or id `named`; the default one if None.
    ///
    /// # Errors
    /// Not found, if the agent does not have it.
    pub(super) fn repository(&self, named: Option<&str>) -> Result<&Repository> {
        Self::choose(&self.repositories, named)
    }

    /// The same, but reading from its store only.
    ///
    /// # Errors
    /// As [`AgentState::repository`].
    pub(super) fn origin(&self, named: Option<&str>) -> Result<&Repository> {
        Self::choose(&self.origins, named)
    }

    fn choose<'a>(among: &'a [Repository], named: Option<&str>) -> Result<&'a Repository> {
        if let Some(id) = named.and_then(|named| named.parse::<RepositoryId>().ok()) {
            return among.iter().find(|repository| repository.id() == id).ok_or_else(|| {
                let known: Vec<_> = among.iter().map(|repository| repository.id().to_string()).collect();
                unknown(&known, id)
            });
        }
        let wanted: Option<Location> = named.map(str::parse).transpose()?;
        let fits = |repository: &&Repository| wanted.as_ref().is_none_or(|at| same(at, repository.store().location()));
        among.iter().find(fits).ok_or_else(|| {
            let known: Vec<_> = among.iter().map(|repository| repository.store().location().to_string()).collect();
            unknown(&known, named.unwrap_or_default())
        })
    }

    /// Repositories, the default one first.
    pub(super) fn stores(&self) -> &[Repository] {
        &self.repositories
    }

    /// The cache.
    ///
    /// # Errors
    /// Not found, if the agent has none.
    pub(super) fn cache(&self) -> Result<Arc<Cache>> {
        self.cache.clone().ok_or_else(|| {
            Error::not_found("this agent has no cache").help("set [cache] dir and capacity in its settings")
        })
    }

    /// Hints that were committed here.
    ///
    /// # Errors
    /// As [`AgentState::cache`].
    pub(super) fn commitments(&self) -> Result<Arc<Commitments>> {
        self.commitments.clone().ok_or_else(|| {
            Error::not_found("this agent has no cache, or no repository")
                .help("set [cache] dir and capacity in its settings")
        })
    }

    /// Tensors in memory for the processes of this node.
    ///
    /// # Errors
    /// Unsupported, if the settings give no memory to them.
    pub(super) fn staged(&self) -> Result<&Arc<StagedTrees>> {
        self.staged.as_ref().ok_or_else(|| {
            Error::unsupported("this agent keeps no tensors in memory")
                .help("set [staging] memory in its settings (docs/staging.md)")
        })
    }

    /// Advisors of its repositories; none without a sites file.
    pub(super) fn advisors(&self) -> &[Advisor] {
        &self.advisors
    }

    /// Advisor of one of its repositories.
    ///
    /// # Errors
    /// Not found, if the agent gives no hints.
    pub(super) fn advisor(&self, repository: &Repository) -> Result<&Advisor> {
        let at = self.origins.iter().position(|other| other.id() == repository.id());
        at.and_then(|at| self.advisors.get(at)).ok_or_else(|| {
            Error::not_found("this agent gives no hints")
                .help("set [advisor] sites in its settings (docs/placement.md)")
        })
    }

    /// Exchange of chunks with peers.
    ///
    /// # Errors
    /// Not found, if the agent has no cache.
    pub(super) fn exchange(&self) -> Result<&Arc<Exchange>> {
        self.exchange.as_ref().ok_or_else(|| {
            Error::not_found("this agent has no cache").help("set [cache] dir and capacity in its settings")
        })
    }

    /// Ledger of what it moves, if it has a cache.
    pub(super) fn ledger(&self) -> Option<Arc<Ledger>> {
        self.exchange.as_ref().map(|exchange| Arc::clone(exchange.peers().ledger()))
    }

    /// Its tokens.
    ///
    /// # Errors
    /// Not found, if its settings name no file for them.
    pub(super) fn tokens(&self) -> Result<&Arc<Tokens>> {
        self.tokens.as_ref().ok_or_else(|| {
            Error::not_found("this agent has no tokens").help(
                "set `http` and `tokens` (a file in a folder that belongs to the agent's user) in its settings, and restart it",
            )
        })
    }

    /// Expiry and limit of a pin that `asker` requests; None is this node's user, who has no limit.
    ///
    /// # Errors
    /// Usage, for no time at all; denied, for longer than it may.
    pub(super) fn pin_bounds(
        &self,
        asker: Option<&Requester>,
        asked: Option<Duration>,
    ) -> Result<(Option<Timestamp>, Option<PinLimit>)> {
        let pins = if matches!(asker, Some(Requester::Token(_))) { &self.token_pins } else { &self.caller_pins };
        pins.bounds(asker, asked, |span| self.after(span))
    }

    /// Discovery of other agents; None, if there is none.
    pub(super) fn discovery(&self, settings: &PeersConfig) -> Option<Discovery> {
        let identity = self.credentials.as_ref()?.identity();
        if !settings.registered && settings.names.is_empty() {
            return None;
        }
        Some(Discovery {
            addresses: settings.addresses.clone(),
            names: settings.names.clone(),
            repositories: if settings.registered { self.origins.clone() } else { Vec::new() },
            register: settings.register.clone().map(|address| (identity, address)),
        })
    }

    /// Certificate and key of this agent.
    ///
    /// # Errors
    /// Usage, if it has no certificate.
    pub(super) fn credentials(&self) -> Result<&Credentials> {
        self.credentials.as_ref().ok_or_else(|| {
            Error::usage("this agent has no identity, so it cannot call other agents")
                .help("create one: towline identity issue SITE/AGENT --to DIR; then set `identity` to DIR")
        })
    }

    /// True once the inputs are prepared, until shutdown or a preemption notice.
    pub(super) fn is_ready(&self) -> bool {
        self.prepared.load(Ordering::Acquire) && self.notice.get().is_none() && !self.tasks.is_closed()
    }

    /// Marks the inputs as prepared.
    pub(super) fn mark_prepared(&self) {
        self.prepared.store(true, Ordering::Release);
    }

    /// Records a preemption notice; only the first one counts.
    pub(super) fn preempt(&self, notice: Notice) {
        tracing::warn!("preemption notice: {}", notice.what);
        let _ = self.notice.set(notice);
        self.preempted.cancel();
    }

    /// Returns once the agent is shutting down or preempted.
    ///
    /// # Cancel safety
    /// Safe.
    pub(super) async fn until_stopping(&self) {
        let mut stop = self.stop.subscribe();
        tokio::select! {
            _ = stop.wait_for(|stop| *stop != Stop::No) => {}
            () = self.preempted.cancelled() => {}
        }
    }

    /// True once a preemption notice arrived.
    pub(super) fn is_preempted(&self) -> bool {
        self.notice.get().is_some()
    }

    /// `grace`, or the time until the preemption if that is sooner.
    pub(super) fn time_left(&self, grace: Duration) -> Duration {
        let at = self.notice.get().and_then(|notice| notice.at);
        at.map_or(grace, |at| at.since(self.clock.now()).min(grace))
    }

    /// Current time.
    pub(super) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Current time plus `span`.
    pub(super) fn after(&self, span: Duration) -> Timestamp {
        let span = i64::try_from(span.as_nanos()).unwrap_or(i64::MAX);
        Timestamp(self.clock.now().0.saturating_add(span))
    }

    pub(super) fn health_summary(&self) -> view::HealthSummary {
        view::HealthSummary { alive: true, ready: self.is_ready() }
    }

    pub(super) fn health(&self) -> view::Health {
        view::Health {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            started: self.started.to_string(),
            ready: self.is_ready(),
            leaving: self.tasks.is_closed(),
            preemption: self.notice.get().map(|notice| notice.what.clone()),
            identity: self.credentials.as_ref().map(|credentials| credentials.identity().to_string()),
            repositories: self.origins.iter().map(place).collect(),
            problems: self.problems(),
        }
    }

    /// Problems of reloaded files and of background work.
    pub(super) fn problems(&self) -> Vec<String> {
        let certificates = self.credentials.as_ref().map(Credentials::problems).unwrap_or_default();
        let audit = self.recorder.as_ref().and_then(Recorder::problem);
        self.rules.problem().into_iter().chain(certificates).chain(audit).chain(self.background.list()).collect()
    }
}

fn unknown(known: &[String], named: impl std::fmt::Display) -> Error {
    Error::not_found("this agent does not have the repository")
        .expected(known.join(", "))
        .got(named)
        .help("add it to `repositories` in the agent's settings")
}

/// True if both locations lead to the same repository; a directory can have several paths.
fn same(a: &Location, b: &Location) -> bool {
    let real = |location: &Location| match location {
        Location::Directory(path) => std::fs::canonicalize(path).ok(),
        _ => None,
    };
    a == b || real(a).is_some_and(|a| Some(a) == real(b))
}

fn place(repository: &Repository) -> view::ServedRepository {
    view::ServedRepository {
        location: Some(repository.store().location().to_string()),
        id: repository.id().to_string(),
    }
}
