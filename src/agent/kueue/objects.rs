//! Objects of Kueue, `kueue.x-k8s.io/v1beta2`, with the fields that count here
//! (<https://github.com/kubernetes-sigs/kueue/tree/ff69552/apis/kueue/v1beta2>). Lists and maps may be null, as Go writes empty ones.

use std::borrow::Cow;
use std::collections::BTreeMap;

use kube::Resource;
use kube::core::{ClusterResourceScope, NamespaceResourceScope, ObjectMeta};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::agent::controller::{Trim, cut, metadata};
use crate::agent::kube::{is_site_label, job_of_object};
use crate::agent::pods::PodAnnotations;
use crate::error::{Error, Result};

/// Group of the objects.
const GROUP: &str = "kueue.x-k8s.io";
/// Their version.
const VERSION: &str = "v1beta2";
/// `apiVersion` of the objects.
pub(super) const API_VERSION: &str = "kueue.x-k8s.io/v1beta2";
/// Conditions of workloads that count here.
const CONDITIONS: [&str; 3] = [QUOTA_RESERVED, FINISHED, EVICTED];
pub(super) const QUOTA_RESERVED: &str = "QuotaReserved";
const FINISHED: &str = "Finished";
const EVICTED: &str = "Evicted";
/// Bytes that are kept of a workload, at most, besides the states of its checks.
const KEPT_MAX: usize = 32 << 10;
/// Bytes of memory of a text or an entry of a list, beside the length of the text.
const ENTRY_LEN: usize = 64;
/// Checks of a workload, and bytes of the message of each: that of this controller has 1000 characters.
const CHECKS_MAX: usize = 64;
const MESSAGE_LEN_MAX: usize = 4000;
/// Bytes of other texts: a label, a time.
const TEXT_LEN_MAX: usize = 253;
/// Resource that stands for all GPUs of the containers of a pod.
const GPUS: &str = "nvidia.com/gpu";
/// `controllerName` of the admission checks of `MultiKueue`.
pub(super) const MULTIKUEUE: &str = "kueue.x-k8s.io/multikueue";

macro_rules! resource {
    ($kind:ident, $scope:ty, $plural:literal) => {
        impl Resource for $kind {
            type DynamicType = ();
            type Scope = $scope;

            fn kind((): &()) -> Cow<'_, str> {
                stringify!($kind).into()
            }

            fn group((): &()) -> Cow<'_, str> {
                GROUP.into()
            }

            fn version((): &()) -> Cow<'_, str> {
                VERSION.into()
            }

            fn plural((): &()) -> Cow<'_, str> {
                $plural.into()
            }

            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }

            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

resource!(Workload, NamespaceResourceScope, "workloads");
resource!(AdmissionCheck, ClusterResourceScope, "admissionchecks");
resource!(ResourceFlavor, ClusterResourceScope, "resourceflavors");
resource!(MultiKueueConfig, ClusterResourceScope, "multikueueconfigs");
resource!(MultiKueueCluster, ClusterResourceScope, "multikueueclusters");

#[derive(Clone, Debug, Deserialize)]
pub(super) struct Workload {
    #[serde(default, deserialize_with = "metadata")]
    pub(super) metadata: ObjectMeta,
    #[serde(default)]
    pub(super) spec: WorkloadSpec,
    #[serde(default)]
    pub(super) status: WorkloadStatus,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct WorkloadSpec {
    pub(super) pod_sets: Option<Vec<PodSet>>,
    pub(super) active: Option<bool>,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct PodSet {
    pub(super) name: String,
    #[serde(default)]
    pub(super) count: u64,
    #[serde(default)]
    pub(super) template: PodTemplate,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct PodTemplate {
    pub(super) metadata: Option<TemplateMetadata>,
    pub(super) spec: Option<TemplateSpec>,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct TemplateMetadata {
    annotations: Option<BTreeMap<String, String>>,
    /// The reason why the annotations, or all of the workload, were not kept.
    #[serde(skip)]
    too_long: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct TemplateSpec {
    pub(super) service_account_name: Option<String>,
    pub(super) node_selector: Option<BTreeMap<String, String>>,
    pub(super) containers: Option<Vec<Container>>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(super) struct Container {
    #[serde(default)]
    pub(super) resources: Resources,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(super) struct Resources {
    pub(super) limits: Option<BTreeMap<String, Value>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct WorkloadStatus {
    pub(super) conditions: Option<Vec<Condition>>,
    pub(super) admission: Option<Admission>,
    pub(super) admission_checks: Option<Vec<AdmissionCheckState>>,
    pub(super) cluster_name: Option<String>,
    pub(super) nominated_cluster_names: Option<Vec<String>>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Condition {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) status: String,
    #[serde(default)]
    pub(super) reason: String,
    #[serde(default)]
    pub(super) message: String,
    pub(super) observed_generation: Option<i64>,
    pub(super) last_transition_time: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Admission {
    pub(super) pod_set_assignments: Option<Vec<PodSetAssignment>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct PodSetAssignment {
    pub(super) name: String,
    /// Flavors by resource.
    pub(super) flavors: Option<BTreeMap<String, String>>,
}

/// State of one check of a workload.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct AdmissionCheckState {
    pub(super) name: String,
    pub(super) state: CheckState,
    #[serde(default)]
    pub(super) last_transition_time: String,
    #[serde(default)]
    pub(super) message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub(super) enum CheckState {
    /// Not decided yet.
    Pending,
    /// The workload may start.
    Ready,
    /// It gives its quota back, and tries again later.
    Retry,
    /// It is deactivated.
    Rejected,
    /// One of a later version of Kueue.
    #[serde(other)]
    Unknown,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct AdmissionCheck {
    #[serde(default, deserialize_with = "metadata")]
    pub(super) metadata: ObjectMeta,
    #[serde(default)]
    pub(super) spec: AdmissionCheckSpec,
    #[serde(default)]
    pub(super) status: Conditions,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct AdmissionCheckSpec {
    #[serde(default)]
    pub(super) controller_name: String,
    pub(super) parameters: Option<ParametersReference>,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct ParametersReference {
    pub(super) kind: String,
    pub(super) name: String,
}

/// Status that has nothing else.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct Conditions {
    pub(super) conditions: Option<Vec<Condition>>,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct ResourceFlavor {
    #[serde(default, deserialize_with = "metadata")]
    pub(super) metadata: ObjectMeta,
    #[serde(default)]
    pub(super) spec: ResourceFlavorSpec,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ResourceFlavorSpec {
    pub(super) node_labels: Option<BTreeMap<String, String>>,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct MultiKueueConfig {
    #[serde(default, deserialize_with = "metadata")]
    pub(super) metadata: ObjectMeta,
    #[serde(default)]
    pub(super) spec: MultiKueueConfigSpec,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct MultiKueueConfigSpec {
    pub(super) clusters: Option<Vec<String>>,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct MultiKueueCluster {
    #[serde(default, deserialize_with = "metadata")]
    pub(super) metadata: ObjectMeta,
    #[serde(default)]
    pub(super) status: Conditions,
}

impl Trim for AdmissionCheck {}
impl Trim for ResourceFlavor {}
impl Trim for MultiKueueConfig {}
impl Trim for MultiKueueCluster {}

impl Trim for Workload {
    fn trim(&mut self) {
        (self.metadata.annotations, self.metadata.labels) = (None, None);
        for pod_set in self.spec.pod_sets.iter_mut().flatten() {
            if let Some(metadata) = &mut pod_set.template.metadata {
                metadata.trim();
            }
            if let Some(spec) = &mut pod_set.template.spec {
                spec.trim();
            }
        }
        self.status.trim();
        let kept = self.len();
        if kept > KEPT_MAX {
            self.refuse(format!("what counts of the workload is longer than {KEPT_MAX} bytes: {kept} bytes"));
        }
    }
}

impl Workload {
    /// Bytes of what is kept of it, besides the states of its checks, about.
    fn len(&self) -> usize {
        let pod_sets = self.pod_sets().iter().map(PodSet::len);
        let Admission { pod_set_assignments } = self.status.admission.as_ref().unwrap_or(&Admission::NONE);
        let assigned = pod_set_assignments.iter().flatten();
        let assigned = assigned.map(|one| text_len(&one.name) + one.flavors.as_ref().map_or(0, map_len));
        let nominated = self.status.nominated_cluster_names.iter().flatten().map(|name| text_len(name));
        let cluster = self.status.cluster_name.iter().map(|name| text_len(name));
        pod_sets.chain(assigned).chain(nominated).chain(cluster).sum()
    }

    /// Keeps nothing of its pods but the `reason` why, which decisions about it tell.
    fn refuse(&mut self, reason: String) {
        let name = self.pod_sets().first().map(|pod_set| cut(&pod_set.name, TEXT_LEN_MAX)).unwrap_or_default();
        let metadata = TemplateMetadata { annotations: None, too_long: Some(reason) };
        let template = PodTemplate { metadata: Some(metadata), spec: None };
        self.spec.pod_sets = Some(vec![PodSet { name, count: 1, template }]);
        (self.status.admission, self.status.nominated_cluster_names) = (None, None);
        // It may have been given to a cluster, whatever its name.
        self.status.cluster_name = self.status.cluster_name.as_deref().map(|name| cut(name, TEXT_LEN_MAX));
    }

    /// True if it has quota and has not ended: its pods may run.
    pub(super) fn is_active(&self) -> bool {
        self.is(QUOTA_RESERVED) && !self.is(FINISHED) && self.metadata.deletion_timestamp.is_none()
    }

    /// True if the condition is there and true.
    pub(super) fn is(&self, condition: &str) -> bool {
        is_true(self.status.conditions.as_deref(), condition)
    }

    /// True if it has quota and waits for its checks.
    pub(super) fn waits(&self) -> bool {
        let over = self.metadata.deletion_timestamp.is_some() || self.is(FINISHED) || self.is(EVICTED);
        self.spec.active != Some(false) && self.is(QUOTA_RESERVED) && !over
    }

    /// States of its checks.
    pub(super) fn checks(&self) -> &[AdmissionCheckState] {
        self.status.admission_checks.as_deref().unwrap_or_default()
    }

    /// Its pods.
    pub(super) fn pod_sets(&self) -> &[PodSet] {
        self.spec.pod_sets.as_deref().unwrap_or_default()
    }

    /// Flavors that the pods of `pod_set` were assigned.
    pub(super) fn flavors(&self, pod_set: &str) -> impl Iterator<Item = &str> {
        let assigned =
            self.status.admission.iter().flat_map(|admission| admission.pod_set_assignments.iter().flatten());
        let flavors = assigned.filter(move |assigned| assigned.name == pod_set).filter_map(|one| one.flavors.as_ref());
        flavors.flat_map(BTreeMap::values).map(String::as_str)
    }
}

impl AdmissionCheck {
    /// Condition `Active`, without which Kueue leaves its queues inactive.
    pub(super) fn active(&self) -> Option<&Condition> {
        self.status.conditions.iter().flatten().find(|condition| condition.kind == "Active")
    }
}

impl MultiKueueCluster {
    /// True if Kueue is connected to it.
    pub(super) fn is_active(&self) -> bool {
        is_true(self.status.conditions.as_deref(), "Active")
    }
}

impl Admission {
    const NONE: Self = Self { pod_set_assignments: None };
}

impl PodSet {
    fn len(&self) -> usize {
        let PodTemplate { metadata, spec } = &self.template;
        let annotations = metadata.as_ref().and_then(|metadata| metadata.annotations.as_ref()).map_or(0, map_len);
        let spec = spec.as_ref().map_or(0, |spec| {
            let account = spec.service_account_name.as_deref().map_or(0, text_len);
            account + spec.node_selector.as_ref().map_or(0, map_len)
        });
        size_of::<Self>() + text_len(&self.name) + annotations + spec
    }
}

impl TemplateSpec {
    /// Drops all but the account, the labels that name a site, and the number of GPUs: users choose the rest.
    fn trim(&mut self) {
        if let Some(labels) = &mut self.node_selector {
            labels.retain(|key, _| is_site_label(key));
            labels.values_mut().for_each(|value| *value = cut(value, TEXT_LEN_MAX));
        }
        let count =
            |container| Some(job_of_object(&serde_json::json!({ "spec": { "containers": [container] } })).ok()?.0.gpus);
        let gpus = self.containers.iter().flatten().filter_map(count).fold(0, u64::saturating_add);
        let limits = BTreeMap::from([(GPUS.to_owned(), gpus.into())]);
        self.containers = (gpus > 0).then(|| vec![Container { resources: Resources { limits: Some(limits) } }]);
    }
}

impl WorkloadStatus {
    /// Drops what is not read.
    fn trim(&mut self) {
        let known = |kind: &&str| {
            let condition = self.conditions.iter().flatten().find(|condition| condition.kind == **kind)?;
            Some(Condition {
                kind: condition.kind.clone(),
                status: cut(&condition.status, TEXT_LEN_MAX),
                reason: String::new(),
                message: String::new(),
                observed_generation: condition.observed_generation,
                last_transition_time: condition.last_transition_time.as_deref().map(|time| cut(time, TEXT_LEN_MAX)),
            })
        };
        self.conditions = Some(CONDITIONS.iter().filter_map(known).collect());
        let checks = self.admission_checks.take().unwrap_or_default().into_iter().take(CHECKS_MAX);
        let checks = checks.map(|check| AdmissionCheckState {
            name: cut(&check.name, TEXT_LEN_MAX),
            state: check.state,
            last_transition_time: cut(&check.last_transition_time, TEXT_LEN_MAX),
            message: cut(&check.message, MESSAGE_LEN_MAX),
        });
        // Collected anew: items of the same type would stay in the memory of all.
        let mut kept = Vec::new();
        kept.extend(checks);
        self.admission_checks = Some(kept);
    }
}

impl TemplateMetadata {
    fn trim(&mut self) {
        let Some(annotations) = &mut self.annotations else { return };
        if let Err(error) = PodAnnotations::trim(annotations) {
            (self.annotations, self.too_long) = (None, Some(error.to_string()));
        }
    }
}

impl PodTemplate {
    /// Requests of its pods.
    ///
    /// # Errors
    /// Usage, for annotations that are malformed, or too long.
    pub(super) fn requests(&self) -> Result<PodAnnotations> {
        match self.metadata.as_ref().and_then(|metadata| metadata.too_long.as_ref()) {
            Some(text) => Err(Error::usage(text.clone())),
            None => PodAnnotations::of(&self.annotations()),
        }
    }

    fn annotations(&self) -> BTreeMap<String, String> {
        self.metadata.as_ref().and_then(|metadata| metadata.annotations.clone()).unwrap_or_default()
    }

    /// Service account, as Kubernetes fills it in.
    pub(super) fn account(&self) -> &str {
        let named = self.spec.as_ref().and_then(|spec| spec.service_account_name.as_deref());
        named.filter(|name| !name.is_empty()).unwrap_or("default")
    }

    /// Labels that its nodes must have.
    pub(super) fn node_selector(&self) -> Option<&BTreeMap<String, String>> {
        self.spec.as_ref()?.node_selector.as_ref()
    }

    /// The pod, as far as it counts for a hint.
    pub(super) fn pod(&self) -> Value {
        serde_json::json!({
            "metadata": { "annotations": self.annotations() },
            "spec": self.spec.clone().unwrap_or_default(),
        })
    }
}

fn is_true(conditions: Option<&[Condition]>, kind: &str) -> bool {
    conditions.into_iter().flatten().any(|condition| condition.kind == kind && condition.status == "True")
}

/// Bytes of memory of a text, about.
fn text_len(text: &str) -> usize {
    text.len() + ENTRY_LEN
}

fn map_len(map: &BTreeMap<String, String>) -> usize {
    map.iter().map(|(key, value)| text_len(key) + text_len(value)).sum()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn workload(annotations: &Value) -> Workload {
        let far = "10000-01-01T00:00:00Z";
        let mut workload: Workload = serde_json::from_value(json!({
            "metadata": {
                "name": "w", "namespace": "ml", "creationTimestamp": far,
                "managedFields": [{ "manager": "m", "operation": "Update", "time": far }],
            },
            "spec": { "podSets": [{ "name": "main", "count": 1, "template": { "metadata": { "annotations": annotations } } }] },
        }))
        .unwrap();
        workload.trim();
        workload
    }

    /// A workload of more than a megabyte, trimmed.
    fn long_workload(pod_sets: &Value, status: &Value) -> Workload {
        let metadata = json!({ "name": "w", "namespace": "ml", "labels": { "l": "x".repeat(2000) } });
        let object = json!({ "metadata": metadata, "spec": { "podSets": pod_sets }, "status": status });
        assert!(object.to_string().len() > 1 << 20);
        let mut workload: Workload = serde_json::from_value(object).unwrap();
        workload.trim();
        workload
    }

    #[test]
    fn of_a_long_workload_little_is_kept() {
        let mut selector: BTreeMap<String, String> = (0..5000).map(|n| (format!("l{n}"), "x".repeat(60))).collect();
        selector.insert("towline.dev/site".to_owned(), "burst".to_owned());
        let mut limits: BTreeMap<String, Value> = (0..5000).map(|n| (format!("x/{n:0>60}"), "1".into())).collect();
        limits.insert("amd.com/gpu".to_owned(), "2".into());
        let containers =
            vec![json!({ "resources": { "limits": limits } }), json!({ "resources": { "limits": { GPUS: 1 } } })];
        let spec = json!({ "nodeSelector": selector, "containers": containers });
        let time = "2026-11-01T00:00:00Z";
        let conditions: Vec<Value> = (0..1000)
            .map(|n| format!("Other{n}"))
            .chain([QUOTA_RESERVED.to_owned()])
            .map(|kind| json!({ "type": kind, "status": "True", "message": "x".repeat(300), "lastTransitionTime": time }))
            .collect();
        let checks = json!([{ "name": "data", "state": "Pending", "message": "x".repeat(32 << 10) }]);
        let status = json!({ "conditions": conditions, "admissionChecks": checks });
        let pod_set = json!({ "name": "main", "count": 1, "template": { "spec": spec } });
        let kept = long_workload(&json!([pod_set]), &status);
        let size = format!("{kept:?}").len();
        assert!(size < 8 << 10, "{size}");
        let template = &kept.pod_sets()[0].template;
        assert_eq!(template.node_selector().map(BTreeMap::len), Some(1));
        assert_eq!(job_of_object(&template.pod()).unwrap().0.gpus, 3);
        assert!(kept.waits() && template.requests().is_ok());
        assert_eq!(
            kept.status.conditions.as_deref().and_then(|all| all[0].last_transition_time.as_deref()),
            Some(time)
        );
    }

    #[test]
    fn a_workload_that_is_long_all_the_same_is_refused() {
        let quota = json!({ "conditions": [{ "type": QUOTA_RESERVED, "status": "True" }] });
        let long = "x".repeat(1 << 20);
        let many: Vec<Value> = (0..50_000).map(|n| json!({ "name": format!("a-pod-set-{n}") })).collect();
        let account = json!([{ "name": "main", "template": { "spec": { "serviceAccountName": long } } }]);
        for pod_sets in [many.into(), account, json!([{ "name": long }])] {
            let kept = long_workload(&pod_sets, &quota);
            assert!(kept.waits() && kept.metadata.name.as_deref() == Some("w"));
            assert_eq!(kept.pod_sets().len(), 1);
            let reason = kept.pod_sets()[0].template.requests().unwrap_err().to_string();
            assert!(reason.starts_with("what counts of the workload is longer than 32768 bytes: "), "{reason}");
            assert!(format!("{kept:?}").len() < 4 << 10);
        }
    }

    #[test]
    fn annotations_of_a_workload_are_kept_up_to_a_length() {
        let read = |annotations: &Value| workload(annotations).pod_sets()[0].template.requests();
        let long = "x".repeat(32 << 10);
        let found =
            read(&json!({ "towline.dev/inputs": "a, b", "other": long, "towline.dev/settings": long })).unwrap();
        assert_eq!(found.inputs.len(), 2);
        let many: serde_json::Map<String, Value> =
            (0..1000).map(|n| (format!("towline.dev/an-annotation-of-a-long-name-{n}"), "".into())).collect();
        for annotations in [json!({ "towline.dev/inputs": long }), many.into()] {
            assert_eq!(read(&annotations).unwrap_err().to_string(), "annotations are longer than 32768 bytes");
            let kept = workload(&annotations);
            assert!(kept.pod_sets()[0].template.annotations().is_empty());
        }
    }
}
