//! Price book: list prices of moving and keeping bytes. One ships with the program; a file overrides entries of it.

use std::collections::BTreeMap;

use serde::Deserialize;
use toml::Spanned;

use super::dollars::micro_usd;
use super::price::{Price, Tier, Unit};
use crate::error::{Error, Result};
use crate::pattern::Patterns;
use crate::toml_text::{at_line, malformed};

/// The book that ships with the program.
const BUILT_IN: &str = include_str!("price_book.toml");

/// Price of bytes that leave a place over a path.
#[derive(Clone, Debug)]
pub struct EgressPrice {
    /// Provider that bills it.
    pub provider: String,
    /// Regions that it holds for.
    pub regions: Patterns,
    /// Price by volume.
    pub price: Price,
}

/// Price of bytes in a store.
#[derive(Clone, Debug)]
pub struct StoragePrice {
    /// Provider that bills it.
    pub provider: String,
    /// Regions that it holds for.
    pub regions: Patterns,
    /// Unit of `micro_usd_month`.
    pub unit: Unit,
    /// Micro-dollars a unit and month.
    pub micro_usd_month: u64,
    /// Micro-dollars for a million requests that write.
    pub micro_usd_million_puts: u64,
    /// Micro-dollars for a million requests that read.
    pub micro_usd_million_gets: u64,
}

/// A price book.
#[derive(Clone, Debug)]
pub struct PriceBook {
    dated: String,
    egress: BTreeMap<String, EgressPrice>,
    storage: BTreeMap<String, StoragePrice>,
}

impl PriceBook {
    /// The book that ships with the program.
    ///
    /// # Panics
    /// Never: a test reads it.
    #[must_use]
    pub fn built_in() -> Self {
        #[expect(clippy::expect_used, reason = "a test reads it")]
        Self::read(BUILT_IN).expect("the built-in price book is well-formed")
    }

    /// Reads a book.
    ///
    /// # Errors
    /// Usage, with the line: malformed; a negative price; tiers that do not rise; a name that is there twice.
    pub fn read(text: &str) -> Result<Self> {
        let document: Document =
            toml::from_str(text).map_err(|error| malformed("price book is malformed", text, &error))?;
        let (mut egress, mut storage) = (BTreeMap::new(), BTreeMap::new());
        for entry in document.egress {
            let at = at_line(text, entry.span().start);
            let WrittenEgress { name, provider, regions, unit, usd, tiers } = entry.into_inner();
            let price = WrittenPrice { unit, usd, tiers }.read().map_err(|error| error.at(&at))?;
            if egress.insert(name.clone(), EgressPrice { provider, regions, price }).is_some() {
                return Err(Error::usage("price is there twice").at(at).got(name));
            }
        }
        for entry in document.storage {
            let at = at_line(text, entry.span().start);
            let (name, price) = entry.into_inner().read().map_err(|error| error.at(&at))?;
            if storage.insert(name.clone(), price).is_some() {
                return Err(Error::usage("price is there twice").at(at).got(name));
            }
        }
        Ok(Self { dated: document.dated, egress, storage })
    }

    /// This book, with the entries of `other` in place of those of the same names.
    #[must_use]
    pub fn overridden_by(mut self, other: Self) -> Self {
        self.dated = format!("{}, overridden {}", self.dated, other.dated);
        self.egress.extend(other.egress);
        self.storage.extend(other.storage);
        self
    }

    /// Date of the prices, as the book says it.
    #[must_use]
    pub fn dated(&self) -> &str {
        &self.dated
    }

    /// The price `name` of bytes that leave `region` of `provider`.
    ///
    /// # Errors
    /// Usage: no such price, or it is not for there.
    pub fn egress(&self, name: &str, provider: &str, region: &str) -> Result<&Price> {
        let found = self.egress.get(name).ok_or_else(|| unknown(name, self.egress.keys()))?;
        fits(name, (&found.provider, &found.regions), provider, region)?;
        Ok(&found.price)
    }

    /// The price `name` of bytes that are kept in `region` of `provider`.
    ///
    /// # Errors
    /// Usage: no such price, or it is not for there.
    pub fn storage(&self, name: &str, provider: &str, region: &str) -> Result<&StoragePrice> {
        let found = self.storage.get(name).ok_or_else(|| unknown(name, self.storage.keys()))?;
        fits(name, (&found.provider, &found.regions), provider, region)?;
        Ok(found)
    }
}

fn unknown<'a>(name: &str, known: impl Iterator<Item = &'a String>) -> Error {
    let known: Vec<&str> = known.map(String::as_str).collect();
    Error::usage("price book has no such price").got(name).expected(known.join(", "))
}

fn fits(name: &str, (of, regions): (&str, &Patterns), provider: &str, region: &str) -> Result<()> {
    if of == provider && regions.take(region) {
        return Ok(());
    }
    Err(Error::usage("price is for another place")
        .got(name)
        .expected(format!("one for {provider} {region}; it is for {of} {}", regions.texts().join(", ")))
        .help("write the price into the link, or override the price in a price book of your own"))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    dated: String,
    #[serde(default)]
    egress: Vec<Spanned<WrittenEgress>>,
    #[serde(default)]
    storage: Vec<Spanned<WrittenStorage>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenEgress {
    name: String,
    provider: String,
    regions: Patterns,
    unit: WrittenUnit,
    usd: Option<String>,
    tiers: Option<Vec<WrittenTier>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenStorage {
    name: String,
    provider: String,
    regions: Patterns,
    unit: WrittenUnit,
    usd_month: String,
    usd_million_puts: String,
    usd_million_gets: String,
}

impl WrittenStorage {
    fn read(self) -> Result<(String, StoragePrice)> {
        let price = StoragePrice {
            provider: self.provider,
            regions: self.regions,
            unit: self.unit.into(),
            micro_usd_month: micro_usd(&self.usd_month)?,
            micro_usd_million_puts: micro_usd(&self.usd_million_puts)?,
            micro_usd_million_gets: micro_usd(&self.usd_million_gets)?,
        };
        Ok((self.name, price))
    }
}

#[derive(Clone, Copy, Deserialize)]
enum WrittenUnit {
    #[serde(rename = "GB")]
    Gb,
    #[serde(rename = "GiB")]
    Gib,
}

impl From<WrittenUnit> for Unit {
    fn from(written: WrittenUnit) -> Self {
        match written {
            WrittenUnit::Gb => Self::Gb,
            WrittenUnit::Gib => Self::Gib,
        }
    }
}

/// A price as it is written: `usd`, or `tiers`, of a unit.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WrittenPrice {
    unit: WrittenUnit,
    usd: Option<String>,
    tiers: Option<Vec<WrittenTier>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenTier {
    up_to: Option<u64>,
    usd: String,
}

impl WrittenPrice {
    /// The price.
    ///
    /// # Errors
    /// Usage, without the line.
    pub(super) fn read(self) -> Result<Price> {
        let unit = self.unit.into();
        match (self.usd, self.tiers) {
            (Some(usd), None) => Ok(Price::flat(unit, micro_usd(&usd)?)),
            (None, Some(tiers)) => {
                let read = |tier: WrittenTier| Ok(Tier { up_to: tier.up_to, micro_usd: micro_usd(&tier.usd)? });
                let tiers = tiers.into_iter().map(read).collect::<Result<Vec<_>>>()?;
                Price::new(unit, tiers).map_err(|bad| Error::usage(bad.message()))
            }
            _ => Err(Error::usage("price is unclear").expected("either `usd` or `tiers`")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_book_has_the_providers_list_prices() {
        const GIB: u64 = 1 << 30;
        const GB: u64 = 1_000_000_000;
        let book = PriceBook::built_in();
        assert_eq!(book.dated(), "2026-11-25");
        for (name, provider, region, so_far, bytes, micro_usd) in [
            // 100 GiB are free, then 9 cents; 8.5 from 10 TiB on.
            ("aws/internet", "aws", "us-east-1", 0, 1024 * GIB, 924 * 90_000),
            ("aws/internet", "aws", "eu-west-1", 10_000 * GIB, 1000 * GIB, 240 * 90_000 + 760 * 85_000),
            ("aws/region", "aws", "us-west-2", 0, 500 * GIB, 10_000_000),
            ("gcp/internet-premium", "gcp", "us-central1", 0, 2048 * GIB, 1024 * 120_000 + 1024 * 110_000),
            ("azure/internet", "azure", "westeurope", 0, 1000 * GB, 900 * 87_000),
            ("azure/internet", "azure", "eastus", 10_340 * GB, GB, 83_000),
            ("r2/internet", "r2", "auto", 0, 1000 * GB, 0),
        ] {
            assert_eq!(book.egress(name, provider, region).unwrap().marginal(so_far, bytes), micro_usd, "{name}");
        }
        let storage = book.storage("aws/s3-standard", "aws", "us-east-1").unwrap();
        assert_eq!(
            (storage.micro_usd_month, storage.micro_usd_million_puts, storage.micro_usd_million_gets),
            (23_000, 5_000_000, 400_000)
        );
    }

    /// The table of docs/placement.md, in cents.
    #[test]
    fn a_months_dollars_are_exact_at_the_edges_of_tiers() {
        let book = PriceBook::built_in();
        let price = book.egress("aws/internet", "aws", "us-east-1").unwrap();
        for (gib, cents) in [
            (100, 0),
            (10_240, 91_260),
            (20_480, 178_300),
            (51_200, 439_420),
            (61_440, 511_100),
            (102_400, 797_820),
            (204_800, 1_412_220),
        ] {
            assert_eq!(price.marginal(0, gib << 30), cents * 10_000, "{gib}");
        }
    }

    #[test]
    fn prices_of_other_places_and_unknown_ones_are_refused() {
        let book = PriceBook::built_in();
        for (name, provider, region, says) in [
            ("aws/internet", "aws", "af-south-1", "price is for another place"),
            ("aws/internet", "gcp", "us-east1", "price is for another place"),
            ("aws/carrier-pigeon", "aws", "us-east-1", "price book has no such price"),
        ] {
            let error = book.egress(name, provider, region).unwrap_err().to_string();
            assert!(error.starts_with(says), "{error}");
        }
    }

    #[test]
    fn a_book_overrides_entries_of_another() {
        let own = "dated = '2026-12-01'\n[[egress]]\nname = 'aws/internet'\nprovider = 'aws'\nregions = '*'\nunit = 'GiB'\nusd = '0.031'\n";
        let book = PriceBook::built_in().overridden_by(PriceBook::read(own).unwrap());
        assert_eq!(book.egress("aws/internet", "aws", "af-south-1").unwrap().marginal(0, 1 << 30), 31_000);
        assert!(book.egress("aws/zone", "aws", "us-east-1").is_ok());
        assert_eq!(book.dated(), "2026-11-25, overridden 2026-12-01");
    }

    #[test]
    fn bad_books_are_refused_with_their_line() {
        let entry = |price: &str| {
            format!("dated = 'x'\n\n[[egress]]\nname = 'a'\nprovider = 'p'\nregions = '*'\nunit = 'GB'\n{price}\n")
        };
        for (text, says) in [
            (entry("usd = '-1'"), "this is not a price at line 3"),
            (entry("usd = '0.0000001'"), "this is not a price at line 3"),
            (entry("usd = '1'\ntiers = []"), "price is unclear at line 3"),
            (entry(""), "price is unclear at line 3"),
            (entry("tiers = []"), "price has no tiers at line 3"),
            (entry("tiers = [{ up_to = 5, usd = '1' }]"), "tiers of a price: the last one"),
            (entry("colour = 'red'"), "price book is malformed"),
            (format!("{0}{1}", entry("usd = '1'"), &entry("usd = '2'")[12..]), "price is there twice at line 10"),
        ] {
            let error = PriceBook::read(&text).unwrap_err().to_string();
            assert!(error.starts_with(says), "{says}: {error}\n{text}");
        }
    }
}
