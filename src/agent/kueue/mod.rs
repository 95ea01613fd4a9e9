//! Controller for Kueue: workloads start once their data is there, and where it costs least (docs/placement.md, "Kueue").
//!
//! ```text
//! cluster   watches of workloads, checks, flavors and clusters; writes to them
//! checks    workloads that wait for an admission check -> needs -> decision -> state of the check
//! needs     names and hints for the pods, looked up in the background
//! holds     what is missing: fetched and held by agents of the site, for all needs of the same names
//! dispatch  clusters that are nominated for MultiKueue, by hint (managed: as a part of what Kueue applies)
//! election  of several controllers one acts
//! ```
//!
//! Decisions follow from the cluster and the repository alone, so another controller can go on at any time; what it holds, it holds anew.

mod checks;
mod cluster;
mod config;
mod decision;
mod dispatch;
mod election;
mod holds;
mod managed;
mod needs;
mod objects;

use std::future::pending;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::api::Api;
use kube::config::{KubeConfigOptions, Kubeconfig};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};

use self::checks::Checks;
use self::cluster::Cluster;
pub use self::config::KueueConfig;
use self::decision::Limits;
use self::dispatch::Dispatcher;
use self::election::Election;
use self::holds::{Holders, Holds};
use self::needs::Needs;
use super::client::Client;
use super::counts::KueueCounts;
use super::pods::AccountRights;
use super::state::AgentState;
use crate::error::{Error, Result};
use crate::id::WriteId;

/// Interval of passes in which nothing is heard of the cluster.
const PASS_EVERY: Duration = Duration::from_secs(5);
/// Time in which changes are gathered for one pass.
const GATHER: Duration = Duration::from_millis(20);

/// The controller.
pub(super) struct Controller {
    agent: Arc<AgentState>,
    config: KueueConfig,
    client: kube::Client,
    /// The agent, for warms.
    warms: Client,
    rights: AccountRights,
    own_site: String,
    /// Name of this process among those that take part in the election.
    own: String,
}

impl Controller {
    /// A controller for the cluster that `config` names; the agent listens at `socket`.
    ///
    /// # Errors
    /// Usage or not found, for a kubeconfig that cannot be used, or if this is no pod of a cluster.
    pub(super) async fn new(agent: &Arc<AgentState>, config: KueueConfig, socket: &Path) -> Result<Self> {
        agent.advisor(agent.origin(None)?)?;
        let own = agent.credentials()?.identity();
        let trust_domain = config.trust_domain.clone().unwrap_or_else(|| own.site().to_owned());
        let connection = connection(config.kubeconfig.as_deref()).await?;
        let config = KueueConfig {
            namespace: config.namespace.clone().or_else(|| Some(connection.default_namespace.clone())),
            ..config
        };
        let client = kube::Client::try_from(connection)
            .map_err(|source| Error::usage("cannot use the settings of the API server").source(source))?;
        Ok(Self {
            agent: Arc::clone(agent),
            rights: AccountRights { rules: config.allow.clone(), trust_domain },
            own_site: own.site().to_owned(),
            own: format!("{}-{}", own.path(), WriteId::random()),
            warms: Client::at(socket),
            client,
            config,
        })
    }

    /// Takes part in the election, and acts while it is won, until the agent shuts down.
    pub(super) async fn run(self) {
        let namespace = self.config.namespace.as_deref().unwrap_or("default");
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), namespace);
        let mut election = Election::new(Arc::clone(&self.agent), leases, self.own.clone(), self.config.lease);
        let leaving = self.agent.leaving.clone();
        let counts = self.agent.cluster.kueue.get_or_init(KueueCounts::default);
        let acted = Box::pin(async {
            loop {
                election.win().await;
                tracing::info!("this agent decides the admission checks of Kueue");
                counts.leads.set(1);
                tokio::select! {
                    () = election.hold() => tracing::warn!("another agent may decide the admission checks of Kueue"),
                    acted = self.act(counts) => {
                        if let Err(error) = acted {
                            tracing::error!("this agent cannot decide the admission checks of Kueue: {error:?}");
                        }
                    }
                }
                counts.leads.set(0);
                counts.waiting.set(0);
            }
        });
        let _: Option<()> = leaving.run_until_cancelled(acted).await;
        election.release().await;
    }

    /// Decides, until dropped.
    async fn act(&self, counts: &KueueCounts) -> Result<()> {
        let agent = || Arc::clone(&self.agent);
        let cluster = Cluster::new(agent(), self.client.clone(), &self.own, self.config.dispatch.is_some());
        let origin = self.agent.origin(None)?;
        let advisor = self.agent.advisor(origin)?;
        let (client, agents) = (self.warms.clone(), self.config.holders.clone());
        let holders = Holders { client, agents, repository: origin.id() };
        let needs = Needs::new(agent(), self.rights.clone(), Holds::new(holders, self.config.warms));
        let KueueConfig { retry_after, admit_after, .. } = self.config;
        let limits = Limits { retry_after, admit_after };
        let mut checks = Checks::new(needs, self.config.controller.clone(), self.own_site.clone(), limits);
        let decides = async {
            let mut changes = cluster.changed.subscribe();
            loop {
                next_pass(&mut changes, checks.due()).await;
                if let Some(seen) = cluster.seen() {
                    checks.pass(&cluster, &seen, (&advisor.sites().sites, counts)).await;
                }
            }
        };
        let dispatches = async {
            let Some(round) = self.config.dispatch else { return pending().await };
            let mut dispatcher = Dispatcher::new(agent(), self.rights.clone(), round);
            let mut changes = cluster.changed.subscribe();
            loop {
                next_pass(&mut changes, dispatcher.due()).await;
                if let Some(seen) = cluster.seen() {
                    dispatcher.pass(&cluster, &seen, (&advisor.sites().sites, counts)).await;
                }
            }
        };
        tokio::select! {
            () = cluster.follow() => {}
            () = decides => {}
            () = dispatches => {}
        }
        Ok(())
    }
}

/// Returns when something has changed, or at `due`.
async fn next_pass(changes: &mut watch::Receiver<u64>, due: Option<Instant>) {
    let latest = Instant::now() + PASS_EVERY;
    // The sender outlives all passes.
    let _ = timeout_at(due.map_or(latest, |due| due.min(latest)), changes.changed()).await;
    sleep(GATHER).await;
}

/// Where the API server is, and as whom to connect.
async fn connection(kubeconfig: Option<&Path>) -> Result<kube::Config> {
    let mut config = match kubeconfig {
        Some(path) => connection_by_file(path).await?,
        None => kube::Config::incluster().map_err(|source| {
            Error::not_found("[kueue] this is no pod of a cluster, or it has no token of its service account")
                .help("set automountServiceAccountToken, or `kubeconfig` outside of a cluster")
                .source(source)
        })?,
    };
    // Passes repeat what failed, and tell of it meanwhile.
    config.default_retry = false;
    Ok(config)
}

async fn connection_by_file(path: &Path) -> Result<kube::Config> {
    let malformed = || Error::usage("[kueue] kubeconfig cannot be used").at(path.display());
    let file = Kubeconfig::read_from(path).map_err(|source| malformed().source(source))?;
    let config = kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
        .await
        .map_err(|source| malformed().source(source))?;
    if config.cluster_url.scheme_str() != Some("https") {
        return Err(malformed().expected("https").got(&config.cluster_url));
    }
    Ok(config)
}
