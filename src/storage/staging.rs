//! Staging files that a crash leaves in a directory; listings do not show them.
//!
//! `object_store` writes an object of a directory as `KEY#1` (`#2`, ... if that is taken), fsyncs it, and publishes it
//! by a rename, or by a hard link where the object must not exist yet; then it fsyncs the folder
//! (<https://github.com/apache/arrow-rs-object-store/blob/main/src/local.rs>). A crash before publication leaves a
//! torn `KEY#1`; a crash between link and unlink leaves `KEY#1` as a second name of the published object. Nothing reads
//! either, `list` leaves both out, and a later write of the same key takes the next number: they only cost space.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::clock::Timestamp;
use crate::error::{Error, Result};

/// A staging file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagingFile {
    /// Key of the object that it was written for.
    pub key: String,
    /// Path.
    pub path: PathBuf,
    /// Length in bytes.
    pub len: u64,
    /// Time of its last write, by the file system's clock.
    pub modified: Timestamp,
    /// True if the object exists: a create can then no longer publish this file.
    pub published: bool,
}

impl StagingFile {
    /// Removes the file; a missing one is no error.
    ///
    /// Its writer may be suspended rather than dead. That is harmless for a key that one writer writes once (packs, segments):
    /// the writer's rename fails, and it reports that. For a key that several writers may create (the log), remove only
    /// `published` files. Otherwise another writer could stage under the same name, and the suspended one would publish its
    /// incomplete file.
    pub fn remove(&self) -> Result<()> {
        match std::fs::remove_file(&self.path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::io("staging file cannot be removed", &self.path, error))
            }
            _ => Ok(()),
        }
    }
}

/// Staging files below `root`, sorted by path. Blocking.
pub fn staging_files(root: &Path) -> Result<Vec<StagingFile>> {
    let mut found = Vec::new();
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let entries = match std::fs::read_dir(&folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && folder != root => continue,
            entries => entries.map_err(|e| Error::io("folder cannot be read", &folder, e))?,
        };
        for entry in entries {
            let entry = entry.map_err(|e| Error::io("folder cannot be read", &folder, e))?;
            let Ok(kind) = entry.file_type() else { continue };
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file() {
                found.extend(staging_file(root, &entry));
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

fn staging_file(root: &Path, entry: &std::fs::DirEntry) -> Option<StagingFile> {
    let path = entry.path();
    let object = published_name(&path)?;
    // A file that disappears here was just published or discarded.
    let metadata = entry.metadata().ok()?;
    let modified = Timestamp(metadata.mtime().saturating_mul(1_000_000_000).saturating_add(metadata.mtime_nsec()));
    let key = object.strip_prefix(root).ok()?.to_str()?.to_owned();
    Some(StagingFile { key, len: metadata.len(), modified, published: object.exists(), path })
}

/// Name `DIR/name` for `DIR/name#12`, by the rule of `object_store`, which refuses objects with such names.
fn published_name(path: &Path) -> Option<PathBuf> {
    let (name, number) = path.file_name()?.to_str()?.split_once('#')?;
    (!name.is_empty() && !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
        .then(|| path.with_file_name(name))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::clock::{Clock, SystemClock};
    use object_store::{ObjectStore, ObjectStoreExt};

    #[tokio::test]
    async fn leftovers_are_hidden_from_listings_and_found_here() {
        let dir = tempfile::tempdir().unwrap();
        let store = object_store::local::LocalFileSystem::new_with_prefix(dir.path()).unwrap();
        store.put(&"log/00".into(), "entry".into()).await.unwrap();
        std::fs::hard_link(dir.path().join("log/00"), dir.path().join("log/00#1")).unwrap();
        std::fs::create_dir_all(dir.path().join("pack/S")).unwrap();
        std::fs::write(dir.path().join("pack/S/P#2"), "torn").unwrap();
        std::fs::write(dir.path().join("pack/S/no#staging"), "an object").unwrap();

        let listed: Vec<_> = futures::TryStreamExt::try_collect(store.list(None)).await.unwrap();
        assert_eq!(listed.iter().map(|m| m.location.as_ref()).filter(|k| k.ends_with("#1")).count(), 0);

        let found = staging_files(dir.path()).unwrap();
        let seen: Vec<_> = found.iter().map(|f| (f.key.as_str(), f.published, f.len)).collect();
        assert_eq!(seen, [("log/00", true, 5), ("pack/S/P", false, 4)]);
        assert!(found.iter().all(|file| SystemClock.now().since(file.modified) < Duration::from_hours(1)));

        for file in &found {
            file.remove().unwrap();
            file.remove().unwrap();
        }
        assert!(staging_files(dir.path()).unwrap().is_empty());
        assert_eq!(store.get(&"log/00".into()).await.unwrap().bytes().await.unwrap(), "entry");
    }
}
