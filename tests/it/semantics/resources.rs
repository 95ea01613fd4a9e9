//! Memory, progress, and picking up where it was.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use towline::budget::Budget;
use towline::error::ErrorKind;
use towline::ops::{RestoreOptions, SaveOptions};
use towline::progress::{Progress, Snapshot};

use super::Fixture;
use crate::data::{name, noise, tree_digest};

const MIB: u64 = 1 << 20;
/// What a process needs besides its buffers, at most.
const REST: u64 = 64 * MIB;

/// Runs `command` to its end; returns the most anonymous memory that it was seen to hold, in bytes.
fn peak_anonymous(mut command: Command) -> u64 {
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::inherit()).spawn().unwrap();
    let rollup = format!("/proc/{}/smaps_rollup", child.id());
    let mut peak = 0;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            assert!(status.success(), "{status}");
            return peak;
        }
        let text = fs::read_to_string(&rollup).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("Anonymous:"));
        let kib: u64 = line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0);
        peak = peak.max(kib << 10);
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// P4: "A process holds no more bytes in buffers than its memory budget (`--memory`".
#[test]
fn a_save_and_a_restore_of_a_gib_stay_within_their_memory() {
    let room = |path: &Path| rustix::fs::statvfs(path).is_ok_and(|found| found.f_bavail * found.f_frsize > 4 << 30);
    let shared = Path::new("/dev/shm");
    let base = if room(shared) { shared.to_owned() } else { std::env::temp_dir() };
    if !room(&base) {
        eprintln!("SKIPPED: no room for a GiB in {}", base.display());
        return;
    }
    let fixture = Fixture::within(&base);
    let mut file = fs::File::create(fixture.path("big")).unwrap();
    for part in 0..32 {
        file.write_all(&noise(part, 32 << 20)).unwrap();
    }
    drop(file);
    fixture.ok("init");
    for args in [["--memory", "64M", "save", "big", "n"], ["--memory", "64M", "restore", "n", "out"]] {
        let peak = peak_anonymous(fixture.command(&args));
        assert!(peak > MIB, "{args:?}: nothing was measured");
        assert!(peak <= 64 * MIB + REST, "{args:?}: {} MiB of anonymous memory", peak / MIB);
        eprintln!("{args:?}: {} MiB of anonymous memory", peak / MIB);
    }
    assert_eq!(fs::metadata(fixture.path("out")).unwrap().len(), 1 << 30);
}

/// P4: "A request that can never fit is refused at once; the error gives the requested and the available bytes."
#[tokio::test]
async fn what_can_never_fit_is_refused() {
    let budget = Budget::new(64 * MIB).unwrap();
    let len = usize::try_from(64 * MIB + 1).unwrap();
    let refused = tokio::time::timeout(Duration::from_secs(5), budget.buffer(len)).await.expect("it waits");
    let error = refused.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exhausted);
    assert!(error.to_string().ends_with("expected at most 64 MiB, got 65 MiB"), "{error}");
    let fixture = Fixture::new();
    fixture.ok("init");
    fixture.fails("--memory 63M ls", 2, &["at least 64 MiB, got 63 MiB"]);
}

/// P7: "Every long operation shows progress".
#[tokio::test(flavor = "multi_thread")]
async fn progress_moves_and_arrives() {
    let fixture = Fixture::new();
    let repository = fixture.in_memory().await;
    fs::write(fixture.path("f"), noise(1, 64_000_000)).unwrap();
    let (saving, restoring) = (Progress::default(), Progress::default());
    let save = SaveOptions { progress: saving.clone(), ..SaveOptions::default() };
    let seen = watch(&saving, repository.save(&fixture.path("f"), &name("n"), &save)).await;
    moves(&seen, "saving", 64_000_000);
    let restore = RestoreOptions { progress: restoring.clone(), ..RestoreOptions::default() };
    let out = fixture.path("out");
    let seen = watch(&restoring, repository.restore(&name("n"), None, &out, &restore)).await;
    moves(&seen, "restoring", 64_000_000);
}

/// Every different reading of `progress` while `work` is done, and one after.
async fn watch<T>(progress: &Progress, work: impl Future<Output = towline::Result<T>>) -> Vec<Snapshot> {
    let mut work = std::pin::pin!(work);
    let mut seen: Vec<Snapshot> = Vec::new();
    loop {
        let ended = tokio::time::timeout(Duration::from_millis(1), &mut work).await;
        let now = progress.snapshot();
        if seen.last() != Some(&now) {
            seen.push(now);
        }
        if let Ok(outcome) = ended {
            assert!(outcome.is_ok(), "{:?}", outcome.err());
            return seen;
        }
    }
}

fn moves(seen: &[Snapshot], phase: &str, total: u64) {
    let within: Vec<&Snapshot> = seen.iter().filter(|snapshot| snapshot.phase == phase).collect();
    // A busy machine lets the watcher look rarely.
    assert!(within.iter().any(|snapshot| snapshot.done < total), "{phase} was seen only at its end");
    assert!(within.windows(2).all(|two| two[0].done <= two[1].done && two[0].moved <= two[1].moved), "{within:?}");
    let last = within.last().unwrap();
    assert_eq!((last.done, last.total), (total, total), "{phase}");
    assert!(last.moved >= total * 9 / 10, "{last:?}");
}

/// P7: "can be interrupted (Ctrl-C, SIGTERM, a dropped future) and resumes: run again, [...] a restore fetches only
/// what DEST lacks."
#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_restore_goes_on() {
    let fixture = Fixture::new();
    let repository = fixture.in_memory().await;
    fs::create_dir(fixture.path("tree")).unwrap();
    for n in 0..40 {
        fs::write(fixture.path(&format!("tree/{n}")), noise(n, 2_000_000)).unwrap();
    }
    repository.save(&fixture.path("tree"), &name("n"), &SaveOptions::default()).await.unwrap();
    let total = 40 * 2_000_000;
    for attempt in 0..20 {
        let out = fixture.path(&format!("out-{attempt}"));
        let progress = Progress::default();
        let options = RestoreOptions { progress: progress.clone(), ..RestoreOptions::default() };
        let enough = async {
            while progress.snapshot().phase != "restoring" || progress.snapshot().done < total / 3 {
                tokio::time::sleep(Duration::from_micros(100)).await;
            }
        };
        let saved = name("n");
        tokio::select! {
            _ = repository.restore(&saved, None, &out, &options) => continue,
            () = enough => {}
        }
        let second = repository.restore(&name("n"), None, &out, &RestoreOptions::default()).await.unwrap();
        assert!(second.fetched_bytes < total * 9 / 10, "{second:?}");
        assert!(second.reused_bytes > total / 10, "{second:?}");
        let mut restored = tree_digest(&out);
        // Threads of the first restore may begin a file after the second one has removed those that were there.
        restored.retain(|path, _| !path.starts_with(b".towline-"));
        assert_eq!(tree_digest(&fixture.path("tree")), restored);
        return;
    }
    panic!("the restore was always faster than the interruption");
}
