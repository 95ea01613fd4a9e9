//! Detection, completion and order of checkpoints, in virtual time, without files.

use std::time::Duration;

use proptest::prelude::*;

use super::candidate::{Class, Marker, MarkerSearch, Tracker, classify};
use super::events::WatchEvent;
use super::parted::PartedStep;
use super::scan::CHECKPOINTS_MAX;
use super::settle::{By, CheckpointState, FileMark, Observation, ObservationHistory, Pace};
use super::state::{FolderScan, NextSave, ObservedCheckpoint, WatchState};
use crate::clock::Timestamp;

const PACE: Pace = Pace { quiet: Duration::from_secs(10), marked: Duration::from_secs(2) };

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn stamp(seconds: i64) -> Timestamp {
    Timestamp(seconds * 1_000_000_000)
}

/// A checkpoint of these files (path, what was written to it), last written at `newest`.
fn seen(files: &[(u64, u64)], newest: i64, marker: Marker) -> Observation {
    let mut files: Vec<FileMark> = files.iter().map(|&(path, stat)| FileMark { path, stat }).collect();
    files.sort_unstable();
    let bytes = files.len() as u64;
    Observation { identity: (1, 7), files, bytes, temporary: 0, newest: stamp(newest), marker }
}

#[test]
fn names_tell_what_an_entry_is() {
    for (name, folder, class) in [
        ("checkpoint-500", true, Class::Step(500)),
        ("checkpoint_3", true, Class::Step(3)),
        ("step-1000", true, Class::Step(1000)),
        ("global_step1000", true, Class::Step(1000)),
        ("global_step_20", true, Class::Step(20)),
        ("iter_0000100", true, Class::Step(100)),
        ("epoch=3-step=1000.ckpt", true, Class::Step(1000)),
        ("epoch=3-step=1000-v1.ckpt", false, Class::Step(1000)),
        ("epoch=02-val_loss=0.31.ckpt", false, Class::Step(2)),
        ("model_1000.pt", false, Class::Step(1000)),
        ("step_7.safetensors", false, Class::Step(7)),
        ("llama-7b-fp16-1200.bin", false, Class::Step(1200)),
        ("ckpt1000.pth", false, Class::Step(1000)),
        ("model_epoch_3_iter_2000.pth", false, Class::Step(2000)),
        ("step=1000-val_loss=0.31-v2.ckpt", false, Class::Step(1000)),
        ("step1000-unsharded", true, Class::Step(1000)),
        ("iter-000100-ckpt.pth", false, Class::Step(100)),
        ("gpt-2-old-data-step-100.pt", false, Class::Step(100)),
        ("step_20_rank1.pt", false, Class::Step(20)),
        ("nodes-5-rank-1.pt", false, Class::Step(5)),
        ("ckpt_rank_3_100.pt", false, Class::Step(100)),
        ("model_20_tp1_pp0.pt", false, Class::Step(20)),
        ("step_20_part0.pt", false, Class::Step(20)),
        ("step_20_world_size_8.pt", false, Class::Step(20)),
        ("checkpoint-20-00001-of-00004.safetensors", false, Class::Step(20)),
        ("mp_rank_00_model_states.pt", false, Class::Unnumbered),
        ("consolidated.00.pth", false, Class::Unnumbered),
        ("mp_rank_00", true, Class::Other),
        ("rng_state_0.pth", false, Class::Beside),
        ("optimizer_0.pt", false, Class::Beside),
        ("optimizer-step-5.pt", false, Class::Beside),
        ("optimizer=adamw-step=100.ckpt", false, Class::Step(100)),
        ("ema_5.safetensors", false, Class::Beside),
        ("ema_model_step_100.pt", false, Class::Step(100)),
        ("lr_scheduler.pt", false, Class::Beside),
        ("random_states_0.bin", false, Class::Beside),
        ("optimized_5.pt", false, Class::Step(5)),
        ("checkpoint-500-backup", true, Class::Copy),
        ("checkpoint-10.bak", true, Class::Copy),
        ("checkpoint-500_old", true, Class::Copy),
        ("checkpoint-500 copy", true, Class::Copy),
        ("checkpoint-500 2", true, Class::Copy),
        ("model_1000 (1).pt", false, Class::Copy),
        ("model_1000-backup-2.pt", false, Class::Copy),
        ("dropped-checkpoint-7", true, Class::Other),
        ("dropped-step=7.ckpt", false, Class::Other),
        ("18446744073709551616.pt", false, Class::Unnumbered),
        ("last.ckpt", false, Class::Unnumbered),
        ("ckpt.pt", false, Class::Unnumbered),
        ("model_v0.1.pt", false, Class::Unnumbered),
        ("llama-7b.pt", false, Class::Unnumbered),
        ("tmp-checkpoint-500", true, Class::Temporary),
        ("checkpoint-500.tmp", true, Class::Temporary),
        (".checkpoint-500.towline-tmp", true, Class::Temporary),
        ("model_1000.pt.partial", false, Class::Temporary),
        ("checkpoint-500", false, Class::Other),
        ("version_0", true, Class::Other),
        ("runs", true, Class::Other),
        ("events.out.tfevents.123", false, Class::Other),
        ("model_1000.pt.part", false, Class::Temporary),
        ("model-00001-of-00005.safetensors", false, Class::Other),
        ("llama-2-00001-of-00005.safetensors", false, Class::Other),
        ("latest", false, Class::Other),
    ] {
        assert_eq!(classify(name, folder), class, "{name}");
    }
}

/// As Orbax names steps.
#[test]
fn folders_named_by_a_number_alone_are_steps() {
    for (name, folder, class) in [
        ("8", true, Class::Step(8)),
        ("008", true, Class::Step(8)),
        ("8", false, Class::Other),
        (".8", true, Class::Temporary),
        ("8.orbax-checkpoint-tmp-123", true, Class::Temporary),
        ("18446744073709551616", true, Class::Other),
        ("2026-11-29", true, Class::Other),
    ] {
        assert_eq!(classify(name, folder), class, "{name}");
    }
}

#[test]
fn files_that_differ_in_the_rank_alone_are_one_step_in_parts() {
    let parted = |entries: &[&str]| -> Vec<(u64, usize)> {
        let found = PartedStep::among(entries.iter().map(|entry| (*entry, 20)));
        found.iter().map(|step| (step.step, step.entries.len())).collect()
    };
    assert_eq!(parted(&["step_20_rank0.pt", "step_20_rank1.pt", "ema_20_rank0.pt"]), [(20, 2)]);
    assert_eq!(parted(&["m_20_tp0_pp0.pt", "m_20_tp0_pp1.pt", "m_20_tp1_pp0.pt", "m_20_tp1_pp1.pt"]), [(20, 4)]);
    assert_eq!(parted(&["s20_rank0.pt", "s20_rank0.pth"]), [], "two names, each of one rank");
    assert_eq!(parted(&["step_20_rank1.pt"]), [], "nothing says that there are others");
    assert_eq!(parted(&["lora_rank8_step_20.pt", "lora_rank16_step_20.pt", "tp8_step_20.pt", "dp3-step-20"]), []);
    assert_eq!(parted(&["step_20-00001-of-00002.pt"]), [(20, 1)]);
    assert_eq!(parted(&["step_20-00001-of-00001.pt", "step-20.pt", "step-20-v2.pt", "global_step20"]), []);
}

#[test]
fn a_step_in_parts_is_told_once_and_is_a_failure() {
    let mut state = state();
    let entries = ["step_20_rank0.pt", "step_20_rank1.pt"].map(str::to_owned).into_iter().collect();
    let scan = FolderScan { parted: vec![PartedStep { step: 20, entries }], ..FolderScan::default() };
    let events = state.update(at(0), Some(scan.clone()));
    assert!(
        matches!(&events[..], [WatchEvent::PassedOver { entry, reason }]
            if entry == "step_20_rank0.pt" && reason.contains("one of 2 parts of step 20") && reason.contains("rank1")),
        "{events:?}"
    );
    assert!(state.update(at(1), Some(scan)).is_empty() && !state.is_empty());
    assert_eq!((state.next(at(99)), state.parted().len()), (None, 1));
    assert!(state.parted()[0].failure().help.unwrap().contains("one folder for each step"));
    assert!(state.update(at(2), Some(FolderScan::default())).is_empty() && state.parted().is_empty());
}

#[test]
fn frameworks_say_when_they_are_done() {
    let of = |names: &[&str]| {
        let mut search = MarkerSearch::default();
        names.iter().for_each(|name| search.add(name, stamp(3)));
        search.marker()
    };
    assert_eq!(of(&["model.safetensors", "training_args.bin"]), Marker::Missing("trainer_state.json"));
    assert_eq!(of(&["training_args.bin", "trainer_state.json"]), Marker::Present(stamp(3)));
    assert_eq!(of(&["__0_0.distcp", "__1_0.distcp"]), Marker::Missing(".metadata"));
    assert_eq!(of(&["__0_0.distcp", ".metadata"]), Marker::Present(stamp(3)));
    assert_eq!(of(&["__0_0.distcp", "__0.metadata"]), Marker::None, "how many ranks there are is not known");
    assert_eq!(of(&["model.safetensors", "optimizer.bin"]), Marker::None);
    assert_eq!(Tracker::Latest.step("global_step500\n"), Some(500));
    assert_eq!(Tracker::Iteration.step("500"), Some(500));
    assert_eq!(Tracker::Iteration.step("release"), None);
    for (tracker, entry, step) in [(Tracker::Latest, "global_step500", 500), (Tracker::Iteration, "iter_0000500", 500)]
    {
        assert!(tracker.covers(entry));
        assert_eq!(tracker.step(&tracker.text(entry, step)), Some(step));
    }
}

#[test]
fn without_a_word_it_is_whole_when_nothing_changed_for_long() {
    let mut series = ObservationHistory::begin(at(0), seen(&[(1, 1)], 0, Marker::None), false);
    series.observe(at(9), seen(&[(1, 2)], 9, Marker::None));
    series.observe(at(18), seen(&[(1, 2)], 9, Marker::None));
    assert_eq!(series.state_at(at(18), PACE), CheckpointState::Writing);
    assert_eq!(series.state_at(at(19), PACE), CheckpointState::Finished(By::Quiet));
    series.disturb(at(19));
    assert_eq!(series.state_at(at(28), PACE), CheckpointState::Writing);
}

#[test]
fn a_marker_shortens_the_wait_unless_it_is_older_than_the_files() {
    let mut series = ObservationHistory::begin(at(0), seen(&[(1, 1)], 0, Marker::Missing(".metadata")), false);
    assert_eq!(series.state_at(at(9), PACE), CheckpointState::Writing);
    assert_eq!(series.state_at(at(10), PACE), CheckpointState::Unmarked(".metadata"));
    series.observe(at(20), seen(&[(1, 1), (2, 1)], 21, Marker::Present(stamp(20))));
    assert_eq!(series.state_at(at(21), PACE), CheckpointState::Writing, "other ranks may lag");
    assert_eq!(series.state_at(at(22), PACE), CheckpointState::Finished(By::Marker));
    // The same step is written again: the marker is still the old one.
    series.observe(at(100), seen(&[(1, 9), (2, 1)], 100, Marker::Present(stamp(20))));
    assert_eq!(series.state_at(at(102), PACE), CheckpointState::Writing);
    assert_eq!(series.state_at(at(110), PACE), CheckpointState::Finished(By::Quiet));
}

#[test]
fn what_is_being_deleted_or_is_empty_is_never_whole() {
    let mut series = ObservationHistory::begin(at(0), seen(&[(1, 1), (2, 1), (3, 1)], 0, Marker::None), false);
    series.observe(at(1), seen(&[(1, 1), (3, 1)], 0, Marker::None));
    assert_eq!(series.state_at(at(10), PACE), CheckpointState::Writing);
    assert_eq!(series.state_at(at(100), PACE), CheckpointState::Shrunk);
    series.observe(at(101), seen(&[(1, 1), (2, 2), (3, 1)], 101, Marker::None));
    assert_eq!(series.state_at(at(111), PACE), CheckpointState::Finished(By::Quiet));
    let empty = ObservationHistory::begin(at(0), seen(&[], 0, Marker::None), true);
    assert!(matches!(empty.state_at(at(100), PACE), CheckpointState::Unmarked(_)));
}

fn state() -> WatchState {
    WatchState::new("dir".to_owned(), PACE, None)
}

fn scanned(checkpoints: &[(&str, u64, Observation)]) -> Option<FolderScan> {
    let observed = |(entry, step, seen): &(&str, u64, Observation)| {
        let folder = !entry.contains('.');
        ((*entry).to_owned(), ObservedCheckpoint { step: *step, folder, seen: seen.clone() })
    };
    let checkpoints = checkpoints.iter().map(observed).collect();
    Option::from(FolderScan { checkpoints, ..FolderScan::default() })
}

fn due(entry: &str, step: u64, by: By) -> Option<NextSave> {
    Option::from(NextSave { entry: entry.to_owned(), step, by, again: false, newest: stamp(0) })
}

/// `entry` was saved as it is.
fn save(state: &mut WatchState, entry: &str) {
    let seen = state.seen(entry);
    state.saved(entry, seen);
}

#[test]
fn what_changes_while_it_is_saved_is_saved_again() {
    let mut state = state();
    state.update(at(0), scanned(&[("checkpoint-9", 9, seen(&[(1, 1)], 0, Marker::None))]));
    let before = state.seen("checkpoint-9");
    // It is looked at while it is saved.
    state.update(at(20), scanned(&[("checkpoint-9", 9, seen(&[(1, 1), (2, 1)], 20, Marker::None))]));
    state.saved("checkpoint-9", before);
    assert_eq!(state.next(at(21)), None);
    assert!(state.next(at(30)).is_some_and(|due| due.again && due.step == 9));
}

#[test]
fn steps_are_saved_in_order_each_once_and_again_when_they_change() {
    let mut state = state();
    let (old, new) = (seen(&[(1, 1)], 0, Marker::None), seen(&[(1, 2)], 50, Marker::None));
    state.update(at(0), scanned(&[("checkpoint-10", 10, old.clone()), ("checkpoint-9", 9, old.clone())]));
    assert_eq!(state.next(at(9)), None);
    assert_eq!(state.pending(at(9)).len(), 2);
    assert_eq!(state.next(at(10)), due("checkpoint-9", 9, By::Quiet));
    save(&mut state, "checkpoint-9");
    assert_eq!(state.next(at(10)), due("checkpoint-10", 10, By::Quiet));
    save(&mut state, "checkpoint-10");
    assert_eq!((state.next(at(99)), state.pending(at(99))), (None, vec![]));
    state.update(at(100), scanned(&[("checkpoint-10", 10, old.clone()), ("checkpoint-9", 9, new)]));
    assert_eq!(state.next(at(109)), None);
    assert!(state.next(at(110)).is_some_and(|due| due.again && due.step == 9));
    // One goes with the framework's own retention, file by file; the other loses the race with it.
    save(&mut state, "checkpoint-9");
    state.update(at(120), scanned(&[("checkpoint-10", 10, seen(&[], 0, Marker::None)), ("checkpoint-11", 11, old)]));
    assert_eq!((state.next(at(125)), state.pending(at(125)).len()), (None, 1));
    let events = state.update(at(126), scanned(&[]));
    assert!(matches!(&events[..], [WatchEvent::Gone { entry }] if entry == "checkpoint-11"), "{events:?}");
}

#[test]
fn what_had_a_temporary_name_is_whole_when_it_is_renamed() {
    let mut state = state();
    let inode = [(1, 7)].into_iter().collect();
    state.update(at(0), Some(FolderScan { temporaries: inode, ..FolderScan::default() }));
    state.update(at(1), scanned(&[("model_5.pt", 5, seen(&[(1, 1)], 0, Marker::None))]));
    assert_eq!(state.next(at(1)), due("model_5.pt", 5, By::Rename));
    state.update(at(2), scanned(&[("model_5.pt", 5, seen(&[(1, 2)], 2, Marker::None))]));
    assert_eq!(state.next(at(2)), None, "it is written on under its final name");
}

#[test]
fn failures_wait_longer_each_time_and_not_when_time_is_short() {
    let mut state = state();
    let whole = || scanned(&[("step-1", 1, seen(&[(1, 1)], 0, Marker::None))]);
    state.update(at(0), whole());
    let waits: Vec<u64> = (0..8).map(|_| state.failed("step-1", at(10)).as_secs()).collect();
    assert_eq!(waits, [2, 4, 8, 16, 32, 60, 60, 60]);
    assert_eq!(state.next(at(69)), None);
    assert!(state.next(at(70)).is_some());
    state.hurry(at(30));
    assert!(state.next(at(30)).is_some());
    assert_eq!(state.disturbed("step-1", at(30)), None);
    assert_eq!(state.next(at(39)), None);
    assert_eq!(state.disturbed("step-1", at(40)), Some(PACE.quiet), "from the second time on it is told");
}

#[test]
fn a_folder_that_is_gone_is_told_once_and_begun_anew() {
    let mut state = state();
    let whole = || scanned(&[("step-1", 1, seen(&[(1, 1)], 0, Marker::None))]);
    assert!(matches!(state.update(at(0), None)[..], [WatchEvent::DirGone { .. }]));
    assert!(state.update(at(1), None).is_empty());
    assert!(matches!(state.update(at(2), whole())[..], [WatchEvent::DirBack { .. }]));
    assert_eq!(state.next(at(12)), due("step-1", 1, By::Quiet));
    assert_eq!(state.update(at(13), None).len(), 1);
    assert_eq!((state.next(at(13)), state.pending(at(13))), (None, vec![]));
}

#[test]
fn one_entry_is_saved_for_each_step_and_each_trouble_is_told_once() {
    let mut state = state();
    let whole = seen(&[(1, 1)], 0, Marker::None);
    let half = seen(&[(1, 1)], 0, Marker::Missing(".metadata"));
    let both = || {
        let mut scanned = scanned(&[
            ("step_1.pt", 1, whole.clone()),
            ("optimizer_1.pt", 1, whole.clone()),
            ("step-2", 2, half.clone()),
        ]);
        scanned
            .iter_mut()
            .for_each(|scanned| drop(scanned.others.insert("last.pt".to_owned(), "it has no number".to_owned())));
        scanned
    };
    let passed = |events: Vec<WatchEvent>| -> Vec<String> {
        let entry = |event| if let WatchEvent::PassedOver { entry, .. } = event { Some(entry) } else { None };
        events.into_iter().filter_map(entry).collect()
    };
    assert_eq!(passed(state.update(at(0), both())), ["last.pt", "step_1.pt"]);
    assert_eq!(passed(state.update(at(11), both())), ["step-2"]);
    assert!(state.update(at(30), both()).is_empty());
    assert_eq!(state.next(at(30)), due("optimizer_1.pt", 1, By::Quiet));
    save(&mut state, "optimizer_1.pt");
    assert_eq!((state.next(at(30)), state.pending(at(30))), (None, vec![]));
}

/// A copy that was passed over is older than what was saved; a later version is newer.
#[test]
fn the_latest_version_is_the_step_and_others_do_not_replace_it_later() {
    let mut state = state();
    let old = seen(&[(1, 1)], 0, Marker::None);
    let (first, other, later) = ("step=9.ckpt", "z-step=9.ckpt", "step=9-v10.ckpt");
    state.update(at(0), scanned(&[(first, 9, old.clone()), (other, 9, old.clone())]));
    assert_eq!(state.next(at(10)), due(first, 9, By::Quiet));
    save(&mut state, first);
    let with_later =
        |marker| scanned(&[(first, 9, old.clone()), (other, 9, old.clone()), (later, 9, seen(&[(1, 2)], 0, marker))]);
    state.update(at(20), with_later(Marker::None));
    assert_eq!(state.next(at(30)), due(later, 9, By::Quiet));
    save(&mut state, later);
    state.update(at(31), scanned(&[(other, 9, old.clone())]));
    assert_eq!((state.next(at(50)), state.pending(at(50))), (None, vec![]));
    state.update(at(51), scanned(&[(other, 9, seen(&[(1, 3)], 51, Marker::None))]));
    assert!(state.next(at(61)).is_some_and(|due| due.entry == other), "it was written again");

    let mut state = self::state();
    state.update(at(0), with_later(Marker::Missing("its end")));
    assert_eq!(state.next(at(9)), None);
    state.update(at(10), with_later(Marker::Missing("its end")));
    assert_eq!(state.next(at(10)), due(first, 9, By::Quiet), "the later one is incomplete");
}

/// One that is looked at often: it must not take the square of the number of checkpoints.
#[test]
fn very_many_checkpoints_are_judged_in_time() {
    let mut state = state();
    let file = seen(&[(1, 1)], 0, Marker::None);
    let names: Vec<String> = (0..CHECKPOINTS_MAX).map(|step| format!("m-{step}.pt")).collect();
    let entries: Vec<_> = names.iter().zip(0..).map(|(name, step)| (name.as_str(), step, file.clone())).collect();
    for seconds in (0..200).step_by(10) {
        state.update(at(seconds), scanned(&entries));
        assert_eq!(state.pending(at(seconds)).len(), CHECKPOINTS_MAX);
    }
    assert_eq!(state.finished(at(200)).len(), CHECKPOINTS_MAX);
    assert_eq!(state.next(at(200)), due("m-0.pt", 0, By::Quiet));
}

#[test]
fn what_was_restored_is_saved_already() {
    let mut state = WatchState::new("dir".to_owned(), PACE, Some("step-1".to_owned()));
    let first = seen(&[(1, 1)], 0, Marker::None);
    state.update(at(0), scanned(&[("step-1", 1, first)]));
    assert_eq!((state.next(at(20)), state.pending(at(20))), (None, vec![]));
    state.update(at(20), scanned(&[("step-1", 1, seen(&[(1, 2)], 20, Marker::None))]));
    assert!(state.next(at(30)).is_some());
}

proptest! {
    /// Whatever a writer does and whenever it is looked at, nothing counts as whole that changed a moment ago, and what stays
    /// as it is does in the end.
    #[test]
    fn only_what_is_quiet_is_whole(
        looks in prop::collection::vec((1_u64..15, prop::collection::btree_map(0_u64..4, 0_u64..3, 0..4), any::<bool>()), 1..30),
    ) {
        let mut series: Option<ObservationHistory> = None;
        let (mut now, mut changed, mut before) = (0, 0, None);
        for (wait, files, marked) in looks {
            now += wait;
            let files: Vec<(u64, u64)> = files.into_iter().collect();
            let newest = i64::try_from(now).unwrap();
            let next = seen(&files, newest, if marked { Marker::Present(stamp(newest)) } else { Marker::None });
            if before.as_ref() != Some(&files) {
                (changed, before) = (now, Some(files.clone()));
            }
            match &mut series {
                None => series = Some(ObservationHistory::begin(at(now), next, false)),
                Some(series) => series.observe(at(now), next),
            }
            let Some(series) = &series else { continue };
            match series.state_at(at(now), PACE) {
                CheckpointState::Finished(By::Marker) => prop_assert!(marked && now - changed >= 2),
                CheckpointState::Finished(By::Quiet) => prop_assert!(now - changed >= 10),
                CheckpointState::Finished(By::Rename) => prop_assert!(false),
                CheckpointState::Writing => prop_assert!(now - changed < 10),
                CheckpointState::Unmarked(_) | CheckpointState::Shrunk => prop_assert!(now - changed >= 10),
            }
            prop_assert_ne!(series.state_at(at(now + 10), PACE), CheckpointState::Writing);
        }
    }
}
