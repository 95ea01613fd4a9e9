//! The tenants that chunks of a cache count for: their names by number, in the file `tenants`, a line each.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::Cache;
use super::allocator::UNIT;
use super::identity::replace;
use super::medium::Medium;
use super::quotas::{Quotas, TenantNumber, TenantQuotas};
use crate::error::{Error, Result};

/// Bytes in the file, at most.
const FILE_LEN_MAX: u64 = 8 << 20;

/// Bytes that the chunks of a tenant take in a cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
pub struct TenantUse {
    /// The tenant.
    pub tenant: String,
    /// Bytes of chunks that count for it, including those being written.
    pub bytes: u64,
    /// Bytes that it may take, if it is bounded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota: Option<u64>,
}

impl Cache {
    /// True if somebody has a quota: then chunks are to be inserted for their tenants.
    #[must_use]
    pub fn has_quotas(&self) -> bool {
        !self.tenant_quotas.is_empty()
    }

    /// Bytes that each tenant takes, by name; none without quotas.
    #[must_use]
    pub fn tenants(&self) -> Vec<TenantUse> {
        let state = self.state();
        let uses = state.quotas.all().map(|(tenant, weight, _)| TenantUse {
            tenant: tenant.to_owned(),
            bytes: weight * UNIT,
            quota: self.tenant_quotas.of(tenant),
        });
        let mut uses: Vec<TenantUse> = uses.collect();
        uses.sort_by(|one, other| one.tenant.cmp(&other.tenant));
        uses
    }

    /// The number of `tenant`, which it gets now if it has none.
    ///
    /// # Errors
    /// Errors of the file system; exhausted, if there are too many tenants.
    pub(super) fn tenant_number(&self, tenant: &str) -> Result<TenantNumber> {
        if let Some(number) = self.state().quotas.number(tenant) {
            return Ok(number);
        }
        let _work = self.tenant_work.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut names: Vec<String> = {
            let state = self.state();
            if let Some(number) = state.quotas.number(tenant) {
                return Ok(number);
            }
            state.quotas.all().map(|(name, ..)| name.to_owned()).collect()
        };
        names.push(tenant.to_owned());
        // Known by its number on the disk before a chunk counts for it.
        let (path, text) = (path(&self.dir), names.join("\n") + "\n");
        replace(&*self.medium, &self.dir, &path, text.as_bytes())
            .map_err(|error| Error::io("cannot write the cache's tenants", &path, error))?;
        let quota = self.tenant_quotas.of(tenant).map(|bytes| bytes / UNIT);
        let added = self.state().quotas.add(tenant.to_owned(), quota);
        added.ok_or_else(|| Error::exhausted("cache has too many tenants").at(self.dir.display()))
    }
}

/// The tenants of the cache in `dir`, none of whom has chunks yet.
///
/// # Errors
/// The file system's.
pub(super) fn load(medium: &dyn Medium, dir: &Path, quotas: &TenantQuotas) -> Result<Quotas> {
    let (mut found, path) = (Quotas::default(), path(dir));
    let io = |error| Error::io("cannot read the cache's tenants", &path, error);
    let Some((_, len)) = medium.names(dir).map_err(io)?.into_iter().find(|(name, _)| name == "tenants") else {
        return Ok(found);
    };
    let mut bytes = vec![0; usize::try_from(len.min(FILE_LEN_MAX)).unwrap_or(0)];
    medium.open(&path, false).and_then(|file| file.read_at(&mut bytes, 0)).map_err(io)?;
    let mut seen = BTreeSet::new();
    for name in String::from_utf8_lossy(&bytes).lines() {
        // The number of a name that is damaged, or comes twice, stays taken.
        let name = if seen.insert(name.to_owned()) { name.to_owned() } else { String::new() };
        let quota = quotas.of(&name).map(|bytes| bytes / UNIT);
        let _ = found.add(name, quota);
    }
    Ok(found)
}

fn path(dir: &Path) -> PathBuf {
    dir.join("tenants")
}
