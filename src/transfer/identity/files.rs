//! Files of certificates and keys: their names, and how they are read.

use std::path::Path;

use crate::error::{Error, Result};

/// A certificate, as cert-manager calls it in a secret (<https://cert-manager.io/docs/usage/certificate/>).
pub(super) const CERTIFICATE: &str = "tls.crt";
/// Its key.
pub(super) const KEY: &str = "tls.key";
/// The certificates of the authorities that are trusted.
pub(super) const AUTHORITY: &str = "ca.crt";
/// The key of the authority, where that lives.
pub(super) const AUTHORITY_KEY: &str = "ca.key";
/// Certificates that are trusted no more.
pub(super) const REVOKED: &str = "revoked";

/// No file of these is longer.
const FILE_LEN_MAX: u64 = 1 << 20;

/// Makes the folder `path` and those above it.
pub(super) fn make_folder(path: &Path) -> Result<()> {
    std::fs::create_dir_all(path).map_err(|source| Error::io("folder cannot be made", path, source))
}

/// Content of the file at `path`, line by line: bytes that are not text spoil their line alone.
///
/// # Errors
/// Usage, if it is too long, or no text of single bytes (it holds a NUL); the file system's.
pub(super) fn read_lines(path: &Path) -> Result<String> {
    let bytes = read_bytes(path)?;
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
    if bytes.contains(&0) {
        return Err(Error::usage("file is not text").at(path.display()).expected("UTF-8").got("a NUL byte"));
    }
    Ok(String::from_utf8_lossy(bytes).into_owned())
}

/// Content of the file at `path`.
pub(super) fn read(path: &Path) -> Result<String> {
    String::from_utf8(read_bytes(path)?)
        .map_err(|source| Error::usage("file is not text").at(path.display()).source(source))
}

fn read_bytes(path: &Path) -> Result<Vec<u8>> {
    let failed = |source| Error::io("file cannot be read", path, source);
    let len = std::fs::metadata(path).map_err(failed)?.len();
    if len > FILE_LEN_MAX {
        let error = Error::usage("file is too long for what it should be").at(path.display());
        return Err(error.expected(format!("at most {FILE_LEN_MAX} bytes")).got(len));
    }
    std::fs::read(path).map_err(failed)
}
