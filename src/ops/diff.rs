//! Diff: differences between two saved trees, from their manifests alone.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::HashSet;

use serde::{Serialize, Serializer};

use crate::error::Result;
use crate::format::{EntryKind, Manifest, TreeEntry};
use crate::id::ChunkId;
use crate::name::Name;
use crate::ops::path_text;
use crate::repository::{Repository, Saved};

/// Two saved trees, compared. Changes are found one at a time: a list of all may need many times the memory of the trees.
#[derive(Clone, Debug)]
pub struct Comparison {
    before: Saved,
    after: Saved,
    /// Chunks of the first tree.
    chunks_before: HashSet<ChunkId>,
}

/// One path that differs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Change<'a> {
    /// The path; bytes that are not UTF-8 are replaced.
    pub path: Cow<'a, str>,
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
    /// Differences from the tree `a` to the tree `b`.
    ///
    /// # Errors
    /// Not found, if there is no such name.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn diff(&self, a: &Name, b: &Name) -> Result<Comparison> {
        let (before, after) = futures::try_join!(self.saved(a), self.saved(b))?;
        Ok(Comparison::new(before, after))
    }
}

impl Comparison {
    pub(crate) fn new(before: Saved, after: Saved) -> Self {
        let chunks_before = before.manifest.chunks.ids.iter().copied().collect();
        Self { before, after, chunks_before }
    }

    /// Paths that differ, sorted.
    pub fn changes(&self) -> impl Iterator<Item = Change<'_>> {
        let (a, b) = (&self.before.manifest, &self.after.manifest);
        by_path(&a.entries, &b.entries).filter_map(move |(before, after)| {
            let entry = after.or(before)?;
            let change = match (before, after) {
                (None, _) => "added",
                (_, None) => "removed",
                (Some(x), Some(y)) if !same_content(a, x, b, y) => "changed",
                (Some(x), Some(y)) if (x.mode, x.mtime) != (y.mode, y.mtime) => "meta",
                _ => return None,
            };
            Some(Change {
                path: path_text(&entry.path),
                change,
                bytes_before: before.map_or(0, size),
                bytes_after: after.map_or(0, size),
                new_bytes: after.map_or(0, |entry| new_bytes(b, entry, &self.chunks_before)),
            })
        })
    }
}

/// `a`, `b` and the list of `changes`.
impl Serialize for Comparison {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Compared<'a> {
            a: &'a Name,
            b: &'a Name,
            changes: Changes<'a>,
        }
        Compared { a: &self.before.name, b: &self.after.name, changes: Changes(self) }.serialize(serializer)
    }
}

/// The changes of a comparison, one by one.
struct Changes<'a>(&'a Comparison);

impl Serialize for Changes<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.changes())
    }
}

/// Pairs the entries of two trees by path, in order; None where a tree lacks the path. Both are sorted.
fn by_path<'a>(
    mut a: &'a [TreeEntry],
    mut b: &'a [TreeEntry],
) -> impl Iterator<Item = (Option<&'a TreeEntry>, Option<&'a TreeEntry>)> {
    std::iter::from_fn(move || {
        let order = match (a.first(), b.first()) {
            (None, None) => return None,
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some(x), Some(y)) => x.path.cmp(&y.path),
        };
        let before = if order.is_le() { a.split_off_first() } else { None };
        let after = if order.is_ge() { b.split_off_first() } else { None };
        Some((before, after))
    })
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
