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

use super::cluster::{Cluster, Seen};
use super::decision::{Decision, Limits, decide};
use super::objects::{AdmissionCheck, AdmissionCheckState, CheckState, Condition, PodSet, QUOTA_RESERVED, Workload};
use crate::agent::controller::{Finding, Gathering, Key, Need, Needs, Objects, SiteFinding, key};
use crate::agent::counts::KueueCounts;
use crate::agent::kube::site_of_labels;
use crate::agent::pods::ServiceAccount;
use crate::placement::Sites;

/// Writes to the API server at a time.
pub(super) const WRITES: usize = 16;
/// Writes of progress a second, of all workloads.
const PROGRESS_RATE: u32 = 20;
/// Interval of the writes of progress of one workload, at least.
const PROGRESS_EVERY: Duration = Duration::from_secs(10);
/// Time in which the watch shows what was written, or why it conflicted.
const UNSEEN: Duration = Duration::from_secs(5);

/// Decides the checks of workloads.
pub(super) struct Checks {
    needs: Needs,
    /// `controllerName` of the checks that this controller decides.
    controller: String,
    /// Site of this cluster, for pods whose nodes name none.
    own_site: String,
    limits: Limits,
    /// Versions of objects that were written to, and when: what was seen of them is old until the watch shows the next.
    written: BTreeMap<Key, (String, Instant)>,
}

/// A workload that waits for one or more of the checks.
struct Waiting {
    workload: Arc<Workload>,
    /// States of all checks of this controller: they are written together, because a manager applies all that it has.
    checks: Vec<AdmissionCheckState>,
    /// Needs of its pods, or why they can have none.
    needs: Result<Vec<Arc<Need>>, SiteFinding>,
}

/// A new state of the checks that are pending, to be written.
struct Change {
    waiting: Waiting,
    decision: Decision,
}

/// Condition `Active` of an admission check.
struct Active {
    status: &'static str,
    reason: &'static str,
    message: String,
}

impl Checks {
    pub(super) fn new(needs: Needs, controller: String, own_site: String, limits: Limits) -> Self {
        Self { needs, controller, own_site, limits, written: BTreeMap::new() }
    }

    /// Brings the checks up to date with what was `seen`.
    ///
    /// # Cancel safety
    /// Safe: each write stands for itself.
    pub(super) async fn pass(&mut self, cluster: &Cluster, seen: &Seen, (sites, counts): (&Sites, &KueueCounts)) {
        let own: BTreeSet<&str> = self.activate(cluster, &seen.checks).await;
        let own_site = self.own_site.clone();
        let mut gathering = self.needs.gathering();
        let waiting = waiting(seen, &own, (sites, &own_site), &mut gathering);
        counts.waiting.set(waiting.len() as u64);
        let in_use = || {
            let active = seen.workloads.values().filter(|workload| workload.is_active());
            let needs = active.filter_map(|workload| needs_of(workload, seen, (sites, &own_site)).ok());
            needs.flatten().map(|need| need.asked()).collect()
        };
        self.needs.look_up(gathering, in_use).await;
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
        for ((_, name), check) in checks.iter().filter(|(_, check)| check.spec.controller_name == self.controller) {
            let active = Active::of(check);
            if active.status == "True" {
                own.insert(name.as_str());
            }
            let (generation, before) = (check.metadata.generation, check.active());
            if before.is_some_and(|known| active.is(known) && known.observed_generation == generation) {
                continue;
            }
            let kept = before.filter(|known| known.status == active.status);
            let at = kept.and_then(|known| known.last_transition_time.clone()).unwrap_or_else(now);
            let status = json!({ "conditions": [{
                "type": "Active", "status": active.status, "reason": active.reason, "message": active.message,
                "observedGeneration": generation, "lastTransitionTime": at,
            }] });
            if let Err(error) = cluster.apply_status(&**check, &status).await {
                tracing::debug!("cannot tell that the admission check {name} is active: {error:?}");
            }
        }
        own
    }

    /// Changes to what the checks say.
    fn changes(&self, waiting: Vec<Waiting>) -> Vec<Change> {
        let count = u32::try_from(waiting.len()).unwrap_or(u32::MAX);
        let spread = PROGRESS_EVERY.max(Duration::from_secs(1) * count / PROGRESS_RATE);
        let mut changes = Vec::new();
        for one in waiting {
            let (key, version) = version_of(&one.workload);
            let written = self.written.get(&key);
            if written.is_some_and(|(written, at)| *written == version && at.elapsed() < UNSEEN) {
                continue;
            }
            let findings: Option<Vec<SiteFinding>> = match &one.needs {
                Ok(needs) => needs.iter().map(|need| self.needs.finding(need)).collect(),
                Err(finding) => Some(vec![finding.clone()]),
            };
            let Some(findings) = findings else { continue };
            let decision = decide(&findings, quota_time(&one.workload), self.limits);
            let early = written.is_some_and(|(_, at)| at.elapsed() < spread);
            let same = one.pending().all(|check| check.state == decision.state && check.message == decision.message);
            if !(same || decision.state == CheckState::Pending && early) {
                changes.push(Change { waiting: one, decision });
            }
        }
        changes
    }
}

impl Waiting {
    fn pending(&self) -> impl Iterator<Item = &AdmissionCheckState> {
        self.checks.iter().filter(|check| check.state == CheckState::Pending)
    }
}

impl Active {
    fn of(check: &AdmissionCheck) -> Self {
        match &check.spec.parameters {
            None => {
                let message = "The controller decides by the data of workloads".to_owned();
                Self { status: "True", reason: "Active", message }
            }
            Some(parameters) => {
                let got = format!("{} {}", parameters.kind, parameters.name);
                let message = format!("The check takes no parameters, but refers to {got}");
                Self { status: "False", reason: "BadParametersRef", message }
            }
        }
    }

    fn is(&self, known: &Condition) -> bool {
        known.status == self.status && known.reason == self.reason && known.message == self.message
    }
}

/// Workloads that wait for one of the checks `own`, those that wait the longest first, with their needs.
fn waiting(seen: &Seen, own: &BTreeSet<&str>, at: (&Sites, &str), gathering: &mut Gathering) -> Vec<Waiting> {
    let mut waiting = Vec::new();
    for workload in seen.workloads.values().filter(|workload| workload.waits()) {
        let checks = workload.checks().iter().filter(|check| own.contains(check.name.as_str()));
        let checks: Vec<AdmissionCheckState> = checks.cloned().collect();
        if checks.iter().any(|check| check.state == CheckState::Pending) {
            waiting.push(Waiting { workload: Arc::clone(workload), checks, needs: Ok(Vec::new()) });
        }
    }
    waiting.sort_by_cached_key(|waiting| since(&waiting.workload).unwrap_or_default());
    for one in &mut waiting {
        let held = quota_time(&one.workload);
        let needs = needs_of(&one.workload, seen, at);
        let gathered = |needs: Vec<Need>| needs.into_iter().map(|need| gathering.add(need, held)).collect();
        one.needs = needs.and_then(gathered);
    }
    waiting
}

/// Needs of the pods of a workload, by the sites of the flavors that they were assigned.
///
/// # Errors
/// Finding that annotations are malformed.
fn needs_of(workload: &Workload, seen: &Seen, (sites, own_site): (&Sites, &str)) -> Result<Vec<Need>, SiteFinding> {
    let namespace = workload.metadata.namespace.as_deref().unwrap_or_default();
    let need = |pod_set: &PodSet| {
        let flavors = workload.flavors(&pod_set.name);
        let flavors = flavors.filter_map(|flavor| seen.flavors.get(&(String::new(), flavor.to_owned())));
        let labels = flavors.filter_map(|flavor| flavor.spec.node_labels.as_ref());
        let site = labels.chain(pod_set.template.node_selector()).find_map(|labels| site_of_labels(labels, sites));
        let site = site.unwrap_or(own_site).to_owned();
        let names = match pod_set.template.requests() {
            Ok(annotations) => annotations.names(),
            Err(error) => {
                let finding = Finding::Malformed(format!("pods {}: {error}", pod_set.name));
                return Some(Err(SiteFinding { site, finding, notes: Vec::new() }));
            }
        };
        if names.reads.is_empty() && names.saves.is_empty() {
            return None;
        }
        let account = ServiceAccount { namespace: namespace.to_owned(), name: pod_set.template.account().to_owned() };
        Some(Ok(Need { account, names, site }))
    };
    workload.pod_sets().iter().filter_map(need).collect()
}

/// Writes a change, and tells of it; false if it must be written again.
async fn write(cluster: &Cluster, change: &Change, counts: &KueueCounts) -> bool {
    let Change { waiting: Waiting { workload, checks, .. }, decision } = change;
    let state = |check: &AdmissionCheckState| {
        let (state, message) = match check.state {
            CheckState::Pending => (decision.state, &decision.message),
            decided => (decided, &check.message),
        };
        let at = if state == check.state { check.last_transition_time.clone() } else { now() };
        json!({ "name": check.name, "state": state, "message": message, "lastTransitionTime": at })
    };
    let states: Vec<Value> = checks.iter().map(state).collect();
    let status = json!({ "admissionChecks": states });
    match cluster.apply_status(&**workload, &status).await {
        Ok(true) => {}
        Ok(false) => return true,
        Err(error) => {
            tracing::debug!("cannot write the state of a workload's check: {error:?}");
            return false;
        }
    }
    // Kueue itself tells that a workload starts.
    let (count, reason) = match decision.state {
        CheckState::Pending | CheckState::Unknown => return true,
        CheckState::Ready => (&counts.ready, None),
        CheckState::Retry => (&counts.retried, Some("DataNotReady")),
        CheckState::Rejected => (&counts.rejected, Some("DataRejected")),
    };
    count.add_one();
    if let Some(reason) = reason {
        cluster.tell(workload, (EventType::Warning, reason, &decision.message), None).await;
    }
    true
}

/// Time since which a workload has its quota.
fn since(workload: &Workload) -> Option<Timestamp> {
    let mut conditions = workload.status.conditions.iter().flatten();
    let reserved = conditions.find(|condition| condition.kind == QUOTA_RESERVED)?;
    reserved.last_transition_time.as_deref()?.parse().ok()
}

/// Time for which a workload has had its quota.
fn quota_time(workload: &Workload) -> Duration {
    let time = since(workload).map(|since| Timestamp::now().duration_since(since));
    time.and_then(|time| Duration::try_from(time).ok()).unwrap_or_default()
}

fn version_of(workload: &Workload) -> (Key, String) {
    (key(workload), workload.metadata.resource_version.clone().unwrap_or_default())
}

/// The time, as objects of Kubernetes have it.
pub(super) fn now() -> String {
    Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::controller::Trim as _;
    use crate::agent::pods::{AccountRights, AccountRule};
    use crate::pattern::Patterns;

    /// A workload that waits for the check `warm` and names 256 inputs of its own.
    fn workload(namespace: &str, n: usize) -> Workload {
        let inputs: Vec<String> = (0..256).map(|input| format!("open/{n}/{input}")).collect();
        let template = json!({ "metadata": { "annotations": { "towline.dev/inputs": inputs.join(",") } } });
        let reserved =
            json!({ "type": QUOTA_RESERVED, "status": "True", "lastTransitionTime": "2020-01-01T00:00:00Z" });
        let mut workload: Workload = serde_json::from_value(json!({
            "metadata": { "name": format!("w{n}"), "namespace": namespace },
            "spec": { "podSets": [{ "name": "main", "count": 1, "template": template }] },
            "status": { "conditions": [reserved], "admissionChecks": [{ "name": "warm", "state": "Pending" }] },
        }))
        .unwrap();
        workload.trim();
        workload
    }

    #[test]
    fn of_workloads_that_no_rule_is_about_no_needs_are_kept() {
        let all = |text: &str| Patterns::of(&[text]).unwrap();
        let rule = AccountRule { namespaces: all("ml"), accounts: all("**"), names: all("**") };
        let rights = Arc::new(AccountRights { rules: vec![rule], trust_domain: "home".to_owned() });
        let gathered = |namespace: &str| {
            let workloads = (0..100).map(|n| Arc::new(workload(namespace, n))).map(|one| (key(&*one), one)).collect();
            let (checks, flavors, configs, clusters) = Default::default();
            let seen = Seen { workloads, checks, flavors, configs, clusters };
            let mut gathering = Gathering::new(Arc::clone(&rights), BTreeSet::new());
            let at = (&Sites::default(), "home");
            let waiting = waiting(&seen, &BTreeSet::from(["warm"]), at, &mut gathering);
            assert_eq!(waiting.len(), 100);
            (waiting, gathering.len)
        };
        let (waiting, len) = gathered("other");
        assert_eq!(len, 0);
        let limits = Limits { retry_after: Duration::from_mins(5), admit_after: None };
        for one in waiting {
            let decision = decide(&[one.needs.unwrap_err()], Duration::ZERO, limits);
            assert_eq!(decision.state, CheckState::Retry, "it has had its quota for long: {}", decision.message);
            assert!(decision.message.contains("no such name that service account other/default may read"));
        }
        let (waiting, len) = gathered("ml");
        assert!(len > 100 * 256 && waiting.iter().all(|one| one.needs.as_ref().is_ok_and(|needs| needs.len() == 1)));
    }
}
