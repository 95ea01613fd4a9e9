//! The manifests that may be asked for: those that a name of a repository stands for.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::error::{ErrorKind, Result};
use crate::format::Frame;
use crate::id::{ChunkId, ManifestId};
use crate::metrics::Metric;
use crate::repository::log::{RefValue, State};
use crate::repository::{Name, Repository, Saved};
use crate::transfer::protocol::Grant;

/// Trees that are kept open.
const OPEN_MAX: NonZeroUsize = NonZeroUsize::new(16).expect("not zero");
/// A repository's state is as good as new for so long: who asks for many things asks often.
const FRESH: Duration = Duration::from_secs(1);
/// What is not found is looked for in a state no older than this.
const FRESH_AGAIN: Duration = Duration::from_millis(20);

/// An opened tree, as peers may ask for its chunks.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) repository: Repository,
    pub(super) saved: Arc<Saved>,
    pub(super) grant: Arc<Grant>,
    numbers: HashMap<ChunkId, u32>,
}

impl Entry {
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
#[derive(Debug, Default)]
pub(super) struct Catalog {
    served: Mutex<Vec<Served>>,
    open: Mutex<Vec<Arc<Entry>>>,
}

#[derive(Clone, Debug)]
struct Served {
    repository: Repository,
    seen: Option<(Instant, Arc<State>)>,
}

impl Catalog {
    /// Bytes that came from the repositories' stores.
    pub(super) fn received(&self) -> u64 {
        let served = self.served.lock().unwrap_or_else(PoisonError::into_inner);
        served.iter().map(|served| served.repository.store().counters().get(Metric::GetBytes)).sum()
    }

    pub(super) fn add(&self, repository: &Repository) {
        self.served().push(Served { repository: repository.clone(), seen: None });
    }

    /// The tree whose manifest is `manifest`, if a name that `may` be read stands for it. What may not be read and what does not
    /// exist take the same way.
    ///
    /// # Errors
    /// Unreachable or damaged, as the repository says.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub(super) async fn find(&self, manifest: &ManifestId, may: impl Fn(&Name) -> bool) -> Result<Option<Arc<Entry>>> {
        let count = self.served().len();
        for age in [FRESH, FRESH_AGAIN] {
            for number in 0..count {
                let Some((repository, state)) = self.state(number, age).await? else { continue };
                let found = state.refs.iter().find(|(name, value)| value.manifest == *manifest && may(name));
                if let Some((name, value)) = found {
                    return self.entry(&repository, name, value).await.map(Some);
                }
            }
        }
        Ok(None)
    }

    async fn state(&self, number: usize, age: Duration) -> Result<Option<(Repository, Arc<State>)>> {
        let Some(served) = self.served().get(number).cloned() else { return Ok(None) };
        if let Some((_, state)) = served.seen.filter(|(when, _)| when.elapsed() < age) {
            return Ok(Some((served.repository, state)));
        }
        let state = served.repository.state().await?;
        if let Some(served) = self.served().get_mut(number) {
            served.seen = Some((Instant::now(), Arc::clone(&state)));
        }
        Ok(Some((served.repository, state)))
    }

    async fn entry(&self, repository: &Repository, name: &Name, value: &RefValue) -> Result<Arc<Entry>> {
        let same = |entry: &Arc<Entry>| entry.saved.value.map_key == value.map_key;
        if let Some(entry) = self.open().iter().find(|entry| same(entry)) {
            return Ok(Arc::clone(entry));
        }
        let saved = match repository.saved_as(name, value).await {
            // Repacked since: the name tells.
            Err(error) if error.kind() == ErrorKind::NotFound => repository.saved(name).await?,
            settled => settled?,
        };
        let entry = Arc::new(Entry::new(repository, saved));
        let mut open = self.open();
        open.retain(|entry| !same(entry));
        open.push(Arc::clone(&entry));
        let over = open.len().saturating_sub(OPEN_MAX.get());
        open.drain(..over);
        Ok(entry)
    }

    /// The tree whose manifest is `manifest`, if it is still open: for requests that were granted.
    pub(super) fn opened(&self, manifest: &ManifestId) -> Option<Arc<Entry>> {
        self.open().iter().rev().find(|entry| entry.saved.value.manifest == *manifest).cloned()
    }

    /// The tree that `grant` is of, if it is still open.
    pub(super) fn of(&self, grant: &Grant) -> Option<Arc<Entry>> {
        self.open().iter().find(|entry| Arc::ptr_eq(&entry.grant.chunks, &grant.chunks)).cloned()
    }

    /// Forgets what was known of the repositories: something turned out to be gone.
    pub(super) fn refresh(&self) {
        self.served().iter_mut().for_each(|served| served.seen = None);
        self.open().clear();
    }

    fn served(&self) -> std::sync::MutexGuard<'_, Vec<Served>> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self) -> std::sync::MutexGuard<'_, Vec<Arc<Entry>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
