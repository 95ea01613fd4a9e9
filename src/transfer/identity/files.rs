//! Names of certificate and key files, and how they are read.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::OFlags;

use crate::error::{Error, Result};
use crate::tree::is_own_file;

/// Certificate, as cert-manager calls it in a secret (<https://cert-manager.io/docs/usage/certificate/>).
pub(super) const CERTIFICATE: &str = "tls.crt";
/// Its key.
pub(super) const KEY: &str = "tls.key";
/// Certificates of the trusted authorities.
pub(super) const AUTHORITY: &str = "ca.crt";
/// Key of the authority, on the authority's machine.
pub(super) const AUTHORITY_KEY: &str = "ca.key";
/// Key that signs policies.
pub(super) const POLICY_KEY: &str = "policy.key";
/// Its certificate.
pub(super) const POLICY_CERTIFICATE: &str = "policy.crt";
/// List of revoked certificates.
pub(super) const REVOKED: &str = "revoked";

/// Bytes of a certificate or key, at most.
const FILE_LEN_MAX: u64 = 1 << 20;
/// Bytes of the list of revoked certificates, at most: more than a million serial numbers.
const LIST_LEN_MAX: u64 = 64 << 20;

/// Creates the folder `path` and those above it.
pub(super) fn make_folder(path: &Path) -> Result<()> {
    std::fs::create_dir_all(path).map_err(|source| Error::io("cannot create folder", path, source))
}

/// Content of the list at `path`, line by line: bytes that are not text spoil their line alone.
///
/// # Errors
/// Usage, if it is too long, UTF-16 or no regular file; the file system's.
pub(super) fn read_lines(path: &Path) -> Result<String> {
    let bytes = read_bytes(path, LIST_LEN_MAX)?;
    if bytes.starts_with(b"\xff\xfe") || bytes.starts_with(b"\xfe\xff") {
        return Err(Error::usage("file is not text").at(path.display()).expected("UTF-8").got("UTF-16"));
    }
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
    Ok(String::from_utf8_lossy(bytes).into_owned())
}

/// Content of the file at `path`.
///
/// # Errors
/// Usage, if it is too long, not text or no regular file; the file system's.
pub(super) fn read(path: &Path) -> Result<String> {
    String::from_utf8(read_bytes(path, FILE_LEN_MAX)?)
        .map_err(|source| Error::usage("file is not text").at(path.display()).source(source))
}

/// Problems of the files in `folder` that users other than this one and root may write: whoever does decides whom this agent trusts.
pub(super) fn exposed(folder: &Path) -> Vec<String> {
    let problem = |name: &str| {
        let path = folder.join(name);
        let found = std::fs::metadata(&path).ok().filter(|found| !is_own_file(found))?;
        let (owner, mode) = (found.uid(), found.mode() & 0o7777);
        Some(format!("{0}: others may write it (owner {owner}, mode {mode:04o}): `chmod go-w {0}`", path.display()))
    };
    [CERTIFICATE, KEY, AUTHORITY, REVOKED].into_iter().filter_map(problem).collect()
}

/// Opens without waiting: a pipe in place of a file is refused, whether or not somebody writes to it. Links are followed, because
/// secrets that Kubernetes mounts are links.
fn read_bytes(path: &Path, len_max: u64) -> Result<Vec<u8>> {
    let failed = |source| Error::io("file cannot be read", path, source);
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = File::options().read(true).custom_flags(flags).open(path).map_err(failed)?;
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(Error::usage("not a regular file").at(path.display()).help("put a file in its place"));
    }
    let mut bytes = Vec::new();
    let len = file.take(len_max + 1).read_to_end(&mut bytes).map_err(failed)?;
    if len as u64 > len_max {
        let error = Error::usage("file is too long for what it should be").at(path.display());
        return Err(error.expected(format!("at most {len_max} bytes")).got("more"));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn a_pipe_and_a_file_without_end_are_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(REVOKED);
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        assert!(read_lines(&path).unwrap_err().to_string().starts_with("not a regular file"));
        std::fs::remove_file(&path).unwrap();
        File::create(&path).unwrap().set_len(LIST_LEN_MAX + 1).unwrap();
        assert!(read_lines(&path).unwrap_err().to_string().starts_with("file is too long"));
        std::fs::write(&path, vec![b'\n'; usize::try_from(FILE_LEN_MAX + 1).unwrap()]).unwrap();
        assert!(read(&path).is_err() && read_lines(&path).is_ok());
    }
}
