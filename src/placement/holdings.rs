//! Chunks of a closure that each site holds, by the inventories of its agents. Pure.

use std::collections::BTreeMap;

use super::closure::{ChunkBits, Closure};
use crate::clock::Timestamp;
use crate::format::{CacheSpace, Inventory, LinkRate};

/// Chunks of a closure at a site.
#[derive(Clone, Debug)]
pub struct Holding {
    /// Chunks in the cache of one of its agents, or more.
    pub held: ChunkBits,
    /// Those of them that are pinned.
    pub pinned: ChunkBits,
    /// Pinned chunks that no agent of the site has yet.
    pub promised: ChunkBits,
    /// Space of all caches together.
    pub space: CacheSpace,
    /// Agents with an inventory.
    pub agents: usize,
    /// Time of the oldest inventory.
    pub oldest: Timestamp,
    /// Measured links to the site, by where they come from; empty for the repository. Of several agents, the one with the most
    /// measurements counts.
    pub links: BTreeMap<String, LinkRate>,
}

/// Chunks of `closure` in the `inventories`, by site.
#[must_use]
pub fn holdings<'a>(
    closure: &Closure,
    inventories: impl IntoIterator<Item = &'a Inventory>,
) -> BTreeMap<String, Holding> {
    let mut sites: BTreeMap<String, Holding> = BTreeMap::new();
    for inventory in inventories {
        let site = sites.entry(inventory.agent.site().to_owned()).or_insert_with(|| Holding {
            held: closure.none(),
            pinned: closure.none(),
            promised: closure.none(),
            space: CacheSpace::default(),
            agents: 0,
            oldest: inventory.at,
            links: BTreeMap::new(),
        });
        site.held.add(&closure.found_in(&inventory.held));
        site.pinned.add(&closure.found_in(&inventory.pinned));
        site.promised.add(&closure.found_in(&inventory.promised));
        site.space.capacity = site.space.capacity.saturating_add(inventory.space.capacity);
        site.space.used = site.space.used.saturating_add(inventory.space.used);
        site.space.promised = site.space.promised.saturating_add(inventory.space.promised);
        site.agents += 1;
        site.oldest = site.oldest.min(inventory.at);
        for link in &inventory.links {
            // Ties are broken by rate, so that the order of agents does not matter.
            let known = site.links.get(&link.site).map(|known| (known.samples, known.rate));
            if known < Some((link.samples, link.rate)) {
                site.links.insert(link.site.clone(), link.clone());
            }
        }
    }
    for site in sites.values_mut() {
        site.promised.remove(&site.held);
    }
    sites
}
