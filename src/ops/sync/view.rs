//! The chunks of a tree to move, and bases to decode them from: those that the destination has are read there.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use crate::error::Result;
use crate::id::ChunkId;
use crate::repository::{ChunkPlace, Located, Saved, StoredChunks};

/// Index of the destination among the repositories that are read; the source is the first.
const DESTINATION: usize = 1;

/// A tree of the source, seen with what the destination has.
#[derive(Debug)]
pub(super) struct View {
    saved: Arc<Saved>,
    /// Chunks that move, by number: those of the manifest that the destination lacks, and of their bases those that it
    /// lacks too.
    pub(super) lacking: BTreeSet<u32>,
    /// Bases in the destination; their numbers follow those of the source.
    here: Vec<Located>,
    /// Chunks of the source that stand in.
    instead: HashMap<u32, u32>,
}

impl View {
    /// Plan of the move of `saved`, if the destination has its chunks at `found`.
    ///
    /// # Errors
    /// As [`StoredChunks::locate`]; damaged, if the map of `saved` is.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub(super) async fn new(
        saved: &Arc<Saved>,
        found: &[Option<ChunkPlace>],
        known: &mut StoredChunks,
    ) -> Result<Self> {
        let missing = (0u32..).zip(found).filter(|(_, place)| place.is_none()).map(|(chunk, _)| chunk);
        let lacking: BTreeSet<u32> = missing.collect();
        let mut needing: Vec<u32> = lacking.iter().copied().collect();
        let mut view = Self { saved: Arc::clone(saved), lacking, here: Vec::new(), instead: HashMap::new() };
        while !needing.is_empty() {
            let needed = needing.iter().map(|&chunk| saved.locate(chunk)).collect::<Result<Vec<Located>>>()?;
            let bases: BTreeSet<ChunkId> = needed.iter().filter_map(|needed| needed.place.base).collect();
            // It is what `known` takes in that counts.
            known.locate(&bases.into_iter().collect::<Vec<_>>()).await?;
            needing.clear();
            for needed in needed {
                let Some(base) = needed.base else { continue };
                match known.base(&needed.place) {
                    Some((id, place)) => {
                        let number = view.add(id, place, known);
                        view.instead.insert(base, number);
                    }
                    None if view.lacking.insert(base) => needing.push(base),
                    None => {}
                }
            }
        }
        Ok(view)
    }

    /// Gives a number to a chunk of the destination, and to what it is decoded from.
    fn add(&mut self, id: ChunkId, place: ChunkPlace, known: &StoredChunks) -> u32 {
        let base = known.base(&place).map(|(id, place)| self.add(id, place, known));
        self.here.push(Located { id, place, base, repository: DESTINATION });
        let number = self.saved.located_chunks() as usize + self.here.len() - 1;
        u32::try_from(number).unwrap_or(u32::MAX)
    }

    /// The chunk numbered `chunk`.
    ///
    /// # Errors
    /// Damaged, if the map of the tree is.
    pub(super) fn locate(&self, chunk: u32) -> Result<Located> {
        let here = chunk.checked_sub(self.saved.located_chunks()).and_then(|at| self.here.get(at as usize));
        if let Some(here) = here {
            return Ok(*here);
        }
        let located = self.saved.locate(chunk)?;
        let base = located.base.map(|base| self.here(base, &located.place).unwrap_or(base));
        Ok(Located { base, ..located })
    }

    /// Chunk of the destination that is read in place of the chunk numbered `base`, if it is a base of one at `place` there too.
    fn here(&self, base: u32, place: &ChunkPlace) -> Option<u32> {
        let number = *self.instead.get(&base)?;
        let here = self.here.get(number.checked_sub(self.saved.located_chunks())? as usize)?;
        (here.place.codec.hops() < place.codec.hops()).then_some(number)
    }
}
