//! Small objects that stand for very much: refused within the memory budget, whoever wrote them.

mod repacking;
mod tensors;

use std::fmt::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{fs, io};

use bytes::Bytes;
use futures::StreamExt as _;
use object_store::memory::InMemory;
use object_store::{ObjectStore as _, ObjectStoreExt as _};
use serde::Serialize;
use towline::chunker::Cut;
use towline::clock::Timestamp;
use towline::codec::Codec;
use towline::error::ErrorKind;
use towline::format::envelope::{DIGEST_LEN, HEADER_LEN, Kind, header, seal};
use towline::format::wire::Writer;
use towline::format::{
    ChunkList, Content, EntryKind, Frame, Manifest, Map, PackRef, Piece, TensorEntry, TensorPart, TreeEntry,
};
use towline::id::{ChunkId, ManifestId, Owned, SessionId, WriteId};
use towline::identity::Identity;
use towline::limits::{MEMORY_MIN, MIB, PACK_CHUNKS_MAX};
use towline::metrics::Metric;
use towline::ops::{CollectOptions, RestoreTensorsOptions, SaveOptions, TensorSelector, VerifyOptions};
use towline::repository::layout::{self, Family, Numbered};
use towline::repository::log::{Action, LogEntry, RefValue, SegmentInfo};
use towline::repository::{OpenOptions, Repository};
use towline::storage::{self, Location, Store, StoreOptions};
use towline::tree::MemoryFile;

use crate::data::name;
use crate::fuzz_smoke::peak_of;
use crate::plant::{self, empty_tree};

/// A repository in memory, opened with the smallest budget.
struct Fixture {
    dir: tempfile::TempDir,
    objects: Arc<InMemory>,
}

impl Fixture {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap(), objects: Arc::new(InMemory::new()) }
    }

    async fn open(&self) -> Repository {
        let options =
            OpenOptions { cache: Some(self.dir.path().to_owned()), memory: Some(MEMORY_MIN), ..OpenOptions::default() };
        let store = Store::from_objects(Arc::clone(&self.objects) as _);
        Repository::create(store, options).await.unwrap().0
    }
}

/// What `work` returns, all of it done by this thread, and the memory that it took at most.
fn measured<T>(work: impl Future<Output = T>) -> (T, u64) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (value, peak) = peak_of(|| runtime.block_on(work));
    (value, peak as u64)
}

fn run<T>(work: impl Future<Output = T>) -> T {
    measured(work).0
}

/// Folders in each other, and many more in the last: 2 GiB of paths.
fn deep_tree() -> Manifest {
    let folder = |path: Vec<u8>| TreeEntry { path, mode: 0o755, mtime: Timestamp(0), kind: EntryKind::Folder };
    let mut tree = Manifest { entries: vec![folder(Vec::new())], ..Manifest::default() };
    let mut path = "x".repeat(255);
    for _ in 0..15 {
        tree.entries.push(folder(path.clone().into_bytes()));
        write!(path, "/{}", "x".repeat(250)).unwrap();
    }
    tree.entries.push(folder(path.clone().into_bytes()));
    // One entry more in the bytes below is one more of these.
    tree.entries.extend((0..100).map(|n| folder(format!("{path}/{n:06}").into_bytes())));
    tree
}

/// The body of [`deep_tree`], with `more` folders after it: they are never built here.
fn deep_body(more: u32) -> Vec<u8> {
    let tree = deep_tree();
    let (_, whole) = tree.encode();
    let last = tree.entries.last().unwrap().path.len();
    // Form, no labels, no chunks, then the number of entries.
    let (entries, start) = (tree.entries.len(), 3 + count_len(tree.entries.len()));
    assert_eq!(whole[..3], [0, 0, 0]);
    let mut out = Writer::new();
    out.bytes(&whole[..3]).count(entries + more as usize).bytes(&whole[start..]);
    for n in 0..more {
        let name = format!("{:06}", 100 + n);
        out.count(last - 6).string(name.as_bytes()).u8(1).varint(0o755).signed(0);
    }
    out.into_bytes()
}

fn count_len(count: usize) -> usize {
    let mut out = Writer::new();
    out.count(count);
    out.len()
}

/// Bytes of `value` as JSON.
fn json_len(value: &impl Serialize) -> u64 {
    struct Count(u64);
    impl io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += bytes.len() as u64;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(0);
    serde_json::to_writer(&mut count, value).unwrap();
    count.0
}

/// Gives `body` a name, as a program that may write to the store can.
async fn plant(repository: &Repository, body: &[u8]) -> RefValue {
    let map = Map { manifest: ManifestId::of(body), packs: Vec::new(), frames: Vec::new(), further: Vec::new() };
    plant_with(repository, body, &map).await
}

/// As [`plant`], with a map.
async fn plant_with(repository: &Repository, body: &[u8], map: &Map) -> RefValue {
    plant_as(repository, "bomb", body, map).await
}

/// As [`plant_with`], under a name of its own.
async fn plant_as(repository: &Repository, to: &str, body: &[u8], map: &Map) -> RefValue {
    plant::plant(repository, to, body, map, SessionId::random()).await
}

#[test]
fn paths_that_share_their_beginnings_do_not_exceed_the_budget() {
    let fixture = Fixture::new();
    let body = deep_body(500_000);
    let value = run(async { plant(&fixture.open().await, &body).await });
    let stored = run(fixture.objects.head(&layout::owned(Family::Manifest, value.manifest_key))).unwrap().size;
    assert!(stored < 4 * MIB, "{stored} bytes stand for 2 GiB");
    drop(body);
    let (refused, peak) = measured(async { fixture.open().await.saved(&name("bomb")).await.map(drop) });
    let error = refused.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exhausted);
    assert!(error.to_string().contains("memory") && error.place().unwrap().contains("manifest/"), "{error:?}");
    assert!(peak < MEMORY_MIN + MIB, "{peak}");
    // A tree of the same kind that fits is read.
    let fixture = Fixture::new();
    let read = run(async {
        let repository = fixture.open().await;
        plant(&repository, &deep_body(100)).await;
        repository.saved(&name("bomb")).await
    });
    assert_eq!(read.unwrap().manifest.entries.len(), 217);
}

#[test]
fn a_list_of_long_paths_takes_no_more_memory_than_its_tree() {
    let fixture = Fixture::new();
    run(async {
        let repository = fixture.open().await;
        plant(&repository, &deep_body(10_000)).await;
        let one = vec![MemoryFile::new("a", [Bytes::from_static(b"a")])];
        repository.save(one, &name("small"), &SaveOptions::default()).await.unwrap();
    });
    let (shown, peak) = measured(async { json_len(&fixture.open().await.show(&name("bomb")).await.unwrap()) });
    assert!(shown > 39 * MIB && peak < MEMORY_MIN, "{shown} {peak}");
    let compared = async { fixture.open().await.diff(&name("small"), &name("bomb")).await.unwrap() };
    let (compared, peak) = measured(async { json_len(&compared.await) });
    assert!(compared > 39 * MIB && peak < MEMORY_MIN, "{compared} {peak}");
}

#[test]
fn a_body_of_zeros_is_refused_before_it_is_decompressed() {
    let fixture = Fixture::new();
    let zeros = vec![0; 200 << 20];
    run(async { plant(&fixture.open().await, &zeros).await });
    drop(zeros);
    let (refused, peak) = measured(async { fixture.open().await.saved(&name("bomb")).await.map(drop) });
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Exhausted);
    assert!(peak < 2 * MIB, "{peak}");
}

#[test]
fn an_entry_of_the_log_with_millions_of_actions_does_not_exceed_the_budget() {
    let fixture = Fixture::new();
    run(async {
        let repository = fixture.open().await;
        let files = vec![MemoryFile::new("a", [Bytes::from_static(b"a")])];
        repository.save(files, &name("a"), &SaveOptions::default()).await.unwrap();
        let next = repository.state().await.unwrap().seq + 1;
        let actions = 15_000_000;
        let mut body = Writer::new();
        body.bytes(&WriteId::random().to_bytes()).u8(0).signed(0).count(actions);
        let mut body = body.into_bytes();
        // Each says that no pack at all is deleted.
        body.extend([13, 1, 0].repeat(actions));
        fixture.objects.put(&Numbered::Entry.key(next), seal(Kind::Entry, &body, true).into()).await.unwrap();
    });
    let (refused, peak) = measured(async { fixture.open().await.state().await.map(drop) });
    let error = refused.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exhausted);
    assert!(error.place().unwrap().contains("log/"), "{error:?}");
    assert!(peak < MEMORY_MIN + MIB, "{peak}");
}

#[test]
fn long_entries_of_the_log_are_not_read_ahead_together() {
    let dir = tempfile::tempdir().unwrap();
    let (repository, _) = run(sparse_index(dir.path(), 1));
    let seq = run(repository.state()).unwrap().seq;
    for number in 1..=8 {
        let path = dir.path().join("repository").join(Numbered::Entry.key(seq + number).as_ref());
        // Zeros: the first one is no entry, the others are not looked at.
        fs::File::create_new(&path).unwrap().set_len(10 * MIB).unwrap();
    }
    let (refused, peak) = measured(async { repository.state().await.map(drop) });
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Damaged);
    assert!(peak < 24 * MIB, "{peak}");
}

#[test]
fn names_in_masses_do_not_exceed_the_budget() {
    let fixture = Fixture::new();
    run(async {
        let repository = fixture.open().await;
        let body = empty_tree().encode().1;
        let value = plant(&repository, &body).await;
        let next = repository.state().await.unwrap().seq + 1;
        for entry in 0..6 {
            let name = |n: u32| format!("run-{entry}/step-{n:064}").parse().unwrap();
            let set = |n| Action::SetRef { name: name(n), expected: None, value: value.clone() };
            let write = WriteId::random();
            let entry_of = LogEntry { write, session: None, at: Timestamp(0), actions: (0..25_000).map(set).collect() };
            let object = seal(Kind::Entry, &entry_of.encode(), true);
            fixture.objects.put(&Numbered::Entry.key(next + entry), object.into()).await.unwrap();
        }
    });
    let (refused, peak) = measured(async { fixture.open().await.state().await.map(drop) });
    let error = refused.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exhausted);
    assert!(error.place().unwrap().contains("names and sessions"), "{error:?}");
    assert!(peak < MEMORY_MIN + 8 * MIB, "{peak}");
}

#[test]
fn lists_of_unneeded_objects_that_repeat_one_take_no_memory_for_it() {
    let fixture = Fixture::new();
    run(async {
        let repository = fixture.open().await;
        let files = vec![MemoryFile::new("a", [Bytes::from(vec![7; 4 << 20])])];
        repository.save(files, &name("a"), &SaveOptions::default()).await.unwrap();
        let pack = fixture.objects.list(Some(&layout::family(Family::Pack))).next().await.unwrap().unwrap();
        let pack = layout::owner(Family::Pack, &pack.location).unwrap();
        let mut list = Writer::new();
        list.count(400_000);
        for _ in 0..400_000 {
            list.u8(0).bytes(&pack.session.to_bytes()).bytes(&pack.object.to_bytes());
        }
        let list = seal(Kind::Tombstone, &list.into_bytes(), true);
        for _ in 0..8 {
            let key = layout::tombstone(Owned::fresh(SessionId::random()));
            fixture.objects.put(&key, list.clone().into()).await.unwrap();
        }
    });
    let (report, peak) = measured(async { fixture.open().await.collect(&CollectOptions::default()).await });
    report.unwrap();
    assert!(peak < MEMORY_MIN + 8 * MIB, "{peak}");
}

#[test]
fn what_no_agent_wrote_is_neither_fetched_nor_decompressed() {
    let fixture = Fixture::new();
    run(async {
        fixture.open().await.announce(&Identity::new("west", "a").unwrap(), "10.0.0.1:7070").await.unwrap();
        let zeros = vec![0; 700 << 20];
        let small = seal(Kind::Agent, &zeros, true);
        assert!(small.len() < 100 << 10);
        let key = |agent: &str| layout::agent("west", agent);
        fixture.objects.put(&key("bomb"), small.into()).await.unwrap();
        fixture.objects.put(&key("long"), vec![7; 50 << 20].into()).await.unwrap();
        // It is short enough to be fetched, and says that it is long.
        fixture.objects.put(&key("short"), seal(Kind::Agent, &zeros[..1 << 20], true).into()).await.unwrap();
    });
    let repository = run(fixture.open());
    let before = repository.store().counters().get(Metric::GetBytes);
    let (announced, peak) = measured(repository.announced(Duration::from_hours(1)));
    assert_eq!(announced.unwrap().len(), 1);
    assert!(repository.store().counters().get(Metric::GetBytes) - before < 4096);
    assert!(peak < MIB, "{peak}");
}

/// `count` packs, each said to hold as many chunks as a pack may, and a frame in each.
fn map_of_packs(manifest: ManifestId, count: u32) -> Map {
    let chunks = u32::try_from(PACK_CHUNKS_MAX).unwrap();
    let session = SessionId::random();
    let pack = |_| PackRef { id: Owned::fresh(session), len: 1 << 20, footer_len: 99, chunks };
    let frame = |pack| Frame {
        pack,
        ordinal: chunks - 1,
        offset: 0,
        stored_len: 100,
        codec: Codec::Raw,
        base: None,
        alone_len: 0,
    };
    Map {
        manifest,
        packs: (0..count).map(pack).collect(),
        frames: (0..count).map(frame).collect(),
        further: Vec::new(),
    }
}

#[test]
fn packs_that_claim_many_chunks_take_no_memory_for_them() {
    let fixture = Fixture::new();
    run(async {
        let body = empty_tree().encode().1;
        plant_with(&fixture.open().await, &body, &map_of_packs(ManifestId::of(&body), 20_000)).await;
    });
    let (report, peak) = measured(async { fixture.open().await.collect(&CollectOptions::default()).await });
    assert_eq!(report.unwrap().live_bytes, 2_000_000, "all of them are marked");
    assert!(peak < MEMORY_MIN + 4 * MIB, "{peak}");
}

#[test]
fn marks_of_more_packs_than_memory_holds_are_refused() {
    let fixture = Fixture::new();
    run(async {
        let body = empty_tree().encode().1;
        plant_with(&fixture.open().await, &body, &map_of_packs(ManifestId::of(&body), 200_000)).await;
    });
    let (report, peak) = measured(async { fixture.open().await.collect(&CollectOptions::default()).await });
    assert_eq!(report.unwrap_err().kind(), ErrorKind::Exhausted);
    assert!(peak < MEMORY_MIN + 4 * MIB, "{peak}");
}

/// The names of all findings would be ten millions.
#[test]
fn very_many_names_of_a_tree_with_very_many_lost_packs_are_reported_within_the_budget() {
    let (packs, names) = (2_000_u32, 5_000_u64);
    let ids = (0..packs).map(|n| ChunkId::of(&n.to_le_bytes())).collect();
    let pieces = vec![Piece { hole: 0, first: 0, count: packs }];
    let content = Content { size: packs.into(), cut: Cut::Fixed, pieces, tensors: Vec::new() };
    let file = TreeEntry { path: b"f".to_vec(), mode: 0o644, mtime: Timestamp(0), kind: EntryKind::File(content) };
    let tree = Manifest { chunks: ChunkList { ids, lens: vec![1; packs as usize] }, ..empty_tree() };
    let body = Manifest { entries: tree.entries.iter().cloned().chain([file]).collect(), ..tree }.encode().1;
    let session = SessionId::random();
    let pack = |_| PackRef { id: Owned::fresh(session), len: 132, footer_len: 84, chunks: 1 };
    let frame =
        |pack| Frame { pack, ordinal: 0, offset: 16, stored_len: 1, codec: Codec::Raw, base: None, alone_len: 0 };
    let map = Map {
        manifest: ManifestId::of(&body),
        packs: (0..packs).map(pack).collect(),
        frames: (0..packs).map(frame).collect(),
        further: Vec::new(),
    };
    let fixture = Fixture::new();
    run(async {
        let repository = fixture.open().await;
        let value = plant_with(&repository, &body, &map).await;
        let set = |n| Action::SetRef { name: name(&format!("n/{n:04}")), expected: None, value: value.clone() };
        repository.log().commit(None, |_| Ok((0..names - 1).map(set).collect())).await.unwrap();
    });
    let (report, peak) = measured(async { fixture.open().await.verify(None, &VerifyOptions::default()).await });
    let damaged = report.unwrap().damaged;
    assert_eq!(damaged.len(), packs as usize);
    assert!(damaged.iter().all(|one| one.names.len() as u64 + one.more_names == names && one.names[0] == "bomb"));
    assert_eq!((damaged[0].names.len(), &damaged[0].names[999][..]), (1_000, "n/0998"));
    assert!(damaged[0].tensors.contains(&"n/0998:f".to_owned()));
    let listed: usize = damaged.iter().map(|one| one.names.len()).sum();
    assert!(listed < 22_000 && peak < MEMORY_MIN, "{listed} names, {peak}");
}

/// A repository in a directory whose index has one more segment, of `packs` packs: a file with a hole in place of their rows.
async fn sparse_index(dir: &Path, packs: u32) -> (Repository, PathBuf) {
    let options = OpenOptions { cache: Some(dir.join("cache")), memory: Some(MEMORY_MIN), ..OpenOptions::default() };
    let location = Location::Directory(dir.join("repository"));
    fs::create_dir(dir.join("repository")).unwrap();
    let store = storage::open(&location, &StoreOptions::default()).await.unwrap();
    let repository = Repository::create(store, options).await.unwrap().0;
    let session = SessionId::random();
    let id = Owned::fresh(session);
    let body_len = 16 + 48 * u64::from(packs) + 32;
    let path = dir.join("repository").join(layout::owned(Family::Index, id).as_ref());
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let head =
        [&header(Kind::Segment, 0, body_len)[..], &0u64.to_le_bytes(), &packs.to_le_bytes(), &1u32.to_le_bytes()];
    fs::write(&path, head.concat()).unwrap();
    let len = body_len + (HEADER_LEN + DIGEST_LEN) as u64;
    fs::File::options().write(true).open(&path).unwrap().set_len(len).unwrap();
    let info = SegmentInfo { len, packs: packs.into(), chunks: 0, built: 0 };
    let log = repository.log();
    log.commit(Some(session), |_| Ok(vec![Action::Open(session)])).await.unwrap();
    log.commit(Some(session), |_| Ok(vec![Action::AddSegment(id, info), Action::Close(session)])).await.unwrap();
    (repository, path)
}

#[test]
fn a_segment_that_lists_packs_without_end_takes_no_memory() {
    let dir = tempfile::tempdir().unwrap();
    let (repository, _) = run(sparse_index(dir.path(), 20_000_000));
    let (found, peak) = measured(async {
        let (_, index) = repository.indexed_state().await.unwrap();
        index.candidates(ChunkId::of(b"any")).count()
    });
    assert_eq!(found, 0);
    assert!(peak < MIB, "{peak}");
    let (report, peak) = measured(async { repository.collect(&CollectOptions::default()).await });
    assert_eq!(report.unwrap_err().kind(), ErrorKind::Exhausted);
    assert!(peak < MEMORY_MIN, "{peak}");
}

#[test]
fn a_segment_that_is_no_file_or_of_another_length_is_damage() {
    let dir = tempfile::tempdir().unwrap();
    let (repository, path) = run(sparse_index(dir.path(), 10));
    let refused = || {
        let error = run(repository.indexed_state()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Damaged, "{error:?}");
    };
    fs::File::options().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
    refused();
    // A check reports it, and takes no memory for the length.
    let (report, peak) = measured(repository.verify(None, &VerifyOptions::default()));
    let damage = report.unwrap().damaged;
    assert!(damage.iter().any(|one| one.error.contains("index")), "{damage:?}");
    assert!(peak < 4 * MIB, "{peak}");
    let elsewhere = dir.path().join("elsewhere");
    fs::rename(&path, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
    refused();
    fs::remove_file(&path).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    refused();
}

#[test]
fn a_segment_that_others_can_write_is_read_from_a_copy() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir().unwrap();
    let (repository, path) = run(sparse_index(dir.path(), 10_000));
    fs::set_permissions(&path, fs::Permissions::from_mode(0o660)).unwrap();
    // A copy's digest is checked.
    let object = fs::read(&path).unwrap();
    let body = &object[HEADER_LEN..object.len() - DIGEST_LEN];
    fs::write(&path, seal(Kind::Segment, body, false)).unwrap();
    let (_, index) = run(repository.indexed_state()).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
    let packs = index.segments().iter().map(|(_, segment)| segment.numbered_packs().count()).sum::<usize>();
    assert_eq!(packs, 10_000);
}

/// Boundaries at powers of two, as far as numbers go: the search for the last one ends.
#[test]
fn planted_boundaries_do_not_overflow() {
    let fixture = Fixture::new();
    run(async {
        let repository = fixture.open().await;
        let mut body = Writer::new();
        body.varint(0);
        let object = seal(Kind::Boundary, &body.into_bytes(), false);
        for number in (0..64).map(|power| 1_u64 << power).chain([0, u64::MAX]) {
            let key = Numbered::Boundary.key(number);
            fixture.objects.put(&key, object.clone().into()).await.unwrap();
        }
        // Nobody wrote them, so there is nothing that could be read; it must only end.
        let _ = fixture.open().await.state().await;
        let _ = repository.state().await;
    });
}
