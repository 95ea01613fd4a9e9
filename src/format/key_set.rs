//! Compact sets of chunks, for telling other sites what a cache holds.
//!
//! A Golomb-coded set (<https://doi.org/10.1145/1498698.1594230>; the same construction as in
//! <https://github.com/bitcoin/bips/blob/master/bip-0158.mediawiki>): each of `n` keys, the first eight bytes of a chunk's id, is
//! scaled to a number below `n * 2^16`, and the sorted numbers are stored as differences, Rice-coded with 15 bits. That takes 17.6
//! bits a chunk. A chunk that is in the set is always found; one that is not is found with a probability of 2^-16. A binary fuse
//! filter of the same error takes 18.1 bits; this set can also be listed, so that its changes are published as a [`Patch`].

use super::wire::{Read, Reader, Writer};
use crate::error::{Error, Result};

/// Chunks that are not in a set and are found in it: one of this many.
pub const FALSE_POSITIVES: u64 = 1 << ERROR_BITS;
/// Maximum number of keys in a set.
pub const KEYS_MAX: u64 = 1 << 25;
const ERROR_BITS: u32 = 16;
/// Bits of a difference that are stored as they are; the rest is unary.
const RICE_BITS: u32 = 15;
/// Smallest scale, so that a set that begins empty can grow.
const SCALE_MIN: u64 = 1024;
/// Bits that are looked at together.
const WINDOW_BITS: u32 = 56;
/// Keys between two marks.
const STRIDE: usize = 512;

/// A set of chunks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeySet {
    /// Numbers are below `scale * 2^16`: the keys that the set was made of.
    scale: u64,
    count: u64,
    bits: Vec<u8>,
    /// Every [`STRIDE`]th number, with the bit after its code.
    marks: Vec<Mark>,
}

impl Default for KeySet {
    fn default() -> Self {
        Self::of(Vec::new())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mark {
    number: u64,
    /// First bit after it.
    bit: u64,
}

impl KeySet {
    /// The set of `keys`, in any order.
    ///
    /// # Panics
    /// If there are more than [`KEYS_MAX`].
    #[must_use]
    pub fn of(mut keys: Vec<u64>) -> Self {
        keys.sort_unstable();
        keys.dedup();
        let scale = (keys.len() as u64).max(SCALE_MIN);
        assert!(scale <= KEYS_MAX, "more keys than a set may have");
        let mut numbers: Vec<u64> = keys.into_iter().map(|key| scaled(key, scale)).collect();
        numbers.dedup();
        Self::of_numbers(scale, numbers)
    }

    fn of_numbers(scale: u64, numbers: impl IntoIterator<Item = u64>) -> Self {
        let mut bits = BitWriter::default();
        let (mut before, mut count, mut marks) = (0, 0_u64, Vec::new());
        for number in numbers {
            bits.rice(number - before);
            if count.is_multiple_of(STRIDE as u64) {
                marks.push(Mark { number, bit: bits.len });
            }
            (before, count) = (number, count + 1);
        }
        Self { scale, count, bits: bits.bytes, marks }
    }

    /// Changes from this set to that of the ascending `keys`.
    #[must_use]
    pub fn changes_to(&self, keys: &[u64]) -> Patch {
        let mut cursor = Cursor::start(self);
        let (mut patch, mut place) = (Patch::default(), 0);
        let mut here = self.next(&mut cursor);
        let mut last = None;
        for &key in keys {
            let number = scaled(key, self.scale);
            if last.replace(number) == Some(number) {
                continue;
            }
            while here.is_some_and(|passed| passed < number) {
                patch.removed.push(place);
                (place, here) = (place + 1, self.next(&mut cursor));
            }
            if here == Some(number) {
                (place, here) = (place + 1, self.next(&mut cursor));
            } else {
                patch.added.push(number);
            }
        }
        patch.removed.extend(place..self.count);
        patch
    }

    /// This set with the changes of `patch`.
    ///
    /// # Errors
    /// Damaged, if it is a patch of another set.
    pub fn patched(&self, patch: &Patch) -> Result<Self> {
        let limit = self.scale << ERROR_BITS;
        let misfit = patch.removed.last().is_some_and(|place| *place >= self.count)
            || patch.added.last().is_some_and(|number| *number >= limit);
        if misfit || patch.added.len() as u64 > KEYS_MAX {
            return Err(Error::damaged("changes do not belong to the set that they name"));
        }
        let mut cursor = Cursor::start(self);
        let mut removed = patch.removed.iter().copied().peekable();
        let kept = (0..self.count).filter_map(|place| {
            let number = self.next(&mut cursor)?;
            (removed.next_if_eq(&place).is_none()).then_some(number)
        });
        Ok(Self::of_numbers(self.scale, merged(kept, patch.added.iter().copied())))
    }

    /// Number of keys.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.count
    }

    /// True if it has no keys.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Bytes in memory.
    #[must_use]
    pub fn weight(&self) -> u64 {
        (self.bits.len() + self.marks.len() * size_of::<Mark>()) as u64
    }

    /// Passes the place of each of the ascending `keys` that is in the set to `found`. Time grows with the number of keys, and
    /// with the part of the set that lies between them.
    pub fn find_all(&self, keys: &[u64], mut found: impl FnMut(usize)) {
        let mut cursor = Cursor::start(self);
        let mut at = None;
        for (place, &key) in keys.iter().enumerate() {
            let wanted = scaled(key, self.scale);
            let mut here = match at {
                Some(number) if number >= wanted => number,
                _ => match self.seek(&mut cursor, wanted) {
                    Some(number) => number,
                    None => return,
                },
            };
            while here < wanted {
                match self.next(&mut cursor) {
                    Some(number) => here = number,
                    None => return,
                }
            }
            at = Some(here);
            if here == wanted {
                found(place);
            }
        }
    }

    /// True if `key` is in the set.
    #[must_use]
    pub fn contains(&self, key: u64) -> bool {
        let mut found = false;
        self.find_all(&[key], |_| found = true);
        found
    }

    /// Writes it.
    pub fn write(&self, writer: &mut Writer) {
        writer.varint(self.scale).varint(self.count).string(&self.bits);
    }

    /// Reads what [`KeySet::write`] wrote, and checks all of it.
    ///
    /// # Errors
    /// Malformed: more keys than there are bits for, keys out of range, bits left over.
    pub fn read(reader: &mut Reader<'_>) -> Read<Self> {
        let (scale, count) = (reader.varint()?, reader.varint()?);
        let bits = reader.string(usize::MAX)?;
        // Each key takes at least the fixed bits and the end of the unary part.
        if !(SCALE_MIN..=KEYS_MAX).contains(&scale) || count > bits.len() as u64 * 8 / u64::from(RICE_BITS + 1) {
            return Err(reader.malformed("set has an impossible number of keys"));
        }
        let marks = usize::try_from(count).unwrap_or(usize::MAX).div_ceil(STRIDE);
        reader.keep(bits.len())?;
        reader.keep_all::<Mark>(marks)?;
        let mut set = Self { scale, count, bits: bits.to_vec(), marks: Vec::with_capacity(marks) };
        let mut cursor = Cursor::start(&set);
        let end = scale << ERROR_BITS;
        let mut before = None;
        for place in 0..count {
            let number = set.next(&mut cursor).filter(|number| *number < end && before != Some(*number));
            let Some(number) = number else { return Err(reader.malformed("number of a set is out of order or range")) };
            before = Some(number);
            if place.is_multiple_of(STRIDE as u64) {
                set.marks.push(Mark { number, bit: cursor.bit });
            }
        }
        let padded = cursor.bit.div_ceil(8) == bits.len() as u64 && window(bits, cursor.bit) == 0;
        if padded { Ok(set) } else { Err(reader.malformed("bits are left over in a set")) }
    }

    /// Moves the cursor near `wanted`, at most [`STRIDE`] numbers before it, and gives the next number.
    fn seek(&self, cursor: &mut Cursor, wanted: u64) -> Option<u64> {
        let next = self.marks.partition_point(|mark| mark.number <= wanted);
        if let Some(index) = next.checked_sub(1) {
            let mark = self.marks[index];
            if mark.bit > cursor.bit {
                let passed = (index * STRIDE) as u64 + 1;
                *cursor = Cursor { number: mark.number, bit: mark.bit, left: self.count - passed };
                return Some(mark.number);
            }
        }
        self.next(cursor)
    }

    fn next(&self, cursor: &mut Cursor) -> Option<u64> {
        cursor.left = cursor.left.checked_sub(1)?;
        let mut high = 0;
        loop {
            let ones = window(&self.bits, cursor.bit).trailing_ones();
            let counted = ones.min(WINDOW_BITS);
            high += u64::from(counted);
            cursor.bit += u64::from(counted);
            if ones < WINDOW_BITS {
                break;
            }
        }
        let low = window(&self.bits, cursor.bit + 1) & ((1 << RICE_BITS) - 1);
        cursor.bit += 1 + u64::from(RICE_BITS);
        if cursor.bit > self.bits.len() as u64 * 8 {
            return None;
        }
        cursor.number = cursor.number.checked_add((high << RICE_BITS) | low)?;
        Some(cursor.number)
    }
}

/// Place in the bits: after the code of `number`.
#[derive(Clone, Copy, Debug)]
struct Cursor {
    number: u64,
    bit: u64,
    /// Codes after it.
    left: u64,
}

impl Cursor {
    fn start(set: &KeySet) -> Self {
        Self { number: 0, bit: 0, left: set.count }
    }
}

/// Changes of a set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Patch {
    /// Places of the keys that are gone, ascending.
    removed: Vec<u64>,
    /// Numbers of the new ones, ascending.
    added: Vec<u64>,
}

impl Patch {
    /// Number of changes.
    #[must_use]
    pub fn len(&self) -> u64 {
        (self.removed.len() + self.added.len()) as u64
    }

    /// True if nothing changes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes it.
    pub fn write(&self, writer: &mut Writer) {
        for list in [&self.removed, &self.added] {
            writer.count(list.len());
            let mut before = 0;
            for &value in list {
                writer.varint(value - before);
                before = value;
            }
        }
    }

    /// Reads what [`Patch::write`] wrote.
    ///
    /// # Errors
    /// Malformed: numbers that do not rise.
    pub fn read(reader: &mut Reader<'_>) -> Read<Self> {
        let mut list = || {
            let count = reader.count(1)?;
            let mut before = None;
            reader.kept_list(count, |reader| {
                let value = before.unwrap_or(0u64).checked_add(reader.varint()?);
                let value = value.filter(|value| before.is_none_or(|before| *value > before));
                before = value;
                value.ok_or_else(|| reader.malformed("numbers of a list do not rise"))
            })
        };
        Ok(Self { removed: list()?, added: list()? })
    }
}

/// Two ascending sequences as one.
fn merged(one: impl Iterator<Item = u64>, other: impl Iterator<Item = u64>) -> impl Iterator<Item = u64> {
    let (mut one, mut other) = (one.peekable(), other.peekable());
    std::iter::from_fn(move || match (one.peek(), other.peek()) {
        (Some(first), Some(second)) if first == second => {
            other.next();
            one.next()
        }
        (Some(first), Some(second)) if second < first => other.next(),
        (Some(_), _) => one.next(),
        (None, _) => other.next(),
    })
}

/// `key` as a number below `scale * 2^16`, in the order of keys.
fn scaled(key: u64, scale: u64) -> u64 {
    ((u128::from(key) * u128::from(scale << ERROR_BITS)) >> 64) as u64
}

/// [`WINDOW_BITS`] bits from `at` on, the lowest of a byte first; zeros beyond the end.
fn window(bits: &[u8], at: u64) -> u64 {
    let first = usize::try_from(at / 8).unwrap_or(usize::MAX).min(bits.len());
    let available = &bits[first..bits.len().min(first + 8)];
    let mut word = [0; 8];
    word[..available.len()].copy_from_slice(available);
    u64::from_le_bytes(word) >> (at % 8) & ((1 << WINDOW_BITS) - 1)
}

#[derive(Debug, Default)]
struct BitWriter {
    bytes: Vec<u8>,
    len: u64,
}

impl BitWriter {
    fn rice(&mut self, value: u64) {
        for _ in 0..value >> RICE_BITS {
            self.push(true);
        }
        self.push(false);
        for bit in 0..RICE_BITS {
            self.push(value >> bit & 1 == 1);
        }
    }

    fn push(&mut self, bit: bool) {
        if self.len.is_multiple_of(8) {
            self.bytes.push(0);
        }
        if let Some(last) = self.bytes.last_mut() {
            *last |= u8::from(bit) << (self.len % 8);
        }
        self.len += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Well-spread keys, as those of chunks are.
    fn keys(from: u64, count: u64) -> Vec<u64> {
        (from..from + count).map(|n| crate::id::ChunkId::of(&n.to_le_bytes()).prefix()).collect()
    }

    fn found(set: &KeySet, mut keys: Vec<u64>) -> u64 {
        keys.sort_unstable();
        let mut found = 0;
        set.find_all(&keys, |_| found += 1);
        found
    }

    fn written(set: &KeySet) -> Vec<u8> {
        let mut writer = Writer::new();
        set.write(&mut writer);
        writer.into_bytes()
    }

    fn read(bytes: &[u8]) -> Read<KeySet> {
        let mut reader = Reader::new(bytes);
        let set = KeySet::read(&mut reader)?;
        reader.finish().map(|()| set)
    }

    #[test]
    fn all_members_are_found_and_hardly_any_others() {
        for count in [0, 1, 2, 511, 512, 513, 100_000] {
            let set = KeySet::of(keys(0, count));
            assert_eq!(found(&set, keys(0, count)), count);
            // Few keys share a number.
            assert!(set.len() <= count && set.len() + 10 > count, "{} of {count}", set.len());
            let others = found(&set, keys(count, 400_000));
            // 6 are expected of 400,000.
            assert!(others < 30, "{others} of a set of {count}");
        }
    }

    #[test]
    fn a_chunk_takes_less_than_18_bits() {
        let set = KeySet::of(keys(0, 100_000));
        let bits = written(&set).len() as f64 * 8.0 / 100_000.0;
        assert!((17.0..17.7).contains(&bits), "{bits}");
        let weight = set.weight() as f64 * 8.0 / 100_000.0;
        assert!(weight < 18.0, "{weight}");
    }

    #[test]
    fn what_was_written_is_read_back_and_nothing_else_is() {
        let set = KeySet::of(keys(7, 2_000));
        let bytes = written(&set);
        assert_eq!(read(&bytes).unwrap(), set);
        for len in 0..bytes.len().min(64) {
            read(&bytes[..len]).unwrap_err();
        }
        read(&[bytes.as_slice(), &[0]].concat()).unwrap_err();
        let of = |scale: u64, count: u64, bits: &[u8]| {
            let mut writer = Writer::new();
            writer.varint(scale).varint(count).string(bits);
            read(&writer.into_bytes())
        };
        assert_eq!(of(1024, 1, &[0, 0]).unwrap().len(), 1);
        // More keys than the bits can have: this takes no memory.
        of(1 << 25, 1 << 25, &[0, 0]).unwrap_err();
        of(1024, 2, &[0, 0]).unwrap_err();
        of(1 << 40, 1, &[0, 0]).unwrap_err();
        // A number beyond the range: 2,048 ones.
        of(1024, 1, &[[0xff; 256].as_slice(), &[0, 0]].concat()).unwrap_err();
    }

    #[test]
    fn a_patch_leads_from_one_set_to_another() {
        let base = KeySet::of(keys(0, 10_000));
        let mut now = keys(500, 10_000);
        now.sort_unstable();
        let patch = base.changes_to(&now);
        assert_eq!(patch.len(), 1_000);
        let mut writer = Writer::new();
        patch.write(&mut writer);
        let bytes = writer.into_bytes();
        assert!(bytes.len() < 4_500, "{}", bytes.len());
        let mut reader = Reader::new(&bytes);
        assert_eq!(Patch::read(&mut reader).unwrap(), patch);
        let patched = base.patched(&patch).unwrap();
        assert_eq!((patched.len(), found(&patched, now.clone())), (10_000, 10_000));
        assert!(found(&patched, keys(0, 500)) < 5);
        assert!(patched.changes_to(&now).is_empty());
        assert_eq!(read(&written(&patched)).unwrap(), patched);
        // Of another set.
        assert_eq!(KeySet::of(keys(0, 10)).patched(&patch).unwrap_err().kind(), crate::error::ErrorKind::Damaged);
        // A set that begins empty.
        let (empty, mut few) = (KeySet::of(Vec::new()), keys(0, 3_000));
        few.sort_unstable();
        assert_eq!(found(&empty.patched(&empty.changes_to(&few)).unwrap(), few), 3_000);
    }

    proptest! {
        #[test]
        fn any_keys_survive(keys in proptest::collection::vec(any::<u64>(), 0..3_000), other in any::<u64>()) {
            let set = KeySet::of(keys.clone());
            let again = read(&written(&set)).unwrap();
            prop_assert_eq!(&again, &set);
            prop_assert!(keys.iter().all(|&key| again.contains(key)));
            let mut all = keys.clone();
            all.push(other);
            all.sort_unstable();
            let (mut found, mut each) = (Vec::new(), Vec::new());
            again.find_all(&all, |place| found.push(place));
            (0..all.len()).filter(|&place| again.contains(all[place])).for_each(|place| each.push(place));
            prop_assert_eq!(found, each);
        }
    }
}
