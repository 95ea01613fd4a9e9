//! Sizes and ranges of bytes, as people write and read them.

use std::str::FromStr;

use crate::error::{Error, Result};

/// The units, each 1024 times the one before.
const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/// `bytes` with one decimal and the largest unit that leaves at least 1: `512 B`, `1.5 GiB`.
pub fn show(bytes: u64) -> String {
    let (mut value, mut unit) = (bytes as f64, 0);
    // What would print as 1024.0 belongs to the next unit.
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        (value, unit) = (value / 1024.0, unit + 1);
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// A number of bytes as `1G`, `512MiB`, `256M` or plain digits; every unit is a power of 1024.
///
/// # Errors
/// Usage, for anything else and for more than 2^64 - 1 bytes.
pub fn parse(text: &str) -> Result<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim_start().to_ascii_lowercase();
    let power = UNITS.iter().position(|name| {
        let name = name.to_ascii_lowercase();
        unit == name || name.strip_suffix("ib") == Some(unit.as_str())
    });
    let power = if unit.is_empty() { Some(0) } else { power };
    power.zip(number.parse::<u64>().ok()).and_then(|(power, number)| number.checked_mul(1 << (10 * power))).ok_or_else(
        || {
            Error::usage("this is not a size")
                .expected("a number and B, K, M, G or T")
                .got(text)
                .cure("for example: 512M, 1GiB")
        },
    )
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
                .cure("for example: 0-1023")
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
        ] {
            assert_eq!(parse(text).unwrap(), bytes, "{text}");
        }
        for text in ["", "M", "1.5G", "-1", "1MB", "1X", "99999999999999999999", "16777216T", "1 0"] {
            assert!(parse(text).is_err(), "{text}");
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
