//! Chunks of a tree to move, and their bases, which are read from the destination if it has them.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::budget::Buffer;
use crate::codec::encode_alone;
use crate::error::Result;
use crate::id::ChunkId;
use crate::repository::{ChunkPlace, Held, Located, PackRead, Saved, Stored, StoredChunks, TravelTree, plan_travel};

/// Index of the destination among the repositories that are read; the source is the first.
const DESTINATION: usize = 1;

/// Bases with which chunks move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bases {
    /// The bases that the chunks are stored with.
    Kept,
    /// The bases that make the fewest bytes move.
    Fewest,
    /// Only chunks of the same tree: another base may belong to a name that readers of the tree may not read.
    Own,
}

/// A tree of the source, combined with chunks of the destination.
#[derive(Debug)]
pub(super) struct View {
    saved: Arc<Saved>,
    bases: Bases,
    /// Chunks to move, by number: those of the manifest that the destination lacks, and those of their bases that it lacks.
    pub(super) lacking: BTreeSet<u32>,
    /// Further chunks to move, without the bases that they are stored with.
    pub(super) alone: BTreeSet<u32>,
    /// Bases in the destination; their numbers follow those of the source.
    here: Vec<Located>,
    /// Chunks of the source that replace others.
    instead: HashMap<u32, u32>,
    /// True once a chunk without its base was longer than the map foretold.
    longer: AtomicBool,
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
        bases: Bases,
    ) -> Result<Self> {
        let missing = (0u32..).zip(found).filter(|(_, place)| place.is_none()).map(|(chunk, _)| chunk);
        let missing: Vec<u32> = missing.collect();
        let (mut needing, lacking) = (missing.clone(), missing.iter().copied().collect());
        let (alone, here, instead, longer) = Default::default();
        let mut view = Self { saved: Arc::clone(saved), bases, lacking, alone, here, instead, longer };
        let is_left = |base: u32| bases == Bases::Own && base as usize >= saved.map.chunks();
        while !needing.is_empty() {
            let needed = needing.iter().map(|&chunk| saved.locate(chunk)).collect::<Result<Vec<Located>>>()?;
            let ids: BTreeSet<ChunkId> = needed.iter().filter_map(|needed| needed.place.base).collect();
            // Only the effect on `known` matters.
            known.locate(&ids.into_iter().collect::<Vec<_>>()).await?;
            needing.clear();
            for needed in needed {
                let Some(base) = needed.base.filter(|&base| !is_left(base)) else { continue };
                if view.here(base, &needed.place).is_some() {
                    continue;
                }
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
        if bases == Bases::Own {
            let leaves = |chunk: &u32| saved.locate(*chunk).is_ok_and(|located| located.base.is_some_and(is_left));
            (view.alone, view.lacking) = std::mem::take(&mut view.lacking).into_iter().partition(leaves);
        }
        if bases == Bases::Fewest {
            let held = |chunk| if view.lacking.contains(&chunk) { Held::No } else { Held::Whole };
            let tree = TravelTree { saved, wanted: &missing, may_come_alone: &|_| true, held: &held };
            let plan = plan_travel(&[tree])?.pop().unwrap_or_default();
            view.lacking = plan.as_stored.into_iter().collect();
            view.alone = plan.alone.into_iter().collect();
        }
        Ok(view)
    }

    /// True if `read` brings chunks that are encoded anew.
    pub(super) fn is_anew(&self, read: &PackRead) -> bool {
        read.chunks.iter().any(|planned| planned.wanted && self.alone.contains(&planned.chunk))
    }

    /// True if a chunk was longer without its base than the map foretold: then the plan is void. Never, where the base must be left.
    pub(super) fn is_longer(&self) -> bool {
        self.longer.load(Ordering::Relaxed)
    }

    /// Takes the requested chunks of `read`: as they are stored, or alone. Each is verified.
    ///
    /// # Errors
    /// Damaged, with pack and chunk, if one is damaged.
    pub(super) fn take(&self, read: &PackRead, buffer: Buffer) -> Result<Stored> {
        Stored::take_with(
            |chunk| self.locate(chunk),
            read,
            buffer,
            |number, chunk, stored| {
                if !self.alone.contains(&number) {
                    return None;
                }
                let alone = encode_alone(chunk.bytes(), stored);
                if self.bases != Bases::Own && !self.is_foreseen(number, alone.bytes.len()) {
                    self.longer.store(true, Ordering::Relaxed);
                }
                Some(alone)
            },
        )
    }

    /// True if the plan counts with `len` bytes, or about that, for a chunk without its base.
    fn is_foreseen(&self, chunk: u32, len: usize) -> bool {
        let (Ok(foreseen), Ok(located)) = (self.saved.alone_len(chunk), self.saved.locate(chunk)) else { return false };
        len <= foreseen.most(located.place.plain_len) as usize
    }

    /// Assigns a number to a chunk of the destination, and to its bases.
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

    /// Chunk of the destination to read instead of chunk number `base`, if it is also the base of the chunk at `place` there.
    fn here(&self, base: u32, place: &ChunkPlace) -> Option<u32> {
        let number = *self.instead.get(&base)?;
        let here = self.here.get(number.checked_sub(self.saved.located_chunks())? as usize)?;
        place.codec.may_have_base(here.place.codec).then_some(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Codec;
    use crate::repository::travel::tests::tree;
    use crate::repository::{OpenOptions, Repository};
    use crate::storage::Store;

    #[tokio::test]
    async fn a_base_that_is_there_is_listed_once() {
        let (repository, _) = Repository::create(Store::memory(), OpenOptions::default()).await.unwrap();
        let mut known = StoredChunks::load(&repository).await.unwrap();
        let saved = Arc::new(tree(&[(Some(2), 500, 800), (Some(2), 500, 800), (None, 800, 0)], 2));
        let base = saved.locate(2).unwrap();
        known.stored(base.id, ChunkPlace { codec: Codec::Raw, ..base.place });
        let view = View::new(&saved, &[None, None], &mut known, Bases::Kept).await.unwrap();
        assert_eq!((view.here.len(), view.lacking), (1, BTreeSet::from([0, 1])));
    }

    #[tokio::test]
    async fn a_base_outside_the_tree_is_left() {
        let (repository, _) = Repository::create(Store::memory(), OpenOptions::default()).await.unwrap();
        let mut known = StoredChunks::load(&repository).await.unwrap();
        // The first is derived from the second, whose base is not listed. However few bytes that saves, it is left.
        let saved = Arc::new(tree(&[(Some(1), 500, 800), (Some(2), 500, 5000), (None, 800, 0)], 2));
        let view = View::new(&saved, &[None, None], &mut known, Bases::Own).await.unwrap();
        assert_eq!((&view.lacking, &view.alone), (&BTreeSet::from([0]), &BTreeSet::from([1])));
        // Nor is it used where the destination has it.
        let base = saved.locate(2).unwrap();
        known.stored(base.id, ChunkPlace { codec: Codec::Raw, ..base.place });
        let view = View::new(&saved, &[None, None], &mut known, Bases::Own).await.unwrap();
        assert_eq!((view.here.len(), view.lacking, view.alone), (0, BTreeSet::from([0]), BTreeSet::from([1])));
    }
}
