//! Taking back: what a name stood for before it was removed or replaced comes back whole, for as long as it is kept and no longer.

use std::fs::{self, File};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use object_store::ObjectStoreExt as _;
use serde_json::{Value, json};
use towline::clock::{Clock as _, ManualClock, SystemClock, Timestamp};
use towline::error::ErrorKind;
use towline::ops::{
    Changes, CollectOptions, CollectReport, Existing, ExpirePolicy, PartOptions, RemovalCause, RemoveOptions,
    RestoreOptions, SaveOptions, SyncOptions, UndeleteOptions, VerifyOptions, sync,
};
use towline::repository::layout::{self, Family, Numbered};
use towline::repository::log::{Action, State, StepFacts};
use towline::repository::{OpenOptions, Repository};
use towline::storage::{Location, StoreOptions, open};

use crate::cli::User;
use crate::data::{name, noise, tree_digest};

const HOUR: Duration = Duration::from_hours(1);
const DAY: Duration = Duration::from_hours(24);

/// A repository in a directory, whose objects can be made old.
struct Fixture {
    dir: tempfile::TempDir,
    repository: Repository,
}

impl Fixture {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let repository = Self::open(&dir, "repo", "cache").await;
        Self { dir, repository }
    }

    async fn open(dir: &tempfile::TempDir, repository: &str, cache: &str) -> Repository {
        let location = Location::directory(dir.path().join(repository)).unwrap();
        let store = open(&location, &StoreOptions { create: true, ..StoreOptions::default() }).await.unwrap();
        let options =
            OpenOptions { cache: Some(dir.path().join(cache)), memory: Some(128 << 20), ..OpenOptions::default() };
        Repository::create(store, options).await.unwrap().0
    }

    /// A handle that knows nothing yet.
    async fn fresh(&self) -> Repository {
        Self::open(&self.dir, "repo", "fresh").await
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Saves a folder with content of its own, a label and a metric.
    async fn save(&self, to: &str, seed: u64) {
        let folder = self.tree(seed);
        let options = SaveOptions {
            labels: [("stage".to_owned(), seed.to_string())].into(),
            facts: StepFacts::default().metric("loss", seed as f64).unwrap(),
            ..SaveOptions::default()
        };
        self.repository.save(&folder, &name(to), &options).await.unwrap();
    }

    /// A folder whose content follows from `seed`.
    fn tree(&self, seed: u64) -> PathBuf {
        let folder = self.path(&format!("tree-{seed}"));
        fs::create_dir_all(folder.join("sub")).unwrap();
        if !folder.join("large").exists() {
            fs::write(folder.join("large"), noise(seed, 2_000_000)).unwrap();
            fs::write(folder.join("sub/small"), noise(seed + 1000, 3000)).unwrap();
        }
        folder
    }

    /// `of` restores as the tree of `seed`, with its label and metric.
    async fn is(&self, of: &str, seed: u64) {
        let dest = self.path(&format!("out-{seed}"));
        let repository = self.fresh().await;
        repository.restore(&name(of), None, &dest, &RestoreOptions::default()).await.unwrap();
        assert_eq!(tree_digest(&dest), tree_digest(&self.tree(seed)), "{of}");
        fs::remove_dir_all(&dest).unwrap();
        let saved = repository.saved(&name(of)).await.unwrap();
        assert_eq!(saved.manifest.labels, [("stage".to_owned(), seed.to_string())].into());
        assert_eq!(saved.value.facts, StepFacts::default().metric("loss", seed as f64).unwrap());
    }

    async fn undelete(&self, of: &str, options: UndeleteOptions) -> towline::Result<u64> {
        Ok(self.fresh().await.undelete(&name(of), &options).await?.was)
    }

    /// A collect with no grace, that keeps what is removed as it would by itself.
    async fn collect(&self) -> CollectReport {
        let options = CollectOptions { grace: Duration::ZERO, ..CollectOptions::default() };
        self.fresh().await.collect(&options).await.unwrap()
    }

    async fn state(&self) -> Arc<State> {
        self.fresh().await.state().await.unwrap()
    }

    /// Makes an object of the log as old as that.
    fn age(&self, key: &object_store::path::Path, age: Duration) {
        let file = File::options().write(true).open(self.path("repo").join(key.as_ref())).unwrap();
        let since_epoch = SystemClock.now().before(age).since(Timestamp(0));
        file.set_modified(SystemTime::UNIX_EPOCH + since_epoch).unwrap();
    }

    async fn verifies(&self) {
        let report = self.fresh().await.verify(None, &VerifyOptions { data: true, ..VerifyOptions::default() }).await;
        assert!(report.as_ref().unwrap().damaged.is_empty(), "{report:?}");
    }
}

fn to(new: &str) -> UndeleteOptions {
    UndeleteOptions { to: Some(name(new)), ..UndeleteOptions::default() }
}

/// B2: "`undelete` restores a name's old value, bit for bit, with its labels and facts, in one commit".
#[tokio::test(flavor = "multi_thread")]
async fn a_removed_name_comes_back_as_it_was() {
    let fixture = Fixture::new().await;
    fixture.save("run/step-1", 1).await;
    fixture.save("other", 2).await;
    let before = fixture.state().await.refs[&name("run/step-1")].clone();
    fixture.repository.remove(&name("run/step-1")).await.unwrap();
    assert_eq!(fixture.fresh().await.list(None).await.unwrap().len(), 1);
    for _ in 0..2 {
        assert_eq!(fixture.collect().await.freed_bytes, 0);
    }
    let report = fixture.collect().await;
    assert_eq!((report.kept_values, report.forgotten_values), (1, 0));
    assert!((2_000_000..2_100_000).contains(&report.kept_bytes), "{report:?}");

    let seq = fixture.state().await.seq;
    assert_eq!(fixture.undelete("run/step-1", UndeleteOptions::default()).await.unwrap(), before.version);
    let state = fixture.state().await;
    assert_eq!(state.seq, seq + 1, "one commit");
    assert!(state.removed.is_empty());
    let after = state.refs[&name("run/step-1")].clone();
    assert_eq!(towline::repository::log::RefValue { version: before.version, ..after }, before);
    fixture.is("run/step-1", 1).await;
    let report = fixture.collect().await;
    assert_eq!((report.kept_values, report.kept_bytes), (0, 0));
    fixture.is("run/step-1", 1).await;
    fixture.verifies().await;
}

/// B1: "a save, copy, sync or step of ranks replaces its tree".
#[tokio::test(flavor = "multi_thread")]
async fn a_replaced_value_comes_back_under_another_name_or_in_its_place() {
    let fixture = Fixture::new().await;
    for seed in [1, 1, 2, 3] {
        fixture.save("best", seed).await;
    }
    fixture.save("other", 4).await;
    fixture.repository.copy(&name("other"), &name("best")).await.unwrap();
    // Three trees were replaced; the one that was saved twice was not.
    let history = fixture.fresh().await.history(&name("best")).await.unwrap();
    assert!(history.present.is_some());
    assert_eq!(history.kept.len(), 3);
    assert!(history.kept.iter().all(|kept| kept.taken.by == Some(RemovalCause::Replaced)), "{history:?}");
    let versions: Vec<u64> = history.kept.iter().map(|kept| kept.value.version).collect();
    assert!(versions.is_sorted_by(|a, b| a > b), "the latest first");

    let refused = fixture.undelete("best", UndeleteOptions::default()).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Conflict, "{refused:?}");
    fixture.undelete("best", to("before")).await.unwrap();
    fixture.is("before", 3).await;
    let first = UndeleteOptions { version: Some(versions[2]), replace: true, ..UndeleteOptions::default() };
    fixture.undelete("best", first).await.unwrap();
    fixture.is("best", 1).await;
    // What it replaced is kept in turn.
    fixture.undelete("best", to("again")).await.unwrap();
    fixture.is("again", 4).await;
    let none = UndeleteOptions { version: Some(1_000), ..to("none") };
    assert_eq!(fixture.undelete("best", none).await.unwrap_err().kind(), ErrorKind::NotFound);
    fixture.collect().await;
    fixture.verifies().await;

    // A sync, and ranks.
    let there = Fixture::open(&fixture.dir, "there", "there-cache").await;
    there.save(&fixture.tree(9), &name("best"), &SaveOptions::default()).await.unwrap();
    let forced = SyncOptions { existing: Existing::Replace, ..SyncOptions::default() };
    sync(&fixture.repository, &there, &[], &forced).await.unwrap();
    assert_eq!(there.history(&name("best")).await.unwrap().kept.len(), 1);
    let rank = PartOptions { rank: 0, ranks: std::num::NonZeroU32::MIN, attempt: "1".parse().unwrap() };
    there.save_part(&fixture.tree(8), &name("best"), &rank, &SaveOptions::default()).await.unwrap();
    assert_eq!(there.history(&name("best")).await.unwrap().kept.len(), 2);
}

/// B1: "No value is kept for changes of paths (`amend`), for steps that `expire` removed without `--keep-removed`".
#[tokio::test(flavor = "multi_thread")]
async fn what_expires_or_is_changed_in_part_is_not_kept_unless_asked() {
    let fixture = Fixture::new().await;
    for step in 1..=3 {
        fixture.save(&format!("run/step-{step}"), step).await;
    }
    let policy = |last| ExpirePolicy { keep_last: std::num::NonZeroU64::new(last), ..ExpirePolicy::default() };
    let plan = fixture.repository.plan_expire(&name("run"), &policy(2)).await.unwrap();
    fixture.repository.expire(&plan).await.unwrap();
    assert!(fixture.state().await.removed.is_empty());
    let reason = fixture.undelete("run/step-1", UndeleteOptions::default()).await.unwrap_err();
    assert_eq!(reason.kind(), ErrorKind::NotFound);
    assert!(format!("{reason:?}").contains("it was removed for good by log entry"), "{reason:?}");
    let changes = Changes { remove: vec![b"sub/small".to_vec()], ..Changes::default() };
    fixture.repository.amend(&name("run/step-3"), &changes, &SaveOptions::default()).await.unwrap();
    assert!(fixture.state().await.removed.is_empty());
    let plan = fixture.repository.plan_expire(&name("run"), &policy(1)).await.unwrap();
    fixture.repository.expire_keeping(&plan).await.unwrap();
    fixture.undelete("run/step-2", UndeleteOptions::default()).await.unwrap();
    fixture.is("run/step-2", 2).await;
}

/// B1: "stays whole for `--keep-removed` (7 days). The store's clock measures that time, whatever the clocks of other
/// machines say".
#[tokio::test(flavor = "multi_thread")]
async fn the_stores_clock_alone_says_how_long_a_value_is_kept() {
    let fixture = Fixture::new().await;
    fixture.save("kept", 1).await;
    // A writer, and later a collector, whose clocks are years behind or ahead.
    let now = SystemClock.now();
    for (seed, clock) in [(2, now.before(DAY * 5000)), (3, now.after(DAY * 5000))] {
        let clock = Arc::new(ManualClock::at(clock));
        let options =
            OpenOptions { cache: Some(fixture.path("wrong")), memory: Some(128 << 20), ..OpenOptions::default() };
        let store = fixture.repository.store().clone();
        let wrong = Repository::open_at(store, options, Arc::<ManualClock>::clone(&clock)).await.unwrap();
        let gone = format!("gone-{seed}");
        wrong.save(&fixture.tree(seed), &name(&gone), &SaveOptions::default()).await.unwrap();
        wrong.remove(&name(&gone)).await.unwrap();
        for jump in [DAY * 5000, DAY * 50_000] {
            clock.set(now.after(jump));
            let options = CollectOptions { grace: Duration::ZERO, ..CollectOptions::default() };
            assert_eq!(wrong.collect(&options).await.unwrap().forgotten_values, 0);
        }
    }
    assert_eq!(fixture.state().await.removed.len(), 2);
    let at = fixture.state().await.removed.values().next().unwrap().at;
    fixture.age(&Numbered::Entry.key(at), HOUR * 167);
    assert_eq!(fixture.collect().await.forgotten_values, 0, "an hour is left");
    fixture.age(&Numbered::Entry.key(at), HOUR * 169);
    let dry = CollectOptions { dry_run: true, grace: Duration::ZERO, ..CollectOptions::default() };
    let planned = fixture.fresh().await.collect(&dry).await.unwrap();
    assert_eq!((planned.forgotten_values, planned.kept_values), (1, 1));
    let report = fixture.collect().await;
    assert_eq!((report.forgotten_values, report.kept_values), (1, 1));
    assert!((2_000_000..2_100_000).contains(&report.freed_bytes), "{report:?}");
    assert!(planned.freed_bytes.abs_diff(report.freed_bytes) < 1000, "{planned:?}");
    let reason = fixture.undelete("gone-2", UndeleteOptions::default()).await.unwrap_err();
    assert_eq!(reason.kind(), ErrorKind::NotFound);
    assert!(format!("{reason:?}").contains("was forgotten by log entry"), "{reason:?}");
    fixture.undelete("gone-3", UndeleteOptions::default()).await.unwrap();
    fixture.is("kept", 1).await;
    fixture.verifies().await;
}

/// Once the entry that took a value is truncated away, the boundary that passed it tells: it was written later.
#[tokio::test(flavor = "multi_thread")]
async fn a_value_outlives_the_entry_that_took_it() {
    let fixture = Fixture::new().await;
    fixture.save("gone", 1).await;
    fixture.repository.remove(&name("gone")).await.unwrap();
    let at = fixture.state().await.removed.values().next().unwrap().at;
    fixture.age(&Numbered::Entry.key(at), DAY * 30);
    // Whoever truncates without looking: no collector that could have forgotten it came by.
    fixture.repository.log().truncate(0, None).await.unwrap();
    assert!(!fixture.path("repo").join(Numbered::Entry.key(at).as_ref()).exists());
    assert_eq!(fixture.state().await.removed.len(), 1, "read from a snapshot of the second version");
    assert_eq!(fixture.collect().await.forgotten_values, 0, "it may be as young as the boundary");
    fixture.age(&Numbered::Boundary.key(1), DAY * 6);
    assert_eq!(fixture.collect().await.forgotten_values, 0);
    // Later boundaries say nothing of it.
    for _ in 0..2 {
        fixture.repository.copy(&name("none"), &name("x")).await.unwrap_err();
        fixture.save("other", 2).await;
        fixture.repository.log().truncate(0, None).await.unwrap();
    }
    let history = fixture.fresh().await.history(&name("gone")).await.unwrap();
    let until: Timestamp = SystemClock.now().after(DAY);
    assert_eq!(history.kept[0].until.as_ref().unwrap()[..10], until.to_string()[..10], "a day is left");
    assert_eq!(history.kept[0].taken.by, None, "the log does not tell any more");
    fixture.age(&Numbered::Boundary.key(1), DAY * 8);
    assert_eq!(fixture.collect().await.forgotten_values, 1);
}

/// B1: "or for `rm --now`, which also forgets earlier values of these names".
#[tokio::test(flavor = "multi_thread")]
async fn now_means_now() {
    let fixture = Fixture::new().await;
    fixture.save("kept", 1).await;
    for seed in [2, 3] {
        fixture.save("gone", seed).await;
    }
    fixture.save("gone/below", 4).await;
    fixture.repository.remove(&name("gone/below")).await.unwrap();
    let now = RemoveOptions { now: true, ..RemoveOptions::default() };
    let plan = fixture.repository.plan_remove(&[name("gone")], &now).await.unwrap();
    assert!((4_000_000..4_100_000).contains(&plan.freed_bytes.unwrap()), "{plan:?}");
    let report = fixture.repository.remove_with(&[name("gone")], &now).await.unwrap();
    assert_eq!((report.removed.len(), report.kept, report.forgotten), (1, 0, 1));
    let freed = fixture.collect().await.freed_bytes;
    assert!((4_000_000..4_100_000).contains(&freed), "{freed}");
    let reason = fixture.undelete("gone", UndeleteOptions::default()).await.unwrap_err();
    assert_eq!(reason.kind(), ErrorKind::NotFound);
    // A name of which only something is kept is there, for this.
    let plain = RemoveOptions::default();
    let below = [name("gone/below")];
    assert_eq!(fixture.repository.remove_with(&below, &plain).await.unwrap_err().kind(), ErrorKind::NotFound);
    let all = RemoveOptions { recursive: true, now: true };
    let report = fixture.repository.remove_with(&[name("gone"), name("gone/below")], &all).await.unwrap();
    assert_eq!((report.removed.len(), report.forgotten), (0, 1));
    assert!(fixture.state().await.removed.is_empty());
    assert!(fixture.collect().await.freed_bytes > 2_000_000);
    fixture.is("kept", 1).await;
}

/// B2: "It is refused, with the reason, if a chunk is gone (exit 3) or known to be damaged (exit 4)".
#[tokio::test(flavor = "multi_thread")]
async fn what_is_lost_is_not_taken_back() {
    let fixture = Fixture::new().await;
    for (gone, seed) in [("damaged", 1), ("purged", 2), ("lost", 3)] {
        fixture.save(gone, seed).await;
    }
    let state = fixture.state().await;
    let mut packs = Vec::new();
    for gone in ["damaged", "purged"] {
        packs.push(fixture.repository.saved(&name(gone)).await.unwrap().map.packs[0]);
    }
    let map = layout::owned(Family::Map, state.refs[&name("lost")].map_key);
    for gone in ["damaged", "purged", "lost"] {
        fixture.repository.remove(&name(gone)).await.unwrap();
    }
    let act =
        async |actions: Vec<Action>| fixture.repository.log().commit(None, |_| Ok(actions.clone())).await.unwrap();
    let condemn = |at: usize, damaged| Action::Condemn { pack: packs[at].id, len: packs[at].len, damaged };
    act(vec![condemn(0, true)]).await;
    // No collector purges what is kept: somebody wrote that by hand. Condemned alone, it is pardoned.
    let at = act(vec![condemn(1, false)]).await.entry.unwrap();
    let taken = fixture.undelete("purged", UndeleteOptions::default()).await.unwrap();
    assert!(fixture.state().await.condemned.values().all(|condemned| condemned.damaged), "{taken}: pardoned");
    fixture.repository.remove(&name("purged")).await.unwrap();
    let at = at.max(act(vec![condemn(1, false)]).await.entry.unwrap());
    act(vec![Action::Purge { pack: packs[1].id, at }]).await;
    fixture.repository.store().objects().delete(&map).await.unwrap();

    for (gone, kind, reason) in [
        ("damaged", ErrorKind::Damaged, "was condemned as damaged by log entry"),
        ("purged", ErrorKind::NotFound, "was purged by log entry"),
        ("lost", ErrorKind::NotFound, "its manifest or map is gone"),
    ] {
        let refused = fixture.undelete(gone, UndeleteOptions::default()).await.unwrap_err();
        assert_eq!(refused.kind(), kind, "{gone}: {refused:?}");
        assert!(format!("{refused:?}").contains(reason), "{gone}: {refused:?}");
        assert!(!fixture.state().await.refs.contains_key(&name(gone)));
    }
    // A collect cannot tell what the lost map uses. It says what helps, and that does.
    let options = CollectOptions { grace: Duration::ZERO, ..CollectOptions::default() };
    let stopped = fixture.fresh().await.collect(&options).await.unwrap_err();
    assert!(stopped.help_text().unwrap().contains("towline rm --now"), "{stopped:?}");
    let now = RemoveOptions { now: true, ..RemoveOptions::default() };
    fixture.repository.remove_with(&["purged", "lost"].map(name), &now).await.unwrap();
    fixture.collect().await;
}

/// B2: "Of several undeletes at the same time one succeeds".
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_many_that_take_it_back_one_does() {
    let fixture = Fixture::new().await;
    for round in 0..4 {
        fixture.save("gone", round).await;
        fixture.repository.remove(&name("gone")).await.unwrap();
        let handles = futures::future::join_all((0..4).map(|_| fixture.fresh())).await;
        let takers = handles.into_iter().enumerate().map(|(n, repository)| {
            let options = if round % 2 == 0 { UndeleteOptions::default() } else { to(&format!("again/{n}")) };
            tokio::spawn(async move { repository.undelete(&name("gone"), &options).await.map(|report| report.name) })
        });
        let results: Vec<_> = futures::future::join_all(takers).await.into_iter().map(Result::unwrap).collect();
        let won: Vec<_> = results.iter().flatten().collect();
        assert_eq!(won.len(), 1, "{results:?}");
        let refused = results.iter().filter_map(|result| result.as_ref().err()).map(towline::Error::kind);
        assert!(
            refused.into_iter().all(|kind| matches!(kind, ErrorKind::Conflict | ErrorKind::NotFound)),
            "{results:?}"
        );
        fixture.is(won[0].as_str(), round).await;
        fixture
            .repository
            .remove_with(&[won[0].clone()], &RemoveOptions { now: true, recursive: false })
            .await
            .unwrap();
    }
}

/// B1, killed and raced: savers that replace, removals, collects that forget everything older, and undeletes.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_is_taken_back_while_others_collect_is_whole() {
    let fixture = Arc::new(Fixture::new().await);
    for seed in 0..4 {
        fixture.save("kept", seed).await;
    }
    let busy = Arc::clone(&fixture);
    let collector = tokio::spawn(async move {
        for _ in 0..12 {
            let options = CollectOptions::at_once();
            busy.fresh().await.collect(&options).await.unwrap();
        }
    });
    let mut taken = 0;
    while !collector.is_finished() {
        fixture.save("gone", 5).await;
        fixture.repository.remove(&name("gone")).await.unwrap();
        match fixture.undelete("gone", UndeleteOptions::default()).await {
            Ok(_) => {
                taken += 1;
                fixture.is("gone", 5).await;
            }
            Err(error) => assert!(matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Conflict), "{error:?}"),
        }
    }
    collector.await.unwrap();
    assert!(taken > 0);
    fixture.is("kept", 3).await;
    fixture.verifies().await;
}

/// B3: "A kept value has no name".
#[tokio::test(flavor = "multi_thread")]
async fn what_is_kept_is_read_by_nobody() {
    let fixture = Fixture::new().await;
    fixture.save("run/step-1", 1).await;
    fixture.save("run/step-2", 2).await;
    let manifest = fixture.state().await.refs[&name("run/step-2")].manifest;
    fixture.repository.remove(&name("run/step-2")).await.unwrap();
    let reader = fixture.fresh().await;
    assert_eq!(reader.saved(&name("run/step-2")).await.unwrap_err().kind(), ErrorKind::NotFound);
    let restored = reader.restore(&name("run/step-2"), None, &fixture.path("out"), &RestoreOptions::default()).await;
    assert_eq!(restored.unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(reader.resolve(&"run@latest".parse().unwrap()).await.unwrap(), name("run/step-1"));
    assert!(reader.state().await.unwrap().refs.values().all(|value| value.manifest != manifest));
    let there = Fixture::open(&fixture.dir, "there", "there-cache").await;
    sync(&fixture.repository, &there, &[], &SyncOptions::default()).await.unwrap();
    let state = there.state().await.unwrap();
    assert_eq!((state.refs.len(), state.removed.len()), (1, 0), "a sync moves names");
}

#[test]
fn the_command_line_takes_back() {
    let user = User::with_repository();
    for (round, text) in ["one", "two"].into_iter().enumerate() {
        user.write("tree/f", text.as_bytes());
        let saved = user.json(&["save", "tree", "best"], 0);
        assert_eq!(saved.get("replaced").map(|replaced| &replaced["kept"]), (round > 0).then_some(&true.into()));
    }
    let removed = user.json(&["rm", "best"], 0);
    assert_eq!(removed, serde_json::json!({ "removed": ["best"], "kept": 1, "forgotten": 0 }));
    let history = user.json(&["history", "best"], 0);
    assert_eq!(history["present"], Value::Null);
    let by: Vec<&str> =
        history["kept"].as_array().unwrap().iter().map(|kept| kept["taken"]["by"].as_str().unwrap()).collect();
    assert_eq!(by, ["removed", "replaced"]);
    assert!(history["kept"][0]["until"].as_str().unwrap().ends_with('Z'));
    assert!(user.ok(&["history", "best"]).contains("replaced 20"), "a table");
    let text = user.ok(&["undelete", "best"]);
    assert!(text.starts_with("best is again version "), "{text}");
    assert_eq!(user.ok(&["cat", "best:f"]), "two");
    assert_eq!(user.fails(&["undelete", "best"], 5)["kind"], "conflict");
    let back = user.json(&["undelete", "best", "--as", "before"], 0);
    assert_eq!((&back["name"], &back["from"]), (&"before".into(), &"best".into()));
    assert_eq!(user.ok(&["cat", "before:f"]), "one");
    assert_eq!(user.fails(&["undelete", "best", "--as", "x"], 3)["kind"], "not-found");
    assert!(user.ok(&["rm", "before"]).contains("`towline undelete` takes it back"));
    assert!(user.ok(&["rm", "--now", "best", "before"]).contains("nothing is kept"));
    assert_eq!(user.json(&["collect", "--grace", "0"], 0)["kept_values"], 0);
    user.ok(&["save", "tree", "best"]);
    user.ok(&["rm", "best"]);
    let collected = user.ok(&["collect", "--grace", "0"]);
    assert!(collected.contains("kept of removed and replaced names: "), "{collected}");
    assert_eq!(user.json(&["collect", "--grace", "0", "--keep-removed", "0"], 0)["forgotten_values"], 1);
    assert_eq!(user.fails(&["history", "best"], 3)["kind"], "not-found");
    user.ok(&["save", "tree", "run-7/step-1"]);
    for verb in ["history", "undelete"] {
        let said = |name: &str| user.fails(&[verb, name], 3)["message"].as_str().unwrap().to_owned();
        let [misspelt, run] = [said("run-7/step-2"), said("run-7")];
        assert!(
            misspelt.starts_with("no such name `run-7/step-2` in ") && misspelt.contains("`run-7/step-1`"),
            "{misspelt}"
        );
        assert_eq!(run, "`run-7` is not a name itself, and no removed name below it is kept");
    }
}

#[test]
fn all_removed_steps_of_a_run_come_back_at_once() {
    let user = User::with_repository();
    for step in 1..=3 {
        user.write("tree/a", format!("{step}").as_bytes());
        user.ok(&["save", "tree", &format!("run/step-{step}")]);
    }
    user.ok(&["save", "tree", "run-b/step-1"]);
    let text = user.ok(&["rm", "run", "--recursive"]);
    assert!(text.contains("with --recursive for all below a name, takes it back"), "{text}");
    user.ok(&["rm", "run-b/step-1"]);
    user.write("tree/a", b"new");
    user.ok(&["save", "tree", "run/step-3"]);
    let error = user.fails(&["undelete", "run"], 3);
    assert_eq!(
        error["help"],
        "`towline undelete run --recursive` restores the names below it that were removed last, of 2"
    );
    let report = user.json(&["undelete", "run", "--recursive"], 0);
    let names: Vec<&str> =
        report["names"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["run/step-1", "run/step-2"]);
    assert_eq!((user.ok(&["cat", "run/step-2:a"]), user.ok(&["cat", "run/step-3:a"])), ("2".into(), "new".into()));
    let again = user.fails(&["undelete", "run", "--recursive"], 3);
    assert_eq!(again["kind"], "not-found");
    user.ok(&["rm", "run/step-1"]);
    user.ok(&["save", "tree", "run/step-1"]);
    let again = user.fails(&["undelete", "run", "--recursive"], 3);
    assert!(again["help"].as_str().unwrap().starts_with("`towline undelete run/step-1 --as NEW` restores"), "{again}");
    let again = user.fails(&["undelete", "run/step-1"], 5);
    assert!(again["help"].as_str().unwrap().contains("--as NEW"), "{again}");
    user.fails(&["show", "run-b/step-1"], 3);
    // Names that an earlier command removed stay removed.
    user.ok(&["rm", "run/step-3"]);
    user.ok(&["rm", "run", "--recursive"]);
    let report = user.json(&["undelete", "run", "--recursive"], 0);
    let restored: Vec<&str> =
        report["names"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
    assert_eq!((restored, &report["earlier"]), (vec!["run/step-1", "run/step-2"], &json!(["run/step-3"])));
    let told = user.ok(&["undelete", "run", "--recursive"]);
    assert!(told.starts_with("run/step-3 is again version "), "{told}");
    assert_eq!(user.run(&["undelete", "run", "--recursive", "--as", "other"]).code, Some(2));
}

/// B2: "If the last value is not kept, an earlier one is restored only by its version".
#[test]
fn no_earlier_value_comes_back_in_place_of_one_that_expired() {
    let user = User::with_repository();
    for (step, content) in [(1, "1"), (1, "2"), (2, "3")] {
        user.write("tree/a", content.as_bytes());
        user.ok(&["save", "tree", &format!("run/step-{step}")]);
    }
    user.ok(&["expire", "run", "--keep-last", "1"]);
    for args in [&["undelete", "run/step-1"][..], &["undelete", "run", "--recursive"]] {
        let error = user.fails(args, 3);
        let message = error["message"].as_str().unwrap();
        assert!(message.starts_with("last value of `run/step-1` is not kept, only an earlier one"), "{message}");
        assert!(message.contains("the last one was removed for good"), "{message}");
        assert!(error["help"].as_str().unwrap().contains("`towline undelete run/step-1 --version V`"), "{error}");
    }
    user.fails(&["show", "run/step-1"], 3);
    let version = user.json(&["history", "run/step-1"], 0)["kept"][0]["version"].to_string();
    user.ok(&["undelete", "run/step-1", "--version", &version]);
    assert_eq!(user.ok(&["cat", "run/step-1:a"]), "1");
    // A removal that keeps the last value is taken back as before.
    user.ok(&["rm", "run/step-1"]);
    user.ok(&["undelete", "run/step-1"]);
}

/// B4: "A sync does not carry removals".
#[test]
fn a_sync_says_which_removals_it_does_not_carry() {
    let user = User::with_repository();
    for step in 1..=3 {
        user.write("tree/a", format!("{step}").as_bytes());
        user.ok(&["save", "tree", &format!("run/step-{step}")]);
    }
    user.ok(&["sync", "../repo", "../there", "--init"]);
    user.ok(&["rm", "run/step-3"]);
    let forth = user.json(&["sync", "../repo", "../there", "run@latest"], 0);
    assert_eq!((&forth["names"], &forth["left_behind"]), (&json!(1), &json!(["run/step-3"])));
    assert_eq!(forth["returned"], Value::Null);
    let told = user.run(&["sync", "../repo", "../there"]);
    let [there, err] = [user.work().join("../there").canonicalize().unwrap().display().to_string(), told.err];
    let expected =
        format!("removed here, and still in {there}, and may be the latest steps there: run/step-3; `towline rm NAME");
    assert!(err.contains(&expected), "{err}");
    for dry in [&["--dry-run"][..], &[]] {
        let back = user.json(&[&["sync", "../there", "../repo", "run"], dry].concat(), 0);
        assert_eq!((&back["returned"], &back["left_behind"]), (&json!(["run/step-3"]), &Value::Null), "{back}");
    }
    user.ok(&["show", "run/step-3"]);
}
