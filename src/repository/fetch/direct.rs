//! Direct reads: chunks that are stored raw in a local pack, or in the cache, go to their final memory without a buffer in between,
//! and are verified there. The same for every frame of a local pack whose sink decodes and verifies by itself.

use std::collections::HashSet;
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use object_store::GetResultPayload;

use super::deliver::verified_alone;
use super::pack_read::{Located, PackRead};
use super::source::ChunkSource;
use super::{Sink, named};
use crate::blocks::Block;
use crate::chunk::Chunk;
use crate::codec::Codec;
use crate::error::{Error, Result};
use crate::repository::layout::{self, Family};
use crate::repository::{Repository, Saved, objects};
use crate::work::blocking;

/// Reads the chunks of `read` to `sink`; returns their plain bytes. None, with nothing read, if one of them is neither raw nor of a codec
/// that `sink` decodes, the pack is not a local file, or `sink` has no memory for most chunks.
///
/// # Errors
/// Not found, if the pack is gone; damaged; errors of `sink`.
///
/// # Cancel safety
/// Safe: it only reads; `sink` may be called for a moment longer.
pub(super) async fn read_direct(
    repository: &Repository,
    saved: &Saved,
    read: &PackRead,
    sink: &Arc<dyn Sink>,
) -> Result<Option<u64>> {
    let [part] = read.parts.as_slice() else { return Ok(None) };
    if !repository.store().is_local() {
        return Ok(None);
    }
    let Some(chunks) = direct_chunks(saved, read, |codec| sink.fills() && is_direct(codec, &**sink))? else {
        return Ok(None);
    };
    let key = layout::owned(Family::Pack, part.pack);
    let opened = objects::get_range(&**repository.store().objects(), &key, part.range.clone()).await?;
    let GetResultPayload::File(file, path) = opened.payload else { return Ok(None) };
    let (pack, sink) = (OpenPack { file, path }, Arc::clone(sink));
    blocking(move || {
        chunks.iter().try_for_each(|(chunk, located)| pack.deliver(*chunk, located, &*sink))?;
        Ok(Some(chunks.iter().map(|(_, located)| u64::from(located.place.plain_len)).sum()))
    })
    .await
}

/// Result of [`read_near`].
#[derive(Debug, Default)]
pub(super) struct ReadNear {
    /// Chunks that were read.
    pub(super) chunks: HashSet<u32>,
    /// Their plain bytes.
    pub(super) bytes: u64,
}

/// Reads those chunks of `read` to `sink` that `source` has on this machine, if all chunks of `read` are raw, and `sink` has memory for
/// most chunks.
///
/// # Errors
/// Errors of `sink`.
///
/// # Cancel safety
/// As [`read_direct`].
pub(super) async fn read_near(
    source: &Arc<dyn ChunkSource>,
    saved: &Saved,
    read: &PackRead,
    sink: &Arc<dyn Sink>,
) -> Result<ReadNear> {
    let Some(chunks) = direct_chunks(saved, read, |codec| sink.fills() && codec == Codec::Raw)? else {
        return Ok(ReadNear::default());
    };
    let (source, sink) = (Arc::clone(source), Arc::clone(sink));
    blocking(move || {
        let mut near = ReadNear::default();
        for (index, located) in chunks {
            let mut is_there = true;
            let filled = sink.fill(index, located.place.plain_len as usize, &mut |slot| {
                is_there = source.read_raw(&located.id, slot).is_some();
                if is_there { Ok(()) } else { Err(Error::not_found("chunk is not on this machine")) }
            });
            match filled {
                Ok(true) => {
                    near.chunks.insert(index);
                    near.bytes += u64::from(located.place.plain_len);
                }
                Ok(false) => {}
                Err(error) if is_there => return Err(error),
                // The others are probably not there either.
                Err(_) => break,
            }
        }
        Ok(near)
    })
    .await
}

/// Chunks of `read` and their places; none, if one of them has another codec, or is only the base of others.
fn direct_chunks(
    saved: &Saved,
    read: &PackRead,
    is_direct: impl Fn(Codec) -> bool,
) -> Result<Option<Vec<(u32, Located)>>> {
    let mut chunks = Vec::with_capacity(read.chunks.len());
    for planned in &read.chunks {
        let located = saved.locate(planned.chunk)?;
        if !is_direct(located.place.codec) || !planned.wanted {
            return Ok(None);
        }
        chunks.push((planned.chunk, located));
    }
    Ok(Some(chunks))
}

/// True if chunks of `codec` need no buffer.
fn is_direct(codec: Codec, sink: &dyn Sink) -> bool {
    codec == Codec::Raw || !codec.has_base() && sink.takes_stored(codec)
}

/// A local pack.
struct OpenPack {
    file: File,
    path: PathBuf,
}

impl OpenPack {
    fn deliver(&self, index: u32, located: &Located, sink: &dyn Sink) -> Result<()> {
        let (codec, len) = (located.place.codec, located.place.plain_len as usize);
        let offset = located.place.offset;
        if sink.takes_stored(codec) {
            let mut read = |slot: &mut [u8]| objects::read_file(&self.file, &self.path, offset, slot);
            if sink.take_stored(located.stored(index), &mut read)? {
                return Ok(());
            }
        }
        if sink.fill(index, len, &mut |slot| self.read(located, slot).map(drop))? {
            return Ok(());
        }
        let mut block = Block::new(len);
        sink.take(index, self.read(located, &mut block)?)
    }

    /// Reads, decodes and verifies a chunk.
    fn read<'a>(&self, located: &Located, slot: &'a mut [u8]) -> Result<Chunk<'a>> {
        let (codec, offset) = (located.place.codec, located.place.offset);
        if codec == Codec::Raw {
            objects::read_file(&self.file, &self.path, offset, slot)?;
            return Chunk::verify(located.id, slot).map_err(|error| named(&located.place, error));
        }
        let mut frame = Block::new(located.place.stored_len as usize);
        objects::read_file(&self.file, &self.path, offset, &mut frame)?;
        verified_alone(located, &frame, slot)
    }
}
