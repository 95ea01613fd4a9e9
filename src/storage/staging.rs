//! Staging files that a crash leaves in a directory, and that listings hide.
//!
//! `object_store` writes an object of a directory as `KEY#1` (`#2`, ... if that is taken), fsyncs it, and publishes it
//! by a rename, or by a hard link where the object must not exist yet; then it fsyncs the folder
//! (<https://github.com/apache/arrow-rs-object-store/blob/main/src/local.rs>). A crash before publication leaves a
//! torn `KEY#1`; a crash between link and unlink leaves `KEY#1` as a second name of the published object. Nothing reads
//! either, `list` leaves both out, and a later write of the same key takes the next number: they only cost space.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::clock::Timestamp;
use crate::error::{Error, Result};

/// A staging file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagingFile {
    /// The key of the object it was to become.
    pub key: String,
    /// Path.
    pub path: PathBuf,
    /// Its length in bytes.
    pub len: u64,
    /// When it was last written, by the file system's clock.
    pub modified: Timestamp,
    /// Whether the object exists: then this file can never be published by a create any more.
    pub published: bool,
}

impl StagingFile {
    /// Removes it; one that is gone already is no error.
    ///
    /// Its writer may be asleep rather than dead. That is harmless where the key is written by one writer once (packs,
    /// segments): the writer's rename fails, and it reports that. For a key that several may create (the log), remove
    /// only what is `published`: else another writer could stage under the freed name, and the sleeper would publish
    /// the other's half-written file.
    pub fn remove(&self) -> Result<()> {
        match std::fs::remove_file(&self.path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::io("staging file cannot be removed", &self.path, error))
            }
            _ => Ok(()),
        }
    }
}

/// The staging files below `root` that were not written for `age` or longer, in order of path. Blocking.
pub fn staging_files(root: &Path, now: Timestamp, age: Duration) -> Result<Vec<StagingFile>> {
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
                found.extend(staging_file(root, &entry, now, age));
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

fn staging_file(root: &Path, entry: &std::fs::DirEntry, now: Timestamp, age: Duration) -> Option<StagingFile> {
    let path = entry.path();
    let object = published_name(&path)?;
    // A file that vanishes here was just published or given up.
    let metadata = entry.metadata().ok()?;
    let modified = Timestamp(metadata.mtime().saturating_mul(1_000_000_000).saturating_add(metadata.mtime_nsec()));
    if now.since(modified) < age {
        return None;
    }
    let key = object.strip_prefix(root).ok()?.to_str()?.to_owned();
    Some(StagingFile { key, len: metadata.len(), modified, published: object.exists(), path })
}

/// `DIR/name` of `DIR/name#12`; the rule is `object_store`'s, which refuses objects so named.
fn published_name(path: &Path) -> Option<PathBuf> {
    let (name, number) = path.file_name()?.to_str()?.split_once('#')?;
    (!name.is_empty() && !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
        .then(|| path.with_file_name(name))
}

#[cfg(test)]
mod tests {
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

        let now = SystemClock.now();
        let found = staging_files(dir.path(), now, Duration::ZERO).unwrap();
        let seen: Vec<_> = found.iter().map(|f| (f.key.as_str(), f.published, f.len)).collect();
        assert_eq!(seen, [("log/00", true, 5), ("pack/S/P", false, 4)]);
        assert!(staging_files(dir.path(), now, Duration::from_hours(1)).unwrap().is_empty());

        for file in &found {
            file.remove().unwrap();
            file.remove().unwrap();
        }
        assert!(staging_files(dir.path(), now, Duration::ZERO).unwrap().is_empty());
        assert_eq!(store.get(&"log/00".into()).await.unwrap().bytes().await.unwrap(), "entry");
    }
}
