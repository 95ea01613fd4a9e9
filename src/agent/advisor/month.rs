//! Volumes of the month so far, which decide the tiers of prices: read from the usage that agents report, at most once a minute.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::sites_files::SitesRead;
use crate::clock::Timestamp;
use crate::error::{ErrorKind, Result};
use crate::format::Month;
use crate::placement::Usage;
use crate::repository::Repository;
use crate::transfer::identity::Trusted;
use crate::transfer::usage::{UsageRead, UsageReports};
use crate::work::blocking;

/// Age from which volumes are read again.
const VOLUMES_AGE: Duration = Duration::from_mins(1);

/// Volumes of the month so far.
#[derive(Debug, Default)]
pub(super) struct MonthSoFar {
    /// Bytes, by meter.
    pub(super) volumes: Arc<BTreeMap<String, u64>>,
    /// Reasons why they may be too small.
    pub(super) gaps: Vec<String>,
}

/// Volumes, as they were read last.
#[derive(Debug, Default)]
pub(super) struct MonthVolumes {
    reports: UsageReports,
    last: Mutex<Option<LastRead>>,
}

#[derive(Clone, Debug)]
struct LastRead {
    at: Instant,
    month: Month,
    /// Hash of the sites file.
    sites: blake3::Hash,
    found: Arc<MonthSoFar>,
}

impl MonthVolumes {
    /// Volumes of the month of `at` on the meters of `sites`. Nothing is read if no price of theirs depends on it.
    ///
    /// # Errors
    /// Unreachable, as the store says.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub(super) async fn at(
        &self,
        repository: &Repository,
        trusted: Option<&Trusted>,
        (sites, at): (&Arc<SitesRead>, Timestamp),
    ) -> Result<Arc<MonthSoFar>> {
        let (Some(trusted), true) = (trusted, sites.sites.has_tiers()) else { return Ok(Arc::default()) };
        let (month, _) = Month::of(at);
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let is_recent =
            |last: &LastRead| last.at.elapsed() < VOLUMES_AGE && (last.month, last.sites) == (month, sites.hash);
        if let Some(last) = last.filter(is_recent) {
            return Ok(last.found);
        }
        let found = match self.reports.read(repository, trusted, month).await {
            Ok(read) => volumes(read, repository, Arc::clone(sites)).await?,
            Err(error) if error.kind() == ErrorKind::Denied => {
                let gap = format!("usage of the month cannot be read, so tiers of prices count from zero: {error}");
                MonthSoFar { gaps: vec![gap], ..MonthSoFar::default() }
            }
            Err(error) => return Err(error),
        };
        let found = Arc::new(found);
        let last = LastRead { at: Instant::now(), month, sites: sites.hash, found: Arc::clone(&found) };
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(last);
        Ok(found)
    }
}

async fn volumes(read: UsageRead, repository: &Repository, sites: Arc<SitesRead>) -> Result<MonthSoFar> {
    let mut gaps = Vec::new();
    if let Some((agent, error)) = read.unusable.first() {
        let count = read.unusable.len();
        gaps.push(format!("{count} reports of usage cannot be used, the first of {}: {error}", agent.path()));
    }
    if read.more {
        gaps.push("there are more reports of usage than are read".to_owned());
    }
    let place = [repository.store().location().to_string(), repository.id().to_string()];
    let volumes = blocking(move || {
        let usage = Usage::of(read.reports.iter().map(|(agent, counted)| (agent, &counted.report)));
        Ok(usage.by_meter(&sites.sites, sites.sites.site_of(&place)))
    });
    Ok(MonthSoFar { volumes: Arc::new(volumes.await?), gaps })
}
