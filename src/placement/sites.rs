//! The sites file: places with compute and the links between them, as their owner believes them to be.
//!
//! Jurisdiction, tenancy and private links come from the signed policy alone. The file may repeat them, and is refused where they
//! differ.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::Deserialize;
use toml::Spanned;

use super::dollars::micro_usd;
use super::price::Price;
use super::price_book::{PriceBook, WrittenPrice};
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::pattern::Patterns;
use crate::policy::PolicyRules;
use crate::toml_text::{LineStarts, OneOrSeveral, malformed};
use crate::{size, span};

/// JSON schema of sites files (<https://json-schema.org/draft/2020-12>). It does not say all that [`Sites::read`] checks.
pub const SITES_SCHEMA: &str = include_str!("sites.schema.json");
/// Maximum length of a sites file.
pub const SITES_LEN_MAX: u64 = 4 << 20;
/// Provider of a site that names none: machines of one's own.
const OWN: &str = "own";
/// Path of a link that names none.
const INTERNET: &str = "internet";

/// A place with compute.
#[derive(Clone, Debug)]
pub struct Site {
    /// Provider; `own` for machines of one's own.
    pub provider: String,
    /// Region of the provider.
    pub region: String,
    /// Addresses of its agents.
    pub agents: Vec<String>,
    /// Repositories at the site, by URL or id.
    pub repositories: BTreeSet<String>,
    /// Bytes of cache of all its agents together; none: unknown.
    pub cache: Option<u64>,
    /// GPUs.
    pub gpus: Vec<Gpus>,
    /// Nodes of a cluster that are at the site, by name.
    pub nodes: Patterns,
    /// The site in the notation of `SkyPilot`, if the file says it.
    infra: Option<String>,
    /// Name of the price of what is stored there, in the price book.
    pub storage: Option<String>,
    /// Line of the file where it begins.
    pub line: usize,
    stated: Stated,
}

/// GPUs of one kind at a site.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpus {
    /// Model, such as `H100`.
    pub model: String,
    /// Number.
    pub count: u64,
    /// Micro-dollars for one and an hour.
    pub micro_usd_hour: u64,
}

/// Statements of the file that only the policy decides.
#[derive(Clone, Debug, Default)]
struct Stated {
    jurisdictions: Option<BTreeSet<String>>,
    tenancy: Option<String>,
}

/// A path from one site to another.
#[derive(Clone, Debug)]
pub struct Link {
    /// Site that sends.
    pub from: String,
    /// Site that receives.
    pub to: String,
    /// Name of the path: `internet`, or one that tells it from others between the same sites.
    pub path: String,
    /// Believed rate in bytes a second; none: unknown.
    pub rate: Option<u64>,
    /// Believed round trip; none: unknown.
    pub delay: Option<Duration>,
    /// Price of a byte.
    pub cost: LinkCost,
    /// Line of the file where it begins.
    pub line: usize,
    private: Option<bool>,
}

/// Cost of a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkCost {
    /// By volume.
    ByVolume {
        /// Name of the meter: links with the same one share the volume of a month.
        meter: String,
        /// Price.
        price: Price,
    },
    /// A line that is paid for whether it is used or not: a byte more costs nothing.
    Flat {
        /// Micro-dollars a month.
        micro_usd_month: u64,
    },
}

/// Sites and links.
#[derive(Clone, Debug, Default)]
pub struct Sites {
    by_name: BTreeMap<String, Site>,
    links: Vec<Link>,
    /// Places of the links to each site, in the order of the file.
    by_target: BTreeMap<String, Vec<usize>>,
}

impl Site {
    /// The site in the notation of `SkyPilot`, `CLOUD/REGION`: as the file says, or by its provider; none for machines of one's own.
    #[must_use]
    pub fn infra(&self) -> Option<String> {
        match &self.infra {
            Some(infra) => Some(infra.clone()),
            None if self.provider == OWN => None,
            None if self.region.is_empty() => Some(self.provider.clone()),
            None => Some(format!("{}/{}", self.provider, self.region)),
        }
    }
}

impl Link {
    /// Link that is used where nothing chooses another: the one called `internet`, or else the first.
    pub fn usual<'a>(links: impl IntoIterator<Item = &'a Self>) -> Option<&'a Self> {
        let mut first = None;
        for link in links {
            if link.path == INTERNET {
                return Some(link);
            }
            first = first.or(Some(link));
        }
        first
    }

    /// True if the file says that the link is private, which [`Sites::check`] holds against the policy.
    #[must_use]
    pub fn is_private(&self) -> bool {
        self.private == Some(true)
    }
}

impl LinkCost {
    /// Name of the meter, if it has one.
    #[must_use]
    pub fn meter(&self) -> Option<&str> {
        match self {
            Self::ByVolume { meter, .. } => Some(meter),
            Self::Flat { .. } => None,
        }
    }

    /// Micro-dollars of `bytes` more; `so_far` has the bytes of the month on a meter.
    pub fn marginal(&self, so_far: impl Fn(&str) -> u64, bytes: u64) -> u64 {
        match self {
            Self::ByVolume { meter, price } => price.marginal(so_far(meter), bytes),
            Self::Flat { .. } => 0,
        }
    }
}

impl Sites {
    /// Reads a sites file, with the prices of `book`.
    ///
    /// # Errors
    /// Usage, with the line: malformed; a site or link that is there twice; a link to a site that is not described, or to itself; a
    /// repository at two sites; a price that is unknown, of another place, or negative.
    pub fn read(text: &str, book: &PriceBook) -> Result<Self> {
        let document: Document =
            toml::from_str(text).map_err(|error| malformed("sites file is malformed", text, &error))?;
        let (mut sites, lines) = (Self::default(), LineStarts::of(text));
        for site in document.sites {
            let line = lines.line(site.span().start);
            sites.add_site(line, site.into_inner(), book).map_err(|error| error.at(format!("line {line}")))?;
        }
        for link in document.links {
            let line = lines.line(link.span().start);
            sites.add_link(line, link.into_inner(), book).map_err(|error| error.at(format!("line {line}")))?;
        }
        Ok(sites)
    }

    /// The sites, by name.
    pub fn sites(&self) -> impl Iterator<Item = (&str, &Site)> {
        self.by_name.iter().map(|(name, site)| (name.as_str(), site))
    }

    /// The site `name`.
    #[must_use]
    pub fn site(&self, name: &str) -> Option<&Site> {
        self.by_name.get(name)
    }

    /// Site that a repository is at, by its location or its id.
    #[must_use]
    pub fn site_of(&self, repository: &[String; 2]) -> Option<&str> {
        let at = |site: &Site| site.repositories.iter().any(|there| repository.contains(there));
        self.sites().find(|(_, site)| at(site)).map(|(name, _)| name)
    }

    /// True if the price of a link depends on what it carried this month.
    #[must_use]
    pub fn has_tiers(&self) -> bool {
        self.links.iter().any(|link| match &link.cost {
            LinkCost::ByVolume { price, .. } => price.tiers().len() > 1,
            LinkCost::Flat { .. } => false,
        })
    }

    /// Site of the node `name` of a cluster: the first one in the file with a pattern for it.
    #[must_use]
    pub fn of_node(&self, name: &str) -> Option<&str> {
        let matching = self.sites().filter(|(_, site)| site.nodes.take(name));
        matching.min_by_key(|(_, site)| site.line).map(|(site, _)| site)
    }

    /// The links, in the order of the file.
    #[must_use]
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    /// Links from one site to another, in the order of the file.
    pub fn links_between(&self, from: &str, to: &str) -> impl Iterator<Item = &Link> {
        self.links_to(to).filter(move |link| link.from == from)
    }

    /// Links to a site, in the order of the file.
    pub fn links_to(&self, site: &str) -> impl Iterator<Item = &Link> {
        let places = self.by_target.get(site).map(Vec::as_slice).unwrap_or_default();
        places.iter().map(|&place| &self.links[place])
    }

    /// Checks that the file says nothing that `policy` decides otherwise.
    ///
    /// # Errors
    /// Conflict, with the lines of both.
    pub fn check(&self, policy: &PolicyRules) -> Result<()> {
        for (name, site) in &self.by_name {
            let Some(rule) = policy.site(name) else { continue };
            let differs = |what: &'static str, stated: String, rules: String| {
                Err(Error::conflict(what)
                    .at(format!("{name}, line {} of the sites file", site.line))
                    .got(stated)
                    .expected(format!("{rules}, as line {} of the policy says", rule.line))
                    .help("remove it from the sites file: the signed policy decides"))
            };
            if let Some(stated) = site.stated.jurisdictions.as_ref().filter(|stated| **stated != rule.jurisdictions) {
                return differs(
                    "sites file has another jurisdiction than the policy",
                    listed(stated),
                    listed(&rule.jurisdictions),
                );
            }
            if let Some(stated) = site.stated.tenancy.as_ref().filter(|stated| Some(*stated) != rule.tenancy.as_ref()) {
                let rules = rule.tenancy.clone().unwrap_or_else(|| "none".to_owned());
                return differs("sites file has another tenancy than the policy", stated.clone(), rules);
            }
        }
        for link in &self.links {
            let rule = policy.private_link(&link.from, &link.to);
            let Some(stated) = link.private.filter(|stated| *stated != rule.is_some()) else { continue };
            let expected = match rule {
                Some(rule) => format!("private, as line {} of the policy says", rule.line),
                None => "a [[link]] of the policy between them, with the prefixes of its addresses".to_owned(),
            };
            return Err(Error::conflict("sites file says another thing of a private link than the policy")
                .at(format!("line {} of the sites file", link.line))
                .got(format!("private = {stated} from {} to {}", link.from, link.to))
                .expected(expected)
                .help("remove `private` from the sites file: the signed policy decides"));
        }
        Ok(())
    }

    fn add_site(&mut self, line: usize, written: WrittenSite, book: &PriceBook) -> Result<()> {
        Identity::new(&written.name, "any")?;
        let provider = written.provider.unwrap_or_else(|| OWN.to_owned());
        let region = written.region.unwrap_or_default();
        if let Some(storage) = &written.storage {
            book.storage(storage, &provider, &region)?;
        }
        let gpus = written.gpus.into_iter().map(|gpus| {
            let micro_usd_hour = micro_usd(&gpus.usd_hour)?;
            Ok(Gpus { model: gpus.model, count: gpus.count, micro_usd_hour })
        });
        let jurisdictions =
            written.jurisdiction.map(|codes| codes.list().into_iter().map(|code| code.to_uppercase()).collect());
        let site = Site {
            provider,
            region,
            agents: written.agents,
            repositories: written.repositories.list().into_iter().collect(),
            cache: written.cache.as_deref().map(size::parse).transpose()?,
            gpus: gpus.collect::<Result<_>>()?,
            nodes: written.nodes,
            infra: written.infra,
            storage: written.storage,
            line,
            stated: Stated { jurisdictions, tenancy: written.tenancy },
        };
        for (name, other) in &self.by_name {
            if let Some(both) = other.repositories.intersection(&site.repositories).next() {
                return Err(Error::usage("repository is at two sites")
                    .got(format!("{both} at {name}, line {}, and at {}", other.line, written.name)));
            }
        }
        if let Some(other) = self.by_name.get(&written.name) {
            return Err(
                Error::usage("site is described twice").got(format!("{}, also in line {}", written.name, other.line))
            );
        }
        self.by_name.insert(written.name, site);
        Ok(())
    }

    fn add_link(&mut self, line: usize, written: WrittenLink, book: &PriceBook) -> Result<()> {
        if written.from == written.to {
            return Err(Error::usage("link leads to where it begins").got(written.from));
        }
        let unknown = |name: &str| {
            Error::usage("link of a site that the file does not describe")
                .got(name)
                .help("add a [[site]] with this name")
        };
        let from = self.by_name.get(&written.from).ok_or_else(|| unknown(&written.from))?;
        if !self.by_name.contains_key(&written.to) {
            return Err(unknown(&written.to));
        }
        let path = written.path.unwrap_or_else(|| INTERNET.to_owned());
        let same = |link: &&Link| link.from == written.from && link.to == written.to && link.path == path;
        if let Some(other) = self.links_to(&written.to).find(same) {
            return Err(Error::usage("link is there twice")
                .got(format!("also in line {}", other.line))
                .help("give it another `path`"));
        }
        let cost = match written.price {
            WrittenCost::Named(name) => {
                let price = book.egress(&name, &from.provider, &from.region)?.clone();
                LinkCost::ByVolume { meter: name, price }
            }
            WrittenCost::Flat { usd_month } => LinkCost::Flat { micro_usd_month: micro_usd(&usd_month)? },
            WrittenCost::Own(price) => {
                let meter = format!("{}/{}/{path}", written.from, written.to);
                LinkCost::ByVolume { meter, price: price.read()? }
            }
        };
        let rate = written.rate.as_deref().map(size::parse_rate).transpose()?;
        if rate == Some(0) {
            return Err(Error::usage("link has a rate of nothing").help("leave the rate out if it is unknown"));
        }
        let delay = written.delay.as_deref().map(span::parse).transpose()?;
        let WrittenLink { from, to, private, .. } = written;
        self.by_target.entry(to.clone()).or_default().push(self.links.len());
        self.links.push(Link { from, to, path, rate, delay, cost, line, private });
        Ok(())
    }
}

fn listed(codes: &BTreeSet<String>) -> String {
    codes.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    #[serde(default, rename = "site")]
    sites: Vec<Spanned<WrittenSite>>,
    #[serde(default, rename = "link")]
    links: Vec<Spanned<WrittenLink>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenSite {
    name: String,
    provider: Option<String>,
    region: Option<String>,
    #[serde(default)]
    agents: Vec<String>,
    #[serde(default)]
    repositories: OneOrSeveral,
    cache: Option<String>,
    #[serde(default)]
    gpus: Vec<WrittenGpus>,
    #[serde(default)]
    nodes: Patterns,
    infra: Option<String>,
    storage: Option<String>,
    jurisdiction: Option<OneOrSeveral>,
    tenancy: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenGpus {
    model: String,
    count: u64,
    usd_hour: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenLink {
    from: String,
    to: String,
    path: Option<String>,
    rate: Option<String>,
    delay: Option<String>,
    price: WrittenCost,
    private: Option<bool>,
}

/// A price as a link has it: the name of one in the price book, one of its own, or a flat one.
#[derive(Deserialize)]
#[serde(untagged, expecting = "the name of a price, or { unit, usd }, { unit, tiers } or { usd_month }")]
enum WrittenCost {
    Named(String),
    Flat { usd_month: String },
    Own(WrittenPrice),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    const SITES: &str = r#"
[[site]]
name = "home"
repositories = "s3://models"
agents = ["home-1:7171"]
cache = "40T"
jurisdiction = ["DE", "EU"]
gpus = [{ model = "H100", count = 64, usd_hour = "1.1" }]

[[site]]
name = "burst"
provider = "aws"
region = "us-east-1"
storage = "aws/s3-standard"
nodes = "ip-10-*"
gpus = [{ model = "H100", count = 512, usd_hour = "2.5" }]

[[link]]
from = "home"
to = "burst"
rate = "10Gbit"
delay = "80ms"
price = { unit = "GB", usd = "0" }

[[link]]
from = "burst"
to = "home"
rate = "10Gbit"
delay = "80ms"
price = "aws/internet"

[[link]]
from = "burst"
to = "home"
path = "dx1"
rate = "40Gbit"
price = { usd_month = "16425" }
private = true
"#;

    const POLICY: &str = "version = 1\nrepository = '01K9ZQBF5628NEHV0HKGX7E3TC'\n\n[[site]]\nname = 'home'\njurisdiction = ['de', 'eu']\ntenancy = 'own'\n\n\
         [[site]]\nname = 'burst'\njurisdiction = 'US'\ntenancy = 'shared'\n\n[[link]]\nbetween = ['home', 'burst']\naddresses = ['10.0.0.0/8']\n";

    fn read(text: &str) -> Result<Sites> {
        Sites::read(text, &PriceBook::built_in())
    }

    #[test]
    fn sites_and_links_are_read_with_their_prices() {
        let sites = read(SITES).unwrap();
        let burst = sites.site("burst").unwrap();
        assert_eq!((burst.provider.as_str(), burst.region.as_str(), burst.cache), ("aws", "us-east-1", None));
        assert_eq!(burst.gpus, [Gpus { model: "H100".to_owned(), count: 512, micro_usd_hour: 2_500_000 }]);
        assert!(burst.nodes.take("ip-10-1-2-3") && !burst.nodes.take("gke-1"));
        assert_eq!((sites.of_node("ip-10-1-2-3"), sites.of_node("gke-1")), (Some("burst"), None));
        let order = read("[[site]]\nname = 'z'\nnodes = 'gpu-1*'\n[[site]]\nname = 'a'\nnodes = 'gpu-*'\n").unwrap();
        assert_eq!(
            (order.of_node("gpu-17"), order.of_node("gpu-2")),
            (Some("z"), Some("a")),
            "by the order of the file"
        );
        let home = sites.site("home").unwrap();
        assert_eq!((home.provider.as_str(), home.cache), ("own", Some(40 << 40)));
        let back: Vec<&Link> = sites.links().iter().filter(|link| link.from == "burst").collect();
        assert_eq!(back.iter().map(|link| link.path.as_str()).collect::<Vec<_>>(), ["internet", "dx1"]);
        assert_eq!((back[0].rate, back[0].delay), (Some(1_250_000_000), Some(Duration::from_millis(80))));
        assert!(matches!(&back[0].cost, LinkCost::ByVolume { meter, .. } if meter == "aws/internet"));
        assert_eq!(back[1].cost, LinkCost::Flat { micro_usd_month: 16_425_000_000 });
        let out = &sites.links()[0];
        assert!(
            matches!(&out.cost, LinkCost::ByVolume { meter, price } if meter == "home/burst/internet" && price.marginal(0, 1 << 40) == 0)
        );
    }

    #[test]
    fn what_the_policy_decides_may_only_be_repeated() {
        let policy = PolicyRules::read(POLICY).unwrap();
        read(SITES).unwrap().check(&policy).unwrap();
        for (text, line, says) in [
            (SITES.replace("[\"DE\", \"EU\"]", "\"US\""), "line 2 of", "another jurisdiction"),
            (SITES.replace("cache = \"40T\"", "tenancy = \"shared\""), "line 2 of", "another tenancy"),
        ] {
            let error = read(&text).unwrap().check(&policy).unwrap_err();
            let told = error.to_string();
            assert!(error.kind() == ErrorKind::Conflict && told.contains(says) && told.contains(line), "{told}");
            assert!(told.contains("as line 4 of the policy says"), "{told}");
        }
        let public = PolicyRules::read(&POLICY[..POLICY.find("[[link]]").unwrap()]).unwrap();
        let told = read(SITES).unwrap().check(&public).unwrap_err().to_string();
        assert!(
            told.contains("another thing of a private link") && told.contains("line 32 of the sites file"),
            "{told}"
        );
        let told =
            read(&SITES.replace("private = true", "private = false")).unwrap().check(&policy).unwrap_err().to_string();
        assert!(told.contains("private, as line 14 of the policy says"), "{told}");
        // The policy need not describe a site, nor the file every site of the policy.
        let other = POLICY.replace("burst", "moon");
        read(&SITES.replace("private = true\n", "")).unwrap().check(&PolicyRules::read(&other).unwrap()).unwrap();
    }

    #[test]
    fn bad_files_are_refused_with_their_line() {
        let with = |more: &str| format!("{SITES}\n{more}");
        let link = |fields: &str| with(&format!("[[link]]\n{fields}"));
        for (text, says) in [
            (with("[[site]]\nname = 'home'"), "site is described twice at line 40"),
            (with("[[site]]\nname = 'b'\nrepositories = 's3://models'"), "repository is at two sites at line 40"),
            (with("[[site]]\nname = 'a/b'"), "line 40"),
            (with("[[site]]\nname = 'b'\nstorage = 'aws/s3-standard'"), "price is for another place at line 40"),
            (with("[[site]]\nname = 'b'\ncache = 'much'"), "this is not a size at line 40"),
            (
                with("[[site]]\nname = 'b'\ngpus = [{ model = 'A', count = 1, usd_hour = '-2' }]"),
                "this is not a price at line 40",
            ),
            (
                link("from = 'home'\nto = 'home'\nprice = { usd_month = '1' }"),
                "link leads to where it begins at line 40",
            ),
            (
                link("from = 'home'\nto = 'mars'\nprice = { usd_month = '1' }"),
                "link of a site that the file does not describe",
            ),
            (link("from = 'home'\nto = 'burst'\nprice = { usd_month = '1' }"), "link is there twice at line 40"),
            (
                link("from = 'home'\nto = 'burst'\npath = 'x'\nprice = 'aws/internet'"),
                "price is for another place at line 40",
            ),
            (
                link("from = 'home'\nto = 'burst'\npath = 'x'\nprice = { unit = 'GB', usd = '-0.1' }"),
                "this is not a price",
            ),
            (link("from = 'home'\nto = 'burst'\npath = 'x'\nprice = 7"), "sites file is malformed at line 44"),
            (
                link("from = 'home'\nto = 'burst'\npath = 'x'\nrate = '0'\nprice = { usd_month = '1' }"),
                "link has a rate of nothing",
            ),
            (with("colour = 'red'"), "sites file is malformed at line 40"),
        ] {
            let told = read(&text).unwrap_err().to_string();
            assert!(told.contains(says), "{says}: {told}");
        }
    }
}
