//! An index segment: the pack of each chunk, in 16 bytes per chunk, sorted, so that it can be searched in place.
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
//! (<https://github.com/apache/parquet-format/blob/master/BloomFilter.md>) with the prefix, uniform as it is, in place of
//! a hash: block `(high32 * f) >> 32`, one bit in each of eight words, `(low32 * salt) >> 27` by the salts below.

use std::cmp::Ordering;

use super::envelope::{DIGEST_LEN, HEADER_LEN, Kind, read_header};
use super::map::PackRef;
use super::pack::footer_len_max;
use super::wire::{Read, Reader, Writer};
use crate::error::{Error, Result};
use crate::id::{ChunkId, ObjectId, Owned, SessionId};
use crate::limits::{PACK_CHUNKS_MAX, PACK_LEN_MAX};

/// Offset of the packs in the object.
const PACKS: usize = HEADER_LEN + 16;
const PACK_ROW: usize = 48;
const BLOCK: usize = 32;
const ENTRY: usize = 16;
/// Bits per chunk in the filter: 1 % false positives.
const FILTER_BITS: usize = 10;
/// Maximum length of the filter, in those that this version writes: room for other writers' false positives.
const FILTER_ROOM: usize = 2;
const SALTS: [u32; 8] =
    [0x47b6_137b, 0x4497_4d91, 0x8824_ad5b, 0xa2b7_289d, 0x7054_95c7, 0x2df1_424b, 0x9efc_4947, 0x5c6b_fb31];

/// One entry of a segment, in the order that it is sorted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Row {
    /// The chunk id's prefix.
    pub prefix: u64,
    /// Pack of the segment.
    pub pack: u32,
    /// Chunk of that pack.
    pub ordinal: u32,
}

/// Blocks of the filter of so many chunks.
fn filter_blocks(chunks: usize) -> usize {
    chunks.saturating_mul(FILTER_BITS).div_ceil(BLOCK * 8).max(1)
}

/// Maximum length of a segment of so many packs and chunks, as an object.
#[must_use]
pub fn segment_len_max(packs: u64, chunks: u64) -> u64 {
    let blocks = filter_blocks(usize::try_from(chunks).unwrap_or(usize::MAX)).saturating_mul(FILTER_ROOM);
    let parts = [(packs, PACK_ROW), (blocks as u64, BLOCK), (chunks, ENTRY)];
    let ends = (PACKS + DIGEST_LEN) as u64;
    parts.into_iter().fold(ends, |len, (count, each)| len.saturating_add(count.saturating_mul(each as u64)))
}

/// Writes the body of a segment: `rows` in any order, each naming one of `packs`.
#[must_use]
pub fn segment_bytes(packs: &[PackRef], mut rows: Vec<Row>) -> Vec<u8> {
    rows.sort_unstable();
    let blocks = filter_blocks(rows.len());
    let mut filter = vec![0u8; blocks * BLOCK];
    rows.iter().for_each(|row| mark(&mut filter, row.prefix));
    let mut out = Writer::new();
    out.u64(rows.len() as u64);
    out.u32(u32::try_from(packs.len()).unwrap_or(u32::MAX)).u32(u32::try_from(blocks).unwrap_or(u32::MAX));
    for pack in packs {
        out.bytes(&pack.id.session.to_bytes()).bytes(&pack.id.object.to_bytes());
        out.u64(pack.len).u32(pack.footer_len).u32(pack.chunks);
    }
    out.bytes(&filter);
    for row in rows {
        out.u64(row.prefix).u32(row.pack).u32(row.ordinal);
    }
    out.into_bytes()
}

/// Ranges of a segment's parts in its object, which is passed to each call, because it may be a mapped file. It uses no memory in
/// proportion to the object.
#[derive(Clone, Debug)]
pub struct SegmentView {
    packs: u32,
    chunks: usize,
    filter: usize,
    entries: usize,
}

impl SegmentView {
    /// Parses the head of a segment. Whoever fetches the object verifies its digest; a wrong entry is only a candidate that does
    /// not match.
    ///
    /// # Errors
    /// Damaged, if the parts do not fit the object; unsupported, if a later version wrote it, or compressed it.
    pub fn parse(object: &[u8]) -> Result<Self> {
        let (compression, body_len) = read_header(Kind::Segment, object)?;
        if compression != 0 {
            return Err(Error::unsupported("index segment is compressed").got(compression).help("use a newer towline"));
        }
        if (object.len() as u64).checked_sub((HEADER_LEN + DIGEST_LEN) as u64) != Some(body_len) {
            return Err(Error::damaged("index segment has another length").expected(body_len).got(object.len()));
        }
        Ok(Self::parse_body(object.get(HEADER_LEN..object.len() - DIGEST_LEN).unwrap_or_default())?)
    }

    fn parse_body(body: &[u8]) -> Read<Self> {
        let mut reader = Reader::new(body);
        let chunks = usize::try_from(reader.u64()?).map_err(|_| reader.malformed("too many chunks"))?;
        let (packs, blocks) = (reader.u32()?, reader.u32()? as usize);
        reader.take((packs as usize).saturating_mul(PACK_ROW))?;
        let filter = PACKS + packs as usize * PACK_ROW;
        reader.take(blocks.saturating_mul(BLOCK))?;
        reader.take(chunks.saturating_mul(ENTRY))?;
        if blocks == 0 {
            return Err(reader.malformed("filter is empty"));
        }
        if blocks > filter_blocks(chunks).saturating_mul(FILTER_ROOM) {
            return Err(reader.malformed("filter is longer than its chunks need"));
        }
        reader.finish()?;
        Ok(Self { packs, chunks, filter, entries: filter + blocks * BLOCK })
    }

    /// Number of packs it covers.
    #[must_use]
    pub fn pack_count(&self) -> u32 {
        self.packs
    }

    /// Pack number `number`; none, if its row is impossible.
    #[must_use]
    pub fn pack(&self, object: &[u8], number: u32) -> Option<PackRef> {
        let start = PACKS + number as usize * PACK_ROW;
        let row = object.get(start..start + PACK_ROW).filter(|_| number < self.packs)?;
        pack_row(&mut Reader::new(row)).ok()
    }

    /// Packs that it covers, except impossible ones.
    pub fn packs<'a>(&self, object: &'a [u8]) -> impl Iterator<Item = PackRef> + use<'a> {
        let view = self.clone();
        (0..self.packs).filter_map(move |number| view.pack(object, number))
    }

    /// Chunks it lists.
    #[must_use]
    pub fn chunks(&self) -> usize {
        self.chunks
    }

    /// Candidates for `id`: chunks with the same id prefix. `object` is the object that this view was parsed from.
    pub fn find<'a>(&self, object: &'a [u8], id: &ChunkId) -> impl Iterator<Item = Row> + use<'a> {
        let wanted = id.prefix();
        let filter = object.get(self.filter..self.entries).unwrap_or_default();
        let rows = if marked(filter, wanted) { self.raw_rows(object) } else { &[] };
        let found = rows.get(lower_bound(rows, wanted)..).unwrap_or_default();
        found.iter().map(row_of).take_while(move |row| row.prefix == wanted)
    }

    /// True if it lists `row`, at a place where [`Self::find`] passes by.
    #[must_use]
    pub fn lists(&self, object: &[u8], row: &Row) -> bool {
        let filter = object.get(self.filter..self.entries).unwrap_or_default();
        let rows = self.raw_rows(object);
        let rows = rows.get(lower_bound(rows, row.prefix)..).unwrap_or_default();
        marked(filter, row.prefix) && rows.binary_search_by(|raw| row_of(raw).cmp(row)).is_ok()
    }

    /// Every entry, sorted.
    pub fn rows<'a>(&self, object: &'a [u8]) -> impl Iterator<Item = Row> + use<'a> {
        self.raw_rows(object).iter().map(row_of)
    }

    fn raw_rows<'a>(&self, object: &'a [u8]) -> &'a [[u8; ENTRY]] {
        object.get(self.entries..self.entries + self.chunks * ENTRY).unwrap_or_default().as_chunks().0
    }
}

fn pack_row(table: &mut Reader<'_>) -> Read<PackRef> {
    let session = SessionId::from_bytes(table.array()?);
    let object = ObjectId::from_bytes(table.array()?);
    let (len, footer_len, chunks) = (table.u64()?, table.u32()?, table.u32()?);
    if len > PACK_LEN_MAX || u64::from(chunks) > PACK_CHUNKS_MAX || footer_len > footer_len_max(chunks) {
        return Err(table.malformed("pack is impossibly long, or holds too many chunks"));
    }
    Ok(PackRef { id: Owned { session, object }, len, footer_len, chunks })
}

fn prefix_of(row: &[u8; ENTRY]) -> u64 {
    row.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

fn row_of(row: &[u8; ENTRY]) -> Row {
    let [.., p0, p1, p2, p3, o0, o1, o2, o3] = *row;
    let (pack, ordinal) = (u32::from_le_bytes([p0, p1, p2, p3]), u32::from_le_bytes([o0, o1, o2, o3]));
    Row { prefix: prefix_of(row), pack, ordinal }
}

/// First row at or after `wanted`, by interpolation search (prefixes are uniform), then binary search: touches two or three
/// pages.
fn lower_bound(rows: &[[u8; ENTRY]], wanted: u64) -> usize {
    let (mut low, mut high) = (0usize, rows.len());
    let (mut floor, mut ceiling) = (0u64, u64::MAX);
    let mut guesses = 3;
    while low < high {
        let span = high - low;
        let middle = if guesses > 0 && ceiling > floor && span > 64 {
            guesses -= 1;
            let part =
                u128::from(wanted.clamp(floor, ceiling) - floor) * (span as u128) / (u128::from(ceiling - floor) + 1);
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

#[expect(clippy::cast_possible_truncation, reason = "the halves of a 64-bit number")]
fn bits(prefix: u64, blocks: usize) -> (usize, [u32; 8]) {
    let (low, high) = (prefix as u32, prefix >> 32);
    let block = (high * blocks as u64) >> 32;
    (block as usize, SALTS.map(|salt| 1 << (low.wrapping_mul(salt) >> 27)))
}

fn mark(filter: &mut [u8], prefix: u64) {
    let (block, masks) = bits(prefix, filter.len() / BLOCK);
    let words = filter.get_mut(block * BLOCK..).unwrap_or_default().as_chunks_mut::<4>().0;
    for (word, mask) in words.iter_mut().zip(masks) {
        *word = (u32::from_le_bytes(*word) | mask).to_le_bytes();
    }
}

fn marked(filter: &[u8], prefix: u64) -> bool {
    let (block, masks) = bits(prefix, filter.len() / BLOCK);
    let words = filter.get(block * BLOCK..).unwrap_or_default().as_chunks::<4>().0;
    words.len() >= 8 && words.iter().zip(masks).all(|(word, mask)| u32::from_le_bytes(*word) & mask != 0)
}

#[cfg(test)]
mod tests {
    use super::super::envelope::seal;
    use super::*;

    fn pack(chunks: u32) -> PackRef {
        let id = Owned::fresh(SessionId::random());
        PackRef { id, len: 1 << 20, footer_len: 100, chunks }
    }

    fn id(n: u32) -> ChunkId {
        ChunkId::of(&n.to_le_bytes())
    }

    fn row(n: u32) -> Row {
        Row { prefix: id(n).prefix(), pack: n / 1000, ordinal: n % 1000 }
    }

    #[test]
    fn every_chunk_is_found_and_hardly_any_other() {
        let packs: Vec<_> = (0..20).map(|_| pack(1000)).collect();
        let object = seal(Kind::Segment, &segment_bytes(&packs, (0..20_000).map(row).collect()), false);
        let view = SegmentView::parse(&object).unwrap();
        assert_eq!(view.packs(&object).collect::<Vec<_>>(), packs);
        assert_eq!((view.pack(&object, 19), view.pack(&object, 20)), (Some(packs[19]), None));
        for n in 0..20_000 {
            assert!(view.find(&object, &id(n)).any(|found| found == row(n)), "{n}");
            assert!(view.lists(&object, &row(n)) && !view.lists(&object, &Row { ordinal: 1000, ..row(n) }), "{n}");
        }
        assert_eq!((20_000..60_000).filter(|&n| view.find(&object, &id(n)).next().is_some()).count(), 0);
        assert!(object.len() < 20_000 * 20);
        let filter = &object[view.filter..view.entries];
        let false_hits = (20_000..60_000).filter(|&n| marked(filter, id(n).prefix())).count();
        assert!(false_hits < 1200, "{false_hits} of 40000");
    }

    #[test]
    fn packs_and_chunks_bound_the_length_of_a_segment() {
        for chunks in [0, 1, 25, 26, 1000] {
            let packs = [pack(500), pack(500)];
            let mut body = segment_bytes(&packs, (0..chunks).map(row).collect());
            let (most, end) = (segment_len_max(2, chunks.into()), PACKS - HEADER_LEN + 2 * PACK_ROW);
            let written = u32::from_le_bytes(body[12..16].try_into().unwrap());
            for (blocks, is_read) in [(written, true), (2 * written, true), (2 * written + 1, false)] {
                let lacking = (blocks as usize * BLOCK) - (body.len() - end - chunks as usize * ENTRY);
                body.splice(end..end, vec![0; lacking]).for_each(drop);
                body[12..16].copy_from_slice(&blocks.to_le_bytes());
                let object = seal(Kind::Segment, &body, false);
                assert_eq!(SegmentView::parse(&object).is_ok(), is_read, "{chunks} chunks, {blocks} blocks");
                assert_eq!(object.len() as u64 <= most, is_read, "{chunks} chunks, {blocks} blocks");
            }
        }
        assert_eq!(segment_len_max(u64::MAX, u64::MAX), u64::MAX);
    }

    #[test]
    fn a_torn_segment_is_malformed() {
        let object = seal(Kind::Segment, &segment_bytes(&[pack(1)], vec![row(1)]), false);
        for cut in 0..object.len() {
            assert!(SegmentView::parse(&object[..cut]).is_err(), "{cut}");
        }
    }
}
