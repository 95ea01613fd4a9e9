//! Entries of the audit log at the side that asks, of pins and of handoffs; and heads that others publish. L1 and L3 of
//! docs/semantics.md.

use std::fs;
use std::process::Command;

use rustix::process::Signal;
use serde_json::{Value, json};

use super::routing::{fails, two_sites};
use super::sidecar::{until, write_checkpoint};
use super::together::{EVERYTHING, identities, start_peer_with};
use super::tokens::token;
use super::{Running, told, told_json, with_tree};
use towline::name::Name;
use towline::repository::log::{Action, State};
use towline::repository::{OpenOptions, Repository};
use towline::storage::{Location, StoreOptions, open as open_store};

use crate::cli::User;
use crate::semantics::Tmpfs;

const LISTENS: &str = "listen = '127.0.0.1:0'";

fn entries(user: &User, log: &str) -> Vec<Value> {
    let shown = user.ok(&["audit", "show", "--dir", log, "--json"]);
    shown.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn of<'a>(all: &'a [Value], action: &str) -> Vec<&'a Value> {
    all.iter().filter(|entry| entry["action"] == action).collect()
}

fn end<'a>(all: &'a [Value], entry: &Value) -> &'a Value {
    all.iter().find(|end| end["of"] == entry["seq"] && end["kind"] == "end").unwrap()
}

/// L1 "Who asks another agent has an entry of it, too": one for the name, with the bytes that came.
#[test]
fn who_asks_another_agent_records_what_it_asked_and_what_came() {
    let user = with_tree();
    user.ok(&["save", "tree", "run/step-1"]);
    identities(&user);
    let home = start_peer_with(&user, "a", &[], (LISTENS, "[audit]\ndir = 'audit-a'"));
    told(&user, &home, &["warm", "run/step-1", "--wait"]);
    let known = [home.listen.clone().unwrap()];
    let second = start_peer_with(&user, "b", &known, ("", "[audit]\ndir = 'audit-b'"));
    told(&user, &second, &["warm", "run/step-1", "--from", "home", "--wait"]);
    second.stop();
    home.stop();

    let (given, came) = (entries(&user, "audit-a"), entries(&user, "audit-b"));
    let asked = of(&came, "fetch");
    assert_eq!(asked.len(), 1, "one for the name, not one for each chunk: {asked:?}");
    assert_eq!((&asked[0]["actor"], &asked[0]["asked"]), (&json!("towline://home/b"), &json!("towline://home/a")));
    assert_eq!((&asked[0]["name"], &asked[0]["verdict"]), (&json!("run/step-1"), &json!("allow")));
    assert_eq!((&asked[0]["to"], &asked[0]["rule"]), (&json!("home"), &json!("no policy, and no labels")));
    let bytes = end(&came, asked[0])["bytes"].as_u64().unwrap();
    assert!(bytes > 20 << 20, "{bytes}");
    let served = of(&given, "serve");
    assert_eq!(end(&given, served[0])["bytes"], bytes, "both sides tell the same");
    let shown = user.ok(&["audit", "show", "--dir", "audit-b"]);
    assert!(shown.contains("fetch  run/step-1 to home, asked of towline://home/a"), "{shown}");
}

/// L1: "one entry for each decision about a request for a name": also where the caller, or the time of a pin, is refused.
#[test]
fn a_refused_call_is_recorded_where_it_is_refused() {
    let user = with_tree();
    let sections = |dir: &str, more: &str| format!("[audit]\ndir = '{dir}'\n{more}");
    let own = |dir: &str| sections(dir, "");
    let (home, cloud) = two_sites(&user, "'mars/*'", (&own("audit-a"), &own("audit-c")));
    for _ in 0..3 {
        fails(&user, &home, &["warm", "run/step-1", "--at", "cloud"], 7);
    }
    fails(&user, &home, &["pins", "--at", "cloud"], 7);
    home.stop();
    cloud.stop();
    let refused = entries(&user, "audit-c");
    let [entry] = of(&refused, "warm")[..] else { panic!("repeats are one: {refused:?}") };
    assert_eq!((&entry["verdict"], &entry["actor"]), (&json!("deny"), &json!("towline://home/a")));
    assert!(entry["rule"].as_str().unwrap().contains("accepts no requests of home/a"), "{entry}");

    let user = with_tree();
    let pins = sections("audit-d", "[caller_pins]\nmax_time = '1h'");
    let (home, cloud) = two_sites(&user, "'home/*'", (&own("audit-b"), &pins));
    fails(&user, &home, &["warm", "run/step-1", "--pin", "2h", "--at", "cloud"], 7);
    home.stop();
    cloud.stop();
    let refused = entries(&user, "audit-d");
    let [entry] = of(&refused, "warm")[..] else { panic!("{refused:?}") };
    assert_eq!((&entry["verdict"], &entry["name"]), (&json!("deny"), &json!("run/step-1")));
    assert!(entry["rule"].as_str().unwrap().contains("lasts too long"), "{entry}");
}

/// L1: pins are set and end by an entry each, by whoever asks, here or by way of another agent.
#[test]
fn pins_that_are_set_and_end_are_recorded() {
    let user = with_tree();
    let (sections, callers) = (|dir| format!("[audit]\ndir = '{dir}'"), "'home/*'");
    let (home, cloud) = two_sites(&user, callers, (&sections("audit-a"), &sections("audit-c")));
    let pin = told_json(&user, &home, &["pin", "run/step-1", "--reason", "mine"])["id"].as_str().unwrap().to_owned();
    told(&user, &home, &["unpin", &pin]);
    told(&user, &home, &["warm", "run/step-1", "--pin", "1h", "--wait"]);
    let there = told_json(&user, &home, &["pin", "run/step-1", "--for", "1h", "--at", "cloud"])["id"].clone();
    told(&user, &home, &["unpin", there.as_str().unwrap(), "--at", "cloud"]);
    home.ask("DELETE", &format!("/v1/pins/{pin}"), "", "").refuses(404);
    home.stop();
    cloud.stop();

    let all = entries(&user, "audit-a");
    let pins = of(&all, "pin");
    assert_eq!(pins.len(), 3, "{pins:?}");
    assert_eq!(end(&all, pins[0])["outcome"], format!("done: pin {pin}"));
    assert_eq!((&pins[1]["name"], &end(&all, pins[1])["bytes"]), (&json!("run/step-1"), &json!(0)));
    assert_eq!((&pins[2]["asked"], &pins[2]["to"]), (&json!("towline://cloud/c"), &json!("cloud")));
    let unpins = of(&all, "unpin");
    assert_eq!(unpins.len(), 2, "{unpins:?}");
    assert!(unpins[0]["rule"].as_str().unwrap().contains(&format!("pin {pin} of ")), "{}", unpins[0]);
    let there_all = entries(&user, "audit-c");
    for action in ["pin", "unpin"] {
        let asked = of(&there_all, action);
        assert_eq!((asked.len(), &asked[0]["actor"]), (1, &json!("towline://home/a")), "{asked:?}");
        let name = if action == "pin" { json!("run/step-1") } else { Value::Null };
        assert_eq!(asked[0]["name"], name);
    }
}

/// Gives the tree of `name` the names `many/N` as well, in one commit.
async fn name_again(user: &User, name: &str, numbers: std::ops::Range<u32>) {
    let location = Location::directory(user.repository()).unwrap();
    let store = open_store(&location, &StoreOptions::default()).await.unwrap();
    let cache = Some(user.work().join("namer"));
    let repository = Repository::open(store, OpenOptions { cache, ..OpenOptions::default() }).await.unwrap();
    let named = |state: &State| {
        let value = state.refs[&name.parse::<Name>().unwrap()].clone();
        let set = |number| Action::SetRef {
            name: format!("many/{number}").parse().unwrap(),
            expected: None,
            value: value.clone(),
        };
        Ok(numbers.clone().map(set).collect())
    };
    repository.log().commit(None, named).await.unwrap();
}

/// A token fills the disk of the log no faster by reading than by asking for tasks.
#[test]
fn reads_of_very_many_names_by_a_token_are_refused_and_repeats_are_not() {
    let user = with_tree();
    user.write("small/file", b"bytes");
    user.ok(&["save", "small", "small"]);
    // As many as are read in two minutes, so that one of the two has too many.
    let most = 1300;
    tokio::runtime::Runtime::new().unwrap().block_on(name_again(&user, "small", 0..most));
    let agent = Running::start(&user, "http = '127.0.0.1:0'\ntokens = 'own/tokens'\n[audit]\ndir = 'audit'\n");
    let holder = token(&user, &agent, &["read=many/**"], &[]);
    let read = |number: u32| holder.ask("GET", &format!("/v1/files/many%2F{number}/file"), "");
    let refused = (0..most).find(|&number| {
        let answer = read(number);
        assert!(matches!(answer.status, 200 | 429), "{}", answer.status);
        answer.status == 429
    });
    let refused = refused.expect("600 a minute are read");
    assert!(refused >= 600, "{refused}");
    assert_eq!(read(refused - 1).status, 200, "it has its entry");
    let by_user = agent.ask("GET", &format!("/v1/files/many%2F{refused}/file"), "", "");
    assert_eq!(by_user.status, 200, "its own user has no limit");
    agent.stop();
    let all = entries(&user, "audit");
    let reads = of(&all, "read");
    let of_token = reads.iter().filter(|entry| entry["actor"].as_str().unwrap().starts_with("token:")).count();
    assert_eq!(of_token, refused as usize, "those that were answered");
}

/// L1 "Another entry tells the bytes at the end": of a handoff, at both sides.
#[test]
fn the_bytes_of_a_handoff_are_recorded_where_they_go_and_where_they_come_from() {
    let user = with_tree();
    fs::create_dir(user.work().join("ckpt")).unwrap();
    let gives = "[audit]\ndir = 'audit-a'\n[sidecar]\nhandoff_to = 'cloud'\n\
                 watch = [{ folder = 'ckpt', run = 'run', settle = '200ms', restore_latest = false }]";
    let keeps = "[audit]\ndir = 'audit-c'\n[handoff]\ndir = 'kept'\ncapacity = '64M'\nwait = '1h'\n\
                 [[handoff.accept]]\nfrom = 'home/*'\nnames = '**'\nmax = '64M'";
    let (home, cloud) = two_sites(&user, "", (gives, keeps));
    until("it watches", || {
        let tasks = home.get("/v1/tasks")["tasks"].clone();
        tasks.as_array().unwrap().iter().any(|one| one["kind"] == "watch")
    });
    fs::rename(user.repository(), user.work().join("hidden")).unwrap();
    write_checkpoint(&user, 6);
    home.signal(Signal::TERM);
    assert_eq!(home.ended().0, Some(1));
    fs::rename(user.work().join("hidden"), user.repository()).unwrap();
    cloud.stop();

    let logs = ["audit-a", "audit-c"].map(|log| entries(&user, log));
    let ends = logs.each_ref().map(|all| {
        let handoffs = of(all, "handoff");
        assert_eq!(handoffs.len(), 1, "{handoffs:?}");
        assert_eq!((&handoffs[0]["actor"], &handoffs[0]["to"]), (&json!("towline://home/a"), &json!("cloud")));
        end(all, handoffs[0])
    });
    assert_eq!(of(&logs[1], "handoff")[0]["rule"], "[[handoff.accept]]");
    let bytes = ends[0]["bytes"].as_u64().unwrap();
    assert!(bytes > 1 << 20, "{bytes}");
    assert_eq!((&ends[1]["bytes"], &ends[0]["outcome"]), (&ends[0]["bytes"], &ends[1]["outcome"]));
    assert_eq!(ends[1]["outcome"], "done");
}

/// L3 "an agent that may not write there has it put by another one, which has it in its `callers`"; and so the heads of commands on
/// its node.
#[test]
fn an_agent_that_may_not_write_has_its_heads_and_those_of_commands_put_by_another() {
    let user = with_tree();
    user.ok(&["save", "tree", "run/step-1"]);
    let Some(disk) = Tmpfs::mount(&user.work().join("ro"), "256M") else { return };
    let copied = Command::new("cp").arg("-a").arg(user.repository()).arg(user.work().join("ro/repo")).status();
    assert!(copied.unwrap().success());
    disk.remount("ro");
    identities(&user);
    let first = start_peer_with(&user, "a", &[], (&format!("{LISTENS}\ncallers = 'home/b'"), ""));
    let settings = format!(
        "repository = 'ro/repo'\nsocket = 'b.sock'\nmemory = '512M'\nidentity = 'b'\n\
         [cache]\ndir = 'cache-b'\ncapacity = '256M'\nfree_floor = '0'\n\
         [peers]\naddresses = ['{}']\n[audit]\ndir = 'audit-b'\n{EVERYTHING}",
        first.listen.clone().unwrap()
    );
    user.write("b.toml", settings.as_bytes());
    let second = Running::from_file(&user, "b.toml");
    second.done("/v1/warm", &json!({ "name": "run/step-1" }));
    let restore = ["restore", "run/step-1", "out"];
    let mut command = user.command(&restore);
    let output = command.env("TOWLINE_AGENT", &second.socket).env("TOWLINE_AUDIT", "log").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    second.stop();
    first.stop();
    assert!(!user.work().join("ro/repo/audit").exists());
    for (log, user_of) in [("audit-b", None), ("log", origin_user(&user, "log"))] {
        let named = user_of.iter().flat_map(|name| ["--user", name]);
        let verify = ["audit", "verify", "--dir", log, "--agent", "home/b"].into_iter().chain(named);
        let sound = user.json(&verify.collect::<Vec<_>>(), 0);
        assert_eq!((&sound["published"], &sound["sound"]), (&sound["last"], &json!(true)), "{log}: {sound}");
    }
}

fn origin_user(user: &User, log: &str) -> Option<String> {
    let origin = user.json(&["audit", "verify", "--dir", log, "--offline"], 0)["origin"].clone();
    origin.as_str().unwrap().strip_prefix("cli:").map(str::to_owned)
}
