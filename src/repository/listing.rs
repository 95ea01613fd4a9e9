//! Listings of a store's objects in bounded memory, whatever the store lists.

use futures::stream::BoxStream;
use futures::{Stream, TryStreamExt as _};
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore};

use super::objects;
use crate::budget::{Budget, GrowingMemory};
use crate::error::{Error, Result};

/// Maximum number of objects of a listing that are not the repository's.
const FOREIGN_MAX: u64 = 1 << 20;

/// Selection of the objects below `prefix` by `pick`, as they are listed. Others take no memory.
///
/// Its errors are those of the store; unsupported, if it lists more than [`FOREIGN_MAX`] objects that are left out: what never ends
/// ends there.
pub(super) fn listing<T, P: Fn(ObjectMeta) -> Option<T>>(
    store: &dyn ObjectStore,
    prefix: &Path,
    pick: P,
) -> impl Stream<Item = Result<T>> + use<T, P> {
    select(store.list(Some(prefix)), prefix, pick)
}

fn select<T, P: Fn(ObjectMeta) -> Option<T>>(
    listed: BoxStream<'static, object_store::Result<ObjectMeta>>,
    prefix: &Path,
    pick: P,
) -> impl Stream<Item = Result<T>> + use<T, P> {
    let (mut foreign, prefix) = (0, prefix.clone());
    listed.map_err(Error::from).try_filter_map(move |meta| {
        let picked = pick(meta);
        foreign += u64::from(picked.is_none());
        let outcome = if foreign > FOREIGN_MAX { Err(too_many(&prefix)) } else { Ok(picked) };
        std::future::ready(outcome)
    })
}

fn too_many(prefix: &Path) -> Error {
    Error::unsupported("store lists too many objects that are not the repository's")
        .at(prefix)
        .expected(format!("at most {FOREIGN_MAX}"))
        .help("remove them, or give the repository a prefix of its own; `towline doctor` tests the store")
}

/// All of a [`listing`], tried again after temporary errors, and its memory: that of the list, and `heap` bytes of each.
///
/// # Errors
/// As [`listing`]; exhausted, if the list takes more than [`Budget::keep`] has left.
///
/// # Cancel safety
/// Safe: it only reads.
pub(super) async fn listed<T>(
    store: &dyn ObjectStore,
    budget: &Budget,
    prefix: &Path,
    pick: impl Fn(ObjectMeta) -> Option<T>,
    heap: impl Fn(&T) -> usize,
) -> Result<(Vec<T>, GrowingMemory)> {
    objects::retry(|| collect(listing(store, prefix, &pick), budget.keep_growing(), &heap))
        .await
        .map_err(|error| if error.place().is_none() { error.at(prefix) } else { error })
}

async fn collect<T>(
    listing: impl Stream<Item = Result<T>>,
    mut memory: GrowingMemory,
    heap: impl Fn(&T) -> usize,
) -> Result<(Vec<T>, GrowingMemory)> {
    let mut listing = std::pin::pin!(listing);
    let mut found: Vec<T> = Vec::new();
    while let Some(one) = listing.try_next().await? {
        let grown = if found.len() == found.capacity() { found.len().max(64) } else { 0 };
        memory.add((grown * size_of::<T>() + heap(&one)) as u64)?;
        found.reserve_exact(grown);
        found.push(one);
    }
    Ok((found, memory))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use futures::StreamExt as _;
    use futures::stream;

    use super::*;
    use crate::error::ErrorKind;
    use crate::limits::MEMORY_MIN;

    /// A store that lists `foreign` keys, then as many as it is asked for.
    fn endless(foreign: u64) -> (BoxStream<'static, object_store::Result<ObjectMeta>>, Arc<AtomicU64>) {
        let count = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&count);
        let keys = (0..).inspect(move |_| {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        let metas = keys.map(move |key: u64| {
            let kind = if key < foreign { "other" } else { "own" };
            Ok(ObjectMeta {
                location: format!("log/{kind}/{key:020}").into(),
                last_modified: std::time::SystemTime::UNIX_EPOCH.into(),
                size: 1,
                e_tag: None,
                version: None,
            })
        });
        (stream::iter(metas).boxed(), count)
    }

    #[tokio::test]
    async fn a_listing_without_end_ends_in_bounded_memory_and_requests() {
        let (prefix, budget) = (Path::from("log"), Budget::new(MEMORY_MIN).unwrap());
        let pick = |meta: ObjectMeta| meta.location.as_ref().strip_prefix("log/own/")?.parse::<u64>().ok();
        let (strangers, count) = endless(u64::MAX);
        let error = collect(select(strangers, &prefix, pick), budget.keep_growing(), |_| 0).await.unwrap_err();
        assert_eq!((error.kind(), count.load(Ordering::Relaxed)), (ErrorKind::Unsupported, FOREIGN_MAX + 1));
        assert!(error.to_string().contains("too many objects that are not the repository's at log"), "{error}");

        let (own, count) = endless(0);
        let error = collect(select(own, &prefix, pick), budget.keep_growing(), |_| 0).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Exhausted);
        let count = count.load(Ordering::Relaxed);
        assert!(count <= budget.kept_max() / 8 + 1, "{count}");
        // The memory of the failed listing is free again.
        budget.keep(budget.kept_max()).unwrap();

        let (mixed, _) = endless(1000);
        let few = select(mixed.take(3000).boxed(), &prefix, pick);
        let (found, memory) = collect(few, budget.keep_growing(), |_| 100).await.unwrap();
        assert_eq!(found, (1000..3000).collect::<Vec<_>>());
        assert!(budget.keep(budget.kept_max() - 2000 * 108).is_err());
        drop(memory);
        assert!(budget.keep(budget.kept_max()).is_ok());
    }
}
