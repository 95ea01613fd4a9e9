//! Where the missing bytes of a site would come from, how long they take and what their egress costs. Pure.
//!
//! All arithmetic is in integers, so that every advisor gets the same numbers.

use std::time::Duration;

use serde::Serialize;

use super::holdings::{Holdings, Source};
use super::sites::{Link, LinkCost};
use crate::format::LinkRate;

/// Rate of a link of which nothing is known.
const DEFAULT_RATE: u64 = 125_000_000;
/// Rate within a site of which nothing is known.
const DEFAULT_RATE_WITHIN: u64 = 1_250_000_000;

/// Basis of a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum TimeBasis {
    /// Rate measured by an agent of the site that receives.
    Measured,
    /// Rate and delay as the sites file believes them.
    Modelled,
    /// Nothing is known of the link: 1 Gbit/s, or 10 Gbit/s within a site.
    Default,
    /// False inventory: it is not known what the site holds.
    Unknown,
}

impl TimeBasis {
    /// Name in hints.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Measured => "measured",
            Self::Modelled => "modelled",
            Self::Default => "default",
            Self::Unknown => "unknown",
        }
    }
}

/// Quantiles of a time, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TimeEstimate {
    /// 10th percentile.
    pub(super) p10: u64,
    /// Median.
    pub(super) p50: u64,
    /// 90th percentile.
    pub(super) p90: u64,
}

/// Rate of a link, and how much is known of it.
#[derive(Clone, Copy, Debug)]
struct RateEstimate {
    /// Bytes a second, at the median.
    rate: u64,
    /// Hundredths: the 90th percentile of a time over its median, and the median over the 10th.
    spread: u64,
    basis: TimeBasis,
    samples: u32,
}

impl RateEstimate {
    /// Rate as the sites file believes it: wide area links vary by about a third in either direction over a day.
    const fn modelled(rate: u64) -> Self {
        Self { rate, spread: 150, basis: TimeBasis::Modelled, samples: 0 }
    }

    /// Guess, of which only the order of magnitude counts.
    const fn guessed(rate: u64) -> Self {
        Self { rate, spread: 320, basis: TimeBasis::Default, samples: 0 }
    }

    fn measured(link: &LinkRate) -> Self {
        let LinkRate { rate, spread, samples, .. } = *link;
        Self { rate, spread: u64::from(spread).max(100), basis: TimeBasis::Measured, samples }
    }
}

impl TimeEstimate {
    /// Time of `bytes` at a rate, with `delay` before the first.
    fn of(bytes: u64, at: RateEstimate, delay: Duration) -> Self {
        if bytes == 0 {
            return Self::default();
        }
        let moving = u128::from(bytes) * 1000 / u128::from(at.rate.max(1));
        let p50 = u64::try_from(moving + delay.as_millis()).unwrap_or(u64::MAX / 1000).max(1);
        Self { p10: p50 * 100 / at.spread, p50, p90: p50.saturating_mul(at.spread) / 100 }
    }

    /// The time until both are over.
    fn and(self, other: Self) -> Self {
        Self { p10: self.p10.max(other.p10), p50: self.p50.max(other.p50), p90: self.p90.max(other.p90) }
    }
}

/// A place that missing chunks may come from.
#[derive(Clone, Debug)]
pub(super) struct SourceOption<'a> {
    /// Its site; none: a repository of which the sites file does not say where it is.
    pub(super) site: Option<&'a str>,
    /// Link from there; none: within the site, or unknown.
    pub(super) link: Option<&'a Link>,
    /// True if it is the repository, which has all chunks; else agents of the site.
    pub(super) repository: bool,
    /// True if it is a folder at another site, of which agents there send chunks.
    pub(super) by_agents: bool,
    /// True if it is in the very site that lacks them.
    pub(super) within: bool,
    /// Rate from there that an agent of the site has measured.
    pub(super) measured: Option<&'a LinkRate>,
}

/// Chunks that come from one place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
pub struct SourceShare {
    /// Site; none: unknown.
    pub site: Option<String>,
    /// Path of the link; none: within the site, or no link is known.
    pub path: Option<String>,
    /// True for the repository; false for caches of agents.
    pub repository: bool,
    /// Bytes, as they travel.
    pub bytes: u64,
    /// Micro-dollars of egress; none: no price is known.
    pub egress_micro_usd: Option<u64>,
    /// Bytes of this month that the link's meter had before these; none: it has no meter.
    pub month_bytes: Option<u64>,
    /// Bytes a second, at the median.
    pub rate: u64,
    /// Basis of the time.
    pub basis: TimeBasis,
    /// Measurements, if it was measured.
    pub samples: u32,
    #[serde(skip)]
    time: TimeEstimate,
}

/// Sources of all missing chunks of a site.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SourcePlan {
    /// Shares, in the order in which they were chosen.
    pub(super) shares: Vec<SourceShare>,
    /// Bytes that no source has.
    pub(super) nowhere: u64,
    /// Bytes of all of these that pins of the site expect.
    pub(super) in_flight: u64,
}

impl SourcePlan {
    /// Takes the chunks that `site` lacks from `options`: each from the first that has it, ordered by what a byte costs, then by time.
    /// Links with the same meter share a month's volume, in the order of the plan; `so_far` has what it had before.
    pub(super) fn choose(
        holdings: &Holdings,
        site: &str,
        mut options: Vec<SourceOption<'_>>,
        usd_per_hour: u64,
        so_far: &dyn Fn(&str) -> u64,
    ) -> Self {
        // Ties are broken by name, so that the order of the options does not matter.
        options.sort_by_cached_key(|option| {
            let key = option.cost_key(usd_per_hour, so_far);
            (key, option.repository, option.site.map(str::to_owned), option.link.map(|link| link.path.clone()))
        });
        // Of several links from one place, only the first is used. The repository has all chunks.
        let mut used: Vec<&SourceOption<'_>> = Vec::new();
        for option in &options {
            if used.iter().any(|other| other.repository == option.repository && other.site == option.site) {
                continue;
            }
            used.push(option);
            if option.repository {
                break;
            }
        }
        let split = holdings.split(site, used.iter().map(|option| option.source()).collect());
        let mut metered: Vec<(String, u64)> = Vec::new();
        let shared = used.iter().zip(&split.bytes).filter(|(_, bytes)| **bytes > 0);
        let shares = shared.map(|(option, bytes)| option.share(*bytes, so_far, &mut metered)).collect();
        Self { shares, nowhere: split.nowhere, in_flight: split.in_flight }
    }

    /// Bytes of all of them, as they travel.
    pub(super) fn bytes(&self) -> u64 {
        self.shares.iter().map(|share| share.bytes).sum::<u64>() + self.nowhere
    }

    /// Time until all have arrived: sources send at the same time.
    pub(super) fn time(&self) -> TimeEstimate {
        self.shares.iter().fold(TimeEstimate::default(), |all, share| all.and(share.time))
    }

    /// The share that takes the longest.
    pub(super) fn bottleneck(&self) -> Option<&SourceShare> {
        self.shares.iter().rev().max_by_key(|share| share.time.p50)
    }

    /// The weakest basis of a time; none if nothing moves.
    pub(super) fn basis(&self) -> Option<TimeBasis> {
        self.shares.iter().map(|share| share.basis).max()
    }

    /// Micro-dollars of all egress; none if the price of a share is not known.
    pub(super) fn egress_micro_usd(&self) -> Option<u64> {
        self.shares.iter().try_fold(0_u64, |sum, share| Some(sum.saturating_add(share.egress_micro_usd?)))
    }

    /// Bytes from the repository.
    pub(super) fn repository_bytes(&self) -> u64 {
        self.shares.iter().filter(|share| share.repository).map(|share| share.bytes).sum()
    }
}

impl SourceOption<'_> {
    fn source(&self) -> Source {
        match self.site {
            Some(site) if !self.repository => Source::Site(site.to_owned()),
            _ if self.by_agents => Source::RepositoryByAgents,
            _ => Source::Repository,
        }
    }

    fn rate(&self) -> RateEstimate {
        if let Some(link) = self.measured {
            return RateEstimate::measured(link);
        }
        match self.link.and_then(|link| link.rate) {
            Some(rate) => RateEstimate::modelled(rate),
            None if self.within => RateEstimate::guessed(DEFAULT_RATE_WITHIN),
            None => RateEstimate::guessed(DEFAULT_RATE),
        }
    }

    /// Cost of 2^40 bytes from here, in micro-dollars, with `usd_per_hour` micro-dollars for an hour; then the time alone.
    fn cost_key(&self, usd_per_hour: u64, so_far: &dyn Fn(&str) -> u64) -> (u128, u64) {
        const SAMPLE: u64 = 1 << 40;
        let time = TimeEstimate::of(SAMPLE, self.rate(), Duration::ZERO);
        let waiting = u128::from(time.p50) * u128::from(usd_per_hour) / 3_600_000;
        // An unknown price is taken to be higher than any known one.
        let egress = self.egress(SAMPLE, &|meter| so_far(meter)).map_or(u128::from(u64::MAX), u128::from);
        (waiting + egress, time.p50)
    }

    fn egress(&self, bytes: u64, so_far: &dyn Fn(&str) -> u64) -> Option<u64> {
        match self.link {
            Some(link) => Some(link.cost.marginal(so_far, bytes)),
            None if self.within => Some(0),
            None => None,
        }
    }

    fn share(&self, bytes: u64, so_far: &dyn Fn(&str) -> u64, metered: &mut Vec<(String, u64)>) -> SourceShare {
        let at = self.rate();
        let believed = self.link.and_then(|link| link.delay).unwrap_or_default();
        let overhead = self.measured.map(|link| Duration::from_millis(link.overhead_ms.into()));
        let delay = overhead.filter(|overhead| !overhead.is_zero()).unwrap_or(believed);
        let planned =
            |meter: &str| -> u64 { metered.iter().filter(|(name, _)| name == meter).map(|(_, bytes)| bytes).sum() };
        let before = |meter: &str| so_far(meter).saturating_add(planned(meter));
        let egress = self.egress(bytes, &before);
        let month_bytes = self.link.and_then(|link| link.cost.meter()).map(before);
        if let Some(LinkCost::ByVolume { meter, .. }) = self.link.map(|link| &link.cost) {
            metered.push((meter.clone(), bytes));
        }
        SourceShare {
            site: self.site.map(str::to_owned),
            path: self.link.map(|link| link.path.clone()),
            repository: self.repository,
            bytes,
            egress_micro_usd: egress,
            month_bytes,
            rate: at.rate,
            basis: at.basis,
            samples: at.samples,
            time: TimeEstimate::of(bytes, at, delay),
        }
    }
}
