//! Permissions of the files and folders of a repository in a directory.
//!
//! The mode of the file that identifies the repository is the setting: later writers give their files the same mode, and their
//! folders the matching one, independent of their umask. Git does the same with `core.sharedRepository`
//! (<https://git-scm.com/docs/git-config#Documentation/git-config.txt-coresharedRepository>), which it keeps in a file.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::str::FromStr;

use rustix::fs::{Mode, fchmod};
use rustix::io::Errno;

use super::home::MARK;
use crate::error::Error;

/// Permission bits for read, write and execute, and the setgid bit, by which new entries inherit the folder's group.
const READ: u32 = 0o444;
const ACCESS: u32 = 0o666;
const SET_GROUP: u32 = 0o2000;
const GROUP_WRITES: u32 = 0o020;

/// Sharing of a new repository in a directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sharing {
    /// Not shared: files 0600, folders 0700.
    #[default]
    Private,
    /// The folder's group may read and write: files 0660, folders 2770.
    Group,
    /// The same, and everybody may read: files 0664, folders 2775.
    Everybody,
}

impl FromStr for Sharing {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "group" => Ok(Self::Group),
            "all" => Ok(Self::Everybody),
            _ => Err(Error::usage("a directory cannot be shared like this").expected("group or all").got(text)),
        }
    }
}

/// The modes of a repository's files and folders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Modes {
    pub(super) file: u32,
    folder: u32,
}

impl Modes {
    /// Modes of a new repository.
    pub(super) fn of(sharing: Sharing) -> Self {
        Self::of_file(match sharing {
            Sharing::Private => 0o600,
            Sharing::Group => 0o660,
            Sharing::Everybody => 0o664,
        })
    }

    /// Modes of the repository at `root`, if there is one.
    pub(super) fn recorded(root: &Path) -> Option<Self> {
        let found = fs::symlink_metadata(root.join(MARK)).ok().filter(fs::Metadata::is_file)?;
        Some(Self::of_file(found.permissions().mode() & ACCESS | 0o600))
    }

    /// Modes from that of a file: users who may read the files may enter the folders.
    fn of_file(file: u32) -> Self {
        let group = if file & GROUP_WRITES == 0 { 0 } else { SET_GROUP };
        Self { file, folder: file | (file & READ) >> 2 | group }
    }

    /// Sets the mode of an open file.
    pub(super) fn set_open_file(self, file: &File) -> io::Result<()> {
        file.set_permissions(Permissions::from_mode(self.file))
    }

    /// Sets the mode of an open folder.
    pub(super) fn set_open_folder(self, folder: &OwnedFd) -> Result<(), Errno> {
        fchmod(folder, Mode::from_raw_mode(self.folder))
    }
}

#[cfg(test)]
mod tests {
    use super::super::root::Root;
    use super::*;

    #[test]
    fn folders_follow_from_files() {
        let modes = |file| Modes::of_file(file).folder;
        assert_eq!([0o600, 0o660, 0o664, 0o644, 0o640].map(modes), [0o700, 0o2770, 0o2775, 0o755, 0o750]);
        assert_eq!("all".parse::<Sharing>().unwrap(), Sharing::Everybody);
        assert!("world".parse::<Sharing>().is_err());
    }

    #[test]
    fn the_record_is_the_mode_of_the_file_that_names_the_repository() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Modes::recorded(dir.path()), None);
        let modes = Modes::of(Sharing::Group);
        fs::write(dir.path().join(MARK), "x").unwrap();
        modes.set_open_file(&File::open(dir.path().join(MARK)).unwrap()).unwrap();
        assert_eq!(Modes::recorded(dir.path()), Some(modes));
        Root::open(dir.path()).unwrap().make_place(&"pack/a/b/object".into(), modes).unwrap();
        for folder in ["pack", "pack/a", "pack/a/b"] {
            assert_eq!(fs::metadata(dir.path().join(folder)).unwrap().permissions().mode() & 0o7777, 0o2770);
        }
    }
}
