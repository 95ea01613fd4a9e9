//! Looking around through the agent: names and folders a part at a time, whose pins there are, what is odd about the settings, and
//! what another agent is told of names.

use std::io::{BufRead as _, BufReader};
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::routing::two_sites;
use super::sidecar::until;
use super::{Running, configure, told, told_json, with_tree};
use crate::cli::has_members;

/// The names in an answer.
fn names(answer: &Value, list: &str) -> Vec<String> {
    answer[list].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn names_are_listed_a_part_at_a_time() {
    let user = with_tree();
    user.ok(&["save", "tree", "run/step-1"]);
    for name in ["run/step-2", "run/step-3", "run-2/step-1", "best"] {
        user.ok(&["cp", "run/step-1", name]);
    }
    let agent = Running::start(&user, "");
    let all = agent.get("/v1/names");
    has_members(&all, "names");
    has_members(&all["names"][0], "name manifest bytes files chunks saved metrics world_size framework");
    assert_eq!(names(&all, "names"), ["best", "run-2/step-1", "run/step-1", "run/step-2", "run/step-3"]);
    assert_eq!(all["names"], user.json(&["ls"], 0)["refs"]);

    let first = agent.get("/v1/names?prefix=run&limit=2");
    assert_eq!(
        (names(&first, "names"), &first["next"]),
        (vec!["run/step-1".into(), "run/step-2".into()], &json!("run/step-2"))
    );
    let rest = agent.get("/v1/names?prefix=run/&limit=2&after=run/step-2");
    assert_eq!((names(&rest, "names"), rest.get("next")), (vec!["run/step-3".into()], None));
    assert_eq!(agent.get("/v1/names?prefix=none"), json!({ "names": [] }));
    for query in ["limit=0", "limit=many", "prefix=a//b", "after=@", "colour=red"] {
        assert_eq!(agent.ask("GET", &format!("/v1/names?{query}"), "", "").refuses(400), "usage", "{query}");
    }
    assert_eq!(agent.ask("GET", "/v1/names?repository=/other", "", "").refuses(404), "not-found");
    agent.stop();
}

#[test]
fn folders_are_listed_a_part_at_a_time() {
    let user = with_tree();
    for name in ["sub/a b", "sub/c/d", "sub.txt"] {
        user.write(&format!("tree/{name}"), name.as_bytes());
    }
    std::os::unix::fs::symlink("a b", user.work().join("tree/sub/link")).unwrap();
    user.ok(&["save", "tree", "run/step-1"]);
    user.ok(&["save", "tree/a.txt", "one"]);
    let agent = Running::start(&user, "");
    let root = agent.get("/v1/files/run@latest/");
    has_members(&root, "name manifest path entries");
    assert_eq!((&root["name"], &root["path"]), (&json!("run/step-1"), &json!("")));
    assert_eq!(names(&root, "entries"), ["a.txt", "sub", "sub.txt"]);
    has_members(&root["entries"][0], "name kind url bytes mode mtime");
    assert_eq!(names(&agent.get("/v1/files/one/"), "entries"), ["a.txt"]);

    for path in ["sub", "sub/"] {
        let folder = agent.get(&format!("/v1/files/run%2Fstep-1/{path}"));
        assert_eq!(names(&folder, "entries"), ["a b", "b.bin", "c", "link"]);
        let kinds: Vec<_> = folder["entries"].as_array().unwrap().iter().map(|entry| entry["kind"].clone()).collect();
        assert_eq!(kinds, ["file", "file", "folder", "link"]);
        assert_eq!(
            (&folder["entries"][1]["bytes"], &folder["entries"][3]["target"]),
            (&json!(20 << 20), &json!("a b"))
        );
        // What is listed can be followed.
        let url = folder["entries"][0]["url"].as_str().unwrap();
        assert_eq!(agent.ask("GET", url, "", "").body, b"sub/a b");
        assert_eq!(names(&agent.get(folder["entries"][2]["url"].as_str().unwrap()), "entries"), ["d"]);
    }
    let first = agent.get("/v1/files/run@latest/sub?limit=1");
    assert_eq!((names(&first, "entries"), &first["next"]), (vec!["a b".into()], &json!("a%20b")));
    let next = agent.get("/v1/files/run@latest/sub?limit=3&after=a%2520b");
    assert_eq!((names(&next, "entries"), next.get("next")), (vec!["b.bin".into(), "c".into(), "link".into()], None));
    assert_eq!(agent.ask("GET", "/v1/files/run@latest/sub?limit=0", "", "").refuses(400), "usage");
    assert_eq!(agent.ask("GET", "/v1/files/run@latest/a.txt?limit=1", "", "").refuses(400), "usage");
    assert_eq!(agent.ask("GET", "/v1/files/run@latest/sub/link", "", "").refuses(400), "usage");
    assert_eq!(agent.ask("GET", "/v1/files/run@latest/none/", "", "").refuses(404), "not-found");
    assert_eq!(agent.ask("GET", "/v1/files/none/", "", "").refuses(404), "not-found");
    agent.stop();
}

#[test]
fn some_paths_are_restored_through_the_agent() {
    let user = with_tree();
    user.ok(&["save", "tree", "run/step-1"]);
    let agent = Running::start(&user, "");
    let restore = |paths: Value| json!({ "name": "run@latest", "to": user.work().join("out"), "paths": paths });
    assert_eq!(agent.done("/v1/restore", &restore(json!(["*.txt"])))["report"]["files"], 1);
    assert!(user.exists("out/a.txt") && !user.exists("out/sub"));
    agent.stop();
}

/// The user who runs the tests, as the system calls them.
fn me() -> String {
    let output = Command::new("id").arg("-un").output().unwrap();
    let me = String::from_utf8(output.stdout).unwrap().trim().to_owned();
    assert!(!me.is_empty());
    me
}

#[test]
fn a_pin_belongs_to_the_user_who_asks() {
    let user = with_tree();
    user.ok(&["save", "tree", "run/step-1"]);
    let me = me();
    let agent = Running::start(&user, "http = '127.0.0.1:0'");
    // What the environment says of the user is not asked.
    let pin = user
        .command(&["pin", "run@latest", "--json"])
        .env("TOWLINE_AGENT", &agent.socket)
        .env("USER", "somebody")
        .output()
        .unwrap();
    let pinned: Value = serde_json::from_slice(&pin.stdout).unwrap();
    assert_eq!(pinned["owner"], me);
    let by_socket = agent.post("/v1/pins", &json!({ "name": "run@latest" }), 201);
    assert_eq!(by_socket["owner"], me, "the kernel tells who has connected");
    assert_eq!(agent.post("/v1/pins", &json!({ "name": "run@latest", "owner": "" }), 201)["owner"], me);
    assert_eq!(agent.post("/v1/pins", &json!({ "name": "run@latest", "owner": "a burst" }), 201)["owner"], "a burst");
    agent.done("/v1/warm", &json!({ "name": "run@latest", "pin": 60 }));
    let pins = told_json(&user, &agent, &["pins"])["pins"].clone();
    let owners: Vec<_> = pins.as_array().unwrap().iter().map(|pin| pin["owner"].clone()).collect();
    assert_eq!(owners, ["a burst", &me], "what a warm pins takes the place of what its owner has pinned before");
    agent.stop();
}

#[test]
fn a_capacity_above_the_disk_is_a_warning() {
    let user = with_tree();
    configure(&user, "");
    let settings = String::from_utf8(user.read("agent.toml")).unwrap();
    let start = |capacity: &str| {
        let cache = format!("dir = 'cache-{capacity}'\ncapacity = '{capacity}'");
        user.write("agent.toml", settings.replace("dir = 'cache'\ncapacity = '256M'", &cache).as_bytes());
        let mut child = user.command(&["agent", "--config", "agent.toml"]).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        let said: Vec<String> = lines.by_ref().take_while(|line| !line.starts_with("listening")).collect();
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        assert!(child.wait().unwrap().success(), "{said:?}");
        said.join("\n")
    };
    let said = start("4E");
    assert!(said.contains("[cache] capacity is 4.0 EiB, but the disk has"), "{said}");
    assert!(!start("256M").contains("capacity"));
}

/// "with the nearest names that the caller may read"
#[test]
fn another_agent_is_told_of_no_name_that_it_may_not_read() {
    let user = with_tree();
    user.ok(&["save", "tree", "secret/step-1"]);
    user.ok(&["save", "tree", "shared/base"]);
    let allow = "[[allow]]\nagents = 'home/*'\nnames = ['run/*', 'shared/*', 'secreT/*']";
    let (home, cloud) = two_sites(&user, "'home/*'", ("", allow));
    let fails = |name: &str| {
        let output = user
            .command(&["pin", name, "--at", "cloud", "--json"])
            .env("TOWLINE_AGENT", &home.socket)
            .output()
            .unwrap();
        let error: Value = serde_json::from_slice(&output.stderr).unwrap();
        (output.status.code(), error["error"]["message"].as_str().unwrap().to_owned())
    };
    let (code, near) = fails("shared/bas");
    assert_eq!(code, Some(3));
    assert!(
        near.starts_with("no such name `shared/bas` in repository ")
            && near.ends_with("; the nearest is `shared/base`"),
        "{near}"
    );
    let (code, hidden) = fails("secreT/step-1");
    assert!(code == Some(3) && !hidden.contains("secret/"), "{hidden}");
    let (code, hidden) = fails("secreT@latest");
    assert!(code == Some(3) && !hidden.contains("`secret`"), "{hidden}");
    let (code, denied) = fails("secret@latest");
    assert_eq!((code, denied), (Some(3), "no such run `secret`: expected names secret/step-N".to_owned()));
    // On its own node nothing is hidden.
    let output = user.command(&["pin", "secreT/step-1"]).env("TOWLINE_AGENT", &cloud.socket).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("`secret/step-1`"));
    let pinned = told_json(&user, &home, &["pin", "run@latest", "--at", "cloud"]);
    assert_eq!(pinned["owner"], format!("home/a/{}", me()));
    let body = json!({ "name": "run@latest" }).to_string();
    let pinned = home.ask("POST", "/v1/pins", "Towline-At: cloud\r\n", &body).json(201);
    assert_eq!(pinned["owner"], format!("home/a/{}", me()), "the agent that passes it on tells who asks");
    home.stop();
    cloud.stop();
}

#[test]
fn a_cache_folder_that_is_removed_is_a_problem() {
    let user = with_tree();
    let agent = Running::start(&user, "");
    let folder = told_json(&user, &agent, &["cache", "stat"])["dir"].as_str().unwrap().to_owned();
    assert_eq!(agent.get("/health")["problems"], json!([]));
    std::fs::rename(&folder, format!("{folder}.gone")).unwrap();
    let problem = || agent.get("/health")["problems"][0].as_str().unwrap_or_default().to_owned();
    let expected = format!("cache: the folder {folder} was removed or replaced");
    until("the problem is told", || problem().starts_with(&expected));
    assert!(told(&user, &agent, &["top", "--once"]).contains(&format!("problem: {expected}")));
    std::fs::rename(format!("{folder}.gone"), &folder).unwrap();
    until("the problem is over", || problem().is_empty());
    agent.stop();
}

#[test]
fn a_dead_peer_is_down() {
    let user = with_tree();
    let (home, cloud) = two_sites(&user, "", ("transport = 'tcp'", ""));
    assert!(told(&user, &home, &["top", "--once"]).contains("tcp x"));
    cloud.signal(Signal::KILL);
    cloud.ended();
    let row = || {
        let top = told(&user, &home, &["top", "--once"]);
        assert!(top.starts_with("towline agent towline://home/a ") && top.contains("AGENT"), "{top}");
        top.lines().find(|line| line.contains("cloud/c")).unwrap_or_else(|| panic!("it is forgotten: {top}")).to_owned()
    };
    until("it is down", || row().contains(" down "));
    assert_eq!(home.get("/v1/peers")["peers"][0]["transport"], Value::Null);
    home.stop();
}
