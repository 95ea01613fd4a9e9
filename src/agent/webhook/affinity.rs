//! Node affinity by a hint: which sites a pod may run at, or at which it does best.

use serde_json::{Value, json};

use crate::agent::pods::HintUse;
use crate::error::{Error, Result};
use crate::placement::{Candidate, Hint, HintVerdict};

/// Label of a node that says its site.
const SITE: &str = "towline.dev/site";
/// Labels of nodes without it: a site may be called as their zone or region
/// (<https://kubernetes.io/docs/reference/labels-annotations-taints/>).
const ZONES: [&str; 2] = ["topology.kubernetes.io/zone", "topology.kubernetes.io/region"];
/// Sites that a pod prefers, at most.
const PREFERRED_MAX: usize = 16;
/// Largest weight of a preference.
const WEIGHT_MAX: u64 = 100;
const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";
const PREFERRED: &str = "preferredDuringSchedulingIgnoredDuringExecution";

/// The affinity of a pod, which may have one, that follows `hint`.
///
/// # Errors
/// Denied, if it is required and the data may go to no site, with the first reasons; usage, for a malformed affinity.
pub(super) fn with_hint(own: Option<&Value>, wanted: HintUse, hint: &Hint) -> Result<Value> {
    let sites: Vec<&Candidate> = hint.candidates.iter().filter(|one| one.verdict == HintVerdict::Allow).collect();
    let mut affinity = own.filter(|own| own.is_object()).cloned().unwrap_or_else(|| json!({}));
    if !affinity["nodeAffinity"].is_object() {
        affinity["nodeAffinity"] = json!({});
    }
    let nodes = &mut affinity["nodeAffinity"];
    match wanted {
        HintUse::Required if sites.is_empty() => return Err(nowhere(hint)),
        HintUse::Required => {
            let names: Vec<&str> = sites.iter().map(|one| one.site.as_str()).collect();
            let alternatives = at_sites(&names);
            let own = nodes[REQUIRED]["nodeSelectorTerms"].as_array().filter(|terms| !terms.is_empty()).cloned();
            let own = own.unwrap_or_else(|| vec![json!({})]);
            if !own.iter().all(Value::is_object) {
                return Err(Error::usage("affinity of the pod is malformed").at("nodeSelectorTerms"));
            }
            // Terms are alternatives, and the expressions of a term hold together.
            let terms: Vec<Value> =
                own.iter().flat_map(|term| alternatives.iter().map(|site| both(term, site))).collect();
            nodes[REQUIRED] = json!({ "nodeSelectorTerms": terms });
        }
        HintUse::Preferred => {
            let best = sites.iter().map(|one| one.score).max().unwrap_or(0).max(1);
            let mut terms = nodes[PREFERRED].as_array().cloned().unwrap_or_default();
            for one in sites.iter().take(PREFERRED_MAX) {
                let weight = (one.score.saturating_mul(WEIGHT_MAX) / best).clamp(1, WEIGHT_MAX);
                let preferences = at_sites(&[&one.site]);
                terms.extend(preferences.into_iter().map(|site| json!({ "weight": weight, "preference": site })));
            }
            if !terms.is_empty() {
                nodes[PREFERRED] = Value::Array(terms);
            }
        }
    }
    Ok(affinity)
}

/// Terms, one of which holds for a node of the sites.
fn at_sites(sites: &[&str]) -> Vec<Value> {
    let among = |key: &str| json!({ "key": key, "operator": "In", "values": sites });
    let named = json!({ "matchExpressions": [among(SITE)] });
    let unnamed = json!({ "key": SITE, "operator": "DoesNotExist" });
    let zones = ZONES.iter().map(|key| json!({ "matchExpressions": [unnamed, among(key)] }));
    [named].into_iter().chain(zones).collect()
}

/// The term `own`, with the expressions of `site`.
fn both(own: &Value, site: &Value) -> Value {
    let mut term = own.clone();
    let mut expressions = own["matchExpressions"].as_array().cloned().unwrap_or_default();
    expressions.extend(site["matchExpressions"].as_array().cloned().unwrap_or_default());
    term["matchExpressions"] = Value::Array(expressions);
    term
}

fn nowhere(hint: &Hint) -> Error {
    let reasons = hint.candidates.iter().take(4).filter_map(|candidate| {
        let denial = candidate.deny.first()?;
        Some(format!("{}: {:.100}: {:.200}", candidate.site, denial.input, denial.rule))
    });
    let reasons = reasons.collect::<Vec<_>>().join("; ");
    Error::denied("the data of this pod may go to no site").got(reasons).help("ask who signs the policy")
}
