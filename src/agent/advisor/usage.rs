//! Usage of a month: what agents have moved, and what it cost.

use super::sites_files::SitesRead;
use super::{Advisor, Shared};
use crate::agent::view::MonthUsage;
use crate::error::{Error, Result};
use crate::format::Month;
use crate::placement::{PricedSites, Usage, UsageBy, UsageRow};
use crate::repository::Repository;
use crate::transfer::identity::Trusted;
use crate::transfer::usage::UsageReports;
use crate::work::blocking;

/// Usage of `month`, as agents have reported it, by `by`; with dollars, if there are `sites`.
///
/// # Errors
/// Denied or unreachable, as the store says. A report that cannot be used is a note.
///
/// # Cancel safety
/// Safe: it only reads.
pub async fn read_usage(
    reports: &UsageReports,
    (repository, trusted): (&Repository, &Trusted),
    (month, by): (Month, UsageBy),
    sites: Option<&SitesRead>,
) -> Result<MonthUsage> {
    let read = reports.read(repository, trusted, month).await?;
    let unusable = read.unusable.iter();
    let mut notes: Vec<String> =
        unusable.map(|(agent, error)| format!("usage of {} cannot be used: {error}", agent.path())).collect();
    if read.more {
        notes.push("there are more reports than are read".to_owned());
    }
    let (state, own) = (repository.state().await?, repository.clone());
    let usage = blocking(move || {
        let view = own.label_view(&state);
        let usage = Usage::of(read.reports.iter().map(|(agent, counted)| (agent, &counted.report)));
        // No report can change what the log says about a name.
        Ok(usage.with_tenants(|name| {
            let tenants = view.of(&name.parse().ok()?).tenants_text();
            (!tenants.is_empty()).then_some(tenants)
        }))
    });
    let usage = usage.await?;
    let place = [repository.store().location().to_string(), repository.id().to_string()];
    let priced =
        sites.map(|read| PricedSites { sites: &read.sites, book: &read.book, repository: read.sites.site_of(&place) });
    match priced {
        Some(PricedSites { repository: None, .. }) => {
            notes.push("no site of the sites file has the repository: its traffic has no price".to_owned());
        }
        None => notes.push("there is no sites file, so nothing has a price: --sites FILE".to_owned()),
        Some(_) => {}
    }
    let rows = usage.rows(by, priced);
    let total = total(&rows);
    let prices = sites.map(|read| read.book.dated().to_owned());
    Ok(MonthUsage { month: month.to_string(), by: by.word().to_owned(), prices, rows, total, notes })
}

impl Advisor {
    /// Usage of `month`, this one if none is given, by `by`.
    ///
    /// # Errors
    /// Denied, without an authority to verify reports with; else as [`read_usage`].
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn usage(&self, month: Option<Month>, by: UsageBy) -> Result<MonthUsage> {
        let Shared { repository, authority, usage_reports, .. } = &*self.0;
        let trusted = authority()?.ok_or_else(|| {
            Error::denied("this agent has no authority to verify usage with")
                .help("set `identity` in its settings: towline identity issue SITE/AGENT --to DIR")
        })?;
        let month = month.unwrap_or_else(|| Month::of(repository.clock().now()).0);
        read_usage(usage_reports, (repository, &trusted), (month, by), Some(&self.sites())).await
    }
}

fn total(rows: &[UsageRow]) -> UsageRow {
    let sum = |of: fn(&UsageRow) -> u64| rows.iter().map(of).fold(0, u64::saturating_add);
    let usd = rows.iter().try_fold(0_u64, |sum, row| Some(sum.saturating_add(row.usd_micro?)));
    UsageRow {
        name: Some("total".to_owned()),
        from: None,
        to: None,
        bytes: sum(|row| row.bytes),
        requests: sum(|row| row.requests),
        usd_micro: usd,
        gpu_seconds: sum(|row| row.gpu_seconds),
    }
}
