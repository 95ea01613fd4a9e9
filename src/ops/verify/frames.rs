//! Check of every byte of the packs: frames must decode to their chunks, and bytes between them must be zero.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use futures::{StreamExt as _, stream};

use super::findings::CHUNKS_MAX;
use super::groups::grouped;
use super::{Verifying, is_damage, is_doubtful};
use crate::budget::{Buffer, GrowingMemory};
use crate::codec::{Codec, HOPS_MAX, PART_STRIDE};
use crate::error::{Error, Result};
use crate::format::{FooterEntry, PackFooter, PackRef, TRAILER_LEN, pack_header};
use crate::id::ChunkId;
use crate::limits::KIB;
use crate::repository::layout::{self, Family};
use crate::repository::{
    ChunkPlace, Delivered, Located, PackRead, PlannedChunk, Repository, deliver, longest_read, read_pack, twice_if,
};

/// Footers read at once.
const FOOTERS: usize = 16;
/// Extra bytes that a base counts for in a read: its own request, or a gap before it.
const APART: u64 = 256 * KIB;

/// Bytes of memory of a base that is looked for.
const NEEDED_WEIGHT: usize = 2 * size_of::<ChunkId>();
/// Bytes of memory of the place of a base.
const BASE_WEIGHT: usize = 2 * size_of::<(ChunkId, ChunkPlace)>();

/// Fault in a pack: of a chunk, or of bytes between chunks.
type PackFault = (Option<u32>, Error);
/// Places of bases.
type Bases = HashMap<ChunkId, ChunkPlace>;

/// A range of a pack to check, with the bases of its chunks.
#[derive(Clone, Debug)]
struct Tile {
    /// Bytes of the pack.
    stretch: Range<u64>,
    /// Read of the tile. Its range comes first; a base next to it extends that part.
    read: PackRead,
    /// Chunks in the read, by their numbers in it.
    chunks: Vec<Located>,
    /// Numbers of the bases of the chunk that was added last, and of that chunk, bases first.
    chain: Vec<u32>,
    /// Chunks of the pack in the range.
    ordinals: Range<u32>,
}

impl Verifying<'_> {
    pub(super) async fn check_frames(&mut self) -> Result<()> {
        let sound: Vec<PackRef> = self.packs.values().filter(|(_, sound)| *sound).map(|(pack, _)| *pack).collect();
        self.options.progress.phase("reading packs", sound.iter().map(|pack| pack.len).sum());
        let (repository, progress) = (self.repository, self.options.progress.clone());
        let bases = self.bases(&sound).await?;
        let longest = longest_read(repository, repository.budget());
        for group in grouped(&sound, repository.budget().total(), |pack| pack.chunks) {
            // All of them before any frame: a footer that is not polled holds memory, for which the reads of frames would wait.
            let footers = group.iter().map(|pack| async move {
                let footer = twice_if(is_doubtful, || repository.footer_uncached(pack)).await;
                (*pack, footer)
            });
            let footers = stream::iter(footers.collect::<Vec<_>>()).buffered(FOOTERS);
            let reads = footers.collect::<Vec<_>>().await.into_iter().flat_map(|(pack, footer)| match footer {
                Ok(footer) => {
                    let footer = Arc::new(footer);
                    let tiles = tiles(&pack, &footer, &bases, longest).into_iter();
                    tiles.map(|tile| (pack, Ok((Arc::clone(&footer), tile)))).collect()
                }
                Err(error) => vec![(pack, Err(error))],
            });
            let looked = stream::iter(reads).map(|(pack, read)| async move {
                let wrong = match read {
                    Ok((footer, tile)) => check_tile(repository, footer, tile).await,
                    Err(error) => Err(error),
                };
                (pack, wrong)
            });
            let mut looked = std::pin::pin!(looked.buffer_unordered(repository.parallelism()));
            while let Some((pack, wrong)) = looked.next().await {
                let wrong = match wrong {
                    Ok((len, wrong)) => {
                        progress.advance(len);
                        progress.moved(len);
                        wrong
                    }
                    Err(error) if is_damage(&error) => vec![(None, error)],
                    Err(error) => return Err(error),
                };
                self.take_down(pack, wrong)?;
            }
        }
        Ok(())
    }

    /// Places of the bases of chunks in `packs`. Their memory counts until the end of the verification. Bases with fewer hops are found
    /// first, so that each is known to have its own when its place is taken.
    async fn bases(&mut self, packs: &[PackRef]) -> Result<Bases> {
        let mut needed = HashSet::new();
        let mut bases = Bases::new();
        let mut is_present = [false; HOPS_MAX as usize + 1];
        let repository = self.repository;
        // First the ids of the bases, then the places of those with 0 hops, with 1, and so on.
        for wanted in std::iter::once(None).chain((0..HOPS_MAX).map(Some)) {
            if let Some(hops) = wanted
                && (bases.len() == needed.len() || !is_present[usize::from(hops)])
            {
                continue;
            }
            let footers = stream::iter(packs.to_vec());
            let footers =
                footers.map(|pack| async move { (pack, twice_if(is_doubtful, || repository.footer(&pack)).await) });
            let mut footers = std::pin::pin!(footers.buffered(repository.parallelism()));
            while let Some((pack, footer)) = footers.next().await {
                let footer = match footer {
                    Ok(footer) => footer,
                    // Reported later, by the check of the frames.
                    Err(error) if is_damage(&error) => continue,
                    Err(error) => return Err(error),
                };
                let Some(hops) = wanted else {
                    need(&mut needed, &footer, &mut self.memory)?;
                    footer.entries.iter().for_each(|entry| is_present[usize::from(entry.codec.hops())] = true);
                    continue;
                };
                let is_wanted = |entry: &FooterEntry| entry.codec.hops() == hops && needed.contains(&entry.id);
                for (ordinal, entry) in (0u32..).zip(&footer.entries).filter(|(_, entry)| is_wanted(entry)) {
                    place(&mut bases, entry.id, ChunkPlace::of(pack.id, ordinal, entry), &mut self.memory)?;
                }
            }
        }
        self.memory.subtract((needed.len() * NEEDED_WEIGHT) as u64);
        Ok(bases)
    }

    fn take_down(&mut self, pack: PackRef, wrong: Vec<PackFault>) -> Result<()> {
        let key = layout::owned(Family::Pack, pack.id);
        for (chunk, error) in wrong {
            self.findings.add_to_pack(pack.id, &key, chunk, error)?;
        }
        Ok(())
    }
}

/// Adds the bases of the chunks in `footer`, and their memory.
fn need(needed: &mut HashSet<ChunkId>, footer: &PackFooter, memory: &mut GrowingMemory) -> Result<()> {
    for base in footer.entries.iter().filter_map(|entry| entry.base) {
        if needed.insert(base) {
            memory.add(NEEDED_WEIGHT as u64)?;
        }
    }
    Ok(())
}

/// Adds the place of a base, and its memory, unless one is known, or the place lacks a base itself: that one was deleted, and a copy
/// elsewhere may have all of its bases.
fn place(bases: &mut Bases, id: ChunkId, place: ChunkPlace, memory: &mut GrowingMemory) -> Result<()> {
    let fits = |base: ChunkId| bases.get(&base).is_some_and(|found| place.codec.may_have_base(found.codec));
    if !bases.contains_key(&id) && place.base.is_none_or(fits) {
        memory.add(BASE_WEIGHT as u64)?;
        bases.insert(id, place);
    }
    Ok(())
}

/// Tiles that cover a pack up to its footer without gaps, each as long as allowed including the bases of its chunks: derived
/// chunks are short, but their bases are not.
fn tiles(pack: &PackRef, footer: &PackFooter, bases: &Bases, longest: u64) -> Vec<Tile> {
    let mut stretches: Vec<(Range<u64>, Range<u32>)> = Vec::new();
    let (mut start, mut beside, mut last) = (0, 0, None);
    for (ordinal, entry) in (0u32..).zip(&footer.entries) {
        let end = entry.offset + u64::from(entry.stored_len);
        // The parts of a bundle follow it closely, and need nothing else.
        let is_beside = entry.codec == Codec::Part && entry.base == last && end <= start + PART_STRIDE;
        let more = if is_beside { 0 } else { bases_len(entry, bases) };
        if entry.codec != Codec::Part {
            last = Some(entry.id);
        }
        match stretches.last_mut() {
            Some((range, ordinals)) if is_beside || end - range.start + beside + more <= longest => {
                (range.end, ordinals.end, beside) = (end, ordinal + 1, beside + more);
            }
            _ => {
                stretches.push((start..end, ordinal..ordinal + 1));
                beside = more;
            }
        }
        start = end;
    }
    let frames_end = pack.len - u64::from(pack.footer_len) - TRAILER_LEN;
    match stretches.last_mut() {
        Some((range, _)) => range.end = frames_end,
        None => stretches.push((0..frames_end, 0..0)),
    }
    stretches.into_iter().map(|(range, ordinals)| Tile::new(pack, footer, bases, range, ordinals)).collect()
}

/// Approximate bytes that are read in addition to a chunk: all of its bases.
fn bases_len(entry: &FooterEntry, bases: &Bases) -> u64 {
    let base = |base: Option<ChunkId>| bases.get(&base?);
    let needed = std::iter::successors(base(entry.base), |place| base(place.base)).take(HOPS_MAX.into());
    needed.map(|place| u64::from(place.stored_len) + APART).sum()
}

impl Tile {
    fn new(pack: &PackRef, footer: &PackFooter, bases: &Bases, range: Range<u64>, ordinals: Range<u32>) -> Self {
        let read = PackRead::of(pack.id, range.clone(), []);
        let mut tile = Self { stretch: range, read, chunks: Vec::new(), chain: Vec::new(), ordinals: ordinals.clone() };
        for ordinal in ordinals {
            if let Some(entry) = footer.entries.get(ordinal as usize) {
                // A chunk whose base is in none of these packs is not needed by any name.
                let _judged = tile.add(entry.id, ChunkPlace::of(pack.id, ordinal, entry), bases, true);
            }
        }
        tile
    }

    /// Number of the chunk at `place`, if it was added last, or is a base of that: then it can be the base of the next chunk, without
    /// being read again.
    fn base_in_chain(&self, place: &ChunkPlace) -> Option<u32> {
        let is_there = |chunk: &u32| self.chunks.get(*chunk as usize).is_some_and(|located| located.place == *place);
        self.chain.iter().copied().find(is_there)
    }

    /// Adds a chunk, after its base; returns its number.
    fn add(&mut self, id: ChunkId, place: ChunkPlace, bases: &Bases, wanted: bool) -> Option<u32> {
        let base = match place.base {
            None => None,
            Some(base) => {
                let found = bases.get(&base).filter(|found| place.codec.may_have_base(found.codec))?;
                Some(self.base_in_chain(found).or_else(|| self.add(base, *found, bases, false))?)
            }
        };
        let above = base.and_then(|base| self.chain.iter().position(|&chunk| chunk == base));
        self.chain.truncate(above.map_or(0, |above| above + 1));
        let chunk = u32::try_from(self.chunks.len()).ok()?;
        self.chain.push(chunk);
        let located = Located { id, place, base, repository: 0 };
        self.read.cover(&located);
        self.read.chunks.push(PlannedChunk { chunk, wanted });
        self.chunks.push(located);
        Some(chunk)
    }
}

/// Faults of one tile, if a second read agrees; and its length.
async fn check_tile(repository: &Repository, footer: Arc<PackFooter>, tile: Tile) -> Result<(u64, Vec<PackFault>)> {
    let read = tile.read.clone();
    let len = tile.stretch.end - tile.stretch.start;
    let work = move |_: &PackRead, buffer: Buffer| inspect(&footer, &tile, &buffer);
    let doubtful =
        |read: &Result<Vec<PackFault>>| is_doubtful(read) || read.as_ref().is_ok_and(|wrong| !wrong.is_empty());
    let read = || async { read_pack(&[repository], repository.budget(), read.clone(), work.clone()).await };
    Ok((len, twice_if(doubtful, read).await?))
}

fn inspect(footer: &PackFooter, tile: &Tile, bytes: &[u8]) -> Result<Vec<PackFault>> {
    let mut wrong: Vec<PackFault> = between(footer, tile, bytes).into_iter().collect();
    let locate = |chunk: u32| {
        tile.chunks.get(chunk as usize).copied().ok_or_else(|| Error::other("a tile does not bring its chunk"))
    };
    let mut unsound = HashSet::new();
    deliver(&tile.read, bytes, locate, |delivered: Delivered<'_>| {
        if let Err(error) = delivered.chunk {
            unsound.insert(delivered.index);
            // A chunk that is only a base here is checked in its own tile.
            let excused = delivered.located.base.is_some_and(|base| unsound.contains(&base));
            // One more than are told, so that it is known that there are more.
            if delivered.wanted && !excused && wrong.len() <= CHUNKS_MAX {
                wrong.push((Some(delivered.located.place.ordinal), error));
            }
        }
        Ok(())
    })?;
    Ok(wrong)
}

/// Fault before, between or after the chunks of a tile.
fn between(footer: &PackFooter, tile: &Tile, bytes: &[u8]) -> Option<PackFault> {
    let start = tile.read.parts.first().map_or(0, |part| part.range.start);
    let at = |offset: u64| usize::try_from(offset - start).unwrap_or(usize::MAX);
    let mut end = tile.stretch.start;
    if end == 0 {
        let header = pack_header();
        if !bytes.starts_with(&header) {
            return Some((None, Error::damaged("pack does not start with its header")));
        }
        end = header.len() as u64;
    }
    let ordinals = tile.ordinals.start as usize..tile.ordinals.end as usize;
    let frames = footer.entries.get(ordinals).unwrap_or_default().iter();
    let frames = frames.map(|entry| entry.offset..entry.offset + u64::from(entry.stored_len));
    for frame in frames.chain(std::iter::once(tile.stretch.end..tile.stretch.end)) {
        let gap = bytes.get(at(end)..at(frame.start));
        if gap.is_none_or(|gap| gap.iter().any(|&byte| byte != 0)) {
            let error = Error::damaged("padding between chunks is not zero").got(format!("at byte {end}"));
            return Some((None, error));
        }
        end = frame.end;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::Budget;
    use crate::codec::Codec;
    use crate::error::ErrorKind;
    use crate::id::{Owned, SessionId};
    use crate::limits::MEMORY_MIN;

    #[test]
    fn bases_count_in_the_memory() {
        let budget = Budget::new(MEMORY_MIN).unwrap();
        let id = |chunk: u32| ChunkId::of(&chunk.to_le_bytes());
        let entry = |chunk: u32| FooterEntry {
            id: id(chunk),
            offset: 0,
            stored_len: 1,
            plain_len: 1,
            codec: Codec::Raw,
            base: Some(id(chunk / 2)),
        };
        let (mut needed, mut memory) = (HashSet::new(), budget.keep_growing());
        let most = u32::try_from(budget.kept_max()).unwrap() / u32::try_from(NEEDED_WEIGHT).unwrap();
        for chunks in [0..most, 0..most, most..2 * most] {
            need(&mut needed, &PackFooter { entries: chunks.map(entry).collect() }, &mut memory).unwrap();
        }
        let beyond = PackFooter { entries: vec![entry(2 * most)] };
        assert_eq!(need(&mut needed, &beyond, &mut memory).unwrap_err().kind(), ErrorKind::Exhausted);
        drop(memory);
        let (mut bases, mut memory) = (Bases::new(), budget.keep_growing());
        let pack = Owned::fresh(SessionId::random());
        let most = u32::try_from(budget.kept_max()).unwrap() / u32::try_from(BASE_WEIGHT).unwrap();
        let mut add = |chunk| {
            let found = ChunkPlace { base: None, ..ChunkPlace::of(pack, chunk, &entry(chunk)) };
            place(&mut bases, id(chunk), found, &mut memory)
        };
        for chunk in (0..most).chain(0..most) {
            add(chunk).unwrap();
        }
        assert_eq!(add(most).unwrap_err().kind(), ErrorKind::Exhausted);
    }

    #[test]
    fn a_copy_that_lacks_its_base_is_no_base() {
        let (pack, id) = (Owned::fresh(SessionId::random()), |chunk: u32| ChunkId::of(&chunk.to_le_bytes()));
        let mut memory = Budget::new(MEMORY_MIN).unwrap().keep_growing();
        let mut bases = Bases::new();
        let mut add = |chunk: u32, codec: Codec, base: Option<ChunkId>| {
            let entry = FooterEntry { id: id(chunk), offset: 0, stored_len: 1, plain_len: 1, codec, base };
            place(&mut bases, id(chunk), ChunkPlace::of(pack, chunk, &entry), &mut memory).unwrap();
            bases.get(&id(chunk)).map(|place| place.codec)
        };
        assert_eq!(add(1, Codec::Difference, Some(id(7))), None);
        assert_eq!(add(2, Codec::Bundle(0), None), Some(Codec::Bundle(0)));
        assert_eq!(add(1, Codec::Bundle(1), Some(id(2))), Some(Codec::Bundle(1)));
        assert_eq!(add(1, Codec::Bundle(3), Some(id(2))), Some(Codec::Bundle(1)));
    }
}
