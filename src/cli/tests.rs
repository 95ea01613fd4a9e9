//! Settings from every source, the command line as a whole, and reports as text.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;

use clap::{CommandFactory, Parser};

use super::args::Cli;
use super::config::{Environment, Flags, Route, Settings};
use super::output::Colors;
use super::render;
use crate::error::ErrorKind;
use crate::ops::{Change, Check, Damage, Diagnosis, Listed, Outcome, VerifyReport};
use crate::repository::log::StepFacts;
use crate::storage::Location;

/// Settings as seen from `folder` with `variables`.
fn settings(flags: Flags, folder: &Path, variables: &[(&str, &str)]) -> crate::Result<Settings> {
    let set: BTreeMap<_, _> = variables.iter().map(|(name, value)| (*name, OsString::from(value))).collect();
    Settings::resolve(flags, Environment { folder, variable: &|name| set.get(name).cloned() })
}

/// Writes a settings file in `folder`, and trusts it.
fn trust(folder: &Path, text: &str, variables: &[(&str, &str)]) {
    std::fs::write(folder.join("towline.toml"), text).unwrap();
    let set: BTreeMap<_, _> = variables.iter().map(|(name, value)| (*name, OsString::from(value))).collect();
    let around = Environment { folder, variable: &|name| set.get(name).cloned() };
    Settings::without_file(Flags::default(), around).unwrap().trusted().unwrap().add(folder).unwrap();
}

fn named(text: &str) -> Route {
    Route::Named(text.parse().unwrap())
}

#[test]
fn a_flag_goes_before_the_variable_before_the_file_before_the_default() {
    let top = tempfile::tempdir().unwrap();
    let below = top.path().join("a/b");
    std::fs::create_dir_all(&below).unwrap();
    let variables = [("TOWLINE_REPO", "/variable"), ("HOME", "/home/u")];
    let flags = Flags { repository: Some("/flag".into()), ..Flags::default() };
    let chosen = |flags: &Flags, variables: &[_]| settings(flags.clone(), &below, variables).unwrap().repository();

    let embedded = Route::Embedded(Location::directory("/home/u/.local/share/towline/repository").unwrap());
    assert_eq!(chosen(&Flags::default(), &variables[1..]).unwrap(), embedded);
    let data = [("XDG_DATA_HOME", "/data"), ("HOME", "/home/u"), ("TOWLINE_REPO", "")];
    let embedded = Route::Embedded(Location::directory("/data/towline/repository").unwrap());
    assert_eq!(chosen(&Flags::default(), &data).unwrap(), embedded);
    assert_eq!(chosen(&Flags::default(), &[]).unwrap_err().kind(), ErrorKind::Usage);

    let config = top.path().join("config");
    let with_file = [("TOWLINE_REPO", "/variable"), ("HOME", "/home/u"), ("XDG_CONFIG_HOME", config.to_str().unwrap())];
    trust(top.path(), "repository = 's3://bucket/file'", &with_file);
    assert_eq!(chosen(&Flags::default(), &with_file[1..]).unwrap(), named("s3://bucket/file"));
    assert_eq!(chosen(&Flags::default(), &with_file).unwrap(), named("/variable"));
    assert_eq!(chosen(&flags, &with_file).unwrap(), named("/flag"));
}

#[test]
fn the_nearest_file_counts_and_the_users_own_comes_last() {
    let top = tempfile::tempdir().unwrap();
    let (work, own) = (top.path().join("work/deep"), top.path().join("config/towline"));
    for folder in [&work, &own] {
        std::fs::create_dir_all(folder).unwrap();
    }
    let config = top.path().join("config");
    let variables = [("XDG_CONFIG_HOME", config.to_str().unwrap())];
    let chosen = || settings(Flags::default(), &work, &variables).unwrap().repository().unwrap();

    std::fs::write(own.join("towline.toml"), "repository = '/own'").unwrap();
    assert_eq!(chosen(), named("/own"));
    trust(&top.path().join("work"), "repository = 'near'", &variables);
    // A relative path counts from the file that holds it, wherever the command is run.
    assert_eq!(chosen(), named(top.path().join("work/near").to_str().unwrap()));
    std::fs::write(work.join("towline.toml"), "memory = 134217728").unwrap();
    let nearest = settings(Flags::default(), &work, &variables).unwrap();
    assert_eq!(nearest.memory, Some(128 << 20));
    // A file that does not say where data goes hides no other.
    assert_eq!(nearest.repository().unwrap(), named(top.path().join("work/near").to_str().unwrap()));
}

#[test]
fn the_other_keys_give_way_too() {
    let top = tempfile::tempdir().unwrap();
    let file = "memory = '1G'\nendpoint = 'https://file'\nallow_http = true";
    let config = top.path().join("towline");
    std::fs::create_dir(&config).unwrap();
    std::fs::write(config.join("towline.toml"), file).unwrap();
    let read = |flags: Flags, variables: &[_]| {
        let variables = [&[("XDG_CONFIG_HOME", top.path().to_str().unwrap())], variables].concat();
        let settings = settings(flags, top.path(), &variables).unwrap();
        let store = settings.store(false);
        (settings.memory, store.endpoint, store.allow_http)
    };
    assert_eq!(read(Flags::default(), &[]), (Some(1 << 30), Some("https://file".into()), true));
    // The S3 client reads the variable itself: the file must not hide it.
    assert_eq!(read(Flags::default(), &[("AWS_ENDPOINT_URL", "https://variable")]).1, None);
    let flags = Flags { memory: Some(1), endpoint: Some("https://flag".into()), ..Flags::default() };
    assert_eq!(read(flags, &[("AWS_ENDPOINT_URL", "x")]), (Some(1), Some("https://flag".into()), true));
}

#[test]
fn a_malformed_file_is_wrong_usage_and_named() {
    let top = tempfile::tempdir().unwrap();
    let path = top.path().join("towline.toml");
    let long = format!("# {}", "x".repeat(70_000));
    for text in ["colour = 'red'", "repository = 1", "memory = 'much'", "memory = -1", "memory =", &long] {
        std::fs::write(&path, text).unwrap();
        let error = settings(Flags::default(), top.path(), &[]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{text:.20}");
        assert_eq!(error.place(), path.to_str(), "{text:.20}");
    }
}

#[test]
fn the_command_line_is_sound_and_teaches() {
    let mut command = Cli::command();
    command.clone().debug_assert();
    for verb in command.get_subcommands_mut() {
        let (name, help) = (verb.get_name().to_owned(), verb.render_help().to_string());
        assert!(help.contains(&format!("towline {name}")), "{name} shows no example");
        assert!(verb.get_about().is_some(), "{name}");
    }
    let manual = command.render_long_help().to_string();
    for part in ["Getting started", "Exit codes", "TOWLINE_REPO", "towline.toml", "PREFIX"] {
        assert!(manual.contains(part), "{part}");
    }
}

#[test]
fn what_is_not_parsed_is_shown_without_secrets() {
    let mut error = Cli::try_parse_from(["towline", "sync", "https://u:hush@h", "s3://bucket"]).unwrap_err();
    super::hide_user(&mut error);
    let text = error.render().to_string();
    assert!(text.contains("https://***@h") && !text.contains("hush"), "{text}");
}

#[test]
fn what_makes_no_sense_is_not_parsed() {
    for line in [
        "towline save x",
        "towline save x a//b",
        "towline save x y --label novalue",
        "towline save x y --cut sideways",
        "towline save x y --rank 0",
        "towline save x y --world-size 2 --attempt a",
        "towline save x y --rank 0 --world-size 2 --attempt a/b",
        "towline cat a:b --range 5-1",
        "towline collect --grace soon",
        "towline ls --memory 1Q",
        "towline ls -q -v",
        "towline sync a gs://b",
        "towline frobnicate",
    ] {
        assert!(Cli::try_parse_from(line.split(' ')).is_err(), "{line}");
    }
    for line in [
        "towline cat a:b --range -5",
        "towline collect --grace 0",
        "towline ls --json --memory 512MiB",
        "towline -vv ls",
    ] {
        assert!(Cli::try_parse_from(line.split(' ')).is_ok(), "{line}");
    }
}

#[test]
fn lists_are_aligned() {
    let one = |name: &str, bytes| Listed {
        name: name.into(),
        manifest: "ab".repeat(32),
        bytes,
        files: 3,
        chunks: 40,
        saved: "2026-01-02T03:04:05Z".into(),
        facts: StepFacts::default(),
    };
    let refs = [one("a", 1 << 30), one("run-7/step-1", 17)];
    let expected = "\
NAME             SIZE  SAVED
a             1.0 GiB  2026-01-02T03:04:05Z
run-7/step-1     17 B  2026-01-02T03:04:05Z
";
    assert_eq!(render::refs(&refs, false), expected);
    assert!(render::refs(&refs, true).contains("CHUNKS"));
    assert_eq!(render::refs(&[], false), "");

    let change = |path: &'static str, change, bytes_before, bytes_after| Change {
        path: path.into(),
        change,
        bytes_before,
        bytes_after,
        new_bytes: 0,
    };
    let (changes, mut text) = ([change("new\n", "added", 0, 5), change("old", "removed", 5, 0)], Vec::new());
    render::changes(&mut text, || changes.iter().cloned()).unwrap();
    let text = String::from_utf8(text).unwrap();
    assert_eq!(text, "   BEFORE  AFTER  NEW  PATH\n+     0 B    5 B  0 B  new\\n\n-     5 B    0 B  0 B  old\n");
}

/// Hours, if each place is compared with each name.
#[test]
fn damage_that_hits_very_many_names_and_places_is_rendered() {
    let count = 100_000;
    let names: Vec<String> = (0..count).map(|n| format!("n/{n:06}")).collect();
    let tensors = names.iter().flat_map(|name| ["x", "y w"].map(|place| format!("{name}:{place}"))).collect();
    let damage = Damage { what: "pack A".into(), error: "gone".into(), names, more_names: 0, tensors };
    let report = VerifyReport { damaged: vec![damage], ..VerifyReport::default() };
    let text = render::verify(&report, false, Colors::PLAIN);
    assert_eq!(text.lines().count(), 2 + 3 * count);
    assert!(text.ends_with("  hits n/099999\n    x\n    y w\n"));
}

#[test]
fn damage_and_diagnoses_say_what_they_hit() {
    let (names, tensors) = (vec!["run/1".into()], vec!["run/1:m.safetensors w".into()]);
    let damage = Damage { what: "pack A".into(), error: "flipped bit".into(), names, more_names: 2, tensors };
    let mut report = VerifyReport { packs: 1, chunks: 2, bytes: 3, damaged: vec![damage], ..VerifyReport::default() };
    let text = render::verify(&report, true, Colors::PLAIN);
    assert!(
        text.contains("damaged pack A: flipped bit\n  hits run/1\n    m.safetensors w\n  hits 2 more names, "),
        "{text}"
    );
    report.damaged.clear();
    assert!(render::verify(&report, false, Colors::PLAIN).ends_with("nothing is damaged\n"));

    let check = Check {
        what: "versioning".into(),
        outcome: Outcome::Bad,
        detail: "on".into(),
        help: Some("turn it off".into()),
    };
    let text = render::diagnosis(&Diagnosis { checks: vec![check] }, Colors::PLAIN);
    assert_eq!(text, "BAD   versioning: on\n      help: turn it off\n");
}
