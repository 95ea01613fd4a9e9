//! Sources of a sync that somebody else wrote: what is wrong with one name neither reaches the destination nor keeps others out.

use std::fs;

use object_store::ObjectStoreExt as _;
use towline::error::ErrorKind;
use towline::format::{Manifest, Map};
use towline::id::{ManifestId, SessionId};
use towline::ops::{Existing, SaveOptions, SyncOptions, SyncReport, VerifyOptions, sync};
use towline::policy::Labels;
use towline::repository::layout::{self, Family};
use towline::repository::log::{Action, RefValue};
use towline::repository::{OpenOptions, Repository, Saved};
use towline::storage::{Location, Store, StoreOptions, open};

use crate::data::{name, noise};
use crate::differences;
use crate::plant::plant;

/// A source with a sound name, and a destination.
struct Fixture {
    dir: tempfile::TempDir,
    from: Repository,
    to: Repository,
}

impl Fixture {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let [from, to] = [repository(&dir, "a").await, repository(&dir, "b").await];
        fs::write(dir.path().join("file"), noise(1, 3_000_000)).unwrap();
        let fixture = Self { dir, from, to };
        fixture.save(&fixture.from, "sound").await;
        fixture
    }

    async fn save(&self, to: &Repository, saved: &str) {
        to.save(&self.dir.path().join("file"), &name(saved), &SaveOptions::default()).await.unwrap();
    }

    /// Names the tree of `sound` in the source as `to`, with a changed value.
    async fn name(&self, to: &str, change: impl Fn(RefValue) -> RefValue) {
        let value = change(RefValue { version: 0, ..self.saved().await.value });
        let set = Action::SetRef { name: name(to), expected: None, value };
        self.from.log().commit(None, |_| Ok(vec![set.clone()])).await.unwrap();
    }

    async fn saved(&self) -> Saved {
        self.from.saved(&name("sound")).await.unwrap()
    }

    async fn sync(&self) -> SyncReport {
        sync(&self.from, &self.to, &[], &SyncOptions::default()).await.unwrap()
    }
}

async fn repository(dir: &tempfile::TempDir, cache: &str) -> Repository {
    let options = OpenOptions { cache: Some(dir.path().join(cache)), memory: Some(64 << 20), ..OpenOptions::default() };
    Repository::create(Store::memory(), options).await.unwrap().0
}

/// Gives the tree of `saved` a map of its own, under the name `to`.
async fn plant_map(repository: &Repository, to: &str, manifest: &Manifest, map: &Map) -> RefValue {
    plant(repository, to, &manifest.encode().1, map, SessionId::random()).await
}

/// Frames that stand for more than their packs hold are damage wherever the map is read.
#[tokio::test(flavor = "multi_thread")]
async fn frames_that_are_too_long_or_overlap_are_refused() {
    let fixture = Fixture::new().await;
    let saved = fixture.saved().await;
    let (mut long, mut overlapping) = (saved.map.clone(), saved.map.clone());
    let at = saved.map.frames.iter().position(|frame| frame.ordinal == 0).unwrap();
    long.frames[at].stored_len = saved.manifest.chunks.lens[at] + 1;
    overlapping.frames[at].offset += 4096;
    for (evil, map, told) in [("long", &long, "longer than its chunk"), ("overlapping", &overlapping, "overlap")] {
        plant_map(&fixture.from, evil, &saved.manifest, map).await;
        let error = fixture.from.saved(&name(evil)).await.unwrap_err();
        assert!(error.kind() == ErrorKind::Damaged && error.to_string().contains(told), "{error:?}");
        let report = fixture.from.verify(Some(&name(evil)), &VerifyOptions::default()).await.unwrap();
        assert!(report.damaged.iter().any(|one| one.error.contains(told)), "{report:?}");
    }
    let report = fixture.sync().await;
    assert_eq!((report.names, report.failed.len()), (1, 2), "{report:?}");
    assert!(fixture.to.saved(&name("sound")).await.is_ok());
}

/// B4: "A name that cannot be copied does not stop the others: one that is damaged, that says another size than its tree has".
#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_says_another_size_than_its_tree_has_is_refused() {
    let fixture = Fixture::new().await;
    fixture.name("few-bytes", |value| RefValue { logical_bytes: 8, ..value }).await;
    fixture.name("few-files", |value| RefValue { files: 0, ..value }).await;
    fixture.name("copy", |value| value).await;
    for evil in ["few-bytes", "few-files"] {
        let refused = sync(&fixture.from, &fixture.to, &[name(evil)], &SyncOptions::default()).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Damaged, "{refused:?}");
        assert!(refused.to_string().contains("another size"), "{refused}");
    }
    let report = fixture.sync().await;
    let failed: Vec<_> = report.failed.iter().map(|failed| failed.name.as_str()).collect();
    assert_eq!((report.names, failed), (2, vec!["few-bytes", "few-files"]));
}

/// Lengths without a base that are far too short make nothing grow on its way.
#[tokio::test(flavor = "multi_thread")]
async fn a_tree_whose_map_foretells_too_little_comes_as_it_is_stored() {
    let (steps, as_stored) = (differences::Fixture::new(), differences::Fixture::new());
    let location = Location::directory(steps.dir.path().join("repository")).unwrap();
    let store = open(&location, &StoreOptions { create: true, ..StoreOptions::default() }).await.unwrap();
    let options = OpenOptions { cache: Some(steps.dir.path().join("source")), ..OpenOptions::default() };
    let from = Repository::create(store, options).await.unwrap().0;
    for number in 1..=2 {
        let path = steps.write(number);
        from.save(&path, &name(&format!("run/step-{number}")), &SaveOptions::default()).await.unwrap();
    }
    let second = [name("run/step-2")];
    let mut saved = from.saved(&second[0]).await.unwrap();
    saved.map.frames.iter_mut().filter(|frame| frame.base.is_some()).for_each(|frame| frame.alone_len = 1);
    let map = layout::owned(Family::Map, saved.value.map_key);
    from.store().objects().put(&map, saved.map.seal().into()).await.unwrap();
    let moved = sync(&from, &steps.open().await, &second, &SyncOptions::default()).await.unwrap();
    let options = SyncOptions { as_stored: true, ..SyncOptions::default() };
    let expected = sync(&from, &as_stored.open().await, &second, &options).await.unwrap();
    assert!(moved.moved_bytes.abs_diff(expected.moved_bytes) < 100, "{moved:?}, {expected:?}");
    assert!(!steps.saved(2).await.map.further.is_empty(), "the bases came");
    steps.assert_restores(&steps.open().await, 2).await;
}

/// B4: "A name that cannot be copied does not stop the others".
#[tokio::test(flavor = "multi_thread")]
async fn a_name_with_the_objects_of_another_and_a_wrong_digest_fails_alone() {
    let fixture = Fixture::new().await;
    fixture.name("evil", |value| RefValue { manifest: ManifestId::of(b"another"), ..value }).await;
    fixture.name("copy", |value| value).await;
    let report = fixture.sync().await;
    let failed: Vec<_> = report.failed.iter().map(|failed| failed.name.as_str()).collect();
    assert_eq!((report.names, failed), (2, vec!["evil"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_cannot_be_copied_makes_nothing_stricter() {
    let fixture = Fixture::new().await;
    let prod = name("prod/x");
    fixture.save(&fixture.to, "prod/x").await;
    fs::write(fixture.dir.path().join("file"), noise(2, 1_000_000)).unwrap();
    fixture.save(&fixture.from, "prod/x").await;
    let labels = Labels::default().with("derived-from", "elsewhere").unwrap();
    fixture.from.tighten(&prod, &labels).await.unwrap();
    let map = fixture.from.saved(&prod).await.unwrap().value.map_key;
    let (map, objects) = (layout::owned(Family::Map, map), fixture.from.store().objects());
    let sound = objects.get(&map).await.unwrap().bytes().await.unwrap();
    let replacing = SyncOptions { existing: Existing::Replace, ..SyncOptions::default() };
    objects.put(&map, "garbage".into()).await.unwrap();
    let report = sync(&fixture.from, &fixture.to, &[], &replacing).await.unwrap();
    assert_eq!(report.failed.len(), 1, "{report:?}");
    assert!(fixture.to.labels(&prod).await.unwrap().labels.is_empty());
    objects.put(&map, sound.into()).await.unwrap();
    let report = sync(&fixture.from, &fixture.to, &[], &replacing).await.unwrap();
    assert_eq!((report.failed, report.replaced), (vec![], vec![prod.clone()]));
    assert_eq!(fixture.to.labels(&prod).await.unwrap().labels, labels);
}
