//! Order of sites: by time, dollars or both. Pure, in integers.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::price::MICRO;
use crate::error::{Error, Result};

/// Kind of objective.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The earliest start.
    #[default]
    Time,
    /// The fewest dollars.
    Cost,
    /// Dollars, with a price for an hour of waiting.
    Weighted,
}

impl FromStr for Mode {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "time" => Ok(Self::Time),
            "cost" => Ok(Self::Cost),
            "weighted" => Ok(Self::Weighted),
            _ => Err(Error::usage("unknown objective").expected("time, cost or weighted").got(text)),
        }
    }
}

/// Objective of a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Objective {
    /// Kind.
    pub mode: Mode,
    /// Dollars that an hour of waiting is worth, for `weighted`.
    pub usd_per_hour: f64,
    /// Quantile of the time that counts: 0.1, 0.5 or 0.9.
    pub quantile: f64,
    /// Sites that cost more than these dollars rank behind all others.
    pub max_usd: Option<f64>,
    /// Sites that take longer than these seconds rank behind all others.
    pub max_seconds: Option<f64>,
}

impl Default for Objective {
    fn default() -> Self {
        Self { mode: Mode::Time, usd_per_hour: 0.0, quantile: 0.5, max_usd: None, max_seconds: None }
    }
}

/// Milliseconds that are no difference for a score.
const MS_ALIKE: u64 = 1_000;
/// Micro-dollars that are no difference for a score.
const MICRO_USD_ALIKE: u64 = 10_000;

/// Time and dollars of a candidate, as far as they count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Burden {
    /// Milliseconds at the objective's quantile.
    pub(super) ms: u64,
    /// Micro-dollars.
    pub(super) micro_usd: u64,
}

impl Objective {
    /// Micro-dollars that an hour of waiting is worth.
    pub(super) fn micro_usd_per_hour(&self) -> u64 {
        match self.mode {
            // More than any link costs: the time decides.
            Mode::Time => MICRO * 1_000_000_000,
            Mode::Cost => 0,
            Mode::Weighted => millionths(self.usd_per_hour),
        }
    }

    /// Value that is compared, the lower the better, and one that breaks ties.
    pub(super) fn value(&self, burden: Burden) -> (u64, u64) {
        match self.mode {
            Mode::Time => (burden.ms, burden.micro_usd),
            Mode::Cost => (burden.micro_usd, burden.ms),
            Mode::Weighted => {
                let waiting = u128::from(burden.ms) * u128::from(millionths(self.usd_per_hour)) / 3_600_000;
                (burden.micro_usd.saturating_add(u64::try_from(waiting).unwrap_or(u64::MAX)), burden.ms)
            }
        }
    }

    /// Reasons why a candidate is beyond the limits of the objective.
    pub(super) fn exceeded(&self, burden: Burden) -> Vec<String> {
        let mut reasons = Vec::new();
        if let Some(most) = self.max_usd.filter(|most| burden.micro_usd > millionths(*most)) {
            reasons.push(format!("costs more than ${most}"));
        }
        if let Some(most) = self.max_seconds.filter(|most| burden.ms > millionths(*most) / 1_000) {
            reasons.push(format!("takes longer than {most} s"));
        }
        reasons
    }

    /// Score from 1 to 100 of a candidate with `value`, if the best one has `best`.
    pub(super) fn score(&self, value: u64, best: u64) -> u64 {
        let alike = if self.mode == Mode::Time { MS_ALIKE } else { MICRO_USD_ALIKE };
        let (value, best) = (u128::from(value) + u128::from(alike), u128::from(best) + u128::from(alike));
        u64::try_from((100 * best + value / 2) / value).unwrap_or(100).clamp(1, 100)
    }
}

/// A number of dollars or seconds, in millionths; negative ones and those that are no number are 0.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates")]
pub(super) fn millionths(value: f64) -> u64 {
    (value * MICRO as f64).round() as u64
}
