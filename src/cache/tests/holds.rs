//! Holds: what a warm brings stays until it ends, and longer than what is only read.

use super::*;

/// Chunks of the requests here take about 97 of the cache's 128 units.
const WARMED: std::ops::Range<u64> = 1000..1040;

fn hold(cache: &Arc<Cache>, numbers: std::ops::Range<u64>) -> Option<Hold> {
    cache.hold(&request(numbers).chunks, None)
}

fn present(cache: &Cache, numbers: std::ops::Range<u64>) -> usize {
    numbers.filter(|&n| cache.contains(&frame(n).id())).count()
}

/// A cache full of chunks that were read so often that they are in the main queue.
fn full(dir: &std::path::Path) -> Arc<Cache> {
    let cache = Arc::new(Cache::open(dir, options()).unwrap());
    for n in 0..200 {
        let _ = cache.insert(&frame(n));
        (0..3).for_each(|_| assert!(cache.get(&frame(n).id()).is_some()));
    }
    cache
}

#[test]
fn what_is_held_is_complete_at_the_end_also_in_a_full_cache() {
    let dir = tempfile::tempdir().unwrap();
    let cache = full(dir.path());
    fill(&cache, WARMED);
    assert!(present(&cache, WARMED) < 20, "without a hold they evict each other");

    let held = hold(&cache, WARMED).unwrap();
    fill(&cache, WARMED);
    assert_eq!(present(&cache, WARMED), 40);
    fill(&cache, 2000..2100);
    assert_eq!(present(&cache, WARMED), 40, "held");
    assert!(cache.listing().pinned.is_empty(), "held is not pinned");
    drop(held);
    assert_eq!(cache.stat().pinned_bytes, 0);
    fill(&cache, 2100..2200);
    assert_eq!(present(&cache, WARMED), 40, "what is read once passes through a tenth of the cache");

    // After a restart, too.
    drop(cache);
    let cache = Arc::new(Cache::open(dir.path(), options()).unwrap());
    assert_eq!(present(&cache, WARMED), 40);
    fill(&cache, 2200..2300);
    assert_eq!(present(&cache, WARMED), 40);

    // The next warm makes way for itself.
    let held = hold(&cache, 3000..3040).unwrap();
    fill(&cache, 3000..3040);
    assert_eq!(present(&cache, 3000..3040), 40);
    drop(held);
}

/// A warm may need a region for a long chunk, in which another has just brought its own.
#[test]
fn a_region_that_is_cleared_costs_what_came_first() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Arc::new(Cache::open(dir.path(), options()).unwrap());
    let (old, new) = (2000..2045, 1000..1010);
    for warmed in [&old, &new] {
        let held = hold(&cache, warmed.clone()).unwrap();
        fill(&cache, warmed.clone());
        drop(held);
    }
    let all = cache.chunks_in(&(0..u32::MAX));
    let place_of = |n: u64| all.iter().find(|chunk| chunk.key == frame(n).id().prefix()).unwrap().place;
    for slab in new.clone().map(|n| place_of(n) / 16 * 16) {
        cache.clear(&(slab..slab + 16));
        assert_eq!(present(&cache, new.clone()), 10, "slab at {slab}");
    }
    assert!(present(&cache, old) < 45);
}

#[test]
fn of_two_warms_that_only_fit_alone_one_is_held() {
    let dir = tempfile::tempdir().unwrap();
    let cache = full(dir.path());
    let first = hold(&cache, WARMED).unwrap();
    assert!(hold(&cache, 3000..3040).is_none());
    assert!(hold(&cache, WARMED).is_some(), "the same chunks count once");
    for (one, other) in WARMED.zip(3000..3040) {
        fill(&cache, one..one + 1);
        fill(&cache, other..other + 1);
    }
    assert_eq!(present(&cache, WARMED), 40);
    drop(first);
    assert!(hold(&cache, 3000..3040).is_some());
}

#[test]
fn pins_and_holds_of_the_same_chunks_end_in_any_order() {
    let dir = tempfile::tempdir().unwrap();
    let cache = full(dir.path());
    let held = hold(&cache, 0..10).unwrap();
    fill(&cache, 0..10);
    let pin = kept(cache.pin(request(0..10)).unwrap());
    assert_eq!(cache.listing().pinned.len(), 10);
    drop(held);
    fill(&cache, 4000..4300);
    assert_eq!(present(&cache, 0..10), 10, "pinned");
    let held = hold(&cache, 0..10).unwrap();
    assert!(cache.unpin(pin.id).unwrap());
    fill(&cache, 4300..4600);
    assert_eq!(present(&cache, 0..10), 10, "held");
    drop(held);
    assert!(cache.evict(u64::MAX) > 0);
    assert_eq!(present(&cache, 0..10), 0);
}

/// A caller whose pins are limited keeps no more by warms that it makes last.
#[test]
fn holds_count_in_the_limit_of_pins() {
    let dir = tempfile::tempdir().unwrap();
    let cache = full(dir.path());
    let limit = |units: u64| PinLimit { owners: "a/".into(), bytes: units * UNIT, pins: 9, chunks: 999 };
    let hold = |numbers, units| cache.hold(&request(numbers).chunks, Some(&limit(units)));
    assert!(hold(WARMED, 40).is_none());
    let held = hold(WARMED, 110).unwrap();
    assert!(hold(3000..3002, 110).is_some(), "it is within the rest");
    assert!(hold(3000..3010, 110).is_none(), "both together are not");
    drop(held);
    let pin = PinRequest { owner: "a/me".into(), ..request(WARMED) };
    let pin = kept(cache.pin(pin).unwrap());
    assert!(hold(3000..3010, 110).is_none(), "pins count, too");
    assert!(cache.hold(&request(3000..3005).chunks, None).is_some());
    assert!(cache.unpin(pin.id).unwrap());
    assert!(hold(3000..3010, 110).is_some());
}
