//! Trees changed in part: A1 to A4 of docs/semantics.md.

use std::collections::BTreeMap;
use std::fs;
use std::num::NonZeroU32;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use object_store::memory::InMemory;
use object_store::{ObjectStore, ObjectStoreExt as _};
use towline::codec::Codec;
use towline::error::ErrorKind;
use towline::format::{EntryKind, TreeEntry};
use towline::id::RepositoryId;
use towline::metrics::Metric;
use towline::name::Name;
use towline::ops::{
    AmendReport, Changes, CollectOptions, Graft, SaveOptions, SaveSource, UndeleteOptions, VerifyOptions,
};
use towline::policy::{Basis, Labels, LocalCaller, Ruling, Verdict};
use towline::repository::layout::{self, Family};
use towline::repository::log::{Declassified, StepFacts};
use towline::repository::{Access, Guard, OpenOptions, PolicyText, Repository, Saved};
use towline::storage::Store;
use towline::tree::MemoryFile;

use crate::data::{name, noise, safetensors};
use crate::faulty::{Faults, Faulty};

struct Fixture {
    dir: tempfile::TempDir,
    objects: Arc<dyn ObjectStore>,
}

impl Fixture {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap(), objects: Arc::new(InMemory::new()) }
    }

    /// A handle that knows nothing yet.
    async fn open(&self) -> Repository {
        let options = OpenOptions {
            cache: Some(self.dir.path().join("cache")),
            memory: Some(64 << 20),
            ..OpenOptions::default()
        };
        Repository::create(Store::from_objects(Arc::clone(&self.objects)), options).await.unwrap().0
    }

    async fn amend(&self, of: &Name, changes: &Changes) -> AmendReport {
        self.open().await.amend(of, changes, &SaveOptions::default()).await.unwrap()
    }

    async fn refuses(&self, of: &Name, changes: &Changes) -> ErrorKind {
        self.open().await.amend(of, changes, &SaveOptions::default()).await.unwrap_err().kind()
    }

    async fn saved(&self, of: &Name) -> Saved {
        self.open().await.saved(of).await.unwrap()
    }

    /// The files of a tree, read and verified.
    async fn files(&self, of: &Name) -> BTreeMap<String, Vec<u8>> {
        let repository = self.open().await;
        let saved = repository.saved(of).await.unwrap();
        let mut files = BTreeMap::new();
        for (entry, _) in saved.manifest.files() {
            let mut out = Vec::new();
            repository.cat(of, &entry.path, None, &mut out).await.unwrap();
            files.insert(String::from_utf8(entry.path.clone()).unwrap(), out);
        }
        files
    }

    /// Collects until nothing is left to do, and looks at every byte of what stays.
    async fn collect_and_verify(&self) {
        let options = CollectOptions::at_once();
        for _ in 0..2 {
            self.open().await.collect(&options).await.unwrap();
        }
        let report = self.open().await.verify(None, &VerifyOptions { data: true, ..VerifyOptions::default() }).await;
        assert!(report.as_ref().unwrap().damaged.is_empty(), "{report:?}");
    }
}

fn put(files: &[(&str, Vec<u8>)]) -> Changes {
    let file = |(path, bytes): &(&str, Vec<u8>)| MemoryFile::new(*path, [Bytes::from(bytes.clone())]);
    Changes { put: SaveSource::Memory(files.iter().map(file).collect()), ..Changes::default() }
}

fn remove(path: &str) -> Changes {
    Changes { remove: vec![path.into()], ..Changes::default() }
}

fn rename(from: &str, to: &str) -> Changes {
    Changes { rename: vec![(from.into(), to.into())], ..Changes::default() }
}

/// A1: "`Repository::amend` puts, removes and renames paths of a tree in one commit".
#[tokio::test(flavor = "multi_thread")]
async fn a_tree_is_made_and_changed_path_by_path() {
    let (fixture, run) = (Fixture::new(), name("run/step-1"));
    let (a, b) = (noise(1, 2_500_000), noise(2, 100_000));
    fixture.amend(&run, &put(&[("a", a.clone()), (".metadata.tmp", b.clone())])).await;
    let before = fixture.saved(&run).await.value.version;
    let report = fixture.amend(&run, &rename(".metadata.tmp", ".metadata")).await;
    assert_eq!((report.tree.new_chunks, report.tree.stored_bytes, report.tree.files), (0, 0, 2), "nothing is stored");
    let after = fixture.saved(&run).await.value;
    assert!(after.version > before && after.files == 2 && after.logical_bytes == 2_600_000);
    assert_eq!(fixture.files(&run).await, BTreeMap::from([("a".into(), a.clone()), (".metadata".into(), b)]));

    // One commit for all of it, and the rest of the tree as it was.
    let all = Changes {
        remove: vec![b".metadata".to_vec()],
        rename: vec![(b"a".to_vec(), b"deep/er/a".to_vec())],
        ..put(&[("a", noise(3, 10))])
    };
    fixture.amend(&run, &all).await;
    assert_eq!(
        fixture.files(&run).await,
        BTreeMap::from([("deep/er/a".into(), a.clone()), ("a".into(), noise(3, 10))])
    );
    fixture.amend(&run, &remove("deep")).await;
    assert_eq!(fixture.files(&run).await, BTreeMap::from([("a".into(), noise(3, 10))]));
    fixture.collect_and_verify().await;
    assert_eq!(fixture.files(&run).await.len(), 1);
}

/// A1: "parts of other trees", which are neither read nor stored again, with what a copy of their files would lose.
#[tokio::test(flavor = "multi_thread")]
async fn parts_of_another_tree_come_with_all_that_they_have() {
    let (fixture, from, to) = (Fixture::new(), name("src/a"), name("dst/b"));
    let disk = fixture.dir.path().join("disk");
    fs::create_dir_all(disk.join("sub/empty")).unwrap();
    fs::write(disk.join("sub/run.sh"), noise(1, 100_000)).unwrap();
    fs::write(disk.join("sub-2"), "beside").unwrap();
    fs::set_permissions(disk.join("sub/run.sh"), fs::Permissions::from_mode(0o755)).unwrap();
    symlink("empty", disk.join("sub/current")).unwrap();
    symlink("/not/here", disk.join("sub/dangling")).unwrap();
    let repository = fixture.open().await;
    repository.save(&disk, &from, &SaveOptions::default()).await.unwrap();
    fixture.amend(&to, &put(&[("x", b"x".to_vec())])).await;
    let report = repository.graft((&from, b"sub"), (&to, b"deep/sub")).await.unwrap();
    assert_eq!((report.tree.new_chunks, report.tree.stored_bytes, report.tree.files), (0, 0, 2), "nothing is stored");
    let below = |saved: &Saved, top: &str| -> Vec<TreeEntry> {
        let entries = saved.manifest.entries.iter().filter(|entry| entry.path.starts_with(top.as_bytes()));
        entries.map(|entry| TreeEntry { path: entry.path[top.len()..].to_vec(), ..entry.clone() }).collect()
    };
    let described = |entries: Vec<TreeEntry>| -> Vec<_> {
        let kind = |kind| if let EntryKind::File(content) = kind { Err(content.size) } else { Ok(kind) };
        entries.into_iter().map(|entry| (entry.path, entry.mode, entry.mtime, kind(entry.kind))).collect()
    };
    let before = fixture.saved(&from).await;
    assert_eq!(
        described(below(&before, "sub/")),
        described(below(&fixture.saved(&to).await, "deep/sub/")),
        "links, empty folders, permissions and times"
    );
    assert_eq!(fixture.files(&to).await["deep/sub/run.sh"], noise(1, 100_000));

    let refused =
        async |path: &[u8], inner: &[u8]| repository.graft((&from, path), (&to, inner)).await.unwrap_err().kind();
    assert_eq!(refused(b"sub", b"deep/sub").await, ErrorKind::Conflict);
    assert_eq!(refused(b"sub", b"").await, ErrorKind::Conflict);
    assert_eq!(refused(b"su", b"new").await, ErrorKind::NotFound);
    let whole = name("whole");
    repository.graft((&from, b"sub"), (&whole, b"")).await.unwrap();
    assert_eq!(described(below(&fixture.saved(&whole).await, "")).len(), 5);

    fixture.amend(&from, &Changes { keep: true, ..remove("sub") }).await;
    assert_eq!(fixture.files(&from).await.len(), 1);
    let options = UndeleteOptions { replace: true, ..UndeleteOptions::default() };
    repository.undelete(&from, &options).await.unwrap();
    assert_eq!(fixture.saved(&from).await.value.manifest, before.value.manifest);
    repository.remove(&from).await.unwrap();
    fixture.collect_and_verify().await;
    assert_eq!(fixture.files(&to).await["deep/sub/run.sh"], noise(1, 100_000));
}

/// A1, from a disk: files of a folder by their paths in it; what is refused changes nothing.
#[tokio::test(flavor = "multi_thread")]
async fn files_come_from_a_disk_too_and_refusals_change_nothing() {
    let (fixture, of) = (Fixture::new(), name("tables"));
    let disk = fixture.dir.path().join("disk");
    fs::create_dir_all(disk.join("d")).unwrap();
    fs::write(disk.join("d/x"), noise(1, 3_000_000)).unwrap();
    fs::write(disk.join("y"), b"y").unwrap();
    fixture.amend(&of, &Changes { put: (&disk).into(), ..Changes::default() }).await;
    fixture.amend(&of, &Changes { put: (&disk.join("y")).into(), ..rename("d", "e") }).await;
    let there = BTreeMap::from([("e/x".to_owned(), noise(1, 3_000_000)), ("y".to_owned(), b"y".to_vec())]);
    assert_eq!(fixture.files(&of).await, there);
    let version = fixture.saved(&of).await.value.version;
    assert_eq!(fixture.refuses(&of, &remove("none")).await, ErrorKind::NotFound);
    assert_eq!(fixture.refuses(&of, &rename("none", "some")).await, ErrorKind::NotFound);
    assert_eq!(fixture.refuses(&of, &put(&[("e", b"1".to_vec())])).await, ErrorKind::Conflict);
    assert_eq!(fixture.refuses(&of, &put(&[("y/z", b"1".to_vec())])).await, ErrorKind::Conflict);
    assert_eq!(fixture.refuses(&of, &Changes::default()).await, ErrorKind::Usage);
    assert_eq!(fixture.refuses(&name("other"), &remove("x")).await, ErrorKind::NotFound);
    assert_eq!(fixture.saved(&of).await.value.version, version);
    assert_eq!(fixture.open().await.saved(&name("other")).await.unwrap_err().kind(), ErrorKind::NotFound);
    let alone = name("alone");
    fixture.open().await.save(&disk.join("y"), &alone, &SaveOptions::default()).await.unwrap();
    assert_eq!(fixture.refuses(&alone, &put(&[("z", b"1".to_vec())])).await, ErrorKind::Usage);
}

/// A2: "Amends of one name at the same time all take effect".
#[tokio::test(flavor = "multi_thread")]
async fn many_at_once_all_succeed() {
    let (fixture, run) = (Fixture::new(), name("run/step-7"));
    let mut tasks = tokio::task::JoinSet::new();
    for rank in 0..16u64 {
        let (repository, run) = (fixture.open().await, run.clone());
        tasks.spawn(async move {
            let mut overtaken = 0;
            for file in 0..2 {
                let files = [(&*format!("__{rank}_{file}"), noise(rank * 2 + file, 300_000))];
                let report = repository.amend(&run, &put(&files), &SaveOptions::default()).await.unwrap();
                assert_eq!(report.tree.new_bytes, 300_000, "what was uploaded is not uploaded again");
                overtaken += report.overtaken;
            }
            overtaken
        });
    }
    let overtaken: u32 = tasks.join_all().await.into_iter().sum();
    assert!(overtaken > 0, "they never met");
    let files = fixture.files(&run).await;
    assert_eq!(files.len(), 32);
    assert!((0..32).all(|n| files[&format!("__{}_{}", n / 2, n % 2)] == noise(n, 300_000)));
    fixture.collect_and_verify().await;
    assert_eq!(fixture.files(&run).await, files);
}

/// A2, with collectors at work and on a bad day: what was acknowledged is there.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_acknowledged_is_lost_to_collectors_and_faults() {
    let dir = tempfile::tempdir().unwrap();
    let faulty = Arc::new(Faulty::new(Arc::new(InMemory::new()), Faults::bad_day(), 5));
    let objects: Arc<dyn ObjectStore> = Arc::<Faulty>::clone(&faulty);
    let open = |n: u32| {
        let (objects, cache) = (Arc::clone(&objects), dir.path().join(format!("cache-{n}")));
        async move {
            loop {
                let store = Store::from_objects_watched(Arc::clone(&objects), Duration::from_secs(5));
                let options =
                    OpenOptions { cache: Some(cache.clone()), memory: Some(64 << 20), ..OpenOptions::default() };
                if let Ok((repository, _)) = Repository::create(store, options).await {
                    return repository;
                }
            }
        }
    };
    let (of, stop) = (name("shared"), Arc::new(AtomicBool::new(false)));
    let collecting = {
        let (repository, stop) = (open(99).await, Arc::clone(&stop));
        tokio::spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                let options = CollectOptions::at_once();
                if let Err(error) = repository.collect(&options).await {
                    assert!(matches!(error.kind(), ErrorKind::Unreachable | ErrorKind::Conflict), "{error:?}");
                }
            }
        })
    };
    let mut tasks = tokio::task::JoinSet::new();
    for writer in 0..4u32 {
        let (repository, of) = (open(writer).await, of.clone());
        tasks.spawn(async move {
            // Each file is written over and over: what of it is sure, and what may be.
            let (mut sure, mut may) = (None, Vec::new());
            for round in 0..6u32 {
                let files = [(&*format!("{writer}"), noise(u64::from(writer * 100 + round), 150_000))];
                match repository.amend(&of, &put(&files), &SaveOptions::default()).await {
                    Ok(_) => (sure, may) = (Some(round), Vec::new()),
                    Err(error) => {
                        assert!(matches!(error.kind(), ErrorKind::Unreachable | ErrorKind::Conflict), "{error:?}");
                        may.push(round);
                    }
                }
            }
            (writer, sure, may)
        });
    }
    let outcomes = tasks.join_all().await;
    stop.store(true, Ordering::Relaxed);
    collecting.await.unwrap();
    faulty.calm(true);
    let fixture = Fixture { dir, objects };
    let files = fixture.files(&of).await;
    for (writer, sure, mut may) in outcomes {
        may.extend(sure);
        let there = files.get(&writer.to_string());
        let fits = |round: &u32| there == Some(&noise(u64::from(writer * 100 + round), 150_000));
        assert!(may.iter().any(fits) || (sure.is_none() && there.is_none()), "{writer}: {sure:?} {may:?}");
    }
    fixture.collect_and_verify().await;
}

/// A3: "Other paths are neither read nor stored again".
#[tokio::test(flavor = "multi_thread")]
async fn what_stays_is_not_read() {
    let (fixture, of) = (Fixture::new(), name("big"));
    fixture.amend(&of, &put(&[("big", noise(1, 8_000_000)), ("small", noise(2, 1000))])).await;
    // With the pack of the big file gone, whoever read it would fail.
    let saved = fixture.saved(&of).await;
    for pack in &saved.map.packs {
        fixture.objects.delete(&layout::owned(Family::Pack, pack.id)).await.unwrap();
    }
    let repository = fixture.open().await;
    let before = repository.store().counters().get(Metric::GetBytes);
    repository.amend(&of, &put(&[("new", noise(3, 1000))]), &SaveOptions::default()).await.unwrap();
    repository.amend(&of, &rename("big", "bigger"), &SaveOptions::default()).await.unwrap();
    repository.amend(&of, &remove("small"), &SaveOptions::default()).await.unwrap();
    let read = repository.store().counters().get(Metric::GetBytes) - before;
    assert!(read < 200_000, "{read} bytes read to change little");
    let after = fixture.saved(&of).await;
    let paths = after.manifest.files().map(|(entry, _)| String::from_utf8_lossy(&entry.path).into_owned());
    assert_eq!(paths.collect::<Vec<_>>(), ["bigger", "new"]);
    let of_big = |saved: &Saved, path: &str| {
        let entry = saved.manifest.entry(path.as_bytes()).unwrap().clone();
        (entry.mode, entry.mtime)
    };
    assert_eq!(of_big(&saved, "big"), of_big(&after, "bigger"));
}

/// A3: differences and what is derived stay what they are, with their bases; labels and facts stay too.
#[tokio::test(flavor = "multi_thread")]
async fn differences_stay_with_their_bases() {
    let (fixture, one, two) = (Fixture::new(), name("run/step-1"), name("run/step-2"));
    let step = |change: u8| {
        let mut file = safetensors(1, &[("w", 512 << 10)]);
        let start = file.len() - (2 << 20);
        file[start..].iter_mut().step_by(64).for_each(|byte| *byte ^= change);
        file
    };
    let facts = StepFacts::default().metric("loss", 0.5).unwrap();
    let labels = BTreeMap::from([("by".to_owned(), "me".to_owned())]);
    let options = SaveOptions { facts: facts.clone(), labels: labels.clone(), ..SaveOptions::default() };
    fixture.amend(&one, &put(&[("w.safetensors", step(0))])).await;
    fixture.open().await.amend(&two, &put(&[("w.safetensors", step(1))]), &options).await.unwrap();
    let differences = |saved: &Saved| saved.map.frames.iter().filter(|frame| frame.codec == Codec::Difference).count();
    let saved = fixture.saved(&two).await;
    assert!(differences(&saved) > 0 && !saved.map.further.is_empty(), "stored as differences to the step before");
    assert_eq!(saved.value.behind, 1);

    let told =
        SaveOptions { facts: StepFacts::default().world_size(NonZeroU32::new(2).unwrap()), ..SaveOptions::default() };
    fixture.open().await.amend(&two, &put(&[("note", b"n".to_vec())]), &told).await.unwrap();
    fixture.amend(&two, &rename("w.safetensors", "v.safetensors")).await;
    let amended = fixture.saved(&two).await;
    assert_eq!(differences(&amended), differences(&saved));
    assert_eq!((amended.map.further.len(), amended.value.behind), (saved.map.further.len(), 1));
    assert_eq!(
        (amended.value.facts.value("loss"), amended.value.facts.ranks().map(NonZeroU32::get)),
        (Some(0.5), Some(2))
    );
    assert_eq!(amended.manifest.labels, labels);
    assert_eq!(fixture.open().await.tensors(&two, &[]).await.unwrap().len(), 1, "tensors stay known");

    fixture.open().await.remove(&one).await.unwrap();
    fixture.collect_and_verify().await;
    assert!(fixture.files(&two).await["v.safetensors"] == step(1));
}

/// A4: "An amend that is dropped or killed at any moment takes effect whole or not at all".
#[tokio::test(flavor = "multi_thread")]
async fn dropped_at_any_moment_the_tree_is_the_old_or_the_new() {
    let (fixture, of) = (Fixture::new(), name("run/step-3"));
    fixture.amend(&of, &put(&[("a", noise(1, 400_000)), ("m.tmp", noise(2, 1000))])).await;
    let old = fixture.files(&of).await;
    let changes = Changes { rename: vec![(b"m.tmp".to_vec(), b"m".to_vec())], ..put(&[("b", noise(3, 400_000))]) };
    let begun = Instant::now();
    fixture.amend(&name("other"), &put(&[("b", noise(3, 400_000))])).await;
    let usual = begun.elapsed();
    let (mut dropped, mut done) = (0, 0);
    for wait in 0..60u32 {
        let (repository, options) = (fixture.open().await, SaveOptions::default());
        let amend = repository.amend(&of, &changes, &options);
        let until = if wait < 59 { usual * wait / 30 } else { Duration::from_mins(1) };
        if tokio::time::timeout(until, amend).await.is_ok() {
            done += 1;
        } else {
            dropped += 1;
        }
        let now = fixture.files(&of).await;
        if now.contains_key("b") {
            let new = ["a", "b", "m"].map(str::to_owned);
            assert!(now.keys().eq(&new) && now["b"] == noise(3, 400_000) && now["m"] == old["m.tmp"]);
            fixture.amend(&of, &Changes { remove: vec![b"b".to_vec()], ..rename("m", "m.tmp") }).await;
        }
        assert_eq!(fixture.files(&of).await, old);
    }
    assert!(dropped > 0 && done > 0, "{dropped} dropped, {done} done");
    fixture.collect_and_verify().await;
}

/// Guard that lets everything go everywhere.
#[derive(Debug)]
struct Open;

impl Guard for Open {
    fn rule_on(&self, _: Option<&PolicyText>, _: &Access<'_>, _: Option<&LocalCaller>) -> Ruling {
        Ruling { verdict: Verdict::Allow, basis: Basis::NoRule }
    }

    fn accepts_declassification(&self, _: RepositoryId, _: &Name, _: &Declassified) -> bool {
        false
    }
}

/// Y1: "a change of some files none from the name".
#[tokio::test(flavor = "multi_thread")]
async fn labels_of_other_names_of_the_tree_stay() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Some(dir.path().to_owned());
    let options = OpenOptions { cache, guard: Some(Arc::new(Open)), ..OpenOptions::default() };
    let store = Store::from_objects(Arc::new(InMemory::new()));
    let repository = Repository::create(store, options).await.unwrap().0;
    repository.set_policy(1, "version = 1".into()).await.unwrap();
    let (q1, q2, labels) = (name("q1"), name("q2"), Labels::default().with("residency", "DE").unwrap());
    let both = put(&[("f", noise(1, 100)), ("g", noise(2, 100))]);
    repository.amend(&q1, &both, &SaveOptions::default()).await.unwrap();
    repository.copy(&q1, &q2).await.unwrap();
    repository.tighten(&q2, &labels).await.unwrap();
    assert_eq!(repository.labels(&q1).await.unwrap().labels, labels);
    repository.amend(&q1, &remove("g"), &SaveOptions::default()).await.unwrap();
    assert_eq!(repository.labels(&q1).await.unwrap().labels, labels);
    // Content that a program copies by itself.
    repository.amend(&name("q3"), &put(&[("f", noise(1, 100))]), &SaveOptions::default()).await.unwrap();
    repository.inherit_labels(&q1, &name("q3")).await.unwrap();
    let copied = repository.labels(&name("q3")).await.unwrap();
    assert_eq!((copied.labels.residency(), copied.own.origins().len()), (labels.residency(), 1));
    // Parts of another tree bring its labels in the same commit, so that none that was given just before is missed.
    let tree = repository.saved(&q1).await.unwrap().shared();
    let graft = Graft { name: q1.clone(), tree, from: b"f".to_vec(), to: b"f".to_vec() };
    let changes = Changes { graft: vec![graft], ..Changes::default() };
    repository.amend(&name("q4"), &changes, &SaveOptions::default()).await.unwrap();
    assert_eq!(repository.labels(&name("q4")).await.unwrap().labels.residency(), labels.residency());
}
