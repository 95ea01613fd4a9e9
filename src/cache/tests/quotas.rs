//! Quotas of tenants: who is beyond its own makes way itself, and nobody else does; across restarts, and from many threads.

use std::collections::BTreeSet;

use super::*;

/// Units of the quota of `small`.
const QUOTA: u64 = 32;

fn bounded() -> CacheOptions {
    let tenants = [("small".to_owned(), QUOTA * UNIT)].into();
    CacheOptions { quotas: TenantQuotas { each: None, tenants }, ..options() }
}

fn bytes_of(cache: &Cache, tenant: &str) -> u64 {
    cache.tenants().iter().find(|used| used.tenant == tenant).map_or(0, |used| used.bytes)
}

fn there(cache: &Cache, numbers: std::ops::Range<u64>) -> BTreeSet<u64> {
    numbers.filter(|&n| cache.contains(&frame(n).id())).collect()
}

/// The `numbers` whose frames take one unit.
fn small_ones(numbers: std::ops::Range<u64>) -> impl Iterator<Item = u64> {
    numbers.filter(|&n| extent::weight(frame(n).bytes().len() as u64) == 1)
}

fn fill_for(cache: &Cache, numbers: std::ops::Range<u64>, tenant: &str) -> u64 {
    numbers.filter(|&n| cache.insert_for(&frame(n), Some(tenant)) == Inserted::Kept).count() as u64
}

/// docs/cache.md: "A tenant that has used up its quota makes way for its own chunks"
#[test]
fn a_tenant_beyond_its_quota_evicts_its_own_chunks_and_never_another_s() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path(), bounded()).unwrap();
    // Full of what counts for others: within its quota, a tenant has room of anybody.
    for n in 0..100 {
        fill_for(&cache, n..n + 1, "large");
        fill(&cache, 1000 + n..1001 + n);
    }
    for n in small_ones(2000..2300) {
        assert_eq!(fill_for(&cache, n..n + 1, "small"), 1);
    }
    assert_eq!(bytes_of(&cache, "small"), QUOTA * UNIT);
    let others = (there(&cache, 0..100), there(&cache, 1000..1100));
    assert!(!others.0.is_empty() && !others.1.is_empty());
    for n in small_ones(3000..3600) {
        assert_eq!(fill_for(&cache, n..n + 1, "small"), 1);
    }
    assert_eq!(bytes_of(&cache, "small"), QUOTA * UNIT);
    assert_eq!((there(&cache, 0..100), there(&cache, 1000..1100)), others, "nobody else made way");
    // Frames of any length stay within it.
    fill_for(&cache, 3700..3800, "small");
    assert!(bytes_of(&cache, "small") <= QUOTA * UNIT);
    // Others go on as before, and may evict what is within a quota, too.
    fill_for(&cache, 4000..4300, "large");
    assert!(cache.contains(&frame(4299).id()) && bytes_of(&cache, "small") <= QUOTA * UNIT);
    let all = cache.tenants();
    let quotas: Vec<_> = all.iter().map(|used| (used.tenant.as_str(), used.quota)).collect();
    assert_eq!(quotas, [("large", None), ("small", Some(QUOTA * UNIT))]);
}

/// docs/cache.md: "A chunk counts for the tenant that it was first brought for"
#[test]
fn a_shared_chunk_counts_for_whoever_had_it_brought_first() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path(), bounded()).unwrap();
    assert_eq!(fill_for(&cache, 0..3, "large"), 3);
    assert_eq!(cache.insert_for(&frame(1), Some("small")), Inserted::Known);
    assert_eq!(bytes_of(&cache, "small"), 0);
    let large = bytes_of(&cache, "large");
    fill_for(&cache, 100..200, "small");
    assert_eq!((bytes_of(&cache, "large"), there(&cache, 0..3).len()), (large, 3));
    // Chunks that were read since stay longest among a tenant's own.
    let hot = there(&cache, 100..200).into_iter().next().unwrap();
    assert!(cache.get(&frame(hot).id()).is_some());
    let cold = there(&cache, 100..200).into_iter().nth(1).unwrap();
    fill_for(&cache, 300..304, "small");
    assert!(cache.contains(&frame(hot).id()) && !cache.contains(&frame(cold).id()));
}

/// docs/cache.md: "Pinned chunks count, and never make way; a chunk that a pin expects is admitted beyond the quota"
#[test]
fn pins_go_beyond_a_quota_and_what_is_pinned_never_makes_way() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path(), bounded()).unwrap();
    let pin = kept(cache.pin(request(0..30)).unwrap());
    assert_eq!(fill_for(&cache, 0..30, "small"), 30, "all that the pin expects");
    assert!(bytes_of(&cache, "small") > QUOTA * UNIT);
    assert_eq!(cache.insert_for(&frame(500), Some("small")), Inserted::Refused(Refusal::Quota));
    assert_eq!(there(&cache, 0..30).len(), 30);
    assert!(cache.unpin(pin.id).unwrap());
    assert_eq!(cache.insert_for(&frame(500), Some("small")), Inserted::Kept, "its own make way now");
    assert!(bytes_of(&cache, "small") <= QUOTA * UNIT);
    let tiny = TenantQuotas { each: Some(0), tenants: [].into() };
    drop(cache);
    let cache = Cache::open(dir.path(), CacheOptions { quotas: tiny, ..options() }).unwrap();
    assert_eq!(cache.insert_for(&frame(600), Some("another")), Inserted::Refused(Refusal::Quota));
    assert_eq!(cache.insert_for(&frame(600), None), Inserted::Kept, "what has no tenant has no quota");
}

/// docs/cache.md: "across restarts"
#[test]
fn whom_chunks_count_for_is_known_after_a_restart_and_lost_with_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path(), bounded()).unwrap();
    fill_for(&cache, 0..20, "large");
    fill_for(&cache, 100..130, "small");
    let before = cache.tenants();
    drop(cache);
    for _ in 0..2 {
        let cache = Cache::open(dir.path(), bounded()).unwrap();
        assert_eq!(cache.tenants(), before);
    }
    let cache = Cache::open(dir.path(), bounded()).unwrap();
    let large = there(&cache, 0..20);
    fill_for(&cache, 200..300, "small");
    assert_eq!(there(&cache, 0..20), large);
    assert!(bytes_of(&cache, "small") <= QUOTA * UNIT);
    drop(cache);
    std::fs::remove_file(dir.path().join("tenants")).unwrap();
    let cache = Cache::open(dir.path(), bounded()).unwrap();
    assert_eq!((cache.tenants(), there(&cache, 0..20)), (vec![], large));
    // Numbers that are given again are nobody's of before.
    fill_for(&cache, 400..401, "small");
    let small = bytes_of(&cache, "small");
    drop(cache);
    let cache = Cache::open(dir.path(), bounded()).unwrap();
    assert_eq!(bytes_of(&cache, "small"), small);
    assert!(cache.check().damaged.is_empty());
}

#[test]
fn many_threads_stay_within_a_quota() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path(), bounded()).unwrap();
    fill_for(&cache, 0..12, "large");
    let large = there(&cache, 0..12);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let cache = &cache;
            scope.spawn(move || {
                for n in 0..100 {
                    let _ = cache.insert_for(&frame(10_000 * (thread + 1) + n), Some("small"));
                    assert!(bytes_of(cache, "small") <= QUOTA * UNIT);
                }
            });
        }
    });
    assert_eq!(there(&cache, 0..12), large);
    assert!(bytes_of(&cache, "small") > 0 && cache.check().damaged.is_empty());
}
