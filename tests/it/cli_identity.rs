//! `towline identity` end to end: the real binary, as somebody who sets up a site would use it.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use crate::cli::User;

#[test]
fn an_authority_and_its_agents_take_one_command_each() {
    let user = User::with_repository();
    let made = user.json(&["identity", "init", "--name", "lab"], 0);
    let authority = user.work().join("../home/.config/towline/authority");
    assert_eq!(made["certificates"][0]["subject"], "CN=lab");
    assert_eq!(made["certificates"][0]["authority"], true);
    assert_eq!(fs::metadata(authority.join("ca.key")).unwrap().permissions().mode() & 0o777, 0o600);

    let issued = user.json(&["identity", "issue", "west/node-7", "--to", "node-7", "--days", "30"], 0);
    assert_eq!(issued["certificates"][0]["identity"], "towline://west/node-7");
    assert_eq!(issued["certificates"][0]["issuer"], "CN=lab");
    let mode = fs::metadata(user.work().join("node-7/tls.key")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);

    let shown = user.json(&["identity", "show", "node-7"], 0);
    assert_eq!(shown["certificates"].as_array().unwrap().len(), 2);
    assert_eq!(shown["certificates"][0], issued["certificates"][0]);
    let text = user.ok(&["identity", "show", "node-7/tls.crt"]);
    let serial = issued["certificates"][0]["serial"].as_str().unwrap();
    assert!(text.starts_with("towline://west/node-7\n  holds: 20") && text.contains(serial), "{text}");

    let before = user.read("node-7/tls.key");
    let rotated = user.json(&["identity", "rotate", "node-7"], 0);
    assert_eq!(rotated["certificates"][0]["identity"], "towline://west/node-7");
    assert_ne!(rotated["certificates"][0]["serial"], issued["certificates"][0]["serial"]);
    assert_ne!(user.read("node-7/tls.key"), before);
}

#[test]
fn nothing_is_overwritten_unasked() {
    let user = User::with_repository();
    user.ok(&["identity", "init", "--authority", "ca"]);
    let key = user.read("ca/ca.key");
    let error = user.fails(&["identity", "init", "--authority", "ca"], 5);
    assert_eq!(error["kind"], "conflict");
    assert_eq!(user.read("ca/ca.key"), key);
    user.ok(&["identity", "issue", "west/a", "--to", "a", "--authority", "ca"]);
    let key = user.read("a/tls.key");
    user.fails(&["identity", "issue", "west/a", "--to", "a", "--authority", "ca"], 5);
    assert_eq!(user.read("a/tls.key"), key);
}

#[test]
fn mistakes_are_told_with_the_way_out() {
    let user = User::with_repository();
    let error = user.fails(&["identity", "issue", "west/a", "--to", "a"], 3);
    assert!(error["help"].as_str().unwrap().starts_with("towline identity init"), "{error}");
    assert!(!user.exists("a"));
    user.ok(&["identity", "init", "--authority", "ca"]);
    for agent in ["west", "West/a", "west/", "west/a/b"] {
        user.fails(&["identity", "issue", agent, "--to", "a", "--authority", "ca"], 2);
    }
    user.fails(&["identity", "issue", "west/a", "--to", "a", "--authority", "ca", "--days", "9999"], 2);
    assert!(!user.exists("a"));
    user.fails(&["identity", "show", "nowhere"], 3);
    user.write("broken/tls.crt", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
    user.fails(&["identity", "show", "broken"], 4);
    user.fails(&["identity", "rotate", "ca", "--authority", "ca"], 3);
}

/// S10 "a key whose certificate may sign policies and nothing else"
#[test]
fn a_policy_key_takes_one_command_and_is_no_agent() {
    let user = User::with_repository();
    user.ok(&["identity", "init", "--authority", "ca"]);
    let made = user.json(&["identity", "issue-policy", "--to", "policy", "--authority", "ca"], 0);
    let certificate = &made["certificates"][0];
    assert_eq!((&certificate["policy"], &certificate["identity"]), (&true.into(), &serde_json::Value::Null));
    let mode = fs::metadata(user.work().join("policy/policy.key")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let shown = user.ok(&["identity", "show", "policy"]);
    assert!(shown.starts_with("policy key (signs policy, and is no agent)"), "{shown}");
    user.fails(&["identity", "issue-policy", "--to", "policy", "--authority", "ca"], 5);
    user.fails(&["identity", "rotate", "policy", "--authority", "ca"], 3);
}
