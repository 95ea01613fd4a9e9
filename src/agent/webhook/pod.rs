//! Parts of a pod that the webhook reads (<https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/>). Lists and maps
//! may be null, as Go writes empty ones.
//!
//! Anybody with a route to the webhook may send one: nothing else of it is kept, and what is kept takes a few times its length.

use std::fmt;

use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;

use crate::agent::kube::{Bounded, MIRROR, Picked};
use crate::agent::pods::{GATE, GATED, PLACED, PodAnnotations};
use crate::error::{Error, Result};

/// Name of the sidecar.
pub(super) const SIDECAR: &str = "towline";
/// Seconds between SIGTERM and SIGKILL, by default.
const TERMINATION_SECONDS: u64 = 30;
/// Elements of a list of a pod or of a container, at most.
const ELEMENTS_MAX: usize = 1_000;
/// Variables of a container, at most.
const VARIABLES_MAX: usize = 10_000;
/// Sources of volumes that nothing can be written to.
const READ_ONLY: [&str; 5] = ["configMap", "secret", "downwardAPI", "projected", "image"];

/// Head of a pod, which has its requests: of one that asks for nothing, the rest is not read.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct PodHead {
    metadata: Metadata,
}

#[derive(Debug, Deserialize)]
pub(super) struct Pod {
    #[serde(default)]
    pub(super) metadata: Metadata,
    pub(super) spec: PodSpec,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct Metadata {
    pub(super) annotations: Option<Picked>,
    /// Only whether there are some counts.
    pub(super) labels: Option<IgnoredAny>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PodSpec {
    pub(super) containers: Bounded<Container, ELEMENTS_MAX>,
    pub(super) init_containers: Option<Bounded<InitContainer, ELEMENTS_MAX>>,
    pub(super) volumes: Option<Bounded<Volume, ELEMENTS_MAX>>,
    pub(super) security_context: Option<Box<SecurityContext>>,
    pub(super) service_account_name: Option<String>,
    pub(super) termination_grace_period_seconds: Option<i64>,
    /// JSON of the affinity, which the module `affinity` parses.
    pub(super) affinity: Option<Box<RawValue>>,
    pub(super) os: Option<Os>,
    #[serde(default)]
    pub(super) host_network: bool,
    pub(super) dns_policy: Option<String>,
    pub(super) node_selector: Option<Picked>,
    pub(super) scheduling_gates: Option<Bounded<SchedulingGate, ELEMENTS_MAX>>,
}

#[derive(Debug, Deserialize)]
pub(super) struct SchedulingGate {
    pub(super) name: Box<str>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Os {
    pub(super) name: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct InitContainer {
    name: Box<str>,
    restart_policy: Option<Box<str>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Container {
    pub(super) name: Box<str>,
    pub(super) env: Option<Bounded<Variable, VARIABLES_MAX>>,
    pub(super) volume_mounts: Option<Bounded<VolumeMount, ELEMENTS_MAX>>,
    pub(super) security_context: Option<Box<SecurityContext>>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Variable {
    pub(super) name: Box<str>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct VolumeMount {
    pub(super) name: Box<str>,
    pub(super) mount_path: Box<str>,
    pub(super) sub_path: Option<Box<str>>,
    pub(super) sub_path_expr: Option<IgnoredAny>,
}

/// Of a container or of a pod.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SecurityContext {
    pub(super) run_as_user: Option<i64>,
    pub(super) run_as_group: Option<i64>,
    pub(super) se_linux_options: Option<SeLinuxOptions>,
}

/// All that they have.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct SeLinuxOptions {
    #[serde(skip_serializing_if = "Option::is_none")]
    level: Option<Box<str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<Box<str>>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<Box<str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    user: Option<Box<str>>,
}

/// A volume: its name, and a source, which is the member with any other name.
#[derive(Debug)]
pub(super) struct Volume {
    name: Box<str>,
    /// True if nothing can be written to it.
    pub(super) read_only: bool,
}

impl<'de> Deserialize<'de> for Volume {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Source {
            read_only: Option<bool>,
        }

        struct Members;

        impl<'de> Visitor<'de> for Members {
            type Value = Volume;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a volume")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut volume = Volume { name: Box::default(), read_only: false };
                while let Some(member) = map.next_key::<String>()? {
                    if member == "name" {
                        volume.name = map.next_value()?;
                        continue;
                    }
                    let source: Option<Source> = map.next_value()?;
                    let told = source.and_then(|source| source.read_only).unwrap_or_default();
                    volume.read_only |= told || READ_ONLY.contains(&member.as_str());
                }
                Ok(volume)
            }
        }

        deserializer.deserialize_map(Members)
    }
}

impl PodHead {
    /// Reads the head of a pod in JSON.
    ///
    /// # Errors
    /// Usage, if it is none.
    pub(super) fn of(object: &str) -> Result<Self> {
        serde_json::from_str(object).map_err(malformed)
    }

    /// Requests of the pod.
    ///
    /// # Errors
    /// Usage, for annotations that are unknown, malformed or contradict each other.
    pub(super) fn annotations(&self) -> Result<PodAnnotations> {
        self.metadata
            .annotations
            .as_ref()
            .map_or_else(|| Ok(PodAnnotations::default()), |own| PodAnnotations::of(&own.0))
    }

    /// True for a pod that the kubelet runs from a file: nothing can change it.
    pub(super) fn is_mirror(&self) -> bool {
        self.metadata.has_annotation(MIRROR)
    }
}

impl Metadata {
    fn has_annotation(&self, key: &str) -> bool {
        self.annotations.as_ref().is_some_and(|annotations| annotations.0.contains_key(key))
    }
}

fn malformed(source: serde_json::Error) -> Error {
    Error::usage("pod is malformed").source(source)
}

impl Pod {
    /// Reads a pod in JSON.
    ///
    /// # Errors
    /// Usage, if it is none, or if it has more of something than a pod has.
    pub(super) fn of(object: &str) -> Result<Self> {
        serde_json::from_str(object).map_err(malformed)
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
        let mut init_containers = self.spec.init_containers.iter().flat_map(|list| &list.0);
        let own = init_containers.find(|container| &*container.name == SIDECAR);
        let is_sidecar = own.is_some_and(|container| container.restart_policy.as_deref() == Some("Always"));
        if self.spec.containers.0.iter().any(|container| &*container.name == SIDECAR) || own.is_some() && !is_sidecar {
            return Err(Error::usage("name of a container is reserved for the sidecar").got(SIDECAR));
        }
        Ok(is_sidecar)
    }

    /// True if it has the scheduling gate already: by this webhook, which may be called again, or by the author of the pod.
    pub(super) fn has_gate(&self) -> bool {
        self.spec.scheduling_gates.iter().flat_map(|list| &list.0).any(|gate| &*gate.name == GATE)
    }

    /// True if this webhook has seen that it is to wait.
    pub(super) fn is_gated(&self) -> bool {
        self.metadata.has_annotation(GATED)
    }

    /// True if its affinity follows a hint already.
    pub(super) fn is_placed(&self) -> bool {
        self.metadata.has_annotation(PLACED)
    }

    /// Seconds between SIGTERM and SIGKILL.
    pub(super) fn termination_seconds(&self) -> u64 {
        let told = self.spec.termination_grace_period_seconds.and_then(|seconds| u64::try_from(seconds).ok());
        told.unwrap_or(TERMINATION_SECONDS)
    }

    /// Volume with a name.
    pub(super) fn volume(&self, name: &str) -> Option<&Volume> {
        self.spec.volumes.iter().flat_map(|list| &list.0).find(|volume| &*volume.name == name)
    }
}
