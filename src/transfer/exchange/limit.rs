//! Outbound rate limits of sites.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::fair_turns::FairTurns;
use crate::identity::Identity;

/// Burst that is sent before the rate applies.
const BURST: Duration = Duration::from_millis(100);

/// Outbound rate limits of sites, in bytes a second. Other sites have no limit.
#[derive(Debug, Default)]
pub struct Limits {
    sites: BTreeMap<String, Limit>,
}

/// Token bucket, which the agents of a site use in turn.
#[derive(Debug)]
struct Limit {
    rate: f64,
    /// Held while one waits for the rate.
    turns: FairTurns<Identity>,
    /// Time when all admitted bytes will have passed at the rate.
    busy_until: Mutex<Option<Instant>>,
}

impl Limits {
    /// Limits by site, in bytes a second; 0 means 1.
    #[must_use]
    pub fn new(limits: impl IntoIterator<Item = (String, u64)>) -> Self {
        Self { sites: limits.into_iter().map(|(site, rate)| (site, Limit::new(rate.max(1) as f64))).collect() }
    }

    /// Waits until `bytes` may go to `agent`.
    ///
    /// # Cancel safety
    /// Safe: bytes that wait do not count as sent.
    pub(super) async fn pass(&self, agent: &Identity, bytes: u64) {
        if let Some(limit) = self.sites.get(agent.site()) {
            limit.pass(agent, bytes).await;
        }
    }
}

impl Limit {
    fn new(rate: f64) -> Self {
        Self { rate, turns: FairTurns::new(1, 1), busy_until: Mutex::new(None) }
    }

    async fn pass(&self, agent: &Identity, bytes: u64) {
        let _turn = self.turns.take(agent.clone()).await;
        if let Some(free) = self.free_at() {
            sleep_until(free).await;
        }
        self.admit(bytes, Instant::now());
    }

    /// Time from which more may go.
    fn free_at(&self) -> Option<Instant> {
        self.lock().and_then(|until| until.checked_sub(BURST))
    }

    fn admit(&self, bytes: u64, now: Instant) {
        let mut busy_until = self.lock();
        let from = busy_until.map_or(now, |until| until.max(now));
        *busy_until = Some(from + Duration::from_secs_f64(bytes as f64 / self.rate));
    }

    fn lock(&self) -> MutexGuard<'_, Option<Instant>> {
        self.busy_until.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn a_site_gets_its_rate_after_a_short_burst() {
        let (limit, now) = (Limit::new(1e6), Instant::now());
        assert_eq!(limit.free_at(), None);
        limit.admit(100_000, now);
        assert_eq!(limit.free_at(), Some(now));
        limit.admit(900_000, now);
        assert_eq!(limit.free_at(), Some(now + Duration::from_secs(1) - BURST));
        // Time that nobody used is not saved up.
        let later = now + Duration::from_secs(5);
        limit.admit(1_000_000, later);
        assert_eq!(limit.free_at(), Some(later + Duration::from_secs(1) - BURST));
    }

    #[tokio::test]
    async fn requests_of_agents_that_go_away_cost_others_nothing() {
        let agent = |name: &str| Identity::new("cloud", name).unwrap();
        let limit = Limit::new(1.0);
        limit.pass(&agent("a"), 1_000_000).await;
        let free = limit.free_at();
        for at in 0..1000 {
            assert!(limit.pass(&agent(&format!("a{}", at % 10)), 1_000_000).now_or_never().is_none());
        }
        assert_eq!(limit.free_at(), free);
    }
}
