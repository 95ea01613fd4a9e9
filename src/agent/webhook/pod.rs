//! Parts of a pod that the webhook reads (<https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/>). Lists and maps
//! may be null, as Go writes empty ones.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use super::annotations::PodAnnotations;
use crate::error::{Error, Result};

/// Name of the sidecar.
pub(super) const SIDECAR: &str = "towline";
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
    pub(super) termination_grace_period_seconds: Option<u64>,
    pub(super) affinity: Option<Value>,
    pub(super) os: Option<Os>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Os {
    pub(super) name: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Container {
    pub(super) name: String,
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
    pub(super) fn has_sidecar(&self) -> bool {
        self.spec.init_containers.iter().flatten().any(|container| container.name == SIDECAR)
    }

    /// Seconds between SIGTERM and SIGKILL.
    pub(super) fn termination_seconds(&self) -> u64 {
        self.spec.termination_grace_period_seconds.unwrap_or(TERMINATION_SECONDS)
    }

    /// Volume with a name.
    pub(super) fn volume(&self, name: &str) -> Option<&Value> {
        self.spec.volumes.iter().flatten().find(|volume| volume["name"] == name)
    }
}
