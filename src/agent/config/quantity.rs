//! Sizes and times as people write them in settings and requests.

use std::time::Duration;

use serde::de::{Deserialize, Deserializer, Error as _};

use crate::size;

/// A number of bytes: `"200G"`, or the number itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::agent) struct Bytes(pub(in crate::agent) u64);

/// A length of time: `"25s"`, `"24h"`, or a number of seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::agent) struct Span(pub(in crate::agent) Duration);

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
