//! The command line's own audit log. L1 of docs/semantics.md.

use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::cli::User;

fn recorded(user: &User, args: &[&str]) -> std::process::Output {
    user.command(args).env("TOWLINE_AUDIT", "log").output().unwrap()
}

#[test]
fn commands_that_touch_names_are_recorded() {
    let user = User::with_tree();
    let second = user.work().join("../second");
    user.write("taken/a.txt", b"something else");
    for (args, ends) in [
        (&["restore", "run/1", "out"][..], true),
        (&["restore", "run/1", "taken"], false),
        (&["restore", "run/1", "other", "--dry-run"], true),
        (&["save", "tree", "run/2"], true),
        (&["cp", "run/2", "run/3"], true),
        (&["settle", "run/3"], true),
        (&["sync", "../repo", "../second", "run/1", "--init"], true),
        (&["rm", "run/2", "run/3"], true),
        (&["cat", "run/1:a.txt", "--range", "0-4"], true),
        (&["label", "run", "sensitivity=internal"], false),
        (&["save", "tree", "kept/step-1"], true),
        (&["save", "tree", "kept/step-2"], true),
        (&["expire", "kept", "--keep-last", "1", "--dry-run"], true),
        (&["expire", "kept", "--keep-last", "1"], true),
        (&["watch", "ckpt", "watched", "--once", "--restore-latest"], true),
        (&["label", "run"], true),
        (&["ls"], true),
    ] {
        let output = recorded(&user, args);
        assert_eq!(output.status.success(), ends, "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    assert!(second.exists());
    let shown = recorded(&user, &["audit", "show", "--json"]);
    let shown: Vec<Value> =
        String::from_utf8(shown.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let decisions: Vec<(&str, &str)> = shown
        .iter()
        .filter(|entry| entry["kind"] == "decision")
        .map(|entry| (entry["action"].as_str().unwrap(), entry["name"].as_str().unwrap()))
        .collect();
    let expected = [
        ("restore", "run/1"),
        ("restore", "run/1"),
        ("save", "run/2"),
        ("copy", "run/2"),
        ("copy", "run/3"),
        ("copy", "run/3"),
        ("sync", "run/1"),
        ("remove", "run/2"),
        ("remove", "run/3"),
        ("read", "run/1"),
        ("label", "run"),
        ("save", "kept/step-1"),
        ("save", "kept/step-2"),
        ("remove", "kept/step-1"),
        ("restore", "watched"),
        ("save", "watched"),
    ];
    assert_eq!(decisions, expected);
    let ends: Vec<&Value> = shown.iter().filter(|entry| entry["kind"] == "end").collect();
    assert_eq!(ends.len(), decisions.len());
    assert_eq!((&ends[0]["of"], &ends[0]["bytes"], &ends[0]["outcome"]), (&2.into(), &300_012.into(), &"done".into()));
    assert!(ends[1]["outcome"].as_str().unwrap().starts_with("conflict: "), "{}", ends[1]);
    let verified = recorded(&user, &["audit", "verify", "--json"]);
    let verified: Value = serde_json::from_slice(&verified.stdout).unwrap();
    assert_eq!((&verified["sound"], &verified["last"]), (&true.into(), &shown.len().into()));
    assert!(verified["origin"].as_str().unwrap().starts_with("cli:"));
}

#[test]
fn commands_at_the_same_time_share_a_log() {
    let user = User::with_tree();
    let all: Vec<_> = (0..6)
        .map(|n| user.command(&["cp", "run/1", &format!("copy/{n}")]).env("TOWLINE_AUDIT", "log").spawn().unwrap())
        .collect();
    for mut one in all {
        assert!(one.wait().unwrap().success());
    }
    let verified = user.json(&["audit", "verify", "--dir", "log", "--offline"], 0);
    assert_eq!((&verified["sound"], &verified["last"]), (&true.into(), &25.into()));
}

/// L3 "without an agent, this machine's certificate signs it"
#[test]
fn without_an_agent_the_certificate_of_the_machine_signs_the_head() {
    let user = User::with_tree();
    user.ok(&["identity", "init"]);
    let folder = user.work().join("../home/.config/towline/identity");
    user.ok(&["identity", "issue", "home/a", "--to", folder.to_str().unwrap()]);
    for args in [&["cp", "run/1", "run/2"][..], &["rm", "run/2"]] {
        assert!(recorded(&user, args).status.success());
    }
    let origin = user.json(&["audit", "verify", "--dir", "log", "--offline"], 0)["origin"].clone();
    let name = origin.as_str().unwrap().strip_prefix("cli:").unwrap();
    let verify = ["audit", "verify", "--dir", "log", "--agent", "home/a", "--user", name];
    let sound = user.json(&verify, 0);
    assert_eq!((&sound["published"], &sound["heads"]), (&sound["last"], &2.into()), "{sound}");
}

/// L1 "a request whose entry cannot be written is refused"
#[test]
fn a_command_that_cannot_be_recorded_does_nothing() {
    let user = User::with_tree();
    fs::write(user.work().join("log"), "a file in its place").unwrap();
    let output = recorded(&user, &["restore", "run/1", "out"]);
    assert!(!output.status.success() && !user.exists("out"));
    assert!(!recorded(&user, &["rm", "run/1"]).status.success());
    assert!(user.ok(&["ls"]).contains("run/1"));

    // No file may grow: the disk is full, as far as this command is concerned.
    fs::remove_file(user.work().join("log")).unwrap();
    let limited = format!("ulimit -f 0; exec {} --json rm run/1", env!("CARGO_BIN_EXE_towline"));
    let mut command = Command::new("sh");
    command.args(["-c", &limited]).env_clear().current_dir(user.work()).env("HOME", user.work().join("../home"));
    let output = command.env("TOWLINE_AUDIT", "log").env("TOWLINE_AGENT", "none").output().unwrap();
    let error: Value = serde_json::from_slice(&output.stderr).unwrap();
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.starts_with("file too large: cannot write the audit log"), "{error}");
    assert!(error["error"]["help"].as_str().unwrap().contains("ulimit -f"), "{error}");
    assert!(user.ok(&["ls"]).contains("run/1"));
}
