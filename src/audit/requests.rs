//! Requests in progress: counts their bytes, and joins repeats within a minute into one entry.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::entry::{Actor, Decision, EntryKind};

/// Maximum number of requests in progress. The least recently used one of the actor that has most is ended first.
const OPEN_MAX: usize = 4096;

/// Treatment of a repeated decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeats {
    /// One entry for all within a minute, as long as bytes are sent.
    Merged,
    /// One entry for each.
    Separate,
}

/// Recorded request. Clones share it.
#[derive(Clone, Debug)]
pub struct Request(Arc<RequestCounters>);

#[derive(Debug)]
struct RequestCounters {
    seq: u64,
    bytes: AtomicU64,
    requests: AtomicU64,
    ended: AtomicBool,
    outcome: OnceLock<String>,
}

impl Request {
    /// Request whose decision is entry `seq`.
    pub(super) fn new(seq: u64) -> Self {
        let (bytes, ended, outcome) = Default::default();
        Self(Arc::new(RequestCounters { seq, bytes, requests: AtomicU64::new(1), ended, outcome }))
    }

    /// Number of the decision's entry.
    #[must_use]
    pub fn seq(&self) -> u64 {
        self.0.seq
    }

    /// Counts `bytes` sent to the requester. False if the request has ended: then it must be decided and recorded
    /// again.
    #[must_use]
    pub fn moved(&self, bytes: u64) -> bool {
        self.0.bytes.fetch_add(bytes, Ordering::Relaxed);
        !self.0.ended.load(Ordering::Acquire)
    }

    /// Ends it; the first outcome stays.
    pub fn end(&self, outcome: impl Into<String>) {
        let _ = self.0.outcome.set(outcome.into());
    }

    fn bytes(&self) -> u64 {
        self.0.bytes.load(Ordering::Relaxed)
    }

    /// Entry of its end.
    fn ended(&self) -> EntryKind {
        self.0.ended.store(true, Ordering::Release);
        EntryKind::End {
            of: self.0.seq,
            bytes: self.bytes(),
            requests: self.0.requests.load(Ordering::Relaxed),
            outcome: self.0.outcome.get().cloned().unwrap_or_else(|| "done".to_owned()),
        }
    }
}

/// Requests in progress.
#[derive(Debug)]
pub(super) struct Requests {
    /// Time within which repeats share one entry, and of silence after which a request has ended.
    window: Duration,
    merged: HashMap<Decision, Open>,
    separate: Vec<Open>,
}

#[derive(Debug)]
struct Open {
    request: Request,
    begun: Instant,
    /// Time of the last repeat.
    repeated: Instant,
    /// Bytes at the last check, and the time since when they have not changed.
    seen: u64,
    still_since: Instant,
}

impl Open {
    fn new(request: Request, now: Instant) -> Self {
        Self { request, begun: now, repeated: now, seen: 0, still_since: now }
    }

    /// True if it was ended, or nobody holds it any more.
    fn is_over(&self) -> bool {
        self.request.0.outcome.get().is_some() || Arc::strong_count(&self.request.0) == 1
    }

    /// True if it began `window` ago, and has sent nothing for as long.
    fn is_still(&mut self, window: Duration, now: Instant) -> bool {
        let bytes = self.request.bytes();
        if bytes != self.seen {
            (self.seen, self.still_since) = (bytes, now);
        }
        now.saturating_duration_since(self.begun) >= window && now.saturating_duration_since(self.still_since) >= window
    }
}

impl Requests {
    pub(super) fn new(window: Duration) -> Self {
        Self { window, merged: HashMap::new(), separate: Vec::new() }
    }

    /// Request that `decision` repeats, if any.
    pub(super) fn repeated(&mut self, decision: &Decision, now: Instant) -> Option<Request> {
        let open = self.merged.get_mut(decision)?;
        if now.saturating_duration_since(open.begun) >= self.window {
            return None;
        }
        open.repeated = now;
        open.request.0.requests.fetch_add(1, Ordering::Relaxed);
        Some(open.request.clone())
    }

    /// Ends that must be recorded before `decision`: of its earlier request, and of one more if there are too many. An actor with few
    /// requests keeps them, however many another has.
    pub(super) fn make_room(&mut self, decision: &Decision) -> Vec<EntryKind> {
        let mut gone: Vec<Open> = self.merged.remove(decision).into_iter().collect();
        if self.merged.len() >= OPEN_MAX {
            gone.extend(self.least_used().and_then(|key| self.merged.remove(&key)));
        }
        gone.iter().map(|open| open.request.ended()).collect()
    }

    /// Least recently used request (repeated, or sending bytes) of the actor that has most requests.
    fn least_used(&self) -> Option<Decision> {
        let mut counts: HashMap<&Actor, usize> = HashMap::new();
        for decision in self.merged.keys() {
            *counts.entry(&decision.actor).or_default() += 1;
        }
        let most = counts.values().copied().max()?;
        let of_most = self.merged.iter().filter(|(decision, _)| counts.get(&decision.actor) == Some(&most));
        let last_use = |open: &Open| (open.repeated.max(open.still_since), open.request.seq());
        of_most.min_by_key(|(_, open)| last_use(open)).map(|(decision, _)| decision.clone())
    }

    /// Adds a recorded request.
    pub(super) fn begin(&mut self, decision: Decision, repeats: Repeats, request: Request, now: Instant) {
        let open = Open::new(request, now);
        match repeats {
            Repeats::Merged => drop(self.merged.insert(decision, open)),
            Repeats::Separate => self.separate.push(open),
        }
    }

    /// Removes the requests that have ended by `now`, or all; returns the entries of their ends.
    pub(super) fn ended(&mut self, now: Instant, all: bool) -> Vec<EntryKind> {
        let window = self.window;
        let mut ends: Vec<EntryKind> =
            self.separate.extract_if(.., |open| all || open.is_over()).map(|open| open.request.ended()).collect();
        let still = self.merged.extract_if(|_, open| all || open.is_still(window, now));
        ends.extend(still.map(|(_, open)| open.request.ended()));
        ends.sort_by_key(|end| if let EntryKind::End { of, .. } = end { *of } else { 0 });
        ends
    }
}
