//! Agents and processes together: warming, restores through an agent, and agents that bring each other what they hold. G2 of
//! docs/semantics.md, for processes.

use std::fs;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use super::sidecar::until;
use super::{PATIENCE, Running, told, told_json, with_tree};
use crate::cli::User;
use crate::data::noise;

/// Bytes that the agent had from `source`.
pub(super) fn had(agent: &Running, source: &str) -> u64 {
    let text = String::from_utf8(agent.ask("GET", "/metrics", "", "").body).unwrap();
    let sample = format!("towline_chunk_from_bytes_total{{source=\"{source}\"}} ");
    text.lines().find_map(|line| line.strip_prefix(&sample)).unwrap().parse().unwrap()
}

/// What was asked of a warm is what was there, came and did not come: in chunks, and in bytes.
fn adds_up(report: &Value) {
    let of = |name: &str| report[name].as_u64().unwrap();
    assert_eq!(of("chunks"), of("hits") + of("fetched") + of("missing"), "{report}");
    assert_eq!(of("bytes"), of("hit_bytes") + of("fetched_bytes") + of("missing_bytes"), "{report}");
    assert_eq!(of("lacking_bytes"), of("fetched_bytes") + of("missing_bytes"), "{report}");
}

/// Takes the packs of the repository out of reach.
pub(super) fn hide_packs(user: &User) {
    fs::rename(user.repository().join("pack"), user.repository().join("hidden")).unwrap();
}

#[test]
fn what_is_warm_is_restored_without_the_repository_s_packs() {
    let user = with_tree();
    user.ok(&["save", "tree", "run/step-1"]);
    let agent = Running::start(&user, "");
    let dry = told_json(&user, &agent, &["warm", "run@latest", "--pin", "24h", "--owner", "me", "--dry-run"]);
    let planned = &dry["tasks"][0]["report"];
    assert_eq!((&planned["dry_run"], &planned["missing"]), (&json!(true), &json!(0)));
    assert_eq!(
        (had(&agent, "repository"), told_json(&user, &agent, &["pins"])["pins"].as_array().unwrap().len()),
        (0, 0)
    );
    let mut command = user.command(&["warm", "run@latest", "--dry-run"]);
    let said = command.env("TOWLINE_AGENT", &agent.socket).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&said.stderr), "run@latest is run/step-1\n");
    assert!(String::from_utf8_lossy(&said.stdout).starts_with("would warm: run/step-1, "), "{said:?}");

    let warm = told_json(&user, &agent, &["warm", "run@latest", "--pin", "24h", "--owner", "me", "--wait"]);
    let report = &warm["tasks"][0]["report"];
    assert_eq!(
        (&report["lacking_bytes"], &warm["tasks"][0]["name"]),
        (&planned["lacking_bytes"], &json!("run/step-1"))
    );
    assert_eq!((&report["missing"], &report["name"]), (&json!(0), &json!("run/step-1")));
    assert!(report["lacking_bytes"].as_u64().unwrap() > 20 << 20);
    adds_up(report);
    let again = told_json(&user, &agent, &["warm", "run/step-1", "--pin", "24h", "--owner", "me", "--wait"]);
    assert_eq!(again["tasks"][0]["report"]["lacking"], 0);
    assert_eq!(again["tasks"][0]["report"]["hits"], report["chunks"]);
    adds_up(&again["tasks"][0]["report"]);
    assert_eq!(told_json(&user, &agent, &["pins"])["pins"].as_array().unwrap().len(), 1, "one takes the other's place");
    let from_repository = had(&agent, "repository");
    assert!(from_repository > 20 << 20);

    hide_packs(&user);
    told(&user, &agent, &["restore", "run/step-1", "out"]);
    assert_eq!(user.read("out/sub/b.bin"), noise(1, 20 << 20));
    let cat = user.command(&["cat", "run/step-1:a.txt"]).env("TOWLINE_AGENT", &agent.socket).output().unwrap();
    assert_eq!(cat.stdout, b"hello, world");
    let to = json!({ "name": "run/step-1", "to": user.work().join("by-agent") });
    agent.done("/v1/restore", &to);
    assert_eq!(agent.ask("GET", "/v1/files/run@latest/a.txt", "", "").body, b"hello, world");
    assert_eq!(had(&agent, "repository"), from_repository);
    assert!(had(&agent, "cache") > 20 << 20);
    let alone = user.run(&["restore", "run/step-1", "alone"]);
    assert_ne!(alone.code, Some(0), "the packs are out of reach");

    // A restart is warm, also after a kill.
    agent.signal(Signal::KILL);
    agent.ended();
    let agent = Running::start(&user, "");
    told(&user, &agent, &["restore", "run/step-1", "again"]);
    assert_eq!(user.read("again/sub/b.bin"), noise(1, 20 << 20));
    agent.stop();
}

#[test]
fn without_the_agent_a_restore_goes_on_alone() {
    let user = with_tree();
    user.ok(&["save", "tree", "run/step-1"]);
    let gone =
        user.command(&["restore", "run/step-1", "out"]).env("TOWLINE_AGENT", "/none/agent.sock").output().unwrap();
    assert_eq!(gone.status.code(), Some(0));
    assert_eq!(user.read("out/a.txt"), b"hello, world");
    // Nor is one of use that has another repository.
    let agent = Running::start(&user, "");
    let other = with_tree();
    other.ok(&["save", "tree", "run/step-2"]);
    told(&other, &agent, &["restore", "run/step-2", "out"]);
    assert_eq!(other.read("out/a.txt"), b"hello, world");
    assert_eq!(had(&agent, "repository"), 0);
    agent.stop();
}

/// G2: "if it stops midway": a stopped process still accepts connections.
#[test]
fn an_agent_that_does_not_answer_is_left_out_with_a_warning() {
    let user = with_tree();
    user.ok(&["save", "tree", "run/step-1"]);
    let socket = user.work().join("silent.sock");
    let _silent = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let restored = user.command(&["restore", "run/step-1", "out"]).env("TOWLINE_AGENT", &socket).output().unwrap();
    let said = String::from_utf8(restored.stderr).unwrap();
    assert_eq!(restored.status.code(), Some(0), "{said}");
    assert!(said.contains("the agent at") && said.contains("does not answer"), "{said}");
    assert_eq!(user.read("out/a.txt"), b"hello, world");
    let ready = user.command(&["top", "--ready"]).env("TOWLINE_AGENT", &socket).output().unwrap();
    assert_eq!(ready.status.code(), Some(6));
}

#[test]
fn chunks_are_given_over_the_socket_alone_and_only_when_asked_for() {
    let user = with_tree();
    let agent = Running::start(&user, "http = '127.0.0.1:0'");
    assert_eq!(agent.ask("GET", "/v1/chunks", "", "").refuses(426), "usage");
    let token = fs::read_to_string(agent.socket.with_extension("token")).unwrap();
    let stream = std::net::TcpStream::connect(agent.http.as_ref().unwrap()).unwrap();
    let headers = format!("Authorization: Bearer {}\r\nUpgrade: towline\r\n", token.trim());
    assert_eq!(super::exchange(stream, "GET", "/v1/chunks", &headers, "").refuses(403), "denied");
    agent.stop();
}

#[test]
fn a_part_is_brought_alone() {
    let user = with_tree();
    user.write("tree/sub.txt", b"beside the folder sub");
    user.ok(&["save", "tree", "data/v1"]);
    let agent = Running::start(&user, "");
    agent.done("/v1/fetch", &json!({ "name": "data/v1", "path": "a.txt" }));
    let kinds = agent.get("/v1/tasks")["tasks"].clone();
    assert_eq!((&kinds[0]["kind"], &kinds[0]["name"]), (&json!("fetch"), &json!("data/v1:a.txt")));
    assert!(had(&agent, "repository") < 1 << 20, "of one small file");

    let part = ["warm", "data/v1:sub/", "--pin", "1h", "--owner", "me", "--wait"];
    let warm = told_json(&user, &agent, &part);
    assert_eq!(warm["tasks"][0]["report"]["lacking_bytes"], 20 << 20);
    told(&user, &agent, &part);
    let pins = told_json(&user, &agent, &["pins"])["pins"].clone();
    assert_eq!((pins.as_array().unwrap().len(), &pins[0]["reason"]), (1, &json!("data/v1:sub")));
    hide_packs(&user);
    assert_eq!(agent.ask("GET", "/v1/files/data%2Fv1/a.txt", "", "").body, b"hello, world");
    assert_eq!(agent.ask("GET", "/v1/files/data%2Fv1/sub/b.bin", "", "").body, noise(1, 20 << 20));
    let lacking = told_json(&user, &agent, &["warm", "data/v1:sub.txt"])["tasks"][0]["id"].clone();
    let transfer = || agent.get(&format!("/v1/tasks/{}", lacking.as_str().unwrap()));
    until("it has ended", || transfer()["state"] != "running");
    assert_eq!(transfer()["report"]["missing"], 1, "it is no part of sub");
    adds_up(&transfer()["report"]);

    let failed = told_json(&user, &agent, &["warm", "data/v1:none"])["tasks"][0]["id"].clone();
    let failed = || agent.get(&format!("/v1/tasks/{}", failed.as_str().unwrap()));
    until("it has failed", || failed()["state"] == "failed");
    let error = failed()["error"].to_string();
    assert!(error.contains("no such path in the saved tree") && error.contains("data/v1:none"), "{error}");
    agent.stop();
}

/// Makes certificates for agents of two sites; the folders lie in the working folder.
pub(super) fn identities(user: &User) {
    user.ok(&["identity", "init"]);
    for agent in ["home/a", "home/b", "cloud/c"] {
        let (_, name) = agent.split_once('/').unwrap();
        user.ok(&["identity", "issue", agent, "--to", name]);
    }
}

/// Every agent of the authority may read every name.
pub(super) const EVERYTHING: &str = "[[allow]]\nagents = '**'\nnames = '**'\n";

/// An agent called `name`, that knows the others at `addresses`.
fn start_peer(user: &User, name: &str, addresses: &[String], more: &str) -> Running {
    start_peer_with(user, name, addresses, ("listen = '127.0.0.1:0'", more))
}

/// As before, with these settings of its own, and these sections.
pub(super) fn start_peer_with(user: &User, name: &str, addresses: &[String], (own, more): (&str, &str)) -> Running {
    let addresses: Vec<String> = addresses.iter().map(|address| format!("'{address}'")).collect();
    // Everybody may read everything, unless rules say otherwise.
    let rules = if more.contains("[[allow]]") { "" } else { EVERYTHING };
    let text = format!(
        "repository = '../repo'\nsocket = '{name}.sock'\nmemory = '512M'\nidentity = '{name}'\n{own}\n\
         [cache]\ndir = 'cache-{name}'\ncapacity = '256M'\nfree_floor = '0'\n\
         [peers]\naddresses = [{}]\n{more}\n{rules}",
        addresses.join(", ")
    );
    let file = format!("{name}.toml");
    user.write(&file, text.as_bytes());
    Running::from_file(user, &file)
}

#[test]
fn agents_bring_each_other_what_they_hold() {
    let user = with_tree();
    user.ok(&["save", "tree", "run/step-1"]);
    identities(&user);
    let first = start_peer(&user, "a", &[], "[[allow]]\nagents = 'home/*'\nnames = ['run/*']");
    let address = vec![first.listen.clone().unwrap()];
    told(&user, &first, &["warm", "run@latest", "--wait"]);
    let (near, far) = (start_peer(&user, "b", &address, ""), start_peer(&user, "c", &address, ""));
    assert_eq!(near.get("/health")["identity"], "towline://home/b");
    let until = Instant::now() + PATIENCE;
    let peer = |agent: &Running| -> Value { agent.get("/v1/peers")["peers"][0].clone() };
    while peer(&near)["transport"].is_null() || peer(&far)["transport"].is_null() {
        assert!(Instant::now() < until, "no link: {} {}", peer(&near), peer(&far));
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(peer(&near)["identity"], "towline://home/a");
    let warm = told_json(&user, &near, &["warm", "run@latest", "--from", "home", "--wait"]);
    assert_eq!(warm["tasks"][0]["report"]["missing"], 0);
    assert_eq!(had(&near, "repository"), 0, "all of it came from the other agent");
    assert!(had(&near, "site") > 20 << 20);
    assert!(told(&user, &near, &["top", "--once"]).contains("towline://home/a"));

    let sources = &warm["tasks"][0]["report"]["sources"];
    assert_eq!((&sources["repository"], &sources["site"]), (&json!(0), &json!(had(&near, "site"))));

    // The other site may not read it there. It has the repository, and reads it only if it is told to.
    let only =
        user.command(&["warm", "run@latest", "--from", "home", "--wait"]).env("TOWLINE_AGENT", &far.socket).output();
    let only = only.unwrap();
    let said = String::from_utf8(only.stdout).unwrap();
    assert_eq!(only.status.code(), Some(6), "{said}");
    assert!(said.contains("fetched: 0 B in 0 chunks") && said.contains("no source that answers has them"), "{said}");
    assert_eq!((had(&far, "remote"), had(&far, "repository")), (0, 0));
    let text = told(&user, &far, &["warm", "run@latest", "--from", "home", "--or-repository", "--wait"]);
    assert!(text.contains("(repository: 20."), "{text}");
    assert_eq!((had(&far, "remote"), had(&far, "site")), (0, 0));
    assert!(had(&far, "repository") > 20 << 20);

    hide_packs(&user);
    let restored = told(&user, &near, &["restore", "run/step-1", "out"]);
    assert!(restored.contains("(this node's agent: 20.") && !restored.contains("repository: "), "{restored}");
    assert_eq!(user.read("out/sub/b.bin"), noise(1, 20 << 20));
    near.stop();
    far.stop();
    first.stop();
}

#[test]
fn a_place_that_nobody_knows_gives_nothing_and_is_named() {
    let user = with_tree();
    user.ok(&["save", "tree", "run/step-1"]);
    identities(&user);
    let first = start_peer(&user, "a", &[], "");
    let second = start_peer(&user, "b", &[first.listen.clone().unwrap()], "");
    for (from, or_repository, says) in [
        ("nowhere", false, "site `nowhere` is not known here: expected one of the sites home or the agents home/a"),
        ("nowhere", true, "site `nowhere` is not known here"),
        ("home/z", false, "agent `home/z` is not known here"),
    ] {
        let asked = json!({ "name": "run@latest", "from": from, "or_repository": or_repository });
        let error = &second.post("/v1/warm", &asked, 404)["error"];
        assert!(error["message"].as_str().unwrap().starts_with(says), "{error}");
    }
    let error = &second.post("/v1/warm", &json!({ "name": "run/step-2" }), 404)["error"];
    assert!(error["message"].as_str().unwrap().starts_with("no such name `run/step-2`"), "{error}");
    first.signal(Signal::KILL);
    first.ended();
    let begun = second.post("/v1/warm", &json!({ "name": "run@latest", "from": "home" }), 202);
    let (_, end) = second.events(&begun).pop().unwrap();
    assert!(end["state"] == "failed" || end["report"]["missing"].as_u64() > Some(0), "{end}");
    assert_eq!((had(&second, "repository"), had(&second, "site")), (0, 0));
    second.stop();
}

#[test]
fn what_keeps_agents_apart_is_named() {
    let user = with_tree();
    identities(&user);
    let agent = start_peer(&user, "a", &[], "");
    let port = agent.listen.clone().unwrap();
    let write = |text: &str| user.write("other.toml", format!("repository = '../repo'\n{text}").as_bytes());
    let cache = "[cache]\ndir = 'other'\ncapacity = '256M'\nfree_floor = '0'\n";
    let start = ["agent", "--config", "other.toml"];
    write(&format!("socket = 'o.sock'\nidentity = 'b'\nlisten = '{port}'\nmemory = '512M'\n{cache}{EVERYTHING}"));
    let error = user.fails(&start, 5);
    assert!(error["message"].as_str().unwrap().starts_with("address in use: cannot listen on "), "{error}");
    write(&format!("socket = 'o.sock'\nidentity = 'none'\n{cache}"));
    assert_eq!(user.fails(&start, 3)["kind"], "not-found");
    write("listen = '0.0.0.0:7071'\n");
    let error = user.fails(&start, 2);
    assert!(error["help"].as_str().unwrap().contains("towline identity issue"), "{error}");
    user.write("b/tls.key", b"-----BEGIN PRIVATE KEY-----\nrubbish\n-----END PRIVATE KEY-----\n");
    write(&format!("socket = 'o.sock'\nidentity = 'b'\nlisten = '127.0.0.1:0'\n{cache}"));
    let error = user.fails(&start, 2).to_string();
    assert!(error.contains("no [[allow]] says which agents may read which names"), "{error}");
    write(&format!("socket = 'o.sock'\nidentity = 'b'\nlisten = '127.0.0.1:0'\n{cache}{EVERYTHING}"));
    let error = user.fails(&start, 4);
    assert!(error["message"].as_str().unwrap().contains("tls.key is not the key of tls.crt"), "{error}");
    agent.stop();
}

#[test]
fn a_warm_that_does_not_fit_reads_nothing() {
    let user = with_tree();
    user.write("big/a.bin", &noise(2, 40 << 20));
    user.ok(&["save", "big", "run/step-1"]);
    for (capacity, floor) in [("32M", "0"), ("256M", "1000T")] {
        let text = format!(
            "repository = '../repo'\nsocket = 'run/agent.sock'\nmemory = '256M'\n\
             [cache]\ndir = 'cache-{capacity}'\ncapacity = '{capacity}'\nfree_floor = '{floor}'\n"
        );
        user.write("small.toml", text.as_bytes());
        let agent = Running::from_file(&user, "small.toml");
        let dry = told_json(&user, &agent, &["warm", "run/step-1", "--dry-run"]);
        assert!(dry["tasks"][0]["report"]["shortfall_bytes"].as_u64().unwrap() > 0, "{dry}");
        let said = told(&user, &agent, &["warm", "run/step-1", "--dry-run"]);
        assert!(said.contains("it does not fit: the cache has "), "{said}");
        let output =
            user.command(&["warm", "run/step-1", "--wait"]).env("TOWLINE_AGENT", &agent.socket).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains("cache is too small for it") && error.contains("free_floor"), "{error}");
        assert_eq!((had(&agent, "repository"), agent.get("/v1/cache")["chunks"].as_u64()), (0, Some(0)));
        agent.stop();
    }
}
