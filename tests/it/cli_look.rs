//! Looking at names, and saying which: `show` and its parts, `rm` and `restore` of several things, what else commands are called, and
//! how sizes, times and errors are written.

use std::fs::{self, File};

use serde_json::{Value, json};

use crate::cli::User;
use crate::data::noise;
use crate::policy::PolicyFixture;
use crate::semantics::Tmpfs;

/// A folder of two files, a folder and a link, saved as run/step-1; a checkpoint among them.
fn with_checkpoint() -> User {
    let user = User::with_repository();
    let header = br#"{"w":{"dtype":"F32","shape":[2,64],"data_offsets":[0,512]},"b":{"dtype":"BF16","shape":[64],"data_offsets":[512,640]}}"#;
    let mut model = u64::try_from(header.len()).unwrap().to_le_bytes().to_vec();
    model.extend_from_slice(header);
    model.extend(noise(7, 640));
    user.write("tree/model.safetensors", &model);
    user.write("tree/config.json", b"{}");
    user.write("tree/tokenizer/vocab.txt", b"a b c");
    user.write("tree/tokenizer/merges.txt", b"ab");
    std::os::unix::fs::symlink("config.json", user.work().join("tree/link")).unwrap();
    user.ok(&["save", "tree", "run/step-1"]);
    user
}

#[test]
fn show_sums_up_and_lists_what_is_asked_for() {
    let user = with_checkpoint();
    let short = user.ok(&["show", "run@latest", "-q"]);
    assert!(short.contains("holds:    4 files, 1 folder, 1 link\n"), "{short}");
    assert!(short.contains("tensors:  2 tensors in 1 file, 640 B: 1 BF16, 1 F32\n"), "{short}");
    assert!(!short.contains("vocab.txt") && !short.contains("TENSOR"), "{short}");
    assert!(user.run(&["show", "run@latest"]).err.contains("--files"), "how to see more is said");

    let files = user.ok(&["show", "run@latest", "--files"]);
    assert!(files.contains("tokenizer/vocab.txt") && files.contains("link -> config.json"), "{files}");
    assert!(!files.contains("[2, 64]"), "{files}");
    let tensors = user.ok(&["show", "run@latest", "--tensors"]);
    assert!(tensors.contains("[2, 64]") && !tensors.contains("vocab.txt"), "{tensors}");

    let folder = user.ok(&["show", "run@latest:tokenizer"]);
    assert!(folder.starts_with("run/step-1:tokenizer\n") && folder.contains("size:     7 B in 2 files"), "{folder}");
    assert!(folder.contains("holds:    2 files\n"), "{folder}");
    assert!(folder.contains("tokenizer/merges.txt") && !folder.contains("config.json"), "{folder}");
    let file = user.ok(&["show", "run/step-1:model.safetensors"]);
    assert!(file.contains("[2, 64]") && !file.contains("config.json"), "{file}");
    let part = user.json(&["show", "run/step-1:tokenizer/"], 0);
    assert_eq!((&part["path"], &part["bytes"], &part["files"]), (&json!("tokenizer"), &json!(7), &json!(2)));
    assert_eq!(user.json(&["show", "run/step-1"], 0)["entries"].as_array().unwrap().len(), 7, "JSON has all of it");
    assert_eq!(user.fails(&["show", "run/step-1:none"], 3)["kind"], "not-found");
}

#[test]
fn several_names_go_in_one_commit_or_not_at_all() {
    let user = with_checkpoint();
    for name in ["run/step-2", "run/step-3", "run-2/step-1", "best", "other/a", "other/b/c", "other"] {
        user.ok(&["cp", "run/step-1", name]);
    }
    let entries = || fs::read_dir(user.repository().join("log")).unwrap().count();
    let before = entries();
    assert_eq!(user.fails(&["rm", "best", "run/step-2", "none"], 3)["kind"], "not-found");
    assert_eq!(user.fails(&["rm", "run"], 3)["kind"], "not-found", "a prefix alone is no name");
    assert_eq!(entries(), before);
    let removed = user.json(&["rm", "best", "run/step-2", "best"], 0);
    assert_eq!(removed, json!({ "removed": ["best", "run/step-2"], "kept": 2, "forgotten": 0 }));
    assert_eq!(entries(), before + 1, "one commit");
    let removed = user.ok(&["rm", "--recursive", "other"]);
    assert!(
        removed.starts_with("removed other\nremoved other/a\nremoved other/b/c\n`towline undelete`, with --recursive"),
        "{removed}"
    );
    assert_eq!(entries(), before + 2);
    assert_eq!(user.fails(&["rm", "-r", "run", "other"], 3)["kind"], "not-found");
    let left = user.json(&["ls"], 0);
    let left: Vec<_> = left["refs"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
    assert_eq!(left, ["run-2/step-1", "run/step-1", "run/step-3"], "run-2 is not below run");
}

#[test]
fn some_paths_of_a_tree_are_restored() {
    let user = with_checkpoint();
    user.write("out/mine", b"mine");
    let args = ["restore", "run@latest", "out", "--path", "*.json", "--path", "tokenizer/v*"];
    assert_eq!(user.json(&args, 0)["files"], 2);
    assert_eq!(
        (user.read("out/config.json"), user.read("out/tokenizer/vocab.txt")),
        (b"{}".to_vec(), b"a b c".to_vec())
    );
    assert!(
        !user.exists("out/model.safetensors") && !user.exists("out/tokenizer/merges.txt") && user.exists("out/mine")
    );
    user.ok(&["restore", "run@latest", "all", "--path", "**/*.txt", "--path", "link"]);
    assert!(user.exists("all/tokenizer/merges.txt") && user.work().join("all/link").is_symlink());
    user.ok(&["restore", "run@latest:tokenizer", "below", "--path", "merges.txt"]);
    assert_eq!(user.read("below/merges.txt"), b"ab");
    user.ok(&["restore", "run@latest", "folder", "--path", "tokenizer/"]);
    assert!(user.exists("folder/tokenizer/vocab.txt") && !user.exists("folder/config.json"));

    let error = user.fails(&["restore", "run@latest", "none", "--path", "config.json", "--path", "*.bin"], 3);
    assert!(error["message"].as_str().unwrap().contains("\"*.bin\"") && !user.exists("none"), "{error}");
    for more in [&["--path", "["][..], &["--path", "a", "--delete"]] {
        let args = [&["restore", "run@latest", "none"], more].concat();
        assert_eq!(user.fails(&args, 2)["kind"], "usage", "{more:?}");
    }
    assert_eq!(user.fails(&["restore", "run@latest:config.json", "one", "--path", "a"], 2)["kind"], "usage");
    assert!(!user.exists("none") && !user.exists("one"));
}

#[test]
fn familiar_names_do_the_same_and_are_in_the_help() {
    let user = with_checkpoint();
    let help = user.ok(&["help"]);
    for alias in ["prune", "gc", "forget"] {
        assert!(help.contains(alias), "{alias} is not in the help");
    }
    assert!(help.contains("--endpoint-url"), "{help}");
    for alias in ["prune", "gc"] {
        assert_eq!(user.json(&[alias, "--dry-run"], 0)["freed_bytes"], 0);
        assert!(user.ok(&["help", alias]).contains("--grace"));
    }
    assert_eq!(user.json(&["forget", "run", "--keep-last", "1", "--dry-run"], 0)["kept"][0]["step"], 1);
    user.ok(&["ls", "--endpoint-url", "http://localhost:1"]);
    let save = user.ok(&["help", "save"]);
    for lost in ["owners", "extended attributes", "ACLs", "hard links"] {
        assert!(save.contains(lost), "{lost} is not in help save");
    }
}

#[test]
fn times_and_sizes_are_written_alike_everywhere() {
    let user = with_checkpoint();
    for grace in ["0", "5", "0.5", "1.5h", "1h 30m", "24h"] {
        user.ok(&["collect", "--dry-run", "--grace", grace]);
        user.ok(&["watch", "tree", "other", "--once", "--settle", "0", "--on-term", grace]);
    }
    user.ok(&["ls", "--memory", "0.25G"]);
    user.set_up("0.25G");
    user.ok(&["ls"]);
    for (args, says) in [
        (&["collect", "--dry-run", "--grace", "soon"][..], "not a time"),
        (&["collect", "--dry-run", "--grace", "-1"], ""),
        (&["ls", "--memory", "256MB"], "256M or 256MiB"),
        (&["ls", "--memory", "much"], "not a size"),
    ] {
        let error = user.fails(args, 2).to_string();
        assert!(error.contains(says), "{args:?}: {error}");
    }
}

#[test]
fn what_is_not_there_is_told_with_what_is_near() {
    let user = with_checkpoint();
    user.ok(&["cp", "run/step-1", "run/step-200"]);
    user.ok(&["cp", "run/step-1", "models/base"]);
    let repository = user.repository().canonicalize().unwrap();
    let repository = repository.display();
    for (args, says) in [
        (&["show", "run"][..], format!("no such name `run` in {repository}; `run` is a run: try `run@latest`")),
        (
            &["restore", "models/bsae", "out"],
            format!("no such name `models/bsae` in {repository}; the nearest is `models/base`"),
        ),
        (
            &["cat", "run/step-190:a"],
            format!("no such name `run/step-190` in {repository}; the nearest are `run/step-200`, `run/step-1`"),
        ),
        (
            &["cp", "models", "new"],
            format!("no such name `models` in {repository}; the name below it is `models/base`"),
        ),
        (&["rm", "nothing-like-it"], format!("no such name `nothing-like-it` in {repository}")),
        (&["verify", "run"], format!("no such name `run` in {repository}; `run` is a run: try `run@latest`")),
        (&["show", "ran@latest"], "no such run `ran`; the nearest is `run`: expected names ran/step-N".to_owned()),
    ] {
        assert_eq!(user.fails(args, 3)["message"], says, "{args:?}");
    }
}

#[test]
fn a_full_disk_is_said_first() {
    let user = User::with_repository();
    user.write("tree/big", &noise(3, 8 << 20));
    user.ok(&["save", "tree", "big"]);
    let Some(_disk) = Tmpfs::mount(&user.work().join("disk"), "4m") else { return };
    let error = user.fails(&["restore", "big", "disk/out"], 1);
    let message = error["message"].as_str().unwrap();
    assert!(message.starts_with("disk full: cannot write a file at ") && message.ends_with("big"), "{error}");
    assert_eq!(error["kind"], "exhausted");
}

#[test]
fn a_full_disk_behind_standard_output_is_named() {
    let user = User::with_tree();
    user.ok(&["save", "tree", "run/step-1"]);
    let onto_full = |args: &[&str]| {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = user.command(args).stdout(full).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    for args in
        [&["ls"][..], &["ls", "--json"], &["show", "run/1"], &["runs"], &["--version"], &["help", "save"], &["--help"]]
    {
        let (code, err) = onto_full(args);
        assert_eq!(code, Some(1), "{args:?}: {err}");
        assert!(
            err.contains("disk full: cannot write standard output") && err.contains("free some space"),
            "{args:?}: {err}"
        );
    }
}

#[test]
fn removing_a_run_advises_what_works() {
    let user = User::with_tree();
    for step in ["r7/step-1", "r7/step-2"] {
        user.ok(&["save", "tree", step]);
    }
    let error = user.fails(&["rm", "r7"], 3);
    let message = error["message"].as_str().unwrap();
    assert!(message.starts_with("no such name `r7` in ") && message.ends_with("; 2 names are below it"), "{error}");
    assert!(error["help"].as_str().unwrap().contains("`towline rm --recursive r7`"), "{error}");
    user.ok(&["rm", "--recursive", "r7"]);
}

#[test]
fn what_is_not_there_comes_with_help() {
    let user = User::with_tree();
    for (args, says) in [
        (&["save", "nothing", "n"][..], "there is nothing to save"),
        (&["agent", "--config", "nofile"], "file cannot be read"),
        (&["config", "trust", "."], "there is no settings file"),
    ] {
        let error = user.fails(args, 3);
        assert!(error["message"].as_str().unwrap().starts_with(says) && error["help"].is_string(), "{args:?}: {error}");
    }
}

#[test]
fn metrics_stay_with_the_same_contents_and_go_with_others() {
    let user = User::with_tree();
    user.ok(&["save", "tree", "r/step-1", "--metric", "loss=1", "--metric", "acc=2"]);
    let again = user.json(&["save", "tree", "r/step-1", "--metric", "acc=3"], 0);
    assert_eq!((&again["replaced"]["lost_metrics"], &again["replaced"]["kept"]), (&Value::Null, &json!(false)));
    let said = user.ok(&["save", "tree", "r/step-1"]);
    assert!(!said.contains("replaced"), "{said}");
    let metrics = &user.json(&["show", "r/step-1"], 0)["metrics"];
    assert_eq!((&metrics["loss"], &metrics["acc"]), (&json!(1.0), &json!(3.0)));

    user.write("tree/other", b"another");
    let said = user.ok(&["save", "tree", "r/step-1", "--metric", "acc=4"]);
    assert!(said.contains("; its metrics are gone with it: loss"), "{said}");
}

#[test]
fn an_agent_that_is_not_there_is_not_ready() {
    let user = User::new();
    let error = user.fails(&["top", "--ready"], 6);
    assert_eq!(error["message"], "agent is not ready");
}

#[test]
fn labels_that_are_not_shown_are_told() {
    let user = PolicyFixture::at("home").user;
    user.write("tree/a", b"a");
    user.ok(&["save", "tree", "run/step-1", "--label", "license=mit"]);
    user.ok(&["label", "run/step-1", "tenant=clinic"]);
    let below = user.run(&["label", "run", "purpose=research"]);
    assert_eq!(below.code, Some(0), "{}", below.err);
    let further = "1 name below it, such as run/step-1, with more labels of their own: `towline label run/step-1`\n";
    assert_eq!(below.err, further);
    let free = user.run(&["label", "run/step-1"]);
    assert_eq!(
        free.err,
        "its tree has other labels, which bind nothing: license; `towline show run/step-1` shows them\n"
    );
    assert_eq!(user.run(&["label", "run/step-1", "--json"]).err, "");
    user.ok(&["label", "run", "tenant=clinic"]);
    assert_eq!(user.run(&["label", "run"]).err, "", "none below has more");
}
