//! Node affinity by a hint: which sites a pod may run at, or at which it does best.

use serde_json::value::RawValue;
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
/// Bytes and values of a pod's own affinity, at most, and its terms that a requirement is added to: each is repeated for each way in
/// which a node says its site.
const LEN_MAX: usize = 64 << 10;
const VALUES_MAX: usize = 2048;
const TERMS_MAX: usize = 64;
/// Bytes of memory of a value, at most: an object with one member.
const VALUE_MEMORY: u64 = 700;
/// Copies of an affinity while it is changed and written.
const COPIES: u64 = 8;
/// Largest weight of a preference.
const WEIGHT_MAX: u64 = 100;
const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";
const PREFERRED: &str = "preferredDuringSchedulingIgnoredDuringExecution";

/// The affinity that a pod has already.
#[derive(Debug)]
pub(super) struct OwnAffinity<'a> {
    text: &'a str,
    values: usize,
}

impl<'a> OwnAffinity<'a> {
    /// Reads nothing yet but its size.
    ///
    /// # Errors
    /// Usage, if it is longer than one of a pod.
    pub(super) fn of(own: Option<&'a RawValue>) -> Result<Self> {
        let text = own.map_or("null", RawValue::get);
        if text.len() > LEN_MAX {
            return Err(malformed("spec.affinity").expected(format!("at most {LEN_MAX} bytes")).got(text.len()));
        }
        // A value follows one of these; those within strings are counted as well.
        let values = 1 + text.bytes().filter(|byte| b"{[:,".contains(byte)).count();
        if values > VALUES_MAX {
            return Err(malformed("spec.affinity").expected(format!("at most {VALUES_MAX} values")).got(values));
        }
        Ok(Self { text, values })
    }

    /// Bytes of memory that [`Self::with_hint`] takes, at most.
    pub(super) fn memory(&self) -> u64 {
        COPIES * (self.values as u64 * VALUE_MEMORY + self.text.len() as u64)
    }

    /// The affinity that follows `hint`.
    ///
    /// # Errors
    /// Denied, if it is required and the data may go to no site, with the first reasons; usage, for a malformed affinity.
    pub(super) fn with_hint(&self, wanted: HintUse, hint: &Hint) -> Result<Value> {
        let own = serde_json::from_str(self.text).map_err(|source| malformed("spec.affinity").source(source))?;
        with_hint(own, wanted, hint)
    }
}

fn malformed(place: &'static str) -> Error {
    Error::usage("affinity of the pod is malformed").at(place)
}

fn with_hint(own: Value, wanted: HintUse, hint: &Hint) -> Result<Value> {
    let sites: Vec<&Candidate> = hint.candidates.iter().filter(|one| one.verdict == HintVerdict::Allow).collect();
    let mut affinity = if own.is_object() { own } else { json!({}) };
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
                return Err(malformed("nodeSelectorTerms"));
            }
            if own.len() > TERMS_MAX {
                return Err(malformed("nodeSelectorTerms").expected(format!("at most {TERMS_MAX}")).got(own.len()));
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
