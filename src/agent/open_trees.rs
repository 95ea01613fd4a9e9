//! Cache of open trees.

use std::collections::VecDeque;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::Semaphore;

use super::tasks::without_offers;
use crate::error::{Error, Result};
use crate::id::MapKey;
use crate::name::Name;
use crate::policy::LocalCaller;
use crate::repository::log::RefValue;
use crate::repository::{Repository, Saved};
use crate::single_flight::SingleFlight;
use crate::size;

/// Number of trees that stay open.
const OPEN_MAX: usize = 4;

/// Trees opened at a time; one that is being decoded takes memory, too.
const OPENING_MAX: usize = 2;

/// Trees that are read: a client that reads one range after another opens a tree once.
#[derive(Debug)]
pub(super) struct OpenTrees {
    trees: Arc<Trees>,
    /// By name, map, and who asks: what one may read, another may not.
    opening: SingleFlight<(Name, MapKey, Option<LocalCaller>), OpenTree>,
    permits: Arc<Semaphore>,
}

/// An open tree, which counts for the tenant or token that holds it until its clones are dropped, too.
#[derive(Clone, Debug)]
pub(super) struct OpenTree {
    tree: Arc<Saved>,
    holder: Option<Arc<str>>,
}

impl OpenTree {
    /// The same tree, opened again after its packs were replaced. It does not count: the tree that it replaces counted.
    pub(super) fn renewed(&self, tree: Arc<Saved>) -> Self {
        Self { tree, holder: self.holder.clone() }
    }
}

impl Deref for OpenTree {
    type Target = Arc<Saved>;

    fn deref(&self) -> &Arc<Saved> {
        &self.tree
    }
}

#[derive(Debug, Default)]
struct Trees {
    /// Recently read ones, the latest first.
    recent: Mutex<VecDeque<Arc<Saved>>>,
    /// All that somebody still reads, or that are among the recent ones.
    in_use: Mutex<Vec<TreeInUse>>,
}

#[derive(Debug)]
struct TreeInUse {
    tree: Weak<Saved>,
    /// Bytes of memory.
    weight: u64,
    /// Tenants and tokens that hold it, also if another caller opened it. They are those of its [`OpenTree`]s.
    holders: Vec<Weak<str>>,
}

impl Default for OpenTrees {
    fn default() -> Self {
        let (trees, opening) = Default::default();
        Self { trees, opening, permits: Arc::new(Semaphore::new(OPENING_MAX)) }
    }
}

impl OpenTrees {
    /// Opens the current value of `name`, once for all concurrent requests.
    ///
    /// # Errors
    /// As [`Repository::saved`]; exhausted, if the trees in use take too much memory.
    ///
    /// # Cancel safety
    /// Safe: it only reads, and an open that is shared continues.
    pub(super) async fn open(&self, repository: &Repository, name: &Name) -> Result<OpenTree> {
        let state = repository.state().await?;
        let Some(value) = state.refs.get(name) else {
            // The error names the names nearby.
            let saved = repository.saved(name).await?.shared();
            return self.trees.hold(&saved, repository);
        };
        if let Some(found) = self.trees.find(name, value) {
            // The policy may have changed since it was opened.
            repository.check_readable(name, &found.value.manifest).await?;
            return self.trees.hold(&found, repository);
        }
        let key = (name.clone(), value.map_key, repository.caller().cloned());
        let open = || {
            let (repository, name, value) = (repository.clone(), name.clone(), value.clone());
            let (trees, permits) = (Arc::clone(&self.trees), Arc::clone(&self.permits));
            async move {
                let _permit = permits.acquire_owned().await;
                // A request that has just ended may have opened it.
                if let Some(found) = trees.find(&name, &value) {
                    repository.check_readable(&name, &found.value.manifest).await?;
                    return trees.hold(&found, &repository);
                }
                let saved = repository.saved(&name).await?.shared();
                trees.hold(&saved, &repository)
            }
        };
        let opened = self.opening.get(&key, open).await?;
        // Another request may have opened it, under an earlier policy.
        repository.check_readable(name, &opened.value.manifest).await?;
        Ok(opened)
    }
}

impl OpenTrees {
    /// As [`Self::open`], for a caller who may not read all names, if it `is_limited`: the error about a name that was removed since it
    /// was resolved offers no others.
    ///
    /// # Errors
    /// As [`Self::open`].
    ///
    /// # Cancel safety
    /// As [`Self::open`].
    pub(super) async fn open_for(&self, repository: &Repository, name: &Name, is_limited: bool) -> Result<OpenTree> {
        match self.open(repository, name).await {
            Err(error) if is_limited => Err(without_offers(repository, name, error).await),
            opened => opened,
        }
    }
}

impl Trees {
    /// As [`Self::hold_for`], for the caller of `repository`.
    ///
    /// # Errors
    /// As there.
    fn hold(&self, opened: &Arc<Saved>, repository: &Repository) -> Result<OpenTree> {
        self.hold_for(repository.caller().and_then(LocalCaller::limited), opened, repository.budget().kept_max())
    }

    /// Counts a tree that is opened, or that is in memory already, for its `holder`. Slow readers of many trees must not take
    /// the memory of all: tenants and tokens take half of it, and one of them, the `holder`, half of that. A tree counts once
    /// for each of these limits, whoever else holds it. Recent trees that nobody reads are closed for others.
    ///
    /// # Errors
    /// Exhausted, if it and the trees that are read take more than `most` bytes; one always may.
    fn hold_for(&self, holder: Option<&str>, opened: &Arc<Saved>, most: u64) -> Result<OpenTree> {
        let mut in_use = self.in_use.lock().unwrap_or_else(PoisonError::into_inner);
        in_use.retain(|one| one.tree.strong_count() > 0);
        // Another caller may have opened it at the same time.
        let mut known = in_use.iter().enumerate();
        let known = known.find_map(|(at, one)| Some((at, one.tree_of(&opened.name, &opened.value)?)));
        let is_new = known.is_none();
        let (mut one, tree) = match known {
            Some((at, tree)) => (in_use.swap_remove(at), tree),
            None => (TreeInUse::of(opened), Arc::clone(opened)),
        };
        let holder = holder.map(|holder| one.count_for(holder));
        in_use.push(one);
        while let Some((limit, whose)) = exceeded(&in_use, holder.as_deref(), most) {
            // Recent trees that nobody reads count for no tenant or token.
            if limit < most || !self.close_recent() {
                // One that is refused counts no more, even before it is closed.
                if is_new {
                    in_use.pop();
                }
                return Err(Error::exhausted("too many large trees are read at once")
                    .at(&opened.name)
                    .expected(format!("at most {} for {whose}", size::show(limit)))
                    .got(format!("{} more", size::show(opened.weight())))
                    .help("try again when others have been read, or raise the agent's `memory`"));
            }
            in_use.retain(|one| one.tree.strong_count() > 0);
        }
        drop(in_use);
        self.keep(&tree);
        Ok(OpenTree { tree, holder })
    }

    fn keep(&self, saved: &Arc<Saved>) {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        recent.retain(|other| other.name != saved.name);
        recent.push_front(Arc::clone(saved));
        recent.truncate(OPEN_MAX);
    }

    /// Closes the least recent tree that nobody reads; false if there is none.
    fn close_recent(&self) -> bool {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let unread = recent.iter().rposition(|tree| Arc::strong_count(tree) == 1);
        unread.is_some_and(|at| recent.remove(at).is_some())
    }

    /// Tree in memory. Keys of objects are unique across repositories, so the repository of a value does not matter.
    fn find(&self, name: &Name, value: &RefValue) -> Option<Arc<Saved>> {
        let in_use = self.in_use.lock().unwrap_or_else(PoisonError::into_inner);
        in_use.iter().find_map(|one| one.tree_of(name, value))
    }
}

impl TreeInUse {
    fn of(saved: &Arc<Saved>) -> Self {
        Self { tree: Arc::downgrade(saved), weight: saved.weight(), holders: Vec::new() }
    }

    /// The tree, if it is still in memory and that of `value`.
    fn tree_of(&self, name: &Name, value: &RefValue) -> Option<Arc<Saved>> {
        self.tree.upgrade().filter(|tree| tree.name == *name && tree.value == *value)
    }

    /// Counts it for `holder` until the result and its clones are dropped.
    fn count_for(&mut self, holder: &str) -> Arc<str> {
        self.holders.retain(|other| other.strong_count() > 0);
        if let Some(held) = self.holders.iter().filter_map(Weak::upgrade).find(|other| **other == *holder) {
            return held;
        }
        let held = Arc::from(holder);
        self.holders.push(Arc::downgrade(&held));
        held
    }

    fn is_held(&self) -> bool {
        self.holders.iter().any(|other| other.strong_count() > 0)
    }

    fn is_held_by(&self, holder: &str) -> bool {
        self.holders.iter().filter_map(Weak::upgrade).any(|other| *other == *holder)
    }
}

/// Limit that the trees in use exceed, and what it is for; one tree exceeds none. Those of `holder` and of all tenants and
/// tokens come first, as no tree is closed for them.
fn exceeded(in_use: &[TreeInUse], holder: Option<&str>, most: u64) -> Option<(u64, &'static str)> {
    let exceeds = |of: &dyn Fn(&TreeInUse) -> bool, limit: u64| {
        let weights: Vec<u64> = in_use.iter().filter(|one| of(one)).map(|one| one.weight).collect();
        weights.len() > 1 && weights.iter().sum::<u64>() > limit
    };
    if holder.is_some_and(|holder| exceeds(&|one| one.is_held_by(holder), most / 4)) {
        return Some((most / 4, "those of one tenant or token"));
    }
    if holder.is_some() && exceeds(&TreeInUse::is_held, most / 2) {
        return Some((most / 2, "those of all tenants and tokens"));
    }
    exceeds(&|_| true, most).then_some((most, "all of them"))
}

#[cfg(test)]
mod tests {
    use futures::future::join_all;

    use super::*;
    use crate::error::ErrorKind;
    use crate::metrics::Metric;
    use crate::ops::SaveOptions;
    use crate::repository::OpenOptions;
    use crate::storage::{Location, StoreOptions, open};

    async fn saved(dir: &std::path::Path, names: &[&str]) -> Repository {
        let location = Location::directory(dir.join("repository")).unwrap();
        let store = open(&location, &StoreOptions { create: true, ..StoreOptions::default() }).await.unwrap();
        let options = OpenOptions { cache: Some(dir.join("cache")), ..OpenOptions::default() };
        let repository = Repository::create(store, options).await.unwrap().0;
        std::fs::write(dir.join("file"), vec![7; 100_000]).unwrap();
        for name in names {
            repository.save(&dir.join("file"), &name.parse().unwrap(), &SaveOptions::default()).await.unwrap();
        }
        repository
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn many_open_a_tree_and_it_is_read_once() {
        let dir = tempfile::tempdir().unwrap();
        let repository = saved(dir.path(), &["a"]).await;
        let (trees, name) = (OpenTrees::default(), "a".parse().unwrap());
        let opened = join_all((0..60).map(|_| trees.open(&repository, &name))).await;
        let opened: Vec<_> = opened.into_iter().map(Result::unwrap).collect();
        assert!(opened.iter().all(|tree| Arc::ptr_eq(tree, &opened[0])));
        assert_eq!(trees.trees.in_use.lock().unwrap().len(), 1, "it is counted once");
        assert_eq!(trees.trees.recent.lock().unwrap().len(), 1);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn trees_that_nobody_reads_make_way_and_tenants_leave_the_user_half() {
        let dir = tempfile::tempdir().unwrap();
        let names = ["a", "b", "c", "d"];
        let repository = saved(dir.path(), &names).await;
        let trees = Trees::default();
        let mut opened = Vec::new();
        for name in names {
            opened.push(repository.saved(&name.parse().unwrap()).await.unwrap().shared());
        }
        let one = opened[0].weight();
        // For two and a half.
        let hold = |tree: &Arc<Saved>| trees.hold_for(None, tree, one * 5 / 2);
        let [a, b, c, d] = <[Arc<Saved>; 4]>::try_from(opened).unwrap();
        hold(&a).unwrap();
        hold(&b).unwrap();
        // Recent ones that nobody reads.
        drop((a, b));
        hold(&c).unwrap();
        hold(&d).unwrap();
        let a = repository.saved(&"a".parse().unwrap()).await.unwrap().shared();
        assert_eq!(hold(&a).unwrap_err().kind(), ErrorKind::Exhausted);
        assert!(hold(&c).is_ok(), "it is in memory");
        drop((c, d));
        // For five, of which tenants and tokens have two and a half.
        let hold = |tree: &Arc<Saved>, holder: &str| trees.hold_for(Some(holder), tree, one * 5);
        let held = hold(&a, "clinic").unwrap();
        let b = repository.saved(&"b".parse().unwrap()).await.unwrap().shared();
        let refused = hold(&b, "clinic").unwrap_err();
        assert!(format!("{refused:?}").contains("those of one tenant or token"), "{refused:?}");
        let others = hold(&b, "token:other").unwrap();
        let c = repository.saved(&"c".parse().unwrap()).await.unwrap().shared();
        let refused = hold(&c, "token:third").unwrap_err();
        assert!(format!("{refused:?}").contains("those of all tenants and tokens"), "{refused:?}");
        trees.hold_for(None, &c, one * 5).unwrap();
        drop((held, others));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_tree_counts_for_each_who_holds_it_whoever_opened_it() {
        let dir = tempfile::tempdir().unwrap();
        let names = ["a", "b", "c"];
        let repository = saved(dir.path(), &names).await;
        let trees = Trees::default();
        let mut opened = Vec::new();
        for name in names {
            let saved = repository.saved(&name.parse().unwrap()).await.unwrap().shared();
            // For four and a half; a tenant or token has one of them, and all together have two.
            opened.push(trees.hold_for(None, &saved, saved.weight() * 9 / 2).unwrap());
        }
        let most = opened[0].weight() * 9 / 2;
        let hold = |tree: usize, holder: &str| trees.hold_for(Some(holder), &opened[tree], most);
        let held = [hold(0, "clinic").unwrap(), hold(0, "clinic").unwrap()];
        let refused = hold(1, "clinic").unwrap_err();
        assert!(format!("{refused:?}").contains("those of one tenant or token"), "{refused:?}");
        let shared = hold(0, "token:other").unwrap();
        let second = hold(1, "token:second").unwrap();
        let refused = hold(2, "token:third").unwrap_err();
        assert!(format!("{refused:?}").contains("those of all tenants and tokens"), "{refused:?}");
        drop(held);
        assert!(hold(1, "clinic").is_ok(), "it holds no other any more");
        assert!(hold(2, "clinic").is_err(), "two are held by others");
        drop((shared, second));
        assert!(hold(2, "token:third").is_ok());
        assert!(!trees.in_use.lock().unwrap().iter().any(TreeInUse::is_held));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_tree_that_is_read_is_found_and_counted_when_it_is_not_recent() {
        let dir = tempfile::tempdir().unwrap();
        let names = ["a", "b", "c", "d", "e"];
        let repository = saved(dir.path(), &names).await;
        let trees = OpenTrees::default();
        let read = trees.open(&repository, &"a".parse().unwrap()).await.unwrap();
        for name in &names[1..] {
            trees.open(&repository, &name.parse().unwrap()).await.unwrap();
        }
        assert!(trees.trees.recent.lock().unwrap().iter().all(|tree| tree.name != read.name));
        let of_token = repository.for_caller(Some(LocalCaller::token("reader", None)));
        let found = trees.open(&of_token, &read.name).await.unwrap();
        assert!(Arc::ptr_eq(&found, &read), "it is read once");
        let holds = |tree: &Saved| {
            let in_use = trees.trees.in_use.lock().unwrap();
            in_use.iter().any(|one| one.is_held_by("token:reader") && one.tree_of(&tree.name, &tree.value).is_some())
        };
        assert!(holds(&read));
        drop(found);
        assert!(!holds(&read));
    }

    /// On one thread no read ends before all have asked.
    #[tokio::test]
    async fn requests_for_absent_names_share_reads_of_the_log() {
        let dir = tempfile::tempdir().unwrap();
        let repository = saved(dir.path(), &["a"]).await;
        let requests = || repository.store().counters().get(Metric::GetRequests);
        let absent = "b".parse().unwrap();
        let before = requests();
        repository.resolve_readable(&absent, |_| true).await.unwrap_err();
        let one = requests() - before;
        let before = requests();
        let all = join_all((0..100).map(|_| repository.resolve_readable(&absent, |_| true))).await;
        assert!(all.iter().all(|found| found.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotFound)));
        assert!(requests() - before <= 3 * one, "{} for all, {one} for one", requests() - before);
        // A state that is older than the request does not answer it.
        repository.save(&dir.path().join("file"), &"b".parse().unwrap(), &SaveOptions::default()).await.unwrap();
        assert!(repository.resolve_readable(&absent, |_| true).await.is_ok());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_name_that_is_gone_is_told_without_the_names_that_are_left() {
        let dir = tempfile::tempdir().unwrap();
        let repository = saved(dir.path(), &["secret-1"]).await;
        let (trees, name) = (OpenTrees::default(), "secret-2".parse().unwrap());
        let error = trees.open(&repository, &name).await.unwrap_err();
        assert!(error.to_string().contains("secret-1"), "{error:?}");
        let error = trees.open_for(&repository, &name, false).await.unwrap_err();
        assert!(error.to_string().contains("secret-1"), "{error:?}");
        let error = trees.open_for(&repository, &name, true).await.unwrap_err();
        assert_eq!((error.kind(), error.to_string().contains("secret-1")), (ErrorKind::NotFound, false), "{error:?}");
    }
}
