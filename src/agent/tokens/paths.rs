//! Paths of this node that a token names: only at or below its folders, by a way that nobody but this user and root can change.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::policy::Scopes;
use crate::tree::check_own_folder;

/// Checks that `path` may be saved by a token with `scopes`. Whether it is allowed by its spelling is decided before the disk is
/// looked at. The last part may be anybody's, and must not be followed if it is a link; the folders above it must be closed to
/// others, so that what was checked is what is saved. Blocking.
///
/// # Errors
/// Denied, if it is not allowed, leads over a link, or others may change the way; not found.
pub(in crate::agent) fn check_named(scopes: &Scopes, path: &Path) -> Result<PathBuf> {
    if !scopes.may_name(path) {
        return Err(Error::denied("token may not name this path")
            .expected("one at or below a folder of its scopes (folder=DIR)")
            .help("have the agent's user do it over the socket, or make a token with that folder"));
    }
    let Some(folder) = path.parent() else {
        return Err(Error::denied("token may not name the root of the file system"));
    };
    let io = |source| Error::io("folder cannot be looked at", folder, source);
    if std::fs::canonicalize(folder).map_err(io)? != folder {
        return Err(Error::denied("path of a token leads over a symbolic link")
            .at(folder.display())
            .help("name the folder itself, in the token's scopes too"));
    }
    for above in folder.ancestors() {
        check_own_folder(above).map_err(|error| {
            error.help("a token saves what lies in a folder that only the agent's user or root can change; the last part of the path may be anybody's")
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
