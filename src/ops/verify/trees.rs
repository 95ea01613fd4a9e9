//! Check of names: their manifests and maps, and the packs in these maps.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use futures::{StreamExt as _, stream};

use super::groups::grouped;
use super::{Subject, Verifying, is_doubtful};
use crate::error::{Error, Result};
use crate::format::{Frame, Manifest, Map, PackFooter, PackRef};
use crate::id::{ChunkId, ManifestKey, MapKey, PackId};
use crate::repository::layout::{self, Family};
use crate::repository::log::RefValue;
use crate::repository::twice_if;

/// Footers read at once.
const FOOTERS: usize = 16;
/// Bytes of memory of a pack that was checked, in the nodes of its tree.
const PACK_WEIGHT: usize = 2 * size_of::<(PackId, (PackRef, bool))>();

impl Verifying<'_> {
    /// Opens the tree of each name; names with the same value are checked once.
    pub(super) async fn check_trees(&mut self) -> Result<()> {
        self.options.progress.phase("reading manifests and maps", 0);
        let distinct: BTreeMap<(ManifestKey, MapKey), RefValue> =
            self.names.values().map(|value| ((value.manifest_key, value.map_key), value.clone())).collect();
        for value in distinct.into_values() {
            let manifest = self.manifest(&value).await?;
            let what = layout::owned(Family::Map, value.map_key).to_string();
            let map = self.repository.map(value.map_key).await;
            let Some(map) = self.note(Subject::Map(value.map_key), what.clone(), map)? else { continue };
            self.users.add(value.map_key, map.packs.iter().map(|pack| pack.id), &mut self.memory)?;
            let counted = manifest.as_ref().is_none_or(|manifest| manifest.chunks.ids.len() == map.chunks());
            if map.manifest != value.manifest || !counted {
                let error = Error::damaged("map belongs to another manifest").at(&what);
                self.findings.add(Subject::Map(value.map_key), what, error)?;
                continue;
            }
            if let Some(manifest) = &manifest {
                let checked = map.check_frames(&manifest.chunks.lens).map_err(|error| error.at(&what));
                if self.note(Subject::Map(value.map_key), what, checked)?.is_none() {
                    continue;
                }
            }
            self.compare(&value, manifest.as_ref(), &map).await?;
        }
        Ok(())
    }

    async fn manifest(&mut self, value: &RefValue) -> Result<Option<Manifest>> {
        let key = layout::owned(Family::Manifest, value.manifest_key);
        let manifest = self.repository.manifest(value.manifest_key, value.manifest).await;
        self.note(Subject::Manifest(value.manifest_key), key.to_string(), manifest)
    }

    /// Compares a map with the footers of its packs.
    async fn compare(&mut self, value: &RefValue, manifest: Option<&Manifest>, map: &Map) -> Result<()> {
        let what = layout::owned(Family::Map, value.map_key).to_string();
        let mut order: Vec<u32> = (0..u32::try_from(map.frames.len()).unwrap_or(u32::MAX)).collect();
        let frame = |chunk: u32| map.frames.get(chunk as usize);
        order.sort_by_key(|&chunk| frame(chunk).map_or(0, |frame| frame.pack));
        let mut order = order.into_iter().peekable();
        let mut end = 0;
        for packs in grouped(&map.packs, self.repository.budget().total(), |pack| pack.chunks) {
            let footers = self.footers(packs).await?;
            self.judge(packs)?;
            let mut wrong = None;
            end = u32::try_from(packs.len()).unwrap_or(u32::MAX).saturating_add(end);
            while let Some(chunk) = order.next_if(|&chunk| frame(chunk).is_some_and(|frame| frame.pack < end)) {
                let Some(frame) = frame(chunk) else { continue };
                let footer = map.pack(frame).ok().and_then(|pack| footers.get(&pack.id));
                let id_of = |chunk: u32| chunk_of(manifest, map, chunk);
                let base = frame.base().and_then(id_of);
                if footer.is_some_and(|footer| !matches_frame(footer, frame, id_of(chunk), base)) {
                    wrong = wrong.or(Some((chunk, *frame)));
                }
            }
            if let Some((chunk, frame)) = wrong {
                let pack = map.pack(&frame)?.id;
                let error = Error::damaged("map and pack disagree about a chunk")
                    .at(&what)
                    .expected(format!("chunk {chunk} of the map"))
                    .got(format!("another in pack {pack}, chunk {}", frame.ordinal));
                self.findings.add(Subject::Map(value.map_key), what.clone(), error)?;
            }
        }
        Ok(())
    }

    /// Checks that packs that a name needs are reliable.
    fn judge(&mut self, packs: &[PackRef]) -> Result<()> {
        for pack in packs {
            let key = layout::owned(Family::Pack, pack.id).to_string();
            let verdict = match self.state.condemned.get(&pack.id) {
                _ if self.state.purged.contains_key(&pack.id) => "a name needs a pack that is purged",
                Some(condemned) if condemned.damaged => "a name needs a pack that is condemned as damaged",
                _ => continue,
            };
            if !self.findings.has(Subject::Pack(pack.id)) {
                self.findings.add(Subject::Pack(pack.id), key.clone(), Error::damaged(verdict).at(key))?;
            }
        }
        Ok(())
    }

    /// Intact footers of `packs`; damage of the others is recorded once.
    pub(super) async fn footers(&mut self, packs: &[PackRef]) -> Result<HashMap<PackId, Arc<PackFooter>>> {
        let repository = self.repository;
        let wanted = packs.iter().filter(|pack| self.packs.get(&pack.id).is_none_or(|(_, sound)| *sound));
        let read: Vec<_> = stream::iter(wanted.copied().collect::<Vec<_>>())
            .map(|pack| async move { (pack, twice_if(is_doubtful, || repository.footer_uncached(&pack)).await) })
            .buffered(FOOTERS)
            .collect()
            .await;
        let mut footers = HashMap::new();
        for (pack, footer) in read {
            let key = layout::owned(Family::Pack, pack.id).to_string();
            let footer = self.note(Subject::Pack(pack.id), key, footer)?;
            if self.packs.insert(pack.id, (pack, footer.is_some())).is_none() {
                self.memory.add(PACK_WEIGHT as u64)?;
            }
            footers.extend(footer.map(|footer| (pack.id, Arc::new(footer))));
        }
        Ok(footers)
    }
}

/// Expected id and plain length of a chunk in a map, as far as known.
fn chunk_of(manifest: Option<&Manifest>, map: &Map, chunk: u32) -> ChunkOf {
    match (chunk as usize).checked_sub(map.chunks()) {
        Some(further) => map.further.get(further).copied(),
        None => {
            let chunks = &manifest?.chunks;
            Some((*chunks.ids.get(chunk as usize)?, *chunks.lens.get(chunk as usize)?))
        }
    }
}

/// Id and plain length of a chunk, as far as known.
type ChunkOf = Option<(ChunkId, u32)>;

/// True if `frame` agrees with the footer, and with the expected chunk and base.
fn matches_frame(footer: &PackFooter, frame: &Frame, chunk: ChunkOf, base: ChunkOf) -> bool {
    let Some(entry) = footer.entries.get(frame.ordinal as usize) else { return false };
    let lies = (entry.offset, entry.stored_len, entry.codec) == (frame.offset, frame.stored_len, frame.codec);
    let based = base.is_none_or(|(id, _)| entry.base == Some(id));
    lies && based && chunk.is_none_or(|chunk| chunk == (entry.id, entry.plain_len))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{SaveOptions, VerifyOptions};
    use crate::repository::faults::{Fault, FaultyStore};
    use crate::repository::{OpenOptions, Repository};
    use crate::storage::Store;

    /// F8: each read of the pack by a repair in turn, of its footer and of its frames, gets a wrong answer once.
    #[tokio::test(flavor = "multi_thread")]
    async fn one_bad_answer_condemns_no_pack() {
        let (objects, dir) = (Arc::new(FaultyStore::default()), tempfile::tempdir().unwrap());
        let file = dir.path().join("file");
        std::fs::write(&file, vec![7; 100_000]).unwrap();
        let open = async || {
            let options = OpenOptions { cache: Some(dir.path().join("cache")), ..OpenOptions::default() };
            Repository::create(Store::from_objects(Arc::clone(&objects) as _), options).await.unwrap().0
        };
        let name = "a".parse().unwrap();
        let repository = open().await;
        repository.save(&file, &name, &SaveOptions::default()).await.unwrap();
        let pack = repository.saved(&name).await.unwrap().map.packs[0].id;
        for nth in 0..8 {
            for fault in [Fault::Hide(nth), Fault::Garble(nth)] {
                objects.set(layout::owned(Family::Pack, pack), fault);
                let options = VerifyOptions { data: true, repair: true, ..VerifyOptions::default() };
                let report = open().await.verify(None, &options).await.unwrap();
                assert_eq!((report.damaged, report.repaired), (vec![], vec![]), "{fault:?}");
            }
        }
    }

    /// F8 "So is an object that a bucket refuses to give".
    #[tokio::test(flavor = "multi_thread")]
    async fn an_object_that_the_store_refuses_is_damage_and_repaired_as_such() {
        let (objects, dir) = (Arc::new(FaultyStore::default()), tempfile::tempdir().unwrap());
        let cache = dir.path().join("cache");
        let file = dir.path().join("file");
        std::fs::write(&file, vec![7; 100_000]).unwrap();
        let open = async || {
            let _ = std::fs::remove_dir_all(&cache);
            let options = OpenOptions { cache: Some(cache.clone()), ..OpenOptions::default() };
            Repository::create(Store::from_objects(Arc::clone(&objects) as _), options).await.unwrap().0
        };
        let name = "a".parse().unwrap();
        open().await.save(&file, &name, &SaveOptions::default()).await.unwrap();
        for family in [Family::Index, Family::Map, Family::Pack] {
            let repository = open().await;
            let state = repository.state().await.unwrap();
            let key = match family {
                Family::Index => layout::owned(family, *state.segments.keys().next().unwrap()),
                Family::Map => layout::owned(family, state.refs[&name].map_key),
                _ => layout::owned(family, repository.saved(&name).await.unwrap().map.packs[0].id),
            };
            objects.set(key.clone(), Fault::Withhold);
            let options = VerifyOptions { data: true, repair: true, ..VerifyOptions::default() };
            let report = open().await.verify(None, &options).await.unwrap();
            let found = report.damaged.iter().find(|damage| damage.what.contains(key.as_ref())).unwrap();
            assert!(found.error.contains("store refuses"), "{found:?}");
            assert!(!report.repaired.is_empty(), "{family:?}");
            if family == Family::Pack {
                assert_eq!(found.names, ["a"]);
                assert_eq!(report.repaired, [format!("condemned {key}")]);
            } else {
                assert_eq!(report.left, [], "{family:?}");
                open().await.verify(Some(&name), &VerifyOptions::default()).await.unwrap();
            }
        }
    }
}
