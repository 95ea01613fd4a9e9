//! Sizes, rates and times as people write them in settings and requests.

use std::time::Duration;

use serde::de::{Deserialize, Deserializer, Error as _};

use crate::size;

/// A number of bytes: `"200G"`, or the number itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::agent) struct Bytes(pub(in crate::agent) u64);

/// A length of time: `"25s"`, `"24h"`, or a number of seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::agent) struct Span(pub(in crate::agent) Duration);

/// Bytes a second: `"300Mbit"` (powers of 1000, as links are sold), or a size (`"40M"`, powers of 1024).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::agent) struct Rate(pub(in crate::agent) u64);

impl<'de> Deserialize<'de> for Rate {
    fn deserialize<D: Deserializer<'de>>(value: D) -> Result<Self, D::Error> {
        let text = String::deserialize(value)?;
        let Some(bits) = text.strip_suffix("bit") else {
            return size::parse(&text).map(Self).map_err(D::Error::custom);
        };
        let (number, power) = match bits.strip_suffix(['k', 'K', 'M', 'G']) {
            Some(number) if bits.ends_with('G') => (number, 1_000_000_000),
            Some(number) if bits.ends_with('M') => (number, 1_000_000),
            Some(number) => (number, 1000),
            None => (bits, 1),
        };
        let rate = number.trim().parse::<u64>().ok().and_then(|number| number.checked_mul(power));
        let wrong = || D::Error::custom(format!("{text:?} is not a rate such as \"300Mbit\""));
        rate.map(|bits| Self(bits / 8)).ok_or_else(wrong)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(value: D) -> Result<Self, D::Error> {
        #[derive(serde::Deserialize)]
        #[serde(untagged, expecting = "a size such as \"200G\", or a number of bytes")]
        enum Written {
            Number(u64),
            Text(String),
        }
        match Written::deserialize(value)? {
            Written::Number(bytes) => Ok(Self(bytes)),
            Written::Text(text) => size::parse(&text).map(Self).map_err(D::Error::custom),
        }
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(value: D) -> Result<Self, D::Error> {
        #[derive(serde::Deserialize)]
        #[serde(untagged, expecting = "a time such as \"25s\" or \"24h\", or a number of seconds")]
        enum Written {
            Seconds(u64),
            Text(String),
        }
        match Written::deserialize(value)? {
            Written::Seconds(seconds) => Ok(Self(Duration::from_secs(seconds))),
            Written::Text(text) => {
                let parsed = humantime::parse_duration(&text);
                parsed.map(Self).map_err(|error| D::Error::custom(format!("{text:?} is not a time: {error}")))
            }
        }
    }
}
