//! Encoding of bundles: a chunk with those that its optimizer changes with it, predicted from the bundle of the step before.

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::Semaphore;

use super::bundles::Pieces;
use super::contents::read_again;
use super::encode::{EncodedChunk, Encoding, NewChunk, StoredForm};
use super::read::HashedChunk;
use crate::budget::{Budget, Buffer};
use crate::codec::{
    BUNDLE_LEN_MAX, BundleBase, Compression, Element, Encoded, Width, encode, encode_bundle, encode_part,
};
use crate::error::{Error, Result};
use crate::id::ChunkId;
use crate::limits::MIB;
use crate::ops::shown;
use crate::repository::{Delivered, Gaps, PackRead, deliver, plan, read_pack};
use crate::tree::Walk;
use crate::work::blocking;

/// Memory to encode one bundle: its plain bytes and frame, its base and the base of that, and what is read of their packs.
const BUNDLE_MEMORY: u64 = 8 * BUNDLE_LEN_MAX;

/// Part of the memory that a save of the user may take for bundles.
pub(super) const SHARE: u64 = 4;

const FLOAT: Element = Element::Float(Width::W4);

/// A bundle to encode with the first of its chunks that is met.
#[derive(Clone, Debug)]
pub(super) struct NewBundle {
    /// All of its chunks.
    pub(super) pieces: Pieces,
    /// The bundle of the step before.
    pub(super) base: Option<ParentBundle>,
}

/// A bundle of the parent.
#[derive(Clone, Copy, Debug)]
pub(super) struct ParentBundle {
    /// Its number in the parent's map.
    pub(super) chunk: u32,
    /// Predicted bundles from the one that is stored whole up to it.
    pub(super) steps: u8,
}

/// Frames of a bundle and of its chunks.
#[derive(Debug)]
pub(super) struct EncodedBundle {
    /// The bundle; none if it would save nothing.
    pub(super) whole: Option<StoredForm>,
    /// Its chunks but the first that was met.
    pub(super) others: Vec<StoredForm>,
}

/// Memory for bundles, and turns to encode that many at a time.
#[derive(Clone, Debug)]
pub(super) struct BundleMemory {
    budget: Budget,
    turns: Arc<Semaphore>,
    /// The memory that `budget` is a part of.
    _carved_from: Budget,
}

/// Plain bytes of a bundle.
struct Plain {
    bytes: Vec<u8>,
    /// Its chunks, in order.
    chunks: Vec<ChunkId>,
}

impl BundleMemory {
    /// Takes `bytes` of `whole`, for as many bundles as there is room for.
    pub(super) async fn carve(whole: &Budget, bytes: u64) -> Result<Self> {
        let budget = whole.carve(bytes).await?;
        let turns = usize::try_from(budget.total() / BUNDLE_MEMORY).unwrap_or(1).max(1);
        Ok(Self { budget, turns: Arc::new(Semaphore::new(turns)), _carved_from: whole.clone() })
    }
}

impl Encoding {
    /// Reason why nothing is predicted by a save that has `budget`, though that was asked for.
    pub(super) fn unpredicted(&self, budget: &Budget, for_caller: bool) -> Option<String> {
        if self.compression != Compression::Predict || self.bundle_memory.is_some() {
            return None;
        }
        if self.contents.has_bundles() {
            if for_caller && budget.carved_for_caller_max() >= BUNDLE_MEMORY {
                return Some(
                    "nothing is predicted: other saves of tokens and handoffs take the memory for it".to_owned(),
                );
            }
            let share = if for_caller { budget.total() / budget.carved_for_caller_max().max(1) } else { SHARE };
            let (least, there) = (share * BUNDLE_MEMORY / MIB, budget.total() / MIB);
            return Some(format!(
                "nothing is predicted: predictions need a memory budget of {least} MiB, this one has {there} MiB (--memory)"
            ));
        }
        let lacking = "no file above 1 MiB has 32-bit weights and, in the same save, moments of the same shape (exp_avg, \
                       momentum_buffer)";
        Some(format!("nothing is predicted: {lacking}"))
    }

    /// Encodes the chunk `new` as part of its bundle.
    ///
    /// # Errors
    /// Conflict, if another chunk of the bundle cannot be read, or has changed.
    pub(super) async fn encode_bundled(
        &self,
        new: &NewChunk,
        bundle: &NewBundle,
        bundle_memory: &BundleMemory,
    ) -> Result<EncodedChunk> {
        let _turn = bundle_memory.turns.acquire().await.map_err(|_| Error::other("no more bundles are encoded"))?;
        let (walk, chunk, file, pieces) = (Arc::clone(&self.walk), new.chunk.clone(), new.file, bundle.pieces.clone());
        let plain = Arc::new(blocking(move || Plain::gather(&walk, &chunk, file, pieces)).await?);
        let predicted = match bundle.base {
            Some(base) => match self.predict(&plain, base, bundle_memory).await {
                Ok(predicted) => predicted,
                Err(error) => {
                    let chunk = new.chunk.id;
                    tracing::warn!(%chunk, "a bundle is stored whole, as its base cannot be read: {error:?}");
                    None
                }
            },
            None => None,
        };
        let mut bundle = blocking(move || Ok(EncodedBundle::of(&plain, predicted))).await?;
        let own = bundle.others.iter().position(|other| other.id == new.chunk.id);
        let own = own.map(|at| bundle.others.remove(at));
        let own = own.ok_or_else(|| Error::other("a bundle lacks the chunk that it was made for"))?;
        Ok(EncodedChunk { bundle: Some(Box::new(bundle)), ..EncodedChunk::new(new, own) })
    }

    /// Encodes a bundle as predicted from the parent's bundle `base`; None if its length differs.
    async fn predict(
        &self,
        plain: &Arc<Plain>,
        base: ParentBundle,
        bundle_memory: &BundleMemory,
    ) -> Result<Option<Encoded>> {
        let Some(parent) = &self.parent else { return Ok(None) };
        let saved = Arc::clone(&parent.saved);
        let reads = plan(|chunk| saved.locate(chunk), [base.chunk], BUNDLE_MEMORY, Gaps::Wide)?;
        let Some(read) = reads.into_iter().next() else { return Ok(None) };
        let plain = Arc::clone(plain);
        let work = move |read: &PackRead, buffer: Buffer| {
            let mut predicted = None;
            deliver(
                read,
                &buffer,
                |chunk| saved.locate(chunk),
                |delivered: Delivered<'_>| {
                    let chunk = delivered.chunk?;
                    if delivered.wanted {
                        let base = BundleBase { id: chunk.id(), steps: base.steps, plain: chunk.bytes() };
                        predicted = encode_bundle(&plain.bytes, plain.chunks.len(), Some(base));
                    }
                    Ok(())
                },
            )?;
            Ok(predicted)
        };
        read_pack(&[&self.repository], &bundle_memory.budget, read, work).await
    }
}

impl Plain {
    /// Reads the `pieces` of a bundle, of which `chunk` of `file` is one.
    fn gather(walk: &Walk, chunk: &HashedChunk, file: usize, pieces: Pieces) -> Result<Self> {
        let mut plain = Self { bytes: Vec::new(), chunks: Vec::new() };
        for (of, range) in pieces {
            if (of, range.start) == (file, chunk.start) {
                plain.bytes.extend_from_slice(&chunk.bytes);
                plain.chunks.push(chunk.id);
                continue;
            }
            let piece = read_again(walk, of, range)?;
            plain.chunks.push(ChunkId::of(&piece));
            plain.bytes.extend_from_slice(&piece);
        }
        Ok(plain)
    }
}

impl EncodedBundle {
    /// The bundle as it was `predicted`, or whole, and all of its chunks as parts of it; or each of these for itself.
    fn of(plain: &Plain, predicted: Option<Encoded>) -> Self {
        let count = plain.chunks.len();
        let len = plain.bytes.len() / count.max(1);
        let members = || plain.chunks.iter().zip(plain.bytes.chunks_exact(len.max(1)));
        let whole = || encode_bundle(&plain.bytes, count, None);
        let stored = match predicted {
            Some(predicted) if predicted.bytes.len() > plain.bytes.len() / 2 => {
                // As for a difference: a base is worth an eighth.
                Some(whole().filter(|whole| predicted.bytes.len() > whole.bytes.len() / 8 * 7).unwrap_or(predicted))
            }
            Some(predicted) => Some(predicted),
            None => whole(),
        };
        let Some(stored) = stored else {
            let alone = |bytes| encode(&Bytes::copy_from_slice(bytes), Compression::Auto, Some(FLOAT));
            let others = members().map(|(&chunk, bytes)| StoredForm::of(chunk, alone(bytes), bytes));
            return Self { whole: None, others: others.collect() };
        };
        let id = ChunkId::of(&plain.bytes);
        let offsets = (0..).step_by(len.max(1));
        let part =
            |((&chunk, bytes), offset): ((&ChunkId, &[u8]), u32)| StoredForm::of(chunk, encode_part(id, offset), bytes);
        let others = members().zip(offsets).map(part).collect();
        Self { whole: Some(StoredForm::of(id, stored, &plain.bytes)), others }
    }
}

/// Memory for bundles of a save on so many workers, at most `max`; 0 if that is too little for one.
pub(super) fn bundling_bytes(max: u64, workers: usize) -> u64 {
    let bytes = (BUNDLE_MEMORY * workers as u64).min(max);
    if bytes < BUNDLE_MEMORY { 0 } else { bytes / MIB * MIB }
}

/// Error for a file that changed while the save read it.
pub(super) fn changed_file(walk: &Walk, file: usize) -> Error {
    let path = walk.found.get(file).map(|found| shown(&found.path)).unwrap_or_default();
    Error::conflict("file changed while it was read").at(path).help("save when nothing writes to it")
}
