//! Staging files that a crash leaves in a directory; listings do not show them.
//!
//! An object is written as `KEY#1` (`#2`, ... if that is taken), synced, and published by a rename, or by a hard link where the object
//! must not exist yet; then its folder is synced. A crash before publication leaves a torn `KEY#1`; a crash between link and unlink
//! leaves `KEY#1` as a second name of the published object. Nothing reads either, listings leave both out, and a later write of the same
//! key takes the next number: they only cost space. `object_store` does the same
//! (<https://github.com/apache/arrow-rs-object-store/blob/main/src/local.rs>).

use std::io;
use std::path::{Path, PathBuf};

use object_store::path::Path as Key;
use rustix::fs::{AtFlags, unlinkat};

use super::list::{self, Entry, Step, Walk};
use super::root::Root;
use crate::clock::Timestamp;
use crate::error::{Error, Result};

/// Maximum number of staging files that are found at once.
const STAGING_MAX: usize = 10_000;

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
    /// Root of the repository.
    root: PathBuf,
    /// Key of the folder, and the file's name there.
    folder: Key,
    name: String,
}

impl StagingFile {
    fn of(root: &Path, key: &Key, entry: Entry, published: bool) -> Self {
        let Entry { folder, name, key: file, stat } = entry;
        let meta = list::object_meta(file, &stat);
        let modified = stat.st_mtime.saturating_mul(1_000_000_000).saturating_add(stat.st_mtime_nsec.cast_signed());
        Self {
            key: key.to_string(),
            path: root.join(meta.location.as_ref()),
            len: meta.size,
            modified: Timestamp(modified),
            published,
            root: root.to_owned(),
            folder,
            name,
        }
    }

    /// Removes the file; a missing one is no error.
    ///
    /// Its writer may be suspended rather than dead. That is harmless for a key that one writer writes once (packs, segments):
    /// the writer's rename fails, and it reports that. For a key that several writers may create (the log), remove only
    /// `published` files. Otherwise another writer could stage under the same name, and the suspended one would publish its
    /// incomplete file.
    pub fn remove(&self) -> Result<()> {
        let removed = Root::open(&self.root).and_then(|root| root.folder(&self.folder));
        match removed.and_then(|folder| Ok(unlinkat(folder, &self.name, AtFlags::empty())?)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(Error::io("staging file cannot be removed", &self.path, error))
            }
            _ => Ok(()),
        }
    }
}

/// Staging files below `root` that `pick` picks, sorted by path. At most 10,000: further ones are found once these are removed.
/// Blocking.
///
/// # Errors
/// Errors of the file system.
pub fn staging_files(root: &Path, pick: impl Fn(&StagingFile) -> bool) -> Result<Vec<StagingFile>> {
    let failed = |error: io::Error| Error::io("folder cannot be read", root, error);
    let mut walk = Walk::new(Root::open(root).map_err(failed)?, Key::default());
    let mut found = Vec::new();
    while found.len() < STAGING_MAX {
        let entry = match walk.step().map_err(failed)? {
            Step::Entry(entry) => entry,
            Step::Other => continue,
            Step::End => break,
        };
        let Some(object) = published_name(&entry.name) else { continue };
        let published = walk.has_beside(object).map_err(failed)?;
        let key = entry.folder.clone().join(object);
        found.extend(Some(StagingFile::of(root, &key, *entry, published)).filter(&pick));
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

/// Name of the object that a staging file is written for; none for other files.
pub(super) fn published_name(name: &str) -> Option<&str> {
    let (object, number) = name.split_once('#')?;
    let is_staged = !object.is_empty() && !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    is_staged.then_some(object)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use object_store::{ObjectStore as _, ObjectStoreExt as _};

    use super::super::{Directory, Home, Modes, Sharing};
    use super::*;
    use crate::clock::{Clock as _, SystemClock};

    #[tokio::test]
    async fn leftovers_are_hidden_from_listings_and_found_here() {
        let dir = tempfile::tempdir().unwrap();
        let store = Directory::new(Home::of(dir.path()).unwrap(), Modes::of(Sharing::Private));
        store.put(&"log/00".into(), "entry".into()).await.unwrap();
        std::fs::hard_link(dir.path().join("log/00"), dir.path().join("log/00#1")).unwrap();
        std::fs::create_dir_all(dir.path().join("pack/S")).unwrap();
        std::fs::write(dir.path().join("pack/S/P#2"), "torn").unwrap();
        std::fs::write(dir.path().join("pack/S/no#staging"), "an object").unwrap();

        let listed: Vec<_> = futures::TryStreamExt::try_collect(store.list(None)).await.unwrap();
        assert_eq!(listed.iter().map(|m| m.location.as_ref()).filter(|k| k.ends_with("#1")).count(), 0);

        let found = staging_files(dir.path(), |_| true).unwrap();
        let seen: Vec<_> = found.iter().map(|f| (f.key.as_str(), f.published, f.len)).collect();
        assert_eq!(seen, [("log/00", true, 5), ("pack/S/P", false, 4)]);
        assert!(found.iter().all(|file| SystemClock.now().since(file.modified) < Duration::from_hours(1)));

        for file in &found {
            file.remove().unwrap();
            file.remove().unwrap();
        }
        assert!(staging_files(dir.path(), |_| true).unwrap().is_empty());
        assert_eq!(store.get(&"log/00".into()).await.unwrap().bytes().await.unwrap(), "entry");
    }
    #[test]
    fn very_many_leftovers_are_found_in_parts() {
        let dir = tempfile::tempdir().unwrap();
        let count = STAGING_MAX + 10;
        for folder in ["log", "other"] {
            std::fs::create_dir(dir.path().join(folder)).unwrap();
        }
        for number in 0..count {
            std::fs::write(dir.path().join(format!("log/{number}#1")), "").unwrap();
            std::fs::write(dir.path().join(format!("other/{number}#1")), "").unwrap();
        }
        for expected in [STAGING_MAX, count - STAGING_MAX, 0] {
            let found = staging_files(dir.path(), |file| file.key.starts_with("log/")).unwrap();
            assert_eq!(found.len(), expected);
            found.iter().try_for_each(StagingFile::remove).unwrap();
        }
    }
}
