//! Identities: names in certificates, an authority that signs them, TLS that requires them.
//!
//! A certificate names its agent by the URI `towline://SITE/AGENT`, not by a DNS name: a host name says where an agent
//! answers and changes with it, has another owner, and can be certified by a public authority. Addresses are configured
//! or discovered; the certificate proves who answers there.

mod authority;
mod certificate;
mod certificate_check;
mod credentials;
mod files;
mod https;
mod other_forms;
mod pem;
mod request;
mod revoked;
mod signature;
#[cfg(test)]
mod tests;
mod tls;

use std::path::Path;

pub use self::authority::{AGENT_DAYS, AUTHORITY_DAYS, Authority, DAYS_MAX, POLICY_DAYS, Subject};
pub use self::certificate::{Certificate, from_hex, hex};
pub use self::certificate_check::{CertificateCheck, Side};
pub use self::credentials::Credentials;
pub use self::https::https_config;
pub use self::request::CertificateRequest;
pub use self::signature::{Context, PolicyKey, Purpose, SIGNATURE_LEN_MAX, Signature, Trusted};
pub use self::tls::{SERVER_NAME, client_config, peer_identity, refused, seed_random_generator, server_config};
use crate::error::{Error, ErrorKind, Result};

/// Certificates at `path`: of a file, or of a folder with `tls.crt`, `policy.crt` or `ca.crt`.
///
/// # Errors
/// Not found, if there are none; damaged, if one is malformed.
pub fn show(path: &Path) -> Result<Vec<Certificate>> {
    let mut found = Vec::new();
    let paths = if path.is_dir() {
        [files::CERTIFICATE, files::POLICY_CERTIFICATE, files::AUTHORITY].map(|name| path.join(name)).to_vec()
    } else {
        vec![path.to_owned()]
    };
    for one in paths {
        match files::read(&one) {
            Ok(text) => {
                let certificates = pem::certificates(&text, &one)?;
                found.extend(certificates.iter().map(Certificate::read).collect::<Result<Vec<_>>>()?);
            }
            Err(error) if error.kind() == ErrorKind::NotFound && path.is_dir() => {}
            Err(error) => return Err(error),
        }
    }
    if found.is_empty() {
        return Err(Error::not_found("there is no certificate").at(path.display()).expected("tls.crt or ca.crt"));
    }
    Ok(found)
}
