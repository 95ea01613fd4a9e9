//! Verifies arriving frames and caches them. Blocking: decoding takes a core, the cache a disk.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

use super::turns::Turns;
use crate::cache::{Cache, Frame};
use crate::chunk::Chunk;
use crate::codec::{self, Codec, Encoded, HOPS_MAX};
use crate::error::Result;
use crate::id::ChunkId;
use crate::repository::Saved;

/// Maximum number of bases of a chunk.
const HOPS: usize = HOPS_MAX as usize;

/// Verifier of frames.
#[derive(Clone, Debug)]
pub(super) struct Verifier {
    cache: Arc<Cache>,
    /// One turn, to encode frames with bases of other trees anew: that takes memory which is not counted.
    replacing: Arc<Turns>,
    /// The bundle that was decoded last: its other parts usually follow. At most 3 MiB, which are not counted.
    bundle: Arc<Mutex<Option<(ChunkId, Bytes)>>>,
}

impl Verifier {
    pub(super) fn new(cache: Arc<Cache>) -> Self {
        Self { cache, replacing: Arc::new(Turns::new(1)), bundle: Arc::default() }
    }

    /// Verifies that `encoded` is the chunk numbered `chunk` and puts it into the cache, where it counts for `tenant`; None if its base
    /// is missing, without which it cannot be verified.
    ///
    /// # Errors
    /// Damaged, if it is not the chunk.
    pub(super) fn keep(
        &self,
        saved: &Saved,
        chunk: u32,
        encoded: Encoded,
        tenant: Option<&str>,
    ) -> Result<Option<Frame>> {
        let located = saved.locate(chunk)?;
        let frame = match encoded.base {
            None => Some(Frame::verify(located.id, encoded, located.place.plain_len, None)?),
            Some(base) => {
                let Some(plain) = self.plain(&base, HOPS) else { return Ok(None) };
                let frame = {
                    let base = Chunk::verify(base, &plain)?;
                    Frame::verify(located.id, encoded, located.place.plain_len, Some(base))?
                };
                // With another base it would need a chunk that no pin of this tree keeps.
                if listed_base(saved, chunk)? == Some(base) { Some(frame) } else { self.without_foreign_base(&frame) }
            }
        };
        if let Some(frame) = &frame {
            self.insert(frame, tenant);
        }
        Ok(frame)
    }

    /// Puts a frame into the cache, where it counts for `tenant`. That may refuse it; the caller has it all the same.
    pub(super) fn insert(&self, frame: &Frame, tenant: Option<&str>) {
        // It counts what it refuses.
        let _ = self.cache.insert_for(frame, tenant);
    }

    /// Decoded chunk of the cache.
    fn plain(&self, id: &ChunkId, hops: usize) -> Option<Bytes> {
        if let Some((_, plain)) = self.last_bundle().as_ref().filter(|(last, _)| last == id) {
            return Some(plain.clone());
        }
        let frame = self.cache.get(id)?;
        let base = match frame.base() {
            Some(base) => Some(self.plain(&base, hops.checked_sub(1)?)?),
            None => None,
        };
        let plain = codec::decode(frame.codec(), frame.bytes(), base.as_deref(), frame.plain_len()).ok()?;
        if matches!(frame.codec(), Codec::Bundle(_)) {
            *self.last_bundle() = Some((*id, plain.clone()));
        }
        Some(plain)
    }

    fn last_bundle(&self) -> MutexGuard<'_, Option<(ChunkId, Bytes)>> {
        self.bundle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `frame`, encoded anew without its base; none if that is missing.
    pub(super) fn alone(&self, frame: &Frame) -> Option<Frame> {
        let base = self.plain(&frame.base()?, HOPS)?;
        let plain = codec::decode(frame.codec(), frame.bytes(), Some(&base), frame.plain_len()).ok()?;
        let chunk = Chunk::verify(frame.id(), &plain).ok()?;
        Frame::decoded(chunk, codec::encode_alone(&plain, &frame.encoded())).ok()
    }

    /// The `chunks` that are in the cache, as by [`Verifier::get`].
    ///
    /// # Errors
    /// Damaged, if the map lacks one.
    pub(super) fn find(&self, saved: &Saved, chunks: &[u32]) -> Result<Vec<(u32, Frame)>> {
        let found = chunks.iter().map(|&chunk| Ok(self.get(saved, chunk)?.map(|frame| (chunk, frame))));
        found.filter_map(Result::transpose).collect()
    }

    /// The chunk numbered `chunk` from the cache, encoded for itself or with the base that the map lists. It may have come for another
    /// tree, with a base that readers of this one may not see and that no pin of this one keeps: then it is encoded anew and
    /// replaced in the cache, or dropped if that base is missing.
    ///
    /// # Errors
    /// Damaged, if the map lacks it.
    pub(super) fn get(&self, saved: &Saved, chunk: u32) -> Result<Option<Frame>> {
        let Some(frame) = self.cache.get(&saved.locate(chunk)?.id) else { return Ok(None) };
        if frame.base().is_none() || frame.base() == listed_base(saved, chunk)? {
            return Ok(Some(frame));
        }
        let alone = self.without_foreign_base(&frame);
        self.cache.replace(&frame, alone.as_ref());
        Ok(alone)
    }

    fn without_foreign_base(&self, frame: &Frame) -> Option<Frame> {
        let _turn = self.replacing.take();
        self.alone(frame)
    }
}

/// Base of a chunk by the map.
fn listed_base(saved: &Saved, chunk: u32) -> Result<Option<ChunkId>> {
    saved.locate(chunk)?.base.map(|base| Ok(saved.locate(base)?.id)).transpose()
}
