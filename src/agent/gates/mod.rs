//! Controller of scheduling gates: a pod that the webhook has given one is scheduled once its data is at its site (docs/deploy.md,
//! "Pods that wait for their data").
//!
//! ```text
//! pods      pods without a node, as the API server shows them
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
use tokio::task::JoinSet;
use tokio::time::Instant;

pub use self::config::GatesConfig;
use self::decision::{Decision, decide};
use self::pods::{PendingPod, PodWait};
use super::controller::{
    ApiServer, Controller, Finding, Gathering, Key, Mirror, Need, Needs, Objects, Role, SiteFinding, Told, key,
    managed, name, next_pass,
};
use super::counts::GateCounts;
use super::pods::{GATE, ServiceAccount};
use super::state::AgentState;
use crate::backoff::Backoff;
use crate::error::Result;

/// Names of the controller.
const ROLE: Role = Role {
    section: "gates",
    lease: "towline-gates",
    reporter: "towline.dev/gates",
    election: "gates, election",
    watches: "gates, watches",
    writes: "gates, writes",
    task: "opens the scheduling gates of pods",
};
/// Pods that are watched: those without a node, with a gate or not.
const UNSCHEDULED: &str = "spec.nodeName=,status.phase=Pending";
/// Manager of the fields that the controller writes.
const MANAGER: &str = "towline";
/// Writes to the API server at a time: of gates, and of events.
const WRITES: usize = 16;
/// Pause before the same event about a pod is written again.
const TELL_AGAIN: Duration = Duration::from_mins(10);
/// Pauses after the API server has refused to open a gate.
const REFUSED: Backoff = Backoff::new(Duration::from_secs(2), Duration::from_mins(5));
/// Time in which the watch shows what was written.
const UNSEEN: Duration = Duration::from_secs(5);
/// Time for which the data of a pod is held once it has a node: until it reads.
const STARTS_WITHIN: Duration = Duration::from_mins(15);

/// The controller.
pub(super) struct GatesController {
    controller: Controller,
    config: GatesConfig,
}

/// Pods that wait, and what was done for them.
struct Gates<'a> {
    server: Arc<ApiServer>,
    needs: Needs,
    own_site: &'a str,
    admit_after: Option<Duration>,
    /// Versions of pods that were written to, and when.
    written: BTreeMap<Key, (String, Instant)>,
    /// Gates that the API server refuses to open, and when to try again.
    refused: BTreeMap<Key, (Instant, Backoff)>,
    /// Last events about pods, and when.
    told: BTreeMap<Key, (&'static str, &'static str, Instant)>,
    /// Events that are being written. A slow API server makes no pod wait.
    tells: JoinSet<()>,
}

/// A pod without a node, with its need, or why it can have none.
type Pending = (Arc<PendingPod>, Result<Option<Arc<Need>>, SiteFinding>);

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
        let (server, pods) = (Arc::new(self.controller.server()), Mirror::<PendingPod>::of_fields(UNSCHEDULED));
        let mut gates = Gates {
            server: Arc::clone(&server),
            needs: self.controller.needs(true, STARTS_WITHIN)?,
            own_site: &self.controller.own_site,
            admit_after: self.config.admit_after,
            written: BTreeMap::new(),
            refused: BTreeMap::new(),
            told: BTreeMap::new(),
            tells: JoinSet::new(),
        };
        let opens = async {
            let mut changes = server.changed.subscribe();
            loop {
                next_pass(&mut changes, gates.needs.due()).await;
                if let Some(seen) = pods.seen() {
                    gates.pass(&seen, counts).await;
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
    async fn pass(&mut self, pods: &Objects<PendingPod>, counts: &GateCounts) {
        self.written.retain(|key, _| pods.contains_key(key));
        self.refused.retain(|key, _| pods.contains_key(key));
        self.told.retain(|key, _| pods.contains_key(key));
        let unended = pods.values().filter(|pod| pod.metadata.deletion_timestamp.is_none());
        let mut unended: Vec<_> = unended.collect();
        // The longest wait first.
        unended.sort_by_cached_key(|pod| pod.metadata.creation_timestamp.as_ref().map(|created| created.0));
        let mut gathering = self.needs.gathering();
        let pending: Vec<Pending> = unended.into_iter().map(|pod| self.pending(pod, &mut gathering)).collect();
        counts.waiting.set(pending.iter().filter(|(pod, _)| pod.waits()).count() as u64);
        // Pods that have a node by now have waited shortly before.
        self.needs.look_up(gathering, BTreeSet::new).await;
        let waiting = pending.into_iter().filter(|(pod, _)| pod.waits());
        let decided = waiting.filter_map(|one| Some((self.decision(&one)?, one.0)));
        let (opens, tells): (Vec<_>, Vec<_>) = decided.partition(|(decision, _)| decision.opens);
        let server = &self.server;
        let writes = iter(opens).map(|(decision, pod)| async move {
            let opened = open(server, &pod).await;
            (decision, pod, opened)
        });
        let written: Vec<_> = writes.buffer_unordered(WRITES).collect().await;
        for (decision, pod, opened) in written {
            self.note(&pod, decision, opened, counts);
        }
        for (decision, pod) in tells {
            self.tell(&pod, decision);
        }
    }

    /// Notes the outcome of a write.
    fn note(&mut self, pod: &Arc<PendingPod>, decision: Decision, opened: Result<bool>, counts: &GateCounts) {
        let (key, version) = (key(&**pod), version(pod));
        match opened {
            Ok(opened) => {
                self.refused.remove(&key);
                self.written.insert(key, (version, Instant::now()));
                if opened {
                    counts.opened.add_one();
                    self.tell(pod, decision);
                }
            }
            Err(error) => {
                let (due, pauses) = self.refused.entry(key).or_insert((Instant::now(), REFUSED));
                *due = Instant::now() + pauses.pause();
                let note = format!("the gate cannot be opened: {error}; {}", decision.note);
                self.tell(pod, Decision { warns: true, reason: "GateNotOpened", note, ..decision });
            }
        }
    }

    /// Decision on a pod; none if nothing is known yet, if the watch does not show yet what was written, or after a refusal.
    fn decision(&self, (pod, need): &Pending) -> Option<Decision> {
        let key = key(&**pod);
        let written = self.written.get(&key);
        if written.is_some_and(|(written, at)| *written == version(pod) && at.elapsed() < UNSEEN)
            || self.refused.get(&key).is_some_and(|(due, _)| *due > Instant::now())
        {
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

    /// A pod with its need; none if it names no data, or does not ask to wait any more.
    fn pending(&self, pod: &Arc<PendingPod>, gathering: &mut Gathering) -> Pending {
        let site = |wanted: Option<&String>| wanted.cloned().unwrap_or_else(|| self.own_site.to_owned());
        let need = match &pod.wanted {
            None => Ok(None),
            Some(Ok(PodWait { names, site: wanted })) => {
                let namespace = pod.metadata.namespace.clone().unwrap_or_default();
                let account = ServiceAccount { namespace, name: pod.account().to_owned() };
                let site = site(wanted.as_ref());
                // Since when names are absent does not count.
                gathering.add(Need { account, names: names.clone(), site }, Duration::ZERO).map(Some)
            }
            Some(Err(text)) => {
                let finding = Finding::Malformed(text.clone());
                Err(SiteFinding { site: site(None), finding, notes: Vec::new() })
            }
        };
        (Arc::clone(pod), need)
    }

    /// Tells of a pod in an event: at once if that is new, else now and then, as long as few are being written.
    fn tell(&mut self, pod: &Arc<PendingPod>, decision: Decision) {
        while self.tells.try_join_next().is_some() {}
        let Decision { warns, reason, action, note, .. } = decision;
        let known = self.told.get(&key(&**pod));
        let is_known =
            known.is_some_and(|known| (known.0, known.1) == (reason, action) && known.2.elapsed() < TELL_AGAIN);
        if is_known || self.tells.len() >= WRITES {
            return;
        }
        self.told.insert(key(&**pod), (reason, action, Instant::now()));
        let type_ = if warns { EventType::Warning } else { EventType::Normal };
        let (server, pod) = (Arc::clone(&self.server), Arc::clone(pod));
        self.tells.spawn(async move {
            server.tell(&*pod, Told { type_, action, reason, note: &note, secondary: None }).await;
        });
    }
}

/// Removes the gate of a pod; false if the pod has changed meanwhile, or is gone.
///
/// # Errors
/// Unreachable, if the API server refuses it, or does not answer.
async fn open(server: &ApiServer, pod: &PendingPod) -> Result<bool> {
    // An item of a list that merges by `name` (<https://github.com/kubernetes/api/blob/v0.35.0/core/v1/types.go>, `SchedulingGates`).
    let patch = json!({
        "metadata": { "uid": pod.metadata.uid, "resourceVersion": pod.metadata.resource_version },
        "spec": { "schedulingGates": [{ "$patch": "delete", "name": GATE }] },
    });
    let api = server.any::<PendingPod>(pod.metadata.namespace.as_deref());
    let parameters = PatchParams { force: false, ..managed(MANAGER) };
    server.written(api.patch(name(pod), &parameters, &Patch::Strategic(patch))).await
}

fn version(pod: &PendingPod) -> String {
    pod.metadata.resource_version.clone().unwrap_or_default()
}
