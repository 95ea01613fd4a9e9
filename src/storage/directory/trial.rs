//! Trial of what the store in a directory needs from its file system, in a folder of its own that is removed again.

use std::io::{self, Write as _};
use std::path::Path;

use object_store::path::Path as Key;
use rustix::fs::{AtFlags, Dir, linkat, unlinkat};
use ulid::Ulid;

use super::modes::Modes;
use super::root::{Place, Root};
use crate::storage::scratch;

const FILE: &str = "file";
const LINK: &str = "link";

/// Results of a trial.
#[derive(Debug)]
pub(crate) struct DirectoryTrial {
    /// Outcome of syncing a file and its folder, as every put does.
    pub(crate) fsync: io::Result<()>,
    /// Outcome of making a hard link twice. A put that must replace nothing links a finished file, which succeeds for one writer only.
    pub(crate) hard_links: io::Result<()>,
}

/// Tries the directory at `path`; removes empty folders of this and earlier trials. Blocking.
///
/// # Errors
/// Errors of the file system: nothing could be tried.
pub(crate) fn try_directory(path: &Path) -> io::Result<DirectoryTrial> {
    let (root, folder) = (Root::open(path)?, scratch());
    let modes = Modes::recorded(path).unwrap_or(Modes::of(super::Sharing::Private));
    let place = root.make_place(&folder.clone().join(FILE), modes)?;
    let tried = DirectoryTrial { fsync: synced(&place, modes), hard_links: linked(&place) };
    for name in [FILE, LINK] {
        // Best effort, as below: leftovers cost nothing.
        let _ = unlinkat(&place.folder, name, AtFlags::empty());
    }
    remove_empty(&root, &folder);
    Ok(tried)
}

fn synced(place: &Place, modes: Modes) -> io::Result<()> {
    let mut file = place.create_beside(FILE, modes.file)?;
    file.write_all(b"towline")?;
    file.sync_all()?;
    place.sync_folder()
}

fn linked(place: &Place) -> io::Result<()> {
    let link = || linkat(&place.folder, FILE, &place.folder, LINK, AtFlags::empty()).map_err(io::Error::from);
    link()?;
    match link() {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
        Ok(()) => Err(io::Error::other("a second link of the same name replaced the first")),
    }
}

/// Removes the empty folders of trials, and the one above: a store leaves them, since removing them under a writer's feet makes it try
/// again.
fn remove_empty(root: &Root, folder: &Key) {
    let Some(above) = folder.parts().next() else { return };
    let above = Key::from(above.as_ref());
    let Ok(open) = root.folder(&above) else { return };
    let names = Dir::read_from(&open).into_iter().flatten().flatten();
    let trials = names.filter(|entry| entry.file_name().to_str().is_ok_and(|name| name.parse::<Ulid>().is_ok()));
    for trial in trials {
        // A folder that is in use is not empty and stays.
        let _ = unlinkat(&open, trial.file_name(), AtFlags::REMOVEDIR);
    }
    if let Ok(place) = root.place(&above) {
        let _ = unlinkat(&place.folder, &place.name, AtFlags::REMOVEDIR);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_leaves_nothing_and_goes_through_no_link() {
        let dir = tempfile::tempdir().unwrap();
        let (root, other) = (dir.path().join("repo"), dir.path().join("other"));
        std::fs::create_dir_all(other.join("empty")).unwrap();
        std::fs::create_dir_all(root.join("probe/notes")).unwrap();
        let tried = try_directory(&root).unwrap();
        assert!(tried.fsync.is_ok() && tried.hard_links.is_ok(), "{tried:?}");
        assert_eq!(std::fs::read_dir(root.join("probe")).unwrap().count(), 1, "what is no trial's stays");
        std::fs::remove_dir(root.join("probe/notes")).unwrap();
        try_directory(&root).unwrap();
        assert_eq!(std::fs::read_dir(&root).unwrap().count(), 0);
        std::os::unix::fs::symlink(&other, root.join("probe")).unwrap();
        try_directory(&root).unwrap_err();
        assert_eq!(std::fs::read_dir(&other).unwrap().count(), 1);
    }
}
