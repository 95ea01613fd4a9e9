//! The golden repository of the second version of maps, tests/golden/v2-map: lengths that chunks have without their bases.
//!
//! `TOWLINE_GOLDEN_WRITE=2-map cargo nextest run golden` writes it anew, which is right only before its first release.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use towline::clock::{ManualClock, Timestamp};
use towline::codec::Codec;
use towline::format::Map;
use towline::format::envelope::{Kind, open, version};
use towline::ops::{RestoreOptions, SaveOptions};
use towline::repository::Repository;

use super::listing::listing;
use super::make::{NOW, directory, options, put, state};
use super::{copy_of, expected_in, objects_in, remade};
use crate::data::name;

pub(super) fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/v2-map")
}

/// Makes a run of two steps at `at`, the second of which is stored as what changed; returns what it is expected to hold.
async fn make(at: &Path, scratch: &Path) -> Value {
    let store = directory(at).await;
    Repository::create(store.clone(), options(scratch)).await.unwrap();
    let clock = ManualClock::at(Timestamp::from(SystemTime::UNIX_EPOCH + Duration::from_secs(NOW)));
    let repository = Repository::open_at(store, options(scratch), Arc::new(clock)).await.unwrap();
    let mut names = serde_json::Map::new();
    for step in [1, 2] {
        let path = scratch.join(format!("state-{step}.safetensors"));
        put(&path, &state(step), 0o644);
        let of = format!("run/step-{step}");
        repository.save(&path, &name(&of), &SaveOptions::default()).await.unwrap();
        names.insert(of.clone(), json!({ "entries": listing(&path), "lengths": lengths(&repository, &of).await }));
    }
    json!({ "names": names })
}

/// Of each chunk with a base: its codec, its length as it is stored, and without the base.
async fn lengths(repository: &Repository, of: &str) -> Vec<(String, u32, u32)> {
    let saved = repository.saved(&name(of)).await.unwrap();
    let with_base = saved.map.frames.iter().filter(|frame| frame.codec.has_base());
    with_base.map(|frame| (frame.codec.word().to_owned(), frame.stored_len, frame.alone_len)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn steps_of_the_golden_run_restore_and_say_their_lengths() {
    let dir = tempfile::tempdir().unwrap();
    copy_of(&golden(), &dir.path().join("repository"));
    let repository =
        Repository::open(directory(&dir.path().join("repository")).await, options(dir.path())).await.unwrap();
    for (of, wanted) in expected_in(&golden())["names"].as_object().unwrap() {
        let dest = tempfile::tempdir().unwrap();
        repository.restore(&name(of), None, dest.path(), &RestoreOptions::default()).await.unwrap();
        let file = fs::read_dir(dest.path()).unwrap().next().unwrap().unwrap().path();
        assert_eq!(serde_json::to_value(listing(&file)).unwrap(), wanted["entries"], "{of}");
        let lengths = lengths(&repository, of).await;
        assert_eq!(serde_json::to_value(&lengths).unwrap(), wanted["lengths"], "{of}");
        assert!(lengths.iter().any(|(codec, ..)| codec == Codec::Derived.word()), "{of}");
        assert!(lengths.iter().all(|(_, stored, alone)| stored < alone), "{lengths:?}");
    }
}

#[test]
fn golden_maps_of_version_2_are_encoded_as_they_are_stored() {
    let objects = objects_in(&golden());
    let maps: Vec<_> = objects.iter().filter(|(key, _)| key.starts_with("map/")).collect();
    assert_eq!(maps.len(), 2);
    for (key, object) in maps {
        let body = open(Kind::Map, object).unwrap();
        assert_eq!((version(object), Map::decode(2, &body).unwrap().encode()), (2, body.to_vec()), "{key}");
    }
}

/// Today's writer makes the same of the same inputs; with `TOWLINE_GOLDEN_WRITE=2-map` it replaces the files.
#[tokio::test(flavor = "multi_thread")]
async fn inputs_of_the_golden_run_still_give_the_same() {
    if let Some(made) = remade("2-map", &golden(), make).await {
        assert_eq!(made, expected_in(&golden()));
    }
}
