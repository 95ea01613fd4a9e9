//! Clusters of `MultiKueue`: nominates for each workload those where its data costs least, the best first, one more each round
//! (<https://kueue.sigs.k8s.io/docs/concepts/multikueue/>, "External").

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::iter;
use kube::api::Patch;
use kube::runtime::events::EventType;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};

use super::checks::WRITES;
use super::cluster::{Cluster, Seen, with_status};
use super::managed::owned_by;
use super::objects::{API_VERSION, AdmissionCheckState, CheckState, MULTIKUEUE, Workload};
use crate::agent::advisor::HintCaller;
use crate::agent::api::hint_for_caller;
use crate::agent::controller::Key;
use crate::agent::counts::KueueCounts;
use crate::agent::kube::{job_of_object, site_of_labels};
use crate::agent::pods::{AccountRights, ServiceAccount};
use crate::agent::state::AgentState;
use crate::error::{Error, Result};
use crate::name::Name;
use crate::placement::{self, Hint, HintCandidate, HintRequest, HintVerdict, Objective, Sites};

/// Manager of the fields that Kueue applies, among them the nominated clusters
/// (<https://github.com/kubernetes-sigs/kueue/blob/ff69552/pkg/constants/constants.go>, `AdmissionName`).
const KUEUE: &str = "kueue-admission";
/// Manager of the nominations, where Kueue does not apply.
const MANAGER: &str = "towline-dispatcher";
/// Time that a hint waits for the chunks of inputs that are new to this agent.
const HINT_WAIT: Duration = Duration::from_secs(2);
/// Maximum number of turns in one pass: the next one sees what has changed, and workloads of other namespaces.
const TURNS_MAX: usize = 4 * WRITES;
/// Time for the turn of a workload.
const TURN_MAX: Duration = Duration::from_mins(1);
/// Pause after a workload has changed meanwhile: the watch shows it soon.
const AGAIN: Duration = Duration::from_secs(1);
/// Pause after a nomination that failed, or found no cluster.
const PAUSE: Duration = Duration::from_secs(30);

/// Nominates clusters.
pub(super) struct Dispatcher {
    agent: Arc<AgentState>,
    rights: AccountRights,
    round: Duration,
    /// Time from which on a workload may be nominated more clusters, by its uid.
    rounds: BTreeMap<(Key, String), Instant>,
}

/// Turn of a workload.
#[derive(Debug)]
struct Turn {
    due: Instant,
    workload: Arc<Workload>,
    /// Key of the workload, and its uid.
    round: (Key, String),
    clusters: Vec<ClusterSite>,
}

/// A cluster and the site that it is at.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ClusterSite {
    name: String,
    site: Option<String>,
}

impl Dispatcher {
    pub(super) fn new(agent: Arc<AgentState>, rights: AccountRights, round: Duration) -> Self {
        Self { agent, rights, round, rounds: BTreeMap::new() }
    }

    /// Time of the next turn of a workload.
    pub(super) fn due(&self) -> Option<Instant> {
        self.rounds.values().min().copied()
    }

    /// Nominates clusters for workloads whose turn it is, of each namespace as many.
    ///
    /// # Cancel safety
    /// Safe: each write stands for itself.
    pub(super) async fn pass(&mut self, cluster: &Cluster, seen: &Seen, (sites, counts): (&Sites, &KueueCounts)) {
        let now = Instant::now();
        let mut turns = Vec::new();
        let mut rounds = BTreeMap::new();
        for (key, workload) in &seen.workloads {
            let Some(check) = undecided(workload, seen) else { continue };
            let round = (key.clone(), workload.metadata.uid.clone().unwrap_or_default());
            // After a restart, the round of what is nominated already begins anew.
            let nominated = workload.status.nominated_cluster_names.as_ref().is_some_and(|names| !names.is_empty());
            let first = if nominated { now + self.round } else { now };
            let due = self.rounds.get(&round).copied().unwrap_or(first);
            rounds.insert(round.clone(), due);
            if due <= now {
                let (workload, clusters) = (Arc::clone(workload), clusters_of(check, seen, sites));
                turns.push(Turn { due, workload, round, clusters });
            }
        }
        let own = &*self;
        let nominated = iter(next_turns(turns)).map(|Turn { workload, round, clusters, .. }| async move {
            let late = || Err(Error::unreachable("no answer in time"));
            let nominated = timeout(TURN_MAX, own.nominate(cluster, &workload, &clusters)).await;
            let pause = match nominated.unwrap_or_else(|_| late()) {
                Ok(Some(nominated)) => {
                    if nominated {
                        counts.nominated.add_one();
                    }
                    own.round
                }
                Ok(None) => AGAIN,
                Err(error) => {
                    tracing::debug!("cannot nominate clusters for {}: {error}", round.0.1);
                    PAUSE
                }
            };
            (round, Instant::now() + pause)
        });
        let nominated: Vec<_> = nominated.buffer_unordered(WRITES).collect().await;
        rounds.extend(nominated);
        self.rounds = rounds;
    }

    /// Nominates the next cluster for a workload, if there is a further one; none if the workload has changed meanwhile. Tells in an
    /// event if the data may go to no cluster.
    async fn nominate(&self, cluster: &Cluster, workload: &Workload, clusters: &[ClusterSite]) -> Result<Option<bool>> {
        let before = workload.status.nominated_cluster_names.clone().unwrap_or_default();
        let order = match self.order(workload, clusters).await {
            Ok(order) => order,
            Err(error) => {
                cluster.tell(workload, (EventType::Warning, "NoCluster", &error.to_string()), None).await;
                return Err(error);
            }
        };
        let Some(next) = order.into_iter().find(|name| !before.contains(name)) else { return Ok(Some(false)) };
        let names: Vec<String> = before.into_iter().chain([next.clone()]).collect();
        match write(cluster, workload, &names).await {
            Ok(true) => {
                let note = format!("cluster {next} is nominated by the data of the workload");
                cluster.tell(workload, (EventType::Normal, "ClusterNominated", &note), Some(&next)).await;
                Ok(Some(true))
            }
            Ok(false) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Names of the clusters where a workload may run, the best first.
    ///
    /// # Errors
    /// Denied, if it may run at none, or its pods may not name their inputs; usage, for malformed annotations.
    async fn order(&self, workload: &Workload, clusters: &[ClusterSite]) -> Result<Vec<String>> {
        let namespace = workload.metadata.namespace.as_deref().unwrap_or_default();
        let (mut names, mut objective, mut gpus) = (BTreeSet::new(), Objective::default(), 0_u64);
        for pod_set in workload.pod_sets() {
            let account =
                ServiceAccount { namespace: namespace.to_owned(), name: pod_set.template.account().to_owned() };
            let used = pod_set.template.requests()?.names();
            let found = self.rights.resolve(&self.agent, &account, &used).await?.names;
            let (job, its_objective) = job_of_object(&pod_set.template.pod())?;
            gpus = gpus.saturating_add(job.gpus.saturating_mul(pod_set.count));
            if !found.is_empty() {
                objective = its_objective;
            }
            names.extend(found);
        }
        if names.is_empty() {
            return Ok(clusters.iter().map(|cluster| cluster.name.clone()).collect());
        }
        let sites: BTreeSet<&String> = clusters.iter().filter_map(|cluster| cluster.site.as_ref()).collect();
        let about = HintRequest {
            candidates: sites.into_iter().map(|site| HintCandidate { site: site.clone() }).collect(),
            objective,
            workload: placement::Workload { gpus, ..placement::Workload::default() },
            ..HintRequest::about(&names)
        };
        // Each name was allowed for the account whose pods name it.
        let may = |name: &Name| names.contains(name);
        let hint = hint_for_caller(&self.agent, HintCaller::namespace(namespace), &about, may, HINT_WAIT).await?;
        let order = in_order(&hint, clusters);
        if order.is_empty() && hint.candidates.iter().any(|candidate| candidate.verdict == HintVerdict::Unknown) {
            return Err(Error::denied("no policy can be read that decides on the data"));
        }
        if order.is_empty() {
            let denied = hint.candidates.iter().flat_map(|candidate| &candidate.deny).next();
            let why =
                denied.map_or_else(String::new, |denied| format!(": {:.100}: {:.200}", denied.input, denied.rule));
            return Err(Error::denied(format!("its data may go to no cluster of the queue{why}")));
        }
        Ok(order)
    }
}

/// The turns of the next pass: in each namespace those that are due longest come first, and no namespace has a second turn before the
/// first of another.
fn next_turns(mut turns: Vec<Turn>) -> Vec<Turn> {
    turns.sort_by_key(|turn| turn.due);
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let mut numbered: Vec<(usize, Turn)> = Vec::with_capacity(turns.len());
    for turn in turns {
        let (namespace, _) = &turn.round.0;
        let count = counts.entry(namespace.clone()).or_default();
        numbered.push((*count, turn));
        *count += 1;
    }
    numbered.sort_by_key(|&(number, _)| number);
    numbered.truncate(TURNS_MAX);
    numbered.into_iter().map(|(_, turn)| turn).collect()
}

/// Check of `MultiKueue` that has not decided on a workload that waits for a cluster, once the others are ready.
fn undecided<'a>(workload: &'a Workload, seen: &Seen) -> Option<&'a AdmissionCheckState> {
    if !workload.waits() || workload.status.cluster_name.is_some() {
        return None;
    }
    let is_multi = |check: &&AdmissionCheckState| {
        let known = seen.checks.get(&(String::new(), check.name.clone()));
        known.is_some_and(|known| known.spec.controller_name == MULTIKUEUE)
    };
    let own = workload.checks().iter().find(is_multi)?;
    let others = workload.checks().iter().filter(|check| check.name != own.name);
    let ready = others.into_iter().all(|check| check.state == CheckState::Ready);
    (own.state == CheckState::Pending && ready).then_some(own)
}

/// Connected clusters of a check, in the order of its configuration, with their sites: by the label of a node's site, or by name.
fn clusters_of(check: &AdmissionCheckState, seen: &Seen, sites: &Sites) -> Vec<ClusterSite> {
    let of_cluster = |name: &str| (String::new(), name.to_owned());
    let parameters = seen.checks.get(&of_cluster(&check.name)).and_then(|check| check.spec.parameters.as_ref());
    let config = parameters.and_then(|parameters| seen.configs.get(&of_cluster(&parameters.name)));
    let names = config.into_iter().flat_map(|config| config.spec.clusters.iter().flatten());
    let located = |name: &String| {
        let cluster = seen.clusters.get(&of_cluster(name)).filter(|cluster| cluster.is_active())?;
        let labelled = cluster.metadata.labels.as_ref().and_then(|labels| site_of_labels(labels, sites));
        let site = labelled.or_else(|| Some(name.as_str()).filter(|name| sites.site(name).is_some()));
        Some(ClusterSite { name: name.clone(), site: site.map(str::to_owned) })
    };
    names.filter_map(located).collect()
}

/// Names of the clusters where the data may go: by the order of their sites in the hint, then those without a site.
fn in_order(hint: &Hint, clusters: &[ClusterSite]) -> Vec<String> {
    let allowed = hint.candidates.iter().filter(|candidate| candidate.verdict == HintVerdict::Allow);
    let mut sites: Vec<Option<&str>> = allowed.map(|candidate| Some(candidate.site.as_str())).collect();
    if hint.elsewhere == HintVerdict::Allow {
        sites.push(None);
    }
    let at = sites.into_iter().flat_map(|site| clusters.iter().filter(move |cluster| cluster.site.as_deref() == site));
    at.map(|cluster| cluster.name.clone()).collect()
}

/// Writes the nominated clusters of a workload. Kueue must be able to remove them: it applies its part of the status as a whole, so they
/// become a part of that; where it patches instead, anybody's will do.
async fn write(cluster: &Cluster, workload: &Workload, names: &[String]) -> Result<bool> {
    let Some(whole) = cluster.whole(workload).await? else { return Ok(false) };
    match owned_by(&whole, (KUEUE, "status"), API_VERSION)? {
        Some(mut owned) => {
            let mut status = owned.get_mut("status").map_or_else(|| json!({}), Value::take);
            status["nominatedClusterNames"] = json!(names);
            cluster.patch_status(workload, KUEUE, &Patch::Apply(with_status(workload, &status))).await
        }
        None => {
            let patch = with_status(workload, &json!({ "nominatedClusterNames": names }));
            cluster.patch_status(workload, MANAGER, &Patch::Merge(patch)).await
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_with_many_workloads_delays_no_other() {
        let begun = Instant::now();
        let turn = |namespace: &str, number: u64| Turn {
            due: begun + Duration::from_secs(number),
            workload: Arc::new(serde_json::from_value(json!({})).unwrap()),
            round: ((namespace.to_owned(), format!("w{number}")), String::new()),
            clusters: Vec::new(),
        };
        let mut turns: Vec<Turn> = (0..1000).rev().map(|number| turn("a", number)).collect();
        turns.push(turn("b", 2000));
        turns.push(turn("b", 1500));
        let next = next_turns(turns);
        assert_eq!(next.len(), TURNS_MAX);
        let first: Vec<_> = next.iter().take(5).map(|turn| (&*turn.round.0.0, &*turn.round.0.1)).collect();
        assert_eq!(first, [("a", "w0"), ("b", "w1500"), ("a", "w1"), ("b", "w2000"), ("a", "w2")]);
    }
}
