//! The cache beside a model: in peace, on a disk that is full, lying or shared, and when the power goes at any step.

mod bases;
mod faults;
mod holds;
mod medium;
mod power;
mod quotas;

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;

use self::medium::Memory;
use super::*;
use crate::chunk::Chunk;
use crate::clock::{ManualClock, Timestamp};
use crate::codec::{Codec, Encoded};
use crate::error::ErrorKind;
use crate::id::{ChunkId, PinId};

const SLAB_LEN: u64 = 16 * UNIT;
const SLABS: u64 = 8;

/// A small generator, so that a run can be repeated.
pub(super) struct Rng(pub(super) u64);

impl Rng {
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// Frame number `n`: of 1 to 4 units.
fn frame(n: u64) -> Frame {
    let mut plain = vec![0; usize::try_from(100 + n.wrapping_mul(7919) % 15_000).unwrap()];
    blake3::Hasher::new().update(&n.to_le_bytes()).finalize_xof().fill(&mut plain);
    let bytes = Bytes::from(plain);
    Frame::decoded(Chunk::new(&bytes), Encoded { codec: Codec::Raw, bytes: bytes.clone(), base: None }).unwrap()
}

/// Puts frames in, whatever becomes of them.
fn fill(cache: &Cache, numbers: std::ops::Range<u64>) {
    for n in numbers {
        let _ = cache.insert(&frame(n));
    }
}

fn options() -> CacheOptions {
    CacheOptions { free_floor: 0, slab_len: Some(SLAB_LEN), ..CacheOptions::new(SLABS * SLAB_LEN) }
}

fn request(numbers: impl IntoIterator<Item = u64>) -> PinRequest {
    let chunk = |n| {
        let frame = frame(n);
        PinChunk { id: frame.id(), stored_len: u32::try_from(frame.bytes().len()).unwrap() }
    };
    let chunks = numbers.into_iter().map(chunk).collect();
    PinRequest { owner: "test".into(), reason: "because".into(), expires: None, chunks }
}

fn kept(pinned: Pinned) -> Pin {
    match pinned {
        Pinned::Kept(pin) => pin,
        Pinned::Lacking { bytes, .. } => panic!("{bytes} bytes are lacking"),
    }
}

#[test]
fn what_is_put_in_is_found_until_it_is_evicted_and_pins_stay_through_anything() {
    let dir = tempfile::tempdir().unwrap();
    let mut cache = Cache::open(dir.path(), options()).unwrap();
    let pin = kept(cache.pin(request(0..20)).unwrap());
    let mut hits = 0;
    for n in 0..600 {
        let _ = cache.insert(&frame(n));
        assert_eq!(cache.get(&frame(n).id()), Some(frame(n)), "what has just come is there");
        let old = n.saturating_sub(n % 50);
        hits += u32::from(cache.get(&frame(old).id()).inspect(|found| assert_eq!(*found, frame(old))).is_some());
        if n % 100 == 99 {
            drop(cache);
            cache = Cache::open(dir.path(), options()).unwrap();
        }
    }
    assert!(hits > 100);
    (0..20).for_each(|n| assert_eq!(cache.get(&frame(n).id()), Some(frame(n)), "a pinned one"));
    assert_eq!(cache.missing(pin.id).unwrap(), Some(Vec::new()));
    assert_eq!(cache.pins(), std::slice::from_ref(&pin));
    let stat = cache.stat();
    assert!(stat.bytes <= stat.slab_bytes && stat.slab_bytes <= SLABS * SLAB_LEN);
    assert_eq!((stat.damaged, stat.pinned_bytes), (0, stat.promised_bytes));
    let checked = cache.check();
    assert_eq!((checked.chunks, checked.bytes, checked.damaged.len()), (stat.chunks, stat.bytes, 0));

    assert!(cache.unpin(pin.id).unwrap());
    assert!(!cache.unpin(pin.id).unwrap());
    fill(&cache, 1000..1300);
    assert!((0..20).all(|n| !cache.contains(&frame(n).id())), "nobody keeps them any more");
    assert!(cache.evict(u64::MAX) > 0);
    assert_eq!((cache.stat().chunks, cache.stat().bytes), (0, 0));
}

#[test]
fn a_pin_that_does_not_fit_is_told_what_lacks_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path(), options()).unwrap();
    let Pinned::Lacking { bytes, disk_full: false } = cache.pin(request(0..100)).unwrap() else {
        panic!("it cannot fit")
    };
    let units: u64 = (0..100).map(|n| u64::from(extent::weight(frame(n).bytes().len() as u64))).sum();
    let most = State::pinnable(SLABS * 16);
    assert_eq!(bytes, (units - most) * UNIT);
    assert_eq!((cache.pins().len(), cache.stat().promised_bytes), (0, 0));
    // Half of it fits; together with itself, too, since chunks are counted once; but not with the other half.
    let first = kept(cache.pin(request(0..40)).unwrap());
    let again = kept(cache.pin(request(0..40)).unwrap());
    assert!(matches!(cache.pin(request(40..100)).unwrap(), Pinned::Lacking { .. }));
    (0..40).for_each(|n| assert_eq!(cache.insert(&frame(n)), Inserted::Kept));
    assert!(cache.unpin(first.id).unwrap());
    fill(&cache, 200..400);
    (0..40).for_each(|n| assert!(cache.get(&frame(n).id()).is_some(), "the other pin keeps {n}"));
    assert_eq!(cache.missing(again.id).unwrap().unwrap(), []);
    assert_eq!(cache.missing(first.id).unwrap(), None);
}

#[test]
fn pins_expire_by_the_clock_also_across_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let clock = Arc::new(ManualClock::at(Timestamp(1000)));
    let with_clock = || CacheOptions { clock: Arc::clone(&clock) as Arc<dyn Clock>, ..options() };
    let cache = Cache::open(dir.path(), with_clock()).unwrap();
    let until = |at| PinRequest { expires: Some(Timestamp(at)), ..request(0..3) };
    let short = kept(cache.pin(until(2000)).unwrap());
    clock.set(Timestamp(1001));
    let long = kept(cache.pin(until(3000)).unwrap());
    assert_eq!(cache.pins(), [short, long.clone()]);
    clock.set(Timestamp(2000));
    assert_eq!(cache.pins(), [long]);
    drop(cache);
    clock.set(Timestamp(3001));
    let cache = Cache::open(dir.path(), with_clock()).unwrap();
    assert_eq!(cache.stat().pins, 0);
    // A renewed one ends later, also across a restart, and one that has ended is not renewed.
    let lasting = kept(cache.pin(PinRequest { expires: Some(Timestamp(3500)), ..request(0..3) }).unwrap());
    let renewed = cache.renew(lasting.id, Some(Timestamp(3900))).unwrap().unwrap();
    assert_eq!(renewed, Pin { expires: Some(Timestamp(3900)), ..lasting });
    drop(cache);
    clock.set(Timestamp(3600));
    let cache = Cache::open(dir.path(), with_clock()).unwrap();
    assert_eq!(cache.pins(), std::slice::from_ref(&renewed));
    clock.set(Timestamp(3901));
    assert!(cache.pins().is_empty());
    assert_eq!(cache.renew(renewed.id, None).unwrap(), None);
    // Trimming, as inserts do at times, ends them too.
    let _ = kept(cache.pin(PinRequest { expires: Some(Timestamp(4000)), ..request(0..40) }).unwrap());
    fill(&cache, 0..40);
    clock.set(Timestamp(4000));
    fill(&cache, 40..240);
    cache.trim();
    assert_eq!((cache.stat().pins, cache.stat().pinned_bytes, cache.stat().refusals), (0, 0, 0));
    assert_eq!(std::fs::read_dir(dir.path().join("pins")).unwrap().count(), 0);
}

#[test]
fn many_threads_see_only_right_bytes_and_no_damage() {
    let dir = tempfile::tempdir().unwrap();
    work_together(&Cache::open(dir.path(), options()).unwrap(), |_| {});
}

#[test]
fn many_threads_see_only_right_bytes_while_slabs_come_and_go() {
    let (memory, dir) = (Memory::new(), tempfile::tempdir().unwrap());
    let options = CacheOptions { free_floor: SLAB_LEN, ..options() };
    let cache = Cache::open_on(Arc::new(memory.clone()), dir.path(), options).unwrap();
    work_together(&cache, |rng| {
        memory.world().available = rng.below(2) * SLABS * SLAB_LEN;
        memory.world().forget();
    });
    // The disk stays full, so all slabs go, and come back when it is not.
    memory.world().available = 0;
    let slabs = cache.stat().slab_bytes;
    assert_eq!((cache.trim(), cache.stat().slab_bytes, cache.stat().chunks), (slabs, 0, 0));
    memory.world().available = SLABS * SLAB_LEN;
    assert_eq!(cache.insert(&frame(0)), Inserted::Kept);
}

/// Six threads read and fill; now and then something is checked, pinned or trimmed, after `between`. What one trim gives back has no
/// bound here: others may add slabs meanwhile.
fn work_together(cache: &Cache, between: impl Fn(&mut Rng) + Sync) {
    let frames: Vec<Frame> = (0..120).map(frame).collect();
    std::thread::scope(|scope| {
        for thread in 0..6u64 {
            let (frames, between) = (&frames, &between);
            scope.spawn(move || {
                let mut rng = Rng(thread + 1);
                for _ in 0..2500 {
                    let wanted = &frames[usize::try_from(rng.below(120)).unwrap()];
                    match cache.get(&wanted.id()) {
                        Some(found) => assert_eq!(found, *wanted),
                        None => assert!(cache.insert(wanted) != Inserted::Refused(Refusal::Unwritable)),
                    }
                    if rng.below(400) == 0 {
                        assert_eq!(cache.check().damaged, []);
                    }
                    if rng.below(100) == 0 {
                        between(&mut rng);
                        cache.trim();
                        assert!(cache.stat().slab_bytes <= SLABS * SLAB_LEN);
                    }
                    if thread == 0 && rng.below(100) == 0 {
                        let numbers = [rng.below(120), rng.below(120)];
                        if let Pinned::Kept(pin) = cache.pin(request(numbers)).unwrap() {
                            assert!(cache.unpin(pin.id).unwrap());
                        }
                    }
                }
            });
        }
    });
    assert_eq!(cache.stat().damaged, 0);
    assert_eq!(cache.check().damaged, []);
    assert_eq!(cache.stat().pinned_bytes, 0);
}

#[test]
fn only_one_process_has_a_cache_and_the_next_is_told_which() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path(), options()).unwrap();
    let error = Cache::open(dir.path(), options()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict);
    assert!(error.to_string().contains(&format!("process {}", std::process::id())), "{error}");
    drop(cache);
    assert!(Cache::open(dir.path(), options()).is_ok());
}

#[test]
fn a_capacity_below_a_slab_is_a_usage_error_and_a_smaller_one_takes_slabs_away() {
    let dir = tempfile::tempdir().unwrap();
    let small = |slabs: u64| CacheOptions { capacity: slabs * SLAB_LEN, ..options() };
    assert_eq!(
        Cache::open(dir.path(), CacheOptions { capacity: 100, ..options() }).unwrap_err().kind(),
        ErrorKind::Usage
    );
    let cache = Cache::open(dir.path(), options()).unwrap();
    let pin = kept(cache.pin(request(0..10)).unwrap());
    fill(&cache, 0..200);
    drop(cache);
    let cache = Cache::open(dir.path(), small(3)).unwrap();
    assert_eq!(cache.stat().slab_bytes, 3 * SLAB_LEN);
    assert_eq!(cache.missing(pin.id).unwrap().unwrap(), [], "what is pinned moved");
    assert_eq!((cache.check().damaged, cache.stat().damaged), (Vec::new(), 0));
    drop(cache);
    let error = Cache::open(dir.path(), CacheOptions { capacity: SLAB_LEN - 1, ..options() }).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
}

#[test]
fn pins_of_an_owner_stay_within_a_limit() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path(), options()).unwrap();
    let units = |numbers: std::ops::Range<u64>| {
        numbers.map(|n| u64::from(extent::weight(frame(n).bytes().len() as u64))).sum::<u64>()
    };
    let limit = PinLimit { owners: "home/a/".into(), bytes: units(0..10) * UNIT, pins: 3, chunks: 24 };
    let pin = |owner: &str, numbers: std::ops::Range<u64>| {
        let request = PinRequest { owner: owner.into(), ..request(numbers) };
        cache.pin_within(request, Some(&limit))
    };
    let first = kept(pin("home/a/me", 0..8).unwrap());
    let error = pin("home/a/you", 8..11).unwrap_err();
    assert!(error.to_string().contains("pins of home/a would keep too much"), "{error}");
    assert_eq!((error.kind(), cache.pins().len()), (ErrorKind::Exhausted, 1), "nothing is promised");
    let second = kept(pin("home/a/you", 4..10).unwrap());
    // A chunk of several pins counts for each: 8 and 6 are listed, and 14 are too many.
    let again = PinRequest { owner: "home/a/me".into(), ..request(0..10) };
    let few = PinLimit { chunks: 23, ..limit.clone() };
    let error = cache.pin_within(again, Some(&few)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exhausted);
    let message = "pins of home/a would list too many chunks: expected at most 23, got 24";
    assert_eq!(error.to_string(), message, "nothing is promised");
    kept(pin("home/a/me", 0..10).unwrap());
    let error = pin("home/a/me", 0..1).unwrap_err();
    assert!(error.to_string().contains("home/a has too many pins: expected at most 3"), "{error}");
    // Others are not counted, and what ended is not.
    kept(cache.pin(PinRequest { owner: "home/ab/me".into(), ..request(0..20) }).unwrap());
    cache.unpin(first.id).unwrap();
    cache.unpin(second.id).unwrap();
    kept(pin("home/a/me", 0..10).unwrap());
}

#[test]
fn what_does_not_fit_beside_pins_is_told_before_it_comes() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path(), options()).unwrap();
    let all = 0..400;
    assert_eq!(cache.shortage(&request(0..10).chunks), 0);
    let short = cache.shortage(&request(all.clone()).chunks);
    assert!(short > 0);
    // Evictable chunks are no hindrance, pinned ones are.
    fill(&cache, 500..700);
    assert_eq!(cache.shortage(&request(all.clone()).chunks), short);
    let pin = kept(cache.pin(request(600..610)).unwrap());
    assert!(cache.shortage(&request(all.clone()).chunks) > short);
    assert!(cache.unpin(pin.id).unwrap());
    assert_eq!(cache.shortage(&request(all).chunks), short);

    // A disk with no room above the floor.
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path(), CacheOptions { free_floor: u64::MAX / 4, ..options() }).unwrap();
    assert!(cache.shortage(&request(0..1).chunks) > 0);
}
