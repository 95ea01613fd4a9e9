//! Many at once: savers and collectors on one repository, on a good day and on a bad one. Nothing acknowledged is lost,
//! nothing wrong is ever read.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use object_store::ObjectStore;
use object_store::memory::InMemory;
use towline::error::{ErrorKind, Result};
use towline::ops::{CollectOptions, RestoreOptions, SaveOptions, VerifyOptions};
use towline::repository::layout::Numbered;
use towline::repository::{OpenOptions, Repository};
use towline::storage::Store;

use crate::data::{name, noise};
use crate::faulty::{Faults, Faulty};

const SAVERS: u64 = 8;

async fn open(objects: &Arc<dyn ObjectStore>, cache: PathBuf) -> Repository {
    let options = OpenOptions { cache: Some(cache), memory: Some(64 << 20), ..OpenOptions::default() };
    loop {
        let store = Store::from_objects_watched(Arc::clone(objects), Duration::from_secs(5));
        match Repository::create(store, options.clone()).await {
            Ok((repository, _)) => return repository,
            Err(error) => assert_ne!(error.kind(), ErrorKind::Damaged, "{error:?}"),
        }
    }
}

/// Content that shares pieces with that of other savers and rounds.
fn content(saver: u64, round: u64) -> Vec<u8> {
    let parts = [round % 5, 100 + (saver + round) % 7, 1000 + saver * 100 + round];
    parts.into_iter().flat_map(|seed| noise(seed, 150_000)).collect()
}

/// What a saver knows to be saved, and what may be.
#[derive(Default)]
struct KnownSaves {
    sure: BTreeMap<String, u64>,
    perhaps: BTreeMap<String, Vec<Option<u64>>>,
}

impl KnownSaves {
    fn note(&mut self, key: String, wanted: Option<u64>, outcome: &Result<()>) {
        match (outcome, wanted) {
            (Ok(()), Some(round)) => {
                self.perhaps.remove(&key);
                self.sure.insert(key, round);
            }
            (Ok(()), None) => {
                self.perhaps.remove(&key);
                self.sure.remove(&key);
            }
            (Err(_), wanted) => {
                let before = self.sure.get(&key).copied();
                let known = self.perhaps.entry(key).or_insert_with(|| vec![before]);
                known.push(wanted);
            }
        }
    }

    async fn check(&self, repository: &Repository, saver: u64, scratch: &Path) {
        let keys: std::collections::BTreeSet<&String> = self.sure.keys().chain(self.perhaps.keys()).collect();
        for key in keys {
            let allowed = match self.perhaps.get(key) {
                Some(known) => known.clone(),
                None => vec![self.sure.get(key).copied()],
            };
            let dest = scratch.join(format!("restored-{saver}"));
            let options = RestoreOptions { overwrite: true, ..RestoreOptions::default() };
            let got = match repository.restore(&name(key), None, &dest, &options).await {
                Ok(_) => Some(fs::read(&dest).unwrap()),
                Err(error) if error.kind() == ErrorKind::NotFound => None,
                Err(error) => panic!("{key}: {error:?}"),
            };
            let fits = |round: &Option<u64>| round.map(|round| content(saver, round)) == got;
            assert!(allowed.iter().any(fits), "{key}: not what was saved, nor what may have been: {allowed:?}");
        }
    }
}

async fn saver(repository: Repository, saver: u64, rounds: u64, scratch: PathBuf) -> KnownSaves {
    let mut books = KnownSaves::default();
    let path = scratch.join(format!("source-{saver}"));
    for round in 0..rounds {
        let key = format!("s{saver}/{}", round % 4);
        fs::write(&path, content(saver, round)).unwrap();
        let options = SaveOptions { reread: true, ..SaveOptions::default() };
        let saved = repository.save(&path, &name(&key), &options).await.map(drop);
        fails_as_it_may(&saved);
        books.note(key, Some(round), &saved);
        if round % 5 == 4 {
            let key = format!("s{saver}/{}", (round + 1) % 4);
            let removed = repository.remove(&name(&key)).await;
            let gone = matches!(&removed, Err(error) if error.kind() == ErrorKind::NotFound);
            books.note(key, None, &if gone { Ok(()) } else { removed });
        }
    }
    books
}

/// A store's fault or a lost race may stop a save; damage or a bug may not.
fn fails_as_it_may(outcome: &Result<()>) {
    if let Err(error) = outcome {
        assert!(matches!(error.kind(), ErrorKind::Unreachable | ErrorKind::Conflict), "{error:?}");
    }
}

async fn collector(repository: Repository, stop: Arc<AtomicBool>) -> u64 {
    let mut collected = 0;
    while !stop.load(Ordering::Relaxed) {
        let options = CollectOptions::at_once();
        let outcome = repository.collect(&options).await.map(|report| collected += report.purged_packs);
        fails_as_it_may(&outcome);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    collected
}

/// Lets all of them loose; returns the store and what each saver believes.
async fn run(objects: Arc<dyn ObjectStore>, rounds: u64, scratch: &Path) -> (Vec<KnownSaves>, u64) {
    let stop = Arc::new(AtomicBool::new(false));
    let mut collectors = Vec::new();
    for n in 0..2 {
        let repository = open(&objects, scratch.join(format!("cache-c{n}"))).await;
        collectors.push(tokio::spawn(collector(repository, Arc::clone(&stop))));
    }
    let mut savers = Vec::new();
    for n in 0..SAVERS {
        let repository = open(&objects, scratch.join(format!("cache-{n}"))).await;
        savers.push(tokio::spawn(saver(repository, n, rounds, scratch.to_owned())));
    }
    let mut books = Vec::new();
    for saver in savers {
        books.push(saver.await.unwrap());
    }
    stop.store(true, Ordering::Relaxed);
    let mut purged = 0;
    for collector in collectors {
        purged += collector.await.unwrap();
    }
    (books, purged)
}

/// P3: "An acknowledged save survives [...] any interleaving of savers and collectors". F10: "Any number of savers,
/// readers and collectors may work on one repository; they coordinate only through the store."
#[tokio::test(flavor = "multi_thread")]
async fn eight_savers_and_two_collectors_lose_nothing_in_a_thousand_commits() {
    let scratch = tempfile::tempdir().unwrap();
    let objects: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let (books, purged) = run(Arc::clone(&objects), 50, scratch.path()).await;
    let repository = open(&objects, scratch.path().join("cache-check")).await;
    let state = repository.state().await.unwrap();
    assert!(state.seq >= 1000, "only {} commits", state.seq);
    assert!(purged > 50, "the collectors had little to do: {purged}");
    for (saver, books) in (0..).zip(&books) {
        assert!(books.perhaps.is_empty(), "a save failed on a good day");
        books.check(&repository, saver, scratch.path()).await;
    }
}

/// F9: "Errors of the 5xx kind, resets, timeouts, slow responses, truncated bodies, lost acknowledgements and stale
/// listings never yield a wrong byte or a wrong ref."
#[tokio::test(flavor = "multi_thread")]
async fn on_a_bad_day_nothing_acknowledged_is_lost_and_nothing_wrong_is_read() {
    for seed in 0..3 {
        let scratch = tempfile::tempdir().unwrap();
        let faulty = Arc::new(Faulty::new(Arc::new(InMemory::new()), Faults::bad_day(), seed));
        let objects: Arc<dyn ObjectStore> = Arc::<Faulty>::clone(&faulty);
        let (books, _) = run(Arc::clone(&objects), 12, scratch.path()).await;
        assert!(faulty.injected() > 100, "the day was not bad: {}", faulty.injected());
        faulty.calm(true);
        let repository = open(&objects, scratch.path().join("cache-check")).await;
        for (saver, books) in (0..).zip(&books) {
            books.check(&repository, saver, scratch.path()).await;
        }
    }
}

/// F9, as before: whichever entries of the log a listing leaves out, they are neither missing nor lost.
#[tokio::test]
async fn entries_that_a_listing_leaves_out_are_no_damage() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("source");
    for hidden in 1..8 {
        let faulty = Faulty::new(Arc::new(InMemory::new()), Faults::default(), 0);
        let objects: Arc<dyn ObjectStore> = Arc::new(faulty.clone());
        let repository = open(&objects, scratch.path().join(format!("cache-{hidden}"))).await;
        for round in 0..4 {
            fs::write(&path, content(0, round)).unwrap();
            repository.save(&path, &name(&format!("a/{round}")), &SaveOptions::default()).await.unwrap();
        }
        faulty.unlist(Numbered::Entry.key(hidden));
        faulty.unlist(Numbered::Entry.key(hidden + 1));
        let options = VerifyOptions { repair: true, ..VerifyOptions::default() };
        let verified = repository.verify(None, &options).await.unwrap();
        assert!(verified.damaged.is_empty(), "{:?}", verified.damaged);
        repository.collect(&CollectOptions::default()).await.unwrap();
        assert_eq!(open(&objects, scratch.path().join("fresh")).await.state().await.unwrap().refs.len(), 4);
    }
}
