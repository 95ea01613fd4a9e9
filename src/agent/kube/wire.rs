//! Wire types of scheduler extenders: <https://github.com/kubernetes/kube-scheduler/blob/e87dbdd/extender/v1/types.go>.
//!
//! They have no JSON tags in Go, so their names are in Pascal case; Go also reads them in lower case, and so does this. Anybody beside
//! the scheduler may send them, so that what is kept of a request is bounded.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;

/// Maximum nodes of a call: more than a cluster has (<https://kubernetes.io/docs/setup/best-practices/cluster-large/>).
const NODES_MAX: usize = 20_000;
/// Maximum containers of a pod.
const CONTAINERS_MAX: usize = 1_000;
/// Maximum entries of a map that count.
const ENTRIES_MAX: usize = 64;
/// Annotation of a pod that the kubelet runs from a file.
pub(in crate::agent) const MIRROR: &str = "kubernetes.io/config.mirror";

/// Arguments of the verbs `filter` and `prioritize`: `nodes`, or `node_names` if the extender is `nodeCacheCapable`.
#[derive(Debug, Deserialize)]
pub(in crate::agent) struct ExtenderArgs {
    #[serde(rename = "Pod", alias = "pod")]
    pub(super) pod: Pod,
    #[serde(rename = "Nodes", alias = "nodes", default)]
    pub(super) nodes: Option<NodeList>,
    #[serde(rename = "NodeNames", alias = "nodenames", default)]
    pub(super) node_names: Option<Bounded<String, NODES_MAX>>,
}

/// List of at most `MAX` elements.
#[derive(Debug)]
pub(in crate::agent) struct Bounded<T, const MAX: usize>(pub(in crate::agent) Vec<T>);

impl<T, const MAX: usize> Default for Bounded<T, MAX> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for Bounded<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List<T, const MAX: usize>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for List<T, MAX> {
            type Value = Bounded<T, MAX>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of at most {MAX} elements")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
                let mut elements = Vec::new();
                while let Some(element) = list.next_element()? {
                    if elements.len() == MAX {
                        return Err(A::Error::custom(format!("more than {MAX} elements")));
                    }
                    elements.push(element);
                }
                elements.shrink_to_fit();
                Ok(Bounded(elements))
            }
        }

        deserializer.deserialize_seq(List(PhantomData))
    }
}

/// Annotations, or labels, that count: of Towline, of zones, and of pods that the kubelet runs from a file. Others are not kept.
#[derive(Debug, Default)]
pub(in crate::agent) struct Picked(pub(in crate::agent) BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Picked {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = Picked;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut picked = BTreeMap::new();
                while let Some(key) = map.next_key::<String>()? {
                    let counts = ["towline.dev/", "topology.kubernetes.io/"].iter().any(|begin| key.starts_with(begin));
                    if !counts && key != MIRROR {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    if picked.len() == ENTRIES_MAX {
                        return Err(A::Error::custom(format!("more than {ENTRIES_MAX} entries like `{key:.100}`")));
                    }
                    picked.insert(key, map.next_value()?);
                }
                Ok(Picked(picked))
            }
        }

        deserializer.deserialize_map(Entries)
    }
}

/// GPUs in a map of limits; other resources are not kept.
#[derive(Debug, Default)]
pub(super) struct GpuLimits(pub(super) u64);

impl<'de> Deserialize<'de> for GpuLimits {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Limits;

        impl<'de> Visitor<'de> for Limits {
            type Value = GpuLimits;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut gpus = 0_u64;
                while let Some(key) = map.next_key::<String>()? {
                    if !key.ends_with(super::GPUS) {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    let count = match map.next_value()? {
                        Quantity::Text(text) => text.parse().unwrap_or(0),
                        Quantity::Number(number) => number,
                        Quantity::Other(_) => 0,
                    };
                    gpus = gpus.saturating_add(count);
                }
                Ok(GpuLimits(gpus))
            }
        }

        deserializer.deserialize_map(Limits)
    }
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
    pub(super) annotations: Option<Picked>,
    #[serde(default)]
    pub(super) labels: Option<Picked>,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct PodSpec {
    #[serde(default)]
    pub(super) containers: Option<Bounded<Container, CONTAINERS_MAX>>,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct Container {
    #[serde(default)]
    pub(super) resources: Resources,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct Resources {
    #[serde(default)]
    pub(super) limits: Option<GpuLimits>,
}

/// Quantity of a resource. Those of GPUs are whole numbers, written as text or not.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Quantity {
    Text(String),
    Number(u64),
    Other(IgnoredAny),
}

/// Nodes, each as it was sent.
#[derive(Debug, Deserialize)]
pub(super) struct NodeList {
    #[serde(default)]
    pub(super) items: Option<Bounded<Box<RawValue>, NODES_MAX>>,
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
