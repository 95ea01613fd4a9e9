//! Runs of checkpoints: steps are stored as differences to a key step, 16-bit copies as what they are derived from; whatever
//! becomes of the names around it, a step comes back bit for bit.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::TryStreamExt as _;
use object_store::memory::InMemory;
use object_store::{ObjectStore, ObjectStoreExt as _};
use towline::codec::{Codec, Compression, rounded};
use towline::error::ErrorKind;
use towline::metrics::Metric;
use towline::ops::{
    CollectOptions, CutChoice, RestoreOptions, SaveOptions, SaveReport, SyncOptions, VerifyOptions, VerifyReport, sync,
};
use towline::repository::layout::{self, Family};
use towline::repository::{OpenOptions, Repository, Saved};
use towline::storage::{Location, Store, StoreOptions, open};

use crate::data::{name, noise, tree_digest};

/// Elements of each tensor: a chunk of 32-bit ones.
const LEN: usize = 256 << 10;

pub(crate) struct Fixture {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) objects: Arc<dyn ObjectStore>,
    memory: u64,
}

impl Fixture {
    pub(crate) fn new() -> Self {
        Self::with_memory(64 << 20)
    }

    /// Its repositories are opened with so much memory.
    pub(crate) fn with_memory(memory: u64) -> Self {
        Self { dir: tempfile::tempdir().unwrap(), objects: Arc::new(InMemory::new()), memory }
    }

    /// A handle that knows nothing yet.
    pub(crate) async fn open(&self) -> Repository {
        let options = OpenOptions {
            cache: Some(self.dir.path().join("cache")),
            memory: Some(self.memory),
            ..OpenOptions::default()
        };
        Repository::create(Store::from_objects(Arc::clone(&self.objects)), options).await.unwrap().0
    }

    pub(crate) fn path(&self, number: u32) -> PathBuf {
        self.dir.path().join(format!("step-{number}"))
    }

    /// The folder of a step as a trainer writes it: its files are called otherwise in each.
    pub(crate) fn write(&self, number: u32) -> PathBuf {
        let path = self.path(number);
        fs::create_dir_all(&path).unwrap();
        let weights = weights(number);
        // The copy stands before what it is derived from, and in a file of its own.
        let copies = [("w", "BF16", rounded(&weights)), ("v", "BF16", rounded(&weights_of(77, number)))];
        fs::write(path.join(format!("copy-{number}.safetensors")), file(&copies)).unwrap();
        let state = [
            ("step", "I64", u64::from(number).to_le_bytes().to_vec()),
            ("exp_avg", "F32", noise(number.into(), 4 * LEN)),
            ("w", "F32", weights),
            ("v", "F32", weights_of(77, number)),
        ];
        fs::write(path.join(format!("state-{number}.safetensors")), file(&state)).unwrap();
        path
    }

    pub(crate) async fn save(&self, number: u32) -> SaveReport {
        self.save_with(number, &SaveOptions::default()).await
    }

    async fn save_with(&self, number: u32, options: &SaveOptions) -> SaveReport {
        let path = self.write(number);
        self.open().await.save(&path, &name(&format!("run/step-{number}")), options).await.unwrap()
    }

    pub(crate) async fn saved(&self, number: u32) -> Saved {
        self.open().await.saved(&name(&format!("run/step-{number}"))).await.unwrap()
    }

    /// Restores a step into an empty folder; returns the stored bytes read.
    pub(crate) async fn assert_restores(&self, from: &Repository, number: u32) -> u64 {
        let dest = tempfile::tempdir().unwrap();
        let saved = name(&format!("run/step-{number}"));
        let report = from.restore(&saved, None, dest.path(), &RestoreOptions::default()).await.unwrap();
        assert_eq!(tree_digest(dest.path()), tree_digest(&self.path(number)));
        report.fetched_bytes
    }

    pub(crate) async fn verify(&self, repair: bool) -> VerifyReport {
        let options = VerifyOptions { data: true, repair, ..VerifyOptions::default() };
        self.open().await.verify(None, &options).await.unwrap()
    }

    /// Collects until nothing is left to do.
    pub(crate) async fn collect(&self) {
        let options = CollectOptions::at_once();
        for _ in 0..2 {
            self.open().await.collect(&options).await.unwrap();
        }
    }

    pub(crate) async fn bytes(&self) -> u64 {
        let listed: Vec<_> = self.objects.list(None).try_collect().await.unwrap();
        listed.iter().map(|meta| meta.size).sum()
    }
}

pub(crate) fn weights(step: u32) -> Vec<u8> {
    weights_of(1, step)
}

/// Weights that look trained, and move a little with each step.
fn weights_of(seed: u64, step: u32) -> Vec<u8> {
    let noise = noise(seed, 2 * LEN);
    let mut out = Vec::with_capacity(4 * LEN);
    for (n, pair) in noise.as_chunks::<2>().0.iter().enumerate() {
        let start = f32::from(i16::from_le_bytes(*pair)) * 1e-6;
        let moved = start * (1.0 + step as f32 * 1e-6 * ((n * 31 % 97) as f32 - 48.0));
        out.extend(moved.to_le_bytes());
    }
    out
}

pub(crate) fn file(tensors: &[(&str, &str, Vec<u8>)]) -> Vec<u8> {
    let (mut header, mut at) = (Vec::new(), 0);
    for (name, dtype, bytes) in tensors {
        let width = match *dtype {
            "BF16" => 2,
            "F32" => 4,
            _ => 8,
        };
        let end = at + bytes.len();
        let shape = bytes.len() / width;
        header.push(format!(r#""{name}":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{at},{end}]}}"#));
        at = end;
    }
    let header = format!("{{{}}}", header.join(","));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.into_bytes());
    tensors.iter().for_each(|(.., bytes)| file.extend(bytes));
    file
}

/// How many of a tree's chunks are stored by a codec.
pub(crate) fn stored_by(saved: &Saved, codec: Codec) -> usize {
    saved.map.frames[..saved.map.chunks()].iter().filter(|frame| frame.codec == codec).count()
}

/// D1: "A step of a run is stored as differences to chunks of earlier steps [...] What is restored is the same, bit for
/// bit."
#[tokio::test(flavor = "multi_thread")]
async fn a_step_is_stored_as_what_changed() {
    let fixture = Fixture::new();
    let first = fixture.save(1).await;
    let second = fixture.save(2).await;
    assert!(second.stored_bytes < first.stored_bytes * 3 / 4, "{} after {}", second.stored_bytes, first.stored_bytes);
    let (key, saved) = (fixture.saved(1).await, fixture.saved(2).await);
    assert_eq!((stored_by(&key, Codec::Derived), stored_by(&key, Codec::Difference)), (2, 0));
    assert_eq!((stored_by(&saved, Codec::Derived), stored_by(&saved, Codec::Difference)), (2, 2));
    assert_eq!((key.value.behind, saved.value.behind), (0, 1));
    // The base of a difference is a chunk that the tree does not have; what is derived has its base in the tree.
    assert_eq!((key.map.further.len(), saved.map.further.len()), (0, 2));

    let repository = fixture.open().await;
    let alone = fixture.assert_restores(&repository, 1).await;
    let read = fixture.assert_restores(&repository, 2).await;
    assert!(read < alone * 19 / 10, "{read} of {alone}");
}

/// D1: "A chunk needs at most two others [...] Every K-th save [...] is stored whole".
#[tokio::test(flavor = "multi_thread")]
async fn key_steps_return_and_differences_reach_back_to_one() {
    let fixture = Fixture::new();
    let options = SaveOptions { key_every: Some(3.try_into().unwrap()), ..SaveOptions::default() };
    for number in 1..=5 {
        fixture.save_with(number, &options).await;
    }
    let mut behind = Vec::new();
    for number in 1..=5 {
        let saved = fixture.saved(number).await;
        behind.push(saved.value.behind);
        // However far from the key step: a base is no difference itself.
        let bases = saved.map.frames.iter().filter(|frame| frame.codec == Codec::Difference);
        for base in bases.map(|frame| frame.base().unwrap()) {
            assert_eq!(saved.map.frames[base as usize].codec.hops(), 0, "step {number}");
        }
        fixture.assert_restores(&fixture.open().await, number).await;
    }
    assert_eq!(behind, [0, 1, 2, 0, 1]);
    let key = fixture.saved(1).await.manifest.chunks.ids;
    let of_third = fixture.saved(3).await.map.further;
    assert!(of_third.iter().all(|(id, _)| key.contains(id)), "step 3 is a difference to step 1, not to step 2");
}

/// D1: "16-bit tensors are stored whole again once the differences of a step exceed 36 % of the size of their bases".
#[tokio::test(flavor = "multi_thread")]
async fn short_numbers_start_anew_once_they_got_far() {
    let fixture = Fixture::new();
    let repository = fixture.open().await;
    let mut saved = Vec::new();
    for number in 1..=4u32 {
        let far: Vec<u8> = weights_of(1, 1000 * number);
        let path = fixture.dir.path().join(format!("{number}.safetensors"));
        fs::write(&path, file(&[("w", "BF16", rounded(&far))])).unwrap();
        let step = name(&format!("short/step-{number}"));
        repository.save(&path, &step, &SaveOptions::default()).await.unwrap();
        saved.push(repository.saved(&step).await.unwrap());
        let dest = tempfile::tempdir().unwrap();
        repository.restore(&step, None, dest.path(), &RestoreOptions::default()).await.unwrap();
        let restored = dest.path().join(path.file_name().unwrap());
        assert!(fs::read(restored).unwrap() == fs::read(&path).unwrap());
    }
    let differences: Vec<usize> = saved.iter().map(|saved| stored_by(saved, Codec::Difference)).collect();
    assert_eq!(differences, [0, 1, 0, 1]);
    assert!(saved[2].manifest.chunks.ids.contains(&saved[3].map.further[0].0), "the third is the fourth's base");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_compression_or_parent_nothing_is_a_difference() {
    let fixture = Fixture::new();
    let off = SaveOptions { compression: Compression::Off, ..SaveOptions::default() };
    let alone = SaveOptions { key_every: Some(1.try_into().unwrap()), ..SaveOptions::default() };
    fixture.save(1).await;
    fixture.save_with(2, &off).await;
    let saved = fixture.saved(2).await;
    assert_eq!((stored_by(&saved, Codec::Difference), stored_by(&saved, Codec::Derived)), (0, 0));
    fixture.save_with(3, &alone).await;
    assert_eq!(stored_by(&fixture.saved(3).await, Codec::Difference), 0);
    for number in 1..=3 {
        fixture.assert_restores(&fixture.open().await, number).await;
    }
}

/// D2: "Removing or expiring a name never deletes chunks that other names are decoded from; a collect frees the rest of
/// it."
#[tokio::test(flavor = "multi_thread")]
async fn a_key_step_may_go_and_what_needs_it_stays() {
    let fixture = Fixture::new();
    for number in 1..=3 {
        fixture.save(number).await;
    }
    let before = fixture.bytes().await;
    fixture.open().await.remove(&name("run/step-1")).await.unwrap();
    fixture.collect().await;
    assert!(fixture.bytes().await < before, "the key step's own state is freed");
    for number in 2..=3 {
        fixture.assert_restores(&fixture.open().await, number).await;
    }
    assert!(fixture.verify(false).await.damaged.is_empty());

    // The next step still finds what to be a difference to.
    fixture.save(4).await;
    assert_eq!(stored_by(&fixture.saved(4).await, Codec::Difference), 2);
    fixture.open().await.remove(&name("run/step-2")).await.unwrap();
    fixture.open().await.remove(&name("run/step-3")).await.unwrap();
    fixture.collect().await;
    fixture.assert_restores(&fixture.open().await, 4).await;
}

/// A chunk that is here only as a difference is here: with its base.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_stored_as_a_difference_is_not_stored_again() {
    let fixture = Fixture::new();
    fixture.save(1).await;
    fixture.save(2).await;
    let again = fixture.open().await.save(&fixture.path(2), &name("elsewhere"), &SaveOptions::default()).await.unwrap();
    assert_eq!(again.new_chunks, 0);
    for gone in ["run/step-1", "run/step-2"] {
        fixture.open().await.remove(&name(gone)).await.unwrap();
    }
    fixture.collect().await;
    let dest = tempfile::tempdir().unwrap();
    let options = RestoreOptions::default();
    fixture.open().await.restore(&name("elsewhere"), None, dest.path(), &options).await.unwrap();
    assert_eq!(tree_digest(dest.path()), tree_digest(&fixture.path(2)));
}

/// D2: "A sync copies the bases that the destination lacks and reads those that it has there."
#[tokio::test(flavor = "multi_thread")]
async fn a_sync_moves_differences_as_they_are_and_bases_once() {
    let (fixture, other) = (Fixture::new(), Fixture::new());
    for number in 1..=3 {
        fixture.save(number).await;
    }
    let (from, to) = (fixture.open().await, other.open().await);
    let read = |from: &Repository| from.store().counters().get(Metric::GetBytes);
    let only_second = sync(&from, &to, &[name("run/step-2")], &SyncOptions::default()).await.unwrap();
    // Without the step that it is a difference to, what of that it needs moves along.
    let second = fixture.saved(2).await;
    assert_eq!(only_second.new_chunks, second.map.frames.len() as u64);
    fixture.assert_restores(&other.open().await, 2).await;

    let before = read(&from);
    let third = sync(&from, &to, &[name("run/step-3")], &SyncOptions::default()).await.unwrap();
    let saved = fixture.saved(3).await;
    let own: u64 = saved.map.frames[..saved.map.chunks()].iter().map(|frame| u64::from(frame.stored_len)).sum();
    assert_eq!(third.moved_bytes + third.skipped_bytes, own);
    assert!(third.skipped_bytes < 1000, "only what says where the tensors are is the same");
    assert!(read(&from) - before < own + own / 50 + 20_000, "{} read for {own}", read(&from) - before);
    fixture.assert_restores(&other.open().await, 3).await;
    assert!(other.verify(false).await.damaged.is_empty());
    sync(&from, &to, &[], &SyncOptions::default()).await.unwrap();
    fixture.assert_restores(&other.open().await, 1).await;
}

/// D4: "`settle` stores a step without others".
#[tokio::test(flavor = "multi_thread")]
async fn a_settled_step_needs_no_other_and_stays_what_it_is() {
    let (fixture, alone) = (Fixture::new(), Fixture::new());
    for number in 1..=3 {
        fixture.save(number).await;
    }
    let (third, progress) = (name("run/step-3"), towline::progress::Progress::default());
    let before = fixture.saved(3).await;
    let settled = fixture.open().await.settle(&third, &progress).await.unwrap();
    let own = alone.open().await.save(&fixture.path(3), &name("alone"), &SaveOptions::default()).await.unwrap();
    let [read, now] = settled.read_bytes;
    assert!(settled.chunks > 0 && read > now && now <= own.stored_bytes * 102 / 100, "{settled:?}, {own:?}");
    let saved = fixture.saved(3).await;
    assert!(saved.map.further.is_empty() && stored_by(&saved, Codec::Difference) == 0);
    assert!(stored_by(&saved, Codec::Derived) > 0, "what derives from the step itself still does");
    assert_eq!((saved.value.version, saved.value.manifest), (before.value.version, before.value.manifest));
    let fetched = fixture.assert_restores(&fixture.open().await, 3).await;
    assert!(fetched <= own.stored_bytes * 102 / 100, "{fetched}");
    // Again there is nothing to do; the next step is a difference to this one.
    let again = fixture.open().await.settle(&third, &progress).await.unwrap();
    assert_eq!((again.chunks, again.read_bytes), (0, [now, now]));
    fixture.save(4).await;
    let next = fixture.saved(4).await;
    assert!(stored_by(&next, Codec::Difference) > 0);
    assert!(next.map.further.iter().all(|(id, _)| saved.manifest.chunks.ids.contains(id)));
    fixture.collect().await;
    for number in 1..=4 {
        fixture.assert_restores(&fixture.open().await, number).await;
    }
    assert!(fixture.verify(false).await.damaged.is_empty());
}

/// D4: "From a directory, `sync` does the same".
#[tokio::test(flavor = "multi_thread")]
async fn a_sync_from_a_directory_moves_a_step_as_if_it_were_stored_alone() {
    let (fixture, alone, as_stored) = (Fixture::new(), Fixture::new(), Fixture::new());
    let location = Location::directory(fixture.dir.path().join("repository")).unwrap();
    let store = open(&location, &StoreOptions { create: true, ..StoreOptions::default() }).await.unwrap();
    let options = OpenOptions { cache: Some(fixture.dir.path().join("source")), ..OpenOptions::default() };
    let from = Repository::create(store, options).await.unwrap().0;
    for number in 1..=3 {
        let path = fixture.write(number);
        from.save(&path, &name(&format!("run/step-{number}")), &SaveOptions::default()).await.unwrap();
    }
    let dry = SyncOptions { dry_run: true, ..SyncOptions::default() };
    let third = [name("run/step-3")];
    let to = fixture.open().await;
    let planned = sync(&from, &to, &third, &dry).await.unwrap();
    let moved = sync(&from, &to, &third, &SyncOptions::default()).await.unwrap();
    let own = alone.open().await.save(&fixture.path(3), &name("alone"), &SaveOptions::default()).await.unwrap();
    assert!(moved.moved_bytes <= own.stored_bytes * 102 / 100, "{moved:?}, {own:?}");
    assert!(planned.moved_bytes.abs_diff(moved.moved_bytes) * 1000 <= moved.moved_bytes, "{planned:?} {moved:?}");
    assert!(fixture.saved(3).await.map.further.is_empty(), "no base came");
    fixture.assert_restores(&fixture.open().await, 3).await;
    let again = sync(&from, &to, &third, &SyncOptions::default()).await.unwrap();
    assert_eq!((again.moved_bytes, again.new_chunks), (0, 0));
    // The step that they are to makes the others small, as they are stored.
    let all = sync(&from, &to, &[], &SyncOptions::default()).await.unwrap();
    assert!(all.new_chunks > 0 && fixture.verify(false).await.damaged.is_empty());
    for number in 1..=3 {
        fixture.assert_restores(&fixture.open().await, number).await;
    }
    let options = SyncOptions { as_stored: true, ..SyncOptions::default() };
    let to = as_stored.open().await;
    let whole = sync(&from, &to, &third, &options).await.unwrap();
    assert!(whole.moved_bytes > moved.moved_bytes * 5 / 4, "{whole:?}, {moved:?}");
    assert!(!as_stored.saved(3).await.map.further.is_empty());
}

/// D3: "`verify --data` names every name and tensor whose bytes depend on a damaged chunk, and no other; restoring them
/// is exit 4. Saving the content of the base again, then `verify --repair`, heals all of them."
#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_base_is_told_for_what_it_hits_and_heals() {
    let fixture = Fixture::new();
    for number in 1..=3 {
        fixture.save(number).await;
    }
    // The chunk of `v` in the key step.
    let key = fixture.saved(1).await;
    let wanted = towline::id::ChunkId::of(&weights_of(77, 1));
    let at = key.manifest.chunks.ids.iter().position(|id| *id == wanted).unwrap();
    let frame = key.map.frames[at];
    let pack = layout::owned(Family::Pack, key.map.pack(&frame).unwrap().id);
    let mut bytes = fixture.objects.get(&pack).await.unwrap().bytes().await.unwrap().to_vec();
    bytes[usize::try_from(frame.offset).unwrap() + 5000] ^= 4;
    fixture.objects.put(&pack, bytes.into()).await.unwrap();

    let report = fixture.verify(false).await;
    let told: Vec<_> =
        report.damaged.iter().map(|damage| (damage.names.as_slice(), damage.tensors.as_slice())).collect();
    let names = ["run/step-1", "run/step-2", "run/step-3"].map(String::from);
    let hit =
        |n: u32| [format!("run/step-{n}:copy-{n}.safetensors v"), format!("run/step-{n}:state-{n}.safetensors v")];
    let tensors = [1, 2, 3].map(hit).concat();
    assert_eq!(told, [(names.as_slice(), tensors.as_slice())], "{report:?}");
    for number in 1..=3 {
        let dest = tempfile::tempdir().unwrap();
        let saved = name(&format!("run/step-{number}"));
        let error =
            fixture.open().await.restore(&saved, None, dest.path(), &RestoreOptions::default()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Damaged);
    }

    // Saved again, the key step is whole; and with it what is a difference to it.
    fixture.verify(true).await;
    let again = SaveOptions { reread: true, ..SaveOptions::default() };
    fixture.save_with(1, &again).await;
    fixture.verify(true).await;
    assert!(fixture.verify(false).await.damaged.is_empty());
    for number in 1..=3 {
        fixture.assert_restores(&fixture.open().await, number).await;
    }
}

/// D1: "If the previous step cannot be read, the save takes more space and succeeds."
#[tokio::test(flavor = "multi_thread")]
async fn a_parent_that_is_gone_or_broken_is_done_without() {
    let fixture = Fixture::new();
    fixture.save(1).await;
    let key = fixture.saved(1).await;
    for pack in &key.map.packs {
        fixture.objects.delete(&layout::owned(Family::Pack, pack.id)).await.unwrap();
    }
    // A repair tells the log that they cannot be relied on.
    fixture.verify(true).await;
    fixture.save(2).await;
    assert_eq!(stored_by(&fixture.saved(2).await, Codec::Difference), 0);
    fixture.assert_restores(&fixture.open().await, 2).await;
    fixture.objects.delete(&layout::owned(Family::Map, key.value.map_key)).await.unwrap();
    fixture.open().await.remove(&name("run/step-2")).await.unwrap();
    fixture.save(3).await;
    fixture.assert_restores(&fixture.open().await, 3).await;
    let told = SaveOptions { base: Some(name("run/step-1")), ..SaveOptions::default() };
    fixture.save_with(4, &told).await;
    fixture.assert_restores(&fixture.open().await, 4).await;
}

/// A frame of another chunk, or of none, under a base's place is damage, never wrong bytes.
#[tokio::test(flavor = "multi_thread")]
async fn bases_are_checked_like_everything_else() {
    let fixture = Fixture::new();
    fixture.save(1).await;
    fixture.save(2).await;
    let mut saved = fixture.saved(2).await;
    let (a, b) = (saved.map.further[0], saved.map.further[1]);
    (saved.map.further[0], saved.map.further[1]) = (b, a);
    let object = saved.map.seal();
    fixture.objects.put(&layout::owned(Family::Map, saved.value.map_key), object.into()).await.unwrap();
    let dest = tempfile::tempdir().unwrap();
    let restored =
        fixture.open().await.restore(&name("run/step-2"), None, dest.path(), &RestoreOptions::default()).await;
    assert_eq!(restored.unwrap_err().kind(), ErrorKind::Damaged);
    assert!(!fixture.verify(false).await.damaged.is_empty());
    assert!(empty(dest.path()), "nothing of a damaged file is left");
}

fn empty(folder: &Path) -> bool {
    fs::read_dir(folder).unwrap().all(|entry| entry.unwrap().file_name().to_string_lossy().starts_with("copy"))
}

/// A copy whose base is gone must not stand in the way of one whose base is here.
#[tokio::test(flavor = "multi_thread")]
async fn a_difference_without_its_base_is_stored_again_as_another() {
    let fixture = Fixture::new();
    fixture.save(1).await;
    fixture.save(2).await;
    for pack in &fixture.saved(1).await.map.packs {
        fixture.objects.delete(&layout::owned(Family::Pack, pack.id)).await.unwrap();
    }
    fixture.verify(true).await;
    let alone = SaveOptions { key_every: Some(1.try_into().unwrap()), ..SaveOptions::default() };
    fixture.save_with(5, &alone).await;
    fixture.open().await.save(&fixture.path(2), &name("run/step-6"), &SaveOptions::default()).await.unwrap();
    assert_eq!(stored_by(&fixture.saved(6).await, Codec::Difference), 2);
    fixture.verify(true).await;
    assert!(fixture.verify(false).await.damaged.iter().all(|damage| !damage.names.contains(&"run/step-2".to_owned())));
    fixture.assert_restores(&fixture.open().await, 2).await;
}

/// Zeros are alike whatever their type: what is derived must not be what something else is derived from.
#[tokio::test(flavor = "multi_thread")]
async fn zeros_of_many_shapes_are_saved() {
    let fixture = Fixture::new();
    let path = fixture.path(1);
    fs::create_dir_all(&path).unwrap();
    let zeros = |width: usize, len: usize| vec![0; width * len];
    let tensors = [
        ("a16", "BF16", zeros(2, LEN)),
        ("a32", "F32", zeros(4, LEN)),
        ("b16", "BF16", zeros(2, LEN / 2)),
        ("b32", "F32", zeros(4, LEN / 2)),
    ];
    fs::write(path.join("zeros.safetensors"), file(&tensors)).unwrap();
    fixture.open().await.save(&path, &name("run/step-1"), &SaveOptions::default()).await.unwrap();
    fixture.assert_restores(&fixture.open().await, 1).await;
}

/// A file that is not read again may be cut otherwise than its tensors would tell.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_read_again_and_was_cut_otherwise_is_no_master() {
    let fixture = Fixture::new();
    let path = fixture.path(1);
    fs::create_dir_all(&path).unwrap();
    let masters = noise(3, 3 * 4 * LEN);
    fs::write(path.join("a.safetensors"), file(&[("w", "F32", masters.clone())])).unwrap();
    // Recorded is only what was settled before the save began.
    std::thread::sleep(Duration::from_millis(50));
    let by_content = SaveOptions { cut: CutChoice::Content, ..SaveOptions::default() };
    fixture.open().await.save(&path, &name("run/step-1"), &by_content).await.unwrap();
    fs::write(path.join("b.safetensors"), file(&[("w", "BF16", rounded(&masters))])).unwrap();
    fixture.open().await.save(&path, &name("run/step-1"), &SaveOptions::default()).await.unwrap();
    fixture.assert_restores(&fixture.open().await, 1).await;
    // All read again, it is one.
    let reread = SaveOptions { reread: true, ..SaveOptions::default() };
    fixture.open().await.save(&path, &name("elsewhere"), &reread).await.unwrap();
}

/// What is derived is short: one read of a pack must not bring all that its chunks are derived from.
#[tokio::test(flavor = "multi_thread")]
async fn more_masters_than_memory_are_verified() {
    let fixture = Fixture::new();
    let path = fixture.path(1);
    fs::create_dir_all(&path).unwrap();
    let masters = noise(3, 4 * 72 * LEN);
    fs::write(path.join("a.safetensors"), file(&[("w", "BF16", rounded(&masters))])).unwrap();
    fs::write(path.join("b.safetensors"), file(&[("w", "F32", masters)])).unwrap();
    fixture.open().await.save(&path, &name("run/step-1"), &SaveOptions::default()).await.unwrap();
    assert_eq!(stored_by(&fixture.saved(1).await, Codec::Derived), 72);
    let report = fixture.verify(false).await;
    assert!(report.damaged.is_empty(), "{report:?}");
}

/// A map that names another chunk as a base than the pack does is damage, though each chunk is where it says.
#[tokio::test(flavor = "multi_thread")]
async fn a_map_with_bases_mixed_up_is_told() {
    let fixture = Fixture::new();
    fixture.save(1).await;
    fixture.save(2).await;
    let mut saved = fixture.saved(2).await;
    let differences: Vec<usize> =
        (0..saved.map.frames.len()).filter(|&at| saved.map.frames[at].codec == Codec::Difference).collect();
    let (a, b) = (saved.map.frames[differences[0]].base, saved.map.frames[differences[1]].base);
    (saved.map.frames[differences[0]].base, saved.map.frames[differences[1]].base) = (b, a);
    let object = saved.map.seal();
    fixture.objects.put(&layout::owned(Family::Map, saved.value.map_key), object.into()).await.unwrap();
    let told = fixture.verify(true).await.damaged;
    assert_eq!(told.iter().flat_map(|damage| &damage.names).collect::<Vec<_>>(), ["run/step-2"]);
    fixture.assert_restores(&fixture.open().await, 2).await;
}
