//! Entries beside a checkpoint, and what is left in the folder by trainings and restores that ended early.

use std::fs;
use std::os::unix::fs::symlink;
use std::sync::Arc;
use std::time::Duration;

use towline::error::ErrorKind;
use towline::ops::{SaveOptions, WatchEvent, WatchOptions};

use super::{Fixture, hugging_face, write};
use crate::data::{name, noise, tree_digest};

/// Entries that were passed over, with the reasons.
fn passed(events: Vec<WatchEvent>) -> Vec<(String, String)> {
    let passed = |event| match event {
        WatchEvent::PassedOver { entry, reason } => Some((entry, reason)),
        _ => None,
    };
    events.into_iter().filter_map(passed).collect()
}

/// W2: "A step in several entries that differ only in the rank is not saved". It is a failure: nobody would find the other ranks.
#[tokio::test(flavor = "multi_thread")]
async fn files_of_single_ranks_are_not_saved_as_a_step() {
    let fixture = Fixture::new().await;
    for name in ["step_20_rank0.pt", "step_20_rank1.pt", "step_21.pt", "rng_state_0.pth"] {
        write(fixture.out().join(name), noise(1, 3000));
    }
    let going = fixture.watch(Duration::from_millis(50), |options| options.once = true);
    let events = Arc::clone(&going.events);
    let report = going.task.await.unwrap().unwrap();
    assert_eq!((report.saved, report.parted, &report.unsaved[..]), (1, 1, &["step_20_rank0.pt".to_owned()][..]));
    let error = report.error(&fixture.out(), "more time", String::clone).unwrap();
    assert!(error.causes()[0].contains("one of 2 parts of step 20"), "{error:?}");
    assert!(error.help_text().unwrap().contains("one folder for each step"), "{error:?}");
    fixture.holds("run/step-21", &fixture.out().join("step_21.pt")).await;
    let told = passed(events.lock().unwrap().clone());
    let told: Vec<&str> = told.iter().map(|(entry, _)| entry.as_str()).collect();
    assert_eq!(told, ["rng_state_0.pth", "step_20_rank0.pt"]);
}

/// W2: an entry that was passed over does not replace the step once the other one is gone, nor after a restart.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_beside_a_checkpoint_does_not_replace_it_after_a_restart() {
    let fixture = Fixture::new().await;
    let good = hugging_face(&fixture.out(), 500);
    write(fixture.out().join("checkpoint-500-backup/model.bin"), noise(7, 3000));
    write(fixture.out().join("z-checkpoint-500/model.bin"), noise(8, 3000));
    let reasons = passed(fixture.once(|_| {}).await);
    assert!(reasons.iter().any(|(entry, why)| entry == "checkpoint-500-backup" && why.contains("more than a step")));
    fs::rename(&good, fixture.path("good")).unwrap();
    let reasons = passed(fixture.once(|_| {}).await);
    assert_eq!(reasons.len(), 2, "{reasons:?}");
    assert!(
        reasons.iter().any(|(entry, why)| entry == "z-checkpoint-500" && why.starts_with("checkpoint-500 was saved"))
    );
    fixture.holds("run/step-500", &fixture.path("good")).await;
    // Written after the save: it is of a later training.
    write(fixture.out().join("z-checkpoint-500/model.bin"), noise(9, 3000));
    fixture.once(|_| {}).await;
    fixture.holds("run/step-500", &fixture.out().join("z-checkpoint-500")).await;
}

/// W3: incomplete checkpoints stay, and do not keep the latest step from being restored.
#[tokio::test(flavor = "multi_thread")]
async fn incomplete_checkpoints_do_not_stop_a_restore_and_are_kept() {
    let fixture = Fixture::new().await;
    let good = hugging_face(&fixture.out(), 7);
    fixture.once(|_| {}).await;
    let saved = tree_digest(&good);
    let restore = |options: &mut WatchOptions| options.restore_latest = true;
    // Without its marker, empty, and with a truncated file. A full disk leaves empty files.
    fs::remove_file(good.join("trainer_state.json")).unwrap();
    write(fixture.out().join("model.bin"), "");
    write(fixture.out().join("checkpoint-6/model.bin"), "");
    write(fixture.out().join("checkpoint-8/model.bin"), "");
    write(fixture.out().join("checkpoint-9/model.pt"), b"PK\x03\x04 and no end");
    let events = fixture.once(restore).await;
    assert!(matches!(&events[1], WatchEvent::Restored { entry, .. } if entry == "checkpoint-7"), "{events:?}");
    let told = passed(events);
    assert!(told.iter().any(|(entry, why)| entry == "checkpoint-7" && why.contains("dropped-checkpoint-7 now")));
    let later: Vec<&str> = told
        .iter()
        .filter(|(_, why)| why.contains("than the restored checkpoint-7"))
        .map(|(entry, _)| &**entry)
        .collect();
    assert_eq!(later, ["checkpoint-8", "checkpoint-9"], "{told:?}");
    assert_eq!(tree_digest(&good), saved);
    assert!(fixture.out().join("dropped-checkpoint-7/model.safetensors").exists());
    assert!(
        fixture.out().join("checkpoint-8/model.bin").exists() && fixture.out().join("checkpoint-9/model.pt").exists()
    );

    let events = fixture.once(restore).await;
    assert!(
        matches!(&events[1], WatchEvent::NotRestored { reason, .. } if reason.ends_with("checkpoint-7")),
        "{events:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn given_up_checkpoints_and_copies_are_no_checkpoints_of_the_folder_and_a_link_is() {
    let fixture = Fixture::new().await;
    let restore = |options: &mut WatchOptions| options.restore_latest = true;
    let good = hugging_face(&fixture.out(), 7);
    fixture.once(|_| {}).await;
    fs::rename(&good, fixture.out().join("dropped-checkpoint-7")).unwrap();
    write(fixture.out().join("checkpoint-8.bak/model.bin"), noise(8, 3000));
    fixture.once(restore).await;
    assert!(good.exists());
    let steps = fixture.repository.state().await.unwrap().refs.len();
    assert_eq!(steps, 1, "neither was saved");

    fs::rename(&good, fixture.path("elsewhere")).unwrap();
    symlink(fixture.path("elsewhere"), fixture.out().join("checkpoint-9")).unwrap();
    let events = fixture.once(restore).await;
    assert!(
        matches!(&events[1], WatchEvent::NotRestored { reason, .. } if reason.ends_with("checkpoint-9")),
        "{events:?}"
    );
    assert!(!good.exists());
}

/// Earlier versions saved such entries.
#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_was_saved_from_a_given_up_entry_gets_a_name_of_its_own() {
    let fixture = Fixture::new().await;
    let kept = hugging_face(&fixture.path("kept"), 7);
    let labels = [("watch.entry".to_owned(), "dropped-checkpoint-7".to_owned())].into_iter().collect();
    let options = SaveOptions { labels, ..SaveOptions::default() };
    fixture.repository.save(&kept, &name("run/step-7"), &options).await.unwrap();
    fixture.once(|options| options.restore_latest = true).await;
    assert_eq!(tree_digest(&fixture.out().join("checkpoint-7")), tree_digest(&kept));
}

/// W3: an error leaves nothing of the restore in DIR.
#[tokio::test(flavor = "multi_thread")]
async fn a_restore_that_fails_leaves_nothing_in_the_folder() {
    let fixture = Fixture::new().await;
    hugging_face(&fixture.out(), 6);
    fixture.once(|_| {}).await;
    fs::remove_dir_all(fixture.out()).unwrap();
    // In the place of the checkpoint, and none itself.
    write(fixture.out().join("checkpoint-6"), "a file");
    let restore = |options: &mut WatchOptions| (options.restore_latest, options.once) = (true, true);
    let error = fixture.watch(Duration::from_millis(50), restore).task.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict, "{error:?}");
    let names: Vec<_> = fs::read_dir(fixture.out()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["checkpoint-6"]);

    fs::remove_file(fixture.out().join("checkpoint-6")).unwrap();
    let later = hugging_face(&fixture.out(), 20);
    symlink(fixture.path("elsewhere"), later.join("scheduler.pt")).unwrap();
    fixture.once(|_| {}).await;
    fs::remove_dir_all(fixture.out()).unwrap();
    let error = fixture.watch(Duration::from_millis(50), restore).task.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
    assert_eq!(fs::read_dir(fixture.out()).unwrap().count(), 0);
}
