//! Trees in memory: which are kept, which must make room for others, and who uses them.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use ulid::Ulid;

use crate::agent::config::StagingConfig;
use crate::agent::view;
use crate::clock::{Clock, Timestamp};
use crate::error::{Error, Result};
use crate::id::{ManifestId, RepositoryId};
use crate::size;
use crate::staging::{SealedMemory, small_pages};
use crate::work::blocking;

/// Time for which a tree is held for the process that asked for it.
const OFFER: Duration = Duration::from_mins(1);
/// Shortest and longest interval at which trees expire.
const EXPIRE_EVERY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));
/// Selector of all tensors.
pub(super) const ALL: &str = "**";
/// Maximum number of trees in memory: each takes a file descriptor.
const TREES_MAX: usize = 256;

/// Tensors of one tree.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct StagedKey {
    pub(super) repository: RepositoryId,
    pub(super) manifest: ManifestId,
    /// Path in the tree; empty for all of it.
    pub(super) below: String,
    /// Selectors, as text.
    pub(super) selectors: Vec<String>,
}

impl StagedKey {
    /// True if the tensors of `other` are among those of this.
    fn covers(&self, other: &Self) -> bool {
        let is_whole = self.below.is_empty() && self.selectors == [ALL];
        let same_tree = (self.repository, self.manifest) == (other.repository, other.manifest);
        self == other || (same_tree && is_whole && other.selectors == [ALL])
    }
}

/// A tree in memory.
#[derive(Debug)]
pub(in crate::agent) struct StagedTree {
    key: StagedKey,
    name: String,
    tensors: u64,
    memory: SealedMemory,
    /// Nanoseconds since 1970.
    last_used: AtomicI64,
}

impl StagedTree {
    pub(super) fn tensors(&self) -> u64 {
        self.tensors
    }

    pub(super) fn memory(&self) -> &SealedMemory {
        &self.memory
    }
}

/// All trees in memory.
pub(in crate::agent) struct StagedTrees {
    settings: StagingConfig,
    clock: Arc<dyn Clock>,
    kept: Mutex<Kept>,
    /// Locks of trees that are being read.
    reading: Mutex<HashMap<StagedKey, Weak<tokio::sync::Mutex<()>>>>,
}

#[derive(Default)]
struct Kept {
    trees: Vec<Arc<StagedTree>>,
    /// Bytes of trees that are being read.
    reserved: u64,
    /// Trees that are held for a process, until the time given.
    offers: HashMap<Ulid, (Lease, Timestamp)>,
}

/// Memory for a tree that is being read; given back on drop.
pub(super) struct Reservation {
    trees: Arc<StagedTrees>,
    bytes: u64,
}

/// Use of a tree by a process: it stays in memory until this is dropped.
pub(in crate::agent) struct Lease {
    tree: Arc<StagedTree>,
    clock: Arc<dyn Clock>,
}

impl Lease {
    pub(super) fn tree(&self) -> &StagedTree {
        &self.tree
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.tree.last_used.store(self.clock.now().0, Ordering::Relaxed);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.trees.kept().reserved -= self.bytes;
    }
}

impl StagedTrees {
    pub(in crate::agent) fn new(settings: StagingConfig, clock: Arc<dyn Clock>) -> Self {
        if let Some(remark) = small_pages() {
            tracing::info!("{remark}");
        }
        Self { settings, clock, kept: Mutex::default(), reading: Mutex::default() }
    }

    /// Lock of the reading of a tree: who has it finds the tree, or reads it for the others.
    pub(super) fn lock_of(&self, key: &StagedKey) -> Arc<tokio::sync::Mutex<()>> {
        let mut reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        reading.retain(|_, lock| lock.strong_count() > 0);
        if let Some(lock) = reading.get(key).and_then(Weak::upgrade) {
            return lock;
        }
        let lock = Arc::default();
        reading.insert(key.clone(), Arc::downgrade(&lock));
        lock
    }

    /// The tree, if it is in memory, or all tensors of the tree that it is a file or folder of.
    pub(super) fn find(&self, key: &StagedKey) -> Option<Lease> {
        let kept = self.kept();
        let found = kept.trees.iter().find(|tree| tree.key.covers(key));
        found.map(|tree| self.lease(tree))
    }

    /// Memory for a tree of `bytes`; trees that nobody uses make room, those that were used longest ago first.
    ///
    /// # Errors
    /// Exhausted, if it is more than the limit, or processes use the memory.
    pub(super) fn reserve(self: &Arc<Self>, bytes: u64) -> Result<Reservation> {
        let limit = self.settings.memory;
        if bytes > limit {
            return Err(Error::exhausted("tensors do not fit into the agent's memory for them")
                .expected(format!("at most {}, [staging] memory", size::show(limit)))
                .got(size::show(bytes))
                .help("choose some of the tensors, or raise [staging] memory"));
        }
        self.drop_expired_offers();
        let mut kept = self.kept();
        let used: u64 = kept.trees.iter().map(|tree| tree.memory.len()).sum::<u64>() + kept.reserved;
        let lacking = used.saturating_add(bytes).saturating_sub(limit);
        let Some(evicted) = victims(&kept.trees, lacking) else {
            return Err(Error::exhausted("processes use the agent's memory for tensors")
                .expected(format!("{} free of {}, [staging] memory", size::show(bytes), size::show(limit)))
                .got(size::show(limit.saturating_sub(used)))
                .help("wait until a process ends, or raise [staging] memory"));
        };
        kept.trees.retain(|tree| !evicted.iter().any(|other| Arc::ptr_eq(tree, other)));
        kept.reserved += bytes;
        drop(kept);
        Ok(Reservation { trees: Arc::clone(self), bytes })
    }

    /// Keeps a tree that was read into the memory of `reservation`.
    pub(super) fn keep(
        &self,
        mut reservation: Reservation,
        key: StagedKey,
        name: String,
        tensors: u64,
        memory: SealedMemory,
    ) -> Lease {
        let last_used = AtomicI64::new(self.clock.now().0);
        let tree = Arc::new(StagedTree { key, name, tensors, memory, last_used });
        let lease = self.lease(&tree);
        let mut kept = self.kept();
        kept.trees.push(tree);
        kept.reserved -= std::mem::take(&mut reservation.bytes);
        drop(kept);
        lease
    }

    /// Holds a tree for a process, which takes it by the returned id.
    pub(super) fn offer(&self, lease: Lease) -> Ulid {
        self.drop_expired_offers();
        let id = Ulid::generate();
        let until = self.clock.now().after(OFFER);
        self.kept().offers.insert(id, (lease, until));
        id
    }

    /// Takes the tree that was offered as `id`.
    ///
    /// # Errors
    /// Not found, if it was taken before, or a minute ago.
    pub(in crate::agent) fn take(&self, id: Ulid) -> Result<Lease> {
        let offer = self.kept().offers.remove(&id).filter(|(_, until)| *until > self.clock.now());
        let missing = || Error::not_found("no memory is held under this id").at(id).help("stage the name again");
        offer.map(|(lease, _)| lease).ok_or_else(missing)
    }

    /// Frees the memory of trees that nobody has used for long, again and again.
    ///
    /// # Cancel safety
    /// Safe.
    pub(in crate::agent) async fn expire_regularly(self: Arc<Self>) {
        loop {
            tokio::time::sleep(self.settings.keep.clamp(EXPIRE_EVERY.0, EXPIRE_EVERY.1)).await;
            let trees = Arc::clone(&self);
            let expire = move || {
                trees.expire();
                Ok(())
            };
            if let Err(error) = blocking(expire).await {
                tracing::warn!("cannot free tensors in memory: {error:?}");
            }
        }
    }

    fn expire(&self) {
        self.drop_expired_offers();
        let now = self.clock.now();
        let keep = self.settings.keep;
        drop(self.take_out(|tree| !in_use(tree) && last_used(tree).after(keep) <= now));
    }

    /// Takes trees out of the list. Freeing their memory takes a while, so their last reference is dropped elsewhere.
    fn take_out(&self, is_out: impl Fn(&Arc<StagedTree>) -> bool) -> Vec<Arc<StagedTree>> {
        let mut kept = self.kept();
        let (out, rest) = std::mem::take(&mut kept.trees).into_iter().partition(is_out);
        kept.trees = rest;
        out
    }

    fn drop_expired_offers(&self) {
        let now = self.clock.now();
        let mut kept = self.kept();
        let offers = std::mem::take(&mut kept.offers);
        let (valid, expired): (HashMap<_, _>, HashMap<_, _>) = offers.into_iter().partition(|(_, offer)| offer.1 > now);
        kept.offers = valid;
        drop(kept);
        // A lease reads the clock when it ends.
        drop(expired);
    }

    /// Frees the memory of trees that no process uses, also of those that are held for one; returns the bytes. Blocks.
    pub(in crate::agent) fn clear(&self) -> u64 {
        let offers = std::mem::take(&mut self.kept().offers);
        drop(offers);
        self.take_out(|tree| !in_use(tree)).iter().map(|tree| tree.memory.len()).sum()
    }

    /// The trees in memory, as the API shows them.
    pub(in crate::agent) fn view(&self) -> view::StagedList {
        let kept = self.kept();
        let trees = kept.trees.iter().map(|tree| view::Staged {
            name: tree.name.clone(),
            below: Some(tree.key.below.clone()).filter(|below| !below.is_empty()),
            selectors: tree.key.selectors.clone(),
            manifest: tree.key.manifest.to_string(),
            tensors: tree.tensors,
            bytes: tree.memory.len(),
            users: (Arc::strong_count(tree) - 1) as u64,
            last_used: last_used(tree).to_string(),
        });
        view::StagedList { memory: self.settings.memory, trees: trees.collect() }
    }

    fn lease(&self, tree: &Arc<StagedTree>) -> Lease {
        Lease { tree: Arc::clone(tree), clock: Arc::clone(&self.clock) }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for StagedTrees {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StagedTrees").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// Trees whose eviction frees `lacking` bytes; none, if those that nobody uses are not enough.
fn victims(trees: &[Arc<StagedTree>], lacking: u64) -> Option<Vec<Arc<StagedTree>>> {
    let mut idle: Vec<&Arc<StagedTree>> = trees.iter().filter(|tree| !in_use(tree)).collect();
    idle.sort_by_key(|tree| last_used(tree));
    let (mut freed, mut found) = (0, Vec::new());
    for tree in idle {
        if freed >= lacking && trees.len() - found.len() < TREES_MAX {
            break;
        }
        freed += tree.memory.len();
        found.push(Arc::clone(tree));
    }
    (freed >= lacking && trees.len() - found.len() < TREES_MAX).then_some(found)
}

/// True if a lease holds the tree; the list of trees has one more reference.
fn in_use(tree: &Arc<StagedTree>) -> bool {
    Arc::strong_count(tree) > 1
}

fn last_used(tree: &StagedTree) -> Timestamp {
    Timestamp(tree.last_used.load(Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::ManualClock;
    use crate::error::ErrorKind;
    use crate::staging::UnsealedMemory;

    fn key(number: u8) -> StagedKey {
        let manifest = ManifestId::of(&[number]);
        StagedKey {
            repository: RepositoryId::random(),
            manifest,
            below: String::new(),
            selectors: vec![ALL.to_owned()],
        }
    }

    fn trees(memory: u64) -> (Arc<StagedTrees>, Arc<ManualClock>) {
        let clock = Arc::new(ManualClock::default());
        let settings = StagingConfig { memory, keep: Duration::from_mins(10) };
        (Arc::new(StagedTrees::new(settings, Arc::<ManualClock>::clone(&clock))), clock)
    }

    fn advance(clock: &ManualClock, span: Duration) {
        clock.set(clock.now().after(span));
    }

    fn keep(trees: &Arc<StagedTrees>, key: &StagedKey, bytes: u64) -> Result<Lease> {
        let reservation = trees.reserve(bytes)?;
        let memory = UnsealedMemory::new(bytes)?.seal()?;
        Ok(trees.keep(reservation, key.clone(), "n".to_owned(), 1, memory))
    }

    #[test]
    fn the_tree_used_longest_ago_makes_room() {
        let (trees, clock) = trees(100);
        let keys: Vec<_> = (0..4).map(key).collect();
        for key in &keys[..3] {
            drop(keep(&trees, key, 30).unwrap());
            advance(&clock, Duration::from_secs(1));
        }
        drop(trees.find(&keys[0]).unwrap());
        advance(&clock, Duration::from_secs(1));
        drop(keep(&trees, &keys[3], 40).unwrap());
        let found: Vec<bool> = keys.iter().map(|key| trees.find(key).is_some()).collect();
        assert_eq!(found, [true, false, true, true]);
    }

    #[test]
    fn all_tensors_are_also_those_of_a_file() {
        let (trees, _) = trees(100);
        let whole = key(0);
        let part = |below: &str, selector: &str| StagedKey {
            below: below.to_owned(),
            selectors: vec![selector.to_owned()],
            ..whole.clone()
        };
        drop(keep(&trees, &part("a", ALL), 10).unwrap());
        assert!(trees.find(&whole).is_none() && trees.find(&part("b", ALL)).is_none());
        drop(keep(&trees, &whole, 10).unwrap());
        assert!(trees.find(&whole).is_some() && trees.find(&part("b", ALL)).is_some());
        assert!(trees.find(&part("", "w")).is_none() && trees.find(&key(1)).is_none());
    }

    #[test]
    fn trees_in_use_stay_and_the_limit_holds() {
        let (trees, _) = trees(100);
        let used = keep(&trees, &key(0), 80).unwrap();
        let error = keep(&trees, &key(1), 30).err().unwrap();
        assert_eq!(
            (error.kind(), error.to_string().contains("processes use")),
            (ErrorKind::Exhausted, true),
            "{error}"
        );
        let reserved = trees.reserve(20).unwrap();
        assert!(trees.reserve(1).is_err(), "a reading takes memory, too");
        drop(reserved);
        drop(used);
        drop(keep(&trees, &key(1), 100).unwrap());
        assert_eq!(trees.view().trees.len(), 1);
        assert!(trees.reserve(101).err().unwrap().to_string().contains("do not fit"));
    }

    #[test]
    fn an_offer_holds_a_tree_for_a_minute_and_is_taken_once() {
        let (trees, clock) = trees(100);
        let id = trees.offer(keep(&trees, &key(0), 80).unwrap());
        assert!(trees.reserve(30).is_err());
        let lease = trees.take(id).unwrap();
        assert_eq!(trees.take(id).err().unwrap().kind(), ErrorKind::NotFound);
        let late = trees.offer(lease);
        advance(&clock, OFFER);
        assert_eq!(trees.take(late).err().unwrap().kind(), ErrorKind::NotFound);
        drop(trees.reserve(30).unwrap());
    }

    #[test]
    fn trees_that_nobody_uses_expire() {
        let (trees, clock) = trees(100);
        let used = keep(&trees, &key(0), 10).unwrap();
        let id = trees.offer(keep(&trees, &key(1), 10).unwrap());
        advance(&clock, Duration::from_mins(10));
        trees.expire();
        assert_eq!(trees.view().trees.len(), 2, "an offer that expires now was a use until now");
        trees.take(id).err().unwrap();
        advance(&clock, Duration::from_mins(10));
        trees.expire();
        assert_eq!(trees.view().trees.len(), 1);
        drop(used);
        trees.expire();
        assert_eq!((trees.view().trees.len(), trees.clear(), trees.clear()), (1, 10, 0));
    }

    #[tokio::test]
    async fn one_process_reads_for_the_others() {
        let (trees, _) = trees(100);
        let key = key(0);
        let lock = trees.lock_of(&key);
        let held = lock.lock().await;
        assert!(trees.lock_of(&key).try_lock().is_err());
        drop(held);
        assert!(trees.lock_of(&key).try_lock().is_ok());
    }
}
