//! Inventories: the agent regularly publishes what its cache holds, for hints.
//!
//! A small head says how the sets of chunks changed since a larger object, the base, which is written anew once the changes are
//! many.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval_at, timeout};

use super::state::AgentState;
use crate::cache::{Cache, CacheListing};
use crate::error::{Error, ErrorKind, Result};
use crate::format::{
    BaseSet, CacheSpace, ChangedSet, INVENTORY_SETS, InventoryHead, KEYS_MAX, KeySet, Patch, SignedBytes, encode_base,
};
use crate::repository::Repository;
use crate::transfer::identity::{Context, Credentials};
use crate::transfer::inventories::published_links;
use crate::work::blocking;

/// Changes of a set from which a new base is written, if they are also [`CHANGED_PART`] of it.
const CHANGES_MAX: u64 = 4096;
/// Share of a set that may have changed: one part in this many.
const CHANGED_PART: u64 = 16;
/// Time after which an unchanged inventory is published again, so that it does not seem old.
const UNCHANGED_EVERY: Duration = Duration::from_mins(10);
/// Time from the start to the first inventory: whoever runs an agent for seconds needs none.
const FIRST_AFTER: Duration = Duration::from_secs(15);
/// Time without further tries after the store has refused one.
const REFUSED_FOR: Duration = Duration::from_hours(1);

/// Time for the last inventory of an agent that ends.
const LAST_WITHIN: Duration = Duration::from_secs(3);

/// Publishes the inventory of `state`'s cache in its repositories every `every`, and once more when the agent leaves.
///
/// # Cancel safety
/// Safe: a base that no head names is overwritten by a later one.
pub(super) async fn run(state: Arc<AgentState>, every: Duration) {
    let (Ok(exchange), Ok(credentials)) = (state.exchange(), state.credentials()) else { return };
    if let Some(first) = state.stores().first() {
        match published_links(first, credentials).await {
            Ok(links) => exchange.restore_link_rates(&links),
            Err(error) => tracing::info!("rates of links are measured anew: {error:?}"),
        }
    }
    let mut places: Vec<Place> = state.stores().iter().cloned().map(Place::new).collect();
    let mut ticks = interval_at(Instant::now() + every.min(FIRST_AFTER), every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while state.leaving.run_until_cancelled(ticks.tick()).await.is_some() {
        publish_in(&mut places, &state).await;
    }
    if timeout(LAST_WITHIN, publish_in(&mut places, &state)).await.is_err() {
        tracing::info!("inventory since the last one is not published: the store does not answer in time");
    }
}

async fn publish_in(places: &mut [Place], state: &AgentState) {
    for place in places {
        place.publish_unless_refused(state).await;
    }
}

/// Inventory in one repository.
struct Place {
    repository: Repository,
    sequence: u64,
    /// Bases of the sets, in the order of the head.
    bases: [Base; 3],
    /// Last head, and when it was published.
    published: Option<(InventoryHead, Instant)>,
    refused: Option<Instant>,
}

#[derive(Clone, Default)]
struct Base {
    stored: Option<BaseSet>,
    set: Arc<KeySet>,
}

impl Place {
    fn new(repository: Repository) -> Self {
        Self { repository, sequence: 0, bases: Default::default(), published: None, refused: None }
    }

    async fn publish_unless_refused(&mut self, state: &AgentState) {
        if self.refused.is_some_and(|since| since.elapsed() < REFUSED_FOR) {
            return;
        }
        self.refused = None;
        match self.publish(state).await {
            Ok(()) => {}
            Err(error) if matches!(error.kind(), ErrorKind::Denied | ErrorKind::Unsupported) => {
                let at = self.repository.store().location();
                tracing::warn!("inventory is not published at {at}, tried again in an hour: {error:?}");
                self.refused = Some(Instant::now());
            }
            Err(error) => tracing::warn!("inventory is not published: {error:?}"),
        }
    }

    /// Publishes what the cache holds, if it changed.
    async fn publish(&mut self, state: &AgentState) -> Result<()> {
        let (cache, credentials, links) = (state.cache()?, state.credentials()?, state.exchange()?.link_rates());
        let (listed, space) = listed(&cache, &self.repository).await?;
        let mut sets = Vec::with_capacity(3);
        for ((set, base), keys) in INVENTORY_SETS.into_iter().zip(&mut self.bases).zip(listed) {
            sets.push(changed_set(&self.repository, credentials, (set, base), keys).await?);
        }
        let sets: [ChangedSet; 3] = sets.try_into().map_err(|_| Error::other("an inventory has three sets"))?;
        let [held, pinned, promised] = sets;
        let now = self.repository.clock().now();
        // After a restart, it must be above that of before; the time is.
        self.sequence = u64::try_from(now.0 / 1_000_000).unwrap_or(0).max(self.sequence + 1);
        let repository = self.repository.id();
        let sequence = self.sequence;
        let head = InventoryHead { repository, sequence, at: now, space, held, pinned, promised, links };
        if self.published.as_ref().is_some_and(|(last, at)| same(last, &head) && at.elapsed() < UNCHANGED_EVERY) {
            return Ok(());
        }
        let bytes = head.encode();
        let signature = credentials.sign(Context::Inventory, &bytes)?.encode()?;
        let identity = credentials.identity();
        let signed = SignedBytes { bytes, signature };
        self.repository.put_inventory(&identity, &signed.encode()).await?;
        self.published = Some((head, Instant::now()));
        Ok(())
    }
}

/// True if two heads say the same, but for the time, and for rates of links without new measurements: the spread grows with time.
fn same(one: &InventoryHead, other: &InventoryHead) -> bool {
    let counts = |head: &InventoryHead| -> Vec<_> {
        head.links.iter().map(|link| (link.site.clone(), link.samples, link.outcomes)).collect()
    };
    let InventoryHead { sequence, at, links, .. } = one;
    counts(one) == counts(other)
        && InventoryHead { sequence: *sequence, at: *at, links: links.clone(), ..other.clone() } == *one
}

/// Keys of the three sets, ascending, and the cache's space.
async fn listed(cache: &Arc<Cache>, repository: &Repository) -> Result<([Vec<u64>; 3], CacheSpace)> {
    let stat = cache.stat();
    if stat.chunks > KEYS_MAX {
        return Err(Error::unsupported("cache has too many chunks for an inventory")
            .expected(format!("at most {KEYS_MAX}"))
            .got(stat.chunks));
    }
    // The listing, and the set that is made of it.
    let _kept = repository.budget().keep(stat.chunks * 2 * size_of::<u64>() as u64)?;
    let listing = blocking({
        let cache = Arc::clone(cache);
        move || Ok(cache.listing())
    });
    let CacheListing { held, pinned, promised } = listing.await?;
    let space = CacheSpace { capacity: stat.capacity, used: stat.bytes, promised: stat.promised_bytes };
    Ok(([held, pinned, promised], space))
}

/// The set `name` of `keys` as a change of `base`. If the changes are many, the set is stored in the other slot and becomes the base.
async fn changed_set(
    repository: &Repository,
    credentials: &Credentials,
    (name, base): (&str, &mut Base),
    keys: Vec<u64>,
) -> Result<ChangedSet> {
    let before = Arc::clone(&base.set);
    let (patch, keys) = blocking(move || Ok((before.changes_to(&keys), keys))).await?;
    if patch.len() <= CHANGES_MAX.max(base.set.len() / CHANGED_PART) {
        return Ok(ChangedSet { base: base.stored, patch });
    }
    let (set, body) = blocking(move || {
        let set = KeySet::of(keys);
        let body = encode_base(&set);
        Ok((set, body))
    })
    .await?;
    let slot = base.stored.is_some_and(|stored| !stored.slot);
    repository.put_inventory_set(&credentials.identity(), name, slot, &body).await?;
    let stored = BaseSet { slot, digest: *blake3::hash(&body).as_bytes() };
    *base = Base { stored: Some(stored), set: Arc::new(set) };
    Ok(ChangedSet { base: base.stored, patch: Patch::default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Timestamp;
    use crate::format::LinkRate;
    use crate::id::RepositoryId;

    #[test]
    fn new_measurements_of_a_link_are_news() {
        let link = |samples, outcomes, spread| LinkRate { spread, samples, outcomes, ..LinkRate::default() };
        let head = |at, link| InventoryHead {
            repository: RepositoryId::from_bytes([1; 16]),
            sequence: 1,
            at: Timestamp(at),
            space: CacheSpace::default(),
            held: ChangedSet::default(),
            pinned: ChangedSet::default(),
            promised: ChangedSet::default(),
            links: vec![link],
        };
        let before = head(1, link(3, 2, 140));
        assert!(same(&before, &head(2, link(3, 2, 150))));
        assert!(!same(&before, &head(2, link(4, 2, 140))));
        assert!(!same(&before, &head(2, link(3, 3, 140))));
    }
}
