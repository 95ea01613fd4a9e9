//! docs/semantics.md, paragraph by paragraph, where no other test proves it. Each test quotes its paragraph.

mod disks;
mod network;
mod resources;
mod sources;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use towline::progress::Progress;
use towline::repository::{OpenOptions, Repository};
use towline::storage::{Location, Store, StoreOptions, open};

/// A folder of a test's own, and the real program run in it.
struct Fixture(TempDir);

/// What came of one command.
#[derive(Debug)]
struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Fixture {
    fn new() -> Self {
        Self::within(&std::env::temp_dir())
    }

    /// In a folder of its own in `base`, with settings that ask for little memory.
    fn within(base: &Path) -> Self {
        let fixture = Self(tempfile::tempdir_in(base).unwrap());
        std::fs::create_dir_all(fixture.path("home/.config/towline")).unwrap();
        let settings = format!("repository = '{}'\nmemory = '64M'\n", fixture.path("repo").display());
        std::fs::write(fixture.path("home/.config/towline/towline.toml"), settings).unwrap();
        fixture
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// `towline`; relative paths count from the scene.
    fn command<S: AsRef<OsStr>>(&self, args: &[S]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
        command.env_clear().env("HOME", self.path("home"));
        command.current_dir(self.0.path()).args(args);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn run(&self, line: &str) -> Ran {
        let args: Vec<&str> = line.split(' ').collect();
        ran(&mut self.command(&args))
    }

    /// The standard output of a command that must succeed.
    fn ok(&self, line: &str) -> String {
        let ran = self.run(line);
        assert_eq!(ran.code, Some(0), "{line}: {}", ran.err);
        ran.out
    }

    /// The message of a command that must end with `code` and say each of `parts`.
    fn fails(&self, line: &str, code: i32, parts: &[&str]) -> String {
        let ran = self.run(line);
        assert_eq!(ran.code, Some(code), "{line}: {}", ran.err);
        assert!(parts.iter().all(|part| ran.err.contains(part)), "{line}: {parts:?} not in {}", ran.err);
        ran.err
    }

    fn json(&self, line: &str) -> serde_json::Value {
        serde_json::from_str(&self.ok(&format!("{line} --json"))).unwrap()
    }

    /// A repository in memory.
    async fn in_memory(&self) -> Repository {
        Repository::create(Store::memory(), self.options()).await.unwrap().0
    }

    /// A repository in the folder `at`, made if it is lacking.
    async fn in_folder(&self, at: &Path) -> Repository {
        let create = StoreOptions { create: true, ..StoreOptions::default() };
        let store = open(&Location::directory(at).unwrap(), &create).await.unwrap();
        Repository::create(store, self.options()).await.unwrap().0
    }

    fn options(&self) -> OpenOptions {
        OpenOptions { cache: Some(self.path("cache")), memory: Some(64 << 20), ..OpenOptions::default() }
    }
}

fn ran(command: &mut Command) -> Ran {
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    Ran { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
}

/// A file system of its own, gone with the value.
pub(crate) struct Tmpfs(PathBuf);

impl Tmpfs {
    /// One of `size` at the folder `at`, which is made; none, said so, where that is not allowed.
    pub(crate) fn mount(at: &Path, size: &str) -> Option<Self> {
        std::fs::create_dir_all(at).unwrap();
        let mounted = rustix::process::geteuid().is_root()
            && mount(&["-t", "tmpfs", "-o", &format!("size={size}"), "towline-test"], at);
        if !mounted {
            eprintln!("SKIPPED: a file system cannot be mounted by this user");
        }
        mounted.then(|| Self(at.to_owned()))
    }

    /// Mounts it again with these options.
    pub(crate) fn remount(&self, options: &str) {
        assert!(mount(&["-o", &format!("remount,{options}")], &self.0), "remount with {options}");
    }
}

fn mount(args: &[&str], at: &Path) -> bool {
    Command::new("mount").args(args).arg(at).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// Does `then` once `progress` has come to `phase`.
fn when(progress: &Progress, phase: &'static str, then: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    let progress = progress.clone();
    std::thread::spawn(move || {
        let since = Instant::now();
        while progress.snapshot().phase != phase {
            assert!(since.elapsed() < Duration::from_mins(1), "{phase} never came");
            std::thread::sleep(Duration::from_micros(50));
        }
        then();
    })
}
