//! Whoever may write to the store but not delete from it has nothing deleted by the next collect, whatever they write.
//!
//! S8: "Nothing is deleted sooner than `--grace` (a day) after a collect first found it unneeded, by the store's clock.
//! That holds for the content of removed names and for content that forged log entries declare unneeded; a pack that a
//! name uses is never deleted, whatever the log says. A map that is wrong about a pack harms no other name: `collect`
//! leaves the pack, and says which name that is. A snapshot that does not follow from the log's entries stops the collect,
//! which names it."

use std::fs;
use std::path::Path;
use std::time::Duration;

use futures::TryStreamExt as _;
use object_store::ObjectStoreExt as _;
use towline::error::ErrorKind;
use towline::format::envelope::{Kind, seal};
use towline::format::wire::Writer;
use towline::format::{Frame, Map};
use towline::id::{Owned, SessionId};
use towline::ops::{CollectOptions, CollectReport, RestoreOptions, SaveOptions};
use towline::repository::layout::{self, Family};
use towline::repository::log::{Action, State};
use towline::repository::{OpenOptions, Repository, Saved};
use towline::storage::Store;

use crate::data::{name, noise};
use crate::plant::{empty_tree, plant};

struct Fixture {
    dir: tempfile::TempDir,
    store: Store,
    repository: Repository,
}

impl Fixture {
    /// A repository with one name, "kept".
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::memory();
        let options =
            OpenOptions { cache: Some(dir.path().to_owned()), memory: Some(128 << 20), ..OpenOptions::default() };
        let repository = Repository::create(store.clone(), options).await.unwrap().0;
        let fixture = Self { dir, store, repository };
        fs::write(fixture.path("f"), noise(1, 3_000_000)).unwrap();
        fixture.repository.save(&fixture.path("f"), &name("kept"), &SaveOptions::default()).await.unwrap();
        fixture
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

    /// Saves a folder of a small file and big ones with the numbers `files` as `to`.
    async fn save_tree(&self, to: &str, files: std::ops::Range<u64>) -> Saved {
        let folder = self.path(to);
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("small"), noise(100, 100)).unwrap();
        for n in files {
            fs::write(folder.join(n.to_string()), noise(10 + n, 500_000)).unwrap();
        }
        self.repository.save(&folder, &name(to), &SaveOptions::default()).await.unwrap();
        let saved = self.repository.saved(&name(to)).await.unwrap();
        assert_eq!(saved.map.packs.len(), 1);
        saved
    }

    /// Names a tree whose map says that each chunk of `of` is one byte of the smallest of them. It is the first map of all.
    async fn plant_map(&self, of: &Saved) {
        let frames = &of.map.frames;
        let smallest = *frames.iter().min_by_key(|frame| frame.stored_len).unwrap();
        let further = of.manifest.chunks.ids.iter().copied().zip(of.manifest.chunks.lens.iter().copied()).collect();
        let (manifest, body) = empty_tree().encode();
        let byte = |(at, frame): (usize, &Frame)| Frame {
            ordinal: frame.ordinal,
            offset: smallest.offset + at as u64,
            stored_len: 1,
            ..smallest
        };
        let frames = frames.iter().enumerate().map(byte).collect();
        let map = Map { manifest, packs: of.map.packs.clone(), frames, further };
        plant(&self.repository, "liar", &body, &map, SessionId::from_bytes([0; 16])).await;
    }

    /// Restores a tree of [`Fixture::save_tree`] and compares it with what was saved.
    async fn restores_tree(&self, from: &str) {
        let dest = self.path("restored-tree");
        self.repository.restore(&name(from), None, &dest, &RestoreOptions::default()).await.unwrap();
        for file in fs::read_dir(self.path(from)).unwrap().map(|file| file.unwrap()) {
            assert!(fs::read(dest.join(file.file_name())).unwrap() == fs::read(file.path()).unwrap(), "{file:?}");
        }
        fs::remove_dir_all(&dest).unwrap();
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
    let fixture = Fixture::new().await;
    let last = fixture.repository.state().await.unwrap().seq;
    let before = fixture.content().await;
    for planted in [last, last + 7] {
        let mut empty = State::default();
        empty.seq += planted;
        let key = format!("snapshot/{planted:020}");
        fixture.put(&key, Kind::Snapshot, &empty.encode()).await;
        for grace in [DAY, Duration::ZERO] {
            let error = fixture.collect(grace).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Damaged, "{error:?}");
            assert!(format!("{error:?}").contains(&key), "{error:?}");
        }
        assert_eq!(fixture.content().await, before);
        fixture.store.objects().delete(&key.as_str().into()).await.unwrap();
    }
    fixture.collect(DAY).await.unwrap();
    fixture.restores().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pack_that_is_used_is_not_deleted_though_the_log_says_it_is_purged() {
    let fixture = Fixture::new().await;
    let state = fixture.repository.state().await.unwrap();
    let marks = towline::repository::collect::mark(&fixture.repository, &state).await.unwrap();
    let pack = *marks.packs().next().unwrap();
    let log = fixture.repository.log();
    let condemned = Action::Condemn { pack: pack.id, len: pack.len, damaged: false };
    let at = log.commit(None, |_| Ok(vec![condemned.clone()])).await.unwrap().entry.unwrap();
    log.commit(None, |_| Ok(vec![Action::Purge { pack: pack.id, at }])).await.unwrap();
    let before = fixture.keys("pack").await;
    fixture.collect(DAY).await.unwrap();
    assert!(fixture.keys("pack").await.contains(&before[0]), "the pack stays for the grace");
    fixture.restores().await;
    // Its chunks have moved: now it may go.
    fixture.collect(Duration::ZERO).await.unwrap();
    assert!(!fixture.keys("pack").await.contains(&before[0]));
    fixture.restores().await;
}

/// A map that makes a pack seem mostly unused, and its chunks others than they are.
#[tokio::test(flavor = "multi_thread")]
async fn a_pack_is_not_rewritten_because_a_map_says_that_its_chunks_are_short() {
    let fixture = Fixture::new().await;
    let victim = fixture.save_tree("victim", 0..6).await;
    fixture.plant_map(&victim).await;
    let before = fixture.keys("pack").await;
    for options in [CollectOptions::default(), CollectOptions::at_once()] {
        let report = fixture.repository.collect(&options).await.unwrap();
        assert_eq!((report.repacked_packs, report.condemned_packs), (0, 0), "{report:?}");
        fixture.restores_tree("victim").await;
    }
    assert_eq!(fixture.keys("pack").await, before);
}

/// The pack is mostly unused: those whose maps are right leave it, and it stays for the one whose map is wrong.
#[tokio::test(flavor = "multi_thread")]
async fn a_pack_that_a_map_is_wrong_about_is_left_and_other_trees_come_out_whole() {
    let fixture = Fixture::new().await;
    let all = fixture.save_tree("all", 0..6).await;
    let victim = fixture.save_tree("victim", 0..1).await;
    let pack = all.map.packs[0];
    assert_eq!(victim.map.packs, [pack]);
    fixture.plant_map(&victim).await;
    fixture.repository.remove(&name("all")).await.unwrap();
    for grace in [DAY, Duration::ZERO] {
        let report = fixture.collect(grace).await.unwrap();
        assert_eq!(report.repacked_packs, 0, "{report:?}");
        assert!(report.steps.iter().any(|step| step.contains("liar cannot be moved")), "{report:?}");
        fixture.restores_tree("victim").await;
    }
    let key = layout::owned(Family::Pack, pack.id).to_string();
    assert!(fixture.keys("pack").await.contains(&key));
    assert_ne!(fixture.repository.saved(&name("victim")).await.unwrap().map.packs, [pack]);
    // Nothing else needs it.
    fixture.repository.remove(&name("liar")).await.unwrap();
    fixture.collect(Duration::ZERO).await.unwrap();
    assert!(!fixture.keys("pack").await.contains(&key));
    fixture.restores_tree("victim").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_removed_name_needed_is_kept_for_the_grace_by_the_stores_clock() {
    let fixture = Fixture::new().await;
    let before = fixture.content().await;
    // Its pack, manifest and map: the index goes on listing the pack until that is purged.
    let needed = 3;
    let removed = fixture.repository.state().await.unwrap().refs[&name("kept")].clone();
    fixture.repository.remove(&name("kept")).await.unwrap();
    for _ in 0..2 {
        let report = fixture.collect(DAY).await.unwrap();
        assert_eq!((report.deleted_objects, report.waiting_objects), (0, needed), "{report:?}");
        assert_eq!(fixture.content().await, before);
        assert_eq!(fixture.keys("tombstone").await.len(), 1, "a list is written once");
    }
    // The name comes back: what it needs is not unneeded any more, and its next grace begins anew.
    let set = Action::SetRef { name: name("kept"), expected: None, value: removed };
    fixture.repository.log().commit(None, |_| Ok(vec![set.clone()])).await.unwrap();
    let report = fixture.collect(DAY).await.unwrap();
    assert_eq!((report.waiting_objects, fixture.keys("tombstone").await.len()), (0, 0), "{report:?}");
    fixture.restores().await;

    fixture.repository.remove(&name("kept")).await.unwrap();
    let moment = Duration::from_millis(1);
    let report = fixture.collect(moment).await.unwrap();
    assert_eq!((report.deleted_objects, report.waiting_objects), (0, needed), "{report:?}");
    tokio::time::sleep(Duration::from_millis(20)).await;
    let report = fixture.collect(moment).await.unwrap();
    assert!(report.deleted_objects >= needed && report.freed_bytes > 3_000_000, "{report:?}");
    assert_eq!(
        (fixture.content().await.len(), report.waiting_objects),
        (1, 1),
        "the segment was replaced by none: {report:?}"
    );
    tokio::time::sleep(Duration::from_millis(20)).await;
    fixture.collect(moment).await.unwrap();
    assert!(fixture.content().await.is_empty() && fixture.keys("tombstone").await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_of_what_is_needed_deletes_nothing() {
    let fixture = Fixture::new().await;
    let before = fixture.content().await;
    let items: Vec<_> = fixture.repository.state().await.unwrap().refs.values().map(|value| value.map_key).collect();
    let planted: Vec<_> = items.iter().map(|id| (Family::Map, *id)).collect();
    let body = towline::repository::collect::tombstones::encode(&planted);
    let key = layout::tombstone(Owned::fresh(SessionId::random()));
    fixture.put(key.as_ref(), Kind::Tombstone, &body).await;
    fixture.put("tombstone/not-ours", Kind::Tombstone, &body).await;
    let torn = layout::tombstone(Owned::fresh(SessionId::random()));
    fixture.put(torn.as_ref(), Kind::Tombstone, &body[..20]).await;
    fixture.collect(DAY).await.unwrap();
    assert_eq!(fixture.content().await, before);
    assert_eq!(fixture.keys("tombstone").await, ["tombstone/not-ours"]);
    fixture.restores().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_moved_boundary_deletes_no_log() {
    let fixture = Fixture::new().await;
    for _ in 0..80 {
        fixture.repository.copy(&name("kept"), &name("other")).await.unwrap();
        fixture.repository.remove(&name("other")).await.unwrap();
    }
    let snapshot = fixture.keys("snapshot").await.pop().unwrap();
    let entries = fixture.keys("log").await;
    let floor = snapshot.rsplit('/').next().unwrap().parse::<u64>().unwrap();
    let mut body = Writer::new();
    body.varint(floor);
    fixture.put("boundary/00000000000000000001", Kind::Boundary, &body.into_bytes()).await;
    fixture.collect(DAY).await.unwrap();
    let left = fixture.keys("log").await;
    assert!(entries.iter().all(|entry| left.contains(entry)));
    fixture.collect(Duration::ZERO).await.unwrap();
    assert!(fixture.keys("log").await.len() < entries.len());
    fixture.restores().await;
}
