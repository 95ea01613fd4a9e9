//! Opening of a directory as a store.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Dir, Mode, openat};
use rustix::io::Errno;

use super::Directory;
use super::home::{Home, MARK};
use super::modes::{Modes, Sharing};
use super::root::READ_FOLDER;
use crate::error::{Error, Result};

/// Opens a directory. Objects are files; a put writes a staging file, syncs and renames it, and syncs the folder, so that an
/// acknowledged put survives a power loss. Large ones are written with direct I/O. Deletes are not synced and may be undone by a
/// power loss. Empty folders stay, because removing them would race with writers. For leftovers of a crash see
/// [`super::staging`].
pub(in crate::storage) fn open_directory(
    path: &Path,
    create: bool,
    shared: Option<Sharing>,
) -> Result<(Directory, PathBuf)> {
    let modes = Modes::recorded(path);
    let new = Modes::of(shared.unwrap_or_default());
    if modes.is_some_and(|modes| shared.is_some() && modes != new) {
        return Err(Error::usage("the repository is there already, with other modes than --shared asks for")
            .at(path.display())
            .help("change the modes of its files and folders: docs/operations.md says how"));
    }
    if create && modes.is_none() {
        make_root(path, new, shared)?;
    }
    let modes = modes.unwrap_or(new);
    let found = path.canonicalize().map_err(|e| {
        let is_missing = e.kind() == std::io::ErrorKind::NotFound;
        let error = Error::io("directory cannot be opened", path, e);
        if is_missing && !create { error.help("`towline init` makes it") } else { error }
    })?;
    if !found.is_dir() {
        return Err(Error::usage("repository path is not a directory").at(path.display()));
    }
    let home = Home::of(&found).map_err(|e| Error::io("directory cannot be opened", path, e))?;
    Ok((Directory::new(home, modes), found))
}

/// Creates the folder of a new repository. An existing one keeps its mode, unless it is to be shared; then it must be an empty one.
///
/// # Errors
/// Conflict, if it is to be shared and is not empty, or is a link; errors of the file system.
fn make_root(path: &Path, modes: Modes, shared: Option<Sharing>) -> Result<()> {
    let io = |source| Error::io("directory cannot be made", path, source);
    let there = path.symlink_metadata().is_ok();
    create_durably(path).map_err(io)?;
    if there && shared.is_none() {
        return Ok(());
    }
    // Checks and changes the open folder: another one may be put at its path meanwhile.
    let folder = openat(CWD, path, READ_FOLDER, Mode::empty()).map_err(|errno| match errno {
        Errno::NOTDIR | Errno::LOOP => Error::conflict("the folder to share is a link")
            .at(path.display())
            .help("name the folder itself: everything in it would be shared"),
        errno => io(errno.into()),
    })?;
    if there && let Some(other) = other_entry(&folder).map_err(io)? {
        return Err(Error::conflict("the folder to share holds other files")
            .at(path.display())
            .expected("an empty or a new folder")
            .got(other)
            .help(format!("name a folder of its own, such as {}", path.join("repository").display())));
    }
    modes.set_open_folder(&folder).map_err(|errno| io(errno.into()))
}

/// An entry of `folder` that neither a new file system has, nor another process that is about to create the same repository.
fn other_entry(folder: &OwnedFd) -> std::io::Result<Option<String>> {
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy();
        if ![".", "..", "lost+found"].contains(&&*name) && name.split('#').next() != Some(MARK) {
            return Ok(Some(name.into_owned()));
        }
    }
    Ok(None)
}

/// `mkdir -p` whose result survives a power loss: each new folder's entry is synced in its parent.
fn create_durably(path: &Path) -> std::io::Result<()> {
    let missing: Vec<&Path> = path.ancestors().take_while(|folder| !folder.exists()).collect();
    std::fs::create_dir_all(path)?;
    missing.iter().filter_map(|folder| folder.parent()).try_for_each(|parent| std::fs::File::open(parent)?.sync_all())
}
