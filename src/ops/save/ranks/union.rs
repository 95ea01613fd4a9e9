//! Union of the trees of all ranks, without I/O.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};

use crate::error::{Error, Result};
use crate::format::{Content, EntryKind, Manifest, TreeEntry};
use crate::ops::save::assemble::renumbered;
use crate::ops::shown;
use crate::repository::log::StepFacts;

/// One rank's tree.
pub(super) struct RankTree<'a> {
    pub(super) rank: u32,
    pub(super) manifest: &'a Manifest,
}

/// Union of trees in the order of ranks: if several have a path, modes and times are those of the lowest rank.
///
/// # Errors
/// Conflict, if two ranks have different things under one path.
pub(super) fn union(trees: &[RankTree<'_>]) -> Result<Manifest> {
    let mut paths: BTreeMap<&[u8], (&RankTree<'_>, &TreeEntry)> = BTreeMap::new();
    let mut labels = BTreeMap::new();
    for tree in trees {
        for (key, value) in &tree.manifest.labels {
            labels.entry(key.clone()).or_insert_with(|| value.clone());
        }
        for entry in &tree.manifest.entries {
            match paths.entry(&entry.path) {
                Entry::Vacant(vacant) => drop(vacant.insert((tree, entry))),
                Entry::Occupied(first) => {
                    let (other, there) = *first.get();
                    if let Some(how) = difference(other.manifest, there, tree.manifest, entry) {
                        return Err(clash(&entry.path, other.rank, tree.rank, how));
                    }
                }
            }
        }
    }
    let mut whole = Manifest { labels, ..Manifest::default() };
    let mut numbers = HashMap::new();
    for (tree, entry) in paths.into_values() {
        let kind = match &entry.kind {
            EntryKind::File(content) => {
                EntryKind::File(renumbered(content, &tree.manifest.chunks, &mut whole.chunks, &mut numbers)?)
            }
            other => other.clone(),
        };
        whole.entries.push(TreeEntry { path: entry.path.clone(), kind, ..*entry });
    }
    Ok(whole)
}

/// Difference of two entries of one path; modes and times aside.
fn difference(of_a: &Manifest, a: &TreeEntry, of_b: &Manifest, b: &TreeEntry) -> Option<&'static str> {
    match (&a.kind, &b.kind) {
        (EntryKind::Folder, EntryKind::Folder) => None,
        (EntryKind::Symlink(a), EntryKind::Symlink(b)) => (a != b).then_some("links to different places"),
        (EntryKind::File(a), EntryKind::File(b)) if a.size != b.size => Some("files of different lengths"),
        (EntryKind::File(a), EntryKind::File(b)) => {
            let placed = |content: &Content, manifest: &Manifest| {
                let chunks = &manifest.chunks;
                let id = |(chunk, range): (u32, std::ops::Range<u64>)| (chunks.ids.get(chunk as usize).copied(), range);
                content.placed(chunks).map(id).collect::<Vec<_>>()
            };
            match placed(a, of_a) == placed(b, of_b) {
                true => None,
                // Only reading both files could tell whether they are the same.
                false if a.cut != b.cut => Some("files that were cut in different ways"),
                false => Some("different files"),
            }
        }
        _ => Some("entries of different kinds"),
    }
}

/// First path of `part` that is missing or different in `whole`, with the difference; modes and times do not count.
pub(super) fn lacking(whole: &Manifest, part: &Manifest) -> Option<(String, &'static str)> {
    part.entries.iter().find_map(|entry| {
        let how = match whole.entry(&entry.path) {
            Some(there) => difference(whole, there, part, entry)?,
            None => "a path that was not there",
        };
        Some((shown(&entry.path), how))
    })
}

/// Facts of a step: for each fact, the value of the lowest rank that gives it.
pub(in crate::ops) fn facts<'a>(each: impl IntoIterator<Item = &'a StepFacts>) -> Result<StepFacts> {
    each.into_iter().try_fold(StepFacts::default(), StepFacts::or)
}

fn clash(path: &[u8], a: u32, b: u32, how: &'static str) -> Error {
    Error::conflict("two ranks saved different things under one path")
        .at(shown(path))
        .got(format!("{how}: ranks {a} and {b}"))
        .help("let one of them leave it out (`--exclude`), and save again with another `--attempt`")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunker::Cut;
    use crate::clock::Timestamp;
    use crate::error::ErrorKind;
    use crate::format::ChunkList;
    use crate::id::ChunkId;
    use crate::ops::save::assemble::append;

    /// A tree of these files, each of chunks of 10 bytes, every one after a hole of 5.
    fn tree(mode: u32, files: &[(&str, &[u8])]) -> Manifest {
        let entry = |path: &str, kind| TreeEntry { path: path.into(), mode, mtime: Timestamp(mode.into()), kind };
        let mut tree = Manifest { entries: vec![entry("", EntryKind::Folder)], ..Manifest::default() };
        for (path, chunks) in files {
            let mut pieces = Vec::new();
            for chunk in *chunks {
                let id = ChunkId::of(&[*chunk]);
                let number = tree.chunks.ids.iter().position(|there| *there == id).unwrap_or_else(|| {
                    tree.chunks.ids.push(id);
                    tree.chunks.lens.push(10);
                    tree.chunks.ids.len() - 1
                });
                append(&mut pieces, 5, u32::try_from(number).unwrap());
            }
            let size = 15 * chunks.len() as u64 + 3;
            let content = Content { size, cut: Cut::Content, pieces, tensors: Vec::new() };
            tree.entries.push(entry(path, EntryKind::File(content)));
        }
        tree
    }

    fn joined(trees: &[Manifest]) -> Result<Manifest> {
        let own: Vec<RankTree<'_>> = (0..).zip(trees).map(|(rank, manifest)| RankTree { rank, manifest }).collect();
        union(&own)
    }

    #[test]
    fn a_union_has_every_path_once_and_reads_back() {
        let ranks = [tree(0o700, &[("b", &[3, 1]), ("same", &[2])]), tree(0o750, &[("a", &[1, 2]), ("same", &[2])])];
        let whole = joined(&ranks).unwrap();
        assert_eq!(whole, tree(0o700, &[("b", &[3, 1]), ("same", &[2])]).merged_with(tree(0o750, &[("a", &[1, 2])])));
        assert_eq!(Manifest::decode(&whole.encode().1).unwrap(), whole);
        assert_eq!(joined(&ranks[..1]).unwrap(), ranks[0], "one rank's tree is the tree");
        assert!(ranks.iter().all(|part| lacking(&whole, part).is_none()));
    }

    impl Manifest {
        /// By hand: the entries of both, sorted, and their chunks in the order in which those use them.
        fn merged_with(mut self, other: Self) -> Self {
            let find = |whole: &mut ChunkList, id: ChunkId| {
                let at = whole.ids.iter().position(|there| *there == id).unwrap_or_else(|| {
                    whole.ids.push(id);
                    whole.lens.push(10);
                    whole.ids.len() - 1
                });
                u32::try_from(at).unwrap()
            };
            let (a, b) = (self.chunks.clone(), other.chunks.clone());
            let mut all: Vec<(TreeEntry, ChunkList)> = self.entries.drain(..).map(|entry| (entry, a.clone())).collect();
            all.extend(other.entries.into_iter().skip(1).map(|entry| (entry, b.clone())));
            all.sort_by(|(a, _), (b, _)| a.path.cmp(&b.path));
            let mut whole = Self::default();
            for (mut entry, chunks) in all {
                if let EntryKind::File(content) = &mut entry.kind {
                    let old = content.clone();
                    content.pieces.clear();
                    for (chunk, _) in old.placed(&chunks) {
                        append(&mut content.pieces, 5, find(&mut whole.chunks, chunks.ids[chunk as usize]));
                    }
                }
                whole.entries.push(entry);
            }
            whole
        }
    }

    #[test]
    fn different_things_under_one_path_are_refused_by_name() {
        let folder = |mut of: Manifest| {
            of.entries[1].kind = EntryKind::Folder;
            of
        };
        let other = [
            (tree(0, &[("f", &[1, 3])]), "different files"),
            (tree(0, &[("f", &[1])]), "lengths"),
            (folder(tree(0, &[("f", &[])])), "kinds"),
        ];
        for (other, how) in other {
            let error = joined(&[tree(0, &[]), tree(0, &[("f", &[1, 2])]), other]).unwrap_err();
            assert_eq!((error.kind(), error.place()), (ErrorKind::Conflict, Some("f")));
            assert!(error.to_string().contains(how) && error.to_string().contains("ranks 1 and 2"), "{error}");
        }
    }

    #[test]
    fn a_part_that_is_not_in_the_whole_is_found() {
        let whole = tree(0, &[("f", &[1]), ("g", &[2])]);
        assert_eq!(lacking(&whole, &tree(7, &[("g", &[2])])), None, "modes and times may differ");
        assert_eq!(lacking(&whole, &tree(0, &[("g", &[3])])).unwrap(), ("g".to_owned(), "different files"));
        assert_eq!(lacking(&whole, &tree(0, &[("h", &[])])).unwrap().0, "h");
    }

    #[test]
    fn the_lowest_rank_that_tells_something_is_believed() {
        let facts_with = |loss: f64, framework: Option<&str>| {
            let facts = StepFacts::default().metric("loss", loss).unwrap();
            framework.map_or(facts.clone(), |name| facts.framework(name).unwrap())
        };
        let all = facts(&[facts_with(1.0, None), facts_with(2.0, Some("jax")).metric("acc", 3.0).unwrap()]).unwrap();
        assert_eq!((all.value("loss"), all.value("acc"), all.written_by()), (Some(1.0), Some(3.0), Some("jax")));
    }
}
