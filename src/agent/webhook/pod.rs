//! Parts of a pod that the webhook reads (<https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/>). Lists and maps
//! may be null, as Go writes empty ones.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use crate::agent::pods::{GATE, GATED, PLACED, PodAnnotations};
use crate::error::{Error, Result};

/// Name of the sidecar.
pub(super) const SIDECAR: &str = "towline";
/// Annotation of a pod that the kubelet runs from a file.
const MIRROR: &str = "kubernetes.io/config.mirror";
/// Seconds between SIGTERM and SIGKILL, by default.
const TERMINATION_SECONDS: u64 = 30;

#[derive(Debug, Deserialize)]
pub(super) struct Pod {
    #[serde(default)]
    pub(super) metadata: Metadata,
    pub(super) spec: PodSpec,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Metadata {
    pub(super) annotations: Option<BTreeMap<String, String>>,
    pub(super) labels: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PodSpec {
    pub(super) containers: Vec<Container>,
    pub(super) init_containers: Option<Vec<Container>>,
    pub(super) volumes: Option<Vec<Value>>,
    pub(super) security_context: Option<SecurityContext>,
    pub(super) service_account_name: Option<String>,
    pub(super) termination_grace_period_seconds: Option<i64>,
    pub(super) affinity: Option<Value>,
    pub(super) os: Option<Os>,
    #[serde(default)]
    pub(super) host_network: bool,
    pub(super) dns_policy: Option<String>,
    pub(super) node_selector: Option<BTreeMap<String, String>>,
    pub(super) scheduling_gates: Option<Vec<SchedulingGate>>,
}

#[derive(Debug, Deserialize)]
pub(super) struct SchedulingGate {
    pub(super) name: String,
}

#[derive(Debug, Deserialize)]
pub(super) struct Os {
    pub(super) name: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Container {
    pub(super) name: String,
    pub(super) restart_policy: Option<String>,
    pub(super) env: Option<Vec<Variable>>,
    pub(super) volume_mounts: Option<Vec<VolumeMount>>,
    pub(super) security_context: Option<SecurityContext>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Variable {
    pub(super) name: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct VolumeMount {
    pub(super) name: String,
    pub(super) mount_path: String,
    pub(super) sub_path: Option<String>,
    pub(super) sub_path_expr: Option<String>,
}

/// Of a container or of a pod.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SecurityContext {
    pub(super) run_as_user: Option<i64>,
    pub(super) run_as_group: Option<i64>,
    pub(super) se_linux_options: Option<Value>,
}

impl Pod {
    /// Reads a pod.
    ///
    /// # Errors
    /// Usage, if it is none.
    pub(super) fn of(object: &Value) -> Result<Self> {
        Self::deserialize(object).map_err(|source| Error::usage("pod is malformed").source(source))
    }

    /// Its requests.
    ///
    /// # Errors
    /// Usage, for annotations that are unknown, malformed or contradict each other.
    pub(super) fn annotations(&self) -> Result<PodAnnotations> {
        self.metadata.annotations.as_ref().map_or_else(|| Ok(PodAnnotations::default()), PodAnnotations::of)
    }

    /// Service account that it runs as.
    pub(super) fn account(&self) -> &str {
        self.spec.service_account_name.as_deref().filter(|name| !name.is_empty()).unwrap_or("default")
    }

    /// True if the sidecar is there already: by this webhook, which may be called again, or by the author of the pod.
    ///
    /// # Errors
    /// Usage, if another container has its name.
    pub(super) fn has_sidecar(&self) -> Result<bool> {
        let named = |container: &&Container| container.name == SIDECAR;
        let own = self.spec.init_containers.iter().flatten().find(named);
        let is_sidecar = own.is_some_and(|container| container.restart_policy.as_deref() == Some("Always"));
        if self.spec.containers.iter().any(|container| named(&container)) || own.is_some() && !is_sidecar {
            return Err(Error::usage("name of a container is reserved for the sidecar").got(SIDECAR));
        }
        Ok(is_sidecar)
    }

    /// True for a pod that the kubelet runs from a file: nothing can change it.
    pub(super) fn is_mirror(&self) -> bool {
        self.has_annotation(MIRROR)
    }

    /// True if it has the scheduling gate already: by this webhook, which may be called again, or by the author of the pod.
    pub(super) fn has_gate(&self) -> bool {
        self.spec.scheduling_gates.iter().flatten().any(|gate| gate.name == GATE)
    }

    /// True if this webhook has seen that it is to wait.
    pub(super) fn is_gated(&self) -> bool {
        self.has_annotation(GATED)
    }

    /// True if its affinity follows a hint already.
    pub(super) fn is_placed(&self) -> bool {
        self.has_annotation(PLACED)
    }

    fn has_annotation(&self, key: &str) -> bool {
        self.metadata.annotations.as_ref().is_some_and(|annotations| annotations.contains_key(key))
    }

    /// Seconds between SIGTERM and SIGKILL.
    pub(super) fn termination_seconds(&self) -> u64 {
        let told = self.spec.termination_grace_period_seconds.and_then(|seconds| u64::try_from(seconds).ok());
        told.unwrap_or(TERMINATION_SECONDS)
    }

    /// Volume with a name.
    pub(super) fn volume(&self, name: &str) -> Option<&Value> {
        self.spec.volumes.iter().flatten().find(|volume| volume["name"] == name)
    }
}
