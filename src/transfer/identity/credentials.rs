//! Credentials of an agent: certificate, key and authorities, reloaded from a folder when the files change.

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
use super::{Identity, pem, tls};
use crate::clock::{Clock, Timestamp};
use crate::error::{Error, ErrorKind, Result};
use crate::tree::Look;

/// The files are looked at again no sooner than after this.
pub(super) const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The credentials of this agent. Clones share them.
///
/// In a folder lie `tls.crt`, `tls.key` and `ca.crt`, as `towline identity issue` and cert-manager write them, and perhaps
/// `revoked`: a serial number or a SHA-256 fingerprint a line, in hexadecimal digits; `#` begins a comment. Good lines hold beside
/// malformed ones, and nobody is taken off the list by a file that cannot be read or may be half written.
#[derive(Clone, Debug)]
pub struct Credentials(Arc<Watched>);

#[derive(Debug)]
struct Watched {
    folder: PathBuf,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    current: Arc<Loaded>,
    /// State of the certificate files when they were last read, successfully or not.
    seen: [Look; 3],
    looked: Timestamp,
    revoked: Revoked,
    /// Problem of the certificate files as they are now.
    problem: Option<String>,
}

/// Credentials at one moment.
#[derive(Clone, Debug)]
pub(super) struct Loaded {
    pub(super) own: Arc<CertifiedKey>,
    pub(super) certificate: Certificate,
    identity: Identity,
    roots: Arc<RootCertStore>,
    clients: Arc<dyn ClientCertVerifier>,
    revoked: Arc<List>,
}

impl Credentials {
    /// The credentials in `folder`; `clock` says when to look again, and which certificates have expired.
    ///
    /// # Errors
    /// Not found, if a file is missing; damaged, if one is not what it should be; denied, if the certificate has expired, names
    /// no agent, was revoked, or was not signed by an authority in `ca.crt`; the file system's.
    pub fn open(folder: &Path, clock: Arc<dyn Clock>) -> Result<Self> {
        let (seen, looked) = (look(folder), clock.now());
        let revoked = Revoked::open(folder.join(REVOKED), looked)?;
        let current = Arc::new(Loaded::read(folder, looked, Arc::clone(revoked.list()))?);
        let state = Mutex::new(State { current, seen, looked, revoked, problem: None });
        Ok(Self(Arc::new(Watched { folder: folder.to_owned(), clock, state })))
    }

    /// Identity of this agent.
    #[must_use]
    pub fn identity(&self) -> Identity {
        self.current().identity.clone()
    }

    /// The certificate that is shown.
    #[must_use]
    pub fn certificate(&self) -> Certificate {
        self.current().certificate.clone()
    }

    /// Problems of the files as they are now; the version before stays in force.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        self.current();
        let state = self.0.state();
        state.problem.iter().chain(state.revoked.problems()).cloned().collect()
    }

    pub(super) fn clock(&self) -> &Arc<dyn Clock> {
        &self.0.clock
    }

    /// The credentials as the files have them now. Files that cannot be used (half written, say) change nothing.
    pub(super) fn current(&self) -> Arc<Loaded> {
        let now = self.0.clock.now();
        let mut state = self.0.state();
        // A clock that went back must not keep us from looking.
        if now.since(state.looked) >= LOOK_EVERY || now < state.looked {
            state.looked = now;
            state.look(&self.0.folder, now);
        }
        Arc::clone(&state.current)
    }
}

impl Watched {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn look(&mut self, folder: &Path, now: Timestamp) {
        // By itself: it holds whatever becomes of the certificates.
        if self.revoked.look(now) {
            tracing::info!("list of revoked certificates has changed");
            let revoked = Arc::clone(self.revoked.list());
            self.current = Arc::new(Loaded { revoked, ..Loaded::clone(&self.current) });
        }
        let seen = look(folder);
        if seen == self.seen {
            return;
        }
        self.seen = seen;
        match Loaded::read(folder, now, Arc::clone(self.revoked.list())) {
            Ok(loaded) => {
                tracing::info!(identity = %loaded.identity, until = %loaded.certificate.not_after, "read certificates again");
                self.current = Arc::new(loaded);
                self.problem = None;
            }
            Err(error) => {
                let problem = format!("certificates changed and cannot be used, so those before hold: {error}");
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
        let provider = tls::provider();
        let own = CertifiedKey::from_der(chain, key, &provider);
        let own = own.map_err(|source| {
            Error::damaged("tls.key is not the key of tls.crt").at(folder.display()).source(source)
        })?;
        let mut roots = RootCertStore::empty();
        for root in pem::certificates(&read(AUTHORITY)?, &path(AUTHORITY))? {
            let added = roots.add(root);
            added.map_err(|source| {
                Error::damaged("authority is unusable").at(path(AUTHORITY).display()).source(source)
            })?;
        }
        let roots = Arc::new(roots);
        let clients = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), provider).build();
        let clients = clients.map_err(|source| Error::damaged("authority is unusable").source(source))?;
        let certificate = own.end_entity_cert().map_err(|source| Error::damaged("no certificate").source(source))?;
        let certificate = Certificate::read(certificate)?;
        let identity = certificate.agent()?.clone();
        let loaded = Self { own: Arc::new(own), certificate, identity, roots, clients, revoked };
        loaded.check_own(now).map_err(|error| error.at(path(CERTIFICATE).display()))?;
        Ok(loaded)
    }

    /// Peers would refuse a bad certificate, and could only say so in one word.
    fn check_own(&self, now: Timestamp) -> Result<()> {
        let Some((first, rest)) = self.own.cert.split_first() else { return Err(Error::damaged("no certificate")) };
        let now = UnixTime::since_unix_epoch(now.since(Timestamp(0)));
        self.verify_server(first, rest, now)
            .and_then(|_| self.verify_client(first, rest, now))
            .map(drop)
            .map_err(tls::refused)
    }

    /// Checks the certificate of somebody who serves.
    pub(super) fn verify_server(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<Identity, rustls::Error> {
        let algorithms = tls::provider().signature_verification_algorithms.all;
        let parsed = ParsedCertificate::try_from(end_entity)?;
        verify_server_cert_signed_by_trust_anchor(&parsed, &self.roots, intermediates, now, algorithms)?;
        self.accept(end_entity, intermediates)
    }

    /// Checks the certificate of somebody who asks.
    pub(super) fn verify_client(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<Identity, rustls::Error> {
        self.clients.verify_client_cert(end_entity, intermediates, now)?;
        self.accept(end_entity, intermediates)
    }

    /// Whom a certificate names that an authority has signed.
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

fn look(folder: &Path) -> [Look; 3] {
    [CERTIFICATE, KEY, AUTHORITY].map(|name| Look::at(&folder.join(name)))
}
