//! The golden repository of bundles, tests/golden/v2-bundle: a run whose steps are predicted.
//!
//! `TOWLINE_GOLDEN_WRITE=2-bundle cargo nextest run golden` writes it anew, which is right only before its first release.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use towline::clock::{ManualClock, Timestamp};
use towline::ops::RestoreOptions;
use towline::repository::Repository;

use super::listing::listing;
use super::make::{NOW, directory, options, put};
use super::{copy_of, expected_in, remade};
use crate::data::name;
use crate::differences::file;
use crate::predictions::{Training, predicting};

pub(super) fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/v2-bundle")
}

/// Makes a run of three steps at `at`, two of them predicted; returns what it is expected to hold.
async fn make(at: &Path, scratch: &Path) -> Value {
    let store = directory(at).await;
    Repository::create(store.clone(), options(scratch)).await.unwrap();
    let clock = ManualClock::at(Timestamp::from(SystemTime::UNIX_EPOCH + Duration::from_secs(NOW)));
    let repository = Repository::open_at(store, options(scratch), Arc::new(clock)).await.unwrap();
    let mut names = serde_json::Map::new();
    let mut training = Training::of(7, &[12_000]);
    for step in 1..=3 {
        training.go_on();
        // Short files are not looked at for bundles.
        let frozen = [("frozen", "F32", vec![0; 1 << 20])];
        let tensors = [training.model(), training.optimizer(), frozen.to_vec()].concat();
        let path = scratch.join(format!("state-{step}.safetensors"));
        put(&path, &file(&tensors), 0o644);
        let of = format!("run/step-{step}");
        repository.save(&path, &name(&of), &predicting()).await.unwrap();
        names.insert(of.clone(), json!({ "entries": listing(&path), "codecs": codecs(&repository, &of).await }));
    }
    json!({ "names": names })
}

/// Codec of each chunk that is part of a bundle, of each bundle, and of those that it is predicted from.
async fn codecs(repository: &Repository, of: &str) -> Vec<u8> {
    let saved = repository.saved(&name(of)).await.unwrap();
    saved.map.frames.iter().map(|frame| frame.codec.byte()).filter(|codec| *codec >= 5).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn predicted_steps_of_the_golden_run_restore() {
    let dir = tempfile::tempdir().unwrap();
    copy_of(&golden(), &dir.path().join("repository"));
    let repository =
        Repository::open(directory(&dir.path().join("repository")).await, options(dir.path())).await.unwrap();
    for (of, wanted) in expected_in(&golden())["names"].as_object().unwrap() {
        let dest = tempfile::tempdir().unwrap();
        repository.restore(&name(of), None, dest.path(), &RestoreOptions::default()).await.unwrap();
        let file = fs::read_dir(dest.path()).unwrap().next().unwrap().unwrap().path();
        assert_eq!(serde_json::to_value(listing(&file)).unwrap(), wanted["entries"], "{of}");
        assert_eq!(serde_json::to_value(codecs(&repository, of).await).unwrap(), wanted["codecs"], "{of}");
    }
    assert_eq!(codecs(&repository, "run/step-3").await, [5, 5, 5, 8, 7, 6]);
}

/// Today's writer makes the same of the same inputs; with `TOWLINE_GOLDEN_WRITE=2-bundle` it replaces the files.
#[tokio::test(flavor = "multi_thread")]
async fn inputs_of_the_golden_bundles_still_give_the_same() {
    if let Some(made) = remade("2-bundle", &golden(), make).await {
        assert_eq!(made, expected_in(&golden()));
    }
}
