//! Warms into a cache that is full or too small.

use serde_json::{Value, json};

use super::sidecar::until;
use super::{Running, configure, told, told_json};
use crate::cli::{Ran, User, ran};
use crate::data::noise;

const NAMES: u64 = 6;
const LEN: usize = 20 << 20;

/// Names of 20 MiB each, of which all together do not fit in the cache of 96 MiB.
fn with_names() -> User {
    let user = User::with_repository();
    for n in 0..NAMES {
        user.write("file", &noise(n, LEN));
        user.ok(&["save", "file", &format!("data/{n}")]);
    }
    user
}

fn start(user: &User, more: &str) -> Running {
    configure(user, more);
    let settings = String::from_utf8(user.read("agent.toml")).unwrap();
    user.write("agent.toml", settings.replace("capacity = '256M'", "capacity = '96M'").as_bytes());
    Running::from_file(user, "agent.toml")
}

fn run(user: &User, agent: &Running, args: &[&str]) -> Ran {
    ran(user.command(args).env("TOWLINE_AGENT", &agent.socket))
}

fn lacking(user: &User, agent: &Running, name: &str) -> Value {
    told_json(user, agent, &["warm", name, "--dry-run"])["tasks"][0]["report"]["lacking_bytes"].clone()
}

#[test]
fn a_warm_into_a_full_cache_is_complete() {
    let user = with_names();
    let agent = start(&user, "");
    for _ in 0..3 {
        for n in 0..NAMES {
            let name = format!("data/{n}");
            told(&user, &agent, &["warm", &name, "--wait"]);
            assert_eq!(lacking(&user, &agent, &name), 0, "{name}");
        }
    }
    agent.stop();
}

#[test]
fn names_that_do_not_fit_together_are_not_all_warm() {
    let user = with_names();
    let agent = start(&user, "");
    let names: Vec<String> = (0..NAMES).map(|n| format!("data/{n}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let warm = run(&user, &agent, &[&["warm"], &names[..], &["--wait"]].concat());
    assert_eq!(warm.code, Some(1), "{}", warm.err);
    let text = String::from_utf8(warm.out).unwrap();
    assert!(warm.err.contains("evicted again") || text.contains("missing: "), "{text}{}", warm.err);

    // One that fails keeps no other from being warmed and reported.
    let warm = run(&user, &agent, &["warm", "data/none", "data/0", "data/1", "--wait"]);
    assert_eq!(warm.code, Some(3), "{}", warm.err);
    let text = String::from_utf8(warm.out).unwrap();
    assert!(text.contains("warm: data/0, 20.0 MiB") && text.contains("warm: data/1, 20.0 MiB"), "{text}");
    let both = ["data/0", "data/1"].map(|name| lacking(&user, &agent, name));
    assert_eq!(both, [0, 0], "{text}{}", warm.err);
    agent.stop();
}

#[test]
fn a_pin_of_no_time_is_refused() {
    let user = User::with_repository();
    user.write("file", &noise(1, 1 << 20));
    user.ok(&["save", "file", "data/1"]);
    let agent = start(&user, "");
    told(&user, &agent, &["warm", "data/1", "--pin", "1h", "--wait"]);
    let pins = agent.get("/v1/pins");
    for verb in [["warm", "data/1", "--pin", "0"], ["pin", "data/1", "--for", "0"]] {
        let refused = run(&user, &agent, &verb);
        assert!(refused.code == Some(2) && refused.err.contains("run out already"), "{}", refused.err);
    }
    for (path, body) in
        [("/v1/warm", json!({ "name": "data/1", "pin": "0s" })), ("/v1/pins", json!({ "name": "data/1", "for": 0 }))]
    {
        assert_eq!(agent.ask("POST", path, "", &body.to_string()).refuses(400), "usage");
    }
    assert_eq!(agent.get("/v1/pins"), pins);
    agent.stop();
}

/// operations.md: "names to fetch into the cache, and to pin there as long as the agent runs, before it is ready; together they must fit"
#[test]
fn inputs_of_a_sidecar_are_there_when_it_is_ready() {
    let user = with_names();
    let sidecar = |names: &str| format!("[sidecar]\nwarm = [{names}]\n");
    let is_ready = |agent: &Running| agent.ask("GET", "/ready", "", "").status == 200;
    let pins = |agent: &Running| {
        let pins = agent.get("/v1/pins")["pins"].as_array().unwrap().clone();
        pins.iter()
            .map(|pin| format!("{} {}", pin["owner"].as_str().unwrap(), pin["reason"].as_str().unwrap()))
            .collect::<Vec<_>>()
    };
    let agent = start(&user, &sidecar("'data/0', 'data/1', 'data/2'"));
    until("it is ready", || is_ready(&agent));
    assert_eq!(pins(&agent), ["sidecar data/0", "sidecar data/1", "sidecar data/2"]);
    for name in ["data/3", "data/4", "data/5"] {
        let _ = run(&user, &agent, &["warm", name, "--wait"]);
    }
    for name in ["data/0", "data/1", "data/2"] {
        assert_eq!(lacking(&user, &agent, name), 0, "{name}");
    }
    agent.stop();

    // Other inputs: those of before are released.
    let agent = start(&user, &sidecar("'data/2', 'data/3', 'data/4', 'data/5'"));
    until("it is ready", || is_ready(&agent));
    assert_eq!(pins(&agent).len(), 4);
    agent.stop();

    // None any more: nothing stays pinned.
    let agent = start(&user, "");
    until("pins are released", || pins(&agent).is_empty());
    agent.stop();

    // Too many: it is never ready, and says why.
    let agent = start(&user, &sidecar("'data/0', 'data/1', 'data/2', 'data/3', 'data/4', 'data/5'"));
    until("the last input failed", || {
        let tasks = agent.get("/v1/tasks")["tasks"].as_array().unwrap().clone();
        tasks.iter().any(|task| task["state"] == "failed" && task["error"]["kind"] == "exhausted")
    });
    assert!(!is_ready(&agent));
    agent.stop();
}
