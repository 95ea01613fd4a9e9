//! Chunks that a job needs, and sets of them. Pure.

use std::ops::Range;

use crate::error::Result;
use crate::format::{Inventory, KeySet};
use crate::repository::Saved;

/// Chunks in one word of a set.
const WORD: usize = u64::BITS as usize;

/// Chunks of some trees, with the bases that they need: each once, in the order of their keys.
#[derive(Clone, Debug, Default)]
pub struct Closure {
    /// First eight bytes of their ids, ascending.
    keys: Vec<u64>,
    /// Stored bytes of each, as they travel.
    stored: Vec<u32>,
    /// Stored bytes of each group of [`WORD`] chunks.
    sums: Vec<u64>,
    /// Stored bytes of all.
    total: u64,
    /// Plain bytes of the trees' files.
    logical: u64,
    /// Plain bytes of the distinct chunks of the trees, without bases that are only needed to decode others.
    unique: u64,
    hash: Option<blake3::Hash>,
}

/// A set of chunks of a closure, by their places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkBits {
    words: Vec<u64>,
}

/// Chunks of trees that are added one after the other.
#[derive(Debug, Default)]
pub struct ClosureBuilder {
    /// First bytes of the id and stored bytes of each chunk, bases included.
    chunks: Vec<(u64, u32)>,
    /// First bytes of the id and plain bytes of each chunk that a tree lists.
    listed: Vec<(u64, u32)>,
    logical: u64,
}

impl ClosureBuilder {
    /// Bytes of memory that each chunk of a tree takes until the closure is made.
    pub const CHUNK_WEIGHT: u64 = 2 * size_of::<(u64, u32)>() as u64;

    /// Adds the chunks of `tree`.
    ///
    /// # Errors
    /// Damaged, if its map lacks a chunk.
    pub fn add(&mut self, tree: &Saved) -> Result<()> {
        self.logical = self.logical.saturating_add(tree.value.logical_bytes);
        self.chunks.reserve(tree.located_chunks() as usize);
        for chunk in 0..tree.located_chunks() {
            let located = tree.locate(chunk)?;
            self.chunks.push((located.id.prefix(), located.place.stored_len));
            if (chunk as usize) < tree.manifest.chunks.ids.len() {
                self.listed.push((located.id.prefix(), located.place.plain_len));
            }
        }
        Ok(())
    }

    /// The closure of all of them.
    #[must_use]
    pub fn build(mut self) -> Closure {
        self.listed.sort_unstable();
        self.listed.dedup_by_key(|(key, _)| *key);
        let unique = self.listed.iter().map(|(_, len)| u64::from(*len)).sum();
        Closure { logical: self.logical, unique, ..Closure::of_chunks(self.chunks) }
    }
}

/// Chunks of a closure in the sets of an inventory.
#[derive(Clone, Debug)]
pub struct Found {
    pub(super) held: ChunkBits,
    pub(super) pinned: ChunkBits,
    pub(super) promised: ChunkBits,
}

impl Closure {
    /// These chunks, each the first eight bytes of its id and its stored bytes. A chunk that is there in two forms counts with the
    /// smaller one, whatever their order.
    #[must_use]
    pub fn of_chunks(mut chunks: Vec<(u64, u32)>) -> Self {
        chunks.sort_unstable();
        chunks.dedup_by_key(|(key, _)| *key);
        let mut hasher = blake3::Hasher::new();
        for (key, stored) in &chunks {
            hasher.update(&key.to_le_bytes()).update(&stored.to_le_bytes());
        }
        let (keys, stored): (Vec<u64>, Vec<u32>) = chunks.into_iter().unzip();
        let sums: Vec<u64> = stored.chunks(WORD).map(|some| some.iter().map(|&len| u64::from(len)).sum()).collect();
        let total = sums.iter().sum();
        Self { keys, stored, sums, total, logical: total, unique: total, hash: Some(hasher.finalize()) }
    }

    /// Trees whose chunks are not known: `logical` bytes of files, all of them only in the repository.
    #[must_use]
    pub fn unread(logical: u64) -> Self {
        Self { total: logical, logical, unique: logical, ..Self::default() }
    }

    /// Chunks that are in the sets of `inventory`.
    #[must_use]
    pub fn found(&self, inventory: &Inventory) -> Found {
        Found {
            held: self.found_in(&inventory.held),
            pinned: self.found_in(&inventory.pinned),
            promised: self.found_in(&inventory.promised),
        }
    }

    /// Bytes of memory that it takes with what `inventories` hold of it, about.
    #[must_use]
    pub fn weight_with(&self, inventories: usize) -> u64 {
        // Three sets for each, and one for the site.
        self.weight() + 4 * self.none().weight() * inventories as u64
    }

    /// Stored bytes of all chunks.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Bytes of memory that it takes, about.
    #[must_use]
    pub fn weight(&self) -> u64 {
        (self.keys.len() * (size_of::<u64>() + size_of::<u32>()) + self.sums.len() * size_of::<u64>()) as u64
    }

    /// Plain bytes of the trees' files.
    #[must_use]
    pub fn logical(&self) -> u64 {
        self.logical
    }

    /// Plain bytes of their distinct chunks.
    #[must_use]
    pub fn unique(&self) -> u64 {
        self.unique
    }

    /// Number of chunks, with bases.
    #[must_use]
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// True if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Hash of the chunks and their stored bytes.
    #[must_use]
    pub fn hash(&self) -> blake3::Hash {
        self.hash.unwrap_or_else(|| blake3::hash(&[]))
    }

    /// All chunks.
    #[must_use]
    pub fn all(&self) -> ChunkBits {
        let mut bits = self.none();
        for (place, word) in bits.words.iter_mut().enumerate() {
            *word = u64::MAX >> (WORD - self.range(place).len());
        }
        bits
    }

    /// No chunk.
    #[must_use]
    pub fn none(&self) -> ChunkBits {
        ChunkBits { words: vec![0; self.keys.len().div_ceil(WORD)] }
    }

    /// Chunks that are in `set`.
    #[must_use]
    pub fn found_in(&self, set: &KeySet) -> ChunkBits {
        let mut bits = self.none();
        set.find_all(&self.keys, |place| bits.words[place / WORD] |= 1 << (place % WORD));
        bits
    }

    /// Stored bytes of the chunks in `bits`.
    #[must_use]
    pub fn stored_bytes(&self, bits: &ChunkBits) -> u64 {
        let mut sum = 0;
        for (place, &word) in bits.words.iter().enumerate() {
            let range = self.range(place);
            if word.count_ones() as usize == range.len() {
                sum += self.sums[place];
                continue;
            }
            let mut rest = word;
            while rest != 0 {
                sum += u64::from(self.stored[range.start + rest.trailing_zeros() as usize]);
                rest &= rest - 1;
            }
        }
        sum
    }

    /// Places of the chunks of one word.
    fn range(&self, word: usize) -> Range<usize> {
        word * WORD..self.keys.len().min((word + 1) * WORD)
    }
}

impl ChunkBits {
    /// Bytes of memory that it takes.
    #[must_use]
    pub fn weight(&self) -> u64 {
        size_of_val(self.words.as_slice()) as u64
    }

    /// Number of chunks.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// True if no chunk is in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// Adds the chunks of `other`.
    pub fn add(&mut self, other: &Self) {
        self.words.iter_mut().zip(&other.words).for_each(|(word, other)| *word |= other);
    }

    /// Removes the chunks of `other`.
    pub fn remove(&mut self, other: &Self) {
        self.words.iter_mut().zip(&other.words).for_each(|(word, other)| *word &= !other);
    }

    /// Removes all chunks but those of `other`.
    pub fn keep(&mut self, other: &Self) {
        self.words.iter_mut().zip(&other.words).for_each(|(word, other)| *word &= other);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u64) -> u64 {
        crate::id::ChunkId::of(&n.to_le_bytes()).prefix()
    }

    #[test]
    fn bytes_of_sets_add_up() {
        for count in [0, 1, 63, 64, 65, 1_000_u32] {
            let closure = Closure::of_chunks((0..count).map(|n| (key(n.into()), 100 + n)).collect());
            let count = u64::from(count);
            let total: u64 = (0..count).map(|n| 100 + n).sum();
            assert_eq!((closure.stored_bytes(&closure.all()), closure.all().len()), (total, count));
            assert_eq!(closure.stored_bytes(&closure.none()), 0);
            let even = KeySet::of((0..count).step_by(2).map(key).collect());
            let held = closure.found_in(&even);
            let expected: u64 = (0..count).step_by(2).map(|n| 100 + n).sum();
            assert_eq!(closure.stored_bytes(&held), expected, "of {count}");
            let mut missing = closure.all();
            missing.remove(&held);
            assert_eq!(closure.stored_bytes(&missing), total - expected);
            missing.keep(&held);
            assert!(missing.is_empty());
            missing.add(&closure.all());
            assert_eq!(missing, closure.all());
        }
    }
}
