//! The text of a policy: sites, links and rules, in TOML, with its version and repository.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use toml::Spanned;
use url::Url;

use super::addresses::Prefix;
use super::labels::Sensitivity;
use super::rules::{Conditions, LinkRule, Places, PolicyRules, SiteRule, Verdict, WrittenRule};
use super::spiffe::SpiffeMap;
use crate::error::{Error, Result};
use crate::id::RepositoryId;
use crate::identity::Identity;
use crate::limits::KIB;
use crate::pattern::{Pattern, Patterns};
use crate::toml_text::{OneOrSeveral, line, malformed};

/// Maximum length of a policy with its signature.
pub const POLICY_LEN_MAX: u64 = 4096 * KIB;
/// Maximum number of rules, of sites and of links of a policy.
const ITEMS_MAX: usize = 20_000;
/// Maximum length of all patterns of a policy that are no plain texts: each compiles to some hundred times its length.
const PATTERNS_LEN_MAX: usize = 512 << 10;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    version: u64,
    repository: String,
    #[serde(default, rename = "site")]
    sites: Vec<Spanned<WrittenSite>>,
    #[serde(default, rename = "link")]
    links: Vec<Spanned<WrittenLink>>,
    #[serde(default)]
    spiffe: Vec<Spanned<WrittenSpiffe>>,
    #[serde(default, rename = "rule")]
    rules: Vec<Spanned<Written>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenSite {
    name: String,
    #[serde(default)]
    jurisdiction: OneOrSeveral,
    tenancy: Option<String>,
    #[serde(default)]
    repositories: OneOrSeveral,
    #[serde(default)]
    private_store: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenLink {
    between: [String; 2],
    addresses: Vec<Prefix>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenSpiffe {
    id: String,
    agent: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Written {
    verdict: Verdict,
    why: String,
    agents: Option<OneOrSeveral>,
    callers: Option<OneOrSeveral>,
    caller_tenants: Option<OneOrSeveral>,
    names: Option<OneOrSeveral>,
    to: Option<OneOrSeveral>,
    jurisdiction: Option<OneOrSeveral>,
    tenancy: Option<OneOrSeveral>,
    tenant: Option<OneOrSeveral>,
    purpose: Option<OneOrSeveral>,
    sensitivity_at_least: Option<Sensitivity>,
    sensitivity_at_most: Option<Sensitivity>,
    path: Option<WrittenPath>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum WrittenPath {
    Private,
    Any,
}

impl PolicyRules {
    /// Reads a policy.
    ///
    /// # Errors
    /// Usage, with the line: for malformed TOML and unknown keys, a site that is described twice or named and not described, a
    /// repository at two sites, a SPIFFE id that is mapped twice, and a rule that an earlier one keeps from ever being reached.
    pub fn read(text: &str) -> Result<Self> {
        let document: Document =
            toml::from_str(text).map_err(|error| malformed("policy is malformed", text, &error))?;
        let lists = [document.sites.len(), document.links.len(), document.spiffe.len(), document.rules.len()];
        let longest = lists.into_iter().max().unwrap_or_default();
        if longest > ITEMS_MAX {
            return Err(Error::exhausted("policy is too long").expected(format!("at most {ITEMS_MAX} rules")));
        }
        let repository = document.repository.parse();
        let repository: RepositoryId = repository
            .map_err(|_| Error::usage("policy names no repository").expected("its id").got(&document.repository))?;
        let sites = read_sites(text, document.sites)?;
        let links = read_links(text, document.links, &sites)?;
        let spiffe = read_spiffe(text, document.spiffe, &sites)?;
        let mut reader = RuleReader { text, sites: &sites, patterns_left: PATTERNS_LEN_MAX };
        let rules = document.rules.into_iter().map(|rule| reader.read(rule)).collect::<Result<Vec<_>>>()?;
        check_reach(&rules)?;
        Ok(Self::new(document.version, repository, Places { sites, links, spiffe }, rules))
    }
}

fn read_sites(text: &str, written: Vec<Spanned<WrittenSite>>) -> Result<BTreeMap<String, SiteRule>> {
    let mut sites = BTreeMap::new();
    let mut homes: BTreeMap<String, String> = BTreeMap::new();
    for site in written {
        let line = line(text, site.span().start);
        let at = format!("line {line}");
        let site = site.into_inner();
        // A name that no certificate can have would describe nobody, or a trust domain.
        Identity::new(&site.name, "any").map_err(|error| error.at(&at))?;
        let repositories = site.repositories.list().into_iter().map(address).collect::<Result<BTreeSet<_>>>();
        let repositories = repositories.map_err(|error| error.at(&at))?;
        for repository in &repositories {
            if let Some(other) = homes.insert(repository.clone(), site.name.clone()) {
                return Err(Error::usage("repository is at two sites")
                    .at(at)
                    .got(format!("{repository} at {other} and at {}", site.name)));
            }
        }
        let jurisdictions = site.jurisdiction.list().into_iter().map(|code| code.to_uppercase()).collect();
        let described =
            SiteRule { jurisdictions, tenancy: site.tenancy, repositories, private_store: site.private_store, line };
        if sites.insert(site.name.clone(), described).is_some() {
            return Err(Error::usage("site is described twice").at(at).got(site.name));
        }
    }
    Ok(sites)
}

/// The address of a repository as stores write it, where an equal URL may be written in several ways.
fn address(written: String) -> Result<String> {
    if !written.starts_with("https://") && !written.starts_with("http://") {
        return Ok(written);
    }
    let has_bucket = |url: &Url| !url.path().trim_matches('/').is_empty();
    match Url::parse(&written) {
        Ok(url) if has_bucket(&url) && url.query().is_none() => Ok(url.as_str().trim_end_matches('/').to_owned()),
        _ => Err(Error::usage("URL of a repository is malformed").expected("ENDPOINT/BUCKET/PREFIX").got(written)),
    }
}

fn read_links(
    text: &str,
    written: Vec<Spanned<WrittenLink>>,
    sites: &BTreeMap<String, SiteRule>,
) -> Result<Vec<LinkRule>> {
    let read = |link: Spanned<WrittenLink>| {
        let line = line(text, link.span().start);
        let link = link.into_inner();
        if let Some(unknown) = link.between.iter().find(|site| !sites.contains_key(*site)) {
            return Err(unknown_site(unknown).at(format!("line {line}")));
        }
        Ok(LinkRule { between: link.between, addresses: link.addresses, line })
    };
    written.into_iter().map(read).collect()
}

fn read_spiffe(
    text: &str,
    written: Vec<Spanned<WrittenSpiffe>>,
    sites: &BTreeMap<String, SiteRule>,
) -> Result<SpiffeMap> {
    let mut map = SpiffeMap::default();
    for entry in written {
        let line = line(text, entry.span().start);
        let WrittenSpiffe { id, agent } = entry.into_inner();
        let mut add = || {
            let parts = agent.split_once('/');
            let (site, name) = parts
                .ok_or_else(|| Error::usage("SPIFFE id is mapped to no agent").expected("SITE/AGENT").got(&agent))?;
            if !sites.contains_key(site) {
                return Err(unknown_site(site));
            }
            map.add(&id, Identity::new(site, name)?, line)
        };
        add().map_err(|error| error.at(format!("line {line}")))?;
    }
    Ok(map)
}

/// Reads rules, and compiles their patterns.
struct RuleReader<'a> {
    text: &'a str,
    sites: &'a BTreeMap<String, SiteRule>,
    /// Bytes of patterns that may still come.
    patterns_left: usize,
}

impl RuleReader<'_> {
    fn read(&mut self, rule: Spanned<Written>) -> Result<WrittenRule> {
        let line = line(self.text, rule.span().start);
        self.read_at(line, rule.into_inner()).map_err(|error| error.at(format!("line {line}")))
    }

    fn read_at(&mut self, line: usize, rule: Written) -> Result<WrittenRule> {
        let to = self.compile(rule.to)?;
        if let Some(unknown) = to.iter().flat_map(Patterns::plain).find(|site| !self.sites.contains_key(*site)) {
            return Err(unknown_site(unknown));
        }
        let codes = |listed: Option<OneOrSeveral>| listed.map(|listed| listed.list().into_iter().collect());
        let jurisdictions: Option<BTreeSet<String>> = codes(rule.jurisdiction);
        let conditions = Conditions {
            agents: self.compile(rule.agents)?,
            callers: self.compile(rule.callers)?,
            caller_tenants: self.compile(rule.caller_tenants)?,
            names: self.compile(rule.names)?,
            to,
            jurisdictions: jurisdictions.map(|codes| codes.iter().map(|code| code.to_uppercase()).collect()),
            tenancies: codes(rule.tenancy),
            tenants: self.compile(rule.tenant)?,
            purposes: self.compile(rule.purpose)?,
            at_least: rule.sensitivity_at_least,
            at_most: rule.sensitivity_at_most,
            private: matches!(rule.path, Some(WrittenPath::Private)),
        };
        Ok(WrittenRule { verdict: rule.verdict, why: rule.why, line, conditions })
    }

    fn compile(&mut self, written: Option<OneOrSeveral>) -> Result<Option<Patterns>> {
        let Some(written) = written else { return Ok(None) };
        let texts = written.list();
        let len: usize = texts.iter().filter(|text| Pattern::has_wildcard(text)).map(String::len).sum();
        self.patterns_left = self.patterns_left.checked_sub(len).ok_or_else(|| {
            let expected = format!("at most {} KiB of patterns that are no plain texts", PATTERNS_LEN_MAX >> 10);
            Error::exhausted("policy has too many patterns")
                .expected(expected)
                .help("give rules labels instead of names")
        })?;
        Patterns::of(&texts).map(Some)
    }
}

fn unknown_site(site: &str) -> Error {
    Error::usage("policy names a site that it does not describe").got(site).help("add a [[site]] with this name")
}

/// Refuses rules that can never apply: those with the conditions of an earlier one, and those after one without
/// conditions.
fn check_reach(rules: &[WrittenRule]) -> Result<()> {
    let mut seen: BTreeMap<String, &WrittenRule> = BTreeMap::new();
    let mut catch_all: Option<&WrittenRule> = None;
    for rule in rules {
        let spelling = rule.conditions.spelling();
        let before = catch_all.or_else(|| seen.get(&spelling).copied());
        if let Some(before) = before {
            return Err(Error::usage("rule is never reached")
                .at(format!("line {}", rule.line))
                .got(format!("line {} decides before it ({})", before.line, before.verdict.word()))
                .help("remove one of the two, or put the narrower rule first"));
        }
        if rule.conditions.are_none() {
            catch_all = Some(rule);
        }
        seen.insert(spelling, rule);
    }
    Ok(())
}
