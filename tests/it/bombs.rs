//! Small objects that stand for very much: refused within the memory budget, whoever wrote them.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt as _;
use object_store::memory::InMemory;
use object_store::{ObjectStore as _, ObjectStoreExt as _};
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
use towline::ops::{CollectOptions, RestoreTensorsOptions, SaveOptions, TensorSelector};
use towline::repository::layout::{self, Family, Numbered};
use towline::repository::log::{Action, LogEntry, RefValue, SegmentInfo, StepFacts};
use towline::repository::{OpenOptions, Repository};
use towline::storage::{self, Location, Store, StoreOptions};
use towline::tree::MemoryFile;

use crate::data::name;
use crate::fuzz_smoke::peak_of;

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

/// Gives `body` a name, as a program that may write to the store can.
async fn plant(repository: &Repository, body: &[u8]) -> RefValue {
    let map = Map { manifest: ManifestId::of(body), packs: Vec::new(), frames: Vec::new(), further: Vec::new() };
    plant_with(repository, body, &map).await
}

/// As [`plant`], with a map.
async fn plant_with(repository: &Repository, body: &[u8], map: &Map) -> RefValue {
    let session = SessionId::random();
    let (manifest_key, map_key) = (Owned::fresh(session), Owned::fresh(session));
    let manifest = ManifestId::of(body);
    let objects = repository.store().objects();
    let put = |key, object: Bytes| async move { objects.put(&key, object.into()).await.unwrap() };
    put(layout::owned(Family::Manifest, manifest_key), seal(Kind::Manifest, body, true)).await;
    put(layout::owned(Family::Map, map_key), map.seal()).await;
    let value = RefValue {
        version: 0,
        manifest,
        manifest_key,
        map_key,
        saved: Timestamp(0),
        logical_bytes: 0,
        files: 0,
        chunks: 0,
        behind: 0,
        facts: StepFacts::default(),
        attempt: None,
    };
    let set = Action::SetRef { name: name("bomb"), expected: None, value: value.clone() };
    repository.log().commit(None, |_| Ok(vec![set.clone()])).await.unwrap();
    value
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

/// The empty tree, in one folder.
fn empty_tree() -> Manifest {
    let root = TreeEntry { path: Vec::new(), mode: 0o755, mtime: Timestamp(0), kind: EntryKind::Folder };
    Manifest { entries: vec![root], ..Manifest::default() }
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

/// A file of `chunks` chunks, and `tensors` tensors that each lie over all of it.
fn overlapping(tensors: usize, chunks: u32) -> (Manifest, Map) {
    let size = u64::from(chunks) * 100;
    let tensor = |n: usize| TensorEntry {
        name: format!("t{n}"),
        dtype: "U8".into(),
        shape: vec![size],
        range: 0..size,
        part: None,
    };
    let content = Content {
        size,
        cut: Cut::Tensor,
        pieces: vec![Piece { hole: 0, first: 0, count: chunks }],
        tensors: (0..tensors).map(tensor).collect(),
    };
    let mut tree = empty_tree();
    tree.chunks = ChunkList {
        ids: (0..chunks).map(|n| ChunkId::of(&n.to_le_bytes())).collect(),
        lens: vec![100; chunks as usize],
    };
    let kind = EntryKind::File(content);
    tree.entries.push(TreeEntry { path: b"m.safetensors".to_vec(), mode: 0o644, mtime: Timestamp(0), kind });
    let pack = PackRef { id: Owned::fresh(SessionId::random()), len: 1 << 30, footer_len: 99, chunks };
    let frame = |n| Frame {
        pack: 0,
        ordinal: n,
        offset: u64::from(n) * 100,
        stored_len: 100,
        codec: if n % 2 == 0 { Codec::Raw } else { Codec::Zstd },
        base: None,
        alone_len: 0,
    };
    let map = Map {
        manifest: tree.encode().0,
        packs: vec![pack],
        frames: (0..chunks).map(frame).collect(),
        further: Vec::new(),
    };
    (tree, map)
}

#[test]
fn tensors_over_the_same_chunks_do_not_exceed_the_budget() {
    let fixture = Fixture::new();
    run(async {
        let (tree, map) = overlapping(5_000, 20_000);
        plant_with(&fixture.open().await, &tree.encode().1, &map).await;
    });
    let choose = |selector: &'static str| {
        let selectors: Vec<TensorSelector> = vec![selector.parse().unwrap()];
        let fixture = &fixture;
        async move { fixture.open().await.choose_tensors(&name("bomb"), None, &selectors).await }
    };
    let (refused, peak) = measured(choose("t*"));
    let error = refused.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exhausted, "{error}");
    let help = error.help_text().unwrap();
    assert!(help.contains("fewer tensors") && help.contains("--memory"), "{help}");
    assert!(peak < MEMORY_MIN + 4 * MIB, "{peak}");
    // A few of them fit.
    let chosen = run(choose("t1[0-9]")).unwrap();
    assert_eq!((chosen.tensors().len(), chosen.chunk_count()), (10, 20_000));
    // All of them are shown.
    let (shown, peak) = measured(async { fixture.open().await.show(&name("bomb")).await });
    let shown = shown.unwrap();
    let tensors = &shown.entries[1].tensors;
    assert_eq!(tensors.len(), 5_000);
    assert!(tensors.iter().all(|tensor| tensor.stored_bytes == 2_000_000 && tensor.codec == "raw+zstd"));
    assert!(peak < MEMORY_MIN + 4 * MIB, "{peak}");
}

#[test]
fn sizes_that_no_number_holds_together_are_refused() {
    let file = |n: u8, size: u64, tensors: usize| {
        let tensor = |n| TensorEntry {
            name: format!("t{n}"),
            dtype: "U8".into(),
            shape: vec![size],
            range: 0..size,
            part: None,
        };
        let tensors = (0..tensors).map(tensor).collect();
        let kind = EntryKind::File(Content { size, cut: Cut::Tensor, pieces: Vec::new(), tensors });
        TreeEntry { path: vec![n], mode: 0o644, mtime: Timestamp(0), kind }
    };
    let read = |files: Vec<TreeEntry>| {
        let mut tree = empty_tree();
        tree.entries.extend(files);
        Manifest::decode(&tree.encode().1)
    };
    // All holes.
    let half = 1 << 63;
    let error = read(vec![file(b'a', half, 0), file(b'b', half, 0)]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Damaged);
    assert!(format!("{error:?}").contains("2^64"), "{error:?}");
    assert_eq!(read(vec![file(b'a', half, 1)]).unwrap_err().kind(), ErrorKind::Damaged, "tensors count too");
    assert_eq!(read(vec![file(b'a', half - 1, 1), file(b'b', 1, 0)]).unwrap().logical_bytes(), half);
}

#[test]
fn a_tensor_in_a_hole_takes_no_room_on_the_disk() {
    const LEN: u64 = 64 << 30;
    let fixture = Fixture::new();
    let (path, out) = (fixture.dir.path().join("model.safetensors"), fixture.dir.path().join("out.safetensors"));
    let header = format!(r#"{{"w":{{"dtype":"U8","shape":[{LEN}],"data_offsets":[0,{LEN}]}}}}"#);
    fs::write(&path, [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat()).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(8 + header.len() as u64 + LEN).unwrap();
    run(async {
        let repository = fixture.open().await;
        repository.save(path.as_path(), &name("w"), &SaveOptions::default()).await.unwrap();
        let (selector, options) = ("w".parse().unwrap(), RestoreTensorsOptions::default());
        repository.restore_tensors(&name("w"), None, &[selector], &out, &options).await.unwrap();
    });
    let found = fs::metadata(&out).unwrap();
    assert!(found.len() > LEN && found.blocks() * 512 < MIB, "{} blocks", found.blocks());
}

/// A file of zeros with `tensors`, whose path is `path`.
fn in_a_hole(path: &str, size: u64, tensors: Vec<TensorEntry>) -> Manifest {
    let mut tree = empty_tree();
    for (end, _) in path.match_indices('/') {
        let kind = EntryKind::Folder;
        tree.entries.push(TreeEntry { path: path[..end].into(), mode: 0o755, mtime: Timestamp(0), kind });
    }
    let content = Content { size, cut: Cut::Tensor, pieces: Vec::new(), tensors };
    let kind = EntryKind::File(content);
    tree.entries.push(TreeEntry { path: path.into(), mode: 0o644, mtime: Timestamp(0), kind });
    tree
}

/// Chooses all tensors of a planted tree, on this thread.
fn choose_all(tree: &Manifest) -> (towline::Result<usize>, u64) {
    let fixture = Fixture::new();
    let (repository, saved) = run(async {
        let repository = fixture.open().await;
        plant(&repository, &tree.encode().1).await;
        let saved = repository.saved(&name("bomb")).await.unwrap().shared();
        (repository, saved)
    });
    let selectors: Vec<TensorSelector> = vec!["*".parse().unwrap()];
    let (chosen, peak) = peak_of(|| repository.choose_tensors_in(&saved, None, &selectors));
    (chosen.map(|chosen| chosen.tensors().len()), peak as u64)
}

/// Every second row of one tensor, and columns that cross all the others.
#[test]
fn parts_that_cross_each_other_do_not_exceed_the_budget() {
    let (columns, rows) = (800_u64, 3_000_u64);
    let part = |shape: [u64; 3], offsets: [u64; 3]| TensorEntry {
        name: "w".into(),
        dtype: "U8".into(),
        range: 0..shape.iter().product(),
        shape: shape.into(),
        part: Some(TensorPart { shape: vec![2, rows, columns], offsets: offsets.into() }),
    };
    let mut parts: Vec<TensorEntry> = (0..rows).step_by(2).map(|at| part([2, 1, columns], [0, at, 0])).collect();
    parts.extend((0..columns).map(|at| part([1, rows, 1], [1, 0, at])));
    let (refused, peak) = choose_all(&in_a_hole("m", 1 << 30, parts));
    let error = refused.unwrap_err();
    assert!(error.to_string().contains("overlap in more ways"), "{error}");
    assert!(peak < 40 * MIB, "{peak}");
}

/// The manifest has the path once, and lists of tensors have it for each.
#[test]
fn a_long_path_of_many_tensors_counts_for_each() {
    let path = vec!["f".repeat(250); 16].join("/");
    let tensor =
        |n: usize| TensorEntry { name: n.to_string(), dtype: "U8".into(), shape: vec![0], range: 0..0, part: None };
    let tree = in_a_hole(&path, 1, (0..50_000).map(tensor).collect());
    let (refused, peak) = choose_all(&tree);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Exhausted);
    assert!(peak < MEMORY_MIN, "{peak}");
    let fixture = Fixture::new();
    let (listed, peak) = measured(async {
        let repository = fixture.open().await;
        plant(&repository, &tree.encode().1).await;
        repository.tensors(&name("bomb"), &[]).await
    });
    let error = listed.unwrap_err();
    assert!(error.kind() == ErrorKind::Exhausted && error.help_text().unwrap().contains("fewer tensors"), "{error}");
    assert!(peak < 2 * MEMORY_MIN, "{peak}");
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
