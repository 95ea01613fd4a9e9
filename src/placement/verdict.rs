//! Verdict of the policy on a site. Pure.

use std::collections::BTreeSet;

use serde::Serialize;

use super::hint::{Input, Snapshot};
use super::sites::Link;
use crate::identity::Identity;
use crate::policy::{Basis, LinkRule, PolicyRules, Question, Route, Ruling};

/// Verdict on a site.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum HintVerdict {
    /// All inputs may go there, to an agent at least.
    Allow,
    /// An input may not.
    Deny,
    /// No policy can be read that decides on an input with labels. Agents deny it.
    Unknown,
}

impl HintVerdict {
    /// Name in hints.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Deny => "deny",
            Self::Unknown => "unknown",
        }
    }
}

/// Denials that a candidate lists.
pub(super) const DENIALS_SHOWN: usize = 8;

/// Denial of one input.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
pub struct Denial {
    /// Name.
    pub input: String,
    /// Basis: `rule`, `residency`, `unknown-site`, `unknown-caller`, `no-rule`, `no-policy`.
    pub code: &'static str,
    /// The reason, as the policy gives it.
    pub rule: String,
}

/// Ruling on a site, by the paths that inputs may take there.
#[derive(Clone, Debug)]
pub(super) struct Placed {
    pub(super) verdict: HintVerdict,
    pub(super) denials: Vec<Denial>,
    /// From agents of other sites, over any link.
    from_agents: bool,
    /// Sites from which it may come over a private link.
    private_from: BTreeSet<String>,
    /// From the repository's store.
    pub(super) from_store: bool,
}

impl Placed {
    /// True if inputs may come over `link` from agents.
    pub(super) fn may_use(&self, link: &Link) -> bool {
        self.from_agents || (link.is_private() && self.private_from.contains(&link.from))
    }
}

/// Rules on all `inputs` going to `site`: to one of its agents, the first one that may have them.
pub(super) fn rule(snapshot: &Snapshot<'_>, inputs: &[Input], site: &str) -> Placed {
    let Some(policy) = snapshot.policy else { return without_policy(inputs) };
    let known = snapshot.agents.iter().filter(|agent| agent.site() == site);
    let mut placed = known.map(|agent| rule_on(snapshot, (policy, inputs), site, Some(agent)));
    let Some(first) = placed.next() else {
        // One that has told nothing yet.
        return rule_on(snapshot, (policy, inputs), site, Identity::new(site, "any").ok().as_ref());
    };
    if first.verdict == HintVerdict::Allow {
        return first;
    }
    placed.find(|other| other.verdict == HintVerdict::Allow).unwrap_or(first)
}

/// Rules on all `inputs` going to `agent` at `site`. Whatever way their chunks take, their manifests come from the store.
fn rule_on(
    snapshot: &Snapshot<'_>,
    (policy, inputs): (&PolicyRules, &[Input]),
    site: &str,
    agent: Option<&Identity>,
) -> Placed {
    let ruled = |input: &Input, from: Option<&str>, route: Route| {
        let question =
            Question { agent, caller: None, from, to: Some(site), name: &input.name, labels: &input.labels, route };
        if route == Route::Store { policy.rule_on_own(&question) } else { policy.rule_on(&question) }
    };
    let all = |from: Option<&str>, route: Route| inputs.iter().all(|input| ruled(input, from, route).allows());
    let (from_agents, from_store) = (all(None, Route::Unknown), all(None, Route::Store));
    let private = policy.private_links_of(site).filter(|(from, _)| snapshot.sites.site(from).is_some());
    let may_privately = private.filter(|(from, link)| route(link).is_some_and(|route| all(Some(from), route)));
    let private_from: BTreeSet<String> = may_privately.map(|(from, _)| from.to_owned()).collect();
    if from_store {
        return Placed { verdict: HintVerdict::Allow, denials: Vec::new(), from_agents, private_from, from_store };
    }
    let denial = |input: &Input| {
        let ruling = ruled(input, None, Route::Store);
        (!ruling.allows()).then(|| denial(input, &ruling))
    };
    Placed {
        verdict: HintVerdict::Deny,
        denials: inputs.iter().filter_map(denial).collect(),
        from_agents,
        private_from,
        from_store,
    }
}

/// Without a policy, what has no labels may go anywhere, and of the rest nothing is known.
fn without_policy(inputs: &[Input]) -> Placed {
    let undecided = inputs.iter().filter(|input| input.labels.restrict());
    let denials: Vec<Denial> = undecided.map(|input| denial(input, &Ruling::deny(Basis::NoPolicy))).collect();
    let open = denials.is_empty();
    let verdict = if open { HintVerdict::Allow } else { HintVerdict::Unknown };
    Placed { verdict, denials, from_agents: open, private_from: BTreeSet::new(), from_store: open }
}

fn denial(input: &Input, ruling: &Ruling) -> Denial {
    let code = match ruling.basis {
        Basis::Rule { .. } => "rule",
        Basis::Residency => "residency",
        Basis::UnknownSite => "unknown-site",
        Basis::UnknownCaller { .. } => "unknown-caller",
        Basis::NoRule => "no-rule",
        Basis::NoPolicy => "no-policy",
    };
    Denial { input: input.name.to_string(), code, rule: ruling.basis.to_string() }
}

/// A connection over the private link `link` of the policy.
fn route(link: &LinkRule) -> Option<Route> {
    let address = link.addresses.first()?.address();
    Some(Route::Connection { local: address, remote: address })
}
