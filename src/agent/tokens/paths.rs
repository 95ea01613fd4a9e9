//! Paths of this node in requests with a token: only at or below its folders, through folders that only this user and root can change.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::policy::Scopes;
use crate::tree::check_own_folder;

/// Checks that `path` may be saved by a token with `scopes`. The scopes are checked before the disk is
/// accessed. The last component may belong to anybody, and must not be followed if it is a link. Others must not be able to write
/// the folders above it, so that the checked path is the saved one. Blocking.
///
/// # Errors
/// Denied, if it is not permitted, contains a link, or others may change a folder on it; not found.
pub(in crate::agent) fn check_named(scopes: &Scopes, path: &Path) -> Result<PathBuf> {
    if !scopes.may_name(path) {
        return Err(Error::denied("token does not permit this path")
            .expected("a path at or below a folder of its scopes (folder=DIR)")
            .help("send the request over the socket as the agent's user, or create a token with that folder"));
    }
    let Some(folder) = path.parent() else {
        return Err(Error::denied("token does not permit the root of the file system"));
    };
    let io = |source| Error::io("cannot inspect a folder", folder, source);
    if std::fs::canonicalize(folder).map_err(io)? != folder {
        return Err(Error::denied("path of a token contains a symbolic link")
            .at(folder.display())
            .help("use the real path of the folder, also in the token's scopes"));
    }
    for above in folder.ancestors() {
        check_own_folder(above).map_err(|error| {
            error.help("a token can save from folders that only the agent's user or root can change; the last component of the path may belong to anybody")
        })?;
    }
    Ok(path.to_owned())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn a_path_lies_in_a_folder_of_the_token_and_leads_there_straight() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().canonicalize().unwrap();
        for folder in ["job/step-1", "other"] {
            fs::create_dir_all(top.join(folder)).unwrap();
        }
        symlink(top.join("other"), top.join("job/link")).unwrap();
        let scopes = Scopes::of(&["save=**".to_owned(), format!("folder={}", top.join("job").display())]).unwrap();
        let checked = |path: &str| check_named(&scopes, &top.join(path)).map_err(|error| error.kind());
        assert!(checked("job").is_ok() && checked("job/step-1").is_ok());
        // The save refuses a link in the last place itself.
        assert!(checked("job/link").is_ok());
        for path in ["other", "job/../other", "job/link/x", "none", "job-2", "/", "/etc/shadow"] {
            assert_eq!(checked(path), Err(ErrorKind::Denied), "{path}");
        }
        assert_eq!(checked("job/none/x"), Err(ErrorKind::NotFound));

        fs::set_permissions(top.join("job"), Permissions::from_mode(0o777)).unwrap();
        assert_eq!(checked("job/step-1"), Err(ErrorKind::Denied), "others can put a link in its place");
        assert!(checked("job").is_ok(), "the last part may be anybody's");
    }
}
