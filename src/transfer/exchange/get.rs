//! Chunks on request: from the cache, from another task that is fetching them, or by a new fetch.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use tokio::time::{Instant, timeout_at};

use super::in_flight::{Fetch, FetchGuard};
use super::stats::{Source, SourceCounters};
use super::{Exchange, FetchPolicy, From, warn_about};
use crate::codec::{Encoded, HOPS_MAX};
use crate::error::Result;
use crate::limits::MIB;
use crate::repository::{Repository, Saved};
use crate::transfer::ledger::NamedTree;
use crate::work::blocking;

/// Maximum number of retries for chunks that another task was to fetch and did not, or that the cache did not keep.
const ROUNDS: usize = 4;
/// Maximum number of bytes for one read of the cache.
const READ_MAX: u64 = 4 * MIB;
/// Maximum length of a chain of bases, with the chunk that needs them.
const LEVELS: usize = HOPS_MAX as usize + 1;

/// Request for chunks of a tree.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChunkRequest<'a> {
    pub(super) repository: &'a Repository,
    pub(super) saved: &'a Arc<Saved>,
    /// Chunks that come, and are kept, without the base that they are stored with.
    pub(super) alone: &'a HashSet<u32>,
    pub(super) policy: &'a FetchPolicy,
    /// True if agents of the site may be asked to fetch it. False for requests of such an agent, which could go in
    /// circles.
    pub(super) through: bool,
    /// Counter of the bytes that arrive for it.
    pub(super) counters: &'a SourceCounters,
    /// Tenant that it counts for in the cache; filled in as it begins.
    pub(super) tenant: Option<&'a str>,
}

impl Exchange {
    /// Gets `chunks`, and passes each to `place` as it arrives; bases first. Returns those that did not arrive.
    ///
    /// # Cancel safety
    /// Safe: arrived chunks are in the cache, and other tasks take over the fetches that they wait for.
    pub(super) async fn get_chunks(
        &self,
        request: &ChunkRequest<'_>,
        chunks: &[u32],
        place: &mut (dyn FnMut(u32, &Encoded) + Send),
    ) -> Vec<u32> {
        let tenant = self.tenant_of(request).await;
        let request = &ChunkRequest { tenant: tenant.as_deref(), ..*request };
        let mut lacking = Vec::new();
        for level in levels(request.saved, chunks, request.alone) {
            match self.get_level(request, level, place).await {
                Ok(left) => lacking.extend(left),
                Err(error) => warn_about(&request.saved.name, "cannot get chunks", &error),
            }
        }
        lacking
    }

    /// Gets chunks none of which is a base of another.
    async fn get_level(
        &self,
        request: &ChunkRequest<'_>,
        chunks: Vec<u32>,
        place: &mut (dyn FnMut(u32, &Encoded) + Send),
    ) -> Result<Vec<u32>> {
        let (mut wanted, mut failed) = (chunks, Vec::new());
        for _ in 0..ROUNDS {
            wanted = self.find_in_cache(request, wanted, place).await?;
            let named_source = request.policy.from != From::Anywhere;
            let (mut mine, mut in_flight, mut waits) = (Vec::new(), HashMap::<u32, FetchGuard>::new(), Vec::new());
            for &chunk in &wanted {
                let id = request.saved.locate(chunk)?.id;
                match self.in_flight.begin(id, named_source) {
                    // Arrived between the lookup and now.
                    Ok(_) if self.cache.contains(&id) => {}
                    Ok(flight) => {
                        mine.push(chunk);
                        in_flight.insert(chunk, flight);
                    }
                    Err(wait) => waits.push(wait),
                }
            }
            let begun: HashSet<u32> = mine.iter().copied().collect();
            if !mine.is_empty() {
                // The chunk is in the cache by then, so its waiters need not wait for the rest.
                let mut placed = |chunk: u32, encoded: &Encoded| {
                    place(chunk, encoded);
                    in_flight.remove(&chunk);
                };
                failed.extend(self.fetch_missing(request, mine, &mut placed).await?);
            }
            drop(in_flight);
            wanted.retain(|chunk| !begun.contains(chunk));
            if wanted.is_empty() {
                return Ok(failed);
            }
            if self.ended_in_time(request, &wanted, waits).await {
                continue;
            }
            // Too slow: this request fetches them itself.
            let late = self.find_in_cache(request, wanted, place).await?;
            failed.extend(self.fetch_missing(request, late, place).await?);
            return Ok(failed);
        }
        failed.extend(wanted);
        Ok(failed)
    }

    /// Waits for the fetches of others that bring `chunks`. False if one of them, whose source was named, is too slow for a request that
    /// may take any source. Fetches from any source end by their own time limits.
    async fn ended_in_time(&self, request: &ChunkRequest<'_>, chunks: &[u32], fetches: Vec<Fetch>) -> bool {
        let limit = Instant::now() + self.patience(request, chunks);
        for Fetch { done, named_source } in fetches {
            if !named_source || request.policy.from != From::Anywhere {
                done.cancelled().await;
            } else if timeout_at(limit, done.cancelled()).await.is_err() {
                return false;
            }
        }
        true
    }

    /// Counts bytes that arrived for `request`.
    pub(super) fn count(&self, request: &ChunkRequest<'_>, from: Source, bytes: u64) {
        self.counts.from.add(from, bytes);
        request.counters.add(from, bytes);
    }

    /// Counts a read of `bytes` from the repository.
    pub(super) fn count_read(&self, request: &ChunkRequest<'_>, bytes: u64) {
        self.count(request, Source::Repository, bytes);
        let tree = NamedTree { repository: request.repository.id(), name: request.saved.name.clone() };
        self.peers.ledger().read(tree, bytes);
    }

    /// Hands over cached chunks; returns the others.
    async fn find_in_cache(
        &self,
        request: &ChunkRequest<'_>,
        chunks: Vec<u32>,
        place: &mut (dyn FnMut(u32, &Encoded) + Send),
    ) -> Result<Vec<u32>> {
        let saved = request.saved;
        let mut lacking = Vec::new();
        let mut rest = chunks.as_slice();
        while !rest.is_empty() {
            let (mut some, mut bytes, mut taken) = (Vec::new(), 0, 0);
            for &chunk in rest {
                let footprint = self.cache.footprint(&saved.locate(chunk)?.id);
                if !some.is_empty() && bytes + footprint.unwrap_or(0) > READ_MAX {
                    break;
                }
                taken += 1;
                match footprint {
                    Some(footprint) => {
                        bytes += footprint;
                        some.push(chunk);
                    }
                    None => lacking.push(chunk),
                }
            }
            rest = &rest[taken..];
            if some.is_empty() {
                continue;
            }
            let _memory = self.budget.carve(bytes).await?;
            let (verifier, tree, looked) = (self.verifier.clone(), Arc::clone(saved), some.clone());
            let found = blocking(move || verifier.find(&tree, &looked)).await?;
            let mut there = HashSet::with_capacity(found.len());
            for (chunk, frame) in found {
                self.count(request, Source::Cache, frame.bytes().len() as u64);
                place(chunk, &frame.encoded());
                there.insert(chunk);
            }
            lacking.extend(some.into_iter().filter(|chunk| !there.contains(chunk)));
        }
        Ok(lacking)
    }
}

/// Chunks by the number of chunks that they need: those that need none, as those in `alone`, first. Leaves out those that the map
/// lacks.
pub(super) fn levels(saved: &Saved, chunks: &[u32], alone: &HashSet<u32>) -> Vec<Vec<u32>> {
    let mut levels = vec![Vec::new(); LEVELS];
    let mut seen = HashSet::with_capacity(chunks.len());
    for &chunk in chunks.iter().filter(|chunk| seen.insert(**chunk)) {
        let (mut hops, mut next) = (0, saved.locate(chunk).ok().filter(|_| !alone.contains(&chunk)));
        while let Some(base) = next.and_then(|located| located.base).filter(|_| hops + 1 < LEVELS) {
            hops += 1;
            next = saved.locate(base).ok();
        }
        if let Some(level) = levels.get_mut(hops).filter(|_| saved.locate(chunk).is_ok()) {
            level.push(chunk);
        }
    }
    levels.retain(|level| !level.is_empty());
    // Chunks with the same base follow each other, so that it is decoded once.
    let base = |chunk: u32| saved.locate(chunk).ok().and_then(|located| located.base);
    for level in levels.iter_mut().skip(1) {
        level.sort_by_key(|&chunk| (base(chunk), chunk));
    }
    levels
}
