//! Repair: rebuild the index, condemn damaged packs, give names maps that name sound packs. Each step is one commit.

use std::collections::{BTreeMap, BTreeSet};

use super::{Subject, Verifying};
use crate::budget::Buffer;
use crate::codec::Encoded;
use crate::error::{ErrorKind, Result};
use crate::format::{Manifest, Map, PackRef};
use crate::id::{ChunkId, MapKey, PackId, SegmentId};
use crate::repository::layout::{self, Family};
use crate::repository::log::{Action, RefValue};
use crate::repository::{Known, Name, PackRead, Place, Writer, deliver, read_pack};

impl Verifying<'_> {
    /// Mends what can be mended, and says what was; `whole`: the index too.
    pub(super) async fn repair(&self, whole: bool) -> Result<Vec<String>> {
        self.options.progress.phase("repairing", 0);
        let mut done = Vec::new();
        if whole {
            self.mend_index(&mut done).await?;
        }
        self.condemn(&mut done).await?;
        self.mend_names(&mut done).await?;
        Ok(done)
    }

    /// Replaces unsound segments, and takes up packs that names need and no segment lists.
    async fn mend_index(&self, done: &mut Vec<String>) -> Result<()> {
        let state = self.repository.state().await?;
        let old: Vec<SegmentId> =
            self.bad_segments.keys().filter(|id| state.segments.contains_key(id)).copied().collect();
        let needed = self.packs.values().filter(|(_, sound)| *sound).map(|(pack, _)| *pack);
        let needed = needed.filter(|pack| self.users.contains_key(&pack.id));
        let covered = old.iter().filter_map(|id| self.bad_segments.get(id)).flatten().copied();
        let packs: BTreeSet<PackRef> = needed.chain(covered).filter(|pack| !self.indexed.contains(&pack.id)).collect();
        if old.is_empty() && packs.is_empty() {
            return Ok(());
        }
        let indexed = self.repository.reindex(&state, &old, &packs).await?;
        done.extend(old.iter().map(|id| format!("replaced {}", layout::owned(Family::Index, *id))));
        done.push(format!("indexed {indexed} packs from their footers"));
        Ok(())
    }

    /// Damaged packs stop being what new content relies on.
    async fn condemn(&self, done: &mut Vec<String>) -> Result<()> {
        let damaged = self.findings.damaged_packs();
        let mut condemned = Vec::new();
        let commit = self.repository.log().commit(None, |state| {
            let due = damaged.iter().filter(|pack| state.is_target(pack)).filter_map(|pack| self.packs.get(pack));
            condemned = due.map(|(pack, _)| *pack).collect();
            let condemn = condemned.iter().map(|pack| Action::Condemn { pack: pack.id, len: pack.len, damaged: true });
            Ok(condemn.collect())
        });
        commit.await?;
        done.extend(condemned.iter().map(|pack| format!("condemned {}", layout::owned(Family::Pack, pack.id))));
        Ok(())
    }

    /// Gives new maps to the names whose map is damaged or names packs that cannot be relied on.
    async fn mend_names(&self, done: &mut Vec<String>) -> Result<()> {
        let state = self.repository.state().await?;
        let mut bad = self.findings.damaged_packs();
        bad.extend(state.condemned.iter().filter(|(_, condemned)| condemned.damaged).map(|(pack, _)| *pack));
        bad.extend(state.purged.keys());
        bad.retain(|pack| self.users.contains_key(pack));
        let bad_maps: BTreeSet<MapKey> = self.findings.subjects().filter_map(map_of).collect();
        let hit = |value: &RefValue| {
            let uses = |pack: &PackId| self.users.get(pack).is_some_and(|maps| maps.contains(&value.map_key));
            bad_maps.contains(&value.map_key) || bad.iter().any(uses)
        };
        let hit: BTreeMap<MapKey, (&Name, &RefValue)> =
            self.names.iter().filter(|(_, value)| hit(value)).map(|(n, v)| (v.map_key, (n, v))).collect();
        if hit.is_empty() {
            return Ok(());
        }
        let mut known = Known::load(self.repository).await?;
        let mut writer = Writer::new(self.repository, &self.options.progress);
        let mut lens = BTreeMap::new();
        for pack in &bad {
            lens.insert(*pack, self.repository.stored_len(*pack).await?.unwrap_or(0));
        }
        for (key, (name, value)) in hit {
            let Some(manifest) = self.sound_manifest(value).await? else { continue };
            let map = if bad_maps.contains(&key) { None } else { Some(self.repository.map(key).await?) };
            let mending = Mending { verifying: self, manifest: &manifest, map: map.as_ref(), bad: &lens };
            if mending.mend(&mut known, &mut writer, value).await? {
                done.push(format!("{name} has a new map"));
            }
        }
        Ok(())
    }

    async fn sound_manifest(&self, value: &RefValue) -> Result<Option<Manifest>> {
        let body = self.repository.manifest_body(value.manifest_key, value.manifest).await;
        match body.and_then(|body| Manifest::decode(&body)) {
            Ok(manifest) => Ok(Some(manifest)),
            Err(error) if super::is_damage(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// One map being replaced.
struct Mending<'a> {
    verifying: &'a Verifying<'a>,
    manifest: &'a Manifest,
    /// The map, if it is sound.
    map: Option<&'a Map>,
    /// Packs that cannot be relied on, and how many bytes of them are left.
    bad: &'a BTreeMap<PackId, u64>,
}

impl Mending<'_> {
    /// Finds a sound place for every chunk and replaces the map; `false` if there is not one for each.
    async fn mend(&self, known: &mut Known, writer: &mut Writer, value: &RefValue) -> Result<bool> {
        let repository = self.verifying.repository;
        let ids = &self.manifest.chunks.ids;
        let mut places: Vec<Option<Place>> = (0u32..).zip(ids).map(|(chunk, _)| self.kept(chunk)).collect();
        let lost = |places: &[Option<Place>]| -> Vec<(u32, ChunkId)> {
            let pairs = (0u32..).zip(ids).zip(places);
            pairs.filter(|(_, place)| place.is_none()).map(|((chunk, id), _)| (chunk, *id)).collect()
        };
        let wanted = lost(&places);
        let found = known.locate(&wanted.iter().map(|(_, id)| *id).collect::<Vec<_>>()).await?;
        for ((chunk, id), place) in wanted.into_iter().zip(found) {
            let place = match place {
                Some(place) => Some(place),
                None => self.rescue(chunk, id, writer).await?.inspect(|place| known.insert(id, *place)),
            };
            if let Some(slot) = places.get_mut(chunk as usize) {
                *slot = place;
            }
        }
        let missing = lost(&places).len();
        let places: Vec<Place> = places.into_iter().flatten().collect();
        if missing > 0 {
            tracing::info!("{missing} chunks are lost until the same content is saved again");
            // What was rescued stays useful to whoever saves the rest again.
            writer.close(|_| Ok(Vec::new())).await?;
            return Ok(false);
        }
        let kept = self.map.map(|map| map.packs.as_slice()).unwrap_or_default();
        let tree = (value.manifest, places.as_slice());
        match repository.remap(writer, known, value.map_key, kept, tree).await {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::Conflict => {
                tracing::info!("a map was not replaced: {error:?}");
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Where the map says that a chunk is, if that can be relied on.
    fn kept(&self, chunk: u32) -> Option<Place> {
        self.told(chunk).filter(|place| !self.bad.contains_key(&place.pack))
    }

    fn told(&self, chunk: u32) -> Option<Place> {
        let map = self.map?;
        let frame = map.frames.get(chunk as usize)?;
        let plain_len = *self.manifest.chunks.lens.get(chunk as usize)?;
        let (pack, ordinal, offset) = (map.pack(frame).ok()?.id, frame.ordinal, frame.offset);
        Some(Place { pack, ordinal, offset, stored_len: frame.stored_len, plain_len, codec: frame.codec })
    }

    /// Copies a chunk that is still whole out of a pack that is not.
    async fn rescue(&self, chunk: u32, id: ChunkId, writer: &mut Writer) -> Result<Option<Place>> {
        let Some(at) = self.told(chunk) else { return Ok(None) };
        let repository = self.verifying.repository;
        let range = at.offset..at.offset + u64::from(at.stored_len);
        if self.bad.get(&at.pack).is_some_and(|len| *len < range.end) {
            return Ok(None);
        }
        let read = PackRead { pack: at.pack, range, chunks: vec![chunk] };
        let take = move |read: &PackRead, buffer: Buffer| {
            let place = |_| Ok((id, at));
            deliver(read, &buffer, place, |delivered| delivered.chunk.map(drop))?;
            Ok(buffer.freeze())
        };
        match read_pack(repository, repository.budget(), read, take).await {
            Ok(bytes) => {
                let stored = Encoded { codec: at.codec, bytes };
                writer.push(id, stored, at.plain_len, true).await.map(Some)
            }
            Err(error) if super::is_damage(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn map_of(subject: Subject) -> Option<MapKey> {
    match subject {
        Subject::Map(key) => Some(key),
        _ => None,
    }
}
