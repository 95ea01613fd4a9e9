//! Bases of cached frames: known after a restart, and replaced.

use super::*;
use crate::codec::encode_derived;

/// Frame number `n`, as a chunk that derives from another: of one unit.
fn derived(n: u64) -> Frame {
    let plain = frame(n);
    Frame::decoded(Chunk::new(plain.bytes()), encode_derived(frame(n + 1).id())).unwrap()
}

fn base_of(n: u64) -> BaseKey {
    BaseKey::of(Some(&frame(n + 1).id()))
}

#[test]
fn a_base_is_known_after_a_restart_and_a_frame_is_replaced_once() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path(), options()).unwrap();
    let (alone, with_base) = (frame(1), derived(1));
    let id = alone.id();
    assert_eq!(cache.base(&id), None);
    assert_eq!(cache.insert(&with_base), Inserted::Kept);
    assert_eq!(cache.base(&id), Some(base_of(1)));
    drop(cache);
    let cache = Cache::open(dir.path(), options()).unwrap();
    let bases = [cache.base(&id), cache.base(&id)];
    assert_eq!(bases, [Some(base_of(1)); 2], "read from the disk, then known");

    let pin = kept(cache.pin(request([1])).unwrap());
    cache.replace(&with_base, Some(&alone));
    assert_eq!((cache.base(&id), cache.get(&id)), (Some(BaseKey::NONE), Some(alone.clone())));
    assert_eq!(cache.missing(pin.id).unwrap(), Some(vec![]));
    // Another thread has read the old frame before.
    cache.replace(&with_base, None);
    assert_eq!(cache.get(&id), Some(alone.clone()));
    drop(cache);
    let cache = Cache::open(dir.path(), options()).unwrap();
    assert_eq!(cache.get(&id), Some(alone.clone()));
    cache.replace(&alone, None);
    assert_eq!((cache.base(&id), cache.get(&id)), (None, None));
}

#[test]
fn a_frame_stays_if_its_replacement_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path(), options()).unwrap();
    let plain = Bytes::from(vec![7; usize::try_from(SLAB_LEN).unwrap() + 1]);
    let with_base = Frame::decoded(Chunk::new(&plain), encode_derived(frame(2).id())).unwrap();
    let encoded = Encoded { codec: Codec::Raw, bytes: plain.clone(), base: None };
    let longer_than_a_slab = Frame::decoded(Chunk::new(&plain), encoded).unwrap();
    assert_eq!(cache.insert(&with_base), Inserted::Kept);
    cache.replace(&with_base, Some(&longer_than_a_slab));
    assert_eq!((cache.base(&with_base.id()), cache.get(&with_base.id())), (Some(base_of(1)), Some(with_base)));
}
