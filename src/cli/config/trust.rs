//! Settings files that the user trusts: records of their contents in the user's configuration folder.
//!
//! Anybody who can have a folder unpacked or checked out can put a `towline.toml` there, and so send what is saved, and requests
//! that the user's credentials sign, anywhere. Its contents count only as the user has seen them.

use std::path::{Path, PathBuf};

use super::file::{FILE, File, SettingsFile};
use crate::error::{Error, ErrorKind, Result};
use crate::tree::{Readers, make_private_folder, read_own_file, replace_file};

/// A record is two lines: a digest, and a path for people to read.
const RECORD_LEN_MAX: u64 = 64 << 10;

/// The folder of the records, one file for each path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cli) struct Trusted(PathBuf);

/// A settings file that was just trusted.
#[derive(Debug)]
pub(in crate::cli) struct Recorded {
    /// Its canonical path.
    pub(in crate::cli) path: PathBuf,
    /// BLAKE3 of its contents, in hexadecimal digits.
    pub(in crate::cli) digest: String,
    /// The settings that need trust.
    pub(in crate::cli) file: File,
}

impl Trusted {
    /// The records below the user's configuration folder.
    pub(super) fn below(config: &Path) -> Self {
        Self(config.join("trusted"))
    }

    /// True if the contents of `found` are trusted at its path.
    pub(super) fn holds(&self, found: &SettingsFile) -> Result<bool> {
        let path = canonical(&found.path)?;
        match read_own_file(&self.record(&path), RECORD_LEN_MAX) {
            Ok(record) => Ok(record.lines().next() == Some(digest(&found.text).as_str())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Records that the file at `path`, or in the folder `path`, is trusted as it is now.
    ///
    /// # Errors
    /// Not found; denied, if others may write it; usage, if it is malformed or no file that would be found; the file system's.
    pub(in crate::cli) fn add(&self, path: &Path) -> Result<Recorded> {
        let path = canonical(&settings_file(path)?)?;
        let found = SettingsFile::read(path.clone(), false)?.ok_or_else(|| {
            Error::not_found("there is no settings file")
                .at(path.display())
                .help("write it first, or give the path of another")
        })?;
        let digest = digest(&found.text);
        make_private_folder(&self.0)?;
        replace_file(&self.record(&path), &format!("{digest}\n{}\n", path.display()), Readers::Owner)?;
        Ok(Recorded { path, digest, file: found.file })
    }

    /// Forgets the file at `path`, or in the folder `path`, which need not be there any more.
    ///
    /// # Errors
    /// Not found, if it is not trusted; the file system's.
    pub(in crate::cli) fn remove(&self, path: &Path) -> Result<PathBuf> {
        let path = canonical(&settings_file(path)?)?;
        let removed = std::fs::remove_file(self.record(&path));
        removed.map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => Error::not_found("settings file is not trusted").at(path.display()),
            _ => Error::io("record of a trusted file cannot be removed", &self.record(&path), source),
        })?;
        Ok(path)
    }

    fn record(&self, path: &Path) -> PathBuf {
        self.0.join(blake3::hash(path.as_os_str().as_encoded_bytes()).to_hex().as_str())
    }
}

/// The settings file that `path` means.
fn settings_file(path: &Path) -> Result<PathBuf> {
    if path.file_name().is_some_and(|name| name == FILE) {
        return Ok(path.to_owned());
    }
    if path.is_dir() {
        return Ok(path.join(FILE));
    }
    Err(Error::usage("it is not a settings file")
        .at(path.display())
        .expected(format!("a path to {FILE}, or its folder")))
}

/// The path without links and dots; the file itself may be gone, or a link.
fn canonical(path: &Path) -> Result<PathBuf> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let real = folder.canonicalize().map_err(|error| Error::io("folder cannot be found", folder, error))?;
    Ok(real.join(FILE))
}

fn digest(text: &str) -> String {
    blake3::hash(text.as_bytes()).to_hex().to_string()
}

/// The command that trusts the file at `path`, to be pasted into a shell.
pub(super) fn command(path: &Path) -> String {
    let path = path.display().to_string();
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=@%,:".contains(c);
    if path.chars().all(plain) {
        return format!("towline config trust {path}");
    }
    format!("towline config trust '{}'", path.replace('\'', r"'\''"))
}
