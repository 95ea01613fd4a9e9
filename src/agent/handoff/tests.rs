//! The store: what comes, is kept, set aside and let go of.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ulid::Ulid;

use super::archive::Contents;
use super::register::PROMISED_MAX;
use super::store::HandoffStore;
use super::stored::{Announced, StoredCheckpoint, names, read_modes};
use crate::agent::config::{HandoffConfig, accepts};
use crate::agent::view::SetAside;
use crate::clock::Timestamp;
use crate::error::{ErrorKind, Result};
use crate::id::RepositoryId;
use crate::identity::Identity;

/// Everybody of one site may give everything, up to the whole store.
const EVERYBODY: &str = "[[accept]]\nfrom = 'home/*'\nnames = '**'\nmax = '1G'";

fn agent(name: &str) -> Identity {
    Identity::new("home", name).unwrap()
}

fn announced(bytes: u64) -> Announced {
    let (name, labels) = ("run/step-5".parse().unwrap(), BTreeMap::from([("a".to_owned(), "b".to_owned())]));
    Announced { name, repository: RepositoryId::random(), labels, bytes }
}

/// A checkpoint in a folder that nobody may write to, as it is sent, and its room.
fn archive(dir: &Path) -> (Vec<u8>, u64) {
    let path = dir.join("checkpoint-5");
    fs::create_dir_all(&path).unwrap();
    fs::write(path.join("model.bin"), [7; 1000]).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o555)).unwrap();
    let contents = Contents::find(&path, None).unwrap();
    let mut bytes = Vec::new();
    contents.send(&mut bytes).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    (bytes, contents.space())
}

fn promise(store: &HandoffStore, name: &str, bytes: u64) -> Result<Ulid> {
    store.promise(&agent(name), announced(bytes))
}

fn take(store: &Arc<HandoffStore>, id: Ulid, mut archive: &[u8]) -> Result<StoredCheckpoint> {
    store.expect(id, &agent("a"))?.take(&mut archive, Timestamp(1))
}

fn config(dir: &Path, capacity: u64, entries: &str) -> HandoffConfig {
    let accept = accepts(entries, capacity).unwrap();
    let (wait, deadline) = (Duration::ZERO, Duration::from_hours(1));
    HandoffConfig { dir: dir.to_owned(), capacity, accept, wait, deadline, tries: 1 }
}

fn open(dir: &Path, capacity: u64) -> Arc<HandoffStore> {
    Arc::new(HandoffStore::open(config(dir, capacity, EVERYBODY)).unwrap())
}

/// Waits until only `left` folders are in `dir`: the others are deleted in the background.
fn await_deletion(dir: &Path, left: usize) {
    let started = Instant::now();
    while fs::read_dir(dir).unwrap().count() != left {
        assert!(started.elapsed() < Duration::from_mins(1), "folders are not deleted");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until `promise` is given: space is free a moment after its folder is gone.
fn await_free(promise: impl Fn() -> Result<Ulid>) {
    let started = Instant::now();
    while let Err(error) = promise() {
        assert_eq!(error.kind(), ErrorKind::Exhausted);
        assert!(started.elapsed() < Duration::from_mins(1), "{error}");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn what_is_kept_is_there_after_a_restart_and_goes_when_it_is_let_go() {
    let temp = tempfile::tempdir().unwrap();
    let (dir, (archive, takes)) = (temp.path().join("kept"), archive(temp.path()));
    let store = open(&dir, 2 * takes);
    assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
    let id = promise(&store, "a", takes).unwrap();
    let other = store.expect(id, &agent("b"));
    assert_eq!(other.unwrap_err().kind(), ErrorKind::NotFound, "it is another's");
    let stored = take(&store, id, &archive).unwrap();
    assert_eq!(take(&store, id, &archive).unwrap_err().kind(), ErrorKind::NotFound, "it came");
    // One that was on its way when the agent was killed is no checkpoint.
    let part = dir.join(format!("{}.part", Ulid::generate()));
    fs::create_dir_all(part.join("files/c")).unwrap();
    fs::set_permissions(part.join("files/c"), fs::Permissions::from_mode(0o555)).unwrap();
    fs::create_dir(dir.join(Ulid::generate().to_string())).unwrap();

    let store = open(&dir, 2 * takes);
    await_deletion(&dir, 2);
    assert!(!part.exists());
    let (again, place) = store.find(id).unwrap();
    assert_eq!((&again, store.bytes()), (&stored, takes), "what nobody knows is left alone");
    assert_eq!(fs::read(place.join("model.bin")).unwrap(), [7; 1000]);
    assert_eq!((store.list(Some(&agent("b"))).len(), store.list(None).len()), (0, 1));
    assert!(store.release(id, Some(&agent("b"))).is_err(), "it is another's");
    store.release(id, Some(&agent("a"))).unwrap();
    assert!(store.find(id).is_none() && store.release(id, None).is_err());
    assert_eq!(store.bytes(), 0);
    await_deletion(&dir, 1);
    // A checkpoint removed by hand is released, too.
    let id = promise(&store, "a", takes).unwrap();
    take(&store, id, &archive).unwrap();
    assert!(!store.has_lost(id));
    fs::rename(dir.join(id.to_string()), temp.path().join("elsewhere")).unwrap();
    assert!(store.has_lost(id));
    store.release(id, None).unwrap();
    assert_eq!(store.bytes(), 0);
}

#[test]
fn space_is_free_once_the_files_are_deleted() {
    let temp = tempfile::tempdir().unwrap();
    let (dir, (archive, takes)) = (temp.path().join("kept"), archive(temp.path()));
    let store = open(&dir, takes);
    let id = promise(&store, "a", takes).unwrap();
    take(&store, id, &archive).unwrap();
    store.release(id, None).unwrap();
    assert_eq!(store.release(id, None).unwrap_err().kind(), ErrorKind::NotFound, "it is gone for everybody at once");
    await_deletion(&dir, 0);
    await_free(|| promise(&store, "b", takes));
}

#[test]
fn room_is_promised_once() {
    let temp = tempfile::tempdir().unwrap();
    let (dir, (archive, takes)) = (temp.path().join("kept"), archive(temp.path()));
    let store = open(&dir, 2 * takes + 500);
    let first = promise(&store, "a", takes).unwrap();
    let second = promise(&store, "a", takes + 500).unwrap();
    assert_eq!(promise(&store, "b", 1).unwrap_err().kind(), ErrorKind::Exhausted);
    // One that breaks off leaves nothing, and its room is free again.
    assert_eq!(take(&store, second, &archive[..500]).unwrap_err().kind(), ErrorKind::Unreachable);
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    take(&store, first, &archive).unwrap();
    // More than was announced is not taken.
    let small = promise(&store, "a", takes - 1).unwrap();
    assert_eq!(take(&store, small, &archive).unwrap_err().kind(), ErrorKind::Exhausted);
    assert_eq!(store.bytes(), takes);
    // One agent cannot take all slots.
    let promises = (0..9).filter(|_| promise(&store, "a", 1).is_ok()).count();
    assert_eq!(promises, PROMISED_MAX.1);
    assert!(promise(&store, "b", 1).is_ok());
    let error = open(&temp.path().join("large"), u64::MAX).promise(&agent("b"), announced(u64::MAX / 2)).unwrap_err();
    assert!(error.kind() == ErrorKind::Exhausted && error.to_string().starts_with("disk full"), "{error}");
    let mut long = announced(1);
    // As JSON, each is six bytes.
    long.labels.insert("long".to_owned(), "\u{1}".repeat(1000));
    assert_eq!(store.promise(&agent("b"), long).unwrap_err().kind(), ErrorKind::Usage);
}

#[test]
fn a_checkpoint_has_three_names_to_be_saved_as() {
    let (from, id) = (agent("a"), Ulid::generate());
    let all = names(&"run/step-7".parse().unwrap(), &from, id).unwrap();
    let expected = [
        "run/step-7".to_owned(),
        format!("handoff/{}/run/step-7", from.path()),
        format!("handoff/{}/{id}/run/step-7", from.path()),
    ];
    assert_eq!(all.map(|name| name.to_string()), expected);
    for other in ["models/production", "run/step-07", "run/step-00"] {
        assert_eq!(names(&other.parse().unwrap(), &from, id).unwrap_err().kind(), ErrorKind::Usage, "{other}");
    }
}

#[test]
fn each_sender_has_a_quota_that_what_was_set_aside_uses_too() {
    let temp = tempfile::tempdir().unwrap();
    let (dir, (archive, takes)) = (temp.path().join("kept"), archive(temp.path()));
    let entry = |max: u64, checkpoints: usize| {
        format!("[[accept]]\nfrom = 'home/*'\nnames = 'run/*'\nmax = {max}\nmax_checkpoints = {checkpoints}")
    };
    let store = Arc::new(HandoffStore::open(config(&dir, 100 * takes, &entry(takes + 10, 9))).unwrap());
    let id = promise(&store, "a", takes).unwrap();
    let error = promise(&store, "a", 11).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exhausted, "what is promised counts");
    assert!(error.to_string().contains("quota of home/a is used up at run/step-5: expected at most 10 B"), "{error}");
    assert!(error.help_text().unwrap().contains("[[handoff.accept]]"));
    assert!(promise(&store, "b", takes).is_ok(), "it is each sender's own");
    take(&store, id, &archive).unwrap();
    let aside = SetAside {
        since: "now".into(),
        tries: 1,
        kind: "usage".into(),
        error: "no step".into(),
        help: "drop it".into(),
    };
    store.set_aside(id, aside.clone()).unwrap();
    assert_eq!((store.aside(), store.to_save()), (1, Vec::new()));
    assert_eq!(promise(&store, "a", 11).unwrap_err().kind(), ErrorKind::Exhausted);

    // It is known after a restart, too, until somebody wants it saved.
    let store = Arc::new(HandoffStore::open(config(&dir, 100 * takes, &entry(1 << 30, 1))).unwrap());
    assert_eq!(store.list(None)[0].1.aside, Some(aside));
    let error = promise(&store, "a", 1).unwrap_err();
    assert!(error.to_string().contains("at most 1 checkpoints stored, got 1 stored"), "{error}");
    store.retry(id).unwrap();
    assert_eq!((store.aside(), store.to_save()), (0, vec![(id, true)]));
    assert_eq!(store.to_save(), [(id, false)], "it is asked for once");
    store.release(id, None).unwrap();
    assert_eq!(store.retry(id).unwrap_err().kind(), ErrorKind::NotFound);
    await_free(|| promise(&store, "a", 1));
}

#[test]
fn what_no_entry_accepts_is_refused_also_once_it_came() {
    let temp = tempfile::tempdir().unwrap();
    let (dir, (archive, takes)) = (temp.path().join("kept"), archive(temp.path()));
    let settings = config(&dir, 2 * takes, EVERYBODY);
    let accept = settings.accept.clone();
    let store = Arc::new(HandoffStore::open(settings).unwrap());
    let id = promise(&store, "a", takes).unwrap();
    // The allowance is withdrawn while the checkpoint is on its way.
    accept.replace(&accepts("[[accept]]\nfrom = 'home/*'\nnames = 'other/*'", 2 * takes).unwrap());
    let error = take(&store, id, &archive).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied);
    assert!(error.help_text().unwrap().contains("[[handoff.accept]]"));
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0, "nothing is kept");
    assert_eq!(promise(&store, "a", 1).unwrap_err().kind(), ErrorKind::Denied);
    accept.replace(&accepts(EVERYBODY, 2 * takes).unwrap());
    assert!(promise(&store, "a", 2 * takes).is_ok(), "its room is free");
}

#[test]
fn what_does_not_come_in_time_gives_its_room_back() {
    let temp = tempfile::tempdir().unwrap();
    let (dir, (archive, takes)) = (temp.path().join("kept"), archive(temp.path()));
    let at_once = HandoffConfig { deadline: Duration::ZERO, ..config(&dir, takes, EVERYBODY) };
    let store = Arc::new(HandoffStore::open(at_once).unwrap());
    let id = promise(&store, "a", takes).unwrap();
    assert!(promise(&store, "b", takes).is_ok(), "a promise that is not taken up ends");
    assert_eq!(take(&store, id, &archive).unwrap_err().kind(), ErrorKind::NotFound);
    // One that breaks off because its time is over says so.
    let store = open(&dir, takes);
    let id = promise(&store, "a", takes).unwrap();
    let incoming = store.expect(id, &agent("a")).unwrap();
    assert_eq!(promise(&store, "b", takes).unwrap_err().kind(), ErrorKind::Exhausted, "it is on its way");
    drop(incoming);
    assert!(promise(&store, "b", takes).is_ok());
}

#[test]
fn what_is_kept_can_be_read_whatever_the_sender_allowed() {
    let temp = tempfile::tempdir().unwrap();
    let (dir, path) = (temp.path().join("kept"), temp.path().join("checkpoint-5"));
    fs::create_dir_all(path.join("deep")).unwrap();
    fs::write(path.join("deep/model.bin"), [7; 1000]).unwrap();
    // As a sender sends it whose files nobody may read.
    let file = path.join("deep/model.bin");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o000)).unwrap();
    let contents = Contents::find(&path, None).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    let mut bytes = Vec::new();
    contents.send(&mut bytes).unwrap();
    let store = open(&dir, contents.space());
    let id = promise(&store, "a", contents.space()).unwrap();
    take(&store, id, &bytes).unwrap();
    let (_, kept) = store.find(id).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!((mode(&kept.join("deep/model.bin")), mode(&kept.join("deep"))), (0o600, 0o700));
    assert_eq!(read_modes(&dir.join(id.to_string())).unwrap()[&b"deep/model.bin".to_vec()], 0);
    assert_eq!(mode(&dir.join(id.to_string()).join("handoff.json")), 0o600);
}

#[test]
fn a_record_that_names_a_path_is_not_believed() {
    let temp = tempfile::tempdir().unwrap();
    let (dir, (archive, takes)) = (temp.path().join("kept"), archive(temp.path()));
    let store = open(&dir, takes);
    let id = promise(&store, "a", takes).unwrap();
    take(&store, id, &archive).unwrap();
    let record = dir.join(id.to_string()).join("handoff.json");
    let text = fs::read_to_string(&record).unwrap();
    for entry in ["/etc", "../checkpoint-5", "a/b", "."] {
        let forged = text.replace("\"checkpoint-5\"", &format!("{entry:?}"));
        assert_ne!(forged, text);
        fs::write(&record, forged).unwrap();
        assert!(open(&dir, takes).find(id).is_none(), "{entry}");
    }
    fs::write(&record, text).unwrap();
    assert!(open(&dir, takes).find(id).is_some());
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
    let error = HandoffStore::open(config(&dir, takes, EVERYBODY)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "others could put records there");
}
