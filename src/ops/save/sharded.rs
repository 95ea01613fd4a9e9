//! Sharded checkpoints: checks that the saved tree has the tensors that their indexes name.

use std::collections::{HashMap, HashSet};

use super::short_list::ShortList;
use super::source::{check_unchanged, open};
use crate::checkpoint::ReserveMemory;
use crate::checkpoint::sharded::{INDEX_LEN_MAX, INDEX_NAME, Index, parse};
use crate::error::Result;
use crate::format::{EntryKind, Manifest, TreeEntry};
use crate::ops::shown;
use crate::tree::{Walk, WalkEntry};

/// Bytes of memory for one byte of an index, at most, while it is parsed.
const INDEX_MEMORY: u64 = 13;

/// Parses a found file if it is an index of at most `most` bytes, for which there is memory. Blocking.
///
/// # Errors
/// It cannot be read, or changed meanwhile.
pub(super) fn read(walk: &Walk, found: &WalkEntry, most: u64, reserve: ReserveMemory<'_>) -> Result<Option<Index>> {
    if !found.path.ends_with(INDEX_NAME.as_bytes()) {
        return Ok(None);
    }
    if found.stat.size > INDEX_LEN_MAX.min(most) || !reserve(found.stat.size * INDEX_MEMORY) {
        tracing::info!("{} is not compared with the tree: it takes too much memory (--memory)", shown(&found.path));
        return Ok(None);
    }
    let file = open(walk, found)?;
    let mut bytes = vec![0; usize::try_from(found.stat.size).unwrap_or(usize::MAX)];
    let whole = file.read_exact_at(&mut bytes, 0).is_ok();
    check_unchanged(&file, found)?;
    Ok(if whole { parse(&bytes).ok() } else { None })
}

/// Warnings about files that `indexes` name and the tree lacks, one per file.
pub(super) fn lacking(walk: &Walk, indexes: &[(usize, Index)], manifest: &Manifest) -> ShortList {
    let (mut warnings, mut tensors_of) = (ShortList::default(), HashMap::new());
    for (at, index) in indexes {
        let Some(found) = walk.found.get(*at) else { continue };
        compare(&found.path, index, manifest, &mut tensors_of, &mut warnings);
    }
    warnings
}

/// Names of the tensors of files that indexes name, by path.
type TensorsOf<'m> = HashMap<&'m [u8], HashSet<&'m str>>;

/// Compares the files in the folder of the index at `path` with what it says.
fn compare<'m>(
    path: &[u8],
    index: &Index,
    manifest: &'m Manifest,
    tensors_of: &mut TensorsOf<'m>,
    warnings: &mut ShortList,
) {
    let folder = path.iter().rposition(|&byte| byte == b'/').map_or(0, |slash| slash + 1);
    let folder = path.get(..folder).unwrap_or_default();
    // The names of very many files may be short and that of the folder long: it is compared once.
    let from = manifest.entries.partition_point(|entry| *entry.path < *folder);
    let inside = manifest.entries.get(from..).unwrap_or_default();
    let inside = &inside[..inside.partition_point(|entry| entry.path.starts_with(folder))];
    for (file, tensors) in &index.files {
        let below = |entry: &TreeEntry| entry.path.get(folder.len()..).unwrap_or_default().cmp(file.as_bytes());
        let entry = inside.binary_search_by(below).ok().and_then(|at| inside.get(at));
        let what = match entry.map(|entry| (&entry.path, &entry.kind)) {
            Some((path, EntryKind::File(content))) => {
                let names = || content.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
                let there = tensors_of.entry(path).or_insert_with(names);
                let mut lacking = tensors.iter().filter(|name| !there.contains(name.as_str()));
                let Some(first) = lacking.next() else { continue };
                match lacking.count() {
                    0 => format!("has no tensor {first}"),
                    others => format!("has no tensor {first} and {others} others"),
                }
            }
            _ => "is lacking".to_owned(),
        };
        let file = || shown(&[folder, file.as_bytes()].concat());
        warnings.push(|| format!("{}: {} {what}, which this index names", shown(path), file()));
    }
}
