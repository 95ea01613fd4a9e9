//! Save and restore, on a directory and in memory: what comes back is what went in, and only what is new is stored.

use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _, symlink};
use std::path::Path;

use towline::error::ErrorKind;
use towline::name::Name;
use towline::ops::{CutChoice, Expected, RestoreOptions, SaveOptions};
use towline::repository::{OpenOptions, Repository};
use towline::storage::{Store, StoreOptions};

use crate::cli::User;
use crate::data::{name, noise, safetensors, tree_digest};

async fn in_memory(cache: &Path) -> Repository {
    let options = OpenOptions { cache: Some(cache.to_owned()), memory: Some(256 << 20), ..OpenOptions::default() };
    Repository::create(Store::memory(), options).await.unwrap().0
}

fn sample(root: &Path) {
    fs::create_dir_all(root.join("sub/empty")).unwrap();
    fs::write(root.join("small"), b"hello").unwrap();
    fs::write(root.join("nothing"), b"").unwrap();
    fs::write(root.join("sub/noise"), noise(1, 5_000_000)).unwrap();
    fs::write(root.join("sub/model.safetensors"), safetensors(7, &[("a", 300_000), ("b", 40), ("c", 1_500_000)]))
        .unwrap();
    fs::write(root.join(std::ffi::OsStr::from_bytes(b"not-\xff-utf8")), b"x").unwrap();
    symlink("../elsewhere", root.join("sub/link")).unwrap();
    let holes = fs::File::create(root.join("holes")).unwrap();
    holes.set_len(10 << 20).unwrap();
    holes.write_all_at(&noise(2, 100_000), 3 << 20).unwrap();
    fs::set_permissions(root.join("small"), fs::Permissions::from_mode(0o640)).unwrap();
}

async fn save(repository: &Repository, path: &Path, to: &Name) -> towline::ops::SaveReport {
    repository.save(path, to, &SaveOptions::default()).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tree_comes_back_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let (source, dest) = (dir.path().join("source"), dir.path().join("dest"));
    sample(&source);
    let repository = in_memory(dir.path()).await;
    let report = save(&repository, &source, &name("a/b")).await;
    assert_eq!(report.files, 6);
    assert!(report.new_bytes < 12_500_000 && report.logical_bytes > 22_000_000, "holes are not stored: {report:?}");
    let restored = repository.restore(&name("a/b"), None, &dest, &RestoreOptions::default()).await.unwrap();
    assert_eq!(tree_digest(&source), tree_digest(&dest));
    assert_eq!(restored.bytes, report.logical_bytes);
    assert_eq!(restored.reused_bytes, 0);
    let holes = fs::metadata(dest.join("holes")).unwrap();
    assert!(std::os::unix::fs::MetadataExt::blocks(&holes) * 512 < 1 << 20, "the hole stays one");

    let again = repository.restore(&name("a/b"), None, &dest, &RestoreOptions::default()).await.unwrap();
    assert_eq!((again.fetched_bytes, again.reused_bytes), (0, report.logical_bytes));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_save_replaces_only_what_it_expects() {
    let dir = tempfile::tempdir().unwrap();
    let (path, of) = (dir.path().join("file"), name("a"));
    fs::write(&path, "one").unwrap();
    let repository = in_memory(dir.path()).await;
    let expecting = |expected| SaveOptions { expected, ..SaveOptions::default() };
    let refused = async |expected| repository.save(&path, &of, &expecting(expected)).await.unwrap_err().kind();

    assert_eq!(refused(Expected::Version(1)).await, ErrorKind::Conflict);
    let first = repository.save(&path, &of, &expecting(Expected::Nothing)).await.unwrap();
    let version = repository.state().await.unwrap().version(&of).unwrap();
    fs::write(&path, "another").unwrap();
    for expected in [Expected::Nothing, Expected::Version(version + 1)] {
        assert_eq!(refused(expected).await, ErrorKind::Conflict);
    }
    assert_eq!(repository.show(&of).await.unwrap().summary().manifest, first.manifest, "what is there stays");
    repository.save(&path, &of, &expecting(Expected::Version(version))).await.unwrap();
    assert_eq!(refused(Expected::Version(version)).await, ErrorKind::Conflict);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_what_is_new_is_stored() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    sample(&source);
    let repository = in_memory(dir.path()).await;
    save(&repository, &source, &name("one")).await;
    let again = save(&repository, &source, &name("two")).await;
    assert_eq!((again.new_bytes, again.new_chunks, again.stored_bytes), (0, 0, 0));

    let mut bytes = fs::read(source.join("sub/noise")).unwrap();
    bytes.splice(2_000_000..2_000_000, *b"inserted");
    fs::write(source.join("sub/noise"), &bytes).unwrap();
    let changed = save(&repository, &source, &name("two")).await;
    assert!((1..=3).contains(&changed.new_chunks), "{changed:?}");
    let dest = dir.path().join("dest");
    repository.restore(&name("two"), None, &dest, &RestoreOptions::default()).await.unwrap();
    assert_eq!(fs::read(dest.join("sub/noise")).unwrap(), bytes);
}

/// What the stat cache knew decides what is read, not what the manifest says.
#[tokio::test(flavor = "multi_thread")]
async fn a_tree_has_one_manifest_whatever_was_read_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    sample(&source);
    let repository = in_memory(dir.path()).await;
    save(&repository, &source, &name("n")).await;
    std::thread::sleep(std::time::Duration::from_millis(50));
    save(&repository, &source, &name("n")).await;
    fs::write(source.join("holes"), noise(3, 200_000)).unwrap();
    let by_stat = save(&repository, &source, &name("n")).await;
    let reread = SaveOptions { reread: true, ..SaveOptions::default() };
    let by_reading = repository.save(&source, &name("m"), &reread).await.unwrap();
    assert_eq!(by_stat.manifest, by_reading.manifest);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_way_to_cut_gives_the_same_bytes_back() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    sample(&source);
    let repository = in_memory(dir.path()).await;
    for (cut, word) in [(CutChoice::Fixed, "fixed"), (CutChoice::Content, "content"), (CutChoice::Tensor, "tensor")] {
        let options = SaveOptions { cut, reread: true, ..SaveOptions::default() };
        repository.save(&source, &name(word), &options).await.unwrap();
        let dest = dir.path().join(word);
        repository.restore(&name(word), None, &dest, &RestoreOptions::default()).await.unwrap();
        assert_eq!(tree_digest(&source), tree_digest(&dest), "{word}");
    }
    // An unchanged file is cut anew for another way.
    std::thread::sleep(std::time::Duration::from_millis(50));
    for (cut, expected) in [
        (CutChoice::Fixed, (0, "fixed")),
        (CutChoice::Auto, (3, "tensor")),
        (CutChoice::Content, (0, "content")),
        (CutChoice::Tensor, (3, "tensor")),
    ] {
        let options = SaveOptions { cut, ..SaveOptions::default() };
        repository.save(&source, &name("again"), &options).await.unwrap();
        let shown = repository.show(&name("again")).await.unwrap();
        let model = shown.entries().find(|entry| entry.path.ends_with("safetensors")).unwrap();
        assert_eq!((model.tensors.iter().len(), model.cut), (expected.0, Some(expected.1)));
    }
}

/// F12: "An existing file that differs ends a restore with exit 5 before anything is written. `--overwrite` replaces
/// such files; `--delete` removes files that the tree lacks."
#[tokio::test(flavor = "multi_thread")]
async fn what_is_in_the_way_is_a_conflict_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let (source, dest) = (dir.path().join("source"), dir.path().join("dest"));
    sample(&source);
    let repository = in_memory(dir.path()).await;
    save(&repository, &source, &name("n")).await;
    fs::create_dir_all(dest.join("sub")).unwrap();
    fs::write(dest.join("sub/noise"), b"mine").unwrap();
    fs::write(dest.join("other"), b"mine too").unwrap();
    let refused = repository.restore(&name("n"), None, &dest, &RestoreOptions::default()).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Conflict);
    assert_eq!(fs::read(dest.join("sub/noise")).unwrap(), b"mine");
    assert!(!dest.join("small").exists());

    let overwrite = RestoreOptions { overwrite: true, ..RestoreOptions::default() };
    repository.restore(&name("n"), None, &dest, &overwrite).await.unwrap();
    assert_eq!(fs::read(dest.join("other")).unwrap(), b"mine too");
    let delete = RestoreOptions { overwrite: true, delete: true, ..RestoreOptions::default() };
    repository.restore(&name("n"), None, &dest, &delete).await.unwrap();
    assert_eq!(tree_digest(&source), tree_digest(&dest));
}

/// F12: "A DEST in the folder of a repository is a conflict."
#[test]
fn nothing_is_put_into_a_repository() {
    let user = User::with_repository();
    user.write("tree/a", b"a");
    user.ok(&["save", "tree", "n"]);
    for dest in ["../repo", "../repo/log", "../repo/new/folder", "../repo/pack/"] {
        for more in [&["--delete"][..], &["--delete", "--dry-run"], &[]] {
            let error = user.fails(&[&["restore", "n", dest], more].concat(), 5);
            assert!(error["message"].as_str().unwrap().starts_with("destination lies in a repository"), "{error}");
        }
    }
    assert!(!user.repository().join("new").exists());
    user.ok(&["verify", "--data"]);
    user.ok(&["restore", "n", "out"]);
}

/// F12: "A folder with content in the place of a file is a conflict unless both are given".
#[tokio::test(flavor = "multi_thread")]
async fn a_folder_with_content_is_not_replaced_by_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let (source, dest) = (dir.path().join("source"), dir.path().join("dest"));
    fs::create_dir(&source).unwrap();
    fs::write(source.join("data"), b"a file").unwrap();
    let home = dest.join("data");
    fs::create_dir_all(&home).unwrap();
    let location = towline::storage::Location::Directory(home.clone());
    let store = towline::storage::open(&location, &StoreOptions::default()).await.unwrap();
    let options = OpenOptions { cache: Some(dir.path().join("cache")), ..OpenOptions::default() };
    let repository = Repository::create(store, options).await.unwrap().0;
    save(&repository, &source, &name("n")).await;
    let before = tree_digest(&home);
    for delete in [false, true] {
        for dry_run in [true, false] {
            let options = RestoreOptions { overwrite: true, delete, dry_run, ..RestoreOptions::default() };
            let refused = repository.restore(&name("n"), None, &dest, &options).await.unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Conflict, "{refused:?}");
        }
    }
    assert_eq!(tree_digest(&home), before, "the repository that it is read from stays");
    let other = dir.path().join("other");
    fs::create_dir_all(other.join("data/deep")).unwrap();
    fs::write(other.join("data/deep/1"), b"mine").unwrap();
    let overwrite = RestoreOptions { overwrite: true, ..RestoreOptions::default() };
    let refused = repository.restore(&name("n"), None, &other, &overwrite).await.unwrap_err();
    assert!(refused.to_string().contains("a folder with content is in the way"), "{refused}");
    let both = RestoreOptions { delete: true, ..overwrite.clone() };
    let report = repository.restore(&name("n"), None, &other, &both).await.unwrap();
    assert_eq!(report.removed.unwrap().paths, ["data/deep"]);
    assert_eq!(fs::read(other.join("data")).unwrap(), b"a file");
    // An empty one holds nothing to lose.
    let empty = dir.path().join("empty");
    fs::create_dir_all(empty.join("data")).unwrap();
    repository.restore(&name("n"), None, &empty, &overwrite).await.unwrap();
    assert_eq!(tree_digest(&empty), tree_digest(&source));
}

#[tokio::test(flavor = "multi_thread")]
async fn parts_of_a_tree_and_of_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    sample(&source);
    let repository = in_memory(dir.path()).await;
    save(&repository, &source, &name("n")).await;
    let into = dir.path().join("into");
    repository.restore(&name("n"), Some(b"sub"), &into, &RestoreOptions::default()).await.unwrap();
    assert_eq!(tree_digest(&source.join("sub")), tree_digest(&into));
    let file = dir.path().join("file");
    repository.restore(&name("n"), Some(b"sub/noise"), &file, &RestoreOptions::default()).await.unwrap();
    let whole = fs::read(source.join("sub/noise")).unwrap();
    assert_eq!(fs::read(&file).unwrap(), whole);
    let mut out = Vec::new();
    let n = repository.cat(&name("n"), b"sub/noise", Some(1_000_000..=2_999_999), &mut out).await.unwrap();
    assert_eq!((n, out.as_slice()), (2_000_000, &whole[1_000_000..3_000_000]));
    let mut holes = Vec::new();
    repository.cat(&name("n"), b"holes", None, &mut holes).await.unwrap();
    assert_eq!(holes, fs::read(source.join("holes")).unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn names_are_copied_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("f");
    fs::write(&source, b"content").unwrap();
    let repository = in_memory(dir.path()).await;
    save(&repository, &source, &name("run/1")).await;
    repository.copy(&name("run/1"), &name("best")).await.unwrap();
    assert_eq!(repository.list(None).await.unwrap().len(), 2);
    assert_eq!(repository.list(Some(&name("run"))).await.unwrap().len(), 1);
    repository.remove(&name("run/1")).await.unwrap();
    assert_eq!(repository.remove(&name("run/1")).await.unwrap_err().kind(), ErrorKind::NotFound);
    let dest = dir.path().join("out/");
    repository.restore(&name("best"), None, &dest, &RestoreOptions::default()).await.unwrap();
    assert_eq!(fs::read(dir.path().join("out/f")).unwrap(), b"content");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_with_a_name_elsewhere_keeps_its_mode_and_time_there() {
    let dir = tempfile::tempdir().unwrap();
    let (source, outside, to) = (dir.path().join("source"), dir.path().join("outside"), dir.path().join("to"));
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    for (folder, file, bits) in [(Some(&source), source.join("f"), 0o666), (Some(&to), outside.clone(), 0o600)] {
        folder.map(fs::create_dir).unwrap().unwrap();
        fs::write(&file, b"same").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(bits)).unwrap();
    }
    fs::hard_link(&outside, to.join("f")).unwrap();
    let before = fs::metadata(&outside).unwrap().modified().unwrap();
    let repository = in_memory(dir.path()).await;
    save(&repository, &source, &name("tree")).await;
    for _ in 0..2 {
        repository.restore(&name("tree"), None, &to, &RestoreOptions::default()).await.unwrap();
        assert_eq!((mode(&outside), fs::metadata(&outside).unwrap().modified().unwrap()), (0o600, before));
        assert_eq!((mode(&to.join("f")), fs::read(to.join("f")).unwrap()), (0o666, b"same".to_vec()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn setuid_and_setgid_bits_are_restored_only_on_request() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    fs::create_dir(&source).unwrap();
    fs::write(source.join("tool"), b"#!/bin/sh").unwrap();
    fs::set_permissions(source.join("tool"), fs::Permissions::from_mode(0o6755)).unwrap();
    let repository = in_memory(dir.path()).await;
    save(&repository, &source, &name("tools")).await;
    for (keep_setuid, expected) in [(false, 0o755), (true, 0o6755)] {
        let to = dir.path().join(format!("out-{keep_setuid}"));
        let options = RestoreOptions { keep_setuid, ..RestoreOptions::default() };
        repository.restore(&name("tools"), None, &to, &options).await.unwrap();
        let mode = fs::metadata(to.join("tool")).unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode, expected, "{mode:o}");
    }
}

/// Whoever saved a tree must not open up a folder that its user made.
#[tokio::test(flavor = "multi_thread")]
async fn a_destination_that_was_there_keeps_its_mode() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    fs::create_dir_all(source.join("sub")).unwrap();
    fs::write(source.join("sub/file"), b"x").unwrap();
    let set = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    set(&source, 0o777);
    set(&source.join("sub"), 0o770);
    let repository = in_memory(dir.path()).await;
    save(&repository, &source, &name("open")).await;
    for (subpath, saved) in [(None, 0o777), (Some(&b"sub"[..]), 0o770)] {
        for own in [0o700, 0o500, 0o755] {
            let dest = tempfile::tempdir().unwrap();
            let dest = dest.path();
            fs::create_dir(dest.join("sub")).unwrap();
            set(dest, own);
            repository.restore(&name("open"), subpath, dest, &RestoreOptions::default()).await.unwrap();
            assert_eq!(mode(dest), own, "{subpath:?}");
            if subpath.is_none() {
                assert_eq!(mode(&dest.join("sub")), 0o770, "what lies in it gets the modes that were saved");
            }
            set(dest, 0o700);
        }
        let made = tempfile::tempdir().unwrap();
        let made = made.path().join("made");
        repository.restore(&name("open"), subpath, &made, &RestoreOptions::default()).await.unwrap();
        assert_eq!(mode(&made), saved);
    }
}

/// Files of an exbibyte that are almost nothing but holes, of fixed pieces or with a tensor that claims all of it: only their bytes are
/// looked at. File systems in memory take such lengths (tmpfs(5)).
#[tokio::test(flavor = "multi_thread")]
async fn a_hole_of_any_length_costs_nothing() {
    let Ok(dir) = tempfile::tempdir_in("/dev/shm") else { return };
    let (source, len) = (dir.path().join("source"), 1_u64 << 60);
    fs::create_dir(&source).unwrap();
    let header = format!(r#"{{"w":{{"dtype":"U8","shape":[{len}],"data_offsets":[0,{len}]}}}}"#);
    let tensors = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
    for (file, head) in [("plain", &b"x"[..]), ("model.safetensors", &tensors)] {
        fs::write(source.join(file), head).unwrap();
        let opened = fs::File::options().write(true).open(source.join(file)).unwrap();
        if opened.set_len(head.len() as u64 + len).is_err() {
            return;
        }
        opened.write_all_at(b"end", len / 2).unwrap();
    }
    let repository = in_memory(dir.path()).await;
    for cut in [CutChoice::Fixed, CutChoice::Auto] {
        let options = SaveOptions { cut, reread: true, ..SaveOptions::default() };
        let saved = repository.save(&source, &name("sparse"), &options).await.unwrap();
        assert!(saved.logical_bytes > 2 * len && saved.stored_bytes < 100_000, "{saved:?}");
    }
}
