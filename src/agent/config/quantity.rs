//! Sizes, rates and times in settings and requests.

use std::time::Duration;

use serde::de::{Deserialize, Deserializer, Error as _};
use utoipa::ToSchema;

use crate::{size, span};

/// A number of bytes: `"200G"`, or the number itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, ToSchema)]
#[serde(transparent)]
#[schema(value_type = Quantity)]
pub(in crate::agent) struct Bytes(#[serde(deserialize_with = "size::deserialize")] pub(in crate::agent) u64);

/// A length of time: `"25s"`, `"24h"`, or a number of seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, ToSchema)]
#[serde(transparent)]
#[schema(value_type = Quantity)]
pub(in crate::agent) struct Span(#[serde(deserialize_with = "span::deserialize")] pub(in crate::agent) Duration);

/// A number, or a number with its unit as text.
#[derive(serde::Deserialize, ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "describes what requests may hold")]
enum Quantity {
    Number(u64),
    Text(String),
}

/// Bytes a second: `"300Mbit"`, or a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::agent) struct Rate(pub(in crate::agent) u64);

impl<'de> Deserialize<'de> for Rate {
    fn deserialize<D: Deserializer<'de>>(value: D) -> Result<Self, D::Error> {
        let text = String::deserialize(value)?;
        size::parse_rate(&text).map(Self).map_err(D::Error::custom)
    }
}
