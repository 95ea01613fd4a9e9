//! A server that others than agents call: its certificate, from a folder, and no certificate of the client.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use rustls::ServerConfig;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use super::credentials::POLL_INTERVAL;
use super::files::{self, CERTIFICATE, KEY};
use super::{pem, tls};
use crate::error::{Error, Result};
use crate::tree::FileStamp;

/// TLS configuration of a server with the certificate in `folder` (`tls.crt`, `tls.key`), which is read again when it changes.
///
/// # Errors
/// Not found, if a file is missing; damaged, if one is malformed, or they do not belong together.
pub fn https_config(folder: &Path) -> Result<ServerConfig> {
    let served = ServedCertificate::open(folder)?;
    let builder = ServerConfig::builder_with_provider(tls::provider()).with_safe_default_protocol_versions();
    let builder = builder.map_err(|source| Error::other("TLS is not at hand").source(source))?;
    let mut config = builder.with_no_client_auth().with_cert_resolver(Arc::new(served));
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

#[derive(Debug)]
struct ServedCertificate {
    folder: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    current: Arc<CertifiedKey>,
    /// State of the files when they were last read, successfully or not.
    seen: [FileStamp; 2],
    last_poll: Instant,
}

impl ServedCertificate {
    fn open(folder: &Path) -> Result<Self> {
        let seen = stamps(folder);
        let state = State { current: Arc::new(read(folder)?), seen, last_poll: Instant::now() };
        Ok(Self { folder: folder.to_owned(), state: Mutex::new(state) })
    }

    /// The certificate in the current files. Files that cannot be used (half written, for example) change nothing.
    fn current(&self) -> Arc<CertifiedKey> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.last_poll.elapsed() >= POLL_INTERVAL {
            state.last_poll = Instant::now();
            let seen = stamps(&self.folder);
            if seen != state.seen {
                state.seen = seen;
                match read(&self.folder) {
                    Ok(read) => state.current = Arc::new(read),
                    Err(error) => {
                        tracing::warn!(
                            "cannot use the changed certificate, the previous one stays in force: {error:?}"
                        );
                    }
                }
            }
        }
        Arc::clone(&state.current)
    }
}

impl ResolvesServerCert for ServedCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current())
    }
}

fn read(folder: &Path) -> Result<CertifiedKey> {
    let (certificate, key) = (folder.join(CERTIFICATE), folder.join(KEY));
    let missing =
        |error: Error| error.help("the folder has tls.crt and tls.key, as `towline identity issue` writes them");
    let chain = pem::certificates(&files::read(&certificate).map_err(missing)?, &certificate)?;
    let key = pem::key(&files::read(&key).map_err(missing)?, &key)?;
    CertifiedKey::from_der(chain, key, &tls::provider())
        .map_err(|source| Error::damaged("tls.key is not the key of tls.crt").at(folder.display()).source(source))
}

fn stamps(folder: &Path) -> [FileStamp; 2] {
    [CERTIFICATE, KEY].map(|name| FileStamp::at(&folder.join(name)))
}

#[cfg(test)]
mod tests {
    use super::super::{AGENT_DAYS, AUTHORITY_DAYS, Authority, Subject};
    use super::*;
    use crate::clock::{Clock as _, SystemClock};
    use crate::identity::Identity;

    #[test]
    fn a_renewed_certificate_is_served_and_a_broken_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let now = SystemClock.now();
        let authority = Authority::create(&dir.path().join("authority"), "test", AUTHORITY_DAYS, now).unwrap();
        let folder = dir.path().join("served");
        let issue = || {
            authority
                .issue(&(&Identity::new("home", "webhook").unwrap()).into(), &folder, (AGENT_DAYS, now), true)
                .unwrap();
        };
        issue();
        let served = ServedCertificate::open(&folder).unwrap();
        let first = served.current();
        let again = || {
            served.state.lock().unwrap().last_poll -= POLL_INTERVAL;
            served.current()
        };
        assert!(Arc::ptr_eq(&first, &again()), "nothing has changed");
        issue();
        let second = again();
        assert_ne!(first.cert, second.cert);
        std::fs::write(folder.join(KEY), "half").unwrap();
        assert!(Arc::ptr_eq(&second, &again()));
        assert!(https_config(&folder).is_err() && https_config(dir.path()).is_err());
        for name in ["", "a b", "a/b", &"a".repeat(254)] {
            let (identity, dns_names) = (Identity::new("home", "webhook").unwrap(), [name.to_owned()]);
            let subject = Subject { identity: &identity, dns_names: &dns_names };
            assert!(authority.issue(&subject, &folder, (AGENT_DAYS, now), true).is_err(), "{name}");
        }
    }
}
