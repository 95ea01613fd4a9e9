//! Which agent may read which names. Authorisation is by manifest: whoever may read a name may read the chunks of its tree.

use globset::{Glob, GlobMatcher};

use crate::error::{Error, Result};
use crate::repository::Name;
use crate::transfer::identity::Identity;

/// What agents of the authority may read.
#[derive(Clone, Debug, Default)]
pub struct Policy {
    /// None: every name.
    rules: Option<Vec<Rule>>,
}

#[derive(Clone, Debug)]
struct Rule {
    agents: GlobMatcher,
    names: Vec<GlobMatcher>,
}

impl Policy {
    /// Every agent of the authority may read every name.
    #[must_use]
    pub fn everybody() -> Self {
        Self::default()
    }

    /// Only what rules allow: each is a pattern of agents (`SITE/AGENT`) and patterns of the names that they may read. In patterns
    /// `*` stands for anything.
    ///
    /// # Errors
    /// Usage, for a malformed pattern.
    pub fn only<'a>(rules: impl IntoIterator<Item = (&'a str, &'a [String])>) -> Result<Self> {
        let rule = |(agents, names): (&str, &[String])| {
            let names = names.iter().map(|name| pattern(name)).collect::<Result<_>>()?;
            Ok(Rule { agents: pattern(agents)?, names })
        };
        Ok(Self { rules: Some(rules.into_iter().map(rule).collect::<Result<_>>()?) })
    }

    /// May `agent` read `name`?
    #[must_use]
    pub fn allows(&self, agent: &Identity, name: &Name) -> bool {
        let Some(rules) = &self.rules else { return true };
        let agent = agent.path();
        let allows =
            |rule: &Rule| rule.agents.is_match(&agent) && rule.names.iter().any(|names| names.is_match(name.as_str()));
        rules.iter().any(allows)
    }
}

/// Which agents may ask this one to do something. Nobody, unless they are told.
#[derive(Clone, Debug, Default)]
pub struct Callers(Vec<GlobMatcher>);

impl Callers {
    /// Those that one of the patterns of agents (`SITE/AGENT`) fits; in patterns `*` stands for anything.
    ///
    /// # Errors
    /// Usage, for a malformed pattern.
    pub fn of(patterns: &[String]) -> Result<Self> {
        Ok(Self(patterns.iter().map(|agents| pattern(agents)).collect::<Result<_>>()?))
    }

    /// Is `agent` one of them?
    #[must_use]
    pub fn include(&self, agent: &Identity) -> bool {
        let agent = agent.path();
        self.0.iter().any(|agents| agents.is_match(&agent))
    }
}

fn pattern(text: &str) -> Result<GlobMatcher> {
    let malformed = |source| {
        let error = Error::usage("pattern in the rules is malformed").expected("text, in which * stands for anything");
        error.got(format!("{text:?}")).cure("see `callers` and [[allow]] in the agent's settings").source(source)
    };
    let glob = Glob::new(text).map_err(malformed)?;
    Ok(glob.compile_matcher())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_rule_allows() {
        let runs = ["run-7/*".to_owned()];
        let all = ["*".to_owned()];
        let policy = Policy::only([("cloud/*", runs.as_slice()), ("home/boss", all.as_slice())]).unwrap();
        let may = |site: &str, agent: &str, name: &str| {
            policy.allows(&Identity::new(site, agent).unwrap(), &name.parse().unwrap())
        };
        assert!(may("cloud", "a", "run-7/step-1"));
        assert!(!may("cloud", "a", "run-8/step-1"));
        assert!(!may("home", "a", "run-7/step-1"));
        assert!(may("home", "boss", "run-8/step-1"));
        assert!(Policy::only([("[", all.as_slice())]).is_err());
        assert!(Policy::everybody().allows(&Identity::new("x", "y").unwrap(), &"anything".parse().unwrap()));
    }

    #[test]
    fn nobody_calls_unless_told() {
        let agent = |site: &str, agent: &str| Identity::new(site, agent).unwrap();
        assert!(!Callers::default().include(&agent("home", "a")));
        let callers = Callers::of(&["home/*".to_owned(), "cloud/boss".to_owned()]).unwrap();
        assert!(callers.include(&agent("home", "a")) && callers.include(&agent("cloud", "boss")));
        assert!(!callers.include(&agent("cloud", "a")) && !callers.include(&agent("home2", "a")));
        assert!(Callers::of(&["[".to_owned()]).is_err());
    }
}
