//! Scheduler extender for Kubernetes: translates a pod and its nodes to a request for a hint, and the hint to what passes and how well.
//! Pure: `api/kube.rs` asks for the hint.
//!
//! Nodes fail only for the policy, never because data is not there yet: a pod that was filtered is tried again only by chance.

mod levels;
mod wire;

use std::collections::BTreeMap;

use serde::Deserialize as _;
use serde_json::value::RawValue;

use self::levels::levels;
pub(super) use self::wire::{Bounded, ExtenderArgs, ExtenderFilterResult, HostPriority, MIRROR, Picked};
use self::wire::{Metadata, Node, PassedNodes, Pod};
use crate::error::{Error, Result};
use crate::name::Name;
use crate::pattern::Patterns;
use crate::placement::{Hint, HintCandidate, HintRequest, HintVerdict, INPUTS_MAX, Mode, Objective, Sites, Workload};

/// Annotation of a pod: the names that it reads, separated by commas.
const INPUTS: &str = "towline.dev/inputs";
/// Annotation of a pod: `time` (default), `cost` or `weighted`.
const OBJECTIVE: &str = "towline.dev/objective";
/// Annotation of a pod: dollars that an hour of waiting is worth.
const USD_PER_HOUR: &str = "towline.dev/usd-per-hour";
/// Label of a node: its site.
const SITE: &str = "towline.dev/site";
/// Labels of a node (<https://kubernetes.io/docs/reference/labels-annotations-taints/>): a site may be called as its zone or region.
const ZONES: [&str; 2] = ["topology.kubernetes.io/zone", "topology.kubernetes.io/region"];
/// Ends of the names of resources that are GPUs.
const GPUS: &str = "/gpu";

/// Names that pods of some namespaces may ask about.
#[derive(Clone, Debug)]
pub struct KubeRule {
    /// Namespaces.
    pub namespaces: Patterns,
    /// Names.
    pub names: Patterns,
}

/// Rules for pods.
#[derive(Clone, Debug, Default)]
pub struct KubeRules(pub Vec<KubeRule>);

impl KubeRules {
    /// True if pods of the namespace may ask about the name.
    #[must_use]
    pub fn allow(&self, namespace: &str, name: &Name) -> bool {
        self.0.iter().any(|rule| rule.namespaces.take(namespace) && rule.names.take(name.as_str()))
    }
}

/// Question of a scheduler: a pod, and where it could run.
#[derive(Debug)]
pub(super) struct KubeQuestion {
    pub(super) namespace: String,
    /// Names that the pod reads; empty: there is nothing to say.
    pub(super) inputs: Vec<String>,
    objective: Objective,
    workload: Workload,
    places: Vec<Place>,
    /// True if the nodes came by name alone.
    by_name: bool,
}

/// A node, and its site if one is known.
#[derive(Debug)]
struct Place {
    node: String,
    site: Option<String>,
    raw: Option<Box<RawValue>>,
}

impl KubeQuestion {
    /// Reads the arguments of a call.
    ///
    /// # Errors
    /// Usage, for an annotation or a node that is malformed.
    pub(super) fn of(args: ExtenderArgs, sites: &Sites) -> Result<Self> {
        let ExtenderArgs { pod, nodes, node_names } = args;
        let by_name = nodes.is_none();
        let places = match nodes {
            None => node_names.unwrap_or_default().0.into_iter().map(|node| place(node, None, sites)).collect(),
            Some(nodes) => {
                let items = nodes.items.unwrap_or_default().0.into_iter();
                items.map(|raw| place_of(raw, sites)).collect::<Result<_>>()?
            }
        };
        let (workload, objective) = job_of(&pod)?;
        let Metadata { namespace, annotations, name, .. } = pod.metadata;
        let annotations = annotations.map(|annotations| annotations.0).unwrap_or_default();
        let inputs = annotations.get(INPUTS).map(String::as_str).unwrap_or_default().split(',').map(str::trim);
        let inputs: Vec<String> = inputs.filter(|name| !name.is_empty()).map(str::to_owned).collect();
        if inputs.len() > INPUTS_MAX {
            return Err(malformed(&name, INPUTS, "at most 256 names").got(inputs.len()));
        }
        Ok(Self { namespace, inputs, objective, workload, places, by_name })
    }

    /// The request for a hint about the sites of the nodes.
    pub(super) fn request(&self) -> HintRequest {
        let mut sites: Vec<&str> = self.places.iter().filter_map(|place| place.site.as_deref()).collect();
        sites.sort_unstable();
        sites.dedup();
        HintRequest {
            workload: self.workload.clone(),
            candidates: sites.into_iter().map(|site| HintCandidate { site: site.to_owned() }).collect(),
            objective: self.objective.clone(),
            ..HintRequest::about(&self.inputs)
        }
    }

    /// Bytes of the reasons in the answer of [`filter`](Self::filter): a short question can have a long one.
    pub(super) fn reasons_len(&self, hint: Option<&Hint>) -> u64 {
        let verdicts = hint.map(verdicts).unwrap_or_default();
        self.places.iter().filter_map(|place| verdicts.get(&place.site)).map(|reason| reason.len() as u64).sum()
    }

    /// Nodes that pass: those of sites where the data may go. Without a hint, all do.
    pub(super) fn filter(self, hint: Option<&Hint>) -> ExtenderFilterResult {
        let verdicts = hint.map(verdicts);
        let (mut passed, mut failed) = (Vec::new(), BTreeMap::new());
        for place in self.places {
            match verdicts.as_ref().and_then(|verdicts| verdicts.get(&place.site)) {
                Some(reason) => drop(failed.insert(place.node, reason.clone())),
                None => passed.push(place),
            }
        }
        let mut result = ExtenderFilterResult { failed_and_unresolvable_nodes: failed, ..Default::default() };
        if self.by_name {
            result.node_names = Some(passed.into_iter().map(|place| place.node).collect());
        } else {
            let items = passed.into_iter().filter_map(|place| place.raw).collect();
            result.nodes = Some(PassedNodes { items, ..PassedNodes::default() });
        }
        result
    }

    /// Score of each node, from 0 to 10. Without a hint, all have 0.
    pub(super) fn prioritize(self, hint: Option<&Hint>) -> Vec<HostPriority> {
        let scores: BTreeMap<&str, u64> = hint.map_or_else(BTreeMap::new, |hint| {
            let sites: Vec<_> = hint.candidates.iter().filter(|one| one.verdict == HintVerdict::Allow).collect();
            let levels = levels(&sites.iter().map(|one| one.score).collect::<Vec<_>>());
            sites.iter().map(|one| one.site.as_str()).zip(levels).collect()
        });
        let score = |place: &Place| place.site.as_deref().and_then(|site| scores.get(site)).copied().unwrap_or(0);
        self.places.into_iter().map(|place| HostPriority { score: score(&place), host: place.node }).collect()
    }
}

/// Reasons against the sites where the data may not go; `None` is a node without a site.
fn verdicts(hint: &Hint) -> BTreeMap<Option<String>, String> {
    let mut reasons = BTreeMap::new();
    for candidate in hint.candidates.iter().filter(|candidate| candidate.verdict != HintVerdict::Allow) {
        // Every node of the site gets it, so one denial must do.
        let (first, others) = match candidate.deny.split_first() {
            Some((first, others)) => (format!("{:.100}: {:.200}", first.input, first.rule), !others.is_empty()),
            None => ("its data".to_owned(), false),
        };
        let others = if others { ", and other inputs" } else { "" };
        let reason = format!("towline: {first}{others}: may not go to site {}", candidate.site);
        reasons.insert(Some(candidate.site.clone()), reason);
    }
    if hint.elsewhere != HintVerdict::Allow {
        let reason = format!(
            "towline: the node has no site (label {SITE}, or `nodes` in the sites file), and the data is restricted"
        );
        reasons.insert(None, reason);
    }
    reasons
}

/// Site that the labels of a node name, if the sites file describes it.
pub(super) fn site_of_labels<'a>(labels: &'a BTreeMap<String, String>, sites: &Sites) -> Option<&'a str> {
    let known = |site: &&str| sites.site(site).is_some();
    let label = |key: &str| labels.get(key).map(String::as_str);
    match label(SITE) {
        Some(site) => Some(site).filter(known),
        None => ZONES.iter().find_map(|zone| label(zone).filter(known)),
    }
}

/// True if [`site_of_labels`] reads the label.
pub(super) fn is_site_label(key: &str) -> bool {
    key == SITE || ZONES.contains(&key)
}

/// A node by its name, and its labels if they are known.
fn place(node: String, labels: Option<&BTreeMap<String, String>>, sites: &Sites) -> Place {
    let labelled = |labels: &BTreeMap<String, String>| labels.contains_key(SITE);
    let site = match labels {
        Some(labels) if labelled(labels) => site_of_labels(labels, sites),
        _ => sites.of_node(&node).or_else(|| site_of_labels(labels?, sites)),
    };
    Place { site: site.map(str::to_owned), node, raw: None }
}

fn place_of(raw: Box<RawValue>, sites: &Sites) -> Result<Place> {
    let node: Node =
        serde_json::from_str(raw.get()).map_err(|source| Error::usage("node is malformed").source(source))?;
    let labels = node.metadata.labels.as_ref().map(|labels| &labels.0);
    Ok(Place { raw: Some(raw), ..place(node.metadata.name, labels, sites) })
}

/// The job of a pod, which anybody may have written, and its objective.
///
/// # Errors
/// Usage, if it is no pod, or an annotation is malformed.
pub(super) fn job_of_object(pod: &serde_json::Value) -> Result<(Workload, Objective)> {
    job_of(&Pod::deserialize(pod).map_err(|source| Error::usage("pod is malformed").source(source))?)
}

/// As [`job_of_object`], for a pod in JSON, of which no more is kept than counts.
///
/// # Errors
/// As [`job_of_object`].
pub(super) fn job_of_text(pod: &str) -> Result<(Workload, Objective)> {
    job_of(&serde_json::from_str(pod).map_err(|source| Error::usage("pod is malformed").source(source))?)
}

fn job_of(pod: &Pod) -> Result<(Workload, Objective)> {
    let annotations = pod.metadata.annotations.as_ref().map(|annotations| &annotations.0);
    let told = |key: &str| annotations?.get(key).map(|value| value.trim()).filter(|value| !value.is_empty());
    let wrong = |key, expected| malformed(&pod.metadata.name, key, expected);
    let mode = match told(OBJECTIVE) {
        None => Mode::default(),
        Some(text) => text.parse().map_err(|_| wrong(OBJECTIVE, "time, cost or weighted").got(text))?,
    };
    let usd_per_hour = match told(USD_PER_HOUR) {
        None => 0.0,
        Some(text) => text.parse().map_err(|_| wrong(USD_PER_HOUR, "dollars").got(text))?,
    };
    let workload = Workload { gpus: gpus(pod), ..Workload::default() };
    Ok((workload, Objective { mode, usd_per_hour, ..Objective::default() }))
}

fn malformed(pod: &str, key: &str, expected: &str) -> Error {
    Error::usage("annotation of the pod is malformed").at(format!("{pod}: {key}")).expected(expected)
}

/// GPUs of all containers, by their limits.
fn gpus(pod: &Pod) -> u64 {
    let containers = pod.spec.containers.iter().flat_map(|containers| &containers.0);
    let limits = containers.filter_map(|container| container.resources.limits.as_ref());
    limits.fold(0, |sum, limits| sum.saturating_add(limits.0))
}
