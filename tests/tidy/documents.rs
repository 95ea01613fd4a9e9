//! Rules of the documents: each promise is quoted by a test, and prose is wrapped.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use super::{Source, root, sources, whole_words};

/// Columns of a line of prose in a document, at most.
const COLUMNS_MAX: usize = 130;

/// The tags like P1 that stand in bold in a document.
fn tags(document: &str) -> BTreeSet<&str> {
    let is_tag = |text: &&str| {
        let mut chars = text.chars();
        chars.next().is_some_and(|c| c.is_ascii_uppercase()) && chars.as_str().parse::<u8>().is_ok()
    };
    document.split("**").skip(1).step_by(2).filter(is_tag).collect()
}

/// The tags that no test quotes.
fn unquoted<'a>(document: &'a str, tests: &[Source]) -> Vec<&'a str> {
    let quoted = |tag: &str| tests.iter().any(|test| whole_words(&test.text, tag).next().is_some());
    tags(document).into_iter().filter(|tag| !quoted(tag)).collect()
}

#[test]
fn every_promise_is_quoted_by_a_test() {
    let mut tests = sources();
    tests.retain(|source| source.path.starts_with("tests/") && !source.path.starts_with("tests/tidy"));
    for path in ["docs/semantics.md", "docs/security.md", "docs/policy.md"] {
        let document = fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("read {path}: {error}"));
        assert!(!tags(&document).is_empty(), "{path} holds no promise");
        assert_eq!(
            unquoted(&document, &tests),
            Vec::<&str>::new(),
            "promises of {path} that no file under tests/ quotes"
        );
    }
}

/// Prose is wrapped; tables, code and addresses cannot be.
#[test]
fn every_document_keeps_its_width() {
    let mut paths =
        vec!["README.md".into(), "ARCHITECTURE.md".into(), "CHANGELOG.md".into(), "bindings/python/README.md".into()];
    let folder = fs::read_dir(root().join("docs")).expect("docs/ is there");
    paths.extend(folder.map(|entry| PathBuf::from("docs").join(entry.expect("a file of docs/").file_name())));
    let mut report = String::new();
    for path in paths.iter().filter(|path| path.extension().is_some_and(|extension| extension == "md")) {
        let text = fs::read_to_string(root().join(path)).expect("a document is text");
        for at in wide(&text) {
            writeln!(report, "  {}: line {at}: longer than {COLUMNS_MAX} columns", path.display())
                .expect("write to a string");
        }
    }
    assert!(report.is_empty(), "\n{report}");
}

/// Numbers of the lines of prose in `document` that are too long.
fn wide(document: &str) -> Vec<usize> {
    let mut in_code = false;
    let lines = document.lines().enumerate().filter(|(_, line)| {
        let fence = line.trim_start().starts_with("```");
        in_code ^= fence;
        !in_code && !fence && !line.starts_with('|') && line.chars().count() > COLUMNS_MAX
    });
    lines.map(|(at, _)| at + 1).collect()
}

#[test]
fn rules_complain() {
    let long = "word ".repeat(COLUMNS_MAX / 5 + 1);
    assert_eq!(wide(&format!("short\n{long}\n| {long}\n```\n{long}\n```\n{long}")), [2, 7]);
    let document = "**P1** A promise. **P2** Another, of **great** weight. P3 is for later.";
    let tests = [Source::new("tests/it/a.rs", "// P1: A promise. P22")];
    assert_eq!(unquoted(document, &tests), ["P2"]);
}
