//! Tests of the stat cache.

use std::fs;
use std::time::{Duration, SystemTime};

use tempfile::TempDir;

use super::*;
use crate::budget::Budget;
use crate::limits::MEMORY_MIN;
use crate::tree::Stat;

fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn names(root: &Path) -> Vec<String> {
    let entries = fs::read_dir(root).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// A settled stat: its stamps carry nanoseconds and are older than `started`.
fn stat(ino: u64, ctime: i64) -> Stat {
    let (mtime, ctime) = (Timestamp(ctime - 7), Timestamp(ctime));
    Stat { dev: 1, ino, size: 5, mode: 0o644, mtime, ctime, nlink: 1 }
}

const STARTED: Timestamp = Timestamp(1_700_000_000_123_456_789);

fn cache(folder: &Path) -> StatCache {
    StatCache::new(folder, RepositoryId::from_bytes([7; 16]), Path::new("/data"))
}

fn load(cache: &StatCache) -> Option<SavedStats> {
    cache.load(&mut Budget::new(MEMORY_MIN).unwrap().tree_memory(None)).unwrap()
}

fn stored(folder: &Path, files: &[(&[u8], Stat)]) -> StatCache {
    let cache = cache(folder);
    let files = files.iter().map(|(path, stat)| (*path, stat));
    cache.store(ManifestId::of(b"body"), b"body", STARTED, files).unwrap();
    cache
}

#[test]
fn what_was_settled_is_known_until_anything_about_it_changes() {
    let root = folder();
    let old = stat(1, STARTED.0 - 1);
    let seen = stored(&root.path().join("made"), &[(b"b", old), (b"a\xff", stat(2, 3)), (b"", stat(3, 5))]);
    let seen = load(&seen).unwrap();
    assert_eq!((seen.manifest(), seen.body()), (ManifestId::of(b"body"), &b"body"[..]));
    assert!(seen.unchanged(b"b", &old) && seen.unchanged(b"a\xff", &stat(2, 3)) && seen.unchanged(b"", &stat(3, 5)));
    assert!(seen.unchanged(b"b", &Stat { nlink: 2, ..old }));
    assert!(!seen.unchanged(b"c", &old) && !seen.unchanged(b"a", &old));
    let (later, one_more) = (Timestamp(old.mtime.0 + 1), old.size + 1);
    for changed in [
        Stat { dev: 2, ..old },
        Stat { ino: 2, ..old },
        Stat { size: one_more, ..old },
        Stat { mtime: later, ..old },
        Stat { ctime: later, ..old },
    ] {
        assert!(!seen.unchanged(b"b", &changed), "{changed:?}");
    }
}

#[test]
fn what_changed_in_the_tick_of_the_save_is_not_trusted() {
    let root = folder();
    let second = STARTED.0 / 1_000_000_000 * 1_000_000_000;
    let files: [(&[u8], Stat, bool); 7] = [
        (b"same tick", stat(1, STARTED.0), false),
        (b"after", stat(1, STARTED.0 + 1), false),
        (b"before", stat(1, STARTED.0 - 1), true),
        (b"mtime set ahead", Stat { mtime: Timestamp(STARTED.0 + 1), ..stat(1, STARTED.0 - 9) }, false),
        (b"coarse stamps", stat(1, second), false),
        (b"coarse but old", stat(1, second - 3_000_000_000), true),
        (b"milliseconds", stat(1, second + 120_000_000), false),
    ];
    let pairs = files.map(|(path, stat, _)| (path, stat));
    let seen = load(&stored(root.path(), &pairs)).unwrap();
    for (path, stat, known) in files {
        assert_eq!(seen.unchanged(path, &stat), known, "{}", String::from_utf8_lossy(path));
    }
}

#[test]
fn a_file_written_after_the_clock_was_read_is_never_trusted() {
    let root = folder();
    for round in 0..50 {
        let started = coarse_now();
        fs::write(root.path().join("raced"), round.to_string()).unwrap();
        let now = Stat::of(&File::open(root.path().join("raced")).unwrap()).unwrap();
        assert!(now.ctime >= started);
        let cache = cache(&root.path().join("cache"));
        cache.store(ManifestId::of(b""), b"", started, [(&b"raced"[..], &now)]).unwrap();
        assert!(!load(&cache).unwrap().unchanged(b"raced", &now));
    }
}

#[test]
fn a_torn_or_foreign_file_is_no_cache() {
    let root = folder();
    let cache = stored(root.path(), &[(b"a", stat(1, 1)), (b"b", stat(2, 2))]);
    let file = root.path().join(&names(root.path())[0]);
    let whole = fs::read(&file).unwrap();
    for cut in 0..whole.len() {
        fs::write(&file, &whole[..cut]).unwrap();
        assert!(load(&cache).is_none(), "{cut}");
    }
    for at in 0..whole.len() {
        let mut flipped = whole.clone();
        flipped[at] ^= 0x40;
        fs::write(&file, &flipped).unwrap();
        assert!(load(&cache).is_none(), "{at}");
    }
    fs::write(&file, &whole).unwrap();
    assert!(load(&cache).is_some());
    let elsewhere = StatCache::new(root.path(), RepositoryId::from_bytes([7; 16]), Path::new("/other"));
    assert!(load(&elsewhere).is_none());
    fs::write(root.path().join("x"), b"").unwrap();
}

#[test]
fn caches_written_longest_ago_make_room() {
    let root = folder();
    let caches = ["/old", "/older", "/new", "/own"].map(|of| {
        let cache = StatCache::new(root.path(), RepositoryId::from_bytes([7; 16]), Path::new(of));
        cache.store(ManifestId::of(b"body"), &[7; 1000], STARTED, []).unwrap();
        cache
    });
    let age = |file: &Path, seconds: u64| {
        let file = File::options().write(true).open(file).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)).unwrap();
    };
    let [old, older, new, own] = &caches;
    for (cache, seconds) in [(old, 20), (older, 10), (new, 30), (own, 5)] {
        age(&cache.file, seconds);
    }
    let one = fs::metadata(&own.file).unwrap().len();
    own.make_room(4 * one + 100).unwrap();
    assert_eq!(names(root.path()).len(), 4);
    own.make_room(2 * one + 100).unwrap();
    assert!(load(own).is_some() && load(new).is_some());
    assert!(load(old).is_none() && load(older).is_none());
}

#[test]
fn a_crashed_saver_does_not_stop_the_next_and_a_live_one_is_left_alone() {
    let root = folder();
    stored(root.path(), &[]);
    let file = root.path().join(&names(root.path())[0]);
    let part = file.with_extension("part");
    fs::write(&part, b"half a cache of a crashed saver, longer than what follows".repeat(9)).unwrap();
    let held = File::options().write(true).open(&part).unwrap();
    flock(&held, FlockOperation::LockExclusive).unwrap();
    let old = stat(1, 1);
    assert!(!load(&stored(root.path(), &[(b"a", old)])).unwrap().unchanged(b"a", &old));
    drop(held);
    assert!(load(&stored(root.path(), &[(b"a", old)])).unwrap().unchanged(b"a", &old));
    assert_eq!(names(root.path()).len(), 1);
}
