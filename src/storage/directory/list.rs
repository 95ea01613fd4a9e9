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

/// Entries whose metadata is read at a time.
const BATCH: usize = 1024;

/// Segments of a key, at most: more than keys have. Deeper folders are left out, as each takes time in proportion to its depth.
const DEPTH_MAX: usize = 32;

/// Listing in progress.
struct Walk {
    root: Root,
    /// Folders to list.
    folders: Vec<Key>,
    /// Folder that is being listed, and names in it.
    current: Option<(OwnedFd, Key, Vec<String>)>,
    /// True until the first folder was opened. It need not exist.
    is_first: bool,
}

/// Objects below `prefix`, in no order. What is no object is left out: links, devices, staging files, and names that are no keys. So is
/// what disappears meanwhile.
pub(super) fn list(home: Home, root: Root, prefix: Key) -> BoxStream<'static, Result<ObjectMeta>> {
    let walk = Walk { root, folders: vec![prefix.clone()], current: None, is_first: true };
    stream::try_unfold((home, prefix, walk), |(home, prefix, mut walk)| async move {
        let next = move || {
            let found = walk.next().map_err(|error| home.located(&prefix, error))?;
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
    let (mut walk, mut listed) = (
        Walk { root: root.clone(), folders: vec![prefix.clone()], current: None, is_first: true },
        ListResult { common_prefixes: Vec::new(), objects: Vec::new(), extensions: Extensions::default() },
    );
    let mut is_open = true;
    while is_open {
        let found = walk.next()?;
        listed.objects.extend(found.unwrap_or_default());
        is_open = walk.current.is_some();
    }
    listed.common_prefixes = walk.folders;
    listed.common_prefixes.sort_unstable();
    listed.objects.sort_unstable_by(|a, b| a.location.cmp(&b.location));
    Ok(listed)
}

impl Walk {
    /// Next objects; none at the end.
    fn next(&mut self) -> io::Result<Option<Vec<ObjectMeta>>> {
        let (folder, key, mut names) = match self.current.take() {
            Some(current) => current,
            None => {
                let Some(key) = self.folders.pop() else { return Ok(None) };
                let is_first = std::mem::take(&mut self.is_first);
                match self.root.folder(&key) {
                    Ok(folder) => {
                        let names = names(&folder)?;
                        (folder, key, names)
                    }
                    Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Some(Vec::new())),
                    // A folder below was exchanged for something else.
                    Err(error)
                        if !is_first && matches!(error.kind(), io::ErrorKind::Other | io::ErrorKind::NotADirectory) =>
                    {
                        return Ok(Some(Vec::new()));
                    }
                    Err(error) => return Err(error),
                }
            }
        };
        let mut found = Vec::new();
        for name in names.split_off(names.len().saturating_sub(BATCH)) {
            let Some(key) = key_of(&key, &name) else { continue };
            let stat = match statat(&folder, &name, AtFlags::SYMLINK_NOFOLLOW) {
                Err(Errno::NOENT) => continue,
                stat => stat?,
            };
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::RegularFile if published_name(&name).is_none() => found.push(object_meta(key, &stat)),
                FileType::Directory => self.folders.extend(within_depth(key)),
                _ => {}
            }
        }
        if !names.is_empty() {
            self.current = Some((folder, key, names));
        }
        Ok(Some(found))
    }
}

/// Key of an entry of the folder `folder`; none if its name is no part of a key.
pub(super) fn key_of(folder: &Key, name: &str) -> Option<Key> {
    let part = PathPart::parse(name).ok()?;
    Some(folder.clone().join(part))
}

/// The folder `key`, if keys may be in it.
pub(super) fn within_depth(key: Key) -> Option<Key> {
    (key.parts().count() < DEPTH_MAX).then_some(key)
}

/// Names in a folder. One that is not UTF-8 is no part of a key.
fn names(folder: &OwnedFd) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(folder)? {
        if let Ok(name) = entry?.file_name().to_str()
            && name != "."
            && name != ".."
        {
            names.push(name.to_owned());
        }
    }
    Ok(names)
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
