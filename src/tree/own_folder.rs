//! Folders of this user alone, in places where others may write, such as a volume of Kubernetes (`emptyDir`).

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, fchmod, fstat, mkdir, open, openat, renameat, statat, unlinkat};
use rustix::io::Errno;

use super::folders::{Listing, READ_FOLDER};
use crate::error::{Error, Result};
use crate::id::ObjectId;

/// Permission bits of group and others.
const OTHERS: Mode = Mode::RWXG.union(Mode::RWXO);
/// Flags of a file of the folder: links are not followed, and a FIFO does not block.
const FILE: OFlags = OFlags::NOFOLLOW.union(OFlags::NONBLOCK).union(OFlags::NOCTTY).union(OFlags::CLOEXEC);
/// Beginning of the names of files that are being written.
const STAGED: &str = ".towline-";

/// An open folder of this user alone. Others may rename it and put a link in its place: all is done in the folder that was opened.
#[derive(Debug)]
pub struct OwnFolder {
    folder: OwnedFd,
    path: PathBuf,
}

impl OwnFolder {
    /// Opens the folder at `path`, created if there is none, and takes the rights of others away. Blocking.
    ///
    /// # Errors
    /// Denied, if it is a link or another user's; errors of the file system.
    pub fn open(path: &Path) -> Result<Self> {
        let io = |errno: Errno| Error::io("folder cannot be opened", path, errno.into());
        match mkdir(path, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(io(errno)),
        }
        let folder = match open(path, READ_FOLDER, Mode::empty()) {
            Ok(folder) => folder,
            Err(Errno::NOTDIR | Errno::LOOP) => {
                return Err(Error::denied("it is a link or a file, and may be planted")
                    .at(path.display())
                    .expected("a folder")
                    .help("remove it"));
            }
            Err(errno) => return Err(io(errno)),
        };
        let found = fstat(&folder).map_err(io)?;
        let user = rustix::process::geteuid().as_raw();
        if found.st_uid != user {
            return Err(Error::denied("folder belongs to another user, and may be planted")
                .at(path.display())
                .expected(format!("user {user}"))
                .got(format!("user {}", found.st_uid))
                .help("remove it"));
        }
        if Mode::from_raw_mode(found.st_mode).intersects(OTHERS) {
            fchmod(&folder, Mode::RWXU).map_err(io)?;
        }
        Ok(Self { folder, path: path.to_owned() })
    }

    /// Path that it was opened at.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Path of the open folder, wherever it is now (`proc_pid_fd(5)`): valid in this process, as long as it is open.
    #[must_use]
    pub fn open_path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.folder.as_raw_fd()))
    }

    /// Names and lengths of the regular files of this user, sorted. Others have names that are not UTF-8, or were planted. Blocking.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn files(&self) -> io::Result<Vec<(String, u64)>> {
        let user = rustix::process::geteuid().as_raw();
        let mut files = Vec::new();
        for entry in Listing::of(&openat(&self.folder, c".", READ_FOLDER, Mode::empty())?)? {
            let (name, _) = entry?;
            let Ok(name) = String::from_utf8(name) else { continue };
            let found = match statat(&self.folder, &name, AtFlags::SYMLINK_NOFOLLOW) {
                Err(Errno::NOENT) => continue,
                found => found?,
            };
            if FileType::from_raw_mode(found.st_mode) == FileType::RegularFile && found.st_uid == user {
                files.push((name, u64::try_from(found.st_size).unwrap_or(0)));
            }
        }
        files.sort_unstable();
        Ok(files)
    }

    /// Reads the text file `name` of at most `len_max` bytes. Blocking.
    ///
    /// # Errors
    /// Damaged, if it is longer, or not UTF-8; errors of the file system.
    pub fn read(&self, name: &str, len_max: u64) -> Result<String> {
        let path = self.path.join(name);
        let io = |source| Error::io("file cannot be read", &path, source);
        let file = openat(&self.folder, name, OFlags::RDONLY | FILE, Mode::empty());
        let file = File::from(file.map_err(|errno| io(errno.into()))?);
        if !file.metadata().map_err(io)?.is_file() {
            return Err(Error::damaged("it is not a regular file").at(path.display()));
        }
        let mut bytes = Vec::new();
        file.take(len_max + 1).read_to_end(&mut bytes).map_err(io)?;
        if bytes.len() as u64 > len_max {
            return Err(Error::damaged("file is too long")
                .at(path.display())
                .expected(format!("at most {len_max} bytes")));
        }
        String::from_utf8(bytes).map_err(|source| Error::damaged("file is not UTF-8").at(path.display()).source(source))
    }

    /// Writes the file `name`, to last, in the place of one that is there. Blocking.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn replace(&self, name: &str, text: &str) -> Result<()> {
        let staged = format!("{STAGED}{}", ObjectId::random());
        let write = || {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | FILE;
            let mut file = File::from(openat(&self.folder, &staged, flags, Mode::RUSR | Mode::WUSR)?);
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            renameat(&self.folder, &staged, &self.folder, name)?;
            rustix::fs::fsync(&self.folder)?;
            Ok(())
        };
        write().map_err(|source| {
            let _ = unlinkat(&self.folder, &staged, AtFlags::empty());
            Error::io("file cannot be written", &self.path.join(name), source)
        })
    }

    /// Removes the file `name`, if it is there. Blocking.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn remove(&self, name: &str) -> Result<()> {
        match unlinkat(&self.folder, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(Error::io("file cannot be removed", &self.path.join(name), errno.into())),
        }
    }

    /// True if [`OwnFolder::replace`] was killed while it wrote the file `name`.
    #[must_use]
    pub fn is_staged(name: &str) -> bool {
        name.starts_with(STAGED)
    }
}

impl AsFd for OwnFolder {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.folder.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn a_folder_that_others_planted_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("own"), dir.path().join("other"));
        fs::create_dir(&other).unwrap();
        symlink(&other, &path).unwrap();
        assert_eq!(OwnFolder::open(&path).unwrap_err().kind(), ErrorKind::Denied);
        fs::remove_file(&path).unwrap();
        fs::write(&path, "").unwrap();
        assert_eq!(OwnFolder::open(&path).unwrap_err().kind(), ErrorKind::Denied);
        fs::remove_file(&path).unwrap();
        OwnFolder::open(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o2777)).unwrap();
        OwnFolder::open(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        if rustix::process::geteuid().is_root() {
            rustix::fs::chown(&path, Some(rustix::fs::Uid::from_raw(4711)), None).unwrap();
            assert_eq!(OwnFolder::open(&path).unwrap_err().kind(), ErrorKind::Denied);
        }
    }

    #[test]
    fn what_has_its_name_later_is_not_touched() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("own"), dir.path().join("other"));
        let own = OwnFolder::open(&path).unwrap();
        own.replace("file", "one").unwrap();
        own.replace("file", "two").unwrap();
        fs::create_dir(&other).unwrap();
        fs::write(other.join("file"), "another's").unwrap();
        fs::rename(&path, dir.path().join("moved")).unwrap();
        symlink(&other, &path).unwrap();
        assert_eq!(own.read("file", 3).unwrap(), "two");
        assert_eq!(own.read("file", 2).unwrap_err().kind(), ErrorKind::Damaged);
        own.remove("file").unwrap();
        own.remove("file").unwrap();
        own.replace("new", "x").unwrap();
        assert_eq!(own.files().unwrap(), [("new".to_owned(), 1)]);
        assert_eq!(fs::read(own.open_path().join("new")).unwrap(), b"x");
        assert_eq!(fs::read(other.join("file")).unwrap(), b"another's");
        assert!(!other.join("new").exists());
    }

    #[test]
    fn only_regular_files_are_listed_and_read() {
        let dir = tempfile::tempdir().unwrap();
        let own = OwnFolder::open(&dir.path().join("own")).unwrap();
        fs::create_dir(own.path().join("folder")).unwrap();
        symlink("/etc/passwd", own.path().join("link")).unwrap();
        rustix::fs::mknodat(&own, "fifo", FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        assert_eq!(own.files().unwrap(), []);
        for name in ["folder", "link", "fifo"] {
            own.read(name, 99).unwrap_err();
        }
        if rustix::process::geteuid().is_root() {
            own.replace("theirs", "x").unwrap();
            let theirs = own.path().join("theirs");
            rustix::fs::chown(&theirs, Some(rustix::fs::Uid::from_raw(4711)), None).unwrap();
            assert_eq!(own.files().unwrap(), []);
        }
    }
}
