//! Staged files: written under a temporary name, then renamed to the final one.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{
    AtFlags, FileType, FlockOperation, Mode, OFlags, Timespec, Timestamps, UTIME_OMIT, fchmod, flock, fstat, fsync,
    ftruncate, futimens, openat, renameat, statat, unlinkat,
};
use rustix::io::{Errno, Result as SysResult};

use crate::clock::Timestamp;
use crate::error::{Error, Result};

/// Maximum number of temporary names to try.
pub(super) const RETRIES: usize = 8;

const CREATE: OFlags =
    OFlags::RDWR.union(OFlags::CREATE).union(OFlags::EXCL).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Mode bits of group and others.
const OTHERS: u32 = 0o077;
/// Flags to open an unfinished file of an earlier process.
const REOPEN: OFlags = OFlags::NOFOLLOW.union(OFlags::NONBLOCK).union(OFlags::CLOEXEC);

/// Events that a placed file survives. In both cases readers see the old or the new file, never a partial one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// Death of this process, at any moment. After a power loss, a file placed in about the last half minute may be empty or
    /// short (renaming does not wait for data: <https://www.kernel.org/doc/html/latest/admin-guide/ext4.html>,
    /// `auto_da_alloc`); another restore repairs it, because existing files are checked first.
    #[default]
    Process,
    /// Also a power loss: each file is synced before it gets its name, and [`Target::flush`](super::Target::flush) syncs the
    /// names.
    Power,
}

/// Last changes to a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Finish {
    pub(super) mode: u32,
    pub(super) mtime: Timestamp,
    pub(super) durability: Durability,
}

/// A file that [`Target::stage`](super::Target::stage) began. Dropped unfinished, it is removed, but for a resumable one; if the
/// process dies, a later [`Target::sweep`](super::Target::sweep) removes it.
#[derive(Debug)]
pub struct Staged {
    folder: Arc<OwnedFd>,
    /// Temporary name; empty once the file has its final name.
    temporary: String,
    name: Vec<u8>,
    file: File,
    shown: PathBuf,
    durability: Durability,
    /// True if the file is kept when dropped unfinished.
    kept: AtomicBool,
}

/// Destination of a file.
pub(super) struct StagedPlace {
    pub(super) folder: Arc<OwnedFd>,
    pub(super) name: Vec<u8>,
    pub(super) shown: PathBuf,
    pub(super) durability: Durability,
}

impl StagedPlace {
    fn staged(self, temporary: String, file: File) -> Staged {
        let Self { folder, name, shown, durability } = self;
        Staged { folder, temporary, name, file, shown, durability, kept: AtomicBool::new(false) }
    }
}

impl Staged {
    pub(super) fn begin(place: StagedPlace, size: u64) -> SysResult<Self> {
        for _ in 0..RETRIES {
            let Some((temporary, file)) = create(&place.folder, super::path::staging_name())? else { continue };
            // A sweep that came between creating and locking has taken the name away.
            if fstat(&file)?.st_nlink == 0 {
                continue;
            }
            let staged = place.staged(temporary, file);
            ftruncate(&staged.file, size)?;
            return Ok(staged);
        }
        Err(Errno::EXIST)
    }

    /// As [`begin`](Self::begin), under the name that [`resume`](Self::resume) searches, unless another process uses it.
    pub(super) fn begin_resumable(place: StagedPlace, size: u64) -> SysResult<Self> {
        let temporary = super::path::resumable_name(&place.name);
        match create(&place.folder, temporary)? {
            Some((temporary, file)) if is_at(&place.folder, temporary.as_str(), &file)? => {
                let staged = place.staged(temporary, file);
                ftruncate(&staged.file, size)?;
                staged.keep();
                Ok(staged)
            }
            _ => Self::begin(place, size),
        }
    }

    /// Continues the unfinished file of an earlier process, unless another one writes it.
    pub(super) fn resume(place: StagedPlace, size: u64) -> SysResult<Option<Self>> {
        let temporary = super::path::resumable_name(&place.name);
        let lock = FlockOperation::NonBlockingLockExclusive;
        let Some(file) = reopen(&place.folder, &temporary, OFlags::RDWR, lock)? else { return Ok(None) };
        let staged = place.staged(temporary, file);
        ftruncate(&staged.file, size)?;
        staged.keep();
        Ok(Some(staged))
    }

    /// Opens the unfinished file of an earlier process for `name` in `folder` for reading; locked while it is open.
    pub(super) fn unfinished(folder: &OwnedFd, name: &[u8]) -> SysResult<Option<File>> {
        let lock = FlockOperation::NonBlockingLockShared;
        reopen(folder, &super::path::resumable_name(name), OFlags::RDONLY, lock)
    }

    /// Keeps it when it is dropped unfinished. Only once it has its size: a shorter file is useless.
    fn keep(&self) {
        self.kept.store(true, Ordering::Release);
    }

    /// Removes it when it is dropped unfinished, instead of keeping it to be resumed.
    pub fn discard(&self) {
        self.kept.store(false, Ordering::Release);
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
                .help("move it away, or let it be replaced with --overwrite"),
            _ => Error::io("cannot place a file", &self.shown, errno.into()),
        })?;
        self.temporary.clear();
        Ok(())
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if !self.temporary.is_empty() && !self.kept.load(Ordering::Acquire) {
            let _ = unlinkat(&self.folder, &*self.temporary, AtFlags::empty());
        }
    }
}

/// Writes, sets and renames: open, flock, write, utimens, chmod, rename, close.
pub(super) fn write_small(folder: &OwnedFd, name: &[u8], bytes: &[u8], finish: &Finish) -> SysResult<()> {
    for _ in 0..RETRIES {
        let Some((temporary, mut file)) = create(folder, super::path::staging_name())? else { continue };
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

/// A new file under the name `temporary`, locked so that a sweep leaves it alone; none if a sweep was quicker, or the name is
/// taken.
fn create(folder: &OwnedFd, temporary: String) -> SysResult<Option<(String, File)>> {
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

/// A regular file of this user at `name`, locked; none if there is none, or it cannot be locked.
fn reopen(folder: &OwnedFd, name: &str, access: OFlags, lock: FlockOperation) -> SysResult<Option<File>> {
    let file = match openat(folder, name, access | REOPEN, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(Errno::NOENT | Errno::LOOP | Errno::ACCESS | Errno::NXIO | Errno::ISDIR) => return Ok(None),
        Err(errno) => return Err(errno),
    };
    let stat = fstat(&file)?;
    // A file with a second hard link is no staged file.
    let ours = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
        && stat.st_uid == rustix::process::geteuid().as_raw()
        && stat.st_nlink == 1
        && stat.st_mode & OTHERS == 0;
    // The holder of the lock may have renamed it meanwhile: then it is a finished file.
    Ok((ours && flock(&file, lock).is_ok() && is_at(folder, name, &file)?).then_some(file))
}

/// True if `name` still refers to `file`; under the lock this does not change.
pub(super) fn is_at(folder: &OwnedFd, name: impl rustix::path::Arg, file: &File) -> SysResult<bool> {
    let open = fstat(file)?;
    match statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(named) => Ok((named.st_dev, named.st_ino) == (open.st_dev, open.st_ino)),
        Err(Errno::NOENT) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Sets time and mode, and renames. The mode is set last, so that a sweep can nearly always open files of a crashed restore.
fn place(folder: &OwnedFd, temporary: &str, name: &[u8], file: &File, finish: &Finish) -> SysResult<()> {
    futimens(file, &times(finish.mtime))?;
    fchmod(file, Mode::from_raw_mode(finish.mode & 0o7777))?;
    if finish.durability == Durability::Power {
        fsync(file)?;
    }
    renameat(folder, temporary, folder, name)
}

/// Modification at `mtime`, access as it is.
pub(super) fn times(mtime: Timestamp) -> Timestamps {
    Timestamps {
        last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        last_modification: Timespec {
            tv_sec: mtime.0.div_euclid(1_000_000_000),
            tv_nsec: mtime.0.rem_euclid(1_000_000_000),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{FileExt, PermissionsExt as _, symlink};

    use super::super::path::resumable_name;
    use super::super::{Durability, Target};
    use crate::clock::Timestamp;

    fn target() -> (tempfile::TempDir, Target) {
        let root = tempfile::tempdir().unwrap();
        let target = Target::open(root.path(), Durability::Process).unwrap();
        (root, target)
    }

    fn count(root: &tempfile::TempDir) -> usize {
        fs::read_dir(root.path()).unwrap().count()
    }

    #[test]
    fn what_was_left_is_taken_over_and_finished() {
        let (root, target) = target();
        let staged = target.stage_resumable(b"model", 6).unwrap();
        staged.file().write_all_at(b"abc", 0).unwrap();
        assert!(target.unfinished(b"model").unwrap().is_none(), "it is being written");
        drop(staged);
        assert_eq!(count(&root), 1, "it stays");
        assert!(target.unfinished(b"model").unwrap().is_some());
        let staged = target.resume(b"model", 6).unwrap().unwrap();
        assert!(target.resume(b"model", 6).unwrap().is_none(), "by one at a time");
        assert_eq!(target.sweep().unwrap(), 0);
        staged.file().write_all_at(b"def", 3).unwrap();
        staged.finish(0o600, Timestamp(0)).unwrap();
        assert_eq!(fs::read(root.path().join("model")).unwrap(), b"abcdef");
        assert_eq!(count(&root), 1);
        assert!(target.resume(b"model", 6).unwrap().is_none());
    }

    #[test]
    fn what_is_discarded_or_swept_is_gone() {
        let (root, target) = target();
        let staged = target.stage_resumable(b"model", 6).unwrap();
        staged.discard();
        drop(staged);
        assert_eq!(count(&root), 0);
        drop(target.stage_resumable(b"model", 6).unwrap());
        assert_eq!((target.sweep().unwrap(), count(&root)), (1, 0));
    }

    #[test]
    fn a_file_larger_than_any_file_system_leaves_nothing() {
        let (root, target) = target();
        assert!(target.stage_resumable(b"model", u64::MAX).is_err());
        assert!(target.stage(b"model", u64::MAX).is_err());
        assert_eq!(count(&root), 0);
        drop(target.stage_resumable(b"model", 6).unwrap());
        assert!(target.resume(b"model", u64::MAX).is_err());
        assert_eq!(count(&root), 0);
    }

    #[test]
    fn two_who_write_one_file_do_not_share_it() {
        let (root, target) = target();
        let first = target.stage_resumable(b"model", 1).unwrap();
        let second = target.stage_resumable(b"model", 1).unwrap();
        first.file().write_all_at(b"1", 0).unwrap();
        second.file().write_all_at(b"2", 0).unwrap();
        first.finish(0o600, Timestamp(0)).unwrap();
        assert_eq!(fs::read(root.path().join("model")).unwrap(), b"1");
        second.finish(0o600, Timestamp(0)).unwrap();
        assert_eq!(fs::read(root.path().join("model")).unwrap(), b"2");
    }

    #[test]
    fn a_planted_link_or_folder_is_not_taken_over() {
        let (root, target) = target();
        fs::write(root.path().join("precious"), "precious").unwrap();
        let temporary = root.path().join(resumable_name(b"model"));
        symlink("precious", &temporary).unwrap();
        assert!(target.unfinished(b"model").unwrap().is_none() && target.resume(b"model", 1).unwrap().is_none());
        target.stage_resumable(b"model", 1).unwrap().finish(0o600, Timestamp(0)).unwrap();
        assert_eq!(fs::read(root.path().join("precious")).unwrap(), b"precious");
        fs::remove_file(&temporary).unwrap();
        fs::set_permissions(root.path().join("precious"), fs::Permissions::from_mode(0o600)).unwrap();
        fs::hard_link(root.path().join("precious"), &temporary).unwrap();
        assert!(target.unfinished(b"model").unwrap().is_none() && target.resume(b"model", 1).unwrap().is_none());
        assert_eq!(fs::read(root.path().join("precious")).unwrap(), b"precious");
        fs::remove_file(&temporary).unwrap();
        fs::create_dir(&temporary).unwrap();
        assert!(target.unfinished(b"model").unwrap().is_none() && target.resume(b"model", 1).unwrap().is_none());
    }
}
