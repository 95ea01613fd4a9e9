//! Small files that are written atomically.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::id::ObjectId;

/// Access to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readers {
    /// Owner.
    Owner = 0o600,
    /// Everybody.
    All = 0o644,
}

/// Writes a file that must not exist yet. Blocking.
///
/// # Errors
/// Conflict, if it exists; errors of the file system.
pub fn create_file(path: &Path, text: &str, readers: Readers) -> Result<()> {
    let staged = stage(path, text, readers)?;
    // Unlike a rename, a link never replaces anything.
    let linked = std::fs::hard_link(&staged.0, path);
    linked.map_err(|source| match source.kind() {
        std::io::ErrorKind::AlreadyExists => Error::conflict("file is there already").at(path.display()).source(source),
        _ => Error::io("file cannot be written", path, source),
    })?;
    sync_folder_of(path)
}

/// Writes a file, and replaces an existing one. Blocking.
///
/// # Errors
/// Errors of the file system.
pub fn replace_file(path: &Path, text: &str, readers: Readers) -> Result<()> {
    let staged = stage(path, text, readers)?;
    std::fs::rename(&staged.0, path).map_err(|source| Error::io("file cannot be written", path, source))?;
    sync_folder_of(path)
}

/// A temporary file, removed on drop.
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

fn sync_folder_of(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(|source| Error::io("folder cannot be synced", folder, source))
}
