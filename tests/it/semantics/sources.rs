//! Sources that change under a save, and repositories within trees and within each other.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, symlink};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use towline::error::ErrorKind;
use towline::ops::{CollectOptions, RestoreOptions, SaveOptions, VerifyOptions};
use towline::progress::Progress;
use towline::repository::Repository;

use super::{Fixture, when};
use crate::data::{name, noise};

/// Tries of what needs two things to happen at the same time.
const TRIES: u64 = 20;

/// Options that show their progress.
fn watched() -> (SaveOptions, Progress) {
    let progress = Progress::default();
    (SaveOptions { reread: true, progress: progress.clone(), ..SaveOptions::default() }, progress)
}

/// F3: "A file that is deleted while the tree is being listed is not saved; it is reported among `skipped`."
#[tokio::test(flavor = "multi_thread")]
async fn what_vanishes_while_the_tree_is_listed_is_skipped() {
    let fixture = Fixture::new();
    let repository = fixture.in_memory().await;
    let tree = fixture.path("tree");
    for n in 0..3000 {
        fs::create_dir_all(tree.join(format!("{n}"))).unwrap();
    }
    for attempt in 0..TRIES {
        // The walk reads the folders of a folder from the last listed to the first.
        let victim = fs::read_dir(&tree).unwrap().next().unwrap().unwrap().path();
        let (options, progress) = watched();
        let removing = when(&progress, "scanning", {
            let victim = victim.clone();
            move || {
                std::thread::sleep(Duration::from_micros(attempt * 500));
                fs::remove_dir(&victim).unwrap();
            }
        });
        let report = repository.save(&tree, &name("n"), &options).await.unwrap();
        removing.join().unwrap();
        if report.skipped.is_empty() {
            continue;
        }
        let gone = victim.file_name().unwrap().to_str().unwrap();
        assert_eq!(report.skipped, [format!("{gone}: vanished")]);
        let saved = repository.show(&name("n")).await.unwrap();
        assert!(saved.entries().all(|entry| entry.path != gone));
        return;
    }
    panic!("nothing ever vanished in time");
}

/// F3: "A file that is deleted between listing and reading ends the save with exit 5 and the file's path, and nothing
/// of that save is visible. A PATH that never existed is exit 3."
#[tokio::test(flavor = "multi_thread")]
async fn what_vanishes_before_it_is_read_ends_the_save() {
    let fixture = Fixture::new();
    let repository = fixture.in_memory().await;
    let tree = fixture.path("tree");
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join("a"), noise(1, 48_000_000)).unwrap();
    for len in [100, 3_000_000] {
        let victim = tree.join("z");
        fs::write(&victim, noise(2, len)).unwrap();
        let (options, progress) = watched();
        let removing = when(&progress, "saving", move || fs::remove_file(victim).unwrap());
        let error = repository.save(&tree, &name("n"), &options).await.unwrap_err();
        removing.join().unwrap();
        assert_eq!((error.kind(), error.place()), (ErrorKind::Conflict, Some("z")), "{error:?}");
        assert!(repository.list(None).await.unwrap().is_empty());
    }
    let never = repository.save(&fixture.path("never"), &name("n"), &SaveOptions::default()).await.unwrap_err();
    assert_eq!(never.kind(), ErrorKind::NotFound);
}

/// F4: "If they changed, the save ends with exit 5 and the file's path: a mixture of two versions is never saved. The
/// advice is to save again when the writer is done, or to leave the file out with `--exclude`."
#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_changes_while_it_is_read_is_not_saved() {
    let fixture = Fixture::new();
    let repository = fixture.in_memory().await;
    let tree = fixture.path("tree");
    fs::create_dir(&tree).unwrap();
    let path = tree.join("big");
    for appends in [true, false] {
        fs::write(&path, noise(1, 48_000_000)).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let (options, progress) = watched();
        let writing = when(&progress, "saving", {
            let (path, stop) = (path.clone(), Arc::clone(&stop));
            move || {
                let mut file = OpenOptions::new().append(appends).write(true).open(path).unwrap();
                while !stop.load(Ordering::Relaxed) {
                    let written =
                        if appends { file.write_all(b"more") } else { file.write_all_at(b"other", 47_000_000) };
                    written.unwrap();
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        });
        let error = repository.save(&tree, &name("n"), &options).await.unwrap_err();
        stop.store(true, Ordering::Relaxed);
        writing.join().unwrap();
        assert_eq!((error.kind(), error.place()), (ErrorKind::Conflict, Some("big")), "{error:?}");
        assert!(error.help_text().unwrap().contains("--exclude"), "{error:?}");
        assert!(repository.list(None).await.unwrap().is_empty());
    }
    repository.save(&tree, &name("n"), &SaveOptions::default()).await.unwrap();
    let out = fixture.path("out");
    repository.restore(&name("n"), None, &out, &RestoreOptions::default()).await.unwrap();
    assert!(fs::read(out.join("big")).unwrap() == fs::read(&path).unwrap());
}

/// F6: "A save of a tree that contains the destination repository leaves that folder out, since the save would never
/// end. Any other repository in the tree is saved like any folder, with a warning".
#[test]
fn a_tree_with_repositories_in_it() {
    let fixture = Fixture::new();
    fs::create_dir(fixture.path("tree")).unwrap();
    fs::write(fixture.path("tree/f"), noise(1, 100_000)).unwrap();
    fixture.ok("init tree/own");
    fixture.ok("init tree/deep/other");
    fixture.ok("--repo tree/deep/other save tree/f f");
    let said = fixture.run("--repo tree/own save tree n");
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert!(said.err.contains("left out own: left out"), "{}", said.err);
    assert!(said.err.contains("warning: deep/other: a repository"), "{}", said.err);
    let again = fixture.json("--repo tree/own save tree n");
    assert_eq!(again["new_bytes"], 0, "{again}");
    assert_eq!(again["warnings"].as_array().unwrap().len(), 1, "{again}");
    fixture.ok("--repo tree/own restore n out");
    assert!(!fixture.path("out/own").exists());
    assert_eq!(fixture.ok("--repo out/deep/other verify --data --quiet"), "");
    fixture.fails("--repo tree/own save tree/own/log n", 2, &["tree/own"]);
}

/// F6: "A repository inside another's folder or prefix is separate: the two share no key, and neither one's collector
/// deletes objects whose keys it does not know."
#[tokio::test(flavor = "multi_thread")]
async fn a_repository_within_another_is_its_own() {
    let fixture = Fixture::new();
    let content = noise(1, 3_000_000);
    fs::write(fixture.path("f"), &content).unwrap();
    let save = async |repository: &Repository, to: &str| {
        repository.save(&fixture.path("f"), &name(to), &SaveOptions::default()).await.unwrap();
    };
    let mut all = Vec::new();
    for at in ["repo", "repo/inner", "repo/pack/inner", "repo/log/inner"] {
        let repository = fixture.in_folder(&fixture.path(at)).await;
        save(&repository, "kept").await;
        all.push(repository);
    }
    fs::write(fixture.path("f"), noise(2, 3_000_000)).unwrap();
    for repository in &all {
        save(repository, "gone").await;
        repository.remove(&name("gone")).await.unwrap();
    }
    let (leftover, strange) = plant_old_files(&fixture);
    for _ in 0..2 {
        for repository in &all {
            let now = CollectOptions::at_once();
            repository.collect(&now).await.unwrap();
        }
    }
    assert!(!leftover.exists(), "a staging file of the repository's own stays");
    assert!(strange.iter().all(|path| path.exists()), "something of another was deleted: {strange:?}");
    for (at, repository) in all.iter().enumerate() {
        let data = VerifyOptions { data: true, ..VerifyOptions::default() };
        let report = repository.verify(None, &data).await.unwrap();
        assert!(report.damaged.is_empty(), "{at}: {report:?}");
        let out = fixture.path(&format!("out-{at}"));
        repository.restore(&name("kept"), None, &out, &RestoreOptions::default()).await.unwrap();
        assert!(fs::read(out).unwrap() == content);
        assert_eq!(repository.list(None).await.unwrap().len(), 1);
    }
}

/// Files that were left there long ago: what an interrupted save of the outer repository leaves beside a pack, and others
/// that are none of its business, some of them named like such.
fn plant_old_files(fixture: &Fixture) -> (PathBuf, [PathBuf; 4]) {
    let session = fs::read_dir(fixture.path("repo/pack")).unwrap().map(|entry| entry.unwrap().path());
    let session = session.filter(|path| !path.ends_with("inner")).min().unwrap();
    let pack = fs::read_dir(session).unwrap().next().unwrap().unwrap().path();
    let leftover = PathBuf::from(format!("{}#1", pack.display()));
    let strange = ["repo/notes", "repo/notes#1", "repo/inner/log/00000000000000000099#1", "repo/pack/inner/pack/x#1"];
    let strange = strange.map(|name| fixture.path(name));
    for path in strange.iter().chain([&leftover]) {
        let file = fs::File::create(path).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
    }
    (leftover, strange)
}

/// F10: "Two saves of one NAME: the one that commits second finds that the name has moved and ends with exit 5".
#[tokio::test(flavor = "multi_thread")]
async fn of_two_saves_of_one_name_the_second_to_commit_is_told() {
    let fixture = Fixture::new();
    let repository = fixture.in_memory().await;
    fs::write(fixture.path("slow"), noise(1, 64_000_000)).unwrap();
    fs::write(fixture.path("quick"), b"quick").unwrap();
    let (options, progress) = watched();
    let slow = tokio::spawn({
        let (repository, path) = (repository.clone(), fixture.path("slow"));
        async move { repository.save(&path, &name("n"), &options).await }
    });
    while progress.snapshot().phase != "saving" {
        tokio::time::sleep(Duration::from_micros(100)).await;
    }
    repository.save(&fixture.path("quick"), &name("n"), &SaveOptions::default()).await.unwrap();
    let error = slow.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict, "{error:?}");
    let shown = repository.show(&name("n")).await.unwrap();
    assert_eq!(shown.summary().bytes, 5);
}

/// F12: "Nothing in a manifest can lead a restore out of DEST: no `..`, no absolute path, no symbolic link, whether
/// saved or already there."
#[tokio::test(flavor = "multi_thread")]
async fn a_link_in_the_way_leads_nowhere() {
    let fixture = Fixture::new();
    let repository = fixture.in_memory().await;
    fs::create_dir_all(fixture.path("tree/sub")).unwrap();
    fs::write(fixture.path("tree/sub/f"), b"content").unwrap();
    repository.save(&fixture.path("tree"), &name("n"), &SaveOptions::default()).await.unwrap();
    let (out, outside) = (fixture.path("out"), fixture.path("outside"));
    fs::create_dir(&out).unwrap();
    fs::create_dir(&outside).unwrap();
    symlink(&outside, out.join("sub")).unwrap();
    let refused = repository.restore(&name("n"), None, &out, &RestoreOptions::default()).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Conflict, "{refused:?}");
    let overwrite = RestoreOptions { overwrite: true, ..RestoreOptions::default() };
    repository.restore(&name("n"), None, &out, &overwrite).await.unwrap();
    assert!(out.join("sub").symlink_metadata().unwrap().is_dir());
    assert_eq!(fs::read(out.join("sub/f")).unwrap(), b"content");
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 0, "something was written through the link");
}

/// Readers refuse a tree of more than 2^64 bytes, so no save makes one: sparse files in memory may have any length.
#[tokio::test(flavor = "multi_thread")]
async fn a_tree_that_nobody_could_read_is_not_saved() {
    let fixture = Fixture::new();
    let repository = fixture.in_memory().await;
    let tree = tempfile::tempdir_in("/dev/shm").unwrap();
    for file in ["a", "b"] {
        fs::File::create(tree.path().join(file)).unwrap().set_len(i64::MAX as u64).unwrap();
    }
    repository.save(tree.path(), &name("two"), &SaveOptions::default()).await.unwrap();
    repository.show(&name("two")).await.unwrap();
    fs::File::create(tree.path().join("c")).unwrap().set_len(i64::MAX as u64).unwrap();
    let error = repository.save(tree.path(), &name("three"), &SaveOptions::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("exceed 2^64 bytes together"), "{error}");
}
