//! Cost of the cache: reading and filling it beside plain files with a checksum, and opening one with ten million chunks.
//!
//! `cargo bench --bench cache` (`CACHE_CHUNKS` sets another number).

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a bench prints, and fails by panicking")]

use std::fs::File;
use std::hint::black_box;
use std::io::{BufWriter, Write as _};
use std::path::Path;
use std::time::Instant;

use bytes::Bytes;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group};
use towline::cache::{Cache, CacheOptions, Frame, Inserted};
use towline::chunk::Chunk;
use towline::codec::{Codec, Encoded};
use towline::id::ChunkId;

/// Bytes in all frames of one length.
const ALL: usize = 256 << 20;

fn main() {
    let chunks: u64 = std::env::var("CACHE_CHUNKS").map_or(10_000_000, |n| n.parse().unwrap());
    if !std::env::args().any(|arg| arg == "--test") {
        opening(chunks);
    }
    benches();
    Criterion::default().configure_from_args().final_summary();
}

criterion_group!(benches, reading, filling);

fn frames(len: usize) -> Vec<Frame> {
    let frame = |n: usize| {
        let mut plain = vec![0; len];
        blake3::Hasher::new().update(&n.to_le_bytes()).finalize_xof().fill(&mut plain);
        let bytes = Bytes::from(plain);
        Frame::decoded(Chunk::new(&bytes), Encoded { codec: Codec::Raw, bytes: bytes.clone(), base: None }).unwrap()
    };
    (0..ALL / len).map(frame).collect()
}

fn options(capacity: u64) -> CacheOptions {
    CacheOptions { free_floor: 0, ..CacheOptions::new(capacity) }
}

/// From the page cache, one thread: what is left is the work besides the disk.
fn reading(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("read");
    for len in [64 << 10, 1 << 20] {
        let dir = tempfile::tempdir_in(".").unwrap();
        let cache = Cache::open(&dir.path().join("cache"), options(1 << 30)).unwrap();
        let frames = frames(len);
        for frame in &frames {
            let _ = cache.insert(frame);
            std::fs::write(dir.path().join(frame.id().to_string()), frame.bytes()).unwrap();
        }
        let ids: Vec<ChunkId> = frames.iter().map(Frame::id).collect();
        drop(frames);
        group.throughput(Throughput::Bytes(ALL as u64)).sample_size(10);
        group.bench_function(BenchmarkId::new("cache", len), |bencher| {
            bencher.iter(|| ids.iter().for_each(|id| drop(black_box(cache.get(id).unwrap()))));
        });
        group.bench_function(BenchmarkId::new("plain files", len), |bencher| {
            bencher.iter(|| {
                for id in &ids {
                    let bytes = std::fs::read(dir.path().join(id.to_string())).unwrap();
                    assert_eq!(ChunkId::of(black_box(&bytes)), *id);
                }
            });
        });
    }
    group.finish();
}

/// Into a cache that is full, so that each frame evicts others; the plain files are written over as well.
fn filling(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("fill");
    for len in [64 << 10, 1 << 20] {
        let dir = tempfile::tempdir_in(".").unwrap();
        let cache = Cache::open(&dir.path().join("cache"), options(128 << 20)).unwrap();
        let frames = frames(len);
        let names: Vec<_> = (0..frames.len() / 2).map(|n| dir.path().join(n.to_string())).collect();
        group.throughput(Throughput::Bytes(ALL as u64)).sample_size(10);
        group.bench_function(BenchmarkId::new("cache", len), |bencher| {
            bencher.iter(|| frames.iter().filter(|frame| cache.insert(frame) == Inserted::Kept).count());
        });
        group.bench_function(BenchmarkId::new("plain files", len), |bencher| {
            bencher.iter(|| {
                for (frame, name) in frames.iter().zip(names.iter().cycle()) {
                    assert_eq!(ChunkId::of(black_box(frame.bytes())), frame.id());
                    std::fs::write(name, frame.bytes()).unwrap();
                }
            });
        });
    }
    group.finish();
}

/// Opens a cache with a journal of as many chunks of 256 KiB, which is written here as the format says; its slabs are holes.
fn opening(chunks: u64) {
    const SLAB_LEN: u64 = 16 << 30;
    const UNITS: u64 = 64;
    let dir = tempfile::tempdir_in(".").unwrap();
    let slabs = (chunks * UNITS * 4096).div_ceil(SLAB_LEN);
    let options = || CacheOptions { slab_len: Some(SLAB_LEN), ..options(slabs * SLAB_LEN) };
    drop(Cache::open(dir.path(), options()).unwrap());
    for slab in 0..slabs {
        File::create(dir.path().join(format!("slab-{slab:06}"))).unwrap().set_len(SLAB_LEN).unwrap();
    }
    write_journal(dir.path(), chunks, UNITS);
    let before = resident();
    let mut times = Vec::new();
    for _ in 0..5 {
        let begun = Instant::now();
        let cache = Cache::open(dir.path(), options()).unwrap();
        times.push(begun.elapsed());
        assert_eq!((cache.stat().chunks, cache.stat().damaged), (chunks, 0));
        if times.len() == 1 {
            let each = (resident() - before) as f64 / chunks as f64;
            println!("{chunks} chunks in the cache: {each:.0} bytes of memory each");
        }
    }
    times.sort_unstable();
    println!("opening it: {:.2?} (at most 5 s wanted)", times[times.len() / 2]);
}

fn write_journal(dir: &Path, chunks: u64, units: u64) {
    let id = std::fs::read(dir.join("cache")).unwrap()[24..40].to_vec();
    let mut header = [b"TWLCJRN1".to_vec(), id, vec![0; 4]].concat();
    header.extend_from_slice(&crc32c(0, &header).to_le_bytes());
    let mut out = BufWriter::new(File::create(dir.join("journal")).unwrap());
    out.write_all(&header).unwrap();
    for n in 0..chunks {
        let mut record = [0; 20];
        record[0] = 1;
        record[2..4].copy_from_slice(&u16::try_from(units).unwrap().to_le_bytes());
        record[4..8].copy_from_slice(&u32::try_from(n * units).unwrap().to_le_bytes());
        record[8..16].copy_from_slice(&ChunkId::of(&n.to_le_bytes()).prefix().to_le_bytes());
        let crc = crc32c(u32::try_from(n).unwrap(), &record[..16]);
        record[16..].copy_from_slice(&crc.to_le_bytes());
        out.write_all(&record).unwrap();
    }
    out.into_inner().unwrap().sync_all().unwrap();
}

fn crc32c(start: u32, bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!start, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| crc >> 1 ^ if crc & 1 == 0 { 0 } else { 0x82f6_3b78 })
    })
}

/// Bytes of memory that this process has.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}
