//! Byte planes and differences by dtype, and predicted bundles, beside zstd and a copy of the same bytes; one core, chunks as a
//! save cuts them.

use std::hint::black_box;

use bytes::Bytes;
use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};
use towline::codec::{
    BundleBase, Codec, Compression, Element, Width, alone_len, decode_into, encode, encode_alone, encode_bundle,
    encode_difference,
};
use towline::id::ChunkId;

/// Elements in a chunk: those of a piece of a tensor.
const ELEMENTS: usize = 256 << 10;
/// Chunks, so that they come from memory and not from the cache.
const CHUNKS: usize = 64;

/// Bundles of three chunks.
const BUNDLES: usize = 16;

/// Normally distributed, as weights are, from a fixed generator.
fn weights() -> Vec<f32> {
    let mut state = 7u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 + 0.5) / (1u64 << 24) as f32
    };
    let normal = |_| 0.02 * (-2.0 * random().ln()).sqrt() * (std::f32::consts::TAU * random()).cos();
    (0..ELEMENTS * CHUNKS).map(normal).collect()
}

/// The same some steps of training later: what an optimizer adds does not ask how large a weight is.
fn later(weights: &[f32]) -> Vec<f32> {
    let moved = |(at, weight): (usize, &f32)| {
        let others = [at + 77, at + 7777, at + 777].map(|at| weights[at % weights.len()]);
        weight + others.iter().sum::<f32>() * 0.001
    };
    weights.iter().enumerate().map(moved).collect()
}

fn chunks(numbers: impl Iterator<Item = u8>, width: usize) -> Vec<Bytes> {
    let all: Vec<u8> = numbers.collect();
    all.chunks(ELEMENTS * width).map(Bytes::copy_from_slice).collect()
}

fn codecs(criterion: &mut Criterion) {
    let weights = weights();
    let later = later(&weights);
    let fp32 = |weights: &[f32]| chunks(weights.iter().flat_map(|weight| weight.to_le_bytes()), 4);
    let bf16 = |weights: &[f32]| {
        chunks(weights.iter().flat_map(|weight| weight.to_bits().to_le_bytes().into_iter().skip(2)), 2)
    };
    one_dtype(criterion, "fp32", [&fp32(&weights), &fp32(&later)], Element::Float(Width::W4));
    one_dtype(criterion, "bf16", [&bf16(&weights), &bf16(&later)], Element::Float(Width::W2));
    bundles(criterion, &weights);
}

/// State of `AdamW` after a step, and after the next one: bundles of weights, first and second moments.
fn trained(weights: &[f32]) -> [Vec<Bytes>; 2] {
    let gradient = |at: usize, step: usize| weights[(at * 31 + step * 7919) % weights.len()] * 0.01;
    let mut state: Vec<[f32; 3]> = weights.iter().map(|weight| [*weight, 0.0, 0.0]).collect();
    let mut advance = |step: usize| {
        for (at, [w, m, v]) in state.iter_mut().enumerate() {
            let g = gradient(at, step);
            *m += 0.1 * (g - *m);
            *v = *v * 0.999 + 0.001 * g * g;
            *w = *w * 0.999_997 - 2e-5 * (*m / (v.sqrt() + 1e-9));
        }
        let member = |piece: &[[f32; 3]], member: usize| {
            piece.iter().flat_map(move |of| of[member].to_le_bytes()).collect::<Vec<u8>>()
        };
        let bundle = |piece: &[[f32; 3]]| Bytes::from([member(piece, 0), member(piece, 1), member(piece, 2)].concat());
        state.chunks_exact(ELEMENTS).map(bundle).collect()
    };
    (0..20).for_each(|step| drop::<Vec<Bytes>>(advance(step)));
    [advance(20), advance(21)]
}

/// The next step as predicted from the one before.
fn bundles(criterion: &mut Criterion, weights: &[f32]) {
    let [before, now] = trained(&weights[..ELEMENTS * BUNDLES]);
    let plain: usize = now.iter().map(Bytes::len).sum();
    let encode = |(before, now): (&Bytes, &Bytes)| {
        let base = Some(BundleBase { id: ChunkId::of(&[]), steps: 0, plain: before });
        encode_bundle(black_box(now), 3, base).expect("they are bundles of one length")
    };
    let encoded: Vec<_> = before.iter().zip(&now).map(encode).collect();
    let stored: usize = encoded.iter().map(|encoded| encoded.bytes.len()).sum();
    let name = format!("{} MiB of AdamW's state, predicted to 1/{:.3}", plain >> 20, plain as f64 / stored as f64);
    let mut group = criterion.benchmark_group(name);
    group.throughput(Throughput::Bytes(plain as u64)).sample_size(10);
    let mut out = vec![0; 3 * 4 * ELEMENTS];
    group.bench_function("predicted in", |bencher| {
        bencher.iter(|| before.iter().zip(&now).map(|pair| encode(pair).bytes.len()).sum::<usize>());
    });
    group.bench_function("predicted out", |bencher| {
        bencher.iter(|| {
            for (encoded, before) in encoded.iter().zip(&before) {
                let base = Some(black_box(before).as_ref());
                decode_into(encoded.codec, black_box(&encoded.bytes), base, &mut out).expect("it was just encoded");
            }
        });
    });
    zstd(&mut group, &now, &mut out);
    group.bench_function("copy", |bencher| bencher.iter(|| now.iter().for_each(|bundle| out.copy_from_slice(bundle))));
    group.finish();
}

fn one_dtype(criterion: &mut Criterion, dtype: &str, [chunks, later]: [&[Bytes]; 2], element: Element) {
    let plain: usize = chunks.iter().map(Bytes::len).sum();
    let encoded: Vec<_> = chunks.iter().map(|chunk| encode(chunk, Compression::Auto, Some(element))).collect();
    assert!(encoded.iter().all(|encoded| encoded.codec == Codec::Planes), "weights are stored as planes");
    let stored: usize = encoded.iter().map(|encoded| encoded.bytes.len()).sum();
    let name = format!("{} MiB of {dtype} weights, planes to 1/{:.3}", plain >> 20, plain as f64 / stored as f64);

    let mut group = criterion.benchmark_group(name);
    group.throughput(Throughput::Bytes(plain as u64)).sample_size(10);
    let mut out = vec![0; ELEMENTS * element.width().bytes()];
    group.bench_function("planes in", |bencher| {
        bencher.iter(|| {
            chunks
                .iter()
                .map(|chunk| encode(black_box(chunk), Compression::Auto, Some(element)).bytes.len())
                .sum::<usize>()
        });
    });
    group.bench_function("planes out", |bencher| {
        bencher.iter(|| {
            for encoded in &encoded {
                decode_into(encoded.codec, black_box(&encoded.bytes), None, &mut out).expect("it was just encoded");
            }
        });
    });
    differences(&mut group, [chunks, later], element, &mut out);
    zstd(&mut group, chunks, &mut out);
    group.bench_function("copy", |bencher| bencher.iter(|| chunks.iter().for_each(|chunk| out.copy_from_slice(chunk))));
    group.finish();
}

/// The later of two states as what changed.
fn differences(
    group: &mut BenchmarkGroup<'_, criterion::measurement::WallTime>,
    [base, later]: [&[Bytes]; 2],
    element: Element,
    out: &mut [u8],
) {
    let id = ChunkId::of(&[]);
    let encode = |(base, later): (&Bytes, &Bytes)| {
        encode_difference(black_box(later), id, base, element).expect("a step later is a small difference")
    };
    let encoded: Vec<_> = base.iter().zip(later).map(encode).collect();
    let stored: usize = encoded.iter().map(|encoded| encoded.bytes.len()).sum();
    let plain: usize = later.iter().map(Bytes::len).sum();
    let to = format!("to 1/{:.3}", plain as f64 / stored as f64);
    group.bench_function(format!("difference in, {to}"), |bencher| {
        bencher.iter(|| base.iter().zip(later).map(|pair| encode(pair).bytes.len()).sum::<usize>());
    });
    group.bench_function(format!("difference out, {to}"), |bencher| {
        bencher.iter(|| {
            for (encoded, base) in encoded.iter().zip(base) {
                let base = Some(black_box(base).as_ref());
                decode_into(encoded.codec, black_box(&encoded.bytes), base, out).expect("it was just encoded");
            }
        });
    });
    group.bench_function("length alone, for a save", |bencher| {
        let lens = || encoded.iter().zip(later).map(|(encoded, later)| u64::from(alone_len(black_box(later), encoded)));
        bencher.iter(|| lens().sum::<u64>());
    });
    // Differences that are sent without their bases: these decoded, the chunks decoded, and encoded anew.
    let bases: Vec<_> =
        base.iter().map(|base| towline::codec::encode(base, Compression::Auto, Some(element))).collect();
    group.bench_function("difference to planes", |bencher| {
        let mut base = vec![0; out.len()];
        bencher.iter(|| {
            for (encoded, of_base) in encoded.iter().zip(&bases) {
                decode_into(of_base.codec, black_box(&of_base.bytes), None, &mut base).expect("it was just encoded");
                decode_into(encoded.codec, black_box(&encoded.bytes), Some(&base), out).expect("it was just encoded");
                black_box(encode_alone(out, encoded));
            }
        });
    });
}

/// The general codec, which knows nothing of tensors.
fn zstd(group: &mut BenchmarkGroup<'_, criterion::measurement::WallTime>, chunks: &[Bytes], out: &mut [u8]) {
    let compress = |chunk: &Bytes| zstd::bulk::compress(black_box(chunk), 1).expect("zstd compresses anything");
    let frames: Vec<Vec<u8>> = chunks.iter().map(compress).collect();
    group.bench_function("zstd-1 in", |bencher| {
        bencher.iter(|| chunks.iter().map(|chunk| compress(chunk).len()).sum::<usize>());
    });
    group.bench_function("zstd-1 out", |bencher| {
        bencher.iter(|| {
            for frame in &frames {
                zstd::bulk::decompress_to_buffer(black_box(frame), out).expect("it was just compressed");
            }
        });
    });
}

criterion_group!(benches, codecs);
criterion_main!(benches);
