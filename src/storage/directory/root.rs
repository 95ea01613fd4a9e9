//! Files and folders of a repository in a directory, opened folder by folder from its root.
//!
//! Another writer of a shared repository may exchange a folder for a link at any moment. So no path is used after a check of it: each
//! folder is opened in the one before, no link is followed, and files are used by their name in the open folder.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use object_store::path::Path as Key;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, fstat, fsync, mkdirat, open, openat, statat, unlinkat};
use rustix::io::Errno;
use thiserror::Error as ThisError;

use super::modes::Modes;
use crate::error::Error;

/// Flags to open a folder for entries by name. They need no permission to list it.
const ENTER: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// Flags to list or sync a folder.
pub(super) const READ_FOLDER: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// Flags to open a file. A FIFO does not block.
const FILE: OFlags = OFlags::NOFOLLOW.union(OFlags::NONBLOCK).union(OFlags::NOCTTY).union(OFlags::CLOEXEC);

/// Error: an entry in a repository that is neither a file nor a folder.
#[derive(Clone, Debug, ThisError, PartialEq, Eq)]
#[error("{} is a link, pipe, socket or device, not a file or folder of the repository: remove it, or mount there what it leads to", .0.display())]
struct UnexpectedEntry(PathBuf);

/// Root of a repository's directory. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct Root {
    folder: Arc<OwnedFd>,
    path: PathBuf,
}

/// Name in an open folder: of a file, or of what may become one.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) folder: OwnedFd,
    pub(super) name: String,
    /// Path, for display.
    pub(super) path: PathBuf,
}

impl Root {
    /// Opens the directory at `path`. A link to one is followed: the path is the user's choice.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let folder = open(path, ENTER.difference(OFlags::NOFOLLOW), Mode::empty())?;
        Ok(Self { folder: Arc::new(folder), path: path.to_owned() })
    }

    /// Metadata.
    pub(super) fn stat(&self) -> io::Result<Stat> {
        Ok(fstat(&self.folder)?)
    }

    /// Opens a file in the root for reading, if it is one.
    pub(super) fn file(&self, name: &str) -> io::Result<File> {
        self.place(&Key::from(name))?.read()
    }

    /// Opens the folder `key`, to list it.
    ///
    /// # Errors
    /// Not found; an unexpected entry, for a link on the way; errors of the file system.
    pub(super) fn folder(&self, key: &Key) -> io::Result<OwnedFd> {
        let (folder, path) = self.enter(key.parts().map(|part| part.as_ref().to_owned()))?;
        openat(&folder, c".", READ_FOLDER, Mode::empty()).map_err(|errno| unexpected(errno, &folder, ".", &path))
    }

    /// Place of the object `key`.
    ///
    /// # Errors
    /// As for [`Root::folder`].
    pub(super) fn place(&self, key: &Key) -> io::Result<Place> {
        let mut parts: Vec<String> = key.parts().map(|part| part.as_ref().to_owned()).collect();
        let name = parts.pop().ok_or(io::ErrorKind::IsADirectory)?;
        let (folder, path) = self.enter(parts.into_iter())?;
        Ok(Place { folder, path: path.join(&name), name })
    }

    /// Opens the object `key` for reading.
    ///
    /// # Errors
    /// Not found, also for a folder; damaged ([`Error`]), for anything else that is no file, or no folder on the way; errors of
    /// the file system.
    pub(super) fn object(&self, key: &Key) -> io::Result<(File, PathBuf)> {
        let opened = self.place(key).and_then(|place| Ok((place.read()?, place.path)));
        opened.map_err(|source| {
            let is_unexpected = source.get_ref().and_then(|inner| inner.downcast_ref::<UnexpectedEntry>()).is_some();
            if !is_unexpected && source.kind() != io::ErrorKind::NotADirectory {
                return source;
            }
            let damaged = Error::damaged("object is not a plain file").at(key).source(source);
            io::Error::other(damaged.help("`towline verify` tells which names it affects"))
        })
    }

    /// As [`Root::place`]; creates lacking folders, durably, with `modes`.
    pub(super) fn make_place(&self, key: &Key, modes: Modes) -> io::Result<Place> {
        let mut parts: Vec<String> = key.parts().map(|part| part.as_ref().to_owned()).collect();
        let name = parts.pop().ok_or(io::ErrorKind::IsADirectory)?;
        let (mut folder, mut path) = (self.own()?, self.path.clone());
        for part in parts {
            path.push(&part);
            folder = match openat(&folder, &part, ENTER, Mode::empty()) {
                Err(Errno::NOENT) => {
                    make_folder(&folder, &part, modes).map_err(|errno| unexpected(errno, &folder, &part, &path))?
                }
                entered => entered.map_err(|errno| unexpected(errno, &folder, &part, &path))?,
            };
        }
        path.push(&name);
        Ok(Place { folder, name, path })
    }

    fn enter(&self, parts: impl Iterator<Item = String>) -> io::Result<(OwnedFd, PathBuf)> {
        let (mut folder, mut path) = (self.own()?, self.path.clone());
        for part in parts {
            path.push(&part);
            let entered = openat(&folder, &part, ENTER, Mode::empty());
            folder = entered.map_err(|errno| unexpected(errno, &folder, &part, &path))?;
        }
        Ok((folder, path))
    }

    fn own(&self) -> io::Result<OwnedFd> {
        self.folder.try_clone()
    }
}

impl Place {
    /// Opens the file for reading.
    ///
    /// # Errors
    /// Not found, also for a folder; an unexpected entry, if it is anything else; errors of the file system.
    pub(super) fn read(&self) -> io::Result<File> {
        let opened = openat(&self.folder, &self.name, OFlags::RDONLY | FILE, Mode::empty());
        let file = File::from(opened.map_err(|errno| unexpected(errno, &self.folder, &self.name, &self.path))?);
        let kind = file.metadata()?.file_type();
        if kind.is_dir() {
            return Err(io::ErrorKind::NotFound.into());
        }
        if kind.is_file() { Ok(file) } else { Err(io::Error::other(UnexpectedEntry(self.path.clone()))) }
    }

    /// Creates the file `name` beside it, which must not exist.
    pub(super) fn create_beside(&self, name: &str, mode: u32) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | FILE;
        Ok(File::from(openat(&self.folder, name, flags, Mode::from_raw_mode(mode))?))
    }

    /// Removes the file.
    ///
    /// # Errors
    /// Not found; an unexpected entry, if it is no file; errors of the file system.
    pub(super) fn remove(&self) -> io::Result<()> {
        let found = statat(&self.folder, &self.name, AtFlags::SYMLINK_NOFOLLOW)?;
        match FileType::from_raw_mode(found.st_mode) {
            FileType::RegularFile => Ok(unlinkat(&self.folder, &self.name, AtFlags::empty())?),
            FileType::Directory => Err(io::ErrorKind::NotFound.into()),
            _ => Err(io::Error::other(UnexpectedEntry(self.path.clone()))),
        }
    }

    /// Syncs the folder: its names then survive a power loss.
    pub(super) fn sync_folder(&self) -> io::Result<()> {
        sync(&self.folder)
    }
}

/// Creates a folder in `parent` with the mode of the repository, whatever the umask is.
fn make_folder(parent: &OwnedFd, name: &str, modes: Modes) -> Result<OwnedFd, Errno> {
    let is_new = match mkdirat(parent, name, Mode::RWXU) {
        Ok(()) => true,
        // Another writer created it first.
        Err(Errno::EXIST) => false,
        Err(errno) => return Err(errno),
    };
    if is_new {
        let made = openat(parent, name, READ_FOLDER, Mode::empty())?;
        if fstat(&made)?.st_uid == rustix::process::geteuid().as_raw() {
            modes.set_open_folder(&made)?;
        }
    }
    fsync(openat(parent, c".", READ_FOLDER, Mode::empty())?)?;
    openat(parent, name, ENTER, Mode::empty())
}

fn sync(folder: &OwnedFd) -> io::Result<()> {
    Ok(fsync(openat(folder, c".", READ_FOLDER, Mode::empty())?)?)
}

/// The error of an open, or that a link or device has the name.
fn unexpected(errno: Errno, folder: &OwnedFd, name: &str, path: &Path) -> io::Error {
    // With `NOFOLLOW` a link is ELOOP, with `DIRECTORY` too it is ENOTDIR; a socket is ENXIO (open(2)).
    if matches!(errno, Errno::LOOP | Errno::NOTDIR | Errno::NXIO)
        && let Ok(found) = statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)
        && !matches!(FileType::from_raw_mode(found.st_mode), FileType::RegularFile | FileType::Directory)
    {
        return io::Error::other(UnexpectedEntry(path.to_owned()));
    }
    errno.into()
}
