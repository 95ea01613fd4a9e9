//! Rates at which bytes come from other sites and from the repository, for hints.
//!
//! A rate is that of the whole link: bytes over the time in which anything was requested from there, however many requests there
//! were at once. Samples are averaged in log space, where a link that is sometimes half as fast and sometimes twice as fast is
//! symmetric, and older ones count less.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::outcomes::{Outcomes, Prediction};
use crate::format::LinkRate;
use crate::limits::MIB;

/// Busy time after which a sample is taken.
const SAMPLE_TIME: Duration = Duration::from_secs(1);
/// Minimum bytes of a sample: less is mostly delay.
const SAMPLE_BYTES: u64 = 4 * MIB;
/// Share that a new sample takes from those before, once there are several.
const SHARE_MIN: f64 = 0.2;
/// Time after which samples count half.
const HALF_LIFE: Duration = Duration::from_hours(6);
/// Standard deviation, in log space, that is assumed before anything is known, and the samples that the assumption counts for.
const PRIOR: (f64, f64) = (0.35, 2.0);
/// Standard normal quantile of 0.9.
const Z90: f64 = 1.281_551_565_545;
/// Bytes from which a transfer is an outcome that counts.
const OUTCOME_BYTES: u64 = 4 * SAMPLE_BYTES;
/// Share of the bytes of a transfer that its slowest source must have, so that its time says something of that link.
const OUTCOME_SHARE: f64 = 0.9;
/// Weight of rates that were measured before a restart.
const RESTORED_WEIGHT: f64 = 3.0;
/// Maximum number of sites; further ones are not measured.
const SITES_MAX: usize = 1024;

/// Rates of one agent.
#[derive(Debug, Default)]
pub(super) struct LinkRates(Mutex<BTreeMap<String, Meter>>);

/// Measurement of one link.
#[derive(Debug, Default)]
struct Meter {
    /// Requests that are open.
    open: u32,
    /// Time since which one is, or since the last sample.
    since: Option<Instant>,
    /// Bytes and busy time since the last sample.
    bytes: u64,
    busy: Duration,
    /// Weight of all samples, their mean and their variance, of ln(bytes a second).
    weight: f64,
    mean: f64,
    variance: f64,
    samples: u32,
    last: Option<Instant>,
    /// Last sample of the requests that are open, and the averages before it.
    unfinished: Option<(u64, Duration, Averages)>,
    /// Bytes of all requests, and the time in which there were some.
    total: u64,
    total_busy: Duration,
    outcomes: Outcomes,
}

/// A transfer whose time is held against what a hint would have said.
#[derive(Debug)]
pub struct MeasuredTransfer {
    begun: Instant,
    /// Links as they were, by site: bytes and busy time so far, and the rate of hints.
    links: BTreeMap<String, (u64, Duration, LinkRate)>,
}

/// Weight, mean and variance of samples.
type Averages = (f64, f64, f64);

/// A request that is measured while this exists.
#[derive(Debug)]
pub(super) struct Measured {
    rates: Arc<LinkRates>,
    site: String,
}

impl LinkRates {
    /// Begins a request to `site`; empty for the repository.
    pub(super) fn begin(self: &Arc<Self>, site: &str) -> Option<Measured> {
        let mut meters = self.lock();
        if meters.len() >= SITES_MAX && !meters.contains_key(site) {
            return None;
        }
        meters.entry(site.to_owned()).or_default().begin(Instant::now());
        Some(Measured { rates: Arc::clone(self), site: site.to_owned() })
    }

    /// Rates of all links that were measured, by site.
    pub(super) fn all(&self) -> Vec<LinkRate> {
        let now = Instant::now();
        let measured = |(site, meter): (&String, &Meter)| meter.rate(site, now);
        self.lock().iter().filter_map(measured).collect()
    }

    /// Continues with `rates`, which this agent published before it was restarted.
    pub(super) fn restore(&self, rates: &[LinkRate]) {
        let mut meters = self.lock();
        for rate in rates.iter().take(SITES_MAX) {
            let meter = meters.entry(rate.site.clone()).or_default();
            if meter.samples == 0 {
                meter.weight = RESTORED_WEIGHT;
                meter.mean = (rate.rate.max(1) as f64).ln();
                meter.variance = (f64::from(rate.spread.max(101)) / 100.0).ln().powi(2) / (Z90 * Z90);
                meter.samples = rate.samples;
                meter.last = Some(Instant::now());
            }
        }
    }

    /// Begins a transfer.
    pub(super) fn begin_transfer(&self) -> MeasuredTransfer {
        self.transfer_at(Instant::now())
    }

    fn transfer_at(&self, now: Instant) -> MeasuredTransfer {
        let link = |(site, meter): (&String, &Meter)| {
            Some((site.clone(), (meter.total, meter.total_busy, meter.rate(site, now)?)))
        };
        MeasuredTransfer { begun: now, links: self.lock().iter().filter_map(link).collect() }
    }

    /// Records the outcome of a transfer that has ended, unless it was short or came over several links.
    pub(super) fn end_transfer(&self, transfer: &MeasuredTransfer) {
        self.end_transfer_at(transfer, Instant::now());
    }

    fn end_transfer_at(&self, transfer: &MeasuredTransfer, now: Instant) {
        let mut meters = self.lock();
        let moved: BTreeMap<&String, u64> = meters
            .iter()
            .map(|(site, meter)| {
                let before = transfer.links.get(site).map_or(0, |(before, ..)| *before);
                (site, meter.total.saturating_sub(before))
            })
            .collect();
        let all: u64 = moved.values().sum();
        let Some((site, bytes)) = moved.into_iter().max_by_key(|(_, bytes)| *bytes) else { return };
        let site = site.clone();
        if bytes < OUTCOME_BYTES || (bytes as f64) < OUTCOME_SHARE * all as f64 {
            return;
        }
        let (Some((_, busy, said)), Some(meter)) = (transfer.links.get(&site), meters.get_mut(&site)) else {
            return;
        };
        let median = bytes as f64 / said.rate.max(1) as f64 + f64::from(said.overhead_ms) / 1000.0;
        let predicted = Prediction { median, p90: median * f64::from(said.spread) / 100.0 };
        let busy = meter.total_busy.saturating_sub(*busy).as_secs_f64();
        meter.outcomes.add(predicted, now.duration_since(transfer.begun).as_secs_f64(), busy);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Meter>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, site: &str, change: impl FnOnce(&mut Meter, Instant)) {
        if let Some(meter) = self.lock().get_mut(site) {
            change(meter, Instant::now());
        }
    }
}

impl Measured {
    /// Counts received bytes.
    pub(super) fn received(&self, bytes: u64) {
        self.rates.change(&self.site, |meter, now| {
            meter.bytes += bytes;
            meter.total += bytes;
            meter.pass(now);
            if meter.busy >= SAMPLE_TIME {
                meter.sample(now);
            }
        });
    }
}

impl Drop for Measured {
    fn drop(&mut self) {
        self.rates.change(&self.site, Meter::end);
    }
}

impl Meter {
    fn begin(&mut self, now: Instant) {
        if self.open == 0 {
            self.since = Some(now);
        }
        self.open += 1;
    }

    fn end(&mut self, now: Instant) {
        self.pass(now);
        self.open = self.open.saturating_sub(1);
        if self.open == 0 {
            // The rest after a sample came out of buffers, faster than the link: it belongs to that sample.
            if self.busy < SAMPLE_TIME
                && let Some((bytes, busy, (weight, mean, variance))) = self.unfinished.take()
            {
                (self.weight, self.mean, self.variance) = (weight, mean, variance);
                self.samples = self.samples.saturating_sub(1);
                self.bytes += bytes;
                self.busy += busy;
            }
            // A transfer that was shorter than a sample is one.
            self.sample(now);
            self.unfinished = None;
            self.since = None;
        }
    }

    /// Adds the time until `now` to the busy time.
    fn pass(&mut self, now: Instant) {
        if let Some(since) = self.since.replace(now) {
            self.busy += now.duration_since(since);
            self.total_busy += now.duration_since(since);
        }
    }

    /// Takes a sample, if there are enough bytes for one.
    fn sample(&mut self, now: Instant) {
        if self.bytes < SAMPLE_BYTES || self.busy.is_zero() {
            return;
        }
        let rate = (self.bytes as f64 / self.busy.as_secs_f64()).max(1.0).ln();
        self.weight *= self.decay(now);
        self.last = Some(now);
        self.unfinished = Some((self.bytes, self.busy, (self.weight, self.mean, self.variance)));
        (self.bytes, self.busy) = (0, Duration::ZERO);
        self.weight = (self.weight + 1.0).min(1.0 / SHARE_MIN);
        let (share, differs) = (1.0 / self.weight, rate - self.mean);
        self.mean += share * differs;
        self.variance = (1.0 - share) * (self.variance + share * differs * differs);
        self.samples = self.samples.saturating_add(1);
    }

    /// Factor by which the weight of the samples shrinks until `now`.
    fn decay(&self, now: Instant) -> f64 {
        let age = self.last.map_or(Duration::ZERO, |last| now.duration_since(last));
        0.5_f64.powf(age.as_secs_f64() / HALF_LIFE.as_secs_f64())
    }

    fn rate(&self, site: &str, now: Instant) -> Option<LinkRate> {
        if self.samples == 0 {
            return None;
        }
        let weight = self.weight * self.decay(now);
        let (assumed, counts) = PRIOR;
        let variance = (weight * self.variance + counts * assumed * assumed) / (weight + counts);
        let spread = self.outcomes.spread().unwrap_or_else(|| (Z90 * variance.sqrt()).exp());
        let u32_of = |value: f64| u32::try_from(whole(value)).unwrap_or(u32::MAX);
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        Some(LinkRate {
            site: site.to_owned(),
            rate: whole(self.mean.exp()).max(1),
            spread: u32_of(100.0 * spread).max(101),
            samples: self.samples,
            overhead_ms: u32_of(1000.0 * self.outcomes.overhead()),
            outcomes: count(self.outcomes.len()),
            error: u32_of(1000.0 * self.outcomes.median_error()),
            covered: count(self.outcomes.covered()),
        })
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates")]
fn whole(value: f64) -> u64 {
    value.round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// A link, and the time there.
    struct Link {
        meter: Meter,
        now: Instant,
    }

    impl Link {
        fn new() -> Self {
            Self { meter: Meter::default(), now: Instant::now() }
        }

        /// `requests` at once bring `bytes` each in `time`.
        fn moved(&mut self, requests: u64, bytes: u64, time: Duration) {
            (0..requests).for_each(|_| self.meter.begin(self.now));
            for _ in 0..4 {
                self.now += time / 4;
                self.meter.bytes += requests * bytes / 4;
                self.meter.total += requests * bytes / 4;
                self.meter.pass(self.now);
                if self.meter.busy >= SAMPLE_TIME {
                    self.meter.sample(self.now);
                }
            }
            (0..requests).for_each(|_| self.meter.end(self.now));
        }

        fn rate(&self) -> LinkRate {
            self.meter.rate("west", self.now).unwrap()
        }
    }

    fn is_about(found: &LinkRate, rate: u64) -> bool {
        (0.99..1.01).contains(&(found.rate as f64 / rate as f64))
    }

    #[test]
    fn the_rate_is_that_of_all_requests_together() {
        let mut link = Link::new();
        link.moved(4, 10 * MIB, SECOND * 2);
        let found = link.rate();
        assert!(is_about(&found, 20 * MIB), "{found:?}");
        // Time without requests does not count.
        link.now += SECOND * 60;
        link.moved(1, 40 * MIB, SECOND * 2);
        let again = link.rate();
        assert!(is_about(&again, 20 * MIB), "{again:?}");
        assert!(again.samples > found.samples && again.spread < found.spread, "{found:?} {again:?}");
    }

    #[test]
    fn small_transfers_are_no_samples_and_short_ones_are() {
        let mut link = Link::new();
        link.moved(1, MIB, SECOND / 10);
        assert_eq!(link.meter.rate("west", link.now), None);
        link.moved(1, 8 * MIB, SECOND / 10);
        assert_eq!(link.rate().samples, 1);
    }

    #[test]
    fn a_link_that_varies_has_a_wide_spread_and_the_past_fades() {
        let (mut steady, mut varying) = (Link::new(), Link::new());
        for n in 0..20 {
            steady.moved(1, 20 * MIB, SECOND);
            varying.moved(1, 20 * MIB, if n % 2 == 0 { SECOND * 4 } else { SECOND / 4 });
        }
        assert!(steady.rate().spread < 140 && varying.rate().spread > 300, "{:?} {:?}", steady.rate(), varying.rate());
        let before = steady.rate().rate;
        steady.now += HALF_LIFE * 8;
        assert_eq!(steady.rate().rate, before);
        assert!(steady.rate().spread > 145, "an old measurement says less");
        steady.moved(1, 80 * MIB, SECOND);
        assert!(steady.rate().rate > before * 3, "{before} {:?}", steady.rate());
    }

    #[test]
    fn the_rest_of_a_transfer_after_a_sample_belongs_to_it() {
        let mut link = Link::new();
        // A second of 20 MiB, then as much at once from buffers.
        for _ in 0..3 {
            link.meter.begin(link.now);
            link.now += SECOND;
            link.meter.bytes += 20 * MIB;
            link.meter.pass(link.now);
            link.meter.sample(link.now);
            link.now += SECOND / 100;
            link.meter.bytes += 20 * MIB;
            link.meter.end(link.now);
            link.now += SECOND;
        }
        let found = link.rate();
        assert!(is_about(&found, 40 * MIB * 100 / 101) && found.samples == 3, "{found:?}");
    }

    #[test]
    fn a_transfer_is_held_against_what_a_hint_would_have_said() {
        let rates = LinkRates::default();
        let mut now = Instant::now();
        // A transfer of some MiB: 2 s of requests, and as much before and after them.
        let mut transfer = |mib: u64| {
            let transfer = rates.transfer_at(now);
            let mut meters = rates.lock();
            let meter = meters.entry("west".to_owned()).or_default();
            meter.begin(now + SECOND);
            meter.bytes += mib * MIB;
            meter.total += mib * MIB;
            meter.end(now + SECOND * 3);
            drop(meters);
            now += SECOND * 4;
            rates.end_transfer_at(&transfer, now);
            rates.lock()["west"].rate("west", now)
        };
        assert_eq!(transfer(40).unwrap().outcomes, 0, "nothing was said of the first one");
        let uncorrected = transfer(40).unwrap();
        assert!(is_about(&uncorrected, 20 * MIB) && uncorrected.outcomes == 1 && uncorrected.covered == 0);
        assert_eq!(uncorrected.overhead_ms, 0);
        transfer(40);
        // Four seconds for what the rate alone says are two.
        let corrected = transfer(40).unwrap();
        assert!(is_about(&corrected, 20 * MIB), "{corrected:?}");
        assert_eq!((corrected.overhead_ms, corrected.error), (2000, 500));
        let later = (0..12).map(|_| transfer(40)).last().flatten().unwrap();
        assert_eq!((later.outcomes, later.covered, later.error), (15, 12, 0), "{later:?}");
        assert!(later.spread < 105, "{later:?}");
        assert_eq!(transfer(8).unwrap().outcomes, 15, "a small one says nothing");

        let restored = LinkRates::default();
        restored.restore(std::slice::from_ref(&later));
        let again = restored.all();
        assert!(is_about(&again[0], 20 * MIB) && again[0].samples == later.samples, "{again:?}");
    }

    #[test]
    fn a_request_is_measured_while_it_is_open() {
        let rates = Arc::new(LinkRates::default());
        let request = rates.begin("west").unwrap();
        request.received(2 * SAMPLE_BYTES);
        assert!(rates.all().iter().all(|link| link.site == "west"));
        drop(request);
        assert!(rates.lock()["west"].open == 0 && rates.lock()["west"].since.is_none());
        let other: Vec<_> = (0..2 * SITES_MAX).filter_map(|n| rates.begin(&n.to_string())).collect();
        assert_eq!(other.len(), SITES_MAX - 1);
    }
}
