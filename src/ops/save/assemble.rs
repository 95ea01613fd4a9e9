//! Assembly of a manifest from a stream of chunks.

use std::collections::{BTreeMap, HashMap};

use super::units::FileDetails;
use crate::budget::GrowingMemory;
use crate::chunker::Cut;
use crate::error::{Error, Result};
use crate::format::{ChunkList, Content, EntryKind, Form, Manifest, Piece, TensorEntry, TreeEntry};
use crate::id::ChunkId;
use crate::limits::MIB;
use crate::repository::ChunkPlace;
use crate::tree::{Walk, WalkKind};

/// Bytes for a chunk of the tree: its id in two lists, its length, and its place, until the tree is published.
const LISTED: u64 = (2 * size_of::<ChunkId>() + size_of::<u32>() + size_of::<Option<ChunkPlace>>()) as u64;
/// Bytes for a piece of a file, with the spare room of a list that grows.
pub(super) const PIECE: u64 = 2 * size_of::<Piece>() as u64;
/// Bytes for a chunk whose place is known, with the spare room of a map.
pub(super) const KNOWN: u64 = (size_of::<(ChunkId, ChunkPlace)>() * 3 / 2) as u64;

/// Manifest under construction.
#[derive(Debug)]
pub(super) struct Assembly {
    manifest: Manifest,
    numbers: HashMap<ChunkId, u32>,
    /// Covered bytes of each entry's file.
    covered: Vec<u64>,
    /// Number of pieces of all files.
    pieces: usize,
    /// Memory of chunks and pieces, those that the save knows otherwise included; None: they are not counted.
    memory: Option<GrowingMemory>,
    /// Bytes taken of it.
    counted: u64,
}

impl Assembly {
    /// Starts with the entries of `walk`; their files have no content yet. `modes` replace those on the disk. Chunks are counted
    /// in `memory` ([`Assembly::count`]), if there is any.
    pub(super) fn new(
        walk: &Walk,
        labels: BTreeMap<String, String>,
        modes: &BTreeMap<Vec<u8>, u32>,
        memory: Option<GrowingMemory>,
    ) -> Self {
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
            pieces: 0,
            memory,
            counted: 0,
        }
    }

    /// Counts the memory of the chunks so far, of `coming` ones, each with a piece, and of the `near` ones whose places are
    /// known. Fails, with nothing more taken, if too little is left.
    pub(super) fn count(&mut self, near: usize, coming: usize) -> Result<()> {
        let Some(memory) = &mut self.memory else { return Ok(()) };
        let (listed, pieces) = (self.manifest.chunks.ids.len() + coming, self.pieces + coming);
        let wanted = near as u64 * KNOWN + listed as u64 * LISTED + pieces as u64 * PIECE;
        memory.subtract(self.counted.saturating_sub(wanted));
        if !memory.try_add(wanted.saturating_sub(self.counted)) {
            let (most, part) = (memory.max() / MIB, memory.part());
            return Err(Error::exhausted("tree has more chunks than the memory budget holds")
                .expected(format!("at most {most} MiB for the files and chunks of all such saves together, {part}"))
                .got(format!("{listed} chunks in {pieces} pieces so far, and {near} that are known"))
                .help("raise --memory, save less at a time, or save parts of the folder under names of their own"));
        }
        self.counted = wanted;
        Ok(())
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
        let before = content.pieces.len();
        append(&mut content.pieces, hole, number);
        let more = content.pieces.len() - before;
        self.pieces += more;
        Ok(())
    }

    /// Gives the file `to` the pieces of `from`, which has the same bytes.
    pub(super) fn copy_pieces(&mut self, from: usize, to: usize) {
        let pieces = self.content(from).map(|content| content.pieces.clone()).unwrap_or_default();
        self.pieces += pieces.len();
        if let Some(content) = self.content(to) {
            content.pieces = pieces;
        }
    }

    /// Starts and lengths of the chunks of a file so far.
    pub(super) fn placed(&self, file: usize) -> Vec<(u64, u64)> {
        match self.manifest.entries.get(file).map(|entry| &entry.kind) {
            Some(EntryKind::File(content)) => {
                content.placed(&self.manifest.chunks).map(|(_, range)| (range.start, range.end - range.start)).collect()
            }
            _ => Vec::new(),
        }
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

    /// Finishes the manifest and its list of chunks, with the memory that they take. Chunks are renumbered in the order of the
    /// entries, because files that were not read came first: so a tree always has the same manifest, regardless of the stat
    /// cache.
    pub(super) fn finish(self) -> (Manifest, Vec<ChunkId>, Option<GrowingMemory>) {
        let Self { mut manifest, memory, .. } = self;
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
        (manifest, ids, memory)
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

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::budget::Budget;
    use crate::clock::Timestamp;
    use crate::error::ErrorKind;
    use crate::limits::MEMORY_MIN;
    use crate::name::Name;
    use crate::ops::recorded::tests::{STEP, left};
    use crate::ops::save::{SaveOptions, SaveSource};
    use crate::repository::{OpenOptions, Repository};
    use crate::storage::Store;
    use crate::tree::MemoryFile;

    const CHUNKS: u64 = 4000;

    /// [`CHUNKS`] files of one chunk each.
    fn files() -> Vec<MemoryFile> {
        let file = |nth: u64| MemoryFile::new(format!("{nth:05}"), [Bytes::from(nth.to_le_bytes().to_vec())]);
        (0..CHUNKS).map(file).collect()
    }

    #[test]
    fn chunks_and_pieces_take_memory_until_the_tree_is_dropped() {
        let budget = Budget::new(MEMORY_MIN).unwrap();
        let all = left(&budget);
        let walk = Walk::in_memory(files(), Timestamp(0)).unwrap();
        let mut assembly = Assembly::new(&walk, BTreeMap::new(), &BTreeMap::new(), Some(budget.tree_memory(None)));
        // Chunks of the first file after the folder, with a hole before each but the first; each of them twice.
        for (nth, start) in (0..2 * CHUNKS).map(|nth| (nth, nth * 16)) {
            assembly.count(0, 1).unwrap();
            assembly.chunk(1, start, ChunkId::of(&(nth % CHUNKS).to_le_bytes()), 8).unwrap();
        }
        assembly.copy_pieces(1, 2);
        assembly.count(100, 0).unwrap();
        let wanted = CHUNKS * LISTED + 4 * CHUNKS * PIECE + 100 * KNOWN;
        let taken = all - left(&budget);
        assert!(taken >= wanted && taken < wanted + 2 * STEP, "{taken} of {wanted}");
        let error = assembly.count(usize::try_from(all / KNOWN).unwrap(), 0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Exhausted);
        assert_eq!(all - left(&budget), taken, "what was refused is not counted");
        let tree = assembly.finish();
        assert_eq!(all - left(&budget), taken, "it is still there");
        drop(tree);
        assert_eq!(left(&budget), all);
    }

    #[tokio::test]
    async fn a_save_of_more_chunks_than_its_memory_holds_is_refused_and_not_visible() {
        let dir = tempfile::tempdir().unwrap();
        let (memory, cache) = (Some(MEMORY_MIN), Some(dir.path().join("cache")));
        let options = OpenOptions { memory, cache, ..OpenOptions::default() };
        let repository = Repository::create(Store::memory(), options).await.unwrap().0;
        let name: Name = "data".parse().unwrap();
        let options = SaveOptions { caller: Some("token:a/".into()), ..SaveOptions::default() };
        let mut others = repository.budget().tree_memory(options.caller.as_deref());
        assert!(others.try_add(others.max() - 8 * STEP));

        let error = repository.save(SaveSource::Memory(files()), &name, &options).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Exhausted, "{error:?}");
        assert!(error.to_string().contains("more chunks"), "{error}");
        assert!(!repository.state().await.unwrap().refs.contains_key(&name));
        drop(others);
        repository.save(SaveSource::Memory(files()), &name, &options).await.unwrap();
    }
}
