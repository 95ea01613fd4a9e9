//! How far are save and restore from the physical floor? Beside BLAKE3 on every core with the same reads and writes, and
//! beside plain copying, in one process on one machine, alternating.
//!
//! `cargo bench --bench pipeline` (`PIPELINE_MIB` sets the size; all of it lies in memory where /dev/shm is).

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a bench prints, and fails by panicking")]

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use towline::codec::Compression;
use towline::ops::{RestoreOptions, SaveOptions};
use towline::repository::{OpenOptions, Repository};
use towline::storage::{Location, StoreOptions, open};

const PIECE: u64 = 8 << 20;
const RUNS: usize = 5;

fn main() {
    let mib: u64 = std::env::var("PIPELINE_MIB").map_or(1024, |n| n.parse().unwrap());
    tokio::runtime::Runtime::new().unwrap().block_on(run(mib << 20));
}

async fn run(len: u64) {
    let dir = tempfile::tempdir_in(if Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "." }).unwrap();
    let source = dir.path().join("source");
    fs::create_dir(&source).unwrap();
    write_noise(&source.join("weights"), len);
    let mut times: Vec<(&str, Vec<Duration>)> = Vec::new();
    for _ in 0..RUNS {
        let mut note = |what, elapsed| match times.iter_mut().find(|(known, _)| *known == what) {
            Some((_, all)) => all.push(elapsed),
            None => times.push((what, vec![elapsed])),
        };
        note("BLAKE3 + read", floor(&source.join("weights"), None));
        note("BLAKE3 + read + write", floor(&source.join("weights"), Some(&dir.path().join("floor"))));
        fs::remove_file(dir.path().join("floor")).unwrap();
        note("copy", timed(|| fs::copy(source.join("weights"), dir.path().join("copy")).map(drop).unwrap()));
        fs::remove_file(dir.path().join("copy")).unwrap();
        let repository = repository(dir.path()).await;
        let name = "bench".parse().unwrap();
        let raw = SaveOptions { compression: Compression::Off, reread: true, ..SaveOptions::default() };
        for what in ["save", "save again, reading all"] {
            let begun = Instant::now();
            repository.save(&source, &name, &raw).await.unwrap();
            note(what, begun.elapsed());
        }
        let begun = Instant::now();
        repository.save(&source, &name, &SaveOptions { reread: false, ..raw.clone() }).await.unwrap();
        note("save again, by stat", begun.elapsed());
        let begun = Instant::now();
        let dest = dir.path().join("restored");
        repository.restore(&name, None, &dest, &RestoreOptions::default()).await.unwrap();
        note("restore", begun.elapsed());
        fs::remove_dir_all(&dest).unwrap();
        fs::remove_dir_all(dir.path().join("repository")).unwrap();
    }
    for (what, all) in &mut times {
        all.sort_unstable();
        let median = all.get(all.len() / 2).copied().unwrap_or_default();
        println!("{what:24} {median:>10.1?} {:>7.2} GB/s", len as f64 / median.as_secs_f64() / 1e9);
    }
}

async fn repository(dir: &Path) -> Repository {
    let options = StoreOptions { create: true, ..StoreOptions::default() };
    let location = Location::directory(dir.join("repository")).unwrap();
    let store = open(&location, &options).await.unwrap();
    Repository::create(store, OpenOptions { cache: Some(dir.join("cache")), memory: None, ..OpenOptions::default() })
        .await
        .unwrap()
        .0
}

/// Reads, hashes and perhaps writes a file in pieces, on every core.
fn floor(source: &Path, dest: Option<&Path>) -> Duration {
    let file = File::open(source).unwrap();
    let len = file.metadata().unwrap().len();
    let out = dest.map(|dest| File::create(dest).unwrap());
    let next = AtomicU64::new(0);
    timed(|| {
        std::thread::scope(|scope| {
            for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
                scope.spawn(|| {
                    let mut buffer = vec![0; usize::try_from(PIECE).unwrap()];
                    loop {
                        let at = next.fetch_add(PIECE, Ordering::Relaxed);
                        if at >= len {
                            return;
                        }
                        let piece = &mut buffer[..usize::try_from(PIECE.min(len - at)).unwrap()];
                        file.read_exact_at(piece, at).unwrap();
                        std::hint::black_box(blake3::hash(piece));
                        if let Some(out) = &out {
                            out.write_all_at(piece, at).unwrap();
                        }
                    }
                });
            }
        });
    })
}

fn timed(work: impl FnOnce()) -> Duration {
    let begun = Instant::now();
    work();
    begun.elapsed()
}

fn write_noise(path: &Path, len: u64) {
    let mut file = File::create(path).unwrap();
    let mut noise = blake3::Hasher::new().update(b"pipeline").finalize_xof();
    let mut piece = vec![0; usize::try_from(PIECE).unwrap()];
    for _ in 0..len / PIECE {
        noise.fill(&mut piece);
        file.write_all(&piece).unwrap();
    }
}
