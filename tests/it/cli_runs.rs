//! Runs on the command line: facts, choices, `runs` and `expire`, with the real binary on a directory.

use std::fs;

use serde_json::json;

use crate::cli::{User, has_members};
use crate::differences::{file, weights};

/// A run of steps 8, 9, 10 (three metrics between them), and a name that is no step.
fn trained() -> User {
    let user = User::with_repository();
    for (step, facts) in [
        ("step-8", "--metric loss=0.5 --metric acc=0.25"),
        ("step-9", "--metric loss=0.25"),
        ("step-010", "--metric loss=0.25 --world-size 8 --framework pytorch"),
    ] {
        user.write("ckpt/model.safetensors", step.as_bytes());
        let args = format!("save ckpt run-7/{step} {facts}");
        user.ok(&args.split(' ').collect::<Vec<_>>());
    }
    user.ok(&["cp", "run-7/step-9", "run-7/best"]);
    user
}

fn words(line: &str) -> Vec<&str> {
    line.split(' ').collect()
}

#[test]
fn a_step_is_settled_and_synced_alone_or_as_it_is_stored() {
    let user = User::with_repository();
    for step in [1, 2] {
        user.write("ckpt/model.safetensors", &file(&[("w", "F32", weights(step))]));
        user.ok(&["save", "ckpt", &format!("run-7/step-{step}")]);
    }
    let moved = |args: &[&str]| user.json(args, 0)["moved_bytes"].as_u64().unwrap();
    let from = user.repository().to_str().unwrap().to_owned();
    let alone = moved(&["sync", &from, "alone", "run-7@latest", "--init"]);
    let as_stored = moved(&["sync", &from, "whole", "run-7@latest", "--init", "--as-stored"]);
    assert!(alone > 0 && as_stored > alone, "{alone} {as_stored}");
    let settled = user.json(&["settle", "run-7@latest"], 0);
    has_members(&settled, "settled failed");
    let settled = &settled["settled"][0];
    has_members(settled, "name chunks stored_bytes read_bytes");
    assert_eq!((&settled["name"], settled["chunks"].as_u64()), (&json!("run-7/step-2"), Some(1)));
    assert!(settled["read_bytes"][0].as_u64() > settled["read_bytes"][1].as_u64(), "{settled}");
    let again = user.ok(&["settle", "run-7/step-2"]);
    assert!(again.starts_with("run-7/step-2 needs no other step: a restore reads "), "{again}");
    for (absent, said) in [("run-7/step-9", "no such name `run-7/step-9`"), ("run-8@latest", "no such run `run-8`")] {
        let refused = user.run(&["settle", absent]);
        assert_eq!(refused.code, Some(3));
        assert!(refused.err.contains(said), "{}", refused.err);
    }
    user.ok(&["restore", "run-7@latest", "out"]);
    assert_eq!(user.read("out/model.safetensors"), file(&[("w", "F32", weights(2))]));
}

/// The latest steps of runs that paused; one that cannot be settled does not keep the others from it.
#[test]
fn the_latest_steps_of_paused_runs_are_settled() {
    let user = User::with_repository();
    for run in ["team/a", "team/b"] {
        for step in [1, 2] {
            user.write("ckpt/model.safetensors", &file(&[("w", "F32", weights(step))]));
            user.ok(&["save", "ckpt", &format!("{run}/step-{step}")]);
        }
    }
    assert_eq!(user.ok(&["settle", "--paused", "1h"]), "no run has paused for so long\n");
    let one = user.json(&["settle", "--paused", "0", "team/a"], 0);
    assert_eq!(one["settled"].as_array().unwrap().len(), 1);
    assert_eq!((&one["settled"][0]["name"], &one["settled"][0]["chunks"]), (&json!("team/a/step-2"), &json!(1)));
    let all = user.json(&["settle", "--paused", "0"], 0);
    let chunks: Vec<_> = all["settled"].as_array().unwrap().iter().map(|one| &one["chunks"]).collect();
    assert_eq!(chunks, [0, 1], "the first is settled: {all}");
    assert_eq!(user.fails(&["settle", "--paused", "0", "team/c"], 3)["kind"], "not-found");
    assert_eq!(user.fails(&["settle", "--paused", "0", "team/a@latest"], 2)["kind"], "usage");
    assert_eq!(user.fails(&["settle"], 2)["kind"], "usage");
}

/// R1: "`RUN@latest`, `RUN@upto=N`, `RUN@min=METRIC` and `RUN@max=METRIC` select a step wherever a name is read, and
/// the selected step is reported."
#[test]
fn a_choice_stands_for_the_step_wherever_a_name_is_read() {
    let user = trained();
    for (choice, step) in [
        ("latest", "step-010"),
        ("upto=9", "step-9"),
        ("min=loss", "step-010"),
        ("max=loss", "step-8"),
        ("max=acc", "step-8"),
    ] {
        let (selector, name) = (format!("run-7@{choice}"), format!("run-7/{step}"));
        let cat = user.run(&["cat", &format!("{selector}:model.safetensors")]);
        assert_eq!(
            (String::from_utf8(cat.out).unwrap(), cat.err),
            (step.to_owned(), format!("{selector} is {name}\n"))
        );
        assert_eq!(user.json(&["show", &selector], 0)["name"], *name);
        assert_eq!(user.json(&["verify", &selector, "--data"], 0)["name"], *name);
        assert_eq!(user.json(&["restore", &selector, "out", "--overwrite"], 0)["name"], *name);
        assert_eq!(user.read("out/model.safetensors"), step.as_bytes());
        let copied = user.json(&["cp", &selector, "copy"], 0);
        assert_eq!((&copied["name"], &copied["from"]), (&json!("copy"), &json!(name)));
    }
    let changes = user.json(&["diff", "run-7@upto=8", "run-7@latest"], 0);
    assert_eq!((&changes["a"], &changes["b"]), (&"run-7/step-8".into(), &"run-7/step-010".into()));
    assert_eq!(changes["changes"].as_array().unwrap().len(), 1);
    assert!(user.ok(&["restore", "run-7@latest:model.safetensors", "one"]).starts_with("restored run-7/step-010"));
    assert_eq!(user.read("one"), b"step-010");
    assert_eq!(user.ok(&["cat", "run-7@latest:model.safetensors", "--range", "-3"]), "010");
    assert_eq!(user.json(&["save", "ckpt", "run-7/step-11", "--base", "run-7@latest"], 0)["new_chunks"], 0);
    assert_eq!(user.run(&["cat", "run-7@latest:model.safetensors", "-q"]).err, "");
}

#[test]
fn choices_that_make_no_sense_or_find_nothing() {
    let user = trained();
    for line in [
        "show run-7@first",
        "cat run-7@upto=x:f",
        "save ckpt run-7@latest",
        "cp run-7@latest run-7@latest",
        "rm run-7@latest",
        "save ckpt x --metric loss=nan",
        "save ckpt x --metric loss=inf",
        "save ckpt x --metric loss",
        "save ckpt x --metric a/b=1",
        "save ckpt x --world-size 0",
        "expire run-7",
        "expire run-7 --keep-last 0",
        "expire run-7 --dry-run",
        "expire run-7@latest --keep-last 1",
    ] {
        assert_eq!(user.fails(&words(line), 2)["kind"], "usage", "{line}");
    }
    for line in [
        "show run-8@latest",
        "show run-7@upto=7",
        "restore run-7@min=los out",
        "runs run-7/step-8",
        "runs nothing",
        "expire run-8 --keep-last 1",
        "expire run-7 --keep-last 1 --keep-min los",
    ] {
        assert_eq!(user.fails(&words(line), 3)["kind"], "not-found", "{line}");
    }
    let told = user.fails(&["show", "run-7@min=los"], 3);
    assert!(told["message"].as_str().unwrap().contains("acc, loss"), "the metrics that there are: {told}");
    let nan = user.fails(&words("save ckpt x --metric loss=nan"), 2);
    assert!(nan["message"].as_str().unwrap().contains("finite number at loss"), "{nan}");
    assert_eq!(user.json(&["ls", "run-7"], 0)["refs"].as_array().unwrap().len(), 4, "nothing was changed");
}

#[test]
fn facts_are_listed() {
    let user = trained();
    let long = user.ok(&["ls", "run-7", "--long"]);
    assert!(
        long.contains("  loss=0.25 world-size=8 framework=pytorch\n") && long.contains("  acc=0.25 loss=0.5\n"),
        "{long}"
    );
    assert!(user.ok(&["show", "run-7@latest"]).contains("facts:    loss=0.25 world-size=8 framework=pytorch\n"));
    let listed = user.json(&["ls", "run-7/step-010"], 0);
    let one = &listed["refs"][0];
    assert_eq!((&one["metrics"], &one["world_size"]), (&json!({ "loss": 0.25 }), &8.into()));
    assert_eq!(one["framework"], "pytorch");
}

#[test]
fn runs_are_listed_and_one_with_its_steps() {
    let user = trained();
    user.ok(&["save", "ckpt", "other/deep/step-1"]);
    user.ok(&["cp", "run-7/step-8", "run-7/step-9/step-0"]);
    let columns = "run count first last latest saved bytes metrics world_size framework";
    let all = user.json(&["runs"], 0);
    has_members(&all, "runs");
    let names: Vec<&str> = all["runs"].as_array().unwrap().iter().map(|run| run["run"].as_str().unwrap()).collect();
    assert_eq!(names, ["other/deep", "run-7", "run-7/step-9"]);
    all["runs"].as_array().unwrap().iter().for_each(|run| has_members(run, columns));
    let run = &all["runs"][1];
    assert_eq!(
        (&run["count"], &run["first"], &run["last"], &run["bytes"]),
        (&3.into(), &8.into(), &10.into(), &20.into())
    );
    assert_eq!((&run["latest"], &run["metrics"]), (&"run-7/step-010".into(), &json!({ "loss": 0.25 })));

    user.ok(&["save", "ckpt", "run-7/step-10", "--metric", "loss=1e-9"]);
    let one = user.json(&["runs", "run-7"], 0);
    let (run, below) = (&one["runs"][0], &one["runs"][1]);
    has_members(run, &format!("{columns} steps"));
    has_members(below, columns);
    has_members(&run["steps"][0], "step name counts saved bytes files chunks behind metrics world_size framework");
    let step = |at: usize| (&run["steps"][at]["step"], &run["steps"][at]["name"], &run["steps"][at]["counts"]);
    assert_eq!(step(2), (&10.into(), &"run-7/step-010".into(), &false.into()));
    assert_eq!(step(3), (&10.into(), &"run-7/step-10".into(), &true.into()));

    let text = user.ok(&["runs", "run-7"]);
    let lines: Vec<&str> = text.lines().collect();
    assert!(
        lines[0].starts_with("RUN") && lines[1].starts_with("run-7 ") && lines[1].ends_with(" loss=1e-9"),
        "{text}"
    );
    assert!(lines[6].starts_with("   9  run-7/step-9 ") && lines[7].starts_with("(10)  run-7/step-010 "), "{text}");
    assert_eq!(user.ok(&["runs", "other"]).lines().count(), 2);

    let empty = User::with_repository();
    let ran = empty.run(&["runs"]);
    assert_eq!((ran.code, ran.out.len(), &*ran.err), (Some(0), 0, "no name is a step of a run: RUN/step-N\n"));
    assert_eq!(empty.json(&["runs"], 0), json!({ "runs": [] }));
}

/// R2: "`expire` removes the steps of a run that no rule keeps [...] the latest always stays".
#[test]
fn an_expire_says_what_stays_and_why() {
    let user = trained();
    let line = ["expire", "run-7", "--keep-max", "acc", "--dry-run"];
    let text = user.ok(&line);
    let expected = "              NAME            SIZE  WHY
keep          run-7/step-8     6 B  max=acc
would remove  run-7/step-9     6 B  (has no acc)
keep          run-7/step-010   8 B  latest (has no acc)
would remove 1 of 3 steps of run-7; `towline collect` could free 0 B after its grace (what other names share or are differences to \
                    stays)
";
    assert_eq!(text, expected, "run-7/best needs all of it");
    let planned = user.json(&line, 0);
    has_members(&planned, "dry_run run kept removed freed_bytes");
    assert_eq!(planned["kept"][0], json!({ "step": 8, "name": "run-7/step-8", "bytes": 6, "reasons": ["max=acc"] }));
    assert_eq!(planned["removed"], json!([{ "step": 9, "name": "run-7/step-9", "bytes": 6, "lacks": ["acc"] }]));
    assert_eq!(user.json(&["runs", "run-7"], 0)["runs"][0]["count"], 3, "a dry run removes nothing");

    let done = user.json(&line[..4], 0);
    has_members(&done, "dry_run run kept removed");
    assert_eq!((&done["dry_run"], &done["removed"]), (&false.into(), &planned["removed"]));
    assert_eq!(user.fails(&["show", "run-7/step-9"], 3)["kind"], "not-found");
    assert_eq!(user.ok(&["cat", "run-7/best:model.safetensors"]), "step-9", "names that are no steps stay");
    assert!(user.ok(&line[..4]).ends_with("removed 0 of 2 steps of run-7\n"));
    let log = fs::read_dir(user.repository().join("log")).unwrap().count();
    user.ok(&line[..4]);
    assert_eq!(
        fs::read_dir(user.repository().join("log")).unwrap().count(),
        log,
        "nothing to remove, nothing to commit"
    );
    user.ok(&["verify", "--data"]);
}

/// K1 and K2, by the command: the JSON says what is awaited, and a rank that changed its mind is exit 5.
#[test]
fn ranks_save_a_step_with_nothing_between_them() {
    let user = User::with_repository();
    user.write("rank-0/model.bin", b"zero");
    user.write("rank-1/optimizer.bin", b"one");
    let save = |rank: u8| format!("save rank-{rank} run-7/step-1 --rank {rank} --world-size 2 --attempt 7.0");
    let first = user.json(&words(&save(1)), 0);
    let told = json!({ "complete": false, "waits_for": 0, "step": null, "rank": 1, "ranks": 2, "attempt": "7.0" });
    let keys = "name manifest logical_bytes new_bytes stored_bytes chunks new_chunks files seconds skipped warnings rank ranks";
    has_members(&first, &format!("{keys} attempt complete waits_for step"));
    assert!(told.as_object().unwrap().iter().all(|(key, value)| first[key] == *value), "{first}");
    assert_eq!(user.run(&["show", "run-7/step-1"]).code, Some(3), "half a step is none");
    assert!(user.ok(&words(&save(0))).contains("rank 0 of 2, attempt 7.0: complete"));
    let last = user.json(&words(&save(1)), 0);
    assert_eq!(last["step"], user.json(&["show", "run-7/step-1"], 0)["manifest"]);
    user.ok(&["restore", "run-7@latest", "out"]);
    assert_eq!((user.read("out/model.bin"), user.read("out/optimizer.bin")), (b"zero".to_vec(), b"one".to_vec()));
    user.write("rank-1/optimizer.bin", b"two");
    let changed = user.run(&words(&save(1)));
    assert!(changed.code == Some(5) && changed.err.contains("optimizer.bin"), "{}", changed.err);
    assert_eq!(user.json(&["runs", "run-7"], 0)["runs"][0]["steps"][0]["world_size"], 2);
}
