//! Steps that ranks save together: whole or not at all, once, and never mixed.

mod store;

use std::collections::BTreeMap;
use std::fs;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::TryStreamExt as _;
use futures::future::join_all;
use object_store::memory::InMemory;
use object_store::{GetOptions, ObjectStore};
use towline::error::ErrorKind;
use towline::ops::{CollectOptions, PartOptions, PartReport, RestoreOptions, SaveOptions, VerifyOptions};
use towline::repository::log::{Action, Attempt, StepFacts};
use towline::repository::{AttemptState, OpenOptions, Repository};
use towline::storage::Store;

use self::store::Clocked;
use crate::data::{name, noise, safetensors};
use crate::faulty::{Faults, Faulty};

const STEP: &str = "run/step-1";

/// Ranks with folders of their own, each on a machine of its own.
struct Gang {
    dir: tempfile::TempDir,
    objects: Arc<dyn ObjectStore>,
}

impl Gang {
    async fn new() -> Self {
        Self::on(Arc::new(InMemory::new())).await
    }

    async fn on(objects: Arc<dyn ObjectStore>) -> Self {
        let gang = Self { dir: tempfile::tempdir().unwrap(), objects };
        Repository::create(gang.store(), gang.options("made")).await.unwrap();
        gang
    }

    fn store(&self) -> Store {
        Store::from_objects_watched(Arc::clone(&self.objects), Duration::from_mins(1))
    }

    fn options(&self, machine: &str) -> OpenOptions {
        OpenOptions {
            cache: Some(self.dir.path().join("cache").join(machine)),
            memory: Some(64 << 20),
            ..OpenOptions::default()
        }
    }

    async fn repository(&self, machine: &str) -> Repository {
        Repository::open(self.store(), self.options(machine)).await.unwrap()
    }

    /// The folder of a rank, with these files in it and no others.
    fn folder(&self, rank: u32, files: &[(&str, &[u8])]) -> PathBuf {
        let folder = self.dir.path().join(format!("rank-{rank}"));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        for (path, bytes) in files {
            fs::create_dir_all(folder.join(path).parent().unwrap()).unwrap();
            fs::write(folder.join(path), bytes).unwrap();
        }
        folder
    }

    /// What rank `rank` has in `life`: its own file, and one that all have.
    fn fill(&self, rank: u32, life: u64) -> PathBuf {
        let own = format!("shards/{rank}.bin");
        let (shard, common) = (noise(1000 * life + u64::from(rank), 300_000), noise(7, 200_000));
        self.folder(rank, &[(&own, &shard), ("common.bin", &common), ("config.json", b"{}")])
    }

    async fn save(&self, rank: u32, ranks: u32, attempt: &str) -> towline::Result<PartReport> {
        let repository = self.repository(&rank.to_string()).await;
        let folder = self.dir.path().join(format!("rank-{rank}"));
        repository.save_part(&folder, &name(STEP), &part(rank, ranks, attempt), &SaveOptions::default()).await
    }

    /// All files of the step, by path; none if there is no step.
    async fn step(&self) -> Option<BTreeMap<String, Vec<u8>>> {
        let repository = self.repository("reader").await;
        repository.state().await.unwrap().refs.get(&name(STEP))?;
        let dest = self.dir.path().join("restored");
        let _ = fs::remove_dir_all(&dest);
        repository.restore(&name(STEP), None, &dest, &RestoreOptions::default()).await.unwrap();
        let (mut files, mut left) = (BTreeMap::new(), vec![dest.clone()]);
        while let Some(folder) = left.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    left.push(path);
                } else {
                    let relative = path.strip_prefix(&dest).unwrap().to_str().unwrap().to_owned();
                    files.insert(relative, fs::read(path).unwrap());
                }
            }
        }
        Some(files)
    }

    /// Is the step what `ranks` had in `life`?
    async fn holds(&self, ranks: u32, life: u64) {
        let files = self.step().await.unwrap();
        assert_eq!(files.len(), ranks as usize + 2, "{:?}", files.keys());
        for rank in 0..ranks {
            let shard = noise(1000 * life + u64::from(rank), 300_000);
            assert!(files[&format!("shards/{rank}.bin")] == shard, "rank {rank}");
        }
        assert!(files["common.bin"] == noise(7, 200_000));
    }

    async fn keys(&self, prefix: &str) -> Vec<String> {
        let prefix = object_store::path::Path::from(prefix);
        self.objects.list(Some(&prefix)).map_ok(|meta| meta.location.to_string()).try_collect().await.unwrap()
    }

    /// Commits that gave the step a value, among all that are still in the log.
    async fn commits(&self) -> usize {
        use towline::format::envelope::{Kind, open};
        use towline::repository::log::LogEntry;
        let mut commits = 0;
        for key in self.keys("log").await {
            let object = self.store().objects().get_opts(&key.into(), GetOptions::default()).await.unwrap();
            let entry = LogEntry::decode(&open(Kind::Entry, &object.bytes().await.unwrap()).unwrap()).unwrap();
            commits += entry.actions.iter().filter(|action| matches!(action, Action::SetRef { .. })).count();
        }
        commits
    }
}

fn part(rank: u32, ranks: u32, attempt: &str) -> PartOptions {
    PartOptions { rank, ranks: NonZeroU32::new(ranks).unwrap(), attempt: attempt.parse().unwrap() }
}

fn conflicts(result: towline::Result<PartReport>, telling: &str) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict, "{error:?}");
    assert!(format!("{error:?}").contains(telling), "{error:?}");
    assert!(error.help_text().is_some());
}

/// K1: "Once the parts of all ranks are stored, the last rank makes the step visible in one commit".
#[tokio::test(flavor = "multi_thread")]
async fn the_last_rank_makes_the_step_visible() {
    let gang = Gang::new().await;
    for (done, rank) in [2, 0, 3, 1].into_iter().enumerate() {
        gang.fill(rank, 1);
        let report = gang.save(rank, 4, "a").await.unwrap();
        assert_eq!(report.complete, done == 3);
        assert_eq!(report.waits_for.is_some(), done < 3);
        assert_eq!(gang.step().await.is_some(), done == 3, "half a step is never visible");
        // What all have is stored by the first, and found by those who come later.
        assert!(report.part.new_bytes < if done == 0 { 501_000 } else { 301_000 }, "{report:?}");
    }
    gang.holds(4, 1).await;
    let repository = gang.repository("reader").await;
    let state = repository.state().await.unwrap();
    assert!(state.sessions.is_empty());
    let value = &state.refs[&name(STEP)];
    assert_eq!((value.facts.ranks().map(NonZeroU32::get), value.files, value.logical_bytes), (Some(4), 6, 1_400_002));
    assert_eq!(gang.commits().await, 1);
    let whole = VerifyOptions { data: true, ..VerifyOptions::default() };
    assert_eq!(repository.verify(None, &whole).await.unwrap().damaged.len(), 0);
}

/// K1: "exactly once", with every rank at the same time, and all of them twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn ranks_at_once_make_one_commit() {
    for round in 0..6 {
        let gang = Gang::new().await;
        for rank in 0..5 {
            gang.fill(rank, round);
        }
        let twice: Vec<u32> = (0..5).chain(0..5).collect();
        let reports = join_all(twice.iter().map(|rank| gang.save(*rank, 5, "a"))).await;
        let complete = reports.into_iter().map(|report| report.unwrap()).filter(|report| report.complete).count();
        assert!(complete >= 1, "somebody is last");
        assert_eq!(gang.commits().await, 1);
        gang.holds(5, round).await;
    }
}

/// K1, on a store that loses answers and fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn ranks_on_a_bad_day_make_one_commit() {
    for seed in 0..6 {
        let faulty = Faulty::new(Arc::new(InMemory::new()), Faults::bad_day(), seed);
        faulty.calm(true);
        let gang = Gang::on(Arc::new(faulty.clone())).await;
        for rank in 0..3 {
            gang.fill(rank, seed);
        }
        faulty.calm(false);
        // A rank that is refused by the store comes again.
        let stubborn = |rank: u32| {
            let gang = &gang;
            async move {
                loop {
                    match gang.save(rank, 3, "a").await {
                        Ok(report) => return report,
                        Err(error) => assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}"),
                    }
                }
            }
        };
        let reports = join_all([2, 0, 1, 0].map(stubborn)).await;
        faulty.calm(true);
        assert!(reports.iter().any(|report| report.complete));
        assert_eq!(gang.commits().await, 1);
        gang.holds(3, seed).await;
    }
}

/// K2: "A rank may retry [...]: with the same content it finds its part".
#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_comes_again_with_the_same_is_welcome() {
    let gang = Gang::new().await;
    gang.fill(0, 1);
    gang.save(0, 2, "a").await.unwrap();
    // Written again, by another machine: other times, the same bytes.
    let folder = gang.fill(0, 1);
    fs::File::open(folder.join("config.json")).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
    let again = gang.save(0, 2, "a").await.unwrap();
    assert_eq!((again.complete, again.waits_for, again.part.new_bytes), (false, Some(1), 0));
    gang.fill(1, 1);
    assert!(gang.save(1, 2, "a").await.unwrap().complete);
    // After the last one too.
    let late = gang.save(0, 2, "a").await.unwrap();
    assert!(late.complete && late.step.is_some(), "{late:?}");
    assert_eq!(gang.commits().await, 1);
    gang.holds(2, 1).await;
}

/// K2: "With other content it is refused (exit 5); after the step is complete, only with content that the step does not hold".
#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_comes_again_with_something_else_is_refused() {
    let gang = Gang::new().await;
    gang.fill(0, 1);
    gang.save(0, 2, "a").await.unwrap();
    gang.fill(0, 2);
    conflicts(gang.save(0, 2, "a").await, "shards/0.bin");
    gang.fill(1, 1);
    assert!(gang.save(1, 2, "a").await.unwrap().complete);
    conflicts(gang.save(0, 2, "a").await, "shards/0.bin");
    gang.holds(2, 1).await;
    // Another attempt is another step under the same name.
    for rank in 0..2 {
        gang.fill(rank, 2);
        gang.save(rank, 2, "b").await.unwrap();
    }
    gang.holds(2, 2).await;
    assert!(gang.repository("reader").await.state().await.unwrap().sessions.is_empty());
}

/// K2: "Attempts and world sizes never mix".
#[tokio::test(flavor = "multi_thread")]
async fn attempts_and_world_sizes_never_mix() {
    let gang = Gang::new().await;
    // Life 1: ranks 0 and 1 of 3. They die; two come back, as a world of 2; one more of the old ones is late.
    for (rank, ranks, attempt, life) in [(0, 3, "a", 1), (1, 3, "a", 1), (0, 2, "a", 2), (1, 2, "b", 3)] {
        gang.fill(rank, life);
        assert!(!gang.save(rank, ranks, attempt).await.unwrap().complete);
    }
    assert!(gang.step().await.is_none());
    assert_eq!(gang.repository("reader").await.state().await.unwrap().sessions.len(), 3);
    gang.fill(1, 2);
    assert!(gang.save(1, 2, "a").await.unwrap().complete);
    gang.holds(2, 2).await;
    // The name has moved: the others are over.
    gang.fill(2, 1);
    conflicts(gang.save(2, 3, "a").await, "moved");
    gang.fill(0, 3);
    conflicts(gang.save(0, 2, "b").await, "moved");
    gang.holds(2, 2).await;
}

/// K2: "one that has saved the step is refused once another has replaced it (exit 5)".
#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_that_was_replaced_does_not_come_back() {
    let gang = Gang::new().await;
    for (attempt, life) in [("a", 1), ("b", 2)] {
        for rank in 0..2 {
            gang.fill(rank, life);
            gang.save(rank, 2, attempt).await.unwrap();
        }
    }
    gang.holds(2, 2).await;
    for rank in 0..2 {
        gang.fill(rank, 1);
        conflicts(gang.save(rank, 2, "a").await, "replaced since");
    }
    gang.holds(2, 2).await;
    // A step that was removed may be saved again, by whom it was saved before.
    gang.repository("reader").await.remove(&name(STEP)).await.unwrap();
    for rank in 0..2 {
        gang.fill(rank, 1);
        gang.save(rank, 2, "a").await.unwrap();
    }
    gang.holds(2, 1).await;
}

/// K3: "A rank that dies may retry; what it had uploaded is used".
#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_dies_anywhere_can_come_again() {
    // After every number of requests, until it lives to the end.
    for requests in 0.. {
        let gang = Gang::new().await;
        for rank in 0..2 {
            gang.fill(rank, 1);
        }
        gang.save(1, 2, "a").await.unwrap();
        let store = Clocked::new(Arc::clone(&gang.objects), None);
        let doomed = Gang { dir: tempfile::tempdir().unwrap(), objects: Arc::<Clocked>::clone(&store) };
        doomed.fill(0, 1);
        store.answer(requests);
        let died = tokio::select! {
            saved = doomed.save(0, 2, "a") => {
                assert!(saved.unwrap().complete);
                false
            }
            () = store.held.notified() => true,
        };
        if died {
            let visible = gang.step().await.is_some();
            assert!(gang.save(0, 2, "a").await.unwrap().complete, "after {requests}, visible: {visible}");
        }
        gang.holds(2, 1).await;
        assert_eq!(gang.commits().await, 1);
        if !died {
            assert!(requests > 30, "{requests}");
            return;
        }
    }
}

/// K3: "A step whose ranks died stays invisible, and is collected".
#[tokio::test(flavor = "multi_thread")]
async fn a_step_whose_ranks_died_is_collected() {
    let objects = Clocked::new(Arc::new(InMemory::new()), None);
    let gang = Gang::on(Arc::<Clocked>::clone(&objects)).await;
    gang.fill(0, 1);
    gang.save(0, 3, "a").await.unwrap();
    let collector = gang.repository("collector").await;
    let now = CollectOptions::at_once();
    let later = |hours: u64| objects.pass(Duration::from_hours(hours));
    // 40 hours after the first rank; but a second came since, and so did one of another attempt.
    later(20);
    gang.fill(1, 1);
    gang.save(1, 3, "a").await.unwrap();
    later(20);
    gang.fill(2, 1);
    gang.save(2, 3, "b").await.unwrap();
    assert_eq!(collector.collect(&now).await.unwrap().fenced_sessions, 0);
    assert_eq!(gang.keys("part").await.len(), 3, "parts of open sessions are nobody else's business");
    later(10);
    assert_eq!(collector.collect(&now).await.unwrap().fenced_sessions, 1, "30 hours without any progress");
    collector.collect(&now).await.unwrap();
    assert_eq!(gang.keys("part").await.len(), 1);
    later(20);
    for _ in 0..2 {
        collector.collect(&now).await.unwrap();
    }
    for family in ["part", "manifest", "map", "pack"] {
        assert_eq!(gang.keys(family).await, [""; 0], "{family}");
    }
    assert!(gang.step().await.is_none());
    // All of them come again: the attempt begins anew.
    for rank in 0..2 {
        gang.fill(rank, 4);
        assert_eq!(gang.save(rank, 2, "a").await.unwrap().complete, rank == 1);
    }
    gang.holds(2, 4).await;
}

/// K3: "A rank whose attempt was ended meanwhile gets an error".
#[tokio::test(flavor = "multi_thread")]
async fn a_rank_whose_attempt_is_ended_is_told() {
    let gang = Gang::new().await;
    let slow = Clocked::new(Arc::clone(&gang.objects), Some("part/"));
    let slow_gang = Gang { dir: tempfile::tempdir().unwrap(), objects: Arc::<Clocked>::clone(&slow) };
    slow_gang.fill(0, 1);
    let saving = async { slow_gang.save(0, 2, "a").await };
    let ending = async {
        slow.held.notified().await;
        let repository = gang.repository("collector").await;
        let attempt = Attempt { name: name(STEP), id: "a".parse().unwrap(), ranks: NonZeroU32::new(2).unwrap() };
        let state = repository.state().await.unwrap();
        let AttemptState::Open(session, joint) = state.attempt_state(&attempt) else { panic!("{state:?}") };
        assert_eq!((&joint.attempt, joint.expected), (&attempt, None));
        let touched = state.sessions[&session].touched;
        repository.log().commit(None, |_| Ok(vec![Action::Fence { session, touched }])).await.unwrap();
        slow.go.notify_one();
    };
    let (refused, ()) = tokio::join!(saving, ending);
    conflicts(refused, "ended");
    assert!(gang.step().await.is_none());
}

/// K4: "two different things under one path are refused".
#[tokio::test(flavor = "multi_thread")]
async fn ranks_that_disagree_on_a_path_are_told_which() {
    let gang = Gang::new().await;
    gang.folder(0, &[("same", b"1"), ("deep/model.bin", b"one")]);
    gang.folder(1, &[("same", b"1"), ("deep/model.bin", b"two")]);
    gang.save(0, 2, "a").await.unwrap();
    conflicts(gang.save(1, 2, "a").await, "deep/model.bin");
    assert!(gang.step().await.is_none());
    // Whoever is asked again says the same; another attempt without the one works.
    conflicts(gang.save(0, 2, "a").await, "ranks 0 and 1");
    gang.folder(1, &[("same", b"1"), ("deep/other.bin", b"two")]);
    for rank in 0..2 {
        gang.save(rank, 2, "b").await.unwrap();
    }
    let files: Vec<String> = gang.step().await.unwrap().into_keys().collect();
    assert_eq!(files, ["deep/model.bin", "deep/other.bin", "same"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_makes_no_sense_is_refused_before_anything_is_written() {
    let gang = Gang::new().await;
    let folder = gang.fill(0, 1);
    let repository = gang.repository("0").await;
    let (step, seq) = (name(STEP), repository.state().await.unwrap().seq);
    let told =
        SaveOptions { facts: StepFacts::default().world_size(NonZeroU32::new(3).unwrap()), ..SaveOptions::default() };
    let usage = |result: towline::Result<PartReport>| assert_eq!(result.unwrap_err().kind(), ErrorKind::Usage);
    usage(repository.save_part(&folder, &step, &part(2, 2, "a"), &SaveOptions::default()).await);
    usage(repository.save_part(&folder, &step, &part(0, 2, "a"), &told).await);
    usage(repository.save_part(&folder.join("config.json"), &step, &part(0, 2, "a"), &SaveOptions::default()).await);
    let gone = repository.save_part(&folder.join("gone"), &step, &part(0, 2, "a"), &SaveOptions::default()).await;
    assert_eq!(gone.unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(repository.state().await.unwrap().seq, seq);
}

/// Ranks' steps are differences to the step before, and a DCP checkpoint of two ranks comes back whole.
#[tokio::test(flavor = "multi_thread")]
async fn steps_of_ranks_are_stored_as_differences() {
    let gang = Gang::new().await;
    let state = |rank: u32, step: u32| {
        let file = safetensors(rank.into(), &[("w", 200_000)]);
        let header = file.len() - 800_000;
        let moved = file[header..].chunks_exact(4).map(|number| {
            let number = u32::from_le_bytes(number.try_into().unwrap()) & 0x3fff_ffff;
            (number + step * (number % 5)).to_le_bytes()
        });
        [file[..header].to_vec(), moved.flatten().collect()].concat()
    };
    let mut written = Vec::new();
    for step in 1..=3 {
        for rank in 0..2 {
            let folder = gang.folder(rank, &[(&format!("rank-{rank}.safetensors"), &state(rank, step))]);
            let repository = gang.repository(&rank.to_string()).await;
            let to = name(&format!("run/step-{step}"));
            let report =
                repository.save_part(&folder, &to, &part(rank, 2, "0"), &SaveOptions::default()).await.unwrap();
            written.push(report.part.stored_bytes);
        }
    }
    assert!(written[2..].iter().all(|later| *later * 3 < written[0]), "{written:?}");
    let reader = gang.repository("reader").await;
    assert_eq!(reader.state().await.unwrap().refs[&name("run/step-3")].behind, 2);
    reader.remove(&name("run/step-1")).await.unwrap();
    let now = CollectOptions::at_once();
    reader.collect(&now).await.unwrap();
    let dest = gang.dir.path().join("out");
    reader.restore(&name("run/step-3"), None, &dest, &RestoreOptions::default()).await.unwrap();
    for rank in 0..2 {
        assert!(fs::read(dest.join(format!("rank-{rank}.safetensors"))).unwrap() == state(rank, 3));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_distributed_checkpoint_of_two_ranks_comes_back_whole() {
    let gang = Gang::new().await;
    let dcp = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/checkpoints/dcp");
    let read = |file: &str| fs::read(dcp.join(file)).unwrap();
    let (metadata, zero, one) = (read(".metadata"), read("__0_0.distcp"), read("__1_0.distcp"));
    gang.folder(0, &[(".metadata", &metadata), ("__0_0.distcp", &zero)]);
    gang.folder(1, &[(".metadata", &metadata), ("__1_0.distcp", &one)]);
    for rank in 0..2 {
        gang.save(rank, 2, "a").await.unwrap();
    }
    let files = gang.step().await.unwrap();
    assert!(files[".metadata"] == metadata && files["__0_0.distcp"] == zero && files["__1_0.distcp"] == one);
    // As if one had saved all of it: the parts are parts of the same tensors.
    let alone = gang.dir.path().join("alone");
    fs::create_dir(&alone).unwrap();
    for file in [".metadata", "__0_0.distcp", "__1_0.distcp"] {
        fs::write(alone.join(file), read(file)).unwrap();
    }
    let reader = gang.repository("reader").await;
    reader.save(&alone, &name("alone"), &SaveOptions::default()).await.unwrap();
    let tensors = |saved: towline::repository::Saved| {
        let files = saved.manifest.files().map(|(entry, content)| (entry.path.clone(), content.tensors.clone()));
        files.collect::<Vec<_>>()
    };
    let (ranks, alone) = (reader.saved(&name(STEP)).await.unwrap(), reader.saved(&name("alone")).await.unwrap());
    assert_eq!(tensors(ranks), tensors(alone));
}

/// K3: "The final commit can also be refused because chunks of earlier steps that the attempt used were collected
/// meanwhile".
#[tokio::test(flavor = "multi_thread")]
async fn what_an_unfinished_step_relies_on_may_be_condemned_but_not_purged() {
    for purged in [false, true] {
        let gang = Gang::new().await;
        let folder = gang.fill(0, 1);
        let keeper = gang.repository("keeper").await;
        keeper.save(&folder, &name("run/step-0"), &SaveOptions::default()).await.unwrap();
        assert_eq!(gang.save(0, 2, "a").await.unwrap().part.new_bytes, 0, "all of it is in the step before");
        keeper.remove(&name("run/step-0")).await.unwrap();
        let grace = if purged { Duration::ZERO } else { Duration::from_hours(1) };
        let report = keeper.collect(&CollectOptions { grace, ..CollectOptions::at_once() }).await.unwrap();
        assert_eq!((report.condemned_packs, report.purged_packs), (1, u64::from(purged)));
        gang.fill(1, 1);
        if purged {
            conflicts(gang.save(1, 2, "a").await, "collected");
            assert!(gang.step().await.is_none());
            gang.save(0, 2, "b").await.unwrap();
            gang.save(1, 2, "b").await.unwrap();
        } else {
            assert!(gang.save(1, 2, "a").await.unwrap().complete);
            assert!(keeper.state().await.unwrap().condemned.is_empty(), "pardoned");
        }
        keeper.collect(&CollectOptions::at_once()).await.unwrap();
        gang.holds(2, 1).await;
    }
}
