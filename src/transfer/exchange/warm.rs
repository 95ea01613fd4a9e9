//! Warming: prefetching many chunks.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::{StreamExt as _, stream};
use tokio::time::{sleep, timeout};

use super::get::{ChunkRequest, levels};
use super::plan::UNIT_LEN;
use super::stats::SourceCounters;
use super::{Exchange, FetchPolicy, From};
use crate::codec::Encoded;
use crate::progress::Progress;
use crate::repository::{Repository, Saved, SourceBytes, TravelPlan};

/// Units that are gathered together. A reader of one of their chunks waits for one such window, not for all.
const WINDOW: u64 = 16 * UNIT_LEN;
/// Concurrent windows: while one ends, the next is in progress.
const WINDOWS: usize = 3;

/// Limits of waiting for the source that a warm must use: time in all, time between two looks, and number of times that it may come
/// back. Others may wait for the place of this warm.
const SOURCE_BACK_MAX: Duration = Duration::from_secs(30);
const SOURCE_BACK_POLL: Duration = Duration::from_secs(1);
const RETURNS_MAX: u32 = 3;

/// Patience with a source that goes away and comes back.
#[derive(Debug, Default)]
struct Patience {
    waited: Duration,
    returns: u32,
}

impl Patience {
    /// Time that is left to wait for the source; none, if it has come back too often, or was waited for too long.
    fn left(&self) -> Option<Duration> {
        let left = SOURCE_BACK_MAX.saturating_sub(self.waited);
        (self.returns <= RETURNS_MAX && !left.is_zero()).then_some(left)
    }
}

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
    /// Fetches the chunks of `plan`, bases first; `progress` moves as they arrive. The log has the reasons of failures. If the source that
    /// must be used is gone, waits half a minute for it to come back.
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
        let mut lacking = [plan.as_stored.as_slice(), &plan.alone].concat();
        let mut patience = Patience::default();
        loop {
            let before = lacking.len();
            let (failed, full) = self.warm_once(&request, &lacking, progress).await;
            let has_sent = failed.len() < before;
            if failed.is_empty() || full || !self.is_worth_another_try(policy, has_sent, &mut patience).await {
                return WarmedChunks { failed, full, sources: counters.read() };
            }
            lacking = failed;
        }
    }

    /// True if the source that must be used lives, and has sent some of what was requested, or has come back: an agent that is
    /// restarted is gone for some seconds.
    async fn is_worth_another_try(&self, policy: &FetchPolicy, has_sent: bool, patience: &mut Patience) -> bool {
        if policy.or_repository || matches!(policy.from, From::Anywhere | From::Repository) {
            return false;
        }
        if self.check_live(policy).await.is_ok() {
            return has_sent;
        }
        patience.returns += 1;
        while let Some(left) = patience.left() {
            let begun = Instant::now();
            sleep(SOURCE_BACK_POLL).await;
            // A source that hangs neither answers nor refuses.
            let reached = timeout(left, self.check_reachable(policy)).await;
            patience.waited += begun.elapsed();
            if reached.is_ok_and(|reached| reached.is_ok()) {
                return true;
            }
        }
        false
    }

    /// Fetches `chunks` from whoever has them now; returns those that did not come, and whether the cache is full.
    async fn warm_once(&self, request: &ChunkRequest<'_>, chunks: &[u32], progress: &Progress) -> (Vec<u32>, bool) {
        let ChunkRequest { saved, alone, .. } = *request;
        let failed = Mutex::new(Vec::new());
        let (full, refused) = (AtomicBool::new(false), self.cache.stat().refusals);
        for level in levels(saved, chunks, alone) {
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
                let lacking = self.get_chunks(request, &window, &mut seen).await;
                if self.cache.stat().refusals > refused && self.lost_any(saved, &window, &lacking) {
                    full.store(true, Ordering::Relaxed);
                }
                failed.lock().unwrap_or_else(PoisonError::into_inner).extend(lacking);
            });
            windows.buffer_unordered(WINDOWS).collect::<()>().await;
        }
        (failed.into_inner().unwrap_or_else(PoisonError::into_inner), full.into_inner())
    }

    /// True if one of `chunks` arrived (is not `lacking`) but is not in the cache.
    fn lost_any(&self, saved: &Saved, chunks: &[u32], lacking: &[u32]) -> bool {
        let lacking: HashSet<&u32> = lacking.iter().collect();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_that_comes_and_goes_is_waited_for_a_few_times_and_not_for_long() {
        let of = |returns, waited| Patience { returns, waited: Duration::from_secs(waited) }.left();
        assert_eq!(of(1, 0), Some(SOURCE_BACK_MAX));
        assert_eq!(of(RETURNS_MAX, 29), Some(Duration::from_secs(1)));
        assert_eq!(of(RETURNS_MAX + 1, 0), None);
        assert_eq!(of(1, 30), None);
        assert_eq!(of(1, 3600), None);
    }
}
