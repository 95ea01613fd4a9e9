//! Controllers: what those of one cluster share. Kueue's ([`kueue`](super::kueue)) and that of scheduling gates
//! ([`gates`](super::gates)) wait for the data of pods.
//!
//! ```text
//! access      where the API server is, whom to ask for warms, names that service accounts may wait for
//! election    of several controllers one acts
//! api_server  watches of objects, writes to them, events (metadata: what is read of that of objects)
//! gathering   what pods need in a pass, as far as rules are about them and there is room
//! needs       names and hints for it, looked up in the background -> findings
//! holds       what is missing: fetched and held by agents of the site, for all needs of the same names
//! ```
//!
//! Decisions follow from the cluster and the repository alone, so another controller can go on at any time; what it holds, it holds anew.

mod access;
mod api_server;
mod election;
mod finding;
mod gathering;
mod holds;
mod metadata;
mod needs;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::api::Api;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};

pub use self::access::ClusterAccess;
pub(super) use self::api_server::{
    ApiServer, Key, Mirror, Objects, Role, Told, Trim, cut, in_time, key, managed, name,
};
use self::election::Election;
#[cfg(test)]
pub(super) use self::finding::Progress;
pub(super) use self::finding::{Finding, SiteFinding, with_notes};
pub(super) use self::gathering::Gathering;
use self::holds::{HoldLimits, Holders, Holds};
pub(super) use self::metadata::metadata;
pub(super) use self::needs::{Need, Needs};
use super::advisor::Advisor;
use super::client::Client;
use super::counts::Count;
use super::pods::AccountRights;
use super::state::AgentState;
use crate::error::Result;
use crate::id::WriteId;

/// Interval of passes in which nothing is heard of the cluster.
const PASS_EVERY: Duration = Duration::from_secs(5);
/// Time in which changes are gathered for one pass.
const GATHER: Duration = Duration::from_millis(20);

/// Controller of an agent, which acts while it is elected.
pub(super) struct Controller {
    pub(super) agent: Arc<AgentState>,
    pub(super) rights: AccountRights,
    pub(super) own_site: String,
    access: ClusterAccess,
    role: Role,
    client: kube::Client,
    /// The agent, for warms.
    warms: Client,
    /// Name of this process among those that take part in the election.
    own: String,
}

impl Controller {
    /// A controller for the cluster that `access` names; the agent listens at `socket`.
    ///
    /// # Errors
    /// Usage or not found, for a kubeconfig that cannot be used, or if this is no pod of a cluster.
    pub(super) async fn new(
        agent: &Arc<AgentState>,
        (access, role): (ClusterAccess, Role),
        socket: &Path,
    ) -> Result<Self> {
        agent.advisor(agent.origin(None)?)?;
        let own = agent.credentials()?.identity();
        let trust_domain = access.trust_domain.clone().unwrap_or_else(|| own.site().to_owned());
        let (client, namespace) = access.connect(role.section).await?;
        let access = ClusterAccess { namespace: access.namespace.clone().or(Some(namespace)), ..access };
        Ok(Self {
            agent: Arc::clone(agent),
            rights: AccountRights { rules: access.allow.clone(), trust_domain },
            own_site: own.site().to_owned(),
            own: format!("{}-{}", own.path(), WriteId::random()),
            warms: Client::at(socket),
            access,
            role,
            client,
        })
    }

    /// Takes part in the election, and runs `act` while it is won, until the agent shuts down. `leads` is 1 meanwhile; `waiting` is 0
    /// otherwise.
    pub(super) async fn run<F>(&self, (leads, waiting): (&Count, &Count), act: impl Fn() -> F + Sync)
    where
        F: Future<Output = Result<()>> + Send,
    {
        let namespace = self.access.namespace.as_deref().unwrap_or("default");
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), namespace);
        let process = (self.own.clone(), self.access.lease);
        let mut election = Election::new(Arc::clone(&self.agent), (leases, self.role), process);
        let (leaving, task) = (self.agent.leaving.clone(), self.role.task);
        let acted = Box::pin(async {
            loop {
                election.win().await;
                tracing::info!("this agent {task}");
                leads.set(1);
                tokio::select! {
                    () = election.hold() => tracing::warn!("another agent may be the one that {task}"),
                    acted = act() => {
                        if let Err(error) = acted {
                            tracing::error!("this agent cannot be the one that {task}: {error:?}");
                        }
                    }
                }
                leads.set(0);
                waiting.set(0);
            }
        });
        let _: Option<()> = leaving.run_until_cancelled(acted).await;
        election.release().await;
    }

    /// The API server of the cluster.
    pub(super) fn server(&self) -> ApiServer {
        ApiServer::new(Arc::clone(&self.agent), self.client.clone(), &self.own, self.role)
    }

    /// Needs of pods, and who has them fetched and held: what is missing, and with `holds_all` what is there as well. It counts as in
    /// use until `stays` has passed since pods waited for it.
    ///
    /// # Errors
    /// Not found, if the agent has no repository.
    pub(super) fn needs(&self, holds_all: bool, stays: Duration) -> Result<Needs> {
        let (client, agents) = (self.warms.clone(), self.access.holders.clone());
        let holders = Holders { client, agents, repository: self.agent.origin(None)?.id() };
        let limits = HoldLimits { warms: self.access.warms, held: self.access.held_names, stays };
        let (agent, holds) = (Arc::clone(&self.agent), Holds::new(holders, limits));
        Ok(Needs::new(agent, self.rights.clone(), (self.role.section, holds_all), holds))
    }

    /// Advisor of the agent's first repository.
    ///
    /// # Errors
    /// Not found, if the agent gives no hints.
    pub(super) fn advisor(&self) -> Result<&Advisor> {
        self.agent.advisor(self.agent.origin(None)?)
    }
}

/// Returns when something has changed, or at `due`.
pub(super) async fn next_pass(changes: &mut watch::Receiver<u64>, due: Option<Instant>) {
    let latest = Instant::now() + PASS_EVERY;
    // The sender outlives all passes.
    let _ = timeout_at(due.map_or(latest, |due| due.min(latest)), changes.changed()).await;
    sleep(GATHER).await;
}
