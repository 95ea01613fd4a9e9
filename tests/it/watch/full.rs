//! Watching with a repository whose disk is full.

use std::fs;
use std::time::Duration;

use towline::error::ErrorKind;
use towline::ops::{Stop, WatchEvent};
use towline::progress::Progress;

use super::{Fixture, hugging_face};
use crate::data::noise;
use crate::semantics::Tmpfs;

/// W4: "Checkpoints that could not be saved in time are named". A store that was full is the reason then, and time is
/// not.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_repository_is_the_reason_that_is_given() {
    let dir = tempfile::tempdir().unwrap();
    let Some(_disk) = Tmpfs::mount(&dir.path().join("repo"), "1m") else { return };
    let fixture = Fixture::within(dir).await;
    let progress = Progress::default();
    let going = fixture.watch(Duration::from_millis(50), |options| options.save.progress = progress.clone());
    fs::create_dir_all(fixture.out().join("checkpoint-1")).unwrap();
    fs::write(fixture.out().join("checkpoint-1/model.bin"), noise(1, 4 << 20)).unwrap();
    let failure =
        |event: &WatchEvent| if let WatchEvent::Failed { failure, .. } = event { Some(failure.kind) } else { None };
    assert_eq!(going.until(failure).await, ErrorKind::Exhausted);
    assert_eq!(progress.snapshot().phase, "watching", "it rests until the next try");
    going.stop.send(Stop::Within { grace: Duration::from_millis(200), linger: false }).unwrap();
    let report = going.task.await.unwrap().unwrap();
    let error = report.error(&fixture.out(), "more time", String::clone).unwrap();
    assert!(error.causes()[0].contains("disk full"), "{error:?}");
    assert!(error.help_text().unwrap().contains("free some space"), "{error:?}");
}

/// W4: "With `--once`, one that cannot be saved keeps no other from being saved; its error is that of the command."
#[tokio::test(flavor = "multi_thread")]
async fn with_once_the_others_are_saved_after_one_that_cannot_be() {
    let dir = tempfile::tempdir().unwrap();
    let Some(_disk) = Tmpfs::mount(&dir.path().join("repo"), "4m") else { return };
    let fixture = Fixture::within(dir).await;
    hugging_face(&fixture.out(), 1);
    fs::write(fixture.out().join("checkpoint-1/large.bin"), noise(1, 8 << 20)).unwrap();
    hugging_face(&fixture.out(), 2);
    let going = fixture.watch(Duration::from_millis(50), |options| options.once = true);
    let error = going.task.await.unwrap().unwrap_err();
    assert!(error.kind() == ErrorKind::Exhausted && error.to_string().starts_with("disk full"), "{error}");
    fixture.holds("run/step-2", &fixture.out().join("checkpoint-2")).await;
    let events = going.events.lock().unwrap().clone();
    let unsaved = |event: &WatchEvent| matches!(event, WatchEvent::Unsaved { entry, .. } if entry == "checkpoint-1");
    assert!(events.iter().any(unsaved), "{events:?}");
}
