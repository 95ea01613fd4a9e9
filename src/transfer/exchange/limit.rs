//! Per-site outbound token bucket.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// Burst that is sent before the rate applies.
const BURST: Duration = Duration::from_millis(100);

/// Outbound rate limits of sites, in bytes a second. Other sites have no limit.
#[derive(Debug, Default)]
pub struct Limits {
    sites: BTreeMap<String, Limit>,
}

#[derive(Debug)]
struct Limit {
    rate: f64,
    /// Time when all admitted bytes will have passed at the rate.
    busy_until: Mutex<Option<Instant>>,
}

impl Limits {
    /// Limits by site, in bytes a second; 0 means 1.
    #[must_use]
    pub fn new(limits: impl IntoIterator<Item = (String, u64)>) -> Self {
        let limit = |rate: u64| Limit { rate: rate.max(1) as f64, busy_until: Mutex::new(None) };
        Self { sites: limits.into_iter().map(|(site, rate)| (site, limit(rate))).collect() }
    }

    /// Waits until `bytes` may go to `site`.
    ///
    /// # Cancel safety
    /// Safe: bytes waited for count as sent.
    pub(super) async fn pass(&self, site: &str, bytes: u64) {
        if let Some(when) = self.sites.get(site).and_then(|limit| limit.take(bytes, Instant::now())) {
            sleep_until(when).await;
        }
    }
}

impl Limit {
    /// Time when `bytes` more may go, if that is not now.
    fn take(&self, bytes: u64, now: Instant) -> Option<Instant> {
        let mut busy_until = self.busy_until.lock().unwrap_or_else(PoisonError::into_inner);
        let from = busy_until.map_or(now, |until| until.max(now));
        *busy_until = Some(from + Duration::from_secs_f64(bytes as f64 / self.rate));
        from.checked_sub(BURST).filter(|when| *when > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_site_gets_its_rate_after_a_short_burst() {
        let limit = Limit { rate: 1e6, busy_until: Mutex::new(None) };
        let now = Instant::now();
        assert_eq!(limit.take(100_000, now), None);
        assert_eq!(limit.take(900_000, now), None);
        // A second's worth is already admitted.
        let when = limit.take(1, now).unwrap();
        assert_eq!(when, now + Duration::from_secs(1) - BURST);
        assert_eq!(limit.take(1, now + Duration::from_secs(5)), None);
    }
}
