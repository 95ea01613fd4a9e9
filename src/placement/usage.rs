//! Usage of a month: what moved between which places, for whom, and what that cost.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::price_book::PriceBook;
use super::sites::{Link, LinkCost, Site, Sites};
use crate::format::{Direction, UsageReport, UsageTotals};
use crate::identity::Identity;

/// Grouping of usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum UsageBy {
    /// From where to where.
    Link,
    /// Where the bytes came to.
    Site,
    /// Run, or name of another tree.
    Run,
    /// Tenant of the name.
    Tenant,
}

impl UsageBy {
    /// Word of the command line and the API.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Link => "link",
            Self::Site => "site",
            Self::Run => "run",
            Self::Tenant => "tenant",
        }
    }
}

/// Bytes that moved in a month.
#[derive(Clone, Debug, Default)]
pub struct Usage {
    moved: BTreeMap<MovedKey, UsageTotals>,
}

/// A place.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    /// The repository's store.
    Repository,
    /// Agents of a site.
    Site(String),
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct MovedKey {
    from: Place,
    to: Place,
    of: MovedName,
}

/// Content that moved, as the agent that counted it tells: no other agent's report changes it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct MovedName {
    /// Run, or name of another tree; empty: none.
    name: String,
    /// Tenants of the name; empty: none.
    tenant: String,
}

/// Usage of one link, site, run or tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
pub struct UsageRow {
    /// Site, run or tenant; none: everything else, or a grouping by link.
    #[cfg_attr(feature = "agent", schema(required))]
    pub name: Option<String>,
    /// Place that sent, of a grouping by link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// Place that received, of a grouping by link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// Bytes.
    pub bytes: u64,
    /// Requests to the repository's store.
    pub requests: u64,
    /// Micro-dollars; none: a price is not known.
    #[cfg_attr(feature = "agent", schema(required))]
    pub usd_micro: Option<u64>,
    /// GPU seconds that did not idle, as the data of jobs came before they had their GPUs.
    pub gpu_seconds: u64,
}

/// Sites, prices, and the site that the repository is at.
#[derive(Clone, Copy, Debug)]
pub struct PricedSites<'a> {
    /// Sites and links.
    pub sites: &'a Sites,
    /// Prices.
    pub book: &'a PriceBook,
    /// Site of the repository, if the sites file says.
    pub repository: Option<&'a str>,
}

impl Usage {
    /// Joins the reports of all agents.
    #[must_use]
    pub fn of<'a>(reports: impl IntoIterator<Item = (&'a Identity, &'a UsageReport)>) -> Self {
        // By link, what senders and what receivers have counted.
        let mut links: BTreeMap<(Place, Place), [BTreeMap<MovedName, UsageTotals>; 2]> = BTreeMap::new();
        for (agent, report) in reports {
            for (line, totals) in &report.lines {
                let here = Place::Site(agent.site().to_owned());
                let there = if line.site.is_empty() { Place::Repository } else { Place::Site(line.site.clone()) };
                let (ends, side) = match line.way {
                    Direction::In => ((there, here), 1),
                    Direction::Out => ((here, there), 0),
                };
                let of = MovedName { name: line.name.clone(), tenant: line.tenant.clone() };
                links.entry(ends).or_default()[side].entry(of).or_default().add(*totals);
            }
        }
        let mut moved = BTreeMap::new();
        for ((from, to), [sent, received]) in links {
            let sum = |side: &BTreeMap<MovedName, UsageTotals>| {
                side.values().fold(0_u64, |sum, totals| sum.saturating_add(totals.bytes))
            };
            // Both sides count the same bytes, perhaps by other names; either may not report.
            let counted = if sum(&sent) > sum(&received) { sent } else { received };
            moved.extend(
                counted.into_iter().map(|(of, totals)| (MovedKey { from: from.clone(), to: to.clone(), of }, totals)),
            );
        }
        Self { moved }
    }

    /// The same with the tenants that names have now; a name without any keeps those that its agents have told.
    #[must_use]
    pub fn with_tenants(self, tenants: impl Fn(&str) -> Option<String>) -> Self {
        let mut moved: BTreeMap<MovedKey, UsageTotals> = BTreeMap::new();
        for (mut key, totals) in self.moved {
            if let Some(tenant) = tenants(&key.of.name) {
                key.of.tenant = tenant;
            }
            moved.entry(key).or_default().add(totals);
        }
        Self { moved }
    }

    /// Bytes on each meter of the links.
    #[must_use]
    pub fn by_meter(&self, sites: &Sites, repository: Option<&str>) -> BTreeMap<String, u64> {
        let mut meters = BTreeMap::new();
        for (key, moved) in &self.moved {
            let link = key.link(sites, repository);
            if let Some(LinkCost::ByVolume { meter, .. }) = link.map(|link| &link.cost) {
                let bytes: &mut u64 = meters.entry(meter.clone()).or_default();
                *bytes = bytes.saturating_add(moved.bytes);
            }
        }
        meters
    }

    /// The month's rows, in the order of their names. Dollars are unknown without `priced`. What a meter's volume costs is divided by
    /// bytes, so that the rows of each grouping have the same sum.
    #[must_use]
    pub fn rows(&self, by: UsageBy, priced: Option<PricedSites<'_>>) -> Vec<UsageRow> {
        let mut rows: BTreeMap<RowKey, Row> = BTreeMap::new();
        for (key, moved) in &self.moved {
            let moved = *moved;
            let row = rows.entry(key.row(by)).or_default();
            row.totals.add(moved);
            match priced {
                None => row.unpriced = true,
                Some(priced) => row.add_cost(key, moved, priced),
            }
        }
        if let Some(priced) = priced {
            divide(&mut rows, priced, &self.by_meter(priced.sites, priced.repository));
        }
        let row = |(key, row): (RowKey, Row)| UsageRow {
            name: Some(key.name).filter(|name| !name.is_empty()),
            from: key.ends.as_ref().map(|(from, _)| from.word().to_owned()),
            to: key.ends.as_ref().map(|(_, to)| to.word().to_owned()),
            bytes: row.totals.bytes,
            requests: row.totals.requests,
            usd_micro: (!row.unpriced).then_some(row.micro_usd),
            gpu_seconds: row.totals.gpu_seconds,
        };
        rows.into_iter().map(row).collect()
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct RowKey {
    ends: Option<(Place, Place)>,
    name: String,
}

#[derive(Clone, Debug, Default)]
struct Row {
    totals: UsageTotals,
    /// Bytes on each meter.
    metered: BTreeMap<String, u64>,
    micro_usd: u64,
    unpriced: bool,
}

impl Row {
    fn add_cost(&mut self, key: &MovedKey, moved: UsageTotals, priced: PricedSites<'_>) {
        match key.requests_micro_usd(moved.requests, priced) {
            Some(micro_usd) => self.micro_usd = self.micro_usd.saturating_add(micro_usd),
            None => self.unpriced = true,
        }
        match key.link(priced.sites, priced.repository).map(|link| &link.cost) {
            Some(LinkCost::ByVolume { meter, .. }) => {
                let bytes = self.metered.entry(meter.clone()).or_default();
                *bytes = bytes.saturating_add(moved.bytes);
            }
            Some(LinkCost::Flat { .. }) => {}
            None if key.is_within(priced.repository) || moved.bytes == 0 => {}
            None => self.unpriced = true,
        }
    }
}

/// Divides what each meter's volume costs among the rows, by bytes; what is left of the division goes to those with the most.
fn divide(rows: &mut BTreeMap<RowKey, Row>, priced: PricedSites<'_>, meters: &BTreeMap<String, u64>) {
    for (meter, &volume) in meters.iter().filter(|(_, volume)| **volume > 0) {
        let links = priced.sites.links().iter();
        let cost = links.map(|link| &link.cost).find(|cost| cost.meter() == Some(meter));
        let Some(cost) = cost.map(|cost| cost.marginal(|_| 0, volume)) else { continue };
        let mut on_it: Vec<(u64, &mut Row)> = rows
            .values_mut()
            .filter_map(|row| row.metered.get(meter).copied().filter(|bytes| *bytes > 0).map(|bytes| (bytes, row)))
            .collect();
        let part =
            |bytes: u64| u64::try_from(u128::from(cost) * u128::from(bytes) / u128::from(volume)).unwrap_or(cost);
        let mut left = on_it.iter().fold(cost, |left, (bytes, _)| left.saturating_sub(part(*bytes)));
        on_it.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
        for (bytes, row) in on_it {
            let more = left.min(1);
            left -= more;
            row.micro_usd = row.micro_usd.saturating_add(part(bytes) + more);
        }
    }
}

impl Place {
    fn site<'a>(&'a self, repository: Option<&'a str>) -> Option<&'a str> {
        match self {
            Self::Repository => repository,
            Self::Site(site) => Some(site),
        }
    }

    fn word(&self) -> &str {
        match self {
            Self::Repository => "repository",
            Self::Site(site) => site,
        }
    }
}

impl MovedKey {
    /// Row of a grouping that it belongs to.
    fn row(&self, by: UsageBy) -> RowKey {
        let name = match by {
            UsageBy::Link => String::new(),
            UsageBy::Site => self.to.word().to_owned(),
            UsageBy::Run => self.of.name.clone(),
            UsageBy::Tenant => self.of.tenant.clone(),
        };
        RowKey { ends: (by == UsageBy::Link).then(|| (self.from.clone(), self.to.clone())), name }
    }

    /// Link that it is taken to have moved over: the usual one of two sites.
    fn link<'a>(&self, sites: &'a Sites, repository: Option<&str>) -> Option<&'a Link> {
        let (from, to) = (self.from.site(repository)?, self.to.site(repository)?);
        if from == to {
            return None;
        }
        Link::usual(sites.links_between(from, to))
    }

    /// True if both places are one site.
    fn is_within(&self, repository: Option<&str>) -> bool {
        let ends = (self.from.site(repository), self.to.site(repository));
        matches!(ends, (Some(from), Some(to)) if from == to)
    }

    /// Micro-dollars of requests to the repository's store; none if they have a price that is not known.
    fn requests_micro_usd(&self, requests: u64, priced: PricedSites<'_>) -> Option<u64> {
        if requests == 0 {
            return Some(0);
        }
        let at: &Site = priced.sites.site(priced.repository?)?;
        let Some(storage) = &at.storage else { return Some(0) };
        let price = priced.book.storage(storage, &at.provider, &at.region).ok()?;
        let million =
            if self.from == Place::Repository { price.micro_usd_million_gets } else { price.micro_usd_million_puts };
        u64::try_from((u128::from(requests) * u128::from(million)).div_ceil(1_000_000)).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Timestamp;
    use crate::format::UsageKey;
    use crate::id::RepositoryId;

    const GIB: u64 = 1 << 30;
    const SITES: &str = r#"
[[site]]
name = "home"
repositories = "s3://models"
provider = "aws"
region = "us-east-1"
storage = "aws/s3-standard"

[[site]]
name = "burst"

[[link]]
from = "home"
to = "burst"
price = "aws/internet"

[[link]]
from = "burst"
to = "home"
path = "dx1"
price = { usd_month = "100" }
"#;

    /// A report of one agent of `site`: direction, other site, name, tenant, GiB and requests.
    fn report(site: &str, lines: &[(Direction, &str, &str, &str, u64, u64)]) -> (Identity, UsageReport) {
        let line = |&(way, site, name, tenant, gib, requests): &(Direction, &str, &str, &str, u64, u64)| {
            let text = str::to_owned;
            let key = UsageKey { day: 1, way, site: text(site), name: text(name), tenant: text(tenant) };
            (key, UsageTotals { bytes: gib * GIB, requests, gpu_seconds: 0 })
        };
        let report = UsageReport {
            repository: RepositoryId::from_bytes([1; 16]),
            month: "2026-11".parse().unwrap(),
            started: Timestamp(0),
            sequence: 1,
            at: Timestamp(0),
            lines: lines.iter().map(line).collect(),
        };
        (Identity::new(site, "a").unwrap(), report)
    }

    fn usage() -> Usage {
        let reports = [
            report(
                "burst",
                &[
                    (Direction::In, "", "run-7", "red", 200, 2_000_000),
                    (Direction::In, "", "web", "blue", 100, 0),
                    (Direction::In, "home", "run-7", "red", 40, 0),
                    (Direction::Out, "home", "run-7", "red", 5, 0),
                    (Direction::Out, "", "", "", 1, 1_000_000),
                ],
            ),
            // It lost some of what burst sent, and has sent more than arrived there.
            report(
                "home",
                &[(Direction::Out, "burst", "run-7", "red", 50, 0), (Direction::In, "burst", "run-7", "", 4, 0)],
            ),
        ];
        Usage::of(reports.iter().map(|(agent, report)| (agent, report)))
    }

    fn rows(by: UsageBy) -> Vec<(String, u64, Option<u64>)> {
        let book = PriceBook::built_in();
        let sites = Sites::read(SITES, &book).unwrap();
        let rows = usage().rows(by, Some(PricedSites { sites: &sites, book: &book, repository: Some("home") }));
        let name = |row: &UsageRow| match (&row.from, &row.to) {
            (Some(from), Some(to)) => format!("{from} > {to}"),
            _ => row.name.clone().unwrap_or_default(),
        };
        rows.iter().map(|row| (name(row), row.bytes / GIB, row.usd_micro)).collect()
    }

    #[test]
    fn no_report_changes_the_tenant_of_another_and_labels_count_more() {
        let reports = [
            report("burst", &[(Direction::In, "", "run-9", "red", 100, 0)]),
            report("west", &[(Direction::In, "", "run-9", "victim", 1, 0)]),
        ];
        let told = Usage::of(reports.iter().map(|(agent, report)| (agent, report)));
        let rows = |usage: &Usage| -> Vec<(String, u64)> {
            let rows = usage.rows(UsageBy::Tenant, None).into_iter();
            rows.map(|row| (row.name.unwrap_or_default(), row.bytes / GIB)).collect()
        };
        assert_eq!(rows(&told), [("red".to_owned(), 100), ("victim".to_owned(), 1)]);
        assert_eq!(rows(&told.clone().with_tenants(|_| None)), rows(&told));
        assert_eq!(rows(&told.with_tenants(|_| Some("red".to_owned()))), [("red".to_owned(), 101)]);
    }

    #[test]
    fn dollars_are_those_computed_by_hand_and_each_grouping_has_the_same_sum() {
        // 350 GiB left home, of which 100 are free: 250 x $0.09 = $22.50. 2 million reads at $0.40, a million writes at $5.
        let whole = 22_500_000 + 800_000 + 5_000_000;
        let by_link = rows(UsageBy::Link);
        assert_eq!(
            by_link,
            [
                ("repository > burst".to_owned(), 300, Some(22_500_000 * 300 / 350 + 1 + 800_000)),
                ("burst > repository".to_owned(), 1, Some(5_000_000)),
                ("burst > home".to_owned(), 5, Some(0)),
                ("home > burst".to_owned(), 50, Some(22_500_000 * 50 / 350)),
            ]
        );
        for by in [UsageBy::Link, UsageBy::Site, UsageBy::Run, UsageBy::Tenant] {
            let rows = rows(by);
            assert_eq!(rows.iter().map(|(_, bytes, _)| bytes).sum::<u64>(), 356, "{by:?}");
            assert_eq!(rows.iter().map(|(_, _, usd)| usd.unwrap()).sum::<u64>(), whole, "{by:?}");
        }
        let names = |by| rows(by).into_iter().map(|(name, gib, _)| (name, gib)).collect::<Vec<_>>();
        let named =
            |list: &[(&str, u64)]| list.iter().map(|(name, gib)| ((*name).to_owned(), *gib)).collect::<Vec<_>>();
        assert_eq!(names(UsageBy::Run), named(&[("", 1), ("run-7", 255), ("web", 100)]));
        assert_eq!(names(UsageBy::Tenant), named(&[("", 1), ("blue", 100), ("red", 255)]));
        assert_eq!(names(UsageBy::Site), named(&[("burst", 350), ("home", 5), ("repository", 1)]));
    }

    #[test]
    fn meters_have_the_volume_of_their_links_and_what_has_no_price_is_unknown() {
        let book = PriceBook::built_in();
        let sites = Sites::read(SITES, &book).unwrap();
        let meters = usage().by_meter(&sites, Some("home"));
        assert_eq!(meters, BTreeMap::from([("aws/internet".to_owned(), 350 * GIB)]));
        assert_eq!(usage().by_meter(&sites, None), BTreeMap::from([("aws/internet".to_owned(), 50 * GIB)]));
        let unknown = usage().rows(UsageBy::Link, Some(PricedSites { sites: &sites, book: &book, repository: None }));
        assert_eq!(unknown.iter().filter(|row| row.usd_micro.is_none()).count(), 2);
        assert!(usage().rows(UsageBy::Run, None).iter().all(|row| row.usd_micro.is_none()));
    }

    /// Agents are trusted with their own counts, not with the arithmetic of others.
    #[test]
    fn absurd_reports_do_not_overflow() {
        let lines = [(Direction::In, "home", "a", "red", 1, 1), (Direction::In, "home", "b", "red", 1, 1)];
        let (agent, mut report) = report("burst", &lines);
        for (_, totals) in &mut report.lines {
            *totals = UsageTotals { bytes: u64::MAX, requests: u64::MAX, gpu_seconds: u64::MAX };
        }
        let usage = Usage::of([(&agent, &report)]);
        let book = PriceBook::built_in();
        let sites = Sites::read(SITES, &book).unwrap();
        let priced = || PricedSites { sites: &sites, book: &book, repository: Some("home") };
        for by in [UsageBy::Tenant, UsageBy::Run, UsageBy::Site, UsageBy::Link] {
            assert!(usage.rows(by, Some(priced())).iter().any(|row| row.bytes == u64::MAX));
        }
        assert_eq!(usage.by_meter(&sites, None).len(), 1);
    }
}
