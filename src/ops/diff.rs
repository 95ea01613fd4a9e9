//! Diff: differences between two saved trees, from their manifests alone.

use std::collections::{BTreeMap, HashSet};

use serde::Serialize;

use crate::error::Result;
use crate::format::{EntryKind, Manifest, TreeEntry};
use crate::id::ChunkId;
use crate::name::Name;
use crate::ops::shown;
use crate::repository::Repository;

/// One path that differs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    /// The path.
    pub path: String,
    /// `added`, `removed`, `changed`, or `meta`: only mode or time.
    pub change: &'static str,
    /// Bytes of the file before.
    pub bytes_before: u64,
    /// Bytes of the file after.
    pub bytes_after: u64,
    /// Plain bytes of its chunks that are not in the first tree.
    pub new_bytes: u64,
}

impl Repository {
    /// Differences from the tree `a` to the tree `b`, by path.
    ///
    /// # Errors
    /// Not found, if there is no such name.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn diff(&self, a: &Name, b: &Name) -> Result<Vec<Change>> {
        let (a, b) = futures::try_join!(self.saved(a), self.saved(b))?;
        Ok(changes(&a.manifest, &b.manifest))
    }
}

fn changes(a: &Manifest, b: &Manifest) -> Vec<Change> {
    let before: HashSet<ChunkId> = a.chunks.ids.iter().copied().collect();
    let mut pairs: BTreeMap<&[u8], (Option<&TreeEntry>, Option<&TreeEntry>)> = BTreeMap::new();
    for entry in &a.entries {
        pairs.entry(&entry.path).or_default().0 = Some(entry);
    }
    for entry in &b.entries {
        pairs.entry(&entry.path).or_default().1 = Some(entry);
    }
    let change = |(path, pair): (&&[u8], &(Option<&TreeEntry>, Option<&TreeEntry>))| {
        let word = match *pair {
            (None, _) => "added",
            (_, None) => "removed",
            (Some(x), Some(y)) if !same_content(a, x, b, y) => "changed",
            (Some(x), Some(y)) if (x.mode, x.mtime) != (y.mode, y.mtime) => "meta",
            _ => return None,
        };
        Some(Change {
            path: shown(path),
            change: word,
            bytes_before: pair.0.map_or(0, size),
            bytes_after: pair.1.map_or(0, size),
            new_bytes: pair.1.map_or(0, |entry| new_bytes(b, entry, &before)),
        })
    };
    pairs.iter().filter_map(change).collect()
}

/// Chunks of a file by id, with their places.
fn content<'a>(manifest: &'a Manifest, entry: &'a TreeEntry) -> impl Iterator<Item = (u64, u64, ChunkId)> + 'a {
    let content = match &entry.kind {
        EntryKind::File(content) => Some(content),
        _ => None,
    };
    content.into_iter().flat_map(|content| {
        content.placed(&manifest.chunks).filter_map(|(chunk, range)| {
            Some((range.start, range.end - range.start, *manifest.chunks.ids.get(chunk as usize)?))
        })
    })
}

fn same_content(a: &Manifest, x: &TreeEntry, b: &Manifest, y: &TreeEntry) -> bool {
    match (&x.kind, &y.kind) {
        (EntryKind::File(f), EntryKind::File(g)) => f.size == g.size && content(a, x).eq(content(b, y)),
        (x, y) => x == y,
    }
}

fn new_bytes(manifest: &Manifest, entry: &TreeEntry, before: &HashSet<ChunkId>) -> u64 {
    let mut counted = HashSet::new();
    content(manifest, entry)
        .filter(|(_, _, id)| !before.contains(id) && counted.insert(*id))
        .map(|(_, len, _)| len)
        .sum()
}

fn size(entry: &TreeEntry) -> u64 {
    match &entry.kind {
        EntryKind::File(content) => content.size,
        _ => 0,
    }
}
