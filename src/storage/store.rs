//! An open store, and how to open one.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{Either, select};
use object_store::ObjectStore;
use object_store::memory::InMemory;

use super::bucket::Bucket;
use super::directory::open_directory;
use super::location::Location;
use super::metered::Metered;
use super::notice::Notices;
use super::options::{STALL, StoreOptions};
use super::s3;
use super::watchdog::Watchdog;
use crate::error::{Error, Result};
use crate::metrics::StoreCounters;

/// An open store with the repository as its root: callers use keys such as `log/0000`. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Store(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    objects: Arc<dyn ObjectStore>,
    location: Location,
    counters: Arc<StoreCounters>,
    bucket: Option<Bucket>,
}

impl Store {
    /// Creates an empty store in memory.
    #[must_use]
    pub fn memory() -> Self {
        Self::from_objects(Arc::new(InMemory::new()))
    }

    /// Wraps any object store with the usual counters and watchdog; for tests and simulations.
    #[must_use]
    pub fn from_objects(objects: Arc<dyn ObjectStore>) -> Self {
        Self::decorated(objects, STALL, Location::Memory, None)
    }

    /// As [`Store::from_objects`]; requests fail after `stall` without progress.
    #[must_use]
    pub fn from_objects_watched(objects: Arc<dyn ObjectStore>, stall: Duration) -> Self {
        Self::decorated(objects, stall, Location::Memory, None)
    }

    fn decorated(objects: Arc<dyn ObjectStore>, stall: Duration, location: Location, bucket: Option<Bucket>) -> Self {
        let counters = Arc::new(StoreCounters::default());
        let objects =
            Arc::new(Metered::new(Watchdog::new(objects, &location, stall), location.clone(), Arc::clone(&counters)));
        Self(Arc::new(Inner { objects, location, counters, bucket }))
    }

    /// Interface to the objects.
    #[must_use]
    pub fn objects(&self) -> &Arc<dyn ObjectStore> {
        &self.0.objects
    }

    /// Location. A directory's path has its symbolic links resolved.
    #[must_use]
    pub fn location(&self) -> &Location {
        &self.0.location
    }

    /// Addresses that whoever opened it chose, the least exact first: its location and, for a bucket at an endpoint, the URL
    /// `ENDPOINT/BUCKET/PREFIX`.
    #[must_use]
    pub fn addresses(&self) -> Vec<String> {
        let mut addresses = vec![self.location().to_string()];
        if let Some(bucket) = &self.0.bucket {
            addresses.extend(bucket.url());
        }
        addresses
    }

    /// Location, with the endpoint of a bucket if there is one: two stores with the same address are the same store.
    #[must_use]
    pub fn address(&self) -> String {
        match self.0.bucket.as_ref().and_then(Bucket::endpoint) {
            Some(endpoint) => format!("{} on {endpoint}", self.location()),
            None => self.location().to_string(),
        }
    }

    /// Requests and bytes so far.
    #[must_use]
    pub fn counters(&self) -> &Arc<StoreCounters> {
        &self.0.counters
    }

    /// True if reads need no network.
    #[must_use]
    pub fn is_local(&self) -> bool {
        !matches!(self.0.location, Location::S3 { .. })
    }

    /// The directory, if it is one.
    #[must_use]
    pub fn directory(&self) -> Option<&Path> {
        match &self.0.location {
            Location::Directory(path) => Some(path),
            Location::S3 { .. } | Location::Memory => None,
        }
    }

    /// The bucket, if it is one, for operations that `object_store` lacks.
    #[must_use]
    pub fn bucket(&self) -> Option<&Bucket> {
        self.0.bucket.as_ref()
    }
}

impl fmt::Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.location.fmt(f)
    }
}

/// Opens the store at `location`. With `create`, a missing directory or bucket is created; without it, this is `NotFound`. For S3
/// one request is sent, so that wrong credentials are `Denied` and a closed port is `Unreachable` here and not later.
///
/// Cancel safe: the directory or bucket may have been created.
pub async fn open(location: &Location, options: &StoreOptions) -> Result<Store> {
    open_and(location, options, async |store| Ok(store.clone())).await
}

/// As [`open`], and does `first` with the store while S3 answers that request; errors of `first` count only after that.
///
/// Cancel safe: as [`open`] and `first`.
pub async fn open_and<T>(
    location: &Location,
    options: &StoreOptions,
    first: impl AsyncFnOnce(&Store) -> Result<T>,
) -> Result<T> {
    let opened = async {
        let store = connect(location, options).await?;
        let Some(bucket) = store.bucket() else { return first(&store).await };
        if options.create {
            bucket.create_if_missing().await?;
        }
        let mut begun = std::pin::pin!(first(&store));
        let checked = std::pin::pin!(bucket.check());
        match select(checked, &mut begun).await {
            Either::Left((checked, _)) => {
                checked?;
                begun.await
            }
            Either::Right((done, checked)) => checked.await.and(done),
        }
    };
    let what = || "open the repository's store".to_owned();
    Notices::new(location).during(what, (Duration::ZERO, options.stall), Box::pin(opened)).await
}

/// Addresses of the store at `location`, which need not exist: see [`Store::addresses`].
///
/// # Errors
/// As [`connect`], for a bucket.
///
/// # Cancel safety
/// Safe: it only reads.
pub async fn addresses(location: &Location, options: &StoreOptions) -> Result<Vec<String>> {
    match location {
        Location::S3 { .. } => Ok(connect(location, options).await?.addresses()),
        Location::Directory(_) | Location::Memory => Ok(vec![location.to_string()]),
    }
}

/// As [`open`], but sends no request to a bucket and creates none: for `doctor`, which reports each request before it fails.
///
/// Cancel safe: as [`open`].
pub async fn connect(location: &Location, options: &StoreOptions) -> Result<Store> {
    match location {
        Location::Directory(path) => {
            let (path, create, shared) = (path.clone(), options.create, options.shared);
            let opened = tokio::task::spawn_blocking(move || open_directory(&path, create, shared)).await;
            let (objects, path) = opened.map_err(|e| Error::other("directory could not be opened").source(e))??;
            Ok(Store::decorated(Arc::new(objects), options.stall, Location::Directory(path), None))
        }
        Location::S3 { .. } if options.shared.is_some() => Err(Error::usage("only a directory is shared by its modes")
            .at(location)
            .help("leave --shared out: in S3 the bucket's policies say who may do what")),
        Location::S3 { bucket, prefix } => {
            let (objects, bucket) = s3::connect(bucket, prefix, options).await?;
            Ok(Store::decorated(objects, options.stall, location.clone(), Some(bucket)))
        }
        Location::Memory => Err(Error::usage("a store in memory cannot be opened by its address").at(location)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;
    use object_store::ObjectStoreExt;

    #[tokio::test]
    async fn a_directory_is_made_only_when_asked() {
        let dir = tempfile::tempdir().unwrap();
        let location = Location::directory(dir.path().join("a/b")).unwrap();
        let error = open(&location, &StoreOptions::default()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);

        let create = StoreOptions { create: true, ..StoreOptions::default() };
        for _ in 0..2 {
            let store = open(&location, &create).await.unwrap();
            assert!(store.is_local() && store.bucket().is_none());
            store.objects().put(&"log/0".into(), "x".into()).await.unwrap();
            assert!(store.directory().unwrap().join("log/0").is_file());
        }
        let file = Location::directory(dir.path().join("a/b/log/0")).unwrap();
        assert_eq!(open(&file, &StoreOptions::default()).await.unwrap_err().kind(), ErrorKind::Usage);
    }
}
