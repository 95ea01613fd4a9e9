//! Sync: only what the destination lacks moves, nothing damaged does, and what was interrupted goes on.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use object_store::memory::InMemory;
use object_store::{ObjectStore, ObjectStoreExt as _};
use towline::error::ErrorKind;
use towline::metrics::Metric;
use towline::name::Name;
use towline::ops::{Existing, KeptReason, RestoreOptions, SaveOptions, SyncOptions, SyncReport, sync};
use towline::policy::Labels;
use towline::repository::layout::{Family, family};
use towline::repository::{OpenOptions, Repository};
use towline::storage::{self, Location, Store, StoreOptions};

use crate::data::{name, noise, tree_digest};
use crate::faulty::{Faults, Faulty};
use crate::policy::PolicyFixture;

async fn repository(store: Store, cache: &Path) -> Repository {
    let options = OpenOptions { cache: Some(cache.to_owned()), memory: Some(64 << 20), ..OpenOptions::default() };
    Repository::create(store, options).await.unwrap().0
}

/// Three names that share most of their content: `run/1`, `run/2`, `other`.
async fn source(dir: &Path) -> Repository {
    let repository = repository(Store::memory(), dir).await;
    let tree = dir.join("tree");
    fs::create_dir_all(tree.join("empty")).unwrap();
    fs::write(tree.join("same"), noise(1, 6_000_000)).unwrap();
    fs::write(tree.join("text"), "towline ".repeat(100_000)).unwrap();
    for step in ["run/1", "run/2", "other"] {
        fs::write(tree.join("step"), noise(step.len() as u64 + u64::from(step.as_bytes()[4]), 1_000_000)).unwrap();
        save(&repository, &tree, &name(step)).await;
    }
    repository
}

async fn save(repository: &Repository, path: &Path, to: &Name) {
    repository.save(path, to, &SaveOptions::default()).await.unwrap();
}

async fn synced(from: &Repository, to: &Repository, what: &[Name]) -> SyncReport {
    sync(from, to, what, &SyncOptions::default()).await.unwrap()
}

async fn assert_same(a: &Repository, b: &Repository, saved: &Name, dir: &Path) {
    let (x, y) = (dir.join("restored-a"), dir.join("restored-b"));
    let options = RestoreOptions { overwrite: true, delete: true, ..RestoreOptions::default() };
    a.restore(saved, None, &x, &options).await.unwrap();
    b.restore(saved, None, &y, &options).await.unwrap();
    assert_eq!(tree_digest(&x), tree_digest(&y));
    let (a, b) = (a.saved(saved).await.unwrap(), b.saved(saved).await.unwrap());
    assert_eq!((a.value.manifest, a.value.saved), (b.value.manifest, b.value.saved));
}

fn put_bytes(repository: &Repository) -> u64 {
    repository.store().counters().get(Metric::PutBytes)
}

#[tokio::test(flavor = "multi_thread")]
async fn only_what_is_lacking_moves() {
    let dir = tempfile::tempdir().unwrap();
    let from = source(dir.path()).await;
    let to = repository(Store::memory(), &dir.path().join("cache")).await;
    let first = synced(&from, &to, &[name("run/1")]).await;
    assert_eq!((first.names, first.skipped_bytes), (1, 0));
    assert!(put_bytes(&to) < first.moved_bytes + 100_000, "{first:?}");
    assert_same(&from, &to, &name("run/1"), dir.path()).await;

    let rest = synced(&from, &to, &[]).await;
    assert_eq!(rest.names, 3);
    assert!(rest.moved_bytes < 2_100_000 && rest.skipped_bytes > 18_000_000, "{rest:?}");
    for saved in ["run/1", "run/2", "other"] {
        assert_same(&from, &to, &name(saved), dir.path()).await;
    }

    let before = put_bytes(&to);
    let again = synced(&from, &to, &[]).await;
    assert_eq!((again.moved_bytes, again.new_chunks, again.names), (0, 0, 3));
    assert_eq!(put_bytes(&to), before, "nothing to say");
}

#[tokio::test(flavor = "multi_thread")]
async fn selectors_are_names_and_prefixes() {
    let dir = tempfile::tempdir().unwrap();
    let from = source(dir.path()).await;
    let to = repository(Store::memory(), &dir.path().join("cache")).await;
    let missing = sync(&from, &to, &[name("run"), name("ru")], &SyncOptions::default()).await.unwrap_err();
    assert_eq!((missing.kind(), missing.place()), (ErrorKind::NotFound, Some("ru")));
    assert_eq!(synced(&from, &to, &[name("run")]).await.names, 2);
    assert_eq!(to.list(None).await.unwrap().len(), 2);
    let same = sync(&to, &to.clone(), &[], &SyncOptions::default()).await.unwrap_err();
    assert_eq!(same.kind(), ErrorKind::Usage);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_of_the_destination_is_replaced_when_forced() {
    let dir = tempfile::tempdir().unwrap();
    let from = source(dir.path()).await;
    let location = Location::directory(dir.path().join("to")).unwrap();
    let store = storage::open(&location, &StoreOptions { create: true, ..StoreOptions::default() }).await.unwrap();
    let to = repository(store, &dir.path().join("cache")).await;
    fs::write(dir.path().join("mine"), b"mine").unwrap();
    save(&to, &dir.path().join("mine"), &name("run/1")).await;
    let forced = SyncOptions { existing: Existing::Replace, ..SyncOptions::default() };
    let report = sync(&from, &to, &[name("run/1")], &forced).await.unwrap();
    assert_eq!((report.replaced, report.kept), (vec![name("run/1")], vec![]));
    assert_same(&from, &to, &name("run/1"), dir.path()).await;
}

/// B4: "A value that is newer in the destination is replaced by no sync without `--force`". Copies of a name keep its time: the
/// side that had the other's value and replaced it is newer.
#[tokio::test(flavor = "multi_thread")]
async fn the_side_that_replaced_the_others_value_is_newer() {
    let dir = tempfile::tempdir().unwrap();
    let from = source(dir.path()).await;
    let to = repository(Store::memory(), &dir.path().join("cache")).await;
    let best = [name("best")];
    from.copy(&name("run/2"), &best[0]).await.unwrap();
    synced(&from, &to, &[]).await;

    // Back to an earlier step in the source: a decision that was made later.
    from.copy(&name("run/1"), &best[0]).await.unwrap();
    let report = synced(&from, &to, &best).await;
    assert_eq!((report.names, report.replaced, report.kept), (1, best.to_vec(), vec![]));
    assert_same(&from, &to, &best[0], dir.path()).await;

    // Back in the destination: kept, and the other names are synced.
    from.copy(&name("run/2"), &best[0]).await.unwrap();
    synced(&from, &to, &best).await;
    to.copy(&name("run/1"), &best[0]).await.unwrap();
    from.copy(&name("other"), &name("new")).await.unwrap();
    let there = to.saved(&best[0]).await.unwrap().value;
    for dry_run in [true, false] {
        let options = SyncOptions { dry_run, ..SyncOptions::default() };
        let report = sync(&from, &to, &[], &options).await.unwrap();
        let kept: Vec<_> = report.kept.iter().map(|kept| (&kept.name, kept.reason)).collect();
        assert_eq!((report.names, kept), (4, vec![(&best[0], KeptReason::Newer)]), "{report:?}");
        assert_eq!(report.replaced, []);
    }
    assert_eq!(to.saved(&best[0]).await.unwrap().value, there);
    assert_same(&from, &to, &name("new"), dir.path()).await;
    let back = sync(&to, &from, &best, &SyncOptions::default()).await.unwrap();
    assert_eq!((back.replaced, back.kept), (best.to_vec(), vec![]), "the other way it is the later value");
}

/// P2: "No byte is handed to a caller before it has been checked against its id." F8: "Readers detect a flipped bit, a
/// truncated object and a missing object". B4: "A name that cannot be copied does not stop the others".
#[tokio::test(flavor = "multi_thread")]
async fn no_damaged_byte_is_passed_on() {
    let dir = tempfile::tempdir().unwrap();
    let from = source(dir.path()).await;
    let to = repository(Store::memory(), &dir.path().join("cache")).await;
    let saved = from.saved(&name("run/2")).await.unwrap();
    let frame = saved.map.frames.iter().rev().find(|frame| frame.codec == towline::codec::Codec::Raw).unwrap();
    let key = towline::repository::layout::owned(Family::Pack, saved.map.pack(frame).unwrap().id);
    let objects = from.store().objects();
    let mut bytes = objects.get(&key).await.unwrap().bytes().await.unwrap().to_vec();
    bytes[usize::try_from(frame.offset).unwrap() + 5] ^= 1;
    objects.put(&key, bytes.into()).await.unwrap();
    let error = sync(&from, &to, &[name("run/2")], &SyncOptions::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Damaged, "{error:?}");
    assert!(error.to_string().contains(key.as_ref()), "{error}");
    let report = synced(&from, &to, &[]).await;
    assert_eq!((report.names, report.failed.len(), &report.failed[0].name), (2, 1, &name("run/2")));
    let error = report.whole().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Damaged, "{error:?}");
    assert!(error.to_string().contains("run/2 could not be copied"), "{error}");
    assert!(to.saved(&name("run/2")).await.is_err());
    for whole in ["run/1", "other"] {
        assert_same(&from, &to, &name(whole), dir.path()).await;
    }
    // A tree with many names is read once.
    for copy in 0..20 {
        from.copy(&name("run/2"), &name(&format!("copies/{copy}"))).await.unwrap();
    }
    let (before, log) = (from.store().counters().get(Metric::GetBytes), to.state().await.unwrap().seq);
    let report = synced(&from, &to, &[]).await;
    assert_eq!((report.names, report.failed.len()), (2, 21), "{report:?}");
    let read = from.store().counters().get(Metric::GetBytes) - before;
    assert!(read < 4_000_000, "{read}");
    assert!(to.state().await.unwrap().seq <= log + 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_sync_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let from = source(dir.path()).await;
    let order = ["run/1", "run/2", "other"];
    for round in 0..12u64 {
        let to = repository(Store::memory(), &dir.path().join("cache")).await;
        let options = SyncOptions::default();
        let cut = tokio::time::timeout(Duration::from_millis(round * 4), sync(&from, &to, &[], &options)).await;
        let there = to.state().await.unwrap().refs.len();
        let prefix = order.iter().take(there).all(|done| to_has(&to, done));
        assert!(prefix, "round {round}: names come in order");
        drop(cut);
        let report = synced(&from, &to, &[]).await;
        assert_eq!(report.names, 3);
        assert!(there == 0 || report.moved_bytes < 3_000_000, "round {round}: {there} names, {report:?}");
        for saved in order {
            assert_same(&from, &to, &name(saved), dir.path()).await;
        }
    }
}

fn to_has(to: &Repository, saved: &str) -> bool {
    futures::executor::block_on(to.state()).unwrap().refs.contains_key(&name(saved))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_faulty_destination_gets_no_wrong_byte() {
    let dir = tempfile::tempdir().unwrap();
    let from = source(dir.path()).await;
    for seed in 0..4 {
        let inner: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let faulty = Arc::new(Faulty::new(Arc::clone(&inner), Faults::bad_day(), seed));
        faulty.calm(true);
        let objects: Arc<dyn ObjectStore> = Arc::<Faulty>::clone(&faulty);
        let store = Store::from_objects_watched(objects, Duration::from_millis(300));
        let to = repository(store, &dir.path().join(format!("cache-{seed}"))).await;
        faulty.calm(false);
        for _ in 0..3 {
            if sync(&from, &to, &[], &SyncOptions::default()).await.is_ok() {
                break;
            }
        }
        faulty.calm(true);
        synced(&from, &to, &[]).await;
        for saved in ["run/1", "run/2", "other"] {
            assert_same(&from, &to, &name(saved), dir.path()).await;
        }
        let stray = inner.list_with_delimiter(Some(&family(Family::Pack))).await.unwrap();
        assert!(!stray.common_prefixes.is_empty());
    }
}

/// The labels of `a` in the source would bind `a/b`, which is the destination's own, or was.
#[tokio::test(flavor = "multi_thread")]
async fn labels_of_a_source_bind_no_names_that_do_not_come_from_it() {
    let dir = tempfile::tempdir().unwrap();
    let (file, cache) = (dir.path().join("file"), dir.path().join("cache"));
    let (from, to) = (repository(Store::memory(), &cache).await, repository(Store::memory(), &cache).await);
    fs::write(&file, b"theirs").unwrap();
    save(&from, &file, &name("a")).await;
    fs::write(&file, b"mine").unwrap();
    save(&to, &file, &name("a/b")).await;
    let labels = Labels::default().with("derived-from", "elsewhere").unwrap();
    from.tighten(&name("a"), &labels).await.unwrap();
    for dry_run in [true, false] {
        let options = SyncOptions { dry_run, ..SyncOptions::default() };
        let refused = sync(&from, &to, &[name("a")], &options).await.unwrap_err();
        assert_eq!((refused.kind(), refused.place()), (ErrorKind::Conflict, Some("a")));
        assert!(refused.to_string().contains("which a/b lacks"), "{refused}");
    }
    to.remove(&name("a/b")).await.unwrap();
    let refused = sync(&from, &to, &[name("a")], &SyncOptions::default()).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Conflict, "it can be undeleted");
    assert!(to.labels(&name("a/b")).await.unwrap().labels.is_empty());
    to.tighten(&name("a"), &labels).await.unwrap();
    assert_eq!(synced(&from, &to, &[name("a")]).await.names, 1);

    // Names that come from the source have its labels.
    let to = repository(Store::memory(), &cache).await;
    save(&from, &file, &name("a/b")).await;
    save(&to, &file, &name("a/b")).await;
    let replacing = SyncOptions { existing: Existing::Replace, ..SyncOptions::default() };
    assert_eq!(sync(&from, &to, &[], &replacing).await.unwrap().names, 2);
    let (above, below) = (to.labels(&name("a")).await.unwrap(), to.labels(&name("a/b")).await.unwrap());
    assert_eq!((above.names_below, below.labels, below.names_below), (1, labels, 0));
}

/// Y3: "a copy or a sync goes to no other repository that is listed by its id alone, since a store may state any."
#[test]
fn a_repository_is_no_destination_by_the_id_that_it_states() {
    let mut lab = PolicyFixture::at("home");
    lab.user.write("data/file", b"content");
    lab.user.ok(&["save", "data", "free/set", "--label", "sensitivity=restricted"]);
    let (from, to) = (lab.user.repository(), lab.user.work().join("other"));
    let (from, to) = (from.to_str().unwrap(), to.to_str().unwrap());
    let id = lab.user.json(&["init", to], 0)["id"].as_str().unwrap().to_owned();
    let rules = lab.rules.clone();
    let place = fs::canonicalize(to).unwrap().display().to_string();
    for (listed, refused) in [(id, "unknown site"), (place, "no policy")] {
        lab.rules = format!("[[site]]\nname = 'partner'\nrepositories = '{listed}'\n\n{rules}");
        lab.set(&[]);
        let ran = lab.user.run(&["sync", from, to, "free/set"]);
        assert!(ran.code != Some(0) && ran.err.contains(refused), "{listed}: {:?} {}", ran.code, ran.err);
    }
}
