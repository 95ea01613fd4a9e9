//! Check that a directory is still the one that was opened.
//!
//! An unmounted disk or share leaves an empty folder, or none. Writes to that folder would succeed, and be lost or hidden once
//! the disk is mounted again; reads would show an empty repository.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use object_store::path::Path as ObjectPath;
use thiserror::Error as ThisError;

use super::root::Root;
use crate::error;
use crate::format::envelope::MAGIC;

/// The object that names a repository, in its directory.
pub(super) const MARK: &str = "repository";
/// Maximum bytes of it that are compared: more than it has.
const MARK_LEN: u64 = 64 << 10;

/// Error: the directory does not exist, or is another one.
#[derive(Clone, Debug, ThisError, PartialEq, Eq)]
#[error("directory {} is not there any more, or is another one than it was: is its disk mounted?", .0.display())]
struct DirectoryMissing(PathBuf);

/// A directory that was opened. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct Home(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    root: PathBuf,
    known: Mutex<HomeIdentity>,
}

/// Identity of the directory.
#[derive(Clone, Debug)]
struct HomeIdentity {
    /// Device and inode, constant while it is mounted.
    identity: (u64, u64),
    /// Content of the file that identifies the repository, once it exists; constant also after a remount.
    mark: Option<Vec<u8>>,
}

impl Home {
    /// Opens the directory at `root`.
    pub(super) fn of(root: &Path) -> io::Result<Self> {
        let open = Root::open(root)?;
        let known = HomeIdentity { identity: identity(&open)?, mark: mark(&open) };
        Ok(Self(Arc::new(Inner { root: root.to_owned(), known: Mutex::new(known) })))
    }

    /// Path of the directory.
    pub(super) fn path(&self) -> &Path {
        &self.0.root
    }

    /// The error of an operation on `key`, with its path if it lacks a permission.
    pub(super) fn located(&self, key: &ObjectPath, error: io::Error) -> io::Error {
        if error.kind() != io::ErrorKind::PermissionDenied {
            return error;
        }
        io::Error::new(error.kind(), format!("{error}: {}", self.0.root.join(key.as_ref()).display()))
    }

    /// Opens the directory, if it is unchanged. Blocking.
    ///
    /// # Errors
    /// Other, if not.
    pub(super) fn open(&self) -> io::Result<Root> {
        let missing = || io::Error::other(DirectoryMissing(self.0.root.clone()));
        let root = Root::open(&self.0.root).map_err(|_| missing())?;
        let identity = identity(&root)?;
        let mut known = self.0.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.identity == identity {
            // A repository may have been created in it meanwhile.
            known.mark = known.mark.take().or_else(|| mark(&root));
            return Ok(root);
        }
        if known.mark.is_none() || known.mark != mark(&root) {
            return Err(missing());
        }
        known.identity = identity;
        Ok(root)
    }
}

/// The repository in whose folder `path` lies, or which it is. What does not exist yet lies where its parent does. A file that another
/// user has put into a folder, such as `/tmp`, does not make it a repository.
pub(crate) fn enclosing_repository(path: &Path) -> Option<PathBuf> {
    let path = std::path::absolute(path).ok()?;
    let there = path.ancestors().find_map(|path| path.canonicalize().ok())?;
    let owner = |path: &Path| path.symlink_metadata().ok().map(|found| found.uid());
    let is_repository = |folder: &&Path| {
        let mark = Root::open(folder).ok().and_then(|root| mark(&root));
        mark.is_some_and(|mark| mark.starts_with(&MAGIC)) && owner(folder) == owner(&folder.join(MARK))
    };
    there.ancestors().find(is_repository).map(Path::to_owned)
}

/// Opens the object at `location` below `root` for reading. Blocking.
///
/// # Errors
/// Errors of the file system; damaged, if it is no regular file.
pub(crate) fn open_object(root: &Path, location: &ObjectPath) -> error::Result<File> {
    let opened = Root::open(root).and_then(|root| root.object(location));
    let (file, _) = opened.map_err(|source| match source.downcast::<error::Error>() {
        Ok(damaged) => damaged,
        Err(source) => error::Error::io("cannot open an object", &root.join(location.as_ref()), source),
    })?;
    Ok(file)
}

fn identity(root: &Root) -> io::Result<(u64, u64)> {
    let found = root.stat()?;
    Ok((found.st_dev, found.st_ino))
}

/// First bytes of the file that identifies the repository.
fn mark(root: &Root) -> Option<Vec<u8>> {
    let mut mark = Vec::new();
    root.file(MARK).ok()?.take(MARK_LEN).read_to_end(&mut mark).ok()?;
    Some(mark)
}

#[cfg(test)]
mod tests {
    use rustix::fs::Mode;

    use super::super::failed;
    use super::*;

    #[test]
    fn a_mark_that_is_no_file_or_has_no_end_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(MARK);
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        assert_eq!(mark(&Root::open(dir.path()).unwrap()), None);
        std::fs::remove_file(&path).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        assert_eq!(mark(&Root::open(dir.path()).unwrap()), None);
        std::fs::remove_file(&path).unwrap();
        File::create(&path).unwrap().set_len(1 << 40).unwrap();
        assert_eq!(mark(&Root::open(dir.path()).unwrap()).unwrap().len() as u64, MARK_LEN);
    }

    #[test]
    fn only_the_same_repository_is_the_same_home() {
        let dir = tempfile::tempdir().unwrap();
        let (root, away) = (dir.path().join("repo"), dir.path().join("away"));
        std::fs::create_dir(&root).unwrap();
        let home = Home::of(&root).unwrap();
        home.open().unwrap();
        std::fs::rename(&root, &away).unwrap();
        let error = crate::Error::from(failed(&ObjectPath::default(), home.open().unwrap_err()));
        assert_eq!(error.kind(), crate::ErrorKind::Unreachable);
        assert!(error.causes().iter().any(|cause| cause.contains("is its disk mounted?")), "{error:?}");
        std::fs::create_dir(&root).unwrap();
        home.open().unwrap_err();
        std::fs::remove_dir(&root).unwrap();
        std::fs::rename(&away, &root).unwrap();
        std::fs::write(root.join(MARK), "this one").unwrap();
        home.open().unwrap();
        // Mounted again it may have another number; what it says of itself is the same.
        std::fs::rename(&root, &away).unwrap();
        for (says, same) in [("another one", false), ("this one", true)] {
            std::fs::create_dir(&root).unwrap();
            std::fs::write(root.join(MARK), says).unwrap();
            assert_eq!(home.open().is_ok(), same, "{says}");
            std::fs::remove_dir_all(&root).unwrap();
        }
    }
}
