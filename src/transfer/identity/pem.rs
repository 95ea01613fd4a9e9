//! Certificates and keys as PEM text.

use std::path::Path;

use rcgen::{KeyPair, PublicKeyData as _};
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::error::{Error, Result};

/// Maximum number of certificates in one file.
const CERTIFICATES_MAX: usize = 64;

/// Certificates in `text`, the content of the file at `path`.
pub(super) fn certificates(text: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let malformed = |source| Error::damaged("certificate is malformed").at(path.display()).source(source);
    let found = CertificateDer::pem_slice_iter(text.as_bytes()).take(CERTIFICATES_MAX + 1);
    let found = found.collect::<Result<Vec<_>, _>>().map_err(malformed)?;
    match found.len() {
        0 => Err(Error::damaged("file holds no certificate")
            .at(path.display())
            .expected("PEM: -----BEGIN CERTIFICATE-----")),
        n if n > CERTIFICATES_MAX => Err(Error::usage("file holds too many certificates")
            .at(path.display())
            .expected(format!("at most {CERTIFICATES_MAX}"))),
        _ => Ok(found),
    }
}

/// Authorities in `text`, the content of the file at `path`.
pub(super) fn roots(text: &str, path: &Path) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for root in certificates(text, path)? {
        let added = roots.add(root);
        added.map_err(|source| Error::damaged("authority is unusable").at(path.display()).source(source))?;
    }
    Ok(roots)
}

/// Key in `text`, the content of the file at `path`.
pub(super) fn key(text: &str, path: &Path) -> Result<PrivateKeyDer<'static>> {
    PrivateKeyDer::from_pem_slice(text.as_bytes())
        .map_err(|source| Error::damaged("key is malformed").at(path.display()).source(source))
}

/// True if `certificate` belongs to `key`.
pub(super) fn is_key_of(key: &KeyPair, certificate: &CertificateDer<'_>) -> Result<bool> {
    let parsed = X509Certificate::from_der(certificate);
    let (_, certificate) = parsed.map_err(|source| Error::damaged("certificate is malformed").source(source))?;
    Ok(certificate.public_key().raw == key.subject_public_key_info())
}
