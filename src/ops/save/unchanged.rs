//! Files that need not be read: they match the stat cache, and all their chunks are still in the repository.

use std::collections::HashSet;

use super::assemble::Assembly;
use super::detect::Formats;
use super::{CutChoice, files_of};
use crate::chunker::Cut;
use crate::error::Result;
use crate::format::{Content, EntryKind, Manifest, TensorEntry};
use crate::id::ChunkId;
use crate::ops::recorded::Record;
use crate::ops::watch::POINTER_LEN_MAX;
use crate::repository::StoredChunks;
use crate::tree::{Walk, WalkEntry};

/// Record of the earlier save, with the chunks of it that are still in the repository.
pub(super) struct Unchanged {
    record: Record,
    here: HashSet<ChunkId>,
}

impl Unchanged {
    /// Finds the chunks of unchanged files that are still in the repository.
    pub(super) async fn find(record: Record, walk: &Walk, formats: &Formats, known: &mut StoredChunks) -> Result<Self> {
        let manifest = &record.manifest;
        let mut wanted = HashSet::new();
        for (_, content) in files_of(walk).filter_map(|at| matching(walk, formats, at, &record)) {
            wanted.extend(content.placed(&manifest.chunks).filter_map(|(chunk, _)| id_of(manifest, chunk)));
        }
        let wanted: Vec<ChunkId> = wanted.into_iter().collect();
        let places = known.locate(&wanted).await?;
        let here = wanted.into_iter().zip(places).filter(|(_, place)| place.is_some()).map(|(id, _)| id).collect();
        Ok(Self { record, here })
    }

    /// Adds unchanged files to the assembly; returns the others, and those whose chunks or tensors take too much memory beside
    /// the record and the `near` chunks.
    pub(super) fn add_unchanged(
        &self,
        walk: &Walk,
        formats: &Formats,
        near: usize,
        assembly: &mut Assembly,
    ) -> Vec<usize> {
        let mut failed = None;
        let mut add = |at| {
            self.add_if_unchanged(walk, formats, (at, near), assembly).unwrap_or_else(|error| {
                failed = Some(error);
                false
            })
        };
        let to_read = files_of(walk).filter(|&at| !add(at)).collect();
        if let Some(error) = failed {
            tracing::info!("unchanged files are read: {error}");
        }
        to_read
    }

    fn add_if_unchanged(
        &self,
        walk: &Walk,
        formats: &Formats,
        (at, near): (usize, usize),
        assembly: &mut Assembly,
    ) -> Result<bool> {
        let manifest = &self.record.manifest;
        let Some((_, content)) = matching(walk, formats, at, &self.record) else { return Ok(false) };
        let chunks = || content.placed(&manifest.chunks);
        let known = |(chunk, _)| id_of(manifest, chunk).is_some_and(|id| self.here.contains(&id));
        if !chunks().all(known) {
            return Ok(false);
        }
        // Before any of them is added: a file that is read must have none yet.
        assembly.count(near, chunks().count())?;
        formats.keep_tensors(content.tensors.iter().map(TensorEntry::weight).sum::<usize>() as u64)?;
        assembly.describe_as(at, content.cut, &content.tensors);
        for (chunk, range) in chunks() {
            if let Some(id) = id_of(manifest, chunk) {
                let len = u32::try_from(range.end - range.start).unwrap_or(u32::MAX);
                assembly.chunk(at, range.start, id, len)?;
            }
        }
        Ok(true)
    }
}

/// Earlier content of the file at `at`, if its metadata is unchanged, and that of the file that describes it, if there is or
/// was one.
fn matching<'m>(walk: &Walk, formats: &Formats, at: usize, record: &'m Record) -> Option<(usize, &'m Content)> {
    let same = |found: &WalkEntry| record.stats.unchanged(&found.path, &found.stat);
    let found = walk.found.get(at).filter(|found| same(found) && !may_be_pointer(found))?;
    let described_by = formats.depends_on(at);
    if let Some(metadata) = described_by {
        walk.found.get(metadata).filter(|found| same(found))?;
    }
    match &record.manifest.entry(&found.path)?.kind {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Timestamp;
    use crate::limits::MEMORY_MIN;
    use crate::name::Name;
    use crate::ops::recorded::tests::{STEP, left};
    use crate::ops::save::{SaveOptions, SaveSource};
    use crate::repository::{OpenOptions, Repository};
    use crate::storage::Store;

    /// A safetensors file with very many tensors.
    fn tensors() -> Vec<u8> {
        let tensor = |nth| format!(r#""{nth}":{{"dtype":"U8","shape":[1],"data_offsets":[{nth},{}]}}"#, nth + 1);
        let (count, len): (usize, usize) = (5000, 2 << 20);
        let last = format!(r#""last":{{"dtype":"U8","shape":[{}],"data_offsets":[{count},{len}]}}"#, len - count);
        let header = format!("{{{},{last}}}", (0..count).map(tensor).collect::<Vec<_>>().join(","));
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![7; len]].concat()
    }

    #[tokio::test]
    async fn tensors_of_unchanged_files_take_memory_or_the_files_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data");
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("f.safetensors"), tensors()).unwrap();
        let (memory, cache) = (Some(MEMORY_MIN), Some(dir.path().join("cache")));
        let options = OpenOptions { memory, cache, ..OpenOptions::default() };
        let repository = Repository::create(Store::memory(), options).await.unwrap().0;
        let (name, options) = ("run/step-1".parse::<Name>().unwrap(), SaveOptions::default());
        repository.save(&path, &name, &options).await.unwrap();
        let (walk, formats) = repository.scan(SaveSource::from(&path), &options).await.unwrap();
        let saved = repository.saved(&name).await.unwrap();
        let (_, content) = saved.manifest.files().next().unwrap();
        assert!(content.tensors.len() > 5000);
        let (id, body) = saved.manifest.encode();
        let cache = repository.stat_cache(walk.root().unwrap());
        let files = walk.found.iter().map(|found| (found.path.as_slice(), &found.stat));
        cache.store(id, &body, Timestamp(i64::MAX), files).unwrap();

        let budget = repository.budget();
        let record = Record::load(&cache, budget.tree_memory(None)).unwrap();
        let mut known = repository.stored_for(&options.label_scope).await.unwrap();
        let unchanged = Unchanged::find(record, &walk, &formats, &mut known).await.unwrap();
        let assembly = || Assembly::new(&walk, options.labels.clone(), &options.modes, Some(budget.tree_memory(None)));
        let near = known.near();
        let before = left(budget);
        assert_eq!(unchanged.add_unchanged(&walk, &formats, near, &mut assembly()), Vec::<usize>::new());
        let taken = before - left(budget);
        let list: usize = content.tensors.iter().map(TensorEntry::weight).sum();
        assert!(taken + STEP >= 4 * list as u64, "{taken} for 4 lists of {list}");

        let mut others = budget.tree_memory(None);
        assert!(others.try_add(left(budget)));
        assert_eq!(unchanged.add_unchanged(&walk, &formats, near, &mut assembly()).len(), 1);
        assert!(formats.warning().is_none(), "they are not plain bytes because of that");
        drop(unchanged);
        drop(others);
        // Without memory for the record, a save reads the files.
        let mut others = budget.tree_memory(None);
        assert!(others.try_add(left(budget) - 4 * STEP));
        repository.save(&path, &name, &options).await.unwrap();
    }
}
