//! Dollars as people write them, without floats.

use crate::error::{Error, Result};

/// Decimal places of a dollar in micro-dollars.
const PLACES: usize = 6;

/// Micro-dollars of a number of dollars, such as `0.09`.
///
/// # Errors
/// Usage, for anything but a number of at most six decimal places that is not negative.
pub(super) fn micro_usd(text: &str) -> Result<u64> {
    let refused = || {
        Error::usage("this is not a price")
            .expected("dollars, not negative, with at most six decimal places")
            .got(text)
            .help("for example: usd = \"0.09\"")
    };
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !digits(whole) || !digits(part) || part.len() > PLACES {
        return Err(refused());
    }
    let whole: u64 = whole.parse().map_err(|_| refused())?;
    let part: u64 = format!("{part:0<PLACES$}").parse().map_err(|_| refused())?;
    whole.checked_mul(super::price::MICRO).and_then(|micro| micro.checked_add(part)).ok_or_else(refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dollars_are_exact() {
        for (text, micro) in [("0.09", 90_000), ("0", 0), ("12", 12_000_000), ("2.5", 2_500_000), ("0.000001", 1)] {
            assert_eq!(micro_usd(text).unwrap(), micro);
        }
        for bad in ["", ".5", "-1", "1e3", "0.0000001", "nan", "1,5", "99999999999999999999", " 1"] {
            assert!(micro_usd(bad).is_err(), "{bad}");
        }
    }
}
