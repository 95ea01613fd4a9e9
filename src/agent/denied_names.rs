//! Limit of the denied names that the audit log lists: whoever may read nothing can invent any number of names.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use crate::clock::Timestamp;

/// Denied requests of one actor and a minute whose names are recorded. Further ones share one entry.
const PER_MINUTE: u32 = 100;

/// Denied requests of the last minute, by actor.
#[derive(Debug, Default)]
pub(super) struct DeniedNames(Mutex<Minute>);

#[derive(Debug, Default)]
struct Minute {
    number: i64,
    counts: HashMap<String, u32>,
}

impl DeniedNames {
    /// True if the name of another denied request of `actor` is recorded.
    pub(super) fn may_list(&self, actor: &str, now: Timestamp) -> bool {
        let mut minute = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let number = now.0.div_euclid(60_000_000_000);
        if minute.number != number {
            *minute = Minute { number, counts: HashMap::new() };
        }
        // Actors have a certificate or a token, so they are few.
        let count = minute.counts.entry(actor.to_owned()).or_default();
        *count = count.saturating_add(1);
        *count <= PER_MINUTE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_actor_has_its_own_limit_every_minute() {
        let denied = DeniedNames::default();
        let listed = |actor, now| (0..1_000).filter(|_| denied.may_list(actor, Timestamp(now))).count();
        assert_eq!((listed("a", 0), listed("b", 0), listed("a", 59_999_999_999)), (100, 100, 0));
        assert_eq!(listed("a", 60_000_000_000), 100);
    }
}
