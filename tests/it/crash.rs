//! Killed without warning, a hundred times: whatever save, sync or collect was doing, the repository verifies, what was
//! acknowledged is there, and the next run uses what was uploaded.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use towline::ops::{RestoreOptions, VerifyOptions};
use towline::repository::{OpenOptions, Repository};
use towline::storage::{Location, StoreOptions, open};

use crate::data::{name, noise, tree_digest};

const KILLS: u64 = 100;

struct Fixture {
    /// What `--memory` says.
    memory: &'static str,
    dir: tempfile::TempDir,
    /// A small generator of its own, so that a run can be repeated.
    rng: u64,
}

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let fixture = Self { dir, rng: 0x9e37_79b9_7f4a_7c15, memory: "128M" };
        for repository in ["a", "b"] {
            assert!(fixture.towline(&["init", &fixture.text(repository)]).status().unwrap().success());
        }
        fixture
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.rng ^= self.rng << 13;
        self.rng ^= self.rng >> 7;
        self.rng ^= self.rng << 17;
        self.rng % bound
    }

    fn towline(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
        command.args(["--memory", self.memory, "-q"]).args(args).env("XDG_CACHE_HOME", self.path("cache"));
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command
    }

    /// A tree that shares much with that of the round before.
    fn write_source(&mut self, round: u64) -> PathBuf {
        let source = self.path("source");
        fs::create_dir_all(&source).unwrap();
        for file in 0..4 {
            if round == 0 || self.below(2) == 0 {
                fs::write(source.join(format!("{file}")), noise(round * 10 + file, 3_000_000)).unwrap();
            }
        }
        source
    }

    /// Runs a command and kills it after a moment; true if it was done before.
    fn kill_in_the_middle(&mut self, args: &[&str], usual: Duration) -> bool {
        let wait = Duration::from_micros(self.below(u64::try_from(usual.as_micros()).unwrap() + 2000));
        let mut child = self.towline(args).spawn().unwrap();
        std::thread::sleep(wait);
        child.kill().unwrap();
        child.wait().unwrap().success()
    }
}

async fn check(path: &Path, cache: PathBuf) {
    let store = open(&Location::directory(path).unwrap(), &StoreOptions::default()).await.unwrap();
    let options = OpenOptions { cache: Some(cache), memory: Some(64 << 20), ..OpenOptions::default() };
    let repository = Repository::open(store, options).await.unwrap();
    let report = repository.verify(None, &VerifyOptions { data: true, ..VerifyOptions::default() }).await.unwrap();
    assert!(report.damaged.is_empty(), "{report:?}");
}

/// P1: "A ref never names anything incomplete." F7: "A save, sync, collect, verify or restore that is killed at any moment
/// leaves a repository that verifies, with every ref at a value that a commit gave it."
#[tokio::test(flavor = "multi_thread")]
async fn killed_a_hundred_times_nothing_is_damaged_and_nothing_acknowledged_is_lost() {
    let mut fixture = Fixture::new();
    let (a, b) = (fixture.text("a"), fixture.text("b"));
    let source = fixture.write_source(0);
    let begun = Instant::now();
    assert!(fixture.towline(&["--repo", &a, "save", source.to_str().unwrap(), "base"]).status().unwrap().success());
    let usual = begun.elapsed();
    let mut sure: Vec<(String, _)> = vec![("base".to_owned(), tree_digest(&source))];
    for round in 1..=KILLS {
        match round % 4 {
            0 => drop(fixture.kill_in_the_middle(&["--repo", &a, "collect", "--grace", "0s"], usual / 2)),
            1 => drop(fixture.kill_in_the_middle(&["sync", &a, &b], usual)),
            _ => {
                let source = fixture.write_source(round);
                let key = format!("run/{}", round % 6);
                let text = source.to_str().unwrap().to_owned();
                sure.retain(|(known, _)| *known != key);
                if fixture.kill_in_the_middle(&["--repo", &a, "save", &text, &key], usual) {
                    sure.push((key, tree_digest(&source)));
                }
            }
        }
        if round % 20 == 0 {
            check(&fixture.path("a"), fixture.path("cache-check")).await;
            check(&fixture.path("b"), fixture.path("cache-check")).await;
        }
    }
    assert!(fixture.towline(&["sync", &a, &b]).status().unwrap().success());
    for repository in ["a", "b"] {
        check(&fixture.path(repository), fixture.path("cache-check")).await;
        let options =
            OpenOptions { cache: Some(fixture.path("cache-check")), memory: Some(64 << 20), ..OpenOptions::default() };
        let location = Location::directory(fixture.path(repository)).unwrap();
        let opened = Repository::open(open(&location, &StoreOptions::default()).await.unwrap(), options).await.unwrap();
        for (number, (key, digest)) in sure.iter().enumerate() {
            let dest = fixture.path(&format!("restored-{repository}-{number}"));
            opened.restore(&name(key), None, &dest, &RestoreOptions::default()).await.unwrap();
            assert_eq!(tree_digest(&dest), *digest, "{key} in {repository}");
        }
    }
}

/// F7 and P7: "Running the command again completes it and uses what was uploaded and committed to an index segment before."
#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_save_uploaded_is_used_by_the_next() {
    // Packs of their usual length: of a save far below a GiB, too, what was sent is known to the next.
    let mut fixture = Fixture { memory: "1G", ..Fixture::new() };
    let a = fixture.text("a");
    let source = fixture.path("source");
    fs::create_dir_all(&source).unwrap();
    fs::write(source.join("big"), noise(77, 260_000_000)).unwrap();
    let text = source.to_str().unwrap().to_owned();
    // The first entry opens the session, the second commits a segment.
    let indexed = fixture.path(&format!("a/log/{:020}", 2));
    for attempt in 0..5 {
        let mut child = fixture.towline(&["--repo", &a, "save", &text, "big"]).spawn().unwrap();
        // Segments are committed as packs arrive: wait for the first, then pull the plug.
        while !indexed.exists() && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(2));
        }
        child.kill().unwrap();
        if child.wait().unwrap().success() {
            fs::remove_dir_all(fixture.path("a")).unwrap();
            assert!(fixture.towline(&["init", &a]).status().unwrap().success());
            assert!(attempt < 4, "the save was always faster than the kill");
            continue;
        }
        break;
    }
    let output =
        fixture.towline(&["--repo", &a, "--json", "save", &text, "big"]).stdout(Stdio::piped()).output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["logical_bytes"], 260_000_000);
    assert!(report["new_bytes"].as_u64().unwrap() < 200_000_000, "what was uploaded is used again: {report}");
    let _ = fixture.below(2);
}
