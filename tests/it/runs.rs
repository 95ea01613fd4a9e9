//! Runs: facts go where the name goes, choices read the log alone, and an expire is all or nothing.

use std::fs;
use std::num::{NonZeroU32, NonZeroU64};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use object_store::ObjectStore;
use object_store::memory::InMemory;
use towline::error::ErrorKind;
use towline::metrics::Metric;
use towline::ops::{CollectOptions, ExpirePolicy, RestoreOptions, SaveOptions, SyncOptions, VerifyOptions, sync};
use towline::repository::log::StepFacts;
use towline::repository::{OpenOptions, Repository};
use towline::selector::Selector;
use towline::storage::Store;

use crate::data::{name, noise};

async fn in_memory(cache: &Path) -> Repository {
    on(&(Arc::new(InMemory::new()) as Arc<dyn ObjectStore>), cache).await
}

async fn on(objects: &Arc<dyn ObjectStore>, cache: &Path) -> Repository {
    let options = OpenOptions { cache: Some(cache.to_owned()), memory: Some(64 << 20), ..OpenOptions::default() };
    let store = Store::from_objects_watched(Arc::clone(objects), Duration::from_mins(1));
    Repository::create(store, options).await.unwrap().0
}

fn facts(loss: f64) -> StepFacts {
    let facts = StepFacts::default().metric("loss", loss).unwrap().framework("pytorch").unwrap();
    facts.world_size(NonZeroU32::new(8).unwrap())
}

/// What step `number` holds: some of it the same as the steps next to it.
fn content(number: u64) -> Vec<u8> {
    [noise(number / 4, 200_000), noise(1000 + number, 50_000)].concat()
}

/// Saves `run/step-<number>` with the loss `1 / number`.
async fn save(repository: &Repository, number: u64, scratch: &Path) -> towline::Result<()> {
    let file = scratch.join(format!("step-{number}"));
    fs::write(&file, content(number)).unwrap();
    let options = SaveOptions { facts: facts(1.0 / number as f64), ..SaveOptions::default() };
    repository.save(&file, &name(&format!("run/step-{number}")), &options).await.map(drop)
}

async fn steps(repository: &Repository) -> Vec<u64> {
    let runs = repository.runs(Some(&name("run"))).await.unwrap();
    runs[0].steps.iter().map(|step| step.step).collect()
}

fn keep_last(count: u64) -> ExpirePolicy {
    ExpirePolicy { keep_last: NonZeroU64::new(count), ..ExpirePolicy::default() }
}

/// R1: "A step's facts [...] are in the log; `cp` and `sync` copy them".
#[tokio::test(flavor = "multi_thread")]
async fn facts_go_where_the_name_goes() {
    let dir = tempfile::tempdir().unwrap();
    let from = in_memory(&dir.path().join("a")).await;
    save(&from, 4, dir.path()).await.unwrap();
    from.copy(&name("run/step-4"), &name("best")).await.unwrap();
    let to = in_memory(&dir.path().join("b")).await;
    sync(&from, &to, &[], &SyncOptions::default()).await.unwrap();
    for repository in [&from, &to] {
        let listed = repository.list(None).await.unwrap();
        assert_eq!(listed.len(), 2);
        assert!(listed.iter().all(|listed| listed.facts == facts(0.25)), "{listed:?}");
    }

    // The same bytes with other facts are another value: saved, copied and synced without storing anything.
    let file = dir.path().join("step-4");
    let better = SaveOptions { facts: facts(0.125), ..SaveOptions::default() };
    assert_eq!(from.save(&file, &name("run/step-4"), &better).await.unwrap().new_chunks, 0);
    from.copy(&name("run/step-4"), &name("best")).await.unwrap();
    let report = sync(&from, &to, &[], &SyncOptions::default()).await.unwrap();
    assert_eq!((report.names, report.new_chunks), (2, 0));
    let listed = to.list(None).await.unwrap();
    assert!(listed.iter().all(|listed| listed.facts == facts(0.125)), "{listed:?}");
    // Told again as it is, there is nothing to commit.
    let before = from.state().await.unwrap().seq;
    from.save(&file, &name("run/step-4"), &better).await.unwrap();
    from.copy(&name("run/step-4"), &name("best")).await.unwrap();
    assert_eq!(from.state().await.unwrap().seq, before);
}

/// R1: "Listing runs and choosing steps read the log alone, whatever the number and size of the steps."
#[tokio::test(flavor = "multi_thread")]
async fn choosing_and_listing_read_the_log_alone() {
    let dir = tempfile::tempdir().unwrap();
    let objects: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let writer = on(&objects, dir.path()).await;
    for number in 1..=12 {
        save(&writer, number, dir.path()).await.unwrap();
    }
    let gets = |repository: &Repository| repository.store().counters().get(Metric::GetRequests);
    writer.log().truncate(0, None).await.unwrap();
    let reader = on(&objects, dir.path()).await;
    reader.state().await.unwrap();
    let before = gets(&reader);
    reader.state().await.unwrap();
    let one_look = gets(&reader) - before;
    for (selector, step) in [("run@latest", 12), ("run@upto=7", 7), ("run@min=loss", 12), ("run@max=loss", 1)] {
        let chosen = reader.resolve(&selector.parse::<Selector>().unwrap()).await.unwrap();
        assert_eq!(chosen, name(&format!("run/step-{step}")), "{selector}");
    }
    assert_eq!(steps(&reader).await, (1..=12).collect::<Vec<_>>());
    assert_eq!(gets(&reader) - before, 6 * one_look, "five looks at the log's end, and nothing else");
}

/// R2: "a step that is kept loses nothing".
#[tokio::test(flavor = "multi_thread")]
async fn what_is_kept_outlives_expire_and_collect() {
    let dir = tempfile::tempdir().unwrap();
    let repository = in_memory(dir.path()).await;
    for number in 1..=9 {
        save(&repository, number, dir.path()).await.unwrap();
    }
    let policy = ExpirePolicy { keep_every: NonZeroU64::new(4), keep_max: vec!["loss".into()], ..keep_last(1) };
    let plan = repository.plan_expire(&name("run"), &policy).await.unwrap();
    assert_eq!(steps(&repository).await.len(), 9, "a plan removes nothing");
    repository.expire(&plan).await.unwrap();
    assert_eq!(steps(&repository).await, [1, 4, 8, 9]);
    let now = CollectOptions::at_once();
    let mut freed = 0;
    for _ in 0..3 {
        freed += repository.collect(&now).await.unwrap().freed_bytes;
    }
    assert!(freed >= 5 * 50_000, "the steps that went leave nothing behind: {freed}");
    for number in [1, 4, 8, 9] {
        let dest = dir.path().join(format!("restored-{number}"));
        let step = name(&format!("run/step-{number}"));
        repository.restore(&step, None, &dest, &RestoreOptions::default()).await.unwrap();
        assert_eq!(fs::read(&dest).unwrap(), content(number));
    }
    let whole = VerifyOptions { data: true, ..VerifyOptions::default() };
    assert_eq!(repository.verify(None, &whole).await.unwrap().damaged.len(), 0);
}

/// R2: "If a step of the plan, kept or not, was saved again or removed meanwhile, nothing is removed and the exit code is 5".
#[tokio::test(flavor = "multi_thread")]
async fn an_expire_of_steps_that_moved_removes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let repository = in_memory(dir.path()).await;
    for number in 1..=5 {
        save(&repository, number, dir.path()).await.unwrap();
    }
    // First one that would have gone, then one that would have stayed.
    for moved in [1, 5] {
        let plan = repository.plan_expire(&name("run"), &keep_last(2)).await.unwrap();
        repository.remove(&name(&format!("run/step-{moved}"))).await.unwrap();
        let refused = repository.expire(&plan).await.unwrap_err();
        assert_eq!((refused.kind(), refused.kind().exit_code()), (ErrorKind::Conflict, 5), "{refused:?}");
    }
    assert_eq!(steps(&repository).await, [2, 3, 4]);
    // Saved again with another loss, it is another version.
    let plan = repository.plan_expire(&name("run"), &keep_last(2)).await.unwrap();
    let again = SaveOptions { facts: facts(9.0), ..SaveOptions::default() };
    repository.save(&dir.path().join("step-4"), &name("run/step-4"), &again).await.unwrap();
    assert_eq!(repository.expire(&plan).await.unwrap_err().kind(), ErrorKind::Conflict);
    assert_eq!(steps(&repository).await, [2, 3, 4]);

    // A step that came since is no reason to stop, and stays.
    let plan = repository.plan_expire(&name("run"), &keep_last(1)).await.unwrap();
    save(&repository, 9, dir.path()).await.unwrap();
    repository.expire(&plan).await.unwrap();
    assert_eq!(steps(&repository).await, [4, 9]);
}

/// R2, raced: a trainer saves steps, old ones again now and then, while somebody expires the run.
#[tokio::test(flavor = "multi_thread")]
async fn an_expire_that_races_saves_harms_none_of_them() {
    let dir = tempfile::tempdir().unwrap();
    let objects: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let (trainer, keeper) = (on(&objects, &dir.path().join("a")).await, on(&objects, &dir.path().join("b")).await);
    save(&trainer, 1, dir.path()).await.unwrap();
    let training = Arc::new(AtomicBool::new(true));
    let still = Arc::clone(&training);
    let expiring = tokio::spawn(async move {
        let mut removed = 0;
        while still.load(Ordering::SeqCst) {
            let plan = keeper.plan_expire(&name("run"), &keep_last(3)).await.unwrap();
            match keeper.expire(&plan).await {
                Ok(()) => removed += plan.removed.len(),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Conflict, "{error:?}"),
            }
            let chosen = keeper.resolve(&"run@latest".parse().unwrap()).await.unwrap();
            assert!(plan.kept.iter().all(|step| step.step <= chosen.step().unwrap().1), "the latest step went back");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        removed
    });
    for number in 2..=40 {
        save(&trainer, number, dir.path()).await.unwrap();
        // Saved again while it may be going: it is there, or its saver was told that it is not.
        let again = SaveOptions { facts: facts(7.0), reread: true, ..SaveOptions::default() };
        let old = number.saturating_sub(3).max(1);
        let step = name(&format!("run/step-{old}"));
        if let Err(error) = trainer.save(&dir.path().join(format!("step-{old}")), &step, &again).await {
            assert_eq!(error.kind(), ErrorKind::Conflict, "{error:?}");
        }
    }
    training.store(false, Ordering::SeqCst);
    assert!(expiring.await.unwrap() > 0, "no expire came through");
    let left = steps(&trainer).await;
    assert!(left.ends_with(&[38, 39, 40]), "the last three: {left:?}");
    for number in left {
        let dest = dir.path().join(format!("restored-{number}"));
        let step = name(&format!("run/step-{number}"));
        trainer.restore(&step, None, &dest, &RestoreOptions::default()).await.unwrap();
        assert_eq!(fs::read(&dest).unwrap(), content(number));
    }
}
