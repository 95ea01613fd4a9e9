//! Identities: names in certificates, an authority that signs them, TLS that requires them.
//!
//! An agent's name stands in its certificate as the URI `towline://SITE/AGENT`, not as a DNS name: names of hosts say where
//! somebody answers and change with it, they have other owners, and a public authority would sign them. Where to connect is
//! configured or found; who answers there is proven.

mod authority;
mod certificate;
mod credentials;
mod files;
mod name;
mod pem;
mod revoked;
mod standing;
#[cfg(test)]
mod tests;
mod tls;

use std::path::Path;

pub use self::authority::{AGENT_DAYS, AUTHORITY_DAYS, Authority, DAYS_MAX};
pub use self::certificate::Certificate;
pub use self::credentials::Credentials;
pub use self::name::Identity;
pub use self::standing::{Side, Standing};
pub use self::tls::{SERVER_NAME, client_config, peer_identity, refused, server_config};
use crate::error::{Error, ErrorKind, Result};

/// The certificates at `path`: of a file, or of a folder with `tls.crt`, `ca.crt` or both.
///
/// # Errors
/// Not found, if there are none; damaged, if one is malformed.
pub fn show(path: &Path) -> Result<Vec<Certificate>> {
    let mut found = Vec::new();
    let paths = if path.is_dir() {
        vec![path.join(files::CERTIFICATE), path.join(files::AUTHORITY)]
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
