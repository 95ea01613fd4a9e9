//! Who may use a repository in a folder, and what `verify --repair` does about a log that cannot be read.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use serde_json::json;

use crate::cli::User;

/// The modes of all files, and of all folders, at and below `root`.
fn modes(root: &Path) -> (BTreeSet<u32>, BTreeSet<u32>) {
    let (mut files, mut folders) = (BTreeSet::new(), BTreeSet::new());
    let mut left = vec![root.to_owned()];
    while let Some(path) = left.pop() {
        let found = fs::metadata(&path).unwrap();
        let mode = found.permissions().mode() & 0o7777;
        if found.is_dir() {
            folders.insert(mode);
            left.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else {
            files.insert(mode);
        }
    }
    (files, folders)
}

/// Runs a command under another umask.
fn under_umask(user: &User, umask: &str, args: &[&str]) {
    let towline = user.command(args);
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("umask {umask} && exec \"$0\" \"$@\"")).arg(towline.get_program());
    shell.args(towline.get_args()).current_dir(user.work()).env_clear();
    shell.env("HOME", user.work().join("../home")).env("TOWLINE_AGENT", "none").env("PATH", "/usr/bin:/bin");
    let output = shell.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_repository_in_a_folder_is_its_users_alone_unless_it_is_shared() {
    for (shared, file, folder) in
        [(None, 0o600, 0o700), (Some("--shared"), 0o660, 0o2770), (Some("--shared=all"), 0o664, 0o2775)]
    {
        let user = User::new();
        user.set_up("128M");
        let expected = (BTreeSet::from([file]), BTreeSet::from([folder]));
        let init: Vec<&str> = ["init"].into_iter().chain(shared).collect();
        user.write("tree/small", b"small");
        user.write("tree/large", &crate::cli::noise(5 << 20));
        fs::set_permissions(user.work().join("tree/small"), Permissions::from_mode(0o646)).unwrap();
        under_umask(&user, "022", &init);
        // Whoever comes later keeps to what was chosen, whatever their umask.
        for umask in ["000", "077"] {
            under_umask(&user, umask, &["save", "tree", &format!("run/{umask}")]);
            assert_eq!(modes(&user.repository()), expected, "{shared:?}, umask {umask}");
        }
        user.ok(&["restore", "run/077", "out"]);
        let restored = fs::metadata(user.work().join("out/small")).unwrap().permissions().mode() & 0o7777;
        assert_eq!(restored, 0o646, "what was saved is not affected");
        if shared.is_none() {
            assert_eq!(user.fails(&["init", "--shared"], 2)["kind"], "usage");
        }
        assert_eq!(modes(&user.repository()), expected);
    }
}

#[test]
fn only_an_empty_folder_becomes_a_shared_repository() {
    let user = User::new();
    user.write("home/.ssh/id", b"secret");
    user.write("empty/file", b"");
    let (home, empty, link) = (user.work().join("home"), user.work().join("empty"), user.work().join("link"));
    fs::remove_file(empty.join("file")).unwrap();
    for folder in [&home, &empty] {
        fs::set_permissions(folder, Permissions::from_mode(0o700)).unwrap();
    }
    std::os::unix::fs::symlink(&empty, link).unwrap();
    let mode = |folder: &Path| fs::metadata(folder).unwrap().permissions().mode() & 0o7777;
    assert!(user.fails(&["init", "--shared", "home"], 5)["message"].as_str().unwrap().contains("got .ssh"));
    assert_eq!(user.fails(&["init", "--shared", "link"], 5)["kind"], "conflict");
    assert_eq!((mode(&home), mode(&empty)), (0o700, 0o700));
    assert!(user.fails(&["init", "--shared", "all"], 2)["help"].as_str().unwrap().contains("--shared=all"));
    user.ok(&["init", "--shared", "empty"]);
    assert_eq!(mode(&empty), 0o2770);
}

#[test]
fn a_bucket_is_not_shared_by_modes() {
    let user = User::new();
    assert_eq!(user.fails(&["init", "--shared", "s3://bucket/x"], 2)["kind"], "usage");
}

/// The entries of the log, sorted.
fn entries(user: &User) -> Vec<std::path::PathBuf> {
    let mut entries: Vec<_> = fs::read_dir(user.repository().join("log")).unwrap().map(|e| e.unwrap().path()).collect();
    entries.sort();
    entries
}

#[test]
fn a_log_entry_of_garbage_is_set_aside_and_the_rest_is_kept() {
    let user = User::with_tree();
    user.write("tree/a.txt", b"second");
    user.ok(&["save", "tree", "run/2"]);
    user.ok(&["cp", "run/1", "lost"]);
    let copied = entries(&user).pop().unwrap();
    user.ok(&["cp", "run/2", "best"]);
    fs::write(&copied, b"garbage").unwrap();

    for command in [&["ls"][..], &["restore", "run/1", "out"], &["save", "tree", "run/3"]] {
        let error = user.fails(command, 4);
        assert!(error.to_string().contains("towline verify --repair"), "{error}");
    }
    let found = user.json(&["verify"], 4);
    assert_eq!(found["repaired"].as_array().unwrap().len(), 0, "looking changes nothing");
    let report = user.json(&["verify", "--repair"], 4);
    let repaired = report["repaired"].to_string();
    let number = copied.file_name().unwrap().to_str().unwrap();
    for told in [&format!("set log/{number} aside, to aside/{number}"), "kept run/1", "kept run/2", "kept best"] {
        assert!(repaired.contains(told), "{told}: {repaired}");
    }
    assert!(!repaired.contains("kept lost"), "{repaired}");
    assert!(report["left"] == json!([]) && report["lost"] == json!([format!("log/{number}")]), "{report}");
    assert_eq!(fs::read(user.repository().join("aside").join(number)).unwrap(), b"garbage");

    user.json(&["verify", "--data"], 0);
    let listed = user.json(&["ls"], 0);
    let names: Vec<&str> = listed["refs"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["best", "run/1", "run/2"]);
    user.ok(&["restore", "run/2", "out"]);
    assert_eq!(user.read("out/a.txt"), b"second");
    user.ok(&["save", "tree", "run/3"]);
    user.ok(&["collect", "--grace", "0"]);
    user.json(&["verify", "--data"], 0);
}

#[test]
fn a_repair_that_heals_everything_ends_with_0() {
    let user = User::with_tree();
    let segments = user.repository().join("index");
    let session = fs::read_dir(segments).unwrap().next().unwrap().unwrap().path();
    let segment =
        if session.is_dir() { fs::read_dir(session).unwrap().next().unwrap().unwrap().path() } else { session };
    fs::write(&segment, b"garbage").unwrap();
    assert_eq!(user.json(&["verify"], 4)["left"], json!([]), "nothing was repaired");
    let report = user.json(&["verify", "--repair"], 0);
    assert_eq!(report["damaged"].as_array().unwrap().len(), 1, "{report}");
    assert!(report["left"] == json!([]) && report["lost"] == json!([]), "{report}");
    assert!(user.ok(&["verify", "--data"]).contains("nothing is damaged"));
}

/// F8: "`verify --data` in every byte": what it tells to run heals what it found.
#[test]
fn the_cure_that_verify_tells_is_one() {
    let user = User::with_repository();
    user.write("tree/model", &crate::cli::noise(3 << 20));
    user.ok(&["save", "tree", "run/1"]);
    let packs = user.repository().join("pack");
    let session = fs::read_dir(packs).unwrap().next().unwrap().unwrap().path();
    let pack = fs::read_dir(session).unwrap().next().unwrap().unwrap().path();
    let mut bytes = fs::read(&pack).unwrap();
    bytes[500_000] ^= 1;
    fs::write(&pack, bytes).unwrap();
    let found = user.run(&["verify", "--data"]);
    assert_eq!(found.code, Some(4), "{}", found.err);
    let help = found.err.split('`').nth(1).unwrap();
    let help: Vec<&str> = help.split(' ').skip(1).collect();
    assert_eq!(user.run(&help).code, Some(4));
    user.ok(&["save", "tree", "run/1"]);
    user.ok(&["verify", "--data"]);
}
