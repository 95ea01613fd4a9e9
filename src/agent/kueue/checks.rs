//! Admission checks: each workload that waits for one gets the state that its data has.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::iter;
use k8s_openapi::jiff::Timestamp;
use kube::runtime::events::EventType;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::cluster::{Cluster, Key, Objects, Seen, Told};
use super::decision::{Decision, SiteFinding, Waited, decide};
use super::needs::{Need, Needs};
use super::objects::{AdmissionCheck, AdmissionCheckState, CheckState, PodSet, Workload};
use crate::agent::counts::KueueCounts;
use crate::agent::kube::site_of_labels;
use crate::agent::pods::ServiceAccount;
use crate::placement::Sites;

/// `controllerName` of the checks that this controller decides.
pub(super) const CONTROLLER: &str = "towline.dev/warm";
/// Writes to the API server at a time.
pub(super) const WRITES: usize = 16;
/// Writes of progress a second, of all workloads.
const PROGRESS_RATE: u32 = 20;
/// Interval of the writes of progress of one workload, at least.
const PROGRESS_EVERY: Duration = Duration::from_secs(10);
/// Time in which the watch shows what was written, or why it conflicted.
const UNSEEN: Duration = Duration::from_secs(5);
/// Beginning of the annotations that say what a pod needs.
const ANNOTATIONS: &str = "towline.dev/";

/// Decides the checks of workloads.
pub(super) struct Checks {
    needs: Needs,
    /// Site of this cluster, for pods whose nodes name none.
    own_site: String,
    admit_after: Option<Duration>,
    /// Versions of objects that were written to, and when: what was seen of them is old until the watch shows the next.
    written: BTreeMap<Key, (String, Instant)>,
}

/// A workload that waits for a check.
struct Waiting {
    workload: Arc<Workload>,
    check: AdmissionCheckState,
    needs: Vec<Need>,
}

/// A new state of a check, to be written.
struct Change {
    waiting: Waiting,
    decision: Decision,
}

impl Checks {
    pub(super) fn new(needs: Needs, own_site: String, admit_after: Option<Duration>) -> Self {
        Self { needs, own_site, admit_after, written: BTreeMap::new() }
    }

    /// Brings the checks up to date with what was `seen`.
    ///
    /// # Cancel safety
    /// Safe: each write stands for itself.
    pub(super) async fn pass(&mut self, cluster: &Cluster, seen: &Seen, (sites, counts): (&Sites, &KueueCounts)) {
        let own: BTreeSet<&str> = self.activate(cluster, &seen.checks).await;
        let waiting = self.waiting(seen, &own, sites);
        counts.waiting.set(waiting.len() as u64);
        // The longest wait first.
        let mut needs: Vec<&Need> = Vec::new();
        let mut known = BTreeSet::new();
        let all = waiting.iter().flat_map(|waiting| &waiting.needs);
        needs.extend(all.filter(|need| known.insert(*need)));
        let needs: Vec<Need> = needs.into_iter().cloned().collect();
        self.needs.look_up(&needs).await;
        let writes = iter(self.changes(waiting)).map(|change| async move {
            let (key, version) = version_of(&change.waiting.workload);
            write(cluster, &change, counts).await.then(|| (key, (version, Instant::now())))
        });
        let written: Vec<_> = writes.buffer_unordered(WRITES).collect().await;
        self.written.extend(written.into_iter().flatten());
        self.written.retain(|key, _| seen.workloads.contains_key(key));
    }

    /// Time of the next look at a workload's data.
    pub(super) fn due(&self) -> Option<Instant> {
        self.needs.due()
    }

    /// Tells Kueue that its checks of this controller are active; returns their names.
    async fn activate<'a>(&self, cluster: &Cluster, checks: &'a Objects<AdmissionCheck>) -> BTreeSet<&'a str> {
        let mut own = BTreeSet::new();
        for ((_, name), check) in checks.iter().filter(|(_, check)| check.spec.controller_name == CONTROLLER) {
            let condition = match &check.spec.parameters {
                None => ("True", "Active", "The controller decides by the data of workloads".to_owned()),
                Some(parameters) => {
                    let got = format!("{} {}", parameters.kind, parameters.name);
                    ("False", "BadParametersRef", format!("The check takes no parameters, but refers to {got}"))
                }
            };
            let (status, reason, message) = (condition.0, condition.1, &condition.2);
            if status == "True" {
                own.insert(name.as_str());
            }
            let generation = check.metadata.generation;
            let before = check.active();
            let same = |known: &super::objects::Condition| {
                known.status == status && known.reason == reason && known.message == *message
            };
            if before.is_some_and(|known| same(known) && known.observed_generation == generation) {
                continue;
            }
            let kept =
                before.filter(|known| known.status == status).and_then(|known| known.last_transition_time.clone());
            let status = json!({ "conditions": [{
                "type": "Active", "status": status, "reason": reason, "message": message,
                "observedGeneration": generation, "lastTransitionTime": kept.unwrap_or_else(now),
            }] });
            if let Err(error) = cluster.apply_status(&**check, &status).await {
                tracing::debug!("cannot tell that the admission check {name} is active: {error}");
            }
        }
        own
    }

    /// Workloads that wait for one of the checks `own`, those that wait the longest first.
    fn waiting(&self, seen: &Seen, own: &BTreeSet<&str>, sites: &Sites) -> Vec<Waiting> {
        let mine =
            |check: &&AdmissionCheckState| check.state == CheckState::Pending && own.contains(check.name.as_str());
        let mut waiting = Vec::new();
        for workload in seen.workloads.values().filter(|workload| workload.waits()) {
            for check in workload.checks().iter().filter(mine) {
                let needs = self.needs_of(workload, seen, sites);
                waiting.push(Waiting { workload: Arc::clone(workload), check: check.clone(), needs });
            }
        }
        waiting.sort_by_cached_key(|waiting| since(&waiting.workload).unwrap_or_default());
        waiting
    }

    /// Needs of the pods of a workload, by the sites of the flavors that they were assigned.
    fn needs_of(&self, workload: &Workload, seen: &Seen, sites: &Sites) -> Vec<Need> {
        let namespace = workload.metadata.namespace.as_deref().unwrap_or_default();
        let need = |pod_set: &PodSet| {
            let mut annotations = pod_set.template.annotations();
            annotations.retain(|key, _| key.starts_with(ANNOTATIONS));
            if annotations.is_empty() {
                return None;
            }
            let flavors = workload.flavors(&pod_set.name);
            let flavors = flavors.filter_map(|flavor| seen.flavors.get(&(String::new(), flavor.to_owned())));
            let labels = flavors.filter_map(|flavor| flavor.spec.node_labels.as_ref());
            let site = labels.chain(pod_set.template.node_selector()).find_map(|labels| site_of_labels(labels, sites));
            let site = site.unwrap_or(&self.own_site).to_owned();
            let account =
                ServiceAccount { namespace: namespace.to_owned(), name: pod_set.template.account().to_owned() };
            Some(Need { account, annotations, site })
        };
        workload.pod_sets().iter().filter_map(need).collect()
    }

    /// Changes to what the checks say.
    fn changes(&self, waiting: Vec<Waiting>) -> Vec<Change> {
        let spread = PROGRESS_EVERY
            .max(Duration::from_secs(1) * u32::try_from(waiting.len()).unwrap_or(u32::MAX) / PROGRESS_RATE);
        let mut changes = Vec::new();
        for one in waiting {
            let (key, version) = version_of(&one.workload);
            let written = self.written.get(&key);
            if written.is_some_and(|(written, at)| *written == version && at.elapsed() < UNSEEN) {
                continue;
            }
            let findings: Option<Vec<SiteFinding>> = one.needs.iter().map(|need| self.needs.finding(need)).collect();
            let Some(findings) = findings else { continue };
            let quota = since(&one.workload).map(|since| Timestamp::now().duration_since(since));
            let quota = quota.and_then(|quota| Duration::try_from(quota).ok()).unwrap_or_default();
            let waited = Waited { quota, retries: one.check.retry_count.unwrap_or(0) };
            let decision = decide(&findings, waited, self.admit_after);
            let progress = decision.state == CheckState::Pending;
            let early = written.is_some_and(|(_, at)| at.elapsed() < spread);
            let same = decision.state == one.check.state && decision.message == one.check.message;
            if !(same || progress && early) {
                changes.push(Change { waiting: one, decision });
            }
        }
        changes
    }
}

/// Writes a change, and tells of it; false if it must be written again.
async fn write(cluster: &Cluster, change: &Change, counts: &KueueCounts) -> bool {
    let Change { waiting: Waiting { workload, check, .. }, decision } = change;
    let changed = decision.state != check.state;
    let at = if changed { now() } else { check.last_transition_time.clone() };
    let mut state = json!({
        "name": check.name, "state": decision.state, "message": decision.message, "lastTransitionTime": at,
    });
    if let Some(seconds) = decision.requeue_after {
        state["requeueAfterSeconds"] = seconds.into();
    }
    let status: Value = json!({ "admissionChecks": [state] });
    match cluster.apply_status(&**workload, &status).await {
        Ok(true) if changed => {
            // Kueue itself tells that a workload starts.
            let (count, reason) = match decision.state {
                CheckState::Pending => return true,
                CheckState::Ready => (&counts.ready, None),
                CheckState::Retry => (&counts.retried, Some("DataNotReady")),
                CheckState::Rejected => (&counts.rejected, Some("DataRejected")),
            };
            count.add_one();
            let Some(reason) = reason else { return true };
            let type_ = EventType::Warning;
            cluster.tell(workload, &Told { type_, reason, note: &decision.message, cluster: None }).await;
            true
        }
        Ok(_) => true,
        Err(error) => {
            tracing::debug!("cannot write the state of a workload's check: {error}");
            false
        }
    }
}

/// Time since which a workload has its quota.
fn since(workload: &Workload) -> Option<Timestamp> {
    let mut conditions = workload.status.conditions.iter().flatten();
    let reserved = conditions.find(|condition| condition.kind == "QuotaReserved")?;
    reserved.last_transition_time.as_deref()?.parse().ok()
}

fn version_of(workload: &Workload) -> (Key, String) {
    let metadata = &workload.metadata;
    let key = (metadata.namespace.clone().unwrap_or_default(), metadata.name.clone().unwrap_or_default());
    (key, metadata.resource_version.clone().unwrap_or_default())
}

/// The time, as objects of Kubernetes have it.
pub(super) fn now() -> String {
    Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}
