//! Rights of agents to read names. Authorisation is by manifest: an agent that may read a name may read the chunks of
//! its tree.

use std::sync::{Arc, PoisonError, RwLock};

use serde::Deserialize;
use serde::de::{Deserializer, Error as _};

use crate::identity::Identity;
use crate::name::Name;
use crate::pattern::Patterns;

/// Rules for the names that agents may read; without a matching rule, none. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct AllowList(Arc<RwLock<Vec<AllowRule>>>);

/// Names that some agents may read.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AllowRule {
    /// Agents, as `SITE/AGENT`.
    #[serde(deserialize_with = "agents")]
    pub agents: Patterns,
    /// Names that these agents may read.
    pub names: Patterns,
}

impl AllowList {
    /// Lets every agent of the authority read every name.
    #[must_use]
    pub fn everybody() -> Self {
        // The pattern is valid; were it not, nobody could read anything.
        let all = Patterns::of(&["**"]).unwrap_or_default();
        Self::only(vec![AllowRule { agents: all.clone(), names: all }])
    }

    /// Allows only what one of `rules` allows.
    #[must_use]
    pub fn only(rules: Vec<AllowRule>) -> Self {
        Self(Arc::new(RwLock::new(rules)))
    }

    /// True if `agent` may read `name`.
    #[must_use]
    pub fn allows(&self, agent: &Identity, name: &Name) -> bool {
        self.rule(agent, name).is_some()
    }

    /// Name of the rule by which `agent` may read `name`, for the audit log: `[[allow]]` and its position, from 1.
    #[must_use]
    pub fn rule(&self, agent: &Identity, name: &Name) -> Option<String> {
        let agent = pattern_text(agent)?;
        let rules = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let place = rules.iter().position(|rule| rule.agents.take(&agent) && rule.names.take(name.as_str()))?;
        Some(format!("[[allow]] {}", place + 1))
    }

    /// Replaces the rules by those of `other`, for all clones.
    pub fn replace(&self, other: &Self) {
        let rules = other.0.read().unwrap_or_else(PoisonError::into_inner).clone();
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = rules;
    }
}

/// Agents that may call this one, by default none. Clones share the patterns.
#[derive(Clone, Debug, Default)]
pub struct Callers(Arc<RwLock<Patterns>>);

impl Callers {
    /// Callers that match one of `patterns` (of `SITE/AGENT`).
    #[must_use]
    pub fn of(patterns: Patterns) -> Self {
        Self(Arc::new(RwLock::new(patterns)))
    }

    /// True if `agent` matches.
    #[must_use]
    pub fn include(&self, agent: &Identity) -> bool {
        let patterns = self.0.read().unwrap_or_else(PoisonError::into_inner);
        pattern_text(agent).is_some_and(|agent| patterns.take(&agent))
    }

    /// Replaces the patterns by those of `other`, for all clones.
    pub fn replace(&self, other: &Self) {
        let patterns = other.0.read().unwrap_or_else(PoisonError::into_inner).clone();
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = patterns;
    }
}

/// Reads patterns of agents, of which each can match one.
///
/// # Errors
/// A pattern without a `/` matches no agent, unless it is `**`.
pub fn agents<'de, D: Deserializer<'de>>(value: D) -> Result<Patterns, D::Error> {
    let patterns = Patterns::deserialize(value)?;
    match patterns.texts().into_iter().find(|text| !text.contains('/') && !text.contains("**")) {
        Some(site) => {
            Err(D::Error::custom(format!("{site} matches no agent: agents are SITE/AGENT, all of a site SITE/*")))
        }
        None => Ok(patterns),
    }
}

/// The text that patterns of agents are compared with. A SPIFFE id has none: not even `**` stands for one.
#[must_use]
pub fn pattern_text(agent: &Identity) -> Option<String> {
    (!agent.is_spiffe()).then(|| agent.path())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(agents: &str, names: &[&str]) -> AllowRule {
        AllowRule { agents: Patterns::of(&[agents]).unwrap(), names: Patterns::of(names).unwrap() }
    }

    fn agent(path: &str) -> Identity {
        let (site, agent) = path.split_once('/').unwrap();
        Identity::new(site, agent).unwrap()
    }

    #[test]
    fn only_what_a_rule_allows() {
        let list = AllowList::only(vec![rule("cloud/*", &["run-7/*"]), rule("home/boss", &["**"])]);
        let may = |by: &str, name: &str| list.allows(&agent(by), &name.parse().unwrap());
        assert!(may("cloud/a", "run-7/step-1") && may("home/boss", "run-8/step-1"));
        assert!(!may("cloud/a", "run-8/step-1") && !may("home/a", "run-7/step-1"));
        assert!(!may("cloud/a", "run-7/secret/step-1"), "a star is one segment");
        assert_eq!(list.rule(&agent("home/boss"), &"run-8/step-1".parse().unwrap()).unwrap(), "[[allow]] 2");
        assert_eq!(list.rule(&agent("home/a"), &"run-7/step-1".parse().unwrap()), None);
        assert!(AllowList::everybody().allows(&agent("x/y"), &"any/thing".parse().unwrap()));
        assert!(!AllowList::default().allows(&agent("x/y"), &"anything".parse().unwrap()));
    }

    #[test]
    fn a_spiffe_id_matches_no_pattern() {
        let workload = Identity::spiffe("spiffe://example.org/a").unwrap();
        for pattern in ["**", "spiffe://example.org/a", "spiffe://**", "*/*"] {
            let list = AllowList::only(vec![rule(pattern, &["**"])]);
            assert!(!list.allows(&workload, &"a".parse().unwrap()), "{pattern}");
            assert!(!Callers::of(Patterns::of(&[pattern]).unwrap()).include(&workload), "{pattern}");
        }
        assert!(!AllowList::everybody().allows(&workload, &"a".parse().unwrap()));
    }

    #[test]
    fn rules_are_replaced_for_all_who_hold_them() {
        let (list, callers) = (AllowList::default(), Callers::default());
        let (held, asked) = (list.clone(), callers.clone());
        list.replace(&AllowList::only(vec![rule("home/*", &["run/*"])]));
        callers.replace(&Callers::of(Patterns::of(&["home/*"]).unwrap()));
        assert!(held.allows(&agent("home/a"), &"run/step-1".parse().unwrap()) && asked.include(&agent("home/a")));
        list.replace(&AllowList::default());
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
