//! Records of the stat cache, with the memory that they take.

use crate::budget::GrowingMemory;
use crate::error::{ErrorKind, Result};
use crate::format::Manifest;
use crate::id::ChunkId;
use crate::limits::KIB;
use crate::tree::{SavedStats, StatCache};

/// Minimum bytes of memory to decode a manifest with.
const DECODED_MIN: u64 = 64 * KIB;
/// Bytes for a chunk whose place is looked up: its id in a list and in a set.
const LOOKED_UP: usize = 3 * size_of::<ChunkId>();

/// Record of an earlier save, and the tree that it saved.
pub(super) struct Record {
    pub(super) stats: SavedStats,
    pub(super) manifest: Manifest,
    /// Memory of both, and of a lookup of the chunks.
    _memory: GrowingMemory,
}

impl Record {
    /// The record in `cache`, which takes memory of `memory`; None if there is none, or if that is too little: files are read
    /// then. Blocks.
    pub(super) fn load(cache: &StatCache, memory: GrowingMemory) -> Option<Self> {
        Self::load_within(cache, memory).unwrap_or_else(|error| {
            tracing::info!("unchanged files are read, without the stat cache: {error}");
            None
        })
    }

    fn load_within(cache: &StatCache, mut memory: GrowingMemory) -> Result<Option<Self>> {
        let Some(stats) = cache.load(&mut memory)? else { return Ok(None) };
        let manifest = decode(stats.body(), &mut memory)?;
        memory.add(manifest.chunks.ids.len().saturating_mul(LOOKED_UP) as u64)?;
        Ok(Some(Self { stats, manifest, _memory: memory }))
    }
}

/// Decodes a manifest, which takes memory of `memory`.
fn decode(body: &[u8], memory: &mut GrowingMemory) -> Result<Manifest> {
    let mut most = (body.len() as u64).saturating_mul(4).max(DECODED_MIN);
    loop {
        // Saves at the same time need memory, too: no more is taken than helps.
        memory.add(most)?;
        let decoded = Manifest::decode_within(body, most);
        memory.subtract(most);
        match decoded {
            Err(error) if error.kind() == ErrorKind::Exhausted => most = most.saturating_mul(2),
            Err(error) => return Err(error),
            Ok(manifest) => {
                memory.add(manifest.weight())?;
                return Ok(manifest);
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::path::Path;

    use super::*;
    use crate::budget::Budget;
    use crate::chunker::Cut;
    use crate::clock::Timestamp;
    use crate::format::{Content, EntryKind, Form, TensorEntry, TreeEntry};
    use crate::id::RepositoryId;
    use crate::limits::MEMORY_MIN;

    /// Steps in which memory for trees is counted.
    pub(in crate::ops) const STEP: u64 = 64 * KIB;

    /// Bytes of memory for trees that are left, in whole steps.
    pub(in crate::ops) fn left(budget: &Budget) -> u64 {
        let mut rest = budget.tree_memory(None);
        let mut left = 0;
        while rest.try_add(STEP) {
            left += STEP;
        }
        left
    }

    /// A file with very many tensors.
    fn manifest() -> Manifest {
        let tensor = |nth: u64| TensorEntry {
            name: format!("layer.{nth}"),
            dtype: "U8".to_owned(),
            shape: Vec::from([0]),
            range: nth..nth,
            part: None,
        };
        let tensors = (0..10_000).map(tensor).collect();
        let content = Content { size: 10_000, cut: Cut::Tensor, pieces: Vec::new(), tensors };
        let file = TreeEntry { path: b"f".to_vec(), mode: 0o644, mtime: Timestamp(0), kind: EntryKind::File(content) };
        Manifest { form: Form::File, entries: Vec::from([file]), ..Manifest::default() }
    }

    #[test]
    fn a_record_takes_memory_while_it_is_there_and_does_not_exist_without() {
        let dir = tempfile::tempdir().unwrap();
        let cache = StatCache::new(dir.path(), RepositoryId::from_bytes([7; 16]), Path::new("/data"));
        let (id, body) = manifest().encode();
        cache.store(id, &body, Timestamp(1), []).unwrap();
        let (len, weight) = (body.len() as u64, manifest().weight());
        let budget = Budget::new(MEMORY_MIN).unwrap();
        let all = left(&budget);
        assert!(len > 2 * STEP && weight > 2 * STEP, "{len} {weight}");

        let record = Record::load(&cache, budget.tree_memory(None)).unwrap();
        assert_eq!(record.manifest, manifest());
        let taken = all - left(&budget);
        assert!(taken >= len + weight && taken < len + weight + 2 * STEP, "{taken} of {len} + {weight}");
        drop(record);
        assert_eq!(left(&budget), all);

        // Too little for the file, for the tree beside it, and for its tensors while they are decoded.
        for rest in [len / 2, len + STEP, len + weight / 2] {
            let mut others = budget.tree_memory(None);
            assert!(others.try_add(all - rest));
            assert!(Record::load(&cache, budget.tree_memory(None)).is_none(), "{rest}");
            drop(others);
            assert_eq!(left(&budget), all);
        }
    }
}
