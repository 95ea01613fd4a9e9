//! Building a map: from the places of a manifest's chunks to frames and their bases.

use std::collections::HashMap;
use std::num::NonZeroU32;

use super::ChunkPlace;
use crate::error::{Error, Result};
use crate::format::{Frame, Map, PackRef};
use crate::id::{ChunkId, ManifestId, PackId};

/// A manifest with its chunks and their places.
#[derive(Clone, Copy, Debug)]
pub struct PlacedTree<'a> {
    /// Manifest.
    pub manifest: ManifestId,
    /// Chunks, in the manifest's order.
    pub chunks: &'a [ChunkId],
    /// Place of each chunk.
    pub places: &'a [ChunkPlace],
}

/// Builds the map of a manifest. `pack` finds a pack, `base` finds the place of a chunk's base. Bases that are not in the
/// manifest, or only with too many hops, become further chunks of the map.
///
/// # Errors
/// Other, if a pack or a base is unknown, which is a bug.
pub(crate) fn map_of(
    tree: PlacedTree<'_>,
    pack: impl Fn(PackId) -> Option<PackRef>,
    base: impl Fn(&ChunkPlace) -> Option<(ChunkId, ChunkPlace)>,
) -> Result<Map> {
    let PlacedTree { manifest, chunks, places } = tree;
    let map = Map { manifest, packs: Vec::new(), frames: Vec::with_capacity(places.len()), further: Vec::new() };
    let mut mapping = Mapping { map, packs: HashMap::new(), pack };
    for place in places {
        mapping.frame(place)?;
    }
    let mut numbers: HashMap<ChunkId, u32> = HashMap::new();
    if places.iter().any(|place| place.base.is_some()) {
        numbers.extend(chunks.iter().copied().zip(0..));
    }
    let mut placed = places.to_vec();
    let mut at = 0;
    while let Some(place) = placed.get(at).copied() {
        if place.base.is_some() {
            let (id, found) =
                base(&place).ok_or_else(|| Error::other("a chunk's base is not known").got(place.pack))?;
            let there = numbers.get(&id).filter(|&&number| {
                placed.get(number as usize).is_some_and(|there| place.codec.may_have_base(there.codec))
            });
            let number = match there {
                Some(&number) => number,
                None => {
                    let number = mapping.frame(&found)?;
                    mapping.map.further.push((id, found.plain_len));
                    placed.push(found);
                    numbers.insert(id, number);
                    number
                }
            };
            if let Some(frame) = mapping.map.frames.get_mut(at) {
                frame.base = NonZeroU32::new(number + 1);
            }
        }
        at += 1;
    }
    Ok(mapping.map)
}

/// Copy of the map `old` with new places for all frames.
///
/// # Errors
/// Other, if a pack is unknown, which is a bug.
pub(crate) fn moved(old: &Map, places: &[ChunkPlace], pack: impl Fn(PackId) -> Option<PackRef>) -> Result<Map> {
    let map = Map { packs: Vec::new(), frames: Vec::with_capacity(places.len()), ..old.clone() };
    let mut mapping = Mapping { map, packs: HashMap::new(), pack };
    places.iter().try_for_each(|place| mapping.frame(place).map(drop))?;
    let mut map = mapping.map;
    map.frames.iter_mut().zip(&old.frames).for_each(|(frame, old)| frame.base = old.base);
    Ok(map)
}

/// Builder of a map.
struct Mapping<P> {
    map: Map,
    packs: HashMap<PackId, u32>,
    pack: P,
}

impl<P: Fn(PackId) -> Option<PackRef>> Mapping<P> {
    /// Adds a frame without its base; returns its number.
    fn frame(&mut self, place: &ChunkPlace) -> Result<u32> {
        let too_many = || Error::exhausted("tree lies in too many packs, or has too many chunks");
        let pack = match self.packs.get(&place.pack) {
            Some(&number) => number,
            None => {
                let pack = (self.pack)(place.pack);
                let pack = pack.ok_or_else(|| Error::other("a chunk lies in an unknown pack").got(place.pack))?;
                let number = u32::try_from(self.map.packs.len()).map_err(|_| too_many())?;
                self.map.packs.push(pack);
                self.packs.insert(place.pack, number);
                number
            }
        };
        let ChunkPlace { ordinal, offset, stored_len, codec, alone_len, .. } = *place;
        let number = u32::try_from(self.map.frames.len()).ok().filter(|&number| number < u32::MAX);
        let number = number.ok_or_else(too_many)?;
        self.map.frames.push(Frame { pack, ordinal, offset, stored_len, codec, base: None, alone_len });
        Ok(number)
    }
}
