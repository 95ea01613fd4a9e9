//! Files that need not be read: they match the stat cache, and all their chunks are still in the repository.

use std::collections::HashSet;

use super::assemble::Assembly;
use super::detect::Formats;
use super::{CutChoice, files_of};
use crate::chunker::Cut;
use crate::error::Result;
use crate::format::{Content, EntryKind, Manifest};
use crate::id::ChunkId;
use crate::ops::watch::POINTER_LEN_MAX;
use crate::repository::StoredChunks;
use crate::tree::{SavedStats, StatCache, Walk, WalkEntry};

/// Record of the earlier save, with the chunks of it that are still in the repository.
pub(super) struct Unchanged {
    recorded: SavedStats,
    manifest: Manifest,
    here: HashSet<ChunkId>,
}

impl Unchanged {
    /// Record of the tree in the stat cache; None if there is none.
    pub(super) async fn load(
        cache: &StatCache,
        walk: &Walk,
        formats: &Formats,
        known: &mut StoredChunks,
    ) -> Result<Option<Self>> {
        let Some(recorded) = cache.load() else { return Ok(None) };
        let Ok(manifest) = Manifest::decode(recorded.body()) else { return Ok(None) };
        let mut wanted = HashSet::new();
        for (_, content) in files_of(walk).filter_map(|at| matching(walk, formats, at, (&recorded, &manifest))) {
            wanted.extend(content.placed(&manifest.chunks).filter_map(|(chunk, _)| id_of(&manifest, chunk)));
        }
        let wanted: Vec<ChunkId> = wanted.into_iter().collect();
        let places = known.locate(&wanted).await?;
        let here = wanted.into_iter().zip(places).filter(|(_, place)| place.is_some()).map(|(id, _)| id).collect();
        Ok(Some(Self { recorded, manifest, here }))
    }

    /// Adds unchanged files to the assembly; returns the others.
    pub(super) fn add_unchanged(&self, walk: &Walk, formats: &Formats, assembly: &mut Assembly) -> Vec<usize> {
        files_of(walk).filter(|&at| !self.add_if_unchanged(walk, formats, at, assembly).unwrap_or(false)).collect()
    }

    fn add_if_unchanged(&self, walk: &Walk, formats: &Formats, at: usize, assembly: &mut Assembly) -> Result<bool> {
        let Some((_, content)) = matching(walk, formats, at, (&self.recorded, &self.manifest)) else {
            return Ok(false);
        };
        let chunks = || content.placed(&self.manifest.chunks);
        let known = |(chunk, _)| id_of(&self.manifest, chunk).is_some_and(|id| self.here.contains(&id));
        if !chunks().all(known) {
            return Ok(false);
        }
        assembly.describe_as(at, content.cut, &content.tensors);
        for (chunk, range) in chunks() {
            if let Some(id) = id_of(&self.manifest, chunk) {
                let len = u32::try_from(range.end - range.start).unwrap_or(u32::MAX);
                assembly.chunk(at, range.start, id, len)?;
            }
        }
        Ok(true)
    }
}

/// Earlier content of the file at `at`, if its metadata is unchanged, and that of the file that describes it, if there is or
/// was one.
fn matching<'m>(
    walk: &Walk,
    formats: &Formats,
    at: usize,
    (recorded, manifest): (&SavedStats, &'m Manifest),
) -> Option<(usize, &'m Content)> {
    let same = |found: &WalkEntry| recorded.unchanged(&found.path, &found.stat);
    let found = walk.found.get(at).filter(|found| same(found) && !may_be_pointer(found))?;
    let described_by = formats.depends_on(at);
    if let Some(metadata) = described_by {
        walk.found.get(metadata).filter(|found| same(found))?;
    }
    match &manifest.entry(&found.path)?.kind {
        EntryKind::File(content) if content.size == found.stat.size && may_be(content.cut, formats.choice) => {
            let was_part = content.tensors.iter().any(|tensor| tensor.part.is_some());
            (described_by.is_some() || !was_part).then_some((at, content))
        }
        _ => None,
    }
}

/// True for a file that is read again because it may be a pointer file, of which each save warns.
fn may_be_pointer(found: &WalkEntry) -> bool {
    found.stat.size <= POINTER_LEN_MAX && found.path.ends_with(b".ckpt")
}

/// True if a save with `choice` may cut a file as `cut`.
fn may_be(cut: Cut, choice: CutChoice) -> bool {
    match choice {
        CutChoice::Auto => cut != Cut::Fixed,
        // Reads files without tensors again: the record does not tell whether a file has any.
        CutChoice::Tensor => cut == Cut::Tensor,
        CutChoice::Content => cut == Cut::Content,
        CutChoice::Fixed => cut == Cut::Fixed,
    }
}

fn id_of(manifest: &Manifest, chunk: u32) -> Option<ChunkId> {
    manifest.chunks.ids.get(chunk as usize).copied()
}
