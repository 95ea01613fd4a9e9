//! `towline sites` and `towline links`.

use std::path::PathBuf;
use std::sync::Arc;

use serde::Serialize;

use super::output::{printable, table};
use super::policy::rules_in_force;
use super::verbs::Context;
use crate::agent::advisor::{Advisor, SitesPaths, SitesRead};
use crate::agent::view::Calibration;
use crate::error::{ErrorKind, Result};
use crate::placement::{Link, LinkCalibration, LinkCost, MICRO, Price, PriceBook, Site, Sites};
use crate::policy::PolicyRules;
use crate::transfer::policy::machine_guard;
use crate::{size, span};

/// Files of `towline sites` and `towline links`.
#[derive(Debug, clap::Args)]
pub(super) struct SitesArgs {
    /// The sites file (docs/placement.md)
    #[arg(value_name = "FILE", default_value = "sites.toml", value_hint = clap::ValueHint::FilePath)]
    file: PathBuf,
    /// Price book whose entries replace those that ship with the program
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    prices: Option<PathBuf>,
}

/// A site, by the file and the policy.
#[derive(Serialize)]
struct SiteView {
    site: String,
    provider: String,
    region: String,
    /// By the policy; empty if it does not describe the site.
    jurisdiction: Vec<String>,
    tenancy: Option<String>,
    /// True if the policy describes the site: what has labels goes to no other.
    in_policy: bool,
    agents: Vec<String>,
    repositories: Vec<String>,
    cache: Option<u64>,
    gpus: Vec<GpusView>,
}

#[derive(Serialize)]
struct GpusView {
    model: String,
    count: u64,
    micro_usd_hour: u64,
}

#[derive(Serialize)]
struct SitesView {
    prices: String,
    /// Version of the policy that the sites were checked against.
    policy: Option<u64>,
    sites: Vec<SiteView>,
}

/// A link, by the file and the policy.
#[derive(Serialize)]
struct LinkView {
    from: String,
    to: String,
    path: String,
    /// Bytes a second.
    rate: Option<u64>,
    delay_seconds: Option<f64>,
    /// By the policy.
    private: bool,
    /// Meter of its volume; none: a flat line.
    meter: Option<String>,
    /// Price by volume; none: a flat line.
    price: Option<Price>,
    micro_usd_month: Option<u64>,
}

#[derive(Serialize)]
struct LinksView {
    prices: String,
    policy: Option<u64>,
    links: Vec<LinkView>,
}

impl Context {
    /// Lists the sites; with `check`, only after the policy of the repository was read.
    pub(super) async fn sites(&self, args: &SitesArgs, check: bool) -> Result<()> {
        let (sites, book, policy) = self.checked_sites(args, check).await?;
        let rules = policy.as_deref();
        let view = SitesView {
            prices: book.dated().to_owned(),
            policy: rules.map(PolicyRules::version),
            sites: sites.sites().map(|(name, site)| site_view(name, site, rules)).collect(),
        };
        if let Some(rules) = rules {
            for site in view.sites.iter().filter(|site| !site.in_policy) {
                self.output
                    .remark(&format!("the policy does not describe {}: nothing with labels goes there", site.site));
            }
            for name in rules.sites().keys().filter(|name| sites.site(name).is_none()) {
                self.output
                    .remark(&format!("the sites file does not describe {}, which the policy does", printable(name)));
            }
        }
        self.output.answer(&view, |view, _| sites_table(&view.sites))
    }

    /// Lists the links.
    pub(super) async fn links(&self, args: &SitesArgs) -> Result<()> {
        let (sites, book, policy) = self.checked_sites(args, false).await?;
        let rules = policy.as_deref();
        let view = LinksView {
            prices: book.dated().to_owned(),
            policy: rules.map(PolicyRules::version),
            links: sites.links().iter().map(|link| link_view(link, rules)).collect(),
        };
        self.output.answer(&view, |view, _| links_table(&view.links))
    }

    /// Lists what agents of the sites have measured.
    pub(super) async fn measured_links(&self, args: &SitesArgs) -> Result<()> {
        let repository = self.open().await?;
        let paths = SitesPaths { sites: args.file.clone(), prices: args.prices.clone() };
        let authority = self.authority_of_agents(&repository).await?;
        let epoch = Advisor::new(repository, paths, machine_guard()?, authority)?.epoch().await?;
        let view = Calibration { generated_at: epoch.at().to_string(), links: epoch.calibration() };
        self.output.answer(&view, |view, _| measured_table(&view.links))
    }

    /// Reads the sites file, and checks it against the policy of the repository, if there is one.
    async fn checked_sites(
        &self,
        args: &SitesArgs,
        required: bool,
    ) -> Result<(Sites, PriceBook, Option<Arc<PolicyRules>>)> {
        let SitesRead { sites, book, .. } =
            SitesPaths { sites: args.file.clone(), prices: args.prices.clone() }.read()?;
        let policy = self.policy_in_force(required).await?;
        if let Some(rules) = &policy {
            sites.check(rules)?;
        }
        Ok((sites, book, policy))
    }

    /// Rules of the repository's policy; none if it has none, or there is no repository and none is `required`.
    async fn policy_in_force(&self, required: bool) -> Result<Option<Arc<PolicyRules>>> {
        let opened = if required { self.open().await.map(Some) } else { self.open_if_made().await };
        let Some(repository) = opened? else { return Ok(None) };
        let state = repository.state().await?;
        if state.policy.is_none() && !required {
            return Ok(None);
        }
        let rules = rules_in_force(&repository, &state).await;
        rules.map(Some).map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                error.help("`towline policy set FILE` sets one; without --check the files alone are read")
            }
            _ => error,
        })
    }
}

fn site_view(name: &str, site: &Site, rules: Option<&PolicyRules>) -> SiteView {
    let rule = rules.and_then(|rules| rules.site(name));
    let gpus = site.gpus.iter().map(|gpus| GpusView {
        model: gpus.model.clone(),
        count: gpus.count,
        micro_usd_hour: gpus.micro_usd_hour,
    });
    SiteView {
        site: name.to_owned(),
        provider: site.provider.clone(),
        region: site.region.clone(),
        jurisdiction: rule.map(|rule| rule.jurisdictions.iter().cloned().collect()).unwrap_or_default(),
        tenancy: rule.and_then(|rule| rule.tenancy.clone()),
        in_policy: rule.is_some(),
        agents: site.agents.clone(),
        repositories: site.repositories.iter().cloned().collect(),
        cache: site.cache,
        gpus: gpus.collect(),
    }
}

fn link_view(link: &Link, rules: Option<&PolicyRules>) -> LinkView {
    let (meter, price, micro_usd_month) = match &link.cost {
        LinkCost::ByVolume { meter, price } => (Some(meter.clone()), Some(price.clone()), None),
        LinkCost::Flat { micro_usd_month } => (None, None, Some(*micro_usd_month)),
    };
    LinkView {
        from: link.from.clone(),
        to: link.to.clone(),
        path: link.path.clone(),
        rate: link.rate,
        delay_seconds: link.delay.map(|delay| delay.as_secs_f64()),
        private: rules.is_some_and(|rules| rules.private_link(&link.from, &link.to).is_some()),
        meter,
        price,
        micro_usd_month,
    }
}

fn sites_table(sites: &[SiteView]) -> String {
    let row = |site: &SiteView| {
        let gpus: Vec<String> = site
            .gpus
            .iter()
            .map(|gpus| format!("{} {} at {}/h", gpus.count, gpus.model, dollars(gpus.micro_usd_hour)))
            .collect();
        vec![
            printable(&site.site),
            printable(&site.provider),
            or_dash(&printable(&site.region)),
            or_dash(&printable(&site.jurisdiction.join(" "))),
            or_dash(&printable(site.tenancy.as_deref().unwrap_or_default())),
            site.cache.map_or_else(|| "-".to_owned(), size::show),
            or_dash(&printable(&gpus.join(", "))),
            or_dash(&printable(&site.repositories.join(" "))),
        ]
    };
    let rows: Vec<_> = sites.iter().map(row).collect();
    table(&["SITE", "PROVIDER", "REGION", "JURISDICTION", "TENANCY", ">CACHE", "GPUS", "REPOSITORIES"], &rows)
}

fn links_table(links: &[LinkView]) -> String {
    let row = |link: &LinkView| {
        let price = match (&link.price, link.micro_usd_month) {
            (Some(price), _) => priced(price),
            (None, flat) => format!("flat, {} a month", dollars(flat.unwrap_or_default())),
        };
        vec![
            printable(&link.from),
            printable(&link.to),
            printable(&link.path),
            link.rate.map_or_else(|| "-".to_owned(), bits),
            link.delay_seconds
                .and_then(|delay| std::time::Duration::try_from_secs_f64(delay).ok())
                .map_or_else(|| "-".to_owned(), span::show),
            if link.private { "private" } else { "-" }.to_owned(),
            price,
        ]
    };
    let rows: Vec<_> = links.iter().map(row).collect();
    table(&["FROM", "TO", "PATH", ">RATE", ">DELAY", "POLICY", "PRICE"], &rows)
}

fn measured_table(links: &[LinkCalibration]) -> String {
    let percent = |share: Option<f64>| share.map_or_else(|| "-".to_owned(), |share| format!("{:.0} %", 100.0 * share));
    let row = |link: &LinkCalibration| {
        vec![
            printable(link.from.as_deref().unwrap_or("repository")),
            printable(&link.to),
            bits(link.rate),
            format!("{:.2}", link.spread),
            link.samples.to_string(),
            link.overhead_s.map_or_else(|| "-".to_owned(), |overhead| format!("{overhead:.2} s")),
            link.outcomes.to_string(),
            percent(link.median_error),
            percent(link.p90_coverage),
        ]
    };
    let rows: Vec<_> = links.iter().map(row).collect();
    table(&["FROM", "TO", ">RATE", ">P90/P50", ">SAMPLES", ">OVERHEAD", ">OUTCOMES", ">ERROR", ">WITHIN P90"], &rows)
}

/// `$0.09/GiB from 100 GiB, $0.085 from 10240`: each tier with where it begins.
fn priced(price: &Price) -> String {
    let unit = price.unit().word();
    let (mut from, mut parts) = (0, Vec::new());
    for tier in price.tiers() {
        let start = if from == 0 { String::new() } else { format!(" from {from}") };
        let per = if parts.is_empty() { format!("/{unit}") } else { String::new() };
        parts.push(format!("{}{per}{start}", dollars(tier.micro_usd)));
        from = tier.up_to.unwrap_or(from);
    }
    parts.join(", ")
}

/// Bytes a second, in bits: `10 Gbit/s`.
pub(super) fn bits(rate: u64) -> String {
    let bits = rate as f64 * 8.0;
    let units = [(1e9, "Gbit"), (1e6, "Mbit"), (1e3, "kbit"), (1.0, "bit")];
    let (size, unit) = units.into_iter().find(|(size, _)| bits >= *size).unwrap_or((1.0, "bit"));
    let value = format!("{:.1}", bits / size);
    format!("{} {unit}/s", value.trim_end_matches('0').trim_end_matches('.'))
}

/// Dollars with no more decimal places than they need, but cents.
pub(super) fn dollars(micro_usd: u64) -> String {
    let text = format!("{}.{:06}", micro_usd / MICRO, micro_usd % MICRO);
    let short = text.trim_end_matches('0');
    let (whole, part) = short.split_once('.').unwrap_or((short, ""));
    if part.is_empty() { format!("${whole}") } else { format!("${whole}.{part:0<2}") }
}

pub(super) fn or_dash(text: &str) -> String {
    if text.is_empty() { "-".to_owned() } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prices_are_shown_by_tier() {
        let book = PriceBook::built_in();
        let shown = priced(book.egress("aws/internet", "aws", "us-east-1").unwrap());
        assert_eq!(shown, "$0/GiB, $0.09 from 100, $0.085 from 10240, $0.07 from 51200, $0.05 from 153600");
        assert_eq!(
            (bits(1_250_000_000), bits(187_500), bits(1)),
            ("10 Gbit/s".to_owned(), "1.5 Mbit/s".to_owned(), "8 bit/s".to_owned())
        );
        assert_eq!(priced(book.egress("r2/internet", "r2", "auto").unwrap()), "$0/GB");
        assert_eq!(
            (dollars(2_500_000), dollars(1), dollars(12_000_000)),
            ("$2.50".to_owned(), "$0.000001".to_owned(), "$12".to_owned())
        );
    }
}
