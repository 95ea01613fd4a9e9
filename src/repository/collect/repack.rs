//! Repacking: live chunks of mostly dead packs move to new packs; the maps that named the old ones are replaced, and the
//! old packs condemned, in one commit.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _, stream};

use super::Marks;
use crate::codec::{Codec, Encoded};
use crate::error::{Error, ErrorKind, Result};
use crate::format::PackRef;
use crate::id::{ChunkId, MapKey, Owned, PackId};
use crate::progress::Progress;
use crate::repository::layout::{self, Family};
use crate::repository::log::{Action, State};
use crate::repository::mend::put_map;
use crate::repository::writer::map_of;
use crate::repository::{Place, Repository, Saved, Writer, objects};

/// Rewrites `packs`; returns the bytes of the packs that this condemned.
///
/// # Errors
/// Damaged, if a live chunk is: the pack is then left as it is.
///
/// # Cancel safety
/// Safe: until its one commit nothing changes for readers; what it uploaded is garbage for the next collect.
pub async fn repack(
    repository: &Repository,
    state: &State,
    marks: &Marks,
    packs: &[PackRef],
    progress: &Progress,
) -> Result<u64> {
    if packs.is_empty() {
        return Ok(0);
    }
    let old: BTreeMap<PackId, PackRef> = packs.iter().map(|pack| (pack.id, *pack)).collect();
    let keys: BTreeSet<MapKey> = old.keys().filter_map(|id| marks.maps.get(id)).flatten().copied().collect();
    let names: BTreeMap<MapKey, _> = state.refs.iter().map(|(name, value)| (value.map_key, (name, value))).collect();
    let mut writer = Writer::new(repository, progress);
    let mut moved: HashMap<(PackId, u32), Place> = HashMap::new();
    let mut swaps = Vec::new();
    for key in keys {
        let Some((name, value)) = names.get(&key) else { continue };
        let saved = match repository.saved_as(name, value).await {
            Ok(saved) => saved,
            // The name moved on since the marking. If something else uses these packs, the next marking pardons them.
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        let mut places = Vec::with_capacity(saved.map.frames.len());
        let mut wanted: Vec<(usize, PackId)> = Vec::new();
        for (index, frame) in saved.map.frames.iter().enumerate() {
            let pack = saved.map.pack(frame)?.id;
            let plain_len = saved.manifest.chunks.lens.get(index).copied().unwrap_or(0);
            let (ordinal, offset, stored_len, codec) = (frame.ordinal, frame.offset, frame.stored_len, frame.codec);
            places.push(Place { pack, ordinal, offset, stored_len, plain_len, codec });
            if old.contains_key(&pack) {
                wanted.push((index, pack));
            }
        }
        let missing = missing_frames(&saved, &places, &wanted, &moved)?;
        let frames = missing.into_iter();
        let frames = frames
            .map(|(id, place)| async move { Ok::<_, Error>((id, place, read_frame(repository, id, &place).await?)) });
        let mut frames = stream::iter(frames.collect::<Vec<_>>()).buffered(repository.parallelism());
        while let Some((id, place, stored)) = frames.try_next().await? {
            progress.advance(u64::from(place.stored_len));
            let new = writer.push(id, Encoded { codec: place.codec, bytes: stored }, place.plain_len, false).await?;
            moved.insert((place.pack, place.ordinal), new);
        }
        drop(frames);
        for (index, pack) in wanted {
            if let Some(place) = places.get_mut(index)
                && let Some(new) = moved.get(&(pack, place.ordinal))
            {
                *place = *new;
            }
        }
        swaps.push((key, saved, places));
    }
    publish(repository, &mut writer, swaps, &old).await
}

/// A map to replace, the tree it belongs to, and where that tree's chunks are now.
type Swap = (MapKey, Saved, Vec<Place>);

/// Writes the new maps and commits the exchange.
async fn publish(
    repository: &Repository,
    writer: &mut Writer,
    swaps: Vec<Swap>,
    old: &BTreeMap<PackId, PackRef>,
) -> Result<u64> {
    writer.settle().await?;
    let session = writer.session().await?;
    let mut actions = Vec::new();
    for (key, saved, places) in swaps {
        let kept = |id: PackId| saved.map.packs.iter().find(|pack| pack.id == id).copied();
        let map = map_of(saved.value.manifest, &places, |id| writer.pack(id).or_else(|| kept(id)))?;
        let new = Owned::fresh(session);
        put_map(repository, new, &map).await?;
        actions.push(Action::SwapMap { old: key, new });
    }
    let condemned = Arc::new(Mutex::new(0));
    let freed = Arc::clone(&condemned);
    writer
        .close(|state| {
            let mut all = actions.clone();
            let mut bytes = 0;
            for pack in old.values().filter(|pack| state.is_target(&pack.id)) {
                all.push(Action::Condemn { pack: pack.id, len: pack.len, damaged: false });
                bytes += pack.len;
            }
            *freed.lock().unwrap_or_else(PoisonError::into_inner) = bytes;
            Ok(all)
        })
        .await?;
    let freed = *condemned.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(freed)
}

/// The stored bytes of one frame, checked by decoding them.
async fn read_frame(repository: &Repository, id: ChunkId, place: &Place) -> Result<Bytes> {
    let key = layout::owned(Family::Pack, place.pack);
    let mut stored = repository.budget().buffer(place.stored_len as usize).await?;
    objects::read_range(&**repository.store().objects(), &key, place.offset, &mut stored).await?;
    let stored = Bytes::copy_from_slice(&stored);
    let (codec, plain_len) = (place.codec, place.plain_len);
    let checked = stored.clone();
    let check = tokio::task::spawn_blocking(move || {
        let plain = if codec == Codec::Raw { checked } else { crate::codec::decode(codec, &checked, plain_len)? };
        crate::chunk::Chunk::verify(id, &plain).map(drop)
    });
    let checked = check.await.map_err(|error| Error::other("a worker stopped").source(error))?;
    checked.map_err(|error| error.at(format!("{key}, byte {}", place.offset)))?;
    Ok(stored)
}

/// The frames of one tree that lie in packs to be rewritten and were not moved yet, each once.
fn missing_frames(
    saved: &Saved,
    places: &[Place],
    wanted: &[(usize, PackId)],
    moved: &HashMap<(PackId, u32), Place>,
) -> Result<Vec<(ChunkId, Place)>> {
    let mut missing: BTreeMap<(PackId, u32), (ChunkId, Place)> = BTreeMap::new();
    for &(index, pack) in wanted {
        let (Some(&id), Some(&place)) = (saved.manifest.chunks.ids.get(index), places.get(index)) else {
            return Err(Error::damaged("map lacks a chunk of its manifest").at(&saved.name));
        };
        if !moved.contains_key(&(pack, place.ordinal)) {
            missing.insert((pack, place.ordinal), (id, place));
        }
    }
    Ok(missing.into_values().collect())
}
