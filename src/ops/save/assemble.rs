//! Putting a manifest together while chunks come by.

use std::collections::{BTreeMap, HashMap};

use super::units::About;
use crate::chunker::Cut;
use crate::error::{Error, Result};
use crate::format::{ChunkList, Content, EntryKind, Form, Manifest, Piece, TensorEntry, TreeEntry};
use crate::id::ChunkId;
use crate::tree::{FoundKind, Walk};

/// A manifest in the making.
#[derive(Debug)]
pub(super) struct Assembly {
    manifest: Manifest,
    numbers: HashMap<ChunkId, u32>,
    /// How much of each entry's file is covered.
    covered: Vec<u64>,
}

impl Assembly {
    /// The entries of `walk`, their files still without content.
    pub(super) fn new(walk: &Walk, labels: BTreeMap<String, String>) -> Self {
        let entries: Vec<TreeEntry> = walk
            .found
            .iter()
            .map(|found| TreeEntry {
                path: found.path.clone(),
                mode: found.stat.mode,
                mtime: found.stat.mtime,
                kind: match &found.kind {
                    FoundKind::Folder => EntryKind::Folder,
                    FoundKind::Symlink { target } => EntryKind::Symlink(target.clone()),
                    FoundKind::File => EntryKind::File(Content {
                        size: found.stat.size,
                        cut: Cut::Content,
                        pieces: Vec::new(),
                        tensors: Vec::new(),
                    }),
                },
            })
            .collect();
        let form = if walk.is_file() { Form::File } else { Form::Folder };
        let covered = vec![0; entries.len()];
        Self {
            manifest: Manifest { form, labels, chunks: ChunkList::default(), entries },
            numbers: HashMap::new(),
            covered,
        }
    }

    fn content(&mut self, file: usize) -> Option<&mut Content> {
        match self.manifest.entries.get_mut(file).map(|entry| &mut entry.kind) {
            Some(EntryKind::File(content)) => Some(content),
            _ => None,
        }
    }

    /// What a file is.
    pub(super) fn describe(&mut self, file: usize, about: About) {
        if let Some(content) = self.content(file) {
            (content.cut, content.tensors) = (about.cut, about.tensors);
        }
    }

    /// As [`Assembly::describe`], from an earlier manifest.
    pub(super) fn describe_as(&mut self, file: usize, cut: Cut, tensors: &[TensorEntry]) {
        self.describe(file, About { cut, tensors: tensors.to_vec() });
    }

    /// The next chunk of a file, which starts at `start`; what lies between is a hole.
    pub(super) fn chunk(&mut self, file: usize, start: u64, id: ChunkId, len: u32) -> Result<()> {
        let chunks = &mut self.manifest.chunks;
        let next = u32::try_from(chunks.ids.len()).map_err(|_| Error::exhausted("tree has too many chunks"))?;
        let number = *self.numbers.entry(id).or_insert(next);
        if number == next {
            chunks.ids.push(id);
            chunks.lens.push(len);
        }
        let covered = self.covered.get_mut(file).ok_or_else(|| Error::other("a chunk of no file"))?;
        let hole = start.checked_sub(*covered).ok_or_else(|| Error::other("chunks came out of order"))?;
        *covered = start + u64::from(len);
        let Some(content) = self.content(file) else { return Err(Error::other("a chunk of no file")) };
        match content.pieces.last_mut() {
            Some(piece) if hole == 0 && piece.first + piece.count == number => piece.count += 1,
            _ => content.pieces.push(Piece { hole, first: number, count: 1 }),
        }
        Ok(())
    }

    /// The manifest, and its chunks.
    pub(super) fn finish(self) -> (Manifest, Vec<ChunkId>) {
        let ids = self.manifest.chunks.ids.clone();
        (self.manifest, ids)
    }
}
