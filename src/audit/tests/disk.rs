//! Tests of the log on disk: crashes, damage, a full disk, other processes.

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;

use super::super::entry::{EntryKind, Verdict};
use super::super::head::{Head, SignedHead};
use super::super::journal::Journal;
use super::super::segments;
use super::super::verify::verify;
use super::{NOW, ORIGIN, decision, entries, folder, open, texts};
use crate::error::ErrorKind;
use crate::id::{AuditLogId, EntryHash};

fn allow(name: &str) -> EntryKind {
    EntryKind::Decision(decision(name, Verdict::Allow))
}

#[test]
fn a_log_goes_on_where_it_was() {
    let folder = folder();
    for n in 0..4 {
        let mut journal = open(folder.path()).unwrap();
        journal.segment_len = 900;
        journal.append(NOW, &[allow(&format!("a/{n}")), allow(&format!("b/{n}"))]).unwrap();
        journal.sync().unwrap();
    }
    let findings = verify(texts(folder.path()).into_iter().map(Ok), &[], 1).unwrap();
    assert_eq!(findings.faults, []);
    let names: Vec<_> = entries(folder.path())
        .into_iter()
        .filter_map(|entry| if let EntryKind::Decision(decision) = entry.what { decision.name } else { None })
        .collect();
    assert_eq!(names, ["a/0", "b/0", "a/1", "b/1", "a/2", "b/2", "a/3", "b/3"]);
    assert!(texts(folder.path()).len() > 1);
}

/// L4 "If a crash leaves an incomplete entry at the end, it is moved to a file beside, and an entry records that"
#[test]
fn a_torn_last_entry_is_set_aside_at_every_length() {
    let folder = folder();
    let mut journal = open(folder.path()).unwrap();
    journal.append(NOW, &[allow("a")]).unwrap();
    let sound = texts(folder.path())[0].bytes.len();
    journal.append(NOW, &[allow("b")]).unwrap();
    drop(journal);
    let path = folder.path().join(segments::name(1));
    let whole = fs::read(&path).unwrap();
    for len in sound + 1..whole.len() {
        fs::write(&path, &whole[..len]).unwrap();
        drop(open(folder.path()).unwrap());
        let entries = entries(folder.path());
        let bytes = (len - sound) as u64;
        let said = |what: &EntryKind| matches!(what, EntryKind::Torn { bytes: torn, .. } if *torn == bytes);
        assert!(entries.len() == 3 && said(&entries[2].what), "{len}: {entries:?}");
        let aside = folder.path().join(segments::name(1)).with_extension(format!("torn-{sound}"));
        assert_eq!(fs::read(aside).unwrap(), &whole[sound..len]);
        assert_eq!(verify(texts(folder.path()).into_iter().map(Ok), &[], 1).unwrap().faults, []);
    }
}

#[test]
fn damage_before_the_end_is_set_aside_and_still_found_by_the_head() {
    let folder = folder();
    let mut journal = open(folder.path()).unwrap();
    journal.append(NOW, &[allow("a"), allow("b"), allow("c")]).unwrap();
    let head = journal.head(NOW);
    drop(journal);
    let path = folder.path().join(segments::name(1));
    let mut bytes = fs::read(&path).unwrap();
    let at = bytes.windows(10).position(|window| window == b"\"name\":\"b\"").unwrap();
    bytes[at + 8] = b'x';
    fs::write(&path, bytes).unwrap();
    let mut journal = open(folder.path()).unwrap();
    journal.append(NOW, &[allow("d"), allow("e")]).unwrap();
    drop(journal);
    assert_eq!(verify(texts(folder.path()).into_iter().map(Ok), &[], 1).unwrap().faults, []);
    assert!(!verify(texts(folder.path()).into_iter().map(Ok), &[head], 1).unwrap().faults.is_empty());
}

#[test]
fn a_segment_that_was_begun_in_a_crash_is_begun_again() {
    let folder = folder();
    let mut journal = open(folder.path()).unwrap();
    journal.append(NOW, &[allow("a")]).unwrap();
    let next = journal.head(NOW).seq + 1;
    drop(journal);
    File::create(folder.path().join(segments::name(next))).unwrap();
    let mut journal = open(folder.path()).unwrap();
    journal.append(NOW, &[allow("b")]).unwrap();
    drop(journal);
    assert_eq!(verify(texts(folder.path()).into_iter().map(Ok), &[], 1).unwrap().faults, []);
    assert!(matches!(entries(folder.path())[2].what, EntryKind::Torn { bytes: 0, .. }));
}

#[test]
fn a_log_is_one_processs_and_one_agents() {
    let folder = folder();
    let journal = open(folder.path()).unwrap();
    let error = open(folder.path()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict);
    drop(journal);
    let error = Journal::open(folder.path(), "cli:eva", NOW, std::time::Duration::ZERO).unwrap_err();
    assert_eq!((error.kind(), error.to_string().contains(ORIGIN)), (ErrorKind::Usage, true));
}

#[test]
fn a_full_disk_says_so_and_leaves_no_half_entry() {
    let folder = folder();
    let mut journal = open(folder.path()).unwrap();
    journal.append(NOW, &[allow("a")]).unwrap();
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let file = journal.swap_file(full);
    let error = journal.append(NOW, &[allow("b")]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exhausted);
    assert!(error.to_string().starts_with("disk full: cannot write the audit log"), "{error}");
    // The disk wrote a part of it, and has space again.
    let mut file = file;
    std::io::Seek::seek(&mut file, std::io::SeekFrom::End(0)).unwrap();
    file.write_all(b"{\"seq\":3,").unwrap();
    journal.swap_file(file);
    journal.append(NOW, &[allow("c")]).unwrap();
    assert_eq!(verify(texts(folder.path()).into_iter().map(Ok), &[], 1).unwrap().faults, []);
    assert_eq!(entries(folder.path()).len(), 3);
}

#[test]
fn heads_survive_bytes_and_no_bytes_are_trusted() {
    let head = Head {
        log: AuditLogId::random(),
        origin: ORIGIN.to_owned(),
        seq: 1 << 40,
        hash: EntryHash::of(b"entry"),
        time: NOW,
    };
    let signed = SignedHead { head, signature: vec![7; 700] };
    let bytes = signed.encode();
    assert_eq!(SignedHead::decode(&bytes).unwrap(), signed);
    for len in 0..bytes.len() {
        assert_eq!(SignedHead::decode(&bytes[..len]).unwrap_err().kind(), ErrorKind::Damaged);
    }
    assert!(SignedHead::decode(&[bytes.as_slice(), &[0]].concat()).is_err());
}
