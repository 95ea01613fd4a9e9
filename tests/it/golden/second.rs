//! The golden repository of the second version of snapshots, tests/golden/v2: what is kept of removed and replaced names.
//!
//! `TOWLINE_GOLDEN_WRITE=2 cargo nextest run golden` writes it anew, which is right only before its first release.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use towline::clock::{ManualClock, Timestamp};
use towline::format::envelope::{Kind, open, version};
use towline::ops::{RemoveOptions, RestoreOptions, SaveOptions, UndeleteOptions};
use towline::policy::Labels;
use towline::repository::Repository;
use towline::repository::log::{Declassified, LogEntry, State, StepFacts};

use super::listing::listing;
use super::make::{NOW, directory, options, put};
use super::{copy_of, expected_in, objects_in, remade};
use crate::data::{name, noise};

pub(super) fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/v2")
}

/// Makes the repository at `at` from inputs that it makes in `scratch`; returns what it is expected to hold.
async fn make(at: &Path, scratch: &Path) -> Value {
    let store = directory(at).await;
    Repository::create(store.clone(), options(scratch)).await.unwrap();
    let clock = ManualClock::at(Timestamp::from(SystemTime::UNIX_EPOCH + Duration::from_secs(NOW)));
    let repository = Repository::open_at(store, options(scratch), Arc::new(clock)).await.unwrap();
    let maker = Maker { repository, scratch };
    maker.save("best", 1).await;
    maker.save("best", 2).await;
    maker.save("run/step-1", 3).await;
    maker.repository.remove(&name("run/step-1")).await.unwrap();
    maker.save("back", 4).await;
    maker.repository.remove(&name("back")).await.unwrap();
    maker.repository.set_policy(1, b"version = 1\n".as_slice().into()).await.unwrap();
    maker.label("bound", "residency=DE,EU sensitivity=restricted tenant=a derived-from=raw/b").await;
    maker.repository.log().truncate(0, None).await.unwrap();
    maker.repository.set_policy(2, b"version = 2\n".as_slice().into()).await.unwrap();
    maker.label("bound/set", "residency=- purpose=c").await;
    maker.declassify("best").await;
    maker.repository.undelete(&name("back"), &UndeleteOptions::default()).await.unwrap();
    maker.save("erased", 5).await;
    let now = RemoveOptions { now: true, ..RemoveOptions::default() };
    maker.repository.remove_with(&[name("erased")], &now).await.unwrap();
    maker.save("late", 6).await;
    maker.repository.remove(&name("late")).await.unwrap();
    let state = maker.repository.state().await.unwrap();
    let seeds = BTreeMap::from([("best", 1), ("late", 6), ("run/step-1", 3)]);
    let kept: BTreeMap<String, Value> = state
        .removed
        .iter()
        .map(|((of, version), removed)| (format!("{of} {version} {}", removed.at), maker.describe(seeds[of.as_str()])))
        .collect();
    json!({
        "repository": maker.repository.id().to_string(),
        "names": { "back": maker.describe(4), "best": maker.describe(2) },
        "kept": kept,
    })
}

struct Maker<'a> {
    repository: Repository,
    scratch: &'a Path,
}

impl Maker<'_> {
    async fn save(&self, to: &str, seed: u64) {
        put(&self.file(seed), &noise(seed, 500), 0o640);
        let facts = StepFacts::default().metric("loss", seed as f64).unwrap();
        let labels = [("stage".to_owned(), seed.to_string())].into();
        let options = SaveOptions { facts, labels, ..SaveOptions::default() };
        self.repository.save(&self.file(seed), &name(to), &options).await.unwrap();
    }

    async fn label(&self, of: &str, pairs: &str) {
        let pairs = pairs.split(' ').map(|pair| pair.split_once('=').unwrap());
        let labels = pairs.fold(Labels::default(), |labels, (key, value)| labels.with(key, value).unwrap());
        self.repository.tighten(&name(of), &labels).await.unwrap();
    }

    async fn declassify(&self, of: &str) {
        let labels = Labels::default().with("sensitivity", "internal").unwrap();
        let plan = self.repository.plan_declassification(&name(of), labels, "for the test").await.unwrap();
        let signed = Declassified { signature: vec![7; 20], ..plan };
        self.repository.declassify(&name(of), signed).await.unwrap();
    }

    fn file(&self, seed: u64) -> PathBuf {
        self.scratch.join(format!("file-{seed}"))
    }

    fn describe(&self, seed: u64) -> Value {
        json!({ "seed": seed, "entries": listing(&self.file(seed)) })
    }
}

/// Checks that `of` is what was saved of `seed`.
async fn is(repository: &Repository, of: &str, wanted: &Value) {
    let dest = tempfile::tempdir().unwrap();
    repository.restore(&name(of), None, dest.path(), &RestoreOptions::default()).await.unwrap();
    let file = fs::read_dir(dest.path()).unwrap().next().unwrap().unwrap().path();
    assert_eq!(serde_json::to_value(listing(&file)).unwrap(), wanted["entries"], "{of}");
    let saved = repository.saved(&name(of)).await.unwrap();
    assert_eq!(saved.manifest.labels["stage"], wanted["seed"].to_string());
    let facts = StepFacts::default().metric("loss", wanted["seed"].as_f64().unwrap()).unwrap();
    assert_eq!(saved.value.facts, facts);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_second_golden_repository_keeps_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    copy_of(&golden(), &dir.path().join("repository"));
    let repository =
        Repository::open(directory(&dir.path().join("repository")).await, options(dir.path())).await.unwrap();
    let expected = expected_in(&golden());
    assert_eq!(repository.id().to_string(), expected["repository"]);
    let state = repository.state().await.unwrap();
    let names: Vec<&str> = state.refs.keys().map(towline::name::Name::as_str).collect();
    assert_eq!(names, expected["names"].as_object().unwrap().keys().collect::<Vec<_>>());
    for of in names {
        is(&repository, of, &expected["names"][of]).await;
    }
    let kept = state.removed.iter().map(|((name, version), removed)| format!("{name} {version} {}", removed.at));
    assert_eq!(kept.collect::<Vec<_>>(), expected["kept"].as_object().unwrap().keys().cloned().collect::<Vec<_>>());
    for ((of, version), removed) in &state.removed {
        let to = Some(name("taken/back"));
        let options = UndeleteOptions { version: Some(*version), to, replace: true };
        repository.undelete(of, &options).await.unwrap();
        is(&repository, "taken/back", &expected["kept"][format!("{of} {version} {}", removed.at)]).await;
    }
}

/// A snapshot of each version and every action about what is kept; what decodes is encoded to the very same bytes.
#[test]
fn the_second_golden_log_folds_from_its_snapshot() {
    let objects = objects_in(&golden());
    let snapshots: Vec<_> = objects.iter().filter(|(key, _)| key.starts_with("snapshot/")).collect();
    let [(_, object)] = snapshots.as_slice() else { panic!("{} snapshots", snapshots.len()) };
    assert_eq!(version(object), 2);
    let body = open(Kind::Snapshot, object).unwrap();
    let mut state = State::decode(2, &body).unwrap();
    assert_eq!((state.encode(), state.removed.len()), (body.to_vec(), 3));
    let mut tags = BTreeSet::new();
    while let Some(object) = objects.get(&format!("log/{:020}", state.seq + 1)) {
        let body = open(Kind::Entry, object).unwrap();
        let entry = LogEntry::decode(&body).unwrap();
        assert_eq!(entry.encode(), body);
        tags.extend(
            entry.actions.iter().map(|action| format!("{action:?}").split(['(', ' ']).next().unwrap().to_owned()),
        );
        state.apply(&entry).unwrap();
    }
    for tag in ["Keep", "Forget", "Label", "Declassify", "SetPolicy"] {
        assert!(tags.contains(tag), "{tags:?}");
    }
    assert_eq!((state.labels.len(), state.declassified.len(), state.policy.map(|mark| mark.version)), (2, 1, Some(2)));
    assert_eq!(state.removed.len(), 3);
}

/// Today's writer makes the same of the same inputs; with `TOWLINE_GOLDEN_WRITE=2` it replaces the files.
#[tokio::test(flavor = "multi_thread")]
async fn the_second_golden_inputs_still_give_the_same() {
    if let Some(made) = remade("2", &golden(), make).await {
        let expected = expected_in(&golden());
        assert_eq!((&made["names"], &made["kept"]), (&expected["names"], &expected["kept"]));
    }
}
