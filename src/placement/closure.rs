//! Chunks that a job needs, and sets of them. Pure.

use std::ops::Range;

use crate::codec::HOPS_MAX;
use crate::error::Result;
use crate::format::{Inventory, KeySet};
use crate::repository::{Held, Saved, Travel, TravelNode, decide};

/// Chunks in one word of a set.
const WORD: usize = u64::BITS as usize;

/// Chunks of some trees, with the bases that they need: each once, in the order of their keys.
#[derive(Clone, Debug, Default)]
pub struct Closure {
    /// First eight bytes of their ids, ascending.
    keys: Vec<u64>,
    /// Stored bytes of each.
    stored: Vec<u32>,
    /// Of each, where its base is, and its bytes without that; empty if no base is only needed to decode others.
    with_bases: Vec<WithBase>,
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

/// How a chunk of a closure is stored beside its bytes.
#[derive(Clone, Copy, Debug)]
struct WithBase {
    /// Place of its base.
    base: Option<u32>,
    /// Bytes without it.
    alone: u32,
    /// True if a tree lists it; false if it is only needed to decode others.
    listed: bool,
}

/// Chunks of a closure that travel to a site.
#[derive(Clone, Debug)]
pub struct Travelling {
    /// All of them.
    pub(super) chunks: ChunkBits,
    /// Chunks that travel without their bases.
    alone: ChunkBits,
}

/// A set of chunks of a closure, by their places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkBits {
    words: Vec<u64>,
}

/// Chunks of trees that are added one after the other.
#[derive(Debug, Default)]
pub struct ClosureBuilder {
    /// First bytes of the id and stored bytes of each chunk, bases included; bytes without its base, and first bytes of the base's id.
    chunks: Vec<(u64, u32, u32, Option<u64>)>,
    /// First bytes of the id and plain bytes of each chunk that a tree lists.
    listed: Vec<(u64, u32)>,
    logical: u64,
}

impl ClosureBuilder {
    /// Bytes of memory that each chunk of a tree takes until the closure is made.
    pub const CHUNK_WEIGHT: u64 = (size_of::<(u64, u32, u32, Option<u64>)>() + size_of::<(u64, u32)>()) as u64;

    /// Adds the chunks of `tree`.
    ///
    /// # Errors
    /// Damaged, if its map lacks a chunk.
    pub fn add(&mut self, tree: &Saved) -> Result<()> {
        self.logical = self.logical.saturating_add(tree.value.logical_bytes);
        self.chunks.reserve(tree.located_chunks() as usize);
        for chunk in 0..tree.located_chunks() {
            let located = tree.locate(chunk)?;
            let (stored, alone) = (located.place.stored_len, tree.alone_len(chunk)?.bytes);
            self.chunks.push((located.id.prefix(), stored, alone, located.place.base.map(|base| base.prefix())));
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
        // Of two forms, the smaller one counts.
        self.chunks.sort_unstable();
        self.chunks.dedup_by_key(|(key, ..)| *key);
        let closure = Closure::of_chunks(self.chunks.iter().map(|(key, stored, ..)| (*key, *stored)).collect());
        let with_bases = if self.listed.len() < closure.len() { self.with_bases(&closure.keys) } else { Vec::new() };
        Closure { logical: self.logical, unique, with_bases, ..closure }.hashed()
    }

    /// How the chunks with these `keys` are stored.
    fn with_bases(&self, keys: &[u64]) -> Vec<WithBase> {
        let place = |key: u64| keys.binary_search(&key).ok().and_then(|place| u32::try_from(place).ok());
        let is_listed = |key| self.listed.binary_search_by_key(&key, |(key, _)| *key).is_ok();
        let stored = self.chunks.iter();
        stored
            .map(|&(key, _, alone, base)| WithBase { base: base.and_then(place), alone, listed: is_listed(key) })
            .collect()
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
        let (total, with_bases) = (sums.iter().sum(), Vec::new());
        Self { keys, stored, with_bases, sums, total, logical: total, unique: total, hash: Some(hasher.finalize()) }
    }

    /// The same with a hash that covers how chunks are stored.
    fn hashed(self) -> Self {
        if self.with_bases.is_empty() {
            return self;
        }
        let mut hasher = blake3::Hasher::new();
        hasher.update(self.hash().as_bytes());
        for WithBase { base, alone, listed } in &self.with_bases {
            hasher
                .update(&base.unwrap_or(u32::MAX).to_le_bytes())
                .update(&alone.to_le_bytes())
                .update(&[u8::from(*listed)]);
        }
        Self { hash: Some(hasher.finalize()), ..self }
    }

    /// Chunks that travel to a site that has `held`, if those in `senders` may travel without their bases.
    #[must_use]
    pub fn travelling(&self, held: &ChunkBits, senders: &ChunkBits) -> Travelling {
        let (mut chunks, mut alone) = (self.all(), self.none());
        chunks.remove(held);
        if self.with_bases.is_empty() || chunks.is_empty() {
            return Travelling { chunks, alone };
        }
        let hops = |base: Option<u32>| {
            let above = |base: &u32| self.with_bases.get(*base as usize)?.base;
            // Forms of several trees may contradict each other, so that a chunk is its own base.
            (0..HOPS_MAX).zip(std::iter::successors(base, above)).map(|(hops, _)| hops + 1).last().unwrap_or(0)
        };
        let node = |(place, (&stored, with)): (usize, (&u32, &WithBase))| TravelNode {
            base: with.base,
            hops: hops(with.base),
            wanted: with.listed,
            held: if held.contains(place) { Held::Whole } else { Held::No },
            may_come_alone: senders.contains(place),
            alone: with.alone,
            ..TravelNode::new(stored)
        };
        let nodes: Vec<TravelNode> = self.stored.iter().zip(&self.with_bases).enumerate().map(node).collect();
        chunks = self.none();
        for (place, (way, _)) in decide(&nodes).into_iter().enumerate().filter(|(_, (way, _))| *way != Travel::Stays) {
            chunks.insert(place);
            if way == Travel::Alone {
                alone.insert(place);
            }
        }
        Travelling { chunks, alone }
    }

    /// Bytes of the chunks in `bits` as they travel.
    #[must_use]
    pub fn travelling_bytes(&self, travelling: &Travelling, bits: &ChunkBits) -> u64 {
        let (mut as_stored, mut alone) = (bits.clone(), bits.clone());
        as_stored.remove(&travelling.alone);
        alone.keep(&travelling.alone);
        let len = |place: usize| self.with_bases.get(place).map_or(0, |with| u64::from(with.alone));
        self.stored_bytes(&as_stored) + alone.places().map(len).sum::<u64>()
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

    /// Bytes of trees whose chunks are not known.
    pub(super) fn unread_bytes(&self) -> u64 {
        if self.is_empty() { self.total } else { 0 }
    }

    /// Bytes of memory that it takes with what `inventories` hold of it, about.
    #[must_use]
    pub fn weight_with(&self, inventories: usize) -> u64 {
        // Three sets for each, and as many for the site.
        self.weight() + 6 * self.none().weight() * inventories as u64
    }

    /// Stored bytes of all chunks.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Bytes of memory that it takes, about.
    #[must_use]
    pub fn weight(&self) -> u64 {
        let chunks = self.keys.len() * (size_of::<u64>() + size_of::<u32>());
        (chunks + size_of_val(self.with_bases.as_slice()) + self.sums.len() * size_of::<u64>()) as u64
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

    /// True if the chunk at `place` is in it.
    fn contains(&self, place: usize) -> bool {
        self.words.get(place / WORD).is_some_and(|word| word >> (place % WORD) & 1 == 1)
    }

    fn insert(&mut self, place: usize) {
        if let Some(word) = self.words.get_mut(place / WORD) {
            *word |= 1 << (place % WORD);
        }
    }

    /// Places of its chunks, ascending.
    fn places(&self) -> impl Iterator<Item = usize> + '_ {
        self.words.iter().enumerate().flat_map(|(number, &word)| {
            let rest = |word: &u64| Some(word & (word - 1)).filter(|rest| *rest != 0);
            let words = std::iter::successors((word != 0).then_some(word), rest);
            words.map(move |word| number * WORD + word.trailing_zeros() as usize)
        })
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
    use crate::repository::travel::tests::{plan_for, tree};

    fn key(n: u64) -> u64 {
        crate::id::ChunkId::of(&n.to_le_bytes()).prefix()
    }

    fn bits(closure: &Closure, saved: &Saved, chunks: &[u32]) -> ChunkBits {
        closure.found_in(&KeySet::of(chunks.iter().map(|&chunk| saved.locate(chunk).unwrap().id.prefix()).collect()))
    }

    /// Hints say what a fetch plans, whatever is there and whoever sends it.
    #[test]
    fn chunks_travel_as_a_fetch_would_plan_it() {
        // Two differences, what derives from them, and their bases, outside of the tree.
        let rows = [
            (Some(4), 500, 800),
            (Some(5), 300, 700),
            (Some(0), 1, 400),
            (Some(1), 1, 350),
            (None, 900, 0),
            (None, 200, 0),
        ];
        let saved = tree(&rows, 4);
        let mut builder = ClosureBuilder::default();
        builder.add(&saved).unwrap();
        let closure = builder.build();
        assert_eq!((closure.len(), closure.total()), (6, 1902));
        let sets: [&[u32]; 6] = [&[], &[4], &[5], &[0, 4], &[1, 3, 5], &[0, 1, 2, 3, 4, 5]];
        for there in sets {
            for senders in sets {
                let (held, may) = (bits(&closure, &saved, there), bits(&closure, &saved, senders));
                let travelling = closure.travelling(&held, &may);
                let plan = plan_for(&saved, &[0, 1, 2, 3], senders, there);
                let bytes = closure.travelling_bytes(&travelling, &travelling.chunks);
                assert_eq!(bytes, plan.bytes, "{there:?} {senders:?}");
                assert_eq!(travelling.chunks, bits(&closure, &saved, &plan.travelling()), "{there:?} {senders:?}");
            }
        }
        let cold = closure.travelling(&closure.none(), &closure.all());
        assert_eq!(
            closure.travelling_bytes(&cold, &cold.chunks),
            800 + 500 + 2,
            "the second base pays, the first does not"
        );
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
