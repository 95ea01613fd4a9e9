//! Limits of the pins that other agents ask for.

use std::time::Duration;

use serde::Deserialize;

use super::quantity::{Bytes, Span};
use crate::cache::PinLimit;
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::span;
use crate::transfer::identity::Identity;

/// Default limit of the time that a pin of another agent lasts.
const TIME: Duration = Duration::from_hours(7 * 24);
/// Default limit of bytes that the pins of one other agent keep: the cache's capacity divided by this.
const CAPACITY_PART: u64 = 4;
/// Default limit of pins of one other agent.
const PINS: usize = 256;
/// Default limit of chunks that the pins of one other agent list: 32 MiB of memory for their ids.
const CHUNKS: u64 = 4 << 20;

/// The section `[caller_pins]`.
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

/// Limits of the pins of each other agent.
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
    /// For a cache of `capacity` bytes.
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
    /// Time of a pin for which another agent `asked`.
    ///
    /// # Errors
    /// Denied, for longer than it may.
    pub(in crate::agent) fn lasting(&self, asked: Option<Duration>) -> Result<Duration> {
        let lasting = asked.unwrap_or(self.time);
        if lasting <= self.time {
            return Ok(lasting);
        }
        Err(Error::denied("pin of another agent lasts too long")
            .expected(format!("at most {}", span::show(self.time)))
            .got(span::show(lasting))
            .help("ask for less, or raise max_time in [caller_pins] of the settings of the agent that is asked"))
    }

    /// Limit of all pins of `caller`.
    pub(in crate::agent) fn limit(&self, caller: &Identity) -> PinLimit {
        PinLimit { owners: format!("{}/", caller.path()), bytes: self.bytes, pins: self.pins, chunks: self.chunks }
    }

    /// End and limit of a pin that `caller` asks for; None is this node, which has no limit. `after` adds a span to the current time.
    ///
    /// # Errors
    /// As [`CallerPins::lasting`].
    pub(in crate::agent) fn bounds(
        &self,
        caller: Option<&Identity>,
        asked: Option<Duration>,
        after: impl Fn(Duration) -> Timestamp,
    ) -> Result<(Option<Timestamp>, Option<PinLimit>)> {
        match caller {
            Some(caller) => Ok((Some(after(self.lasting(asked)?)), Some(self.limit(caller)))),
            None => Ok((asked.map(after), None)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn pins_of_callers_are_bounded_and_those_of_this_node_are_not() {
        let pins = CallerPinsSection::default().settle(400);
        assert_eq!((pins.time, pins.bytes, pins.pins), (TIME, 100, PINS));
        let (after, caller) =
            (|span: Duration| Timestamp(i64::try_from(span.as_nanos()).unwrap()), Identity::new("home", "a").unwrap());
        let hour = Duration::from_hours(1);
        assert_eq!(pins.bounds(None, None, after).unwrap(), (None, None));
        assert_eq!(pins.bounds(None, Some(2 * TIME), after).unwrap(), (Some(after(2 * TIME)), None));
        let limit = PinLimit { owners: "home/a/".into(), bytes: 100, pins: PINS, chunks: CHUNKS };
        assert_eq!(pins.bounds(Some(&caller), None, after).unwrap(), (Some(after(TIME)), Some(limit.clone())));
        assert_eq!(pins.bounds(Some(&caller), Some(hour), after).unwrap(), (Some(after(hour)), Some(limit)));
        let error = pins.bounds(Some(&caller), Some(TIME + hour), after).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied);
        assert!(error.to_string().contains("expected at most 7d"), "{error}");
    }
}
