//! Every byte of the packs: frames decode to their chunks, and between them there is nothing.

use std::ops::Range;
use std::sync::Arc;

use futures::{StreamExt as _, stream};

use super::{Subject, Verifying, is_damage};
use crate::budget::Buffer;
use crate::error::{Error, Result};
use crate::format::{PackFooter, PackRef, TRAILER_LEN, pack_header};
use crate::repository::layout::{self, Family};
use crate::repository::{PackRead, Place, Repository, deliver, longest_read, read_pack};

/// Footers read ahead of the frames.
const AHEAD: usize = 4;

/// What is wrong in a pack: with which chunk, or with what is between chunks.
type Wrong = (Option<u32>, Error);

impl Verifying<'_> {
    pub(super) async fn look_at_frames(&mut self) -> Result<()> {
        let sound: Vec<PackRef> = self.packs.values().filter(|(_, sound)| *sound).map(|(pack, _)| *pack).collect();
        self.options.progress.phase("reading packs", sound.iter().map(|pack| pack.len).sum());
        let (repository, progress) = (self.repository, self.options.progress.clone());
        let longest = longest_read(repository, repository.budget());
        let tiled = stream::iter(sound).map(|pack| async move { (pack, repository.footer_uncached(&pack).await) });
        let reads = tiled.buffered(AHEAD).flat_map(|(pack, footer)| {
            let reads = match footer {
                Ok(footer) => {
                    let footer = Arc::new(footer);
                    let tiles = tiles(&pack, &footer, longest).into_iter();
                    tiles.map(|tile| (pack, Ok((Arc::clone(&footer), tile)))).collect()
                }
                Err(error) => vec![(pack, Err(error))],
            };
            stream::iter(reads)
        });
        let looked = reads.map(|(pack, read)| async move {
            let wrong = match read {
                Ok((footer, tile)) => look(repository, pack, footer, tile).await,
                Err(error) => Err(error),
            };
            (pack, wrong)
        });
        let mut looked = std::pin::pin!(looked.buffer_unordered(repository.parallelism()));
        while let Some((pack, wrong)) = looked.next().await {
            let wrong = match wrong {
                Ok((len, wrong)) => {
                    progress.advance(len);
                    progress.moved(len);
                    wrong
                }
                Err(error) if is_damage(&error) => vec![(None, error)],
                Err(error) => return Err(error),
            };
            self.take_down(pack, wrong);
        }
        Ok(())
    }

    fn take_down(&mut self, pack: PackRef, wrong: Vec<Wrong>) {
        let key = layout::owned(Family::Pack, pack.id);
        for (chunk, error) in wrong {
            match chunk {
                Some(ordinal) => {
                    self.findings.add(Subject::Chunk(pack.id, ordinal), format!("{key}, chunk {ordinal}"), error);
                }
                None => self.findings.add(Subject::Pack(pack.id), key.to_string(), error),
            }
        }
    }
}

/// Reads that cover a pack up to its footer without a gap, each as long as it may be.
fn tiles(pack: &PackRef, footer: &PackFooter, longest: u64) -> Vec<PackRead> {
    let mut tiles: Vec<PackRead> = Vec::new();
    let mut start = 0;
    for (ordinal, entry) in (0u32..).zip(&footer.entries) {
        let end = entry.offset + u64::from(entry.stored_len);
        match tiles.last_mut() {
            Some(last) if end - last.range.start <= longest => {
                last.range.end = end;
                last.chunks.push(ordinal);
            }
            _ => tiles.push(PackRead { pack: pack.id, range: start..end, chunks: vec![ordinal] }),
        }
        start = end;
    }
    let frames_end = pack.len - u64::from(pack.footer_len) - TRAILER_LEN;
    match tiles.last_mut() {
        Some(last) => last.range.end = frames_end,
        None => tiles.push(PackRead { pack: pack.id, range: 0..frames_end, chunks: Vec::new() }),
    }
    tiles
}

/// What is wrong in one tile, if reading it twice says so; and its length.
async fn look(
    repository: &Repository,
    pack: PackRef,
    footer: Arc<PackFooter>,
    tile: PackRead,
) -> Result<(u64, Vec<Wrong>)> {
    let len = tile.range.end - tile.range.start;
    let work = move |tile: &PackRead, buffer: Buffer| inspect(&pack, &footer, tile, &buffer);
    let first = read_pack(repository, repository.budget(), tile.clone(), work.clone()).await?;
    if first.is_empty() {
        return Ok((len, first));
    }
    Ok((len, read_pack(repository, repository.budget(), tile, work).await?))
}

fn inspect(pack: &PackRef, footer: &PackFooter, tile: &PackRead, bytes: &[u8]) -> Result<Vec<Wrong>> {
    let place = |ordinal: u32| {
        let entry = footer.entries.get(ordinal as usize).ok_or_else(|| Error::other("a tile names no chunk"))?;
        let (offset, stored_len, plain_len) = (entry.offset, entry.stored_len, entry.plain_len);
        Ok((entry.id, Place { pack: pack.id, ordinal, offset, stored_len, plain_len, codec: entry.codec }))
    };
    let mut wrong = Vec::new();
    let mut between = 0;
    let header = pack_header();
    if tile.range.start == 0 {
        between = header.len();
        if bytes.get(..between) != Some(header.as_slice()) {
            wrong.push((None, Error::damaged("pack does not start with its header")));
        }
    }
    let mut gaps: Vec<Range<usize>> = Vec::new();
    deliver(tile, bytes, place, |delivered| {
        gaps.push(between..delivered.stored.start);
        between = delivered.stored.end;
        wrong.extend(delivered.chunk.err().map(|error| (Some(delivered.index), error)));
        Ok(())
    })?;
    gaps.push(between..bytes.len());
    let dirty = gaps.into_iter().find(|gap| bytes.get(gap.clone()).is_none_or(|gap| gap.iter().any(|&b| b != 0)));
    wrong.extend(dirty.map(|gap| {
        let at = tile.range.start + gap.start as u64;
        (None, Error::damaged("padding between chunks is not zero").got(format!("at byte {at}")))
    }));
    Ok(wrong)
}
