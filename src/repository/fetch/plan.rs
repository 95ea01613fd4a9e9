//! Planning: groups chunks to few ranged reads; each read has everything needed to decode its chunks. Pure.
//!
//! A chunk stored as a difference is read together with its base, so that no plain bytes are kept between reads. Bases come in
//! the order of their places, each followed by its dependents.

use std::collections::HashMap;
use std::ops::Range;

use super::gaps::{GapBudget, Gaps};
use super::pack_read::{Located, PackRead, PlannedChunk, cover, frame, stored_len};
use crate::codec::{Codec, HOPS_MAX, PART_STRIDE};
use crate::error::{Error, Result};
use crate::id::PackId;
use crate::limits::CHUNK_LEN_MAX;

/// Maximum number of requests in one read, if a base has many dependents.
const PARTS: usize = 16;
/// Chunks, one without a base and its dependents, that are read together regardless of length.
const TOGETHER: usize = 3;
/// Maximum number of chunks to decode for one, including that.
const CHAIN_MAX: usize = HOPS_MAX as usize + 1;

/// Plans the reads of the `wanted` chunks and their bases. No read is longer than `longest`, unless one chunk with its bases is.
/// Each chunk is read once, unless it has more dependents than fit into one read. `gaps` says how much may be read between two
/// chunks.
///
/// # Errors
/// Errors of `locate`.
pub fn plan(
    locate: impl Fn(u32) -> Result<Located>,
    wanted: impl IntoIterator<Item = u32>,
    longest: u64,
    gaps: Gaps,
) -> Result<Vec<PackRead>> {
    let wanted = ascending(wanted);
    let trees = Trees::grow(&locate, &wanted)?;
    let allowed = match gaps {
        Gaps::Wide => GapBudget::WIDE,
        Gaps::Spare => GapBudget::spare(trees.frames(&locate)?),
    };
    let (reads, open) = Default::default();
    let mut plan = Planning { locate, wanted: &wanted, longest, allowed, reads, open };
    let mut members = Vec::new();
    for &(.., root) in &trees.roots {
        members.clear();
        trees.collect(root, &mut Vec::new(), &mut members);
        plan.add(&members)?;
    }
    plan.close();
    Ok(plan.reads)
}

/// Maximum plain bytes of the chunks that one read brings to be encoded anew. A frame of some bytes can stand for megabytes: the length of
/// a read does not bound what is made of it.
pub const ANEW_MAX: u64 = CHUNK_LEN_MAX;

/// As [`plan`], for chunks that are encoded anew, without their bases: each read brings at most [`ANEW_MAX`] plain bytes of them.
///
/// # Errors
/// As [`plan`].
pub fn plan_anew(
    locate: impl Fn(u32) -> Result<Located>,
    wanted: impl IntoIterator<Item = u32>,
    longest: u64,
    gaps: Gaps,
) -> Result<Vec<PackRead>> {
    let mut ordered = Vec::new();
    for chunk in ascending(wanted) {
        let located = locate(chunk)?;
        ordered.push((located.base.unwrap_or(chunk), chunk, u64::from(located.place.plain_len)));
    }
    ordered.sort_unstable();
    let (mut reads, mut some, mut plain) = (Vec::new(), Vec::new(), 0);
    for (_, chunk, len) in ordered {
        if !some.is_empty() && plain + len > ANEW_MAX {
            reads.extend(plan(&locate, std::mem::take(&mut some), longest, gaps)?);
            plain = 0;
        }
        some.push(chunk);
        plain += len;
    }
    reads.extend(plan(&locate, some, longest, gaps)?);
    Ok(reads)
}

/// Chunks in ascending order, each once.
fn ascending(chunks: impl IntoIterator<Item = u32>) -> Vec<u32> {
    let mut chunks: Vec<u32> = chunks.into_iter().collect();
    chunks.sort_unstable();
    chunks.dedup();
    chunks
}

/// Place of a chunk in a form that is cheap to compare: number of its pack (by first use), offset; then the chunk.
type Order = (u32, u64, u32);

/// Chunks with their dependents.
#[derive(Default)]
struct Trees {
    roots: Vec<Order>,
    branches: HashMap<u32, Vec<Order>>,
    packs: HashMap<(usize, PackId), u32>,
}

impl Trees {
    fn grow(locate: &impl Fn(u32) -> Result<Located>, wanted: &[u32]) -> Result<Self> {
        let mut trees = Self::default();
        for &chunk in wanted {
            let mut next = Some(chunk);
            for _ in 0..CHAIN_MAX {
                let Some(chunk) = next else { break };
                let located = locate(chunk)?;
                let order = trees.order(chunk, &located);
                match located.base {
                    Some(base) => trees.branches.entry(base).or_default().push(order),
                    None => trees.roots.push(order),
                }
                next = located.base;
            }
            if next.is_some() {
                return Err(Error::damaged("chunk needs more others than there may be").got(chunk));
            }
        }
        trees.branches.values_mut().chain([&mut trees.roots]).for_each(|orders| {
            orders.sort_unstable();
            orders.dedup();
        });
        Ok(trees)
    }

    fn order(&mut self, chunk: u32, located: &Located) -> Order {
        let met = u32::try_from(self.packs.len()).unwrap_or(u32::MAX);
        let pack = *self.packs.entry((located.repository, located.place.pack)).or_insert(met);
        (pack, located.place.offset, chunk)
    }

    /// Pack and byte range of every chunk's frame.
    fn frames(&self, locate: &impl Fn(u32) -> Result<Located>) -> Result<Vec<(u32, Range<u64>)>> {
        let orders = self.roots.iter().chain(self.branches.values().flatten());
        orders.map(|&(pack, _, chunk)| Ok((pack, frame(&locate(chunk)?)))).collect()
    }

    /// Collects a chunk and all its dependents, each with the chunks that it needs.
    fn collect(&self, chunk: u32, above: &mut Vec<u32>, members: &mut Vec<(Vec<u32>, u32)>) {
        members.push((above.clone(), chunk));
        above.push(chunk);
        for &(.., child) in self.branches.get(&chunk).map(Vec::as_slice).unwrap_or_default() {
            self.collect(child, above, members);
        }
        above.pop();
    }
}

/// Builder of a plan.
struct Planning<'a, L> {
    locate: L,
    wanted: &'a [u32],
    longest: u64,
    allowed: GapBudget,
    reads: Vec<PackRead>,
    open: PackRead,
}

impl<L: Fn(u32) -> Result<Located>> Planning<'_, L> {
    /// Adds a chunk and its dependents: to the open read, if all of them fit.
    fn add(&mut self, members: &[(Vec<u32>, u32)]) -> Result<()> {
        let mut parts = self.open.parts.clone();
        let deepest = members.iter().map(|(above, _)| above.len() + 1).max().unwrap_or(1);
        let most = deepest.max(self.open.parts.len());
        for (_, chunk) in members {
            cover(&mut parts, &(self.locate)(*chunk)?, self.allowed.gap());
            if stored_len(&parts) > self.longest || parts.len() > most {
                self.close();
                break;
            }
        }
        for (above, chunk) in members {
            let located = (self.locate)(*chunk)?;
            if members.len() > TOGETHER && self.open.chunks.len() > above.len() {
                let near = self.open.stored_len() + PART_STRIDE;
                let mut parts = self.open.parts.clone();
                cover(&mut parts, &located, self.allowed.gap());
                // A part follows its bundle closely.
                let is_beside = located.place.codec == Codec::Part && stored_len(&parts) <= near;
                if !is_beside && stored_len(&parts) > self.longest || parts.len() > PARTS {
                    self.close();
                    for &chunk in above {
                        self.cover(&(self.locate)(chunk)?);
                        self.open.chunks.push(PlannedChunk { chunk, wanted: false });
                    }
                }
            }
            self.cover(&located);
            let wanted = self.wanted.binary_search(chunk).is_ok();
            self.open.chunks.push(PlannedChunk { chunk: *chunk, wanted });
        }
        Ok(())
    }

    /// Extends the open read to cover a chunk; unwanted bytes reduce the allowance.
    fn cover(&mut self, located: &Located) {
        let before = self.open.stored_len();
        cover(&mut self.open.parts, located, self.allowed.gap());
        let more = self.open.stored_len() - before;
        self.allowed.took(more.saturating_sub(located.place.stored_len.into()));
    }

    fn close(&mut self) {
        if !self.open.chunks.is_empty() {
            self.reads.push(std::mem::take(&mut self.open));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Codec;
    use crate::id::{ChunkId, Owned, SessionId};
    use crate::limits::MIB;
    use crate::repository::ChunkPlace;

    const LEN: u32 = 512 << 10;

    /// Chunks of half a MiB one after another in two packs, one of bases and one of what needs them.
    struct Bench {
        packs: [PackId; 2],
        bases: Vec<Option<u32>>,
    }

    impl Bench {
        fn new(bases: &[Option<u32>]) -> Self {
            let session = SessionId::random();
            Self { packs: [Owned::fresh(session), Owned::fresh(session)], bases: bases.to_vec() }
        }

        fn locate(&self, chunk: u32) -> Located {
            let base = self.bases[chunk as usize];
            let codec = if base.is_some() { Codec::Difference } else { Codec::Raw };
            let place = ChunkPlace {
                pack: self.packs[usize::from(base.is_some())],
                ordinal: chunk,
                offset: u64::from(chunk) * u64::from(LEN),
                stored_len: LEN,
                plain_len: LEN,
                codec,
                base: base.map(|base| ChunkId::of(&base.to_le_bytes())),
                alone_len: 0,
            };
            Located { id: ChunkId::of(&chunk.to_le_bytes()), place, base, repository: 0 }
        }

        /// Chunks that each read brings, those not wanted negative.
        fn plan(&self, wanted: &[u32], longest: u64) -> Vec<Vec<i64>> {
            let reads = plan(|chunk| Ok(self.locate(chunk)), wanted.iter().copied(), longest, Gaps::Wide).unwrap();
            for read in &reads {
                for brought in &read.chunks {
                    assert!(read.find(&self.locate(brought.chunk)).is_some());
                }
            }
            let sign = |b: &PlannedChunk| if b.wanted { i64::from(b.chunk) } else { -i64::from(b.chunk) };
            reads.iter().map(|read| read.chunks.iter().map(sign).collect()).collect()
        }
    }

    #[test]
    fn neighbours_share_a_read_up_to_its_length() {
        let bench = Bench::new(&[None; 6]);
        assert_eq!(bench.plan(&[4, 0, 1, 2, 1], 2 * MIB), [vec![0, 1, 2], vec![4]]);
        assert_eq!(bench.plan(&[0, 1, 2, 3, 4, 5], MIB), [vec![0, 1], vec![2, 3], vec![4, 5]]);
        assert_eq!(bench.plan(&[0, 1], 1), [vec![0], vec![1]]);
    }

    /// A frame of some bytes may stand for megabytes.
    #[test]
    fn what_is_encoded_anew_is_bounded_by_its_plain_bytes() {
        let bench = Bench::new(&[None, Some(0), Some(0), Some(0), Some(0), Some(0)]);
        let plain_len = u32::try_from(ANEW_MAX / 3).unwrap();
        let locate = |chunk| {
            let located = bench.locate(chunk);
            Ok(Located { place: ChunkPlace { stored_len: 50, plain_len, ..located.place }, ..located })
        };
        let planned = |reads: Vec<PackRead>| -> Vec<Vec<u32>> {
            let wanted = |read: PackRead| read.chunks.into_iter().filter(|chunk| chunk.wanted).map(|chunk| chunk.chunk);
            reads.into_iter().map(|read| wanted(read).collect()).collect()
        };
        assert_eq!(planned(plan(locate, 1..6, 8 * MIB, Gaps::Wide).unwrap()), [vec![1, 2, 3, 4, 5]]);
        let reads = plan_anew(locate, [5, 4, 3, 2, 1, 1], 8 * MIB, Gaps::Wide).unwrap();
        assert_eq!(planned(reads), [vec![1, 2, 3], vec![4, 5]]);
    }

    #[test]
    fn bases_come_with_what_needs_them_and_once() {
        let bench = Bench::new(&[None, None, None, None, Some(1), Some(2), Some(3)]);
        assert_eq!(bench.plan(&[4, 5, 6], 4 * MIB), [vec![-1, 4, -2, 5, -3, 6]]);
        assert_eq!(bench.plan(&[4, 5, 6], 2 * MIB), [vec![-1, 4, -2, 5], vec![-3, 6]]);
        assert_eq!(bench.plan(&[1, 4, 5], MIB), [vec![1, 4], vec![-2, 5]]);
    }

    #[test]
    fn what_many_need_is_read_again_rather_than_kept() {
        let bench = Bench::new(&[None, Some(0), Some(0), Some(0), Some(0)]);
        assert_eq!(bench.plan(&[1, 2, 3, 4], 2 * MIB), [vec![0, 1, 2, 3], vec![0, 4]]);
    }

    #[test]
    fn what_needs_one_chunk_and_lies_apart_is_read_in_few_requests_at_once() {
        let bases: Vec<Option<u32>> = (0..1000).map(|chunk| (chunk > 0).then_some(0)).collect();
        let bench = Bench::new(&bases);
        for (codec, apart) in [(Codec::Difference, LEN), (Codec::Part, LEN), (Codec::Part, 4 << 10)] {
            // Short frames, far from each other.
            let locate = |chunk| {
                let located = bench.locate(chunk);
                let (codec, offset) = (if chunk == 0 { Codec::Bundle(0) } else { codec }, u64::from(chunk * apart));
                Ok(Located { place: ChunkPlace { offset, stored_len: 1, codec, ..located.place }, ..located })
            };
            let reads = plan(locate, 1..1000, MIB, Gaps::Wide).unwrap();
            assert!(reads.iter().all(|read| read.parts.len() <= PARTS && read.stored_len() <= MIB));
            let chunks = reads.iter().flat_map(|read| &read.chunks).filter(|chunk| chunk.wanted);
            let brought: Vec<u32> = chunks.map(|chunk| chunk.chunk).collect();
            assert_eq!(brought, (1..1000).collect::<Vec<_>>());
        }
    }

    /// The parts of a long bundle do not read it again.
    #[test]
    fn parts_are_read_with_their_bundle_whatever_its_length() {
        let bench = Bench::new(&[None, Some(0), Some(1), Some(1), Some(1)]);
        let locate = |chunk| {
            let located = bench.locate(chunk);
            let (codec, stored_len) = match chunk {
                0 => (Codec::Bundle(0), LEN),
                1 => (Codec::Bundle(1), LEN),
                _ => (Codec::Part, 4),
            };
            let offset = if chunk < 2 { located.place.offset } else { u64::from(2 * LEN + 4 * chunk) };
            Ok(Located { place: ChunkPlace { offset, stored_len, codec, ..located.place }, ..located })
        };
        let reads = plan(locate, 2..5, 1, Gaps::Wide).unwrap();
        assert_eq!(reads.len(), 1, "{reads:?}");
    }

    /// A pack of short chunks of which every second is wanted: few requests for a tree, few bytes for parts of tensors.
    #[test]
    fn gaps_are_read_for_trees_and_skipped_for_parts_of_tensors() {
        let bench = Bench::new(&[None; 400]);
        let short = 10 << 10;
        let locate = |chunk: u32| {
            let located = bench.locate(chunk);
            let place = ChunkPlace { offset: u64::from(chunk) * u64::from(short), stored_len: short, ..located.place };
            Ok(Located { place, ..located })
        };
        let every = |step: usize| (0..400).step_by(step);
        let planned = |step: usize, gaps: Gaps| {
            let reads = plan(locate, every(step), 8 * MIB, gaps).unwrap();
            (reads.len(), reads.iter().map(PackRead::stored_len).sum::<u64>() / u64::from(short))
        };
        assert_eq!(planned(2, Gaps::Wide), (1, 399));
        // Six gaps are a 32nd.
        assert_eq!(planned(2, Gaps::Spare), (194, 206));
        // All of it: as few requests either way.
        assert_eq!(planned(1, Gaps::Wide), (1, 400));
        assert_eq!(planned(1, Gaps::Spare), (1, 400));
        // All but two gaps of a chunk: they are as good as nothing.
        let most = plan(locate, (0..400).filter(|chunk| chunk % 150 != 149), 8 * MIB, Gaps::Spare).unwrap();
        assert_eq!((most.len(), most[0].chunks.len()), (1, 398));
    }

    /// Bases and what needs them are weighed as one: nothing is read for being between others.
    #[test]
    fn gaps_between_bases_count_like_others() {
        let bases: Vec<Option<u32>> = (0..200).map(|chunk| (chunk >= 100).then(|| chunk - 100)).collect();
        let bench = Bench::new(&bases);
        let wanted = (100..200).filter(|chunk| chunk % 4 < 2);
        let reads = plan(|chunk| Ok(bench.locate(chunk)), wanted, 8 * MIB, Gaps::Spare).unwrap();
        assert_eq!(reads.iter().map(PackRead::stored_len).sum::<u64>(), 100 * u64::from(LEN));
        assert!(reads.iter().all(|read| read.parts.len() == 2 && read.chunks.len() == 4));
    }

    #[test]
    fn circles_are_damage() {
        let bench = Bench::new(&[Some(1), Some(0)]);
        assert!(plan(|chunk| Ok(bench.locate(chunk)), [0], MIB, Gaps::Wide).is_err());
    }
}
