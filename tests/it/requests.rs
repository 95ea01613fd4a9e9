//! Requests to the store, counted: how many there are does not grow with what a log entry may hold very many of.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt as _,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use towline::clock::{Clock as _, SystemClock, Timestamp};
use towline::id::{Owned, SessionId};
use towline::name::Name;
use towline::ops::{CollectOptions, RestoreOptions, SaveOptions, SyncOptions, sync};
use towline::repository::collect::{KeepUntil, outlived};
use towline::repository::layout::{self, Family};
use towline::repository::log::{Action, State};
use towline::repository::{OpenOptions, Repository};
use towline::storage::Store;
use towline::tree::MemoryFile;

use crate::data::{name, noise};

/// A store in memory that remembers reads of objects and of their metadata.
#[derive(Debug, Default)]
struct Counted {
    inner: InMemory,
    reads: Mutex<Vec<Path>>,
}

impl Counted {
    /// Keys of the reads since the last call.
    fn reads(&self) -> Vec<Path> {
        std::mem::take(&mut *self.reads.lock().unwrap())
    }

    /// Number of reads of manifests, and of maps, since the last call.
    fn tree_reads(&self) -> [usize; 2] {
        let reads = self.reads();
        [Family::Manifest, Family::Map].map(|family| {
            let prefix = layout::family(family);
            reads.iter().filter(|key| key.prefix_matches(&prefix)).count()
        })
    }
}

impl fmt::Display for Counted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Counted({})", self.inner)
    }
}

#[async_trait]
impl ObjectStore for Counted {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        self.inner.put_opts(location, payload, opts).await
    }

    async fn put_multipart_opts(&self, to: &Path, opts: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(to, opts).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.reads.lock().unwrap().push(location.clone());
        self.inner.get_opts(location, options).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.reads.lock().unwrap().push(location.clone());
        self.inner.get_ranges(location, ranges).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

async fn repository(objects: &Arc<Counted>, dir: &tempfile::TempDir) -> Repository {
    let store = Store::from_objects(Arc::clone(objects) as Arc<dyn ObjectStore>);
    let options =
        OpenOptions { cache: Some(dir.path().join("cache")), memory: Some(256 << 20), ..OpenOptions::default() };
    Repository::create(store, options).await.unwrap().0
}

/// Each session has a pack, or none; all were opened by one entry. Hours, if each is compared with each listed object.
#[tokio::test(flavor = "multi_thread")]
async fn a_collect_asks_once_for_the_time_of_an_entry_that_opened_very_many_sessions() {
    let dir = tempfile::tempdir().unwrap();
    let objects = Arc::new(Counted::default());
    let repository = repository(&objects, &dir).await;
    let sessions: Vec<SessionId> = (0..60_000).map(|_| SessionId::random()).collect();
    let open = || sessions.iter().map(|session| Action::Open(*session)).collect();
    repository.log().commit(Some(sessions[0]), |_| Ok(open())).await.unwrap();
    let (with_pack, _) = sessions.split_at(sessions.len() / 2);
    for session in with_pack {
        let key = layout::owned(Family::Pack, Owned::fresh(*session));
        objects.inner.put(&key, vec![0; 3].into()).await.unwrap();
    }
    for dry_run in [true, false] {
        objects.reads();
        let report = repository.collect(&CollectOptions { dry_run, ..CollectOptions::at_once() }).await.unwrap();
        let (reads, count) = (objects.reads(), with_pack.len() as u64);
        assert_eq!((report.held_packs, report.held_bytes, report.held.len() as u64), (count, 3 * count, count));
        assert!(report.held.iter().all(|held| held.ends.is_some()), "the time of each is known");
        assert!(reads.len() < 200, "{} reads", reads.len());
    }
}

/// A request for each entry that kept something, and a log entry with all that is forgotten, if they are not bounded.
#[tokio::test(flavor = "multi_thread")]
async fn very_many_kept_values_are_forgotten_by_few_requests_and_some_with_each_entry() {
    let dir = tempfile::tempdir().unwrap();
    let objects = Arc::new(Counted::default());
    let repository = repository(&objects, &dir).await;
    let files = vec![MemoryFile::new("f", [Bytes::from_static(b"bytes")])];
    repository.save(files, &name("saved"), &SaveOptions::default()).await.unwrap();
    let names: Vec<Name> = (0..20_000).map(|n| name(&format!("r/{n:05}"))).collect();
    let set = |state: &State| {
        let value = state.refs[&name("saved")].clone();
        let set = |name: &Name| Action::SetRef { name: name.clone(), expected: None, value: value.clone() };
        Ok(names.iter().map(set).collect())
    };
    repository.log().commit(None, set).await.unwrap();
    let (single, rest) = names.split_at(200);
    for taken in single.iter().map(std::slice::from_ref).chain([rest]) {
        let take = |state: &State| {
            let keep = taken.iter().map(|name| Action::Keep { name: name.clone(), version: state.refs[name].version });
            let gone = taken.iter().map(|name| (name.clone(), state.refs[name].version));
            let gone = gone.map(|(name, expected)| Action::RemoveRef { name, expected });
            Ok(keep.chain(gone).collect())
        };
        repository.log().commit(None, take).await.unwrap();
    }
    let state = repository.log().refresh().await.unwrap();
    assert_eq!(state.removed.len(), names.len());
    objects.reads();
    let now = KeepUntil::TakenBefore(SystemClock.now());
    assert_eq!(outlived(&repository, &state, now).await.unwrap(), Some(state.seq));
    let reads = objects.reads().len();
    assert!(reads < 20, "{reads} reads for 201 entries");
    assert_eq!(outlived(&repository, &state, KeepUntil::TakenBefore(Timestamp(0))).await.unwrap(), None);

    let options = CollectOptions { keep_removed: Duration::from_nanos(1), ..CollectOptions::at_once() };
    let planned = repository.collect(&CollectOptions { dry_run: true, ..options.clone() }).await.unwrap();
    assert_eq!((planned.forgotten_values, planned.kept_values), (20_000, 0));
    let report = repository.collect(&options).await.unwrap();
    assert_eq!((report.forgotten_values, report.kept_values), (20_000, 0));
    assert!(report.steps.len() < 1100 && report.steps.iter().any(|step| step.starts_with("forget 19000 more values")));
    let forgotten = repository.log().refresh().await.unwrap();
    assert!(forgotten.removed.is_empty() && forgotten.refs.len() == 1);
    // Opening, twice forgetting, closing, at least.
    assert!(forgotten.seq >= state.seq + 4, "{} after {}", forgotten.seq, state.seq);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sync_reads_a_tree_once_for_all_of_its_names() {
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let (source, destination) = (Arc::new(Counted::default()), Arc::new(Counted::default()));
    let (from, to) = (repository(&source, &dirs[0]).await, repository(&destination, &dirs[1]).await);
    let content = noise(1, 3_000_000);
    let save = async |repository: &Repository, to: &str, bytes: &[u8]| {
        let files = vec![MemoryFile::new("f", [Bytes::copy_from_slice(bytes)])];
        repository.save(files, &name(to), &SaveOptions::default()).await.unwrap();
    };
    // Older than the source's.
    save(&to, "n/07", b"another").await;
    save(&from, "n/00", &content).await;
    for n in 1..30 {
        from.copy(&name("n/00"), &name(&format!("n/{n:02}"))).await.unwrap();
    }
    save(&from, "other", &content[..1_000_000]).await;

    source.reads();
    let options = SyncOptions { dry_run: true, ..SyncOptions::default() };
    let planned = sync(&from, &to, &[], &options).await.unwrap();
    assert_eq!((planned.names, planned.planned.len(), source.tree_reads()), (31, 31, [2, 2]));
    assert!(planned.planned.iter().all(|one| one.replaces == (one.name == name("n/07"))));
    let moved: u64 = planned.planned.iter().map(|one| one.moved_bytes).sum();
    assert!(moved == planned.moved_bytes && planned.planned[0].moved_bytes > 2_900_000, "{planned:?}");

    let report = sync(&from, &to, &[], &SyncOptions::default()).await.unwrap();
    assert_eq!((report.names, source.tree_reads()), (31, [2, 2]));
    assert_eq!((report.moved_bytes, report.skipped_bytes), (planned.moved_bytes, planned.skipped_bytes));
    assert_eq!(report.replaced, [name("n/07")]);
    assert!(report.skipped_bytes > 29 * 2_900_000, "{report:?}");
    let (here, there) = (from.state().await.unwrap(), to.state().await.unwrap());
    for (name, value) in &here.refs {
        let copy = &there.refs[name];
        assert_eq!((copy.manifest, copy.saved, &copy.facts), (value.manifest, value.saved, &value.facts));
        assert_eq!((copy.logical_bytes, copy.files, copy.chunks), (value.logical_bytes, value.files, value.chunks));
    }
    assert!(there.removed_of(&name("n/07")).next().is_some(), "what it replaced can be restored");
    let dest = dirs[1].path().join("dest");
    to.restore(&name("n/29"), None, &dest, &RestoreOptions::default()).await.unwrap();
    assert!(std::fs::read(dest.join("f")).unwrap() == content);

    // All is there: each tree of the destination is read once.
    destination.reads();
    let again = sync(&from, &to, &[], &SyncOptions::default()).await.unwrap();
    assert_eq!((again.names, again.moved_bytes, destination.tree_reads()), (31, 0, [2, 2]));
    assert_eq!(again.skipped_bytes, report.moved_bytes + report.skipped_bytes);
}
