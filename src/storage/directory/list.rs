//! Listing of the objects in a directory.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, SystemTime};

use futures::stream::{self, BoxStream};
use futures::{StreamExt as _, TryStreamExt as _};
use object_store::path::{Path as Key, PathPart};
use object_store::{Extensions, ListResult, ObjectMeta, Result};
use rustix::fs::{AtFlags, Dir, FileType, Stat, statat};
use rustix::io::Errno;

use super::blocking;
use super::home::Home;
use super::root::Root;
use super::staging::published_name;

/// Steps at a time.
const BATCH: usize = 1024;

/// Segments of a key, at most: more than keys have. Deeper folders are left out, as each takes time in proportion to its depth.
const DEPTH_MAX: usize = 32;

/// Listing in progress. It keeps no names but those of the folders above the entry that is read.
pub(super) struct Walk {
    root: Root,
    /// Folder to list, until it is opened. It need not exist.
    first: Option<Key>,
    /// Open folders, each in the one before.
    folders: Vec<Folder>,
}

/// A folder that is being listed.
struct Folder {
    key: Key,
    entries: Dir,
}

/// An entry of a folder, whose name is part of a key.
pub(super) struct Entry {
    pub(super) folder: Key,
    pub(super) name: String,
    pub(super) key: Key,
    pub(super) stat: Stat,
}

/// Step of a listing.
pub(super) enum Step {
    /// An entry: a file, where the whole listing makes the step.
    Entry(Box<Entry>),
    /// One that is left out.
    Other,
    /// No more entries.
    End,
}

/// Objects below `prefix`, in no order. What is no object is left out: links, devices, staging files, and names that are no keys. So is
/// what disappears meanwhile.
pub(super) fn list(home: Home, root: Root, prefix: Key) -> BoxStream<'static, Result<ObjectMeta>> {
    let walk = Walk::new(root, prefix.clone());
    stream::try_unfold((home, prefix, walk), |(home, prefix, mut walk)| async move {
        let next = move || {
            let found = walk.objects().map_err(|error| home.located(&prefix, error))?;
            Ok(found.map(|found| (stream::iter(found.into_iter().map(Ok)), (home, prefix, walk))))
        };
        blocking(Key::default(), next).await
    })
    .try_flatten()
    .boxed()
}

/// Objects and folders in the folder `prefix`, sorted.
///
/// # Errors
/// Errors of the file system.
pub(super) fn list_folder(root: &Root, prefix: &Key) -> io::Result<ListResult> {
    let mut listed = ListResult { common_prefixes: Vec::new(), objects: Vec::new(), extensions: Extensions::default() };
    let mut folder = match root.folder(prefix) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(listed),
        folder => Folder::of(prefix.clone(), &folder?)?,
    };
    loop {
        let entry = match folder.read()? {
            Step::Entry(entry) => entry,
            Step::Other => continue,
            Step::End => break,
        };
        match FileType::from_raw_mode(entry.stat.st_mode) {
            FileType::RegularFile => listed.objects.extend(entry.object()),
            FileType::Directory => listed.common_prefixes.extend(within_depth(entry.key)),
            _ => {}
        }
    }
    listed.common_prefixes.sort_unstable();
    listed.objects.sort_unstable_by(|a, b| a.location.cmp(&b.location));
    Ok(listed)
}

impl Walk {
    /// A listing of the folder `prefix`, and of those below.
    pub(super) fn new(root: Root, prefix: Key) -> Self {
        Self { root, first: Some(prefix), folders: Vec::new() }
    }

    /// Next objects; none at the end.
    fn objects(&mut self) -> io::Result<Option<Vec<ObjectMeta>>> {
        let mut found = Vec::new();
        for _ in 0..BATCH {
            match self.step()? {
                Step::Entry(file) => found.extend(file.object()),
                Step::Other => {}
                Step::End if found.is_empty() => return Ok(None),
                Step::End => break,
            }
        }
        Ok(Some(found))
    }

    /// Next step.
    pub(super) fn step(&mut self) -> io::Result<Step> {
        if let Some(first) = self.first.take() {
            match self.root.folder(&first) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                folder => self.folders.push(Folder::of(first, &folder?)?),
            }
        }
        let Some(folder) = self.folders.last_mut() else { return Ok(Step::End) };
        match folder.read()? {
            Step::Entry(entry) => match FileType::from_raw_mode(entry.stat.st_mode) {
                FileType::RegularFile => return Ok(Step::Entry(entry)),
                FileType::Directory => self.enter(entry.key)?,
                _ => {}
            },
            Step::Other => {}
            Step::End => drop(self.folders.pop()),
        }
        Ok(Step::Other)
    }

    /// Goes on with the folder `key`, if it is still one.
    fn enter(&mut self, key: Key) -> io::Result<()> {
        let Some(key) = within_depth(key) else { return Ok(()) };
        match self.root.folder(&key) {
            Err(error) if is_gone(&error) => {}
            folder => self.folders.push(Folder::of(key, &folder?)?),
        }
        Ok(())
    }

    /// True if the folder of the last file has an entry `name`.
    pub(super) fn has_beside(&self, name: &str) -> io::Result<bool> {
        let Some(folder) = self.folders.last() else { return Ok(false) };
        Ok(statat(folder.entries.fd()?, name, AtFlags::SYMLINK_NOFOLLOW).is_ok())
    }
}

impl Folder {
    fn of(key: Key, folder: &OwnedFd) -> io::Result<Self> {
        Ok(Self { key, entries: Dir::read_from(folder)? })
    }

    /// Next entry; one that is no part of a key, or just disappeared, is left out.
    fn read(&mut self) -> io::Result<Step> {
        let Some(read) = self.entries.read() else { return Ok(Step::End) };
        let read = read?;
        let Ok(name) = read.file_name().to_str() else { return Ok(Step::Other) };
        let Some(key) = key_of(&self.key, name) else { return Ok(Step::Other) };
        let stat = match statat(self.entries.fd()?, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(Step::Other),
            stat => stat?,
        };
        Ok(Step::Entry(Box::new(Entry { folder: self.key.clone(), name: name.to_owned(), key, stat })))
    }
}

impl Entry {
    /// Description of the object; none of a staging file.
    fn object(self) -> Option<ObjectMeta> {
        published_name(&self.name).is_none().then(|| object_meta(self.key, &self.stat))
    }
}

/// True if a folder was removed, or exchanged for something else.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory | io::ErrorKind::Other)
}

/// Key of an entry of the folder `folder`; none if its name is no part of a key.
fn key_of(folder: &Key, name: &str) -> Option<Key> {
    let part = PathPart::parse(name).ok()?;
    Some(folder.clone().join(part))
}

/// The folder `key`, if keys may be in it.
fn within_depth(key: Key) -> Option<Key> {
    (key.parts().count() < DEPTH_MAX).then_some(key)
}

/// Description of an object.
pub(super) fn object_meta(location: Key, stat: &Stat) -> ObjectMeta {
    let seconds = Duration::from_secs(u64::try_from(stat.st_mtime).unwrap_or(0));
    let nanoseconds = Duration::from_nanos(stat.st_mtime_nsec);
    let modified = SystemTime::UNIX_EPOCH + seconds + nanoseconds;
    ObjectMeta {
        location,
        last_modified: modified.into(),
        size: u64::try_from(stat.st_size).unwrap_or(0),
        e_tag: Some(e_tag(stat)),
        version: None,
    }
}

/// Tag of the content of a file: its inode, time of the last write in nanoseconds, and length.
pub(super) fn e_tag(stat: &Stat) -> String {
    format!("{:x}-{:x}-{:x}-{:x}", stat.st_ino, stat.st_mtime, stat.st_mtime_nsec, stat.st_size)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with very many entries, files and folders, is read in parts, and its names are not kept.
    #[test]
    fn a_listing_holds_no_more_than_a_batch() {
        let dir = tempfile::tempdir().unwrap();
        let count = 2 * BATCH;
        for number in 0..count {
            let folder = dir.path().join(format!("folder-{number}"));
            std::fs::create_dir(&folder).unwrap();
            std::fs::write(folder.join("below"), "").unwrap();
            std::fs::write(dir.path().join(format!("file-{number}")), "").unwrap();
        }
        let mut walk = Walk::new(Root::open(dir.path()).unwrap(), Key::default());
        let mut keys = Vec::new();
        let mut batches = 0;
        while let Some(found) = walk.objects().unwrap() {
            assert!(found.len() <= BATCH && walk.folders.len() <= 2);
            keys.extend(found.into_iter().map(|meta| meta.location));
            batches += 1;
        }
        assert!(batches >= 6, "each folder is opened, read and closed");
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), 2 * count);
        let top = list_folder(&Root::open(dir.path()).unwrap(), &Key::default()).unwrap();
        assert_eq!((top.objects.len(), top.common_prefixes.len()), (count, count));
    }
}
