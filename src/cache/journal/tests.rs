//! The journal with its tail torn, its middle damaged, and another's file in its place.

use proptest::prelude::*;

use super::*;
use crate::cache::medium::Disk;
use crate::cache::queue::{QueueKind, Resident};

const ID: CacheId = [7; 16];

fn record(n: u64) -> Record {
    let weight = u16::try_from(n % 500 + 1).unwrap();
    let place = u32::try_from(n * 500).unwrap();
    match n % 3 {
        0 => Record::Insert(Resident { key: n, place, weight, standing: QueueKind::Small, frequency: 1 }),
        1 => Record::Promote(n - 1),
        _ => Record::Remove(n - 2),
    }
}

fn records(range: std::ops::Range<u64>) -> Vec<Record> {
    range.map(record).collect()
}

fn read(dir: &Path, id: &CacheId) -> (Vec<Record>, Option<Journal>) {
    let mut found = Vec::new();
    let journal = replay(&Disk::open(dir).unwrap(), dir, id, |records, _| {
        found.extend_from_slice(records);
        true
    });
    (found, journal)
}

#[test]
fn what_was_appended_is_read_in_order_and_continued() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = Journal::rewrite(&Disk::open(dir.path()).unwrap(), dir.path(), &ID, &records(0..70_000)).unwrap();
    journal.append(&records(70_000..70_010)).unwrap();
    let (found, journal) = read(dir.path(), &ID);
    assert_eq!(found, records(0..70_010));
    journal.unwrap().append(&records(70_010..70_020)).unwrap();
    let (found, journal) = read(dir.path(), &ID);
    assert_eq!(found, records(0..70_020));
    assert_eq!(journal.unwrap().len(), std::fs::metadata(path(dir.path())).unwrap().len());
}

#[test]
fn another_caches_journal_is_none() {
    let dir = tempfile::tempdir().unwrap();
    Journal::rewrite(&Disk::open(dir.path()).unwrap(), dir.path(), &ID, &records(0..10)).unwrap();
    let (found, journal) = read(dir.path(), &[8; 16]);
    assert!(found.is_empty() && journal.is_none());
}

proptest! {
    #[test]
    fn what_follows_damage_is_dropped(
        count in 1u64..60,
        cut in proptest::option::of(0usize..1200),
        bent in proptest::option::of((0usize..1200, 0u8..8)),
        tail in proptest::collection::vec(any::<u8>(), 0..50),
    ) {
        let dir = tempfile::tempdir().unwrap();
        Journal::rewrite(&Disk::open(dir.path()).unwrap(), dir.path(), &ID, &records(0..count)).unwrap();
        let whole = std::fs::read(path(dir.path())).unwrap();
        let mut bytes = whole.clone();
        if let Some((at, bit)) = bent.filter(|(at, _)| *at < bytes.len()) {
            bytes[at] ^= 1 << bit;
        }
        bytes.truncate(cut.unwrap_or(usize::MAX));
        bytes.extend_from_slice(&tail);
        std::fs::write(path(dir.path()), &bytes).unwrap();
        let (found, journal) = read(dir.path(), &ID);
        let same = bytes.iter().zip(&whole).take_while(|(a, b)| a == b).count();
        let sound = if same < HEADER_LEN { 0 } else { (same - HEADER_LEN) / RECORD_LEN };
        prop_assert_eq!(found, records(0..sound as u64));
        let whole_records = same.checked_sub(HEADER_LEN).is_some_and(|len| len.is_multiple_of(RECORD_LEN));
        prop_assert_eq!(journal.is_some(), same == bytes.len() && whole_records);
    }
}
