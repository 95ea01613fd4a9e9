//! The manifests that may be asked for: those that a name of a repository stands for.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::served::Served;
use super::single_flight::SingleFlight;
use crate::error::{ErrorKind, Result};
use crate::format::Frame;
use crate::id::{ChunkId, ManifestId, MapKey};
use crate::metrics::Metric;
use crate::repository::log::RefValue;
use crate::repository::{Name, Repository, Saved};
use crate::transfer::identity::Identity;
use crate::transfer::protocol::Grant;

/// Trees that are kept open.
const OPEN_MAX: NonZeroUsize = NonZeroUsize::new(16).expect("not zero");
/// Trees that are opened at the same time, at most.
const OPENING_MAX: usize = 8;
/// A repository's state is as good as new for so long: who asks for many things asks often.
const FRESH: Duration = Duration::from_secs(1);
/// Age of the state in which a miss is looked up again, at most.
const FRESH_AGAIN: Duration = Duration::from_millis(20);

/// An opened tree, as peers may ask for its chunks.
#[derive(Debug)]
pub(super) struct OpenedTree {
    pub(super) repository: Repository,
    pub(super) saved: Arc<Saved>,
    pub(super) grant: Arc<Grant>,
    numbers: HashMap<ChunkId, u32>,
}

impl OpenedTree {
    fn new(repository: &Repository, saved: Saved) -> Self {
        let mut bases = saved.map.further.clone();
        let chunks = &saved.manifest.chunks;
        // A base may be a chunk of the tree itself, and be asked for by its id.
        let listed = saved.map.frames.iter().filter_map(Frame::base);
        bases.extend(
            listed.filter_map(|base| Some((*chunks.ids.get(base as usize)?, *chunks.lens.get(base as usize)?))),
        );
        bases.sort_unstable();
        bases.dedup();
        let ids = chunks.ids.iter().chain(saved.map.further.iter().map(|(id, _)| id));
        let numbers = ids.zip(0..).map(|(id, number)| (*id, number)).collect();
        let grant = Arc::new(Grant { chunks: Arc::new(chunks.clone()), bases });
        Self { repository: repository.clone(), saved: saved.shared(), grant, numbers }
    }

    /// Does its repository lie on this node's disk? Then all of it is here.
    pub(super) fn is_here(&self) -> bool {
        self.repository.store().directory().is_some()
    }

    /// The number of a chunk, as [`Saved::locate`] counts.
    pub(super) fn number(&self, id: &ChunkId) -> Option<u32> {
        self.numbers.get(id).copied()
    }
}

/// The repositories of an agent, and what of them was asked for lately.
#[derive(Debug)]
pub(super) struct Catalog {
    served: Mutex<Vec<Arc<Served>>>,
    open: Arc<Mutex<Vec<Arc<OpenedTree>>>>,
    opening: SingleFlight<MapKey, Arc<OpenedTree>>,
    permits: Arc<Semaphore>,
}

impl Default for Catalog {
    fn default() -> Self {
        let (served, open, opening) = Default::default();
        Self { served, open, opening, permits: Arc::new(Semaphore::new(OPENING_MAX)) }
    }
}

impl Catalog {
    /// Bytes that came from the repositories' stores.
    pub(super) fn received(&self) -> u64 {
        self.served().iter().map(|served| served.repository.store().counters().get(Metric::GetBytes)).sum()
    }

    pub(super) fn add(&self, repository: &Repository) {
        lock(&self.served).push(Arc::new(Served::new(repository)));
    }

    /// The tree whose manifest is `manifest`, if a name that `may` be read stands for it; `agent` asks, or a process of this node.
    /// Forbidden and absent manifests take the same path: rights are checked first, so both are misses.
    ///
    /// # Errors
    /// Unreachable or damaged, as the repository says.
    ///
    /// # Cancel safety
    /// Safe: it only reads, and what others wait for goes on.
    pub(super) async fn find(
        &self,
        agent: Option<&Identity>,
        manifest: &ManifestId,
        may: impl Fn(&Name) -> bool,
    ) -> Result<Option<Arc<OpenedTree>>> {
        let (asked, all) = (Instant::now(), self.served());
        let mut hurry = true;
        for age in [FRESH, FRESH_AGAIN] {
            let mut missed = true;
            for served in &all {
                let state = served.state(asked.checked_sub(age), hurry).await?;
                if served.rights.has(agent, &state, &may, manifest) {
                    let named = state.refs.iter().find(|(name, value)| value.manifest == *manifest && may(name));
                    if let Some((name, value)) = named {
                        return self.entry(&served.repository, name, value).await.map(Some);
                    }
                }
                let remembered = agent.is_some() && served.rights.is_missed(agent, &state, manifest);
                if age == FRESH && !remembered {
                    hurry &= served.rights.may_hurry(agent, &state, &may);
                }
                missed &= remembered;
                if age == FRESH_AGAIN && agent.is_some() {
                    served.rights.miss(agent, &state, &may, *manifest);
                }
            }
            if missed {
                return Ok(None);
            }
        }
        Ok(None)
    }

    /// Opens a tree, once for all who ask for it.
    async fn entry(&self, repository: &Repository, name: &Name, value: &RefValue) -> Result<Arc<OpenedTree>> {
        let same = |entry: &&Arc<OpenedTree>| entry.saved.value.map_key == value.map_key;
        if let Some(entry) = lock(&self.open).iter().find(same) {
            return Ok(Arc::clone(entry));
        }
        let (open, permits) = (Arc::clone(&self.open), Arc::clone(&self.permits));
        let (repository, name, value) = (repository.clone(), name.clone(), value.clone());
        let key = value.map_key;
        let opened = self.opening.get(&key, || async move {
            let _permit = permits.acquire_owned().await;
            let saved = match repository.saved_as(&name, &value).await {
                // Repacked since: the name tells.
                Err(error) if error.kind() == ErrorKind::NotFound => repository.saved(&name).await?,
                settled => settled?,
            };
            let entry = Arc::new(OpenedTree::new(&repository, saved));
            let mut open = lock(&open);
            open.retain(|other| other.saved.value.map_key != entry.saved.value.map_key);
            open.push(Arc::clone(&entry));
            let over = open.len().saturating_sub(OPEN_MAX.get());
            open.drain(..over);
            Ok(entry)
        });
        opened.await
    }

    /// The tree whose manifest is `manifest`, if it is still open: for requests that were granted.
    pub(super) fn opened(&self, manifest: &ManifestId) -> Option<Arc<OpenedTree>> {
        lock(&self.open).iter().rev().find(|entry| entry.saved.value.manifest == *manifest).cloned()
    }

    /// The tree that `grant` is of, if it is still open.
    pub(super) fn of(&self, grant: &Grant) -> Option<Arc<OpenedTree>> {
        lock(&self.open).iter().find(|entry| Arc::ptr_eq(&entry.grant.chunks, &grant.chunks)).cloned()
    }

    /// Forgets what was known of the repositories: something turned out to be gone.
    pub(super) fn refresh(&self) {
        self.served().iter().for_each(|served| served.forget());
        lock(&self.open).clear();
    }

    /// `repository` as it is served, if it is.
    pub(super) fn served_as(&self, repository: &Repository) -> Option<Arc<Served>> {
        let location = repository.store().location();
        let mut all = self.served().into_iter();
        all.find(|served| served.repository.id() == repository.id() && served.repository.store().location() == location)
    }

    fn served(&self) -> Vec<Arc<Served>> {
        lock(&self.served).clone()
    }
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
