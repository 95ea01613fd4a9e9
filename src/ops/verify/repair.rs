//! Repair: rebuilds the index, condemns damaged packs, and replaces maps by ones with intact packs. Each step is one commit.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use bytes::Bytes;
use object_store::path::Path;

use super::{Subject, VerifyReport, Verifying};
use crate::budget::Buffer;
use crate::codec::{self, Compression, Encoded};
use crate::error::Result;
use crate::format::{Manifest, Map, PackRef};
use crate::id::{ChunkId, MapKey, PackId, SegmentId};
use crate::name::Name;
use crate::repository::layout::{self, Family, Numbered};
use crate::repository::log::{Accepted, Action, RefValue};
use crate::repository::{
    ChunkPlace, Delivered, Gaps, Located, PackPart, PackRead, RepairedTree, Repository, Saved, StoredChunks, Writer,
    deliver, is_open, plan, read_pack,
};

impl Repository {
    /// Repairs an unreadable log, and reports actions and losses.
    pub(super) async fn salvage(&self, accepted: Accepted, report: &mut VerifyReport) -> Result<()> {
        let Some(salvaged) = self.log().salvage(accepted).await? else { return Ok(()) };
        let unreadable = salvaged.unreadable.iter().map(|(entry, _)| entry);
        let lost = unreadable.chain(salvaged.refused.iter().map(|(entry, _)| entry));
        report.lost = lost.map(ToString::to_string).collect();
        let done = &mut report.repaired;
        for (entry, copy) in &salvaged.unreadable {
            done.push(format!("{}: what it committed is lost", left_out(entry, copy.as_ref())));
        }
        for (entry, copy) in &salvaged.covered {
            done.push(format!("{}: the accepted snapshot stands for it", left_out(entry, copy.as_ref())));
        }
        if let Some(number) = salvaged.accepted {
            let snapshot = Numbered::Snapshot.key(number);
            done.push(format!("went on from {snapshot}, which nothing before it in the log can confirm any more"));
        }
        for (entry, copy) in &salvaged.refused {
            done.push(format!("set {entry} aside, to {copy}: it does not follow from the entries before it"));
        }
        for (snapshot, copy) in &salvaged.snapshots {
            done.push(format!("moved {snapshot} to {copy}: nothing is lost, as the log's entries say the same"));
        }
        if report.lost.is_empty() && salvaged.names.is_empty() && salvaged.partial.is_empty() {
            return Ok(());
        }
        done.extend(salvaged.names.iter().map(|name| format!("lost a change of {name}: it needs what is lost")));
        done.extend(salvaged.partial.iter().map(|entry| format!("kept {entry} in part: the rest needs what is lost")));
        let state = self.state().await?;
        done.push(format!("the log goes on from entry {} with {} names", salvaged.snapshot, state.refs.len()));
        let named = state.refs.keys().map(|name| format!("kept {name}"));
        done.extend(named);
        if accepted.lost_labels {
            done.push(
                "labels that a lost entry gave are lost: check those of each name (towline label NAME)".to_owned(),
            );
        }
        done.push(
            "what was saved last may be missing: save it again, its content is found if it is still there".to_owned(),
        );
        Ok(())
    }
}

impl Verifying<'_> {
    /// Repairs what is possible, and reports it; with `whole`, also the index.
    pub(super) async fn repair(&self, whole: bool) -> Result<Vec<String>> {
        self.options.progress.phase("repairing", 0);
        let mut done = Vec::new();
        if whole {
            self.repair_index(&mut done).await?;
        }
        self.condemn(&mut done).await?;
        self.repair_names(&mut done).await?;
        Ok(done)
    }

    /// Replaces damaged segments, and indexes packs that names need and no segment lists.
    async fn repair_index(&self, done: &mut Vec<String>) -> Result<()> {
        let state = self.repository.state().await?;
        let old: Vec<SegmentId> =
            self.bad_segments.keys().filter(|id| state.segments.contains_key(id)).copied().collect();
        let needed = self.packs.values().filter(|(_, sound)| *sound).map(|(pack, _)| *pack);
        let needed = needed.filter(|pack| self.users.has(&pack.id));
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

    /// Condemns damaged packs, so that new content does not rely on them.
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

    /// Replaces maps that are damaged, or that use unreliable packs.
    async fn repair_names(&self, done: &mut Vec<String>) -> Result<()> {
        let state = self.repository.state().await?;
        let mut bad = self.findings.damaged_packs();
        bad.extend(state.condemned.iter().filter(|(_, condemned)| condemned.damaged).map(|(pack, _)| *pack));
        bad.extend(state.purged.keys());
        bad.retain(|pack| self.users.has(pack));
        let bad_maps: BTreeSet<MapKey> = self.findings.every_subject().filter_map(map_of).collect();
        let users = bad.iter().flat_map(|pack| self.users.of(pack));
        let hit_maps: BTreeSet<MapKey> = users.chain(bad_maps.iter().copied()).collect();
        let hit: BTreeMap<MapKey, (&Name, &RefValue)> = self
            .names
            .iter()
            .filter(|(_, v)| hit_maps.contains(&v.map_key))
            .map(|(n, v)| (v.map_key, (n, v)))
            .collect();
        if hit.is_empty() {
            return Ok(());
        }
        let mut known = StoredChunks::load(self.repository).await?;
        if !is_open(known.state()) {
            // A base may be a stricter name's.
            known.forget_differences();
        }
        let mut writer = Writer::new(self.repository, &self.options.progress);
        let mut lens = BTreeMap::new();
        for pack in &bad {
            lens.insert(*pack, self.repository.stored_len(*pack).await?.unwrap_or(0));
        }
        for (key, (name, value)) in hit {
            let Some(manifest) = self.sound_manifest(value).await? else { continue };
            let ids = manifest.chunks.ids.clone();
            let tree = match self.sound_map(key, &bad_maps).await? {
                Some(map) if map.check_frames(&manifest.chunks.lens).is_err() => None,
                Some(map) => {
                    let (name, value) = (name.clone(), value.clone());
                    Some(Arc::new(Saved::ruled_now(name, value, manifest, map)))
                }
                None => None,
            };
            let repair = TreeRepair { verifying: self, ids: &ids, tree, bad: &lens };
            if repair.repair(&mut known, &mut writer, value).await? {
                done.push(format!("{name} has a new map"));
            }
        }
        Ok(())
    }

    async fn sound_map(&self, key: MapKey, bad: &BTreeSet<MapKey>) -> Result<Option<Map>> {
        if bad.contains(&key) { Ok(None) } else { self.repository.map(key).await.map(Some) }
    }

    async fn sound_manifest(&self, value: &RefValue) -> Result<Option<Manifest>> {
        match self.repository.manifest(value.manifest_key, value.manifest).await {
            Ok(manifest) => Ok(Some(manifest)),
            Err(error) if super::is_damage(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// One map being replaced.
struct TreeRepair<'a> {
    verifying: &'a Verifying<'a>,
    /// The manifest's chunks.
    ids: &'a [ChunkId],
    /// The tree, if its map is intact.
    tree: Option<Arc<Saved>>,
    /// Unreliable packs, and the bytes that are left of them.
    bad: &'a BTreeMap<PackId, u64>,
}

impl TreeRepair<'_> {
    /// Finds an intact place for every chunk and replaces the map; `false` if a chunk has none.
    async fn repair(&self, known: &mut StoredChunks, writer: &mut Writer, value: &RefValue) -> Result<bool> {
        let repository = self.verifying.repository;
        let mut places: Vec<Option<ChunkPlace>> = (0u32..).zip(self.ids).map(|(chunk, _)| self.kept(chunk)).collect();
        let lost = |places: &[Option<ChunkPlace>]| -> Vec<(u32, ChunkId)> {
            let pairs = (0u32..).zip(self.ids).zip(places);
            pairs.filter(|(_, place)| place.is_none()).map(|((chunk, id), _)| (chunk, *id)).collect()
        };
        let wanted = lost(&places);
        let found = known.locate(&wanted.iter().map(|(_, id)| *id).collect::<Vec<_>>()).await?;
        for ((chunk, id), place) in wanted.into_iter().zip(found) {
            let place = match place {
                Some(place) => Some(place),
                None => self.rescue(chunk, writer).await?.inspect(|place| known.stored(id, *place)),
            };
            if let Some(slot) = places.get_mut(chunk as usize) {
                *slot = place;
            }
        }
        let missing = lost(&places).len();
        let places: Vec<ChunkPlace> = places.into_iter().flatten().collect();
        if missing > 0 {
            tracing::info!("{missing} chunks are lost until the same content is saved again");
            // A later save of the rest finds the rescued chunks.
            writer.close(|_| Ok(Vec::new())).await?;
            return Ok(false);
        }
        let packs = self.tree.as_ref().map(|tree| tree.map.packs.as_slice()).unwrap_or_default();
        let bases = self.kept_bases(&places)?;
        let repaired =
            RepairedTree { manifest: value.manifest, chunks: self.ids, places: &places, bases: &bases, packs };
        match repository.remap(writer, known, value.map_key, &repaired).await {
            Ok(()) => Ok(true),
            Err(error) if error.kind().is_conflict() => {
                tracing::info!("a map was not replaced: {error:?}");
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Place of a chunk by the map, if it and its bases are reliable.
    fn kept(&self, chunk: u32) -> Option<ChunkPlace> {
        let located = self.tree.as_ref()?.locate(chunk).ok()?;
        let whole = located.base.is_none_or(|base| self.kept(base).is_some());
        (whole && !self.bad.contains_key(&located.place.pack)).then_some(located.place)
    }

    /// Chunks of the old map that may be bases of `places`, and stay.
    fn kept_bases(&self, places: &[ChunkPlace]) -> Result<HashMap<ChunkId, ChunkPlace>> {
        let mut bases: HashMap<ChunkId, ChunkPlace> = HashMap::new();
        let Some(tree) = &self.tree else { return Ok(bases) };
        if places.iter().all(|place| place.base.is_none()) {
            return Ok(bases);
        }
        for chunk in 0..tree.located_chunks() {
            if let Some(place) = self.kept(chunk) {
                let id = tree.locate(chunk)?.id;
                let best = bases.entry(id).or_insert(place);
                if place.codec.hops() < best.codec.hops() {
                    *best = place;
                }
            }
        }
        Ok(bases)
    }

    /// Copies an intact chunk out of a damaged pack. Differences are stored again without a base.
    async fn rescue(&self, chunk: u32, writer: &mut Writer) -> Result<Option<ChunkPlace>> {
        let Some(tree) = self.tree.clone() else { return Ok(None) };
        let repository = self.verifying.repository;
        let Some(read) = plan(|chunk| tree.locate(chunk), [chunk], u64::MAX, Gaps::Wide)?.pop() else {
            return Ok(None);
        };
        let beyond = |part: &PackPart| self.bad.get(&part.pack).is_some_and(|len| *len < part.range.end);
        if read.parts.iter().any(beyond) {
            return Ok(None);
        }
        let take = move |read: &PackRead, buffer: Buffer| {
            let mut taken = None;
            deliver(
                read,
                &buffer,
                |chunk| tree.locate(chunk),
                |delivered: Delivered<'_>| {
                    let plain = Bytes::copy_from_slice(delivered.chunk?.bytes());
                    let Located { id, place, .. } = delivered.located;
                    if delivered.wanted && place.base.is_some() {
                        taken = Some((id, place.plain_len, codec::encode(&plain, Compression::Auto, None)));
                    } else if delivered.wanted {
                        let bytes = Bytes::copy_from_slice(buffer.get(delivered.stored).unwrap_or_default());
                        taken = Some((id, place.plain_len, Encoded { codec: place.codec, bytes, base: None }));
                    }
                    Ok(())
                },
            )?;
            Ok(taken)
        };
        match read_pack(&[repository], repository.budget(), read, take).await {
            Ok(Some((id, plain_len, stored))) => writer.push(id, stored, plain_len, false).await.map(Some),
            Ok(None) => Ok(None),
            Err(error) if super::is_damage(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Text about an entry that cannot be used: that it was copied to `copy`, or is missing.
fn left_out(entry: &Path, copy: Option<&Path>) -> String {
    match copy {
        Some(copy) => format!("set {entry} aside, to {copy}"),
        None => format!("went on without {entry}, which is missing"),
    }
}

fn map_of(subject: Subject) -> Option<MapKey> {
    match subject {
        Subject::Map(key) => Some(key),
        _ => None,
    }
}
