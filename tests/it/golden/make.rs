//! Writes the golden repository: a bit of everything that this version of the format can hold.
//!
//! `TOWLINE_GOLDEN_WRITE=1 cargo nextest run golden` writes it anew, which is right only together with a new version of the
//! format: tests/golden/v1 is what version 1 has been since its first release.

use std::collections::BTreeMap;
use std::fs;
use std::num::NonZeroU32;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use object_store::ObjectStoreExt as _;
use serde_json::{Value, json};
use towline::clock::{ManualClock, Timestamp};
use towline::codec::{Codec, rounded};
use towline::format::envelope::{Kind, seal};
use towline::format::{PackLayout, PackRef, Row, TRAILER_LEN, pack_header, segment_bytes};
use towline::id::{ChunkId, Owned, PackId, SegmentId, SessionId};
use towline::ops::{CutChoice, PartOptions, RemoveOptions, SaveOptions};
use towline::repository::layout::{self, Family, Numbered};
use towline::repository::log::{Action, SegmentInfo, StepFacts};
use towline::repository::{OpenOptions, Repository};
use towline::storage::{Location, Store, StoreOptions, open};

use super::listing::listing;
use crate::data::{name, noise};

/// The time at which everything happens: 2023-11-14T22:13:20Z.
pub(super) const NOW: u64 = 1_700_000_000;

pub(super) async fn directory(path: &Path) -> Store {
    open(&Location::directory(path).unwrap(), &StoreOptions { create: true, ..StoreOptions::default() }).await.unwrap()
}

pub(super) fn options(cache: &Path) -> OpenOptions {
    OpenOptions { cache: Some(cache.join("cache")), memory: Some(128 << 20), ..OpenOptions::default() }
}

/// Makes the repository at `at` from inputs that it makes in `scratch`; returns what it is expected to hold.
pub(super) async fn make(at: &Path, scratch: &Path) -> Value {
    let store = directory(at).await;
    let repository = Repository::create(store.clone(), options(scratch)).await.unwrap().0;
    let clock = ManualClock::at(Timestamp::from(SystemTime::UNIX_EPOCH + Duration::from_secs(NOW)));
    let repository_at = Repository::open_at(store, options(scratch), Arc::new(clock)).await.unwrap();
    drop(repository);
    let mut maker = Maker { repository: repository_at, source: scratch.join("source"), names: BTreeMap::new() };
    maker.saves().await;
    maker.repository.log().truncate(0, None).await.unwrap();
    maker.collects().await;
    json!({ "repository": maker.repository.id().to_string(), "names": maker.names })
}

struct Maker {
    repository: Repository,
    source: PathBuf,
    names: BTreeMap<String, Value>,
}

impl Maker {
    /// Names that share chunks, and names that will go.
    async fn saves(&mut self) {
        tree(&self.source);
        let tree = self.source.clone();
        let labels = [("loss", "0.25"), ("stage", "golden")].map(|(key, value)| (key.to_owned(), value.to_owned()));
        self.save("tree", &tree, SaveOptions { labels: labels.into(), ..SaveOptions::default() }).await;
        let facts = StepFacts::default().metric("loss", 0.125).unwrap().metric("acc", -2.5e-3).unwrap();
        let facts = facts.world_size(NonZeroU32::new(8).unwrap()).framework("PyTorch 2.9 \u{e9}").unwrap();
        let step = SaveOptions { facts, ..SaveOptions::default() };
        self.save("run-1/step-10", &tree.join("model.safetensors"), step).await;
        for number in [1, 2] {
            let path = tree.with_file_name(format!("state-{number}.safetensors"));
            put(&path, &state(number), 0o644);
            self.save(&format!("run-2/step-{number}"), &path, SaveOptions::default()).await;
        }
        for (gone, bytes) in [("gone/condemned", 1), ("gone/damaged", 2), ("gone/forgotten", 3), ("gone/purged", 4)] {
            let path = tree.with_file_name("gone");
            put(&path, &noise(bytes, 700), 0o600);
            self.save(gone, &path, SaveOptions::default()).await;
        }
    }

    /// What a collector and an interrupted writer leave.
    async fn collects(&mut self) {
        let (condemned, damaged) = (self.remove("gone/condemned").await, self.remove("gone/damaged").await);
        let (forgotten, purged) = (self.remove("gone/forgotten").await, self.remove("gone/purged").await);
        let tree = self.source.clone();
        put(&tree.join("small"), b"hello again", 0o640);
        settle(&tree);
        self.save("tree-2", &tree, SaveOptions::default()).await;
        self.repository.copy(&name("tree"), &name("best/so_far")).await.unwrap();
        self.names.insert("best/so_far".to_owned(), self.names["tree"].clone());

        let stalled = SessionId::random();
        let touched = self.act(Some(stalled), vec![Action::Open(stalled)]).await;
        self.act(None, vec![Action::Fence { session: stalled, touched }]).await;
        let collector = SessionId::random();
        self.act(Some(collector), vec![Action::Open(collector)]).await;
        self.act(Some(collector), vec![Action::Renew(collector)]).await;
        let at = self.act(Some(collector), vec![condemn(condemned, false)]).await;
        self.act(Some(collector), vec![Action::Pardon { pack: condemned.id, at }]).await;
        self.act(Some(collector), vec![condemn(condemned, false), condemn(damaged, true)]).await;
        self.purge(collector, forgotten).await;
        self.merge(collector).await;
        self.swap(collector).await;
        self.act(Some(collector), vec![Action::Close(collector)]).await;
        self.ranks().await;
        self.interrupted().await;
        self.purge(SessionId::random(), purged).await;

        let state = self.repository.state().await.unwrap();
        assert!(
            state.forgotten > 0 && state.purged.len() == 1 && state.condemned.len() == 2 && state.sessions.len() == 2
        );
        self.put(&Numbered::Snapshot.key(state.seq), state.seal()).await;
        let fixed = SaveOptions { cut: CutChoice::Fixed, ..SaveOptions::default() };
        self.save("late", &tree.join("sub/small-noise"), fixed).await;
    }

    async fn save(&mut self, to: &str, path: &Path, options: SaveOptions) {
        let (labels, facts) = (options.labels.clone(), options.facts.clone());
        let report = self.repository.save(path, &name(to), &options).await.unwrap();
        let form = if path.is_dir() { "folder" } else { "file" };
        let expected = json!({
            "manifest": report.manifest, "form": form, "labels": labels, "facts": facts, "chunks": report.chunks,
            "entries": listing(path),
        });
        self.names.insert(to.to_owned(), expected);
    }

    /// A step of two ranks, and one that waits for its second.
    async fn ranks(&mut self) {
        let ranks = NonZeroU32::new(2).unwrap();
        let (folders, whole) =
            (["rank-0", "rank-1"].map(|rank| self.source.with_file_name(rank)), self.source.with_file_name("ranks"));
        for (rank, folder) in (0..).zip(&folders) {
            for root in [folder, &whole] {
                fs::create_dir_all(root).unwrap();
                put(&root.join(format!("shard-{rank}")), &noise(20 + rank, 900), 0o644);
                put(&root.join("common"), b"of all ranks", 0o644);
                fs::set_permissions(root, fs::Permissions::from_mode(0o755)).unwrap();
                touch(root);
            }
        }
        for (to, rank) in [("run-3/step-1", 1), ("run-3/step-1", 0), ("run-3/step-2", 1)] {
            let options = PartOptions { rank, ranks, attempt: "4711.0".parse().unwrap() };
            let folder = &folders[rank as usize];
            let (to, save) = (name(to), SaveOptions::default());
            let report = self.repository.save_part(folder, &to, &options, &save).await.unwrap();
            assert_eq!(report.complete, to.as_str().ends_with('1') && rank == 0);
        }
        let value = self.repository.saved(&name("run-3/step-1")).await.unwrap().value;
        let labels = BTreeMap::<String, String>::new();
        let expected = json!({
            "manifest": value.manifest.to_string(), "form": "folder", "labels": labels, "facts": value.facts,
            "chunks": value.chunks, "entries": listing(&whole),
        });
        self.names.insert("run-3/step-1".to_owned(), expected);
    }

    /// Removes a name; returns the one pack that it was in.
    async fn remove(&mut self, gone: &str) -> PackRef {
        let saved = self.repository.saved(&name(gone)).await.unwrap();
        let now = RemoveOptions { now: true, ..RemoveOptions::default() };
        self.repository.remove_with(&[name(gone)], &now).await.unwrap();
        self.names.remove(gone).unwrap();
        assert_eq!(saved.map.packs.len(), 1);
        saved.map.packs[0]
    }

    async fn act(&self, session: Option<SessionId>, actions: Vec<Action>) -> u64 {
        self.repository.log().commit(session, |_| Ok(actions.clone())).await.unwrap().entry.unwrap()
    }

    async fn put(&self, key: &object_store::path::Path, object: bytes::Bytes) {
        self.repository.store().objects().put(key, object.into()).await.unwrap();
    }

    /// Condemns, purges and deletes a pack, under a session that is open or is opened and closed for it.
    async fn purge(&self, session: SessionId, pack: PackRef) {
        let guest = !self.repository.state().await.unwrap().sessions.contains_key(&session);
        if guest {
            self.act(Some(session), vec![Action::Open(session)]).await;
        }
        let at = self.act(Some(session), vec![condemn(pack, false)]).await;
        self.act(Some(session), vec![Action::Purge { pack: pack.id, at }]).await;
        self.repository.store().objects().delete(&layout::owned(Family::Pack, pack.id)).await.unwrap();
        let mut last = vec![Action::Deleted(vec![pack.id])];
        last.extend(guest.then_some(Action::Close(session)));
        self.act(Some(session), last).await;
    }

    /// All segments into one, without purged packs.
    async fn merge(&self, session: SessionId) {
        let (state, index) = self.repository.indexed_state().await.unwrap();
        let (mut packs, mut rows) = (Vec::new(), Vec::new());
        for (_, segment) in index.segments() {
            for (nth, pack) in segment.packs().enumerate() {
                if !state.purged.contains_key(&pack.id) {
                    let new = u32::try_from(packs.len()).unwrap();
                    let own = segment.rows().filter(|row| row.pack as usize == nth);
                    rows.extend(own.map(|row| Row { pack: new, ..row }));
                    packs.push(pack);
                }
            }
        }
        let new = vec![self.segment(session, &packs, rows).await];
        let old = state.segments.keys().copied().collect();
        self.act(Some(session), vec![Action::ReplaceSegments { old, new, built: state.seq }]).await;
    }

    async fn segment(&self, session: SessionId, packs: &[PackRef], rows: Vec<Row>) -> (SegmentId, SegmentInfo) {
        let (id, chunks) = (Owned::fresh(session), rows.len() as u64);
        let object = seal(Kind::Segment, &segment_bytes(packs, rows), false);
        let info = SegmentInfo { len: object.len() as u64, packs: packs.len() as u64, chunks, built: 0 };
        self.put(&layout::owned(Family::Index, id), object).await;
        (id, info)
    }

    /// A map written again under a new key, as repacking does.
    async fn swap(&self, session: SessionId) {
        let saved = self.repository.saved(&name("tree-2")).await.unwrap();
        let new = Owned::fresh(session);
        self.put(&layout::owned(Family::Map, new), saved.map.seal()).await;
        self.act(Some(session), vec![Action::SwapMap { old: saved.value.map_key, new }]).await;
    }

    /// A writer that uploaded and indexed a pack, and was heard of no more.
    async fn interrupted(&self) {
        let session = SessionId::random();
        self.act(Some(session), vec![Action::Open(session)]).await;
        let id: PackId = Owned::fresh(session);
        let (frame, mut layout) = (noise(9, 500), PackLayout::new());
        let mut bytes = pack_header().to_vec();
        layout.push(ChunkId::of(&frame), (Codec::Raw, None), 500, 500);
        bytes.extend(&frame);
        let tail = layout.finish().1;
        bytes.extend(&tail);
        let footer_len = u32::try_from(tail.len() as u64 - TRAILER_LEN).unwrap();
        let pack = PackRef { id, len: bytes.len() as u64, footer_len, chunks: 1 };
        self.put(&layout::owned(Family::Pack, id), bytes.into()).await;
        let row = Row { prefix: ChunkId::of(&frame).prefix(), pack: 0, ordinal: 0 };
        let (segment, info) = self.segment(session, &[pack], vec![row]).await;
        self.act(Some(session), vec![Action::AddSegment(segment, info)]).await;
    }
}

fn condemn(pack: PackRef, damaged: bool) -> Action {
    Action::Condemn { pack: pack.id, len: pack.len, damaged }
}

/// The tree that is saved.
fn tree(root: &Path) {
    fs::create_dir_all(root.join("sub/empty")).unwrap();
    put(&root.join("small"), b"hello", 0o640);
    put(&root.join("nothing"), b"", 0o644);
    put(&root.join("sub/script"), b"#!/bin/sh\necho towline\n", 0o755);
    put(&root.join("sub/small-noise"), &noise(5, 3000), 0o600);
    put(&root.join("sub-file-between"), b"sorts between sub and sub/", 0o644);
    put(&root.join(std::ffi::OsStr::from_bytes(b"not-\xff-utf8 100%")), b"x", 0o644);
    put(&root.join("model.safetensors"), &model(), 0o644);
    put(&root.join("weights.safetensors"), &weights(), 0o644);
    put(&root.join("counts.safetensors"), &counts(), 0o644);
    put(&root.join("text"), &text(), 0o644);
    // A distributed checkpoint, whose parts know their tensors, and a torch file.
    fs::create_dir(root.join("dcp")).unwrap();
    for file in ["dcp/.metadata", "dcp/__0_0.distcp", "dcp/__1_0.distcp", "views.pt"] {
        let written = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/checkpoints").join(file);
        put(&root.join(file), &fs::read(written).unwrap(), 0o644);
    }
    symlink("../elsewhere", root.join("sub/link")).unwrap();
    let holes = fs::File::create(root.join("holes")).unwrap();
    holes.set_len(2 << 20).unwrap();
    holes.write_all_at(&b"towline!".repeat(16 << 10), 1 << 20).unwrap();
    fs::set_permissions(root.join("holes"), fs::Permissions::from_mode(0o644)).unwrap();
    fs::set_permissions(root.join("sub/empty"), fs::Permissions::from_mode(0o700)).unwrap();
    settle(root);
}

pub(super) fn put(path: &Path, bytes: &[u8], mode: u32) {
    fs::write(path, bytes).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    touch(path);
}

/// Sets modes of folders and all times to what they are to be, the deepest first.
fn settle(root: &Path) {
    for folder in ["", "dcp", "sub"] {
        fs::set_permissions(root.join(folder), fs::Permissions::from_mode(0o755)).unwrap();
    }
    for path in ["holes", "sub/link", "sub/empty", "sub", "dcp", ""] {
        touch(&root.join(path));
    }
}

fn touch(path: &Path) {
    let time = rustix::fs::Timespec { tv_sec: i64::try_from(NOW).unwrap() - 60, tv_nsec: 123_456_789 };
    let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(rustix::fs::CWD, path, &times, rustix::fs::AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

/// Several types and shapes: rows, a scalar, small ones that share a chunk, an empty one, a gap, a tail; a part that does
/// not compress and is long enough for a page, and one that does.
fn model() -> Vec<u8> {
    let header = concat!(
        r#"{"__metadata__":{"format":"pt"},"#,
        r#""norm.bias":{"dtype":"F32","shape":[64],"data_offsets":[0,256]},"#,
        r#""norm.scale":{"dtype":"BF16","shape":[64],"data_offsets":[256,384]},"#,
        r#""step":{"dtype":"I64","shape":[],"data_offsets":[384,392]},"#,
        r#""none":{"dtype":"F16","shape":[0,7],"data_offsets":[392,392]},"#,
        r#""weight":{"dtype":"F32","shape":[300,64],"data_offsets":[392,77192]},"#,
        r#""mask":{"dtype":"BOOL","shape":[1000,300],"data_offsets":[77200,377200]},"#,
        r#""f8":{"dtype":"F8_E4M3","shape":[40000],"data_offsets":[377200,417200]}}"#,
    );
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.bytes());
    file.extend(noise(6, 77_192));
    file.extend([0; 8]);
    file.extend((0..300_000u32).map(|i| u8::from(i % 300 < i / 1000)));
    file.extend((0..40_000u32).map(|i| u8::from(i % 7 == 0)));
    file.extend(b"tail");
    file
}

/// A tensor whose numbers, in byte planes, are raw and Huffman-coded.
fn weights() -> Vec<u8> {
    let scattered = |n: u32| (n.wrapping_mul(2_654_435_761) >> 8) as f32 / 16_777_216.0 - 0.5;
    let weight = |n: u32| scattered(n) * scattered(n + 7);
    tensor("F32", 4000, (0..4000).flat_map(|n| weight(n).to_le_bytes()))
}

/// A tensor whose numbers, in byte planes, are in groups and all the same.
fn counts() -> Vec<u8> {
    let count = |n: u32| if n.is_multiple_of(9) { n.wrapping_mul(n) % 900 } else { 3 };
    tensor("I32", 4000, (0..4000).flat_map(|n| count(n).to_le_bytes()))
}

/// The weights of a training step, and their copy in 16 bits: the second step's are stored as differences to the first's, the
/// copies as derived from them. NaNs with payloads, both zeros and infinities are among them.
pub(super) fn state(step: u32) -> Vec<u8> {
    const COUNT: u32 = 256 << 10;
    let strange =
        [0x7fc0_0001, 0xffa0_0000, 0x0000_0000, 0x8000_0000, 0x7f80_0000, 0xff80_0000, 0x0000_0001, 0x8000_0001];
    let weight = |n: u32| {
        let moved = if n.wrapping_mul(2_654_435_761) >> 27 == 0 { step } else { 0 };
        let exponent = 120 + (n.wrapping_mul(n) >> 4 & 1);
        (n & 1) << 31 | exponent << 23 | (n & 3) << 21 | moved
    };
    let weight = |n: u32| strange.get(n as usize).map_or_else(|| weight(n), |bits| bits ^ (step - 1) << 1);
    let master: Vec<u8> = (0..COUNT).flat_map(|n| weight(n).to_le_bytes()).collect();
    let header = format!(
        r#"{{"copy":{{"dtype":"BF16","shape":[{COUNT}],"data_offsets":[0,{}]}},"w":{{"dtype":"F32","shape":[{COUNT}],"data_offsets":[{},{}]}}}}"#,
        2 * COUNT,
        2 * COUNT,
        6 * COUNT
    );
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &rounded(&master), &master].concat()
}

/// A file of one tensor.
fn tensor(dtype: &str, len: usize, numbers: impl Iterator<Item = u8>) -> Vec<u8> {
    let bytes: Vec<u8> = numbers.collect();
    let header =
        format!(r#"{{"t":{{"dtype":"{dtype}","shape":[{len}],"data_offsets":[0,{}]}}}}"#, bytes.len()).into_bytes();
    [&(header.len() as u64).to_le_bytes(), &*header, &bytes].concat()
}

/// More than a MiB that compresses well and is cut by its content.
fn text() -> Vec<u8> {
    let bits = noise(8, 12_000);
    let letters: Vec<u8> =
        bits.iter().flat_map(|byte| (0..8).map(move |bit| b"ab"[usize::from(byte >> bit & 1)])).collect();
    let mut text = Vec::new();
    for round in 0..13 {
        text.extend(format!("round {round}\n").bytes());
        text.extend(&letters);
    }
    text
}
