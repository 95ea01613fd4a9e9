//! Requests to a peer for chunks of an opened tree.

use super::protocol::limits::BASES_MAX;
use super::protocol::{Runs, Wanted};
use crate::error::Result;
use crate::repository::Saved;

/// Maximum number of chunks in one request: within both the limit of runs and that of bases.
pub(super) const REQUEST_CHUNKS_MAX: usize = BASES_MAX;

/// Request for `chunks`, numbered as by [`Saved::locate`]. Sorts them, so that each is at its ordinal.
///
/// # Errors
/// Damaged, if the map lacks one.
pub(super) fn frame_request(saved: &Saved, chunks: &mut [u32]) -> Result<Wanted> {
    let listed = u32::try_from(saved.manifest.chunks.ids.len()).unwrap_or(u32::MAX);
    chunks.sort_unstable();
    let (places, bases) = chunks.split_at(chunks.partition_point(|&chunk| chunk < listed));
    let bases = bases.iter().map(|&chunk| Ok(saved.locate(chunk)?.id)).collect::<Result<_>>()?;
    Ok(Wanted { chunks: places.iter().copied().collect::<Runs>(), bases })
}
