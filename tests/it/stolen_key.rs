//! Whoever may write to the store but not delete from it has nothing deleted by the next collect, whatever they write.
//!
//! S8: "Nothing is deleted sooner than `--grace` (a day) after a collect first found it unneeded, by the store's clock.
//! That holds for the content of removed names and for content that forged log entries declare unneeded; a pack that a
//! name uses is never deleted, whatever the log says. A snapshot that does not follow from the log's entries stops the
//! collect, which names it."

use std::fs;
use std::path::Path;
use std::time::Duration;

use futures::TryStreamExt as _;
use object_store::ObjectStoreExt as _;
use towline::error::ErrorKind;
use towline::format::envelope::{Kind, seal};
use towline::format::wire::Writer;
use towline::ops::{CollectOptions, CollectReport, RestoreOptions, SaveOptions};
use towline::repository::log::{Action, State};
use towline::repository::{OpenOptions, Repository};
use towline::storage::Store;

use crate::data::{name, noise};

struct Scene {
    dir: tempfile::TempDir,
    store: Store,
    repository: Repository,
}

impl Scene {
    /// A repository with one name, "kept".
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::memory();
        let options =
            OpenOptions { cache: Some(dir.path().to_owned()), memory: Some(128 << 20), ..OpenOptions::default() };
        let repository = Repository::create(store.clone(), options).await.unwrap().0;
        let scene = Self { dir, store, repository };
        fs::write(scene.path("f"), noise(1, 3_000_000)).unwrap();
        scene.repository.save(&scene.path("f"), &name("kept"), &SaveOptions::default()).await.unwrap();
        scene
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }

    async fn put(&self, key: &str, kind: Kind, body: &[u8]) {
        self.store.objects().put(&key.into(), seal(kind, body, false).into()).await.unwrap();
    }

    /// Objects of saved trees.
    async fn content(&self) -> Vec<String> {
        let mut content = Vec::new();
        for family in ["pack", "index", "manifest", "map"] {
            content.extend(self.keys(family).await);
        }
        content
    }

    async fn keys(&self, prefix: &str) -> Vec<String> {
        let prefix = object_store::path::Path::from(prefix);
        let listed = self.store.objects().list(Some(&prefix)).map_ok(|meta| meta.location.to_string());
        listed.try_collect().await.unwrap()
    }

    async fn collect(&self, grace: Duration) -> towline::error::Result<CollectReport> {
        self.repository.collect(&CollectOptions { grace, ..CollectOptions::at_once() }).await
    }

    async fn restores(&self) {
        let dest = self.path("restored");
        self.repository.restore(&name("kept"), None, &dest, &RestoreOptions::default()).await.unwrap();
        assert!(fs::read(&dest).unwrap() == noise(1, 3_000_000));
        remove(&dest);
    }
}

fn remove(path: &Path) {
    fs::remove_file(path).unwrap();
}

const DAY: Duration = Duration::from_hours(24);

#[tokio::test(flavor = "multi_thread")]
async fn a_planted_snapshot_stops_the_collect() {
    let scene = Scene::new().await;
    let last = scene.repository.state().await.unwrap().seq;
    let before = scene.content().await;
    for planted in [last, last + 7] {
        let empty = State { seq: planted, ..State::default() };
        let key = format!("snapshot/{planted:020}");
        scene.put(&key, Kind::Snapshot, &empty.encode()).await;
        for grace in [DAY, Duration::ZERO] {
            let error = scene.collect(grace).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Damaged, "{error:?}");
            assert!(format!("{error:?}").contains(&key), "{error:?}");
        }
        assert_eq!(scene.content().await, before);
        scene.store.objects().delete(&key.as_str().into()).await.unwrap();
    }
    scene.collect(DAY).await.unwrap();
    scene.restores().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pack_that_is_used_is_not_deleted_though_the_log_says_it_is_purged() {
    let scene = Scene::new().await;
    let state = scene.repository.state().await.unwrap();
    let marks = towline::repository::collect::mark(&scene.repository, &state).await.unwrap();
    let pack = *marks.packs().next().unwrap();
    let log = scene.repository.log();
    let condemned = Action::Condemn { pack: pack.id, len: pack.len, damaged: false };
    let at = log.commit(None, |_| Ok(vec![condemned.clone()])).await.unwrap().entry.unwrap();
    log.commit(None, |_| Ok(vec![Action::Purge { pack: pack.id, at }])).await.unwrap();
    let before = scene.keys("pack").await;
    scene.collect(DAY).await.unwrap();
    assert!(scene.keys("pack").await.contains(&before[0]), "the pack stays for the grace");
    scene.restores().await;
    // Its chunks have moved: now it may go.
    scene.collect(Duration::ZERO).await.unwrap();
    assert!(!scene.keys("pack").await.contains(&before[0]));
    scene.restores().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_removed_name_needed_is_kept_for_the_grace_by_the_stores_clock() {
    let scene = Scene::new().await;
    let before = scene.content().await;
    // Its pack, manifest and map: the index goes on listing the pack until that is purged.
    let needed = 3;
    let removed = scene.repository.state().await.unwrap().refs[&name("kept")].clone();
    scene.repository.remove(&name("kept")).await.unwrap();
    for _ in 0..2 {
        let report = scene.collect(DAY).await.unwrap();
        assert_eq!((report.deleted_objects, report.waiting_objects), (0, needed), "{report:?}");
        assert_eq!(scene.content().await, before);
        assert_eq!(scene.keys("tombstone").await.len(), 1, "a list is written once");
    }
    // The name comes back: what it needs is not unneeded any more, and its next grace begins anew.
    let set = Action::SetRef { name: name("kept"), expected: None, value: removed };
    scene.repository.log().commit(None, |_| Ok(vec![set.clone()])).await.unwrap();
    let report = scene.collect(DAY).await.unwrap();
    assert_eq!((report.waiting_objects, scene.keys("tombstone").await.len()), (0, 0), "{report:?}");
    scene.restores().await;

    scene.repository.remove(&name("kept")).await.unwrap();
    let moment = Duration::from_millis(1);
    let report = scene.collect(moment).await.unwrap();
    assert_eq!((report.deleted_objects, report.waiting_objects), (0, needed), "{report:?}");
    tokio::time::sleep(Duration::from_millis(20)).await;
    let report = scene.collect(moment).await.unwrap();
    assert!(report.deleted_objects >= needed && report.freed_bytes > 3_000_000, "{report:?}");
    assert_eq!(
        (scene.content().await.len(), report.waiting_objects),
        (1, 1),
        "the segment was replaced by none: {report:?}"
    );
    tokio::time::sleep(Duration::from_millis(20)).await;
    scene.collect(moment).await.unwrap();
    assert!(scene.content().await.is_empty() && scene.keys("tombstone").await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_of_what_is_needed_deletes_nothing() {
    let scene = Scene::new().await;
    let before = scene.content().await;
    let items: Vec<_> = scene.repository.state().await.unwrap().refs.values().map(|value| value.map_key).collect();
    let planted: Vec<_> = items.iter().map(|id| (towline::repository::layout::Family::Map, *id)).collect();
    let body = towline::repository::collect::tombstones::encode(&planted);
    let key = towline::repository::layout::tombstone(towline::id::Owned::fresh(towline::id::SessionId::random()));
    scene.put(key.as_ref(), Kind::Tombstone, &body).await;
    scene.put("tombstone/not-ours", Kind::Tombstone, &body).await;
    let torn = towline::repository::layout::tombstone(towline::id::Owned::fresh(towline::id::SessionId::random()));
    scene.put(torn.as_ref(), Kind::Tombstone, &body[..20]).await;
    scene.collect(DAY).await.unwrap();
    assert_eq!(scene.content().await, before);
    assert_eq!(scene.keys("tombstone").await, ["tombstone/not-ours"]);
    scene.restores().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_moved_boundary_deletes_no_log() {
    let scene = Scene::new().await;
    for _ in 0..80 {
        scene.repository.copy(&name("kept"), &name("other")).await.unwrap();
        scene.repository.remove(&name("other")).await.unwrap();
    }
    let snapshot = scene.keys("snapshot").await.pop().unwrap();
    let entries = scene.keys("log").await;
    let floor = snapshot.rsplit('/').next().unwrap().parse::<u64>().unwrap();
    let mut body = Writer::new();
    body.varint(floor);
    scene.put("boundary/00000000000000000001", Kind::Boundary, &body.into_bytes()).await;
    scene.collect(DAY).await.unwrap();
    let left = scene.keys("log").await;
    assert!(entries.iter().all(|entry| left.contains(entry)));
    scene.collect(Duration::ZERO).await.unwrap();
    assert!(scene.keys("log").await.len() < entries.len());
    scene.restores().await;
}
