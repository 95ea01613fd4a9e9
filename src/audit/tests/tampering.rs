//! L2: any change, move or removal in a log of several segments is found, up to the published head.

use super::super::chain;
use super::super::entry::{Entry, EntryKind, Verdict};
use super::super::head::Head;
use super::super::segments::{self, SegmentText};
use super::super::verify::{Findings, verify};
use super::{NOW, decision, folder, open, texts};
use crate::clock::Timestamp;
use crate::id::AuditLogId;

/// A log of three segments, and its head.
fn log() -> (Vec<SegmentText>, Head) {
    let folder = folder();
    let mut journal = open(folder.path()).unwrap();
    journal.segment_len = 1100;
    for n in 0..5 {
        let verdict = if n % 2 == 0 { Verdict::Allow } else { Verdict::Deny };
        journal.append(NOW, &[EntryKind::Decision(decision(&format!("run/step-{n}"), verdict))]).unwrap();
    }
    journal.append(NOW, &[EntryKind::End { of: 2, bytes: 12345, requests: 3, outcome: "done".to_owned() }]).unwrap();
    let texts = texts(folder.path());
    assert_eq!(texts.len(), 3, "{texts:?}");
    (texts, journal.head(NOW))
}

fn checked(texts: &[SegmentText], heads: &[Head]) -> Findings {
    verify(texts.iter().cloned().map(Ok), heads, 1).unwrap()
}

/// All lines with their ends, in order, each with its segment.
fn lines(texts: &[SegmentText]) -> Vec<(usize, Vec<u8>)> {
    let of = |(at, text): (usize, &SegmentText)| {
        let lines = text.bytes.split_inclusive(|byte| *byte == b'\n').map(|line| (at, line.to_vec()));
        lines.collect::<Vec<_>>()
    };
    texts.iter().enumerate().flat_map(of).collect()
}

/// Segments that hold `lines`.
fn joined(texts: &[SegmentText], lines: &[(usize, Vec<u8>)]) -> Vec<SegmentText> {
    let mut texts = texts.to_vec();
    texts.iter_mut().for_each(|text| text.bytes.clear());
    lines.iter().for_each(|(at, line)| texts[*at].bytes.extend_from_slice(line));
    texts
}

#[test]
fn a_log_as_it_was_written_is_sound() {
    let (texts, head) = log();
    let findings = checked(&texts, std::slice::from_ref(&head));
    assert_eq!(findings.faults, []);
    assert_eq!((findings.first, findings.last, findings.published), (1, head.seq, Some(head.seq)));
    assert_eq!(findings.local_only(), None);
    assert_eq!(checked(&texts, &[]).local_only(), Some((1, head.seq)));
}

#[test]
fn every_single_byte_edit_is_found() {
    let (texts, head) = log();
    for segment in 0..texts.len() {
        for at in 0..texts[segment].bytes.len() {
            let byte = texts[segment].bytes[at];
            let flipped = (0..8).map(|bit| byte ^ 1 << bit);
            for other in flipped.chain([b'\n', b' ', b'"', 0]).filter(|other| *other != byte) {
                let mut edited = texts.clone();
                edited[segment].bytes[at] = other;
                let findings = checked(&edited, std::slice::from_ref(&head));
                assert!(!findings.faults.is_empty(), "byte {at} of segment {segment} as {other}");
                // Also without a head: only the chain as a whole can be replaced undetected.
                assert!(!checked(&edited, &[]).faults.is_empty(), "byte {at} of segment {segment} as {other}");
            }
            let mut shorter = texts.clone();
            shorter[segment].bytes.remove(at);
            let mut longer = texts.clone();
            longer[segment].bytes.insert(at, byte);
            for edited in [shorter, longer] {
                assert!(!checked(&edited, std::slice::from_ref(&head)).faults.is_empty(), "{at} of {segment}");
            }
        }
    }
}

#[test]
fn every_cut_is_found() {
    let (texts, head) = log();
    let heads = std::slice::from_ref(&head);
    for segment in 0..texts.len() {
        for len in 0..texts[segment].bytes.len() {
            // The rest of the segment and all later ones.
            let mut cut = texts[..=segment].to_vec();
            cut[segment].bytes.truncate(len);
            assert!(!checked(&cut, heads).faults.is_empty(), "{len} of {segment}");
            // The rest of the segment alone.
            let mut cut = texts.clone();
            cut[segment].bytes.truncate(len);
            assert!(!checked(&cut, heads).faults.is_empty(), "{len} of {segment}");
        }
        let mut without = texts.clone();
        without.remove(segment);
        assert!(!checked(&without, heads).faults.is_empty(), "without segment {segment}");
        assert!(segment == 0 || !checked(&texts[..segment], heads).faults.is_empty(), "cut before {segment}");
    }
    let all = lines(&texts);
    for at in 0..all.len() {
        for until in at + 1..=all.len() {
            let rest: Vec<_> = all[..at].iter().chain(&all[until..]).cloned().collect();
            assert!(!checked(&joined(&texts, &rest), heads).faults.is_empty(), "without entries {at} to {until}");
        }
    }
    let findings = checked(&joined(&texts, &all[..all.len() - 1]), heads);
    let what = format!("log ends at entry {}, but entry {} was published at", head.seq - 1, head.seq);
    assert!(findings.faults[0].what.starts_with(&what), "{findings:?}");
}

#[test]
fn every_reorder_and_repeat_is_found() {
    let (texts, head) = log();
    let heads = std::slice::from_ref(&head);
    let all = lines(&texts);
    for from in 0..all.len() {
        for to in 0..all.len() {
            let mut repeated = all.clone();
            repeated.insert(to, all[from].clone());
            assert!(!checked(&joined(&texts, &repeated), heads).faults.is_empty(), "{from} again at {to}");
            if from == to {
                continue;
            }
            let mut swapped = all.clone();
            (swapped[from].1, swapped[to].1) = (all[to].1.clone(), all[from].1.clone());
            assert!(!checked(&joined(&texts, &swapped), heads).faults.is_empty(), "{from} for {to}");
            let mut moved = all.clone();
            let line = moved.remove(from).1;
            let segment = all[to].0;
            moved.insert(to, (segment, line));
            assert!(!checked(&joined(&texts, &moved), heads).faults.is_empty(), "{from} moved to {to}");
        }
    }
    for a in 0..texts.len() {
        for b in 0..a {
            let mut swapped = texts.clone();
            (swapped[a].bytes, swapped[b].bytes) = (texts[b].bytes.clone(), texts[a].bytes.clone());
            assert!(!checked(&swapped, heads).faults.is_empty(), "segment {a} for {b}");
        }
    }
}

#[test]
fn the_first_bad_entry_is_named() {
    let (texts, head) = log();
    let mut edited = texts.clone();
    let at = edited[0].bytes.windows(6).position(|window| window == b"step-1").unwrap();
    edited[0].bytes[at + 5] = b'7';
    let fault = &checked(&edited, &[head]).faults[0];
    assert_eq!(fault.what, "entry 3 is changed, or one before it");
    assert_eq!((fault.entry, fault.line, fault.segment.as_deref()), (Some(3), Some(3), Some(&*segments::name(1))));
}

/// Log with `name` in place of the one in entry `seq`, and with all later hashes made to match.
fn rewritten(texts: &[SegmentText], seq: u64) -> Vec<SegmentText> {
    let (mut previous, mut out) = (chain::START, texts.to_vec());
    for text in &mut out {
        let mut bytes = Vec::new();
        for line in text.bytes.split_inclusive(|byte| *byte == b'\n') {
            let mut entry: Entry = serde_json::from_slice(line).unwrap();
            match &mut entry.what {
                EntryKind::Decision(decision) if entry.seq == seq => decision.name = Some("innocent".to_owned()),
                EntryKind::Begin { previous: said, .. } => *said = previous.to_string(),
                _ => {}
            }
            let (line, hash) = chain::seal(&previous, &entry).unwrap();
            bytes.extend_from_slice(&line);
            previous = hash;
        }
        text.bytes = bytes;
    }
    out
}

/// L3 "Whoever may write the log's files could replace all entries after the last head"
#[test]
fn a_log_that_is_rewritten_as_a_whole_is_found_up_to_the_head() {
    let (texts, head) = log();
    let middle = {
        let findings = checked(&texts[..1], &[]);
        let mut first = texts[0].bytes.split_inclusive(|byte| *byte == b'\n');
        let hash = first.next_back().and_then(|line| serde_json::from_slice::<serde_json::Value>(line).ok()).unwrap();
        assert_eq!(hash["seq"], findings.last);
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(hash["hash"].as_str().unwrap().as_bytes().chunks(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
        }
        Head { seq: findings.last, hash: crate::id::EntryHash::from_bytes(bytes), ..head.clone() }
    };
    let before = rewritten(&texts, 2);
    assert_eq!(checked(&before, &[]).faults, [], "the chain alone does not tell");
    let fault = &checked(&before, std::slice::from_ref(&middle)).faults[0];
    assert!(fault.what.contains("are not those whose head was published"), "{fault:?}");
    assert!(!checked(&before, std::slice::from_ref(&head)).faults.is_empty());

    let after = rewritten(&texts, 6);
    let findings = checked(&after, std::slice::from_ref(&middle));
    assert_eq!((findings.faults.len(), findings.local_only()), (0, Some((middle.seq + 1, head.seq))));
    assert!(!checked(&after, &[middle, head]).faults.is_empty());
}

#[test]
fn a_log_in_the_place_of_another_is_found() {
    let (texts, head) = log();
    let (other, _) = log();
    assert!(!checked(&other, std::slice::from_ref(&head)).faults.is_empty());
    let lost = Head { log: AuditLogId::random(), seq: 900, time: Timestamp(NOW.0 - 1), ..head.clone() };
    let earlier = Head { seq: 800, ..lost.clone() };
    let findings = checked(&texts, &[earlier, lost, head]);
    assert_eq!(findings.faults.len(), 1);
    assert!(findings.faults[0].what.ends_with("is missing: its entry 900 was published at 2026-11-18T11:06:40Z"));
}

#[test]
fn segments_that_were_taken_away_are_named_and_the_head_vouches_for_the_rest() {
    let (texts, head) = log();
    let rest = &texts[1..];
    assert_eq!(checked(rest, &[]).faults[0].what, format!("segment {} is missing", segments::name(1)));
    let from = |heads: &[Head]| verify(rest.iter().cloned().map(Ok), heads, rest[0].first).unwrap();
    assert_eq!(
        (from(std::slice::from_ref(&head)).faults, from(&[]).local_only()),
        (vec![], Some((rest[0].first, head.seq)))
    );
    let mut edited = rest.to_vec();
    let at = edited[0].bytes.windows(8).position(|window| window == b"previous").unwrap();
    edited[0].bytes[at + 12] ^= 1;
    assert!(!verify(edited.into_iter().map(Ok), &[head], rest[0].first).unwrap().faults.is_empty());
    // Nothing is left of what was to be checked.
    let beyond = verify(rest.iter().cloned().map(Ok), &[], 100_000).unwrap();
    assert!(
        beyond.faults[0].what.starts_with(&format!("segment {} is missing", segments::name(100_000))),
        "{beyond:?}"
    );
}
