//! The documents against the programs: each command line in them parses, each settings file is one that an agent takes, and the
//! table of settings has every key.

use std::fs;
use std::path::{Path, PathBuf};

use clap::error::ErrorKind as Wrong;
use clap::{CommandFactory, Parser};

use super::args::Cli;
use super::config::{Environment, Flags, Route, Settings};
use super::help;
use crate::agent::Config;
use crate::policy::PolicyRules;

/// Errors of the parser about a verb that lacks an argument, and flags without a verb.
const LACKING: [Wrong; 3] =
    [Wrong::MissingRequiredArgument, Wrong::MissingSubcommand, Wrong::DisplayHelpOnMissingArgumentOrSubcommand];

/// A fenced block of a document.
struct Block {
    /// The document, and the line where it begins.
    place: String,
    language: String,
    text: String,
}

/// The text of README.md, docs/ and the README of the Python package.
fn documents() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut paths: Vec<PathBuf> = fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    paths.extend(["README.md", "bindings/python/README.md"].map(|path| root.join(path)));
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), fs::read_to_string(path).unwrap())).collect()
}

fn blocks(path: &Path, text: &str) -> Vec<Block> {
    let mut found: Vec<Block> = Vec::new();
    let mut within = false;
    for (number, line) in text.lines().enumerate() {
        match line.trim_start().strip_prefix("```") {
            Some(_) if within => within = false,
            Some(language) => {
                let place = format!("{}:{}", path.display(), number + 1);
                found.push(Block { place, language: language.trim().to_owned(), text: String::new() });
                within = true;
            }
            None if within => {
                let block = found.last_mut().unwrap();
                block.text += line;
                block.text += "\n";
            }
            None => {}
        }
    }
    found
}

fn blocks_in(languages: &[&str]) -> Vec<Block> {
    let all = documents().into_iter().flat_map(|(path, text)| blocks(&path, &text));
    all.filter(|block| languages.contains(&block.language.as_str())).collect()
}

/// The words of each command in a line of shell, without redirections. Knows quotes, comments, and what parts commands; no more
/// is in the documents.
fn words(line: &str) -> Vec<Vec<String>> {
    let (mut tokens, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for c in line.chars() {
        match (quote, c) {
            (Some(end), c) if c == end => quote = None,
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '#') if word.is_none() => break,
            (None, ' ') => tokens.extend(word.take()),
            (None, '&' | '|' | ';' | '>') => {
                tokens.extend(word.take());
                tokens.push(c.to_string());
            }
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    tokens.extend(word);
    let commands = tokens.split(|token| ["&", "|", ";"].contains(&token.as_str()));
    let redirected = |command: &[String]| command.iter().take_while(|word| *word != ">").cloned().collect::<Vec<_>>();
    commands.map(redirected).filter(|command| !command.is_empty()).collect()
}

/// The command lines of `towline` in a text of shell; with prompts, only what follows one.
fn command_lines(text: &str, prompts: bool) -> Vec<Vec<String>> {
    let text = text.replace("\\\n", " ");
    let lines = text.lines().filter_map(|line| if prompts { line.strip_prefix("$ ") } else { Some(line) });
    let mut found: Vec<Vec<String>> = lines.flat_map(words).collect();
    for command in &mut found {
        let assigned =
            command.iter().take_while(|word| word.split_once('=').is_some_and(|(name, _)| is_variable(name)));
        command.drain(..assigned.count());
    }
    found.retain(|command| command.first().is_some_and(|first| first == "towline"));
    found
}

fn is_variable(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_uppercase() || c == '_')
}

/// The parser's error for a command line.
fn complaint(command: &[String]) -> Option<String> {
    let error = Cli::try_parse_from(command).err()?;
    (error.exit_code() != 0).then(|| format!("{}\n{error}", command.join(" ")))
}

#[test]
fn every_command_line_in_the_documents_parses() {
    let (mut complaints, mut count) = (Vec::new(), 0);
    for block in blocks_in(&["sh", "bash", "console"]) {
        for command in command_lines(&block.text, block.language == "console") {
            count += 1;
            complaints.extend(complaint(&command).map(|said| format!("{}: {said}", block.place)));
        }
    }
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
    assert!(count >= 30, "only {count} command lines were found");
}

#[test]
fn every_command_line_in_running_text_parses() {
    let mut count = 0;
    for (path, text) in documents() {
        for (at, _) in text.match_indices("`towline ") {
            let span = text[at + 1..].split('`').next().unwrap();
            // With a placeholder it is a pattern: NAME, PIN..., [--wait], stat|check.
            let is_pattern = |word: &str| {
                word.contains(['[', '|']) || word.contains("...") || word.chars().all(|c| c.is_ascii_uppercase())
            };
            if span.contains('\n') || span.split(' ').any(is_pattern) {
                continue;
            }
            let command: Vec<String> = span.split(' ').map(str::to_owned).collect();
            let wrong = Cli::try_parse_from(&command).err().filter(|error| error.exit_code() != 0);
            // A verb alone is its name, whatever else it wants.
            let wrong = wrong.filter(|error| !LACKING.contains(&error.kind()));
            assert!(wrong.is_none(), "{}: {span}: {wrong:?}", path.display());
            count += 1;
        }
    }
    assert!(count >= 5, "only {count} were found");
}

#[test]
fn every_example_in_the_help_parses() {
    let mut texts = vec![help::MANUAL.to_owned()];
    texts.extend(Cli::command().get_subcommands().filter_map(|verb| Some(verb.get_after_help()?.to_string())));
    let mut count = 0;
    for line in texts.iter().flat_map(|text| text.lines()).filter(|line| line.starts_with("  towline ")) {
        // Its description follows it.
        let line = line.trim_start().split("  ").next().unwrap();
        for command in command_lines(line, false) {
            assert_eq!(complaint(&command), None);
            count += 1;
        }
    }
    assert!(count >= 50, "only {count} examples were found");
}

#[test]
fn a_command_that_is_wrong_is_found() {
    let text = "Text\n```console\n$ A=b towline ls && towline frobnicate  # comment\ntowline output\n```\n";
    let block = &blocks(Path::new("x.md"), text)[0];
    let found = command_lines(&block.text, true);
    assert_eq!(found, [vec!["towline", "ls"], vec!["towline", "frobnicate"]]);
    assert!(complaint(&found[0]).is_none() && complaint(&found[1]).is_some());
    let quoted = command_lines("towline restore a b \\\n --tensor '*norm*' | cat; towline ls &", false);
    assert_eq!(quoted, [vec!["towline", "restore", "a", "b", "--tensor", "*norm*"], vec!["towline", "ls"]]);
}

/// Settings that show only some sections, with what else they need.
fn completed(text: &str) -> String {
    let has = |key: &str| text.lines().any(|line| line.split('=').next().is_some_and(|left| left.trim() == key));
    let mut whole = String::new();
    let top = [("repository", "'/r'"), ("identity", "'/i'"), ("listen", "'0.0.0.0:7071'")];
    for (key, value) in top.into_iter().filter(|(key, _)| !has(key)) {
        whole.extend([key, " = ", value, "\n"]);
    }
    whole += text;
    for (section, lines) in [
        ("[cache]", "dir = '/c'\ncapacity = '1G'"),
        ("[peers]", "addresses = ['a:7071']"),
        ("[[allow]]", "agents = '**'\nnames = '**'"),
    ] {
        if !text.lines().any(|line| line.starts_with(section)) {
            whole.extend([section, "\n", lines, "\n"]);
        }
    }
    whole
}

#[test]
fn every_settings_file_in_the_documents_is_taken() {
    let blocks = blocks_in(&["toml"]);
    assert!(blocks.len() >= 3, "{}", blocks.len());
    let (policies, blocks): (Vec<_>, Vec<_>) =
        blocks.into_iter().partition(|block| block.text.starts_with("version ="));
    assert!(!policies.is_empty());
    for policy in policies {
        let read = PolicyRules::read(&policy.text);
        assert!(read.is_ok(), "{}: {:?}", policy.place, read.unwrap_err());
    }
    // Cases beside a policy are typed by tests/it/policy.rs.
    for block in blocks.into_iter().filter(|block| !block.text.starts_with("policy =")) {
        let taken = Config::parse(&completed(&block.text), Path::new("/etc/towline/agent.toml"));
        assert!(taken.is_ok(), "{}: {:?}", block.place, taken.unwrap_err());
    }
}

#[test]
fn the_settings_in_the_help_are_taken() {
    let (_, settings) = help::MANUAL.split_once("towline.toml may hold:\n").unwrap();
    let settings = settings.split("\n\n").next().unwrap();
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("towline")).unwrap();
    fs::write(folder.path().join("towline/towline.toml"), settings).unwrap();
    let variable = |name: &str| (name == "XDG_CONFIG_HOME").then(|| folder.path().into());
    let around = Environment { folder: folder.path(), variable: &variable };
    let taken = Settings::resolve(Flags::default(), around).unwrap();
    assert_eq!(taken.repository().unwrap(), Route::Named("s3://bucket/prefix".parse().unwrap()));
    assert_eq!((taken.memory, settings.lines().count()), (Some(1 << 30), 4));
}

#[test]
fn settings_that_ship_are_taken() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for settings in
        ["kubernetes/agent.toml", "kubernetes/scheduler/agent.toml", "slurm/agent.toml", "skypilot/agent.toml"]
    {
        Config::read(&root.join("deploy").join(settings)).unwrap();
    }
}

/// Settings that the chart renders, with the values of its tests.
#[test]
fn settings_of_the_chart_are_taken() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/golden");
    for (file, agents) in [("helm-minimal.yaml", 1), ("helm-full.yaml", 5), ("helm-own-certificates.yaml", 4)] {
        let text = fs::read_to_string(golden.join(file)).unwrap();
        let mut found = 0;
        for part in text.split("agent.toml: |\n").skip(1) {
            let lines = part.lines().take_while(|line| line.is_empty() || line.starts_with("    "));
            let settings: Vec<&str> = lines.map(|line| line.trim_start_matches("    ")).collect();
            Config::parse(&settings.join("\n"), Path::new("/etc/towline/settings/agent.toml"))
                .unwrap_or_else(|error| panic!("{file}: {error:?}"));
            found += 1;
        }
        assert_eq!(found, agents, "{file}");
    }
}

/// The keys that a section takes, as the parser itself lists them when it meets one that it does not know.
fn keys(section: &str) -> Vec<String> {
    let error = Config::parse(&section.replace("{}", "unknown_to_all = 1"), Path::new("/x")).unwrap_err();
    let said = format!("{error:?}");
    let listed = said.split_once("unknown_to_all`, expected ").map(|(_, listed)| listed.lines().next().unwrap());
    let listed = listed.unwrap_or_else(|| panic!("{section}: {said}"));
    listed.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

#[test]
fn every_key_of_the_settings_is_in_the_table() {
    let (_, text) = documents().into_iter().find(|(path, _)| path.ends_with("docs/operations.md")).unwrap();
    let table: Vec<&str> =
        text.lines().skip_while(|line| !line.starts_with("| key |")).take_while(|line| line.starts_with('|')).collect();
    let firsts: Vec<&str> = table.iter().map(|row| row.split('|').nth(1).unwrap().trim()).collect();
    let top = keys("{}");
    assert!(top.len() > 10 && top.contains(&"repository".to_owned()), "{top:?}");
    let sections = [
        ("[admission]", "[admission]\n{}"),
        ("[cache]", "[cache]\n{}"),
        ("[staging]", "[staging]\n{}"),
        ("[advisor]", "[advisor]\n{}"),
        ("[[advisor.kube]]", "[[advisor.kube]]\n{}"),
        ("[[advisor.slurm]]", "[[advisor.slurm]]\n{}"),
        ("[[advisor.skypilot]]", "[[advisor.skypilot]]\n{}"),
        ("[peers]", "[peers]\n{}"),
        ("[handoff]", "[handoff]\n{}"),
        ("[audit]", "[audit]\n{}"),
        ("[[handoff.accept]]", "[[handoff.accept]]\n{}"),
        ("[caller_pins]", "[caller_pins]\n{}"),
        ("[token_pins]", "[token_pins]\n{}"),
        ("[[limits]]", "[[limits]]\n{}"),
        ("[[allow]]", "[[allow]]\n{}"),
        ("[sidecar]", "[sidecar]\n{}"),
        ("[[sidecar.watch]]", "[[sidecar.watch]]\n{}"),
        ("[service_account]", "[service_account]\n{}"),
        ("[webhook]", "[webhook]\n{}"),
        ("[webhook.issuer]", "[webhook.issuer]\n{}"),
        ("[[webhook.allow]]", "[[webhook.allow]]\n{}"),
        ("[kueue]", "[kueue]\n{}"),
        ("[[kueue.allow]]", "[[kueue.allow]]\n{}"),
        ("[gates]", "[gates]\n{}"),
        ("[[gates.allow]]", "[[gates.allow]]\n{}"),
    ];
    let is_section = |key: &String| sections.iter().any(|(name, _)| words_in(name).any(|word| word == key));
    for key in top.iter().filter(|key| !is_section(key)) {
        let documents = |first: &&str| !first.starts_with("`[") && words_in(first).any(|word| word == key);
        assert!(firsts.iter().any(documents), "`{key}` is not in the table of docs/operations.md");
    }
    for (name, section) in sections {
        for key in keys(section).iter().filter(|key| !is_section(key)) {
            let documents =
                |first: &&str| first.starts_with(&format!("`{name} ")) && words_in(first).any(|word| word == key);
            assert!(firsts.iter().any(documents), "`{key}` of {name} is not in the table of docs/operations.md");
        }
    }
}

fn words_in(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
}
