//! Check that a directory is still the one that was opened.
//!
//! An unmounted disk or share leaves an empty folder, or none. Writes to that folder would succeed, and be lost or hidden once
//! the disk is mounted again; reads would show an empty repository.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use object_store::Error;
use object_store::path::Path as ObjectPath;
use rustix::fs::{Mode, OFlags};
use thiserror::Error as ThisError;

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

/// Error: an entry in a repository that is neither a file nor a folder.
#[derive(Clone, Debug, ThisError, PartialEq, Eq)]
#[error("{} is a link or a device, not a file or folder of the repository: remove it, or mount there what it leads to", .0.display())]
struct UnexpectedEntry(PathBuf);

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
        let known = HomeIdentity { identity: identity(root)?, mark: mark(root) };
        Ok(Self(Arc::new(Inner { root: root.to_owned(), known: Mutex::new(known) })))
    }

    /// Checks that the directory is unchanged.
    ///
    /// # Errors
    /// Generic, if not.
    pub(super) async fn check(&self) -> object_store::Result<()> {
        let home = self.clone();
        let checked = tokio::task::spawn_blocking(move || home.is_there()).await;
        if checked.map_err(|source| generic(Box::new(source)))? {
            return Ok(());
        }
        Err(generic(Box::new(DirectoryMissing(self.0.root.clone()))))
    }

    /// As [`check`](Self::check), and checks that neither `location` nor a folder above it is a symbolic link.
    ///
    /// # Errors
    /// Generic, if not.
    pub(super) async fn check_at(&self, location: &ObjectPath) -> object_store::Result<()> {
        self.check().await?;
        let (root, location) = (self.0.root.clone(), location.clone());
        let checked = tokio::task::spawn_blocking(move || plain(&root, &location)).await;
        checked.map_err(|source| generic(Box::new(source)))?
    }

    fn is_there(&self) -> bool {
        let Ok(identity) = identity(&self.0.root) else { return false };
        let mut known = self.0.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.identity == identity {
            // A repository may have been created in it meanwhile.
            known.mark = known.mark.take().or_else(|| mark(&self.0.root));
            return true;
        }
        let same = known.mark.is_some() && known.mark == mark(&self.0.root);
        if same {
            known.identity = identity;
        }
        same
    }
}

/// Checks that `location` below `root` is a file or folder, or does not exist. Another writer of a shared repository, or the
/// author of an unpacked one, could have put a link to other files there.
///
/// # Errors
/// Generic, if it is anything else, or a folder above it is a link.
pub(super) fn plain(root: &Path, location: &ObjectPath) -> object_store::Result<()> {
    let mut path = root.to_owned();
    for part in location.parts() {
        path.push(part.as_ref());
        let Ok(found) = std::fs::symlink_metadata(&path) else { return Ok(()) };
        if !found.is_file() && !found.is_dir() {
            return Err(generic(Box::new(UnexpectedEntry(path))));
        }
    }
    Ok(())
}

/// The repository in whose folder `path` lies, or which it is. What does not exist yet lies where its parent does.
pub(crate) fn enclosing_repository(path: &Path) -> Option<PathBuf> {
    let path = std::path::absolute(path).ok()?;
    let there = path.ancestors().find_map(|path| path.canonicalize().ok())?;
    let is_repository = |folder: &&Path| mark(folder).is_some_and(|mark| mark.starts_with(&MAGIC));
    there.ancestors().find(is_repository).map(Path::to_owned)
}

/// Opens the object at `location` below `root` for reading.
///
/// # Errors
/// Errors of the file system; damaged, if it is no regular file.
pub(crate) fn open_object(root: &Path, location: &ObjectPath) -> error::Result<File> {
    let path = root.join(location.as_ref());
    let strange = |source| error::Error::damaged("object is not a plain file").at(location).source(source);
    plain(root, location).map_err(strange)?;
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = rustix::fs::open(&path, flags, Mode::empty()).map_err(io::Error::from);
    let file = opened.map(File::from).map_err(|source| error::Error::io("cannot open an object", &path, source))?;
    let found = file.metadata().map_err(|source| error::Error::io("cannot look at an object", &path, source))?;
    if found.is_file() { Ok(file) } else { Err(error::Error::damaged("object is not a plain file").at(location)) }
}

fn identity(root: &Path) -> io::Result<(u64, u64)> {
    let found = std::fs::metadata(root)?;
    Ok((found.dev(), found.ino()))
}

/// First bytes of the file that identifies the repository. Links, pipes and devices are refused, because reading them could hang.
fn mark(root: &Path) -> Option<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(root.join(MARK), flags, Mode::empty()).ok()?);
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let mut mark = Vec::new();
    file.take(MARK_LEN).read_to_end(&mut mark).ok()?;
    Some(mark)
}

fn generic(source: Box<dyn std::error::Error + Send + Sync>) -> Error {
    Error::Generic { store: "directory", source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_that_is_no_file_or_has_no_end_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(MARK);
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        assert_eq!(mark(dir.path()), None);
        std::fs::remove_file(&path).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        assert_eq!(mark(dir.path()), None);
        std::fs::remove_file(&path).unwrap();
        File::create(&path).unwrap().set_len(1 << 40).unwrap();
        assert_eq!(mark(dir.path()).unwrap().len() as u64, MARK_LEN);
    }

    #[tokio::test]
    async fn only_the_same_repository_is_the_same_home() {
        let dir = tempfile::tempdir().unwrap();
        let (root, away) = (dir.path().join("repo"), dir.path().join("away"));
        std::fs::create_dir(&root).unwrap();
        let home = Home::of(&root).unwrap();
        home.check().await.unwrap();
        std::fs::rename(&root, &away).unwrap();
        let error = crate::Error::from(home.check().await.unwrap_err());
        assert_eq!(error.kind(), crate::ErrorKind::Unreachable);
        assert!(error.causes().iter().any(|cause| cause.contains("is its disk mounted?")), "{error:?}");
        std::fs::create_dir(&root).unwrap();
        home.check().await.unwrap_err();
        std::fs::remove_dir(&root).unwrap();
        std::fs::rename(&away, &root).unwrap();
        std::fs::write(root.join(MARK), "this one").unwrap();
        home.check().await.unwrap();
        // Mounted again it may have another number; what it says of itself is the same.
        std::fs::rename(&root, &away).unwrap();
        for (says, same) in [("another one", false), ("this one", true)] {
            std::fs::create_dir(&root).unwrap();
            std::fs::write(root.join(MARK), says).unwrap();
            assert_eq!(home.check().await.is_ok(), same, "{says}");
            std::fs::remove_dir_all(&root).unwrap();
        }
    }
}
