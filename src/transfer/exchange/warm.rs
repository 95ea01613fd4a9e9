//! Warming: prefetching many chunks.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use futures::{StreamExt as _, stream};

use super::get::{ChunkRequest, levels};
use super::plan::UNIT_LEN;
use super::stats::SourceCounters;
use super::{Exchange, FetchPolicy};
use crate::codec::Encoded;
use crate::progress::Progress;
use crate::repository::{Repository, Saved, SourceBytes, TravelPlan};

/// Units that are gathered together. A reader of one of their chunks waits for one such window, not for all.
const WINDOW: u64 = 16 * UNIT_LEN;
/// Concurrent windows: while one ends, the next is in progress.
const WINDOWS: usize = 3;

/// Result of warming chunks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WarmedChunks {
    /// Chunks that did not arrive.
    pub failed: Vec<u32>,
    /// The cache refused chunks for lack of space, so the rest was not read.
    pub full: bool,
    /// Moved stored bytes, by source, except those of chunks that another request fetched at the same time.
    pub sources: SourceBytes,
}

impl Exchange {
    /// Fetches the chunks of `plan`, bases first; `progress` moves as they arrive. The log has the reasons of failures.
    ///
    /// # Cancel safety
    /// Safe: arrived chunks are kept.
    pub async fn warm(
        &self,
        repository: &Repository,
        saved: &Arc<Saved>,
        plan: &TravelPlan,
        policy: &FetchPolicy,
        progress: &Progress,
    ) -> WarmedChunks {
        let counters = SourceCounters::default();
        let alone: HashSet<u32> = plan.alone.iter().copied().collect();
        let request =
            ChunkRequest { repository, saved, alone: &alone, policy, through: true, counters: &counters, tenant: None };
        let chunks = [plan.as_stored.as_slice(), &plan.alone].concat();
        let failed = Mutex::new(Vec::new());
        let (full, refused) = (AtomicBool::new(false), self.cache.stat().refusals);
        for level in levels(saved, &chunks, &alone) {
            let windows = stream::iter(windows(saved, level)).map(|window| async {
                let window = window;
                if full.load(Ordering::Relaxed) {
                    failed.lock().unwrap_or_else(PoisonError::into_inner).extend(window);
                    return;
                }
                let mut seen = |chunk: u32, encoded: &Encoded| {
                    progress.moved(encoded.bytes.len() as u64);
                    progress.advance(saved.locate(chunk).map_or(0, |located| located.place.plain_len.into()));
                };
                let lacking = self.get_chunks(&request, &window, &mut seen).await;
                if self.cache.stat().refusals > refused && self.lost_any(saved, &window, &lacking) {
                    full.store(true, Ordering::Relaxed);
                }
                failed.lock().unwrap_or_else(PoisonError::into_inner).extend(lacking);
            });
            windows.buffer_unordered(WINDOWS).collect::<()>().await;
        }
        let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
        WarmedChunks { failed, full: full.into_inner(), sources: counters.read() }
    }

    /// True if one of `chunks` arrived (is not `lacking`) but is not in the cache.
    fn lost_any(&self, saved: &Saved, chunks: &[u32], lacking: &[u32]) -> bool {
        let came = chunks.iter().filter(|chunk| !lacking.contains(chunk));
        came.filter_map(|&chunk| saved.locate(chunk).ok()).any(|located| !self.cache.contains(&located.id))
    }
}

/// The chunks in the order of packs, some units at a time.
fn windows(saved: &Saved, mut chunks: Vec<u32>) -> Vec<Vec<u32>> {
    chunks.sort_by_cached_key(|&chunk| {
        saved.locate(chunk).ok().map(|located| (located.place.pack, located.place.offset))
    });
    let mut windows: Vec<Vec<u32>> = Vec::new();
    let mut left = 0;
    for chunk in chunks {
        let len = saved.locate(chunk).map_or(0, |located| u64::from(located.place.stored_len));
        match windows.last_mut().filter(|_| left >= len) {
            Some(window) => window.push(chunk),
            None => {
                windows.push(vec![chunk]);
                left = WINDOW;
            }
        }
        left = left.saturating_sub(len);
    }
    windows
}
