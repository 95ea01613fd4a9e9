//! Credentials of an agent: certificate, key and authorities, reloaded from a folder when the files change.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustls::RootCertStore;
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier, danger::ClientCertVerifier};
use rustls::sign::CertifiedKey;

use super::certificate::Certificate;
use super::files::{self, AUTHORITY, CERTIFICATE, KEY, REVOKED};
use super::revoked::{List, Revoked};
use super::{pem, tls};
use crate::clock::{Clock, Timestamp};
use crate::error::{Error, ErrorKind, Result};
use crate::identity::Identity;
use crate::transfer::policy_versions::PolicyVersions;
use crate::tree::FileStamp;

/// Maximum number of intermediate certificates. webpki tries their orders before it verifies a signature, so that a stranger's
/// certificates take CPU: eight of one name 70 ms, four nothing that could be measured (2026-11-28).
pub(super) const INTERMEDIATES_MAX: usize = 4;
/// Minimum time between two checks of the files.
pub(super) const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Credentials of this agent. Clones share them.
///
/// The folder has `tls.crt`, `tls.key` and `ca.crt`, as `towline identity issue` and cert-manager write them, and
/// perhaps `revoked`: a serial number or a SHA-256 fingerprint a line, in hexadecimal digits; `#` begins a comment.
/// Good lines hold beside malformed ones, and a file that cannot be read or may be half written removes nobody from the
/// list.
#[derive(Clone, Debug)]
pub struct Credentials(Arc<WatchedCredentials>);

#[derive(Debug)]
struct WatchedCredentials {
    folder: PathBuf,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
    versions: Arc<PolicyVersions>,
}

#[derive(Debug)]
struct State {
    current: Arc<Loaded>,
    /// State of the certificate files when they were last read, successfully or not.
    seen: [FileStamp; 3],
    last_poll: Timestamp,
    revoked: Revoked,
    /// Problem of the certificate files in their current state.
    problem: Option<String>,
    /// Problems of files that others may write.
    exposed: Vec<String>,
}

/// Credentials at one moment.
#[derive(Clone, Debug)]
pub(super) struct Loaded {
    pub(super) own: Arc<CertifiedKey>,
    pub(super) certificate: Certificate,
    identity: Identity,
    /// Certificates of the trusted authorities.
    authorities: Arc<[Certificate]>,
    roots: Arc<RootCertStore>,
    clients: Arc<dyn ClientCertVerifier>,
    revoked: Arc<List>,
    /// Derived from the key.
    reset_secret: Secret,
}

/// Bytes that are never logged.
#[derive(Clone)]
struct Secret([u8; 32]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Credentials {
    /// Opens the credentials in `folder`; `clock` decides when to check the files again, and which certificates have
    /// expired.
    ///
    /// # Errors
    /// Not found, if a file is missing; damaged, if one is malformed; denied, if the certificate has expired, names no
    /// agent, was revoked, or was not signed by an authority in `ca.crt`; errors of the file system.
    pub fn open(folder: &Path, clock: Arc<dyn Clock>) -> Result<Self> {
        let (seen, last_poll) = (stamps(folder), clock.now());
        let revoked = Revoked::open(folder.join(REVOKED), last_poll)?;
        let current = Arc::new(Loaded::read(folder, last_poll, Arc::clone(revoked.list()))?);
        let state =
            Mutex::new(State { current, seen, last_poll, revoked, problem: None, exposed: files::exposed(folder) });
        Ok(Self(Arc::new(WatchedCredentials { folder: folder.to_owned(), clock, state, versions: Arc::default() })))
    }

    /// Identity of this agent.
    #[must_use]
    pub fn identity(&self) -> Identity {
        self.current().identity.clone()
    }

    /// Own certificate.
    #[must_use]
    pub fn certificate(&self) -> Certificate {
        self.current().certificate.clone()
    }

    /// Problems of the files in their current state; the previous version stays in force.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        self.current();
        let state = self.0.state();
        let current = &state.current;
        let listed = current.authorities.iter().filter(|one| current.revoked.holds(one)).map(|one| {
            let subject = &one.subject;
            format!("authority {subject} is in the list of revoked certificates, which has no effect: remove it from {AUTHORITY}")
        });
        state.problem.iter().chain(&state.exposed).chain(state.revoked.problems()).cloned().chain(listed).collect()
    }

    /// Secret of this agent that survives restarts.
    pub(in crate::transfer) fn reset_secret(&self) -> [u8; 32] {
        self.current().reset_secret.0
    }

    /// Versions of policies that whoever has these credentials tells its peers, and hears of them.
    pub(in crate::transfer) fn versions(&self) -> &Arc<PolicyVersions> {
        &self.0.versions
    }

    pub(in crate::transfer) fn clock(&self) -> &Arc<dyn Clock> {
        &self.0.clock
    }

    /// Credentials from the current files. Files that cannot be used (half written, for example) change nothing.
    pub(super) fn current(&self) -> Arc<Loaded> {
        let now = self.0.clock.now();
        let mut state = self.0.state();
        // A clock that went back must not prevent the check.
        if now.since(state.last_poll) >= POLL_INTERVAL || now < state.last_poll {
            state.last_poll = now;
            state.reload(&self.0.folder, now);
        }
        Arc::clone(&state.current)
    }
}

impl WatchedCredentials {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn reload(&mut self, folder: &Path, now: Timestamp) {
        self.exposed = files::exposed(folder);
        // Independent: the list holds even if the certificates cannot be read.
        if self.revoked.reload(now) {
            tracing::info!("list of revoked certificates has changed");
            let revoked = Arc::clone(self.revoked.list());
            self.current = Arc::new(Loaded { revoked, ..Loaded::clone(&self.current) });
        }
        let seen = stamps(folder);
        if seen == self.seen {
            return;
        }
        self.seen = seen;
        match Loaded::read(folder, now, Arc::clone(self.revoked.list())) {
            Ok(loaded) => {
                tracing::info!(identity = %loaded.identity, until = %loaded.certificate.not_after, "reloaded certificates");
                self.current = Arc::new(loaded);
                self.problem = None;
            }
            Err(error) => {
                let problem = format!("cannot use the changed certificates, the previous ones stay in force: {error}");
                tracing::warn!("{problem}: {error:?}");
                self.problem = Some(problem);
            }
        }
    }
}

impl Loaded {
    fn read(folder: &Path, now: Timestamp, revoked: Arc<List>) -> Result<Self> {
        let path = |name: &str| folder.join(name);
        let missing = |error: Error| match error.kind() {
            ErrorKind::NotFound => Error::not_found("agent has no certificate")
                .at(folder.display())
                .expected(format!("{CERTIFICATE}, {KEY} and {AUTHORITY}"))
                .help(format!("towline identity issue SITE/AGENT --to {}", folder.display()))
                .source(error),
            _ => error,
        };
        let read = |name: &str| files::read(&path(name)).map_err(missing);
        let chain = pem::certificates(&read(CERTIFICATE)?, &path(CERTIFICATE))?;
        let key = pem::key(&read(KEY)?, &path(KEY))?;
        let reset_secret = Secret(blake3::derive_key("towline 2026-11-23 secret of an agent", key.secret_der()));
        let provider = tls::provider();
        let own = CertifiedKey::from_der(chain, key, &provider);
        let own = own.map_err(|source| {
            Error::damaged("tls.key is not the key of tls.crt").at(folder.display()).source(source)
        })?;
        let trusted = read(AUTHORITY)?;
        let roots = Arc::new(pem::roots(&trusted, &path(AUTHORITY))?);
        let authorities = pem::certificates(&trusted, &path(AUTHORITY))?;
        let authorities = authorities.iter().map(Certificate::read).collect::<Result<_>>()?;
        let clients = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), provider).build();
        let clients = clients.map_err(|source| Error::damaged("authority is unusable").source(source))?;
        let certificate = own.end_entity_cert().map_err(|source| Error::damaged("no certificate").source(source))?;
        let certificate = Certificate::read(certificate)?;
        let identity = certificate.agent()?.clone();
        let own = Arc::new(own);
        let loaded = Self { own, certificate, identity, authorities, roots, clients, revoked, reset_secret };
        loaded.check_own(now).map_err(|error| error.at(path(CERTIFICATE).display()))?;
        Ok(loaded)
    }

    /// Trusted authorities.
    pub(super) fn roots(&self) -> &Arc<RootCertStore> {
        &self.roots
    }

    /// Revoked certificates.
    pub(super) fn revoked(&self) -> &Arc<List> {
        &self.revoked
    }

    /// Peers would refuse a bad certificate, with a bare alert.
    fn check_own(&self, now: Timestamp) -> Result<()> {
        let Some((first, rest)) = self.own.cert.split_first() else { return Err(Error::damaged("no certificate")) };
        let now = UnixTime::since_unix_epoch(now.since(Timestamp(0)));
        self.verify_server(first, rest, now)
            .and_then(|_| self.verify_client(first, rest, now))
            .map(drop)
            .map_err(tls::refused)
    }

    /// Checks a server's certificate.
    pub(super) fn verify_server(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<Identity, rustls::Error> {
        check_number(intermediates)?;
        let algorithms = tls::provider().signature_verification_algorithms.all;
        let parsed = ParsedCertificate::try_from(end_entity)?;
        verify_server_cert_signed_by_trust_anchor(&parsed, &self.roots, intermediates, now, algorithms)?;
        self.accept(end_entity, intermediates)
    }

    /// Checks a client's certificate.
    pub(super) fn verify_client(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<Identity, rustls::Error> {
        check_number(intermediates)?;
        self.clients.verify_client_cert(end_entity, intermediates, now)?;
        self.accept(end_entity, intermediates)
    }

    /// Identity in a certificate that a trusted authority has signed.
    fn accept(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
    ) -> Result<Identity, rustls::Error> {
        let certificate = Certificate::read(end_entity).map_err(tls::unusable)?;
        let read = |intermediate| Certificate::read(intermediate).map_err(tls::unusable);
        let intermediates = intermediates.iter().map(read).collect::<Result<Vec<_>, _>>()?;
        if intermediates.iter().chain([&certificate]).any(|one| self.revoked.holds(one)) {
            return Err(rustls::CertificateError::Revoked.into());
        }
        certificate.agent().cloned().map_err(tls::unusable)
    }
}

/// Refuses more intermediate certificates than a chain of any authority has.
fn check_number(intermediates: &[CertificateDer<'_>]) -> Result<(), rustls::Error> {
    if intermediates.len() <= INTERMEDIATES_MAX {
        return Ok(());
    }
    Err(tls::unusable(
        Error::denied("too many intermediate certificates")
            .expected(format!("at most {INTERMEDIATES_MAX}"))
            .got(intermediates.len())
            .help("leave out those that do not lead from the certificate to an authority in ca.crt"),
    ))
}

fn stamps(folder: &Path) -> [FileStamp; 3] {
    [CERTIFICATE, KEY, AUTHORITY].map(|name| FileStamp::at(&folder.join(name)))
}
