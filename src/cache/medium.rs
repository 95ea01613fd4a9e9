//! Interface for the disk operations of a cache: tests simulate a power loss between any two of them.

use std::fmt;
use std::fs::File;
use std::io::{self, IoSlice};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{FallocateFlags, OFlags, fallocate, statvfs};
use rustix::io::{Errno, pwritev, retry_on_intr};

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
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Disk;

/// Opens a file of the cache for reading and writing, or creates it in place of any other. Whoever may write to the folder can put a
/// link to a file elsewhere there, which must not be written: links are not followed, and an existing file must be this user's and have
/// no other name.
///
/// # Errors
/// Permission denied, if it is another's; errors of the file system.
pub(super) fn open_own(path: &Path, create: bool) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(true).create_new(create).mode(0o600).custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
    let file = match options.open(path) {
        Err(error) if create && error.kind() == io::ErrorKind::AlreadyExists => {
            std::fs::remove_file(path)?;
            options.open(path)?
        }
        opened => opened?,
    };
    let found = file.metadata()?;
    if found.is_file() && found.uid() == rustix::process::geteuid().as_raw() && found.nlink() <= 1 {
        return Ok(file);
    }
    Err(io::Error::new(io::ErrorKind::PermissionDenied, "it is another user's, or has another name"))
}

impl Medium for Disk {
    fn open(&self, path: &Path, create: bool) -> io::Result<Arc<dyn MediumFile>> {
        Ok(Arc::new(open_own(path, create)?))
    }

    fn names(&self, folder: &Path) -> io::Result<Vec<(String, u64)>> {
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
        std::fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_file(path)
    }

    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
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
