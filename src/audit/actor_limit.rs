//! Limits of what one actor makes the audit log record in a minute: a caller can ask for any number of names that do not exist, and
//! each recorded request takes space.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::clock::Timestamp;

/// Denied requests of one actor and a minute whose names are recorded. Further ones share one entry.
pub(crate) const DENIED_NAMES: u32 = 100;
/// Requests of one actor and a minute that are recorded one by one. Further ones are refused.
pub(crate) const RECORDED_REQUESTS: u32 = 600;
/// Trees whose chunks one agent is served in a minute, as each has an entry. Requests for further ones are refused.
pub(crate) const SERVED_TREES: u32 = 1024;

/// Counts of the last minute, by actor.
#[derive(Debug)]
pub(crate) struct ActorLimit {
    per_minute: u32,
    minute: Mutex<Minute>,
}

#[derive(Debug, Default)]
struct Minute {
    number: i64,
    counts: HashMap<String, u32>,
    /// Digests of what was counted once for each actor.
    seen: HashSet<blake3::Hash>,
}

impl ActorLimit {
    /// A limit of `per_minute` for each actor.
    pub(crate) fn new(per_minute: u32) -> Self {
        Self { per_minute, minute: Mutex::default() }
    }

    /// True if `actor` is within its limit; counts one more.
    pub(crate) fn admit(&self, actor: &str, now: Timestamp) -> bool {
        self.admit_several(actor, 1, now)
    }

    /// As [`ActorLimit::admit`], for a request for `what`, whose repeats in the same minute have no entry of their own.
    pub(crate) fn admit_once(&self, actor: &str, what: &str, now: Timestamp) -> bool {
        let digest = blake3::hash(format!("{actor}\0{what}").as_bytes());
        let mut minute = self.minute(now);
        if minute.seen.contains(&digest) {
            return true;
        }
        let admitted = minute.count(actor, 1) <= self.per_minute;
        if admitted {
            minute.seen.insert(digest);
        }
        admitted
    }

    /// As [`ActorLimit::admit`], for a request with `entries` of its own; counts as many.
    pub(crate) fn admit_several(&self, actor: &str, entries: u32, now: Timestamp) -> bool {
        self.minute(now).count(actor, entries) <= self.per_minute
    }

    /// Counts of the minute of `now`.
    fn minute(&self, now: Timestamp) -> MutexGuard<'_, Minute> {
        let mut minute = self.minute.lock().unwrap_or_else(PoisonError::into_inner);
        let number = now.0.div_euclid(60_000_000_000);
        if minute.number != number {
            *minute = Minute { number, ..Minute::default() };
        }
        minute
    }
}

impl Minute {
    /// Counts `entries` more of `actor`; returns their number.
    fn count(&mut self, actor: &str, entries: u32) -> u32 {
        // Actors have a certificate or a token, so they are few.
        let count = self.counts.entry(actor.to_owned()).or_default();
        *count = count.saturating_add(entries);
        *count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_actor_has_its_own_limit_every_minute() {
        let limit = ActorLimit::new(100);
        let admitted = |actor, now| (0..1_000).filter(|_| limit.admit(actor, Timestamp(now))).count();
        assert_eq!((admitted("a", 0), admitted("b", 0), admitted("a", 59_999_999_999)), (100, 100, 0));
        assert_eq!(admitted("a", 60_000_000_000), 100);
        assert!(limit.admit_several("c", 100, Timestamp(0)) && !limit.admit("c", Timestamp(0)));
        assert!(!limit.admit_several("d", 101, Timestamp(0)));
        let once = |what: &str| limit.admit_once("e", what, Timestamp(0));
        assert!((0..1_000).all(|_| once("run/step-1")), "repeats have no entry");
        assert_eq!((0..1_000).filter(|number| once(&format!("run/step-{number}"))).count(), 100);
    }
}
