//! The bytes of a bundle may also be stored in another way: as zeros of the same tree, or by somebody who saw a step and saves
//! its content. That must neither stop a save or a sync, nor hide damage.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use object_store::ObjectStoreExt as _;
use towline::codec::Codec;
use towline::format::Frame;
use towline::ops::{RemoveOptions, RestoreOptions, SaveOptions, SyncOptions, sync};
use towline::repository::layout::{self, Family};
use towline::repository::{Located, NameScope, OpenOptions, Repository, Saved};
use towline::storage::{Location, StoreOptions, open};

use crate::data::{name, noise, tree_digest};
use crate::differences::{Fixture, file, stored_by};
use crate::predictions::{Training, predicting};

/// Numbers of the tensor: one piece, and a short one.
const LEN: usize = PIECE + 40_000;
const PIECE: usize = 256 << 10;

/// The bytes of the second bundle of a training: the short pieces of the weights and moments, one after another.
fn bundle(training: &Training) -> Vec<u8> {
    let moments = training.optimizer().into_iter().filter(|(_, dtype, _)| *dtype == "F32");
    training.model().into_iter().chain(moments).flat_map(|(_, _, bytes)| bytes[4 * PIECE..].to_vec()).collect()
}

/// Writes a file that has `bytes` as one chunk, and `padding`.
fn write_copy(folder: &Path, bytes: &[u8], padding: Vec<u8>) {
    fs::create_dir_all(folder).unwrap();
    let tensors = [("copy", "F32", bytes.to_vec()), ("x", "I64", padding)];
    fs::write(folder.join("copy.safetensors"), file(&tensors)).unwrap();
}

/// A run, of which somebody else saves the bundles before each step.
struct Copied {
    fixture: Fixture,
    training: Training,
}

impl Copied {
    fn new() -> Self {
        Self { fixture: Fixture::with_memory(256 << 20), training: Training::of(100, &[LEN]) }
    }

    /// Saves a step; the other one saves its content with `copier` before.
    async fn save(&mut self, step: u32, copier: Option<&SaveOptions>) {
        self.training.go_on();
        if let Some(options) = copier {
            self.copy(step, options).await;
        }
        self.save_own(step).await;
    }

    /// Saves the training as it is.
    async fn save_own(&self, step: u32) {
        let (folder, repository) = (self.fixture.path(step), self.fixture.open().await);
        self.training.write(&folder);
        repository.save(&folder, &name(&format!("run/step-{step}")), &predicting()).await.unwrap();
    }

    async fn copy(&self, step: u32, options: &SaveOptions) {
        let folder = self.fixture.dir.path().join(format!("copy-{step}"));
        write_copy(&folder, &bundle(&self.training), noise(5, 2 << 20));
        let saved = name(&format!("scratch/copy-{step}"));
        self.fixture.open().await.save(&folder, &saved, options).await.unwrap();
    }

    /// Flips a bit of the first frame of a step for which `is_hit` is true, and asserts that only `names` are found damaged.
    async fn assert_found(&self, step: u32, names: &[&str], is_hit: impl Fn(&Saved, &Located) -> bool) {
        let saved = self.fixture.saved(step).await;
        let frames = (0..saved.located_chunks()).map(|chunk| saved.locate(chunk).unwrap());
        let frame = frames.into_iter().find(|located| is_hit(&saved, located)).unwrap().place;
        let pack = layout::owned(Family::Pack, frame.pack);
        let mut bytes = self.fixture.objects.get(&pack).await.unwrap().bytes().await.unwrap().to_vec();
        bytes[usize::try_from(frame.offset + u64::from(frame.stored_len) / 2).unwrap()] ^= 4;
        self.fixture.objects.put(&pack, bytes.into()).await.unwrap();
        let report = self.fixture.verify(false).await;
        let found: BTreeSet<&str> =
            report.damaged.iter().flat_map(|damage| &damage.names).map(String::as_str).collect();
        assert_eq!(found.into_iter().collect::<Vec<_>>(), names, "{report:?}");
    }

    async fn assert_sound(&self, steps: u32) {
        for step in 1..=steps {
            self.fixture.assert_restores(&self.fixture.open().await, step).await;
        }
        assert!(self.fixture.verify(false).await.damaged.is_empty());
    }
}

/// Options of a saver with limited rights, who relies on nobody's bases.
fn limited() -> SaveOptions {
    let label_scope = NameScope::only(|name| name.as_str().starts_with("scratch/"));
    SaveOptions { label_scope, ..SaveOptions::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_stored_the_bytes_of_a_bundle_before_stops_no_save() {
    let mut run = Copied::new();
    for step in 1..=3 {
        run.save(step, Some(&SaveOptions::default())).await;
    }
    let saved = run.fixture.saved(3).await;
    assert_eq!(stored_by(&saved, Codec::Part), 6, "{:?}", saved.map.frames);
    let of_parts = saved.map.frames.iter().filter(|frame| frame.codec == Codec::Part).filter_map(Frame::base);
    let bases = of_parts.map(|base| saved.map.frames[base as usize].codec);
    assert_eq!(bases.filter(|codec| *codec == Codec::Planes).count(), 3, "the copies were not found");
    run.assert_sound(3).await;
    // The steps outlive the copies.
    for step in 1..=3 {
        run.fixture.open().await.remove(&name(&format!("scratch/copy-{step}"))).await.unwrap();
    }
    run.fixture.collect().await;
    run.assert_sound(3).await;
}

/// F8: "A damaged pack" is found, although the bytes of the bundle are stored in another way, too.
#[tokio::test(flavor = "multi_thread")]
async fn damaged_parts_of_a_bundle_that_is_stored_twice_are_found() {
    let mut run = Copied::new();
    for step in 1..=2 {
        run.save(step, None).await;
        run.copy(step, &limited()).await;
    }
    let len = u32::try_from(bundle(&run.training).len()).unwrap();
    let is_copied = |saved: &Saved, located: &Located| {
        let base = located.base.filter(|_| located.place.codec == Codec::Part);
        base.is_some_and(|base| saved.locate(base).unwrap().place.plain_len == len)
    };
    run.assert_found(2, &["run/step-2"], is_copied).await;
    // Saved again, it is whole.
    run.fixture.verify(true).await;
    let options = SaveOptions { reread: true, ..SaveOptions::default() };
    let again = run.fixture.open().await.save(&run.fixture.path(2), &name("again"), &options).await.unwrap();
    assert!(again.new_chunks > 0, "{again:?}");
    run.fixture.verify(true).await;
    run.assert_sound(2).await;
}

/// The bytes of a bundle were also stored as a difference whose base is gone, in a pack that stays for other chunks.
#[tokio::test(flavor = "multi_thread")]
async fn a_copy_without_its_base_hides_no_damage() {
    let mut run = Copied::new();
    for step in 1..=2 {
        run.save(step, None).await;
    }
    run.training.go_on();
    let (copied, mut similar) = (bundle(&run.training), bundle(&run.training));
    for (byte, noise) in similar.iter_mut().step_by(4).zip(noise(6, copied.len())) {
        *byte ^= noise & 15;
    }
    let folder = |name: &str| run.fixture.dir.path().join(name);
    write_copy(&folder("similar"), &similar, noise(7, 3 << 20));
    write_copy(&folder("copied"), &copied, noise(8, 3 << 20));
    write_copy(&folder("kept"), &[], noise(8, 3 << 20));
    let repository = run.fixture.open().await;
    for (from, to) in [("similar", "c/step-1"), ("copied", "c/step-2"), ("kept", "kept")] {
        repository.save(&folder(from), &name(to), &SaveOptions::default()).await.unwrap();
    }
    let difference = repository.saved(&name("c/step-2")).await.unwrap();
    assert_eq!(stored_by(&difference, Codec::Difference), 1, "{:?}", difference.map.frames);
    let options = RemoveOptions { now: true, ..RemoveOptions::default() };
    repository.remove_with(&[name("c/step-1"), name("c/step-2")], &options).await.unwrap();
    run.fixture.collect().await;
    run.save_own(3).await;
    run.save(4, None).await;
    run.assert_sound(4).await;
    let len = u32::try_from(copied.len()).unwrap();
    let is_predicted = |_: &Saved, located: &Located| {
        matches!(located.place.codec, Codec::Bundle(1..)) && located.place.plain_len == len
    };
    run.assert_found(4, &["run/step-4"], is_predicted).await;
}

/// A bundle of zeros and a chunk of zeros have the same bytes, whichever comes first.
#[tokio::test(flavor = "multi_thread")]
async fn zeros_are_bundles_and_chunks_at_once() {
    let zeros = |len: usize| vec![0; 4 * len];
    let small = ["model.b.w", "opt.b.w.exp_avg", "opt.b.w.exp_avg_sq"].map(|name| (name, zeros(PIECE / 16)));
    let large = ["model.a.w", "opt.a.w.exp_avg", "opt.a.w.exp_avg_sq"].map(|name| (name, zeros(3 * PIECE / 16)));
    let alone = [("model.c.w", zeros(3 * PIECE / 16))];
    let orders = [
        [&small[..], &large, &alone],
        [&large, &small, &alone],
        [&alone, &small, &large],
        [&alone, &large, &small],
        [&small, &alone, &large],
        [&small, &alone, &[]],
        [&alone, &small, &[]],
    ];
    for (order, number) in orders.into_iter().zip(1..) {
        let fixture = Fixture::with_memory(256 << 20);
        let mut tensors: Vec<_> = order.concat().into_iter().map(|(name, bytes)| (name, "F32", bytes)).collect();
        tensors.push(("x", "I64", noise(9, 2 << 20)));
        let folder = fixture.path(number);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("state.safetensors"), file(&tensors)).unwrap();
        for run in [format!("run/step-{number}"), format!("other-{number}/step-1")] {
            fixture.open().await.save(&folder, &name(&run), &predicting()).await.unwrap();
        }
        assert!(stored_by(&fixture.saved(number).await, Codec::Part) > 0);
        fixture.assert_restores(&fixture.open().await, number).await;
        assert!(fixture.verify(false).await.damaged.is_empty());
    }
}

/// Weights and momentum of one scale are shorter as one chunk of planes than as a bundle.
#[tokio::test(flavor = "multi_thread")]
async fn a_bundle_may_travel_alone() {
    let (fixture, other) = (Fixture::with_memory(256 << 20), Fixture::with_memory(256 << 20));
    // From a directory, a sync need not bring bases.
    let location = Location::directory(fixture.dir.path().join("repository")).unwrap();
    let store = open(&location, &StoreOptions { create: true, ..StoreOptions::default() }).await.unwrap();
    let options = OpenOptions { cache: Some(fixture.dir.path().join("source")), ..OpenOptions::default() };
    let from = Repository::create(store, options).await.unwrap().0;
    let numbers = |seed: u64| -> Vec<f32> {
        let bytes = noise(seed, 8192 * 12);
        let uniform = |bytes: &[u8]| f32::from(i16::from_le_bytes([bytes[0], bytes[1]])) / 32768.0;
        bytes.chunks_exact(12).map(|bytes| bytes.chunks_exact(2).map(uniform).sum()).collect()
    };
    let (mut weights, mut momentum) = (numbers(1), numbers(2));
    for step in 1..=3 {
        for ((weight, momentum), gradient) in weights.iter_mut().zip(&mut momentum).zip(numbers(10 + u64::from(step))) {
            *momentum = 0.9 * *momentum + 0.4359 * gradient;
            *weight -= 0.001 * *momentum;
        }
        let bytes = |numbers: &[f32]| numbers.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let tensors = [
            ("model.w", "F32", bytes(&weights)),
            ("optimizer.state.0.momentum_buffer", "F32", bytes(&momentum)),
            ("x", "I64", noise(9, 2 << 20)),
        ];
        let folder = fixture.path(step);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("state.safetensors"), file(&tensors)).unwrap();
        let saved = name(&format!("run/step-{step}"));
        from.save(&folder, &saved, &predicting()).await.unwrap();
    }
    let to = other.open().await;
    for step in [2, 3, 1] {
        sync(&from, &to, &[name(&format!("run/step-{step}"))], &SyncOptions::default()).await.unwrap();
        let dest = tempfile::tempdir().unwrap();
        to.restore(&name(&format!("run/step-{step}")), None, dest.path(), &RestoreOptions::default()).await.unwrap();
        assert_eq!(tree_digest(dest.path()), tree_digest(&fixture.path(step)));
    }
    let arrived = other.saved(2).await;
    assert_eq!(stored_by(&arrived, Codec::Part), 2, "{:?}", arrived.map.frames);
    let bundle = arrived.map.frames.iter().filter(|frame| frame.codec == Codec::Part).find_map(Frame::base).unwrap();
    assert_eq!(arrived.map.frames[bundle as usize].codec, Codec::Planes, "it did not travel alone");
    assert!(other.verify(false).await.damaged.is_empty());
}
