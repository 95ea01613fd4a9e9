//! Tokens that save what they may not read, and tokens that end while a request arrives. S12 of docs/security.md.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use rustix::process::Signal;
use serde_json::{Value, json};

use super::routing::{connections, linked};
use super::sidecar::until;
use super::together::{identities, start_peer_with};
use super::tokens::{Holder, SETTINGS, connect, token};
use super::{Running, told, told_json, with_tree};
use crate::data::safetensors;

/// Bytes of the tensor of each step: one chunk.
const LEN: usize = 1 << 20;

/// S12: "What it saves is stored as a difference to, or predicted from, names alone that it may read"
#[test]
fn the_size_of_a_save_tells_nothing_of_a_name_that_the_token_may_not_read() {
    let user = with_tree();
    let step = |changed: usize| {
        let mut file = safetensors(1, &[("w", LEN / 4)]);
        let at = file.len() - 4 * changed;
        file[at..].fill(1);
        file
    };
    user.write("key/model.safetensors", &step(0));
    user.ok(&["save", "key", "run-7/step-1"]);
    user.write("hidden/model.safetensors", &step(1));
    user.ok(&["save", "hidden", "run-7/step-2"]);
    let agent = Running::start(&user, SETTINGS);
    let folder = format!("folder={}", user.work().display());
    let saves = token(&user, &agent, &["save=run-7/*", &folder], &[]);
    let reads = token(&user, &agent, &["save=run-7/*", "read=run-7/step-1", &folder], &[]);
    let stored = |holder: &Holder<'_>, number: usize| {
        user.write("next/model.safetensors", &step(number));
        let body = json!({ "path": user.work().join("next"), "name": format!("run-7/step-{number}") });
        let ended = holder.ended(&holder.post("/v1/save", &body, 202));
        assert_eq!(ended["state"], "done", "{ended}");
        ended["report"]["stored_bytes"].as_u64().unwrap()
    };
    let whole = stored(&saves, 3);
    assert!(whole > LEN as u64 / 2, "{whole}: it is a difference");
    let difference = stored(&reads, 4);
    assert!(difference < LEN as u64 / 2, "{difference}: it is no difference to what the token may read");
    agent.stop();
}

/// Sends the head of a request and the first byte of its body; the rest is returned.
fn half_sent(holder: &Holder<'_>, agent: &Running, path: &str, body: &Value) -> (TcpStream, Vec<u8>) {
    let mut stream = connect(agent);
    let mut body = body.to_string().into_bytes();
    let rest = body.split_off(1);
    write!(
        stream,
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer {}\r\nContent-Length: {}\r\n\r\n",
        holder.secret,
        1 + rest.len()
    )
    .unwrap();
    stream.write_all(&body).unwrap();
    (stream, rest)
}

/// S12: "A token that ends while a request arrives is refused as one that had ended before"
#[test]
fn a_request_that_arrives_after_its_token_was_revoked_makes_nothing() {
    let user = with_tree();
    user.ok(&["save", "tree", "run/step-1"]);
    let agent = Running::start(&user, SETTINGS);
    let folder = format!("folder={}", user.work().display());
    let tree = user.work().join("tree").display().to_string();
    for (scopes, path, body) in [
        (&["admin"][..], "/v1/tokens", json!({ "scopes": ["admin"] })),
        (&["admin"], "/v1/restore", json!({ "name": "run/step-1", "to": user.work().join("out") })),
        (&["read=run/*", "pins"], "/v1/pins", json!({ "name": "run/step-1" })),
        (&["read=run/*", "warm", "pins"], "/v1/warm", json!({ "name": "run/step-1", "pin": "1h" })),
        (&["save=run/*", &folder], "/v1/save", json!({ "path": tree, "name": "run/step-2" })),
    ] {
        let holder = token(&user, &agent, scopes, &[]);
        let (mut stream, rest) = half_sent(&holder, &agent, path, &body);
        let is_used = || told_json(&user, &agent, &["token", "list"])["tokens"][0]["used"].is_string();
        until("the head of the request is read", is_used);
        told(&user, &agent, &["token", "revoke", &holder.id]);
        stream.write_all(&rest).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 401 "), "{path}: {answer}");
        assert_eq!(told_json(&user, &agent, &["token", "list"])["tokens"], json!([]), "{path}");
        assert_eq!(agent.get("/v1/tasks"), json!({ "tasks": [] }), "{path}");
        assert_eq!(agent.get("/v1/pins"), json!({ "pins": [] }), "{path}");
    }
    assert_eq!(user.json(&["ls", "run"], 0)["refs"].as_array().unwrap().len(), 1);
    agent.stop();
}

/// S12: "no request of it is forwarded to another agent"
#[test]
fn what_waits_for_another_agent_is_not_sent_once_its_token_is_revoked() {
    let user = with_tree();
    user.ok(&["save", "tree", "run/step-1"]);
    identities(&user);
    let cloud = start_peer_with(&user, "c", &[], ("listen = '127.0.0.1:0'\ncallers = ['home/*']", ""));
    let address = cloud.listen.clone().unwrap();
    let own = format!("listen = '127.0.0.1:0'\n{SETTINGS}");
    let home = start_peer_with(&user, "a", std::slice::from_ref(&address), (&own, ""));
    linked(&home, "towline://cloud/c");
    let admin = token(&user, &home, &["admin"], &[]);
    // Connections to it are made, and it says nothing.
    cloud.signal(Signal::STOP);
    let before = connections(&address);
    let mut stream = connect(&home);
    let body = json!({ "name": "run/step-1" }).to_string();
    write!(
        stream,
        "POST /v1/pins HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTowline-At: cloud/c\r\n\
         Authorization: Bearer {}\r\nContent-Length: {}\r\n\r\n{body}",
        admin.secret,
        body.len()
    )
    .unwrap();
    until("the other agent is called", || connections(&address) > before);
    told(&user, &home, &["token", "revoke", &admin.id]);
    cloud.signal(Signal::CONT);
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 401 "), "{answer}");
    assert_eq!(cloud.get("/v1/pins"), json!({ "pins": [] }));
    home.stop();
    cloud.stop();
}
