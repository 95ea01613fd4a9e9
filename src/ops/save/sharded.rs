//! Sharded checkpoints: checks that the saved tree has the tensors that their indexes name.

use std::collections::{BTreeSet, HashSet};

use super::source::{check_unchanged, open};
use crate::checkpoint::sharded::{INDEX_LEN_MAX, INDEX_NAME, Index, parse};
use crate::error::Result;
use crate::format::{EntryKind, Manifest};
use crate::ops::shown;
use crate::tree::{Walk, WalkEntry};

/// Parses a found file if it is an index of at most `most` bytes. Blocking.
///
/// # Errors
/// It cannot be read, or changed meanwhile.
pub(super) fn read(walk: &Walk, found: &WalkEntry, most: u64) -> Result<Option<Index>> {
    if !found.path.ends_with(INDEX_NAME.as_bytes()) {
        return Ok(None);
    }
    if found.stat.size > INDEX_LEN_MAX.min(most) {
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
pub(super) fn lacking(walk: &Walk, indexes: &[(usize, Index)], manifest: &Manifest) -> Vec<String> {
    let found = indexes.iter().filter_map(|(at, index)| Some((walk.found.get(*at)?, index)));
    found.flat_map(|(found, index)| compare(found, index, manifest)).collect()
}

fn compare(found: &WalkEntry, index: &Index, manifest: &Manifest) -> Vec<String> {
    let folder = found.path.iter().rposition(|&byte| byte == b'/').map_or(0, |slash| slash + 1);
    let folder = found.path.get(..folder).unwrap_or_default();
    let lacking = |(file, tensors): (&String, &BTreeSet<String>)| {
        let path = [folder, file.as_bytes()].concat();
        let what = match manifest.entry(&path).map(|entry| &entry.kind) {
            Some(EntryKind::File(content)) => {
                let there: HashSet<&str> = content.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
                let lacking: Vec<&String> = tensors.iter().filter(|name| !there.contains(name.as_str())).collect();
                let first = lacking.first()?;
                let others =
                    if lacking.len() > 1 { format!(" and {} others", lacking.len() - 1) } else { String::new() };
                format!("has no tensor {first}{others}")
            }
            _ => "is lacking".to_owned(),
        };
        Some(format!("{}: {} {what}, which this index names", shown(&found.path), shown(&path)))
    };
    index.files.iter().filter_map(lacking).collect()
}
