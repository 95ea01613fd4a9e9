//! A cache whose process is killed under load, again and again: no wrong byte, nothing damaged, pins kept, and warm.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use bytes::Bytes;
use towline::cache::{Cache, CacheOptions, Frame, Inserted, PinChunk, PinRequest, Pinned};
use towline::chunk::Chunk;
use towline::codec::{Codec, Encoded};

use crate::data::{Rng, noise};

const KILLS: u64 = 100;
const NUMBERS: u64 = 400;
const SLAB_LEN: u64 = 4 << 20;
/// Tells the child which directory to work in.
const CHILD: &str = "TOWLINE_CACHE_CHILD";

/// Frame number `n`: 300 bytes to 400 KB.
fn frame(n: u64) -> Frame {
    let len = if n.is_multiple_of(7) { 300 } else { 1000 + n.wrapping_mul(7919) % 400_000 };
    let bytes = Bytes::from(noise(n, usize::try_from(len).unwrap()));
    Frame::decoded(Chunk::new(&bytes), Encoded { codec: Codec::Raw, bytes: bytes.clone(), base: None }).unwrap()
}

fn open(dir: &Path) -> Cache {
    let options = CacheOptions { free_floor: 0, slab_len: Some(SLAB_LEN), ..CacheOptions::new(8 * SLAB_LEN) };
    Cache::open(dir, options).unwrap()
}

/// One line for the parent, as soon as it is true.
fn say(word: &str, id: impl std::fmt::Display) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n{word} {id}").unwrap();
    out.flush().unwrap();
}

fn work(cache: &Cache, seed: u64) {
    let mut rng = Rng(seed);
    let mut pins = Vec::new();
    loop {
        let n = rng.below(NUMBERS);
        let wanted = frame(n);
        match cache.get(&wanted.id()) {
            Some(found) => assert_eq!(found, wanted),
            None => assert!(matches!(cache.insert(&wanted), Inserted::Kept | Inserted::Known)),
        }
        match rng.below(60) {
            0 => {
                let stored_len = u32::try_from(wanted.bytes().len()).unwrap();
                let chunks = vec![PinChunk { id: wanted.id(), stored_len }];
                let request = PinRequest { owner: "it".into(), reason: "kill".into(), expires: None, chunks };
                if let Pinned::Kept(pin) = cache.pin(request).unwrap() {
                    say("pinned", pin.id);
                    pins.push(pin.id);
                }
            }
            1 => {
                if let Some(id) = pins.pop() {
                    say("ending", id);
                    assert!(cache.unpin(id).unwrap());
                    say("ended", id);
                }
            }
            2 => assert!(cache.evict(rng.below(2) * SLAB_LEN) <= 8 * SLAB_LEN),
            _ => {}
        }
    }
}

#[test]
#[ignore = "what the test below starts and kills"]
fn child_under_load() {
    let Some(dir) = std::env::var_os(CHILD) else { return };
    let cache = open(Path::new(&dir));
    let base = u64::from(std::process::id()) << 8;
    say("working", base);
    std::thread::scope(|scope| {
        for thread in 1..4 {
            let cache = &cache;
            scope.spawn(move || work(cache, base + thread));
        }
    });
}

#[test]
fn killed_under_load_it_is_sound_and_warm_and_keeps_its_pins() {
    let dir = tempfile::tempdir().unwrap();
    let frames: Vec<Frame> = (0..NUMBERS).map(frame).collect();
    let mut rng = Rng(0x9e37_79b9_7f4a_7c15);
    let mut promised: BTreeSet<String> = BTreeSet::new();
    let mut warm = 0;
    for round in 0..KILLS {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["cache::child_under_load", "--exact", "--ignored", "--nocapture"]).env(CHILD, dir.path());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        assert!(lines.any(|line| line.starts_with("working ")), "the child does not work");
        std::thread::sleep(Duration::from_millis(rng.below(60)));
        assert!(child.try_wait().unwrap().is_none(), "the child ended by itself in round {round}");
        child.kill().unwrap();
        child.wait().unwrap();
        let (mut doubtful, mut ended) = (BTreeSet::new(), BTreeSet::new());
        for line in lines {
            match line.split_once(' ') {
                Some(("pinned", id)) => drop(promised.insert(id.to_owned())),
                Some(("ending", id)) => drop(doubtful.insert(id.to_owned())),
                Some(("ended", id)) => drop(ended.insert(id.to_owned())),
                _ => {}
            }
        }
        let cache = open(dir.path());
        let pins: BTreeSet<String> = cache.pins().iter().map(|pin| pin.id.to_string()).collect();
        assert!(promised.iter().all(|pin| pins.contains(pin) || doubtful.contains(pin)), "a promise is broken");
        assert!(ended.is_disjoint(&pins), "a promise that was ended is back");
        let found =
            frames.iter().filter(|frame| cache.get(&frame.id()).inspect(|got| assert_eq!(got, *frame)).is_some());
        warm += u64::from(found.count() > 20);
        assert_eq!((cache.check().damaged, cache.stat().damaged), (Vec::new(), 0), "a kill damages nothing");
        // What is pinned must not pile up.
        for pin in cache.pins() {
            assert!(cache.unpin(pin.id).unwrap());
        }
        promised.clear();
    }
    assert!(warm >= KILLS - 5, "warm after {warm} of {KILLS} kills");
}
