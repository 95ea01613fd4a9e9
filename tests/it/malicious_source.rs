//! Sources of a sync that somebody else wrote: what is wrong with one name neither reaches the destination nor keeps others out.

use std::fs;

use towline::error::ErrorKind;
use towline::format::{Manifest, Map};
use towline::id::SessionId;
use towline::ops::{SaveOptions, SyncOptions, SyncReport, VerifyOptions, sync};
use towline::repository::log::{Action, RefValue};
use towline::repository::{OpenOptions, Repository, Saved};
use towline::storage::Store;

use crate::data::{name, noise};
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

    /// Names the tree of `sound` in the source as `to`, with other facts.
    async fn name(&self, to: &str, change: impl Fn(RefValue) -> RefValue) {
        let value = change(self.saved().await.value);
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
