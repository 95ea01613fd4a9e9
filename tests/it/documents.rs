//! What the documents say to type, typed: README.md's shell blocks on a fresh machine, and the unit for systemd.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use tempfile::TempDir;

use crate::data::safetensors;

/// Commands that need a second machine: tests/it/agent/routing.rs and tests/demo have one.
const ELSEWHERE: [&str; 2] = ["--from home", "--at cloud"];
/// Commands that build from source, install, or are tests themselves.
const NOT_OURS: [&str; 4] = ["make ", "cargo ", "pip ", "helm "];
/// How long a test waits for what must come, in a shell.
const UNTIL: &str =
    "wait_until() { for _ in $(seq 600); do \"$@\" >/dev/null 2>&1 && return; sleep 0.1; done; return 1; }";

fn document(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

/// The fenced blocks in a language.
fn blocks(document: &str, language: &str) -> Vec<String> {
    let parts = document.split("\n```");
    let own = parts.filter_map(|part| part.strip_prefix(language)?.strip_prefix('\n'));
    own.map(|text| format!("{text}\n")).collect()
}

/// Somebody with a shell, a home, a checkpoint, and a folder for a bucket.
struct Reader(TempDir);

impl Reader {
    fn new() -> Self {
        let reader = Self(tempfile::tempdir().unwrap());
        for folder in ["home", "work/ckpt", "bucket/models"] {
            fs::create_dir_all(reader.0.path().join(folder)).unwrap();
        }
        let tensors = [("model.embed.weight", 4000), ("model.layers.0.norm", 800), ("model.layers.0.w", 50_000)];
        fs::write(reader.0.path().join("work/ckpt/model.safetensors"), safetensors(1, &tensors)).unwrap();
        reader
    }

    /// Types `block`, then `end`, which stops what went on in the background.
    fn types(&self, block: &str, end: &str) {
        let bucket = format!("{}/bucket", self.0.path().display());
        let mut script = format!("set -euo pipefail\n{UNTIL}\n");
        for line in block.lines() {
            assert!(!NOT_OURS.iter().any(|start| line.starts_with(start)), "{line}");
            if !ELSEWHERE.iter().any(|there| line.contains(there)) {
                script += &line.replace("s3://bucket", &bucket);
                script += "\n";
            }
        }
        script += end;
        let binary = Path::new(env!("CARGO_BIN_EXE_towline"));
        let path = format!("{}:/usr/bin:/bin", binary.parent().unwrap().display());
        let mut shell = Command::new("bash");
        shell.args(["-c", &script]).current_dir(self.0.path().join("work")).env_clear().env("PATH", path);
        shell
            .env("HOME", self.0.path().join("home"))
            .env("XDG_RUNTIME_DIR", self.0.path().join("run"))
            .stdin(Stdio::null());
        let ran = shell.output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
        assert!(ran.status.success(), "{script}\n{out}\n{err}");
    }

    fn has(&self, path: &str) -> bool {
        self.0.path().join(path).exists()
    }
}

#[test]
fn what_the_readme_says_to_type_works() {
    let document = document("README.md");
    let blocks = blocks(&document, "sh");
    let block = |with: &str| {
        let mut found = blocks.iter().filter(|block| block.contains(with));
        let block = found.next().unwrap_or_else(|| panic!("no block of README.md has {with}"));
        assert!(found.next().is_none(), "two blocks have {with}");
        block
    };
    let reader = Reader::new();
    let saving = block("towline init\n");
    reader.types(saving, "");
    assert!(reader.has("work/out/model.safetensors") && reader.has("bucket/models/pack"));
    reader.types(block("towline expire"), "");
    reader.types(block("--shard 3/8"), "");
    assert!(reader.has("work/rank-3/tensors.safetensors"));
    let watching = block("towline watch");
    assert_eq!(watching.lines().count(), 1);
    fs::remove_dir_all(reader.0.path().join("work/out")).unwrap();
    fs::create_dir(reader.0.path().join("work/out")).unwrap();
    reader.types(watching, "wait_until test -e out/step-2000/model.safetensors\nkill -INT $!\nwait $!\n");

    let agents = block("towline agent");
    let settings = "repository = '../home/.local/share/towline/repository'\nidentity = 'tls'\nlisten = '127.0.0.1:0'\n\
                    memory = '512M'\n[cache]\ndir = 'cache'\ncapacity = '256M'\nfree_floor = '1M'\n\
                    [[allow]]\nagents = '**'\nnames = '**'\n";
    fs::write(reader.0.path().join("work/agent.toml"), settings).unwrap();
    fs::remove_dir_all(reader.0.path().join("work/out")).unwrap();
    reader.types(agents, "wait_until towline top --once\nkill $!\nwait $!\n");
    assert!(reader.has("work/out/model.safetensors") && reader.has("work/tls/tls.crt"));
    let rest = blocks.iter().filter(|block| !NOT_OURS.iter().any(|start| block.starts_with(start)));
    assert_eq!(rest.count(), 5, "a new block of README.md wants to be typed here");
}

/// Whether `systemd-analyze verify` has nothing against a unit; none, where there is no systemd.
fn verified(folder: &Path, unit: &str) -> Option<bool> {
    let file = folder.join("towline.service");
    fs::write(&file, unit).unwrap();
    let ran =
        Command::new("systemd-analyze").arg("verify").arg(&file).env("SYSTEMD_LOG_LEVEL", "warning").output().ok()?;
    Some(ran.status.success() && ran.stderr.is_empty())
}

#[test]
fn the_unit_for_systemd_is_one() {
    let document = document("docs/operations.md");
    let [unit] = &blocks(&document, "ini")[..] else { panic!("docs/operations.md has another number of units") };
    let unit = unit.replace("/usr/local/bin/towline", env!("CARGO_BIN_EXE_towline"));
    let folder = tempfile::tempdir().unwrap();
    let Some(good) = verified(folder.path(), &unit) else {
        eprintln!("skipped: no systemd-analyze");
        return;
    };
    assert!(good, "{unit}");
    assert_eq!(verified(folder.path(), &unit.replace("LimitNOFILE", "LimitNOFILES")), Some(false));
    // The kernel's patience with it is longer than its own.
    let number = |key: &str| unit.lines().find_map(|line| line.strip_prefix(key)?.parse::<u64>().ok()).unwrap();
    assert!(number("TimeoutStopSec=") > 25);
}

#[path = "../../examples/save_restore.rs"]
#[expect(dead_code, reason = "its main is cargo's")]
mod save_restore;

#[tokio::test(flavor = "multi_thread")]
async fn the_example_in_rust_runs_twice() {
    let dir = tempfile::tempdir().unwrap();
    let location = towline::storage::Location::directory(dir.path().join("repository")).unwrap();
    for _ in 0..2 {
        save_restore::run(&location, dir.path()).await.unwrap();
        assert_eq!(fs::read(dir.path().join("restored/weights.bin")).unwrap(), vec![2; 1 << 20]);
    }
}
