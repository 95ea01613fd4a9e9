//! Sizes and ranges of bytes, as people write and read them.

use std::str::FromStr;

#[cfg(any(feature = "agent", feature = "cli"))]
use serde::de::{Deserialize, Deserializer, Error as _};

use crate::error::{Error, Result};

/// The units, each 1024 times the one before.
const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/// `bytes` with one decimal and the largest unit that leaves at least 1: `512 B`, `1.5 GiB`.
pub fn show(bytes: u64) -> String {
    let (mut value, mut unit) = (bytes as f64, 0);
    // Values that would print as 1024.0 use the next unit.
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        (value, unit) = (value / 1024.0, unit + 1);
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// Digits of a fraction, at most: more than the smallest part of a byte that a size can tell apart.
const FRACTION_DIGITS_MAX: usize = 18;

/// A number of bytes as `1G`, `1.5G`, `512MiB`, `256M` or plain digits; every unit is a power of 1024. The grammar is in
/// docs/operations.md, "Sizes and times".
///
/// # Errors
/// Usage, for anything else and for more than 2^64 - 1 bytes.
pub fn parse(text: &str) -> Result<u64> {
    let (number, unit) = split_number(text.trim());
    let unit = unit.trim_start().to_ascii_lowercase();
    let power = UNITS.iter().position(|name| {
        let name = name.to_ascii_lowercase();
        unit == name || name.strip_suffix("ib") == Some(unit.as_str())
    });
    let power = if unit.is_empty() { Some(0) } else { power };
    let bytes = power.and_then(|power| scaled(number, 1 << (10 * power)));
    bytes.ok_or_else(|| {
        // The command line shows no help of a flag's value.
        let expected = match unit.strip_suffix('b').filter(|unit| ["k", "m", "g", "t", "p", "e"].contains(unit)) {
            Some(letter) => {
                let letter = letter.to_ascii_uppercase();
                format!("{number}{letter} or {number}{letter}iB, which are powers of 1024")
            }
            None => "a number and B, K, M, G, T, P or E".to_owned(),
        };
        Error::usage("this is not a size").expected(expected).got(text).help("for example: 512M, 1.5G, 1GiB")
    })
}

/// Bytes a second: `300Mbit` (powers of 1000, as links are sold), or a size (`40M`, powers of 1024).
///
/// # Errors
/// Usage, for anything else.
pub fn parse_rate(text: &str) -> Result<u64> {
    let refused = || {
        Error::usage("this is not a rate")
            .expected("a number and bit, kbit, Mbit or Gbit; or a size, for bytes a second")
            .got(text)
            .help("for example: 300Mbit, 40M")
    };
    let Some(bits) = text.trim().strip_suffix("bit") else { return parse(text).map_err(|_| refused()) };
    let (number, unit) = split_number(bits);
    let power = match unit.trim_start() {
        "" => Some(1),
        "k" | "K" => Some(1000),
        "M" => Some(1_000_000),
        "G" => Some(1_000_000_000),
        _ => None,
    };
    power.and_then(|power| scaled(number, power)).map(|bits| bits / 8).ok_or_else(refused)
}

/// A setting that is a size: text as for [`parse`], or a number of bytes.
#[cfg(any(feature = "agent", feature = "cli"))]
pub(crate) fn deserialize<'de, D: Deserializer<'de>>(value: D) -> Result<u64, D::Error> {
    #[derive(serde::Deserialize)]
    #[serde(untagged, expecting = "a size such as \"200G\", or a number of bytes")]
    enum Written {
        Bytes(u64),
        Text(String),
    }
    match Written::deserialize(value)? {
        Written::Bytes(bytes) => Ok(bytes),
        Written::Text(text) => parse(&text).map_err(D::Error::custom),
    }
}

/// The digits and the fraction that `text` begins with, and the rest.
fn split_number(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    text.split_at(end)
}

/// `number` times `unit`, rounded down; none for what is no decimal number, for too much, and for part of a single unit.
fn scaled(number: &str, unit: u64) -> Option<u64> {
    let (whole, fraction) = number.split_once('.').map_or((number, None), |(whole, fraction)| (whole, Some(fraction)));
    let whole = u128::from(whole.parse::<u64>().ok()?) * u128::from(unit);
    let part = match fraction {
        None => 0,
        Some(digits) if unit > 1 && digits.len() <= FRACTION_DIGITS_MAX => {
            u128::from(digits.parse::<u64>().ok()?) * u128::from(unit) / 10_u128.pow(u32::try_from(digits.len()).ok()?)
        }
        Some(_) => return None,
    };
    u64::try_from(whole + part).ok()
}

/// Part of a file, as an HTTP range names it (<https://www.rfc-editor.org/rfc/rfc9110#section-14.1.2>).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ByteRange {
    /// `A-B`: from offset A to offset B, both included.
    Between(u64, u64),
    /// `A-`: from offset A to the end.
    From(u64),
    /// `-N`: the last N bytes.
    Last(u64),
}

impl FromStr for ByteRange {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let number = |digits: &str| digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse::<u64>().ok())?;
        let range = match text.split_once('-') {
            Some(("", count)) => number(count).filter(|&count| count > 0).map(Self::Last),
            Some((first, "")) => number(first).map(Self::From),
            Some((first, last)) => number(first)
                .zip(number(last))
                .filter(|(first, last)| first <= last)
                .map(|(first, last)| Self::Between(first, last)),
            None => None,
        };
        range.ok_or_else(|| {
            Error::usage("this is not a range of bytes")
                .expected("A-B (both included), A- or -N")
                .got(text)
                .help("for example: 0-1023")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_powers_of_1024() {
        for (text, bytes) in [
            ("0", 0),
            ("17", 17),
            ("9B", 9),
            ("4k", 4 << 10),
            ("256M", 256 << 20),
            ("512MiB", 512 << 20),
            ("1G", 1 << 30),
            ("2 TiB", 2 << 40),
            ("1.5G", 3 << 29),
            ("0.5 KiB", 512),
            ("0.1k", 102),
            ("15.999999999999999999E", u64::MAX - 1),
            (" 5M ", 5 << 20),
        ] {
            assert_eq!(parse(text).unwrap(), bytes, "{text}");
        }
        for text in [
            "",
            "M",
            "-1",
            "+1",
            "1MB",
            "1X",
            "99999999999999999999",
            "16777216T",
            "1 0",
            "1.5",
            "1.G",
            ".5G",
            "1.5.5G",
            "1e3",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
        let error = parse("1.5gb").unwrap_err();
        assert!(error.to_string().contains("expected 1.5G or 1.5GiB, which are powers of 1024"), "{error}");
    }

    #[test]
    fn rates_are_bits_in_powers_of_1000_or_sizes() {
        for (text, rate) in
            [("300Mbit", 37_500_000), ("1.5Gbit", 187_500_000), ("8 kbit", 1000), ("80bit", 10), ("1.5M", 3 << 19)]
        {
            assert_eq!(parse_rate(text).unwrap(), rate, "{text}");
        }
        for text in ["", "bit", "fast", "1Xbit", "-1Mbit"] {
            assert!(parse_rate(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown_with_one_decimal() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536 << 20, "1.5 GiB"),
            ((1 << 20) - 1, "1.0 MiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(show(bytes), text);
        }
    }

    #[test]
    fn ranges_are_those_of_http() {
        let read = |text: &str| text.parse::<ByteRange>().unwrap();
        assert_eq!(read("0-0"), ByteRange::Between(0, 0));
        assert_eq!(read("2-5"), ByteRange::Between(2, 5));
        assert_eq!(read("2-"), ByteRange::From(2));
        assert_eq!(read("-3"), ByteRange::Last(3));
        for text in ["", "-", "5", "5-2", "-0", "a-b", "+1-2", "1--2", "1-2-3", " 1-2"] {
            assert!(text.parse::<ByteRange>().is_err(), "{text}");
        }
    }
}
