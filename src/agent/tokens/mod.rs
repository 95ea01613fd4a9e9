//! Tokens for processes with limited rights at the API: created, stored as hashes, revoked.

mod file;
mod grant;
mod paths;
#[cfg(test)]
pub(super) mod tests;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use ulid::Ulid;

use self::file::Record;
pub(super) use self::grant::{Grant, not_valid};
pub(super) use self::paths::check_named;
use super::socket::random_secret;
use super::view;
use crate::clock::{Clock, Timestamp};
use crate::error::{Error, Result};
use crate::fair_turns::{FairTurn, FairTurns, Taken};
use crate::limits::AGENT_NAME_LEN_MAX;
use crate::name::is_segment;
use crate::policy::Scopes;

/// Beginning of each token, by which people and scanners recognise one.
const PREFIX: &str = "towline_";
/// Tokens that hold at the same time, at most.
const TOKENS_MAX: usize = 1024;
/// Requests of all tokens in progress at a time: three quarters of the connections that the API serves on loopback, so that tokens
/// alone never take all.
const REQUESTS_MAX: usize = 192;
/// Requests in progress of the tokens of one tenant, or of one token without a tenant.
const TENANT_REQUESTS_MAX: usize = 64;
/// Bytes of a label, at most.
const NAME_LEN_MAX: usize = 128;

/// Arguments of [`Tokens::make`].
#[derive(Debug)]
pub(super) struct TokenSpec {
    pub(super) scopes: Scopes,
    /// Label for people.
    pub(super) name: Option<String>,
    pub(super) tenant: Option<String>,
    /// Time for which it holds; until it is revoked, if it is not given.
    pub(super) lasting: Option<Duration>,
}

/// Permit of a request with a token, released on drop.
#[derive(Debug)]
pub(super) struct RequestSlot {
    _turn: FairTurn,
}

/// The tokens of an agent, in memory and in its file.
#[derive(Debug)]
pub(super) struct Tokens {
    file: PathBuf,
    clock: Arc<dyn Clock>,
    grants: RwLock<Vec<Arc<Grant>>>,
    /// Requests in progress, by the owners that are limited together.
    requests: FairTurns<String>,
    /// Held while the file is written.
    writing: Mutex<()>,
    _lock: File,
}

impl Tokens {
    /// Opens the tokens in `file`, which is created with the first token. Blocking.
    ///
    /// # Errors
    /// Conflict, if another agent has the file; denied, if others own or may write it; damaged or unsupported, if it cannot be read; the
    /// file system's.
    pub(super) fn open(file: &Path, clock: Arc<dyn Clock>) -> Result<Self> {
        let lock = file::claim(file)?;
        let grants = file::read(file)?.into_iter().map(|record| Grant::of(record).map(Arc::new));
        let grants = grants.collect::<Result<_>>().map_err(|error| error.at(file.display()))?;
        Ok(Self {
            file: file.to_owned(),
            clock,
            grants: RwLock::new(grants),
            requests: FairTurns::new(REQUESTS_MAX, TENANT_REQUESTS_MAX),
            writing: Mutex::new(()),
            _lock: lock,
        })
    }

    /// Admits one request with the token of `grant`.
    ///
    /// # Errors
    /// Exhausted, if too many requests of this token, of the tokens of its tenant, or of all are in progress.
    pub(super) fn begin_request(&self, grant: &Grant) -> Result<RequestSlot> {
        let turn = self.requests.try_take(grant.limited_owners()).map_err(|taken| {
            let (what, max) = match (taken, grant.tenant()) {
                (Taken::All, _) => ("tokens", REQUESTS_MAX),
                (Taken::Share, Some(_)) => ("tokens of this tenant", TENANT_REQUESTS_MAX),
                (Taken::Share, None) => ("this token", TENANT_REQUESTS_MAX),
            };
            Error::exhausted(format!("too many requests with {what} are in progress"))
                .expected(format!("at most {max}"))
                .help("wait until other responses have been read completely")
        })?;
        Ok(RequestSlot { _turn: turn })
    }

    /// Token with the secret `shown`; None, if there is none, or it has ended: the caller cannot distinguish these.
    pub(super) fn find(&self, shown: &str) -> Option<Arc<Grant>> {
        if !shown.starts_with(PREFIX) {
            return None;
        }
        let (hash, now) = (blake3::hash(shown.as_bytes()), self.clock.now());
        let found = self.all().into_iter().find(|grant| grant.is_of(&hash))?;
        if found.is_over(now) {
            return None;
        }
        found.use_at(now);
        Some(found)
    }

    /// True if `grant` holds no more.
    pub(super) fn is_over(&self, grant: &Grant) -> bool {
        grant.is_over(self.clock.now())
    }

    /// Returns once `grant` holds no more, at most a second later.
    ///
    /// # Cancel safety
    /// Safe.
    pub(super) fn ended(&self, grant: Arc<Grant>) -> impl Future<Output = ()> + Send + 'static {
        grant.ended(Arc::clone(&self.clock))
    }

    /// All that are kept, the oldest first; some may have expired.
    pub(super) fn list(&self) -> Vec<view::Token> {
        self.all().iter().map(|grant| grant.view()).collect()
    }

    /// Creates a token at the request of a holder of `by`, if a token requests it; only the returned value has its secret. Blocking.
    ///
    /// # Errors
    /// Usage, for a malformed label, tenant or time; denied, if `by` has ended; exhausted, if there are too many, or the disk is full; the
    /// file system's. Nothing has changed then.
    pub(super) fn make(&self, by: Option<&Grant>, spec: TokenSpec) -> Result<view::MadeToken> {
        check_spec(&spec)?;
        let TokenSpec { scopes, name, tenant, lasting } = spec;
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.clock.now();
        if by.is_some_and(|by| by.is_over(now)) {
            return Err(not_valid());
        }
        let mut grants: Vec<_> = self.all().into_iter().filter(|grant| !grant.is_over(now)).collect();
        if grants.len() >= TOKENS_MAX {
            return Err(Error::exhausted("agent has too many tokens")
                .expected(format!("at most {TOKENS_MAX}"))
                .help("revoke those that are not used: towline token list, towline token revoke"));
        }
        let secret = format!("{PREFIX}{}", random_secret());
        let made = Arc::new(Grant::of(Record {
            id: Ulid::generate().to_string(),
            hash: blake3::hash(secret.as_bytes()).to_hex().to_string(),
            name,
            tenant,
            scopes: scopes.texts(),
            created: now.0,
            expires: lasting.map(|span| after(now, span).0),
        })?);
        grants.push(Arc::clone(&made));
        self.write(&grants).map_err(|error| error.help("no token was made; those that there were hold as before"))?;
        *self.grants.write().unwrap_or_else(PoisonError::into_inner) = grants;
        Ok(view::MadeToken { token: made.view(), secret })
    }

    /// Ends the token `id`, at once; returns the text that identified its tasks and pins. Blocking.
    ///
    /// # Errors
    /// Not found, if there is none; exhausted or the file system's, if the file cannot be written: then it would hold again after a
    /// restart.
    pub(super) fn revoke(&self, id: &str) -> Result<String> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut grants = self.all();
        let unknown = || Error::not_found("there is no such token").at(id).help("`towline token list` lists them");
        let parsed: Ulid = id.parse().map_err(|_| unknown())?;
        let revoked = Arc::clone(grants.iter().find(|grant| grant.id() == parsed).ok_or_else(unknown)?);
        revoked.revoke();
        grants.retain(|grant| !grant.is_revoked());
        self.write(&grants).map_err(|source| {
            Error::new(source.kind(), "token is revoked until the agent ends: the file of tokens cannot be written")
                .at(self.file.display())
                .help("put that right, then revoke it once more, or it holds again after a restart")
                .source(source)
        })?;
        *self.grants.write().unwrap_or_else(PoisonError::into_inner) = grants;
        Ok(revoked.path())
    }

    fn all(&self) -> Vec<Arc<Grant>> {
        self.grants.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn write(&self, grants: &[Arc<Grant>]) -> Result<()> {
        file::write(&self.file, grants.iter().map(|grant| grant.record()).collect())
    }
}

fn after(now: Timestamp, span: Duration) -> Timestamp {
    Timestamp(now.0.saturating_add(i64::try_from(span.as_nanos()).unwrap_or(i64::MAX)))
}

fn check_spec(spec: &TokenSpec) -> Result<()> {
    if spec.lasting.is_some_and(|span| span.is_zero()) {
        return Err(Error::usage("token would have expired at once").help("leave the time out, or give a longer one"));
    }
    let is_label = |name: &&String| name.len() <= NAME_LEN_MAX && !name.chars().any(char::is_control);
    if let Some(name) = &spec.name
        && !is_label(&name)
    {
        return Err(Error::usage("name of the token is malformed")
            .expected(format!("at most {NAME_LEN_MAX} bytes, without control characters")));
    }
    if let Some(tenant) = &spec.tenant
        && !(is_segment(tenant) && tenant.len() <= AGENT_NAME_LEN_MAX)
    {
        return Err(Error::usage("name of the tenant is malformed")
            .expected(format!("at most {AGENT_NAME_LEN_MAX} of [A-Za-z0-9._+=-]"))
            .help("for example: --tenant team-a"));
    }
    Ok(())
}
