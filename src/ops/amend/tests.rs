//! Changes of trees, without a repository.

use super::changes::amended;
use super::*;
use crate::chunker::Cut;
use crate::clock::Timestamp;
use crate::format::{Content, EntryKind, Form, Piece, TreeEntry};

/// A tree of these files, each of one chunk of 10 bytes, with the folders above them.
fn tree(files: &[(&str, u8)]) -> Manifest {
    let entry = |path: &str, kind| TreeEntry { path: path.into(), mode: 0o755, mtime: Timestamp(1), kind };
    let mut tree = Manifest { entries: vec![entry("", EntryKind::Folder)], ..Manifest::default() };
    for (path, chunk) in files {
        for (at, _) in path.match_indices('/') {
            tree.entries.push(entry(&path[..at], EntryKind::Folder));
        }
        let id = ChunkId::of(&[*chunk]);
        let first = tree.chunks.ids.iter().position(|there| *there == id).unwrap_or_else(|| {
            tree.chunks.ids.push(id);
            tree.chunks.lens.push(10);
            tree.chunks.ids.len() - 1
        });
        let pieces = vec![Piece { hole: 0, first: u32::try_from(first).unwrap(), count: 1 }];
        let content = Content { size: 10, cut: Cut::Content, pieces, tensors: Vec::new() };
        tree.entries.push(entry(path, EntryKind::File(content)));
    }
    tree.entries.sort_by(|a, b| a.path.cmp(&b.path));
    tree.entries.dedup_by(|a, b| a.path == b.path);
    tree
}

/// Each file's path, and the first byte of its chunk's name; folders by their path with a slash.
fn seen(tree: &Manifest) -> Vec<String> {
    let seen = |entry: &TreeEntry| {
        let path = String::from_utf8(entry.path.clone()).unwrap();
        match &entry.kind {
            EntryKind::File(content) => {
                let chunks = content.placed(&tree.chunks).map(|(chunk, _)| tree.chunks.ids[chunk as usize]);
                let chunks: Vec<ChunkId> = chunks.collect();
                let byte = (0..=9u8).find(|&byte| chunks == [ChunkId::of(&[byte])]);
                format!("{path}={}", byte.unwrap())
            }
            _ => format!("{path}/"),
        }
    };
    tree.entries.iter().map(seen).collect()
}

fn changes(remove: &[&str], rename: &[(&str, &str)]) -> Changes {
    Changes {
        remove: remove.iter().map(|path| path.as_bytes().to_vec()).collect(),
        rename: rename.iter().map(|(from, to)| (from.as_bytes().to_vec(), to.as_bytes().to_vec())).collect(),
        ..Changes::default()
    }
}

fn done(base: &Manifest, new: Option<&Manifest>, changes: &Changes) -> Vec<String> {
    let tree = amended(Some(base), new, changes, Timestamp(9)).unwrap();
    assert_eq!(Manifest::decode(&tree.encode().1).unwrap(), tree, "a tree like any other");
    seen(&tree)
}

fn refused(base: &Manifest, new: Option<&Manifest>, changes: &Changes) -> ErrorKind {
    amended(Some(base), new, changes, Timestamp(9)).unwrap_err().kind()
}

#[test]
fn files_are_put_beside_and_in_place_of_others() {
    let base = tree(&[("a", 1), ("d/b", 2), ("z", 1)]);
    let none = changes(&[], &[]);
    assert_eq!(done(&base, Some(&tree(&[("d/c", 3)])), &none), ["/", "a=1", "d/", "d/b=2", "d/c=3", "z=1"]);
    assert_eq!(done(&base, Some(&tree(&[("a", 4)])), &none), ["/", "a=4", "d/", "d/b=2", "z=1"]);
    assert_eq!(amended(Some(&base), None, &none, Timestamp(9)).unwrap(), base, "what nobody names stays as it is");
    let new = tree(&[("x/y", 5)]);
    assert_eq!(amended(None, Some(&new), &none, Timestamp(9)).unwrap().entries[1..], new.entries[1..]);
}

#[test]
fn paths_are_removed_with_all_in_them_and_nothing_beside_them() {
    let base = tree(&[("a-b", 1), ("a/b", 2), ("a/c/d", 3), ("ab", 4)]);
    assert_eq!(done(&base, None, &changes(&["a"], &[])), ["/", "a-b=1", "ab=4"]);
    assert_eq!(done(&base, None, &changes(&["a/c/d", "ab"], &[])), ["/", "a/", "a-b=1", "a/b=2", "a/c/"]);
    assert_eq!(refused(&base, None, &changes(&["a/x"], &[])), ErrorKind::NotFound);
    assert_eq!(refused(&base, None, &changes(&["a", "a/b"], &[])), ErrorKind::NotFound);
}

#[test]
fn renames_follow_removals_and_come_before_what_is_put() {
    let base = tree(&[("m.tmp", 1), ("m", 2), ("d/x", 3)]);
    assert_eq!(done(&base, None, &changes(&["m"], &[("m.tmp", "m")])), ["/", "d/", "d/x=3", "m=1"]);
    assert_eq!(done(&base, None, &changes(&[], &[("m.tmp", "m")])), ["/", "d/", "d/x=3", "m=1"], "in its place");
    assert_eq!(
        done(&base, None, &changes(&[], &[("d", "e/f"), ("m", "o")])),
        ["/", "e/", "e/f/", "e/f/x=3", "m.tmp=1", "o=2"]
    );
    let put = tree(&[("m.tmp", 7)]);
    assert_eq!(done(&base, Some(&put), &changes(&[], &[("m.tmp", "m")])), ["/", "d/", "d/x=3", "m=1", "m.tmp=7"]);
    assert_eq!(done(&base, None, &changes(&[], &[("m", "m")])), seen(&base));
}

#[test]
fn no_file_gets_a_name_that_restores_remove() {
    let unfinished = "d/.towline-0123456789abcdef-0.part";
    let base = tree(&[("a", 1), (unfinished, 2)]);
    assert_eq!(done(&base, None, &changes(&[], &[(unfinished, "d/b")])), ["/", "a=1", "d/", "d/b=2"]);
    assert_eq!(done(&base, None, &changes(&["a"], &[])), ["/".to_owned(), "d/".to_owned(), format!("{unfinished}=2")]);
    let base = tree(&[("a", 1)]);
    assert_eq!(refused(&base, None, &changes(&[], &[("a", unfinished)])), ErrorKind::Usage);
    assert_eq!(refused(&base, Some(&tree(&[(unfinished, 3)])), &Changes::default()), ErrorKind::Usage);
}

#[test]
fn what_is_in_the_way_is_never_replaced_by_another_kind() {
    let base = tree(&[("f", 1), ("d/x", 2), ("e/y", 3)]);
    for (from, to) in [("f", "d"), ("d", "f"), ("d", "e"), ("d", "f/g")] {
        assert_eq!(refused(&base, None, &changes(&[], &[(from, to)])), ErrorKind::Conflict, "{from} to {to}");
    }
    for put in ["d", "f/g"] {
        assert_eq!(refused(&base, Some(&tree(&[(put, 4)])), &Changes::default()), ErrorKind::Conflict, "{put}");
    }
    assert_eq!(refused(&base, None, &changes(&[], &[("d", "d/e")])), ErrorKind::Usage);
    for path in ["", "/f", "d/../f", "d/"] {
        assert_eq!(refused(&base, None, &changes(&[path], &[])), ErrorKind::Usage, "{path:?}");
        assert_eq!(refused(&base, None, &changes(&[], &[("f", path)])), ErrorKind::Usage, "{path:?}");
    }
    let mut alone = tree(&[("f", 1)]);
    (alone.form, alone.entries) = (Form::File, alone.entries.split_off(1));
    assert_eq!(refused(&alone, Some(&tree(&[("g", 1)])), &Changes::default()), ErrorKind::Usage);
}
