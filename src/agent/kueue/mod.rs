//! Controller for Kueue: workloads start once their data is there, and where it costs least (docs/placement.md, "Kueue").
//!
//! ```text
//! cluster   workloads, checks, flavors and clusters; writes to them
//! checks    workloads that wait for an admission check -> needs -> decision -> state of the check
//! dispatch  clusters that are nominated for MultiKueue, by hint (managed: as a part of what Kueue applies)
//! ```

mod checks;
mod cluster;
mod config;
mod decision;
mod dispatch;
mod managed;
mod objects;

use std::future::pending;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use self::checks::Checks;
use self::cluster::Cluster;
pub use self::config::KueueConfig;
use self::decision::Limits;
use self::dispatch::Dispatcher;
use super::controller::{Controller, Role, next_pass};
use super::counts::KueueCounts;
use super::state::AgentState;
use crate::error::Result;

/// Names of the controller.
const ROLE: Role = Role {
    section: "kueue",
    lease: "towline-kueue",
    reporter: "towline.dev/kueue",
    election: "Kueue, election",
    watches: "Kueue, watches",
    writes: "Kueue, writes",
    task: "decides the admission checks of Kueue",
};

/// The controller.
pub(super) struct KueueController {
    controller: Controller,
    config: KueueConfig,
}

impl KueueController {
    /// A controller for the cluster that `config` names; the agent listens at `socket`.
    ///
    /// # Errors
    /// As [`Controller::new`].
    pub(super) async fn new(agent: &Arc<AgentState>, config: KueueConfig, socket: &Path) -> Result<Self> {
        let controller = Controller::new(agent, (config.access.clone(), ROLE), socket).await?;
        Ok(Self { controller, config })
    }

    /// Decides while it is elected, until the agent shuts down.
    pub(super) async fn run(self) {
        let counts = self.controller.agent.cluster.kueue.get_or_init(KueueCounts::default);
        self.controller.run((&counts.leads, &counts.waiting), || self.act(counts)).await;
    }

    /// Decides, until dropped.
    async fn act(&self, counts: &KueueCounts) -> Result<()> {
        let Self { controller, config } = self;
        let cluster = Cluster::new(controller.server(), config.dispatch.is_some());
        let advisor = controller.advisor()?;
        let limits = Limits { retry_after: config.retry_after, admit_after: config.admit_after };
        let own_site = controller.own_site.clone();
        let mut checks =
            Checks::new(controller.needs(false, Duration::ZERO)?, config.controller.clone(), own_site, limits);
        let decides = async {
            let mut changes = cluster.server.changed.subscribe();
            loop {
                next_pass(&mut changes, checks.due()).await;
                if let Some(seen) = cluster.seen() {
                    checks.pass(&cluster, &seen, (&advisor.sites().sites, counts)).await;
                }
            }
        };
        let dispatches = async {
            let Some(round) = config.dispatch else { return pending().await };
            let mut dispatcher = Dispatcher::new(Arc::clone(&controller.agent), controller.rights.clone(), round);
            let mut changes = cluster.server.changed.subscribe();
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
