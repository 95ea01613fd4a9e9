//! Warm: fetch a tree's chunks into the cache before they are needed, and pin them there.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;

use super::requester::Requester;
use crate::cache::{Cache, Hold, Pin, PinChunk, PinLimit, PinRequest, Pinned};
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::name::Name;
use crate::ops::{chunks_below, shown};
use crate::progress::Progress;
use crate::repository::{Repository, Saved, SourceBytes, TravelPlan};
use crate::size::show;
use crate::transfer::exchange::{Exchange, FetchPolicy, is_held};
use crate::transfer::protocol::Priority;
use crate::work::blocking;

/// Maximum number of plans that are made anew: others may fill the cache again and again.
const PLANS_MAX: usize = 3;

/// Options of a warm.
#[derive(Clone, Debug, Default)]
pub struct WarmOptions {
    /// Only this file or folder of the tree, with the chunks that it needs.
    pub below: Option<Vec<u8>>,
    /// Sources of missing chunks, and the priority of the fetch.
    pub policy: FetchPolicy,
    /// Pin to create, if any.
    pub pin: Option<Pinning>,
    /// Limit of what the caller keeps in the cache, by pins and while its warms run; none for this node's own.
    pub limit: Option<PinLimit>,
    /// The tree, if it is open already.
    pub tree: Option<Arc<Saved>>,
    /// Plan of how its chunks come, if it was planned together with other trees.
    pub plan: Option<Arc<TravelPlan>>,
    /// Dry run: only report what is missing, fetch and pin nothing.
    pub dry_run: bool,
    /// Progress, updated as chunks arrive.
    pub progress: Progress,
}

/// Pin of a warmed tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pinning {
    /// Owner.
    pub owner: String,
    /// Expiry, if it expires.
    pub expires: Option<Timestamp>,
    /// Other agent or token that requested it: one that was revoked pins nothing more.
    pub(super) by: Option<Requester>,
}

impl Pinning {
    /// A pin of this node's own.
    #[must_use]
    pub fn new(owner: impl Into<String>, expires: Option<Timestamp>) -> Self {
        Self { owner: owner.into(), expires, by: None }
    }
}

/// Result of a warm or of its dry run. The requested chunks are `hits + fetched + missing`, in bytes as well. `lacking` is
/// `fetched + missing`; in a dry run the requested chunks are `hits + lacking`.
#[derive(Clone, Debug, Serialize)]
pub struct Warmed {
    /// Result of a dry run: nothing was fetched or pinned.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
    /// Name of the tree.
    pub name: Name,
    /// Id of its manifest.
    pub manifest: String,
    /// Requested chunks, including the bases that they need here.
    pub chunks: u64,
    /// Their bytes, as they are kept here.
    pub bytes: u64,
    /// Chunks that were in the cache already.
    pub hits: u64,
    /// Their stored bytes.
    pub hit_bytes: u64,
    /// Chunks that were not in the cache at the start.
    pub lacking: u64,
    /// Their stored bytes.
    pub lacking_bytes: u64,
    /// Missing chunks that are fetched without their bases.
    pub alone: u64,
    /// True if the bytes of some of these are estimates: their save did not record them.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub estimated: bool,
    /// Chunks that were fetched.
    pub fetched: u64,
    /// Their stored bytes.
    pub fetched_bytes: u64,
    /// Chunks that are still missing: no source had them, or the cache is full. 0 in a dry run.
    pub missing: u64,
    /// Their stored bytes.
    pub missing_bytes: u64,
    /// True if the cache is full: missing chunks were not stored, were not requested any more, or were there and have been evicted.
    pub full: bool,
    /// Bytes that the cache is short of for the whole tree. Only a dry run reports it; a warm fails instead.
    pub shortfall_bytes: u64,
    /// Stored bytes fetched, by source. Chunks that a concurrent request fetched are not counted.
    pub sources: SourceBytes,
    /// Id of the pin.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pin: Option<String>,
    /// Duration in seconds.
    pub seconds: f64,
}

/// Fetches the missing chunks of the tree `name` of `repository`, or of a part of it, into the cache of `exchange`. A new pin
/// replaces an earlier one of the same owner for the same reason, and ends no earlier than that would have.
///
/// # Errors
/// Not found, for a missing name or path, or an unknown source; unreachable, if a required source does not answer; exhausted,
/// if the tree does not fit in the cache or cannot be pinned there (nothing is fetched then); damaged or unreachable, as the
/// repository reports. Chunks that no source has are not an error: see [`Warmed::missing`].
///
/// # Cancel safety
/// Safe: fetched chunks stay in the cache and are not fetched again; a pin stays, too.
#[tracing::instrument(skip_all, fields(%name))]
pub async fn warm(exchange: &Exchange, repository: &Repository, name: &Name, options: &WarmOptions) -> Result<Warmed> {
    let (begun, transfer) = (Instant::now(), exchange.begin_transfer());
    options.progress.phase("looking", 0);
    let saved = opened(repository, name, options).await?;
    let mut needs = WarmNeeds::of(exchange, repository, &saved, options, options.plan.clone()).await?;
    if options.dry_run {
        check_limit(exchange, &needs.chunks, options).await?;
        return Ok(Warmed { seconds: begun.elapsed().as_secs_f64(), ..needs.report(name, &saved) });
    }
    if needs.shortfall > 0 && options.pin.is_none() {
        return Err(cache_too_small(exchange.cache(), name, needs.shortfall));
    }
    let mut kept = needs.keep(exchange, &saved, options).await?;
    for _ in 0..PLANS_MAX {
        // Others' chunks may have displaced some since the plan was made. What is there by now is kept.
        if !needs.lost_any(exchange, &saved).await? {
            break;
        }
        let again = async {
            let needs = WarmNeeds::of(exchange, repository, &saved, options, None).await?;
            let kept = needs.keep(exchange, &saved, options).await?;
            Ok::<_, Error>((needs, kept))
        };
        match again.await {
            Ok(again) => (needs, kept) = again,
            Err(error) => {
                tracing::info!("chunks of {name} that were evicted meanwhile are not fetched: {error:?}");
                break;
            }
        }
    }
    options.progress.phase("warming", plain_len(&saved, &needs.lacking));
    let fetched = exchange.warm(repository, &saved, &needs.plan, &options.policy, &options.progress).await;
    exchange.end_transfer(&transfer);
    let left = left_of(exchange, (&saved, &needs.plan), kept.hold).await?;
    let sums = sum(&needs.plan.needed, &needs.chunks, &needs.lacking, &left);
    Ok(Warmed {
        dry_run: false,
        hits: sums.hits.chunks,
        hit_bytes: sums.hits.bytes,
        lacking: sums.fetched.chunks + sums.missing.chunks,
        lacking_bytes: sums.fetched.bytes + sums.missing.bytes,
        fetched: sums.fetched.chunks,
        fetched_bytes: sums.fetched.bytes,
        missing: sums.missing.chunks,
        missing_bytes: sums.missing.bytes,
        full: fetched.full || is_evicted(&left, &needs.lacking),
        sources: fetched.sources,
        pin: kept.pin,
        seconds: begun.elapsed().as_secs_f64(),
        ..needs.report(name, &saved)
    })
}

/// Chunks that a warm needs, and those of them that it fetches.
struct WarmNeeds {
    plan: Arc<TravelPlan>,
    /// Needed chunks, in the order of the plan.
    chunks: Arc<Vec<PinChunk>>,
    lacking: Vec<u32>,
    /// Bytes that the cache is short of for all of them.
    shortfall: u64,
}

/// Pin or hold that keeps the chunks of a warm from being evicted while it runs.
struct Kept {
    /// Id of the pin.
    pin: Option<String>,
    hold: Option<Hold>,
}

impl WarmNeeds {
    /// Needs by `plan`, or by one that is made now.
    async fn of(
        exchange: &Exchange,
        repository: &Repository,
        saved: &Arc<Saved>,
        options: &WarmOptions,
        plan: Option<Arc<TravelPlan>>,
    ) -> Result<Self> {
        let plan = match plan {
            Some(plan) => plan,
            None => planned(exchange, repository, saved, options).await?,
        };
        let lacking = plan.travelling();
        if !lacking.is_empty() {
            exchange.check_reachable(&options.policy).await?;
        }
        let (tree, of_tree) = (Arc::clone(saved), Arc::clone(&plan));
        let chunks = Arc::new(blocking(move || pin_chunks(&tree, &of_tree)).await?);
        let shortfall = if lacking.is_empty() { 0 } else { shortage(exchange, &chunks).await? };
        Ok(Self { plan, chunks, lacking, shortfall })
    }

    /// Pins the chunks, or holds them for as long as the warm runs.
    async fn keep(&self, exchange: &Exchange, saved: &Saved, options: &WarmOptions) -> Result<Kept> {
        let pin = match options.pin.clone() {
            Some(pinning) => Some(pinned(exchange, (&saved.name, &self.chunks), options, pinning).await?),
            None => None,
        };
        Ok(Kept { pin, hold: held(exchange, &self.chunks, options).await? })
    }

    /// True if the cache has lost one of the chunks that it had when the plan was made.
    async fn lost_any(&self, exchange: &Exchange, saved: &Arc<Saved>) -> Result<bool> {
        let (saved, plan, cache) = (Arc::clone(saved), Arc::clone(&self.plan), Arc::clone(exchange.cache()));
        let lacking: BTreeSet<u32> = self.lacking.iter().copied().collect();
        let is_lost = move |chunk: &u32| !lacking.contains(chunk) && is_missing(&saved, *chunk, &cache);
        blocking(move || Ok(plan.needed.iter().any(is_lost))).await
    }

    /// Report of a dry run.
    fn report(&self, name: &Name, saved: &Saved) -> Warmed {
        let before = sum(&self.plan.needed, &self.chunks, &self.lacking, &[]);
        Warmed {
            dry_run: true,
            name: name.clone(),
            manifest: saved.value.manifest.to_string(),
            chunks: self.chunks.len() as u64,
            bytes: before.hits.bytes + before.fetched.bytes,
            hits: before.hits.chunks,
            hit_bytes: before.hits.bytes,
            lacking: before.fetched.chunks,
            lacking_bytes: before.fetched.bytes,
            alone: self.plan.alone.len() as u64,
            estimated: !self.plan.exact,
            fetched: 0,
            fetched_bytes: 0,
            missing: 0,
            missing_bytes: 0,
            full: false,
            shortfall_bytes: self.shortfall,
            sources: SourceBytes::default(),
            pin: None,
            seconds: 0.0,
        }
    }
}

/// The tree to warm.
async fn opened(repository: &Repository, name: &Name, options: &WarmOptions) -> Result<Arc<Saved>> {
    match &options.tree {
        Some(tree) => Ok(Arc::clone(tree)),
        None => Ok(repository.saved(name).await?.shared()),
    }
}

/// Plan of how the chunks of `saved` come.
async fn planned(
    exchange: &Exchange,
    repository: &Repository,
    saved: &Arc<Saved>,
    options: &WarmOptions,
) -> Result<Arc<TravelPlan>> {
    let (tree, below) = (Arc::clone(saved), options.below.clone());
    let wanted = blocking(move || chunks_below(&tree, below.as_deref())).await?;
    let plans = exchange.travel(repository, vec![(Arc::clone(saved), wanted)], &options.policy).await?;
    Ok(Arc::new(plans.into_iter().next().unwrap_or_default()))
}

/// Pins `chunks` of the tree `name`; returns the pin's id.
async fn pinned(
    exchange: &Exchange,
    (name, chunks): (&Name, &Arc<Vec<PinChunk>>),
    options: &WarmOptions,
    pinning: Pinning,
) -> Result<String> {
    let (name, cache, chunks) = (name.clone(), Arc::clone(exchange.cache()), Arc::clone(chunks));
    let (reason, limit) = (reason(&name, options.below.as_deref()), options.limit.clone());
    let _turn = exchange.cache().limit_turn(limit.as_ref()).await;
    let by = pinning.by.clone();
    let make = move || pin((&name, &chunks), reason, &cache, pinning, limit.as_ref());
    let pin = blocking(move || match by {
        Some(by) => by.holding(make),
        None => make(),
    });
    let pin = pin.await?;
    Ok(pin.id.to_string())
}

/// Checks that the pin that is asked for would be within the limit of the caller.
async fn check_limit(exchange: &Exchange, chunks: &Arc<Vec<PinChunk>>, options: &WarmOptions) -> Result<()> {
    let Some(limit) = options.limit.clone().filter(|_| options.pin.is_some()) else { return Ok(()) };
    let (cache, chunks) = (Arc::clone(exchange.cache()), Arc::clone(chunks));
    let _turn = exchange.cache().limit_turn(Some(&limit)).await;
    blocking(move || cache.check_limit(&chunks, &limit)).await
}

/// Keeps `chunks` from being evicted while they are warmed, if there is room for all of them. Pinned ones need no hold, and what is only
/// read once should displace nothing.
async fn held(exchange: &Exchange, chunks: &Arc<Vec<PinChunk>>, options: &WarmOptions) -> Result<Option<Hold>> {
    if options.pin.is_some() || options.policy.priority != Priority::Warm {
        return Ok(None);
    }
    let (cache, chunks) = (Arc::clone(exchange.cache()), Arc::clone(chunks));
    let limit = options.limit.clone();
    let _turn = exchange.cache().limit_turn(limit.as_ref()).await;
    blocking(move || Ok(cache.hold(&chunks, limit.as_ref()))).await
}

/// Needed chunks that the cache lacks at the end of a warm, also such as were there at its start. Then the hold ends.
async fn left_of(
    exchange: &Exchange,
    (saved, plan): (&Arc<Saved>, &Arc<TravelPlan>),
    hold: Option<Hold>,
) -> Result<Vec<u32>> {
    let (saved, plan, cache) = (Arc::clone(saved), Arc::clone(plan), Arc::clone(exchange.cache()));
    blocking(move || {
        let left = plan.needed.iter().copied().filter(|&chunk| is_missing(&saved, chunk, &cache)).collect();
        drop(hold);
        Ok(left)
    })
    .await
}

/// True if one of `left` was in the cache at the start, and so is not one of `lacking`.
fn is_evicted(left: &[u32], lacking: &[u32]) -> bool {
    let lacking: BTreeSet<&u32> = lacking.iter().collect();
    left.iter().any(|chunk| !lacking.contains(chunk))
}

/// Bytes that the cache is short of for `chunks`.
async fn shortage(exchange: &Exchange, chunks: &Arc<Vec<PinChunk>>) -> Result<u64> {
    let (cache, chunks) = (Arc::clone(exchange.cache()), Arc::clone(chunks));
    blocking(move || Ok(cache.shortage(&chunks))).await
}

fn is_missing(saved: &Saved, chunk: u32, cache: &Cache) -> bool {
    saved.locate(chunk).is_ok() && !is_held(cache, saved, chunk)
}

fn plain_len(saved: &Saved, chunks: &[u32]) -> u64 {
    chunks.iter().filter_map(|&chunk| saved.locate(chunk).ok()).map(|located| u64::from(located.place.plain_len)).sum()
}

/// Number of chunks and their stored bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sum {
    chunks: u64,
    bytes: u64,
}

/// Sums of the requested chunks by result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sums {
    hits: Sum,
    fetched: Sum,
    missing: Sum,
}

/// Sums up the `needed` chunks, which are `chunks` in a cache; `before` were missing at the start and `after` at the end. A chunk that
/// was in the cache and has been evicted meanwhile counts as missing.
fn sum(needed: &[u32], chunks: &[PinChunk], before: &[u32], after: &[u32]) -> Sums {
    let (before, after): (BTreeSet<_>, BTreeSet<_>) = (before.iter().collect(), after.iter().collect());
    let mut sums = Sums::default();
    for (number, chunk) in needed.iter().zip(chunks) {
        let sum = match (before.contains(number), after.contains(number)) {
            (_, true) => &mut sums.missing,
            (true, false) => &mut sums.fetched,
            (false, false) => &mut sums.hits,
        };
        sum.chunks += 1;
        sum.bytes += u64::from(chunk.stored_len);
    }
    sums
}

/// Reason of a pin, as `towline pins` shows it.
fn reason(name: &Name, below: Option<&[u8]>) -> String {
    below.map_or_else(|| name.to_string(), |below| format!("{name}:{}", shown(below)))
}

/// Pins `chunks` of the tree `name` for `pinning` within `limit`, replacing the pin of the same owner for the same reason. The later
/// end of both counts.
fn pin(
    (name, chunks): (&Name, &[PinChunk]),
    reason: String,
    cache: &Cache,
    Pinning { owner, expires, by: _ }: Pinning,
    limit: Option<&PinLimit>,
) -> Result<Pin> {
    let before: Vec<Pin> = cache.pins().into_iter().filter(|pin| pin.owner == owner && pin.reason == reason).collect();
    let expires = before.iter().map(|pin| pin.expires).fold(expires, later);
    let request = PinRequest { owner, reason, expires, chunks: chunks.to_vec() };
    match cache.pin_within(request, limit)? {
        Pinned::Kept(pin) => {
            for earlier in before {
                cache.unpin(earlier.id)?;
            }
            Ok(pin)
        }
        Pinned::Lacking { bytes, disk_full } => Err(pin_lacking(name, bytes, disk_full)),
    }
}

/// The later end of two pins; none of them is never.
fn later(one: Option<Timestamp>, other: Option<Timestamp>) -> Option<Timestamp> {
    Some(one?.max(other?))
}

/// Error for a pin of `name` that is `bytes` too large for the cache.
pub(super) fn pin_lacking(name: &Name, bytes: u64, disk_full: bool) -> Error {
    let help = if disk_full {
        "free space on the cache's disk, lower free_floor, or end other pins (towline pins, towline unpin)"
    } else {
        "end other pins (towline pins, towline unpin), or raise the cache's capacity"
    };
    Error::exhausted("pin does not fit into the cache").at(name).expected(format!("{} more", show(bytes))).help(help)
}

/// Chunks of a tree that a cache needs by `plan`, in its order, each with its size there.
///
/// # Errors
/// Damaged, if the map lacks a chunk.
fn pin_chunks(saved: &Saved, plan: &TravelPlan) -> Result<Vec<PinChunk>> {
    let chunk = |&number: &u32| {
        let stored_len = plan.len_of(saved, number)?;
        Ok(PinChunk { id: saved.locate(number)?.id, stored_len })
    };
    plan.needed.iter().map(chunk).collect()
}

/// Plans how all chunks of `trees` come here with the fewest bytes in all.
///
/// # Errors
/// Damaged, if a map lacks a chunk.
///
/// # Cancel safety
/// Safe: it only reads.
pub(super) async fn plan_whole(
    exchange: &Exchange,
    repository: &Repository,
    trees: &[Arc<Saved>],
    policy: &FetchPolicy,
) -> Result<Vec<TravelPlan>> {
    let whole = |saved: &Arc<Saved>| Ok((Arc::clone(saved), chunks_below(saved, None)?));
    let wanted = trees.iter().map(whole).collect::<Result<Vec<_>>>()?;
    exchange.travel(repository, wanted, policy).await
}

/// Chunks that restores of the whole `trees` will need here: for each tree, each with its size in the cache.
///
/// # Errors
/// Damaged, if a map lacks a chunk.
///
/// # Cancel safety
/// Safe: it only reads.
pub(super) async fn needed_chunks(
    exchange: &Exchange,
    repository: &Repository,
    trees: &[Arc<Saved>],
) -> Result<Vec<Vec<PinChunk>>> {
    let plans = plan_whole(exchange, repository, trees, &FetchPolicy::default()).await?;
    let trees = trees.to_vec();
    blocking(move || trees.iter().zip(&plans).map(|(saved, plan)| pin_chunks(saved, plan)).collect()).await
}

/// Error for `cache`, which is `bytes` too small for `name`.
fn cache_too_small(cache: &Cache, name: &Name, bytes: u64) -> Error {
    let (capacity, floor) = (show(cache.stat().capacity), show(cache.free_floor()));
    Error::exhausted("cache is too small for it: nothing was fetched")
        .at(name)
        .got(format!("{} too few: capacity is {capacity}, and free_floor keeps {floor} of the disk free", show(bytes)))
        .help("warm a part of it (NAME:PATH), end pins (towline unpin), raise `capacity` in [cache], free disk space, or lower `free_floor`")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::ChunkId;

    #[test]
    fn what_became_of_chunks_adds_up_to_what_was_asked_for() {
        // 2 was there, and was evicted meanwhile.
        let chunk = |number: u32| PinChunk { id: ChunkId::of(&number.to_le_bytes()), stored_len: 10_u32.pow(number) };
        let chunks: Vec<PinChunk> = (0..5).map(chunk).collect();
        let sums = sum(&[0, 1, 2, 3, 4], &chunks, &[1, 3], &[2, 3]);
        assert_eq!(sums.hits, Sum { chunks: 2, bytes: 10_001 });
        assert_eq!(sums.fetched, Sum { chunks: 1, bytes: 10 });
        assert_eq!(sums.missing, Sum { chunks: 2, bytes: 1_100 });
        assert_eq!(sum(&[], &[], &[], &[]), Sums::default());
    }
}
