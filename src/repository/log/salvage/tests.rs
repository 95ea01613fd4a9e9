//! Tests of the repair of logs.

use std::sync::Arc;

use object_store::ObjectStore;
use object_store::memory::InMemory;

use super::*;
use crate::budget::Budget;
use crate::clock::SystemClock;
use crate::id::{ManifestId, Owned, SessionId};
use crate::limits::{MEMORY_MIN, MIB};
use crate::policy::Labels;
use crate::repository::faults::{Fault, FaultyStore};
use crate::repository::log::{RefValue, State};
use crate::repository::runs::tests::value;

fn log(objects: &Arc<impl ObjectStore>) -> Log {
    Log::new(Arc::clone(objects) as _, Arc::new(SystemClock), Budget::new(MEMORY_MIN).unwrap())
}

async fn set(objects: &Arc<impl ObjectStore>, name: &str) {
    let session = SessionId::random();
    let key = Owned::fresh(session);
    let manifest = ManifestId::of(name.as_bytes());
    let value = RefValue { manifest, manifest_key: key, map_key: key, ..value(0, &[]) };
    let log = log(objects);
    log.commit(Some(session), |_| Ok(vec![Action::Open(session)])).await.unwrap();
    let name: Name = name.parse().unwrap();
    let commit = log.commit(Some(session), |state| {
        let expected = state.version(&name);
        Ok(vec![Action::SetRef { name: name.clone(), expected, value: value.clone() }])
    });
    commit.await.unwrap();
    log.commit(Some(session), |_| Ok(vec![Action::Close(session)])).await.unwrap();
}

async fn names(objects: &Arc<impl ObjectStore>) -> Vec<String> {
    log(objects).refresh().await.unwrap().refs.keys().map(ToString::to_string).collect()
}

#[tokio::test]
async fn a_snapshot_that_no_log_reaches_is_not_read() {
    let objects = Arc::new(InMemory::new());
    set(&objects, "a").await;
    for planted in [u64::MAX, u64::MAX - 3] {
        let state = State { seq: planted, ..State::default() };
        let key = Numbered::Snapshot.key(planted);
        objects.put(&key, state.seal().into()).await.unwrap();
    }
    assert_eq!(names(&objects).await, ["a"]);
    set(&objects, "b").await;
    assert_eq!(names(&objects).await, ["a", "b"]);
}

#[tokio::test]
async fn garbage_with_numbers_far_ahead_is_left_aside_by_a_repair() {
    for planted in [NUMBER_MAX - 1, NUMBER_MAX, NUMBER_MAX + 1, u64::MAX] {
        let objects = Arc::new(InMemory::new());
        set(&objects, "a").await;
        for kind in [Numbered::Entry, Numbered::Snapshot] {
            objects.put(&kind.key(planted), "x".into()).await.unwrap();
        }
        let damaged = log(&objects).audit().await.unwrap().damaged;
        assert!(damaged.iter().any(|(key, _)| *key == Numbered::Entry.key(planted)), "{planted}: {damaged:?}");
        let salvaged = log(&objects).salvage(Accepted::default()).await.unwrap().unwrap();
        assert!(salvaged.unreadable.is_empty(), "{planted}: nothing of the log is lost");
        assert_eq!(salvaged.snapshots.len(), 1, "{planted}");
        set(&objects, "b").await;
        log(&objects).truncate(0, None).await.unwrap();
        assert_eq!(names(&objects).await, ["a", "b"], "{planted}");
    }
}

/// Whatever number it has: of an entry, of the next one, of one far ahead.
#[tokio::test]
async fn a_repair_sets_unreadable_snapshots_aside() {
    for planted in [1, 3, 4, 5, 900_000] {
        let objects = Arc::new(InMemory::new());
        set(&objects, "a").await;
        let key = Numbered::Snapshot.key(planted);
        objects.put(&key, "x".into()).await.unwrap();
        let damaged = log(&objects).audit().await.unwrap().damaged;
        let [(found, error)] = damaged.as_slice() else { panic!("{planted}: {damaged:?}") };
        assert_eq!(*found, key);
        assert!(error.help_text().is_some_and(|help| help.contains("towline verify --repair")), "{error:?}");
        let salvaged = log(&objects).salvage(Accepted::default()).await.unwrap().unwrap();
        let copy = layout::aside_snapshot(planted);
        assert_eq!((salvaged.unreadable, salvaged.snapshots), (Vec::new(), vec![(key, copy.clone())]));
        assert_eq!(objects.get(&copy).await.unwrap().bytes().await.unwrap(), "x");
        assert!(log(&objects).audit().await.unwrap().damaged.is_empty(), "{planted}");
        assert!(log(&objects).salvage(Accepted::default()).await.unwrap().is_none(), "once is enough");
        assert_eq!(names(&objects).await, ["a"]);
    }
}

/// A snapshot with a valid body is read, and named by the audit. Nothing is written behind the last number.
#[tokio::test]
async fn a_snapshot_at_the_last_number_does_no_lasting_harm() {
    let objects = Arc::new(InMemory::new());
    set(&objects, "a").await;
    let key = Numbered::Snapshot.key(NUMBER_MAX);
    objects.put(&key, State { seq: NUMBER_MAX, ..State::default() }.seal().into()).await.unwrap();
    let open = log(&objects).commit(None, |_| Ok(vec![Action::Open(SessionId::random())])).await;
    let error = open.unwrap_err();
    assert_eq!((error.kind(), error.place()), (ErrorKind::Damaged, Some(key.as_ref())), "{error:?}");
    let damaged = log(&objects).audit().await.unwrap().damaged;
    assert!(damaged.iter().any(|(found, _)| *found == key), "{damaged:?}");
    assert_eq!(log(&objects).truncate(0, None).await.unwrap_err().kind(), ErrorKind::Damaged);
    objects.delete(&key).await.unwrap();
    assert_eq!(names(&objects).await, ["a"], "nothing was deleted");
}

/// Three names, three entries each. If any entry is garbage or missing, the others stay in force.
#[tokio::test]
async fn whichever_entry_is_lost_the_others_stay_in_force() {
    for (lost, gone) in (1..=9).flat_map(|lost| [(lost, false), (lost, true)]) {
        let objects = Arc::new(InMemory::new());
        for name in ["a", "b", "c"] {
            set(&objects, name).await;
        }
        let key = Numbered::Entry.key(lost);
        if gone {
            objects.delete(&key).await.unwrap();
        } else {
            objects.put(&key, "garbage".into()).await.unwrap();
            let error = log(&objects).refresh().await.unwrap_err();
            assert!(error.help_text().is_some_and(|help| help.contains("towline verify --repair")), "{error:?}");
        }
        let salvaged = log(&objects).salvage(Accepted::default()).await.unwrap();
        // The last entry leaves no trace if it is missing.
        let Some(salvaged) = salvaged else {
            assert!(gone && lost == 9);
            continue;
        };
        assert_eq!(salvaged.unreadable.len(), 1, "{lost}");
        assert_eq!(salvaged.unreadable[0].0, key);
        assert_eq!(salvaged.unreadable[0].1, (!gone).then(|| Numbered::Aside.key(lost)));
        if !gone {
            let aside = objects.get(&Numbered::Aside.key(lost)).await.unwrap().bytes().await.unwrap();
            assert_eq!(aside, "garbage", "it is kept as it was");
        }
        let expected: Vec<&str> =
            [("a", 2), ("b", 5), ("c", 8)].iter().filter(|(_, set)| *set != lost).map(|(name, _)| *name).collect();
        assert_eq!(names(&objects).await, expected, "entry {lost}, gone: {gone}");
        assert!(log(&objects).salvage(Accepted::default()).await.unwrap().is_none(), "once is enough");
        set(&objects, "d").await;
        assert!(names(&objects).await.contains(&"d".to_owned()), "it goes on");
    }
}

/// A name is set (2), removed and kept (4), and its kept value forgotten (5). If any entry is lost, the rest
/// follows.
#[tokio::test]
async fn what_is_kept_of_names_survives_the_loss_of_other_entries() {
    for (lost, kept_after_4, names_lost) in [(1, 1, 0), (2, 0, 1), (3, 1, 0), (4, 0, 0)] {
        for forgets in [false, true] {
            let objects = Arc::new(InMemory::new());
            set(&objects, "a").await;
            let a: Name = "a".parse().unwrap();
            let take = log(&objects);
            let taken = take.commit(None, |state| {
                let gone = Action::RemoveRef { name: a.clone(), expected: 2 };
                Ok(state.keep([&a]).into_iter().chain([gone]).collect())
            });
            taken.await.unwrap();
            let forget = Action::Forget { name: a.clone(), version: 2, at: 4 };
            log(&objects).commit(None, |_| Ok(if forgets { vec![forget.clone()] } else { vec![] })).await.unwrap();
            set(&objects, "b").await;
            objects.put(&Numbered::Entry.key(lost), "garbage".into()).await.unwrap();
            let salvaged = log(&objects).salvage(Accepted::default()).await.unwrap().unwrap();
            assert_eq!((salvaged.names.len(), salvaged.partial.len()), (names_lost, 0), "{lost}: {salvaged:?}");
            let state = log(&objects).refresh().await.unwrap();
            assert_eq!(state.removed.len(), if forgets { 0 } else { kept_after_4 }, "{lost}");
            assert_eq!(state.refs.contains_key(&a), lost == 4, "{lost}");
        }
    }
}

/// Object number 2^64 - 1 below `log/`, as anybody may put one there.
#[tokio::test]
async fn a_number_far_ahead_is_no_entry_and_is_not_counted_up_to() {
    let objects = Arc::new(InMemory::new());
    set(&objects, "a").await;
    let stray = Numbered::Entry.key(u64::MAX);
    objects.put(&stray, "stray".into()).await.unwrap();
    let audit = log(&objects).audit().await.unwrap();
    assert!(audit.folds);
    let [(key, error)] = audit.damaged.as_slice() else { panic!("{:?}", audit.damaged) };
    assert_eq!(*key, stray);
    assert!(error.help_text().is_some_and(|help| help.contains("delete it")), "{error:?}");
    assert!(log(&objects).salvage(Accepted::default()).await.unwrap().is_none(), "nothing of the log is lost");
    // A real gap beside it.
    objects.delete(&Numbered::Entry.key(2)).await.unwrap();
    let salvaged = log(&objects).salvage(Accepted::default()).await.unwrap().unwrap();
    assert_eq!((salvaged.snapshot, salvaged.unreadable), (3, vec![(Numbered::Entry.key(2), None)]));
    set(&objects, "b").await;
    assert_eq!(names(&objects).await, ["b"]);
}

#[tokio::test]
async fn what_is_lost_counts_in_the_memory_before_anything_is_done() {
    let objects = Arc::new(InMemory::new());
    let small = Budget::new(MEMORY_MIN).unwrap().carve(MIB).await.unwrap();
    let most = small.kept_max() / OBJECT_WEIGHT as u64;
    for number in 1..=most {
        objects.put(&Numbered::Entry.key(number), "garbage".into()).await.unwrap();
    }
    let tight = Log::new(Arc::clone(&objects) as _, Arc::new(SystemClock), small.clone());
    let error = tight.salvage(Accepted::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exhausted, "{error:?}");
    assert!(small.keep(small.kept_max()).is_ok(), "what was refused is given back");
    assert!(objects.head(&Numbered::Aside.key(1)).await.is_err(), "nothing was done");
    let salvaged = log(&objects).salvage(Accepted::default()).await.unwrap().unwrap();
    assert_eq!(salvaged.unreadable.len() as u64, most);
}

#[tokio::test]
async fn labels_are_not_lost_without_a_word() {
    let objects = Arc::new(InMemory::new());
    set(&objects, "a").await;
    for (name, label) in [("a", ("tenant", "t")), ("b", ("sensitivity", "secret"))] {
        let labels = Labels::default().with(label.0, label.1).unwrap();
        let name: Name = name.parse().unwrap();
        let give = |state: &State| Ok(state.label(&name, &labels)?.into_iter().collect());
        log(&objects).commit(None, give).await.unwrap();
    }
    // The label of `b`.
    objects.put(&Numbered::Entry.key(5), "garbage".into()).await.unwrap();
    let error = log(&objects).salvage(Accepted::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict, "{error:?}");
    assert!(error.help_text().is_some_and(|help| help.contains("--accept-lost-labels")), "{error:?}");
    assert!(objects.get(&Numbered::Aside.key(5)).await.is_err(), "nothing was done");
    let salvaged = log(&objects).salvage(Accepted { lost_labels: true, ..Accepted::default() }).await.unwrap().unwrap();
    assert_eq!(salvaged.unreadable.len(), 1);
    let state = log(&objects).refresh().await.unwrap();
    assert_eq!(state.labels.keys().map(ToString::to_string).collect::<Vec<_>>(), ["a"]);
}

#[tokio::test]
async fn an_entry_of_another_log_is_left_out() {
    let (old, objects) = (Arc::new(InMemory::new()), Arc::new(InMemory::new()));
    for name in ["a", "b"] {
        set(&old, name).await;
    }
    set(&objects, "kept").await;
    // Sets `b` in a session that this log does not know.
    let entry = old.get(&Numbered::Entry.key(5)).await.unwrap().bytes().await.unwrap();
    objects.put(&Numbered::Entry.key(4), entry.clone().into()).await.unwrap();
    assert_eq!(log(&objects).refresh().await.unwrap_err().kind(), ErrorKind::Damaged);
    let salvaged = log(&objects).salvage(Accepted::default()).await.unwrap().unwrap();
    assert_eq!(salvaged.refused, [(Numbered::Entry.key(4), Numbered::Aside.key(4))]);
    assert_eq!(objects.get(&Numbered::Aside.key(4)).await.unwrap().bytes().await.unwrap(), entry);
    assert!(log(&objects).audit().await.unwrap().damaged.is_empty());
    set(&objects, "later").await;
    assert_eq!(names(&objects).await, ["kept", "later"]);
}

#[tokio::test]
async fn a_long_gap_is_told_once_and_the_log_goes_on_above_it() {
    let objects = Arc::new(InMemory::new());
    set(&objects, "a").await;
    let entry = objects.get(&Numbered::Entry.key(1)).await.unwrap().bytes().await.unwrap();
    let far = 900_000;
    objects.put(&Numbered::Entry.key(far), entry.into()).await.unwrap();
    let audit = log(&objects).audit().await.unwrap();
    let [(key, error)] = audit.damaged.as_slice() else { panic!("{} are told", audit.damaged.len()) };
    assert_eq!(*key, Numbered::Entry.key(4));
    assert!(error.to_string().contains(&format!("{} log entries", far - 4)), "{error}");
    let salvaged = log(&objects).salvage(Accepted::default()).await.unwrap().unwrap();
    assert_eq!((salvaged.snapshot, salvaged.unreadable.len()), (far, 1));
    assert_eq!(names(&objects).await, ["a"]);
}

#[tokio::test]
async fn an_entry_of_a_later_version_is_not_garbage() {
    let objects = Arc::new(InMemory::new());
    set(&objects, "a").await;
    let key = Numbered::Entry.key(2);
    let mut bytes = objects.get(&key).await.unwrap().bytes().await.unwrap().to_vec();
    bytes.truncate(bytes.len() - DIGEST_LEN);
    bytes[5] = 2;
    let digest = blake3::hash(&bytes);
    bytes.extend_from_slice(digest.as_bytes());
    objects.put(&key, bytes.into()).await.unwrap();
    assert_eq!(log(&objects).salvage(Accepted::default()).await.unwrap_err().kind(), ErrorKind::Unsupported);
}

#[tokio::test]
async fn one_bad_answer_condemns_nothing() {
    let read = async |answers: Vec<Result<Option<u8>>>| {
        let left = std::cell::RefCell::new(answers.into_iter());
        let read =
            twice_if_damaged(|| std::future::ready(left.borrow_mut().next().expect("it is read at most twice"))).await;
        (read.map_err(|error| error.kind()), left.borrow().len())
    };
    let damaged = || Err(Error::damaged("entry"));
    assert_eq!(read(vec![damaged(), Ok(Some(1))]).await, (Ok(Some(1)), 0));
    assert_eq!(read(vec![Ok(None), Ok(Some(1))]).await, (Ok(Some(1)), 0));
    assert_eq!(read(vec![damaged(), damaged()]).await, (Err(ErrorKind::Damaged), 0));
    assert_eq!(read(vec![Ok(None), damaged()]).await, (Err(ErrorKind::Damaged), 0));
    assert_eq!(read(vec![damaged(), Err(Error::unreachable("store"))]).await, (Err(ErrorKind::Unreachable), 0));
    assert_eq!(read(vec![Err(Error::unreachable("store")), Ok(Some(1))]).await, (Err(ErrorKind::Unreachable), 1));
}

/// 66 entries that set 22 names, with a snapshot after entry 64.
async fn long_log() -> Arc<FaultyStore> {
    let objects = Arc::new(FaultyStore::default());
    for nth in 0..22 {
        set(&objects, &format!("{nth:0>2}")).await;
    }
    assert!(log(&objects).exact_snapshot(64).await.unwrap().is_some());
    objects
}

/// Makes an entry garbage, or deletes it.
async fn spoil(objects: &Arc<FaultyStore>, number: u64, gone: bool) {
    let key = Numbered::Entry.key(number);
    if gone {
        objects.delete(&key).await.unwrap();
    } else {
        objects.put(&key, "garbage".into()).await.unwrap();
    }
}

fn accept(snapshot: u64) -> Accepted {
    Accepted { snapshot: Some(snapshot), ..Accepted::default() }
}

/// F8: an entry between the boundary and the newest snapshot.
#[tokio::test]
async fn an_entry_before_a_snapshot_is_repaired_once_that_is_accepted() {
    for (lost, gone) in [(30, false), (30, true), (64, false), (64, true), (29, true)] {
        let objects = long_log().await;
        spoil(&objects, lost, gone).await;
        assert_eq!(names(&objects).await.len(), 22, "readers start from the snapshot");
        for accepted in [Accepted::default(), accept(63)] {
            let error = log(&objects).salvage(accepted).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Conflict, "{error:?}");
            assert!(error.help_text().is_some_and(|help| help.contains("--accept-snapshot 64")), "{error:?}");
        }
        assert!(objects.get(&Numbered::Aside.key(lost)).await.is_err(), "nothing was done");
        let salvaged = log(&objects).salvage(accept(64)).await.unwrap().unwrap();
        let copy = (!gone).then(|| Numbered::Aside.key(lost));
        assert_eq!((salvaged.accepted, salvaged.loses()), (Some(64), false), "{salvaged:?}");
        assert_eq!(salvaged.covered, [(Numbered::Entry.key(lost), copy)]);
        assert!(log(&objects).audit().await.unwrap().damaged.is_empty());
        assert!(log(&objects).salvage(Accepted::default()).await.unwrap().is_none(), "once is enough");
        set(&objects, "later").await;
        log(&objects).truncate(0, None).await.unwrap();
        assert_eq!(names(&objects).await.len(), 23);
    }
}

/// The session that the lost entry opened is closed by a later one.
#[tokio::test]
async fn a_snapshot_that_the_other_entries_make_needs_no_leave() {
    let objects = long_log().await;
    spoil(&objects, 1, false).await;
    let salvaged = log(&objects).salvage(Accepted::default()).await.unwrap().unwrap();
    assert_eq!((salvaged.unreadable.len(), salvaged.accepted), (1, None));
    assert!(log(&objects).audit().await.unwrap().damaged.is_empty());
    assert_eq!(names(&objects).await.len(), 22);
}

/// S8: "A snapshot that does not follow from the log's entries stops the collect".
#[tokio::test]
async fn a_repair_does_not_make_a_planted_snapshot_the_start_of_the_log() {
    let objects = long_log().await;
    let key = Numbered::Snapshot.key(64);
    objects.put(&key, State { seq: 64, ..State::default() }.seal().into()).await.unwrap();
    // Whoever damages a later entry gets no repair that starts from it.
    spoil(&objects, 66, false).await;
    for accepted in [Accepted::default(), accept(64)] {
        let error = log(&objects).salvage(accepted).await.unwrap_err();
        assert_eq!((error.kind(), error.place()), (ErrorKind::Damaged, Some(key.as_ref())), "{error:?}");
    }
    // An earlier one neither.
    spoil(&objects, 30, false).await;
    let error = log(&objects).salvage(Accepted::default()).await.unwrap_err();
    assert_eq!((error.kind(), error.place()), (ErrorKind::Conflict, Some(key.as_ref())), "{error:?}");
    objects.delete(&key).await.unwrap();
    let salvaged = log(&objects).salvage(Accepted::default()).await.unwrap().unwrap();
    assert_eq!((salvaged.unreadable.len(), salvaged.accepted), (2, None));
    assert_eq!(names(&objects).await.len(), 22);
}

/// F8: nothing else is lost, so that only the snapshot tells of it.
#[tokio::test]
async fn a_snapshot_after_a_lost_last_entry_is_not_passed_over() {
    let objects = long_log().await;
    for number in [64, 65, 66] {
        spoil(&objects, number, true).await;
    }
    let error = log(&objects).salvage(Accepted::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict, "{error:?}");
    assert!(error.help_text().is_some_and(|help| help.contains("--accept-snapshot 64")), "{error:?}");
    let salvaged = log(&objects).salvage(accept(64)).await.unwrap().unwrap();
    assert_eq!((salvaged.covered.len(), salvaged.accepted), (1, Some(64)));
    assert!(log(&objects).audit().await.unwrap().damaged.is_empty());
    assert_eq!(names(&objects).await.len(), 21);
}

/// Nothing shows whether the snapshot follows from that of the boundary, which is garbage.
#[tokio::test]
async fn a_snapshot_after_that_of_the_boundary_is_not_trusted_without_it() {
    let objects = long_log().await;
    log(&objects).truncate(2, None).await.unwrap();
    let state = log(&objects).refresh().await.unwrap();
    log(&objects).write_snapshot(&state).await.unwrap();
    objects.put(&Numbered::Snapshot.key(64), "garbage".into()).await.unwrap();
    let error = log(&objects).salvage(Accepted::default()).await.unwrap_err();
    assert!(error.help_text().is_some_and(|help| help.contains("--accept-snapshot 66")), "{error:?}");
    let salvaged = log(&objects).salvage(accept(66)).await.unwrap().unwrap();
    assert_eq!((salvaged.accepted, salvaged.snapshots.len()), (Some(66), 1));
    assert!(log(&objects).audit().await.unwrap().damaged.is_empty());
    assert_eq!(names(&objects).await.len(), 22);
}

/// The boundary is refused, or acknowledged and lost, after the snapshot was written.
#[tokio::test]
async fn a_second_repair_finishes_an_interrupted_one() {
    for (fault, gone) in [(Fault::Refuse, false), (Fault::Refuse, true), (Fault::Lose, false)] {
        for (lost, accepted) in [(vec![65], Accepted::default()), (vec![30, 65], accept(64))] {
            let objects = long_log().await;
            for &number in &lost {
                spoil(&objects, number, gone).await;
            }
            objects.set(Numbered::Boundary.key(1), fault);
            log(&objects).salvage(accepted).await.unwrap_err();
            assert!(log(&objects).exact_snapshot(66).await.unwrap().is_some());
            assert!(!log(&objects).audit().await.unwrap().damaged.is_empty());
            objects.heal();
            let salvaged = log(&objects).salvage(accepted).await.unwrap().unwrap();
            assert_eq!(salvaged.unreadable.len(), 1, "{salvaged:?}");
            assert_eq!((salvaged.snapshot, salvaged.unreadable[0].0.clone()), (66, Numbered::Entry.key(65)));
            assert!(log(&objects).audit().await.unwrap().damaged.is_empty());
            assert_eq!(names(&objects).await.len(), 21);
            set(&objects, "later").await;
            assert!(names(&objects).await.contains(&"later".to_owned()), "it goes on");
        }
    }
}
