//! Chunks of the inputs that were asked for lately, and what each site holds of them, kept up to date as inventories arrive.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;

use crate::budget::{Budget, Retained};
use crate::clock::Timestamp;
use crate::error::Result;
use crate::id::MapKey;
use crate::name::Name;
use crate::placement::{AgentChunks, Closure, ClosureBuilder, Found, Holdings};
use crate::policy::LocalCaller;
use crate::repository::Repository;
use crate::repository::log::{RefValue, State};
use crate::single_flight::SingleFlight;
use crate::transfer::inventories::Counted;
use crate::work::blocking;

/// Sets of inputs that are remembered.
const KNOWN_MAX: usize = 64;
/// Sets of inputs that are read at a time, in each lane.
const READING_MAX: usize = 1;
/// Sets of inputs that are read or wait for it, in each lane. Further ones are not begun before one of them is done.
const PENDING_MAX: usize = 8;
/// Time that an epoch takes at most for the inputs that are known. The rest is computed when it is asked for.
const UPDATE_MAX: Duration = Duration::from_secs(2);

/// Maps of the trees, ascending, each once, and the caller on whose behalf they are read.
type InputsKey = (Vec<MapKey>, Option<LocalCaller>, Lane);

/// Requesters whose inputs wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Lane {
    /// User of the advisor.
    Own,
    /// Other agents, tokens and pods: they must not make the user wait.
    Others,
}

/// Capacity of a lane.
#[derive(Debug)]
struct LaneSlots {
    pending: Arc<Semaphore>,
    reading: Arc<Semaphore>,
}

impl Default for LaneSlots {
    fn default() -> Self {
        Self { pending: Arc::new(Semaphore::new(PENDING_MAX)), reading: Arc::new(Semaphore::new(READING_MAX)) }
    }
}

/// Inputs that were asked for lately.
#[derive(Debug)]
pub(super) struct KnownInputs {
    budget: Budget,
    /// The latest first.
    known: Mutex<Vec<Arc<Known>>>,
    reading: SingleFlight<InputsKey, Arc<Known>>,
    own: LaneSlots,
    others: LaneSlots,
}

/// Inventories at a time.
#[derive(Clone, Copy, Debug)]
pub(super) struct InventoriesAt<'a> {
    pub(super) inventories: &'a [Arc<Counted>],
    pub(super) at: Timestamp,
}

/// Chunks found in an inventory.
#[derive(Clone, Debug)]
struct FoundIn {
    inventory: Arc<Counted>,
    found: Arc<Found>,
    /// True if its agent ran then.
    runs: bool,
}

/// Trees, and what sites hold of their chunks by some inventories.
#[derive(Debug)]
struct Known {
    trees: Vec<MapKey>,
    closure: Arc<Closure>,
    found: Vec<FoundIn>,
    holdings: Arc<Holdings>,
    kept: Option<Retained>,
}

impl KnownInputs {
    pub(super) fn new(repository: &Repository) -> Self {
        Self {
            budget: repository.budget().clone(),
            known: Mutex::default(),
            reading: SingleFlight::default(),
            own: LaneSlots::default(),
            others: LaneSlots::default(),
        }
    }

    /// Sites that hold chunks of `trees`, by the inventories. Nothing is begun for a caller that goes away before there is a slot.
    ///
    /// # Errors
    /// As [`Repository::saved_as`]; exhausted, if they take more memory than there is.
    ///
    /// # Cancel safety
    /// Safe: work that has begun continues.
    pub(super) async fn holdings(
        self: &Arc<Self>,
        told: InventoriesAt<'_>,
        reader: &Repository,
        mut trees: Vec<(Name, RefValue)>,
        lane: Lane,
    ) -> Result<Arc<Holdings>> {
        trees.sort_unstable_by_key(|(_, value)| value.map_key);
        trees.dedup_by_key(|(_, value)| value.map_key);
        let maps: Vec<MapKey> = trees.iter().map(|(_, value)| value.map_key).collect();
        if let Some(known) = self.find(&maps, told) {
            return Ok(Arc::clone(&known.holdings));
        }
        let slots = if lane == Lane::Own { &self.own } else { &self.others };
        let pending = Arc::clone(&slots.pending).acquire_owned().await;
        let reading = Arc::clone(&slots.reading);
        let key = (maps.clone(), reader.caller().cloned(), lane);
        let (own, reader, inventories, at) = (Arc::clone(self), reader.clone(), told.inventories.to_vec(), told.at);
        let read = || async move {
            let (_pending, _reading) = (pending, reading.acquire_owned().await);
            let before = own.closure(&maps);
            let closure = match before {
                Some(closure) => closure,
                None => Arc::new(closure_of(&reader, trees).await?),
            };
            own.add(maps, closure, InventoriesAt { inventories: &inventories, at }).await
        };
        Ok(Arc::clone(&self.reading.get(&key, read).await?.holdings))
    }

    /// Computes anew what the inventories change, for all inputs that are still saved.
    ///
    /// # Cancel safety
    /// Safe: the rest is computed when it is asked for.
    pub(super) async fn update(&self, told: InventoriesAt<'_>, log: &State) {
        let current: BTreeSet<MapKey> = log.refs.values().map(|value| value.map_key).collect();
        self.lock().retain(|known| known.trees.iter().all(|tree| current.contains(tree)));
        let outdated: Vec<Arc<Known>> = self.lock().iter().filter(|known| !known.is_of(told)).cloned().collect();
        let begun = Instant::now();
        for known in outdated {
            if begun.elapsed() > UPDATE_MAX {
                return;
            }
            if let Err(error) = self.add(known.trees.clone(), Arc::clone(&known.closure), told).await {
                tracing::warn!("holdings of inputs are not kept up to date: {error:?}");
            }
        }
    }

    /// Maps of the trees that were asked for lately, the latest first.
    pub(super) fn trees(&self) -> Vec<MapKey> {
        self.lock().iter().flat_map(|known| known.trees.iter().copied()).collect()
    }

    fn find(&self, trees: &[MapKey], told: InventoriesAt<'_>) -> Option<Arc<Known>> {
        let mut all = self.lock();
        let at = all.iter().position(|known| known.trees == trees && known.is_of(told))?;
        let found = all.remove(at);
        all.insert(0, Arc::clone(&found));
        Some(found)
    }

    fn closure(&self, trees: &[MapKey]) -> Option<Arc<Closure>> {
        self.lock().iter().find(|known| known.trees == trees).map(|known| Arc::clone(&known.closure))
    }

    /// Computes what sites hold of `closure`, and remembers it. Inputs that were not asked for lately are dropped if the memory is short.
    async fn add(&self, trees: Vec<MapKey>, closure: Arc<Closure>, told: InventoriesAt<'_>) -> Result<Arc<Known>> {
        let before = self.lock().iter().find(|known| known.trees == trees).cloned();
        let weight = closure.weight_with(told.inventories.len());
        let (inventories, at) = (told.inventories.to_vec(), told.at);
        let computed = blocking(move || {
            let found = inventories.into_iter().map(|inventory| {
                let mut old = before.iter().flat_map(|known| &known.found);
                let same = old.find(|old| Arc::ptr_eq(&old.inventory, &inventory)).map(|old| Arc::clone(&old.found));
                let found = same.unwrap_or_else(|| Arc::new(closure.found(&inventory)));
                FoundIn { found, runs: inventory.agent_runs(at), inventory }
            });
            let found: Vec<FoundIn> = found.collect();
            let agents =
                found.iter().map(|of| AgentChunks { inventory: &of.inventory, found: &of.found, runs: of.runs });
            let holdings = Holdings::join(Arc::clone(&closure), agents);
            Ok((closure, found, Arc::new(holdings)))
        });
        let (closure, found, holdings) = computed.await?;
        let kept = self.keep(&trees, weight);
        let known = Arc::new(Known { trees, closure, found, holdings, kept });
        if known.kept.is_some() {
            let mut all = self.lock();
            all.insert(0, Arc::clone(&known));
            all.truncate(KNOWN_MAX);
        }
        Ok(known)
    }

    /// Memory for inputs of `weight` bytes, taken from those that were not asked for lately; none if it is still too little.
    fn keep(&self, trees: &[MapKey], weight: u64) -> Option<Retained> {
        let mut all = self.lock();
        all.retain(|known| known.trees != trees);
        loop {
            match self.budget.keep(weight) {
                Ok(kept) => return Some(kept),
                Err(error) if all.pop().is_none() => {
                    tracing::warn!("inputs of a hint are not remembered: {error}");
                    return None;
                }
                Err(_) => {}
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Arc<Known>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn is_of(&self, told: InventoriesAt<'_>) -> bool {
        let same = |of: &FoundIn, inventory: &Arc<Counted>| {
            Arc::ptr_eq(&of.inventory, inventory) && of.runs == inventory.agent_runs(told.at)
        };
        self.found.len() == told.inventories.len()
            && self.found.iter().zip(told.inventories).all(|(of, inventory)| same(of, inventory))
    }
}

/// Chunks of `trees`, read by `reader` one after the other.
///
/// # Errors
/// As [`Repository::saved_as`]; exhausted, if their chunks take too much memory.
async fn closure_of(reader: &Repository, trees: Vec<(Name, RefValue)>) -> Result<Closure> {
    let (mut builder, mut kept) = (ClosureBuilder::default(), Vec::new());
    for (name, value) in trees {
        let tree = reader.saved_as(&name, &value).await?;
        kept.push(reader.budget().keep(u64::from(tree.located_chunks()) * ClosureBuilder::CHUNK_WEIGHT)?);
        builder = blocking(move || {
            builder.add(&tree)?;
            Ok(builder)
        })
        .await?;
    }
    blocking(move || Ok(builder.build())).await
}
