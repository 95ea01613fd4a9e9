//! Assembly of a manifest from a stream of chunks.

use std::collections::{BTreeMap, HashMap};

use super::units::FileDetails;
use crate::chunker::Cut;
use crate::error::{Error, Result};
use crate::format::{ChunkList, Content, EntryKind, Form, Manifest, Piece, TensorEntry, TreeEntry};
use crate::id::ChunkId;
use crate::tree::{Walk, WalkKind};

/// Manifest under construction.
#[derive(Debug)]
pub(super) struct Assembly {
    manifest: Manifest,
    numbers: HashMap<ChunkId, u32>,
    /// Covered bytes of each entry's file.
    covered: Vec<u64>,
}

impl Assembly {
    /// Starts with the entries of `walk`; their files have no content yet. `modes` replace those on the disk.
    pub(super) fn new(walk: &Walk, labels: BTreeMap<String, String>, modes: &BTreeMap<Vec<u8>, u32>) -> Self {
        let entries: Vec<TreeEntry> = walk
            .found
            .iter()
            .map(|found| TreeEntry {
                path: found.path.clone(),
                mode: modes.get(&found.path).copied().unwrap_or(found.stat.mode),
                mtime: found.stat.mtime,
                kind: match &found.kind {
                    WalkKind::Folder => EntryKind::Folder,
                    WalkKind::Symlink { target } => EntryKind::Symlink(target.clone()),
                    WalkKind::File => EntryKind::File(Content {
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

    /// Records the description of a file.
    pub(super) fn describe(&mut self, file: usize, details: FileDetails) {
        if let Some(content) = self.content(file) {
            (content.cut, content.tensors) = (details.cut, details.tensors);
        }
    }

    /// As [`Assembly::describe`], from an earlier manifest.
    pub(super) fn describe_as(&mut self, file: usize, cut: Cut, tensors: &[TensorEntry]) {
        self.describe(file, FileDetails { cut, tensors: tensors.to_vec() });
    }

    /// Adds the next chunk of a file, which starts at `start`; a gap before it is a hole.
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
        append(&mut content.pieces, hole, number);
        Ok(())
    }

    /// Manifest so far.
    pub(super) fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Tensor of a file that contains the byte at `offset`.
    pub(super) fn tensor_at(&self, file: usize, offset: u64) -> Option<usize> {
        let tensors = self.tensors(file);
        let at = tensors.partition_point(|tensor| tensor.range.start <= offset).checked_sub(1)?;
        tensors.get(at).filter(|tensor| offset < tensor.range.end).map(|_| at)
    }

    /// The name of a file's tensor.
    pub(super) fn tensor_name(&self, file: usize, tensor: usize) -> Option<&str> {
        self.tensors(file).get(tensor).map(|tensor| tensor.name.as_str())
    }

    fn tensors(&self, file: usize) -> &[TensorEntry] {
        match self.manifest.entries.get(file).map(|entry| &entry.kind) {
            Some(EntryKind::File(content)) => &content.tensors,
            _ => &[],
        }
    }

    /// Finishes the manifest and its list of chunks. Chunks are renumbered in the order of the entries, because files that were
    /// not read came first: so a tree always has the same manifest, regardless of the stat cache.
    pub(super) fn finish(self) -> (Manifest, Vec<ChunkId>) {
        let mut manifest = self.manifest;
        let received = std::mem::take(&mut manifest.chunks);
        let mut numbers: Vec<Option<u32>> = vec![None; received.ids.len()];
        let chunks = &mut manifest.chunks;
        for entry in &mut manifest.entries {
            let EntryKind::File(content) = &mut entry.kind else { continue };
            for Piece { mut hole, first, count } in std::mem::take(&mut content.pieces) {
                for received_as in first as usize..first as usize + count as usize {
                    let Some(number) = numbers.get_mut(received_as) else { continue };
                    let number = *number.get_or_insert_with(|| {
                        chunks.ids.extend(received.ids.get(received_as));
                        chunks.lens.extend(received.lens.get(received_as));
                        // The number of chunks cannot exceed the number added, which was checked.
                        u32::try_from(chunks.ids.len() - 1).unwrap_or(u32::MAX)
                    });
                    append(&mut content.pieces, hole, number);
                    hole = 0;
                }
            }
        }
        let ids = manifest.chunks.ids.clone();
        (manifest, ids)
    }
}

/// Adds a chunk to a file's pieces.
pub(super) fn append(pieces: &mut Vec<Piece>, hole: u64, number: u32) {
    match pieces.last_mut() {
        Some(piece) if hole == 0 && piece.first + piece.count == number => piece.count += 1,
        _ => pieces.push(Piece { hole, first: number, count: 1 }),
    }
}

/// Renumbers the content by the positions of its chunks in the list `into`, adding missing ones.
pub(in crate::ops) fn renumbered(
    content: &Content,
    chunks: &ChunkList,
    into: &mut ChunkList,
    numbers: &mut HashMap<ChunkId, u32>,
) -> Result<Content> {
    let (mut pieces, mut covered) = (Vec::new(), 0);
    for (chunk, range) in content.placed(chunks) {
        let found = chunks.ids.get(chunk as usize).zip(chunks.lens.get(chunk as usize));
        let (id, len) = found.ok_or_else(|| Error::damaged("a file's piece names no chunk"))?;
        let next = u32::try_from(into.ids.len()).map_err(|_| Error::exhausted("tree has too many chunks"))?;
        let number = *numbers.entry(*id).or_insert(next);
        if number == next {
            into.ids.push(*id);
            into.lens.push(*len);
        }
        append(&mut pieces, range.start - covered, number);
        covered = range.end;
    }
    Ok(Content { pieces, tensors: content.tensors.clone(), ..*content })
}
