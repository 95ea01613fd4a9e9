//! Dry runs, what is replaced and what is refused: commands that could take something away say so first.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use crate::cli::{User, noise};
use crate::policy::PolicyFixture;

/// Every file below `folder`, with its length and time: what a dry run must leave as it is.
fn snapshot(folder: &Path) -> BTreeMap<String, (u64, SystemTime)> {
    let (mut folders, mut all) = (vec![folder.to_path_buf()], BTreeMap::new());
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let meta = entry.metadata().unwrap();
            if meta.is_dir() {
                folders.push(entry.path());
            }
            all.insert(entry.path().display().to_string(), (meta.len(), meta.modified().unwrap()));
        }
    }
    all
}

/// Result of a dry run as JSON, after making sure that it changed nothing in the working folder or the repository.
fn rehearsed(user: &User, args: &[&str]) -> Value {
    let all = || (snapshot(&user.work()), snapshot(&user.repository()));
    let before = all();
    let told = user.json(&[args, &["--dry-run"]].concat(), 0);
    let text = user.ok(&[args, &["--dry-run", "-q"]].concat());
    assert!(text.contains("would "), "{args:?}: {text}");
    assert_eq!(all(), before, "{args:?} changed something");
    told
}

#[test]
fn restore_says_what_it_would_do_and_what_it_deletes() {
    let user = User::with_tree();
    assert_eq!(rehearsed(&user, &["restore", "run/1", "fresh"])["bytes"], 300_012);
    assert!(!user.exists("fresh"));

    user.write("out/a.txt", b"mine");
    user.write("out/extra", &noise(1000));
    user.write("out/old/deep/one", b"1");
    user.write("out/old/two", b"22");
    assert_eq!(user.fails(&["restore", "run/1", "out", "--dry-run"], 5)["kind"], "conflict");
    let args = ["restore", "run/1", "out", "--overwrite", "--delete"];
    let planned = rehearsed(&user, &args);
    let removed = json!({ "files": 3, "bytes": 1003, "paths": ["extra", "old"] });
    assert_eq!(
        (&planned["dry_run"], &planned["removed"], &planned["replaced_files"]),
        (&json!(true), &removed, &json!(1))
    );
    let done = user.json(&args, 0);
    assert_eq!((&done["removed"], &done["fetched_bytes"]), (&removed, &planned["fetched_bytes"]));
    assert!(!user.exists("out/extra") && !user.exists("out/old") && user.exists("out/sub/b.bin"));
    assert_eq!(done.get("dry_run"), None);
    user.write("out/x", b"x");
    let text = user.ok(&args);
    assert!(text.contains("deleted: 1 file, 1 B") && text.contains("\n    x\n"), "{text}");
    assert_eq!(rehearsed(&user, &["restore", "run/1", "out"])["fetched_bytes"], 0, "it is there");
}

/// F12: "It keeps, and counts, what the `.towlineignore` files in DEST leave out of a save".
#[test]
fn a_restore_that_deletes_keeps_what_was_never_saved() {
    let user = User::with_repository();
    user.write("proj/.towlineignore", b"logs/\n*.env\n");
    user.write("proj/a.txt", b"a");
    user.write("proj/secret.env", b"secret");
    user.write("proj/logs/today", b"log");
    user.ok(&["save", "proj", "p"]);
    user.write("proj/old/b.txt", b"b");
    user.write("proj/old/deep/other.env", b"other");
    // An ignore file that was not saved keeps nothing.
    user.write("proj/new/.towlineignore", b"*\n");
    user.write("proj/new/c.txt", b"c");
    let args = ["restore", "p", "proj", "--overwrite", "--delete"];
    let removed = json!({ "files": 3, "bytes": 4, "paths": ["new", "old/b.txt"], "ignored": 3 });
    assert_eq!(rehearsed(&user, &args)["removed"], removed);
    assert_eq!(user.json(&args, 0)["removed"], removed);
    for kept in ["secret.env", "logs/today", "old/deep/other.env"] {
        assert!(user.exists(&format!("proj/{kept}")), "{kept}");
    }
    assert!(!user.exists("proj/new") && !user.exists("proj/old/b.txt"));
    let text = user.ok(&args);
    assert!(text.contains("kept: 3 that .towlineignore leaves out"), "{text}");
}

#[test]
fn restore_of_an_empty_tree_empties_nothing_unless_told() {
    let user = User::with_repository();
    fs::create_dir_all(user.work().join("none/sub")).unwrap();
    user.ok(&["save", "none", "none"]);
    user.write("out/precious", b"precious");
    for args in [&["restore", "none", "out", "--delete"][..], &["restore", "none", "out", "--delete", "--dry-run"]] {
        let error = user.fails(args, 5);
        assert!(error["message"].as_str().unwrap().contains("1 files with 8 B there"), "{error}");
        assert!(error["help"].as_str().unwrap().contains("--yes"), "{error}");
    }
    assert!(user.exists("out/precious") && !user.exists("out/sub"), "something was written before it was refused");
    user.ok(&["restore", "none", "out"]);
    assert!(user.exists("out/precious"), "without --delete nothing goes");
    assert_eq!(user.json(&["restore", "none", "out", "--delete", "--yes"], 0)["removed"]["files"], 1);
    assert!(!user.exists("out/precious"));
    user.ok(&["restore", "none", "out", "--delete"]);
    assert_eq!(user.run(&["restore", "none", "out", "--yes"]).code, Some(2));
}

#[test]
fn restoring_tensors_can_be_rehearsed() {
    let user = User::with_repository();
    user.write("ckpt/model.safetensors", &crate::data::safetensors(1, &[("a", 100_000), ("b", 200_000)]));
    user.ok(&["save", "ckpt", "run/step-1"]);
    let args = ["restore", "run@latest", "out", "--tensor", "a"];
    let planned = rehearsed(&user, &args);
    let done = user.json(&args, 0);
    for key in ["file", "bytes", "fetched_bytes", "chunks", "tensors"] {
        assert_eq!(planned[key], done[key], "{key}");
    }
    assert_eq!(user.fails(&[&args[..], &["--dry-run"]].concat(), 5)["kind"], "conflict");
}

#[test]
fn removing_and_expiring_say_what_would_come_free() {
    let user = User::with_repository();
    for step in 1..=3_usize {
        user.write("ckpt/shared", &noise(500_000));
        user.write("ckpt/own", &noise(1_000_000 + step));
        user.ok(&["save", "ckpt", &format!("run/step-{step}")]);
    }
    let one = rehearsed(&user, &["rm", "run/step-1"]);
    let freed = one["freed_bytes"].as_u64().unwrap();
    assert!((1_000_000..1_100_000).contains(&freed), "{one}");
    assert_eq!(one["names"], json!([{ "name": "run/step-1", "bytes": 1_500_001 }]));
    let plan = rehearsed(&user, &["expire", "run", "--keep-last", "1"]);
    assert!((2_000_000..2_200_000).contains(&plan["freed_bytes"].as_u64().unwrap()), "{plan}");
    assert_eq!(user.fails(&["rm", "none", "--dry-run"], 3)["kind"], "not-found");
    user.ok(&["expire", "run", "--keep-last", "1"]);
    let planned = rehearsed(&user, &["collect", "--grace", "0"])["freed_bytes"].as_u64().unwrap();
    let freed = user.json(&["collect", "--grace", "0"], 0)["freed_bytes"].as_u64().unwrap();
    // The pack that holds what is shared is rewritten: it goes, too.
    assert!(planned > 2_400_000 && freed.abs_diff(planned) < 100_000, "{planned} planned, {freed} freed");
}

#[test]
fn sync_says_what_would_move_and_makes_the_destination_if_told() {
    let user = User::with_repository();
    for step in 1..=2_usize {
        user.write("ckpt/shared", &noise(500_000));
        user.write("ckpt/own", &noise(1_000_000 + step));
        user.ok(&["save", "ckpt", &format!("run/step-{step}")]);
    }
    let there = user.work().join("../there");
    assert_eq!(user.fails(&["sync", "../repo", "../there", "--dry-run"], 3)["kind"], "not-found");
    assert_eq!(user.fails(&["sync", "../repo", "../there", "rnu/step-1", "--init"], 3)["kind"], "not-found");
    assert!(!user.exists("../there"), "nothing is made for a name that is misspelt");
    let planned = rehearsed(&user, &["sync", "../repo", "../there", "--init"]);
    assert!(!there.exists(), "a dry run made the destination");
    assert_eq!(planned["planned"].as_array().unwrap().len(), 2);
    let first = planned["planned"][0]["moved_bytes"].as_u64().unwrap();
    let second = planned["planned"][1]["moved_bytes"].as_u64().unwrap();
    assert!(first > 1_500_000 && (1_000_000..1_100_000).contains(&second), "what is shared moves once: {planned}");

    // The choice is made in the source.
    let latest = ["sync", "../repo", "../there", "run@latest", "--init"];
    let expected = rehearsed(&user, &latest);
    let ran = user.run(&latest);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert!(ran.err.contains("run@latest is run/step-2") && ran.err.contains("made the repository"), "{}", ran.err);
    assert_eq!(user.json(&["ls", "--repo", "../there"], 0)["refs"].as_array().unwrap().len(), 1);
    assert_eq!((&expected["planned"][0]["name"], &expected["names"]), (&json!("run/step-2"), &json!(1)));

    let rest = rehearsed(&user, &["sync", "../repo", "../there"]);
    let done = user.json(&["sync", "../repo", "../there", "--init"], 0);
    for key in ["names", "moved_bytes", "skipped_bytes", "chunks", "new_chunks"] {
        assert_eq!(rest[key], done[key], "{key}");
    }
    assert_eq!(user.fails(&["sync", "../repo", "../there", "none@latest"], 3)["kind"], "not-found");
}

/// B4: "A value that is newer in the destination is replaced by no sync without `--force`: it is kept, all other names are copied,
/// and the exit code is 5".
#[test]
fn sync_keeps_what_is_newer_there_unless_forced() {
    let user = User::with_tree();
    user.ok(&["cp", "run/1", "other"]);
    user.ok(&["sync", "../repo", "../there", "run", "--init"]);
    let manifest = |repo: &str, name: &str| user.json(&["show", name, "--repo", repo], 0)["manifest"].clone();
    user.write("tree/a.txt", b"the other side's");
    user.ok(&["save", "tree", "run/1", "--repo", "../there"]);
    let theirs = manifest("../there", "run/1");

    let sync = ["sync", "../repo", "../there"];
    let planned = user.json(&[&sync[..], &["--dry-run"]].concat(), 5);
    assert_eq!((&planned["names"], &planned["kept"][0]["name"]), (&json!(1), &json!("run/1")), "{planned}");
    let told = user.json(&sync, 5);
    let kept = &told["kept"][0];
    assert_eq!((&kept["name"], &kept["reason"], &told["kept"][1]), (&json!("run/1"), &json!("newer"), &Value::Null));
    assert!(kept["saved_there"].as_str() >= kept["saved"].as_str(), "{told}");
    assert_eq!((&told["names"], told.get("replaced")), (&json!(1), None), "{told}");
    assert_eq!(
        (manifest("../there", "run/1"), manifest("../there", "other")),
        (theirs.clone(), manifest("../repo", "other"))
    );
    let quiet = user.run(&[&sync[..], &["-q"]].concat());
    assert!(
        quiet.code == Some(5) && quiet.err.contains("run/1 is newer") && quiet.err.contains("--force"),
        "{}",
        quiet.err
    );

    let absent = user.json(&[&sync[..], &["--if-absent"]].concat(), 0);
    assert_eq!((&absent["kept"][0]["reason"], &absent["names"]), (&json!("exists"), &json!(1)), "{absent}");
    assert!(
        user.ok(&[&sync[..], &["--if-absent"]].concat())
            .contains("kept as there: 1 name\n    run/1: exists there (saved 20")
    );
    assert_eq!(user.fails(&[&sync[..], &["--if-absent", "--force"]].concat(), 2)["kind"], "usage");

    let forced = [&sync[..], &["--force"]].concat();
    let planned = rehearsed(&user, &forced);
    assert_eq!((&planned["replaced"], &planned["planned"][0]["replaces"]), (&json!(["run/1"]), &json!(true)));
    assert_eq!(manifest("../there", "run/1"), theirs);
    assert_eq!(user.json(&forced, 0)["replaced"], json!(["run/1"]));
    assert_eq!(manifest("../there", "run/1"), manifest("../repo", "run/1"));

    // An older value is replaced without being told, and reported.
    user.write("tree/a.txt", b"later");
    user.ok(&["save", "tree", "run/1"]);
    let replaced = user.run(&sync);
    assert!(replaced.err.contains("`towline undelete run/1 --replace` there restores it"), "{}", replaced.err);
    assert!(String::from_utf8(replaced.out).unwrap().contains("replaced: 1 name, which `undelete --replace` restores"));
}

#[test]
fn save_and_cp_say_what_they_replace_and_may_be_told_not_to() {
    let user = User::with_tree();
    let first = user.json(&["show", "run/1"], 0);
    assert_eq!(user.json(&["save", "tree", "run/1"], 0).get("replaced"), None, "it is the same tree");
    user.write("tree/a.txt", b"hello, moon");
    let again = user.json(&["save", "tree", "run/1"], 0);
    assert_eq!((&again["replaced"]["manifest"], &again["replaced"]["bytes"]), (&first["manifest"], &json!(300_012)));
    user.write("tree/a.txt", b"hello, sun");
    assert!(user.ok(&["save", "tree", "run/1"]).starts_with("saved run/1 (replaced 293.0 KiB, saved 20"));

    let before = user.json(&["show", "run/1"], 0)["manifest"].clone();
    user.write("tree/a.txt", b"hello, stars");
    let refused = user.fails(&["save", "tree", "run/1", "--if-absent"], 5);
    assert!(refused["message"].as_str().unwrap().starts_with("the name exists already at run/1"), "{refused}");
    user.ok(&["save", "tree", "run/2", "--if-absent"]);
    assert_eq!(user.fails(&["cp", "run/2", "run/1", "--if-absent"], 5)["kind"], "conflict");
    assert_eq!(user.json(&["show", "run/1"], 0)["manifest"], before);
    user.ok(&["cp", "run/2", "run/3", "--if-absent"]);
    let copied = user.json(&["cp", "run/2", "run/1"], 0);
    assert_eq!(copied["replaced"]["manifest"], before);
    assert_eq!(user.json(&["cp", "run/2", "run/1"], 0).get("replaced"), None, "it stands for that already");

    let part = |rank: &'static str| ["save", "tree", "run/2", "--rank", rank, "--world-size", "2", "--attempt", "a"];
    assert_eq!(user.fails(&[&part("0")[..], &["--if-absent"]].concat(), 5)["kind"], "conflict");
    assert_eq!(user.json(&part("0"), 0).get("replaced"), None, "not yet");
    let stood = user.json(&["show", "run/2"], 0)["manifest"].clone();
    assert_eq!(user.json(&part("1"), 0)["replaced"]["manifest"], stood);
}

#[test]
fn of_two_that_save_one_name_if_absent_one_wins() {
    let user = User::with_repository();
    user.write("one", &noise(3_000_000));
    user.write("two", &noise(3_000_001));
    let spawn = |path: &str| user.command(&["save", path, "name", "--if-absent"]).spawn().unwrap();
    let children = [spawn("one"), spawn("two")];
    let mut codes = children.map(|child| child.wait_with_output().unwrap().status.code());
    codes.sort_unstable();
    assert_eq!(codes, [Some(0), Some(5)]);
}

#[test]
fn what_looks_like_a_step_and_is_none_is_warned_about() {
    let user = User::with_tree();
    let warnings = user.json(&["save", "tree", "run-7/step-abc"], 0)["warnings"].clone();
    assert!(warnings[0].as_str().unwrap().starts_with("run-7/step-abc is no step of a run"), "{warnings}");
    assert!(user.run(&["cp", "run/1", "run-7/step_9"]).err.starts_with("warning: run-7/step_9 is no step"));
    assert_eq!(user.run(&["save", "tree", "run-7/step-9"]).err, "");
    let run = "warning: run-7 is a run, and this is none of its steps: they are run-7/step-N\n";
    assert_eq!(user.run(&["save", "tree", "run-7"]).err, run);
    user.write("tree/new", b"more");
    assert_eq!(user.run(&["save", "tree", "run-7"]).err, "", "it was there before");
}

/// W4: "the exit code is 1, as for a step in parts (W2), also with `--once`".
#[test]
fn a_watch_of_files_of_single_ranks_fails_and_says_what_to_do() {
    let user = User::with_repository();
    user.write("out/step_3_rank0.pt", b"zero");
    user.write("out/step_3_rank1.pt", b"one");
    let ran = user.run(&["watch", "out", "run", "--once", "--settle", "50ms"]);
    assert!(ran.code == Some(1) && ran.err.contains("one of 2 parts of step 3"), "{}", ran.err);
    assert!(ran.err.contains("one folder for each step"), "{}", ran.err);
}

#[test]
fn watch_takes_metrics_from_what_the_trainer_logged() {
    let user = User::with_repository();
    let state = |step: u32, loss: f64| {
        let history =
            [json!({ "step": step - 5, "loss": 9.0 }), json!({ "step": step, "epoch": 1.0, "eval_loss": loss })];
        json!({ "global_step": step, "best_metric": 0.5, "log_history": history }).to_string()
    };
    let finished = |step: u32| {
        user.write(&format!("out/checkpoint-{step}/model.bin"), &noise(1000));
        user.write(&format!("out/checkpoint-{step}/trainer_state.json"), state(step, f64::from(step)).as_bytes());
    };
    finished(10);
    let text = user.run(&["watch", "out", "run", "--once", "--settle", "0.2"]);
    assert!(
        text.err.contains("; eval_loss=10") || String::from_utf8_lossy(&text.out).contains("; eval_loss=10"),
        "{text:?}"
    );
    assert_eq!(user.json(&["show", "run/step-10"], 0)["metrics"], json!({ "eval_loss": 10.0 }));
    finished(20);
    let metrics = ["--metric", "val=eval_loss", "--metric", "loss", "--metric", "lr=0.001", "--metric", "none=lacking"];
    user.ok(&[&["watch", "out", "run", "--once", "--settle", "0.2"][..], &metrics].concat());
    let expected = json!({ "val": 20.0, "loss": 9.0, "lr": 0.001 });
    assert_eq!(user.json(&["show", "run/step-20"], 0)["metrics"], expected);
    assert_eq!(user.run(&["watch", "out", "run", "--once", "--metric", "a/b"]).code, Some(2));
    // Before anything is opened.
    assert_eq!(user.run(&["--repo", "nowhere", "watch", "out", "run/step-1", "--once"]).code, Some(2));
}

#[test]
fn a_watch_that_finds_no_checkpoint_says_so() {
    let user = User::with_repository();
    user.write("out/checkpoint-5/model.bin", &noise(1000));
    user.write("empty/notes.txt", b"later");
    let told = |dir: &str| {
        let ran = user.run(&["watch", dir, "run", "--once", "--settle", "0"]);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        ran.err + &String::from_utf8_lossy(&ran.out)
    };
    let (deep, empty) = (told("out/checkpoint-5"), told("empty"));
    assert!(deep.contains("which looks like one itself: watch the folder above it"), "{deep}");
    assert!(empty.contains("no checkpoint in empty: expected files or folders with the step"), "{empty}");
    assert!(!told("out").contains("no checkpoint in"));
}

#[test]
fn a_limit_of_zero_is_told_in_words() {
    let error = User::with_repository().run(&["expire", "run", "--keep-last", "0"]).err;
    assert!(error.contains("'0' for '--keep-last <N>': expected a whole number from 1"), "{error}");
}

#[test]
fn a_folder_in_the_way_of_a_file_goes_when_the_file_is_there() {
    let user = User::with_repository();
    user.write("saved/d", &noise(3_000_000));
    user.write("saved/small", b"small");
    user.ok(&["save", "saved", "x"]);
    user.write("out/d/precious", b"precious");
    user.write("out/small/precious", b"precious");
    let (packs, hidden) = (user.repository().join("pack"), user.work().join("hidden"));
    fs::rename(&packs, &hidden).unwrap();
    let restore = ["restore", "x", "out", "--overwrite", "--delete", "--yes"];
    assert_ne!(user.run(&restore).code, Some(0));
    assert!(user.exists("out/d/precious") && user.exists("out/small/precious"));
    fs::rename(&hidden, &packs).unwrap();
    user.ok(&restore);
    assert_eq!((user.read("out/d"), user.read("out/small")), (noise(3_000_000), b"small".to_vec()));
}

#[test]
fn a_list_says_where_there_is_no_repository_yet() {
    let user = User::new();
    let listed = user.run(&["ls"]);
    let said = listed.err.starts_with("there is no repository yet at ")
        && listed.err.contains(".local/share/towline/repository");
    assert!(listed.code == Some(0) && said, "{}", listed.err);
    let user = User::with_repository();
    assert_eq!(user.run(&["ls"]).err, "the repository holds no names\n");
}

/// A default repository on a disk that is not mounted is not made anew in its mount point.
#[test]
fn a_default_repository_that_is_gone_is_not_made_again_by_a_save() {
    let user = User::new();
    user.write("tree/a.txt", b"hello, world");
    user.ok(&["save", "tree", "run/1"]);
    let (here, away) = (user.work().join("../home/.local/share/towline"), user.work().join("../away"));
    user.ok(&["save", "tree", "run/2"]);
    fs::rename(&here, &away).unwrap();
    for empty_mount_point in [false, true] {
        if empty_mount_point {
            fs::create_dir(&here).unwrap();
        }
        for args in [&["save", "tree", "run/3"][..], &["ls"], &["restore", "run/1", "out"]] {
            let gone = user.fails(args, 3);
            assert!(gone["message"].as_str().unwrap().contains("was here, and is gone"), "{args:?}: {gone}");
            assert!(gone["help"].as_str().unwrap().contains("not mounted"), "{gone}");
        }
        assert!(!here.join("repository").exists());
    }
    fs::remove_dir(&here).unwrap();
    fs::rename(&away, &here).unwrap();
    assert_eq!(user.json(&["ls"], 0)["refs"].as_array().unwrap().len(), 2);
    fs::rename(&here, &away).unwrap();
    user.ok(&["init"]);
    assert!(user.ok(&["save", "tree", "run/3"]).contains("saved run/3"), "it is a decision now");
}

#[test]
fn an_explanation_of_nothing_says_so() {
    let user = User::with_repository();
    user.write("tree/a", &noise(100_000));
    let first = user.json(&["save", "tree", "run/1", "--explain"], 0);
    assert_eq!(first["explained"].as_array().unwrap().len(), 1);
    // Files that have just been written are read again.
    let again = (2..60).map(|nth| {
        sleep(Duration::from_secs(1));
        user.run(&["save", "tree", &format!("run/{nth}"), "--explain"]).err
    });
    assert!(again.into_iter().any(|err| err.contains("nothing to explain: no file has changed")));
}

/// B4: "With `--init` the destination is made unless a policy refuses every name."
#[test]
fn a_refused_name_does_not_stop_the_others_on_their_way_to_a_new_repository() {
    let user = PolicyFixture::at("home").user;
    user.write("data/file", b"labelled");
    for name in ["raw/a", "raw/b"] {
        user.ok(&["save", "data", name, "--label", "sensitivity=restricted"]);
    }
    user.write("data/file", b"without labels");
    user.ok(&["save", "data", "free/set"]);
    user.fails(&["sync", "../repo", "../raw", "raw", "--init"], 7);
    assert!(!user.exists("../raw"), "every name is refused");
    for dry_run in [&["--dry-run"][..], &[]] {
        let synced = user.run(&[&["sync", "../repo", "../mixed", "--init"], dry_run].concat());
        assert!(synced.code == Some(7) && synced.err.contains("raw/a, raw/b"), "{:?} {}", synced.code, synced.err);
        assert_eq!(user.exists("../mixed"), dry_run.is_empty());
    }
    let copied = user.ok(&["ls", "--repo", "../mixed"]);
    assert!(copied.contains("free/set") && !copied.contains("raw"), "{copied}");
}
