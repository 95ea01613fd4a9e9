//! Marking: which chunks of which packs the names and the kept values use, from their maps alone.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use futures::{StreamExt as _, TryStreamExt as _, stream};

use crate::budget::{Budget, GrowingMemory};
use crate::error::{Error, ErrorKind, Result};
use crate::format::{Map, PackRef};
use crate::id::{MapKey, ObjectId, Owned, PackId, SessionId};
use crate::name::Name;
use crate::repository::Repository;
use crate::repository::log::{RefValue, State};

/// Maps read at once.
const READS: usize = 8;

/// Maximum memory of a used pack: its entry in a map whose nodes may be half empty, and a node for its ordinals.
const PACK_SHARE: u64 = 2 * size_of::<(PackId, Used)>() as u64 + 192;
/// Maximum memory of 64 ordinals.
const WORD_SHARE: u64 = 2 * size_of::<(u32, u64)>() as u64;
/// Maximum memory to record that a map uses a pack.
const MAP_SHARE: u64 = 2 * size_of::<(PackId, MapKey)>() as u64;

/// Packs and chunks that the names of one state use.
#[derive(Debug)]
pub struct Marks {
    /// Used packs.
    packs: BTreeMap<PackId, Used>,
    /// Pairs of a used pack and a map that uses it.
    maps: BTreeSet<(PackId, MapKey)>,
    /// Stored bytes of chunks that only kept values use.
    kept_bytes: u64,
    /// Memory of the marks: the number of packs in a map comes from untrusted input.
    memory: GrowingMemory,
}

/// Used part of one pack.
#[derive(Clone, Debug)]
struct Used {
    pack: PackRef,
    /// Bits of the ordinals, 64 per word; only words with a set bit, because the number of chunks is untrusted.
    ordinals: BTreeMap<u32, u64>,
    bytes: u64,
}

impl Used {
    fn chunks(&self) -> u64 {
        self.ordinals.values().map(|word| u64::from(word.count_ones())).sum()
    }
}

impl Marks {
    /// Empty marks, whose memory counts in `budget`.
    #[must_use]
    pub fn new(budget: &Budget) -> Self {
        Self { packs: BTreeMap::new(), maps: BTreeSet::new(), kept_bytes: 0, memory: budget.keep_growing() }
    }

    /// True if any chunk of `pack` is used.
    #[must_use]
    pub fn uses(&self, pack: &PackId) -> bool {
        self.packs.contains_key(pack)
    }

    /// Stored bytes of the chunks of `pack` that are used, by the maps that name them first: the pack's footer may say otherwise.
    #[must_use]
    pub fn used_bytes(&self, pack: &PackId) -> u64 {
        self.packs.get(pack).map_or(0, |used| used.bytes)
    }

    /// Number of the chunks of `pack` that are used.
    #[must_use]
    pub fn used_chunks(&self, pack: &PackId) -> u64 {
        self.packs.get(pack).map_or(0, Used::chunks)
    }

    /// Ordinals of the chunks of `pack` that are used, ascending.
    pub fn ordinals(&self, pack: &PackId) -> impl Iterator<Item = u32> {
        let words = self.packs.get(pack).into_iter().flat_map(|used| &used.ordinals);
        words.flat_map(|(&at, &word)| (0..64).filter(move |bit| (word >> bit) & 1 == 1).map(move |bit| at * 64 + bit))
    }

    /// True if `map` uses `pack`.
    #[must_use]
    pub fn is_used_by(&self, pack: PackId, map: MapKey) -> bool {
        self.maps.contains(&(pack, map))
    }

    /// Every used pack.
    pub fn packs(&self) -> impl Iterator<Item = &PackRef> {
        self.packs.values().map(|used| &used.pack)
    }

    /// Stored bytes of all used chunks.
    #[must_use]
    pub fn live_bytes(&self) -> u64 {
        self.packs.values().fold(0, |sum, used| sum.saturating_add(used.bytes))
    }

    /// Stored bytes of unused chunks in packs that have used ones as well, with the alignment of all chunks there.
    #[must_use]
    pub fn unused_bytes(&self) -> u64 {
        let partly = self.packs.values().filter(|used| used.chunks() < u64::from(used.pack.chunks));
        partly.map(|used| used.pack.content_len().saturating_sub(used.bytes)).fold(0, u64::saturating_add)
    }

    /// Bytes that stay only because of kept values.
    #[must_use]
    pub fn kept_bytes(&self) -> u64 {
        self.kept_bytes
    }

    /// Maps that use `pack`.
    pub fn maps_of(&self, pack: PackId) -> impl Iterator<Item = MapKey> {
        let key = |byte| Owned { session: SessionId::from_bytes([byte; 16]), object: ObjectId::from_bytes([byte; 16]) };
        self.maps.range((pack, key(0))..=(pack, key(u8::MAX))).map(|(_, map)| *map)
    }

    fn add(&mut self, key: MapKey, map: &Map) -> Result<()> {
        for frame in &map.frames {
            let Some(pack) = map.packs.get(frame.pack as usize) else { continue };
            let used = match self.packs.entry(pack.id) {
                Entry::Occupied(used) => used.into_mut(),
                Entry::Vacant(vacant) => {
                    self.memory.add(PACK_SHARE)?;
                    vacant.insert(Used { pack: *pack, ordinals: BTreeMap::new(), bytes: 0 })
                }
            };
            let word = match used.ordinals.entry(frame.ordinal / 64) {
                Entry::Occupied(word) => word.into_mut(),
                Entry::Vacant(vacant) => {
                    self.memory.add(WORD_SHARE)?;
                    vacant.insert(0)
                }
            };
            let bit = 1u64 << (frame.ordinal % 64);
            if *word & bit == 0 {
                used.bytes = used.bytes.saturating_add(u64::from(frame.stored_len));
            }
            *word |= bit;
            if self.maps.insert((pack.id, key)) {
                self.memory.add(MAP_SHARE)?;
            }
        }
        Ok(())
    }
}

/// Reads the maps of all names and kept values of `state`. Memory is bounded by the size of these maps, not of the
/// repository.
///
/// # Errors
/// Damaged, with the name, if a map cannot be read: nothing may be collected then; exhausted, if the marks do not fit into the
/// memory budget.
///
/// # Cancel safety
/// Safe: it only reads.
pub async fn mark(repository: &Repository, state: &State) -> Result<Marks> {
    let mut marks = Marks::new(repository.budget());
    marks.read(repository, &state.refs).await?;
    let live = marks.live_bytes();
    marks.read(repository, state.removed_values()).await?;
    marks.kept_bytes = marks.live_bytes() - live;
    Ok(marks)
}

impl Marks {
    /// Reads the maps of `refs`, and adds the packs and chunks that they use.
    ///
    /// # Errors
    /// As [`mark`].
    ///
    /// # Cancel safety
    /// Not safe: drop the marks.
    pub async fn read(
        &mut self,
        repository: &Repository,
        refs: impl IntoIterator<Item = (&Name, &RefValue)>,
    ) -> Result<()> {
        let mut keys = BTreeMap::new();
        for (name, value) in refs {
            keys.entry(value.map_key).or_insert(name);
        }
        let maps = keys.into_iter().map(|(key, name)| async move {
            let map = repository.map(key).await;
            let map = map.map_err(|error| match error.kind() {
                ErrorKind::NotFound | ErrorKind::Damaged => Error::damaged("cannot collect: a map cannot be read")
                    .at(name)
                    .help("towline verify --repair rebuilds it, or remove the name with towline rm --now")
                    .source(error),
                _ => error,
            })?;
            Ok::<_, Error>((key, map))
        });
        // Collected first: a stream over a closure's futures would not be known to be `Send`.
        let mut maps = stream::iter(maps.collect::<Vec<_>>()).buffer_unordered(READS);
        while let Some((key, map)) = maps.try_next().await? {
            self.add(key, &map)?;
        }
        Ok(())
    }
}
