//! How long does a hint take for a checkpoint of a million chunks? The bound is 5 ms over 20 sites and 50 ms over 1,000, of which 20
//! hold a part, once it is known what each site holds; and 2 s to find that out from their inventories.

use std::fmt::Write as _;
use std::sync::Arc;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use towline::clock::Timestamp;
use towline::format::{CacheSpace, Inventory, KeySet};
use towline::id::ChunkId;
use towline::identity::Identity;
use towline::placement::{
    API_VERSION, Closure, HintInput, HintRequest, Holdings, Input, PriceBook, Sites, Snapshot, hint,
};
use towline::policy::Labels;

const CHUNKS: u64 = 1_000_000;
const SITES: u64 = 20;
/// Sites of the larger question.
const MANY_SITES: u64 = 1_000;
/// Bytes of a stored chunk: together about a terabyte.
const LEN: u32 = 1 << 20;

fn key(n: u64) -> u64 {
    ChunkId::of(&n.to_le_bytes()).prefix()
}

/// Site `n` holds a 20th more of the checkpoint than the one before, and as much of others.
fn inventory(n: u64) -> Inventory {
    let of_it = CHUNKS * n / SITES;
    let keys = (0..of_it).chain(CHUNKS..CHUNKS + of_it).map(key).collect();
    Inventory {
        agent: Identity::new(&format!("site-{n}"), "a").expect("an identity"),
        sequence: 1,
        at: Timestamp(0),
        space: CacheSpace { capacity: 4 << 40, used: 1 << 40, promised: 0 },
        held: KeySet::of(keys),
        pinned: KeySet::default(),
        promised: KeySet::default(),
        links: Vec::new(),
    }
}

/// Every site has a link from and to its neighbour and the first one, which has the repository.
fn sites(count: u64) -> String {
    let mut text = String::new();
    for n in 0..count {
        let repository = if n == 0 { "repositories = 's3://models'\n" } else { "" };
        writeln!(text, "[[site]]\nname = 'site-{n}'\n{repository}").expect("write to a string");
    }
    let links = (1..count).flat_map(|n| [(0, n, "internet"), (n, 0, "internet"), (n - 1, n, "neighbour")]);
    for (from, to, path) in links {
        writeln!(
            text,
            "[[link]]\nfrom = 'site-{from}'\nto = 'site-{to}'\npath = '{path}'\nrate = '10Gbit'\n\
             price = {{ unit = 'GB', usd = '0.0{}' }}",
            1 + from % 9
        )
        .expect("write to a string");
    }
    text
}

fn snapshot<'a>(sites: &'a Sites, book: &'a PriceBook) -> Snapshot<'a> {
    Snapshot {
        at: Timestamp(0),
        log: 1,
        repository: ["s3://models".to_owned(), "01K9ZQBF5628NEHV0HKGX7E3TC".to_owned()],
        sites,
        book,
        agents: Vec::new(),
        unknown: std::collections::BTreeSet::new(),
        policy: None,
        gaps: Vec::new(),
        month_so_far: Arc::default(),
        hash: blake3::hash(b""),
    }
}

fn hints(bench: &mut Criterion) {
    let book = PriceBook::built_in();
    let closure = Arc::new(Closure::of_chunks((0..CHUNKS).map(|n| (key(n), LEN)).collect()));
    let inventories: Vec<Inventory> = (0..SITES).map(inventory).collect();
    let request = HintRequest {
        api_version: API_VERSION.to_owned(),
        inputs: vec![HintInput { reference: "run/step-1".to_owned() }],
        ..HintRequest::default()
    };
    let inputs = [Input {
        name: "run/step-1".parse().expect("a name"),
        labels: Labels::default(),
        saved: Timestamp(0),
        step_seconds: None,
    }];
    for count in [SITES, MANY_SITES] {
        let sites = Sites::read(&sites(count), &book).expect("sites");
        let snapshot = snapshot(&sites, &book);
        let held = Holdings::of(Arc::clone(&closure), &inventories, snapshot.at);
        bench.bench_function(&format!("hint for 1,000,000 chunks at {count} sites"), |bencher| {
            bencher.iter(|| {
                let found = hint(&snapshot, &request, &inputs, &held).expect("a hint");
                serde_json::to_vec(&found).expect("JSON")
            });
        });
    }
    let first = Sites::read(&sites(SITES), &book).expect("sites");
    let snapshot = snapshot(&first, &book);
    let mut slow = bench.benchmark_group("at first");
    slow.sample_size(10);
    slow.bench_function("what 20 sites hold of 1,000,000 chunks", |bencher| {
        bencher.iter(|| Holdings::of(Arc::clone(&closure), &inventories, snapshot.at));
    });
    slow.bench_function("hint at 20 sites, nothing remembered", |bencher| {
        let fresh = || Holdings::of(Arc::clone(&closure), &inventories, snapshot.at);
        bencher.iter_batched(fresh, |held| hint(&snapshot, &request, &inputs, &held), BatchSize::PerIteration);
    });
    slow.bench_function("a set of 1,000,000 chunks is made", |bencher| {
        let keys: Vec<u64> = (0..CHUNKS).map(key).collect();
        bencher.iter(|| KeySet::of(keys.clone()));
    });
}

criterion_group!(benches, hints);
criterion_main!(benches);
