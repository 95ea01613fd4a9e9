//! State of an agent: repositories, cache, links to other agents, tasks.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::actor_limit::{ActorLimit, DENIED_NAMES, RECORDED_REQUESTS};
use super::advisor::{Advisor, SitesPaths};
use super::audit::open_log;
use super::commitments::Commitments;
use super::config::{CacheConfig, CallerPins, Config, PeersConfig};
use super::file_windows::FileWindows;
use super::handoff::HandoffStore;
use super::head_limits::HeadLimits;
use super::kube::KubeRules;
use super::open_trees::OpenTrees;
use super::preemption::Notice;
use super::requester::Requester;
use super::rules::Rules;
use super::tasks::Tasks;
use super::tokens::Tokens;
use super::user_rules::UserRules;
use super::view;
use crate::audit::Recorder;
use crate::budget::Budget;
use crate::cache::{Cache, CacheOptions, PinLimit};
use crate::clock::{Clock, SystemClock, Timestamp};
use crate::error::{Error, Result};
use crate::id::RepositoryId;
use crate::identity::Identity;
use crate::limits::{MEMORY_MIN, MIB};
use crate::ops::Stop;
use crate::repository::{Guard, OpenOptions, Repository};
use crate::size;
use crate::storage::Location;
use crate::transfer::exchange::{Exchange, ExchangeOptions, Limits};
use crate::transfer::identity::Credentials;
use crate::transfer::ledger::Ledger;
use crate::transfer::peers::{Discovery, Peers, PeersOptions};
use crate::transfer::policy::{Policies, seen_folder};
use crate::transfer::protocol::limits::WINDOW_MIN;
use crate::transfer::{GOOD_WINDOW, Gate};
use crate::work::blocking;

/// Assumed number of discovered peers when memory is divided among links.
const DISCOVERED_GUESS: usize = 8;
/// Divisor of the exchange's memory: one such part is for frames that are read ahead for peers.
const READ_AHEAD_DIVISOR: u64 = 4;
/// Limit of processes of this node that read chunks at the same time.
const LOCAL_READERS_MAX: usize = 256;

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
    /// Recently used trees.
    pub(super) open_trees: OpenTrees,
    /// Bytes of files sent.
    pub(super) file_bytes_sent: AtomicU64,
    /// Limits of the heads of audit logs that are published for other agents.
    pub(super) head_limits: HeadLimits,
    /// Limit of the denied names in the audit log.
    pub(super) denied_names: ActorLimit,
    /// Limit of requests that the audit log records one by one.
    pub(super) recorded_requests: ActorLimit,
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
        let credentials = match &config.identity {
            Some(folder) => Some(Credentials::open(folder, Arc::clone(&clock))?),
            None => None,
        };
        let share = share(config)?;
        let recorder = open_log(config.audit.as_ref(), credentials.as_ref(), Arc::clone(&clock)).await?;
        let cache = match config.cache.clone() {
            None => None,
            Some(settings) => Some(open_cache(settings).await?),
        };
        let store = handoff_store(config).await?;
        let tokens = tokens(config, &clock).await?;
        let policies = Policies::new(credentials.clone(), seen_folder());
        let origins = repositories(config, share, &policies).await?;
        let commitments = open_commitments(cache.as_ref(), &origins).await?;
        let advisors = match &config.advisor {
            None => Vec::new(),
            Some(paths) => advisors(paths, &origins, credentials.as_ref(), &policies).await?,
        };
        let exchange = match &cache {
            Some(cache) => Some(exchange(config, share, cache, (credentials.as_ref(), policies)).await?),
            None => None,
        };
        let mut repositories = origins.clone();
        if let Some(exchange) = &exchange {
            recorder.iter().for_each(|recorder| exchange.record_in(recorder.clone()));
            origins.iter().for_each(|repository| exchange.serve_repository(repository));
            let nearer = |origin: &Repository| origin.with_source(Arc::<Exchange>::clone(exchange));
            repositories = origins.iter().map(nearer).collect();
        }
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
            open_trees: OpenTrees::default(),
            file_bytes_sent: AtomicU64::new(0),
            head_limits: HeadLimits::default(),
            denied_names: ActorLimit::new(DENIED_NAMES),
            recorded_requests: ActorLimit::new(RECORDED_REQUESTS),
            started: clock.now(),
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
    /// Denied, for longer than it may.
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

    /// Problems of reloaded files.
    fn problems(&self) -> Vec<String> {
        let certificates = self.credentials.as_ref().map(Credentials::problems).unwrap_or_default();
        let audit = self.recorder.as_ref().and_then(Recorder::problem);
        self.rules.problem().into_iter().chain(certificates).chain(audit).collect()
    }
}

/// Repositories of `config`, each with `share` bytes of memory.
async fn repositories(config: &Config, share: u64, policies: &Arc<Policies>) -> Result<Vec<Repository>> {
    let mut opened = Vec::new();
    for location in &config.repositories {
        let guard: Arc<dyn Guard> = Arc::<Policies>::clone(policies);
        let options = OpenOptions { memory: Some(share), guard: Some(guard), ..OpenOptions::default() };
        opened.push(Repository::at(location, &config.store, options).await?);
    }
    Ok(opened)
}

/// Advisors of `repositories`.
async fn advisors(
    paths: &SitesPaths,
    repositories: &[Repository],
    credentials: Option<&Credentials>,
    policies: &Arc<Policies>,
) -> Result<Vec<Advisor>> {
    let (paths, policies, credentials) = (paths.clone(), Arc::clone(policies), credentials.cloned());
    let repositories = repositories.to_vec();
    blocking(move || {
        let advisor = |repository: Repository| {
            let credentials = credentials.clone();
            let authority = move || Ok(credentials.as_ref().map(Credentials::trusted));
            Advisor::new(repository, paths.clone(), Arc::clone(&policies), Box::new(authority))
        };
        repositories.into_iter().map(advisor).collect()
    })
    .await
}

/// Warns if the disk of `dir` is smaller than the configured `capacity`: the free disk space is the limit then.
fn warn_of_capacity(setting: &str, dir: &Path, capacity: u64) {
    let Ok(disk) = rustix::fs::statvfs(dir) else { return };
    if let Some(warning) = too_large(setting, capacity, disk.f_blocks.saturating_mul(disk.f_frsize)) {
        tracing::warn!(dir = %dir.display(), "{warning}");
    }
}

/// Warning for a `capacity` above the size of the disk, in bytes.
fn too_large(setting: &str, capacity: u64, disk: u64) -> Option<String> {
    let (wanted, has) = (size::show(capacity), size::show(disk));
    (capacity > disk)
        .then(|| format!("{setting} is {wanted}, but the disk has {has}: the free disk space is the limit"))
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

/// Memory share of each consumer that must not wait for another: the repositories, the exchange, the links, and files being
/// sent.
fn share(config: &Config) -> Result<u64> {
    let sharers =
        config.repositories.len() + 1 + usize::from(config.cache.is_some()) + usize::from(config.identity.is_some());
    let sharers = sharers as u64;
    let memory = config.memory.unwrap_or_else(|| Budget::default_bytes().max(MEMORY_MIN * sharers));
    if memory / sharers >= MEMORY_MIN {
        return Ok(memory / sharers);
    }
    Err(Error::usage("memory of the agent is too small")
        .expected(format!("at least {} MiB, for {sharers} shares", MEMORY_MIN * sharers / MIB))
        .got(format!("{} MiB", memory / MIB))
        .help("raise `memory`"))
}

/// Number of connections to each of `others`, and the largest window of each, that fit into `share` bytes. The windows of all
/// must fit at the same time, or some would wait for ever, plus those of one peer that switches to another transport. Memory
/// that is short reduces the number of connections, not the windows.
fn links(share: u64, others: usize, fixed: Option<usize>) -> Result<(usize, u64)> {
    let usual = PeersOptions::default();
    let others = others.max(1);
    let fit = usize::try_from(share / GOOD_WINDOW).unwrap_or(usize::MAX) / others;
    let connections = fixed.unwrap_or(fit.clamp(1, usual.connections));
    let all = (others * connections) as u64;
    // Rounded to whole MiB: the budget counts in pages, and the last window must fit, too.
    let window = (share / (all + connections as u64) / MIB * MIB).clamp(WINDOW_MIN, usual.window);
    if all * window <= share {
        return Ok((connections, window));
    }
    Err(Error::usage("memory of the agent is too small for its links")
        .expected(format!("a share of {} MiB, for {all} connections", all * window / MIB))
        .got(format!("{} MiB", share / MIB))
        .help("raise `memory`, or reduce [peers] addresses or connections"))
}

async fn tokens(config: &Config, clock: &Arc<dyn Clock>) -> Result<Option<Arc<Tokens>>> {
    let Some(file) = config.tokens.clone() else { return Ok(None) };
    let clock = Arc::clone(clock);
    Ok(Some(Arc::new(blocking(move || Tokens::open(&file, clock)).await?)))
}

/// Opens the commitments of the cache, if there is one.
async fn open_commitments(cache: Option<&Arc<Cache>>, origins: &[Repository]) -> Result<Option<Arc<Commitments>>> {
    let (Some(cache), Some(repository)) = (cache.cloned(), origins.first()) else { return Ok(None) };
    let budget = repository.budget().clone();
    blocking(move || Commitments::open(cache, budget)).await.map(|opened| Some(Arc::new(opened)))
}

/// Opens the cache that `settings` name.
async fn open_cache(settings: CacheConfig) -> Result<Arc<Cache>> {
    let CacheConfig { dir, capacity, free_floor, quotas, .. } = settings;
    let options = CacheOptions { free_floor, quotas, ..CacheOptions::new(capacity) };
    let folder = dir.clone();
    let cache = blocking(move || Cache::open(&folder, options)).await?;
    warn_of_capacity("[cache] capacity", &dir, capacity);
    Ok(Arc::new(cache))
}

/// The store of checkpoints that others hand off, if it is configured.
async fn handoff_store(config: &Config) -> Result<Option<Arc<HandoffStore>>> {
    let Some(settings) = config.handoff.clone() else { return Ok(None) };
    let (dir, capacity) = (settings.dir.clone(), settings.capacity);
    let store = blocking(move || HandoffStore::open(settings)).await?;
    warn_of_capacity("[handoff] capacity", &dir, capacity);
    Ok(Some(Arc::new(store)))
}

async fn exchange(
    config: &Config,
    share: u64,
    cache: &Arc<Cache>,
    (credentials, policies): (Option<&Credentials>, Arc<Policies>),
) -> Result<Arc<Exchange>> {
    let settings = &config.peers;
    let (identity, peers) = match credentials {
        None => (Identity::new("local", "agent")?, Peers::nobody()),
        Some(credentials) => {
            let finds = settings.registered || !settings.names.is_empty();
            let others = settings.addresses.len() + if finds { DISCOVERED_GUESS } else { 0 };
            let (connections, window) = links(share, others, settings.connections)?;
            let options = PeersOptions { transports: settings.transports, connections, window };
            (credentials.identity(), Peers::new(credentials.clone(), Budget::new(share)?, options))
        }
    };
    settings.addresses.iter().try_for_each(|address| peers.add(address))?;
    let (cache, budget, allow) = (Arc::clone(cache), Budget::new(share)?, config.allow.clone());
    let ahead = budget.carve(share / READ_AHEAD_DIVISOR).await?;
    Ok(Exchange::new(ExchangeOptions {
        identity,
        cache,
        budget,
        ahead,
        peers,
        allow,
        policies,
        limits: Limits::new(settings.limits.iter().cloned()),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capacity_above_the_disk_is_told() {
        assert_eq!(too_large("[cache] capacity", 1 << 30, 1 << 30), None);
        let warning = too_large("[cache] capacity", 3 << 30, 1 << 30).unwrap();
        assert!(warning.starts_with("[cache] capacity is 3.0 GiB, but the disk has 1.0 GiB"), "{warning}");
    }

    #[tokio::test]
    async fn all_links_fit_at_once() {
        for (memory, others) in [(64, 1), (64, 8), (64, 16), (128, 7), (128, 11), (500, 3), (2048, 30)] {
            let share = memory * MIB + 5;
            let (connections, window) = links(share, others, None).unwrap();
            assert!((1..=4).contains(&connections) && window >= WINDOW_MIN);
            let (budget, mut stored) = (Budget::new(share).unwrap(), Vec::new());
            for _ in 0..others * connections {
                let carved = futures::FutureExt::now_or_never(budget.carve(window));
                stored.push(carved.expect("there is room for the last one").unwrap());
            }
        }
        assert_eq!(links(512 * MIB, 1, None).unwrap(), (4, 64 * MIB));
        assert_eq!(links(128 * MIB, 7, None).unwrap(), (2, 8 * MIB));
        assert_eq!(links(128 * MIB, 1, Some(2)).unwrap(), (2, 32 * MIB));
        let error = links(64 * MIB, 17, None).unwrap_err();
        assert_eq!((error.kind(), error.help_text().is_some()), (crate::error::ErrorKind::Usage, true));
    }
}
