//! Verification: the lines of a log against each other, and against the published heads. Pure.

use serde::Serialize;

use super::chain::{self, Broken, START};
use super::entry::EntryKind;
use super::head::Head;
use super::segments::{self, SegmentText};
use crate::error::Result;
use crate::id::EntryHash;

/// First place where a log was changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fault {
    /// Name of the segment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub segment: Option<String>,
    /// Line in the segment, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<u64>,
    /// Number of the expected entry.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entry: Option<u64>,
    /// Description of the fault.
    pub what: String,
}

/// Findings of a verification.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Findings {
    /// Id of the log.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log: Option<String>,
    /// Owner of the log, as it says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// Number of its first entry here.
    pub first: u64,
    /// Number of the last entry in a valid chain.
    pub last: u64,
    /// Number of the last entry covered by a published head.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub published: Option<u64>,
    /// Time of that head.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub published_at: Option<String>,
    /// Faults: the first of the chain, and missing logs.
    pub faults: Vec<Fault>,
}

impl Findings {
    /// Entries after the last published head: whoever can write the log's files could have replaced them.
    #[must_use]
    pub fn local_only(&self) -> Option<(u64, u64)> {
        let from = self.published.map_or(self.first, |published| published + 1);
        (from <= self.last).then_some((from, self.last))
    }
}

/// Verifies the log in `segments`, which begins with entry `first`, against `heads` of the same origin, whose
/// signatures were checked. It stops at the first fault: later entries prove nothing.
///
/// # Errors
/// Errors of `segments`.
pub fn verify(segments: impl IntoIterator<Item = Result<SegmentText>>, heads: &[Head], first: u64) -> Result<Findings> {
    let mut checker = Checker::new(heads, first);
    let mut last_left_out = None;
    for segment in segments {
        let segment = segment?;
        if segment.first < first {
            last_left_out = Some(segment.name);
            continue;
        }
        if let Err(fault) = checker.segment(&segment) {
            checker.findings.faults.push(fault);
            return Ok(checker.with_other_logs());
        }
    }
    if first > 1 && checker.next == first {
        let there = last_left_out.map_or_else(|| "none".to_owned(), |name| format!("none after {name}"));
        let what = format!("segment {} is missing: the folder has {there}", segments::name(first));
        checker.findings.faults.push(Fault { segment: None, line: None, entry: Some(first), what });
        return Ok(checker.with_other_logs());
    }
    checker.end();
    Ok(checker.with_other_logs())
}

struct Checker<'a> {
    heads: &'a [Head],
    /// Number of the next entry, and the hash before it; none if the log does not begin with its first entry.
    next: u64,
    previous: Option<EntryHash>,
    findings: Findings,
}

impl<'a> Checker<'a> {
    fn new(heads: &'a [Head], first: u64) -> Self {
        let previous = (first == 1).then_some(START);
        let findings = Findings { first, last: first.saturating_sub(1), ..Findings::default() };
        Self { heads, next: first, previous, findings }
    }

    fn segment(&mut self, segment: &SegmentText) -> Result<(), Fault> {
        let fault = |line: u64, entry: u64, what: String| Fault {
            segment: Some(segment.name.clone()),
            line: Some(line),
            entry: Some(entry),
            what,
        };
        if segment.first != self.next {
            let what = format!("segment {} is missing", segments::name(self.next));
            return Err(Fault { segment: None, line: None, entry: Some(self.next), what });
        }
        if segment.bytes.is_empty() {
            return Err(fault(1, self.next, "segment is empty".to_owned()));
        }
        for (number, line) in (1..).zip(segment.bytes.split_inclusive(|byte| *byte == b'\n')) {
            let seq = self.next;
            self.line(line, number == 1).map_err(|what| fault(number, seq, what))?;
        }
        Ok(())
    }

    fn line(&mut self, line: &[u8], begins: bool) -> Result<(), String> {
        let seq = self.next;
        let line = line.strip_suffix(b"\n").ok_or_else(|| format!("entry {seq} is cut off"))?;
        let previous = match self.previous {
            Some(previous) => previous,
            // Earlier segments were moved away: only a published head can prove the beginning.
            None => chain::beginning(line).ok_or_else(|| format!("entry {seq} is changed"))?.0,
        };
        let (entry, hash) = chain::open(&previous, seq, line).map_err(|broken| match broken {
            Broken::Malformed => format!("entry {seq} is malformed"),
            Broken::Changed => format!("entry {seq} is changed, or one before it"),
            Broken::Number(found) if found > seq => format!("entry {found} stands where {seq} should: a gap"),
            Broken::Number(found) => format!("entry {found} stands where {seq} should: out of order"),
        })?;
        match (&entry.what, begins) {
            (EntryKind::Begin { log, origin, previous: said, .. }, true) => {
                if *said != previous.to_string() {
                    return Err(format!("entry {seq} does not follow from the segment before it"));
                }
                let known = self.findings.log.get_or_insert_with(|| log.clone()) == log;
                if !known || self.findings.origin.get_or_insert_with(|| origin.clone()) != origin {
                    return Err(format!("entry {seq} begins a segment of another log"));
                }
            }
            (EntryKind::Begin { .. }, false) | (_, true) => {
                return Err(format!("entry {seq} begins no segment, or begins one within another"));
            }
            (_, false) => {}
        }
        self.published(seq, &hash)?;
        (self.previous, self.findings.last, self.next) = (Some(hash), seq, seq + 1);
        Ok(())
    }

    /// Compares entry `seq` to the published heads.
    fn published(&mut self, seq: u64, hash: &EntryHash) -> Result<(), String> {
        for head in self.own().filter(|head| head.seq == seq) {
            let at = head.time.to_string();
            if head.hash != *hash {
                let sound = self.findings.published.map_or_else(|| "none".to_owned(), |seq| seq.to_string());
                return Err(format!(
                    "entries up to {seq} are not those whose head was published at {at}; the last that are: {sound}"
                ));
            }
            (self.findings.published, self.findings.published_at) = (Some(seq), Some(at));
        }
        Ok(())
    }

    /// Heads of this log.
    fn own(&self) -> impl Iterator<Item = &'a Head> + use<'a> {
        let log = self.findings.log.clone();
        self.heads.iter().filter(move |head| log.as_deref() == Some(head.log.to_string().as_str()))
    }

    /// Reports published entries that are missing.
    fn end(&mut self) {
        let last = self.findings.last;
        if let Some(head) = self.own().filter(|head| head.seq > last).max_by_key(|head| head.seq) {
            let (seq, at) = (head.seq, head.time);
            let what = format!("log ends at entry {last}, but entry {seq} was published at {at}: it was cut");
            self.findings.faults.push(Fault { segment: None, line: None, entry: Some(last + 1), what });
        }
    }

    /// Reports published logs of the same origin that are missing.
    fn with_other_logs(self) -> Findings {
        let mut findings = self.findings;
        let other = |head: &&Head| findings.log.as_ref().is_some_and(|log| *log != head.log.to_string());
        let mut others: Vec<&Head> = self.heads.iter().filter(other).collect();
        others.sort_by_key(|head| (head.log, head.seq));
        for (at, head) in others.iter().enumerate() {
            if others.get(at + 1).is_none_or(|next| next.log != head.log) {
                let (log, seq, time) = (head.log, head.seq, head.time);
                let what = format!("log {log} is missing: its entry {seq} was published at {time}");
                findings.faults.push(Fault { segment: None, line: None, entry: None, what });
            }
        }
        findings
    }
}
