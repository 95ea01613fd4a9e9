//! Entries beside a checkpoint, and what is left in the folder by trainings and restores that ended early.

use std::fs;

use towline::ops::WatchEvent;

use super::{Fixture, hugging_face, write};
use crate::data::{name, noise};

/// Entries that were passed over, with the reasons.
fn passed(events: Vec<WatchEvent>) -> Vec<(String, String)> {
    let passed = |event| match event {
        WatchEvent::PassedOver { entry, reason } => Some((entry, reason)),
        _ => None,
    };
    events.into_iter().filter_map(passed).collect()
}

/// W2: "An entry that was passed over does not replace the step once the other one is gone."
#[tokio::test(flavor = "multi_thread")]
async fn what_was_beside_a_checkpoint_does_not_replace_it_after_a_restart() {
    let fixture = Fixture::new().await;
    let good = hugging_face(&fixture.out(), 500);
    write(fixture.out().join("checkpoint-500-backup/model.safetensors"), noise(7, 3000));
    write(fixture.out().join("z-checkpoint-500/model.safetensors"), noise(8, 3000));
    let reasons = passed(fixture.once(|_| {}).await);
    assert!(reasons.iter().any(|(entry, why)| entry == "checkpoint-500-backup" && why.contains("more than a step")));
    fs::rename(&good, fixture.path("good")).unwrap();
    let reasons = passed(fixture.once(|_| {}).await);
    assert_eq!(reasons.len(), 2, "{reasons:?}");
    assert!(reasons.iter().any(|(entry, why)| entry == "z-checkpoint-500" && why.starts_with("checkpoint-500 was saved")));
    fixture.holds("run/step-500", &fixture.path("good")).await;
    // Written after the save: it is of a later training.
    write(fixture.out().join("z-checkpoint-500/model.safetensors"), noise(9, 3000));
    fixture.once(|_| {}).await;
    fixture.holds("run/step-500", &fixture.out().join("z-checkpoint-500")).await;
    assert!(fixture.repository.saved(&name("run/step-500")).await.is_ok());
}
