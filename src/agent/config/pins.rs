//! Limits of the pins that other agents and tokens ask for.

use std::time::Duration;

use serde::Deserialize;

use super::quantity::{Bytes, Span};
use crate::agent::requester::Requester;
use crate::cache::PinLimit;
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::span;

/// Default limit of the duration of a caller's pin.
const TIME: Duration = Duration::from_hours(7 * 24);
/// Default limit of bytes that the pins of one other agent keep: the cache's capacity divided by this.
const CAPACITY_PART: u64 = 4;
/// Default limit of pins of one other agent.
const PINS: usize = 256;
/// Default limit of chunks that the pins of one other agent list: 32 MiB of memory for their ids.
const CHUNKS: u64 = 4 << 20;

/// The sections `[caller_pins]` and `[token_pins]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CallerPinsSection {
    #[serde(rename = "max_time")]
    time: Option<Span>,
    #[serde(rename = "max_bytes")]
    bytes: Option<Bytes>,
    #[serde(rename = "max_pins")]
    pins: Option<usize>,
    #[serde(rename = "max_chunks")]
    chunks: Option<u64>,
}

/// Limits of the pins of each other agent, or of the tokens of each tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallerPins {
    /// Longest time of a pin; also the time of one that is requested without a time.
    pub time: Duration,
    /// Bytes that all pins of one agent keep, at most.
    pub bytes: u64,
    /// Pins of one agent, at most.
    pub pins: usize,
    /// Chunks that all pins of one agent list, at most; a chunk of several pins counts for each.
    pub chunks: u64,
}

impl CallerPinsSection {
    /// Default limits for a cache of `capacity` bytes.
    pub(super) fn settle(self, capacity: u64) -> CallerPins {
        CallerPins {
            time: self.time.map_or(TIME, |span| span.0),
            bytes: self.bytes.map_or(capacity / CAPACITY_PART, |bytes| bytes.0),
            pins: self.pins.unwrap_or(PINS),
            chunks: self.chunks.unwrap_or(CHUNKS),
        }
    }
}

impl CallerPins {
    /// Duration of a pin for which `caller` asked.
    ///
    /// # Errors
    /// Denied, if it is longer than the limit.
    fn lasting(&self, caller: &Requester, asked: Option<Duration>) -> Result<Duration> {
        let lasting = asked.unwrap_or(self.time);
        if lasting <= self.time {
            return Ok(lasting);
        }
        let (whose, section) = match caller {
            Requester::Agent(_) => ("another agent", "caller_pins"),
            Requester::Token(_) => ("a token", "token_pins"),
        };
        Err(Error::denied(format!("pin of {whose} lasts too long"))
            .expected(format!("at most {}", span::show(self.time)))
            .got(span::show(lasting))
            .help(format!("request less, or raise max_time in [{section}] of the settings of that agent")))
    }

    /// Limit of all pins of `caller`.
    fn limit(&self, caller: &Requester) -> PinLimit {
        PinLimit { owners: caller.limited_owners(), bytes: self.bytes, pins: self.pins, chunks: self.chunks }
    }

    /// End and limit of a pin that `caller` asks for; None is this node, which has no limit. `after` adds a span to the current time.
    ///
    /// # Errors
    /// Usage, for no time at all; denied, for longer than it may.
    pub(in crate::agent) fn bounds(
        &self,
        caller: Option<&Requester>,
        asked: Option<Duration>,
        after: impl Fn(Duration) -> Timestamp,
    ) -> Result<(Option<Timestamp>, Option<PinLimit>)> {
        if asked.is_some_and(|asked| asked.is_zero()) {
            return Err(Error::usage("pin would have run out already")
                .expected("a time above 0")
                .got("0s")
                .help("ask for a longer time, such as 24h"));
        }
        match caller {
            Some(caller) => Ok((Some(after(self.lasting(caller, asked)?)), Some(self.limit(caller)))),
            None => Ok((asked.map(after), None)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::identity::Identity;

    #[test]
    fn pins_of_callers_are_bounded_and_those_of_this_node_are_not() {
        let pins = CallerPinsSection::default().settle(400);
        assert_eq!((pins.time, pins.bytes, pins.pins), (TIME, 100, PINS));
        let after = |span: Duration| Timestamp(i64::try_from(span.as_nanos()).unwrap());
        let caller = Requester::Agent(Identity::new("home", "a").unwrap());
        let hour = Duration::from_hours(1);
        assert_eq!(pins.bounds(None, None, after).unwrap(), (None, None));
        assert_eq!(pins.bounds(None, Some(2 * TIME), after).unwrap(), (Some(after(2 * TIME)), None));
        let limit = PinLimit { owners: "home/a/".into(), bytes: 100, pins: PINS, chunks: CHUNKS };
        assert_eq!(pins.bounds(Some(&caller), None, after).unwrap(), (Some(after(TIME)), Some(limit.clone())));
        assert_eq!(pins.bounds(Some(&caller), Some(hour), after).unwrap(), (Some(after(hour)), Some(limit)));
        let error = pins.bounds(Some(&caller), Some(TIME + hour), after).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied);
        assert!(error.to_string().contains("expected at most 7d"), "{error}");
        for whose in [None, Some(&caller)] {
            let error = pins.bounds(whose, Some(Duration::ZERO), after).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
        }
    }
}
