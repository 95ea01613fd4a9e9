//! Plans how the chunks of trees come here: as they are stored, with their bases or without.

use std::collections::HashSet;
use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::join_all;

use super::get::ChunkRequest;
use super::plan::Candidate;
use super::stats::SourceCounters;
use super::{Exchange, FetchPolicy, warn_about};
use crate::budget::Retained;
use crate::cache::{BaseKey, Cache};
use crate::error::Result;
use crate::fair_turns::FairTurn;
use crate::limits::MIB;
use crate::policy::LocalCaller;
use crate::repository::{FramePlace, Held, Repository, Saved, TRAVEL_WEIGHT, TravelPlan, TravelTree, plan_travel};
use crate::work::blocking;

/// A tree and those of its chunks that are wanted here.
pub type WantedTree = (Arc<Saved>, Vec<u32>);

impl Exchange {
    /// Plan for each of `trees` of the wanted chunks that are not in the cache, with the fewest bytes in all: chunks come without their
    /// bases where that is less, and where a peer that holds them sends them so.
    ///
    /// # Errors
    /// Damaged, if a map lacks a chunk; exhausted, if the trees have too many chunks for the memory.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn travel(
        &self,
        repository: &Repository,
        trees: Vec<WantedTree>,
        policy: &FetchPolicy,
    ) -> Result<Vec<TravelPlan>> {
        self.plan_travel(repository, trees, (policy, true)).await
    }

    /// As [`Exchange::travel`], for a request that may ask agents of the site for chunks that they would have to fetch, or not.
    async fn plan_travel(
        &self,
        repository: &Repository,
        trees: Vec<WantedTree>,
        (policy, through): (&FetchPolicy, bool),
    ) -> Result<Vec<TravelPlan>> {
        let weight: u64 = trees.iter().map(|(_, wanted)| wanted.len() as u64 * TRAVEL_WEIGHT).sum();
        let trees = Arc::new(trees);
        let planned = |senders: Vec<Senders>| {
            let (cache, trees) = (Arc::clone(&self.cache), Arc::clone(&trees));
            async move {
                // A single read has few chunks.
                let turn = if weight >= MIB { Some(self.plan_turn(repository, weight).await?) } else { None };
                let planned = move || {
                    // Held until the plan is made, also if the request is dropped.
                    let _turn = turn;
                    plan(&cache, &trees, &senders)
                };
                blocking(planned).await
            }
        };
        let as_stored = planned(Vec::new()).await?;
        if as_stored.iter().zip(&*trees).all(|(plan, (_, wanted))| !plan.has_bases(wanted)) {
            return Ok(as_stored);
        }
        let ask = |saved| self.senders_of(repository, saved, (policy, through)).boxed();
        // All at once: a peer that is silent delays them once.
        planned(join_all(trees.iter().map(|(saved, _)| ask(saved))).await).await
    }

    /// Turn of a plan that takes `weight` bytes, and its memory.
    async fn plan_turn(&self, repository: &Repository, weight: u64) -> Result<(FairTurn, Retained)> {
        let turn = self.planning.take(repository.caller().and_then(LocalCaller::limited).map(str::to_owned)).await;
        Ok((turn, repository.budget().keep(weight)?))
    }

    /// Peers that hold chunks of `saved` and send them without their bases.
    async fn senders_of(
        &self,
        repository: &Repository,
        saved: &Arc<Saved>,
        (policy, through): (&FetchPolicy, bool),
    ) -> Senders {
        let (alone, counters) = (HashSet::new(), SourceCounters::default());
        let request =
            ChunkRequest { repository, saved, alone: &alone, policy, through, counters: &counters, tenant: None };
        self.senders(&request).await
    }

    /// Peers that hold chunks of a request and send them without their bases.
    async fn senders(&self, request: &ChunkRequest<'_>) -> Senders {
        let (view, peers) = self.view(request, &[]).await;
        let mut senders = Vec::new();
        for sender in view.site.into_iter().chain(view.remote) {
            let peer = peers.iter().find(|peer| *peer.address() == sender.peer);
            if let Some(link) = peer.and_then(|peer| peer.link().ok())
                && link.may_ask_alone().await
            {
                senders.push(sender);
            }
        }
        senders
    }

    /// Gets `chunks` of `request` as it is planned that they come, bases that come for them first; passes each to `place`.
    ///
    /// # Cancel safety
    /// Safe: arrived chunks are in the cache.
    pub(super) async fn get_planned(&self, request: &ChunkRequest<'_>, chunks: &[u32], place: FramePlace<'_>) {
        let mut chunks = chunks.to_vec();
        chunks.sort_unstable();
        let (tree, how) = ((Arc::clone(request.saved), chunks.clone()), (request.policy, request.through));
        let plans = self.plan_travel(request.repository, vec![tree], how).await.unwrap_or_else(|error| {
            warn_about(&request.saved.name, "chunks come as they are stored", &error);
            Vec::new()
        });
        let plan = plans.into_iter().next().unwrap_or_default();
        chunks.extend(plan.as_stored);
        let alone: HashSet<u32> = plan.alone.into_iter().collect();
        self.get_chunks(&ChunkRequest { alone: &alone, ..*request }, &chunks, place).await;
    }
}

/// Peers that send chunks of a tree without their bases.
type Senders = Vec<Candidate<Arc<str>>>;

/// Plan for `trees`, some of whose chunks `senders` send without their bases. Blocks on the disk.
fn plan(cache: &Cache, trees: &[WantedTree], senders: &[Senders]) -> Result<Vec<TravelPlan>> {
    let of_trees: Vec<_> = trees
        .iter()
        .enumerate()
        .map(|(at, (saved, _))| {
            let senders = senders.get(at).map(Vec::as_slice).unwrap_or_default();
            let may_come_alone = move |chunk| senders.iter().any(|sender| sender.held.contains(chunk));
            (may_come_alone, move |chunk| held(cache, saved, chunk))
        })
        .collect();
    let trees = trees.iter().zip(&of_trees).map(|((saved, wanted), (may_come_alone, held))| TravelTree {
        saved,
        wanted,
        may_come_alone,
        held,
    });
    plan_travel(&trees.collect::<Vec<_>>())
}

/// True if `cache` holds a chunk of `saved` in a form that this tree can use. Blocks on the disk.
#[must_use]
pub fn is_held(cache: &Cache, saved: &Saved, chunk: u32) -> bool {
    held(cache, saved, chunk) != Held::No
}

/// State of a chunk in `cache`. Blocks on the disk. A chunk whose base is that of another tree is not held: no pin of this tree would
/// keep that base.
fn held(cache: &Cache, saved: &Saved, chunk: u32) -> Held {
    let Ok(located) = saved.locate(chunk) else { return Held::No };
    let Some(base) = cache.base(&located.id) else { return Held::No };
    if base == BaseKey::NONE {
        return Held::Whole;
    }
    match located.base.and_then(|listed| Some((listed, saved.locate(listed).ok()?.id))) {
        Some((listed, id)) if base == BaseKey::of(Some(&id)) => match held(cache, saved, listed) {
            Held::Whole => Held::Whole,
            Held::No | Held::WithoutBase => Held::WithoutBase,
        },
        _ => Held::No,
    }
}
