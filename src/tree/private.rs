//! Private folders in places where other users may create them first, and files that no other user may write.

use std::fs::{DirBuilder, File, Metadata, symlink_metadata};
use std::io::Read as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::Path;

use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::size;

/// Permission bits of group and others.
const OTHERS: u32 = 0o077;
/// Write permission bits of group and others.
const OTHERS_WRITE: u32 = 0o022;
/// Sticky bit: only owners of files may rename and remove them.
const STICKY: u32 = 0o1000;
/// Flags to open an entry of any kind: links are not followed, a FIFO does not block, and a terminal does not become the
/// controlling one.
const GUARDED: OFlags =
    OFlags::RDONLY.union(OFlags::NOFOLLOW).union(OFlags::NONBLOCK).union(OFlags::NOCTTY).union(OFlags::CLOEXEC);

/// Checks that `folder` is a folder of this user without access for others, and no link. Blocking.
///
/// # Errors
/// Denied, if it is not; not found.
pub fn check_private_folder(folder: &Path) -> Result<()> {
    let found = symlink_metadata(folder).map_err(|error| Error::io("folder cannot be read", folder, error))?;
    let user = rustix::process::geteuid().as_raw();
    if found.is_dir() && found.uid() == user && found.mode() & OTHERS == 0 {
        return Ok(());
    }
    let help = if found.is_dir() && found.uid() == user {
        format!("if you trust what is in it: chmod 700 {}; or name another place", folder.display())
    } else {
        "remove it, or name another place".to_owned()
    };
    Err(Error::denied("folder can be used by others")
        .at(folder.display())
        .expected(format!("a folder of user {user} with mode 0700"))
        .got(format!("owner {}, mode {:04o}", found.uid(), found.mode() & 0o7777))
        .help(help))
}

/// Checks that only this user and root can replace entries of `folder`: it belongs to one of them, and others cannot write there,
/// or it is sticky. Links are followed. Blocking.
///
/// # Errors
/// Denied, if others can; not found.
pub fn check_own_folder(folder: &Path) -> Result<()> {
    let found = std::fs::metadata(folder).map_err(|error| Error::io("folder cannot be read", folder, error))?;
    let user = rustix::process::geteuid().as_raw();
    let (owned, mode) = (found.uid() == user || found.uid() == 0, found.mode());
    if found.is_dir() && owned && (mode & OTHERS_WRITE == 0 || mode & STICKY != 0) {
        return Ok(());
    }
    Err(Error::denied("others can replace what lies in the folder")
        .at(folder.display())
        .expected(format!("a folder of user {user} or root that others cannot write"))
        .got(format!("owner {}, mode {:04o}", found.uid(), mode & 0o7777)))
}

/// As [`check_private_folder`], but creates the folder if it does not exist.
///
/// # Errors
/// As [`check_private_folder`]; errors of the file system.
pub fn make_private_folder(folder: &Path) -> Result<()> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(|error| Error::io("folder cannot be made", folder, error))?;
    check_private_folder(folder)
}

/// As [`read_own_file`], but follows links: files in volumes of Kubernetes are links
/// (<https://github.com/kubernetes/kubernetes/blob/master/pkg/volume/util/atomic_writer.go>). Blocking.
///
/// # Errors
/// As [`read_own_file`].
pub fn read_own_target(path: &Path, len_max: u64) -> Result<String> {
    read_own(path, len_max, GUARDED.difference(OFlags::NOFOLLOW))
}

/// Reads the text file at `path`, of at most `len_max` bytes, which only this user or root may write; links are not followed. The
/// checks are made on the open file. Blocking.
///
/// # Errors
/// Denied, if it is no regular file, or others own it or may write it; usage, if it is longer, or not UTF-8; errors of the file system.
pub fn read_own_file(path: &Path, len_max: u64) -> Result<String> {
    read_own(path, len_max, GUARDED)
}

fn read_own(path: &Path, len_max: u64, flags: OFlags) -> Result<String> {
    let io = |error| Error::io("file cannot be read", path, error);
    let file = match open(path, flags, Mode::empty()) {
        Ok(opened) => File::from(opened),
        Err(Errno::LOOP) => return Err(not_regular(path).got("a symbolic link")),
        // A socket (open(2)).
        Err(Errno::NXIO) => return Err(not_regular(path)),
        Err(error) => return Err(io(error.into())),
    };
    check_own_file(&file.metadata().map_err(io)?, path)?;
    let mut bytes = Vec::new();
    let len = file.take(len_max + 1).read_to_end(&mut bytes).map_err(io)?;
    if len as u64 > len_max {
        return Err(Error::usage("file is too long")
            .at(path.display())
            .expected(format!("at most {}", size::show(len_max))));
    }
    String::from_utf8(bytes).map_err(|source| Error::usage("file is not UTF-8").at(path.display()).source(source))
}

/// Whether only this user and root may write the file that `found` is of.
pub fn is_own_file(found: &Metadata) -> bool {
    let user = rustix::process::geteuid().as_raw();
    found.is_file() && (found.uid() == user || found.uid() == 0) && found.mode() & OTHERS_WRITE == 0
}

fn check_own_file(found: &Metadata, path: &Path) -> Result<()> {
    if !found.is_file() {
        return Err(not_regular(path));
    }
    let user = rustix::process::geteuid().as_raw();
    if found.uid() != user && found.uid() != 0 {
        return Err(Error::denied("file belongs to another user")
            .at(path.display())
            .expected(format!("user {user} or root"))
            .got(format!("user {}", found.uid()))
            .help("remove it, or use a copy of your own"));
    }
    if found.mode() & OTHERS_WRITE != 0 {
        return Err(Error::denied("file can be written by others")
            .at(path.display())
            .expected("no permission to write for group and others")
            .got(format!("mode {:04o}", found.mode() & 0o7777))
            .help("look at what it holds, then: chmod go-w FILE"));
    }
    Ok(())
}

fn not_regular(path: &Path) -> Error {
    Error::denied("it is not a regular file")
        .at(path.display())
        .help("put the file itself there, or remove what is there")
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn only_a_folder_of_this_user_alone_will_do() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("own");
        make_private_folder(&own).unwrap();
        make_private_folder(&own).unwrap();
        for mode in [0o755, 0o710, 0o701, 0o770] {
            fs::set_permissions(&own, Permissions::from_mode(mode)).unwrap();
            assert_eq!(make_private_folder(&own).unwrap_err().kind(), ErrorKind::Denied, "{mode:o}");
        }
        fs::set_permissions(&own, Permissions::from_mode(0o700)).unwrap();
        symlink(&own, dir.path().join("link")).unwrap();
        assert_eq!(make_private_folder(&dir.path().join("link")).unwrap_err().kind(), ErrorKind::Denied);
        if rustix::process::geteuid().is_root() {
            rustix::fs::chown(&own, Some(rustix::fs::Uid::from_raw(4711)), None).unwrap();
            assert_eq!(make_private_folder(&own).unwrap_err().kind(), ErrorKind::Denied);
        }
    }

    #[test]
    fn a_folder_is_own_unless_others_can_replace_what_is_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("own");
        fs::create_dir(&own).unwrap();
        symlink(&own, dir.path().join("link")).unwrap();
        for (mode, good) in
            [(0o700, true), (0o755, true), (0o1777, true), (0o777, false), (0o775, false), (0o2777, false)]
        {
            fs::set_permissions(&own, Permissions::from_mode(mode)).unwrap();
            for path in [&own, &dir.path().join("link")] {
                let checked = check_own_folder(path).map_err(|error| error.kind());
                assert_eq!(checked, if good { Ok(()) } else { Err(ErrorKind::Denied) }, "{mode:o}");
            }
        }
        fs::set_permissions(&own, Permissions::from_mode(0o700)).unwrap();
        if rustix::process::geteuid().is_root() {
            rustix::fs::chown(&own, Some(rustix::fs::Uid::from_raw(4711)), None).unwrap();
            assert_eq!(check_own_folder(&own).unwrap_err().kind(), ErrorKind::Denied);
        }
        assert_eq!(check_own_folder(&dir.path().join("none")).unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn only_a_file_that_nobody_else_may_write_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let read = || read_own_file(&path, 16);
        assert_eq!(read().unwrap_err().kind(), ErrorKind::NotFound);
        fs::write(&path, "text").unwrap();
        for mode in [0o644, 0o600, 0o444] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            assert_eq!(read().unwrap(), "text", "{mode:o}");
        }
        for mode in [0o664, 0o646, 0o620, 0o602] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            assert_eq!(read().unwrap_err().kind(), ErrorKind::Denied, "{mode:o}");
        }
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        if rustix::process::geteuid().is_root() {
            rustix::fs::chown(&path, Some(rustix::fs::Uid::from_raw(4711)), None).unwrap();
            assert!(read().unwrap_err().to_string().contains("user 4711"));
        }
        fs::remove_file(&path).unwrap();
        for wrong in [b"seventeen letters".as_slice(), b"\xff\xfe"] {
            fs::write(&path, wrong).unwrap();
            assert_eq!(read().unwrap_err().kind(), ErrorKind::Usage);
        }
    }

    #[test]
    fn what_is_no_regular_file_is_neither_read_nor_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), "text").unwrap();
        symlink("file", dir.path().join("link")).unwrap();
        fs::create_dir(dir.path().join("folder")).unwrap();
        let fifo = std::process::Command::new("mkfifo").arg(dir.path().join("fifo")).status().unwrap();
        assert!(fifo.success());
        let _socket = std::os::unix::net::UnixListener::bind(dir.path().join("socket")).unwrap();
        for name in ["link", "folder", "fifo", "socket"] {
            let error = read_own_file(&dir.path().join(name), 16).unwrap_err();
            assert!(error.to_string().contains("not a regular file"), "{name}: {error}");
            assert_eq!(error.kind(), ErrorKind::Denied, "{name}");
        }
    }
}
