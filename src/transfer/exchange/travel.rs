//! Plans how the chunks of a tree come here: as they are stored, with their bases or without.

use std::collections::HashSet;
use std::sync::Arc;

use super::get::ChunkRequest;
use super::plan::Candidate;
use super::stats::SourceCounters;
use super::{Exchange, FetchPolicy};
use crate::cache::Cache;
use crate::error::Result;
use crate::repository::{FramePlace, Held, Repository, Saved, TravelPlan, plan_travel};
use crate::work::blocking;

impl Exchange {
    /// Plan for those of the chunks `wanted` that are not in the cache, with the fewest bytes: chunks come without their bases where
    /// that is less, and where a peer that holds them sends them so.
    ///
    /// # Errors
    /// Damaged, if the map lacks a chunk.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn travel(
        &self,
        repository: &Repository,
        saved: &Arc<Saved>,
        wanted: Vec<u32>,
        policy: &FetchPolicy,
    ) -> Result<TravelPlan> {
        let (alone, counters) = (HashSet::new(), SourceCounters::default());
        let request =
            ChunkRequest { repository, saved, alone: &alone, policy, through: true, counters: &counters, tenant: None };
        self.plan_travel(&request, wanted).await
    }

    /// As [`Exchange::travel`], for a request.
    pub(super) async fn plan_travel(&self, request: &ChunkRequest<'_>, wanted: Vec<u32>) -> Result<TravelPlan> {
        let wanted = Arc::new(wanted);
        let planned = |senders: Vec<Candidate<Arc<str>>>| {
            let (saved, cache, wanted) = (Arc::clone(request.saved), Arc::clone(&self.cache), Arc::clone(&wanted));
            blocking(move || {
                let may_come_alone = |chunk| senders.iter().any(|sender| sender.held.contains(chunk));
                plan_travel(&saved, &wanted, may_come_alone, |chunk| held(&cache, &saved, chunk))
            })
        };
        let as_stored = planned(Vec::new()).await?;
        if !as_stored.has_bases(&wanted) {
            return Ok(as_stored);
        }
        let (view, peers) = self.view(request, &[]).await;
        let may_ask = |sender: &Candidate<Arc<str>>| {
            let peer = peers.iter().find(|peer| *peer.address() == sender.peer);
            peer.is_some_and(|peer| peer.link().is_ok_and(|link| link.may_ask_alone()))
        };
        planned(view.site.into_iter().chain(view.remote).filter(may_ask).collect()).await
    }

    /// Gets `chunks` of `request` as it is planned that they come, bases that come for them first, and passes each to `place`.
    ///
    /// # Cancel safety
    /// Safe: arrived chunks are in the cache.
    pub(super) async fn get_planned(&self, request: &ChunkRequest<'_>, chunks: &[u32], place: FramePlace<'_>) {
        let mut chunks = chunks.to_vec();
        chunks.sort_unstable();
        let plan = self.plan_travel(request, chunks.clone()).await.unwrap_or_else(|error| {
            tracing::warn!(name = %request.saved.name, "chunks come as they are stored: {error:?}");
            TravelPlan::default()
        });
        chunks.extend(plan.as_stored);
        let alone: HashSet<u32> = plan.alone.into_iter().collect();
        self.get_chunks(&ChunkRequest { alone: &alone, ..*request }, &chunks, place).await;
    }
}

/// State of a chunk in `cache`. Blocks on the disk, for a chunk whose base is missing.
fn held(cache: &Cache, saved: &Saved, chunk: u32) -> Held {
    let Ok(located) = saved.locate(chunk) else { return Held::No };
    if !cache.contains(&located.id) {
        return Held::No;
    }
    match located.base {
        Some(base) if held(cache, saved, base) != Held::Whole && cache.needs_base(&located.id) => Held::WithoutBase,
        _ => Held::Whole,
    }
}
