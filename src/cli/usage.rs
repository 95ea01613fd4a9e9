//! `towline usage`.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::{Args, ValueEnum, ValueHint};

use super::output::{printable, table};
use super::sites::dollars;
use super::verbs::Context;
use crate::agent::advisor::{SitesPaths, SitesRead, read_usage};
use crate::agent::view::MonthUsage;
use crate::error::{Error, Result};
use crate::format::Month;
use crate::placement::{UsageBy, UsageRow};
use crate::size;
use crate::transfer::usage::UsageReports;

/// Sites file that is used if it exists.
const SITES: &str = "sites.toml";

/// `towline usage`.
#[derive(Debug, Args)]
pub(super) struct UsageArgs {
    /// Grouping
    #[arg(long, value_enum, default_value_t = Grouping::Link)]
    by: Grouping,
    /// Month in UTC, such as 2026-11; default: this one
    #[arg(long, value_name = "MONTH")]
    month: Option<Month>,
    /// Format; json is that of --json
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
    /// The sites file (docs/placement.md), for dollars; default: sites.toml, if there is one
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    sites: Option<PathBuf>,
    /// Price book whose entries replace those that ship with the program
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    prices: Option<PathBuf>,
}

/// Grouping of usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Grouping {
    /// From where to where
    Link,
    /// Where the bytes came to
    Site,
    /// Run, or name of another tree
    Run,
    /// Tenant of the name
    Tenant,
}

/// Format of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    Table,
    Csv,
    Json,
}

impl Grouping {
    const fn of(self) -> UsageBy {
        match self {
            Self::Link => UsageBy::Link,
            Self::Site => UsageBy::Site,
            Self::Run => UsageBy::Run,
            Self::Tenant => UsageBy::Tenant,
        }
    }
}

impl UsageArgs {
    /// The sites file that is named, or the usual one, if it exists.
    fn sites_if_there(&self) -> Result<Option<SitesRead>> {
        let sites = match &self.sites {
            Some(named) => named.clone(),
            None if PathBuf::from(SITES).exists() => PathBuf::from(SITES),
            None if self.prices.is_some() => {
                return Err(Error::usage("prices need a sites file").help("--sites FILE"));
            }
            None => return Ok(None),
        };
        SitesPaths { sites, prices: self.prices.clone() }.read().map(Some)
    }
}

impl Context {
    /// Shows what agents have moved in a month, and what it cost.
    pub(super) async fn usage(&self, args: &UsageArgs) -> Result<()> {
        let repository = self.open().await?;
        let month = args.month.unwrap_or_else(|| Month::of(repository.clock().now()).0);
        let sites = args.sites_if_there()?;
        let authority = self.authority_of_agents(&repository).await?;
        let trusted = authority()?.ok_or_else(|| {
            Error::denied("this machine has no authority to verify usage with")
                .help("issue a certificate to this machine: towline identity issue SITE/AGENT --to ~/.config/towline/identity")
        })?;
        let asked = (month, args.by.of());
        let view = read_usage(&UsageReports::default(), (&repository, &trusted), asked, sites.as_ref()).await?;
        for note in &view.notes {
            self.output.remark(&printable(note));
        }
        match args.format {
            Format::Csv if !self.output.is_json() => self.output.print(csv(&view).as_bytes()),
            Format::Json => self.output.as_json().answer(&view, |_, _| String::new()),
            _ => self.output.answer(&view, |view, _| usage_table(view)),
        }
    }
}

/// Columns of the names of a row.
fn names(view: &MonthUsage) -> Vec<&str> {
    if view.by == UsageBy::Link.word() { vec!["from", "to"] } else { vec![&view.by] }
}

/// Names of a row, by column; empty: everything else.
fn named(row: &UsageRow) -> Vec<&str> {
    match (&row.from, &row.to) {
        (Some(from), Some(to)) => vec![from, to],
        _ => vec![row.name.as_deref().unwrap_or_default()],
    }
}

fn usage_table(view: &MonthUsage) -> String {
    let columns = names(view);
    let row = |row: &UsageRow| {
        let mut cells: Vec<String> =
            named(row).into_iter().map(|name| printable(if name.is_empty() { "-" } else { name })).collect();
        cells.resize(columns.len(), String::new());
        cells.extend([size::show(row.bytes), row.requests.to_string()]);
        cells.push(row.usd_micro.map_or_else(|| "-".to_owned(), dollars));
        cells.push(format!("{:.1}", row.gpu_seconds as f64 / 3600.0));
        cells
    };
    let rows: Vec<_> = view.rows.iter().chain([&view.total]).map(row).collect();
    let heads: Vec<String> = columns.iter().map(|name| name.to_uppercase()).collect();
    let heads: Vec<&str> =
        heads.iter().map(String::as_str).chain([">BYTES", ">REQUESTS", ">DOLLARS", ">GPU HOURS"]).collect();
    table(&heads, &rows)
}

/// The rows as of RFC 4180, with exact numbers and without the total.
fn csv(view: &MonthUsage) -> String {
    let columns = names(view).join(",");
    let mut text = format!("month,{columns},bytes,requests,usd,gpu_seconds\n");
    for row in &view.rows {
        let names: Vec<String> = named(row).into_iter().map(quoted).collect();
        let usd = row.usd_micro.map(|micro| dollars(micro).trim_start_matches('$').to_owned()).unwrap_or_default();
        let names = names.join(",");
        // Writing to a string does not fail.
        let _ = writeln!(text, "{},{names},{},{},{usd},{}", view.month, row.bytes, row.requests, row.gpu_seconds);
    }
    text
}

/// A cell, quoted if it must be. One that a spreadsheet would take for a formula is quoted with an apostrophe before it.
fn quoted(cell: &str) -> String {
    let cell = if cell.starts_with(['=', '+', '-', '@']) { format!("'{cell}") } else { cell.to_owned() };
    if cell.contains([',', '"', '\n', '\r']) { format!("\"{}\"", cell.replace('"', "\"\"")) } else { cell }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_cannot_break_out() {
        for (cell, expected) in
            [("run", "run"), ("a,b", "\"a,b\""), ("say \"x\"", "\"say \"\"x\"\"\""), ("=1+1", "'=1+1")]
        {
            assert_eq!(quoted(cell), expected);
        }
    }
}
