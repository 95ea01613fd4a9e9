//! Tests of the last entries, read from the end of a log.

use std::fs::{self, OpenOptions};
use std::io::Write as _;

use super::super::chain::LINE_LEN_MAX;
use super::super::entry::{Entry, EntryKind, Verdict};
use super::super::latest::{LatestEntries, latest_entries};
use super::super::segments;
use super::{NOW, decision, entries, folder, open};
use crate::error::ErrorKind;

/// Log of several segments in which every third decision is a refusal.
fn log(folder: &tempfile::TempDir, decisions: u64) {
    let mut journal = open(folder.path()).unwrap();
    journal.segment_len = 5_000;
    for n in 0..decisions {
        let verdict = if n % 3 == 0 { Verdict::Deny } else { Verdict::Allow };
        journal.append(NOW, &[EntryKind::Decision(decision(&format!("run/step-{n}"), verdict))]).unwrap();
    }
}

fn is_denied(entry: &Entry) -> bool {
    matches!(&entry.what, EntryKind::Decision(decision) if decision.verdict == Verdict::Deny)
}

#[test]
fn pages_from_the_end_are_the_whole_log_backwards() {
    let folder = folder();
    log(&folder, 100);
    assert!(segments::list(folder.path()).unwrap().len() > 3);
    for wanted in [|_: &Entry| true, is_denied] {
        let mut expected = entries(folder.path());
        expected.reverse();
        expected.retain(wanted);
        for limit in [1, 7, 1000] {
            let (mut found, mut before) = (Vec::new(), None);
            loop {
                let page = latest_entries(folder.path(), before, limit, wanted).unwrap();
                assert!(page.entries.len() <= limit && page.unreadable == 0);
                found.extend(page.entries);
                before = page.next;
                if before.is_none() {
                    break;
                }
            }
            assert_eq!(found, expected, "{limit}");
        }
    }
}

#[test]
fn what_is_no_entry_is_counted_and_what_is_being_written_is_not_read() {
    let folder = folder();
    log(&folder, 5);
    let (_, last) = segments::list(folder.path()).unwrap().pop().unwrap();
    let mut file = OpenOptions::new().append(true).open(&last).unwrap();
    file.write_all(b"garbage\n{\"seq\":99,\"time\":").unwrap();
    let found = latest_entries(folder.path(), None, 1, |_| true).unwrap();
    assert_eq!((found.entries.len(), found.unreadable), (1, 1));
    // Longer than any line: not read to its beginning.
    file.write_all(&vec![b'x'; 3 * LINE_LEN_MAX + (1 << 20)]).unwrap();
    let error = latest_entries(folder.path(), None, 1, |_| true).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Damaged);
}

#[test]
fn an_empty_log_has_no_entries() {
    let folder = folder();
    assert_eq!(latest_entries(folder.path(), None, 10, |_| true).unwrap(), LatestEntries::default());
    fs::write(folder.path().join(segments::name(1)), "").unwrap();
    assert_eq!(latest_entries(folder.path(), None, 10, |_| true).unwrap(), LatestEntries::default());
}
