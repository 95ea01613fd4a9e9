//! Applies changes to a tree. Pure: no chunk is read.

use std::collections::{BTreeMap, HashMap};

use super::{Changes, Graft};
use crate::clock::Timestamp;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{ChunkList, EntryKind, Form, Manifest, TreeEntry};
use crate::ops::save::assemble::renumbered;
use crate::ops::shown;
use crate::tree::{check_file_name, check_path};

/// Permissions of folders that a rename creates.
const FOLDER_MODE: u32 = 0o755;

/// Entry at a path, and the chunk list that it refers to.
type ExistingEntry<'a> = (&'a TreeEntry, &'a ChunkList);

/// Entries of the new tree, by path.
struct Paths<'a> {
    there: BTreeMap<Vec<u8>, ExistingEntry<'a>>,
    /// Entry of a folder that exists only because of its content.
    implied: ExistingEntry<'a>,
}

/// Applies `changes` to `base`, or to an empty folder; `new` is the tree of the files to put. Labels of both are merged; those of
/// `new` win.
///
/// # Errors
/// Not found, if a path to remove or rename does not exist; conflict, if an entry is in the way of a new one; usage, for
/// an invalid path or a name that restores remove, or a `base` that is a single file.
pub(super) fn amended(
    base: Option<&Manifest>,
    new: Option<&Manifest>,
    changes: &Changes,
    now: Timestamp,
) -> Result<Manifest> {
    if base.is_some_and(|base| base.form == Form::File) {
        return Err(Error::usage("the name stands for a single file, which has no paths to change")
            .help("save it anew, or put the files under another name"));
    }
    let folder = TreeEntry { path: Vec::new(), mode: FOLDER_MODE, mtime: now, kind: EntryKind::Folder };
    let none = ChunkList::default();
    let mut paths = Paths { there: BTreeMap::new(), implied: (&folder, &none) };
    paths.there.insert(Vec::new(), paths.implied);
    let entries = base.into_iter().flat_map(|base| base.entries.iter().map(|entry| (entry, &base.chunks)));
    paths.there.extend(entries.map(|(entry, chunks)| (entry.path.clone(), (entry, chunks))));
    for path in &changes.remove {
        checked(path)?;
        paths.take(path)?;
    }
    for (from, to) in &changes.rename {
        checked(from).and_then(|()| checked(to))?;
        paths.rename(from, to)?;
    }
    for graft in &changes.graft {
        paths.graft(graft)?;
    }
    for entry in new.into_iter().flat_map(|new| &new.entries) {
        let chunks = new.map_or(&none, |new| &new.chunks);
        paths.put(entry, chunks)?;
    }
    let mut labels = base.map(|base| base.labels.clone()).unwrap_or_default();
    labels.extend(new.into_iter().flat_map(|new| new.labels.clone()));
    let mut tree = Manifest { labels, ..Manifest::default() };
    let mut numbers = HashMap::new();
    for (path, (entry, chunks)) in paths.there {
        if !is_folder(entry) && base.is_none_or(|base| base.entry(&path).is_none()) {
            check_file_name(&path)?;
        }
        let kind = match &entry.kind {
            EntryKind::File(content) => EntryKind::File(renumbered(content, chunks, &mut tree.chunks, &mut numbers)?),
            other => other.clone(),
        };
        tree.entries.push(TreeEntry { path, kind, ..*entry });
    }
    Ok(tree)
}

impl<'a> Paths<'a> {
    /// Removes the entry at `path` with its content.
    fn take(&mut self, path: &[u8]) -> Result<Vec<(Vec<u8>, ExistingEntry<'a>)>> {
        if !self.there.contains_key(path) {
            return Err(nothing_at(path));
        }
        let below = self.there.range(path.to_vec()..).map(|(there, _)| there);
        let below = below.take_while(|there| there.starts_with(path));
        let within = |there: &&Vec<u8>| matches!(there.get(path.len()), None | Some(b'/'));
        let taken: Vec<Vec<u8>> = below.filter(within).cloned().collect();
        Ok(taken.into_iter().filter_map(|path| self.there.remove_entry(&path)).collect())
    }

    /// Moves the entry at `from` with its content. A file replaces a file.
    fn rename(&mut self, from: &[u8], to: &[u8]) -> Result<()> {
        if from == to && self.there.contains_key(from) {
            return Ok(());
        }
        if to.strip_prefix(from).is_some_and(|rest| rest.first() == Some(&b'/')) {
            return Err(Error::usage("a folder cannot be moved into itself").at(shown(from)).got(shown(to)));
        }
        let moved = self.take(from)?;
        let is_folder = moved.first().is_some_and(|(_, (entry, _))| is_folder(entry));
        let in_way = self.there.get(to);
        if in_way.is_some_and(|(there, _)| is_folder || self::is_folder(there)) {
            return Err(in_the_way(to));
        }
        self.imply_parents(to)?;
        for (path, entry) in moved {
            let to = [to, path.get(from.len()..).unwrap_or_default()].concat();
            checked(&to)?;
            self.there.insert(to, entry);
        }
        Ok(())
    }

    /// Adds an entry of another tree with its content. A file replaces a file.
    fn graft(&mut self, graft: &'a Graft) -> Result<()> {
        let Graft { tree, from, to, .. } = graft;
        let (entries, chunks) = (&tree.manifest.entries, &tree.manifest.chunks);
        let top = entries.iter().find(|entry| entry.path == *from).ok_or_else(|| nothing_at(from))?;
        if to.is_empty() {
            if !is_folder(top) {
                return Err(Error::usage("a file needs a path in the tree that it is copied to").at(shown(from)));
            }
            if self.there.len() > 1 {
                return Err(in_the_way(to));
            }
        } else {
            checked(to)?;
            if self.there.get(to).is_some_and(|(there, _)| is_folder(top) || is_folder(there)) {
                return Err(in_the_way(to));
            }
            self.imply_parents(to)?;
        }
        for entry in entries {
            let Some(rest) = below(&entry.path, from) else { continue };
            let separator: &[u8] = if to.is_empty() || rest.is_empty() { b"" } else { b"/" };
            let path = [to, separator, rest].concat();
            if !path.is_empty() {
                checked(&path)?;
            }
            self.there.insert(path, (entry, chunks));
        }
        Ok(())
    }

    /// Puts an entry at its path. An existing folder stays unchanged; a file replaces a file or link.
    fn put(&mut self, entry: &'a TreeEntry, chunks: &'a ChunkList) -> Result<()> {
        match self.there.get(&entry.path) {
            Some((there, _)) if is_folder(there) && is_folder(entry) => return Ok(()),
            Some((there, _)) if is_folder(there) || is_folder(entry) => return Err(in_the_way(&entry.path)),
            _ => {}
        }
        self.imply_parents(&entry.path)?;
        self.there.insert(entry.path.clone(), (entry, chunks));
        Ok(())
    }

    /// Creates missing folders above `path`.
    fn imply_parents(&mut self, path: &[u8]) -> Result<()> {
        for (at, _) in path.iter().enumerate().filter(|(_, byte)| **byte == b'/') {
            let parent = path.get(..at).unwrap_or_default();
            match self.there.get(parent) {
                Some((there, _)) if is_folder(there) => {}
                Some(_) => return Err(in_the_way(parent)),
                None => drop(self.there.insert(parent.to_vec(), self.implied)),
            }
        }
        Ok(())
    }
}

fn is_folder(entry: &TreeEntry) -> bool {
    entry.kind == EntryKind::Folder
}

/// Rest of `path` below the folder `top`, empty for `top` itself; none for a path elsewhere.
fn below<'a>(path: &'a [u8], top: &[u8]) -> Option<&'a [u8]> {
    let rest = path.strip_prefix(top)?;
    if top.is_empty() || rest.is_empty() { Some(rest) } else { rest.strip_prefix(b"/") }
}

fn nothing_at(path: &[u8]) -> Error {
    Error::not_found("there is nothing at this path of the tree").at(shown(path))
}

fn in_the_way(path: &[u8]) -> Error {
    Error::conflict("something of another kind is in the way").at(shown(path)).help("remove it first")
}

/// Checks a path in a tree.
fn checked(path: &[u8]) -> Result<()> {
    check_path(path)
        .map_err(|error| Error::new(ErrorKind::Usage, "no path in a tree").at(path.escape_ascii()).source(error))
}
