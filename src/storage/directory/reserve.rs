//! Disk space that a repository in a folder keeps, to free space on a full disk: removing names and collecting write to the log first.

use std::fs::{self, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, fallocate, statvfs};

use super::modes::Modes;
use crate::storage::Store;
use crate::work::blocking;

/// The file, in the folder of the repository. No object: only its space matters.
pub(crate) const RESERVE: &str = "reserve";
/// Its bytes: some 250 log entries.
const LEN: u64 = 1 << 20;
/// Bytes of a block, as `stat` counts them.
const BLOCK: u64 = 512;
/// Free bytes of a disk below which no reserve is made there.
const FREE_MIN: u64 = 16 * LEN;

impl Store {
    /// Sets disk space aside for [`Store::spend_reserve`], if the store is a folder and its disk has much space. Best effort: not every
    /// file system can, and none has to.
    ///
    /// # Cancel safety
    /// Safe: the next call goes on.
    pub async fn keep_reserve(&self) {
        let Some(folder) = self.directory().map(Path::to_owned) else { return };
        let kept = blocking(move || {
            if let Err(error) = keep(&folder) {
                tracing::debug!("no space is set aside in {}: {error}", folder.display());
            }
            Ok(())
        });
        let _ = kept.await;
    }

    /// Free bytes of the disk of a folder, as far as the file system tells them.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn free_bytes(&self) -> Option<u64> {
        let folder = self.directory()?.to_owned();
        blocking(move || Ok(free_bytes(&folder).ok())).await.ok().flatten()
    }

    /// Frees the space that was set aside. True if there was some.
    ///
    /// # Cancel safety
    /// Not safe: it may have been freed.
    pub async fn spend_reserve(&self) -> bool {
        let Some(file) = self.directory().map(reserve) else { return false };
        blocking(move || Ok(fs::remove_file(file).is_ok())).await.unwrap_or(false)
    }
}

fn reserve(folder: &Path) -> PathBuf {
    folder.join(RESERVE)
}

fn free_bytes(folder: &Path) -> io::Result<u64> {
    let disk = statvfs(folder)?;
    Ok(disk.f_bavail.saturating_mul(disk.f_frsize))
}

fn keep(folder: &Path) -> io::Result<()> {
    let file = reserve(folder);
    // A sparse file takes no space.
    if fs::symlink_metadata(&file).is_ok_and(|found| found.is_file() && found.blocks() * BLOCK >= LEN) {
        return Ok(());
    }
    if free_bytes(folder)? < FREE_MIN {
        return Ok(());
    }
    // A new file: another writer of a shared repository may have put anything there.
    match fs::remove_file(&file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mode = Modes::recorded(folder).map_or(0o600, |modes| modes.file);
    let opened = OpenOptions::new().write(true).create_new(true).mode(mode).open(&file)?;
    // Whatever the umask is.
    opened.set_permissions(Permissions::from_mode(mode))?;
    let kept = fallocate(&opened, FallocateFlags::empty(), 0, LEN);
    if kept.is_err() {
        fs::remove_file(&file)?;
    }
    Ok(kept?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_reserve_is_kept_once_and_spent_once() {
        let folder = tempfile::tempdir().unwrap();
        let location = crate::storage::Location::Directory(folder.path().to_owned());
        let store = crate::storage::open(&location, &crate::storage::StoreOptions::default()).await.unwrap();
        assert!(!store.spend_reserve().await);
        store.keep_reserve().await;
        store.keep_reserve().await;
        let found = fs::metadata(reserve(folder.path())).unwrap();
        assert_eq!(found.len(), LEN);
        assert!(found.blocks() * BLOCK >= LEN);
        fs::write(reserve(folder.path()), []).unwrap();
        fs::File::options().write(true).open(reserve(folder.path())).unwrap().set_len(LEN).unwrap();
        store.keep_reserve().await;
        let found = fs::metadata(reserve(folder.path())).unwrap();
        assert!(found.blocks() * BLOCK >= LEN, "one without space is replaced");
        assert!(store.spend_reserve().await);
        assert!(!store.spend_reserve().await);
        assert!(!Store::memory().spend_reserve().await);
    }
}
