//! Lengths of time, as people write them.

use std::time::Duration;

#[cfg(feature = "agent")]
use serde::de::{Deserialize, Deserializer, Error as _};

use crate::error::{Error, Result};

/// A length of time: a number of seconds (`25`, `0.5`, `0`), or numbers with units (`25s`, `250ms`, `1.5h`, `1h 30m`, `7d`).
/// The grammar is in docs/operations.md, "Sizes and times".
///
/// # Errors
/// Usage, for anything else.
pub fn parse(text: &str) -> Result<Duration> {
    let bare = text.trim();
    let is_number =
        bare.starts_with(|c: char| c.is_ascii_digit()) && bare.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    let wrong = || {
        Error::usage("this is not a time")
            .expected("a number of seconds, or numbers with ms, s, m, h, d or w")
            .got(format!("{text:?}"))
            .help("for example: 25, 0.5, 90s, 1h 30m, 7d")
    };
    // humantime has months, years, micro- and nanoseconds, too: `M` would be months.
    let units = bare.split(|c: char| !c.is_ascii_alphabetic()).filter(|unit| !unit.is_empty());
    if units.clone().any(|unit| !UNITS.contains(&unit)) {
        return Err(wrong());
    }
    let parsed =
        if is_number { humantime::parse_duration(&format!("{bare}s")) } else { humantime::parse_duration(bare) };
    parsed.map_err(|_| wrong())
}

/// Units that are understood.
const UNITS: [&str; 24] = [
    "ms", "msec", "millis", "s", "sec", "secs", "second", "seconds", "m", "min", "mins", "minute", "minutes", "h",
    "hr", "hrs", "hour", "hours", "d", "day", "days", "w", "week", "weeks",
];

/// `span` in a form that [`parse`] reads: `1h 30m`.
#[must_use]
pub fn show(span: Duration) -> String {
    // humantime writes months and years, which no time that people write has.
    let seconds = span.as_secs();
    let parts = [
        (seconds / 86_400, "d"),
        (seconds / 3600 % 24, "h"),
        (seconds / 60 % 60, "m"),
        (seconds % 60, "s"),
        (u64::from(span.subsec_millis()), "ms"),
    ];
    let parts: Vec<String> =
        parts.iter().filter(|(number, _)| *number > 0).map(|(number, unit)| format!("{number}{unit}")).collect();
    if parts.is_empty() { "0s".to_owned() } else { parts.join(" ") }
}

/// A setting that is a length of time: text as for [`parse`], or a number of seconds.
#[cfg(feature = "agent")]
pub(crate) fn deserialize<'de, D: Deserializer<'de>>(value: D) -> Result<Duration, D::Error> {
    #[derive(serde::Deserialize)]
    #[serde(untagged, expecting = "a time such as \"25s\" or \"24h\", or a number of seconds")]
    enum Written {
        Seconds(u64),
        /// With a fraction; also a negative one, which is refused.
        Part(f64),
        Text(String),
    }
    match Written::deserialize(value)? {
        Written::Seconds(seconds) => Ok(Duration::from_secs(seconds)),
        Written::Part(seconds) => Duration::try_from_secs_f64(seconds)
            .map_err(|_| D::Error::custom(format!("{seconds} is not a number of seconds from 0 to {}", u64::MAX))),
        Written::Text(text) => parse(&text).map_err(D::Error::custom),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_seconds_or_have_units() {
        for (text, millis) in [
            ("0", 0),
            ("5", 5000),
            ("0.5", 500),
            ("25s", 25_000),
            ("250ms", 250),
            ("1.5h", 5_400_000),
            ("1h 30m", 5_400_000),
            ("7d", 7 * 86_400_000),
            (" 2m ", 120_000),
        ] {
            assert_eq!(parse(text).unwrap(), Duration::from_millis(millis), "{text}");
        }
        for text in [
            "", "soon", "-1", "-1s", "+5", "1e3", "inf", "NaN", ".5", "5.", "1.2.3", "5 apples", "1h 30", "2M",
            "1month", "5us", "1y",
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.help_text().is_some(), "{text}");
        }
    }

    #[test]
    fn what_is_shown_is_read_again() {
        for span in [0, 1500, 90_061_000, 40 * 86_400_000, 3_000 * 86_400_000].map(Duration::from_millis) {
            assert_eq!(parse(&show(span)).unwrap(), span);
        }
    }
}
