//! Controller of scheduling gates: a pod that the webhook has given one is scheduled once its data is at its site (docs/deploy.md,
//! "Pods that wait for their data").
//!
//! ```text
//! pods      pods with the gate, as the API server shows them
//! decision  from what is known of a pod's data to whether it waits on. Pure.
//! ```

mod config;
mod decision;
mod pods;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::iter;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::runtime::events::EventType;
use serde_json::json;
use tokio::time::Instant;

pub use self::config::GatesConfig;
use self::decision::{Decision, decide};
use self::pods::GatedPod;
use super::controller::{
    ApiServer, Controller, Finding, Key, Mirror, Need, Needs, Objects, Role, SiteFinding, Told, key, managed, name,
    next_pass,
};
use super::counts::GateCounts;
use super::pods::{GATE, GATED_LABEL, PodAnnotations, ServiceAccount};
use super::state::AgentState;
use crate::error::Result;

/// Names of the controller.
const ROLE: Role = Role {
    lease: "towline-gates",
    reporter: "towline.dev/gates",
    election: "gates, election",
    watches: "gates, watches",
    writes: "gates, writes",
    task: "opens the scheduling gates of pods",
};
/// Label of the pods that are watched.
const LABELLED: &str = "towline.dev/gated=true";
/// Manager of the fields that the controller writes.
const MANAGER: &str = "towline";
/// Writes to the API server at a time.
const WRITES: usize = 16;
/// Interval of the events about one pod, at least.
const TELL_EVERY: Duration = Duration::from_secs(30);
/// Time in which the watch shows what was written.
const UNSEEN: Duration = Duration::from_secs(5);
/// Time for which the data of a pod is held once its gate is open: until it reads.
const STARTS_WITHIN: Duration = Duration::from_mins(15);

/// The controller.
pub(super) struct GatesController {
    controller: Controller,
    config: GatesConfig,
}

/// Pods that wait, and what was done for them.
struct Gates<'a> {
    needs: Needs,
    own_site: &'a str,
    admit_after: Option<Duration>,
    /// Versions of pods that were written to, and when.
    written: BTreeMap<Key, (String, Instant)>,
    /// Last events about pods, and when.
    told: BTreeMap<Key, (&'static str, Instant)>,
    /// Needs of pods whose gates were opened, and when.
    opened: BTreeMap<Need, Instant>,
}

/// A pod that waits, with its need, or why it can have none.
type Waiting = (Arc<GatedPod>, Result<Option<Need>, SiteFinding>);

impl GatesController {
    /// A controller for the cluster that `config` names; the agent listens at `socket`.
    ///
    /// # Errors
    /// As [`Controller::new`].
    pub(super) async fn new(agent: &Arc<AgentState>, config: GatesConfig, socket: &Path) -> Result<Self> {
        let controller = Controller::new(agent, (config.access.clone(), ROLE), socket).await?;
        Ok(Self { controller, config })
    }

    /// Opens gates while it is elected, until the agent shuts down.
    pub(super) async fn run(self) {
        let counts = self.controller.agent.cluster.gates.get_or_init(GateCounts::default);
        self.controller.run((&counts.leads, &counts.waiting), || self.act(counts)).await;
    }

    /// Opens gates, until dropped.
    async fn act(&self, counts: &GateCounts) -> Result<()> {
        let (server, pods) = (self.controller.server(), Mirror::<GatedPod>::labelled(LABELLED));
        let mut gates = Gates {
            needs: self.controller.needs()?,
            own_site: &self.controller.own_site,
            admit_after: self.config.admit_after,
            written: BTreeMap::new(),
            told: BTreeMap::new(),
            opened: BTreeMap::new(),
        };
        let opens = async {
            let mut changes = server.changed.subscribe();
            loop {
                next_pass(&mut changes, gates.needs.due()).await;
                if let Some(seen) = pods.seen() {
                    gates.pass(&server, &seen, counts).await;
                }
            }
        };
        tokio::select! {
            () = pods.follow(&server) => {}
            () = opens => {}
        }
        Ok(())
    }
}

impl Gates<'_> {
    /// Opens the gates of those of `pods` whose data is there, and tells of the others.
    ///
    /// # Cancel safety
    /// Safe: each write stands for itself.
    async fn pass(&mut self, server: &ApiServer, pods: &Objects<GatedPod>, counts: &GateCounts) {
        self.written.retain(|key, _| pods.contains_key(key));
        self.told.retain(|key, _| pods.contains_key(key));
        self.opened.retain(|_, at| at.elapsed() < STARTS_WITHIN);
        let mut waiting: Vec<Waiting> =
            pods.values().filter(|pod| pod.waits()).map(|pod| (Arc::clone(pod), self.need_of(pod))).collect();
        // The longest wait first.
        waiting.sort_by_cached_key(|(pod, _)| pod.age(Timestamp::now()).map_or(Duration::ZERO, |age| age));
        waiting.reverse();
        counts.waiting.set(waiting.len() as u64);
        let mut known = BTreeSet::new();
        let all = waiting.iter().filter_map(|(_, need)| need.as_ref().ok()?.as_ref());
        let needs: Vec<Need> = all.filter(|need| known.insert(*need)).cloned().collect();
        let opened: BTreeSet<Need> = self.opened.keys().cloned().collect();
        self.needs.look_up(&needs, || opened.clone()).await;
        let decided: Vec<(Waiting, Decision)> = waiting
            .into_iter()
            .filter_map(|one| Some((self.decision(&one)?, one)))
            .map(|(to, one)| (one, to))
            .collect();
        let (opens, tells): (Vec<_>, Vec<_>) = decided.into_iter().partition(|(_, decision)| decision.opens);
        let writes = iter(opens).map(|((pod, need), decision)| async move {
            open(server, &pod, &decision, counts).await.then_some((pod, need))
        });
        for (pod, need) in writes.buffer_unordered(WRITES).filter_map(async |one| one).collect::<Vec<_>>().await {
            self.written.insert(key(&*pod), (version(&pod), Instant::now()));
            if let Ok(Some(need)) = need {
                self.opened.insert(need, Instant::now());
            }
        }
        for ((pod, _), decision) in tells {
            self.tell(server, &pod, &decision).await;
        }
    }

    /// Decision on a pod; none if nothing is known yet, or if the watch does not show yet what was written.
    fn decision(&self, (pod, need): &Waiting) -> Option<Decision> {
        let written = self.written.get(&key(&**pod));
        if written.is_some_and(|(written, at)| *written == version(pod) && at.elapsed() < UNSEEN) {
            return None;
        }
        let finding = match need {
            Ok(Some(need)) => Some(self.needs.finding(need)?),
            Ok(None) => None,
            Err(finding) => Some(finding.clone()),
        };
        let age = pod.age(Timestamp::now()).unwrap_or_default();
        Some(decide(finding.as_ref(), age, self.admit_after))
    }

    /// Need of a pod; none if it names no data.
    ///
    /// # Errors
    /// Finding that its annotations are malformed.
    fn need_of(&self, pod: &GatedPod) -> Result<Option<Need>, SiteFinding> {
        let site = |wanted: Option<String>| wanted.unwrap_or_else(|| self.own_site.to_owned());
        let wanted = match PodAnnotations::of(&pod.metadata.annotations.clone().unwrap_or_default()) {
            Ok(wanted) => wanted,
            Err(error) => {
                let finding = Finding::Malformed(error.to_string());
                return Err(SiteFinding { site: site(None), finding, notes: Vec::new() });
            }
        };
        let names = wanted.names();
        if names.reads.is_empty() {
            return Ok(None);
        }
        let namespace = pod.metadata.namespace.clone().unwrap_or_default();
        let account = ServiceAccount { namespace, name: pod.account().to_owned() };
        Ok(Some(Need { account, names, site: site(wanted.warm_at) }))
    }

    /// Tells why a pod waits, in an event: at once if that is new, else now and then.
    async fn tell(&mut self, server: &ApiServer, pod: &GatedPod, decision: &Decision) {
        let known = self.told.get(&key(pod));
        if known.is_some_and(|(reason, at)| *reason == decision.reason && at.elapsed() < TELL_EVERY) {
            return;
        }
        self.told.insert(key(pod), (decision.reason, Instant::now()));
        let type_ = if decision.warns { EventType::Warning } else { EventType::Normal };
        server.tell(pod, Told { type_, reason: decision.reason, note: &decision.note, secondary: None }).await;
    }
}

/// Removes the gate of a pod, and its label; false if that must be tried again.
async fn open(server: &ApiServer, pod: &GatedPod, decision: &Decision, counts: &GateCounts) -> bool {
    // An item of a list that merges by `name` (<https://github.com/kubernetes/api/blob/v0.35.0/core/v1/types.go>, `SchedulingGates`).
    let patch = json!({
        "metadata": {
            "uid": pod.metadata.uid, "resourceVersion": pod.metadata.resource_version, "labels": { GATED_LABEL: null },
        },
        "spec": { "schedulingGates": [{ "$patch": "delete", "name": GATE }] },
    });
    let api = server.any::<GatedPod>(pod.metadata.namespace.as_deref());
    let parameters = PatchParams { force: false, ..managed(MANAGER) };
    match server.written(api.patch(name(pod), &parameters, &Patch::Strategic(patch))).await {
        Ok(true) => {}
        Ok(false) => return true,
        Err(error) => {
            tracing::debug!("cannot open the gate of a pod: {error:?}");
            return false;
        }
    }
    counts.opened.add_one();
    let type_ = if decision.warns { EventType::Warning } else { EventType::Normal };
    server.tell(pod, Told { type_, reason: decision.reason, note: &decision.note, secondary: None }).await;
    true
}

fn version(pod: &GatedPod) -> String {
    pod.metadata.resource_version.clone().unwrap_or_default()
}
