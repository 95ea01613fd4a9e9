//! Rules of a policy, and rulings on whether the content of a name may go to a site.
//!
//! The residency of the labels is checked first: no rule overrides it. Then the first rule whose conditions all hold
//! decides. If none does, or the policy does not describe the site, restricted content stays where it is.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::addresses::Prefix;
use super::labels::{Labels, Sensitivity};
use super::spiffe::SpiffeMap;
use crate::id::RepositoryId;
use crate::identity::Identity;
use crate::name::Name;
use crate::pattern::Patterns;

/// Answer of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// The content may go there.
    Allow,
    /// The content must stay.
    Deny,
}

impl Verdict {
    /// Name in the policy.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Deny => "deny",
        }
    }
}

/// Site, as the policy describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SiteRule {
    /// Jurisdictions of the site, upper case.
    pub jurisdictions: BTreeSet<String>,
    /// Owner of its machines: `own`, `dedicated`, `shared` or another word.
    pub tenancy: Option<String>,
    /// Repositories at this site, by id or by address: a path, `s3://BUCKET/PREFIX`, or `ENDPOINT/BUCKET/PREFIX`.
    pub repositories: BTreeSet<String>,
    /// True if the site reaches its repositories over a private path.
    pub private_store: bool,
    /// Line of the policy where it begins.
    pub line: usize,
}

/// A private link between two sites.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkRule {
    /// The two sites.
    pub between: [String; 2],
    /// Prefixes that both ends of a private connection lie in.
    pub addresses: Vec<Prefix>,
    /// Line of the policy where it begins.
    pub line: usize,
}

/// Whoever asks an agent or a command of this machine for something.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LocalCaller {
    /// `user:NAME` or `token:NAME`; of a token without a name, its id.
    pub name: String,
    /// Tenant of a token, if it has one.
    pub tenant: Option<String>,
}

impl LocalCaller {
    /// A user of this machine.
    #[must_use]
    pub fn user(name: &str) -> Self {
        Self { name: format!("user:{name}"), tenant: None }
    }

    /// Whoever shows a token of this name.
    #[must_use]
    pub fn token(name: &str, tenant: Option<&str>) -> Self {
        Self { name: format!("token:{name}"), tenant: tenant.map(str::to_owned) }
    }

    /// Tenant of a token, else the token; None for a user, who has all rights here.
    #[must_use]
    pub fn limited(&self) -> Option<&str> {
        self.tenant.as_deref().or_else(|| self.name.starts_with("token:").then_some(self.name.as_str()))
    }
}

/// Conditions of a rule: all that are given must hold.
#[derive(Clone, Debug, Default)]
pub struct Conditions {
    /// Requesting agents.
    pub agents: Option<Patterns>,
    /// Local callers that ask, as [`LocalCaller::name`] has them.
    pub callers: Option<Patterns>,
    /// Tenants of their tokens.
    pub caller_tenants: Option<Patterns>,
    /// Names.
    pub names: Option<Patterns>,
    /// Destination sites.
    pub to: Option<Patterns>,
    /// Jurisdictions of that site.
    pub jurisdictions: Option<BTreeSet<String>>,
    /// Tenancy of that site.
    pub tenancies: Option<BTreeSet<String>>,
    /// Tenants of the content: for `allow`, all must match; for `deny`, one.
    pub tenants: Option<Patterns>,
    /// Purposes of the content, likewise.
    pub purposes: Option<Patterns>,
    /// Lowest sensitivity.
    pub at_least: Option<Sensitivity>,
    /// Highest sensitivity.
    pub at_most: Option<Sensitivity>,
    /// Only over a private link.
    pub private: bool,
}

impl Conditions {
    /// True if there are no conditions: the rule decides everything.
    #[must_use]
    pub fn are_none(&self) -> bool {
        self.spelling() == Self::default().spelling()
    }

    /// Canonical text of the conditions, equal for equal conditions.
    pub(super) fn spelling(&self) -> String {
        fn texts(patterns: Option<&Patterns>) -> Option<Vec<&str>> {
            patterns.map(Patterns::texts)
        }
        format!(
            "{:?}",
            (
                (texts(self.agents.as_ref()), texts(self.names.as_ref()), texts(self.to.as_ref())),
                (&self.jurisdictions, &self.tenancies),
                (texts(self.tenants.as_ref()), texts(self.purposes.as_ref())),
                (self.at_least, self.at_most, self.private),
                (texts(self.callers.as_ref()), texts(self.caller_tenants.as_ref())),
            )
        )
    }

    /// True if `caller` meets the conditions on callers, or there are none; none, if there are some and the caller is unknown.
    fn hold_for(&self, caller: Option<&LocalCaller>) -> Option<bool> {
        if self.callers.is_none() && self.caller_tenants.is_none() {
            return Some(true);
        }
        let caller = caller?;
        let of_tenant = |patterns: &Patterns| caller.tenant.as_ref().is_some_and(|tenant| patterns.take(tenant));
        Some(
            self.callers.as_ref().is_none_or(|callers| callers.take(&caller.name))
                && self.caller_tenants.as_ref().is_none_or(of_tenant),
        )
    }
}

/// One rule.
#[derive(Clone, Debug)]
pub struct WrittenRule {
    /// Verdict.
    pub verdict: Verdict,
    /// Reason, for people.
    pub why: String,
    /// Line of the policy where it begins.
    pub line: usize,
    /// Conditions.
    pub conditions: Conditions,
}

/// Path of content to a site.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Route {
    /// Between processes of one node: no network.
    Node,
    /// Connection between these addresses.
    Connection {
        /// Address of this node.
        local: IpAddr,
        /// Address of the other node.
        remote: IpAddr,
    },
    /// The object store of the repository.
    Store,
    /// Unknown path: never private.
    Unknown,
}

/// Question to a policy.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// Requesting agent; none: a process without a certificate.
    pub agent: Option<&'a Identity>,
    /// Whoever asks on this machine, if that is known; never of another agent's request.
    pub caller: Option<&'a LocalCaller>,
    /// Site where the content comes from, if it is known.
    pub from: Option<&'a str>,
    /// Destination site; none: unknown.
    pub to: Option<&'a str>,
    /// Name.
    pub name: &'a Name,
    /// Labels of the content.
    pub labels: &'a Labels,
    /// Path of the content.
    pub route: Route,
}

/// Reason of a ruling.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "by")]
pub enum Basis {
    /// A rule.
    Rule {
        /// Line of the policy where it begins.
        line: usize,
        /// Its reason.
        why: String,
    },
    /// The residency of the labels, which has no jurisdiction of the site.
    Residency,
    /// The content is restricted, and the policy does not describe the site, or the site is unknown.
    UnknownSite,
    /// A rule denies to some callers, the content has restricting labels, and nobody knows who asks.
    UnknownCaller {
        /// Line of the policy where it begins.
        line: usize,
        /// Its reason.
        why: String,
    },
    /// No rule matches.
    NoRule,
    /// No policy can be read and verified, and the content is restricted or this machine has seen one before.
    NoPolicy,
}

impl Basis {
    /// The reason of the rule, or the word by which JSON tells what decided otherwise.
    #[must_use]
    pub fn reason(&self) -> &str {
        match self {
            Self::Rule { why, .. } => why,
            Self::Residency => "residency",
            Self::UnknownSite => "unknown-site",
            Self::UnknownCaller { .. } => "unknown-caller",
            Self::NoRule => "no-rule",
            Self::NoPolicy => "no-policy",
        }
    }
}

impl fmt::Display for Basis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rule { line, why } => write!(f, "rule at line {line}: {why}"),
            Self::Residency => f.write_str("residency: the site lies in none of the jurisdictions"),
            Self::UnknownSite => f.write_str("unknown site: what has labels stays"),
            Self::UnknownCaller { line, why } => {
                write!(f, "unknown caller, and the rule at line {line} denies to some: {why}")
            }
            Self::NoRule => f.write_str("no rule allows it"),
            Self::NoPolicy => f.write_str("no policy that can be read and verified here"),
        }
    }
}

/// Ruling on a question.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Ruling {
    /// Verdict.
    pub verdict: Verdict,
    /// Reason.
    pub basis: Basis,
}

impl Ruling {
    /// True if it allows.
    #[must_use]
    pub fn allows(&self) -> bool {
        self.verdict == Verdict::Allow
    }

    /// Denial for `basis`.
    #[must_use]
    pub fn deny(basis: Basis) -> Self {
        Self { verdict: Verdict::Deny, basis }
    }
}

/// Places and machines, as a policy describes them.
#[derive(Debug)]
pub(super) struct Places {
    pub(super) sites: BTreeMap<String, SiteRule>,
    pub(super) links: Vec<LinkRule>,
    pub(super) spiffe: SpiffeMap,
}

/// A policy, ready to be asked.
#[derive(Debug)]
pub struct PolicyRules {
    version: u64,
    repository: RepositoryId,
    sites: BTreeMap<String, SiteRule>,
    links: Vec<LinkRule>,
    spiffe: SpiffeMap,
    rules: Vec<WrittenRule>,
    index: Index,
}

/// Rules by the first segment of their names and by their site, if they name one: most rules are never evaluated.
#[derive(Debug, Default)]
struct Index(HashMap<(Option<String>, Option<String>), Vec<usize>>);

impl Index {
    fn of(rules: &[WrittenRule]) -> Self {
        let mut index = Self::default();
        for (at, rule) in rules.iter().enumerate() {
            let segments = keys(rule.conditions.names.as_ref(), |text| text.split('/').next().unwrap_or_default());
            let sites = keys(rule.conditions.to.as_ref(), |text| text);
            for segment in &segments {
                for site in &sites {
                    index.0.entry((segment.clone(), site.clone())).or_default().push(at);
                }
            }
        }
        index
    }

    /// Rules that may match, in their order.
    fn candidates(&self, name: &Name, site: Option<&str>) -> impl Iterator<Item = usize> {
        let segment = name.as_str().split('/').next().map(str::to_owned);
        let site = site.map(str::to_owned);
        let mut keys = vec![(None, None), (segment.clone(), None)];
        if site.is_some() {
            keys.extend([(None, site.clone()), (segment, site)]);
        }
        let mut lists: Vec<&[usize]> = keys.iter().filter_map(|key| self.0.get(key)).map(Vec::as_slice).collect();
        std::iter::from_fn(move || {
            let next = lists.iter().filter_map(|list| list.first()).min().copied()?;
            for list in &mut lists {
                *list = list.strip_prefix(&[next]).unwrap_or(list);
            }
            Some(next)
        })
    }
}

/// Keys of `patterns` in the index: their literal prefixes, or the key for all.
fn keys(patterns: Option<&Patterns>, beginning: impl Fn(&str) -> &str) -> BTreeSet<Option<String>> {
    let literal = |text: &str| {
        let text = beginning(text);
        (!text.contains(['*', '?', '[', ']', '{', '}', '\\'])).then(|| text.to_owned())
    };
    match patterns {
        None => BTreeSet::from([None]),
        Some(patterns) => {
            let found: Option<BTreeSet<Option<String>>> =
                patterns.texts().iter().map(|text| literal(text).map(Some)).collect();
            found.unwrap_or_else(|| BTreeSet::from([None]))
        }
    }
}

impl PolicyRules {
    pub(super) fn new(version: u64, repository: RepositoryId, places: Places, rules: Vec<WrittenRule>) -> Self {
        let index = Index::of(&rules);
        let Places { sites, links, spiffe } = places;
        Self { version, repository, sites, links, spiffe, rules, index }
    }

    /// The agent that `identity` is: itself, or the one that this policy maps a SPIFFE id to; none for an id that it does not map.
    #[must_use]
    pub fn agent<'a>(&'a self, identity: &'a Identity) -> Option<Cow<'a, Identity>> {
        self.spiffe.agent(identity)
    }

    /// Version: higher than that of every earlier policy of the repository.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Repository of the policy.
    #[must_use]
    pub fn repository(&self) -> RepositoryId {
        self.repository
    }

    /// Described sites.
    #[must_use]
    pub fn sites(&self) -> &BTreeMap<String, SiteRule> {
        &self.sites
    }

    /// Number of rules.
    #[must_use]
    pub fn rules(&self) -> usize {
        self.rules.len()
    }

    /// The rules as they are written, in their order.
    #[must_use]
    pub fn written(&self) -> &[WrittenRule] {
        &self.rules
    }

    /// The site `name`.
    #[must_use]
    pub fn site(&self, name: &str) -> Option<&SiteRule> {
        self.sites.get(name)
    }

    /// The private link between two sites, whichever is named first.
    #[must_use]
    pub fn private_link(&self, one: &str, other: &str) -> Option<&LinkRule> {
        let between = |link: &&LinkRule| link.between == [one, other] || link.between == [other, one];
        self.links.iter().find(between)
    }

    /// The private links of `site`, each with the site at the other end.
    pub fn private_links_of(&self, site: &str) -> impl Iterator<Item = (&str, &LinkRule)> {
        self.links.iter().filter_map(move |link| match &link.between {
            [one, other] if one == site => Some((other.as_str(), link)),
            [one, other] if other == site => Some((one.as_str(), link)),
            _ => None,
        })
    }

    /// Site where this machine's repository lies: by the most exact of its addresses that is listed, or else by its id.
    #[must_use]
    pub fn site_of(&self, addresses: &[String], id: RepositoryId) -> Option<&str> {
        self.site_of_destination(addresses).or_else(|| self.site_that_lists(&id.to_string()))
    }

    /// Site where a destination lies: by the most exact of its addresses that is listed. Its id does not count: a store may state any.
    #[must_use]
    pub fn site_of_destination(&self, addresses: &[String]) -> Option<&str> {
        addresses.iter().rev().find_map(|address| self.site_that_lists(address))
    }

    fn site_that_lists(&self, repository: &str) -> Option<&str> {
        let found = self.sites.iter().find(|(_, site)| site.repositories.contains(repository));
        found.map(|(name, _)| name.as_str())
    }

    /// The ruling on `question`.
    #[must_use]
    pub fn rule_on(&self, question: &Question<'_>) -> Ruling {
        let site = question.to.and_then(|name| Some((name, self.sites.get(name)?)));
        let bound = question.labels.restrict();
        if bound && site.is_none() {
            return Ruling::deny(Basis::UnknownSite);
        }
        if let (Some(residency), Some((_, site))) = (question.labels.residency(), site)
            && site.jurisdictions.is_disjoint(residency)
        {
            return Ruling::deny(Basis::Residency);
        }
        let candidates = self.index.candidates(question.name, question.to).filter_map(|at| self.rules.get(at));
        for rule in candidates.filter(|rule| self.holds(rule, question, site.map(|(_, site)| site))) {
            let (line, verdict) = (rule.line, rule.verdict);
            match rule.conditions.hold_for(question.caller) {
                Some(true) => return Ruling { verdict, basis: Basis::Rule { line, why: rule.why.clone() } },
                None if bound && verdict == Verdict::Deny => {
                    return Ruling::deny(Basis::UnknownCaller { line, why: rule.why.clone() });
                }
                // A rule that allows does not hold for somebody unknown.
                Some(false) | None => {}
            }
        }
        Ruling::deny(Basis::NoRule)
    }

    /// The ruling on `question` about what a machine reads from its store, or writes there, for itself: content without restricting
    /// labels is bound by rules about it, but needs none.
    #[must_use]
    pub fn rule_on_own(&self, question: &Question<'_>) -> Ruling {
        let ruling = self.rule_on(question);
        if ruling.basis == Basis::NoRule && !question.labels.restrict() {
            return Ruling { verdict: Verdict::Allow, basis: Basis::NoRule };
        }
        ruling
    }

    /// True if a rule allows `identity` to take something, whatever it is: else its owner is locked out.
    #[must_use]
    pub fn admits(&self, identity: &Identity) -> bool {
        let Some(agent) = self.agent(identity) else { return false };
        let site = self.sites.get(agent.site());
        let concerns = |rule: &&WrittenRule| {
            let conditions = &rule.conditions;
            let by = conditions.agents.as_ref().is_none_or(|agents| agents.take(&agent.path()));
            by && self.holds_at(conditions, Some(agent.site()), site)
        };
        self.rules.iter().filter(concerns).any(|rule| rule.verdict == Verdict::Allow)
    }

    /// True if all conditions of `rule` hold, but for those about callers.
    fn holds(&self, rule: &WrittenRule, question: &Question<'_>, site: Option<&SiteRule>) -> bool {
        let (conditions, labels) = (&rule.conditions, question.labels);
        let agent = || question.agent.map(Identity::path);
        let by = |agents: &Patterns| agent().is_some_and(|agent| agents.take(&agent));
        let level = labels.sensitivity().unwrap_or(Sensitivity::Public);
        conditions.names.as_ref().is_none_or(|names| names.take(question.name.as_str()))
            && conditions.agents.as_ref().is_none_or(by)
            && conditions.at_least.is_none_or(|least| level >= least)
            && conditions.at_most.is_none_or(|most| level <= most)
            && matches(conditions.tenants.as_ref(), labels.tenants(), rule.verdict)
            && matches(conditions.purposes.as_ref(), labels.purposes(), rule.verdict)
            && self.holds_at(conditions, question.to, site)
            && (!conditions.private || self.is_private(question, site))
    }

    #[expect(clippy::unused_self, reason = "one of the conditions of this policy")]
    fn holds_at(&self, conditions: &Conditions, to: Option<&str>, site: Option<&SiteRule>) -> bool {
        let in_one = |codes: &BTreeSet<String>| site.is_some_and(|site| !site.jurisdictions.is_disjoint(codes));
        let owned = |words: &BTreeSet<String>| {
            site.and_then(|site| site.tenancy.as_ref()).is_some_and(|tenancy| words.contains(tenancy))
        };
        conditions.to.as_ref().is_none_or(|sites| to.is_some_and(|to| sites.take(to)))
            && conditions.jurisdictions.as_ref().is_none_or(in_one)
            && conditions.tenancies.as_ref().is_none_or(owned)
    }

    /// True if the path to the site is private: by the addresses of the connection itself, never by a claim.
    fn is_private(&self, question: &Question<'_>, site: Option<&SiteRule>) -> bool {
        match question.route {
            Route::Node => true,
            Route::Store => site.is_some_and(|site| site.private_store),
            Route::Unknown => false,
            Route::Connection { .. } => {
                let (Some(from), Some(to)) = (question.from, question.to) else { return false };
                self.is_private_link((from, to), question.route)
            }
        }
    }

    /// True if `route` is a connection between the two sites whose ends both have prefixes of one of their private
    /// links.
    #[must_use]
    pub fn is_private_link(&self, (from, to): (&str, &str), route: Route) -> bool {
        match route {
            Route::Node => true,
            Route::Store | Route::Unknown => false,
            Route::Connection { local, remote } => {
                let joins = |link: &&LinkRule| {
                    let [one, other] = &link.between;
                    (one == from && other == to) || (one == to && other == from)
                };
                let covers = |link: &LinkRule, address| link.addresses.iter().any(|prefix| prefix.contains(address));
                self.links.iter().filter(joins).any(|link| covers(link, local) && covers(link, remote))
            }
        }
    }
}

/// For `deny`, one matching value is enough; for `allow`, each must match, and there must be one.
fn matches(patterns: Option<&Patterns>, values: &BTreeSet<String>, verdict: Verdict) -> bool {
    let Some(patterns) = patterns else { return true };
    match verdict {
        Verdict::Deny => values.iter().any(|value| patterns.take(value)),
        Verdict::Allow => !values.is_empty() && values.iter().all(|value| patterns.take(value)),
    }
}
