//! An open store, and how to open one.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;

use super::bucket::Bucket;
use super::direct::Direct;
use super::home::Home;
use super::location::Location;
use super::metered::Metered;
use super::modes::{Modes, Sharing};
use super::s3::{self, Keys};
use super::watchdog::Watchdog;
use crate::error::{Error, Result};
use crate::metrics::StoreCounters;

/// A request without progress for this long fails.
pub const STALL: Duration = Duration::from_mins(1);

/// Options to open a store with.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// The S3 endpoint; else `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL`, the profile's, or AWS itself.
    pub endpoint: Option<String>,
    /// Whether plain http may go further than this machine.
    pub allow_http: bool,
    /// Whether to make the directory or bucket if it is not there.
    pub create: bool,
    /// With whom a new repository in a directory is shared; nobody, if not told. One that is there keeps what it has.
    pub shared: Option<Sharing>,
    /// The S3 region; else that of the environment, the profile or the instance, or `us-east-1`.
    pub region: Option<String>,
    /// S3 keys instead of the chain of credentials.
    pub keys: Option<Keys>,
    /// A request without progress for this long fails.
    pub stall: Duration,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self { endpoint: None, allow_http: false, create: false, shared: None, region: None, keys: None, stall: STALL }
    }
}

/// An open store, rooted at the repository: callers use keys such as `log/0000`. Cheap to clone.
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
    /// An empty store in memory.
    #[must_use]
    pub fn memory() -> Self {
        Self::from_objects(Arc::new(InMemory::new()))
    }

    /// A store over any objects, counted and watched like every other; for tests and simulations.
    #[must_use]
    pub fn from_objects(objects: Arc<dyn ObjectStore>) -> Self {
        Self::decorated(objects, STALL, Location::Memory, None)
    }

    /// As [`Store::from_objects`], failing after `stall` without progress.
    #[must_use]
    pub fn from_objects_watched(objects: Arc<dyn ObjectStore>, stall: Duration) -> Self {
        Self::decorated(objects, stall, Location::Memory, None)
    }

    fn decorated(objects: Arc<dyn ObjectStore>, stall: Duration, location: Location, bucket: Option<Bucket>) -> Self {
        let counters = Arc::new(StoreCounters::default());
        let objects = Arc::new(Metered::new(Watchdog::new(objects, stall), location.clone(), Arc::clone(&counters)));
        Self(Arc::new(Inner { objects, location, counters, bucket }))
    }

    /// The objects.
    #[must_use]
    pub fn objects(&self) -> &Arc<dyn ObjectStore> {
        &self.0.objects
    }

    /// Location. A directory's path has its symbolic links resolved.
    #[must_use]
    pub fn location(&self) -> &Location {
        &self.0.location
    }

    /// Its location, and the endpoint of a bucket that has one: two stores with the same address are the same store.
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

    /// Whether reading from it costs no network.
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

    /// The bucket, if it is one: for what `object_store` cannot reach.
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

/// Opens the store at `location`. With `create`, a directory or bucket that is not there is made (again is no error);
/// without, it is `NotFound`. For S3 one request is made, so that wrong credentials are `Denied` and a closed port is
/// `Unreachable` here and not later.
///
/// Cancel safe: at worst the directory or bucket was made.
pub async fn open(location: &Location, options: &StoreOptions) -> Result<Store> {
    let store = connect(location, options).await?;
    if let Some(bucket) = store.bucket() {
        if options.create {
            bucket.create_if_missing().await?;
        }
        bucket.check().await?;
    }
    Ok(store)
}

/// As [`open`], but nothing is asked of a bucket, nor is one made: for whoever wants to say what was tried before it
/// fails, as `doctor` does.
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

/// Objects are files, written beside their place, fsynced, moved into it, and the folder fsynced: an acknowledged put
/// survives a power loss; large ones past the page cache. Deletes are not fsynced, so one may come undone. Empty folders are left: removing them would
/// race writers. What a crash leaves behind is told in [`super::staging_files`].
fn open_directory(path: &Path, create: bool, shared: Option<Sharing>) -> Result<(Direct, PathBuf)> {
    let modes = Modes::recorded(path);
    let new = Modes::of(shared.unwrap_or_default());
    if modes.is_some_and(|modes| shared.is_some() && modes != new) {
        return Err(Error::usage("the repository is there already, and is shared in another way")
            .at(path.display())
            .help("change the modes of its files and folders: docs/operations.md says how"));
    }
    if create && modes.is_none() {
        make_root(path, new, shared).map_err(|e| Error::io("directory cannot be made", path, e))?;
    }
    let modes = modes.unwrap_or(new);
    let found = path.canonicalize().map_err(|e| {
        let error = Error::io("directory cannot be opened", path, e);
        if create { error } else { error.help("`towline init` makes it") }
    })?;
    if !found.is_dir() {
        return Err(Error::usage("repository path is not a directory").at(path.display()));
    }
    let objects = LocalFileSystem::new_with_prefix(&found)?.with_fsync(true).with_automatic_cleanup(false);
    let home = Home::of(&found).map_err(|e| Error::io("directory cannot be opened", path, e))?;
    Ok((Direct::new(objects, home, found.clone(), modes), found))
}

/// Makes the folder of a new repository. One that is there already keeps its mode, unless it is to be shared.
fn make_root(path: &Path, modes: Modes, shared: Option<Sharing>) -> std::io::Result<()> {
    let there = path.exists();
    create_durably(path)?;
    if there && shared.is_none() { Ok(()) } else { modes.set_folder(path) }
}

/// `mkdir -p` whose result survives a power loss: each new folder's entry is synced in its parent.
fn create_durably(path: &Path) -> std::io::Result<()> {
    let missing: Vec<&Path> = path.ancestors().take_while(|folder| !folder.exists()).collect();
    std::fs::create_dir_all(path)?;
    missing.iter().filter_map(|folder| folder.parent()).try_for_each(|parent| std::fs::File::open(parent)?.sync_all())
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
