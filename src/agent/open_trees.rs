//! Cache of open trees.

use std::collections::VecDeque;
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
    opening: SingleFlight<(Name, MapKey, Option<LocalCaller>), Arc<Saved>>,
    permits: Arc<Semaphore>,
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
    /// Tenant or token that opened it, if its rights are limited.
    opener: Option<String>,
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
    pub(super) async fn open(&self, repository: &Repository, name: &Name) -> Result<Arc<Saved>> {
        let state = repository.state().await?;
        // The error names the names nearby.
        let Some(value) = state.refs.get(name) else { return Ok(repository.saved(name).await?.shared()) };
        if let Some(found) = self.trees.find(name, value) {
            // The policy may have changed since it was opened.
            repository.check_readable(name, &found.value.manifest).await?;
            return Ok(found);
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
                    return Ok(found);
                }
                let saved = repository.saved(&name).await?.shared();
                let opener = repository.caller().and_then(LocalCaller::limited);
                trees.use_memory(&saved, opener, repository.budget().kept_max())?;
                trees.keep(&saved);
                Ok(saved)
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
    pub(super) async fn open_for(&self, repository: &Repository, name: &Name, is_limited: bool) -> Result<Arc<Saved>> {
        match self.open(repository, name).await {
            Err(error) if is_limited => Err(without_offers(repository, name, error).await),
            opened => opened,
        }
    }
}

impl Trees {
    fn keep(&self, saved: &Arc<Saved>) {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        recent.retain(|other| other.name != saved.name);
        recent.push_front(Arc::clone(saved));
        recent.truncate(OPEN_MAX);
    }

    /// Counts a tree that is opened. Slow readers of many trees must not take the memory of all: tenants and tokens take half of it,
    /// and one of them, the `opener`, half of that. Recent trees that nobody reads are closed first.
    ///
    /// # Errors
    /// Exhausted, if it and the trees that are read take more than `most` bytes; one always may.
    fn use_memory(&self, saved: &Arc<Saved>, opener: Option<&str>, most: u64) -> Result<()> {
        let weight = saved.weight();
        let mut in_use = self.in_use.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            in_use.retain(|one| one.tree.strong_count() > 0);
            let sum = |of: &dyn Fn(&TreeInUse) -> bool| -> u64 {
                in_use.iter().filter(|one| of(one)).map(|one| one.weight).sum()
            };
            let fits = |used: u64, most: u64| used == 0 || used + weight <= most;
            let own = opener.map_or(0, |opener| sum(&|one| one.opener.as_deref() == Some(opener)));
            let limited = opener.map_or(0, |_| sum(&|one| one.opener.is_some()));
            let (limit, whose) = if !fits(sum(&|_| true), most) {
                (most, "all of them")
            } else if !fits(limited, most / 2) {
                (most / 2, "those of all tenants and tokens")
            } else if !fits(own, most / 4) {
                (most / 4, "those of one tenant or token")
            } else {
                let opener = opener.map(str::to_owned);
                in_use.push(TreeInUse { tree: Arc::downgrade(saved), weight, opener });
                return Ok(());
            };
            if self.recent.lock().unwrap_or_else(PoisonError::into_inner).pop_back().is_some() {
                continue;
            }
            return Err(Error::exhausted("too many large trees are read at once")
                .at(&saved.name)
                .expected(format!("at most {} for {whose}", size::show(limit)))
                .got(format!("{} more", size::show(weight)))
                .help("try again when others have been read, or raise the agent's `memory`"));
        }
    }

    /// Keys of objects are unique across repositories, so the repository of a value does not matter.
    fn find(&self, name: &Name, value: &RefValue) -> Option<Arc<Saved>> {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let at = recent.iter().position(|saved| saved.name == *name && saved.value == *value)?;
        let found = recent.remove(at)?;
        recent.push_front(Arc::clone(&found));
        Some(found)
    }
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
        let used_of = |most: u64, tree: &Arc<Saved>, opener: Option<&str>| {
            trees.use_memory(tree, opener, most)?;
            trees.keep(tree);
            Ok::<_, Error>(())
        };
        // For two and a half.
        let used = |tree: &Arc<Saved>, opener: Option<&str>| used_of(one * 5 / 2, tree, opener);
        let [a, b, c, d] = <[Arc<Saved>; 4]>::try_from(opened).unwrap();
        used(&a, None).unwrap();
        used(&b, None).unwrap();
        // Recent ones that nobody reads.
        drop((a, b));
        used(&c, None).unwrap();
        used(&d, None).unwrap();
        let a = repository.saved(&"a".parse().unwrap()).await.unwrap().shared();
        assert_eq!(used(&a, None).unwrap_err().kind(), ErrorKind::Exhausted);
        drop((c, d));
        // For five, of which tenants and tokens have two and a half.
        let used = |tree: &Arc<Saved>, opener: Option<&str>| used_of(one * 5, tree, opener);
        used(&a, Some("clinic")).unwrap();
        let b = repository.saved(&"b".parse().unwrap()).await.unwrap().shared();
        let refused = used(&b, Some("clinic")).unwrap_err();
        assert!(format!("{refused:?}").contains("those of one tenant or token"), "{refused:?}");
        used(&b, Some("token:other")).unwrap();
        let c = repository.saved(&"c".parse().unwrap()).await.unwrap().shared();
        let refused = used(&c, Some("token:third")).unwrap_err();
        assert!(format!("{refused:?}").contains("those of all tenants and tokens"), "{refused:?}");
        used(&c, None).unwrap();
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
