//! Steps that are in the repository when a watch starts: their content decides whether they are those of the folder.

use std::fs;
use std::fs::DirBuilder;
use std::os::unix::fs::{DirBuilderExt as _, symlink};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use async_trait::async_trait;
use tokio::sync::watch::channel;
use towline::error::{ErrorKind, Result};
use towline::name::Name;
use towline::ops::{HandoffTarget, SaveOptions, Stop, UnsavedCheckpoint, WatchEvent, WatchOptions};

use super::{Fixture, hugging_face, write};
use crate::data::{name, tree_digest};

/// A copy of `folder` with other bytes in its files, whose sizes and modification times are the same.
fn fake(folder: &Path, dest: &Path) {
    for file in fs::read_dir(folder).unwrap() {
        let file = file.unwrap();
        let other: Vec<u8> = fs::read(file.path()).unwrap().into_iter().map(|byte| !byte).collect();
        let copy = dest.join(file.file_name());
        write(copy.clone(), other);
        let modified = file.metadata().unwrap().modified().unwrap();
        fs::File::options().append(true).open(copy).unwrap().set_modified(modified).unwrap();
    }
}

/// W1 and G6: sizes and times prove nothing, since whoever received a checkpoint as a handoff knows them.
#[tokio::test(flavor = "multi_thread")]
async fn a_fake_of_the_same_sizes_and_times_is_not_taken_for_a_saved_step() {
    let fixture = Fixture::new().await;
    let folder = hugging_face(&fixture.out(), 1);
    for more in [false, true] {
        let planted = fixture.path(if more { "planted-with-more" } else { "planted" });
        fake(&folder, &planted);
        if more {
            // Beside more files, it looks like one that is being deleted.
            write(planted.join("zzz"), "more");
        }
        fixture.repository.save(&planted, &name("run/step-1"), &SaveOptions::default()).await.unwrap();
        let events = fixture.once(|_| {}).await;
        let replaced =
            |event: &WatchEvent| matches!(event, WatchEvent::Saved { report, .. } if report.replaced.is_some());
        assert!(events.iter().any(replaced), "{events:?}");
        fixture.holds("run/step-1", &folder).await;
    }
}

/// W1: "A step whose content in the repository is that in DIR is not saved again".
#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_others_saved_with_the_same_content_is_kept() {
    let fixture = Fixture::new().await;
    let folder = hugging_face(&fixture.out(), 1);
    let (once, twice) = (fixture.path("once"), fixture.path("twice"));
    fake(&folder, &once);
    fake(&once, &twice);
    let file = fs::File::options().append(true).open(twice.join("optimizer.pt")).unwrap();
    file.set_modified(UNIX_EPOCH).unwrap();
    fixture.repository.save(&twice, &name("run/step-1"), &SaveOptions::default()).await.unwrap();
    let before = fixture.repository.state().await.unwrap().refs.clone();
    let events = fixture.once(|_| {}).await;
    assert!(matches!(&events[1..], [WatchEvent::Kept { name, .. }] if name == "run/step-1"), "{events:?}");
    assert_eq!(fixture.repository.state().await.unwrap().refs, before);
}

/// Another agent that is told which steps are saved.
#[derive(Debug, Default)]
struct Receiver(Mutex<Vec<String>>);

#[async_trait]
impl HandoffTarget for Receiver {
    async fn needed(&self) {
        std::future::pending::<()>().await;
    }

    async fn send(&self, checkpoint: &UnsavedCheckpoint<'_>) -> Result<String> {
        panic!("time is not short, but it was sent {checkpoint:?}")
    }

    async fn release(&self, name: &Name) {
        self.0.lock().unwrap().push(name.to_string());
    }
}

/// G6: what is left of a checkpoint does not prove that the whole one, of which another agent has a copy, is saved.
#[tokio::test(flavor = "multi_thread")]
async fn a_handed_off_copy_is_released_for_a_whole_step_only() {
    let fixture = Fixture::new().await;
    hugging_face(&fixture.out(), 1);
    let folder = hugging_face(&fixture.out(), 2);
    fixture.once(|_| {}).await;
    fs::remove_file(folder.join("optimizer.pt")).unwrap();
    let receiver = Arc::new(Receiver::default());
    let events = fixture.once(|options| options.handoff = Some(Arc::clone(&receiver) as Arc<dyn HandoffTarget>)).await;
    assert!(
        matches!(&events[1..], [WatchEvent::Kept { .. }, WatchEvent::PassedOver { entry, .. }] if entry == "checkpoint-2"),
        "{events:?}"
    );
    assert_eq!(*receiver.0.lock().unwrap(), ["run/step-1"]);
}

/// The checkpoints of a machine that comes back are not what the run has since.
#[tokio::test(flavor = "multi_thread")]
async fn a_folder_behind_its_run_is_told() {
    let fixture = Fixture::new().await;
    let here = hugging_face(&fixture.out(), 10);
    fixture.once(|_| {}).await;
    let restore = |options: &mut WatchOptions| options.restore_latest = true;
    let alike = fixture.once(restore).await;
    assert!(matches!(&alike[1], WatchEvent::NotRestored { later: None, .. }), "{alike:?}");
    // Another machine goes on with the run.
    fixture.repository.save(&here, &name("run/step-11"), &SaveOptions::default()).await.unwrap();
    let behind = fixture.once(restore).await;
    let WatchEvent::NotRestored { later: Some(later), .. } = &behind[1] else { panic!("{behind:?}") };
    assert_eq!(later, "run/step-11");
}

/// W3: "If that step names another one as the best, in a `trainer_state.json`, that comes back as well".
#[tokio::test(flavor = "multi_thread")]
async fn the_best_checkpoint_comes_back_too() {
    let fixture = Fixture::new().await;
    let restore = |options: &mut WatchOptions| options.restore_latest = true;
    let best = hugging_face(&fixture.out(), 5);
    let before = tree_digest(&best);
    for (step, state) in [
        (20, r#"{"best_global_step": 5, "best_metric": NaN, "log_history": []}"#),
        (30, r#"{"best_model_checkpoint": "out/checkpoint-5"}"#),
        (40, r#"{"best_global_step": 40}"#),
        (50, r#"{"best_global_step": 7}"#),
    ] {
        let latest = hugging_face(&fixture.out(), step);
        write(latest.join("trainer_state.json"), state);
        fixture.once(|_| {}).await;
        fs::remove_dir_all(fixture.out()).unwrap();
        let events = fixture.once(restore).await;
        let restored: Vec<&str> = events
            .iter()
            .filter_map(|event| match event {
                WatchEvent::Restored { entry, .. } => Some(entry.as_str()),
                _ => None,
            })
            .collect();
        let name = format!("checkpoint-{step}");
        if step < 40 {
            assert_eq!(restored, [&name, "checkpoint-5"], "{events:?}");
            assert_eq!(tree_digest(&best), before);
        } else {
            assert_eq!(restored, [&name], "{events:?}");
        }
        let missing = events.iter().any(|event| {
            matches!(event, WatchEvent::NotRestored { reason, .. }
                if reason.starts_with("the best checkpoint by checkpoint-50 cannot be restored: no such name `run/step-7`"))
        });
        assert_eq!(missing, step == 50, "{events:?}");
    }
}

/// A training may begin at the first event, and a watch that was killed before has restored nothing.
#[tokio::test(flavor = "multi_thread")]
async fn the_best_checkpoint_is_there_before_the_latest_one_is_told() {
    let fixture = Fixture::new().await;
    let (best, latest) = (hugging_face(&fixture.out(), 5), hugging_face(&fixture.out(), 20));
    write(latest.join("trainer_state.json"), r#"{"best_global_step": 5}"#);
    fixture.once(|_| {}).await;
    // As a kill during the restore of the best one leaves them.
    for entry in ["checkpoint-5", "checkpoint-20"] {
        let staging = fixture.out().join(format!(".{entry}.towline-tmp"));
        DirBuilder::new().mode(0o700).create(&staging).unwrap();
        fs::rename(fixture.out().join(entry), staging.join(entry)).unwrap();
    }
    let (_stop, stop) = channel(Stop::No);
    let options = WatchOptions {
        settle: Duration::ZERO,
        restore_latest: true,
        once: true,
        save: SaveOptions::default(),
        metrics: Vec::new(),
        handoff: None,
        stop,
    };
    let mut restored = Vec::new();
    let mut tell = |event| {
        if let WatchEvent::Restored { entry, report } = event {
            restored.push((entry, report.fetched_bytes, best.exists() && latest.exists()));
        }
    };
    fixture.repository.watch(&fixture.out(), &name("run"), &options, &mut tell).await.unwrap();
    assert_eq!(restored, ["checkpoint-20", "checkpoint-5"].map(|entry| (entry.to_owned(), 0, true)));
    assert_eq!(fs::read_dir(fixture.out()).unwrap().count(), 2, "nothing is left beside them");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_with_a_link_out_of_it_is_not_restored_for_a_training() {
    let fixture = Fixture::new().await;
    let checkpoint = hugging_face(&fixture.out(), 10);
    symlink("model.safetensors", checkpoint.join("within")).unwrap();
    fixture.once(|_| {}).await;
    let saved = tree_digest(&checkpoint);
    let restore = |options: &mut WatchOptions| (options.restore_latest, options.once) = (true, true);
    fs::remove_dir_all(fixture.out()).unwrap();
    fixture.watch(Duration::from_millis(50), restore).task.await.unwrap().unwrap();
    assert_eq!(tree_digest(&checkpoint), saved);

    let later = hugging_face(&fixture.out(), 20);
    symlink(fixture.path("elsewhere"), later.join("scheduler.pt")).unwrap();
    fixture.once(|_| {}).await;
    fs::remove_dir_all(fixture.out()).unwrap();
    let error = fixture.watch(Duration::from_millis(50), restore).task.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
    assert!(error.to_string().contains("got scheduler.pt -> "), "{error}");
    assert!(!later.exists());
}
