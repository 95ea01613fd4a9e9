//! Cost of cutting by content, beside hashing and copying the same bytes.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use towline::chunker::content;

const LEN: usize = 64 << 20;

fn content_cutting(criterion: &mut Criterion) {
    let mut bytes = vec![0; LEN];
    blake3::Hasher::new().update(b"bench").finalize_xof().fill(&mut bytes);
    let mut copy = vec![0; LEN];
    let mut found = Vec::new();

    let mut group = criterion.benchmark_group("64 MiB of random bytes");
    group.throughput(Throughput::Bytes(LEN as u64)).sample_size(20);
    group.bench_function("content candidates", |bencher| {
        bencher.iter(|| {
            found.clear();
            content::candidates(&[], black_box(&bytes), &mut found);
            found.len()
        });
    });
    group.bench_function("blake3", |bencher| bencher.iter(|| blake3::hash(black_box(&bytes))));
    group.bench_function("copy", |bencher| bencher.iter(|| copy.copy_from_slice(black_box(&bytes))));
    group.finish();
}

criterion_group!(benches, content_cutting);
criterion_main!(benches);
