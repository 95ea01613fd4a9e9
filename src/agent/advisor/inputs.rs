//! Chunks of the inputs that were asked for lately, and what each site holds of them, kept up to date as inventories arrive.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::HintCaller;
use super::remembered::{Entry, Remembered};
use crate::clock::Timestamp;
use crate::error::Result;
use crate::fair_turns::FairTurns;
use crate::id::MapKey;
use crate::name::Name;
use crate::placement::{AgentChunks, Closure, ClosureBuilder, Found, Holdings};
use crate::policy::LocalCaller;
use crate::repository::Repository;
use crate::repository::log::{RefValue, State};
use crate::single_flight::SingleFlight;
use crate::transfer::inventories::Counted;
use crate::work::blocking;

/// Part of the memory for plans that all remembered inputs may take beside it: a quarter.
const ROOM_PART: u64 = 4;
/// Sets of inputs that are read at a time, in each lane.
const READING_MAX: usize = 1;
/// Sets of inputs that are read or wait for it, in each lane and of one caller. Further ones are not begun before one is done.
const PENDING_MAX: usize = 32;
const PENDING_EACH: usize = 8;
/// Time that an epoch takes at most for the inputs that are known. The rest is computed when it is asked for.
const UPDATE_MAX: Duration = Duration::from_secs(2);

/// Maps of the trees, ascending, each once, the caller on whose behalf they are read, and who asks for the hint.
type InputsKey = (Vec<MapKey>, Option<LocalCaller>, HintCaller);

/// Turns at reading inputs. Callers take turns, so that one with many sets delays another by one of them.
#[derive(Debug)]
struct Lane {
    pending: FairTurns<HintCaller>,
    reading: Arc<FairTurns<HintCaller>>,
}

impl Default for Lane {
    fn default() -> Self {
        Self {
            pending: FairTurns::new(PENDING_MAX, PENDING_EACH),
            reading: Arc::new(FairTurns::new(READING_MAX, READING_MAX)),
        }
    }
}

/// Inputs that were asked for lately.
#[derive(Debug)]
pub(super) struct KnownInputs {
    known: Mutex<Remembered<Known>>,
    reading: SingleFlight<InputsKey, Arc<Known>>,
    /// Lane of the advisor's user.
    own: Lane,
    /// Lane of other agents, tokens and pods: they must not make the user wait.
    others: Lane,
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
    /// The inventory, whose memory is not kept by what is remembered.
    inventory: Weak<Counted>,
    found: Arc<Found>,
    /// True if its agent ran then.
    runs: bool,
}

/// Trees, and what sites hold of their chunks by some inventories.
#[derive(Debug)]
struct Known {
    closure: Arc<Closure>,
    found: Vec<FoundIn>,
    holdings: Arc<Holdings>,
}

impl KnownInputs {
    pub(super) fn new(repository: &Repository) -> Self {
        Self {
            known: Mutex::new(Remembered::new(repository.budget().kept_max() / ROOM_PART)),
            reading: SingleFlight::default(),
            own: Lane::default(),
            others: Lane::default(),
        }
    }

    /// Sites that hold chunks of `trees`, by the inventories. Nothing is begun for a caller that goes away before it has a turn.
    ///
    /// # Errors
    /// As [`Repository::saved_as`]; exhausted, if they take more memory than there is while they are read.
    ///
    /// # Cancel safety
    /// Safe: work that has begun continues.
    pub(super) async fn holdings(
        self: &Arc<Self>,
        told: InventoriesAt<'_>,
        reader: &Repository,
        mut trees: Vec<(Name, RefValue)>,
        caller: HintCaller,
    ) -> Result<Arc<Holdings>> {
        trees.sort_unstable_by_key(|(_, value)| value.map_key);
        trees.dedup_by_key(|(_, value)| value.map_key);
        let maps: Vec<MapKey> = trees.iter().map(|(_, value)| value.map_key).collect();
        if let Some(known) = self.lock().use_at(Instant::now(), &maps, |known| known.is_of(told)) {
            return Ok(Arc::clone(&known.holdings));
        }
        let lane = if caller == HintCaller::User { &self.own } else { &self.others };
        let pending = lane.pending.take(caller).await;
        let reading = Arc::clone(&lane.reading);
        let key = (maps.clone(), reader.caller().cloned(), caller);
        let (own, reader, inventories, at) = (Arc::clone(self), reader.clone(), told.inventories.to_vec(), told.at);
        let read = || async move {
            let (_pending, _reading) = (pending, reading.take(caller).await);
            let before = own.lock().get(&maps).map(|known| Arc::clone(&known.closure));
            let closure = match before {
                Some(closure) => closure,
                None => Arc::new(closure_of(&reader, trees).await?),
            };
            own.add((maps, closure), InventoriesAt { inventories: &inventories, at }, (caller, Instant::now())).await
        };
        Ok(Arc::clone(&self.reading.get(&key, read).await?.holdings))
    }

    /// Computes anew what the inventories change, for all inputs that are still saved.
    ///
    /// # Cancel safety
    /// Safe: the rest is computed when it is asked for.
    pub(super) async fn update(&self, told: InventoriesAt<'_>, log: &State) {
        let current: BTreeSet<MapKey> = log.refs.values().map(|value| value.map_key).collect();
        let is_saved = |entry: &Entry<Known>| entry.trees.iter().all(|tree| current.contains(tree));
        self.lock().retain(Instant::now(), is_saved);
        let outdated: Vec<Entry<Known>> =
            self.lock().latest().into_iter().filter(|entry| !entry.known.is_of(told)).cloned().collect();
        let begun = Instant::now();
        for Entry { trees, known, caller, used, .. } in outdated {
            if begun.elapsed() > UPDATE_MAX {
                return;
            }
            if let Err(error) = self.add((trees, Arc::clone(&known.closure)), told, (caller, used)).await {
                tracing::warn!("holdings of inputs are not kept up to date: {error:?}");
            }
        }
    }

    /// Maps of the trees that were asked for lately, the latest first.
    pub(super) fn trees(&self) -> Vec<MapKey> {
        self.lock().latest().into_iter().flat_map(|entry| entry.trees.iter().copied()).collect()
    }

    /// Computes what sites hold of the chunks of trees, and remembers it for its caller, if it fits.
    async fn add(
        &self,
        (trees, closure): (Vec<MapKey>, Arc<Closure>),
        told: InventoriesAt<'_>,
        (caller, used): (HintCaller, Instant),
    ) -> Result<Arc<Known>> {
        let before = self.lock().get(&trees).cloned();
        let weight = closure.weight_with(told.inventories.len());
        let (inventories, at) = (told.inventories.to_vec(), told.at);
        let computed = blocking(move || {
            let found = inventories.iter().map(|inventory| {
                let mut old = before.iter().flat_map(|known| &known.found);
                let same = old.find(|old| old.is_in(inventory)).map(|old| Arc::clone(&old.found));
                let found = same.unwrap_or_else(|| Arc::new(closure.found(inventory)));
                FoundIn { found, runs: inventory.agent_runs(at), inventory: Arc::downgrade(inventory) }
            });
            let found: Vec<FoundIn> = found.collect();
            let agents = inventories.iter().zip(&found);
            let agents = agents.map(|(inventory, of)| AgentChunks { inventory, found: &of.found, runs: of.runs });
            let holdings = Holdings::join(Arc::clone(&closure), agents);
            Ok(Known { closure, found, holdings: Arc::new(holdings) })
        });
        let known = Arc::new(computed.await?);
        if !self.lock().put(Entry { trees, known: Arc::clone(&known), weight, caller, used }) {
            tracing::debug!(
                weight,
                "inputs of a hint are not remembered: they take more memory than a caller may have"
            );
        }
        Ok(known)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Remembered<Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FoundIn {
    fn is_in(&self, inventory: &Arc<Counted>) -> bool {
        // Its place is not used again as long as there is a reference to it.
        std::ptr::eq(self.inventory.as_ptr(), Arc::as_ptr(inventory))
    }
}

impl Known {
    fn is_of(&self, told: InventoriesAt<'_>) -> bool {
        let same =
            |of: &FoundIn, inventory: &Arc<Counted>| of.is_in(inventory) && of.runs == inventory.agent_runs(told.at);
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

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn many_sets_of_one_caller_delay_another_by_one() {
        let (lane, one, other) = (Lane::default(), HintCaller::namespace("a"), HintCaller::namespace("b"));
        let pending: Vec<_> = (0..PENDING_EACH).map(|_| lane.pending.take(one).now_or_never()).collect();
        assert!(pending.iter().all(Option::is_some) && lane.pending.take(one).now_or_never().is_none());
        assert!(lane.pending.take(other).now_or_never().is_some(), "another has places left");
        let first = lane.reading.take(one).await;
        let (mut second, mut third) = (Box::pin(lane.reading.take(one)), Box::pin(lane.reading.take(other)));
        assert!(second.as_mut().now_or_never().is_none() && third.as_mut().now_or_never().is_none());
        drop(first);
        assert!(third.as_mut().now_or_never().is_some(), "its turn comes before the next one of the first");
    }
}
