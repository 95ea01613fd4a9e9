//! Pods with a gate, with the fields that count here (<https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/>).
//! Lists and maps may be null, as Go writes empty ones.

use std::borrow::Cow;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::Resource;
use kube::core::{NamespaceResourceScope, ObjectMeta};
use serde::Deserialize;

use crate::agent::controller::Trim;
use crate::agent::pods::{AUTHORITIES, GATE, PREFIX, SETTINGS};

#[derive(Clone, Debug, Deserialize)]
pub(super) struct GatedPod {
    #[serde(default)]
    pub(super) metadata: ObjectMeta,
    #[serde(default)]
    spec: GatedPodSpec,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct GatedPodSpec {
    service_account_name: Option<String>,
    scheduling_gates: Option<Vec<SchedulingGate>>,
}

#[derive(Clone, Debug, Deserialize)]
struct SchedulingGate {
    name: String,
}

impl Resource for GatedPod {
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

impl Trim for GatedPod {
    fn trim(&mut self) {
        let metadata = &mut self.metadata;
        (metadata.managed_fields, metadata.owner_references, metadata.labels) = (None, None, None);
        let long = |key: &str| [SETTINGS, AUTHORITIES].contains(&key);
        if let Some(annotations) = &mut metadata.annotations {
            annotations.retain(|key, _| key.starts_with(PREFIX) && !long(key));
        }
    }
}

impl GatedPod {
    /// True if the gate holds it back.
    pub(super) fn waits(&self) -> bool {
        let gated = self.spec.scheduling_gates.iter().flatten().any(|gate| gate.name == GATE);
        gated && self.metadata.deletion_timestamp.is_none()
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
