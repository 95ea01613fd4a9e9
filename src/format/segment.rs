//! An index segment: which pack holds which chunk. 16 bytes a chunk, sorted, so that it is searched where it lies.
//!
//! The body of an uncompressed envelope of kind 'I':
//!
//! ```text
//! 0      8    n, chunks          8   4  p, packs       12  4  f, filter blocks
//! 16     48p  packs: session (16), object (16), length (8), footer length (4), chunks (4)
//! ..     32f  filter: a split-block Bloom filter
//! ..     16n  entries sorted: id prefix (8), pack (4), ordinal in that pack (4)
//! ```
//!
//! The prefix is the first eight bytes of the chunk id read as a big-endian number. A hit is only a candidate: the pack's
//! footer has the full id. The filter is Parquet's split-block Bloom filter
//! (<https://github.com/apache/parquet-format/blob/master/BloomFilter.md>) over bytes 8 to 16 of the chunk id, read
//! little-endian, in place of a hash: block `(high32 * f) >> 32`, one bit in each of eight words by the salts below.

use std::cmp::Ordering;

use super::envelope::HEADER_LEN;
use super::map::PackRef;
use super::wire::{Malformed, Read, Reader, Writer};
use crate::id::{ChunkId, ObjectId, Owned, SessionId};

const PACK_ROW: usize = 48;
const BLOCK: usize = 32;
const ENTRY: usize = 16;
/// Bits a chunk in the filter: 1 % false hits.
const FILTER_BITS: usize = 10;
const SALTS: [u32; 8] = [
    0x47b6_137b, 0x4497_4d91, 0x8824_ad5b, 0xa2b7_289d, 0x7054_95c7, 0x2df1_424b, 0x9efc_4947, 0x5c6b_fb31,
];

/// A candidate: some chunk whose id starts like the one asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hit {
    /// Which pack of the segment.
    pub pack: u32,
    /// Which chunk of that pack.
    pub ordinal: u32,
}

/// Writes the body of a segment over `packs`, each with the ids it holds in the order of its footer.
#[must_use]
pub fn segment_bytes(packs: &[(PackRef, Vec<ChunkId>)]) -> Vec<u8> {
    let chunks: usize = packs.iter().map(|(_, ids)| ids.len()).sum();
    let blocks = (chunks * FILTER_BITS).div_ceil(BLOCK * 8).max(1);
    let mut filter = vec![0u8; blocks * BLOCK];
    let mut entries = Vec::with_capacity(chunks);
    for (pack, (_, ids)) in (0u32..).zip(packs) {
        for (ordinal, id) in (0u32..).zip(ids) {
            mark(&mut filter, id);
            entries.push((id.prefix(), pack, ordinal));
        }
    }
    entries.sort_unstable();
    let mut out = Writer::new();
    out.u64(chunks as u64);
    out.u32(u32::try_from(packs.len()).unwrap_or(u32::MAX)).u32(u32::try_from(blocks).unwrap_or(u32::MAX));
    for (pack, _) in packs {
        out.bytes(&pack.id.session.to_bytes()).bytes(&pack.id.object.to_bytes());
        out.u64(pack.len).u32(pack.footer_len).u32(pack.chunks);
    }
    out.bytes(&filter);
    for (prefix, pack, ordinal) in entries {
        out.u64(prefix).u32(pack).u32(ordinal);
    }
    out.into_bytes()
}

/// A segment's parts within its object, which is borrowed at each call: it may be a mapped file.
#[derive(Clone, Debug)]
pub struct SegmentView {
    packs: Vec<PackRef>,
    chunks: usize,
    filter: usize,
    entries: usize,
}

impl SegmentView {
    /// Reads the head of a segment. The object's digest is for whoever fetched it: a wrong entry can only be a
    /// candidate that does not match.
    ///
    /// # Errors
    /// Malformed, if the parts do not fit the object.
    pub fn parse(object: &[u8]) -> Read<Self> {
        let mut reader = Reader::new(object.get(HEADER_LEN..).unwrap_or_default());
        let chunks = usize::try_from(reader.u64()?).map_err(|_| reader.malformed("too many chunks"))?;
        let (packs, blocks) = (reader.u32()? as usize, reader.u32()? as usize);
        let mut table = Reader::new(reader.take(packs.saturating_mul(PACK_ROW))?);
        let packs = (0..packs).map(|_| pack_row(&mut table)).collect::<Read<Vec<_>>>()?;
        let filter = HEADER_LEN + 16 + packs.len() * PACK_ROW;
        reader.take(blocks.saturating_mul(BLOCK))?;
        reader.take(chunks.saturating_mul(ENTRY))?;
        if blocks == 0 {
            return Err(reader.malformed("filter is empty"));
        }
        Ok(Self { packs, chunks, filter, entries: filter + blocks * BLOCK })
    }

    /// The packs it covers.
    #[must_use]
    pub fn packs(&self) -> &[PackRef] {
        &self.packs
    }

    /// Chunks it lists.
    #[must_use]
    pub fn chunks(&self) -> usize {
        self.chunks
    }

    /// Candidates for `id`; `object` is what this view was parsed from.
    pub fn find(&self, object: &[u8], id: &ChunkId) -> Vec<Hit> {
        let filter = object.get(self.filter..self.entries).unwrap_or_default();
        let entries = object.get(self.entries..self.entries + self.chunks * ENTRY).unwrap_or_default();
        if !marked(filter, id) {
            return Vec::new();
        }
        let (rows, _) = entries.as_chunks::<ENTRY>();
        let wanted = id.prefix();
        let from = lower_bound(rows, wanted);
        rows.iter().skip(from).take_while(|row| prefix_of(row) == wanted).map(hit_of).collect()
    }

    /// Every entry, in order of prefix.
    pub fn entries<'a>(&self, object: &'a [u8]) -> impl Iterator<Item = (u64, Hit)> + 'a {
        let entries = object.get(self.entries..self.entries + self.chunks * ENTRY).unwrap_or_default();
        entries.as_chunks::<ENTRY>().0.iter().map(|row| (prefix_of(row), hit_of(row)))
    }
}

fn pack_row(table: &mut Reader<'_>) -> Result<PackRef, Malformed> {
    let session = SessionId::from_bytes(table.array()?);
    let object = ObjectId::from_bytes(table.array()?);
    let (len, footer_len, chunks) = (table.u64()?, table.u32()?, table.u32()?);
    Ok(PackRef { id: Owned { session, object }, len, footer_len, chunks })
}

fn prefix_of(row: &[u8; ENTRY]) -> u64 {
    row.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

fn hit_of(row: &[u8; ENTRY]) -> Hit {
    let [.., p0, p1, p2, p3, o0, o1, o2, o3] = *row;
    Hit { pack: u32::from_le_bytes([p0, p1, p2, p3]), ordinal: u32::from_le_bytes([o0, o1, o2, o3]) }
}

/// The first row at or after `wanted`. Prefixes are uniform, so guess by proportion, then halve: two or three pages.
fn lower_bound(rows: &[[u8; ENTRY]], wanted: u64) -> usize {
    let (mut low, mut high) = (0usize, rows.len());
    let (mut floor, mut ceiling) = (0u64, u64::MAX);
    let mut guesses = 3;
    while low < high {
        let span = high - low;
        let middle = if guesses > 0 && ceiling > floor && span > 64 {
            guesses -= 1;
            let part = u128::from(wanted.clamp(floor, ceiling) - floor) * (span as u128) / (u128::from(ceiling - floor) + 1);
            low + usize::try_from(part).unwrap_or(0).min(span - 1)
        } else {
            low + span / 2
        };
        let found = rows.get(middle).map_or(u64::MAX, prefix_of);
        match found.cmp(&wanted) {
            Ordering::Less => (low, floor) = (middle + 1, found),
            Ordering::Equal | Ordering::Greater => (high, ceiling) = (middle, found),
        }
    }
    low
}

fn bits(id: &ChunkId, blocks: usize) -> (usize, [u32; 8]) {
    let [_, _, _, _, _, _, _, _, b0, b1, b2, b3, b4, b5, b6, b7, ..] = *id.as_bytes();
    let low = u32::from_le_bytes([b0, b1, b2, b3]);
    let high = u32::from_le_bytes([b4, b5, b6, b7]);
    let block = (u64::from(high) * blocks as u64) >> 32;
    (usize::try_from(block).unwrap_or(0), SALTS.map(|salt| 1 << (low.wrapping_mul(salt) >> 27)))
}

fn mark(filter: &mut [u8], id: &ChunkId) {
    let (block, masks) = bits(id, filter.len() / BLOCK);
    let words = filter.get_mut(block * BLOCK..).unwrap_or_default().as_chunks_mut::<4>().0;
    for (word, mask) in words.iter_mut().zip(masks) {
        *word = (u32::from_le_bytes(*word) | mask).to_le_bytes();
    }
}

fn marked(filter: &[u8], id: &ChunkId) -> bool {
    let (block, masks) = bits(id, filter.len() / BLOCK);
    let words = filter.get(block * BLOCK..).unwrap_or_default().as_chunks::<4>().0;
    words.len() >= 8 && words.iter().zip(masks).all(|(word, mask)| u32::from_le_bytes(*word) & mask != 0)
}

#[cfg(test)]
mod tests {
    use super::super::envelope::{Kind, seal};
    use super::*;

    fn pack(chunks: u32) -> PackRef {
        let id = Owned::fresh(SessionId::random());
        PackRef { id, len: 1 << 20, footer_len: 100, chunks }
    }

    fn id(n: u32) -> ChunkId {
        ChunkId::of(&n.to_le_bytes())
    }

    #[test]
    fn every_chunk_is_found_and_hardly_any_other() {
        let packs: Vec<_> = (0..20).map(|p| (pack(1000), (p * 1000..(p + 1) * 1000).map(id).collect())).collect();
        let object = seal(Kind::Segment, &segment_bytes(&packs), false);
        let view = SegmentView::parse(&object).unwrap();
        assert_eq!(view.packs().len(), 20);
        for n in 0..20_000 {
            let found = view.find(&object, &id(n));
            assert!(found.contains(&Hit { pack: n / 1000, ordinal: n % 1000 }), "{n}");
        }
        assert_eq!((20_000..60_000).filter(|&n| !view.find(&object, &id(n)).is_empty()).count(), 0);
        assert!(object.len() < 20_000 * 20);
    }

    #[test]
    fn a_torn_segment_is_malformed() {
        let object = seal(Kind::Segment, &segment_bytes(&[(pack(1), vec![id(1)])]), false);
        for cut in 0..object.len() - 32 {
            assert!(SegmentView::parse(&object[..cut]).is_err(), "{cut}");
        }
    }
}
