//! Limit of the large trees that are warmed or pinned at the same time: each takes memory for its lists of chunks until it ends.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::agent::requester::Requester;
use crate::agent::view::TaskKind;
use crate::error::{ErrorKind, Result};
use crate::fair_turns::{FairTurn, FairTurns};
use crate::limits::MIB;
use crate::name::Name;
use crate::repository::log::State;
use crate::repository::{Repository, Saved};

/// Chunks and files above which a tree is large: its lists take some 2 MiB.
const LARGE_MIN: u64 = 16 << 10;
/// Bytes of memory of an opened tree above which it is large, whatever the log says of it: long paths and links count there for little.
const HEAVY_MIN: u64 = MIB;
/// Trees of tokens and other agents, and of this node, that are opened at the same time.
const OPENING_LIMITED: usize = 2;
const OPENING_OWN: usize = 4;
/// Memory of an agent's share for each large tree, and limits of their number.
const MEMORY_EACH: u64 = 64 * MIB;
const AT_ONCE: std::ops::RangeInclusive<usize> = 2..=16;

/// Places of large trees.
#[derive(Debug)]
pub(in crate::agent) struct LargeTrees {
    warms: Lane,
    /// Fetches for readers, which do not wait for warms.
    fetches: Lane,
    /// Pins that are made, which do not wait for warms either.
    pins: Lane,
    opening_limited: FairTurns<String>,
    opening_own: FairTurns<String>,
}

#[derive(Debug)]
struct Lane {
    all: Arc<Semaphore>,
    /// Half of them, for tokens and other agents, by the owners that are limited together: each has half of these at most.
    limited: FairTurns<String>,
}

/// Place of a tree, until this is dropped.
#[derive(Debug, Default)]
#[must_use]
pub(in crate::agent) struct TreePlace {
    _limited: Option<FairTurn>,
    _all: Option<OwnedSemaphorePermit>,
}

impl LargeTrees {
    /// Places for an agent whose repositories have `memory` bytes each.
    pub(in crate::agent) fn new(memory: u64) -> Self {
        let wanted = usize::try_from(memory / MEMORY_EACH).unwrap_or(usize::MAX);
        let places = wanted.clamp(*AT_ONCE.start(), *AT_ONCE.end());
        let half = |count: usize| FairTurns::new(count, count.div_ceil(2));
        let lane = || Lane { all: Arc::new(Semaphore::new(places)), limited: half(places / 2) };
        let (opening_limited, opening_own) = (half(OPENING_LIMITED), FairTurns::new(OPENING_OWN, OPENING_OWN));
        Self { warms: lane(), fetches: lane(), pins: lane(), opening_limited, opening_own }
    }

    /// The tree `name`, opened, and its place: see [`Self::place`]. `caller` is the token or other agent that asks for it, if one
    /// does.
    ///
    /// # Errors
    /// As [`Repository::saved`].
    ///
    /// # Cancel safety
    /// Safe: a dropped wait holds nothing.
    pub(in crate::agent) async fn opened(
        &self,
        repository: &Repository,
        name: &Name,
        (kind, caller): (TaskKind, Option<&Requester>),
        since: Instant,
    ) -> Result<(Arc<Saved>, TreePlace)> {
        let size = Self::size_of(&*repository.state_since(Some(since)).await?, [name]);
        let place = self.place(kind, caller, size).await;
        let saved = self.open(repository, name, caller, since).await?;
        if size >= LARGE_MIN || saved.weight() < HEAVY_MIN {
            return Ok((saved.shared(), place));
        }
        // Nothing is held while it waits.
        drop(saved);
        let place = self.place(kind, caller, LARGE_MIN).await;
        Ok((self.open(repository, name, caller, Instant::now()).await?.shared(), place))
    }

    /// Place for a task with the trees `names` together, as by [`Self::opened`]. Names that are gone count for nothing.
    ///
    /// # Errors
    /// As [`Repository::saved`].
    ///
    /// # Cancel safety
    /// Safe: a dropped wait holds nothing.
    pub(in crate::agent) async fn place_of_all(
        &self,
        repository: &Repository,
        names: &[Name],
        (kind, caller): (TaskKind, Option<&Requester>),
    ) -> Result<TreePlace> {
        let size = self.size_of_all(repository, names, caller).await?;
        Ok(self.place(kind, caller, size).await)
    }

    /// Place for a pin of the trees `names` together, while it is made. Names that are gone count for nothing.
    ///
    /// # Errors
    /// As [`Repository::saved`].
    ///
    /// # Cancel safety
    /// Safe: a dropped wait holds nothing.
    pub(in crate::agent) async fn place_of_pin(
        &self,
        repository: &Repository,
        names: &[Name],
        caller: Option<&Requester>,
    ) -> Result<TreePlace> {
        let size = self.size_of_all(repository, names, caller).await?;
        Ok(self.pins.place(caller, size).await)
    }

    /// Chunks and files of the trees `names`; those of trees that a `caller` opens are large also if they weigh much, as trees with
    /// many bases do.
    async fn size_of_all(&self, repository: &Repository, names: &[Name], caller: Option<&Requester>) -> Result<u64> {
        let begun = Instant::now();
        let size = Self::size_of(&*repository.state_since(Some(begun)).await?, names);
        if caller.is_none() || size >= LARGE_MIN {
            return Ok(size);
        }
        let mut weight = 0;
        for name in names {
            weight += match self.open(repository, name, caller, begun).await {
                Err(error) if error.kind() == ErrorKind::NotFound => 0,
                opened => opened?.weight(),
            };
        }
        Ok(if weight >= HEAVY_MIN { LARGE_MIN } else { size })
    }

    async fn open(
        &self,
        repository: &Repository,
        name: &Name,
        caller: Option<&Requester>,
        since: Instant,
    ) -> Result<Saved> {
        let (opening, owners) = match caller {
            Some(caller) => (&self.opening_limited, caller.limited_owners()),
            None => (&self.opening_own, String::new()),
        };
        let _turn = opening.take(owners).await;
        repository.saved_since(name, since).await
    }

    /// Chunks and files of the trees `names`.
    fn size_of<'n>(state: &State, names: impl IntoIterator<Item = &'n Name>) -> u64 {
        let values = names.into_iter().filter_map(|name| state.refs.get(name));
        values.map(|value| value.chunks.saturating_add(value.files)).fold(0, u64::saturating_add)
    }

    /// Place for a task of `kind`: see [`Lane::place`].
    async fn place(&self, kind: TaskKind, caller: Option<&Requester>, size: u64) -> TreePlace {
        let lane = if kind == TaskKind::Fetch { &self.fetches } else { &self.warms };
        lane.place(caller, size).await
    }
}

impl Lane {
    /// Place for trees of `size` chunks and files, once there is one. Tokens and other agents take turns, so that one with many
    /// delays another by its share alone.
    ///
    /// # Cancel safety
    /// Safe: a dropped wait holds nothing.
    async fn place(&self, caller: Option<&Requester>, size: u64) -> TreePlace {
        if size < LARGE_MIN {
            return TreePlace::default();
        }
        let mut limited = None;
        // The smaller limit first: a task that waits for it holds no place of others.
        if let Some(caller) = caller {
            limited = Some(self.limited.take(caller.limited_owners()).await);
        }
        // Never closed.
        let all = Arc::clone(&self.all).acquire_owned().await.ok();
        TreePlace { _limited: limited, _all: all }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Poll;

    use futures::poll;

    use super::*;
    use crate::identity::Identity;
    use crate::ops::SaveOptions;
    use crate::repository::{OpenOptions, Repository};
    use crate::storage::Store;

    fn agent(name: &str) -> Requester {
        Requester::Agent(Identity::new("home", name).unwrap())
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn large_trees_of_others_take_half_of_the_places_and_small_ones_none() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), "text").unwrap();
        let options = OpenOptions { cache: Some(dir.path().join("cache")), ..OpenOptions::default() };
        let repository = Repository::create(Store::memory(), options).await.unwrap().0;
        let name: Name = "large".parse().unwrap();
        repository.save(&dir.path().join("file"), &name, &SaveOptions::default()).await.unwrap();
        let mut state = State::clone(&*repository.state().await.unwrap());
        let small = LargeTrees::size_of(&state, [&name]);
        state.refs.get_mut(&name).unwrap().chunks = LARGE_MIN;
        let large = LargeTrees::size_of(&state, [&name]);
        let trees = LargeTrees::new(2 * MEMORY_EACH);
        let other = agent("other");
        let place = |kind, is_limited: bool, size| Box::pin(trees.place(kind, is_limited.then_some(&other), size));
        let first = place(TaskKind::Warm, true, large).await;
        let mut second = place(TaskKind::Warm, true, large);
        assert!(poll!(&mut second).is_pending(), "the other place is for this node");
        let own = place(TaskKind::Warm, false, large).await;
        assert!(poll!(place(TaskKind::Warm, false, large)).is_pending(), "both are taken");
        for free in [place(TaskKind::Warm, true, small), place(TaskKind::Fetch, true, large)] {
            drop(free.await);
        }
        // Pins wait for each other alone.
        let pin = trees.pins.place(Some(&other), large).await;
        assert!(poll!(Box::pin(trees.pins.place(Some(&other), large))).is_pending());
        drop((first, pin));
        drop((second.await, own));
    }

    #[tokio::test]
    async fn a_caller_with_many_large_trees_delays_another_by_one() {
        let trees = LargeTrees::new(2 * MEMORY_EACH);
        let (many, other) = (agent("many"), agent("other"));
        let place = |caller| Box::pin(trees.place(TaskKind::Warm, Some(caller), LARGE_MIN));
        let first = place(&many).await;
        let (mut second, mut third) = (place(&many), place(&many));
        assert!(poll!(&mut second).is_pending() && poll!(&mut third).is_pending());
        let mut others = place(&other);
        assert!(poll!(&mut others).is_pending());
        drop(first);
        let others = match poll!(&mut others) {
            Poll::Ready(others) => others,
            Poll::Pending => panic!("its turn comes before the others of a caller with many"),
        };
        assert!(poll!(&mut second).is_pending());
        drop(others);
        drop(second.await);
        drop(third.await);
        // Of more places, a caller leaves half to others.
        let trees = LargeTrees::new(8 * MEMORY_EACH);
        let place = |caller| Box::pin(trees.place(TaskKind::Warm, Some(caller), LARGE_MIN));
        let _held = [place(&many).await, place(&many).await];
        assert!(poll!(place(&many)).is_pending() && poll!(place(&other)).is_ready());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_tree_of_few_chunks_and_files_is_large_by_its_memory() {
        let dir = tempfile::tempdir().unwrap();
        let (light, heavy) = (dir.path().join("light"), dir.path().join("heavy"));
        for tree in [&light, &heavy] {
            std::fs::create_dir(tree).unwrap();
            std::fs::write(tree.join("file"), "text").unwrap();
        }
        for n in 0..600 {
            std::os::unix::fs::symlink("x".repeat(4000), heavy.join(n.to_string())).unwrap();
        }
        let options = OpenOptions { cache: Some(dir.path().join("cache")), ..OpenOptions::default() };
        let repository = Repository::create(Store::memory(), options).await.unwrap().0;
        let [light_name, heavy_name]: [Name; 2] = ["light", "heavy"].map(|name| name.parse().unwrap());
        repository.save(&light, &light_name, &SaveOptions::default()).await.unwrap();
        repository.save(&heavy, &heavy_name, &SaveOptions::default()).await.unwrap();
        let size = LargeTrees::size_of(&repository.state().await.unwrap(), [&heavy_name]);
        assert!(size < LARGE_MIN, "the log says little of it: {size}");
        let trees = LargeTrees::new(2 * MEMORY_EACH);
        let other = agent("other");
        let warm = (TaskKind::Warm, Some(&other));
        let (_, first) = trees.opened(&repository, &heavy_name, warm, Instant::now()).await.unwrap();
        let second = trees.opened(&repository, &heavy_name, warm, Instant::now());
        let second = tokio::time::timeout(std::time::Duration::from_millis(200), second).await;
        assert!(second.is_err(), "others have one place");
        let names = [heavy_name.clone()];
        let all = trees.place_of_all(&repository, &names, warm);
        assert!(tokio::time::timeout(std::time::Duration::from_millis(200), all).await.is_err());
        drop(trees.opened(&repository, &light_name, warm, Instant::now()).await.unwrap());
        drop(first);
        drop(trees.opened(&repository, &heavy_name, warm, Instant::now()).await.unwrap());
    }
}
