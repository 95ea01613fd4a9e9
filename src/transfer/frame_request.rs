//! Requests to a peer for chunks of an opened tree.

use std::collections::HashSet;

use super::protocol::limits::BASES_MAX;
use super::protocol::{Runs, Wanted};
use crate::error::Result;
use crate::repository::Saved;

/// Maximum number of chunks in one request: within both the limit of runs and that of bases.
pub(super) const REQUEST_CHUNKS_MAX: usize = BASES_MAX;

/// Request for `chunks`, numbered as by [`Saved::locate`], of which those in `alone` are to come without their bases. Sorts them, so
/// that each is at its ordinal.
///
/// # Errors
/// Damaged, if the map lacks one.
pub(super) fn frame_request(saved: &Saved, chunks: &mut [u32], alone: &HashSet<u32>) -> Result<Wanted> {
    let listed = u32::try_from(saved.manifest.chunks.ids.len()).unwrap_or(u32::MAX);
    chunks.sort_unstable();
    let without = (0..).zip(chunks.iter()).filter(|(_, chunk)| alone.contains(chunk)).map(|(ordinal, _)| ordinal);
    let alone = without.collect::<Runs>();
    let lens = chunks.iter().map(|&chunk| Ok(saved.locate(chunk)?.place.plain_len)).collect::<Result<_>>()?;
    let (places, bases) = chunks.split_at(chunks.partition_point(|&chunk| chunk < listed));
    let bases = bases.iter().map(|&chunk| Ok(saved.locate(chunk)?.id)).collect::<Result<_>>()?;
    Ok(Wanted { chunks: places.iter().copied().collect::<Runs>(), bases, alone, lens })
}
