//! Removal of entries of a target: surplus ones, and leftovers of earlier restores.

use std::fs::File;
use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, flock, fstat, openat, statat, unlinkat};
use rustix::io::{Errno, Result as SysResult};

use super::folders::Listing;
use super::path::{check_path, is_staging, join};
use super::staged::is_at;
use super::stat::{Stat, kind_of};
use super::target::{Target, make_writable};
use super::walk::READ_FILE;
use crate::error::{Error, Result};

/// Bytes of the paths of folders that wait to be swept or removed.
const PATHS_MAX: usize = 16 << 20;

impl Target {
    /// Removes the entry at `path`, a folder with its content; links are removed, not followed. A missing entry is no error. The
    /// parent folder must be writable for its owner ([`make_folder`](Self::make_folder)).
    pub fn remove(&self, path: &[u8]) -> Result<()> {
        self.go_on()?;
        check_path(path)?;
        let removed = match self.unlink(path) {
            Err(Errno::ISDIR) => self.remove_folder(path, PATHS_MAX),
            other => other,
        };
        match removed {
            Ok(()) | Err(Errno::NOENT | Errno::NOTDIR) => Ok(()),
            Err(errno) => {
                self.go_on()?;
                Err(self.folders.fault("cannot remove", path, errno))
            }
        }
    }

    /// Removes the entry at `path`, a folder only if it is empty. A missing entry is no error.
    ///
    /// # Errors
    /// Conflict, if it is a folder with content; errors of the file system.
    pub fn remove_alone(&self, path: &[u8]) -> Result<()> {
        self.go_on()?;
        check_path(path)?;
        let removed = match self.unlink(path) {
            Err(Errno::ISDIR) => {
                self.folders.forget(path);
                self.folders.parent(path).and_then(|(parent, name)| unlinkat(&parent, name, AtFlags::REMOVEDIR))
            }
            other => other,
        };
        match removed {
            Ok(()) | Err(Errno::NOENT | Errno::NOTDIR) => Ok(()),
            Err(Errno::NOTEMPTY | Errno::EXIST) => {
                Err(Error::conflict("a folder got content while it was to be replaced")
                    .at(self.folders.shown(path).display())
                    .help("run the command again"))
            }
            Err(errno) => Err(self.folders.fault("cannot remove", path, errno)),
        }
    }

    /// True if the folder at `path` has no entries.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn is_empty_folder(&self, path: &[u8]) -> Result<bool> {
        check_path(path)?;
        let first = self.folders.read(path).and_then(|open| Listing::of(&open)?.next().transpose());
        first.map(|first| first.is_none()).map_err(|errno| self.folders.fault("cannot look into a folder", path, errno))
    }

    fn unlink(&self, path: &[u8]) -> SysResult<()> {
        let (parent, name) = self.folders.parent(path)?;
        unlinkat(&parent, name, AtFlags::empty())
    }

    /// Removes a folder with its content: works at any depth with few open folders. The paths of folders that wait take about
    /// `room` bytes; a folder is listed again for those that do not fit.
    fn remove_folder(&self, path: &[u8], room: usize) -> SysResult<()> {
        let mut bytes = path.len();
        let mut folders = vec![path.to_vec()];
        while let Some(path) = folders.last().cloned() {
            let found = self.remove_files(&path, room.saturating_sub(bytes))?;
            if found.is_empty() {
                self.unless_stopped()?;
                self.folders.forget(&path);
                let (parent, name) = self.folders.parent(&path)?;
                unlinkat(&parent, name, AtFlags::REMOVEDIR)?;
                bytes -= path.len();
                folders.pop();
            }
            bytes += found.iter().map(Vec::len).sum::<usize>();
            folders.extend(found);
        }
        Ok(())
    }

    /// As [`go_on`](Self::go_on), within system calls.
    fn unless_stopped(&self) -> SysResult<()> {
        if self.stop.is_cancelled() { Err(Errno::CANCELED) } else { Ok(()) }
    }

    /// Removes all but folders in a folder. Returns the paths of these, as many as fit into `room` bytes, but at least one.
    fn remove_files(&self, path: &[u8], mut room: usize) -> SysResult<Vec<Vec<u8>>> {
        let mut found = Vec::new();
        make_writable(&self.folders.get(path)?)?;
        let open = self.folders.read(path)?;
        for entry in Listing::of(&open)? {
            let (name, kind) = entry?;
            self.unless_stopped()?;
            match if kind == FileType::Directory { Err(Errno::ISDIR) } else { unlink_in(&open, &name) } {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(Errno::ISDIR) => {
                    let folder = join(path, &name);
                    if found.is_empty() || folder.len() <= room {
                        room = room.saturating_sub(folder.len());
                        found.push(folder);
                    }
                }
                Err(errno) => return Err(errno),
            }
        }
        Ok(found)
    }

    /// Removes unfinished files of earlier restores below the target; returns their number. Files of running restores are locked,
    /// and stay; so do files without permission, and those in folders whose paths would take too much memory.
    pub fn sweep(&self) -> Result<u64> {
        let (mut swept, mut bytes) = (0, 0);
        let mut pending = vec![Vec::new()];
        while let Some(path) = pending.pop() {
            bytes -= path.len();
            let fault = |errno| self.folders.fault("cannot look for unfinished files", &path, errno);
            let (folder, listing) =
                match self.folders.read(&path).and_then(|folder| Listing::of(&folder).map(|listing| (folder, listing)))
                {
                    Ok(opened) => opened,
                    Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS) => continue,
                    Err(errno) => return Err(fault(errno)),
                };
            for entry in listing {
                let (name, kind) = entry.map_err(fault)?;
                self.go_on()?;
                if is_folder(&folder, &name, kind) {
                    let path = join(&path, &name);
                    if bytes + path.len() <= PATHS_MAX {
                        bytes += path.len();
                        pending.push(path);
                    }
                } else if is_staging(&name) {
                    swept += u64::from(sweep_one(&folder, &name).is_ok());
                }
            }
        }
        Ok(swept)
    }
}

fn unlink_in(folder: &OwnedFd, name: &[u8]) -> SysResult<()> {
    unlinkat(folder, name, AtFlags::empty())
}

/// True for a folder; asks for the kind if the file system's listing lacks it.
fn is_folder(folder: &OwnedFd, name: &[u8], listed: FileType) -> bool {
    match listed {
        FileType::Unknown => {
            statat(folder, name, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(|raw| kind_of(&raw) == FileType::Directory)
        }
        _ => listed == FileType::Directory,
    }
}

/// Removes one unfinished file if it is not locked. Links cannot be locked; a restore that creates one retries.
fn sweep_one(folder: &OwnedFd, name: &[u8]) -> SysResult<()> {
    match openat(folder, name, READ_FILE, Mode::empty()) {
        Ok(file) => {
            let file = File::from(file);
            let found = fstat(&file)?;
            // A restore makes neither pipes nor second names of files.
            if kind_of(&found) != FileType::RegularFile || Stat::from_raw(&found).nlink > 1 {
                return Err(Errno::EXIST);
            }
            flock(&file, FlockOperation::NonBlockingLockExclusive)?;
            // The name may be that of another file now.
            if !is_at(folder, name, &file)? {
                return Err(Errno::BUSY);
            }
            unlink_in(folder, name)
        }
        Err(Errno::LOOP) => unlink_in(folder, name),
        Err(errno) => Err(errno),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rustix::fs::{CWD, mkfifoat};

    use tokio_util::sync::CancellationToken;
    use tokio_util::task::TaskTracker;

    use super::super::path::resumable_name;
    use super::super::staged::Durability;
    use super::*;
    use crate::clock::Timestamp;
    use crate::error::ErrorKind;

    #[test]
    fn what_no_restore_makes_is_not_swept() {
        let root = tempfile::tempdir().unwrap();
        let [pipe, second, left] =
            ["pipe", "second", "left"].map(|name| root.path().join(resumable_name(name.as_bytes())));
        mkfifoat(CWD, &pipe, Mode::RUSR | Mode::WUSR).unwrap();
        fs::write(root.path().join("data"), "data").unwrap();
        fs::hard_link(root.path().join("data"), &second).unwrap();
        fs::write(&left, "left").unwrap();
        let target = Target::open(root.path(), Durability::Process).unwrap();
        assert_eq!(target.sweep().unwrap(), 1);
        assert!(pipe.exists() && second.exists() && !left.exists());
    }

    #[test]
    fn nothing_is_changed_after_a_stop() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("folder")).unwrap();
        fs::write(root.path().join("folder/file"), "").unwrap();
        let left = root.path().join(resumable_name(b"left"));
        fs::write(&left, "left").unwrap();
        let (stop, work) = (CancellationToken::new(), TaskTracker::new());
        let target = Target::open(root.path(), Durability::Process).unwrap().until(stop.clone(), work.token());
        stop.cancel();
        let time = Timestamp(0);
        let errors = [
            target.make_folder(b"new").map(drop),
            target.stage(b"new", 1).map(drop),
            target.stage_resumable(b"new", 1).map(drop),
            target.resume(b"left", 1).map(drop),
            target.write_small(b"new", b"", 0o600, time),
            target.symlink(b"new", b"there", time),
            target.set_folder(b"folder", 0o500, time),
            target.set_file(b"folder/file", 0o400, time),
            target.remove(b"folder"),
            target.remove_alone(b"folder/file"),
            target.sweep().map(drop),
        ];
        for error in errors {
            assert_eq!(error.unwrap_err().kind(), ErrorKind::Cancelled);
        }
        // A removal that has begun.
        assert_eq!(target.remove_files(b"folder", PATHS_MAX).unwrap_err(), Errno::CANCELED);
        assert!(root.path().join("folder/file").exists() && left.exists());
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 2);
        assert_eq!(work.len(), 1);
        drop(target);
        assert!(work.is_empty());
    }

    #[test]
    fn a_folder_is_removed_with_room_for_few_paths() {
        for (room, folders) in [(0, 1), (20, 3), (1 << 20, 5)] {
            let root = tempfile::tempdir().unwrap();
            for (a, b) in (0..5).flat_map(|a| (0..5).map(move |b| (a, b))) {
                let deep = root.path().join(format!("gone/{a}/{b}/deep"));
                fs::create_dir_all(&deep).unwrap();
                fs::write(deep.join("x"), "").unwrap();
                fs::write(root.path().join(format!("gone/{a}/y")), "").unwrap();
            }
            let target = Target::open(root.path(), Durability::Process).unwrap();
            assert_eq!(target.remove_files(b"gone", room).unwrap().len(), folders);
            target.remove_folder(b"gone", room).unwrap();
            assert!(!root.path().join("gone").exists(), "{room}");
        }
    }
}
