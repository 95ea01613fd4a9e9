//! Rights of the credentials: read, write, delete. docs/security.md lists the operations that each allows.

use object_store::{ObjectStore, ObjectStoreExt as _};

use super::Check;
use crate::error::{Error, ErrorKind, Result};
use crate::repository::layout;
use crate::storage::{Store, scratch};

/// Rights at a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rights {
    /// Names can be listed, checked and restored.
    Read,
    /// Names can also be saved.
    Write,
    /// Names can also be saved, and objects written that only a collect should write.
    WriteTombstones,
    /// Unneeded objects can also be deleted.
    Delete,
}

impl Rights {
    /// `may_read`: an absent object was answered as absent.
    pub(super) fn check(self, may_read: bool) -> Check {
        const WHAT: &str = "rights";
        match self {
            Self::Read if !may_read => Check::bad(WHAT, "may neither read nor write"),
            Self::Read => Check::ok(WHAT, "may read, not write: enough to restore; not probed further"),
            Self::Write => {
                let detail =
                    "may read and write, not delete: enough to save and to restore, not to collect; not probed further";
                Check::ok(WHAT, detail)
            }
            Self::WriteTombstones => {
                let detail = "may write lists of unneeded objects (tombstone/), but not delete: a stolen key could have a collect \
                              delete what a removed name needed without its grace";
                Check::warn(WHAT, detail).help("deny s3:PutObject below tombstone/ and boundary/: docs/security.md, S3")
            }
            Self::Delete => Check::ok(WHAT, "may read, write and delete"),
        }
    }
}

/// Writes an empty object under `probe/` and deletes it. If it cannot be deleted, it stays, and one under `tombstone/` is tried.
///
/// # Errors
/// Errors of the store except a refusal.
pub(super) async fn rights(store: &Store) -> Result<Rights> {
    let objects: &dyn ObjectStore = &**store.objects();
    let key = scratch().join("rights");
    if refused(objects.put(&key, Vec::new().into()).await.map(drop))? {
        return Ok(Rights::Read);
    }
    if !refused(objects.delete(&key).await)? {
        return Ok(Rights::Delete);
    }
    // No collect mistakes it for a list.
    let denied = refused(objects.put(&layout::tombstones().join("rights"), Vec::new().into()).await.map(drop))?;
    Ok(if denied { Rights::Write } else { Rights::WriteTombstones })
}

/// Checks that absent objects are answered as absent: S3 answers 403 to both where the credentials may not list the
/// whole bucket (<https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetObject.html>, "Permissions"), and Towline asks for
/// objects that may not be there.
///
/// # Errors
/// Errors of the store except a refusal.
pub(super) async fn absence(store: &Store) -> Result<Check> {
    const WHAT: &str = "absent objects";
    match store.objects().get(&scratch().join("absent")).await.map_err(Error::from) {
        Err(error) if error.kind() == ErrorKind::Denied && store.directory().is_some() => {
            let help = "run as the owner of the folder, or change its owner or mode (`ls -ld` shows them)";
            Ok(Check::bad(WHAT, "permission denied").help(help))
        }
        Err(error) if error.kind() == ErrorKind::Denied => {
            let help = "allow s3:ListBucket on the bucket, without a condition on s3:prefix: docs/security.md";
            Ok(Check::bad(WHAT, "refused (403) instead of not found (404)").help(help))
        }
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(Check::ok(WHAT, "are not found (404)")),
    }
}

fn refused(outcome: object_store::Result<()>) -> Result<bool> {
    match outcome.map_err(Error::from) {
        Ok(()) => Ok(false),
        Err(error) if error.kind() == ErrorKind::Denied => Ok(true),
        Err(error) => Err(error),
    }
}
