//! Cases beside a policy: what its author expects it to decide, in TOML, and whether it does.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use toml::Spanned;

use super::labels::Labels;
use super::rules::{Basis, LocalCaller, PolicyRules, Question, Route, Ruling, Verdict};
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::name::Name;
use crate::toml_text::{OneOrSeveral, at_line, line, malformed};

/// Name of a case that gives only labels.
const ANY_NAME: &str = "any";
/// Destination that stands for a machine without a certificate.
const NOBODY: &str = "-";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    policy: Option<String>,
    #[serde(default, rename = "test")]
    tests: Vec<Spanned<Written>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Written {
    name: Option<String>,
    #[serde(default)]
    labels: BTreeMap<String, OneOrSeveral>,
    caller: Option<String>,
    caller_tenant: Option<String>,
    from: Option<String>,
    route: Option<WrittenRoute>,
    #[serde(default)]
    allow: OneOrSeveral,
    #[serde(default)]
    deny: OneOrSeveral,
    rule: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "\"node\", \"store\", or the two addresses of a connection: here, there")]
enum WrittenRoute {
    Word(WordRoute),
    Connection([IpAddr; 2]),
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum WordRoute {
    Node,
    Store,
}

/// Expected rulings.
#[derive(Debug)]
pub struct Cases {
    policy: Option<String>,
    cases: Vec<Case>,
}

/// One expected ruling.
#[derive(Debug)]
struct Case {
    line: usize,
    name: Name,
    labels: Labels,
    caller: Option<LocalCaller>,
    from: Option<String>,
    to: String,
    agent: Option<Identity>,
    route: Route,
    expected: Verdict,
    rule: Option<String>,
}

/// A case, and what was decided.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CheckedCase {
    /// Line of the file of cases where it begins.
    pub line: usize,
    /// Name.
    pub name: Name,
    /// Destination, as it was written.
    pub to: String,
    /// Expected answer.
    pub expected: Verdict,
    /// Expected reason, if one was given: the `why` of a rule, or what decides besides rules.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// Ruling.
    #[serde(flatten)]
    pub ruling: Ruling,
    /// True if that is what was expected.
    pub passed: bool,
}

/// Report on cases.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CaseReport {
    /// Cases that were decided as expected.
    pub passed: usize,
    /// The others.
    pub failed: usize,
    /// All of them, in their order.
    pub cases: Vec<CheckedCase>,
    /// Rules that decide no case.
    pub untested: Vec<UntestedRule>,
}

/// A rule that decides no case.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UntestedRule {
    /// Line of the policy where it begins.
    pub line: usize,
    /// Its reason.
    pub why: String,
}

impl Cases {
    /// Reads a file of cases.
    ///
    /// # Errors
    /// Usage, with the line: for malformed TOML, unknown keys and labels, a case that expects nothing, and a file without cases.
    pub fn read(text: &str) -> Result<Self> {
        let document: Document =
            toml::from_str(text).map_err(|error| malformed("cases of a policy are malformed", text, &error))?;
        if document.tests.is_empty() {
            return Err(Error::usage("there are no cases").help("add [[test]] with name, labels, allow and deny"));
        }
        let mut cases = Vec::new();
        for test in document.tests {
            let (start, written) = (test.span().start, test.into_inner());
            cases.extend(cases_of(written, line(text, start)).map_err(|error| error.at(at_line(text, start)))?);
        }
        Ok(Self { policy: document.policy, cases })
    }

    /// File of the policy that they are about, if they name one: relative to their own.
    #[must_use]
    pub fn policy(&self) -> Option<&str> {
        self.policy.as_deref()
    }

    /// Decides them by `rules`.
    #[must_use]
    pub fn check(&self, rules: &PolicyRules) -> CaseReport {
        let cases: Vec<CheckedCase> = self.cases.iter().map(|case| case.check(rules)).collect();
        let deciding = cases.iter().filter_map(|case| match case.ruling.basis {
            Basis::Rule { line, .. } => Some(line),
            _ => None,
        });
        let deciding: BTreeSet<usize> = deciding.collect();
        let untested = rules.written().iter().filter(|rule| !deciding.contains(&rule.line));
        let passed = cases.iter().filter(|case| case.passed).count();
        CaseReport {
            passed,
            failed: cases.len() - passed,
            untested: untested.map(|rule| UntestedRule { line: rule.line, why: rule.why.clone() }).collect(),
            cases,
        }
    }
}

/// The cases that one `[[test]]` stands for: one for each destination.
fn cases_of(written: Written, line: usize) -> Result<Vec<Case>> {
    let name: Name = written.name.as_deref().unwrap_or(ANY_NAME).parse()?;
    let mut labels = written.labels.into_iter();
    let labels =
        labels.try_fold(Labels::default(), |labels, (key, value)| labels.with(&key, &value.list().join(",")))?;
    let route = match written.route {
        None => Route::Unknown,
        Some(WrittenRoute::Word(WordRoute::Node)) => Route::Node,
        Some(WrittenRoute::Word(WordRoute::Store)) => Route::Store,
        Some(WrittenRoute::Connection([local, remote])) if written.from.is_some() => {
            Route::Connection { local, remote }
        }
        Some(WrittenRoute::Connection(_)) => {
            return Err(
                Error::usage("case gives addresses and no site that they lead from").help("add from = \"SITE\"")
            );
        }
    };
    let caller = match (written.caller, written.caller_tenant) {
        (Some(name), tenant) => Some(LocalCaller { name, tenant }),
        (None, None) => None,
        (None, Some(_)) => {
            return Err(Error::usage("case gives a tenant and no caller").help("add caller = \"token:NAME\""));
        }
    };
    let allowed = written.allow.list().into_iter().map(|to| (to, Verdict::Allow));
    let denied = written.deny.list().into_iter().map(|to| (to, Verdict::Deny));
    let expected: Vec<(String, Verdict)> = allowed.chain(denied).collect();
    if expected.is_empty() {
        return Err(
            Error::usage("case expects nothing").help("add allow = \"SITE\" or deny = \"SITE\", or lists of them")
        );
    }
    let case = |(to, expected): (String, Verdict)| {
        let (name, labels, caller) = (name.clone(), labels.clone(), caller.clone());
        let (from, rule) = (written.from.clone(), written.rule.clone());
        Ok(Case { line, name, labels, caller, from, agent: agent(&to)?, to, route, expected, rule })
    };
    expected.into_iter().map(case).collect()
}

/// The agent that a destination stands for: `SITE/AGENT`, any agent of `SITE`, or none for `-`.
fn agent(to: &str) -> Result<Option<Identity>> {
    if to == NOBODY {
        return Ok(None);
    }
    let (site, agent) = to.split_once('/').unwrap_or((to, "any"));
    Identity::new(site, agent).map(Some)
}

impl Case {
    fn check(&self, rules: &PolicyRules) -> CheckedCase {
        let question = Question {
            agent: self.agent.as_ref(),
            caller: self.caller.as_ref(),
            from: self.from.as_deref(),
            to: self.agent.as_ref().map(Identity::site),
            name: &self.name,
            labels: &self.labels,
            route: self.route,
        };
        // Over the store a machine reads for itself.
        let own = matches!(self.route, Route::Store);
        let ruling = if own { rules.rule_on_own(&question) } else { rules.rule_on(&question) };
        let as_expected = self.rule.as_deref().is_none_or(|rule| rule == ruling.basis.reason());
        CheckedCase {
            line: self.line,
            name: self.name.clone(),
            to: self.to.clone(),
            expected: self.expected,
            rule: self.rule.clone(),
            passed: ruling.verdict == self.expected && as_expected,
            ruling,
        }
    }
}
