//! Usage: objects in which agents tell what they have moved in a month. Their contents belong to `format`, their signatures to
//! `transfer`.
//!
//! They are not part of the saved state: no commit names them, and a collect ignores them.

use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _};
use object_store::path::Path;

use super::listing::listing;
use super::{Repository, layout, objects};
use crate::clock::Timestamp;
use crate::error::Result;
use crate::format::Month;
use crate::format::envelope::{Kind, seal};
use crate::identity::Identity;

/// Maximum number of reports of a month that are read.
const REPORTS_MAX: usize = 64 << 10;

/// A report in the store.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StoredUsage {
    /// The agent that its key names.
    pub agent: Identity,
    /// Start of the process, as its key says.
    pub started: Timestamp,
    /// Its key.
    pub key: Path,
    /// Length, entity tag and time by which the store tells its versions apart.
    pub version: String,
}

impl Repository {
    /// Writes the usage of `month` by the process of `identity` that began at `started`, in place of the one before.
    ///
    /// # Errors
    /// Denied or unreachable, as the store says.
    ///
    /// # Cancel safety
    /// Safe: it is one write.
    pub async fn put_usage(&self, month: Month, identity: &Identity, started: Timestamp, body: &[u8]) -> Result<()> {
        let key = layout::usage(month, identity, u64::try_from(started.0).unwrap_or(0));
        self.put_object(&key, seal(Kind::Usage, body, true)).await
    }

    /// Reports of `month`, by agent; and whether there are more than are read.
    ///
    /// # Errors
    /// Denied or unreachable, as the store says.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn stored_usage(&self, month: Month) -> Result<(Vec<StoredUsage>, bool)> {
        let reports = listing(&**self.store().objects(), &layout::usage_of(month), |meta| {
            let (agent, started) = layout::usage_of_key(&meta.location)?;
            let version = format!("{} {:?} {}", meta.size, meta.e_tag, meta.last_modified);
            Some(StoredUsage { agent, started, key: meta.location, version })
        });
        let mut reports: Vec<StoredUsage> = reports.take(REPORTS_MAX + 1).try_collect().await?;
        let more = reports.len() > REPORTS_MAX;
        reports.truncate(REPORTS_MAX);
        reports.sort();
        Ok((reports, more))
    }

    /// Body of a report; none if it is gone. It counts in the memory budget only while it is read.
    ///
    /// # Errors
    /// Damaged; exhausted; denied or unreachable, as the store says.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn usage(&self, report: &StoredUsage) -> Result<Option<Bytes>> {
        objects::body(&**self.store().objects(), self.budget(), Kind::Usage, &report.key).await
    }
}
