//! Which agent may read which names. Authorisation is by manifest: whoever may read a name may read the chunks of its tree.

use std::sync::{Arc, PoisonError, RwLock};

use serde::Deserialize;

use crate::pattern::Patterns;
use crate::repository::Name;
use crate::transfer::identity::Identity;

/// Rules of which agents may read which names; without a matching rule, none. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Policy(Arc<RwLock<Vec<Rule>>>);

/// Names that some agents may read.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Agents, as `SITE/AGENT`.
    pub agents: Patterns,
    /// Names that they may read.
    pub names: Patterns,
}

impl Policy {
    /// Every agent of the authority may read every name.
    #[must_use]
    pub fn everybody() -> Self {
        // Sound, and if it were not, nobody could read anything.
        let all = Patterns::of(&["**"]).unwrap_or_default();
        Self::only(vec![Rule { agents: all.clone(), names: all }])
    }

    /// Only what one of `rules` allows.
    #[must_use]
    pub fn only(rules: Vec<Rule>) -> Self {
        Self(Arc::new(RwLock::new(rules)))
    }

    /// True if `agent` may read `name`.
    #[must_use]
    pub fn allows(&self, agent: &Identity, name: &Name) -> bool {
        let agent = agent.path();
        let rules = self.0.read().unwrap_or_else(PoisonError::into_inner);
        rules.iter().any(|rule| rule.agents.take(&agent) && rule.names.take(name.as_str()))
    }

    /// Replaces the rules by those of `other`, for all clones.
    pub fn replace(&self, other: &Self) {
        let rules = other.0.read().unwrap_or_else(PoisonError::into_inner).clone();
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = rules;
    }
}

/// Agents that may call this one. Nobody by default. Clones share the patterns.
#[derive(Clone, Debug, Default)]
pub struct Callers(Arc<RwLock<Patterns>>);

impl Callers {
    /// Agents that match one of `patterns` (of `SITE/AGENT`).
    #[must_use]
    pub fn of(patterns: Patterns) -> Self {
        Self(Arc::new(RwLock::new(patterns)))
    }

    /// True if `agent` matches.
    #[must_use]
    pub fn include(&self, agent: &Identity) -> bool {
        self.0.read().unwrap_or_else(PoisonError::into_inner).take(&agent.path())
    }

    /// Replaces the patterns by those of `other`, for all clones.
    pub fn replace(&self, other: &Self) {
        let patterns = other.0.read().unwrap_or_else(PoisonError::into_inner).clone();
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = patterns;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(agents: &str, names: &[&str]) -> Rule {
        Rule { agents: Patterns::of(&[agents]).unwrap(), names: Patterns::of(names).unwrap() }
    }

    fn agent(path: &str) -> Identity {
        let (site, agent) = path.split_once('/').unwrap();
        Identity::new(site, agent).unwrap()
    }

    #[test]
    fn only_what_a_rule_allows() {
        let policy = Policy::only(vec![rule("cloud/*", &["run-7/*"]), rule("home/boss", &["**"])]);
        let may = |by: &str, name: &str| policy.allows(&agent(by), &name.parse().unwrap());
        assert!(may("cloud/a", "run-7/step-1") && may("home/boss", "run-8/step-1"));
        assert!(!may("cloud/a", "run-8/step-1") && !may("home/a", "run-7/step-1"));
        assert!(!may("cloud/a", "run-7/secret/step-1"), "a star is one segment");
        assert!(Policy::everybody().allows(&agent("x/y"), &"any/thing".parse().unwrap()));
        assert!(!Policy::default().allows(&agent("x/y"), &"anything".parse().unwrap()));
    }

    #[test]
    fn rules_are_replaced_for_all_who_hold_them() {
        let (policy, callers) = (Policy::default(), Callers::default());
        let (held, asked) = (policy.clone(), callers.clone());
        policy.replace(&Policy::only(vec![rule("home/*", &["run/*"])]));
        callers.replace(&Callers::of(Patterns::of(&["home/*"]).unwrap()));
        assert!(held.allows(&agent("home/a"), &"run/step-1".parse().unwrap()) && asked.include(&agent("home/a")));
        policy.replace(&Policy::default());
        assert!(!held.allows(&agent("home/a"), &"run/step-1".parse().unwrap()));
    }

    #[test]
    fn nobody_calls_unless_told() {
        assert!(!Callers::default().include(&agent("home/a")));
        let callers = Callers::of(Patterns::of(&["home/*", "cloud/boss"]).unwrap());
        assert!(callers.include(&agent("home/a")) && callers.include(&agent("cloud/boss")));
        assert!(!callers.include(&agent("cloud/a")) && !callers.include(&agent("home2/a")));
        assert!(!Callers::of(Patterns::of(&["*"]).unwrap()).include(&agent("home/a")), "a star is one segment");
    }
}
