//! Ctrl-C and SIGTERM: what an interrupted command says, keeps and ends with.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use towline::error::ErrorKind;
use towline::ops::{CollectOptions, SaveOptions};
use towline::repository::{OpenOptions, Repository};
use towline::storage::Store;

use crate::cli::{User, ended, noise};
use crate::data::name;
use crate::faulty::{Faults, Faulty};

/// More than a save can write before it is interrupted: some packs of it are there by then.
const LEN: usize = 160 << 20;

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// The finished packs of a repository in a folder.
fn packs(repository: &Path) -> usize {
    let sessions = fs::read_dir(repository.join("pack")).into_iter().flatten().map(Result::unwrap);
    let objects = sessions.flat_map(|session| fs::read_dir(session.path()).unwrap()).map(Result::unwrap);
    objects.filter(|object| !object.file_name().to_string_lossy().contains('#')).count()
}

/// Starts to save `big`, and sends `with` once a pack is there; its exit code and standard error.
fn interrupted_save(user: &User, with: Signal) -> (Option<i32>, String) {
    for _ in 0..5 {
        let child = user.command(&["save", "big", "big", "--reread"]).spawn().unwrap();
        while packs(&user.repository()) == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        // As `timeout` of coreutils does: a process, and then its group.
        signal(&child, with);
        signal(&child, with);
        let (code, err) = ended(child);
        if code != Some(0) {
            return (code, err);
        }
        user.ok(&["rm", "--now", "big"]);
        user.ok(&["collect", "--grace", "0"]);
    }
    panic!("the save was always faster than the signal");
}

/// F9: "After ten seconds without an answer the log says which store is asked for what."
#[test]
fn a_store_that_never_answers_is_named_while_it_is_waited_for() {
    let user = User::new();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", silent.local_addr().unwrap());
    let mut command = user.command(&["ls", "--repo", "s3://bucket/x", "--endpoint", &endpoint]);
    let keys = command.env("AWS_ACCESS_KEY_ID", "k").env("AWS_SECRET_ACCESS_KEY", "s");
    let mut child = keys.spawn().unwrap();
    let mut said = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut said).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(said.contains("s3://bucket/x has not answered for 10s, waiting for: open"), "{said}");
}

/// They may tell why the store does not answer.
#[test]
fn an_interrupted_doctor_tells_the_checks_before() {
    let user = User::new();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", silent.local_addr().unwrap());
    let mut command = user.command(&["doctor", "s3://bucket/x", "--endpoint", &endpoint]);
    let keys = command.env("AWS_ACCESS_KEY_ID", "k").env("AWS_SECRET_ACCESS_KEY", "s");
    let child = keys.stdout(Stdio::piped()).spawn().unwrap();
    let _asked = silent.accept().unwrap();
    signal(&child, Signal::INT);
    let done = child.wait_with_output().unwrap();
    let [out, err] = [done.stdout, done.stderr].map(|text| String::from_utf8(text).unwrap());
    assert_eq!(done.status.code(), Some(130), "{err}");
    assert!(out.contains("  endpoint: ") && out.contains("  credentials: "), "{out}");
    assert!(err.contains("interrupted"), "{err}");
}

/// P7: "On the first signal a save or sync records what it has sent, within seconds, and reports how much that is".
#[test]
fn an_interrupted_save_says_what_it_kept_and_the_next_uses_it() {
    let user = User::with_repository();
    user.write("big", &noise(LEN));
    for (with, exit) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let (code, err) = interrupted_save(&user, with);
        assert_eq!(code, Some(exit), "{err}");
        assert!(err.contains("error: the save of big was interrupted; "), "{err}");
        assert!(err.contains("iB of new data are stored and will be used again"), "{err}");
        assert_eq!(user.json(&["collect", "--dry-run"], 0)["held_packs"], 0, "its session is over");
        if with == Signal::INT {
            user.ok(&["collect", "--grace", "0"]);
        }
    }
    let again = user.json(&["save", "big", "big"], 0);
    let (new, all) = (again["new_bytes"].as_u64().unwrap(), LEN as u64);
    assert!(new < all - (8 << 20), "at least a pack was used again: {again}");
    assert_eq!(user.run(&["cat", "big:big"]).out.len(), LEN);
}

#[test]
fn a_second_ctrl_c_ends_the_process_at_once() {
    let user = User::with_repository();
    user.write("big", &noise(8 << 20));
    user.ok(&["save", "big", "big"]);
    let mut child = user.command(&["cat", "big:big"]).spawn().unwrap();
    // The first byte is there: it is running, and soon stuck in a pipe that nobody empties.
    let mut pipe = child.stdout.take().unwrap();
    std::io::Read::read_exact(&mut pipe, &mut [0]).unwrap();
    signal(&child, Signal::INT);
    std::thread::sleep(Duration::from_millis(400));
    signal(&child, Signal::INT);
    let (code, err) = ended(child);
    assert_eq!(code, Some(130));
    assert!(!err.contains("error:"), "it waited until it had let go: {err}");
}

#[test]
fn a_killed_save_holds_its_packs_and_collect_says_so() {
    let user = User::with_repository();
    user.write("big", &noise(LEN));
    let mut child = user.command(&["save", "big", "big"]).spawn().unwrap();
    while packs(&user.repository()) < 2 {
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    if child.wait().unwrap().success() {
        return; // It was faster than the kill: nothing to see.
    }
    for args in [&["collect", "--dry-run", "--grace", "0"][..], &["collect", "--grace", "0"]] {
        let report = user.json(args, 0);
        let held = report["held_bytes"].as_u64().unwrap();
        assert!(report["held_packs"].as_u64().unwrap() >= 2 && held > 0, "{args:?}: {report}");
        assert_eq!(report["held"][0]["bytes"], held);
        assert!(report["held"][0]["ends"].as_str().unwrap().ends_with('Z'), "{report}");
        assert_eq!(report["purged_packs"], 0);
    }
    let text = user.ok(&["collect", "--grace", "0"]);
    assert!(text.contains("kept for open sessions: ") && text.contains("or with a collect after 2"), "{text}");
}

/// A stop does not wait for uploads that hang, and what had arrived by then is known to the next save.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_does_not_wait_for_uploads_that_hang() {
    let dir = tempfile::tempdir().unwrap();
    let faulty = Faulty::new(Arc::clone(Store::memory().objects()), Faults { stalls: 1000, ..Faults::default() }, 1);
    faulty.calm(true);
    let options =
        || OpenOptions { cache: Some(dir.path().join("cache")), memory: Some(64 << 20), ..OpenOptions::default() };
    let store = Store::from_objects(Arc::new(faulty.clone()));
    let (repository, _) = Repository::create(store, options()).await.unwrap();
    let path = dir.path().join("big");
    fs::write(&path, noise(100 << 20)).unwrap();
    let saving = SaveOptions::default();
    let (stop, progress) = (saving.stop.clone(), saving.progress.clone());
    let task = {
        let (repository, path) = (repository.clone(), path.clone());
        tokio::spawn(async move { repository.save(&path, &name("big"), &saving).await })
    };
    while progress.snapshot().moved == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // From now on nothing is answered: whatever is on its way hangs.
    faulty.calm(false);
    let stalled = faulty.injected();
    while faulty.injected() == stalled && !task.is_finished() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    faulty.calm(true);
    stop.cancel();
    let error = tokio::time::timeout(Duration::from_mins(1), task).await.expect("it hangs").unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled, "{error:?}");
    assert!(error.to_string().contains("will be used again"), "{error:?}");
    assert!(repository.state().await.unwrap().sessions.is_empty(), "the session is over");
    let again = repository.save(&path, &name("big"), &SaveOptions::default()).await.unwrap();
    assert!(again.new_bytes < 100 << 20, "what had arrived is used: {again:?}");
    let report = repository.collect(&CollectOptions::default()).await.unwrap();
    assert_eq!(report.held_packs, 0);
}

/// W4: "At SIGTERM and Ctrl-C `watch` saves the finished checkpoints". People are told which signal it was.
#[test]
fn a_watch_says_which_signal_ends_it() {
    let user = User::with_repository();
    for (signal, called) in [(Signal::INT, "SIGINT"), (Signal::TERM, "SIGTERM")] {
        let mut child = user.command(&["watch", "out", "run", "--settle", "50ms"]).spawn().unwrap();
        let mut told = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        assert!(told.by_ref().any(|line| line.starts_with("watching out ")));
        kill_process(Pid::from_child(&child), signal).unwrap();
        let rest: Vec<String> = told.collect();
        assert!(rest.contains(&format!("got {called}: the watch ends")), "{rest:?}");
        assert_eq!(child.wait().unwrap().code(), Some(0));
    }
}
