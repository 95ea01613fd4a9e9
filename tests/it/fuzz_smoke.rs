//! The fuzz targets' checks on stable Rust: the golden objects, bent at random from fixed seeds, through every parser.
//!
//! With `TOWLINE_FUZZ_SEEDS=DIR` the seeds are written to `DIR/<target>/` for cargo-fuzz (tests/fuzz/corpus is where it looks).

#[expect(unreachable_pub, reason = "a crate of its own for cargo-fuzz")]
#[path = "../fuzz/src/lib.rs"]
mod parsers;

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use towline::audit::{EntryKind, Head, Journal, SignedHead, read_segments};
use towline::clock::Timestamp;
use towline::codec::{BundleBase, Codec, Compression, Element, Width, encode, encode_bundle};
use towline::format::TRAILER_LEN;
use towline::format::envelope::{DIGEST_LEN, HEADER_LEN, Kind, open};
use towline::id::{AuditLogId, ChunkId, EntryHash, ManifestId, Owned, SessionId};
use towline::repository::collect::tombstones;
use towline::repository::layout::Family;
use towline::transfer::protocol::{
    EndCode, Ended, ErrorCode, Find, Found, Frame, Hello, Message, Missing, Priority, Request, Runs, Survey, Wanted,
};

use self::parsers::PARSERS;
pub(crate) use self::parsers::memory::peak_of;
use crate::golden::{objects, objects_with_bundles, objects_with_lengths, second_objects, tail};
use crate::predictions::Training;

/// Bent inputs for each parser.
const ROUNDS: u32 = 2_000;
/// No single input may take longer, on a busy machine without optimisation.
const PATIENCE: Duration = Duration::from_secs(5);

/// A head with `signature`, as bytes.
fn audit_head(signature: Vec<u8>) -> Bytes {
    let (log, hash) = (AuditLogId::random(), EntryHash::of(b"entry"));
    let head = Head { log, origin: "towline://west/a".to_owned(), seq: 300, hash, time: Timestamp(1 << 60) };
    SignedHead { head, signature }.encode().into()
}

/// A log of two entries, as it is on the disk.
fn audit_log() -> Bytes {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    let mut journal = Journal::open(&path, "towline://west/a", Timestamp(1 << 60), Duration::ZERO).unwrap();
    let end = EntryKind::End { of: 1, bytes: 2, requests: 3, outcome: "done".to_owned() };
    journal.append(Timestamp(1 << 60), &[end]).unwrap();
    read_segments(&path).unwrap().next().unwrap().unwrap().bytes.into()
}

/// A list of one object of each kind.
fn tombstone() -> Bytes {
    let item = |family| (family, Owned::fresh(SessionId::random()));
    tombstones::encode(&Family::ALL.map(item)).into()
}

/// Objects of the golden repository for the parser called `name`.
fn seeds(name: &str) -> Vec<Bytes> {
    let mut objects = objects();
    // Entries and the snapshot of the second version besides those of the first.
    for (key, object) in
        second_objects().into_iter().filter(|(key, _)| key.starts_with("log/") || key.starts_with("snap"))
    {
        objects.insert(format!("{key}-2"), object);
    }
    objects.extend(objects_with_lengths().into_iter().filter(|(key, _)| key.starts_with("map/")));
    objects.extend(objects_with_bundles().into_iter().filter(|(key, _)| key.starts_with("map/")));
    let bodies = |prefix: &str, kind| {
        objects
            .iter()
            .filter(|(key, _)| key.starts_with(prefix))
            .map(|(_, object)| open(kind, object).unwrap())
            .collect()
    };
    let packs = || objects.iter().filter(|(key, _)| key.starts_with("pack/")).map(|(_, pack)| pack);
    match name {
        "manifest" => bodies("manifest/", Kind::Manifest),
        "map" => bodies("map/", Kind::Map),
        "part" => bodies("part/", Kind::Part),
        "tombstone" => vec![tombstone()],
        "segment" => bodies("index/", Kind::Segment),
        "entry" => bodies("log/", Kind::Entry),
        "state" => bodies("snapshot/", Kind::Snapshot),
        "pack_footer" => {
            let footer = |pack| {
                let tail = tail(pack);
                tail.slice(..tail.len() - usize::try_from(TRAILER_LEN).unwrap())
            };
            packs().flat_map(|pack| [tail(pack), footer(pack)]).collect()
        }
        "envelope" => {
            let whole = objects.iter().filter(|(key, _)| !key.starts_with("pack/")).map(|(_, object)| object.clone());
            // Without its digest: the check puts a right one there.
            whole.flat_map(|object| [object.slice(..object.len() - DIGEST_LEN), object]).collect()
        }
        "codec" => {
            // Compressed bodies are frames; before each, the length that it decodes to, as the check wants it.
            let compressed = objects.values().filter(|object| object[4] != b'K' && object[7] == 1);
            let frame = |object: &Bytes| {
                let len: Vec<u8> = object[8..12].iter().rev().copied().collect();
                Bytes::from([&len, &object[HEADER_LEN..object.len() - DIGEST_LEN]].concat())
            };
            compressed.map(frame).chain(planes()).chain(bundles()).collect()
        }
        "torch" => checkpoints(&["views.pt", "objects.pth", "training.bin"]),
        "dcp" => checkpoints(&["dcp/.metadata"]),
        "sharded" => {
            let index = br#"{"metadata":{"total_size":12},"weight_map":{"a":"1.safetensors","b":"1.safetensors","c":"2.safetensors"}}"#;
            vec![Bytes::from_static(index)]
        }
        "message" => messages(),
        "audit_head" => vec![audit_head(vec![1, 1, 3, 0, 0, 0, 48, 1, 0, 3, 4, 2, 0, 7, 7]), audit_head(Vec::new())],
        "audit_log" => vec![audit_log()],
        "inventory" => crate::golden::inventories(),
        "usage" => crate::golden::reports_of_usage(),
        "pickle" => {
            let of_archive = |file: &Bytes| {
                let find = |from: usize, what: &[u8]| file[from..].windows(what.len()).position(|at| at == what);
                let start = find(0, b"\x80\x02").or_else(|| find(0, b"\x80\x04")).unwrap();
                // After a record comes its data descriptor.
                file.slice(start..start + find(start, b"PK\x07\x08").unwrap())
            };
            let mut pickles: Vec<Bytes> = checkpoints(&["views.pt", "training.bin"]).iter().map(of_archive).collect();
            pickles.extend(checkpoints(&["dcp/.metadata"]));
            pickles
        }
        _ => objects.values().map(|object| object.slice(..object.len().min(4096))).collect(),
    }
}

/// Messages of the peer protocol: kind and body, without the length in front.
fn messages() -> Vec<Bytes> {
    let chunks: Runs = [0, 1, 2, 9, 10, 70_000].into_iter().collect();
    let wanted = Wanted { chunks: chunks.clone(), bases: vec![ChunkId::of(b"base")], ..Wanted::default() };
    let (manifest, stored) = (ManifestId::of(b"tree"), Bytes::from_static(b"stored"));
    let frame = Frame { request: 300, ordinal: 2, codec: 3, plain_len: 9, base: Some(ChunkId::of(b"base")), stored };
    let hello = Hello {
        versions: vec![1, 3],
        software: "0.1.0".into(),
        site: "west".into(),
        agent: "a".into(),
        window: 1 << 23,
        requests: 64,
        extensions: vec![(7, b"x".to_vec())],
    };
    let survey = Survey { chunks: 70_009, upto: 70_005, held: chunks.clone() };
    let messages = [
        Message::Hello(hello),
        Message::Request(Request { request: 1, priority: Priority::Warm, manifest, wanted }),
        Message::Find(Find { request: 2, manifest, from: 9 }),
        Message::Found(Found { request: 2, survey }),
        Message::Frame(frame),
        Message::Missing(Missing { request: 1, ordinals: chunks }),
        Message::Ended(Ended { request: 1, code: EndCode::Failed, text: "disk".into() }),
        Message::Credit { granted: 1 << 40 },
        Message::Goodbye { text: "bye".into() },
        Message::Error { code: ErrorCode::Limit, text: "too much".into() },
    ];
    let whole = |message: &Message| {
        let (head, after) = message.write();
        Bytes::from([&head[4..], &after].concat())
    };
    messages.iter().map(whole).collect()
}

/// Numbers in byte planes of every kind: raw, one byte, coded, in groups; each with its length before it.
fn planes() -> Vec<Bytes> {
    let numbers = |spread: u32| (0..2000u32).flat_map(move |n| (n.wrapping_mul(n) % spread).to_le_bytes());
    let plain = |spread| numbers(spread).collect::<Bytes>();
    let encode = |plain: &Bytes| encode(plain, Compression::Auto, Some(Element::Float(Width::W4)));
    let stored = [3, 5, 40, 200, 70_000].map(|spread| encode(&plain(spread)));
    assert!(stored.iter().all(|stored| stored.codec == Codec::Planes));
    stored.map(|stored| Bytes::from([&8000u32.to_be_bytes(), &*stored.bytes].concat())).to_vec()
}

/// Bundles, stored whole and predicted; each with its length before it.
fn bundles() -> Vec<Bytes> {
    let mut training = Training::of(7, &[600]);
    let mut plain = || {
        training.go_on();
        let optimizer = training.optimizer().into_iter().filter(|(name, ..)| *name != "step");
        training.model().into_iter().chain(optimizer).flat_map(|(.., bytes)| bytes).collect::<Vec<u8>>()
    };
    let [before, now] = [plain(), plain()];
    let predicted = encode_bundle(&now, 3, Some(BundleBase { id: ChunkId::of(&before), steps: 0, plain: &before }));
    let stored = [encode_bundle(&before, 3, None), predicted].map(Option::unwrap);
    stored.map(|stored| Bytes::from([&7200u32.to_be_bytes(), &*stored.bytes].concat())).to_vec()
}

/// Files that torch wrote.
fn checkpoints(files: &[&str]) -> Vec<Bytes> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/checkpoints");
    files.iter().map(|file| std::fs::read(folder.join(file)).unwrap().into()).collect()
}

/// A stream of numbers that is the same everywhere.
struct Rng(blake3::OutputReader);

impl Rng {
    fn new(name: &str) -> Self {
        Self(blake3::Hasher::new().update(name.as_bytes()).finalize_xof())
    }

    fn below(&mut self, limit: usize) -> usize {
        let mut bytes = [0; 8];
        self.0.fill(&mut bytes);
        usize::try_from(u64::from_le_bytes(bytes) % limit.max(1) as u64).unwrap()
    }

    /// `seed` with one to four things done to it.
    fn bend(&mut self, seed: &[u8], other: &[u8]) -> Vec<u8> {
        let mut bytes = seed.to_vec();
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len());
            let len = self.below(9).min(bytes.len() - at);
            match self.below(7) {
                0 if !bytes.is_empty() => bytes[at] ^= 1 << self.below(8),
                1 if !bytes.is_empty() => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][self.below(5)],
                2 => bytes.truncate(at),
                3 => drop(bytes.drain(at..at + len)),
                4 => drop(bytes.splice(at..at, [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1])),
                5 => {
                    let from = self.below(other.len());
                    drop(bytes.splice(at..at + len, other[from..].iter().copied().take(64)));
                }
                _ => {
                    let repeated = bytes[at..at + len].to_vec();
                    drop(bytes.splice(at..at, repeated));
                }
            }
        }
        bytes
    }
}

/// The processor time that this thread has used: what other processes do to the clock on the wall does not count.
fn thread_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap())
}

#[test]
fn bent_golden_objects_are_read_or_refused_by_every_parser() {
    for (name, parse) in PARSERS {
        let seeds = seeds(name);
        assert!(!seeds.is_empty(), "{name}");
        let mut rng = Rng::new(name);
        seeds.iter().for_each(|seed| parse(seed));
        for round in 0..ROUNDS {
            let (seed, other) = (rng.below(seeds.len()), rng.below(seeds.len()));
            let bent = rng.bend(&seeds[seed], &seeds[other]);
            let begun = thread_time();
            parse(&bent);
            let took = thread_time().saturating_sub(begun);
            assert!(took < PATIENCE, "{name}, round {round}: {took:?} of the processor");
        }
    }
}

#[test]
fn seeds_are_written_for_cargo_fuzz_when_asked_for() {
    let Some(root) = std::env::var_os("TOWLINE_FUZZ_SEEDS") else { return };
    for (name, _) in PARSERS {
        let folder = Path::new(&root).join(name);
        std::fs::create_dir_all(&folder).unwrap();
        for seed in seeds(name) {
            std::fs::write(folder.join(blake3::hash(&seed).to_string()), &seed).unwrap();
        }
    }
}
