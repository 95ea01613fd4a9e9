//! Full disks and read-only folders.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;

use towline::ops::{CollectOptions, RestoreOptions, SaveOptions};
use towline::repository::Repository;

use super::{Fixture, Tmpfs, ran};
use crate::data::{name, noise, tree_digest};

/// Who owns nothing.
const NOBODY: u32 = 65534;

/// F1: "A save to a directory that fills up ends with exit 1, names the path, and says to free some space and run it
/// again; the name keeps its old value, the repository verifies, and the second run uses what the first one wrote."
#[test]
fn a_save_onto_a_full_disk() {
    let fixture = Fixture::new();
    let Some(disk) = Tmpfs::mount(&fixture.path("repo"), "40m") else { return };
    fs::write(fixture.path("f"), noise(1, 1_000_000)).unwrap();
    fixture.ok("init");
    fixture.ok("save f n");
    let before = fixture.ok("ls --long");
    fs::write(fixture.path("f"), noise(2, 80_000_000)).unwrap();
    let repo = fixture.path("repo");
    fixture.fails("save f n", 1, &[repo.to_str().unwrap(), "free some space", "run the same command again"]);
    assert_eq!(fixture.ok("ls --long"), before);
    fixture.ok("verify --data");

    disk.remount("size=200m");
    let second = fixture.json("save f n");
    let new = second["new_bytes"].as_u64().unwrap();
    assert!(new < 60_000_000, "what the first run wrote is not used: {second}");
    fixture.ok("restore n out");
    assert!(fs::read(fixture.path("out")).unwrap() == noise(2, 80_000_000));
}

/// F1: "`rm`, `expire` and `collect` work on a full disk, too: `init` and each collect set 1 MiB of it aside for their log
/// entries, if the disk has 16 MiB free. Packs that would have to be rewritten wait until there is space."
#[test]
fn names_and_their_content_can_be_removed_on_a_full_disk() {
    let fixture = Fixture::new();
    let Some(_disk) = Tmpfs::mount(&fixture.path("repo"), "40m") else { return };
    fixture.ok("init");
    for step in 1..=4 {
        fs::create_dir_all(fixture.path("tree")).unwrap();
        fs::write(fixture.path("tree/own"), noise(step, 5_000_000)).unwrap();
        fs::write(fixture.path("tree/all"), noise(9, 2_000_000)).unwrap();
        fixture.ok(&format!("save tree run/step-{step}"));
    }
    let ballast = fixture.path("repo/.ballast");
    let fill = || fs::write(&ballast, vec![1; 64 << 20]).unwrap_err();
    assert_eq!(fill().kind(), std::io::ErrorKind::StorageFull);
    fs::write(fixture.path("f"), noise(8, 1_000_000)).unwrap();
    fixture.fails("save f n", 1, &["disk full"]);

    fixture.ok("rm run/step-1");
    fixture.ok("expire run --keep-last 1");
    assert_eq!(fixture.ok("ls"), fixture.ok("ls run/step-4"));
    let collected = fixture.json("collect --grace 0 --keep-removed 0");
    // The first pack has what the last step needs as well, and there is no space for a rewritten one.
    let freed = collected["freed_bytes"].as_u64().unwrap();
    assert!(freed > 9_000_000, "{collected}");
    fixture.ok("save f n");
    fixture.ok("verify --data");

    // Once more, with the reserve that the collect made.
    fs::remove_file(&ballast).unwrap();
    fixture.ok("collect --grace 0 --keep-removed 0");
    fill();
    fixture.ok("rm n");
    assert!(fixture.json("collect --grace 0 --keep-removed 0")["freed_bytes"].as_u64().unwrap() > 900_000);
    fixture.ok("restore run/step-4 out");
    assert!(fs::read(fixture.path("out/own")).unwrap() == noise(4, 5_000_000));
}

/// F1: "A restore onto a disk that fills up ends the same way: finished files stay, and the unfinished file is not
/// there under its name, not even in part."
#[test]
fn a_restore_onto_a_full_disk() {
    let fixture = Fixture::new();
    let Some(disk) = Tmpfs::mount(&fixture.path("out"), "40m") else { return };
    fs::create_dir(fixture.path("tree")).unwrap();
    fs::write(fixture.path("tree/a"), noise(1, 5_000_000)).unwrap();
    fs::write(fixture.path("tree/b"), noise(2, 60_000_000)).unwrap();
    fixture.ok("init");
    fixture.ok("save tree n");
    let out = fixture.path("out");
    fixture.fails("restore n out", 1, &["at out/b", "free some space", "run the same command again"]);
    let left: Vec<_> = fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["a"], "the complete file and nothing else");
    assert!(fs::read(out.join("a")).unwrap() == noise(1, 5_000_000));

    disk.remount("size=100m");
    let second = fixture.json("restore n out");
    assert_eq!(second["reused_bytes"], 5_000_000);
    assert_eq!(tree_digest(&fixture.path("tree")), tree_digest(&out));
}

/// F2: "A repository that cannot be written to can be read: `ls`, `show`, `diff`, `cat`, `restore` and `verify` work on
/// it. Commands that write end with exit 7 and the path, before they change anything. The same holds for a DEST that
/// cannot be written to".
#[test]
fn a_read_only_repository_is_read_and_not_written() {
    let fixture = Fixture::new();
    let Some(disk) = Tmpfs::mount(&fixture.path("repo"), "40m") else { return };
    fs::write(fixture.path("f"), noise(1, 1_000_000)).unwrap();
    fs::write(fixture.path("g"), noise(2, 1_000_000)).unwrap();
    fixture.ok("init");
    fixture.ok("save f n");
    fixture.ok("save g gone");
    fixture.ok("cp n m");
    fixture.ok("rm gone");
    fixture.ok("init other");
    fixture.ok("--repo other save g n");
    disk.remount("ro");
    let before = tree_digest(&fixture.path("repo"));

    for line in ["ls", "show n", "diff n m", "cat n:f --range 0-9", "restore n out", "verify --data"] {
        fixture.ok(line);
    }
    assert!(fs::read(fixture.path("out")).unwrap() == noise(1, 1_000_000));
    let repo = fixture.path("repo");
    for line in ["save g n", "rm n", "cp n new", "collect --grace 0s", "sync other repo --memory 128M"] {
        fixture.fails(line, 7, &[repo.to_str().unwrap()]);
    }
    let Some(target) = Tmpfs::mount(&fixture.path("target"), "1m") else { return };
    target.remount("ro");
    fixture.fails("restore n target/dest", 7, &["at target/dest"]);
    assert_eq!(tree_digest(&repo), before);
}

/// F2: "a source file that cannot be read: a save never leaves it out silently." Also permission bits, as they bind
/// everybody but root.
#[test]
fn an_unreadable_source_file_ends_the_save() {
    let fixture = Fixture::new();
    let root = rustix::process::geteuid().is_root();
    fs::create_dir_all(fixture.path("tree/shut")).unwrap();
    fs::create_dir(fixture.path("dest")).unwrap();
    fs::write(fixture.path("tree/open"), b"x").unwrap();
    fs::write(fixture.path("tree/secret"), b"x").unwrap();
    let mode = |name: &str, mode| fs::set_permissions(fixture.path(name), fs::Permissions::from_mode(mode)).unwrap();
    if root {
        chown(fixture.0.path(), Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let run = |line: &str| {
        let args: Vec<&str> = line.split(' ').collect();
        let mut command = fixture.command(&args);
        if root {
            command.uid(NOBODY).gid(NOBODY);
        }
        ran(&mut command)
    };
    assert_eq!(run("init").code, Some(0));
    for unreadable in ["tree/secret", "tree/shut"] {
        mode(unreadable, 0o000);
        let refused = run("save tree n");
        assert_eq!(refused.code, Some(7), "{}", refused.err);
        assert!(refused.err.contains(unreadable), "{}", refused.err);
        mode(unreadable, 0o755);
        assert_eq!(run("ls").out, "");
    }
    let saved = run("save tree n");
    assert_eq!(saved.code, Some(0), "{}", saved.err);
    mode("dest", 0o555);
    let refused = run("restore n dest/deeper");
    assert_eq!(refused.code, Some(7), "{}", refused.err);
    assert!(refused.err.contains("dest/deeper"), "{}", refused.err);
    mode("repo/log", 0o555);
    let refused = run("rm n");
    assert_eq!(refused.code, Some(7), "{}", refused.err);
    assert!(refused.err.contains("repo/log"), "{}", refused.err);
    mode("repo/log", 0o755);
    assert_eq!(run("show n").code, Some(0), "the name is still there");
}

/// F13: "nothing is read or written: operations fail with exit 6 (unreachable) and ask whether the disk is mounted, and
/// no folder is created in its place. When the same repository is back, the process continues."
#[tokio::test(flavor = "multi_thread")]
async fn a_directory_that_goes_away() {
    let fixture = Fixture::new();
    let (repo, away, out) = (fixture.path("repo"), fixture.path("away"), fixture.path("out"));
    fs::write(fixture.path("f"), noise(1, 3_000_000)).unwrap();
    fs::write(fixture.path("g"), noise(2, 3_000_000)).unwrap();
    let repository = fixture.in_folder(&repo).await;
    let save = |from: &str| {
        let (repository, path, name) = (repository.clone(), fixture.path(from), name(from));
        async move { repository.save(&path, &name, &SaveOptions::default()).await.map(drop) }
    };
    save("f").await.unwrap();
    fs::rename(&repo, &away).unwrap();
    let restore = || async { repository.restore(&name("f"), None, &out, &RestoreOptions::default()).await.map(drop) };
    for asked in [save("g").await, restore().await] {
        let error = asked.unwrap_err();
        assert_eq!(error.kind().exit_code(), 6, "{error:?}");
        assert!(error.causes().iter().any(|cause| cause.contains("is its disk mounted?")), "{error:?}");
    }
    assert!(!repo.exists() && !out.exists());

    // Another folder in its place is not it; a copy, which has another inode, is.
    fs::create_dir(&repo).unwrap();
    assert_eq!(save("g").await.unwrap_err().kind().exit_code(), 6);
    assert_eq!(fs::read_dir(&repo).unwrap().count(), 0);
    let copied = std::process::Command::new("cp").args(["-a", "-T"]).args([&away, &repo]).status().unwrap();
    assert!(copied.success());
    save("g").await.unwrap();
    restore().await.unwrap();
    assert!(fs::read(&out).unwrap() == noise(1, 3_000_000));
    fixture.ok("verify --data");
}

/// F1: "A local cache whose disk is full fails nothing".
#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_under_the_local_cache() {
    let fixture = Fixture::new();
    let Some(_disk) = Tmpfs::mount(&fixture.path("cache"), "256k") else { return };
    let repository = fixture.in_memory().await;
    let save = async |repository: &Repository, bytes: Vec<u8>, to: &str| {
        fs::write(fixture.path("f"), bytes).unwrap();
        repository.save(&fixture.path("f"), &name(to), &SaveOptions::default()).await.unwrap()
    };
    save(&repository, noise(1, 20_000_000), "a").await;
    let filled = fs::write(fixture.path("cache/ballast"), vec![1; 1 << 20]).unwrap_err();
    assert_eq!(filled.kind(), std::io::ErrorKind::StorageFull);

    // Another process, which has no segment at hand.
    let other = || Repository::open(repository.store().clone(), fixture.options());
    let report = save(&other().await.unwrap(), noise(1, 20_000_000), "b").await;
    assert_eq!(report.new_bytes, 0, "the index is used: {report:?}");
    let report = other().await.unwrap().collect(&CollectOptions::default()).await.unwrap();
    assert!(report.live_bytes > 0);
    let restored = RestoreOptions::default();
    other().await.unwrap().restore(&name("b"), None, &fixture.path("out"), &restored).await.unwrap();
    assert!(fs::read(fixture.path("out")).unwrap() == noise(1, 20_000_000));
    let cached = fs::read_dir(fixture.path("cache")).unwrap().flatten().filter(|entry| entry.path().is_dir());
    let files = cached.flat_map(|folder| fs::read_dir(folder.path().join("index")).into_iter().flatten());
    assert_eq!(files.count(), 0, "nothing half-written stays");
}

/// F8: "Readers detect a flipped bit". A damaged file of the local cache is fetched again: the repository is not to
/// blame.
#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_local_cache_is_fetched_again() {
    let fixture = Fixture::new();
    let repository = fixture.in_memory().await;
    fs::write(fixture.path("f"), noise(1, 5_000_000)).unwrap();
    repository.save(&fixture.path("f"), &name("a"), &SaveOptions::default()).await.unwrap();
    let other = || Repository::open(repository.store().clone(), fixture.options());
    let cached = || -> Vec<PathBuf> {
        let folders = fs::read_dir(fixture.path("cache")).unwrap().flatten();
        let files = folders.flat_map(|folder| fs::read_dir(folder.path().join("index")).into_iter().flatten());
        files.map(|file| file.unwrap().path()).collect()
    };
    for damage in [&b""[..], b"garbage", &[0; 4096]] {
        other().await.unwrap().save(&fixture.path("f"), &name("b"), &SaveOptions::default()).await.unwrap();
        let files = cached();
        assert!(!files.is_empty(), "a segment is cached");
        let whole = fs::read(&files[0]).unwrap();
        let mut torn = damage.to_vec();
        torn.resize(if damage.len() == 4096 { whole.len() } else { damage.len() }, 0);
        fs::write(&files[0], torn).unwrap();
        let report =
            other().await.unwrap().save(&fixture.path("f"), &name("c"), &SaveOptions::default()).await.unwrap();
        assert_eq!(report.new_bytes, 0, "the index is used");
        assert!(fs::read(&files[0]).unwrap() == whole, "the cache is whole again");
    }
}
