//! Tests of trees on a real file system: walks, and that no entry is placed outside.

use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use proptest::prelude::{any, prop, proptest};
use rustix::fs::{Mode, OFlags, mkdirat, openat};
use tempfile::TempDir;

use super::*;
use crate::budget::Budget;
use crate::clock::Timestamp;
use crate::error::ErrorKind;
use crate::limits::MEMORY_MIN;

const MTIME: Timestamp = Timestamp(1_234_567_890_123_456_789);

fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn put(root: &Path, path: impl AsRef<Path>, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn paths(root: &Path, rules: &Rules) -> Vec<String> {
    let walk = walk(root, rules).unwrap();
    walk.found.iter().map(|found| String::from_utf8_lossy(&found.path).into_owned()).collect()
}

fn target(root: &Path) -> Target {
    Target::open(root, Durability::Process).unwrap()
}

fn names(root: &Path) -> Vec<String> {
    let mut names = fs::read_dir(root)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect::<Vec<_>>();
    names.sort();
    names
}

mod walking {
    use super::*;

    #[test]
    fn everything_is_found_in_byte_order_whatever_its_name() {
        let root = folder();
        put(root.path(), "a/x", "1");
        put(root.path(), "a-b", "2");
        put(root.path(), ".hidden", "3");
        put(root.path(), std::ffi::OsStr::from_bytes(b"latin-\xe9"), "4");
        fs::create_dir(root.path().join("empty")).unwrap();
        symlink("nowhere/at all", root.path().join("link")).unwrap();
        let walk = walk(root.path(), &Rules::default()).unwrap();
        let found = walk.found.iter().map(|found| &found.path[..]).collect::<Vec<_>>();
        let expected: [&[u8]; 8] = [b"", b".hidden", b"a", b"a-b", b"a/x", b"empty", b"latin-\xe9", b"link"];
        assert_eq!(found, expected);
        assert_eq!(walk.found[7].kind, WalkKind::Symlink { target: b"nowhere/at all".to_vec() });
        let mut text = [0];
        walk.open(&walk.found[6]).unwrap().read_exact_at(&mut text, 0).unwrap();
        assert_eq!(&text, b"4");
        assert_eq!(walk.open(&walk.found[7]).unwrap_err().kind(), ErrorKind::Conflict);
    }

    #[test]
    fn a_file_is_a_tree_of_its_own_and_a_link_to_it_keeps_the_links_name() {
        let root = folder();
        put(root.path(), "real", "content");
        symlink("real", root.path().join("latest")).unwrap();
        for name in ["real", "latest"] {
            let walk = walk(&root.path().join(name), &Rules::default()).unwrap();
            assert!(walk.is_file());
            assert_eq!(walk.root().unwrap(), root.path().canonicalize().unwrap().join("real"));
            let [found] = &walk.found[..] else { panic!("{:?}", walk.found) };
            assert_eq!((&found.path[..], &found.kind), (name.as_bytes(), &WalkKind::File));
            assert!(walk.open(found).unwrap().is_still(&found.stat).unwrap());
        }
        assert_eq!(walk(&root.path().join("gone"), &Rules::default()).unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn ignore_files_hold_in_their_folder_and_excludes_go_first() {
        let root = folder();
        put(root.path(), IGNORE_FILE, "*.tmp\n/top\n!keep.tmp\nbuild/\n");
        put(root.path(), format!("sub/{IGNORE_FILE}"), "!b.tmp\nlocal\n");
        put(root.path(), ".gitignore", "kept-by-us\n");
        for path in ["a.tmp", "keep.tmp", "top", "sub/top", "sub/b.tmp", "sub/local", "local", "build/x", "kept-by-us"]
        {
            put(root.path(), path, "");
        }
        let kept = ["", ".gitignore", IGNORE_FILE, "keep.tmp", "kept-by-us", "local", "sub"];
        let mut expected = kept.map(str::to_owned).to_vec();
        expected.extend(["sub/.towlineignore", "sub/b.tmp", "sub/top"].map(str::to_owned));
        assert_eq!(paths(root.path(), &Rules::default()), expected);
        let excludes = vec!["sub".to_owned(), "!a.tmp".to_owned()];
        expected.retain(|path| !path.starts_with("sub"));
        expected.insert(3, "a.tmp".to_owned());
        assert_eq!(paths(root.path(), &Rules { excludes, ..Rules::default() }), expected);
    }

    #[test]
    fn a_pattern_that_cannot_be_read_stops_the_save_and_is_named() {
        let root = folder();
        put(root.path(), format!("sub/{IGNORE_FILE}"), "fine\n{a,b\n");
        let error = walk(root.path(), &Rules::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(error.place().unwrap().ends_with("sub/.towlineignore:2"), "{error}");
        let rules = Rules { excludes: vec!["{a".into()], ..Rules::default() };
        assert_eq!(walk(root.path(), &rules).unwrap_err().kind(), ErrorKind::Usage);
    }

    #[test]
    fn the_repository_itself_is_left_out_and_others_are_pointed_at() {
        let root = folder();
        put(root.path(), "mine/repository", "");
        put(root.path(), "mine/log/1", "");
        put(root.path(), "other/repository", "");
        put(root.path(), "other/log/1", "");
        symlink(root.path().join("mine"), root.path().join("alias")).unwrap();
        let rules = Rules { skip: vec![root.path().join("alias"), "/does/not/exist".into()], ..Rules::default() };
        let found = walk(root.path(), &rules).unwrap();
        assert_eq!(found.skipped, [Skipped { path: b"mine".to_vec(), reason: SkipReason::LeftOut }]);
        assert_eq!(found.repositories, [b"other"]);
        assert!(!found.found.iter().any(|found| found.path.starts_with(b"mine")));
        assert_eq!(walk(&root.path().join("mine/log"), &rules).unwrap_err().kind(), ErrorKind::Usage);
    }

    #[test]
    fn what_is_no_file_and_what_is_not_finished_is_skipped_with_the_reason() {
        let root = folder();
        let _socket = std::os::unix::net::UnixListener::bind(root.path().join("socket")).unwrap();
        let staged = target(root.path()).stage(b"model", 10).unwrap();
        let walk = walk(root.path(), &Rules::default()).unwrap();
        assert_eq!(walk.found.len(), 1);
        let reasons = walk.skipped.iter().map(|skipped| skipped.reason).collect::<Vec<_>>();
        assert_eq!(reasons, [SkipReason::Unfinished, SkipReason::Special("socket")]);
        drop(staged);
    }

    #[test]
    fn holes_are_told_from_data_if_long_enough_to_matter() {
        let root = folder();
        let path = root.path().join("sparse");
        let file = File::options().create_new(true).read(true).write(true).open(&path).unwrap();
        file.set_len(4 << 20).unwrap();
        assert_eq!(extents(&file, 4 << 20).unwrap(), []);
        file.write_all_at(&[1; 4096], 1 << 20).unwrap();
        file.write_all_at(&[1; 4096], (1 << 20) + 16384).unwrap();
        file.write_all_at(&[1; 100], (3 << 20) + 100).unwrap();
        let found = extents(&file, 4 << 20).unwrap();
        assert_eq!(found, [1 << 20..(1 << 20) + 20480, 3 << 20..(3 << 20) + 4096]);
        assert_eq!(extents(&file, 5).unwrap().into_iter().map(|r| (r.start, r.end)).collect::<Vec<_>>(), [(0, 5)]);
        assert_eq!(extents(&file, 0).unwrap(), []);
        assert_eq!(extents(&file, 8 << 20).unwrap(), found, "a file that shrank");
        assert_eq!(Extents::new(&file, 4 << 20).collect::<crate::error::Result<Vec<_>>>().unwrap(), found);
    }

    #[test]
    fn holes_are_found_however_many_there_are() {
        let root = folder();
        let file = File::options().create_new(true).read(true).write(true).open(root.path().join("sparse")).unwrap();
        let holes = 6;
        file.set_len(2 * holes * HOLE_MIN).unwrap();
        for nth in 0..holes {
            file.write_all_at(&[1; 4096], 2 * nth * HOLE_MIN).unwrap();
        }
        let found = Extents::new(&file, 2 * holes * HOLE_MIN).collect::<crate::error::Result<Vec<_>>>().unwrap();
        assert_eq!(found.len() as u64, holes);
        assert_eq!(found.iter().map(|data| data.end - data.start).sum::<u64>(), 4096 * holes);
        let listed = extents(&file, 2 * holes * HOLE_MIN).unwrap();
        assert_eq!(listed[..4], found[..4]);
        let rest = found[4].start..2 * holes * HOLE_MIN;
        assert_eq!((listed.len(), &listed[4]), (5, &rest), "the rest of a list is one range");
    }
}

mod placing {
    use super::*;

    #[test]
    fn a_tree_with_read_only_folders_comes_out_as_it_went_in_and_can_be_placed_again() {
        let root = folder();
        let dest = root.path().join("not/yet/there");
        for _ in 0..2 {
            let target = target(&dest);
            target.make_folder(b"ro").unwrap();
            target.make_folder(b"ro/deep").unwrap();
            target.write_small(b"ro/deep/\xff", b"small", 0o4751, MTIME).unwrap();
            let staged = target.stage(b"ro/big", 1 << 20).unwrap();
            staged.file().write_all_at(b"end", (1 << 20) - 3).unwrap();
            staged.finish(0o444, MTIME).unwrap();
            target.symlink(b"ro/link", b"../out", MTIME).unwrap();
            target.set_folder(b"ro/deep", 0o500, MTIME).unwrap();
            target.set_folder(b"ro", 0o555, MTIME).unwrap();
            target.set_folder(b"", 0o711, MTIME).unwrap();
        }
        let walk = walk(&dest, &Rules::default()).unwrap();
        let found = walk.found.iter().map(|f| (&f.path[..], f.stat.mode, f.stat.mtime)).collect::<Vec<_>>();
        let expected: [(&[u8], u32, Timestamp); 6] = [
            (b"", 0o711, MTIME),
            (b"ro", 0o555, MTIME),
            (b"ro/big", 0o444, MTIME),
            (b"ro/deep", 0o500, MTIME),
            (b"ro/deep/\xff", 0o4751, MTIME),
            (b"ro/link", 0o777, MTIME),
        ];
        assert_eq!(found, expected);
        assert!(walk.skipped.is_empty());
        let big = walk.open(&walk.found[2]).unwrap();
        assert_eq!(big.each_extent(walk.found[2].stat.size).count(), 1, "the hole is gone");
        assert_eq!(fs::read(dest.join("ro/deep").join(std::ffi::OsStr::from_bytes(b"\xff"))).unwrap(), b"small");
    }

    #[test]
    fn nothing_reaches_outside_by_its_path() {
        let root = folder();
        let target = target(&root.path().join("dest"));
        target.make_folder(b"a").unwrap();
        let hostile: [&[u8]; 9] =
            [b"a/../../b", b"..", b".", b"/etc/x", b"a//b", b"a/", b"a/./b", b"nul\0", &[b'x'; 256]];
        for path in hostile {
            let shown = String::from_utf8_lossy(path).into_owned();
            let refused = |result: Result<(), crate::Error>| {
                assert_eq!(result.unwrap_err().kind(), ErrorKind::Damaged, "{shown}");
            };
            refused(target.write_small(path, b"", 0o600, MTIME));
            refused(target.stage(path, 1).map(drop));
            refused(target.make_folder(path).map(drop));
            refused(target.symlink(path, b"x", MTIME));
            refused(target.set_folder(path, 0o700, MTIME));
            refused(target.set_file(path, 0o700, MTIME));
            refused(target.remove(path));
            refused(target.read(path).map(drop));
            refused(target.kind_of(path).map(drop));
        }
        assert_eq!(target.write_small(b"", b"", 0o600, MTIME).unwrap_err().kind(), ErrorKind::Damaged);
        assert_eq!(target.remove(b"").unwrap_err().kind(), ErrorKind::Damaged);
        assert_eq!(names(root.path()), ["dest"]);
    }

    #[test]
    fn nothing_reaches_outside_by_a_planted_link() {
        let root = folder();
        put(root.path(), "out/precious", "old");
        let dest = root.path().join("dest");
        let target = target(&dest);
        symlink("../out", dest.join("way")).unwrap();
        symlink("../out/precious", dest.join("file")).unwrap();
        for path in [&b"way/precious"[..], b"way/new"] {
            let refused = target.write_small(path, b"new", 0o600, MTIME).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Conflict, "{refused}");
            assert!(target.stage(path, 1).is_err());
            assert!(target.symlink(path, b"x", MTIME).is_err());
            assert!(target.make_folder(path).is_err());
            assert!(target.read(path).is_err());
            assert_eq!(target.kind_of(path).unwrap(), None);
            target.remove(path).unwrap();
        }
        assert!(target.make_folder(b"way").is_err());
        assert!(target.set_folder(b"way", 0o700, MTIME).is_err());
        assert!(target.set_file(b"file", 0o777, MTIME).is_err());
        assert!(target.read(b"file").is_err());
        target.write_small(b"file", b"new", 0o600, MTIME).unwrap();
        target.remove(b"way").unwrap();
        assert_eq!(names(&dest), ["file"]);
        assert_eq!(fs::read_to_string(root.path().join("out/precious")).unwrap(), "old");
        assert_eq!(names(&root.path().join("out")), ["precious"]);
    }

    #[test]
    fn a_folder_turned_into_a_link_after_it_was_used_leads_nowhere() {
        let root = folder();
        put(root.path(), "out/x", "old");
        let dest = root.path().join("dest");
        let target = target(&dest);
        target.make_folder(b"a").unwrap();
        target.make_folder(b"a/b").unwrap();
        target.write_small(b"a/b/x", b"1", 0o600, MTIME).unwrap();
        target.remove(b"a").unwrap();
        symlink("../out", dest.join("a")).unwrap();
        assert!(target.write_small(b"a/x", b"2", 0o600, MTIME).is_err());
        assert_eq!(fs::read_to_string(root.path().join("out/x")).unwrap(), "old");
    }

    #[test]
    fn removing_takes_read_only_folders_but_never_what_links_point_to() {
        let root = folder();
        put(root.path(), "out/precious", "old");
        let dest = root.path().join("dest");
        put(&dest, "gone/deep/er/x", "");
        symlink("../../out", dest.join("gone/link")).unwrap();
        fs::set_permissions(dest.join("gone/deep"), fs::Permissions::from_mode(0o555)).unwrap();
        let target = target(&dest);
        target.remove(b"gone").unwrap();
        target.remove(b"gone").unwrap();
        target.remove(b"never/was").unwrap();
        assert!(names(&dest).is_empty());
        assert_eq!(names(&root.path().join("out")), ["precious"]);
    }

    #[test]
    fn a_dropped_file_is_removed_and_the_old_one_stays() {
        let root = folder();
        put(root.path(), "model", "old");
        let target = target(root.path());
        let staged = target.stage(b"model", 3).unwrap();
        staged.file().write_all_at(b"new", 0).unwrap();
        assert_eq!(fs::metadata(root.path().join(&names(root.path())[0])).unwrap().mode() & 0o777, 0o600);
        drop(staged);
        assert_eq!(names(root.path()), ["model"]);
        assert_eq!(fs::read_to_string(root.path().join("model")).unwrap(), "old");
        fs::create_dir(root.path().join("folder")).unwrap();
        let error = target.stage(b"folder", 1).unwrap().finish(0o600, MTIME).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict);
        assert_eq!(target.write_small(b"folder", b"", 0o600, MTIME).unwrap_err().kind(), ErrorKind::Conflict);
        assert_eq!(names(root.path()), ["folder", "model"]);
    }

    #[test]
    fn a_sweep_takes_what_crashes_left_and_leaves_what_is_being_written() {
        let root = folder();
        let target = target(root.path());
        target.make_folder(b"sub").unwrap();
        let live = target.stage(b"sub/live", 1).unwrap();
        put(root.path(), "sub/.towline-0123456789abcdef-1f.part", "crashed");
        symlink("x", root.path().join(".towline-0123456789abcdef-2.part")).unwrap();
        put(root.path(), ".towline-mine.part", "somebody's own");
        assert_eq!(self::target(root.path()).sweep().unwrap(), 2);
        assert_eq!(names(root.path()), [".towline-mine.part", "sub"]);
        live.finish(0o600, MTIME).unwrap();
        assert_eq!(names(&root.path().join("sub")), ["live"]);
    }

    #[test]
    fn entries_list_what_may_be_removed() {
        let root = folder();
        put(root.path(), "a/x", "");
        put(root.path(), "b/repo/log/1", "");
        put(root.path(), "b/y", "");
        put(root.path(), IGNORE_FILE, "*");
        let _socket = std::os::unix::net::UnixListener::bind(root.path().join("socket")).unwrap();
        let target = target(root.path());
        let _live = target.stage(b"live", 1).unwrap();
        let (keep, budget) = ([root.path().join("b/repo")], Budget::new(MEMORY_MIN).unwrap());
        let entries = target.entries(&keep, &[].into(), &budget).unwrap().list;
        let listed = entries.iter().map(|entry| String::from_utf8_lossy(&entry.path)).collect::<Vec<_>>();
        assert_eq!(listed, [IGNORE_FILE, "a", "a/x", "b/y", "socket"]);
        assert_eq!(entries[4].kind, None);
    }

    #[test]
    fn a_file_where_a_folder_should_be_is_a_conflict() {
        let root = folder();
        put(root.path(), "file", "");
        for dest in ["file", "file/below"] {
            let error = Target::open(&root.path().join(dest), Durability::Power).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
        }
        let target = Target::open(root.path(), Durability::Power).unwrap();
        assert_eq!(target.make_folder(b"file").unwrap_err().kind(), ErrorKind::Conflict);
        assert_eq!(target.make_folder(b"file/x").unwrap_err().kind(), ErrorKind::Conflict);
        assert_eq!(target.make_folder(b"no/x").unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(target.kind_of(b"").unwrap().unwrap().kind, Some(WalkKind::Folder));
        target.write_small(b"durable", b"x", 0o600, MTIME).unwrap();
        target.flush().unwrap();
    }

    #[test]
    fn more_folders_than_may_be_open_are_no_trouble() {
        let root = folder();
        let target = target(root.path());
        for number in 0..300 {
            let path = format!("{number}");
            target.make_folder(path.as_bytes()).unwrap();
            target.write_small(format!("{path}/x").as_bytes(), b"x", 0o600, MTIME).unwrap();
        }
        let mut deep = b"0".to_vec();
        for _ in 0..1000 {
            deep.extend_from_slice(b"/d");
            target.make_folder(&deep).unwrap();
        }
        assert_eq!(walk(root.path(), &Rules::default()).unwrap().found.len(), 1 + 600 + 1000);
        target.remove(b"0").unwrap();
        assert_eq!(target.entries(&[], &[].into(), &Budget::new(MEMORY_MIN).unwrap()).unwrap().list.len(), 598);
    }
}

#[test]
fn a_path_that_is_too_long_is_an_error_that_names_it_unless_it_is_left_out() {
    let root = tempfile::tempdir().unwrap();
    let name = "x".repeat(250);
    let mut folder = rustix::fs::open(root.path(), OFlags::DIRECTORY, Mode::empty()).unwrap();
    for _ in 0..17 {
        mkdirat(&folder, name.as_str(), Mode::RWXU).unwrap();
        folder = openat(&folder, name.as_str(), OFlags::DIRECTORY, Mode::empty()).unwrap();
    }
    let error = walk(root.path(), &Rules::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(error.place().is_some_and(|place| place.contains(&name)), "{error:?}");
    let rules = Rules { excludes: vec!["x*".to_owned()], ..Rules::default() };
    assert_eq!(walk(root.path(), &rules).unwrap().found.len(), 1);
}

proptest! {
    #[test]
    fn a_checked_path_has_only_plain_segments(path in prop::collection::vec(any::<u8>(), 0..40)) {
        if check_path(&path).is_ok() {
            let path = Path::new(std::ffi::OsStr::from_bytes(&path));
            assert!(path.components().all(|part| matches!(part, std::path::Component::Normal(_))));
            assert!(path.components().count() > 0);
        }
    }
}

#[test]
fn a_root_that_others_may_have_linked_is_not_followed() {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir(root.path().join("secret")).unwrap();
    fs::write(root.path().join("secret/key"), "key").unwrap();
    fs::write(root.path().join("file"), "file").unwrap();
    symlink("secret", root.path().join("folder-link")).unwrap();
    symlink("file", root.path().join("file-link")).unwrap();
    let rules = Rules { no_follow: true, ..Rules::default() };
    for link in ["folder-link", "file-link"] {
        assert_eq!(walk(&root.path().join(link), &rules).unwrap_err().kind(), ErrorKind::Conflict, "{link}");
        assert!(walk(&root.path().join(link), &Rules::default()).is_ok(), "{link}");
    }
    let folder = walk(&root.path().join("secret"), &rules).unwrap();
    assert_eq!((folder.found.len(), folder.is_file()), (2, false));
    let file = walk(&root.path().join("file"), &rules).unwrap();
    assert_eq!((file.found.len(), file.is_file()), (1, true));
    assert_eq!(walk(&root.path().join("none"), &rules).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn ignore_files_are_bounded_together_and_can_be_left_unread() {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir(root.path().join("sub")).unwrap();
    // A short line counts as 64 bytes.
    let patterns = "zz?\n".repeat(3_000);
    fs::write(root.path().join(IGNORE_FILE), &patterns).unwrap();
    assert!(walk(root.path(), &Rules::default()).is_ok());
    fs::write(root.path().join("sub").join(IGNORE_FILE), &patterns).unwrap();
    let error = walk(root.path(), &Rules::default()).unwrap_err();
    assert!(error.to_string().contains("at most 256 KiB in all of a tree"), "{error}");
    let unread = Rules { no_ignore_files: true, ..Rules::default() };
    assert_eq!(walk(root.path(), &unread).unwrap().found.len(), 4);
    // Braces that a recursive parser would follow to the end of its stack.
    let deep = format!("{}a{}", "{".repeat(3_000), "}".repeat(3_000));
    fs::remove_file(root.path().join("sub").join(IGNORE_FILE)).unwrap();
    fs::write(root.path().join(IGNORE_FILE), &deep).unwrap();
    let error = walk(root.path(), &Rules::default()).unwrap_err();
    assert!(error.to_string().contains("ignore pattern is too long or too deep"), "{error}");
    fs::write(root.path().join(IGNORE_FILE), "{a,{b,c}}\n").unwrap();
    walk(root.path(), &Rules::default()).unwrap();
    let excludes = vec![format!("{}a{}", "{".repeat(17), "}".repeat(17))];
    let error = walk(root.path(), &Rules { excludes, ..Rules::default() }).unwrap_err();
    assert_eq!((error.kind(), error.place()), (ErrorKind::Usage, Some("--exclude")), "{error}");
}

/// Users who own the parent of a folder to restore to can put a link there while it is created.
#[test]
fn a_folder_behind_a_link_is_never_taken_for_one_that_was_created() {
    use std::os::unix::fs::{MetadataExt as _, symlink};

    let root = tempfile::tempdir().unwrap();
    let (victim, dest) = (root.path().join("victim"), root.path().join("dest"));
    fs::create_dir(&victim).unwrap();
    assert_eq!(Target::open(&root.path().join("a/b"), Durability::Process).unwrap().found_mode(), None);
    symlink("nowhere", &dest).unwrap();
    assert_eq!(Target::open(&dest, Durability::Process).unwrap_err().kind(), ErrorKind::Conflict);
    fs::remove_file(&dest).unwrap();

    let over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                let _ = symlink(&victim, &dest);
                let _ = fs::remove_file(&dest);
            }
        });
        for _ in 0..2_000 {
            if let Ok(target) = Target::open(&dest, Durability::Process) {
                let opened = rustix::fs::fstat(target.folders.base()).unwrap();
                let is_victim = opened.st_ino == fs::metadata(&victim).unwrap().ino();
                assert_eq!(target.found_mode().is_some(), is_victim);
            }
            let _ = fs::remove_dir(&dest);
        }
        over.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}
