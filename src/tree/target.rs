//! Target of a restore. No operation can reach outside of it.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, chmodat, fchmod, fstat, futimens, mkdirat, open, openat, readlinkat, renameat,
    statat, symlinkat, syncfs, unlinkat, utimensat,
};
use rustix::io::{Errno, Result as SysResult};
use tokio_util::sync::CancellationToken;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::folders::Folders;
use super::path::{check_path, staging_name};
use super::rules::InForce;
use super::staged::{Durability, Finish, RETRIES, Staged, StagedPlace, times, write_small};
use super::stat::{Stat, WalkEntry, WalkKind, kind_of};
use super::walk::{Scan, identity, open_file};
use crate::budget::{Budget, GrowingMemory};
use crate::clock::Timestamp;
use crate::error::{Error, Result};

/// Object at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Present {
    /// Kind; none for a socket, pipe or device.
    pub kind: Option<WalkKind>,
    /// Metadata.
    pub stat: Stat,
}

/// An entry of a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetEntry {
    /// Path.
    pub path: Vec<u8>,
    /// Kind; none for a socket, pipe or device.
    pub kind: Option<WalkKind>,
    /// Bytes in it, if it is a file.
    pub bytes: u64,
}

/// Entries of a target that may be removed.
#[derive(Debug)]
pub struct TargetEntries {
    /// In byte order of the paths.
    pub list: Vec<TargetEntry>,
    /// Number of entries that ignore files leave out; the content of a folder does not count.
    pub ignored: u64,
    /// Memory that they count as.
    pub memory: Option<GrowingMemory>,
}

/// Flags that open a folder.
const FOLDER_FLAGS: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Creates the folder `name` in `parent` and opens it, links not followed; none if there is something of that name.
fn create_folder(parent: &Path, name: &OsStr) -> SysResult<Option<OwnedFd>> {
    let parent = open(parent, FOLDER_FLAGS, Mode::empty())?;
    match mkdirat(&parent, name, Mode::RWXU | Mode::RWXG | Mode::RWXO) {
        Ok(()) => openat(&parent, name, FOLDER_FLAGS | OFlags::NOFOLLOW, Mode::empty()).map(Some),
        Err(Errno::EXIST) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// A folder that a tree is restored to. It is thread-safe.
///
/// Paths are checked ([`check_path`]) and resolved one segment at a time, refusing symbolic links, from the folder that
/// was opened: neither `..` nor a link, planted before or meanwhile, leads out of it. Only where a method says so may a
/// path be empty: the folder itself.
#[derive(Debug)]
pub struct Target {
    pub(super) folders: Folders,
    durability: Durability,
    /// Mode of the folder before it was opened, if it existed.
    found_mode: Option<u32>,
    /// Cancelled to refuse further changes.
    pub(super) stop: CancellationToken,
    /// Counts it as long as it may be changed.
    _counted: Option<TaskTrackerToken>,
}

impl Target {
    /// Opens the folder `dest` (a link to one is followed); creates it and its parents if needed. A folder that takes its place while it
    /// is created counts as one that was there before.
    ///
    /// # Errors
    /// Conflict, if a file is in the way; denied.
    pub fn open(dest: &Path, durability: Durability) -> Result<Self> {
        let what = "cannot open the folder to restore to";
        let in_the_way = |error: std::io::Error| match error.kind() {
            std::io::ErrorKind::AlreadyExists | std::io::ErrorKind::NotADirectory => Error::conflict(what)
                .at(dest.display())
                .expected("a folder")
                .got("a file on the way")
                .help("name another place, or move the file away"),
            _ => Error::io(what, dest, error),
        };
        let fault = |errno: Errno| in_the_way(errno.into());
        let created = match (dest.is_dir(), dest.file_name()) {
            (false, Some(name)) => {
                let parent = dest.parent().filter(|parent| !parent.as_os_str().is_empty());
                let parent = parent.unwrap_or_else(|| Path::new("."));
                std::fs::create_dir_all(parent).map_err(in_the_way)?;
                create_folder(parent, name).map_err(fault)?
            }
            _ => None,
        };
        let is_new = created.is_some();
        let base = match created {
            Some(base) => base,
            None => open(dest, FOLDER_FLAGS, Mode::empty()).map_err(|errno| match errno {
                // A link to nothing.
                Errno::NOENT => in_the_way(Errno::EXIST.into()),
                errno => fault(errno),
            })?,
        };
        let found = fstat(&base).map_err(fault)?;
        // Users who may write to the parent can exchange what was created there.
        let is_own = is_new && found.st_uid == rustix::process::geteuid().as_raw();
        let found_mode = (!is_own).then(|| Stat::from_raw(&found).mode);
        let (folders, stop) = (Folders::new(base, dest.to_owned()), CancellationToken::new());
        Ok(Self { folders, durability, found_mode, stop, _counted: None })
    }

    /// Ends each method that changes something, or lists entries, once `stop` is cancelled: it completes at most the change to one
    /// entry that it has begun. `counted` lives until this is dropped.
    #[must_use]
    pub(crate) fn until(self, stop: CancellationToken, counted: TaskTrackerToken) -> Self {
        Self { stop, _counted: Some(counted), ..self }
    }

    /// Refuses a change after a stop.
    ///
    /// # Errors
    /// Cancelled.
    pub(crate) fn go_on(&self) -> Result<()> {
        if self.stop.is_cancelled() { Err(Error::cancelled("interrupted")) } else { Ok(()) }
    }

    /// Permission bits of the folder before it was opened; none if it was created.
    #[must_use]
    pub fn found_mode(&self) -> Option<u32> {
        self.found_mode
    }

    /// Opens the folder `dest` as [`Target::open`] does, if it exists; creates nothing.
    ///
    /// # Errors
    /// Conflict, if a file is there, or on the way; denied.
    pub fn there(dest: &Path, durability: Durability) -> Result<Option<Self>> {
        match dest.metadata() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            _ => Self::open(dest, durability).map(Some),
        }
    }

    /// Entry at `path`, links not followed; also none if a parent is missing or is no folder. The path may be empty.
    pub fn kind_of(&self, path: &[u8]) -> Result<Option<Present>> {
        let look = || -> SysResult<Present> {
            if path.is_empty() {
                let stat = Stat::from_raw(&fstat(self.folders.base())?);
                return Ok(Present { kind: Some(WalkKind::Folder), stat });
            }
            let (parent, name) = self.folders.parent(path)?;
            let raw = statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
            let kind = match kind_of(&raw) {
                FileType::RegularFile => Some(WalkKind::File),
                FileType::Directory => Some(WalkKind::Folder),
                FileType::Symlink => {
                    Some(WalkKind::Symlink { target: readlinkat(&parent, name, Vec::new())?.into_bytes() })
                }
                _ => None,
            };
            Ok(Present { kind, stat: Stat::from_raw(&raw) })
        };
        check_or_root(path)?;
        match look() {
            Ok(present) => Ok(Some(present)),
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
            Err(errno) => Err(self.folders.fault("cannot look at what is there", path, errno)),
        }
    }

    /// Opens the file at `path` to read it.
    ///
    /// # Errors
    /// Not found; conflict, if it is not a regular file.
    pub fn read(&self, path: &[u8]) -> Result<File> {
        check_path(path)?;
        open_file(&self.folders, path, "cannot read a file that is there")
    }

    /// Creates the folder `path` in an existing one, or uses an existing one; returns true if it was created. Its owner may write
    /// to it until [`set_folder`](Self::set_folder), independent of its mode. The path may be empty.
    ///
    /// # Errors
    /// Conflict, if another entry has the name; not found, if the parent is missing.
    pub fn make_folder(&self, path: &[u8]) -> Result<bool> {
        self.go_on()?;
        check_or_root(path)?;
        let make = || -> SysResult<bool> {
            if path.is_empty() {
                return make_writable(self.folders.base()).map(|()| false);
            }
            let (parent, name) = self.folders.parent(path)?;
            match mkdirat(&parent, name, Mode::RWXU) {
                Ok(()) => Ok(true),
                Err(Errno::EXIST) => make_writable(&self.folders.get(path)?).map(|()| false),
                Err(errno) => Err(errno),
            }
        };
        make().map_err(|errno| self.folders.fault("cannot make a folder", path, errno))
    }

    /// Begins the file `path` of `size` bytes, all of them a hole, under a name of its own in the same folder.
    pub fn stage(&self, path: &[u8], size: u64) -> Result<Staged> {
        let fault = |errno| self.folders.fault("cannot begin a file", path, errno);
        Staged::begin(self.place_of(path)?, size).map_err(fault)
    }

    /// As [`stage`](Self::stage); dropped unfinished, or if the process dies, the file stays, and [`resume`](Self::resume) finds
    /// it.
    ///
    /// # Errors
    /// As `stage`.
    pub fn stage_resumable(&self, path: &[u8], size: u64) -> Result<Staged> {
        let fault = |errno| self.folders.fault("cannot begin a file", path, errno);
        Staged::begin_resumable(self.place_of(path)?, size).map_err(fault)
    }

    /// Continues the unfinished file of an earlier process for `path`, made `size` bytes long; none if there is none, or another
    /// process writes it.
    ///
    /// # Errors
    /// Not found, for the folder; denied.
    pub fn resume(&self, path: &[u8], size: u64) -> Result<Option<Staged>> {
        let fault = |errno| self.folders.fault("cannot go on with a file", path, errno);
        Staged::resume(self.place_of(path)?, size).map_err(fault)
    }

    /// Unfinished file of an earlier process for `path`, to be read; none as for [`resume`](Self::resume), or without its folder.
    ///
    /// # Errors
    /// Denied.
    pub fn unfinished(&self, path: &[u8]) -> Result<Option<File>> {
        check_path(path)?;
        let look = || {
            let (folder, name) = self.folders.parent(path)?;
            Staged::unfinished(&folder, name)
        };
        match look() {
            Ok(found) => Ok(found),
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
            Err(errno) => Err(self.folders.fault("cannot look at what is there", path, errno)),
        }
    }

    fn place_of(&self, path: &[u8]) -> Result<StagedPlace> {
        self.go_on()?;
        check_path(path)?;
        let fault = |errno| self.folders.fault("cannot begin a file", path, errno);
        let (folder, name) = self.folders.parent(path).map_err(fault)?;
        Ok(StagedPlace { folder, name: name.to_vec(), shown: self.folders.shown(path), durability: self.durability })
    }

    /// Places the small file `path`, like [`stage`](Self::stage), but with fewer system calls.
    ///
    /// # Errors
    /// Conflict, if a folder has the name; exhausted, denied, not found (the folder it belongs in).
    pub fn write_small(&self, path: &[u8], bytes: &[u8], mode: u32, mtime: Timestamp) -> Result<()> {
        self.go_on()?;
        check_path(path)?;
        let fault = |errno| self.folders.fault("cannot write a file", path, errno);
        let (folder, name) = self.folders.parent(path).map_err(fault)?;
        write_small(&folder, name, bytes, &Finish { mode, mtime, durability: self.durability }).map_err(fault)
    }

    /// Places a symbolic link to `target` at `path`, over a file or link that is there.
    pub fn symlink(&self, path: &[u8], target: &[u8], mtime: Timestamp) -> Result<()> {
        self.go_on()?;
        check_path(path)?;
        let fault = |errno| self.folders.fault("cannot make a symbolic link", path, errno);
        let (folder, name) = self.folders.parent(path).map_err(fault)?;
        let mut tries = 0;
        loop {
            let temporary = staging_name();
            symlinkat(target, &folder, &*temporary).map_err(fault)?;
            let placed = utimensat(&folder, &*temporary, &times(mtime), AtFlags::SYMLINK_NOFOLLOW)
                .and_then(|()| renameat(&folder, &*temporary, &folder, name));
            tries += 1;
            match placed {
                Ok(()) => return Ok(()),
                // A sweep may remove a new link, because it cannot distinguish it from a leftover.
                Err(Errno::NOENT) if tries < RETRIES => {}
                Err(errno) => {
                    let _ = unlinkat(&folder, &*temporary, AtFlags::empty());
                    return Err(fault(errno));
                }
            }
        }
    }

    /// Gives the folder `path` its final mode and time. For when all in it is placed, the deepest first. May be empty. A setgid
    /// bit that it has stays, as with chmod(1): it says whose group new files get.
    pub fn set_folder(&self, path: &[u8], mode: u32, mtime: Timestamp) -> Result<()> {
        self.go_on()?;
        check_or_root(path)?;
        let set = || {
            let folder = self.folders.read(path)?;
            futimens(&folder, &times(mtime))?;
            let kept = Stat::from_raw(&fstat(&folder)?).mode & 0o2000;
            fchmod(&folder, Mode::from_raw_mode((mode & 0o7777) | kept))
        };
        set().map_err(|errno| self.folders.fault("cannot set the mode and time of a folder", path, errno))
    }

    /// Gives the file `path`, whose content is right already, its mode and time.
    pub fn set_file(&self, path: &[u8], mode: u32, mtime: Timestamp) -> Result<()> {
        self.go_on()?;
        check_path(path)?;
        let fault = |errno| self.folders.fault("cannot set the mode and time of a file", path, errno);
        let (parent, name) = self.folders.parent(path).map_err(fault)?;
        let file = openat(&parent, name, PATH_ONLY, Mode::empty()).map_err(fault)?;
        let found = fstat(&file).map_err(fault)?;
        if kind_of(&found) != FileType::RegularFile {
            return Err(fault(Errno::EXIST));
        }
        let stat = Stat::from_raw(&found);
        if stat.nlink > 1 {
            if stat.mode == mode & 0o7777 && stat.mtime == mtime {
                return Ok(());
            }
            // It got another name since it was looked at, perhaps outside the target.
            return Err(fault(Errno::MLINK));
        }
        utimensat(&parent, name, &times(mtime), AtFlags::SYMLINK_NOFOLLOW)
            .and_then(|()| chmod_opened(&file, mode))
            .map_err(fault)
    }

    /// Entries that may be removed: all, without unfinished files of restores. Not listed are folders in `keep`, their content,
    /// entries that the target's ignore files leave out of a save, if `wanted` has the path of the file, and the folders above
    /// both. They count in the `budget`, until the memory with them is dropped.
    ///
    /// # Errors
    /// Exhausted, for more entries than the budget holds; usage, for a malformed ignore file; denied.
    pub fn entries(&self, keep: &[PathBuf], wanted: &BTreeSet<&[u8]>, budget: &Budget) -> Result<TargetEntries> {
        let keep = keep.iter().filter_map(|folder| identity(folder)).collect::<Vec<_>>();
        let mut scan = Scan::new(&self.folders, &keep, Some(InForce::new(&[])?));
        scan.ignore_files = Some(wanted);
        scan.memory = Some(budget.tree_memory(None));
        scan.special = Some(Vec::new());
        scan.stop = self.stop.clone();
        scan.remedy = "raise --memory, or restore without --delete";
        scan.run()?;
        let Scan { found, left_out, ignored, special, memory, .. } = scan;
        let mut above = BTreeSet::new();
        for folder in &left_out {
            let mut path = Some(folder.as_slice());
            while let Some(one) = path.filter(|one| above.insert(*one)) {
                path = one.iter().rposition(|byte| *byte == b'/').and_then(|end| one.get(..end));
            }
        }
        let found = found.into_iter().filter(|found| !found.path.is_empty());
        let mut list = found
            .map(|WalkEntry { path, kind, stat }| {
                let bytes = if kind == WalkKind::File { stat.size } else { 0 };
                TargetEntry { path, kind: Some(kind), bytes }
            })
            .chain(special.into_iter().flatten().map(|path| TargetEntry { path, kind: None, bytes: 0 }))
            .filter(|entry| !above.contains(entry.path.as_slice()))
            .collect::<Vec<_>>();
        list.sort_unstable_by(|a, b| a.path.cmp(&b.path));
        Ok(TargetEntries { list, ignored, memory })
    }

    /// Syncs placed entries, so that they survive a power loss, with [`Durability::Power`].
    pub fn flush(&self) -> Result<()> {
        match self.durability {
            Durability::Process => Ok(()),
            Durability::Power => syncfs(self.folders.base())
                .map_err(|errno| self.folders.fault("cannot sync the file system", b"", errno)),
        }
    }
}

/// Names a file or folder without opening it.
const PATH_ONLY: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Lets the owner list, enter and change an open folder.
pub(super) fn make_writable(folder: impl AsFd) -> SysResult<()> {
    let mode = Stat::from_raw(&fstat(&folder)?).mode;
    if mode & 0o700 == 0o700 {
        return Ok(());
    }
    match chmod_opened(&folder, mode | 0o700) {
        // Another user's folder: its mode may be sufficient; if not, the next call reports it.
        Err(Errno::PERM) => Ok(()),
        other => other,
    }
}

/// Changes the mode of an open entry, also of one opened with `O_PATH`, which fchmod(2) refuses and the link in /proc allows
/// (<https://man7.org/linux/man-pages/man2/open.2.html>, under `O_PATH`).
fn chmod_opened(opened: impl AsFd, mode: u32) -> SysResult<()> {
    let link = format!("/proc/self/fd/{}", opened.as_fd().as_raw_fd());
    chmodat(rustix::fs::CWD, link, Mode::from_raw_mode(mode & 0o7777), AtFlags::empty())
}

fn check_or_root(path: &[u8]) -> Result<()> {
    if path.is_empty() { Ok(()) } else { check_path(path) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::MEMORY_MIN;

    #[test]
    fn listed_entries_count_in_the_budget_while_they_are_there() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("file"), "").unwrap();
        let target = Target::open(root.path(), Durability::Process).unwrap();
        let budget = Budget::new(MEMORY_MIN).unwrap();
        let TargetEntries { list, memory, .. } = target.entries(&[], &BTreeSet::new(), &budget).unwrap();
        assert_eq!(list.len(), 1);
        let mut others = budget.tree_memory(None);
        assert!(!others.try_add(others.max()));
        drop(memory);
        assert!(others.try_add(others.max()));
        let error = target.entries(&[], &BTreeSet::new(), &budget).unwrap_err();
        assert_eq!(error.help_text(), Some("raise --memory, or restore without --delete"), "{error:?}");
    }

    #[test]
    fn folders_to_keep_are_kept_among_any_number_of_entries_that_are_skipped() {
        let root = tempfile::tempdir().unwrap();
        let repository = root.path().join("towline/repository");
        std::fs::create_dir_all(repository.join("log")).unwrap();
        for number in 0..=super::super::walk::SKIPPED_MAX {
            std::fs::write(root.path().join(format!(".towline-{number:016x}-0.part")), "").unwrap();
        }
        let socket = root.path().join("socket");
        let _socket = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let target = Target::open(root.path(), Durability::Process).unwrap();
        let budget = Budget::new(MEMORY_MIN).unwrap();
        let entries = target.entries(&[repository], &BTreeSet::new(), &budget).unwrap();
        let listed = entries.list.iter().map(|entry| entry.path.as_slice()).collect::<Vec<_>>();
        assert_eq!(listed, [b"socket"], "neither the repository nor the folder above it");
    }
}
