//! Tests of the audit log: written entries are found again, and any change is found.

mod disk;
mod latest;
mod recording;
mod tampering;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use tempfile::TempDir;

use super::chain::{self, START};
use super::entry::{Action, Actor, Decision, Entry, EntryKind, Verdict};
use super::journal::Journal;
use super::segments::{SegmentText, read_segments};
use crate::clock::Timestamp;
use crate::identity::Identity;

/// 2026-11-21.
const NOW: Timestamp = Timestamp(1_795_000_000_123_456_789);
const ORIGIN: &str = "towline://west/node-7";

fn decision(name: &str, verdict: Verdict) -> Decision {
    Decision {
        actor: Actor::Agent(Identity::new("cloud", "pod-1").unwrap()),
        action: Action::Serve,
        name: Some(name.to_owned()),
        manifest: Some("ab".repeat(32)),
        repository: None,
        asked: None,
        to: Some("cloud".to_owned()),
        verdict,
        rule: "[[allow]] \"cloud/*\"\n".to_owned(),
    }
}

fn open(folder: &Path) -> crate::Result<Journal> {
    Journal::open(folder, ORIGIN, NOW, Duration::ZERO)
}

/// Private folder for a log.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).unwrap();
    folder
}

fn texts(folder: &Path) -> Vec<SegmentText> {
    read_segments(folder).unwrap().map(Result::unwrap).collect()
}

/// Entries of a log, without a check of their order.
fn entries(folder: &Path) -> Vec<Entry> {
    let texts = texts(folder);
    let lines = texts.iter().flat_map(|text| text.bytes.split(|byte| *byte == b'\n'));
    lines.filter(|line| !line.is_empty()).map(|line| serde_json::from_slice(line).unwrap()).collect()
}

#[test]
fn a_line_is_json_with_a_hash_over_its_bytes() {
    let entry = Entry { seq: 7, time: NOW, what: EntryKind::Decision(decision("run/step-1", Verdict::Deny)) };
    let (line, hash) = chain::seal(&START, &entry).unwrap();
    let text = String::from_utf8(line.clone()).unwrap();
    let expected = format!(
        "{{\"seq\":7,\"time\":\"2026-11-18T11:06:40.123456789Z\",\"kind\":\"decision\",\"actor\":\"towline://cloud/pod-1\",\
         \"action\":\"serve\",\"name\":\"run/step-1\",\"manifest\":\"{}\",\"to\":\"cloud\",\"verdict\":\"deny\",\
         \"rule\":\"[[allow]] \\\"cloud/*\\\"\\n\",\"hash\":\"{hash}\"}}\n",
        "ab".repeat(32)
    );
    assert_eq!(text, expected);
    let (read, same) = chain::open(&START, 7, &line[..line.len() - 1]).unwrap();
    assert_eq!((read, same), (entry, hash));
}

#[test]
fn long_texts_are_cut_and_entries_fit_a_line() {
    let mut long = decision(&"\u{1}".repeat(10_000), Verdict::Allow);
    long.rule = "\u{e9}".repeat(10_000);
    long.actor = Actor::User("u".repeat(10_000));
    long.to = Some("\"".repeat(10_000));
    let entry = Entry { seq: u64::MAX, time: NOW, what: EntryKind::Decision(long.bounded()) };
    let (line, _) = chain::seal(&START, &entry).unwrap();
    assert!(line.len() < chain::LINE_LEN_MAX, "{}", line.len());
}

#[test]
fn any_bytes_are_a_line_or_are_not() {
    let entry = Entry { seq: 1, time: NOW, what: EntryKind::Decision(decision("a", Verdict::Allow)) };
    let (line, _) = chain::seal(&START, &entry).unwrap();
    for cut in 0..line.len() {
        assert!(chain::open(&START, 1, &line[..cut]).is_err() || cut == line.len() - 1);
        assert!(chain::beginning(&line[..cut]).is_none());
    }
    for bytes in [&b""[..], b"\xff", b"{}", &vec![b'a'; 100_000]] {
        assert!(chain::open(&START, 1, bytes).is_err() && chain::beginning(bytes).is_none());
    }
}
