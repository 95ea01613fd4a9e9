//! Inventories, tests/golden/inventory: a head, and the set that it is based on.

use std::fs;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use towline::clock::Timestamp;
use towline::format::{
    BaseSet, CacheSpace, ChangedSet, InventoryHead, KeySet, LinkRate, Patch, SignedBytes, decode_base, encode_base,
};
use towline::id::{ChunkId, RepositoryId};

fn golden(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/inventory").join(file)
}

/// Keys of the chunks that hold these numbers, ascending.
fn keys(numbers: std::ops::Range<u64>) -> Vec<u64> {
    let mut keys: Vec<u64> = numbers.map(|n| ChunkId::of(&n.to_le_bytes()).prefix()).collect();
    keys.sort_unstable();
    keys
}

/// The base, and the signed head of a cache that lost ten of its chunks and got twenty others.
fn made() -> (Vec<u8>, Vec<u8>) {
    let base = KeySet::of(keys(0..2_000));
    let body = encode_base(&base);
    let stored = BaseSet { slot: true, digest: *blake3::hash(&body).as_bytes() };
    let head = InventoryHead {
        repository: RepositoryId::from_bytes([7; 16]),
        sequence: 1_000_000,
        at: Timestamp(1_700_000_000_000_000_000),
        space: CacheSpace { capacity: 1 << 40, used: 1 << 39, promised: 1 << 20 },
        held: ChangedSet { base: Some(stored), patch: base.changes_to(&keys(10..2_020)) },
        pinned: ChangedSet { base: None, patch: KeySet::default().changes_to(&keys(50..60)) },
        promised: ChangedSet { base: None, patch: Patch::default() },
        links: vec![
            LinkRate { site: String::new(), rate: 125_000_000, spread: 156, samples: 1, ..LinkRate::default() },
            LinkRate {
                site: "west".to_owned(),
                rate: 1,
                spread: 101,
                samples: 3,
                overhead_ms: 250,
                outcomes: 20,
                error: 1_000,
                covered: 18,
            },
        ],
    };
    (body, SignedBytes { bytes: head.encode(), signature: vec![1, 2, 3] }.encode())
}

/// All of them, for the fuzzer.
pub(crate) fn inventories() -> Vec<Bytes> {
    let (base, signed) = made();
    let head = SignedBytes::decode(&signed).unwrap().bytes;
    vec![base.into(), signed.into(), head.into()]
}

#[test]
fn inventories_stay_as_they_are() {
    let (base, signed) = made();
    if std::env::var_os("TOWLINE_GOLDEN_WRITE").is_some() {
        fs::write(golden("head-2"), &signed).unwrap();
    }
    let (stored_base, stored_head) = (fs::read(golden("held-1")).unwrap(), fs::read(golden("head-2")).unwrap());
    assert!(base == stored_base && signed == stored_head, "the encoding of inventories changed");
    // Version 1 had no outcomes of links.
    let before = SignedBytes::decode(&fs::read(golden("head")).unwrap()).unwrap();
    let before = InventoryHead::decode(&before.bytes, u64::MAX).unwrap();
    let head = InventoryHead::decode(&SignedBytes::decode(&stored_head).unwrap().bytes, u64::MAX).unwrap();
    let links: Vec<LinkRate> = head
        .links
        .iter()
        .map(|link| LinkRate { overhead_ms: 0, outcomes: 0, error: 0, covered: 0, ..link.clone() })
        .collect();
    assert_eq!(before, InventoryHead { links, ..head.clone() });
    let set = decode_base(&stored_base, &head.held.base.unwrap().digest, u64::MAX).unwrap();
    let now = set.patched(&head.held.patch).unwrap();
    let (mut found, mut pinned) = (0, 0);
    now.find_all(&keys(0..2_020), |_| found += 1);
    KeySet::default().patched(&head.pinned.patch).unwrap().find_all(&keys(0..2_020), |_| pinned += 1);
    assert_eq!((now.len(), found, pinned), (2_010, 2_010, 10));
}
