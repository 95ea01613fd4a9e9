//! The stranger: tests/golden/reader.py, written from docs/format.md alone, restores what Towline wrote.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::listing::listing;
use super::{bundles, expected, golden, lengths, second};

/// The tests' own Python with what tests/golden/requirements.txt asks for; none if it was not set up.
fn python() -> Option<PathBuf> {
    let venv = std::env::var_os("TOWLINE_VENV").map_or_else(|| root().join(".venv"), PathBuf::from);
    let python = venv.join("bin/python");
    let ready =
        Command::new(&python).args(["-c", "import blake3, zstandard"]).output().is_ok_and(|o| o.status.success());
    let required = std::env::var("TOWLINE_TEST_REQUIRE_SERVERS").is_ok_and(|value| value == "1");
    assert!(ready || !required, "{} lacks what tests/golden/requirements.txt asks for", python.display());
    ready.then_some(python)
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(python: &Path, arguments: &[&str]) -> Output {
    read_in(&golden(), python, arguments)
}

/// Runs the reader on the repository in `folder`.
fn read_in(folder: &Path, python: &Path, arguments: &[&str]) -> Output {
    let repository = folder.join("repository");
    let (verb, rest) = arguments.split_first().unwrap();
    let mut command = Command::new(python);
    command.arg(root().join("tests/golden/reader.py")).arg(verb).arg(repository).args(rest);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

#[test]
fn a_reader_written_from_the_specification_restores_every_name() {
    let Some(python) = python() else {
        eprintln!("skipped: no .venv with tests/golden/requirements.txt");
        return;
    };
    let expected = expected();
    let names = String::from_utf8(read(&python, &["list"]).stdout).unwrap();
    let names: Vec<&str> = names.lines().collect();
    assert_eq!(names, expected["names"].as_object().unwrap().keys().collect::<Vec<_>>());
    for name in names {
        let facts: serde_json::Value = serde_json::from_slice(&read(&python, &["facts", name]).stdout).unwrap();
        assert_eq!(facts, expected["names"][name]["facts"], "{name}");
        let dir = tempfile::tempdir().unwrap();
        let dest = dir.path().join("dest");
        read(&python, &["restore", name, dest.to_str().unwrap()]);
        let folder = expected["names"][name]["form"] == "folder";
        let top = if folder { dest } else { fs::read_dir(&dest).unwrap().next().unwrap().unwrap().path() };
        assert_eq!(serde_json::to_value(listing(&top)).unwrap(), expected["names"][name]["entries"], "{name}");
    }
}

#[test]
fn it_also_reads_maps_with_lengths_and_bundles() {
    let Some(python) = python() else {
        eprintln!("skipped: no .venv with tests/golden/requirements.txt");
        return;
    };
    for folder in [lengths::golden(), bundles::golden()] {
        let expected = super::expected_in(&folder);
        for (name, wanted) in expected["names"].as_object().unwrap() {
            let dir = tempfile::tempdir().unwrap();
            read_in(&folder, &python, &["restore", name, dir.path().join("dest").to_str().unwrap()]);
            let file = fs::read_dir(dir.path().join("dest")).unwrap().next().unwrap().unwrap().path();
            assert_eq!(serde_json::to_value(listing(&file)).unwrap(), wanted["entries"], "{name}");
        }
    }
}

#[test]
fn it_also_reads_what_is_kept_of_removed_names() {
    let Some(python) = python() else {
        eprintln!("skipped: no .venv with tests/golden/requirements.txt");
        return;
    };
    let (folder, expected) = (second::golden(), super::expected_in(&second::golden()));
    let names = String::from_utf8(read_in(&folder, &python, &["list"]).stdout).unwrap();
    assert_eq!(names.lines().collect::<Vec<_>>(), expected["names"].as_object().unwrap().keys().collect::<Vec<_>>());
    let kept = String::from_utf8(read_in(&folder, &python, &["kept"]).stdout).unwrap();
    assert_eq!(kept.lines().collect::<Vec<_>>(), expected["kept"].as_object().unwrap().keys().collect::<Vec<_>>());
    for (key, wanted) in expected["kept"].as_object().unwrap() {
        let mut key = key.split(' ');
        let (name, version) = (key.next().unwrap(), key.next().unwrap());
        let dir = tempfile::tempdir().unwrap();
        read_in(&folder, &python, &["back", name, version, dir.path().to_str().unwrap()]);
        let file = fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap().path();
        assert_eq!(serde_json::to_value(listing(&file)).unwrap(), wanted["entries"], "{name}");
    }
}
