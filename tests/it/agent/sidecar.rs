//! An agent beside a training: ready when the inputs are there, saving what is written, and done in time when it must end.

use std::fs;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;

use super::{PATIENCE, Running, configure, with_tree};
use crate::cli::User;
use crate::data::noise;

pub(super) fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < end, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Writes a checkpoint as a framework does, without a mark of its end.
pub(super) fn write_checkpoint(user: &User, step: u64) {
    user.write(&format!("ckpt/checkpoint-{step}/model.bin"), &noise(step, 1 << 20));
}

const SIDECAR: &str = "[sidecar]\nrestore = [{ name = 'models/base', to = 'base' }]\n\
    watch = [{ folder = 'ckpt', run = 'run', settle = '300ms' }]\n";

fn ready(agent: &Running) {
    until("it is ready", || agent.ask("GET", "/ready", "", "").status == 200);
}

fn saved(user: &User, step: u64) {
    until("a step is saved", || user.ok(&["ls"]).contains(&format!("run/step-{step}")));
}

#[test]
fn it_brings_the_inputs_and_saves_what_is_written() {
    let user = with_tree();
    user.ok(&["save", "tree", "models/base"]);
    let agent = Running::start(&user, SIDECAR);
    ready(&agent);
    assert_eq!(user.read("base/a.txt"), b"hello, world");
    write_checkpoint(&user, 5);
    saved(&user, 5);
    write_checkpoint(&user, 6);
    agent.signal(Signal::TERM);
    assert_eq!(agent.ended(), (Some(0), String::new()));
    assert!(user.ok(&["ls"]).contains("run/step-6"), "saved within the grace");

    // Killed before it could save: the next one does.
    let agent = Running::start(&user, SIDECAR);
    agent.signal(Signal::KILL);
    agent.ended();
    write_checkpoint(&user, 7);
    let agent = Running::start(&user, SIDECAR);
    ready(&agent);
    saved(&user, 7);
    agent.stop();

    // On another node the volume is empty: the latest step comes back under the name that the framework gave it.
    fs::remove_dir_all(user.work().join("ckpt")).unwrap();
    let agent = Running::start(&user, SIDECAR);
    ready(&agent);
    assert_eq!(user.read("ckpt/checkpoint-7/model.bin"), noise(7, 1 << 20));
    assert!(!user.exists("ckpt/checkpoint-6"));
    write_checkpoint(&user, 8);
    saved(&user, 8);
    agent.stop();
}

/// operations.md: "`delete = true` removes what the step lacks."
#[test]
fn files_of_an_earlier_step_are_told_or_removed() {
    let user = User::with_repository();
    user.write("model/a", b"weights of step 3");
    user.write("model/b", b"more weights of step 3");
    user.ok(&["save", "model", "two/step-3"]);
    let restored = |more: &str| {
        let restore = format!("restore = [{{ name = 'two@latest', to = 'data', overwrite = true{more} }}]");
        configure(&user, &format!("[sidecar]\n{restore}\n"));
        let mut command = user.command(&["agent", "--json", "--config", "agent.toml"]);
        let agent = Running::from_command(command.env("RUST_LOG", "towline=warn"));
        ready(&agent);
        agent.signal(Signal::TERM);
        let (code, log) = agent.ended();
        assert_eq!(code, Some(0), "{log}");
        log
    };
    let log = restored("");
    assert!(!log.contains("stay there"), "{log}");
    fs::remove_file(user.work().join("model/b")).unwrap();
    user.write("model/a", b"weights of step 4");
    user.ok(&["save", "model", "two/step-4"]);
    let log = restored("");
    assert!(log.contains("files that two/step-4 lacks stay there") && log.contains("1, such as \"b\""), "{log}");
    assert_eq!(log.matches("stay there").count(), 1, "{log}");
    assert!(user.exists("data/b"));
    let log = restored(", delete = true");
    assert!(!log.contains("stay there"), "{log}");
    assert_eq!((user.read("data/a"), user.exists("data/b")), (b"weights of step 4".to_vec(), false));
}

/// An agent whose run has a latest step that cannot be restored: its packs are damaged.
fn with_a_damaged_step(user: &User) -> Running {
    user.ok(&["save", "tree", "run/step-1"]);
    for session in fs::read_dir(user.repository().join("pack")).unwrap() {
        for pack in fs::read_dir(session.unwrap().path()).unwrap() {
            fs::write(pack.unwrap().path(), b"not a pack").unwrap();
        }
    }
    let agent =
        Running::start(user, "grace = '4s'\n[sidecar]\nwatch = [{ folder = 'ckpt', run = 'run', settle = '100ms' }]\n");
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(agent.ask("GET", "/ready", "", "").status, 503);
    agent
}

#[test]
fn it_saves_also_where_it_could_not_restore() {
    let user = with_tree();
    let agent = with_a_damaged_step(&user);
    // A training that runs on while its sidecar starts anew.
    write_checkpoint(&user, 2);
    saved(&user, 2);
    ready(&agent);
    agent.stop();
}

#[test]
fn what_it_could_neither_restore_nor_save_is_named() {
    let user = with_tree();
    let agent = with_a_damaged_step(&user);
    fs::rename(user.repository(), user.work().join("hidden")).unwrap();
    write_checkpoint(&user, 2);
    agent.signal(Signal::TERM);
    let (code, error) = agent.ended();
    assert_eq!(code, Some(1), "{error}");
    assert!(error.contains("not saved: checkpoint-2"), "{error}");
}

#[test]
fn it_is_ready_when_its_inputs_are_warm() {
    let user = with_tree();
    let agent = Running::start(&user, "[sidecar]\nwarm = ['run@latest', 'models/base']\n");
    // A run that has not begun has no inputs yet; a plain name must be there.
    until("it has tried", || {
        let tried = agent.get("/v1/tasks")["tasks"].clone();
        tried.as_array().unwrap().iter().any(|one| one["name"] == "models/base" && one["state"] == "failed")
    });
    assert_eq!(agent.ask("GET", "/ready", "", "").json(503)["ready"], json!(false));
    let probe =
        || user.command(&["top", "--ready"]).env("TOWLINE_AGENT", &agent.socket).output().unwrap().status.code();
    assert_eq!(probe(), Some(6));
    user.ok(&["save", "tree", "models/base"]);
    until("it is ready", || agent.ask("GET", "/ready", "", "").status == 200);
    assert_eq!(probe(), Some(0));
    assert!(agent.get("/v1/cache")["bytes"].as_u64().unwrap() > 20 << 20);
    agent.stop();
}

#[test]
fn what_could_not_be_saved_in_time_is_named() {
    let user = User::with_repository();
    user.write("ckpt/checkpoint-1/model.bin", &noise(1, 300 << 20));
    let watch = "grace = '50ms'\n[sidecar]\nwatch = [{ folder = 'ckpt', run = 'run', settle = '1h' }]\n";
    let agent = Running::start(&user, watch);
    until("it watches", || !agent.get("/v1/tasks")["tasks"].as_array().unwrap().is_empty());
    std::thread::sleep(Duration::from_millis(300));
    agent.signal(Signal::TERM);
    let (code, error) = agent.ended();
    assert_eq!(code, Some(1), "{error}");
    assert!(error.contains("watch run"), "{error}");
}

#[test]
fn a_watch_that_cannot_save_shows_it() {
    let user = User::with_repository();
    user.write("ckpt/.keep", b"");
    let watch = "grace = '2s'\n[sidecar]\nwatch = [{ folder = 'ckpt', run = 'run', settle = '100ms' }]\n";
    let agent = Running::start(&user, watch);
    until("it watches", || !agent.get("/v1/tasks")["tasks"].as_array().unwrap().is_empty());
    let hidden = user.work().join("hidden");
    fs::rename(user.repository(), &hidden).unwrap();
    fs::write(user.repository(), b"in the way").unwrap();
    write_checkpoint(&user, 3);
    let trouble = || agent.get("/v1/tasks")["tasks"][0]["error"]["message"].as_str().map(str::to_owned);
    until("the failure is told", || {
        trouble().is_some_and(|message| message.contains("checkpoint-3 could not be saved"))
    });
    let top = super::told(&user, &agent, &["top", "--once"]);
    assert!(top.contains("checkpoint-3 could not be saved"), "{top}");
    let figures = String::from_utf8(agent.ask("GET", "/metrics", "", "").body).unwrap();
    let retried = figures.lines().find_map(|line| line.strip_prefix("towline_task_retries_total{kind=\"watch\"} "));
    assert!(retried.unwrap().parse::<u64>().unwrap() > 0, "{figures}");

    fs::remove_file(user.repository()).unwrap();
    fs::rename(&hidden, user.repository()).unwrap();
    saved(&user, 3);
    until("the failure is over", || trouble().is_none());
    agent.signal(Signal::TERM);
    let (code, log) = agent.ended();
    assert_eq!(code, Some(0), "{log}");
}

#[test]
fn what_was_saved_before_a_restart_is_not_named_as_unsaved() {
    let user = User::with_repository();
    write_checkpoint(&user, 1);
    let watch = |settle: &str| {
        format!("grace = '5s'\n[sidecar]\nwatch = [{{ folder = 'ckpt', run = 'run', settle = '{settle}' }}]\n")
    };
    let agent = Running::start(&user, &watch("100ms"));
    saved(&user, 1);
    agent.stop();

    // Nothing settles: neither is looked at in the ordinary way.
    write_checkpoint(&user, 2);
    let agent = Running::start(&user, &watch("1h"));
    until("it watches", || !agent.get("/v1/tasks")["tasks"].as_array().unwrap().is_empty());
    std::thread::sleep(Duration::from_millis(300));
    agent.signal(Signal::TERM);
    let (code, error) = agent.ended();
    assert_eq!(code, Some(1), "{error}");
    assert!(error.contains("not saved: checkpoint-2") && !error.contains("checkpoint-1"), "{error}");
}
