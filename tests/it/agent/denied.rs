//! Files over HTTP and handoff between agents as processes: a site that the policy denies receives not one byte of a denied name.
//! Y3 of docs/policy.md; P5 of docs/semantics.md.

use std::fs;
use std::path::Path;

use rustix::process::Signal;
use serde_json::{Value, json};

use super::routing::two_sites;
use super::sidecar::until;
use super::together::had;
use super::{Running, told, with_tree};
use crate::cli::User;
use crate::data::noise;

/// Bytes in each block of denied content, and nowhere else.
const MARKER: &[u8] = b"<denied: not one byte of this may be seen>";

const RULES: &str = "[[rule]]\nverdict = 'deny'\nnames = 'raw/**'\nto = 'cloud'\nwhy = 'stays'\n\
                     [[rule]]\nverdict = 'allow'\nwhy = 'all'\n";

fn marked() -> Vec<u8> {
    let mut bytes = noise(3, 1 << 20);
    bytes.chunks_mut(4096).for_each(|block| block[..MARKER.len()].copy_from_slice(MARKER));
    bytes
}

fn has_marker(bytes: &[u8]) -> bool {
    bytes.windows(MARKER.len()).any(|window| window == MARKER)
}

/// True if a file at or below `path` holds the marker.
fn is_marked(path: &Path) -> bool {
    match fs::read_dir(path) {
        Ok(entries) => entries.map(|entry| entry.unwrap().path()).any(|entry| is_marked(&entry)),
        Err(_) => fs::read(path).is_ok_and(|bytes| has_marker(&bytes)),
    }
}

/// Puts the rules in force, signed by the authority of the certificates in the working folder.
fn set_policy(user: &User) {
    let own = user.work().join("../home/.config/towline/identity");
    user.ok(&["identity", "issue", "home/user", "--to", own.to_str().unwrap()]);
    user.ok(&["identity", "issue-policy", "--to", "policy-key"]);
    let id = user.json(&["init"], 0)["id"].as_str().unwrap().to_owned();
    let place = user.repository().canonicalize().unwrap();
    let sites = format!(
        "version = 1\nrepository = '{id}'\n[[site]]\nname = 'home'\njurisdiction = 'DE'\nrepositories = '{}'\n\
         [[site]]\nname = 'cloud'\njurisdiction = 'US'\n",
        place.display()
    );
    user.write("policy.toml", format!("{sites}{RULES}").as_bytes());
    user.ok(&["policy", "sign", "policy.toml", "--key", "policy-key"]);
    user.ok(&["policy", "set", "policy.toml"]);
}

/// Bytes that `agent` has received of another one's links and calls, as its sockets counted them.
fn received(agent: &Running) -> u64 {
    let ledger = agent.get("/v1/ledger");
    ledger["links"].as_array().unwrap().iter().map(|link| link["received"].as_u64().unwrap()).sum()
}

/// Files over HTTP, ranges, lists, restores and warms: from its agent a process of the denied site gets nothing.
#[test]
fn the_agent_of_a_denied_site_hands_out_no_file_of_a_denied_name() {
    let user = with_tree();
    let sections = "[audit]\ndir = 'audit-c'";
    let (home, cloud) = two_sites(&user, "", ("", sections));
    set_policy(&user);
    user.write("raw/secret.bin", &marked());
    user.ok(&["save", "raw", "raw/set"]);
    told(&user, &home, &["warm", "raw/set", "run/step-1", "--wait"]);
    assert!(is_marked(&user.work().join("cache-a")), "it is found where it may be");
    let before = received(&cloud);

    let file = "/v1/files/raw%2Fset/secret.bin";
    for (method, path, headers) in [
        ("GET", file, ""),
        ("GET", file, "Range: bytes=0-99\r\n"),
        ("GET", file, "Range: bytes=-1\r\n"),
        ("HEAD", file, ""),
        ("GET", "/v1/files/raw%2Fset/", ""),
    ] {
        let answer = cloud.ask(method, path, headers, "");
        assert!(answer.status >= 400, "{method} {path}: {}", answer.status);
        assert!(!has_marker(&answer.body), "{method} {path}");
    }
    let out = user.work().join("out");
    for (path, body) in [
        ("/v1/restore", json!({ "name": "raw/set", "to": out })),
        ("/v1/warm", json!({ "name": "raw/set" })),
        ("/v1/warm", json!({ "name": "raw/set", "from": "home", "or_repository": true })),
        ("/v1/fetch", json!({ "name": "raw/set" })),
        ("/v1/pins", json!({ "name": "raw/set" })),
    ] {
        let answer = cloud.ask("POST", path, "", &body.to_string());
        if answer.status == 202 {
            let (_, end) = cloud.events(&answer.json_of_any()).pop().unwrap();
            assert_eq!((&end["state"], &end["error"]["kind"]), (&json!("failed"), &json!("denied")), "{path}: {end}");
        } else {
            answer.refuses(403);
        }
    }
    assert_eq!((had(&cloud, "remote"), had(&cloud, "repository"), had(&home, "repository") > 0), (0, 0, true));
    let moved = received(&cloud) - before;
    assert!(moved < 64 << 10, "{moved} bytes came to its sockets, and none of them content");
    // A name that is not denied is served.
    assert_eq!(cloud.ask("GET", "/v1/files/run%2Fstep-1/a.txt", "", "").body, b"hello, world");
    home.stop();
    cloud.stop();
    for folder in ["cache-c", "out"] {
        assert!(!is_marked(&user.work().join(folder)), "{folder}");
    }
    let shown = user.ok(&["audit", "show", "--dir", "audit-c", "--denied", "--json"]);
    let denied: Vec<Value> = shown.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(denied.iter().any(|entry| entry["action"] == "read" && entry["name"] == "raw/set"), "{shown}");
}

/// G4: who may call another agent learns no more of a denied name than of an absent one.
#[test]
fn a_caller_at_a_denied_site_learns_nothing_of_a_denied_name() {
    let user = with_tree();
    let (home, cloud) = two_sites(&user, "'home/*'", ("", ""));
    user.write("raw/file", b"secret");
    // Denied to home this time, which may call the cloud's agent.
    set_policy(&user);
    user.ok(&["save", "raw", "raw/set"]);
    let rules = RULES.replace("to = 'cloud'", "to = 'home'");
    let text = fs::read_to_string(user.work().join("policy.toml")).unwrap();
    let text = text.split("# signature").next().unwrap().replace("version = 1", "version = 2").replace(RULES, &rules);
    user.write("policy.toml", text.as_bytes());
    user.ok(&["policy", "sign", "policy.toml", "--key", "policy-key"]);
    user.ok(&["policy", "set", "policy.toml", "--lock-out"]);
    let asked = |name: &str, body: Value| {
        let path = if body.get("for").is_some() { "/v1/pins" } else { "/v1/warm" };
        let answer = home.ask("POST", path, "Towline-At: cloud/c\r\n", &body.to_string());
        (answer.status, String::from_utf8_lossy(&answer.body).replace(name, "NAME"))
    };
    until("the policy is known", || asked("raw/set", json!({ "name": "raw/set", "dry_run": true })).0 != 202);
    for more in [json!({ "dry_run": true }), json!({}), json!({ "for": "1h" })] {
        let [there, absent] = ["raw/set", "raw/not"].map(|name| {
            let mut body = more.clone();
            body["name"] = name.into();
            asked(name, body)
        });
        assert_eq!(there, absent, "{more}");
        assert_eq!(there.0, 404, "{more} {}", there.1);
    }
    assert_eq!(asked("run/step-1", json!({ "name": "run/step-1", "dry_run": true })).0, 202);
    home.stop();
    cloud.stop();
}

/// Handoff: a run that is denied to the site is not handed off there, not even when its node goes.
#[test]
fn a_denied_run_is_not_handed_off_there() {
    let user = with_tree();
    fs::create_dir(user.work().join("ckpt")).unwrap();
    let gives = "[audit]\ndir = 'audit-a'\n[sidecar]\nhandoff_to = 'cloud'\n\
                 watch = [{ folder = 'ckpt', run = 'raw', settle = '200ms', restore_latest = false }]";
    let keeps = "[handoff]\ndir = 'kept'\ncapacity = '64M'\nwait = '1h'\n\
                 [[handoff.accept]]\nfrom = 'home/*'\nnames = '**'\nmax = '64M'";
    let (home, cloud) = two_sites(&user, "", (gives, keeps));
    set_policy(&user);
    until("it watches, and knows the policy", || {
        let tasks = home.get("/v1/tasks")["tasks"].clone();
        let watches = tasks.as_array().unwrap().iter().any(|one| one["kind"] == "watch");
        watches && home.ask("GET", "/v1/files/run%2Fstep-1/a.txt", "", "").status == 200
    });
    let before = received(&cloud);
    fs::rename(user.repository(), user.work().join("hidden")).unwrap();
    user.write("ckpt/checkpoint-6/model.bin", &marked());
    home.signal(Signal::TERM);
    let (code, error) = home.ended();
    assert!(code == Some(1) && !error.contains("handed off"), "{error}");
    fs::rename(user.work().join("hidden"), user.repository()).unwrap();
    assert_eq!(cloud.get("/v1/handoffs")["handoffs"], json!([]));
    let moved = received(&cloud) - before;
    assert!(moved < 64 << 10, "{moved} bytes came to its sockets, and none of them content");
    cloud.stop();
    assert!(!is_marked(&user.work().join("kept")) && !is_marked(&user.work().join("cache-c")));
    let shown = user.ok(&["audit", "show", "--dir", "audit-a", "--denied", "--json"]);
    let denied: Vec<Value> = shown.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let handoff = denied.iter().find(|entry| entry["action"] == "handoff").unwrap_or_else(|| panic!("{shown}"));
    assert_eq!((&handoff["name"], &handoff["asked"]), (&json!("raw/step-6"), &json!("towline://cloud/c")));
}
