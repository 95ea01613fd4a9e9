//! Placement: where data is cheap to have. Pure: sites, links and prices in, answers out.
//!
//! ```text
//! price book + sites file -> sites and links, checked against the signed policy
//! ```

mod dollars;
mod price;
mod price_book;
mod sites;

pub use self::price::{BadTiers, MICRO, Price, Tier, Unit};
pub use self::price_book::{EgressPrice, PriceBook, StoragePrice};
pub use self::sites::{Gpus, Link, LinkCost, SITES_LEN_MAX, Site, Sites};
