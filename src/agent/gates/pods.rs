//! Pods that are not scheduled, with the fields that count here (<https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/>).
//! Lists and maps may be null, as Go writes empty ones.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::Resource;
use kube::core::{NamespaceResourceScope, ObjectMeta};
use serde::Deserialize;

use crate::agent::controller::{Trim, metadata};
use crate::agent::pods::{GATE, PodAnnotations, PodNames};

/// A pod that is not scheduled.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct PendingPod {
    #[serde(default, deserialize_with = "metadata")]
    pub(super) metadata: ObjectMeta,
    #[serde(default)]
    spec: PendingPodSpec,
    /// Data that it waits for, or the reason why that is malformed; none if it does not wait for data.
    #[serde(skip)]
    pub(super) wanted: Option<Result<PodWait, String>>,
}

/// Data that a pod waits for.
#[derive(Clone, Debug)]
pub(super) struct PodWait {
    pub(super) names: PodNames,
    pub(super) site: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PendingPodSpec {
    service_account_name: Option<String>,
    scheduling_gates: Option<Vec<SchedulingGate>>,
}

#[derive(Clone, Debug, Deserialize)]
struct SchedulingGate {
    name: String,
}

impl Resource for PendingPod {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        "Pod".into()
    }

    fn group((): &()) -> Cow<'_, str> {
        "".into()
    }

    fn version((): &()) -> Cow<'_, str> {
        "v1".into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        "pods".into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

impl Trim for PendingPod {
    fn trim(&mut self) {
        let annotations = self.metadata.annotations.take().unwrap_or_default();
        // Also for a pod whose gate is open: its data is held until it has a node.
        self.wanted = wait_of(annotations).transpose();
        self.metadata.labels = None;
        // Others choose their gates, and how many.
        self.spec.scheduling_gates = self.is_gated().then(|| vec![SchedulingGate { name: GATE.to_owned() }]);
    }
}

/// Data that a pod waits for by its annotations; none if they name none, or do not ask for it.
///
/// # Errors
/// The reason why they are malformed.
fn wait_of(mut annotations: BTreeMap<String, String>) -> Result<Option<PodWait>, String> {
    let wanted = PodAnnotations::trim(&mut annotations).and_then(|()| PodAnnotations::of(&annotations));
    let wanted = wanted.map_err(|error| error.to_string())?;
    let names = wanted.names();
    Ok((wanted.gated && !names.reads.is_empty()).then_some(PodWait { names, site: wanted.warm_at }))
}

impl PendingPod {
    /// True if it has the gate.
    pub(super) fn is_gated(&self) -> bool {
        self.spec.scheduling_gates.iter().flatten().any(|gate| gate.name == GATE)
    }

    /// True if the gate holds it back.
    pub(super) fn waits(&self) -> bool {
        self.is_gated() && self.metadata.deletion_timestamp.is_none()
    }

    /// Service account, as Kubernetes fills it in.
    pub(super) fn account(&self) -> &str {
        self.spec.service_account_name.as_deref().filter(|name| !name.is_empty()).unwrap_or("default")
    }

    /// Time since it was created, by the clocks of this machine and of the API server.
    pub(super) fn age(&self, now: Timestamp) -> Option<Duration> {
        let created = self.metadata.creation_timestamp.as_ref()?.0;
        Duration::try_from(now.duration_since(created)).ok()
    }
}

#[cfg(test)]
mod tests {
    use kube::core::ObjectList;
    use serde_json::{Value, json};

    use super::*;

    /// A list of a page of pods, as the API server answers.
    fn list(metadata: &Value) -> ObjectList<PendingPod> {
        let other = json!({ "metadata": { "name": "other", "namespace": "ml", "labels": null }, "spec": {} });
        let pods = json!([{ "metadata": metadata, "spec": { "schedulingGates": [{ "name": GATE }] } }, other]);
        serde_json::from_value(json!({ "apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": pods })).unwrap()
    }

    #[test]
    fn of_long_pods_little_is_kept() {
        let mut gates: Vec<Value> = (0..20_000).map(|n| json!({ "name": format!("example.com/{n:0>40}") })).collect();
        gates.push(json!({ "name": GATE }));
        let labels: BTreeMap<String, String> = (0..1000).map(|n| (format!("l{n}"), "x".repeat(60))).collect();
        let annotations = json!({
            "towline.dev/gate": "warm", "towline.dev/inputs": "a", "other": "x".repeat(200 << 10),
        });
        let metadata = json!({ "name": "long", "namespace": "ml", "labels": labels, "annotations": annotations });
        let pod = json!({ "metadata": metadata, "spec": { "schedulingGates": gates } });
        assert!(pod.to_string().len() > 1 << 20);
        let mut pod: PendingPod = serde_json::from_value(pod).unwrap();
        pod.trim();
        assert!(pod.waits() && matches!(pod.wanted, Some(Ok(_))));
        assert!(format!("{pod:?}").len() < 4 << 10);
        pod.spec.scheduling_gates = Some(vec![SchedulingGate { name: "example.com/other".to_owned() }]);
        pod.trim();
        assert!(!pod.waits() && pod.spec.scheduling_gates.is_none());
    }

    #[test]
    fn a_pod_with_metadata_that_cannot_be_read_fails_no_list() {
        let far = "10000-01-01T00:00:00Z";
        let pods = list(&json!({
            "name": "far", "namespace": "ml", "uid": "u", "resourceVersion": "7", "creationTimestamp": far,
            "managedFields": [{ "manager": "m", "operation": "Update", "time": far }],
            "ownerReferences": [{ "kind": 7 }], "annotations": { "towline.dev/inputs": "a" },
        }));
        assert_eq!(pods.items.iter().map(kube::ResourceExt::name_any).collect::<Vec<_>>(), ["far", "other"]);
        let pod = &pods.items[0];
        assert!(pod.waits() && pod.age(Timestamp::now()).is_none());
        assert_eq!(pod.metadata.annotations.as_ref().map(BTreeMap::len), Some(1));
        assert_eq!((pod.metadata.uid.as_deref(), pod.metadata.resource_version.as_deref()), (Some("u"), Some("7")));
        let deleted = list(&json!({ "name": "far", "namespace": "ml", "deletionTimestamp": far }));
        assert!(!deleted.items[0].waits(), "it is being deleted, whenever");
        let now = list(&json!({ "name": "now", "namespace": "ml", "creationTimestamp": "2026-11-01T00:00:00Z" }));
        assert!(now.items[0].age("2026-11-01T00:00:07Z".parse().unwrap()) == Some(Duration::from_secs(7)));
    }
}
