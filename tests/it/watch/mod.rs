//! Watching a folder that a training writes to: every way of finishing a checkpoint, folders that come and go, signals,
//! restarts, and bringing the latest back.

mod content;
mod copies;
mod full;

use std::fs::{self, DirBuilder};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{DirBuilderExt as _, symlink};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::sync::watch::{Sender, channel};
use tokio::task::JoinHandle;
use towline::error::Result;
use towline::ops::{RestoreOptions, SaveOptions, Stop, WatchEvent, WatchOptions, WatchReport};
use towline::progress::Progress;
use towline::repository::{OpenOptions, Repository};
use towline::storage::{Location, StoreOptions, open};

use crate::cli::User;
use crate::data::{name, noise, safetensors, tree_digest};

/// How long a test waits for what must come.
const PATIENCE: Duration = Duration::from_mins(2);

/// A repository, and a place for the training's folder.
struct Fixture {
    dir: tempfile::TempDir,
    repository: Repository,
}

/// A watch that goes on in the background.
struct RunningWatch {
    stop: Sender<Stop>,
    events: Arc<Mutex<Vec<WatchEvent>>>,
    task: JoinHandle<Result<WatchReport>>,
}

impl Fixture {
    async fn new() -> Self {
        Self::within(tempfile::tempdir().unwrap()).await
    }

    /// With its repository in the folder `repo` of `dir`.
    async fn within(dir: tempfile::TempDir) -> Self {
        let location = Location::directory(dir.path().join("repo")).unwrap();
        let store = open(&location, &StoreOptions { create: true, ..StoreOptions::default() }).await.unwrap();
        let options =
            OpenOptions { cache: Some(dir.path().join("cache")), memory: Some(64 << 20), ..OpenOptions::default() };
        let (repository, _) = Repository::create(store, options).await.unwrap();
        Self { dir, repository }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn out(&self) -> PathBuf {
        self.path("out")
    }

    /// Watches `out`, with a run called `run`.
    fn watch(&self, settle: Duration, adjust: impl FnOnce(&mut WatchOptions)) -> RunningWatch {
        self.watch_at(self.out(), settle, adjust)
    }

    fn watch_at(&self, out: PathBuf, settle: Duration, adjust: impl FnOnce(&mut WatchOptions)) -> RunningWatch {
        let (stop, stopped) = channel(Stop::No);
        let save = SaveOptions::default();
        let mut options = WatchOptions {
            settle,
            restore_latest: false,
            once: false,
            save,
            metrics: Vec::new(),
            handoff: None,
            stop: stopped,
        };
        adjust(&mut options);
        let events = Arc::new(Mutex::new(Vec::new()));
        let (repository, told) = (self.repository.clone(), Arc::clone(&events));
        let task = tokio::spawn(async move {
            let mut tell = |event| told.lock().unwrap().push(event);
            repository.watch(&out, &name("run"), &options, &mut tell).await
        });
        RunningWatch { stop, events, task }
    }

    /// Saves what is finished, and tells what happened.
    async fn once(&self, adjust: impl FnOnce(&mut WatchOptions)) -> Vec<WatchEvent> {
        let going = self.watch(Duration::from_millis(50), |options| {
            options.once = true;
            adjust(options);
        });
        going.task.await.unwrap().unwrap();
        let events = going.events.lock().unwrap();
        events.clone()
    }

    /// Whether the step holds exactly what is at `path`.
    async fn holds(&self, step: &str, path: &Path) {
        let dest = self.path(&format!("restored-{}", step.replace('/', "-")));
        let options = RestoreOptions { overwrite: true, delete: true, ..RestoreOptions::default() };
        self.repository.restore(&name(step), None, &dest, &options).await.unwrap();
        if path.is_dir() {
            assert_eq!(tree_digest(&dest), tree_digest(path), "{step}");
        } else {
            assert_eq!(fs::read(&dest).unwrap(), fs::read(path).unwrap(), "{step}");
        }
    }
}

impl RunningWatch {
    /// Waits for an event that `wanted` takes.
    async fn until<T>(&self, wanted: impl Fn(&WatchEvent) -> Option<T>) -> T {
        let since = Instant::now();
        loop {
            if let Some(found) = self.events.lock().unwrap().iter().find_map(&wanted) {
                return found;
            }
            assert!(since.elapsed() < PATIENCE && !self.task.is_finished(), "{:?}", self.events.lock().unwrap());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn saved(&self, step: u64) -> &'static str {
        self.until(|event| match event {
            WatchEvent::Saved { step: saved, by, .. } if *saved == step => Some(*by),
            _ => None,
        })
        .await
    }

    fn count(&self, wanted: impl Fn(&WatchEvent) -> bool) -> usize {
        self.events.lock().unwrap().iter().filter(|event| wanted(event)).count()
    }

    /// Asks it to stop, and waits until it has.
    async fn end(self) -> WatchReport {
        self.stop.send(Stop::Within { grace: PATIENCE, linger: false }).unwrap();
        self.task.await.unwrap().unwrap()
    }
}

fn write(path: PathBuf, bytes: impl AsRef<[u8]>) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, bytes).unwrap();
}

/// A folder as transformers leaves it.
fn hugging_face(out: &Path, step: u64) -> PathBuf {
    let folder = out.join(format!("checkpoint-{step}"));
    let files = ["model.safetensors", "training_args.bin", "optimizer.pt", "rng_state_0.pth", "trainer_state.json"];
    for (file, name) in files.into_iter().enumerate() {
        let bytes = if file == 0 { safetensors(step, &[("a", 5000)]) } else { noise(step + file as u64, 3000) };
        write(folder.join(name), bytes);
    }
    folder
}

/// Writes `bytes` in pieces, with pauses.
fn write_slowly(path: &Path, bytes: &[u8]) {
    use std::io::Write as _;
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let mut file = fs::File::create(path).unwrap();
    for piece in bytes.chunks(bytes.len() / 8 + 1) {
        file.write_all(piece).unwrap();
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// W1: "Its framework marked it finished, the marker is not older than the files, and nothing changed for a fifth of
/// the settling time".
#[tokio::test(flavor = "multi_thread")]
async fn what_frameworks_write_slowly_is_saved_when_its_marker_is_there() {
    let fixture = Fixture::new().await;
    let going = fixture.watch(Duration::from_secs(2), |_| {});
    let out = fixture.out();
    let writer = std::thread::spawn(move || {
        let folder = out.join("checkpoint-500");
        write_slowly(&folder.join("training_args.bin"), &noise(1, 8000));
        write_slowly(&folder.join("optimizer.pt"), &noise(2, 400_000));
        write_slowly(&folder.join("trainer_state.json"), b"{\"global_step\": 500}");
        write_slowly(&folder.join("rng_state_1.pth"), &noise(3, 8000));
        let folder = out.join("step-1000");
        write_slowly(&folder.join("__0_0.distcp"), &noise(4, 400_000));
        write_slowly(&folder.join("__1_0.distcp"), &noise(5, 400_000));
        write_slowly(&folder.join(".metadata.tmp"), &noise(6, 8000));
        fs::rename(folder.join(".metadata.tmp"), folder.join(".metadata")).unwrap();
    });
    assert_eq!((going.saved(500).await, going.saved(1000).await), ("marker", "marker"));
    writer.join().unwrap();
    assert_eq!(going.end().await, WatchReport { saved: 2, ..WatchReport::default() });
    fixture.holds("run/step-500", &fixture.out().join("checkpoint-500")).await;
    fixture.holds("run/step-1000", &fixture.out().join("step-1000")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_says_nothing_is_saved_when_it_is_quiet_or_renamed() {
    let fixture = Fixture::new().await;
    let going = fixture.watch(Duration::from_millis(300), |_| {});
    let out = fixture.out();
    let writer = std::thread::spawn(move || {
        write_slowly(&out.join("model_1.pt"), &noise(1, 400_000));
        write_slowly(&out.join("epoch=0-step=2.ckpt.tmp"), &noise(2, 400_000));
        fs::rename(out.join("epoch=0-step=2.ckpt.tmp"), out.join("epoch=0-step=2.ckpt")).unwrap();
        write_slowly(&out.join("tmp-checkpoint-3/model.bin"), &noise(3, 400_000));
        fs::rename(out.join("tmp-checkpoint-3"), out.join("checkpoint-3")).unwrap();
        write_slowly(&out.join("last.ckpt"), &noise(4, 8000));
        write_slowly(&out.join("logs/events.1"), &noise(4, 8000));
    });
    for step in 1..=3 {
        going.saved(step).await;
    }
    going
        .until(|event| matches!(event, WatchEvent::PassedOver { entry, .. } if entry == "last.ckpt").then_some(()))
        .await;
    writer.join().unwrap();
    assert_eq!(going.end().await.unsaved, Vec::<String>::new());
    for (step, entry) in [(1, "model_1.pt"), (2, "epoch=0-step=2.ckpt"), (3, "checkpoint-3")] {
        fixture.holds(&format!("run/step-{step}"), &fixture.out().join(entry)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_was_cut_off_is_not_saved_until_it_is_whole() {
    let fixture = Fixture::new().await;
    let (file, whole) = (fixture.out().join("step-8/model.safetensors"), safetensors(8, &[("a", 5000)]));
    write(file.clone(), &whole[..whole.len() / 2]);
    let events = fixture.once(|_| {}).await;
    let told = |event: &WatchEvent| matches!(event, WatchEvent::PassedOver { reason, .. } if reason.contains("the end of a safetensors file"));
    assert!(events.iter().any(told), "{events:?}");
    assert!(fixture.repository.list(None).await.unwrap().is_empty());
    write(file, &whole);
    fixture.once(|_| {}).await;
    fixture.holds("run/step-8", &fixture.out().join("step-8")).await;
}

/// W2: "DIR may be missing, renamed, deleted and made again: `watch` waits for it and says so once".
#[tokio::test(flavor = "multi_thread")]
async fn the_folder_may_come_and_go() {
    let fixture = Fixture::new().await;
    let going = fixture.watch(Duration::from_millis(500), |_| {});
    let gone = |times| {
        let going = &going;
        async move {
            let since = Instant::now();
            while going.count(|event| matches!(event, WatchEvent::DirGone { .. })) < times {
                assert!(since.elapsed() < PATIENCE);
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    };
    gone(1).await;
    hugging_face(&fixture.out(), 1);
    going.saved(1).await;
    fs::rename(fixture.out(), fixture.path("away")).unwrap();
    gone(2).await;
    hugging_face(&fixture.out(), 2);
    going.saved(2).await;
    fs::remove_dir_all(fixture.out()).unwrap();
    gone(3).await;
    fs::rename(fixture.path("away"), fixture.out()).unwrap();
    going.until(|event| matches!(event, WatchEvent::Kept { entry, .. } if entry == "checkpoint-1").then_some(())).await;
    assert_eq!(going.count(|event| matches!(event, WatchEvent::DirBack { .. })), 3);
    assert_eq!(going.end().await.saved, 2, "what comes back as it was is not saved again");
    fixture.holds("run/step-1", &fixture.out().join("checkpoint-1")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_written_again_is_saved_again_and_what_is_deleted_is_not() {
    let fixture = Fixture::new().await;
    let folder = hugging_face(&fixture.out(), 5);
    write(fixture.out().join("checkpoint-6/training_args.bin"), "unfinished");
    let going = fixture.watch(Duration::from_millis(100), |_| {});
    going.saved(5).await;
    write(folder.join("optimizer.pt"), noise(99, 3000));
    let since = Instant::now();
    while going.count(|event| matches!(event, WatchEvent::Saved { step: 5, .. })) < 2 {
        assert!(since.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let whole = tree_digest(&folder);
    // A rotation that was interrupted: what is left must not take the place of what is saved, now or after a restart.
    fs::remove_file(folder.join("model.safetensors")).unwrap();
    fs::remove_dir_all(fixture.out().join("checkpoint-6")).unwrap();
    going.until(|event| matches!(event, WatchEvent::Gone { entry } if entry == "checkpoint-6").then_some(())).await;
    assert_eq!(going.end().await, WatchReport { saved: 2, ..WatchReport::default() });
    let events = fixture.once(|_| {}).await;
    assert!(matches!(&events[1..], [WatchEvent::PassedOver { entry, .. }] if entry == "checkpoint-5"), "{events:?}");
    let dest = fixture.path("back");
    fixture.repository.restore(&name("run/step-5"), None, &dest, &RestoreOptions::default()).await.unwrap();
    assert_eq!(tree_digest(&dest), whole);
}

/// W1: "A step whose content in the repository is that in DIR is not saved again, nor after a restart".
#[tokio::test(flavor = "multi_thread")]
async fn a_restart_saves_nothing_twice() {
    let fixture = Fixture::new().await;
    for step in [1, 2, 10] {
        hugging_face(&fixture.out(), step);
    }
    let order = |events: &[WatchEvent]| -> Vec<u64> {
        let step = |event: &WatchEvent| if let WatchEvent::Saved { step, .. } = event { Some(*step) } else { None };
        events.iter().filter_map(step).collect()
    };
    assert_eq!(order(&fixture.once(|_| {}).await), [1, 2, 10]);
    let before = fixture.repository.state().await.unwrap().refs.clone();
    fs::remove_dir_all(fixture.path("cache")).unwrap();
    let events = fixture.once(|_| {}).await;
    assert_eq!(events.iter().filter(|event| matches!(event, WatchEvent::Kept { .. })).count(), 3, "{events:?}");
    assert_eq!(fixture.repository.state().await.unwrap().refs, before);
}

/// W1: "A step with other content in the repository, whoever saved it, is replaced; that is reported with the size and
/// time of the old value."
#[tokio::test(flavor = "multi_thread")]
async fn a_step_of_somebody_else_is_replaced_and_that_is_said() {
    let fixture = Fixture::new().await;
    fs::write(fixture.path("f"), noise(1, 1000)).unwrap();
    let theirs =
        fixture.repository.save(&fixture.path("f"), &name("run/step-1"), &SaveOptions::default()).await.unwrap();
    hugging_face(&fixture.out(), 1);
    let events = fixture.once(|_| {}).await;
    let replaced = |event: &WatchEvent| match event {
        WatchEvent::Saved { report, .. } => report.replaced.clone(),
        _ => None,
    };
    let replaced = events.iter().find_map(replaced).unwrap();
    assert_eq!((replaced.manifest, replaced.bytes), (theirs.manifest, 1000));
}

/// W3: "`--restore-latest` restores the latest step under its original name, whole or not at all".
#[tokio::test(flavor = "multi_thread")]
async fn the_latest_comes_back_under_its_own_name() {
    let fixture = Fixture::new().await;
    let restore = |options: &mut WatchOptions| options.restore_latest = true;
    let empty = fixture.once(restore).await;
    assert!(
        matches!(&empty[1], WatchEvent::NotRestored { reason, later: None } if reason.contains("no step")),
        "{empty:?}"
    );
    hugging_face(&fixture.out(), 9);
    let latest = hugging_face(&fixture.out(), 10);
    let before = tree_digest(&latest);
    fixture.once(|_| {}).await;
    let held = fixture.once(restore).await;
    let WatchEvent::NotRestored { reason, later: None } = &held[1] else { panic!("{held:?}") };
    assert!(reason.ends_with("checkpoint-10"), "{reason}");

    fs::remove_dir_all(fixture.out()).unwrap();
    let events = fixture.once(restore).await;
    assert!(matches!(&events[1..], [WatchEvent::Restored { entry, .. }] if entry == "checkpoint-10"), "{events:?}");
    assert_eq!(tree_digest(&latest), before);
    assert_eq!(fs::read_dir(fixture.out()).unwrap().count(), 1, "nothing is left beside it");
    // What a killed restore left, and a folder that is not empty but holds no checkpoint.
    let staging = fixture.out().join(".checkpoint-10.towline-tmp");
    DirBuilder::new().mode(0o700).create(&staging).unwrap();
    fs::rename(&latest, staging.join("checkpoint-10")).unwrap();
    write(staging.join("checkpoint-10/more"), "x");
    write(fixture.out().join("runs/log"), "x");
    let again = fixture.once(restore).await;
    assert!(matches!(&again[1], WatchEvent::Restored { report, .. } if report.fetched_bytes == 0), "{again:?}");
    assert_eq!(tree_digest(&latest), before);
}

/// S9: "A link that they put in the place of a checkpoint, of Towline's own files there or of a trainer's state is not
/// followed: nothing outside the folder is saved, changed or deleted."
#[tokio::test(flavor = "multi_thread")]
async fn planted_links_are_not_followed() {
    let fixture = Fixture::new().await;
    let restore = |options: &mut WatchOptions| options.restore_latest = true;
    write(fixture.path("victim/keep"), "keep");
    write(fixture.path("conf"), "keep");
    let folder = fixture.out().join("global_step20");
    write(folder.join("mp_rank_00_model_states.pt"), noise(1, 9000));
    write(fixture.out().join("latest"), "global_step20");
    fixture.once(|_| {}).await;
    let before = tree_digest(&folder);
    fs::remove_dir_all(fixture.out()).unwrap();

    fs::create_dir(fixture.out()).unwrap();
    symlink(fixture.path("victim"), fixture.out().join(".global_step20.towline-tmp")).unwrap();
    symlink(fixture.path("conf"), fixture.out().join("latest")).unwrap();
    let events = fixture.once(restore).await;
    assert!(events.iter().any(|event| matches!(event, WatchEvent::Restored { .. })), "{events:?}");
    assert_eq!(tree_digest(&folder), before);
    assert!(folder.symlink_metadata().unwrap().is_dir());
    assert_eq!(fs::read(fixture.path("victim/keep")).unwrap(), b"keep");
    assert_eq!(fs::read(fixture.path("conf")).unwrap(), b"keep");
    assert_eq!(fs::read(fixture.out().join("latest")).unwrap(), b"global_step20");
}

#[tokio::test(flavor = "multi_thread")]
async fn trackers_and_single_files_come_back_too() {
    let fixture = Fixture::new().await;
    let folder = fixture.out().join("global_step20");
    write(folder.join("mp_rank_00_model_states.pt"), noise(1, 9000));
    write(fixture.out().join("latest"), "global_step20");
    let events = fixture.once(|_| {}).await;
    assert!(matches!(&events[1], WatchEvent::Saved { step: 20, by: "marker", .. }), "{events:?}");
    fs::remove_dir_all(fixture.out()).unwrap();
    fixture.once(|options| options.restore_latest = true).await;
    assert_eq!(fs::read(fixture.out().join("latest")).unwrap(), b"global_step20");
    fixture.holds("run/step-20", &folder).await;
    fs::remove_dir_all(fixture.out()).unwrap();
    write(fixture.out().join("latest"), "notes, and no tracker");
    let going = fixture.watch(Duration::from_millis(50), |options| options.restore_latest = true);
    assert!(going.task.await.unwrap().unwrap_err().to_string().contains("has the name of the tracker file"));
    assert_eq!(fs::read_dir(fixture.out()).unwrap().count(), 1, "it is left alone");
    fs::remove_dir_all(fixture.out()).unwrap();
    write(fixture.out().join("model_30.pt"), noise(2, 9000));
    fixture.once(|_| {}).await;
    fs::remove_dir_all(fixture.out()).unwrap();
    fixture.once(|options| options.restore_latest = true).await;
    assert_eq!(fs::read(fixture.out().join("model_30.pt")).unwrap(), noise(2, 9000));

    // Whoever writes to the repository does not choose where files go: a single file has a name of its own.
    write(fixture.path("evil/train.py"), "import os");
    let (script, step, options) = (fixture.path("evil/train.py"), name("run/step-35"), SaveOptions::default());
    fixture.repository.save(&script, &step, &options).await.unwrap();
    fs::remove_dir_all(fixture.out()).unwrap();
    write(fixture.out().join("train.py"), "mine");
    fixture.once(|options| options.restore_latest = true).await;
    assert_eq!(fs::read(fixture.out().join("train.py")).unwrap(), b"mine");
    assert_eq!(fs::read(fixture.out().join("step-35.ckpt")).unwrap(), b"import os");

    let labels = [("watch.entry".to_owned(), "../model_40.pt".to_owned())].into();
    let options = SaveOptions { labels, ..SaveOptions::default() };
    fixture.repository.save(&fixture.out(), &name("run/step-40"), &options).await.unwrap();
    fs::remove_dir_all(fixture.out()).unwrap();
    let going = fixture.watch(Duration::from_millis(50), |options| options.restore_latest = true);
    assert!(going.task.await.unwrap().unwrap_err().to_string().contains("does not name a checkpoint"));
    assert!(!fixture.path("model_40.pt").exists());
}

/// W2: "A save that fails is reported and retried, at growing intervals".
#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_is_away_is_waited_for() {
    let fixture = Fixture::new().await;
    write(fixture.path("first"), "a log begins with the first commit");
    fixture.repository.save(&fixture.path("first"), &name("first"), &SaveOptions::default()).await.unwrap();
    let (log, aside) = (fixture.path("repo/log"), fixture.path("aside"));
    fs::rename(&log, &aside).unwrap();
    fs::write(&log, "in the way").unwrap();
    hugging_face(&fixture.out(), 1);
    let going = fixture.watch(Duration::from_millis(50), |_| {});
    going.until(|event| matches!(event, WatchEvent::Failed { .. }).then_some(())).await;
    fs::remove_file(&log).unwrap();
    fs::rename(&aside, &log).unwrap();
    going.saved(1).await;
    assert_eq!(going.end().await.unsaved, Vec::<String>::new());
    fixture.holds("run/step-1", &fixture.out().join("checkpoint-1")).await;
}

/// The real program, beside a training.
struct Program {
    child: std::process::Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Program {
    fn start(user: &User, args: &[&str]) -> Self {
        let mut child = user.command(&[&["watch", "out", "run", "--json"], args].concat()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut program = Self { child, lines };
        program.until("watching");
        program
    }

    fn until(&mut self, event: &str) -> Value {
        loop {
            let line: Value = serde_json::from_str(&self.lines.next().unwrap().unwrap()).unwrap();
            if line["event"] == event {
                return line;
            }
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn code(mut self) -> Option<i32> {
        self.lines.by_ref().for_each(drop);
        self.child.wait().unwrap().code()
    }
}

/// W4: "At SIGTERM and Ctrl-C `watch` saves the finished checkpoints, as far as `--on-term` allows".
#[test]
fn a_signal_makes_it_save_what_is_finished_and_name_what_is_not() {
    let user = User::with_repository();
    // The signal may find nothing yet: the trainer has got it too, and writes its last checkpoint now.
    let mut program = Program::start(&user, &["--settle", "1", "--on-term", "60"]);
    program.signal(Signal::TERM);
    program.signal(Signal::TERM);
    program.until("stopping");
    user.write("out/checkpoint-7/model.bin", b"weights");
    user.write("out/checkpoint-7/trainer_state.json", b"{}");
    assert_eq!(program.until("saved")["entry"], "checkpoint-7");
    assert_eq!(program.code(), Some(0));
    assert_eq!(user.json(&["restore", "run@latest", "back"], 0)["name"], "run/step-7");
    assert_eq!(user.read("back/model.bin"), b"weights");

    user.write("out/checkpoint-8/training_args.bin", b"half");
    let mut program = Program::start(&user, &["--settle", "100", "--on-term", "0.2"]);
    program.signal(Signal::TERM);
    assert_eq!(program.until("unsaved")["entry"], "checkpoint-8", "the other one is known to be saved");
    assert_eq!(program.code(), Some(1));

    // Ctrl-C does not wait for more, and a second signal for nothing.
    fs::remove_dir_all(user.work().join("out")).unwrap();
    let mut program = Program::start(&user, &["--settle", "1h", "--on-term", "1h"]);
    program.signal(Signal::INT);
    program.until("stopping");
    assert_eq!(program.code(), Some(0));
    user.write("out/model_9.pt", b"x");
    let mut program = Program::start(&user, &["--settle", "1h", "--on-term", "1h"]);
    program.signal(Signal::TERM);
    program.until("stopping");
    std::thread::sleep(Duration::from_millis(400));
    program.signal(Signal::TERM);
    assert_eq!(program.code(), Some(1));
}

#[test]
fn the_command_says_what_it_does() {
    let user = User::with_repository();
    user.write("out/step_3.pt", b"three");
    let once = ["watch", "out", "run", "--once", "--settle", "50ms", "--label", "by=watch", "--framework", "pytorch"];
    let ran = user.run(&once);
    let (out, err) = (String::from_utf8(ran.out).unwrap(), ran.err);
    assert_eq!(ran.code, Some(0), "{err}");
    assert!(out.starts_with("saved step_3.pt as run/step-3: 5 B in 1 file, ") && out.ends_with("by quiet\n"), "{out}");
    assert!(err.starts_with("watching out for steps of run\n"), "{err}");
    let shown = user.ok(&["show", "run@latest"]);
    assert!(
        ["by=watch", "watch.entry=step_3.pt", "framework=pytorch"].iter().all(|part| shown.contains(part)),
        "{shown}"
    );
    assert!(user.run(&once).err.contains("step_3.pt is saved already as run/step-3\n"));
    assert_eq!(user.run(&["watch", "none", "run", "--once"]).code, Some(3));
    assert_eq!(user.fails(&["watch", "out", "run@latest"], 2)["kind"], "usage");
    assert_eq!(user.fails(&["watch", "out", "run", "--settle", "-1"], 2)["kind"], "usage");
}

/// W1: two watches that save one step at once. Each looks again when the other was faster; the last one's content stays, and that it
/// replaced the other's is said.
#[tokio::test(flavor = "multi_thread")]
async fn two_watches_of_one_step_leave_nothing_unsaved() {
    let fixture = Fixture::new().await;
    let (here, there) = (fixture.out().join("step-3"), fixture.path("out2/step-3"));
    for (folder, seed) in [(&here, 1), (&there, 2)] {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join("model.bin"), noise(seed, 12 << 20)).unwrap();
    }
    let once = |options: &mut WatchOptions| options.once = true;
    let watches = [fixture.out(), fixture.path("out2")];
    let watches = watches.map(|folder| fixture.watch_at(folder, Duration::from_millis(50), once));
    let mut replaced = 0;
    for going in watches {
        assert_eq!(going.task.await.unwrap().unwrap(), WatchReport { saved: 1, ..WatchReport::default() });
        let events = going.events.lock().unwrap();
        replaced += events
            .iter()
            .filter(|event| matches!(event, WatchEvent::Saved { report, .. } if report.replaced.is_some()))
            .count();
    }
    assert_eq!(replaced, 1, "whoever was second says so");
}

/// W4: a stop request is answered while a checkpoint is saved, and what was sent by the end is used by the next save.
#[tokio::test(flavor = "multi_thread")]
async fn a_watch_that_must_end_records_what_it_has_sent() {
    let fixture = Fixture::new().await;
    fs::create_dir_all(fixture.out().join("step-1")).unwrap();
    fs::write(fixture.out().join("step-1/model.bin"), noise(1, 400 << 20)).unwrap();
    let progress = Progress::default();
    let going = fixture.watch(Duration::from_millis(50), |options| options.save.progress = progress.clone());
    while progress.snapshot().moved < 64 << 20 {
        assert!(!going.task.is_finished());
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    going.stop.send(Stop::Within { grace: Duration::from_millis(100), linger: false }).unwrap();
    going.until(|event| matches!(event, WatchEvent::Stopping { .. }).then_some(())).await;
    let report = going.task.await.unwrap().unwrap();
    if report.unsaved.is_empty() {
        return; // It was faster than the request.
    }
    let step = fixture.out().join("step-1");
    let again = fixture.repository.save(&step, &name("run/step-1"), &SaveOptions::default()).await.unwrap();
    assert!(again.new_bytes < 380 << 20, "what was sent is used: {again:?}");
    assert!(again.replaced.is_none());
}
