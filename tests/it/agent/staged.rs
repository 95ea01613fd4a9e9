//! Tensors in the agent's memory: staged once, mapped by other processes, freed when nobody uses them.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;
use towline::agent::{Client, StageRequest, StagedMemory};
use towline::staging::TensorTable;
use towline::{ErrorKind, Result};

use super::{PATIENCE, Running, told, told_json};
use crate::cli::{User, has_members};
use crate::data::{noise, safetensors};
use crate::policy::PolicyFixture;

/// A repository with `run/step-1`: two tensors of 1 MiB and 3 MiB of bytes, and a file of something else.
fn trained() -> User {
    let user = User::with_repository();
    user.write("tree/model.safetensors", &safetensors(1, &[("a", 1 << 18), ("b", 3 << 18)]));
    user.write("tree/notes.txt", b"no tensors");
    user.ok(&["save", "tree", "run/step-1"]);
    user
}

/// An agent that keeps so many MiB of tensors in memory.
fn start(user: &User, mib: u64, more: &str) -> Running {
    Running::start(user, &format!("{more}\n[staging]\nmemory = '{mib}M'\n"))
}

/// Runs `work` with a client of `agent`.
fn with_client<T>(agent: &Running, work: impl AsyncFnOnce(Client) -> T) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(work(Client::at(&agent.socket)))
}

fn asks(name: &str, tensors: &[&str]) -> StageRequest {
    let tensors = tensors.iter().map(|&selector| selector.to_owned()).collect();
    StageRequest { name: name.to_owned(), tensors, ..StageRequest::default() }
}

/// Bytes of each tensor, by its name.
fn mapped(staged: &StagedMemory) -> Vec<(String, Vec<u8>)> {
    let memory = staged.memory.map().unwrap();
    let table = TensorTable::read(&memory).unwrap();
    let bytes = |start: u64, len: u64| {
        let start = usize::try_from(table.base() + start).unwrap();
        memory[start..start + usize::try_from(len).unwrap()].to_vec()
    };
    table.tensors().iter().map(|tensor| (tensor.name.clone(), bytes(tensor.start, tensor.len))).collect()
}

/// The number of users of each staged tree.
fn users(agent: &Running) -> Vec<u64> {
    let trees = agent.get("/v1/staged")["trees"].as_array().unwrap().clone();
    trees.iter().map(|tree| tree["users"].as_u64().unwrap()).collect()
}

/// Waits until `done`.
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn processes_map_what_was_read_and_verified_once() {
    let user = trained();
    let agent = start(&user, 64, "");
    let held = with_client(&agent, async |client| {
        let first = client.stage(&asks("run@latest", &[]), |_| {}).await.unwrap();
        let second = client.stage(&asks("run/step-1", &[]), |_| {}).await.unwrap();
        (first, second)
    });
    let (first, second) = &held;
    assert_eq!((first.report.reused, second.report.reused), (false, true));
    assert_eq!((first.report.tensors, first.report.name.as_str()), (2, "run/step-1"));
    assert!(first.report.fetched_bytes > 0 && second.report.fetched_bytes == 0);
    let file = std::fs::read(user.work().join("tree/model.safetensors")).unwrap();
    let tail = |len: usize| file[file.len() - len..].to_vec();
    let (a, b) = (tail(4 << 20)[..1 << 20].to_vec(), tail(3 << 20));
    assert_eq!(mapped(first), [("a".to_owned(), a), ("b".to_owned(), b)]);
    assert_eq!(mapped(first), mapped(second));
    // The agent keeps the memory for as long as a process uses it, also while another one has ended.
    until("both processes use it", || users(&agent) == [2]);
    let bytes = first.report.bytes;
    drop(held);
    until("nobody uses it", || users(&agent) == [0]);
    assert_eq!(agent.ask("DELETE", "/v1/staged", "", "").json(200)["freed_bytes"], bytes);
    let again = with_client(&agent, async |client| client.stage(&asks("run@latest", &[]), |_| {}).await.unwrap());
    assert_eq!((again.report.reused, again.report.sources.cache), (false, again.report.fetched_bytes));
    agent.stop();
}

#[test]
fn the_command_stages_and_says_what_is_there() {
    let user = trained();
    let agent = start(&user, 5, "");
    assert!(told(&user, &agent, &["stage", "run@latest"]).contains("2 tensors, 4.0 MiB, read into memory in "));
    assert!(told(&user, &agent, &["stage", "run/step-1"]).contains("were in memory"));
    let only = told_json(&user, &agent, &["stage", "run/step-1:model.safetensors", "--tensor", "a[0:10]"]);
    has_members(&only, "name tensors bytes reused fetched_bytes sources seconds times");
    has_members(&only["times"], "total first_tensor read decode wait copy");
    assert_eq!(only["tensors"], 1);
    let listed = told_json(&user, &agent, &["stage", "--list"]);
    has_members(&listed, "memory trees");
    let table = told(&user, &agent, &["stage", "--list"]);
    assert!(
        table.contains("run/step-1:model.safetensors  a[0:10]") && table.contains("of 5.0 MiB are used"),
        "{table}"
    );
    let bytes = only["bytes"].as_u64().unwrap();
    let freed = told_json(&user, &agent, &["stage", "--clear"])["freed_bytes"].as_u64().unwrap();
    assert!(freed > bytes && told(&user, &agent, &["stage", "--clear"]).starts_with("freed 0 B"));
    let refused = |args: &[&str], code: i32| {
        let output = user.command(args).env("TOWLINE_AGENT", &agent.socket).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(refused(&["stage", "run/step-1", "--tensor", "none"], 3).contains("no such tensor"));
    assert!(refused(&["stage", "absent"], 3).contains("absent"));
    assert!(refused(&["stage"], 2).contains("--list"));
    agent.stop();
}

#[test]
fn memory_has_a_limit_and_what_nobody_uses_makes_room() {
    let user = trained();
    let agent = start(&user, 5, "");
    user.write("other/model.safetensors", &safetensors(2, &[("c", 1 << 20)]));
    user.ok(&["save", "other", "run/step-2"]);
    with_client(&agent, async |client| -> Result<()> {
        let first = client.stage(&asks("run/step-1", &[]), |_| {}).await?;
        let full = client.stage(&asks("run/step-2", &[]), |_| {}).await.unwrap_err();
        assert_eq!(full.kind(), ErrorKind::Exhausted, "{full}");
        assert!(full.to_string().contains("processes use the agent's memory"), "{full}");
        drop(first);
        until("nobody uses it", || users(&agent) == [0]);
        let second = client.stage(&asks("run/step-2", &[]), |_| {}).await?;
        assert!(mapped(&second)[0].1.len() == 4 << 20);
        user.write("large/model.safetensors", &safetensors(3, &[("d", 6 << 18)]));
        user.ok(&["save", "large", "run/step-3"]);
        let large = client.stage(&asks("run/step-3", &[]), |_| {}).await.unwrap_err();
        assert!(large.kind() == ErrorKind::Exhausted && large.to_string().contains("do not fit"), "{large}");
        Ok(())
    })
    .unwrap();
    let other = User::with_repository();
    let plain = Running::start(&other, "");
    let refused = with_client(&plain, async |client| client.stage(&asks("run/step-1", &[]), |_| {}).await.unwrap_err());
    assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
    plain.stop();
    agent.stop();
}

#[test]
fn memory_outlives_the_agent_and_what_is_damaged_is_never_passed_on() {
    let user = trained();
    let agent = start(&user, 64, "");
    let held = with_client(&agent, async |client| client.stage(&asks("run/step-1", &[]), |_| {}).await.unwrap());
    let before = mapped(&held);
    agent.signal(Signal::KILL);
    agent.ended();
    assert_eq!(mapped(&held), before);
    for pack in files_below(&user.repository().join("pack")) {
        let len = std::fs::metadata(&pack).unwrap().len();
        std::fs::write(&pack, noise(9, usize::try_from(len).unwrap())).unwrap();
    }
    std::fs::remove_dir_all(user.work().join("cache")).unwrap();
    let agent = start(&user, 64, "");
    let damaged = with_client(&agent, async |client| client.stage(&asks("run/step-1", &[]), |_| {}).await.unwrap_err());
    assert_eq!(damaged.kind(), ErrorKind::Damaged, "{damaged}");
    assert_eq!(agent.get("/v1/staged")["trees"], json!([]));
    agent.stop();
}

#[test]
fn a_sidecar_stages_before_it_is_ready_and_never_waits_for_room() {
    let user = trained();
    let sidecar = "[sidecar]\nstage = ['run@latest', 'absent@latest', 'run/step-9']\n";
    let agent = start(&user, 5, sidecar);
    until("it is ready", || agent.ask("GET", "/ready", "", "").status == 200);
    let trees = agent.get("/v1/staged")["trees"].clone();
    assert_eq!((trees[0]["name"].as_str(), trees.as_array().unwrap().len()), (Some("run/step-1"), 1));
    let held = with_client(&agent, async |client| client.stage(&asks("run/step-1", &[]), |_| {}).await.unwrap());
    assert!(held.report.reused);
    drop(agent);
    let agent = start(&user, 1, sidecar);
    until("it is ready", || agent.ask("GET", "/ready", "", "").status == 200);
    assert_eq!(agent.get("/v1/staged")["trees"], json!([]));
}

#[test]
fn the_policy_is_asked_for_tensors_in_memory_too() {
    let mut lab = PolicyFixture::at("home");
    lab.user.write("tree/model.safetensors", &safetensors(1, &[("a", 1 << 18)]));
    lab.user.ok(&["save", "tree", "open/model"]);
    let agent = start(&lab.user, 64, "");
    let stage = |name: &str| {
        with_client(&agent, async |client| {
            client.stage(&asks(name, &[]), |_| {}).await.map(|staged| staged.report.reused)
        })
    };
    assert!(!stage("open/model").unwrap() && stage("open/model").unwrap());
    // Another name of the same tree is another question.
    lab.user.ok(&["cp", "open/model", "open/copy"]);
    assert!(stage("open/copy").unwrap());
    lab.rules = "[[rule]]\nverdict = 'deny'\nnames = 'open/model'\nwhy = 'closed now'\n[[rule]]\nverdict = 'allow'\nwhy = 'all else'\n"
        .to_owned();
    lab.set(&["--lock-out"]);
    let denied = stage("open/model").unwrap_err();
    assert_eq!(denied.kind(), ErrorKind::Denied, "{denied}");
    assert!(told(&lab.user, &agent, &["stage", "--list"]).contains("open/model"), "it is still in memory");
    agent.stop();
}

#[test]
fn a_file_of_a_staged_tree_is_not_read_again() {
    let user = trained();
    let agent = start(&user, 5, "");
    told(&user, &agent, &["stage", "run@latest"]);
    let file = StageRequest { path: Some("model.safetensors".to_owned()), ..asks("run/step-1", &[]) };
    let held = with_client(&agent, async |client| client.stage(&file, |_| {}).await.unwrap());
    assert!(held.report.reused && users(&agent) == [1]);
    drop(held);
    // A command does not hold what it stages: the next one evicts it.
    user.write("other/model.safetensors", &safetensors(2, &[("c", 1 << 20)]));
    user.ok(&["save", "other", "run/step-2"]);
    until("nobody uses it", || users(&agent) == [0]);
    told(&user, &agent, &["stage", "run/step-2"]);
    told(&user, &agent, &["stage", "run/step-1"]);
    assert_eq!(users(&agent), [0]);
    agent.stop();
}

/// All files below a folder.
fn files_below(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files_below(&path) } else { vec![path] }).collect()
}

#[test]
fn memory_is_passed_once_and_over_the_socket_only() {
    let user = trained();
    let agent = start(&user, 64, "http = '127.0.0.1:0'");
    let task = agent.done("/v1/stage", &json!({ "name": "run/step-1", "hold": true }));
    let path = format!("/v1/staged/{}", task["report"]["memory"].as_str().unwrap());
    assert_eq!(agent.ask("GET", &path, "", "").refuses(426), "usage");
    let upgrade = "Upgrade: towline\r\n";
    assert_eq!(agent.ask("GET", "/v1/staged/nonsense", upgrade, "").refuses(400), "usage");
    // A process that disconnects before it is ready, and one that comes too late.
    let mut stream = UnixStream::connect(&agent.socket).unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\n{upgrade}\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut head = [0; 12];
    stream.read_exact(&mut head).unwrap();
    assert_eq!(&head, b"HTTP/1.1 101");
    drop(stream);
    assert_eq!(agent.ask("GET", &path, upgrade, "").refuses(404), "not-found");
    until("nobody uses it", || users(&agent) == [0]);
    agent.stop();
}
