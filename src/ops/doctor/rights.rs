//! Rights of the credentials: read, write, delete. docs/security.md says what each is enough for.

use object_store::{ObjectStore, ObjectStoreExt as _};

use super::Check;
use crate::error::{Error, ErrorKind, Result};
use crate::storage::{Store, scratch};

/// Rights at a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rights {
    /// Names can be listed, checked and restored.
    Read,
    /// They can be saved too.
    Write,
    /// Unneeded objects can be deleted too.
    Delete,
}

impl Rights {
    pub(super) fn check(self) -> Check {
        const WHAT: &str = "rights";
        match self {
            Self::Read => Check::ok(WHAT, "may read, not write: enough to restore; not probed further"),
            Self::Write => {
                let detail =
                    "may read and write, not delete: enough to save and to restore, not to collect; not probed further";
                Check::ok(WHAT, detail)
            }
            Self::Delete => Check::ok(WHAT, "may read, write and delete"),
        }
    }
}

/// Writes an empty object under `probe/` and deletes it. Where it may not be deleted, it stays.
///
/// # Errors
/// Whatever the store answers but a refusal.
pub(super) async fn rights(store: &Store) -> Result<Rights> {
    let objects: &dyn ObjectStore = &**store.objects();
    let key = scratch().join("rights");
    if refused(objects.put(&key, Vec::new().into()).await.map(drop))? {
        return Ok(Rights::Read);
    }
    let denied = refused(objects.delete(&key).await)?;
    Ok(if denied { Rights::Write } else { Rights::Delete })
}

/// Checks that absent objects are answered as absent: S3 answers 403 to both where the credentials may not list the
/// whole bucket (<https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetObject.html>, "Permissions"), and Towline asks for
/// objects that may not be there.
///
/// # Errors
/// Whatever the store answers but a refusal.
pub(super) async fn absence(store: &Store) -> Result<Check> {
    const WHAT: &str = "absent objects";
    match store.objects().get(&scratch().join("absent")).await.map_err(Error::from) {
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
