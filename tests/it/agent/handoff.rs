//! Handoff: a checkpoint that cannot be saved in time outlives its node on another agent's disk, which saves it. G6 of docs/semantics.md.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use rustix::process::Signal;
use serde_json::{Value, json};

use super::routing::two_sites;
use super::sidecar::{until, write_checkpoint};
use super::together::start_peer_with;
use super::{Answer, Running, told as agent_told, told_json, with_tree};
use crate::cli::User;
use crate::data::noise;

/// Settings of `home/a`: a watch that hands off to the other site. A restored step would be handed off too, if the store goes before the
/// watch has compared it.
const GIVES: &str = "[sidecar]\nhandoff_to = 'cloud'\n\
    watch = [{ folder = 'ckpt', run = 'run', settle = '200ms', restore_latest = false }]";

/// How `cloud/c` keeps.
fn keeps(from: &str, capacity: &str, wait: &str) -> String {
    let accept = format!("[[handoff.accept]]\nfrom = {from}\nnames = '**'\nmax = '{capacity}'");
    format!("[handoff]\ndir = 'kept'\ncapacity = '{capacity}'\nwait = '{wait}'\n{accept}")
}

/// Takes the repository away, and gives it back.
fn hide(user: &User) {
    fs::rename(user.repository(), user.work().join("hidden")).unwrap();
}

fn unhide(user: &User) {
    // A write that was in progress when it was hidden, such as that of an inventory, may have made folders again.
    let _ = fs::remove_dir_all(user.repository());
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
    agent.get("/v1/handoffs")["handoffs"].as_array().unwrap().clone()
}

fn watches(agent: &Running) {
    until("it watches", || {
        let transfers = agent.get("/v1/tasks")["tasks"].clone();
        transfers.as_array().unwrap().iter().any(|one| one["kind"] == "watch")
    });
}

fn received(agent: &Running) -> u64 {
    let ledger = agent.get("/v1/ledger");
    let links = ledger["links"].as_array().unwrap();
    let calls = links.iter().find(|link| link["transport"] == "calls" && link["peer"] == "towline://home/a");
    calls.map_or(0, |calls| calls["received"].as_u64().unwrap())
}

#[test]
fn it_outlives_its_node() {
    let user = with_tree();
    let (cloud, error) = node_lost(&user, &keeps("'home/*'", "64M", "1h"), &[6, 7]);
    for entry in ["checkpoint-6", "checkpoint-7"] {
        assert!(error.contains(&format!("{entry} (handed off to cloud/c, which saves it)")), "{error}");
    }
    let stored = kept(&cloud);
    let names: BTreeSet<&str> = stored.iter().map(|stored| stored["name"].as_str().unwrap()).collect();
    assert_eq!(names, BTreeSet::from(["run/step-6", "run/step-7"]));
    // A folder and a file take some room besides.
    assert!(
        stored.iter().all(|stored| stored["from"] == "towline://home/a" && stored["bytes"] == (1 << 20) + 8192),
        "{stored:?}"
    );

    // The node is gone, the receiver is killed, and the store comes back after a while.
    fs::remove_dir_all(user.work().join("ckpt")).unwrap();
    cloud.signal(Signal::KILL);
    cloud.ended();
    unhide(&user);
    let cloud = start_peer_with(&user, "c", &[], ("listen = '127.0.0.1:0'", &keeps("'home/*'", "64M", "1h")));
    until("all is saved", || ["run/step-6", "run/step-7"].iter().all(|step| user.ok(&["ls"]).contains(step)));
    until("it is let go of", || kept(&cloud).is_empty());
    until("it is deleted", || fs::read_dir(user.work().join("kept")).unwrap().count() == 0);
    cloud.stop();
    // It is what the watch would have saved.
    user.ok(&["watch", "fresh", "run", "--restore-latest", "--once"]);
    assert_eq!(user.read("fresh/checkpoint-7/model.bin"), noise(7, 1 << 20));
}

#[test]
fn it_has_the_metrics_that_the_trainer_logged() {
    let user = with_tree();
    let state = json!({ "global_step": 7, "log_history": [{ "loss": 0.25, "epoch": 1.0, "step": 7 }] });
    user.write("ckpt/checkpoint-7/trainer_state.json", state.to_string().as_bytes());
    let (home, cloud) = two_sites(&user, "", (GIVES, &keeps("'home/*'", "64M", "0s")));
    watches(&home);
    hide(&user);
    write_checkpoint(&user, 7);
    home.signal(Signal::TERM);
    assert_eq!(home.ended().0, Some(1));
    unhide(&user);
    until("it is saved", || user.ok(&["ls"]).contains("run/step-7"));
    assert_eq!(user.json(&["show", "run/step-7"], 0)["metrics"], json!({ "loss": 0.25 }));
    cloud.stop();
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
    assert_eq!(cloud.get("/v1/tasks")["tasks"], json!([]), "it had nothing to save");
    cloud.stop();
}

#[test]
fn a_store_that_is_away_is_waited_for() {
    let user = with_tree();
    let (cloud, _) = node_lost(&user, &keeps("'home/a'", "64M", "0s"), &[7]);
    until("it has tried", || {
        let transfers = cloud.get("/v1/tasks")["tasks"].clone();
        transfers.as_array().unwrap().iter().any(|one| one["kind"] == "save" && one["state"] == "failed")
    });
    // A copy handed over before the checkpoint was finished may still be there: its release is not waited for.
    let stored = kept(&cloud);
    assert!(!stored.is_empty() && stored.iter().all(|one| one["name"] == "run/step-7"), "{stored:?}");
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
    let (cloud, _) = node_lost(&user, &keeps("'home/a'", "64M", "1h"), &[6, 7, 8]);
    assert_eq!(kept(&cloud).len(), 3);
    cloud.signal(Signal::KILL);
    cloud.ended();
    unhide(&user);
    // The training went on elsewhere, and came to steps 6 and 7 again; step 8 was saved from the same files.
    user.ok(&["save", "tree", "run/step-006"]);
    user.ok(&["save", "tree", "run/step-7"]);
    user.ok(&["save", "ckpt/checkpoint-8", "run/step-8"]);
    let cloud = start_peer_with(&user, "c", &[], ("listen = '127.0.0.1:0'", &keeps("'home/a'", "64M", "1h")));
    until("it is let go of", || kept(&cloud).is_empty());
    cloud.stop();
    let names = user.ok(&["ls"]);
    assert!(names.contains("handoff/home/a/run/step-6"), "another spelling of a step is taken: {names}");
    assert!(names.contains("handoff/home/a/run/step-7") && !names.contains("handoff/home/a/run/step-8"), "{names}");
    // The labels of the run bind it under another name, too.
    let labels = user.json(&["label", "handoff/home/a/run/step-7"], 0);
    assert!(labels["labels"]["derived-from"].to_string().contains("run/step-7"), "{labels}");
    user.ok(&["restore", "run/step-7", "theirs"]);
    assert_eq!(user.read("theirs/a.txt"), b"hello, world");
    user.ok(&["restore", "handoff/home/a/run/step-7", "ours"]);
    assert_eq!(user.read("ours/model.bin"), noise(7, 1 << 20));
}

/// G6: "the latest step never becomes one of an abandoned branch".
#[test]
fn a_step_beyond_those_of_a_training_that_went_on_elsewhere_is_not_the_latest() {
    let user = with_tree();
    let (cloud, _) = node_lost(&user, &keeps("'home/a'", "64M", "1h"), &[3, 5, 6]);
    assert_eq!(kept(&cloud).len(), 3);
    cloud.signal(Signal::KILL);
    cloud.ended();
    unhide(&user);
    // Another node resumed the run, and came to steps 4 and 5.
    for step in [4, 5] {
        user.write("theirs/model.bin", &noise(90 + step, 1 << 20));
        user.ok(&["save", "theirs", &format!("run/step-{step}")]);
    }
    let cloud = start_peer_with(&user, "c", &[], ("listen = '127.0.0.1:0'", &keeps("'home/a'", "64M", "1h")));
    until("it is let go of", || kept(&cloud).is_empty());
    cloud.stop();
    user.ok(&["restore", "run@latest", "latest"]);
    assert_eq!(user.read("latest/model.bin"), noise(95, 1 << 20));
    user.fails(&["show", "run/step-6"], 3);
    for step in [5, 6] {
        let dest = format!("ours-{step}");
        user.ok(&["restore", &format!("handoff/home/a/run/step-{step}"), &dest]);
        assert_eq!(user.read(&format!("{dest}/model.bin")), noise(step, 1 << 20));
    }
    // No step before it is of the other training.
    user.ok(&["show", "run/step-3"]);
}

/// G6: whoever was offered the checkpoint first knows its sizes and times, and can have something else saved under its name.
#[test]
fn a_fake_of_the_same_sizes_and_times_takes_no_handoff_away() {
    let user = with_tree();
    let (cloud, _) = node_lost(&user, &keeps("'home/a'", "64M", "1h"), &[7, 8]);
    assert_eq!(kept(&cloud).len(), 2);
    cloud.signal(Signal::KILL);
    cloud.ended();
    unhide(&user);
    for (step, more) in [(7, false), (8, true)] {
        let (fake, model) = (format!("fake/checkpoint-{step}"), "model.bin");
        user.write(&format!("{fake}/{model}"), &noise(99, 1 << 20));
        let modified = |path: &str| fs::metadata(user.work().join(path).join(model)).unwrap().modified().unwrap();
        let file = fs::File::options().append(true).open(user.work().join(&fake).join(model)).unwrap();
        file.set_modified(modified(&format!("ckpt/checkpoint-{step}"))).unwrap();
        if more {
            user.write(&format!("{fake}/zzz"), b"more");
        }
        user.ok(&["save", &fake, &format!("run/step-{step}")]);
    }
    let cloud = start_peer_with(&user, "c", &[], ("listen = '127.0.0.1:0'", &keeps("'home/a'", "64M", "1h")));
    until("it is let go of", || kept(&cloud).is_empty());
    cloud.stop();
    for step in [7, 8] {
        let dest = format!("ours-{step}");
        user.ok(&["restore", &format!("handoff/home/a/run/step-{step}"), &dest]);
        assert_eq!(user.read(&format!("{dest}/model.bin")), noise(step, 1 << 20));
    }
    // The sender starts again: what its steps hold is not what it has.
    let watched = user.ok(&["watch", "ckpt", "run", "--once", "--json"]);
    let events = watched.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["event"].clone());
    assert_eq!(events.collect::<Vec<_>>(), ["watching", "saved", "saved"], "{watched}");
    for step in [7, 8] {
        let dest = format!("again-{step}");
        user.ok(&["restore", &format!("run/step-{step}"), &dest]);
        assert_eq!(user.read(&format!("{dest}/model.bin")), noise(step, 1 << 20));
    }
}

#[test]
fn who_does_not_keep_says_why() {
    for (of, capacity, says) in [
        ("'home/b'", "64M", "agent cloud/c accepts no handoffs of home/a"),
        ("'home/a'", "1000K", "no space for this handoff"),
    ] {
        let user = with_tree();
        let (cloud, error) = node_lost(&user, &keeps(of, capacity, "1h"), &[7]);
        assert!(error.contains("not saved: checkpoint-7"), "{error}");
        assert!(error.contains(says) && !error.contains("handed off to"), "{error}");
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
        home.ask("POST", "/v1/handoffs", "Towline-At: cloud/c\r\n", &body)
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

/// Announces a checkpoint of so many bytes to `cloud/c`, by way of `home`.
fn announce(home: &Running, name: &str, bytes: u64) -> Answer {
    let repository = home.get("/health")["repositories"][0]["id"].clone();
    let body = json!({ "name": name, "repository": repository, "bytes": bytes }).to_string();
    home.ask("POST", "/v1/handoffs", "Towline-At: cloud/c\r\n", &body)
}

#[test]
fn a_sender_has_names_and_a_quota() {
    let user = with_tree();
    let accept = "[[handoff.accept]]\nfrom = ['home/*']\nnames = 'run/*'\nmax = '1000'\nmax_checkpoints = 2";
    let keeps = format!("[handoff]\ndir = 'kept'\ncapacity = '64M'\n{accept}");
    let (home, cloud) = two_sites(&user, "", ("", &keeps));
    let error = announce(&home, "other/step-1", 1).json(403);
    assert!(error["error"]["message"].as_str().unwrap().contains("agent home/a may not hand this off"), "{error}");
    assert!(error["error"]["help"].as_str().unwrap().contains("[[handoff.accept]]"), "{error}");
    announce(&home, "run/step-1", 600).json(201);
    let error = announce(&home, "run/step-2", 401).json(507);
    assert!(error["error"]["message"].as_str().unwrap().contains("quota of home/a is used up"), "{error}");
    announce(&home, "run/step-2", 400).json(201);
    let error = announce(&home, "run/step-3", 0).json(507);
    assert!(error["error"]["message"].as_str().unwrap().contains("at most 2 checkpoints"), "{error}");
    home.stop();
    cloud.stop();
}

#[test]
fn what_is_announced_and_does_not_come_gives_its_room_back() {
    let user = with_tree();
    let keeps = keeps("'home/a'", "64M", "0s").replace("wait =", "deadline = '300ms'\nwait =");
    let (home, cloud) = two_sites(&user, "", ("", &keeps));
    announce(&home, "run/step-1", 64 << 20).json(201);
    until("its room is free", || announce(&home, "run/step-2", 64 << 20).status == 201);
    home.stop();
    cloud.stop();
}

#[test]
fn more_than_was_announced_leaves_nothing_and_takes_no_room() {
    let user = with_tree();
    let (home, cloud) = two_sites(&user, "", ("", &keeps("'home/a'", "64M", "0s")));
    let id = announce(&home, "run/step-1", 5000).json(201)["id"].as_str().unwrap().to_owned();
    // A folder, then a file that takes more than is left: kind, path, mode, mtime, and its length.
    let folder = [&[2, 1][..], b"c", &[0, 0]].concat();
    let file = [&[1, 3][..], b"c/f", &[0, 0, 100]].concat();
    let mut archive = Vec::new();
    for head in [folder, file] {
        archive.extend(u32::try_from(head.len()).unwrap().to_le_bytes());
        archive.extend(head);
    }
    let archive = String::from_utf8(archive).unwrap();
    let error = home.ask("PUT", &format!("/v1/handoffs/{id}"), "Towline-At: cloud/c\r\n", &archive).json(507);
    assert!(error["error"]["message"].as_str().unwrap().contains("larger than announced"), "{error}");
    assert!(kept(&cloud).is_empty());
    assert_eq!(fs::read_dir(user.work().join("kept")).unwrap().count(), 0);
    announce(&home, "run/step-1", 64 << 20).json(201);
    home.stop();
    cloud.stop();
}

/// The one checkpoint that `agent` has set aside.
fn set_aside(agent: &Running) -> Value {
    until("it is set aside", || kept(agent).iter().any(|kept| !kept["aside"].is_null()));
    assert!(told_metric(agent, "towline_handoff_set_aside 1"));
    kept(agent)[0].clone()
}

fn told_metric(agent: &Running, line: &str) -> bool {
    String::from_utf8(agent.ask("GET", "/metrics", "", "").body).unwrap().lines().any(|told| told == line)
}

#[test]
fn what_cannot_be_saved_is_set_aside_until_somebody_has_it_retried_or_dropped() {
    let user = with_tree();
    let keeps = keeps("'home/a'", "64M", "1h");
    let (cloud, _) = node_lost(&user, &keeps, &[7]);
    let id = kept(&cloud)[0]["id"].as_str().unwrap().to_owned();
    let restart = |cloud: Running| {
        cloud.signal(Signal::KILL);
        cloud.ended();
        start_peer_with(&user, "c", &[], ("listen = '127.0.0.1:0'", &keeps))
    };
    // As an earlier version took it: under a name that is no step.
    let told = user.work().join("kept").join(&id).join("handoff.json");
    let text = fs::read_to_string(&told).unwrap();
    fs::write(&told, text.replace("run/step-7", "models/production")).unwrap();
    unhide(&user);
    let cloud = restart(cloud);
    let aside = set_aside(&cloud);
    assert_eq!((&aside["name"], &aside["aside"]["kind"]), (&json!("models/production"), &json!("usage")));
    let list = agent_told(&user, &cloud, &["handoff", "list"]);
    assert!(list.contains("only steps of a run") && list.contains(&format!("towline handoff drop {id}")), "{list}");

    // After a restart it is known, and not tried again; asked for, it is, and fails again.
    let cloud = restart(cloud);
    set_aside(&cloud);
    assert_eq!(cloud.get("/v1/tasks")["tasks"], json!([]));
    let retried = told_json(&user, &cloud, &["handoff", "retry", &id]);
    assert!(retried["retried"][0]["aside"].is_null(), "{retried}");
    set_aside(&cloud);

    // With its cause put right it is saved.
    fs::write(&told, text).unwrap();
    let cloud = restart(cloud);
    until("it is saved", || kept(&cloud).is_empty());
    assert!(user.ok(&["ls"]).contains("run/step-7"));
    cloud.stop();
}

#[test]
fn what_ends_the_agent_whenever_it_is_saved_is_set_aside() {
    let user = with_tree();
    let keeps = keeps("'home/a'", "64M", "1h").replace("wait =", "tries = 3\nwait =");
    let (cloud, _) = node_lost(&user, &keeps, &[7]);
    cloud.signal(Signal::KILL);
    cloud.ended();
    unhide(&user);
    let id = fs::read_dir(user.work().join("kept")).unwrap().next().unwrap().unwrap().path();
    // As after three saves during each of which the agent ended.
    fs::write(id.join("begun"), "3\n").unwrap();
    let cloud = start_peer_with(&user, "c", &[], ("listen = '127.0.0.1:0'", &keeps));
    let aside = set_aside(&cloud)["aside"].clone();
    assert!(aside["error"].as_str().unwrap().contains("agent ended whenever it saved this"), "{aside}");
    assert!(aside["error"].as_str().unwrap().contains("3 saves without an end"), "{aside}");
    assert!(!user.ok(&["ls"]).contains("step-7"));
    // Asked for, it is tried again, also where the save cannot be counted, as on a full disk.
    fs::create_dir(id.join("begun.new")).unwrap();
    let id = id.file_name().unwrap().to_str().unwrap().to_owned();
    told_json(&user, &cloud, &["handoff", "retry", &id]);
    until("it is saved", || kept(&cloud).is_empty());
    assert!(user.ok(&["ls"]).contains("run/step-7"));
    cloud.stop();
}

#[test]
fn what_is_set_aside_can_be_dropped() {
    let user = with_tree();
    let (cloud, _) = node_lost(&user, &keeps("'home/a'", "64M", "1h"), &[7]);
    cloud.signal(Signal::KILL);
    cloud.ended();
    // The sender may give these names no more: what it gave is not saved in its name, either.
    unhide(&user);
    let others = keeps("'home/a'", "64M", "0s").replace("'**'", "'other/*'").replace("wait =", "tries = 2\nwait =");
    let cloud = start_peer_with(&user, "c", &[], ("listen = '127.0.0.1:0'", &others));
    let aside = set_aside(&cloud);
    assert_eq!((&aside["aside"]["tries"], &aside["aside"]["kind"]), (&json!(2), &json!("denied")), "{aside}");
    assert!(aside["aside"]["help"].as_str().unwrap().contains("[[handoff.accept]]"), "{aside}");
    let id = aside["id"].as_str().unwrap();
    let dropped = agent_told(&user, &cloud, &["handoff", "drop", id]);
    assert!(dropped.contains(id), "{dropped}");
    assert!(kept(&cloud).is_empty() && told_metric(&cloud, "towline_handoff_set_aside 0"));
    until("its folder is gone", || fs::read_dir(user.work().join("kept")).unwrap().count() == 0);
    assert_eq!(cloud.ask("POST", &format!("/v1/handoffs/{id}/retry"), "", "").refuses(404), "not-found");
    cloud.stop();
    assert!(!user.ok(&["ls"]).contains("step-7"));
}

#[test]
fn the_modes_of_the_sender_are_what_is_saved() {
    let user = with_tree();
    fs::create_dir(user.work().join("ckpt")).unwrap();
    let (home, cloud) = two_sites(&user, "", (GIVES, &keeps("'home/a'", "64M", "1h")));
    watches(&home);
    hide(&user);
    write_checkpoint(&user, 7);
    let model = user.work().join("ckpt/checkpoint-7/model.bin");
    fs::set_permissions(&model, fs::Permissions::from_mode(0o640)).unwrap();
    fs::set_permissions(user.work().join("ckpt/checkpoint-7"), fs::Permissions::from_mode(0o750)).unwrap();
    home.signal(Signal::TERM);
    assert_eq!(home.ended().0, Some(1));
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    let id = kept(&cloud)[0]["id"].as_str().unwrap().to_owned();
    let there = user.work().join("kept").join(id).join("files/checkpoint-7");
    assert_eq!((mode(&there), mode(&there.join("model.bin"))), (0o700, 0o600));
    cloud.signal(Signal::KILL);
    cloud.ended();
    unhide(&user);
    let cloud = start_peer_with(&user, "c", &[], ("listen = '127.0.0.1:0'", &keeps("'home/a'", "64M", "1h")));
    until("it is saved", || kept(&cloud).is_empty());
    cloud.stop();
    user.ok(&["restore", "run/step-7", "out"]);
    let out = user.work().join("out");
    assert_eq!((mode(&out), mode(&out.join("model.bin"))), (0o750, 0o640));
}

#[test]
fn only_another_agent_gives() {
    let user = with_tree();
    let agent = Running::start(&user, "");
    let told = json!({ "name": "run/step-1", "repository": agent.get("/health")["repositories"][0]["id"], "bytes": 1 });
    assert_eq!(agent.ask("POST", "/v1/handoffs", "", &told.to_string()).refuses(403), "denied");
    assert_eq!(agent.ask("GET", "/v1/handoffs", "", "").refuses(404), "not-found");
    agent.stop();
}
