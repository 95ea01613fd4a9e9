//! The architecture as a test: layers, sizes, first lines, where keys are spelt, where unsafe may stand.
//!
//! Each rule is a function from one source file to its complaints, so each has a test that it can complain.

#[path = "tidy/documents.rs"]
mod documents;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The layers, lowest first; within one, a module uses only those to its left.
const LAYERS: &[(u8, &[&str])] = &[
    (
        0,
        &[
            "error",
            "limits",
            "id",
            "clock",
            "backoff",
            "log_limit",
            "single_flight",
            "fair_turns",
            "blocks",
            "budget",
            "progress",
            "metrics",
            "size",
            "span",
            "pattern",
            "spelling",
            "toml_text",
            "work",
            "name",
            "selector",
            "identity",
        ],
    ),
    (1, &["chunk", "codec", "chunker", "checkpoint", "format", "policy"]),
    (2, &["storage", "tree", "cache", "repository", "audit"]),
    (3, &["transfer", "placement", "staging"]),
    (4, &["ops"]),
    (5, &["agent", "cli"]),
];
/// Names after `crate::` that are no modules: the re-exports that every layer may use.
const ROOT_NAMES: &[&str] = &["Error", "ErrorKind", "Result"];
/// Where `unsafe` may stand.
const UNSAFE_FILES: &[&str] = &[
    "benches/links/link/src/node.rs",
    "src/cli/allocator.rs",
    "src/codec/difference.rs",
    "src/codec/huffman/lanes.rs",
    "src/codec/planes/classed.rs",
    "src/codec/planes/split.rs",
    "src/codec/wide/mod.rs",
    "src/repository/index/map.rs",
    "src/ops/tensors/device.rs",
    "src/staging/cuda/copier.rs",
    "src/staging/cuda/decoder/mod.rs",
    "src/staging/cuda/driver.rs",
    "src/staging/cuda/mod.rs",
    "src/staging/ring/engine.rs",
    "src/staging/ring/mod.rs",
    "src/staging/ring/tests.rs",
    "src/staging/sealed.rs",
    "src/staging/upload.rs",
    "src/tree/change_times.rs",
    "tests/cuda/libcuda.rs",
    "tests/fuzz/src/memory.rs",
];
/// The one file that spells object keys.
const LAYOUT: &str = "src/repository/layout.rs";
/// How object keys begin.
const KEY_STARTS: &[&str] = &[
    "pack/",
    "log/",
    "index/",
    "manifest/",
    "map/",
    "part/",
    "snapshot/",
    "boundary/",
    "agent/",
    "audit/",
    "aside/",
    "tombstone/",
];
/// Lines in a file, tests included.
const LINES_MAX: usize = 600;

/// One source file, with its path from the repository's root.
struct Source {
    path: String,
    text: String,
}

impl Source {
    fn new(path: &str, text: &str) -> Self {
        Self { path: path.to_owned(), text: text.to_owned() }
    }

    /// The top-level module that a file under `src/` belongs to.
    fn module(&self) -> Option<&str> {
        let within = self.path.strip_prefix("src/")?;
        within.split('/').next().map(|first| first.strip_suffix(".rs").unwrap_or(first))
    }

    fn in_src(&self) -> bool {
        self.path.starts_with("src/")
    }

    /// How many `super` lead from this file to the crate's root.
    fn depth(&self) -> usize {
        let within = self.path.trim_start_matches("src/").trim_end_matches("/mod.rs");
        within.split('/').count()
    }

    /// The text without comments, string contents and unit tests.
    fn product_code(&self) -> String {
        if self.path.ends_with("/tests.rs") || self.path.contains("/tests/") {
            return String::new();
        }
        scan(product(&self.text)).code
    }
}

/// The text above its unit tests.
fn product(text: &str) -> &str {
    text.find("#[cfg(test)]\nmod ").map_or(text, |end| &text[..end])
}

/// A source text taken apart.
#[derive(Default)]
struct Scanned {
    /// Code as the compiler sees it, with every string literal empty.
    code: String,
    /// The contents of the string literals, as written.
    strings: Vec<String>,
}

/// Takes a Rust text apart: comments go, string literals are set aside.
fn scan(text: &str) -> Scanned {
    let mut scanned = Scanned::default();
    let mut rest = text;
    while let Some(next) = rest.chars().next() {
        let word_before = scanned.code.ends_with(is_word);
        let taken = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            block_comment_len(rest)
        } else if let Some((open, close)) = string_bounds(rest, word_before) {
            let body = &rest[open..];
            let raw = rest[..open].contains('r');
            let len = string_len(body, &close, raw);
            scanned.strings.push(body[..len].to_owned());
            scanned.code.push_str("\"\"");
            (open + len + close.len()).min(rest.len())
        } else {
            let len = char_literal_len(rest).unwrap_or(next.len_utf8());
            scanned.code.push_str(&rest[..len]);
            len
        };
        rest = &rest[taken..];
    }
    scanned
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn block_comment_len(text: &str) -> usize {
    let (mut depth, mut at) = (0_usize, 0);
    while at < text.len() {
        let (step, change) = match &text.as_bytes()[at..] {
            [b'/', b'*', ..] => (2, 1),
            [b'*', b'/', ..] => (2, -1),
            _ => (1, 0),
        };
        at += step;
        depth = depth.saturating_add_signed(change);
        if depth == 0 {
            break;
        }
    }
    at
}

/// If a string literal begins here: the length of its opening and what closes it.
fn string_bounds(text: &str, word_before: bool) -> Option<(usize, String)> {
    let prefix =
        ["br", "cr", "r", "b", "c", ""].into_iter().find(|p| text.starts_with(p) && (p.is_empty() || !word_before))?;
    let after = &text[prefix.len()..];
    let hashes = if prefix.ends_with('r') { after.len() - after.trim_start_matches('#').len() } else { 0 };
    after[hashes..].starts_with('"').then(|| {
        let close = if prefix.ends_with('r') { format!("\"{}", "#".repeat(hashes)) } else { "\"".to_owned() };
        (prefix.len() + hashes + 1, close)
    })
}

/// The length of a literal's body: up to what closes it and, unless it is raw, is not escaped.
fn string_len(body: &str, close: &str, raw: bool) -> usize {
    let mut at = 0;
    while at < body.len() {
        if body[at..].starts_with(close) {
            return at;
        }
        let escape = !raw && body[at..].starts_with('\\');
        let width = |from: usize| body[from..].chars().next().map_or(0, char::len_utf8);
        at += if escape { 1 + width(at + 1) } else { width(at) };
    }
    body.len()
}

/// `'x'` and `'\n'`, but not the lifetime `'x`.
fn char_literal_len(text: &str) -> Option<usize> {
    let inner = text.strip_prefix('\'')?;
    let end = if let Some(escaped) = inner.strip_prefix('\\') {
        1 + escaped.char_indices().skip(1).find(|(_, c)| *c == '\'').map(|(at, _)| at)?
    } else {
        inner.char_indices().nth(1).filter(|(_, c)| *c == '\'').map(|(at, _)| at)?
    };
    Some(1 + end + 1)
}

/// The places of `word` in `text` where it stands alone.
fn whole_words<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    text.match_indices(word)
        .map(|(at, _)| at)
        .filter(move |&at| !text[..at].ends_with(is_word) && !text[at + word.len()..].starts_with(is_word))
}

/// Floor and place of a module.
fn position(module: &str) -> Option<(u8, usize)> {
    LAYERS.iter().find_map(|(layer, modules)| Some((*layer, modules.iter().position(|m| *m == module)?)))
}

/// The names that follow `crate::` and the `super::` chains that reach the root.
fn root_names(source: &Source) -> BTreeSet<String> {
    let code = scan(&source.text).code;
    let mut found = BTreeSet::new();
    for at in whole_words(&code, "crate") {
        if let Some(path) = code[at + "crate".len()..].strip_prefix("::") {
            found.extend(first_segments(path));
        }
    }
    for at in whole_words(&code, "super") {
        let mut rest = &code[at..];
        let mut steps = 0;
        while let Some(after) = rest.strip_prefix("super::") {
            (rest, steps) = (after, steps + 1);
        }
        if steps >= source.depth() && !code[..at].ends_with("super::") {
            let own = source.module().unwrap_or_default();
            found.extend(first_segments(rest).into_iter().filter(|name| position(name).is_some() && name != own));
        }
    }
    found
}

/// `a::b` gives a; `{a::b, c::{d, e}}` gives a and c.
fn first_segments(path: &str) -> Vec<String> {
    let word = |text: &str| text.chars().take_while(|c| is_word(*c)).collect::<String>();
    let Some(list) = path.strip_prefix('{') else { return vec![word(path)] };
    let (mut names, mut depth, mut fresh) = (Vec::new(), 1_usize, true);
    for (at, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 1 => fresh = true,
            c if fresh && is_word(c) => {
                names.push(word(&list[at..]));
                fresh = false;
            }
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    names
}

fn layers(source: &Source) -> Vec<String> {
    let Some(module) = source.module().filter(|m| source.in_src() && !["lib", "main"].contains(m)) else {
        return Vec::new();
    };
    let Some((layer, place)) = position(module) else {
        return vec![format!("module {module} is on no layer: give it one in tests/tidy.rs and in src/lib.rs")];
    };
    let complaint = |name: &String| match position(name) {
        _ if name == module || ROOT_NAMES.contains(&name.as_str()) => None,
        None => Some(format!("uses crate::{name}: name the module that it lives in")),
        Some((4, _)) if layer != 5 => Some(format!("uses crate::{name}: only an entry point may call an operation")),
        Some(other) if other < (layer, place) => None,
        Some((other, _)) => {
            Some(format!("{module} (layer {layer}) uses crate::{name} (layer {other}, not to its left)"))
        }
    };
    root_names(source).iter().filter_map(complaint).collect()
}

fn size(source: &Source) -> Vec<String> {
    let lines = source.text.lines().count();
    (lines > LINES_MAX).then(|| format!("{lines} lines: at most {LINES_MAX}; split it")).into_iter().collect()
}

fn first_line(source: &Source) -> Vec<String> {
    let said = source.text.lines().next().is_some_and(|line| line.starts_with("//! ") && line.len() > 8);
    (!said).then(|| "first line must be `//!` and say what the file is".to_owned()).into_iter().collect()
}

fn ascii(source: &Source) -> Vec<String> {
    let bad = source.text.lines().enumerate().filter(|(_, line)| source.in_src() && !line.is_ascii());
    bad.map(|(at, _)| format!("line {}: not ASCII: write an escape", at + 1)).collect()
}

/// A comment begins with a noun or a verb: one that begins with a pronoun must be read twice.
fn plain_comments(source: &Source) -> Vec<String> {
    if source.path.starts_with("tests/") {
        return Vec::new();
    }
    let begins = |line: &str| {
        let comment = line.trim_start().strip_prefix("//").map(|rest| rest.trim_start_matches(['/', '!']).trim_start());
        let first = comment.and_then(|comment| comment.split([' ', ',', '.']).next());
        first.is_some_and(|first| ["What", "Who", "Whom", "That"].contains(&first))
    };
    let mut within = false;
    let mut complaints = Vec::new();
    for (at, line) in source.text.lines().enumerate() {
        let is_comment = line.trim_start().starts_with("//");
        if is_comment && !within && begins(line) {
            complaints.push(format!("line {}: begin the comment with a noun or a verb", at + 1));
        }
        within = is_comment;
    }
    complaints
}

fn unfinished(source: &Source) -> Vec<String> {
    // Spelt in halves: this file obeys its own rule.
    let words = [
        concat!("TO", "DO"),
        concat!("FIX", "ME"),
        concat!("XX", "X"),
        concat!("un", "implemented"),
        concat!("to", "do"),
    ];
    let found = |word: &&str| match *word {
        macro_name if macro_name.starts_with(char::is_lowercase) => {
            whole_words(&source.text, macro_name).any(|at| source.text[at + macro_name.len()..].starts_with('!'))
        }
        mark => whole_words(&source.text, mark).next().is_some(),
    };
    words.iter().filter(|word| found(word)).map(|word| format!("{word}: finish it or write an issue")).collect()
}

fn unsafe_code(source: &Source) -> Vec<String> {
    let found = whole_words(&scan(&source.text).code, "unsafe").next().is_some();
    let allowed = UNSAFE_FILES.contains(&source.path.as_str());
    (found && !allowed).then(|| format!("unsafe: only in {}", UNSAFE_FILES.join(", "))).into_iter().collect()
}

fn keys(source: &Source) -> Vec<String> {
    let judged = ["src/repository/", "src/ops/"].iter().any(|folder| source.path.starts_with(folder));
    if !judged || source.path == LAYOUT || source.path.ends_with("/tests.rs") || source.path.contains("/tests/") {
        return Vec::new();
    }
    let spells = |literal: &String| KEY_STARTS.iter().any(|start| literal.starts_with(start));
    let literals = scan(product(&source.text)).strings;
    literals
        .iter()
        .filter(|literal| spells(literal))
        .map(|key| format!("spells the key {key:?}: that is {LAYOUT}'s"))
        .collect()
}

fn printing(source: &Source) -> Vec<String> {
    if !source.in_src() || source.path.starts_with("src/cli/") || source.path == "src/main.rs" {
        return Vec::new();
    }
    let code = source.product_code();
    let calls = |name: &&&str| whole_words(&code, name).any(|at| code[at + name.len()..].starts_with('!'));
    let names = ["println", "eprintln", "print", "eprint"];
    names.iter().filter(calls).map(|name| format!("{name}!: only cli speaks to people")).collect()
}

fn pure_layers(source: &Source) -> Vec<String> {
    let low = source.module().and_then(position).is_some_and(|(layer, _)| source.in_src() && layer <= 1);
    let found = whole_words(&source.product_code(), "tokio").next().is_some();
    (low && found
        && ![
            "src/budget/mod.rs",
            "src/budget/growing.rs",
            "src/budget/callers.rs",
            "src/single_flight.rs",
            "src/fair_turns.rs",
            "src/work.rs",
        ]
        .contains(&source.path.as_str()))
    .then(|| "tokio on layer 0 or 1: those do no I/O".to_owned())
    .into_iter()
    .collect()
}

const RULES: &[fn(&Source) -> Vec<String>] =
    &[layers, size, first_line, ascii, plain_comments, unfinished, unsafe_code, keys, printing, pure_layers];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every Rust file of the project, sorted.
fn sources() -> Vec<Source> {
    let mut folders: Vec<PathBuf> = ["src", "tests", "benches"].iter().map(|name| root().join(name)).collect();
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(&folder) else { continue };
        for entry in entries {
            let path = entry.expect("list a source folder").path();
            if path.is_dir() && !path.ends_with("target") {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).expect("read a source file");
                let within = path.strip_prefix(root()).expect("a source file lies in the repository");
                found.push(Source { path: within.display().to_string(), text });
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

/// Lines of `git diff --name-status` that are anything but an addition.
fn changed_golden(name_status: &str) -> Vec<&str> {
    name_status.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('A')).collect()
}

#[test]
fn every_file_keeps_the_rules() {
    let sources = sources();
    assert!(sources.len() > 10, "found only {} source files", sources.len());
    let mut report = String::new();
    for source in &sources {
        for complaint in RULES.iter().flat_map(|rule| rule(source)) {
            writeln!(report, "  {}: {complaint}", source.path).expect("write to a string");
        }
    }
    assert!(report.is_empty(), "\n{report}");
}

/// The picture of the layers is in lib.rs alone, and is the one that the rules go by.
#[test]
fn the_picture_of_the_layers_is_true() {
    let front = std::fs::read_to_string(root().join("src/lib.rs")).expect("read src/lib.rs");
    let is_there = |name: &str, ending: &str| root().join(format!("src/{name}{ending}")).exists();
    let drawn: Vec<(u8, BTreeSet<&str>)> = front.lines().rev().filter_map(drawn_layer).collect();
    assert_eq!(drawn.len(), LAYERS.len());
    for ((number, modules), (drawn, names)) in LAYERS.iter().zip(drawn) {
        // Types that carry bytes from one layer to the next are not drawn.
        let is_drawn = |name: &&str| *name != "chunk" && (is_there(name, "") || is_there(name, ".rs"));
        let modules: BTreeSet<&str> = modules.iter().copied().filter(is_drawn).collect();
        assert_eq!((*number, modules), (drawn, names));
    }
    let other = std::fs::read_to_string(root().join("ARCHITECTURE.md")).expect("read ARCHITECTURE.md");
    assert_eq!(other.lines().filter_map(drawn_layer).count(), 0, "the picture is in src/lib.rs");
}

/// A line of the picture: its number, and the modules up to the first wide gap.
fn drawn_layer(line: &str) -> Option<(u8, BTreeSet<&str>)> {
    let (number, rest) = line.trim_start_matches("//! ").strip_prefix("layer ")?.split_once("  ")?;
    let names = rest.split("   ").next()?;
    Some((number.parse().ok()?, names.split_whitespace().collect()))
}

/// A user of the library builds no server and no command line.
#[test]
fn features_bring_only_what_they_need() {
    let agent = ["axum", "hyper-util", "quinn", "rcgen", "x509-parser"];
    let cli = ["clap", "clap_complete", "indicatif", "tracing-subscriber"];
    for (features, absent) in
        [("", [agent.as_slice(), &cli].concat()), ("agent", cli.to_vec()), ("cli", agent.to_vec())]
    {
        let arguments = ["tree", "--offline", "--locked", "--edges", "normal", "--prefix", "none", "--depth", "1"];
        let chosen = ["--package", "towline", "--no-default-features", "--features", features];
        let mut tree = Command::new(env!("CARGO"));
        let output = tree.current_dir(root()).args(arguments).args(chosen).output().expect("run cargo tree");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let listed = String::from_utf8_lossy(&output.stdout);
        let names: BTreeSet<&str> = listed.lines().filter_map(|line| line.split(' ').next()).collect();
        assert!(names.contains("tokio"), "{listed}");
        let there: Vec<_> = absent.into_iter().filter(|name| names.contains(name)).collect();
        assert!(there.is_empty(), "features {features:?} bring {there:?}");
    }
}

#[test]
fn golden_files_are_only_ever_added() {
    let arguments = ["diff", "--name-status", "--no-renames", "HEAD", "--", "tests/golden"];
    let Ok(output) = Command::new("git").current_dir(root()).args(arguments).output() else { return };
    if output.status.success() {
        let listed = String::from_utf8_lossy(&output.stdout);
        assert_eq!(changed_golden(&listed), Vec::<&str>::new(), "a written format is never edited: add a new version");
    }
}

/// Number of complaints of `rule` about `text` at `path`.
fn judge(rule: fn(&Source) -> Vec<String>, path: &str, text: &str) -> usize {
    rule(&Source::new(path, text)).len()
}

#[test]
fn layers_complain() {
    for (path, text) in [
        ("src/codec/zstd.rs", "use crate::repository::Repository;"),
        ("src/codec/zstd.rs", "use crate::{error::Result, format::{Pack, Frame}};"),
        ("src/storage/probe.rs", "fn f() { crate::tree::walk() }"),
        ("src/repository/mod.rs", "use crate::ops::save;"),
        ("src/id.rs", "use crate::Repository;"),
        ("src/storage/mod.rs", "use super::repository::Ref;"),
        ("src/storage/deep/a.rs", "use super::super::super::ops::save;"),
        ("src/surprise.rs", "//! A module without a layer."),
    ] {
        assert_eq!(judge(layers, path, text), 1, "{path}: {text}");
    }
    for (path, text) in [
        ("src/cli/save.rs", "use crate::{error::{Error, Result}, ops, repository::layout};"),
        ("src/repository/log/fold.rs", "use super::super::layout; use super::entry; use crate::storage::Store;"),
        (
            "src/codec/mod.rs",
            "//! Not [`crate::ops`], says a comment, nor \"crate::cli\".\nconst A: &str = \"crate::cli\";",
        ),
        ("src/format/pack.rs", "use crate::chunker::Cut; use crate::{Error, Result};"),
        ("src/lib.rs", "pub use crate::ops::save;"),
    ] {
        assert_eq!(judge(layers, path, text), 0, "{path}: {text}");
    }
}

#[test]
fn plain_rules_complain() {
    assert_eq!(judge(size, "tests/it/a.rs", &"\n".repeat(LINES_MAX + 1)), 1);
    assert_eq!(judge(size, "tests/it/a.rs", &"\n".repeat(LINES_MAX)), 0);
    assert_eq!(judge(first_line, "src/a.rs", "use std::fmt;\n//! Late."), 1);
    assert_eq!(judge(first_line, "src/a.rs", "//!\n"), 1);
    assert_eq!(judge(first_line, "src/a.rs", "//! What it is.\n"), 0);
    assert_eq!(judge(ascii, "src/a.rs", "//! Caf\u{e9}."), 1);
    assert_eq!(judge(ascii, "tests/a.rs", "//! Caf\u{e9}."), 0);
    assert_eq!(judge(plain_comments, "src/a.rs", "    /// What it is.\n// Who asks,\nfn f() {}\n// That, too.\n"), 2);
    assert_eq!(judge(plain_comments, "src/a.rs", "//! Names.\n//! What they are.\n// Whatever comes.\n"), 0);
    assert_eq!(judge(unfinished, "src/a.rs", concat!("// TO", "DO: later")), 1);
    assert_eq!(judge(unfinished, "tests/a.rs", concat!("fn f() { to", "do!() }")), 1);
    assert_eq!(judge(unfinished, "src/a.rs", concat!("a mktemp(\"XX", "XXXX\") of a TO", "DOs list")), 0);
}

#[test]
fn rules_of_place_complain() {
    let unsound = "fn f() { unsafe { g() } }";
    assert_eq!(judge(unsafe_code, "src/codec/raw.rs", unsound), 1);
    assert_eq!(judge(unsafe_code, UNSAFE_FILES[0], unsound), 0);
    assert_eq!(
        judge(unsafe_code, "src/codec/raw.rs", "// unsafe\n#![deny(unsafe_code)] const A: &str = \"unsafe\";"),
        0
    );

    let spelt = "let key = format!(\"pack/{session}/{ulid}\");";
    assert_eq!(judge(keys, "src/repository/writer.rs", spelt), 1);
    assert_eq!(judge(keys, "src/ops/verify.rs", "join(r#\"log/\"#)"), 1);
    assert_eq!(judge(keys, LAYOUT, spelt), 0);
    assert_eq!(judge(keys, "src/repository/writer.rs", "/// pack/A\nlet a = \"a pack/b\";"), 0);
    assert_eq!(judge(keys, "src/repository/log/tests.rs", spelt), 0);

    assert_eq!(judge(printing, "src/ops/save.rs", "println!(\"saved\");"), 1);
    assert_eq!(judge(printing, "src/cli/save.rs", "println!(\"saved\");"), 0);
    assert_eq!(judge(printing, "src/ops/save.rs", "/// println!(\"{}\", 1)\nfn println() {}"), 0);

    assert_eq!(judge(pure_layers, "src/format/pack.rs", "use tokio::io::AsyncRead;"), 1);
    assert_eq!(judge(pure_layers, "src/storage/open.rs", "use tokio::io::AsyncRead;"), 0);
    assert_eq!(
        judge(pure_layers, "src/progress.rs", "fn f() {}\n#[cfg(test)]\nmod tests { #[tokio::test] fn t() {} }"),
        0
    );
}

#[test]
fn rules_of_documents_complain() {
    assert_eq!(changed_golden("A\ttests/golden/v1/new\nM\ttests/golden/v1/pack\nD\ttests/golden/v1/map\n").len(), 2);
}

#[test]
fn a_text_is_taken_apart_as_the_compiler_would() {
    let text = "a /* b /* c */ d */ e // f\n'g' '\"' '\\'' &'h str \"i\\\"j\" r#\"k\"l\"# b\"m\" br\"n\\\" for\"\"";
    let scanned = scan(text);
    assert_eq!(scanned.strings, ["i\\\"j", "k\"l", "m", "n\\", ""]);
    assert_eq!(scanned.code, "a  e \n'g' '\"' '\\'' &'h str \"\" \"\" \"\" \"\" for\"\"");
}
