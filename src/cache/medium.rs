//! Interface for the disk operations of a cache: tests simulate a power loss between any two of them.

use std::fmt;
use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{AtFlags, CWD, FallocateFlags, Mode, OFlags, fallocate, fsync, openat, renameat, statvfs, unlinkat};
use rustix::io::{Errno, pwritev, retry_on_intr};

use super::pins;
use crate::error::Result;
use crate::tree::OwnFolder;

/// Storage of a cache.
pub(super) trait Medium: fmt::Debug + Send + Sync {
    /// Opens a file for reading and writing; `create` creates an empty one in place of any other.
    fn open(&self, path: &Path, create: bool) -> io::Result<Arc<dyn MediumFile>>;
    /// Names of files and their lengths.
    fn names(&self, folder: &Path) -> io::Result<Vec<(String, u64)>>;
    /// Renames a file atomically.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Syncs a folder: its names then survive a power loss.
    fn sync_folder(&self, folder: &Path) -> io::Result<()>;
    /// Bytes that can still be written to the disk.
    fn available(&self, folder: &Path) -> io::Result<u64>;
}

/// One file of it.
pub(super) trait MediumFile: fmt::Debug + Send + Sync {
    /// Fills `buffer` from byte `at`.
    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()>;
    /// Writes all of `parts`, one after the other, from byte `at` on.
    fn write_at(&self, parts: &[&[u8]], at: u64) -> io::Result<()>;
    /// Sets the length of the file to `len` bytes, and reserves the disk space if the file system supports it.
    fn allocate(&self, len: u64) -> io::Result<()>;
    /// Syncs the file: written bytes then survive a power loss.
    fn sync(&self) -> io::Result<()>;
    /// Length in bytes.
    fn len(&self) -> io::Result<u64>;
}

/// The local file system.
#[derive(Debug)]
pub(super) struct Disk {
    /// Folder of the pins. Others may be able to put a link in its place: it is opened once.
    pins: OwnFolder,
}

impl Disk {
    /// Opens the folder at `dir`, and that of the pins in it.
    ///
    /// # Errors
    /// Denied, if others may have planted that of the pins; errors of the file system.
    pub(super) fn open(dir: &Path) -> Result<Self> {
        Ok(Self { pins: OwnFolder::open(&pins::folder(dir))? })
    }

    /// Open folder of `path`, and its path from there.
    fn place<'p>(&self, path: &'p Path) -> (BorrowedFd<'_>, &'p Path) {
        match path.strip_prefix(self.pins.path()) {
            Ok(name) if !name.as_os_str().is_empty() => (self.pins.as_fd(), name),
            _ => (CWD, path),
        }
    }
}

/// Opens a file of the cache for reading and writing, or creates it in place of any other. `path` is from `folder`. Whoever may write to
/// the cache's folder can put a link to a file elsewhere there, which must not be written: links are not followed, and an existing file
/// must be this user's and have no other name.
///
/// # Errors
/// Permission denied, if it is another's; errors of the file system.
pub(super) fn open_own(folder: BorrowedFd<'_>, path: &Path, create: bool) -> io::Result<File> {
    let mut flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    flags.set(OFlags::CREATE | OFlags::EXCL, create);
    let mode = Mode::RUSR | Mode::WUSR;
    let opened = match openat(folder, path, flags, mode) {
        Err(Errno::EXIST) if create => {
            unlinkat(folder, path, AtFlags::empty())?;
            openat(folder, path, flags, mode)
        }
        opened => opened,
    };
    let file = File::from(opened?);
    let found = file.metadata()?;
    if found.is_file() && found.uid() == rustix::process::geteuid().as_raw() && found.nlink() <= 1 {
        return Ok(file);
    }
    Err(io::Error::new(io::ErrorKind::PermissionDenied, "it is another user's, or has another name"))
}

impl Medium for Disk {
    fn open(&self, path: &Path, create: bool) -> io::Result<Arc<dyn MediumFile>> {
        let (folder, path) = self.place(path);
        Ok(Arc::new(open_own(folder, path, create)?))
    }

    fn names(&self, folder: &Path) -> io::Result<Vec<(String, u64)>> {
        if folder == self.pins.path() {
            return self.pins.files();
        }
        let mut names = Vec::new();
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            let metadata = entry.metadata()?;
            // A file with a name that is not UTF-8 is not part of the cache.
            if let (true, Ok(name)) = (metadata.is_file(), entry.file_name().into_string()) {
                names.push((name, metadata.len()));
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let ((from_folder, from), (to_folder, to)) = (self.place(from), self.place(to));
        Ok(renameat(from_folder, from, to_folder, to)?)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let (folder, path) = self.place(path);
        Ok(unlinkat(folder, path, AtFlags::empty())?)
    }

    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        if folder == self.pins.path() {
            return Ok(fsync(&self.pins)?);
        }
        File::open(folder)?.sync_all()
    }

    fn available(&self, folder: &Path) -> io::Result<u64> {
        let found = statvfs(folder)?;
        Ok(found.f_bavail.saturating_mul(found.f_frsize))
    }
}

impl MediumFile for File {
    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        self.read_exact_at(buffer, at)
    }

    /// Usually one system call: a page that is written completely need not be read first.
    fn write_at(&self, parts: &[&[u8]], mut at: u64) -> io::Result<()> {
        let slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
        let mut written = retry_on_intr(|| pwritev(self, &slices, at))?;
        for part in parts {
            let done = written.min(part.len());
            self.write_all_at(&part[done..], at + done as u64)?;
            written -= done;
            at += part.len() as u64;
        }
        Ok(())
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        match fallocate(self, FallocateFlags::empty(), 0, len) {
            // NFS before 4.2 and ZFS: a full disk is only noticed by a write.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => self.set_len(len),
            done => Ok(done?),
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }
}
