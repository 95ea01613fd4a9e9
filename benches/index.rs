//! Does the size of a repository cost anything? Ten million chunks (simulated content, real index segments) beside a
//! repository that holds one checkpoint alone.
//!
//! `cargo bench --bench index` (`INDEX_CHUNKS` sets another number).

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a bench prints, and fails by panicking")]

use std::path::Path;
use std::time::{Duration, Instant};

use object_store::ObjectStoreExt as _;
use towline::format::envelope::{Kind, seal};
use towline::format::{PackRef, Row, segment_bytes};
use towline::id::{ChunkId, Owned, SessionId};
use towline::metrics::Metric;
use towline::ops::{RestoreOptions, SaveOptions};
use towline::repository::layout::{Family, owned};
use towline::repository::log::{Action, SegmentInfo};
use towline::repository::{OpenOptions, Repository, StoredChunks};
use towline::storage::{Location, StoreOptions, open};

const PACK_CHUNKS: u64 = 256;
const SEGMENT_CHUNKS: u64 = 2 << 20;
const RUNS: usize = 5;

fn main() {
    let chunks: u64 = std::env::var("INDEX_CHUNKS").map_or(10_000_000, |n| n.parse().unwrap());
    tokio::runtime::Runtime::new().unwrap().block_on(run(chunks));
}

async fn run(chunks: u64) {
    let dir = tempfile::tempdir_in(if Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "." }).unwrap();
    let checkpoint = dir.path().join("checkpoint");
    std::fs::create_dir(&checkpoint).unwrap();
    let mut bytes = vec![0; 256 << 20];
    blake3::Hasher::new().update(b"checkpoint").finalize_xof().fill(&mut bytes);
    std::fs::write(checkpoint.join("weights"), &bytes).unwrap();

    let small = repository(&dir.path().join("small"), dir.path()).await;
    let large = repository(&dir.path().join("large"), dir.path()).await;
    let index_bytes = fill(&large, chunks).await;
    let name = "run/step-1".parse().unwrap();
    for repository in [&small, &large] {
        repository.save(&checkpoint, &name, &SaveOptions::default()).await.unwrap();
    }
    let held = small.list(None).await.unwrap()[0].chunks;
    println!(
        "{chunks} chunks in the index, {:.1} bytes each; the checkpoint has {held}",
        index_bytes as f64 / chunks as f64
    );

    let (mut alone, mut among) = (Vec::new(), Vec::new());
    for run in 0..RUNS {
        for (repository, times) in [("small", &mut alone), ("large", &mut among)] {
            let fresh = reopen(&dir.path().join(repository), dir.path()).await;
            let dest = dir.path().join(format!("restored-{repository}-{run}"));
            let begun = Instant::now();
            fresh.restore(&name, None, &dest, &RestoreOptions::default()).await.unwrap();
            times.push(begun.elapsed());
            let requests = fresh.store().counters().get(Metric::GetRequests);
            if run == 0 {
                println!("restore from the {repository} repository: {requests} get requests");
            }
            std::fs::remove_dir_all(&dest).unwrap();
        }
    }
    let (alone, among) = (median(alone), median(among));
    let ratio = among.as_secs_f64() / alone.as_secs_f64();
    println!("restore: alone {alone:.1?}, among {chunks} chunks {among:.1?}: {ratio:.2}x (at most 2x wanted)");
    lookups(&large, chunks).await;
}

async fn repository(path: &Path, cache: &Path) -> Repository {
    let options = StoreOptions { create: true, ..StoreOptions::default() };
    let store = open(&Location::directory(path).unwrap(), &options).await.unwrap();
    Repository::create(store, OpenOptions { cache: Some(cache.join("cache")), memory: None, ..OpenOptions::default() })
        .await
        .unwrap()
        .0
}

async fn reopen(path: &Path, cache: &Path) -> Repository {
    let store = open(&Location::directory(path).unwrap(), &StoreOptions::default()).await.unwrap();
    Repository::open(store, OpenOptions { cache: Some(cache.join("cache")), memory: None, ..OpenOptions::default() })
        .await
        .unwrap()
}

/// The id of simulated chunk `n`.
fn id(n: u64) -> ChunkId {
    ChunkId::of(&n.to_le_bytes())
}

/// Adds segments over `chunks` chunks; returns their bytes.
async fn fill(repository: &Repository, chunks: u64) -> u64 {
    let session = SessionId::random();
    repository.log().commit(Some(session), |_| Ok(vec![Action::Open(session)])).await.unwrap();
    let mut index_bytes = 0;
    for from in (0..chunks).step_by(usize::try_from(SEGMENT_CHUNKS).unwrap()) {
        let n = SEGMENT_CHUNKS.min(chunks - from);
        let pack = |_| PackRef { id: Owned::fresh(session), len: 64 << 20, footer_len: 14_000, chunks: 256 };
        let packs: Vec<PackRef> = (0..n.div_ceil(PACK_CHUNKS)).map(pack).collect();
        let row = |k: u64| {
            let (pack, ordinal) = (u32::try_from(k / PACK_CHUNKS).unwrap(), u32::try_from(k % PACK_CHUNKS).unwrap());
            Row { prefix: id(from + k).prefix(), pack, ordinal }
        };
        let object = seal(Kind::Segment, &segment_bytes(&packs, (0..n).map(row).collect()), false);
        index_bytes += object.len() as u64;
        let segment = Owned::fresh(session);
        let info = SegmentInfo { len: object.len() as u64, packs: packs.len() as u64, chunks: n, built: 0 };
        repository.store().objects().put(&owned(Family::Index, segment), object.into()).await.unwrap();
        repository.log().commit(Some(session), |_| Ok(vec![Action::AddSegment(segment, info)])).await.unwrap();
    }
    repository.log().commit(Some(session), |_| Ok(vec![Action::Close(session)])).await.unwrap();
    index_bytes
}

/// Cost of learning that a chunk is new, and to find the candidates of one that is not.
async fn lookups(repository: &Repository, chunks: u64) {
    const LOOKUPS: u64 = 1_000_000;
    let begun = Instant::now();
    let mut known = StoredChunks::load(repository).await.unwrap();
    println!("opening the index: {:.1?}", begun.elapsed());
    let fresh: Vec<ChunkId> = (chunks..chunks + LOOKUPS).map(id).collect();
    let begun = Instant::now();
    let found = known.locate(&fresh).await.unwrap().into_iter().flatten().count();
    println!("{LOOKUPS} chunks that are new: {:.0} ns each ({found} found)", per(begun.elapsed(), LOOKUPS));
    let state = repository.state().await.unwrap();
    let index = repository.index(&state).await.unwrap();
    let step = (chunks / LOOKUPS).max(1);
    let begun = Instant::now();
    let hits: usize = (0..LOOKUPS).map(|n| index.candidates(id(n * step)).count()).sum();
    println!(
        "{LOOKUPS} chunks that are there: {:.0} ns each, hashing included ({hits} candidates)",
        per(begun.elapsed(), LOOKUPS)
    );
}

fn per(elapsed: Duration, n: u64) -> f64 {
    elapsed.as_secs_f64() * 1e9 / n as f64
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}
