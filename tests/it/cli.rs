//! The `towline` command end to end: the real binary on directory repositories.

use std::ffi::OsStr;
use std::fs;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use crate::ports::ClosedPort;

const VERBS: [&str; 39] = [
    "init",
    "save",
    "watch",
    "restore",
    "ls",
    "runs",
    "expire",
    "show",
    "tensors",
    "diff",
    "cat",
    "rm",
    "undelete",
    "history",
    "cp",
    "settle",
    "sync",
    "verify",
    "collect",
    "doctor",
    "identity",
    "agent",
    "warm",
    "stage",
    "pin",
    "unpin",
    "pins",
    "cache",
    "handoff",
    "audit",
    "token",
    "page",
    "top",
    "config",
    "sites",
    "links",
    "completions",
    "hint",
    "usage",
];

/// A user of a fresh machine: a home folder, a working folder, nothing else.
pub(crate) struct User(TempDir);

/// What came of one command.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) out: Vec<u8>,
    pub(crate) err: String,
}

impl User {
    pub(crate) fn new() -> Self {
        let user = Self(tempfile::tempdir().unwrap());
        for folder in ["home", "work"] {
            fs::create_dir(user.0.path().join(folder)).unwrap();
        }
        user
    }

    /// With a repository, named by the user's own `towline.toml`.
    pub(crate) fn with_repository() -> Self {
        let user = Self::new();
        user.set_up("128M");
        user.ok(&["init"]);
        user
    }

    /// Writes the user's own `towline.toml`.
    pub(crate) fn set_up(&self, memory: &str) {
        let folder = self.0.path().join("home/.config/towline");
        fs::create_dir_all(&folder).unwrap();
        let settings = format!("repository = '{}'\nmemory = '{memory}'\n", self.repository().display());
        fs::write(folder.join("towline.toml"), settings).unwrap();
    }

    /// As before; a tree of two files and a link is saved as run/1.
    pub(crate) fn with_tree() -> Self {
        let user = Self::with_repository();
        user.write("tree/a.txt", b"hello, world");
        user.write("tree/sub/b.bin", &noise(300_000));
        std::os::unix::fs::symlink("a.txt", user.work().join("tree/link")).unwrap();
        user.ok(&["save", "tree", "run/1"]);
        user
    }

    pub(crate) fn work(&self) -> PathBuf {
        self.0.path().join("work")
    }

    pub(crate) fn repository(&self) -> PathBuf {
        self.0.path().join("repo")
    }

    pub(crate) fn write(&self, path: &str, bytes: &[u8]) {
        let path = self.work().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    pub(crate) fn read(&self, path: &str) -> Vec<u8> {
        fs::read(self.work().join(path)).unwrap()
    }

    pub(crate) fn exists(&self, path: &str) -> bool {
        self.work().join(path).exists()
    }

    pub(crate) fn command<S: AsRef<OsStr>>(&self, args: &[S]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
        command.env_clear().current_dir(self.work()).env("HOME", self.0.path().join("home")).args(args);
        // One that happens to run on this machine is none of a test's business.
        command.env("TOWLINE_AGENT", "none");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    pub(crate) fn run<S: AsRef<OsStr>>(&self, args: &[S]) -> Ran {
        ran(&mut self.command(args))
    }

    pub(crate) fn ok(&self, args: &[&str]) -> String {
        let ran = self.run(args);
        assert_eq!(ran.code, Some(0), "{args:?}: {}", ran.err);
        String::from_utf8(ran.out).unwrap()
    }

    /// The one JSON object that the command prints, whatever its exit code is.
    pub(crate) fn json(&self, args: &[&str], code: i32) -> Value {
        let ran = self.run(&[args, &["--json"]].concat());
        assert_eq!(ran.code, Some(code), "{args:?}: {}", ran.err);
        serde_json::from_slice(&ran.out).unwrap_or_else(|error| panic!("{args:?}: {error}"))
    }

    /// The kind, and the whole, of the error that the command ends with.
    pub(crate) fn fails(&self, args: &[&str], code: i32) -> Value {
        let ran = self.run(&[args, &["--json"]].concat());
        assert_eq!(ran.code, Some(code), "{args:?}: {}", ran.err);
        assert!(ran.out.is_empty(), "{args:?} printed something");
        let error: Value = serde_json::from_str(&ran.err).unwrap_or_else(|_| panic!("{args:?}: {}", ran.err));
        error["error"].clone()
    }
}

pub(crate) fn ran(command: &mut Command) -> Ran {
    let output = command.output().unwrap();
    Ran { code: output.status.code(), out: output.stdout, err: String::from_utf8(output.stderr).unwrap() }
}

/// Bytes that do not compress.
pub(crate) fn noise(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    blake3::Hasher::new().update(&len.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

/// Checks that `value` is an object with exactly the members `keys`.
pub(crate) fn has_members(value: &Value, keys: &str) {
    let mut expected: Vec<&str> = keys.split(' ').collect();
    expected.sort_unstable();
    let mut found: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
    found.sort_unstable();
    assert_eq!(found, expected);
}

#[test]
fn a_tree_goes_in_and_comes_out() {
    let user = User::with_tree();
    assert!(user.ok(&["ls"]).contains("run/1"));
    assert!(user.ok(&["ls", "run", "--long"]).contains("MANIFEST"));
    let shown = user.ok(&["show", "run/1", "--files"]);
    assert!(shown.contains("sub/b.bin") && shown.contains("link -> a.txt") && shown.contains("293.0 KiB"), "{shown}");

    assert!(user.ok(&["restore", "run/1", "out"]).starts_with("restored run/1"));
    assert_eq!(user.read("out/sub/b.bin"), noise(300_000));
    assert_eq!(fs::read_link(user.work().join("out/link")).unwrap(), Path::new("a.txt"));
    user.ok(&["restore", "run/1:sub/b.bin", "one.bin"]);
    assert_eq!(user.read("one.bin"), noise(300_000));
    user.ok(&["restore", "run/1:a.txt", "into/"]);
    assert_eq!(user.read("into/a.txt"), b"hello, world");

    user.write("tree/a.txt", b"hello, moon");
    user.ok(&["save", "tree", "run/2", "--base", "run/1", "--label", "mood=good"]);
    assert!(user.ok(&["show", "run/2"]).contains("mood=good"));
    let changes = user.ok(&["diff", "run/1", "run/2"]);
    assert!(changes.lines().any(|line| line.starts_with('~') && line.ends_with("a.txt")), "{changes}");
    assert!(!changes.contains("b.bin"));

    user.ok(&["cp", "run/2", "best"]);
    user.ok(&["rm", "run/2"]);
    assert_eq!(user.ok(&["cat", "best:a.txt"]), "hello, moon");
    assert_eq!(user.ok(&["ls", "-q"]).lines().count(), 3);
}

#[test]
fn cat_writes_the_bytes_asked_for() {
    let user = User::with_tree();
    for (range, bytes) in [
        ("0-0", "h"),
        ("7-11", "world"),
        ("7-", "world"),
        ("-5", "world"),
        ("-50", "hello, world"),
        ("4-999", "o, world"),
    ] {
        assert_eq!(user.ok(&["cat", "run/1:a.txt", "--range", range]), bytes, "{range}");
    }
    assert_eq!(user.run(&["cat", "run/1:sub/b.bin"]).out, noise(300_000));
    assert_eq!(user.run(&["cat", "run/1:sub/b.bin", "--json"]).out, noise(300_000));
    assert_eq!(user.fails(&["cat", "run/1:none"], 3)["kind"], "not-found");
    assert_eq!(user.fails(&["cat", "run/1:none", "--range", "-1"], 3)["kind"], "not-found");
    assert_eq!(user.fails(&["cat", "run/1:sub"], 2)["kind"], "usage");

    let odd = OsStr::from_bytes(b"tree/\xff\xfe");
    fs::write(user.work().join(odd), "odd").unwrap();
    user.ok(&["save", "tree", "run/odd"]);
    let ran = user.run(&[OsStr::new("cat"), OsStr::from_bytes(b"run/odd:\xff\xfe")]);
    assert_eq!((ran.code, &*ran.out), (Some(0), &b"odd"[..]));

    user.ok(&["save", "tree/a.txt", "one"]);
    assert_eq!(user.ok(&["cat", "one:a.txt"]), "hello, world");
    // A tree of one file needs no path.
    assert_eq!(user.ok(&["cat", "one", "--range", "-5"]), "world");
    let error = user.fails(&["cat", "run/1"], 2);
    assert!(error["message"].as_str().unwrap().starts_with("tree has several files"), "{error}");
    assert_eq!(error["help"], "`towline show run/1 --files` lists its files");
}

#[test]
fn json_has_the_members_that_the_help_promises() {
    let user = User::with_tree();
    let saved = user.json(&["save", "tree", "run/2"], 0);
    has_members(
        &saved,
        "name manifest logical_bytes new_bytes stored_bytes chunks new_chunks files seconds skipped warnings",
    );
    assert_eq!((&saved["name"], &saved["new_chunks"], &saved["files"]), (&"run/2".into(), &0.into(), &2.into()));
    let restored = user.json(&["restore", "run/1", "out"], 0);
    has_members(&restored, "name bytes fetched_bytes sources reused_bytes files seconds");
    assert_eq!(restored["bytes"], 300_012);

    let listed = user.json(&["ls"], 0);
    has_members(&listed, "refs");
    has_members(&listed["refs"][0], "name manifest bytes files chunks saved metrics world_size framework");
    has_members(
        &user.json(&["show", "run/1"], 0),
        "name manifest saved bytes stored_bytes base_bytes behind files chunks metrics world_size framework labels entries",
    );
    user.write("tree/c", b"c");
    user.ok(&["save", "tree", "run/2"]);
    let changes = user.json(&["diff", "run/1", "run/2"], 0);
    has_members(&changes, "a b changes");
    let added = changes["changes"].as_array().unwrap().iter().find(|change| change["path"] == "c").unwrap();
    has_members(added, "path change bytes_before bytes_after new_bytes");
    assert_eq!((&added["change"], &added["new_bytes"]), (&"added".into(), &1.into()));

    assert_eq!(user.json(&["cp", "run/2", "best"], 0), serde_json::json!({ "name": "best", "from": "run/2" }));
    assert_eq!(user.json(&["rm", "run/2"], 0), serde_json::json!({ "removed": ["run/2"], "kept": 1, "forgotten": 0 }));
    let made = user.json(&["init", "../other"], 0);
    has_members(&made, "repository id created bucket_created");
    assert_eq!(made["created"], true);
    has_members(
        &user.json(&["sync", "../repo", "../other"], 0),
        "names moved_bytes skipped_bytes chunks new_chunks seconds",
    );
    has_members(&user.json(&["verify", "--data"], 0), "packs chunks bytes damaged repaired left lost seconds");
    let keys = "condemned_packs purged_packs deleted_objects repacked_packs merged_segments fenced_sessions freed_bytes forgotten_values kept_values \
                kept_bytes live_bytes unused_bytes waiting_objects waiting_bytes held_packs held_bytes held unfinished_objects unfinished_bytes steps \
                seconds";
    has_members(&user.json(&["collect", "--dry-run"], 0), keys);
    has_members(&user.json(&["collect", "--grace", "0"], 0), keys);
    let checks = user.json(&["doctor"], 0);
    has_members(&checks, "checks");
    has_members(&checks["checks"][0], "what outcome detail help");
}

#[test]
fn init_says_whether_it_made_something() {
    let user = User::new();
    assert!(user.ok(&["init", "r"]).starts_with("made the repository"));
    assert!(user.ok(&["init", "r"]).contains("there already"));
    assert!(user.ok(&["init", "r", "-q"]).is_empty());
    assert_eq!(user.json(&["init", "--repo", "r"], 0)["created"], false);
}

#[test]
fn sync_moves_what_is_lacking() {
    let user = User::with_tree();
    user.ok(&["cp", "run/1", "other"]);
    let error = user.fails(&["sync", "../repo", "../there"], 3);
    let help = error["help"].as_str().unwrap();
    assert!(help.contains("--init") && help.contains("towline init "), "{error}");
    user.ok(&["init", "../there"]);
    assert_eq!(user.json(&["sync", "../repo", "../there", "run"], 0)["names"], 1);
    let again = user.json(&["sync", "../repo", "../there"], 0);
    assert_eq!((&again["names"], &again["moved_bytes"]), (&2.into(), &0.into()));
    assert_eq!(user.ok(&["cat", "run/1:a.txt", "--repo", "../there"]), "hello, world");
}

#[test]
fn exit_codes_tell_what_kind_of_trouble() {
    let user = User::with_tree();
    for line in
        ["save tree a//b", "frobnicate", "cat run/1:a.txt --range 5-1", "ls --repo gs://bucket", "ls --memory 1M"]
    {
        let args: Vec<&str> = line.split(' ').collect();
        assert_eq!(user.fails(&args, 2)["kind"], "usage", "{line}");
    }
    for line in ["show none", "restore none out", "rm none", "cp none new", "save none new", "restore run/1:none out"] {
        let args: Vec<&str> = line.split(' ').collect();
        assert_eq!(user.fails(&args, 3)["kind"], "not-found", "{line}");
    }
    let nowhere = user.work().join("nowhere");
    let error = user.fails(&["ls", "--repo", "nowhere"], 3);
    assert!(error["help"].as_str().unwrap().contains(&format!("`towline init {}`", nowhere.display())), "{error}");
    assert!(!nowhere.exists(), "looking for a repository made one");
    fs::create_dir(&nowhere).unwrap();
    assert_eq!(user.fails(&["ls", "--repo", "nowhere"], 3)["place"], nowhere.to_str().unwrap());

    user.write("out/a.txt", b"mine");
    assert_eq!(user.fails(&["restore", "run/1", "out"], 5)["kind"], "conflict");
    assert_eq!(user.read("out/a.txt"), b"mine");
    assert!(!user.work().join("out/link").exists(), "something was written before the conflict was found");
    user.ok(&["restore", "run/1", "out", "--overwrite"]);
    assert_eq!(user.read("out/a.txt"), b"hello, world");
    user.write("out/extra", b"x");
    user.ok(&["restore", "run/1", "out", "--delete"]);
    assert!(!user.work().join("out/extra").exists());
}

/// F8: "exit 4, with the object, what was expected and what was there. [...] `verify --data` in every byte, and both
/// name the refs that are affected."
#[test]
fn damage_is_exit_code_4_with_the_report() {
    let user = User::with_tree();
    let flipped = flip_a_byte(&user.repository().join("pack"));
    let report = user.json(&["verify", "--data"], 4);
    has_members(&report["damaged"][0], "what error names more_names tensors");
    assert_eq!(report["damaged"][0]["names"], serde_json::json!(["run/1"]));
    let ran = user.run(&["verify", "--data", "-q"]);
    assert_eq!(ran.code, Some(4));
    assert!(String::from_utf8(ran.out).unwrap().contains("hits run/1"));
    assert_eq!(user.fails(&["restore", "run/1", "out"], 4)["kind"], "damaged", "{}", flipped.display());
}

/// Flips a bit early in the largest file below `folder`.
fn flip_a_byte(folder: &Path) -> PathBuf {
    let (mut folders, mut largest) = (vec![folder.to_path_buf()], (0, PathBuf::new()));
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
            match entry.metadata().unwrap() {
                found if found.is_dir() => folders.push(entry.path()),
                found => largest = largest.max((found.len(), entry.path())),
            }
        }
    }
    let path = largest.1;
    let mut bytes = fs::read(&path).unwrap();
    let at = bytes.len() / 4;
    bytes[at] ^= 4;
    fs::write(&path, bytes).unwrap();
    path
}

/// P5: "plain http to another machine is refused unless `--allow-http` [...] allows it."
#[test]
fn a_closed_port_is_exit_code_6_and_a_refusal_7() {
    let user = User::new();
    let port = ClosedPort::new();
    let endpoint = format!("http://{}", port.address());
    let mut command = user.command(&["ls", "--repo", "s3://bucket/x", "--endpoint", &endpoint, "--json"]);
    let closed = ran(command.env("AWS_ACCESS_KEY_ID", "k").env("AWS_SECRET_ACCESS_KEY", "s"));
    assert_eq!(closed.code, Some(6), "{}", closed.err);
    assert_eq!(serde_json::from_str::<Value>(&closed.err).unwrap()["error"]["kind"], "unreachable");

    // Both are refused before anything is sent: names in clear over a network, and nobody to be there.
    let clear = user.fails(&["ls", "--repo", "s3://bucket/x", "--endpoint", "http://192.0.2.1"], 7);
    assert_eq!(clear["kind"], "denied");
    let command = &mut user.command(&["ls", "--repo", "s3://bucket/x", "--endpoint", &endpoint, "--json"]);
    let nobody = ran(command.env("AWS_EC2_METADATA_DISABLED", "true"));
    assert_eq!(nobody.code, Some(7), "{}", nobody.err);
}

#[test]
fn errors_for_people_have_cause_and_cure() {
    let user = User::new();
    let ran = user.run(&["ls", "--repo", "nowhere"]);
    assert!(ran.out.is_empty());
    assert!(ran.err.starts_with("error: there is no repository at "), "{}", ran.err);
    assert!(ran.err.contains("\n  cause: ") && ran.err.contains("`towline init "), "{}", ran.err);
    assert!(!ran.err.contains('\x1b'), "colours in a pipe");
    let usage = user.fails(&["save", "only-a-path"], 2);
    has_members(&usage, "kind message place help causes");
}

#[test]
fn the_embedded_repository_is_made_on_first_use() {
    let user = User::new();
    user.write("f", b"x");
    let first = user.run(&["save", "f", "a"]);
    assert_eq!(first.code, Some(0), "{}", first.err);
    assert!(first.err.starts_with("made the repository "), "{}", first.err);
    assert!(user.0.path().join("home/.local/share/towline/repository").is_dir());
    assert!(user.run(&["ls"]).err.is_empty());

    // Whoever only looks makes nothing.
    let elsewhere = user.0.path().join("data");
    for (args, code) in [(&["ls"][..], 0), (&["runs"], 0), (&["ls", "run"], 3), (&["show", "a"], 3), (&["collect"], 3)]
    {
        let looked = ran(user.command(args).env("XDG_DATA_HOME", &elsewhere));
        assert_eq!((looked.code, looked.out.len()), (Some(code), 0), "{args:?}: {}", looked.err);
        assert!(!elsewhere.exists(), "{args:?} made something");
    }
}

/// P8: "A settings file decides where data goes only with the user's consent."
#[test]
fn the_repository_is_found_by_flag_variable_and_file() {
    let user = User::with_tree();
    fs::create_dir_all(user.work().join("deep/down")).unwrap();
    let below = ran(user.command(&["ls"]).current_dir(user.work().join("deep/down")));
    assert!(String::from_utf8(below.out).unwrap().contains("run/1"), "{}", below.err);
    user.ok(&["init", "../empty"]);
    let by_variable = ran(user.command(&["ls"]).env("TOWLINE_REPO", "../empty"));
    assert_eq!((by_variable.code, by_variable.out.len()), (Some(0), 0));
    let by_flag = ran(user.command(&["ls", "--repo", "../repo"]).env("TOWLINE_REPO", "../empty"));
    assert!(String::from_utf8(by_flag.out).unwrap().contains("run/1"));

    user.write("towline.toml", b"repository = '../empty'\nallow_http = false");
    let error = user.fails(&["ls"], 2).to_string();
    assert!(error.contains("not trusted") && error.contains("../empty"), "{error}");
    // It keeps no command from working that would not use it.
    user.ok(&["sync", "../repo", "../empty"]);
    user.ok(&["doctor", "../empty"]);
    assert!(user.ok(&["ls", "--repo", "../repo"]).contains("run/1"));
    user.ok(&["rm", "run/1", "--repo", "../empty"]);
    let told = user.json(&["config", "trust", "."], 0);
    assert_eq!(told["sets"]["repository"], "../empty");
    assert!(user.ok(&["ls"]).is_empty());
    user.write("towline.toml", b"repository = '../repo'");
    user.fails(&["ls"], 2);
    // Commands that need no repository work all the same.
    user.ok(&["completions", "bash"]);
    let trusted = user.ok(&["config", "trust", "towline.toml"]);
    assert!(trusted.contains("  repository = \"../repo\"\n"), "{trusted}");
    assert!(user.ok(&["ls"]).contains("run/1"));
    user.ok(&["config", "untrust", "."]);
    user.fails(&["ls"], 2);
    user.fails(&["config", "untrust", "."], 3);
    user.fails(&["config", "trust", "tree"], 3);
    user.fails(&["config", "trust", "tree/a.txt"], 2);

    fs::write(user.work().join("towline.toml"), "repositry = 'x'").unwrap();
    let error = user.fails(&["ls"], 2);
    assert!(error["place"].as_str().unwrap().ends_with("towline.toml"), "{error}");
    assert!(error["causes"][0].as_str().unwrap().contains("repositry"), "{error}");
}

#[test]
fn help_teaches() {
    let user = User::new();
    for verb in VERBS {
        for args in [&["help", verb], &[verb, "--help"]] {
            let help = user.ok(args);
            assert!(help.contains("Examples:") && help.contains(&format!("towline {verb}")), "{verb}: {help}");
        }
    }
    for args in [&["help"], &["--help"]] {
        let manual = user.ok(args);
        assert!(VERBS.iter().all(|verb| manual.contains(verb)));
        assert!(["Getting started:", "Exit codes:", "TOWLINE_REPO"].iter().all(|part| manual.contains(part)));
    }
    assert!(user.ok(&["--version"]).starts_with("towline "));
    assert_eq!(user.run::<&str>(&[]).code, Some(2));
}

#[test]
fn completions_know_the_commands() {
    let user = User::new();
    for shell in ["bash", "zsh", "fish"] {
        let script = user.ok(&["completions", shell]);
        assert!(VERBS.iter().all(|verb| script.contains(verb)) && script.contains("overwrite"), "{shell}");
    }
    assert_eq!(user.run(&["completions", "cobol"]).code, Some(2));
}

#[test]
fn a_pipe_sees_no_progress_and_verbose_goes_to_standard_error() {
    let user = User::with_tree();
    for args in [&["save", "tree", "again", "--reread"][..], &["restore", "again", "out"], &["verify", "--data"]] {
        assert_eq!(user.run(args).err, "", "{args:?}");
        let quiet = user.run(&[args, &["-q"]].concat());
        assert_eq!((quiet.code, quiet.out.len(), quiet.err.len()), (Some(0), 0, 0), "{args:?}");
    }
    let verbose = user.run(&["save", "tree", "again", "-v", "--json"]);
    assert!(serde_json::from_slice::<Value>(&verbose.out).is_ok());
    assert!(verbose.err.contains("opened the repository"), "{}", verbose.err);
    // What ends says within what it was, and how long it took.
    user.write("tree/new", &noise(1 << 20));
    for (args, within) in [
        (["save", "tree", "again", "-vv"], ["save{name=again}", "save{name=again}:pack{id="]),
        (["restore", "again", "traced", "-vv"], ["restore{name=again}", "restore{name=again}:read{chunks="]),
    ] {
        let log = user.run(&args).err;
        let timed = |span: &str| log.lines().any(|line| line.contains(span) && line.contains("time.busy="));
        assert!(within.iter().all(|span| timed(span)), "{log}");
    }
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let user = User::with_repository();
    user.write("big", &noise(8 << 20));
    user.ok(&["save", "big", "big"]);
    let mut child = user.command(&["cat", "big:big"]).spawn().unwrap();
    let mut first = [0; 10];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let (code, err) = ended(child);
    assert_eq!((code, &*err), (Some(0), ""));
    assert_eq!(first, noise(8 << 20)[..10]);
}

#[test]
fn a_signal_stops_a_command_that_is_stuck() {
    let user = User::with_repository();
    user.write("big", &noise(8 << 20));
    user.ok(&["save", "big", "big"]);
    for (signal, exit) in [(rustix::process::Signal::INT, 130), (rustix::process::Signal::TERM, 143)] {
        let mut child = user.command(&["cat", "big:big"]).spawn().unwrap();
        // The first byte is there: it is running, and soon stuck in a pipe that nobody empties.
        let mut pipe = child.stdout.take().unwrap();
        pipe.read_exact(&mut [0]).unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, signal).unwrap();
        let (code, err) = ended(child);
        assert_eq!(code, Some(exit));
        assert!(err.starts_with("error: interrupted\n  help: run the same command again"), "{err}");
    }
}

/// Waits for `child` to end by itself.
pub(crate) fn ended(mut child: Child) -> (Option<i32>, String) {
    let since = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if since.elapsed() > Duration::from_mins(2) {
            child.kill().unwrap();
            panic!("the command hangs");
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let mut err = String::new();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    (status.code(), err)
}
