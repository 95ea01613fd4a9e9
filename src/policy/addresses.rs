//! Address prefixes, such as `10.1.0.0/16`, by which a policy defines private links.

use std::net::IpAddr;
use std::str::FromStr;

use serde::Deserialize;

use crate::error::{Error, Result};

/// Addresses that begin with the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Prefix {
    address: IpAddr,
    bits: u8,
}

impl Prefix {
    /// An address that has it.
    #[must_use]
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// True if `address` has this prefix. An IPv4 address mapped to IPv6 counts as itself.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(self.bits)).unwrap_or(0);
                (own.to_bits() ^ other.to_bits()) & mask == 0
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(self.bits)).unwrap_or(0);
                (own.to_bits() ^ other.to_bits()) & mask == 0
            }
            _ => false,
        }
    }
}

impl FromStr for Prefix {
    type Err = Error;

    /// Parses `ADDRESS/BITS`, or one address.
    fn from_str(text: &str) -> Result<Self> {
        let malformed =
            || Error::usage("address prefix is malformed").expected("such as 10.1.0.0/16 or fd00:1::/32").got(text);
        let (address, bits) = text.split_once('/').map_or((text, None), |(address, bits)| (address, Some(bits)));
        let address: IpAddr = address.parse().map_err(|_| malformed())?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        let bits = match bits {
            Some(bits) => bits.parse().ok().filter(|bits| *bits <= most).ok_or_else(malformed)?,
            None => most,
        };
        let prefix = Self { address, bits };
        // A mapped address would never match: compared addresses are in IPv4 form.
        if address != address.to_canonical() {
            return Err(malformed());
        }
        Ok(prefix)
    }
}

impl TryFrom<String> for Prefix {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_compared_by_their_first_bits() {
        for (prefix, address, expected) in [
            ("10.1.0.0/16", "10.1.255.1", true),
            ("10.1.0.0/16", "10.2.0.1", false),
            ("10.1.0.0/16", "::ffff:10.1.0.1", true),
            ("0.0.0.0/0", "192.0.2.1", true),
            ("0.0.0.0/0", "2001:db8::1", false),
            ("192.0.2.1", "192.0.2.1", true),
            ("192.0.2.1", "192.0.2.2", false),
            ("fd00:1::/32", "fd00:1:2::3", true),
            ("fd00:1::/32", "fd00:2::1", false),
        ] {
            let prefix: Prefix = prefix.parse().unwrap();
            assert_eq!(prefix.contains(address.parse().unwrap()), expected, "{prefix:?} {address}");
        }
        for bad in ["", "10.1.0.0/33", "10.1/16", "fd00::/129", "10.0.0.0/", "::ffff:10.0.0.0/104", "host/8"] {
            assert!(bad.parse::<Prefix>().is_err(), "{bad}");
        }
    }
}
