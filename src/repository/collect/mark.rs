//! Marking: which chunks of which packs the names use, told from their maps alone.

use std::collections::{BTreeMap, BTreeSet};

use futures::{StreamExt as _, TryStreamExt as _, stream};

use crate::error::{Error, ErrorKind, Result};
use crate::format::PackRef;
use crate::id::{MapKey, PackId};
use crate::repository::log::{RefValue, State};
use crate::repository::{Name, Repository};

/// Maps read at once.
const READS: usize = 8;

/// Packs and chunks that the names of one state use.
#[derive(Debug, Default)]
pub struct Marks {
    /// Used packs.
    packs: BTreeMap<PackId, Used>,
    /// Maps, by the packs that they name.
    pub(super) maps: BTreeMap<PackId, BTreeSet<MapKey>>,
}

/// Used part of one pack.
#[derive(Clone, Debug)]
struct Used {
    pack: PackRef,
    /// Bits of the ordinals, 64 a word. Only words with a bit: how many chunks a pack has is a claim of the map.
    ordinals: BTreeMap<u32, u64>,
    bytes: u64,
}

impl Marks {
    /// Is any chunk of `pack` used?
    #[must_use]
    pub fn uses(&self, pack: &PackId) -> bool {
        self.packs.contains_key(pack)
    }

    /// Stored bytes of the chunks of `pack` that are used.
    #[must_use]
    pub fn used_bytes(&self, pack: &PackId) -> u64 {
        self.packs.get(pack).map_or(0, |used| used.bytes)
    }

    /// Every used pack.
    pub fn packs(&self) -> impl Iterator<Item = &PackRef> {
        self.packs.values().map(|used| &used.pack)
    }

    /// Stored bytes of all used chunks.
    #[must_use]
    pub fn live_bytes(&self) -> u64 {
        self.packs.values().map(|used| used.bytes).sum()
    }

    fn add(&mut self, key: MapKey, map: &crate::format::Map) {
        for frame in &map.frames {
            let Some(pack) = map.packs.get(frame.pack as usize) else { continue };
            let used =
                self.packs.entry(pack.id).or_insert_with(|| Used { pack: *pack, ordinals: BTreeMap::new(), bytes: 0 });
            let word = used.ordinals.entry(frame.ordinal / 64).or_default();
            let bit = 1u64 << (frame.ordinal % 64);
            used.bytes += if *word & bit == 0 { u64::from(frame.stored_len) } else { 0 };
            *word |= bit;
        }
        for pack in &map.packs {
            self.maps.entry(pack.id).or_default().insert(key);
        }
    }
}

/// Reads the maps of all names of `state`. Their size is what bounds a marking, not the repository's.
///
/// # Errors
/// Damaged, naming the name, if a map cannot be read: then nothing may be collected.
///
/// # Cancel safety
/// Safe: it only reads.
pub async fn mark(repository: &Repository, state: &State) -> Result<Marks> {
    let mut marks = Marks::default();
    marks.read(repository, &state.refs).await?;
    Ok(marks)
}

impl Marks {
    /// Reads the maps of `refs`, and marks what they use besides.
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
                ErrorKind::NotFound | ErrorKind::Damaged => {
                    Error::damaged("nothing can be collected: a map cannot be read")
                        .at(name)
                        .cure("towline verify --repair rebuilds it, or remove the name")
                        .source(error)
                }
                _ => error,
            })?;
            Ok::<_, Error>((key, map))
        });
        // Collected first: a stream over a closure's futures would not be known to be `Send`.
        let mut maps = stream::iter(maps.collect::<Vec<_>>()).buffer_unordered(READS);
        while let Some((key, map)) = maps.try_next().await? {
            self.add(key, &map);
        }
        Ok(())
    }
}
