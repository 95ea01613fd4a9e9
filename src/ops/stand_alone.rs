//! A copy of a name that needs no chunks of other names: differences to such chunks are stored again without a base.

use std::collections::HashMap;
use std::sync::Arc;

use super::names::{Replaced, exists};
use crate::budget::Buffer;
use crate::codec::{Codec, Encoded, encode_alone};
use crate::error::{Error, Result};
use crate::id::ChunkId;
use crate::name::Name;
use crate::policy::Labels;
use crate::progress::Progress;
use crate::repository::log::Keeping;
use crate::repository::{
    ChunkPlace, Delivered, Gaps, NameScope, PackRead, Publication, Published, Repository, Saved, StoredChunks, Writer,
    deliver, longest_read, plan_anew, read_pack,
};

/// A chunk without a base: its id, its plain length and its encoding.
type BaselessChunk = (ChunkId, u32, Encoded);

impl Repository {
    /// As [`Repository::copy`], but chunks with a base outside of the tree are stored again without it, so that readers of the
    /// copy only need its own content. With `if_absent` nothing is replaced.
    ///
    /// # Errors
    /// Not found, if there is no `from`; conflict, if `to` exists and must not, or if one of them changed meanwhile;
    /// damaged, if a chunk is.
    ///
    /// # Cancel safety
    /// Not safe: it may have happened.
    pub async fn copy_stand_alone(
        &self,
        from: &Name,
        to: &Name,
        if_absent: bool,
        progress: &Progress,
    ) -> Result<Option<Replaced>> {
        let mut known = StoredChunks::load(self).await?;
        let there = known.state().refs.get(to).cloned();
        if there.is_some() && if_absent {
            return Err(exists(to));
        }
        let saved = Arc::new(self.saved(from).await?);
        known.add(&saved);
        self.check_copy((from, &saved.value.manifest), to).await?;
        let mut writer = Writer::new(self, progress);
        let stored = self.store_alone(&saved, &mut writer, progress).await;
        let (_, places) = writer.discard_on_error(stored).await?;
        let (_, body) = writer.discard_on_error(self.saved_verbatim(from, &saved.value).await).await?;
        let publication = Publication {
            name: to,
            expected: there.as_ref().map(|value| value.version),
            keep: Keeping::Quota,
            manifest: (saved.value.manifest, body.to_vec()),
            chunks: &saved.manifest.chunks.ids,
            places: &places,
            known: &known,
            logical_bytes: saved.value.logical_bytes,
            files: saved.value.files,
            saved: saved.value.saved,
            behind: 0,
            facts: saved.value.facts.clone(),
            labels: Labels::default(),
            label_scope: NameScope::default(),
            from: vec![(from, saved.value.manifest)],
        };
        let published = writer.publish(publication).await;
        match writer.discard_on_error(published).await? {
            Published::Done(value) => Ok(there.as_ref().map(|old| Replaced::of(old, &value))),
            Published::Moved | Published::Lost(_) => {
                writer.give_up().await?;
                Err(Error::conflict("a name moved while it was copied").at(to).help("run the command again"))
            }
        }
    }

    /// Stores those chunks of the tree again, without a base, whose base is outside of it. Returns their new places, and those of all
    /// chunks of the tree in its order.
    ///
    /// # Errors
    /// Damaged, if a chunk is; errors of the store.
    ///
    /// # Cancel safety
    /// Not safe: drop the writer.
    pub(super) async fn store_alone(
        &self,
        saved: &Arc<Saved>,
        writer: &mut Writer,
        progress: &Progress,
    ) -> Result<(HashMap<ChunkId, ChunkPlace>, Vec<ChunkPlace>)> {
        let chunks = 0..u32::try_from(saved.map.chunks()).unwrap_or(u32::MAX);
        let mut places = chunks.map(|chunk| Ok(saved.locate(chunk)?.place)).collect::<Result<Vec<ChunkPlace>>>()?;
        let numbers: HashMap<ChunkId, usize> = saved.manifest.chunks.ids.iter().copied().zip(0..).collect();
        let mut stored_again = HashMap::new();
        for read in self.dependent(saved, progress)? {
            let _memory = read.memory_to_encode(self.budget(), |chunk| saved.locate(chunk)).await?;
            for (id, plain_len, stored) in self.decoded_alone(saved, read).await? {
                progress.advance(plain_len.into());
                let place = writer.push(id, stored, plain_len, false).await?;
                stored_again.insert(id, place);
                if let Some(slot) = numbers.get(&id).and_then(|&number| places.get_mut(number)) {
                    *slot = place;
                }
            }
        }
        Ok((stored_again, places))
    }

    /// Reads for all chunks of the tree with a foreign base.
    fn dependent(&self, saved: &Saved, progress: &Progress) -> Result<Vec<PackRead>> {
        let chunks = with_foreign_bases(saved);
        let lens = chunks.iter().filter_map(|&chunk| saved.manifest.chunks.lens.get(chunk as usize));
        progress.phase("storing what depends on others", lens.map(|&len| u64::from(len)).sum());
        plan_anew(|chunk| saved.locate(chunk), chunks, longest_read(self, self.budget()), Gaps::Wide)
    }

    /// Encodes the requested chunks of `read` without a base.
    async fn decoded_alone(&self, saved: &Arc<Saved>, read: PackRead) -> Result<Vec<BaselessChunk>> {
        let tree = Arc::clone(saved);
        let take = move |read: &PackRead, buffer: Buffer| {
            let (frames, mut taken) = (buffer.freeze(), Vec::new());
            let sink = |delivered: Delivered<'_>| {
                let chunk = delivered.chunk?;
                if delivered.wanted {
                    let located = &delivered.located;
                    let bytes = frames.slice(delivered.stored);
                    let stored = Encoded { codec: located.place.codec, bytes, base: located.place.base };
                    taken.push((located.id, located.place.plain_len, encode_alone(chunk.bytes(), &stored)));
                }
                Ok(())
            };
            deliver(read, &frames, |chunk| tree.locate(chunk), sink)?;
            Ok(taken)
        };
        read_pack(&[self], self.budget(), read, take).await
    }
}

/// True if a chunk of the tree has a base outside of it.
pub(super) fn has_foreign_bases(saved: &Saved) -> bool {
    !with_foreign_bases(saved).is_empty()
}

/// Chunks of the tree with a base outside of it. A bundle that is stored without a base, and is nothing but chunks of the tree, counts
/// as inside.
fn with_foreign_bases(saved: &Saved) -> Vec<u32> {
    let own = saved.map.chunks();
    let frames = || (0u32..).zip(saved.map.frames.iter().take(own));
    let mut parts: HashMap<u32, u64> = HashMap::new();
    for (chunk, frame) in frames().filter(|(_, frame)| frame.codec == Codec::Part) {
        let len = saved.manifest.chunks.lens.get(chunk as usize).copied().unwrap_or(0);
        *parts.entry(frame.base().unwrap_or(u32::MAX)).or_default() += u64::from(len);
    }
    let is_inside = |base: u32| {
        let bundle = saved.locate(base).map(|bundle| bundle.place);
        bundle.is_ok_and(|place| !place.codec.has_base() && parts.get(&base) == Some(&u64::from(place.plain_len)))
    };
    let is_outside = |base: u32| base as usize >= own && !is_inside(base);
    frames().filter(|(_, frame)| frame.base().is_some_and(is_outside)).map(|(chunk, _)| chunk).collect()
}
