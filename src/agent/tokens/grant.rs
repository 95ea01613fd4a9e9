//! A token: its rights, its expiry, and a hash of its secret.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use ulid::Ulid;

use super::file::Record;
use crate::agent::view;
use crate::clock::{Clock, Timestamp};
use crate::error::{Error, Result};
use crate::policy::Scopes;

/// Interval of checks of the expiry while a response to a token is sent: clocks are set, and machines sleep.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Time of a last use of a token that was not used yet.
const NEVER: i64 = i64::MIN;

/// A token that was made and not revoked.
#[derive(Debug)]
pub(in crate::agent) struct Grant {
    id: Ulid,
    hash: blake3::Hash,
    name: Option<String>,
    tenant: Option<String>,
    scopes: Scopes,
    created: Timestamp,
    expires: Option<Timestamp>,
    used: AtomicI64,
    revoked: CancellationToken,
    /// Read while something is made with it, written to revoke it.
    making: RwLock<()>,
}

impl Grant {
    /// The token that `record` describes, unused.
    ///
    /// # Errors
    /// Damaged, if a part of it is malformed.
    pub(super) fn of(record: Record) -> Result<Self> {
        let malformed = |what: &'static str| Error::damaged(what).got(format!("{:.64?}", record.id));
        Ok(Self {
            id: record.id.parse().map_err(|_| malformed("id of a token is malformed"))?,
            hash: blake3::Hash::from_hex(&record.hash).map_err(|_| malformed("hash of a token is malformed"))?,
            scopes: Scopes::of(&record.scopes)
                .map_err(|source| malformed("scopes of a token are malformed").source(source))?,
            name: record.name,
            tenant: record.tenant,
            created: Timestamp(record.created),
            expires: record.expires.map(Timestamp),
            used: AtomicI64::new(NEVER),
            revoked: CancellationToken::new(),
            making: RwLock::new(()),
        })
    }

    /// The record from which [`Grant::of`] makes it again.
    pub(super) fn record(&self) -> Record {
        Record {
            id: self.id.to_string(),
            hash: self.hash.to_hex().to_string(),
            name: self.name.clone(),
            tenant: self.tenant.clone(),
            scopes: self.scopes.texts(),
            created: self.created.0,
            expires: self.expires.map(|at| at.0),
        }
    }

    /// Id, which is no secret.
    pub(in crate::agent) fn id(&self) -> Ulid {
        self.id
    }

    /// Label for people.
    pub(in crate::agent) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Tenant whose quota its pins count against, if it has one.
    pub(in crate::agent) fn tenant(&self) -> Option<&str> {
        self.tenant.as_deref()
    }

    /// Rights.
    pub(in crate::agent) fn scopes(&self) -> &Scopes {
        &self.scopes
    }

    /// Text that identifies its tasks and pins: `token:TENANT/ID`.
    pub(in crate::agent) fn path(&self) -> String {
        format!("token:{}", self.label())
    }

    /// Prefix of the owners that are limited together: `token:TENANT/`, or its own if it has no tenant.
    pub(in crate::agent) fn limited_owners(&self) -> String {
        match &self.tenant {
            Some(tenant) => format!("token:{tenant}/"),
            None => format!("{}/", self.path()),
        }
    }

    /// `TENANT/ID`, by which the audit log names it.
    pub(in crate::agent) fn label(&self) -> String {
        format!("{}/{}", self.tenant.as_deref().unwrap_or_default(), self.id)
    }

    /// True if `hash` is that of its secret. The comparison takes the same time whatever they are.
    pub(super) fn is_of(&self, hash: &blake3::Hash) -> bool {
        self.hash == *hash
    }

    /// True if it has expired or was revoked at `now`.
    pub(super) fn is_over(&self, now: Timestamp) -> bool {
        self.revoked.is_cancelled() || self.expires.is_some_and(|at| at <= now)
    }

    /// Makes something, unless it was revoked; a revocation waits meanwhile. So what was made is there once it is revoked, and nothing is
    /// made later. Calls must not be nested. Blocking, as `make` is.
    ///
    /// # Errors
    /// Denied, if it was revoked; those of `make`.
    pub(in crate::agent) fn holding<T>(&self, make: impl FnOnce() -> Result<T>) -> Result<T> {
        let _making = self.making.read().unwrap_or_else(PoisonError::into_inner);
        if self.is_revoked() {
            return Err(not_valid());
        }
        make()
    }

    /// Ends it now, even if its file cannot be written.
    pub(super) fn revoke(&self) {
        let _making = self.making.write().unwrap_or_else(PoisonError::into_inner);
        self.revoked.cancel();
    }

    /// Cancelled when it is revoked.
    pub(in crate::agent) fn revocation(&self) -> &CancellationToken {
        &self.revoked
    }

    /// True once it was revoked.
    pub(super) fn is_revoked(&self) -> bool {
        self.revoked.is_cancelled()
    }

    /// Records its use.
    pub(super) fn use_at(&self, now: Timestamp) {
        self.used.store(now.0, Ordering::Relaxed);
    }

    /// Returns once it is revoked or has expired, at most a second later.
    ///
    /// # Cancel safety
    /// Safe.
    pub(in crate::agent) async fn ended(self: Arc<Self>, clock: Arc<dyn Clock>) {
        while !self.is_over(clock.now()) {
            let left = self.expires.map_or(POLL_INTERVAL, |at| at.since(clock.now()).min(POLL_INTERVAL));
            tokio::select! {
                () = self.revoked.cancelled() => {}
                () = tokio::time::sleep(left) => {}
            }
        }
    }

    /// View without the secret, which the agent does not know.
    pub(super) fn view(&self) -> view::Token {
        let used = self.used.load(Ordering::Relaxed);
        view::Token {
            id: self.id.to_string(),
            name: self.name.clone(),
            tenant: self.tenant.clone(),
            scopes: self.scopes.texts(),
            created: self.created.to_string(),
            expires: self.expires.map(|at| at.to_string()),
            used: (used != NEVER).then(|| Timestamp(used).to_string()),
        }
    }
}

/// Error for a request whose token does not hold, whatever the reason.
pub(in crate::agent) fn not_valid() -> Error {
    Error::denied("request has no valid token").expected("Authorization: Bearer TOKEN")
}
