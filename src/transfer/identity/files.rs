//! Files of certificates and keys: written whole or not at all, keys for their owner alone.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::id::ObjectId;

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

/// Who may read a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Readers {
    /// Its owner.
    Owner = 0o600,
    /// Everybody.
    All = 0o644,
}

/// Writes a file that must not be there yet.
pub(super) fn create(path: &Path, text: &str, readers: Readers) -> Result<()> {
    let staged = stage(path, text, readers)?;
    // Unlike a rename, a link never replaces anything.
    let linked = std::fs::hard_link(&staged.0, path);
    linked.map_err(|source| match source.kind() {
        std::io::ErrorKind::AlreadyExists => Error::conflict("file is there already").at(path.display()).source(source),
        _ => Error::io("file cannot be written", path, source),
    })?;
    sync_folder(path)
}

/// Writes a file in the place of whatever is there.
pub(super) fn replace(path: &Path, text: &str, readers: Readers) -> Result<()> {
    let staged = stage(path, text, readers)?;
    std::fs::rename(&staged.0, path).map_err(|source| Error::io("file cannot be written", path, source))?;
    sync_folder(path)
}

/// A file under a name of its own, which goes when this does.
struct Staged(PathBuf);

impl Drop for Staged {
    fn drop(&mut self) {
        // After a rename there is nothing left to remove.
        let _ = std::fs::remove_file(&self.0);
    }
}

fn stage(path: &Path, text: &str, readers: Readers) -> Result<Staged> {
    let staged = path.with_file_name(format!(".towline-{}", ObjectId::random()));
    let write = || {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(readers as u32).open(&staged)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()
    };
    let written = write();
    let staged = Staged(staged);
    written.map_err(|source| Error::io("file cannot be written", path, source))?;
    Ok(staged)
}

fn sync_folder(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(|source| Error::io("folder cannot be synced", folder, source))
}

/// Makes the folder `path` and those above it.
pub(super) fn make_folder(path: &Path) -> Result<()> {
    std::fs::create_dir_all(path).map_err(|source| Error::io("folder cannot be made", path, source))
}

/// What the file at `path` holds.
pub(super) fn read(path: &Path) -> Result<String> {
    let failed = |source| Error::io("file cannot be read", path, source);
    let len = std::fs::metadata(path).map_err(failed)?.len();
    if len > FILE_LEN_MAX {
        let error = Error::usage("file is too long for what it should be").at(path.display());
        return Err(error.expected(format!("at most {FILE_LEN_MAX} bytes")).got(len));
    }
    std::fs::read_to_string(path).map_err(failed)
}
