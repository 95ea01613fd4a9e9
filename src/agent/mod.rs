//! The agent: a daemon on a node with a cache, repositories, links to other agents, and an API on a Unix socket and on
//! loopback.
//!
//! ```text
//! config -> state (repositories, cache, exchange, tasks) -> api (HTTP API, peers)
//! client    client of the API
//! tokens    rights of processes that get part of what this node's user may do
//! sidecar   inputs, watches and preemption of a training
//! staged    tensors in memory for the processes of the node
//! handoff   checkpoints of agents that may be shut down before they can save them
//! webhook   sidecars and certificates for pods of Kubernetes (pods: their annotations and rights)
//! kueue     admission checks and clusters for the workloads of Kueue (controller: the election, watches and warms of controllers)
//! gates     pods with a scheduling gate start once their data is there
//! ```
//!
//! Shutdown: refuse new tasks, let running ones finish within the grace period, stop the rest, close listeners.

pub mod advisor;
mod api;
mod audit;
mod cache_folder;
mod client;
mod commands;
mod commitments;
mod config;
mod controller;
mod counts;
mod dial;
mod file_windows;
mod files;
mod folders;
mod gates;
mod handoff;
mod head_limits;
mod inventory;
mod kube;
mod kueue;
mod metrics;
mod open_trees;
mod page;
mod pods;
mod preemption;
mod problems;
mod redact;
mod requester;
mod restart;
mod routing;
mod rules;
mod service_account;
mod shares;
mod sidecar;
mod skypilot;
mod slurm;
mod socket;
mod staged;
mod state;
mod tasks;
mod tokens;
mod usage;
mod user;
mod user_rules;
pub mod view;
mod warm;
mod webhook;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use futures::FutureExt as _;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::timeout;

use self::api::{Caller, Callers, Local, OpenPaths, router, serve};
use self::audit::Publication;
pub use self::client::Client;
pub use self::commands::command_log;
pub use self::config::{
    Accepts, AuditConfig, CacheConfig, CallerPins, Config, HandoffConfig, PeersConfig, RestoredInput, SenderQuota,
    SidecarConfig, StagingConfig, WatchedFolder,
};
pub use self::controller::ClusterAccess;
pub use self::gates::GatesConfig;
use self::gates::GatesController;
use self::handoff::{ReceiverOptions, run_receiver};
pub use self::kueue::KueueConfig;
use self::kueue::KueueController;
pub use self::page::PageServer;
pub use self::pods::AccountRule;
pub use self::preemption::Provider;
use self::restart::once_released;
pub use self::routing::AgentSelector;
pub use self::service_account::ServiceAccountConfig;
use self::slurm::SlurmHints;
use self::socket::Claimed;
pub use self::socket::well_known;
pub use self::staged::{StageReport, StageRequest, StagedMemory};
use self::state::AgentState;
use self::usage::UsagePublication;
pub use self::user::user_name;
pub use self::warm::{Pinning, WarmOptions, Warmed, warm};
pub use self::webhook::{IssuerConfig, SidecarIdentity, SidecarTemplate, WebhookConfig};
use crate::error::{Error, Result};
use crate::ops::Stop;
use crate::transfer::exchange::Exchange;
use crate::transfer::identity::seed_random_generator;
use crate::transfer::peers::discover;
use crate::transfer::{self, ServedChunks, not_bound};
use crate::work::on_own_thread;

/// Protocol that a connection is upgraded to, to transfer chunks.
const PROTOCOL: &str = "towline";
/// Header with which a request selects another agent and a response names the agent that answered.
const AT: &str = "towline-at";
/// Fraction of the grace period that watches may use.
const WATCH_GRACE_FRACTION: f64 = 0.9;
/// Time that stopped tasks and open connections have to end.
const SHUTDOWN_MAX: Duration = Duration::from_secs(3);

/// A running agent.
#[derive(Debug)]
pub struct Agent {
    state: Arc<AgentState>,
    api: JoinSet<()>,
    socket: PathBuf,
    http: Option<SocketAddr>,
    listen: Option<SocketAddr>,
    webhook: Option<SocketAddr>,
    grace: Duration,
    /// Reports of what it has moved, if it publishes any.
    usage: Option<UsagePublication>,
    /// The audit log's heads, if decisions are recorded.
    publication: Option<Publication>,
    /// Last field: the socket's file is removed after everything else has been dropped.
    _claimed: Claimed,
}

impl Agent {
    /// Opens everything that `config` names, and starts the API. Needs a runtime.
    ///
    /// # Errors
    /// Conflict, if another agent has the socket, or another process the port or the cache, for three seconds: a process that was
    /// killed still holds them for a moment; not found, for a missing repository; usage, denied or exhausted, as the parts report.
    ///
    /// # Cancel safety
    /// Safe: only empty folders may be left.
    pub async fn start(config: Config) -> Result<Self> {
        seed_random_generator();
        // Opens the socket first: only one agent can hold it.
        let (claimed, unix) = once_released("the socket", async || Claimed::listen(&config.socket)).await?;
        let tcp = match config.http {
            Some(address) => Some(once_released("the port of `http`", || listen(address)).await?),
            None => None,
        };
        let token = if tcp.is_some() { Some(socket::write_token(&config.socket)?) } else { None };
        if let Some(account) = &config.service_account {
            Box::pin(account.obtain()).await?;
        }
        let state = Arc::new(AgentState::open(&config).await?);
        let handoff_senders = config.handoff.as_ref().map(|handoff| handoff.accept.clone()).unwrap_or_default();
        let token_file = socket::token_path(&config.socket);
        let token = token.as_deref().map(|token| (token, token_file.as_path()));
        let router = router(
            Arc::clone(&state),
            token,
            OpenPaths {
                metrics: config.open_metrics,
                kube: !config.kube.0.is_empty(),
                skypilot: !config.skypilot.0.is_empty(),
            },
            Callers { api_clients: config.callers, handoff_senders, scrapers: config.scrapers },
        );
        let (mut api, leaving) = (JoinSet::new(), state.leaving.clone());
        let listen = match config.listen {
            Some(address) => Some(open_to_peers(&state, address, &router, &mut api).await?),
            None => None,
        };
        if let (Some(discovery), Ok(exchange)) = (state.discovery(&config.peers), state.exchange()) {
            api.spawn(discover(Arc::clone(exchange.peers()), discovery, leaving.clone()));
        }
        let http = match tcp {
            Some(listener) => {
                let address = listener.local_addr().ok();
                api.spawn(serve(listener, |_| Caller::Loopback, router.clone(), leaving.clone()));
                address
            }
            None => None,
        };
        api.spawn(serve(Local(unix), Caller::Socket, router, leaving.clone()));
        if let Some((store, handoff)) = state.store.clone().zip(config.handoff) {
            let options = ReceiverOptions { wait: handoff.wait, tries: handoff.tries };
            let receiver = run_receiver(Arc::clone(&state), store, options);
            api.spawn(leaving.clone().run_until_cancelled_owned(receiver).map(drop));
        }
        let of_cluster = OfCluster { webhook: config.webhook, kueue: config.kueue, gates: config.gates };
        let webhook = Box::pin(begin_for_cluster(&state, of_cluster, &config.socket, &mut api)).await?;
        begin_jobs(&state, config.cache.as_ref(), (config.slurm, config.service_account), &mut api);
        let usage = config.cache.as_ref().map(|cache| cache.usage).filter(|every| !every.is_zero());
        let usage = usage.and_then(|every| UsagePublication::begin(&state, every));
        let publication = Publication::begin(&state, config.audit.as_ref());
        sidecar::begin(&state, config.sidecar, &mut api)?;
        tracing::info!(socket = %config.socket.display(), "agent is running");
        Ok(Self {
            state,
            api,
            socket: config.socket,
            http,
            listen,
            webhook,
            grace: config.grace,
            usage,
            publication,
            _claimed: claimed,
        })
    }

    /// Path of the socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Loopback address of its API, if it has one.
    #[must_use]
    pub fn http(&self) -> Option<SocketAddr> {
        self.http
    }

    /// Address for other agents, if they may connect.
    #[must_use]
    pub fn listens(&self) -> Option<SocketAddr> {
        self.listen
    }

    /// Address of its webhook, if it has one.
    #[must_use]
    pub fn webhook(&self) -> Option<SocketAddr> {
        self.webhook
    }

    /// Shuts down: refuses new tasks, waits for running ones for the grace period or until `hurry`, stops the rest, closes listeners.
    ///
    /// # Errors
    /// Cancelled, if tasks failed or had to be stopped; the error names them.
    ///
    /// # Cancel safety
    /// Safe, but without a graceful shutdown, as if the process were killed.
    pub async fn shut_down(mut self, hurry: impl Future<Output = ()>) -> Result<()> {
        tracing::info!(grace = ?self.grace, "agent is shutting down");
        let (tasks, grace) = (&self.state.tasks, self.state.time_left(self.grace));
        tasks.close();
        // Watches stop by themselves shortly before the deadline.
        self.state.stop.send_replace(Stop::Within { grace: grace.mul_f64(WATCH_GRACE_FRACTION), linger: true });
        let under_way = tasks.running();
        tokio::select! {
            () = tasks.ended() => {}
            () = tokio::time::sleep(grace) => {}
            () = hurry => {}
        }
        under_way.iter().for_each(|task| task.stop());
        // Tasks that do not stop in time end with the process.
        let _ = timeout(SHUTDOWN_MAX, tasks.ended()).await;
        self.state.leaving.cancel();
        self.state.local_readers.close();
        let closed = async {
            self.state.local_readers.wait().await;
            while self.api.join_next().await.is_some() {}
        };
        let _ = timeout(SHUTDOWN_MAX, closed).await;
        if let Some(usage) = self.usage.take() {
            usage.end().await;
        }
        if let Some(publication) = self.publication.take() {
            publication.end().await;
        }
        if let Ok(cache) = self.state.cache() {
            // Work that does not stop may hold all threads for blocking work.
            let synced = on_own_thread("sync", move || cache.sync()).await;
            synced.map_err(|error| {
                error.help("what was cached last is fetched again after a restart; free space on the cache's disk")
            })?;
        }
        let lost: Vec<String> = under_way.iter().filter_map(|task| task.not_done()).collect();
        if lost.is_empty() {
            return Ok(());
        }
        Err(Error::cancelled("agent shut down before all tasks were done")
            .got(lost.join("; "))
            .help("start them again: they resume; or raise `grace`"))
    }
}

/// Parts of an agent for a cluster of Kubernetes.
struct OfCluster {
    webhook: Option<Box<WebhookConfig>>,
    kueue: Option<Box<KueueConfig>>,
    gates: Option<Box<GatesConfig>>,
}

/// Starts what the API server of a Kubernetes cluster calls, and what calls it. Returns the address of the webhook.
async fn begin_for_cluster(
    state: &Arc<AgentState>,
    of_cluster: OfCluster,
    socket: &Path,
    api: &mut JoinSet<()>,
) -> Result<Option<SocketAddr>> {
    if let Some(kueue) = of_cluster.kueue {
        api.spawn(KueueController::new(state, *kueue, socket).await?.run());
    }
    if let Some(gates) = of_cluster.gates {
        api.spawn(GatesController::new(state, *gates, socket).await?.run());
    }
    match of_cluster.webhook {
        Some(webhook) => webhook::begin(state, *webhook, api).await.map(Some),
        None => Ok(None),
    }
}

/// Starts the background jobs that end with the API.
fn begin_jobs(
    state: &Arc<AgentState>,
    cache: Option<&CacheConfig>,
    (slurm_hints, account): (Option<SlurmHints>, Option<ServiceAccountConfig>),
    api: &mut JoinSet<()>,
) {
    let leaving = &state.leaving;
    if let (Some(account), Ok(credentials)) = (account, state.credentials()) {
        let renewed = account.renew(credentials.clone());
        api.spawn(leaving.clone().run_until_cancelled_owned(renewed).map(drop));
    }
    api.spawn(leaving.clone().run_until_cancelled_owned(Arc::clone(&state.rules).poll()).map(drop));
    if let Some(every) = cache.map(|cache| cache.inventory).filter(|every| !every.is_zero()) {
        api.spawn(inventory::run(Arc::clone(state), every));
        let samples = advisor::samples::run(Arc::clone(state), every);
        api.spawn(leaving.clone().run_until_cancelled_owned(samples).map(drop));
    }
    if let Some(hints) = slurm_hints {
        api.spawn(leaving.clone().run_until_cancelled_owned(slurm::run(Arc::clone(state), hints)).map(drop));
    }
    if cache.is_some() {
        api.spawn(leaving.clone().run_until_cancelled_owned(cache_folder::watch(Arc::clone(state))).map(drop));
    }
    if let Ok(trees) = state.staged() {
        api.spawn(leaving.clone().run_until_cancelled_owned(Arc::clone(trees).expire_regularly()).map(drop));
    }
    api.spawn(leaving.clone().run_until_cancelled_owned(commitments::resume(Arc::clone(state))).map(drop));
}

/// Listens for other agents at `address`, on the same port over TCP and QUIC. TCP also carries calls of the API.
async fn open_to_peers(
    state: &AgentState,
    address: SocketAddr,
    router: &Router,
    api: &mut JoinSet<()>,
) -> Result<SocketAddr> {
    let credentials = state.credentials()?;
    let exchange = state.exchange()?;
    let (tcp, quic) = once_released("the port of `listen`", || transfer::listen(address, credentials)).await?;
    let (mut tcp, quic) = (tcp.through(state.gate.clone()), quic.through(state.gate.clone()));
    let address = tcp.address()?;
    let (served_chunks, leaving): (Arc<dyn ServedChunks>, _) =
        (Arc::<Exchange>::clone(exchange), state.leaving.clone());
    api.spawn(serve(tcp.take_calls(), Caller::Remote, router.clone(), leaving.clone()));
    api.spawn(quic.serve(Arc::clone(&served_chunks), leaving.clone()).map(ended));
    api.spawn(tcp.serve(served_chunks, leaving).map(ended));
    Ok(address)
}

/// Logs the error of a listener that ends unexpectedly.
fn ended(result: Result<()>) {
    if let Err(error) = result {
        tracing::error!("stopped serving other agents: {error:?}");
    }
}

async fn listen(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|source| not_bound(source, address))
}
