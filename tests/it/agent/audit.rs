//! The audit log of an agent: who was given what and who was not, published and verified; and refusal where nothing can be recorded.
//! L1 to L4 of docs/semantics.md. That every edit, cut and reorder is found is shown in src/audit/tests/tampering.rs.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::{Value, json};
use towline::audit::{Head, SignedHead};
use towline::clock::{Clock as _, SystemClock};
use towline::id::{AuditLogId, EntryHash};
use towline::transfer::identity::{Context, Credentials, hex};

use super::together::{identities, start_peer_with};
use super::{Running, told_json, with_tree};
use crate::cli::User;
use crate::semantics::Tmpfs;

/// An agent `home/a` that lets agents at home read run/*, records in audit-a and has all of run/step-1.
fn recording(user: &User) -> Running {
    for name in ["run/step-1", "secret/step-1"] {
        user.ok(&["save", "tree", name]);
        user.write("tree/a.txt", b"hello, others");
    }
    identities(user);
    let sections = "[audit]\ndir = 'audit-a'\n[[allow]]\nagents = 'home/*'\nnames = 'run/*'";
    let agent = start_peer_with(user, "a", &[], ("listen = '127.0.0.1:0'", sections));
    told_json(user, &agent, &["warm", "run/step-1", "secret/step-1", "--wait"]);
    agent
}

fn entries(user: &User, more: &[&str]) -> Vec<Value> {
    let shown = user.ok(&[&["audit", "show", "--dir", "audit-a", "--json"], more].concat());
    shown.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn verified(user: &User, code: i32) -> Value {
    user.json(&["audit", "verify", "--dir", "audit-a", "--agent", "home/a"], code)
}

/// L1 "one entry, written before the request is carried out"; L3 "and at shutdown"
#[test]
fn who_was_given_what_and_who_was_not_is_recorded_and_published() {
    let user = with_tree();
    let first = recording(&user);
    let second = start_peer_with(&user, "b", &[first.listen.clone().unwrap()], ("", ""));
    for (name, missing) in [("run/step-1", false), ("secret/step-1", true)] {
        second.post("/v1/cache/evict", &json!({ "bytes": 1_u64 << 30 }), 200);
        let begun = second.post("/v1/warm", &json!({ "name": name, "from": "home" }), 202);
        let (_, end) = second.events(&begun).pop().unwrap();
        assert_eq!(end["report"]["missing"].as_u64() > Some(0), missing, "{end}");
    }
    assert_eq!(first.ask("GET", "/v1/files/run%2Fstep-1/a.txt", "", "").body, b"hello, world");
    second.stop();
    first.stop();

    let all = entries(&user, &[]);
    let of = |action: &str, verdict: &str| -> Vec<&Value> {
        all.iter().filter(|entry| entry["action"] == action && entry["verdict"] == verdict).collect()
    };
    let end = |entry: &Value| all.iter().find(|end| end["of"] == entry["seq"] && end["kind"] == "end").unwrap();
    let served = of("serve", "allow");
    assert!(served.len() == 1 && served[0]["actor"] == "towline://home/b", "{served:?}");
    assert_eq!((&served[0]["name"], &served[0]["to"]), (&json!("run/step-1"), &json!("home")));
    assert_eq!(served[0]["rule"], "[[allow]] 1");
    assert!(end(served[0])["bytes"].as_u64() > Some(20 << 20), "{}", end(served[0]));
    let denied = of("serve", "deny");
    assert!(denied.len() == 1 && denied[0]["name"] == "secret/step-1", "{denied:?}");
    assert_eq!(entries(&user, &["--denied"]), [denied[0].clone()]);
    assert_eq!(end(denied[0])["bytes"], 0);
    let read = of("read", "allow");
    assert_eq!((read.len(), &end(read[0])["bytes"]), (1, &json!(12)));
    assert_eq!(of("warm", "allow").len(), 2);
    assert_eq!(entries(&user, &["--name", "secret/*"]).len(), 2);

    let sound = verified(&user, 0);
    assert_eq!((&sound["sound"], &sound["published"]), (&json!(true), &json!(all.len())));
    assert_eq!((&sound["origin"], &sound["local_only"]), (&json!("towline://home/a"), &Value::Null));
    assert_eq!(user.ok(&["audit", "export", "--dir", "audit-a"]).lines().count(), all.len());
    let offline = user.json(&["audit", "verify", "--dir", "audit-a", "--offline"], 0);
    assert_eq!(offline["local_only"], json!([1, all.len()]));
    let other = user.json(&["audit", "verify", "--dir", "audit-a", "--agent", "home/b"], 4);
    assert!(other["faults"].to_string().contains("log says that it is of towline://home/a"), "{other}");
}

fn segment(user: &User) -> PathBuf {
    user.work().join("audit-a/00000000000000000001.jsonl")
}

/// L2 "names the first bad entry and ends with exit 4"; L4 "and an entry records that"
#[test]
fn a_log_that_was_changed_is_found_also_across_a_restart() {
    let user = with_tree();
    recording(&user).stop();
    let whole = fs::read(segment(&user)).unwrap();
    verified(&user, 0);

    let mut edited = whole.clone();
    let at = whole.windows(10).position(|window| window == b"run/step-1").unwrap();
    edited[at] = b'R';
    fs::write(segment(&user), &edited).unwrap();
    let found = verified(&user, 4);
    let fault = &found["faults"][0];
    assert_eq!((&fault["line"], &found["sound"]), (&fault["entry"], &json!(false)));
    assert!(fault["what"].as_str().unwrap().contains("is changed"), "{fault}");
    let text = user.run(&["audit", "verify", "--dir", "audit-a"]);
    assert!(String::from_utf8_lossy(&text.out).contains("FAULT: entry "), "{text:?}");

    // The whole end of it gone, as if it had never been.
    let lines: Vec<&[u8]> = whole.split_inclusive(|byte| *byte == b'\n').collect();
    fs::write(segment(&user), lines[..2].concat()).unwrap();
    let found = verified(&user, 4);
    assert!(found["faults"][0]["what"].as_str().unwrap().contains("it was cut"), "{found}");
    // An agent that goes on from there hides nothing.
    Running::from_file(&user, "a.toml").stop();
    assert_eq!(verified(&user, 4)["sound"], false);

    // The whole log, with an incomplete entry at its end, as after a power loss.
    let torn = [whole.as_slice(), b"{\"seq\":99,"].concat();
    fs::write(segment(&user), &torn).unwrap();
    Running::from_file(&user, "a.toml").stop();
    assert!(entries(&user, &[]).iter().any(|entry| entry["kind"] == "torn" && entry["bytes"] == 10));
    let aside = segment(&user).with_extension(format!("torn-{}", whole.len()));
    assert_eq!(fs::read(aside).unwrap(), b"{\"seq\":99,");

    // All of it gone: another one in its place is not it.
    fs::remove_dir_all(user.work().join("audit-a")).unwrap();
    Running::from_file(&user, "a.toml").stop();
    let found = verified(&user, 4);
    assert!(found["faults"].to_string().contains("is missing: its entry "), "{found}");
}

/// L3 "signed": what others put there is found. S11 "`verify` reports an overwritten head"
#[test]
fn heads_of_others_are_not_trusted() {
    let user = with_tree();
    recording(&user).stop();
    let heads = user.repository().join("audit/home/a");
    let head = fs::read_dir(&heads).unwrap().next().unwrap().unwrap().path();
    let other = user.repository().join("audit/home/b");
    fs::create_dir_all(&other).unwrap();
    fs::copy(&head, other.join(head.file_name().unwrap())).unwrap();
    let found = user.json(&["audit", "verify", "--dir", "audit-a", "--agent", "home/b"], 4);
    assert!(found["faults"].to_string().contains("signed by another agent"), "{found}");
    let mut bytes = fs::read(&head).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::remove_file(&head).unwrap();
    fs::write(&head, bytes).unwrap();
    let found = verified(&user, 4);
    assert!(found["faults"].to_string().contains("a published head is not to be trusted"), "{found}");
    user.ok(&["identity", "init", "--authority", "stranger"]);
    user.json(&["audit", "verify", "--dir", "audit-a", "--trusted", "stranger"], 4);
}

fn command(user: &User, agent: &Running, args: &[&str]) {
    let mut command = user.command(args);
    let output = command.env("TOWLINE_AGENT", &agent.socket).env("TOWLINE_AUDIT", "log").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// L3 "So is that of the log of commands and of Python: when a command ends"
#[test]
fn the_log_of_commands_is_published_by_the_agent() {
    let user = with_tree();
    let agent = recording(&user);
    command(&user, &agent, &["cp", "run/step-1", "run/copy"]);
    command(&user, &agent, &["rm", "run/copy"]);
    let origin = user.json(&["audit", "verify", "--dir", "log", "--offline"], 0)["origin"].clone();
    let name = origin.as_str().unwrap().strip_prefix("cli:").unwrap();
    let verify = ["audit", "verify", "--dir", "log", "--agent", "home/a", "--user", name];
    let sound = user.json(&verify, 0);
    assert_eq!((&sound["published"], &sound["heads"]), (&sound["last"], &json!(2)));
    assert_eq!(verified(&user, 0)["origin"], "towline://home/a", "the agent's own is another");
    let log = user.work().join("log/00000000000000000001.jsonl");
    let whole = fs::read(&log).unwrap();
    let lines: Vec<&[u8]> = whole.split_inclusive(|byte| *byte == b'\n').collect();
    fs::write(&log, lines[..lines.len() - 1].concat()).unwrap();
    let found = user.json(&verify, 4);
    assert!(found["faults"][0]["what"].as_str().unwrap().contains("it was cut"), "{found}");
    // Nobody has the agent sign heads of its own log.
    let forged = json!({ "log": sound["log"], "origin": "towline://home/a", "seq": 9, "hash": "0".repeat(64) });
    assert_eq!(agent.ask("POST", "/v1/audit/heads", "", &forged.to_string()).refuses(400), "usage");
    agent.stop();
}

/// L3 "If the agent may not write there, another agent that lists it in `callers` puts it"
#[test]
fn heads_of_agents_without_credentials_are_published_by_others() {
    let user = with_tree();
    user.ok(&["save", "tree", "run/step-1"]);
    identities(&user);
    let first = start_peer_with(&user, "a", &[], ("listen = '127.0.0.1:0'\ncallers = 'home/b'", ""));
    let second = start_peer_with(&user, "b", &[first.listen.clone().unwrap()], ("", ""));
    let signed = |signer: &str, origin: &str| {
        let credentials = Credentials::open(&user.work().join(signer), Arc::new(SystemClock)).unwrap();
        let (log, hash) = (AuditLogId::random(), EntryHash::of(b"entry"));
        let head = Head { log, origin: origin.to_owned(), seq: 7, hash, time: SystemClock.now() };
        let signature = credentials.sign(Context::AuditHead, &head.encode()).unwrap().encode().unwrap();
        json!({ "signed": hex(&SignedHead { head, signature }.encode()) })
    };
    let put = |body: &Value| second.ask("PUT", "/v1/audit/heads", "towline-at: home/a\r\n", &body.to_string());
    assert_eq!(put(&signed("b", "towline://home/b")).json(201)["seq"], 7);
    let kept = || fs::read_dir(user.repository().join("audit/home/b")).unwrap().count();
    assert_eq!(kept(), 1);
    for (signer, origin) in [("b", "towline://home/a"), ("c", "towline://home/b"), ("c", "towline://cloud/c")] {
        assert_eq!(put(&signed(signer, origin)).refuses(403), "denied", "{origin} by {signer}");
    }
    let malformed = json!({ "signed": "00" });
    put(&malformed).refuses(500);
    assert_eq!((kept(), user.repository().join("audit/home/a").exists()), (1, false));
    assert_eq!(first.ask("PUT", "/v1/audit/heads", "", &malformed.to_string()).refuses(403), "denied");
    second.stop();
    first.stop();
}

/// L1 "A request whose entry cannot be written is refused; if the disk is full, the error says so"
#[test]
fn a_full_disk_under_the_log_refuses_what_must_be_recorded() {
    let user = with_tree();
    let Some(_disk) = Tmpfs::mount(&user.work().join("small"), "128k") else { return };
    user.ok(&["save", "tree", "run/step-1"]);
    let agent = Running::start(&user, "[audit]\ndir = 'small/audit'\n");
    let read = || agent.ask("GET", "/v1/files/run%2Fstep-1/a.txt", "", "");
    assert_eq!(read().status, 200);
    let ballast = user.work().join("small/ballast");
    fs::write(&ballast, vec![1; 1 << 20]).unwrap_err();
    // Repeats of what is recorded go on; what needs an entry does not.
    let restore = json!({ "name": "run/step-1", "to": user.work().join("out") });
    let refused = |status| agent.post("/v1/restore", &restore, status);
    let mut answer = Value::Null;
    for _ in 0..100 {
        // The page that is begun has room for some entries.
        answer = agent.ask("POST", "/v1/restore", "", &restore.to_string()).json_of_any();
        if answer["error"].is_object() {
            break;
        }
    }
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.starts_with("disk full: cannot write the audit log"), "{answer}");
    assert_eq!(answer["error"]["kind"], "exhausted");
    let health = agent.get("/health")["problems"].to_string();
    assert!(health.contains("disk full: cannot write the audit log"), "{health}");
    fs::remove_file(&ballast).unwrap();
    refused(202);
    agent.stop();
    user.json(&["audit", "verify", "--dir", "small/audit", "--offline"], 0);
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let user = with_tree();
    user.write("agent.toml", b"repository = '../repo'\nsocket = 'a.sock'\n[audit]\ndir = 'audit'\npublish = true\n");
    let error = user.fails(&["agent", "--config", "agent.toml"], 2);
    assert!(error["message"].as_str().unwrap().contains("no identity"), "{error}");
}
