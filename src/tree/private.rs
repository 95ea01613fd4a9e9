//! Folders that only this user may use, in places where anybody may make them first.

use std::fs::{DirBuilder, symlink_metadata};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::Path;

use crate::error::{Error, Result};

/// The permissions of everybody but the owner.
const OTHERS: u32 = 0o077;

/// Checks that `folder` is a folder of this user which nobody else may use, and no link. Blocking.
///
/// # Errors
/// Denied, if it is not; not found.
pub fn check_private_folder(folder: &Path) -> Result<()> {
    let found = symlink_metadata(folder).map_err(|error| Error::io("folder cannot be read", folder, error))?;
    let user = rustix::process::geteuid().as_raw();
    if found.is_dir() && found.uid() == user && found.mode() & OTHERS == 0 {
        return Ok(());
    }
    Err(Error::denied("folder can be used by others")
        .at(folder.display())
        .expected(format!("a folder of user {user} with mode 0700"))
        .got(format!("owner {}, mode {:04o}", found.uid(), found.mode() & 0o7777))
        .cure("remove it, or name another place"))
}

/// As [`check_private_folder`], after making the folder if it is not there.
///
/// # Errors
/// As [`check_private_folder`]; the file system's.
pub fn make_private_folder(folder: &Path) -> Result<()> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(|error| Error::io("folder cannot be made", folder, error))?;
    check_private_folder(folder)
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
}
