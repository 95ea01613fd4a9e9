//! Limits of the heads of audit logs that this agent publishes for others, which nothing deletes from the repository.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use crate::audit::Head;
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::id::{AuditLogId, EntryHash};
use crate::identity::Identity;

/// Heads of one agent and a minute: that of its own log, and those of its node's commands.
const PER_MINUTE: u32 = 30;
/// Maximum difference between the time of a head and this machine's.
const SKEW_MAX_S: i64 = 3600;
/// Maximum number of logs that are remembered; then all are forgotten.
const LOGS_MAX: usize = 4096;

/// Heads that were published lately.
#[derive(Debug, Default)]
pub(super) struct HeadLimits(Mutex<Published>);

#[derive(Debug, Default)]
struct Published {
    minute: i64,
    /// Heads of each agent in that minute.
    counts: HashMap<Identity, u32>,
    /// Last entry that a head of each log covered, and its hash.
    last: HashMap<(Identity, AuditLogId), (u64, EntryHash)>,
}

impl HeadLimits {
    /// Admits `head` of the agent `by`.
    ///
    /// # Errors
    /// Exhausted, beyond the limit of a minute; usage, for a time that is far from `now`, and for a head that covers no more entries
    /// than an earlier one of the log.
    pub(super) fn admit(&self, by: &Identity, head: &Head, now: Timestamp) -> Result<()> {
        let seconds = |time: Timestamp| time.0.div_euclid(1_000_000_000);
        if (seconds(head.time) - seconds(now)).abs() > SKEW_MAX_S {
            return Err(Error::usage("head of an audit log has a wrong time")
                .at(by.path())
                .expected(now)
                .got(head.time));
        }
        let mut published = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let minute = seconds(now).div_euclid(60);
        if published.minute != minute {
            published.minute = minute;
            published.counts.clear();
        }
        let key = (by.clone(), head.log);
        // The same head comes again if it could not be stored.
        let older = |(seq, hash): &(u64, EntryHash)| *seq > head.seq || *seq == head.seq && *hash != head.hash;
        if published.last.get(&key).is_some_and(older) {
            return Err(Error::usage("head of an audit log is not newer than the last one")
                .at(by.path())
                .got(head.seq));
        }
        let count = published.counts.entry(by.clone()).or_default();
        *count += 1;
        if *count > PER_MINUTE {
            return Err(Error::exhausted("agent has too many heads of audit logs published")
                .at(by.path())
                .expected(format!("at most {PER_MINUTE} a minute"))
                .help("try again in a minute"));
        }
        if published.last.len() >= LOGS_MAX {
            published.last.clear();
        }
        published.last.insert(key, (head.seq, head.hash));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn heads_are_few_newer_and_of_now() {
        let limits = HeadLimits::default();
        let at = |seconds: i64| Timestamp(seconds * 1_000_000_000);
        let (one, other) = (Identity::new("home", "a").unwrap(), Identity::new("home", "b").unwrap());
        let log = AuditLogId::random();
        let head = |seq, seconds| Head {
            log,
            origin: one.to_string(),
            seq,
            hash: EntryHash::from_bytes([0; 32]),
            time: at(seconds),
        };
        let admit = |by: &Identity, seq, seconds, now| {
            limits.admit(by, &head(seq, seconds), at(now)).map_err(|error| error.kind())
        };
        assert_eq!(admit(&one, 1, 0, 7200), Err(ErrorKind::Usage), "of long ago");
        for seq in 1..=30 {
            assert_eq!(admit(&one, seq, 6000, 6000), Ok(()));
        }
        assert_eq!(admit(&one, 29, 6001, 6001), Err(ErrorKind::Usage), "not newer");
        assert_eq!(admit(&one, 31, 6001, 6001), Err(ErrorKind::Exhausted));
        assert_eq!(admit(&other, 31, 6001, 6001), Ok(()));
        assert_eq!(admit(&one, 31, 6060, 6060), Ok(()));
    }
}
