//! Selection of the entries to restore, and their destinations.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::super::subpath::{entry, within};
use crate::error::{Error, Result};
use crate::format::{EntryKind, Form, TreeEntry};
use crate::pattern::{PathMatcher, Pattern};
use crate::repository::Saved;
use crate::tree::check_file_name;
use crate::work::blocking;

/// One entry with its path below the folder that is restored to.
#[derive(Debug)]
pub(super) struct Item {
    /// Empty for the folder itself.
    pub(super) path: Vec<u8>,
    at: usize,
}

/// Entries to restore, in the manifest's order: a folder before its content.
#[derive(Debug)]
pub(super) struct Items {
    /// Destination folder.
    pub(super) folder: PathBuf,
    /// True for a tree, false for a single file.
    pub(super) is_folder: bool,
    /// Items to restore.
    pub(super) list: Vec<Item>,
    /// Keep setuid and setgid bits of files.
    pub(super) keep_setuid: bool,
}

/// Setuid and setgid bits, by which a file runs as its owner or group.
const SETUID_SETGID: u32 = 0o6000;

impl Items {
    /// Selects all of `saved`, or the entry at `subpath`, for `dest`; of a folder only entries that match the patterns `only`, if
    /// there are any, with their parent folders.
    pub(super) fn choose(saved: &Saved, subpath: Option<&[u8]>, only: &[String], dest: &Path) -> Result<Self> {
        let manifest = &saved.manifest;
        let below = match (subpath, manifest.form) {
            (None, Form::File) => manifest.entries.first().map(|entry| entry.path.as_slice()).unwrap_or_default(),
            (None, Form::Folder) => &[],
            (Some(path), _) => path.strip_suffix(b"/").unwrap_or(path),
        };
        let root = entry(saved, below)?;
        if !matches!(root.kind, EntryKind::Folder) {
            if let Some(pattern) = only.first() {
                return Err(Error::usage("what is to be restored is one file, so no paths of it can be chosen")
                    .at(&saved.name)
                    .got(pattern));
            }
            let items = Self::single(saved, below, dest)?;
            items.check_names(saved)?;
            return Ok(items);
        }
        let relative = |(at, entry): (usize, &TreeEntry)| Some(Item { path: within(&entry.path, below)?.to_vec(), at });
        let mut list: Vec<Item> = manifest.entries.iter().enumerate().filter_map(relative).collect();
        if !only.is_empty() {
            list = taken(list, only)
                .map_err(|error| error.help(format!("`towline show {} --files` lists the paths", saved.name)))?;
        }
        let items = Self { folder: dest.to_owned(), is_folder: true, list, keep_setuid: false };
        items.check_names(saved)?;
        Ok(items)
    }

    /// As [`Items::choose`], on a thread for long work: patterns are matched with all paths.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub(super) async fn choose_apart(
        saved: &Arc<Saved>,
        subpath: Option<&[u8]>,
        only: &[String],
        dest: &Path,
    ) -> Result<Self> {
        let (saved, subpath) = (Arc::clone(saved), subpath.map(<[u8]>::to_vec));
        let (only, dest) = (only.to_vec(), dest.to_owned());
        blocking(move || Self::choose(&saved, subpath.as_deref(), &only, &dest)).await
    }

    /// Refuses files and links with names of unfinished files, which no save makes: the next restore would take them for its own.
    fn check_names(&self, saved: &Saved) -> Result<()> {
        for item in &self.list {
            if !matches!(item.entry(saved)?.kind, EntryKind::Folder) {
                check_file_name(&item.path).map_err(|error| {
                    Error::unsupported("a path of the saved tree cannot be restored as it is")
                        .at(&saved.name)
                        .source(error)
                        .help("restore it alone to another name, and the other paths with `--path`")
                })?;
            }
        }
        Ok(())
    }

    /// Mode of a restored `entry`, without setuid and setgid bits by default: the author of a tree must not choose programs that
    /// run with the rights of the restoring user.
    pub(super) fn mode(&self, entry: &TreeEntry) -> u32 {
        if self.keep_setuid { entry.mode } else { entry.mode & !SETUID_SETGID }
    }

    /// Selects one file or link, for the path `dest`, or into it if it is a folder or ends in `/`.
    fn single(saved: &Saved, below: &[u8], dest: &Path) -> Result<Self> {
        let at = saved.manifest.entries.iter().position(|entry| entry.path == below).unwrap_or(0);
        let own = below.rsplit(|&byte| byte == b'/').next().unwrap_or(below);
        let into = dest.is_dir() || dest.as_os_str().as_bytes().ends_with(b"/");
        let (folder, name) = match dest.file_name() {
            _ if into => (dest.to_owned(), own),
            Some(name) => {
                let parent = dest.parent().filter(|parent| !parent.as_os_str().is_empty());
                (parent.unwrap_or(Path::new(".")).to_owned(), OsStr::as_bytes(name))
            }
            None => return Err(Error::usage("destination names no file").at(dest.display())),
        };
        let list = vec![Item { path: name.to_vec(), at }];
        Ok(Self { folder, is_folder: false, list, keep_setuid: false })
    }

    /// Bytes in their files.
    pub(super) fn bytes(&self, saved: &Saved) -> u64 {
        self.contents(saved).sum()
    }

    /// Number of files among them.
    pub(super) fn files(&self, saved: &Saved) -> u64 {
        self.contents(saved).count() as u64
    }

    /// True if all of them are folders.
    pub(super) fn is_folders_only(&self, saved: &Saved) -> bool {
        self.list.iter().all(|item| item.entry(saved).is_ok_and(|entry| matches!(entry.kind, EntryKind::Folder)))
    }

    fn contents<'a>(&'a self, saved: &'a Saved) -> impl Iterator<Item = u64> + 'a {
        self.list.iter().filter_map(|item| match &item.entry(saved).ok()?.kind {
            EntryKind::File(content) => Some(content.size),
            _ => None,
        })
    }
}

/// Items that match one of `patterns`, and the folders above them, except the root folder, whose destination may have other
/// content.
///
/// # Errors
/// Usage, for a malformed pattern; not found, if one matches nothing.
fn taken(items: Vec<Item>, patterns: &[String]) -> Result<Vec<Item>> {
    let mut wanted = BTreeSet::new();
    for pattern in patterns {
        let pattern = Pattern::of_path(pattern)?;
        let mut any = false;
        let mut matcher = PathMatcher::new(|path: &[u8]| pattern.takes(path));
        for item in items.iter().filter(|item| pattern.text().is_empty() || matcher.takes(&item.path)) {
            any = true;
            let mut path = Some(item.path.as_slice());
            // The folders above a wanted one are wanted already.
            while let Some(next) = path.filter(|path| !wanted.contains(*path)) {
                wanted.insert(next.to_vec());
                path = next.iter().rposition(|byte| *byte == b'/').and_then(|end| next.get(..end));
            }
        }
        if !any {
            return Err(Error::not_found(format!("no path of the saved tree matches {:?}", pattern.text())));
        }
    }
    Ok(items.into_iter().filter(|item| !item.path.is_empty() && wanted.contains(&item.path)).collect())
}

impl Item {
    /// Entry.
    pub(super) fn entry<'a>(&self, saved: &'a Saved) -> Result<&'a TreeEntry> {
        saved.manifest.entries.get(self.at).ok_or_else(|| Error::other("an item names no entry"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunker::Cut;
    use crate::clock::Timestamp;
    use crate::error::ErrorKind;
    use crate::format::Content;
    use crate::repository::travel::tests::tree;

    #[test]
    fn names_of_unfinished_files_are_not_restored() {
        let unfinished = ".towline-0123456789abcdef-0.part";
        let content = Content { size: 0, cut: Cut::Content, pieces: Vec::new(), tensors: Vec::new() };
        let entry = |path: &str, kind| TreeEntry { path: path.into(), mode: 0o755, mtime: Timestamp(1), kind };
        let mut saved = tree(&[], 0);
        saved.manifest.entries = vec![
            entry("", EntryKind::Folder),
            entry(unfinished, EntryKind::File(content.clone())),
            entry("model", EntryKind::File(content)),
        ];
        let chosen = |subpath: Option<&str>, only: &[String], dest: &str| {
            Items::choose(&saved, subpath.map(str::as_bytes), only, Path::new(dest)).map(|items| items.list.len())
        };
        let refused = chosen(None, &[], "/none/dest").unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
        assert!(refused.help_text().is_some_and(|help| help.contains("`--path`")), "{refused:?}");
        assert_eq!(chosen(None, &["model".to_owned()], "/none/dest").unwrap(), 1);
        assert_eq!(chosen(Some(unfinished), &[], "/none/dest/").unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!(chosen(Some(unfinished), &[], "/none/other").unwrap(), 1);
    }
}
