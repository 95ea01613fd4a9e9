//! The manifests that may be requested: those of names of a repository.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::permits::Endpoints;
use super::served::ServedRepository;
use crate::error::{ErrorKind, Result};
use crate::format::Frame;
use crate::id::{ChunkId, ManifestId, MapKey, RepositoryId};
use crate::identity::Identity;
use crate::metrics::Metric;
use crate::name::Name;
use crate::policy::{LocalCaller, Route};
use crate::repository::log::RefValue;
use crate::repository::{Repository, Saved};
use crate::single_flight::SingleFlight;
use crate::transfer::policy::Policies;
use crate::transfer::protocol::Grant;

/// Maximum number of trees that are kept open.
const OPEN_MAX: NonZeroUsize = NonZeroUsize::new(16).expect("not zero");
/// Bytes of memory of a chunk of an opened tree, beside those of the tree: its number by its id, and its place in the grant.
const CHUNK_WEIGHT: u64 = 96;
/// Chunks of the trees that are opened at the same time, at most, unless one alone has more; and what each counts at least, so that they
/// are few.
const OPENING_MAX: u32 = 1 << 19;
const OPENING_MIN: u32 = OPENING_MAX / 8;
/// Maximum number of maps of one tree that are opened for a request.
const MAPS_MAX: usize = 4;
/// Age up to which a repository's state counts as current, for requests in quick succession.
const FRESH: Duration = Duration::from_secs(1);
/// Maximum age of the state for a second lookup after a miss.
const FRESH_AGAIN: Duration = Duration::from_millis(20);

/// Requesting peer, and the route of its answers.
#[derive(Clone, Copy, Debug)]
pub(super) struct PeerSide<'a> {
    pub(super) peer: &'a Identity,
    pub(super) own: &'a Identity,
    pub(super) route: Route,
}

impl<'a> PeerSide<'a> {
    /// This agent and the peer.
    fn endpoints(self) -> Endpoints<'a> {
        Endpoints { from: self.own, to: self.peer, caller: None }
    }
}

/// An opened tree, as peers may ask for its chunks.
#[derive(Debug)]
pub(super) struct OpenedTree {
    pub(super) repository: Repository,
    pub(super) saved: Arc<Saved>,
    pub(super) grant: Arc<Grant>,
    numbers: HashMap<ChunkId, u32>,
    /// Approximate bytes of memory.
    weight: u64,
}

impl OpenedTree {
    fn new(repository: &Repository, saved: Saved) -> Self {
        let mut bases = saved.map.further.clone();
        let chunks = &saved.manifest.chunks;
        // A base may be a chunk of the tree itself, and be requested by its id.
        let listed = saved.map.frames.iter().filter_map(Frame::base);
        bases.extend(
            listed.filter_map(|base| Some((*chunks.ids.get(base as usize)?, *chunks.lens.get(base as usize)?))),
        );
        bases.sort_unstable();
        bases.dedup();
        let ids = chunks.ids.iter().chain(saved.map.further.iter().map(|(id, _)| id));
        let numbers = ids.zip(0..).map(|(id, number)| (*id, number)).collect();
        let weight = saved.weight() + saved.map.frames.len() as u64 * CHUNK_WEIGHT + size_of_val(&*bases) as u64;
        let grant = Arc::new(Grant { chunks: Arc::new(chunks.clone()), bases });
        Self { repository: repository.for_caller(None), saved: saved.shared(), grant, numbers, weight }
    }

    /// Number of chunks of other trees that it needs.
    fn bases(&self) -> usize {
        self.saved.map.further.len()
    }

    /// Number of a chunk, as in [`Saved::locate`].
    pub(super) fn number(&self, id: &ChunkId) -> Option<u32> {
        self.numbers.get(id).copied()
    }

    /// Bytes that the repository stores for the chunk `id`, if the tree has it.
    pub(super) fn stored_len(&self, id: &ChunkId) -> Option<u64> {
        Some(self.saved.locate(self.number(id)?).ok()?.place.stored_len.into())
    }
}

/// Removes the first of `open` until there are few, and they take at most `most` bytes of memory; the last one stays.
fn keep_within(open: &mut Vec<Arc<OpenedTree>>, most: u64) {
    let mut left = most;
    let fits = |tree: &&Arc<OpenedTree>| {
        let fits = tree.weight <= left;
        left = left.saturating_sub(tree.weight);
        fits
    };
    let kept = open.iter().rev().take(OPEN_MAX.get()).take_while(fits).count();
    open.drain(..open.len().saturating_sub(kept.max(1)));
}

/// The repositories of an agent, and trees that were requested lately.
#[derive(Debug)]
pub(super) struct Catalog {
    served: Mutex<Vec<Arc<ServedRepository>>>,
    open: Arc<Mutex<Vec<Arc<OpenedTree>>>>,
    /// By map and by who asks: one that is refused is not the answer to another.
    opening: SingleFlight<(MapKey, Option<LocalCaller>), Arc<OpenedTree>>,
    permits: Arc<Semaphore>,
}

impl Default for Catalog {
    fn default() -> Self {
        let (served, open, opening) = Default::default();
        Self { served, open, opening, permits: Arc::new(Semaphore::new(OPENING_MAX as usize)) }
    }
}

impl Catalog {
    /// Bytes that came from the repositories' stores.
    pub(super) fn received(&self) -> u64 {
        self.served().iter().map(|served| served.repository.store().counters().get(Metric::GetBytes)).sum()
    }

    pub(super) fn add(&self, repository: &Repository, policies: &Arc<Policies>) {
        lock(&self.served).push(Arc::new(ServedRepository::new(repository, policies)));
    }

    /// The tree whose manifest is `manifest`, if a name that is `allowed` stands for it and the policy lets it go to who asks: the agent
    /// by its certificate, or the one that the policy maps its SPIFFE id to. Without an agent it is for `caller`, a process of this node.
    /// Forbidden and absent manifests take the same path: rights are checked first, so both are misses.
    ///
    /// # Errors
    /// Unreachable or damaged, as for the repository.
    ///
    /// # Cancel safety
    /// Safe: it only reads, and shared reads continue.
    pub(super) async fn find(
        &self,
        by: Option<PeerSide<'_>>,
        caller: Option<&LocalCaller>,
        manifest: &ManifestId,
        allowed: impl Fn(Option<&Identity>, &Name) -> bool,
    ) -> Result<Option<Arc<OpenedTree>>> {
        let agent = by.map(|by| by.peer);
        let (asked, all) = (Instant::now(), self.served());
        let mut hurry = true;
        for age in [FRESH, FRESH_AGAIN] {
            let mut missed = true;
            for served in &all {
                let state = served.state_for_policy(asked.checked_sub(age), hurry).await?;
                let permits = served.permits(&state).await;
                let permitted = |name: &Name| {
                    let tree = state.refs.get(name).map(|value| value.manifest);
                    by.zip(tree).is_none_or(|(by, tree)| permits.permits(by.endpoints(), by.route, name, &tree))
                };
                let named = agent.and_then(|agent| permits.agent(agent));
                let may = |name: &Name| allowed(named.as_deref(), name) && permitted(name);
                let private = by.is_some_and(|by| permits.is_private((by.own, by.peer), by.route));
                let rights = served.rights(private);
                if rights.has(agent, &state, may, manifest) {
                    // Copies of a name share its map: one of them that may be read is enough.
                    let mut maps = HashSet::new();
                    let found = state.refs.iter().filter(|(name, value)| {
                        let is_new = value.manifest == *manifest && !maps.contains(&value.map_key);
                        is_new && may(name) && maps.insert(value.map_key)
                    });
                    let repository = served.repository.for_caller(caller.cloned());
                    if let Some(entry) = self.entry_with_bases(&repository, found).await? {
                        return Ok(Some(entry));
                    }
                }
                let remembered = agent.is_some() && rights.is_missed(agent, &state, manifest);
                if age == FRESH && !remembered {
                    hurry &= rights.may_hurry(agent, &state, may);
                }
                missed &= remembered;
                if age == FRESH_AGAIN && agent.is_some() {
                    rights.miss(agent, &state, may, *manifest);
                }
            }
            if missed {
                return Ok(None);
            }
        }
        Ok(None)
    }

    /// Opens the names `found` of one tree as far as their maps differ, as that of a copy that stands alone does; returns the one with
    /// most bases, which serves readers of each.
    async fn entry_with_bases<'n>(
        &self,
        repository: &Repository,
        found: impl Iterator<Item = (&'n Name, &'n RefValue)>,
    ) -> Result<Option<Arc<OpenedTree>>> {
        let (mut seen, mut best, mut failed) = (HashSet::new(), None::<Arc<OpenedTree>>, None);
        for (name, value) in found {
            if seen.len() == MAPS_MAX || !seen.insert(value.map_key) {
                continue;
            }
            match self.entry(repository, name, value).await {
                Ok(entry) if best.as_ref().is_none_or(|best| best.bases() < entry.bases()) => best = Some(entry),
                Ok(_) => {}
                Err(error) => failed = Some(error),
            }
        }
        match (best, failed) {
            (None, Some(error)) => Err(error),
            (best, _) => Ok(best),
        }
    }

    /// Opens a tree, once for all concurrent requests.
    async fn entry(&self, repository: &Repository, name: &Name, value: &RefValue) -> Result<Arc<OpenedTree>> {
        let same = |entry: &&Arc<OpenedTree>| entry.saved.value.map_key == value.map_key;
        if let Some(entry) = lock(&self.open).iter().find(same) {
            return Ok(Arc::clone(entry));
        }
        let (open, permits) = (Arc::clone(&self.open), Arc::clone(&self.permits));
        let (repository, name, value) = (repository.clone(), name.clone(), value.clone());
        let key = (value.map_key, repository.caller().cloned());
        let opened = self.opening.get(&key, || async move {
            let chunks = u32::try_from(value.chunks).unwrap_or(u32::MAX).clamp(OPENING_MIN, OPENING_MAX);
            let _permit = permits.acquire_many_owned(chunks).await;
            let saved = match repository.saved_as(&name, &value).await {
                // Repacked since: look it up by name.
                Err(error) if error.kind() == ErrorKind::NotFound => repository.saved(&name).await?,
                settled => settled?,
            };
            let entry = Arc::new(OpenedTree::new(&repository, saved));
            let mut open = lock(&open);
            open.retain(|other| other.saved.value.map_key != entry.saved.value.map_key);
            open.push(Arc::clone(&entry));
            keep_within(&mut open, repository.budget().kept_max() / 2);
            Ok(entry)
        });
        opened.await
    }

    /// Tree whose manifest is `manifest`, if it is still open: for requests that were granted, with `map` if they were for that one.
    pub(super) fn opened(&self, manifest: &ManifestId, map: Option<MapKey>) -> Option<Arc<OpenedTree>> {
        let open = lock(&self.open);
        let is_meant = |value: &RefValue| value.manifest == *manifest && map.is_none_or(|map| map == value.map_key);
        open.iter().filter(|entry| is_meant(&entry.saved.value)).max_by_key(|entry| entry.bases()).cloned()
    }

    /// True if neither labels nor a policy restricted any reader of `repository` at the last read.
    pub(super) fn is_open(&self, repository: &Repository) -> bool {
        self.served_as(repository).is_some_and(|served| served.is_open())
    }

    /// Tree of `grant`, if it is still open.
    pub(super) fn of(&self, grant: &Grant) -> Option<Arc<OpenedTree>> {
        lock(&self.open).iter().find(|entry| Arc::ptr_eq(&entry.grant.chunks, &grant.chunks)).cloned()
    }

    /// Forgets the known state of the repositories, after an object turned out to be gone.
    pub(super) fn refresh(&self) {
        self.served().iter().for_each(|served| served.forget());
        lock(&self.open).clear();
    }

    /// Entry of the served `repository`, if it is served.
    pub(super) fn served_as(&self, repository: &Repository) -> Option<Arc<ServedRepository>> {
        let location = repository.store().location();
        let mut all = self.served().into_iter();
        all.find(|served| served.repository.id() == repository.id() && served.repository.store().location() == location)
    }

    /// Names of `manifest` at the last read of the repositories.
    pub(super) fn names_of(&self, manifest: &ManifestId) -> Vec<(RepositoryId, Name)> {
        let mut found = Vec::new();
        for served in self.served() {
            let Some(state) = served.known() else { continue };
            let same = state.refs.iter().filter(|(_, value)| value.manifest == *manifest);
            found.extend(same.map(|(name, _)| (served.repository.id(), name.clone())));
        }
        found
    }

    /// Reason why the policy, as read last, does not permit sending `name` to an agent; None if it does.
    pub(super) fn refusal(&self, endpoints: Endpoints<'_>, name: &Name, tree: &ManifestId) -> Option<String> {
        self.served().iter().find_map(|served| served.last_permits()?.refusal(endpoints, name, tree))
    }

    /// Agent that the policy of `repository`, as read last, maps `identity` to.
    pub(super) fn agent_in(&self, repository: RepositoryId, identity: &Identity) -> Option<Identity> {
        let served = self.served().into_iter().find(|served| served.repository.id() == repository)?;
        served.last_permits()?.agent(identity).map(Cow::into_owned)
    }

    fn served(&self) -> Vec<Arc<ServedRepository>> {
        lock(&self.served).clone()
    }
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
