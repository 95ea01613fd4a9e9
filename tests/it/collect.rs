//! Collecting: what nothing needs goes, what anything needs stays, whoever else is at work.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures::TryStreamExt as _;
use object_store::ObjectStoreExt as _;
use object_store::memory::InMemory;
use towline::clock::{ManualClock, Timestamp};
use towline::error::ErrorKind;
use towline::id::{Owned, PackId, SessionId};
use towline::ops::{CollectOptions, CollectReport, RestoreOptions, SaveOptions};
use towline::progress::Progress;
use towline::repository::collect::{mark, repack};
use towline::repository::layout::{self, Family};
use towline::repository::log::Action;
use towline::repository::{OpenOptions, Repository};
use towline::storage::{Location, Store, StoreOptions, open};

use crate::data::{name, noise};
use crate::faulty::{Faults, Faulty};

fn options(cache: &Path) -> OpenOptions {
    OpenOptions { cache: Some(cache.to_owned()), memory: Some(128 << 20), ..OpenOptions::default() }
}

async fn repository(cache: &Path) -> (Store, Repository) {
    let store = Store::memory();
    let made = Repository::create(store.clone(), options(cache)).await.unwrap().0;
    (store, made)
}

async fn save(repository: &Repository, path: &Path, to: &str) {
    repository.save(path, &name(to), &SaveOptions { reread: true, ..SaveOptions::default() }).await.unwrap();
}

async fn collect(repository: &Repository) -> CollectReport {
    repository.collect(&CollectOptions::at_once()).await.unwrap()
}

async fn keys(store: &Store, prefix: &str) -> Vec<String> {
    let prefix = object_store::path::Path::from(prefix);
    let mut keys: Vec<String> =
        store.objects().list(Some(&prefix)).map_ok(|meta| meta.location.to_string()).try_collect().await.unwrap();
    keys.sort();
    keys
}

async fn restores(repository: &Repository, from: &str, expected: &[u8]) {
    let dir = tempfile::tempdir().unwrap();
    let dest = dir.path().join("f");
    repository.restore(&name(from), None, &dest, &RestoreOptions::default()).await.unwrap();
    assert!(fs::read(&dest).unwrap() == expected, "{from}");
}

#[tokio::test(flavor = "multi_thread")]
async fn removed_names_free_their_packs_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let (store, repository) = repository(dir.path()).await;
    let (kept, gone) = (noise(1, 3_000_000), noise(2, 4_000_000));
    fs::write(dir.path().join("kept"), &kept).unwrap();
    fs::write(dir.path().join("gone"), &gone).unwrap();
    save(&repository, &dir.path().join("kept"), "kept").await;
    save(&repository, &dir.path().join("gone"), "gone").await;
    assert_eq!(collect(&repository).await.purged_packs, 0);
    repository.remove(&name("gone")).await.unwrap();

    let dry = CollectOptions { dry_run: true, ..CollectOptions::at_once() };
    let planned = repository.collect(&dry).await.unwrap();
    assert_eq!((planned.condemned_packs, keys(&store, "pack").await.len()), (1, 2));

    let report = collect(&repository).await;
    assert_eq!((report.condemned_packs, report.purged_packs), (1, 1), "{report:?}");
    assert!((4_000_000..4_100_000).contains(&report.freed_bytes), "{report:?}");
    for family in ["pack", "index", "manifest", "map"] {
        assert_eq!(keys(&store, family).await.len(), 1, "{family}");
    }
    restores(&repository, "kept", &kept).await;
    let state = repository.state().await.unwrap();
    let settled = state.condemned.is_empty() && state.purged.values().all(|purged| purged.deleted);
    assert!(settled && state.sessions.is_empty(), "all is done: {state:?}");
    save(&repository, &dir.path().join("gone"), "gone").await;
    restores(&repository, "gone", &gone).await;
}

/// Whoever may save can write any length into the log.
#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_tells_the_bytes_that_the_store_has() {
    let dir = tempfile::tempdir().unwrap();
    let (_, repository) = repository(dir.path()).await;
    fs::write(dir.path().join("gone"), noise(2, 4_000_000)).unwrap();
    save(&repository, &dir.path().join("gone"), "gone").await;
    repository.remove(&name("gone")).await.unwrap();
    let (state, index) = repository.indexed_state().await.unwrap();
    assert!(state.refs.is_empty());
    let packs = index.packs(repository.budget()).unwrap();
    let condemn = |pack: &PackId| Action::Condemn { pack: *pack, len: 1 << 50, damaged: false };
    let actions: Vec<Action> = packs.keys().map(condemn).collect();
    repository.log().commit(None, |_| Ok(actions.clone())).await.unwrap();
    let planned = repository.collect(&CollectOptions { dry_run: true, ..CollectOptions::at_once() }).await.unwrap();
    assert_eq!(planned.purged_packs, 1, "{planned:?}");
    assert!((4_000_000..4_100_000).contains(&planned.freed_bytes), "{planned:?}");
    assert!(planned.steps.iter().any(|step| step.ends_with("(3.9 MiB)")), "{planned:?}");
}

/// F5: "No rule of the log reads a clock, so a machine whose clock jumps by a year, either way, loses nothing and damages
/// nothing."
#[tokio::test(flavor = "multi_thread")]
async fn a_condemned_pack_that_is_used_again_is_pardoned() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = repository(dir.path()).await;
    let clock = Arc::new(ManualClock::at(Timestamp(1_700_000_000_000_000_000)));
    let open = Repository::open_at(store.clone(), options(dir.path()), Arc::<ManualClock>::clone(&clock));
    let repository = open.await.unwrap();
    let content = noise(3, 3_000_000);
    fs::write(dir.path().join("f"), &content).unwrap();
    save(&repository, &dir.path().join("f"), "a").await;
    // The index still finds its chunks, but a writer that knows them from before has to pardon the pack.
    let base = SaveOptions { reread: true, base: Some(name("a")), ..SaveOptions::default() };
    let known = towline::repository::StoredChunks::load(&repository).await.unwrap();
    repository.remove(&name("a")).await.unwrap();
    let day = CollectOptions { keep_removed: Duration::ZERO, ..CollectOptions::default() };
    assert_eq!(repository.collect(&day).await.unwrap().condemned_packs, 1);
    drop(known);
    assert!(repository.save(&dir.path().join("f"), &name("b"), &base).await.is_err(), "the base is gone");
    // A new save stores again: a condemned pack is no target.
    save(&repository, &dir.path().join("f"), "b").await;
    assert_eq!(keys(&store, "pack").await.len(), 2);
    // This machine's clock jumps years back and forth: the grace is told by the store's.
    for jump in [1_600_000_000_000_000_000, 1_800_000_000_000_000_000] {
        clock.set(Timestamp(jump));
        assert_eq!(repository.collect(&day).await.unwrap().purged_packs, 0);
    }
    assert_eq!(collect(&repository).await.purged_packs, 1);
    restores(&repository, "b", &content).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mostly_dead_packs_are_rewritten() {
    let dir = tempfile::tempdir().unwrap();
    let (store, repository) = repository(dir.path()).await;
    let tree = dir.path().join("tree");
    fs::create_dir(&tree).unwrap();
    for n in 0..8 {
        fs::write(tree.join(format!("{n}")), noise(10 + n, 500_000)).unwrap();
    }
    save(&repository, &tree, "all").await;
    for n in 5..8 {
        fs::remove_file(tree.join(format!("{n}"))).unwrap();
    }
    save(&repository, &tree, "most").await;
    assert_eq!(collect(&repository).await.unused_bytes, 0);
    repository.remove(&name("all")).await.unwrap();
    let report = collect(&repository).await;
    assert_eq!(report.repacked_packs, 0);
    assert!((1_500_000..1_600_000).contains(&report.unused_bytes), "three files of eight: {report:?}");

    for n in 1..5 {
        fs::remove_file(tree.join(format!("{n}"))).unwrap();
    }
    save(&repository, &tree, "one").await;
    repository.copy(&name("one"), &name("two")).await.unwrap();
    repository.remove(&name("most")).await.unwrap();
    let report = collect(&repository).await;
    assert_eq!((report.repacked_packs, report.unused_bytes), (1, 0), "{report:?}");
    let packs = keys(&store, "pack").await;
    assert_eq!(packs.len(), 1, "the old pack is gone: {report:?}");
    let len = store.objects().head(&packs[0].as_str().into()).await.unwrap().size;
    assert!(len < 600_000, "{len}");
    for from in ["one", "two"] {
        let dest = dir.path().join(from);
        repository.restore(&name(from), None, &dest, &RestoreOptions::default()).await.unwrap();
        assert_eq!(fs::read(dest.join("0")).unwrap(), noise(10, 500_000));
    }
    assert_eq!(collect(&repository).await.repacked_packs, 0);
}

/// F1: "Packs that would have to be rewritten wait until there is space, also if it runs out while they are."
#[tokio::test(flavor = "multi_thread")]
async fn packs_wait_for_space_to_be_rewritten_and_the_rest_is_freed() {
    for full in [std::io::ErrorKind::StorageFull, std::io::ErrorKind::QuotaExceeded] {
        let dir = tempfile::tempdir().unwrap();
        let disk = Faulty::new(Arc::new(InMemory::new()), Faults::default(), 1);
        let store = Store::from_objects(Arc::new(disk.clone()));
        let repository = Repository::create(store.clone(), options(dir.path())).await.unwrap().0;
        let tree = dir.path().join("tree");
        fs::create_dir(&tree).unwrap();
        for n in 0..4 {
            fs::write(tree.join(format!("{n}")), noise(30 + n, 500_000)).unwrap();
        }
        save(&repository, &tree, "all").await;
        save(&repository, &tree.join("0"), "one").await;
        fs::write(dir.path().join("gone"), noise(40, 3_000_000)).unwrap();
        save(&repository, &dir.path().join("gone"), "gone").await;
        for removed in ["all", "gone"] {
            repository.remove(&name(removed)).await.unwrap();
        }

        disk.fill(Some(full));
        let report = collect(&repository).await;
        assert_eq!((report.purged_packs, report.repacked_packs), (1, 0), "{report:?}");
        let leaves = |step: &String| step.starts_with("leave 1 mostly unused packs: the disk has too little space");
        assert!(report.steps.iter().any(leaves), "{report:?}");
        assert_eq!(keys(&store, "pack").await.len(), 1);
        assert!(repository.state().await.unwrap().sessions.is_empty());
        restores(&repository, "one", &noise(30, 500_000)).await;

        disk.fill(None);
        let report = collect(&repository).await;
        assert_eq!((report.purged_packs, report.repacked_packs, report.unused_bytes), (1, 1, 0), "{report:?}");
        assert_eq!(keys(&store, "pack").await.len(), 1);
        restores(&repository, "one", &noise(30, 500_000)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_was_outpaced_while_repacking_leaves_it_at_that() {
    let dir = tempfile::tempdir().unwrap();
    let (store, repository) = repository(dir.path()).await;
    let tree = dir.path().join("tree");
    fs::create_dir(&tree).unwrap();
    for n in 0..4 {
        fs::write(tree.join(format!("{n}")), noise(20 + n, 500_000)).unwrap();
    }
    save(&repository, &tree, "all").await;
    save(&repository, &tree.join("0"), "one").await;
    repository.remove(&name("all")).await.unwrap();
    // The slow one has looked, and is about to repack.
    let state = repository.state().await.unwrap();
    let marks = mark(&repository, &state).await.unwrap();
    let packs: Vec<_> = marks.packs().copied().collect();
    assert_eq!(collect(&repository).await.repacked_packs, 1);
    let repacked = repack(&repository, &state, &marks, &packs, &Progress::default()).await.unwrap();
    assert_eq!(repacked.freed, 0, "somebody else freed it");
    restores(&repository, "one", &noise(20, 500_000)).await;

    // But what is gone and ought not to be is damage, whoever looks.
    let state = repository.state().await.unwrap();
    let marks = mark(&repository, &state).await.unwrap();
    let packs: Vec<_> = marks.packs().copied().collect();
    for key in keys(&store, "pack").await {
        store.objects().delete(&key.into()).await.unwrap();
    }
    let error = repack(&repository, &state, &marks, &packs, &Progress::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Damaged, "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_save_is_kept_while_its_session_is_open_and_swept_after() {
    let dir = tempfile::tempdir().unwrap();
    let (store, repository) = repository(dir.path()).await;
    let content = noise(4, 40_000_000);
    fs::write(dir.path().join("f"), &content).unwrap();
    let interrupted = {
        let (repository, path) = (repository.clone(), dir.path().join("f"));
        tokio::spawn(async move { repository.save(&path, &name("never"), &SaveOptions::default()).await })
    };
    while keys(&store, "pack").await.is_empty() && !interrupted.is_finished() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    interrupted.abort();
    if interrupted.await.is_ok() {
        return; // It was faster than the interruption: nothing to see.
    }
    let before = keys(&store, "pack").await;
    collect(&repository).await;
    assert_eq!(keys(&store, "pack").await, before, "an open session's objects are nobody else's business");
    let session = *repository.state().await.unwrap().sessions.keys().next().unwrap();
    let close = Action::Close(session);
    repository.log().commit(None, |_| Ok(vec![close.clone()])).await.unwrap();
    collect(&repository).await;
    assert_eq!(keys(&store, "pack").await.len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_is_truncated_and_still_reads() {
    let dir = tempfile::tempdir().unwrap();
    let (store, repository) = repository(dir.path()).await;
    fs::write(dir.path().join("f"), b"content").unwrap();
    save(&repository, &dir.path().join("f"), "a").await;
    for _ in 0..100 {
        repository.copy(&name("a"), &name("b")).await.unwrap();
        repository.remove(&name("b")).await.unwrap();
    }
    collect(&repository).await;
    assert!(keys(&store, "log").await.len() <= 64 * 2 + 8);
    assert_eq!(keys(&store, "boundary").await.len(), 1);
    let fresh = Repository::open(store, options(dir.path())).await.unwrap();
    assert_eq!(fresh.state().await.unwrap().refs, repository.state().await.unwrap().refs);
    restores(&fresh, "a", b"content").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn half_written_files_of_a_killed_save_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("repo");
    let location = Location::directory(&root).unwrap();
    let store = open(&location, &StoreOptions { create: true, ..StoreOptions::default() }).await.unwrap();
    let made = Repository::create(store, options(&dir.path().join("cache"))).await.unwrap().0;
    let pack = layout::owned(Family::Pack, Owned::fresh(SessionId::random()));
    let torn = root.join(format!("{pack}#1"));
    fs::create_dir_all(torn.parent().unwrap()).unwrap();
    fs::write(&torn, noise(1, 1 << 20)).unwrap();
    for dry_run in [true, false] {
        let report = made.collect(&CollectOptions { dry_run, ..CollectOptions::default() }).await.unwrap();
        assert_eq!((report.unfinished_objects, report.unfinished_bytes), (1, 1 << 20), "{report:?}");
        assert_eq!(report.freed_bytes, 0);
    }
    File::options().write(true).open(&torn).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
    for dry_run in [true, false] {
        let report = made.collect(&CollectOptions { dry_run, ..CollectOptions::default() }).await.unwrap();
        assert_eq!((report.unfinished_objects, report.freed_bytes), (0, 1 << 20), "{report:?}");
        assert_eq!(torn.exists(), dry_run);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn packs_of_tiny_chunks_are_left_in_peace() {
    let dir = tempfile::tempdir().unwrap();
    let (store, repository) = repository(dir.path()).await;
    fs::write(dir.path().join("f"), b"hello").unwrap();
    save(&repository, &dir.path().join("f"), "tiny").await;
    let packs = keys(&store, "pack").await;
    for _ in 0..3 {
        assert_eq!(collect(&repository).await.repacked_packs, 0);
    }
    assert_eq!(keys(&store, "pack").await, packs);
    restores(&repository, "tiny", b"hello").await;
}

#[tokio::test]
async fn index_segments_that_are_not_live_leave_the_local_cache() {
    let dir = tempfile::tempdir().unwrap();
    let (_store, repository) = repository(&dir.path().join("cache")).await;
    let folder = repository.cache().join("index");
    let cached = || {
        let files = fs::read_dir(&folder).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
        files.collect::<BTreeSet<_>>()
    };
    let unfinished = ".unfinished.part".to_owned();
    for content in ["first", "second"] {
        let file = dir.path().join(content);
        fs::write(&file, content.repeat(2000)).unwrap();
        repository.save(&file, &name("name"), &SaveOptions::default()).await.unwrap();
        let (state, _) = repository.indexed_state().await.unwrap();
        let mut expected: BTreeSet<_> =
            state.segments.keys().map(|id| format!("{}-{}", id.session, id.object)).collect();
        assert!(!expected.is_empty());
        expected.extend(cached().contains(&unfinished).then(|| unfinished.clone()));
        assert_eq!(cached(), expected);
        for other in ["old", &unfinished] {
            fs::write(folder.join(other), "bytes").unwrap();
        }
    }
}
