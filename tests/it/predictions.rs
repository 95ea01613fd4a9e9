//! Runs that save each step: weights and second moments are predicted from the step before; whatever becomes of the names around
//! it, a step comes back bit for bit.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use object_store::ObjectStoreExt as _;
use towline::codec::{Codec, Compression, STEPS_MAX};
use towline::error::ErrorKind;
use towline::ops::{PartOptions, RestoreOptions, SaveOptions, SaveReport, SyncOptions, sync};
use towline::policy::Labels;
use towline::progress::Progress;
use towline::repository::layout::{self, Family};
use towline::repository::{OpenOptions, Repository};
use towline::storage::{Location, Store, StoreOptions, open};

use crate::data::{name, noise, tree_digest};
use crate::differences::{Fixture, file, stored_by};
use crate::faulty::{Faults, Faulty};

/// Numbers of the tensors: the second is cut in two.
const LENS: [usize; 2] = [256 << 10, 300_000];
/// Their names.
const WEIGHTS: [&str; 2] = ["model.a", "model.b"];
const FIRST: [&str; 2] = ["optimizer.state.0.exp_avg", "optimizer.state.1.exp_avg"];
const SECOND: [&str; 2] = ["optimizer.state.0.exp_avg_sq", "optimizer.state.1.exp_avg_sq"];

/// Name, type and bytes of a tensor.
pub(crate) type Named = (&'static str, &'static str, Vec<u8>);

/// Weights of a tensor, and what `AdamW` keeps of them.
struct Tensor {
    weights: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
}

/// A training by `AdamW`.
pub(crate) struct Training {
    seed: u64,
    step: u32,
    tensors: Vec<Tensor>,
}

impl Training {
    pub(crate) fn new() -> Self {
        Self::of(100, &LENS)
    }

    /// Tensors of these lengths, with weights and data of their own for each seed.
    pub(crate) fn of(seed: u64, lens: &[usize]) -> Self {
        let tensor = |(seed, len): (u64, usize)| Tensor {
            weights: numbers(seed, len).iter().map(|x| x * 0.05).collect(),
            first: vec![0.0; len],
            second: vec![0.0; len],
        };
        let mut training = Self { seed, step: 0, tensors: (seed..).zip(lens.iter().copied()).map(tensor).collect() };
        (0..3).for_each(|_| training.go_on());
        training
    }

    /// As torch computes it on a processor.
    #[expect(clippy::cast_possible_truncation, reason = "torch rounds its coefficients to the nearest")]
    pub(crate) fn go_on(&mut self) {
        self.step += 1;
        let power = |beta: f64| 1.0 - beta.powi(i32::try_from(self.step).unwrap());
        let (rate, root) = ((1e-3 / power(0.9)) as f32, power(0.999).sqrt() as f32);
        for (seed, tensor) in (self.seed * 1000 + u64::from(self.step) * 10..).zip(&mut self.tensors) {
            let Tensor { weights, first, second } = tensor;
            let gradients = numbers(seed, weights.len());
            for (((w, m), v), x) in weights.iter_mut().zip(first).zip(second).zip(gradients) {
                let g = x * x * x * 1e-2;
                *w *= (1.0 - 1e-3 * 0.1) as f32;
                *m += (1.0 - 0.9) as f32 * (g - *m);
                *v = *v * 0.999 + (1.0 - 0.999) as f32 * g * g;
                *w -= rate * (*m / (v.sqrt() / root + 1e-8));
            }
        }
    }

    pub(crate) fn model(&self) -> Vec<Named> {
        let weights = self.tensors.iter().zip(WEIGHTS);
        weights.map(|(tensor, name)| (name, "F32", bytes(&tensor.weights))).collect()
    }

    pub(crate) fn optimizer(&self) -> Vec<Named> {
        let step = [("step", "I64", u64::from(self.step).to_le_bytes().to_vec())];
        let first = self.tensors.iter().zip(FIRST).map(|(tensor, name)| (name, "F32", bytes(&tensor.first)));
        let second = self.tensors.iter().zip(SECOND).map(|(tensor, name)| (name, "F32", bytes(&tensor.second)));
        first.chain(second).chain(step).collect()
    }

    /// Writes what a trainer saves.
    pub(crate) fn write(&self, folder: &Path) {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join("model.safetensors"), file(&self.model())).unwrap();
        fs::write(folder.join("optimizer.safetensors"), file(&self.optimizer())).unwrap();
    }
}

fn bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Numbers that look random, between -1 and 1.
fn numbers(seed: u64, len: usize) -> Vec<f32> {
    let bytes = noise(seed, 2 * len);
    bytes.as_chunks::<2>().0.iter().map(|pair| f32::from(i16::from_le_bytes(*pair)) / 32768.0).collect()
}

pub(crate) fn predicting() -> SaveOptions {
    SaveOptions { compression: Compression::Predict, ..SaveOptions::default() }
}

/// A run whose steps are saved one after another.
struct Run {
    fixture: Fixture,
    training: Training,
    step: u32,
}

impl Run {
    fn new() -> Self {
        Self { fixture: Fixture::with_memory(256 << 20), training: Training::new(), step: 0 }
    }

    /// With these steps.
    async fn of(steps: u32) -> Self {
        let mut run = Self::new();
        for _ in 0..steps {
            run.save(&predicting()).await;
        }
        run
    }

    fn next(&mut self) -> PathBuf {
        self.step += 1;
        self.training.go_on();
        let folder = self.fixture.path(self.step);
        self.training.write(&folder);
        folder
    }

    async fn save(&mut self, options: &SaveOptions) -> SaveReport {
        let folder = self.next();
        let step = name(&format!("run/step-{}", self.step));
        self.fixture.open().await.save(&folder, &step, options).await.unwrap()
    }

    async fn assert_restores(&self, steps: impl IntoIterator<Item = u32>) {
        for step in steps {
            self.fixture.assert_restores(&self.fixture.open().await, step).await;
        }
    }

    /// Steps since a bundle that is stored whole, of each bundle in the map of a step.
    async fn bundles(&self, step: u32) -> Vec<u8> {
        let saved = self.fixture.saved(step).await;
        let bundle = |codec: Codec| if let Codec::Bundle(steps) = codec { Some(steps) } else { None };
        let mut bundles: Vec<u8> = saved.map.frames.iter().filter_map(|frame| bundle(frame.codec)).collect();
        bundles.sort_unstable();
        bundles
    }
}

/// D5: "a step that is saved right after the one before takes less than half the space that it would take whole [...] a step is
/// read with the steps back to its key step, at most seven"
#[tokio::test(flavor = "multi_thread")]
async fn each_step_is_predicted_from_the_one_before() {
    let mut run = Run::new();
    let mut stored = Vec::new();
    for _ in 0..10 {
        let report = run.save(&predicting()).await;
        assert!(report.new_bytes * 100 > report.logical_bytes * 99 && report.warnings.is_empty(), "{report:?}");
        stored.push(report.stored_bytes);
    }
    // The first moments here are noise: they take a third of the plain bytes.
    for (at, bytes) in stored.iter().enumerate() {
        let bound = if at % 8 == 0 { 100 } else { 42 };
        assert!(bytes * 100 < stored[0] * bound || at == 0, "step {}: {stored:?}", at + 1);
    }
    for (step, behind) in [(1, 0), (2, 1), (8, 7), (9, 0), (10, 1)] {
        let saved = run.fixture.saved(step).await;
        assert_eq!((saved.value.behind, stored_by(&saved, Codec::Part)), (behind, 9), "step {step}");
    }
    // Three bundles, each with those that it is predicted from.
    assert_eq!(run.bundles(1).await, [0, 0, 0]);
    assert_eq!(run.bundles(3).await, [0, 0, 0, 1, 1, 1, 2, 2, 2]);
    assert_eq!(run.bundles(8).await.last(), Some(&STEPS_MAX));
    run.assert_restores(1..=10).await;
    let report = run.fixture.verify(false).await;
    assert!(report.damaged.is_empty(), "{report:?}");
}

/// However rare key steps are, a bundle has at most so many steps.
#[tokio::test(flavor = "multi_thread")]
async fn bundles_begin_anew_after_seven_steps() {
    let mut run = Run::new();
    let options = SaveOptions { key_every: Some(100.try_into().unwrap()), ..predicting() };
    for _ in 0..9 {
        run.save(&options).await;
    }
    assert_eq!(run.bundles(8).await.last(), Some(&STEPS_MAX));
    assert_eq!(run.bundles(9).await, [0, 0, 0]);
    assert_eq!(run.fixture.saved(9).await.value.behind, 0);
    run.assert_restores([8, 9]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn steps_may_go_and_those_predicted_from_them_stay() {
    let mut run = Run::of(4).await;
    let before = run.fixture.bytes().await;
    for step in [1, 3] {
        run.fixture.open().await.remove(&name(&format!("run/step-{step}"))).await.unwrap();
    }
    run.fixture.collect().await;
    run.assert_restores([2, 4]).await;
    assert!(run.fixture.verify(false).await.damaged.is_empty());
    // The next step is predicted from the one that is there.
    run.save(&predicting()).await;
    assert_eq!(run.bundles(5).await.last(), Some(&4));
    for step in [2, 4, 5] {
        run.fixture.open().await.remove(&name(&format!("run/step-{step}"))).await.unwrap();
    }
    run.fixture.collect().await;
    assert!(run.fixture.bytes().await * 10 < before, "nothing is left");
}

#[tokio::test(flavor = "multi_thread")]
async fn predictions_begin_at_a_key_step_and_may_end() {
    let mut run = Run::new();
    run.save(&SaveOptions::default()).await;
    // The key step before has no bundles.
    run.save(&predicting()).await;
    assert_eq!(stored_by(&run.fixture.saved(2).await, Codec::Part), 0);
    assert!(stored_by(&run.fixture.saved(2).await, Codec::Difference) > 0);
    let key = SaveOptions { key_every: Some(1.try_into().unwrap()), ..predicting() };
    run.save(&key).await;
    run.save(&predicting()).await;
    assert_eq!(run.bundles(4).await.last(), Some(&1));
    run.save(&SaveOptions::default()).await;
    assert_eq!((run.bundles(5).await, run.fixture.saved(5).await.value.behind), (vec![], 0));
    run.assert_restores(1..=5).await;
}

/// The first moments do not fit the weights, as after a restart with another optimizer.
#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_predicted_is_stored_in_another_way() {
    let mut run = Run::of(2).await;
    let other = Training::of(300, &LENS);
    for (tensor, other) in run.training.tensors.iter_mut().zip(other.tensors) {
        tensor.weights.clone_from(&other.first);
        tensor.second.clone_from(&other.weights);
    }
    let report = run.save(&predicting()).await;
    assert!(report.stored_bytes < report.new_bytes * 102 / 100, "{report:?}");
    // It does not need what it gains nothing from.
    assert_eq!(run.bundles(3).await.last(), Some(&0));
    run.save(&predicting()).await;
    run.assert_restores(1..=4).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn little_memory_stores_no_predictions_and_reads_them() {
    let run = Run::of(3).await;
    let small = Fixture::with_memory(64 << 20);
    let (from, to) = (run.fixture.open().await, small.open().await);
    sync(&from, &to, &[], &SyncOptions { as_stored: true, ..SyncOptions::default() }).await.unwrap();
    for step in 1..=3 {
        run.fixture.assert_restores(&to, step).await;
    }
    let report = to.save(&run.fixture.path(3), &name("other"), &predicting()).await.unwrap();
    assert_eq!(report.new_chunks, 0);
    let fresh = Fixture::with_memory(64 << 20);
    let report = fresh.open().await.save(&run.fixture.path(3), &name("run/step-3"), &predicting()).await.unwrap();
    assert!(
        report.warnings[0].starts_with("nothing is predicted: predictions need a memory budget of 96 MiB"),
        "{report:?}"
    );
    assert_eq!(stored_by(&fresh.saved(3).await, Codec::Part), 0);
}

/// D4: "`settle` stores a step without others".
#[tokio::test(flavor = "multi_thread")]
async fn a_predicted_step_settles() {
    let mut run = Run::of(3).await;
    let settled = run.fixture.open().await.settle(&name("run/step-3"), &Progress::default()).await.unwrap();
    assert!(settled.chunks > 0, "{settled:?}");
    assert!(run.bundles(3).await.is_empty());
    run.save(&predicting()).await;
    run.fixture.collect().await;
    run.assert_restores(1..=4).await;
    assert!(run.fixture.verify(false).await.damaged.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sync_moves_a_predicted_step_with_or_without_those_before() {
    let run = Run::of(4).await;
    let (all, one) = (Fixture::with_memory(256 << 20), Fixture::with_memory(256 << 20));
    let from = run.fixture.open().await;
    let (to, last) = (all.open().await, name("run/step-4"));
    let moved = sync(&from, &to, &[], &SyncOptions::default()).await.unwrap();
    let alone = sync(&from, &one.open().await, &[last], &SyncOptions::default()).await.unwrap();
    assert!(moved.moved_bytes > alone.moved_bytes, "{moved:?} {alone:?}");
    for step in 1..=4 {
        run.fixture.assert_restores(&to, step).await;
    }
    run.fixture.assert_restores(&one.open().await, 4).await;
    for other in [&all, &one] {
        assert!(other.verify(false).await.damaged.is_empty());
    }
}

/// Key steps keep their bundles at the destination, so that the steps after them are as small there.
#[tokio::test(flavor = "multi_thread")]
async fn a_sync_from_a_directory_keeps_predictions() {
    let (mut run, other) = (Run::new(), Fixture::with_memory(256 << 20));
    let location = Location::directory(run.fixture.dir.path().join("repository")).unwrap();
    let store = open(&location, &StoreOptions { create: true, ..StoreOptions::default() }).await.unwrap();
    let options = OpenOptions { cache: Some(run.fixture.dir.path().join("source")), ..OpenOptions::default() };
    let from = Repository::create(store, options).await.unwrap().0;
    let mut stored = 0;
    for step in 1..=4 {
        let folder = run.next();
        stored += from.save(&folder, &name(&format!("run/step-{step}")), &predicting()).await.unwrap().stored_bytes;
    }
    let to = other.open().await;
    for step in 1..=4 {
        sync(&from, &to, &[name(&format!("run/step-{step}"))], &SyncOptions::default()).await.unwrap();
    }
    assert!(other.bytes().await < stored * 11 / 10, "{} for {stored}", other.bytes().await);
    for step in 1..=4 {
        run.fixture.assert_restores(&to, step).await;
    }
}

/// A key step is whole as it is: it keeps its bundles, from which the next steps are predicted.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_step_that_settles_keeps_its_bundles() {
    let mut run = Run::of(1).await;
    let settled = run.fixture.open().await.settle(&name("run/step-1"), &Progress::default()).await.unwrap();
    assert_eq!(settled.chunks, 0, "{settled:?}");
    run.save(&predicting()).await;
    assert_eq!(run.bundles(2).await.last(), Some(&1));
    // Nothing else is in them, so it can be declassified as it is; a predicted step needs other steps.
    let plan = async |step: u32| {
        let repository = run.fixture.open().await;
        repository.plan_declassification(&name(&format!("run/step-{step}")), Labels::default(), "published").await
    };
    assert!(plan(1).await.is_ok());
    assert_eq!(plan(2).await.unwrap_err().kind(), ErrorKind::Conflict);
}

/// Saves that break off at any request, or are never told that one was done: the next one goes on, and nothing is half there.
#[tokio::test(flavor = "multi_thread")]
async fn saves_that_break_off_go_on() {
    let mut injected = 0;
    for seed in 1..=3 {
        let mut run = Run::new();
        for _ in 0..3 {
            let (folder, step) = (run.next(), name(&format!("run/step-{}", run.step)));
            let faults = Faults { errors: 150, lost_acks: 150, resets: 50, ..Faults::default() };
            let store = Faulty::new(Arc::clone(&run.fixture.objects), faults, seed * 100 + u64::from(run.step));
            for _ in 0..50 {
                // Each is a process of its own, whose writer is dropped where it failed.
                let options = OpenOptions {
                    cache: Some(run.fixture.dir.path().join("cache")),
                    memory: Some(256 << 20),
                    ..OpenOptions::default()
                };
                let Ok(repository) = Repository::open(Store::from_objects(Arc::new(store.clone())), options).await
                else {
                    run.fixture.open().await;
                    continue;
                };
                if repository.save(&folder, &step, &predicting()).await.is_ok() {
                    break;
                }
            }
            injected += store.injected();
        }
        run.assert_restores(1..=3).await;
        assert_eq!(run.bundles(3).await.last(), Some(&2), "predicted all the same");
        assert!(run.fixture.verify(false).await.damaged.is_empty());
    }
    assert!(injected > 10, "{injected}");
}

/// Random bits, of which nothing is saved: each tensor is stored for itself.
#[tokio::test(flavor = "multi_thread")]
async fn what_nothing_shortens_is_stored_as_it_is() {
    let fixture = Fixture::with_memory(256 << 20);
    for step in 1..=2u64 {
        let tensor = |name, seed| (name, "F32", noise(seed + 10 * step, 1 << 20));
        let tensors = [tensor("w", 1), tensor("w.exp_avg", 2), tensor("w.exp_avg_sq", 3)];
        let path = fixture.path(u32::try_from(step).unwrap());
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join("state.safetensors"), file(&tensors)).unwrap();
        fixture.open().await.save(&path, &name(&format!("run/step-{step}")), &predicting()).await.unwrap();
    }
    assert_eq!(stored_by(&fixture.saved(2).await, Codec::Part), 0);
    for step in 1..=2 {
        fixture.assert_restores(&fixture.open().await, step).await;
    }
}

/// D3: "`verify --data` names every name and tensor whose bytes depend on a damaged chunk, and no other".
#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_bundle_is_told_for_all_that_is_predicted_from_it() {
    let run = Run::of(3).await;
    let second = run.fixture.saved(2).await;
    let frame = second.map.frames.iter().find(|frame| frame.codec == Codec::Bundle(1)).unwrap();
    let pack = layout::owned(Family::Pack, second.map.pack(frame).unwrap().id);
    let mut bytes = run.fixture.objects.get(&pack).await.unwrap().bytes().await.unwrap().to_vec();
    bytes[usize::try_from(frame.offset).unwrap() + 5000] ^= 4;
    run.fixture.objects.put(&pack, bytes.into()).await.unwrap();
    let report = run.fixture.verify(false).await;
    let mut names: Vec<&String> = report.damaged.iter().flat_map(|damage| &damage.names).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names, ["run/step-2", "run/step-3"], "{report:?}");
    let dest = tempfile::tempdir().unwrap();
    let options = RestoreOptions::default();
    let restored = run.fixture.open().await.restore(&name("run/step-3"), None, dest.path(), &options).await;
    assert_eq!(restored.unwrap_err().kind(), ErrorKind::Damaged);
    run.assert_restores([1]).await;
    // Saved again, both are whole.
    run.fixture.verify(true).await;
    for step in [2, 3] {
        let options = SaveOptions { reread: true, ..SaveOptions::default() };
        let again = name(&format!("again-{step}"));
        run.fixture.open().await.save(&run.fixture.path(step), &again, &options).await.unwrap();
    }
    run.fixture.verify(true).await;
    assert!(run.fixture.verify(false).await.damaged.is_empty());
    run.assert_restores(1..=3).await;
}

/// Each rank has weights and moments of its own.
#[tokio::test(flavor = "multi_thread")]
async fn ranks_predict_their_parts() {
    let fixture = Fixture::with_memory(256 << 20);
    let mut ranks = [Training::of(100, &LENS), Training::of(200, &LENS)];
    let folder = |rank: usize| fixture.dir.path().join(format!("rank-{rank}"));
    for step in 1..=3 {
        let name = name(&format!("run/step-{step}"));
        for (rank, training) in ranks.iter_mut().enumerate() {
            training.go_on();
            training.write(&folder(rank).join(format!("part-{rank}")));
            let (rank_number, attempt) = (rank.try_into().unwrap(), "a".parse().unwrap());
            let part = PartOptions { rank: rank_number, ranks: 2.try_into().unwrap(), attempt };
            fixture.open().await.save_part(&folder(rank), &name, &part, &predicting()).await.unwrap();
        }
    }
    let saved = fixture.saved(3).await;
    assert_eq!((saved.value.behind, stored_by(&saved, Codec::Part)), (2, 18));
    let dest = tempfile::tempdir().unwrap();
    let options = RestoreOptions::default();
    fixture.open().await.restore(&name("run/step-3"), None, dest.path(), &options).await.unwrap();
    for rank in 0..2 {
        let part = format!("part-{rank}");
        assert_eq!(tree_digest(&dest.path().join(&part)), tree_digest(&folder(rank).join(&part)));
    }
}
