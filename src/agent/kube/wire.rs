//! Wire types of scheduler extenders: <https://github.com/kubernetes/kube-scheduler/blob/e87dbdd/extender/v1/types.go>.
//!
//! They have no JSON tags in Go, so their names are in Pascal case; Go also reads them in lower case, and so does this.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// Arguments of the verbs `filter` and `prioritize`: `nodes`, or `node_names` if the extender is `nodeCacheCapable`.
#[derive(Debug, Deserialize)]
pub(in crate::agent) struct ExtenderArgs {
    #[serde(rename = "Pod", alias = "pod")]
    pub(super) pod: Pod,
    #[serde(rename = "Nodes", alias = "nodes", default)]
    pub(super) nodes: Option<NodeList>,
    #[serde(rename = "NodeNames", alias = "nodenames", default)]
    pub(super) node_names: Option<Vec<String>>,
}

/// Parts of a pod that count (<https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/>).
#[derive(Debug, Default, Deserialize)]
pub(super) struct Pod {
    #[serde(default)]
    pub(super) metadata: Metadata,
    #[serde(default)]
    pub(super) spec: PodSpec,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct Metadata {
    #[serde(default)]
    pub(super) name: String,
    #[serde(default)]
    pub(super) namespace: String,
    #[serde(default)]
    pub(super) annotations: Option<BTreeMap<String, String>>,
    #[serde(default)]
    pub(super) labels: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct PodSpec {
    #[serde(default)]
    pub(super) containers: Option<Vec<Container>>,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct Container {
    #[serde(default)]
    pub(super) resources: Resources,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct Resources {
    #[serde(default)]
    pub(super) limits: Option<BTreeMap<String, Quantity>>,
}

/// Quantity of a resource. Those of GPUs are whole numbers, written as text or not.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Quantity {
    Text(String),
    Number(u64),
    Other(serde::de::IgnoredAny),
}

/// Nodes, each as it was sent.
#[derive(Debug, Deserialize)]
pub(super) struct NodeList {
    #[serde(default)]
    pub(super) items: Option<Vec<Box<RawValue>>>,
}

/// Parts of a node that count.
#[derive(Debug, Deserialize)]
pub(super) struct Node {
    #[serde(default)]
    pub(super) metadata: Metadata,
}

/// Result of the verb `filter`. Nodes are in the form of the arguments, the other form is null.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "PascalCase")]
pub(in crate::agent) struct ExtenderFilterResult {
    pub(super) nodes: Option<PassedNodes>,
    pub(super) node_names: Option<Vec<String>>,
    pub(super) failed_nodes: BTreeMap<String, String>,
    /// Nodes that no preemption would help.
    pub(super) failed_and_unresolvable_nodes: BTreeMap<String, String>,
    pub(super) error: String,
}

#[derive(Debug, Default, Serialize)]
pub(super) struct PassedNodes {
    pub(super) metadata: BTreeMap<String, String>,
    pub(super) items: Vec<Box<RawValue>>,
}

/// Element of the result of the verb `prioritize`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub(in crate::agent) struct HostPriority {
    pub(super) host: String,
    /// 0 to 10.
    pub(super) score: u64,
}

impl ExtenderFilterResult {
    /// Result that fails the pod.
    pub(in crate::agent) fn failed(error: String) -> Self {
        Self { error, ..Self::default() }
    }
}
