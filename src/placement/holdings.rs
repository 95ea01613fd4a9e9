//! Chunks of a closure that each site holds, by the inventories of its agents. Pure, but for a memory of sums.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use super::closure::{ChunkBits, Closure, Found};
use super::site_links::SiteLinks;
use crate::clock::Timestamp;
use crate::format::{CacheSpace, Inventory, LinkRate};

/// Maximum number of splits that are remembered: each is some words, and a set of inputs has one a site, mostly.
const SPLITS_MAX: usize = 4096;

/// Chunks of a closure at a site.
#[derive(Clone, Debug)]
pub struct Holding {
    /// Chunks in the cache of one of its agents, or more.
    held: ChunkBits,
    /// Chunks that one of its agents could send: one that has not ended.
    sendable: ChunkBits,
    /// Pinned chunks that no agent of the site has yet.
    promised: ChunkBits,
    /// Stored bytes of them.
    pub held_bytes: u64,
    /// Stored bytes of the pinned ones among them.
    pub pinned_bytes: u64,
    /// Space of all caches together.
    pub space: CacheSpace,
    /// Agents with an inventory.
    pub agents: usize,
    /// Agents that run, as their inventories are recent.
    pub running: usize,
    /// Time of the oldest inventory.
    pub oldest: Timestamp,
    /// Measured links to the site, by where they come from; empty for the repository.
    pub links: BTreeMap<String, LinkRate>,
}

/// Chunks of a closure that an agent has.
#[derive(Clone, Copy, Debug)]
pub struct AgentChunks<'a> {
    /// Its inventory.
    pub inventory: &'a Inventory,
    /// Chunks found in that.
    pub found: &'a Found,
    /// True if the agent runs; else its cache counts for its own site only.
    pub runs: bool,
}

/// Chunks of a job's inputs, and what each site holds of them.
#[derive(Debug)]
pub struct Holdings {
    closure: Arc<Closure>,
    sites: BTreeMap<String, Holding>,
    splits: Mutex<HashMap<SplitKey, Arc<Split>>>,
}

/// Bytes that a site lacks, split by where they come from: each chunk from the first source that has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Split {
    /// Bytes from each source, as they travel.
    pub(super) bytes: Vec<u64>,
    /// Bytes that no source has.
    pub(super) nowhere: u64,
    /// Bytes of all of these that pins of the site expect.
    pub(super) in_flight: u64,
}

/// A source of chunks: the caches of a site, or the repository, which has all.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Source {
    Site(String),
    Repository,
    /// The repository, by agents on whose disk it is.
    RepositoryByAgents,
}

/// The site that lacks chunks, none for one that holds nothing; and the sources, in order.
type SplitKey = (Option<String>, Vec<Source>);

impl Holdings {
    /// Chunks of `closure` in the `inventories` at the time `now`.
    #[must_use]
    pub fn of<'a>(closure: Arc<Closure>, inventories: impl IntoIterator<Item = &'a Inventory>, now: Timestamp) -> Self {
        let found: Vec<(&Inventory, Found)> =
            inventories.into_iter().map(|inventory| (inventory, closure.found(inventory))).collect();
        let agents =
            found.iter().map(|(inventory, found)| AgentChunks { inventory, found, runs: inventory.agent_runs(now) });
        Self::join(closure, agents)
    }

    /// The same, from what was found in each of the inventories.
    #[must_use]
    pub fn join<'a>(closure: Arc<Closure>, agents: impl IntoIterator<Item = AgentChunks<'a>>) -> Self {
        let mut sites: BTreeMap<String, (Holding, [ChunkBits; 2])> = BTreeMap::new();
        let mut links: HashMap<&str, SiteLinks<'_>> = HashMap::new();
        for AgentChunks { inventory, found, runs } in agents {
            let (site, [pinned, promised]) = sites
                .entry(inventory.agent.site().to_owned())
                .or_insert_with(|| (Holding::none(&closure, inventory.at), [closure.none(), closure.none()]));
            site.held.add(&found.held);
            if runs {
                site.sendable.add(&found.held);
                site.running += 1;
            }
            pinned.add(&found.pinned);
            promised.add(&found.promised);
            site.space.capacity = site.space.capacity.saturating_add(inventory.space.capacity);
            site.space.used = site.space.used.saturating_add(inventory.space.used);
            site.space.promised = site.space.promised.saturating_add(inventory.space.promised);
            site.agents += 1;
            site.oldest = site.oldest.min(inventory.at);
            links.entry(inventory.agent.site()).or_default().add(&inventory.links);
        }
        let sites = sites.into_iter().map(|(name, (mut site, [pinned, mut promised]))| {
            let medians = links.remove(name.as_str()).unwrap_or_default().medians();
            site.links = medians.map(|link| (link.site.clone(), link)).collect();
            promised.remove(&site.held);
            site.held_bytes = closure.stored_bytes(&site.held);
            site.pinned_bytes = closure.stored_bytes(&pinned);
            site.promised = promised;
            (name, site)
        });
        Self { sites: sites.collect(), closure, splits: Mutex::default() }
    }

    /// The chunks.
    #[must_use]
    pub fn closure(&self) -> &Closure {
        &self.closure
    }

    /// Chunks at `site`; none: no agent of it has an inventory.
    #[must_use]
    pub fn at(&self, site: &str) -> Option<&Holding> {
        self.sites.get(site)
    }

    /// Sites that can send some of the chunks.
    pub(super) fn senders(&self) -> impl Iterator<Item = &str> {
        self.sites.iter().filter(|(_, site)| !site.sendable.is_empty()).map(|(name, _)| name.as_str())
    }

    /// Splits the chunks that `site` lacks among `sources`. The work of a new combination is linear in the chunks; it is remembered.
    pub(super) fn split(&self, site: &str, sources: Vec<Source>) -> Arc<Split> {
        let own = self
            .sites
            .get_key_value(site)
            .filter(|(_, holding)| holding.held_bytes > 0 || !holding.promised.is_empty());
        let key = (own.map(|(name, _)| name.clone()), sources);
        if let Some(known) = self.splits.lock().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Arc::clone(known);
        }
        let split = Arc::new(self.computed(own.map(|(_, holding)| holding), &key.1));
        let mut splits = self.splits.lock().unwrap_or_else(PoisonError::into_inner);
        if splits.len() >= SPLITS_MAX {
            splits.clear();
        }
        splits.insert(key, Arc::clone(&split));
        split
    }

    fn computed(&self, own: Option<&Holding>, sources: &[Source]) -> Split {
        let mut unread = self.closure.unread_bytes();
        let none = self.closure.none();
        let held = own.map_or(&none, |own| &own.held);
        // Agents send chunks without their bases; a store cannot.
        let mut senders = none.clone();
        for source in sources {
            match (source, self.of_source(source)) {
                (Source::RepositoryByAgents, _) => senders = self.closure.all(),
                (_, Some(holding)) => senders.add(&holding.sendable),
                (_, None) => {}
            }
        }
        let travelling = self.closure.travelling(held, &senders);
        let mut left = travelling.chunks.clone();
        let mut bytes = Vec::with_capacity(sources.len());
        for source in sources {
            let mut taken = left.clone();
            match (source, self.of_source(source)) {
                (Source::Repository | Source::RepositoryByAgents, _) => {}
                (Source::Site(_), Some(holding)) => taken.keep(&holding.sendable),
                (Source::Site(_), None) => taken = none.clone(),
            }
            left.remove(&taken);
            let is_repository = matches!(source, Source::Repository | Source::RepositoryByAgents);
            let of_unread = if is_repository { std::mem::take(&mut unread) } else { 0 };
            bytes.push(self.closure.travelling_bytes(&travelling, &taken) + of_unread);
        }
        let mut promised = travelling.chunks.clone();
        promised.keep(own.map_or(&none, |own| &own.promised));
        Split {
            bytes,
            nowhere: self.closure.travelling_bytes(&travelling, &left) + unread,
            in_flight: self.closure.travelling_bytes(&travelling, &promised),
        }
    }

    /// Chunks of a source that is a site.
    fn of_source(&self, source: &Source) -> Option<&Holding> {
        match source {
            Source::Site(site) => self.sites.get(site),
            Source::Repository | Source::RepositoryByAgents => None,
        }
    }
}

impl Holding {
    fn none(closure: &Closure, at: Timestamp) -> Self {
        Self {
            held: closure.none(),
            sendable: closure.none(),
            held_bytes: 0,
            pinned_bytes: 0,
            promised: closure.none(),
            space: CacheSpace::default(),
            agents: 0,
            running: 0,
            oldest: at,
            links: BTreeMap::new(),
        }
    }
}
