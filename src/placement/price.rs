//! Prices by volume: tiers of a month, in integer micro-dollars.
//!
//! Sums are exact: they are kept as bytes times micro-dollars, and divided once at the end, so that the dollars of a transfer do not
//! depend on how it is cut.

use serde::Serialize;

/// Micro-dollars in a dollar.
pub const MICRO: u64 = 1_000_000;

/// Unit that a price is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Unit {
    /// 10^9 bytes.
    #[serde(rename = "GB")]
    Gb,
    /// 2^30 bytes.
    #[serde(rename = "GiB")]
    Gib,
}

impl Unit {
    /// Bytes in it.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Gb => 1_000_000_000,
            Self::Gib => 1 << 30,
        }
    }

    /// Name in files and tables.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Gb => "GB",
            Self::Gib => "GiB",
        }
    }
}

/// A tier of a price.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Tier {
    /// Volume of a month at which it ends, in units; none: it has no end.
    pub up_to: Option<u64>,
    /// Micro-dollars a unit.
    pub micro_usd: u64,
}

/// Price of bytes by the volume of a month.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Price {
    unit: Unit,
    /// In rising order; the last one has no end.
    tiers: Vec<Tier>,
}

/// Reason why tiers make no price.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadTiers {
    /// There are none.
    None,
    /// A tier ends where or before the one before it does.
    NotRising,
    /// Only the last tier has no end, and it has none.
    Unbounded,
}

impl BadTiers {
    /// Message.
    #[must_use]
    pub const fn message(self) -> &'static str {
        match self {
            Self::None => "price has no tiers",
            Self::NotRising => "tiers of a price do not rise",
            Self::Unbounded => "tiers of a price: the last one, and only that, has no `up_to`",
        }
    }
}

impl Price {
    /// A price of `tiers`.
    ///
    /// # Errors
    /// The tiers are none, do not rise, or the last one ends.
    pub fn new(unit: Unit, tiers: Vec<Tier>) -> Result<Self, BadTiers> {
        let Some((last, others)) = tiers.split_last() else { return Err(BadTiers::None) };
        if last.up_to.is_some() || others.iter().any(|tier| tier.up_to.is_none()) {
            return Err(BadTiers::Unbounded);
        }
        let mut ends = others.iter().filter_map(|tier| tier.up_to);
        if ends.next() == Some(0) || others.windows(2).any(|two| two[0].up_to >= two[1].up_to) {
            return Err(BadTiers::NotRising);
        }
        Ok(Self { unit, tiers })
    }

    /// One price for any volume.
    #[must_use]
    pub fn flat(unit: Unit, micro_usd: u64) -> Self {
        Self { unit, tiers: vec![Tier { up_to: None, micro_usd }] }
    }

    /// Unit of the price.
    #[must_use]
    pub fn unit(&self) -> Unit {
        self.unit
    }

    /// The tiers.
    #[must_use]
    pub fn tiers(&self) -> &[Tier] {
        &self.tiers
    }

    /// Micro-dollars of `bytes` more in a month that had `so_far` bytes, rounded half up.
    #[must_use]
    pub fn marginal(&self, so_far: u64, bytes: u64) -> u64 {
        let unit = u128::from(self.unit.bytes());
        let exact = self.exact(so_far.saturating_add(bytes)) - self.exact(so_far);
        u64::try_from((exact + unit / 2) / unit).unwrap_or(u64::MAX)
    }

    /// Bytes times micro-dollars of a month with `bytes`.
    fn exact(&self, bytes: u64) -> u128 {
        let bytes = u128::from(bytes);
        let (mut sum, mut from) = (0, 0);
        for tier in &self.tiers {
            let to = tier.up_to.map_or(bytes, |end| self.end(end).min(bytes));
            sum += to.saturating_sub(from) * u128::from(tier.micro_usd);
            from = from.max(to);
        }
        sum
    }

    fn end(&self, units: u64) -> u128 {
        u128::from(units) * u128::from(self.unit.bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn aws() -> Price {
        let tier = |up_to, micro_usd| Tier { up_to, micro_usd };
        let tiers =
            vec![tier(Some(100), 0), tier(Some(10_240), 90_000), tier(Some(51_200), 85_000), tier(None, 70_000)];
        Price::new(Unit::Gib, tiers).unwrap()
    }

    #[test]
    fn a_transfer_across_tiers_pays_each_of_them() {
        const GIB: u64 = 1 << 30;
        let price = aws();
        for (so_far, bytes, micro_usd) in [
            (0, 100 * GIB, 0),
            (0, 101 * GIB, 90_000),
            (99 * GIB, 2 * GIB, 90_000),
            (0, 10_240 * GIB, 10_140 * 90_000),
            (10_239 * GIB, 2 * GIB, 90_000 + 85_000),
            (51_199 * GIB, 2 * GIB, 85_000 + 70_000),
            (60_000 * GIB, GIB, 70_000),
            (100 * GIB, 0, 0),
            // 0.09 dollars for 2^30 bytes: 12,000 bytes are one micro-dollar and a little.
            (100 * GIB, 12_000, 1),
            (100 * GIB, 5_000, 0),
            (u64::MAX, GIB, 0),
        ] {
            assert_eq!(price.marginal(so_far, bytes), micro_usd, "{bytes} after {so_far}");
        }
        assert_eq!(Price::flat(Unit::Gb, 20_000).marginal(7, 1_500_000_000), 30_000);
    }

    #[test]
    fn the_sum_of_parts_is_the_whole() {
        let price = aws();
        let whole = price.marginal(0, 40_000 << 30);
        let parts: u64 = (0..40_000).map(|n| price.marginal(n << 30, 1 << 30)).sum();
        assert_eq!(whole, parts);
    }

    #[test]
    fn tiers_rise_and_the_last_one_has_no_end() {
        let tiers = |ends: &[Option<u64>]| {
            let tiers = ends.iter().map(|&up_to| Tier { up_to, micro_usd: 1 }).collect();
            Price::new(Unit::Gb, tiers).map(drop)
        };
        assert_eq!(tiers(&[]), Err(BadTiers::None));
        assert_eq!(tiers(&[Some(1)]), Err(BadTiers::Unbounded));
        assert_eq!(tiers(&[None, None]), Err(BadTiers::Unbounded));
        assert_eq!(tiers(&[Some(2), Some(2), None]), Err(BadTiers::NotRising));
        assert_eq!(tiers(&[Some(0), None]), Err(BadTiers::NotRising));
        assert_eq!(tiers(&[Some(1), Some(2), None]), Ok(()));
    }
}
