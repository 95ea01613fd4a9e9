//! Opening of a directory as a store.

use std::path::{Path, PathBuf};

use super::Directory;
use super::home::Home;
use super::modes::{Modes, Sharing};
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
        make_root(path, new, shared).map_err(|e| Error::io("directory cannot be made", path, e))?;
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

/// Creates the folder of a new repository. An existing one keeps its mode, unless it is to be shared.
fn make_root(path: &Path, modes: Modes, shared: Option<Sharing>) -> std::io::Result<()> {
    let there = path.exists();
    create_durably(path)?;
    if there && shared.is_none() { Ok(()) } else { modes.set_folder(path) }
}

/// `mkdir -p` whose result survives a power loss: each new folder's entry is synced in its parent.
fn create_durably(path: &Path) -> std::io::Result<()> {
    let missing: Vec<&Path> = path.ancestors().take_while(|folder| !folder.exists()).collect();
    std::fs::create_dir_all(path)?;
    missing.iter().filter_map(|folder| folder.parent()).try_for_each(|parent| std::fs::File::open(parent)?.sync_all())
}
