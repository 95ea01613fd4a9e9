//! A file on its way: written under a name of its own, then renamed to where it belongs.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::fs::{
    AtFlags, FlockOperation, Mode, OFlags, fchmod, flock, fstat, fsync, ftruncate, futimens, openat, renameat, unlinkat,
};
use rustix::io::{Errno, Result as SysResult};

use super::target::{Durability, Finish, times};
use crate::clock::Timestamp;
use crate::error::{Error, Result};

/// How often a name is tried before something must be wrong.
pub(super) const RETRIES: usize = 8;

const CREATE: OFlags =
    OFlags::RDWR.union(OFlags::CREATE).union(OFlags::EXCL).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// A file that [`Target::stage`](super::Target::stage) began. Dropped unfinished, it is removed; if the process dies, a
/// later [`Target::sweep`](super::Target::sweep) removes it.
#[derive(Debug)]
pub struct Staged {
    folder: Arc<OwnedFd>,
    /// Empty once the file has its final name.
    temporary: String,
    name: Vec<u8>,
    file: File,
    shown: PathBuf,
    durability: Durability,
}

impl Staged {
    pub(super) fn begin(
        folder: Arc<OwnedFd>,
        name: &[u8],
        size: u64,
        shown: PathBuf,
        durability: Durability,
    ) -> SysResult<Self> {
        for _ in 0..RETRIES {
            let Some((temporary, file)) = create(&folder)? else { continue };
            // A sweep that came between creating and locking has taken the name away.
            if fstat(&file)?.st_nlink == 0 {
                continue;
            }
            let staged = Self { folder, temporary, name: name.to_vec(), file, shown, durability };
            ftruncate(&staged.file, size)?;
            return Ok(staged);
        }
        Err(Errno::EXIST)
    }

    /// The file, to be written at offsets (`FileExt::write_all_at`) from any thread.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Sets mode and time and moves the file to its place, over a file or link that is there.
    ///
    /// # Errors
    /// Conflict, if a folder has the name; exhausted. The file is then removed.
    pub fn finish(mut self, mode: u32, mtime: Timestamp) -> Result<()> {
        let finish = Finish { mode, mtime, durability: self.durability };
        place(&self.folder, &self.temporary, &self.name, &self.file, &finish).map_err(|errno| match errno {
            Errno::ISDIR => Error::conflict("cannot place a file")
                .at(self.shown.display())
                .got("a folder with this name")
                .cure("move it away, or let it be replaced with --overwrite"),
            _ => Error::io("cannot place a file", &self.shown, errno.into()),
        })?;
        self.temporary.clear();
        Ok(())
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if !self.temporary.is_empty() {
            let _ = unlinkat(&self.folder, &*self.temporary, AtFlags::empty());
        }
    }
}

/// Writes, sets and renames: open, flock, write, utimens, chmod, rename, close.
pub(super) fn write_small(folder: &OwnedFd, name: &[u8], bytes: &[u8], finish: &Finish) -> SysResult<()> {
    for _ in 0..RETRIES {
        let Some((temporary, mut file)) = create(folder)? else { continue };
        let written = file
            .write_all(bytes)
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
            .and_then(|()| place(folder, &temporary, name, &file, finish));
        match written {
            Ok(()) => return Ok(()),
            // A sweep that came between creating and locking has taken the name away.
            Err(Errno::NOENT) => {}
            Err(errno) => {
                let _ = unlinkat(folder, &*temporary, AtFlags::empty());
                return Err(errno);
            }
        }
    }
    Err(Errno::NOENT)
}

/// A new file under a name of its own, locked so that a sweep leaves it alone; none if a sweep was quicker.
fn create(folder: &OwnedFd) -> SysResult<Option<(String, File)>> {
    let temporary = super::path::staging_name();
    let file = match openat(folder, &*temporary, CREATE, Mode::RUSR | Mode::WUSR) {
        Ok(file) => File::from(file),
        Err(Errno::EXIST) => return Ok(None),
        Err(errno) => return Err(errno),
    };
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Ok(None),
        // Where a file system has no locks, a sweep cannot lock either, and leaves everything.
        _ => Ok(Some((temporary, file))),
    }
}

/// The mode goes last before the name: a file of a crashed restore can then nearly always be opened by a sweep.
fn place(folder: &OwnedFd, temporary: &str, name: &[u8], file: &File, finish: &Finish) -> SysResult<()> {
    futimens(file, &times(finish.mtime))?;
    fchmod(file, Mode::from_raw_mode(finish.mode & 0o7777))?;
    if finish.durability == Durability::Power {
        fsync(file)?;
    }
    renameat(folder, temporary, folder, name)
}
