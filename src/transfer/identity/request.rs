//! A request for a certificate, with its key, until somebody signs it.

use std::fmt;
use std::path::Path;

use rcgen::{CertificateParams, KeyPair};

use super::authority::new_key;
use super::certificate::Certificate;
use super::files::{self, AUTHORITY, CERTIFICATE, KEY};
use super::pem;
use crate::error::{Error, Result};
use crate::tree::{Readers, replace_file};

/// A new key, and the request for its certificate.
pub struct CertificateRequest {
    key: KeyPair,
    pem: String,
}

impl CertificateRequest {
    /// Makes a key and a request for a certificate; whoever signs it decides the name.
    ///
    /// # Errors
    /// Other, if the available cryptography fails.
    pub fn create() -> Result<Self> {
        let key = new_key()?;
        let request = CertificateParams::default().serialize_request(&key).and_then(|request| request.pem());
        let pem = request.map_err(|source| Error::other("cannot make a certificate request").source(source))?;
        Ok(Self { key, pem })
    }

    /// The request, in PEM.
    #[must_use]
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// Writes the signed `certificate`, its key and the certificates of the `authorities` to `folder`, for
    /// [`Credentials`](super::Credentials). Existing files are replaced. Blocking.
    ///
    /// # Errors
    /// Damaged, if it is no certificate of this key; the file system's.
    pub fn complete(&self, certificate: &str, authorities: &str, folder: &Path) -> Result<Certificate> {
        let path = folder.join(CERTIFICATE);
        let chain = pem::certificates(certificate, &path)?;
        let first = chain.first().filter(|first| pem::is_key_of(&self.key, first).unwrap_or(false));
        let first = first.ok_or_else(|| Error::damaged("certificate is not of the key that it was requested for"))?;
        let read = Certificate::read(first)?;
        files::make_folder(folder)?;
        // An agent that reads the files in between finds a key that does not match, and keeps its old credentials.
        replace_file(&folder.join(AUTHORITY), authorities, Readers::All)?;
        replace_file(&folder.join(KEY), &self.key.serialize_pem(), Readers::Owner)?;
        replace_file(&path, certificate, Readers::All)?;
        Ok(read)
    }
}

impl fmt::Debug for CertificateRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CertificateRequest(..)")
    }
}
