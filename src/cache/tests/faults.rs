//! Disks that are full, shared with others, damaged, or changed behind the cache's back.

use super::*;

fn on(memory: &Memory, dir: &tempfile::TempDir) -> Cache {
    Cache::open_on(Arc::new(memory.clone()), dir.path(), options()).unwrap()
}

/// Numbers of the frames that are there; anything wrong is a failure.
fn present(cache: &Cache, numbers: std::ops::Range<u64>) -> usize {
    numbers.filter(|&n| cache.get(&frame(n).id()).inspect(|found| assert_eq!(*found, frame(n))).is_some()).count()
}

#[test]
fn a_full_disk_refuses_and_everything_else_goes_on() {
    let (memory, dir) = (Memory::new(), tempfile::tempdir().unwrap());
    let cache = on(&memory, &dir);
    memory.world().full = true;
    assert_eq!(cache.insert(&frame(0)), Inserted::Refused(Refusal::DiskFull));
    memory.world().full = false;
    (0..6).for_each(|n| assert_eq!(cache.insert(&frame(n)), Inserted::Kept));
    memory.world().full = true;
    // Within the slab that there is, chunks come and go.
    (6..60).for_each(|n| assert_eq!(cache.insert(&frame(n)), Inserted::Kept));
    assert_eq!(cache.stat().slab_bytes, SLAB_LEN);
    assert!(present(&cache, 0..60) > 2);
    // On a file system that copies on write, any write may be one too many.
    memory.world().full_for_writes = true;
    let before = cache.stat();
    (60..70).for_each(|n| assert_eq!(cache.insert(&frame(n)), Inserted::Refused(Refusal::Unwritable)));
    assert!(cache.stat().bytes <= before.bytes, "units of what could not be written are free again");
    assert!(cache.pin(request(0..2)).is_err());
    assert_eq!(cache.stat().promised_bytes, 0, "a pin that could not be written is none");
    memory.world().full_for_writes = false;
    memory.world().full = false;
    cache.sync().unwrap();
    (70..600).for_each(|n| assert_eq!(cache.insert(&frame(n)), Inserted::Kept));
    assert_eq!(cache.stat().damaged, 0);
    let left = present(&cache, 0..600);
    drop(cache);
    let again = on(&memory, &dir);
    assert_eq!(present(&again, 0..600), left, "the journal was written again when it could be");
    assert_eq!(again.check().damaged, []);
}

#[test]
fn a_disk_without_room_for_the_journal_makes_nothing_damaged() {
    let (memory, dir) = (Memory::new(), tempfile::tempdir().unwrap());
    let cache = on(&memory, &dir);
    fill(&cache, 0..100);
    let before = present(&cache, 0..100);
    memory.world().full = true;
    memory.world().full_for_growth = true;
    // Slabs have their space, but what goes could not be told from what comes after a restart.
    let _ = cache.insert(&frame(100));
    (101..160).for_each(|n| assert_eq!(cache.insert(&frame(n)), Inserted::Refused(Refusal::Unwritable)));
    assert!(present(&cache, 0..100) + 1 >= before, "nothing is evicted for them");
    assert!(cache.sync().is_err());
    // Killed, and started again on the full disk.
    drop(cache);
    let memory = memory.after(medium::Loss::Nothing);
    memory.world().full = true;
    memory.world().full_for_growth = true;
    let cache = on(&memory, &dir);
    assert_eq!((present(&cache, 0..100), cache.check().damaged), (before, Vec::new()));
    let _ = cache.insert(&frame(160));
    (161..200).for_each(|n| assert_ne!(cache.insert(&frame(n)), Inserted::Kept));
    memory.world().full = false;
    memory.world().full_for_growth = false;
    // The next sync is the first that can, and what comes is kept.
    cache.sync().unwrap();
    (200..300).for_each(|n| assert_eq!(cache.insert(&frame(n)), Inserted::Kept));
    assert_eq!((cache.check().damaged, cache.stat().damaged), (Vec::new(), 0));
}

#[test]
fn a_disk_that_others_fill_gets_slabs_back_but_no_pinned_chunk_is_lost() {
    let (memory, dir) = (Memory::new(), tempfile::tempdir().unwrap());
    let floor = 10 * SLAB_LEN;
    let options = CacheOptions { free_floor: floor, ..options() };
    let cache = Cache::open_on(Arc::new(memory.clone()), dir.path(), options).unwrap();
    memory.world().available = floor + SLAB_LEN;
    let pin = kept(cache.pin(request(0..3)).unwrap());
    let pinned = cache.pin(request(3..90)).unwrap();
    assert!(matches!(pinned, Pinned::Lacking { disk_full: true, .. }), "the disk would not hold them");
    memory.world().available = u64::MAX / 4;
    fill(&cache, 0..100);
    assert_eq!(cache.stat().slab_bytes, SLABS * SLAB_LEN);
    // Nothing that this disk tells changes when slabs go: it takes all that it can.
    memory.world().available = floor - 1;
    assert!(cache.trim() >= (SLABS - 3) * SLAB_LEN);
    assert_eq!(cache.missing(pin.id).unwrap().unwrap(), []);
    assert_eq!(present(&cache, 0..3), 3);
    assert_eq!(cache.check().damaged, []);
    let small = cache.stat().slab_bytes;
    fill(&cache, 100..150);
    assert!(cache.stat().slab_bytes <= small, "no slab is added below the floor");
    memory.world().available = floor + 2 * SLAB_LEN;
    (150..250).for_each(|n| assert_eq!(cache.insert(&frame(n)), Inserted::Kept));
    assert_eq!(present(&cache, 0..3), 3);
}

#[test]
fn damage_in_a_slab_is_a_miss_and_the_next_fill_heals_it() {
    let (memory, dir) = (Memory::new(), tempfile::tempdir().unwrap());
    let cache = on(&memory, &dir);
    let pin = kept(cache.pin(request(0..2)).unwrap());
    (0..12).for_each(|n| assert_eq!(cache.insert(&frame(n)), Inserted::Kept));
    memory.meddle("slab-000000", |bytes| bytes.iter_mut().step_by(4096).for_each(|byte| *byte ^= 1));
    let left = present(&cache, 0..12);
    assert!(left < 12);
    assert_eq!(cache.stat().damaged, 12 - left as u64);
    assert_eq!(cache.missing(pin.id).unwrap().unwrap().len(), 2);
    fill(&cache, 0..12);
    assert_eq!(present(&cache, 0..12), 12);
    assert_eq!(cache.stat().pinned_bytes, cache.stat().promised_bytes);
    memory.meddle("slab-000000", |bytes| bytes[200] ^= 4);
    assert_eq!(cache.check().damaged.len(), 1);
    assert_eq!(cache.check().damaged.len(), 0);
}

#[test]
fn a_raw_chunk_is_read_to_its_place_or_not_at_all() {
    let (memory, dir) = (Memory::new(), tempfile::tempdir().unwrap());
    let cache = on(&memory, &dir);
    fill(&cache, 0..12);
    let read = |n: u64, more: usize| {
        let frame = frame(n);
        let mut out = vec![0; frame.bytes().len() + more];
        let found = cache.read_raw(&frame.id(), &mut out).map(|chunk| chunk.id());
        assert!(found.is_none_or(|id| id == frame.id() && out == frame.bytes()[..]));
        found.is_some()
    };
    assert!((0..12).all(|n| read(n, 0)));
    assert_eq!(cache.stat().hits, 12);
    assert!(!read(3, 1) && !read(400, 0), "another length, and a chunk that is not there");
    memory.meddle("slab-000000", |bytes| bytes.iter_mut().step_by(4096).for_each(|byte| *byte ^= 1));
    let left = (0..12).filter(|&n| read(n, 0)).count();
    assert!(left < 12);
    assert_eq!((cache.stat().hits, cache.stat().damaged), (12 + left as u64, 0), "`get` drops what is damaged");
    assert_eq!(present(&cache, 0..12), left);
}

#[test]
fn a_slab_that_is_gone_or_cut_takes_only_its_own_with_it() {
    for cut in [Some(SLAB_LEN / 2), None] {
        let (memory, dir) = (Memory::new(), tempfile::tempdir().unwrap());
        let cache = on(&memory, &dir);
        fill(&cache, 0..40);
        let before = present(&cache, 0..40);
        drop(cache);
        match cut {
            Some(len) => memory.meddle("slab-000001", |bytes| bytes.truncate(usize::try_from(len).unwrap())),
            None => Medium::remove(&memory, &dir.path().join("slab-000001")).unwrap(),
        }
        let cache = on(&memory, &dir);
        let after = present(&cache, 0..40);
        assert!(after > 0 && after < before);
        assert_eq!(cache.stat().damaged, (before - after) as u64);
        assert_eq!(cache.check().damaged, []);
        (40..200).for_each(|n| assert_eq!(cache.insert(&frame(n)), Inserted::Kept));
        assert_eq!(cache.check().damaged, []);
    }
}

#[test]
fn a_slab_that_is_cut_while_it_is_open_is_only_misses() {
    let (memory, dir) = (Memory::new(), tempfile::tempdir().unwrap());
    let cache = on(&memory, &dir);
    fill(&cache, 0..12);
    memory.meddle("slab-000000", |bytes| bytes.truncate(5000));
    assert!(present(&cache, 0..12) < 12);
    assert!(cache.stat().damaged > 0);
}

#[test]
fn a_damaged_description_begins_anew_and_a_later_version_is_left_alone() {
    let (memory, dir) = (Memory::new(), tempfile::tempdir().unwrap());
    let cache = on(&memory, &dir);
    let pin = kept(cache.pin(request(0..2)).unwrap());
    fill(&cache, 0..12);
    drop(cache);
    memory.meddle("cache", |bytes| bytes[50] ^= 1);
    let cache = on(&memory, &dir);
    assert_eq!((cache.stat().chunks, cache.stat().slab_bytes), (0, 0));
    assert_eq!(cache.missing(pin.id).unwrap().unwrap().len(), 2, "pins are known by themselves");
    (0..12).for_each(|n| assert_eq!(cache.insert(&frame(n)), Inserted::Kept));
    drop(cache);
    let of_version = |version: u8| {
        memory.meddle("cache", |bytes| {
            bytes[8] = version;
            let digest = *blake3::hash(&bytes[..72]).as_bytes();
            bytes[72..].copy_from_slice(&digest);
        });
    };
    of_version(1);
    let cache = on(&memory, &dir);
    assert_eq!(cache.stat().chunks, 0, "extents of an earlier version are not believed");
    drop(cache);
    of_version(3);
    let error = Cache::open_on(Arc::new(memory.clone()), dir.path(), options()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}

#[test]
fn a_journal_damaged_in_the_middle_keeps_what_is_before_and_no_wrong_byte_comes_of_it() {
    let (memory, dir) = (Memory::new(), tempfile::tempdir().unwrap());
    let cache = on(&memory, &dir);
    fill(&cache, 0..90);
    drop(cache);
    let mut len = 0;
    memory.meddle("journal", |bytes| len = bytes.len());
    for at in (0..len).step_by(97) {
        let memory = memory.after(medium::Loss::Nothing);
        memory.meddle("journal", |bytes| bytes[at] ^= 8);
        let cache = on(&memory, &dir);
        let found = present(&cache, 0..90);
        fill(&cache, 90..130);
        let _ = (present(&cache, 0..130), cache.check());
        assert_eq!(cache.check().damaged, []);
        drop(cache);
        let cache = on(&memory, &dir);
        assert_eq!(cache.check().damaged, [], "byte {at}, {found} were left");
    }
}

#[test]
fn a_damaged_pin_ends_and_half_a_pin_was_never_one() {
    let (memory, dir) = (Memory::new(), tempfile::tempdir().unwrap());
    let cache = on(&memory, &dir);
    let (one, two) = (kept(cache.pin(request(0..2)).unwrap()), kept(cache.pin(request(1..4)).unwrap()));
    drop(cache);
    memory.meddle(&one.id.to_string(), |bytes| bytes[30] ^= 1);
    let half = dir.path().join("pins").join(PinId::random().to_string()).with_extension("new");
    Medium::open(&memory, &half, true).unwrap();
    let cache = on(&memory, &dir);
    assert_eq!(cache.pins(), [two]);
    assert_eq!(Medium::names(&memory, &dir.path().join("pins")).unwrap().len(), 1);
}

#[test]
fn links_that_others_put_into_the_folder_are_not_followed() {
    let (dir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let target = elsewhere.path().join("file");
    std::fs::write(&target, "precious").unwrap();
    let link = |name: &str| std::os::unix::fs::symlink(&target, dir.path().join(name)).unwrap();
    link("lock");
    assert!(Cache::open(dir.path(), options()).is_err());
    std::fs::remove_file(dir.path().join("lock")).unwrap();
    let pins = dir.path().join("pins");
    std::os::unix::fs::symlink(elsewhere.path(), &pins).unwrap();
    assert_eq!(Cache::open(dir.path(), options()).unwrap_err().kind(), ErrorKind::Denied);
    std::fs::remove_file(&pins).unwrap();
    std::fs::create_dir(&pins).unwrap();
    std::fs::write(pins.join("notes"), "of somebody who names the wrong folder").unwrap();
    let cache = Cache::open(dir.path(), options()).unwrap();
    assert!(pins.join("notes").exists());
    link("slab-000000");
    assert_eq!(cache.insert(&frame(0)), Inserted::Kept, "a new slab takes the place of the link");
    drop(cache);
    // Another name of the file is no better.
    let slab = dir.path().join("slab-000000");
    std::fs::hard_link(&slab, elsewhere.path().join("slab")).unwrap();
    assert!(Cache::open(dir.path(), options()).is_err());
    assert_eq!(std::fs::read_to_string(&target).unwrap(), "precious");
}

#[test]
fn a_folder_of_another_user_is_refused() {
    use std::os::unix::fs::{PermissionsExt as _, chown};
    let dir = tempfile::tempdir().unwrap();
    // A volume of Kubernetes.
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o2777)).unwrap();
    drop(Cache::open(&dir.path().join("below"), options()).unwrap());
    drop(Cache::open(dir.path(), options()).unwrap());
    if rustix::process::geteuid().is_root() {
        chown(dir.path(), Some(65_534), None).unwrap();
        let error = Cache::open(dir.path(), options()).unwrap_err();
        assert!(error.kind() == ErrorKind::Denied && error.to_string().contains("another user"), "{error}");
    }
}
