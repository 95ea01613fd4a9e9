//! Custody: a checkpoint that cannot be saved in time outlives its node on another agent's disk, which saves it. G6 of docs/semantics.md.

use std::collections::BTreeSet;
use std::fs;

use rustix::process::Signal;
use serde_json::{Value, json};

use super::elsewhere::two_sites;
use super::sidecar::{until, write_checkpoint};
use super::together::start_peer_with;
use super::{Running, with_tree};
use crate::cli::User;
use crate::data::noise;

/// How `home/a` watches, and gives what it may not save to the other site.
const GIVES: &str = "[sidecar]\nentrust = 'cloud'\nwatch = [{ folder = 'ckpt', run = 'run', settle = '200ms' }]";

/// How `cloud/c` keeps.
fn keeps(of: &str, capacity: &str, wait: &str) -> String {
    format!("[custody]\ndir = 'kept'\ncapacity = '{capacity}'\nof = [{of}]\nwait = '{wait}'")
}

/// Takes the repository away, and gives it back.
fn hide(user: &User) {
    fs::rename(user.repository(), user.work().join("hidden")).unwrap();
}

fn unhide(user: &User) {
    fs::rename(user.work().join("hidden"), user.repository()).unwrap();
}

/// Both agents, and what is written to the watched folder once the store is away; then the one at home is asked to end. The other one,
/// which keeps as `keeps` says, and what was said at the end.
fn node_lost(user: &User, keeps: &str, steps: &[u64]) -> (Running, String) {
    fs::create_dir(user.work().join("ckpt")).unwrap();
    let (home, cloud) = two_sites(user, "", (GIVES, keeps));
    watches(&home);
    hide(user);
    steps.iter().for_each(|&step| write_checkpoint(user, step));
    home.signal(Signal::TERM);
    let (code, error) = home.ended();
    assert_eq!(code, Some(1), "{error}");
    (cloud, error)
}

/// What `agent` keeps.
fn kept(agent: &Running) -> Vec<Value> {
    agent.get("/v1/custody")["kept"].as_array().unwrap().clone()
}

fn watches(agent: &Running) {
    until("it watches", || {
        let transfers = agent.get("/v1/transfers")["transfers"].clone();
        transfers.as_array().unwrap().iter().any(|one| one["kind"] == "watch")
    });
}

fn received(agent: &Running) -> u64 {
    let ledger = agent.get("/v1/ledger");
    let links = ledger["links"].as_array().unwrap();
    let calls = links.iter().find(|link| link["carrier"] == "calls" && link["peer"] == "towline://home/a");
    calls.map_or(0, |calls| calls["received"].as_u64().unwrap())
}

#[test]
fn it_outlives_its_node() {
    let user = with_tree();
    let (cloud, error) = node_lost(&user, &keeps("'home/*'", "64M", "1h"), &[6, 7]);
    for entry in ["checkpoint-6", "checkpoint-7"] {
        assert!(error.contains(&format!("{entry} (in the custody of cloud/c, which saves it)")), "{error}");
    }
    let held = kept(&cloud);
    let names: BTreeSet<&str> = held.iter().map(|held| held["name"].as_str().unwrap()).collect();
    assert_eq!(names, BTreeSet::from(["run/step-6", "run/step-7"]));
    // A folder and a file take some room besides.
    assert!(
        held.iter().all(|held| held["from"] == "towline://home/a" && held["bytes"] == (1 << 20) + 8192),
        "{held:?}"
    );

    // The node is gone, the keeper is killed, and the store comes back after a while.
    fs::remove_dir_all(user.work().join("ckpt")).unwrap();
    cloud.signal(Signal::KILL);
    cloud.ended();
    unhide(&user);
    let cloud = start_peer_with(&user, "c", &[], ("listen = '127.0.0.1:0'", &keeps("'home/*'", "64M", "1h")));
    until("all is saved", || ["run/step-6", "run/step-7"].iter().all(|step| user.ok(&["ls"]).contains(step)));
    until("it is let go of", || kept(&cloud).is_empty());
    assert_eq!(fs::read_dir(user.work().join("kept")).unwrap().count(), 0);
    cloud.stop();
    // It is what the watch would have saved.
    user.ok(&["watch", "fresh", "run", "--restore-latest", "--once"]);
    assert_eq!(user.read("fresh/checkpoint-7/model.bin"), noise(7, 1 << 20));
}

#[test]
fn what_is_saved_in_time_is_let_go_of() {
    let user = with_tree();
    fs::create_dir(user.work().join("ckpt")).unwrap();
    let (home, cloud) = two_sites(&user, "", (GIVES, &keeps("'home/a'", "64M", "1h")));
    watches(&home);
    write_checkpoint(&user, 8);
    until("a step is saved", || user.ok(&["ls"]).contains("run/step-8"));
    assert_eq!(received(&cloud), 0, "while there is time nobody else has it");
    write_checkpoint(&user, 9);
    home.signal(Signal::TERM);
    assert_eq!(home.ended(), (Some(0), String::new()));
    assert!(received(&cloud) > 1 << 20, "it was given first");
    until("it is let go of", || kept(&cloud).is_empty());
    assert!(user.ok(&["ls"]).contains("run/step-9"));
    assert_eq!(cloud.get("/v1/transfers")["transfers"], json!([]), "it had nothing to save");
    cloud.stop();
}

#[test]
fn a_store_that_is_away_is_waited_for() {
    let user = with_tree();
    let (cloud, _) = node_lost(&user, &keeps("'home/a'", "64M", "0s"), &[7]);
    until("it has tried", || {
        let transfers = cloud.get("/v1/transfers")["transfers"].clone();
        transfers.as_array().unwrap().iter().any(|one| one["kind"] == "save" && one["state"] == "failed")
    });
    assert_eq!(kept(&cloud).len(), 1);
    unhide(&user);
    until("it is saved", || user.ok(&["ls"]).contains("run/step-7"));
    until("it is let go of", || kept(&cloud).is_empty());
    cloud.stop();
}

#[test]
fn what_was_taken_away_by_hand_takes_no_room() {
    let user = with_tree();
    let (cloud, _) = node_lost(&user, &keeps("'home/a'", "64M", "0s"), &[7]);
    let id = kept(&cloud)[0]["id"].as_str().unwrap().to_owned();
    fs::rename(user.work().join("kept").join(id), user.work().join("by-hand")).unwrap();
    until("it is let go of", || kept(&cloud).is_empty());
    unhide(&user);
    cloud.stop();
    assert!(!user.ok(&["ls"]).contains("run/step-7"));
}

#[test]
fn what_somebody_saved_meanwhile_is_not_replaced() {
    let user = with_tree();
    let (cloud, _) = node_lost(&user, &keeps("'home/a'", "64M", "1h"), &[7, 8]);
    assert_eq!(kept(&cloud).len(), 2);
    cloud.signal(Signal::KILL);
    cloud.ended();
    unhide(&user);
    // The training went on elsewhere, and came to step 7 again; step 8 was saved from the same files.
    user.ok(&["save", "tree", "run/step-7"]);
    user.ok(&["save", "ckpt/checkpoint-8", "run/step-8"]);
    let cloud = start_peer_with(&user, "c", &[], ("listen = '127.0.0.1:0'", &keeps("'home/a'", "64M", "1h")));
    until("it is let go of", || kept(&cloud).is_empty());
    cloud.stop();
    let names = user.ok(&["ls"]);
    assert!(names.contains("custody/home/a/run/step-7") && !names.contains("custody/home/a/run/step-8"), "{names}");
    user.ok(&["restore", "run/step-7", "theirs"]);
    assert_eq!(user.read("theirs/a.txt"), b"hello, world");
    user.ok(&["restore", "custody/home/a/run/step-7", "ours"]);
    assert_eq!(user.read("ours/model.bin"), noise(7, 1 << 20));
}

#[test]
fn who_does_not_keep_says_why() {
    for (of, capacity, says) in [
        ("'home/b'", "64M", "agent cloud/c keeps nothing for home/a"),
        ("'home/a'", "1000K", "there is no room to keep this"),
    ] {
        let user = with_tree();
        let (cloud, error) = node_lost(&user, &keeps(of, capacity, "1h"), &[7]);
        assert!(error.contains("not saved: checkpoint-7"), "{error}");
        assert!(error.contains(says) && !error.contains("in the custody of"), "{error}");
        assert!(kept(&cloud).is_empty());
        unhide(&user);
        cloud.stop();
    }
}

#[test]
fn only_steps_are_taken_and_no_name_is_replaced() {
    let user = with_tree();
    user.ok(&["save", "tree", "models/production"]);
    let (home, cloud) = two_sites(&user, "'home/*'", ("", &keeps("'home/*'", "64M", "0s")));
    let repository = home.get("/health")["repositories"][0]["id"].clone();
    let announce = |name: &str| {
        let body = json!({ "name": name, "repository": repository, "bytes": 1 }).to_string();
        home.ask("POST", "/v1/custody", "Towline-At: cloud/c\r\n", &body)
    };
    let long = format!("{}/step-7", "r".repeat(490));
    for name in ["models/production", "run/latest", "run/step-", &long] {
        assert_eq!(announce(name).refuses(400), "usage", "{name}");
    }
    assert_eq!(announce("run/step-7").json(201)["id"].as_str().unwrap().len(), 26);
    assert!(kept(&cloud).is_empty());
    home.stop();
    cloud.stop();
}

#[test]
fn only_another_agent_gives() {
    let user = with_tree();
    let agent = Running::start(&user, "");
    let told = json!({ "name": "run/step-1", "repository": agent.get("/health")["repositories"][0]["id"], "bytes": 1 });
    assert_eq!(agent.ask("POST", "/v1/custody", "", &told.to_string()).refuses(403), "denied");
    assert_eq!(agent.ask("GET", "/v1/custody", "", "").refuses(404), "not-found");
    agent.stop();
}
