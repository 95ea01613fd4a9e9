//! Usage of a month, as agents have reported it: read from the repository, verified, and kept for as long as it does not change.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use futures::{StreamExt as _, stream};
use object_store::path::Path;

use super::identity::{Context, Signature, Trusted};
use crate::budget::Retained;
use crate::clock::Timestamp;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{Month, SignedBytes, UsageKey, UsageReport, UsageTotals};
use crate::id::RepositoryId;
use crate::identity::Identity;
use crate::repository::{Repository, StoredUsage};
use crate::work::blocking;

/// Reports read at once.
const READS: usize = 8;
/// Bytes of memory of a line, with short names.
const LINE_WEIGHT: u64 = (size_of::<(UsageKey, UsageTotals)>() + 64) as u64;

/// Reports of one repository.
#[derive(Debug, Default)]
pub struct UsageReports(Mutex<BTreeMap<Path, Known>>);

/// A report at its last version.
#[derive(Clone, Debug)]
struct Known {
    agent: Identity,
    version: String,
    report: Result<Arc<CountedUsage>, Arc<Error>>,
}

/// A report whose memory is counted.
#[derive(Debug)]
pub struct CountedUsage {
    /// The report.
    pub report: UsageReport,
    _kept: Retained,
}

/// Reports of a month.
#[derive(Debug, Default)]
pub struct UsageRead {
    /// Usable ones, by agent.
    pub reports: Vec<(Identity, Arc<CountedUsage>)>,
    /// The others.
    pub unusable: Vec<(Identity, Error)>,
    /// True if there are more than are read.
    pub more: bool,
}

impl UsageReports {
    /// Reads the reports of `month`, if they have changed since the last call. Only those whose signatures `trusted` confirms are
    /// used.
    ///
    /// # Errors
    /// Denied or unreachable, as the store says. A report that cannot be read or verified is no error: it is in the result.
    ///
    /// # Cancel safety
    /// Safe: what was read is kept.
    pub async fn read(&self, repository: &Repository, trusted: &Trusted, month: Month) -> Result<UsageRead> {
        let (stored, more) = repository.stored_usage(month).await?;
        let keys: BTreeSet<Path> = stored.iter().map(|stored| stored.key.clone()).collect();
        self.lock().retain(|key, _| keys.contains(key));
        let read = stream::iter(stored).map(|stored| async move {
            let known = self.lock().get(&stored.key).filter(|known| known.version == stored.version).cloned();
            let report = match known {
                Some(known) => known.report,
                None => self.read_one(repository, trusted, &stored, month).await,
            };
            (stored.agent, report)
        });
        let mut found = UsageRead { more, ..UsageRead::default() };
        let mut read = std::pin::pin!(read.buffered(READS));
        while let Some((agent, report)) = read.next().await {
            match report {
                Ok(report) => found.reports.push((agent, report)),
                Err(error) => found.unusable.push((agent, Error::shared(&error))),
            }
        }
        Ok(found)
    }

    async fn read_one(
        &self,
        repository: &Repository,
        trusted: &Trusted,
        stored: &StoredUsage,
        month: Month,
    ) -> Result<Arc<CountedUsage>, Arc<Error>> {
        let report = read(repository, trusted, stored, month).await.and_then(|report| {
            let kept = repository.budget().keep_published(stored.agent.path(), self.others(stored), weight(&report))?;
            Ok(CountedUsage { report, _kept: kept })
        });
        let report = report.map(Arc::new).map_err(Arc::new);
        let before = self.lock().get(&stored.key).and_then(|known| known.report.clone().ok());
        let report = match (&report, before) {
            (Ok(now), Some(before)) if now.report.sequence < before.report.sequence => Err(Arc::new(
                Error::conflict("usage is older than what was read before")
                    .at(&stored.key)
                    .expected(format!("a sequence number from {}", before.report.sequence))
                    .got(now.report.sequence),
            )),
            _ => report,
        };
        let gone = |error: &Arc<Error>| matches!(error.kind(), ErrorKind::Unreachable | ErrorKind::Exhausted);
        // Errors that say nothing of the report itself are tried again.
        if !report.as_ref().is_err_and(gone) {
            let known = Known { agent: stored.agent.clone(), version: stored.version.clone(), report: report.clone() };
            self.lock().insert(stored.key.clone(), known);
        }
        report
    }

    /// Bytes of the other reports of the agent of `stored`.
    fn others(&self, stored: &StoredUsage) -> u64 {
        let known = self.lock();
        let others = known.iter().filter(|(key, known)| known.agent == stored.agent && **key != stored.key);
        others.filter_map(|(_, known)| Some(weight(&known.report.as_ref().ok()?.report))).sum()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<Path, Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes of memory of a report.
fn weight(report: &UsageReport) -> u64 {
    report.lines.len() as u64 * LINE_WEIGHT
}

async fn read(repository: &Repository, trusted: &Trusted, stored: &StoredUsage, month: Month) -> Result<UsageReport> {
    let body = repository.usage(stored).await?;
    let body = body.ok_or_else(|| Error::not_found("report was removed meanwhile").at(&stored.key))?;
    let (agent, trusted, id, started) = (stored.agent.clone(), trusted.clone(), repository.id(), stored.started);
    let memory = repository.budget().kept_max() / READS as u64;
    blocking(move || verified(&body, &trusted, &agent, (id, month, started), memory)).await
}

/// The report in `body`, if `agent` signed it for the repository and the month of its key, with a certificate that was valid then.
fn verified(
    body: &[u8],
    trusted: &Trusted,
    agent: &Identity,
    (id, month, started): (RepositoryId, Month, Timestamp),
    memory: u64,
) -> Result<UsageReport> {
    let signed = SignedBytes::decode(body)?;
    let signature = Signature::decode(&signed.signature)?;
    let at = UsageReport::time(&signed.bytes)?;
    let signer = trusted.verify(&signature, Context::Usage, &signed.bytes, at)?;
    if signer.agent()? != agent {
        return Err(Error::denied("usage was signed by another agent").expected(agent).got(signer.agent()?));
    }
    let report = UsageReport::decode(&signed.bytes, memory)?;
    // A copy under another key would count again.
    if (report.repository, report.month, report.started) != (id, month, started) {
        return Err(Error::denied("usage is of another repository, month or process than its key says")
            .expected(format!("{id}, {month}, {started}"))
            .got(format!("{}, {}, {}", report.repository, report.month, report.started)));
    }
    Ok(report)
}
