//! Connections before their handshake is done: a limited number, and of one address. Pure.
//!
//! A new connection is always admitted. If that is one too many, another is closed: among the older half of those with the most
//! connections of one address, the first that has sent nothing, else the oldest. So silent connections never keep out others, and a
//! new one has time to send its first bytes.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};

/// Source of a connection: an IPv4 address, or the 64 bits of an IPv6 address that one host can vary no further
/// (<https://www.rfc-editor.org/rfc/rfc4291#section-2.5.4>).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Source(IpAddr);

impl Source {
    fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V6(address) => {
                let network = u128::from(address) & (u128::MAX << 64);
                Self(Ipv6Addr::from(network).into())
            }
            v4 @ IpAddr::V4(_) => Self(v4),
        }
    }
}

/// Connections before their handshake is done.
#[derive(Debug)]
pub(super) struct Pool {
    places: usize,
    share: usize,
    next: u64,
    waiting: BTreeMap<u64, Waiting>,
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    from: Source,
    spoke: bool,
}

impl Pool {
    /// Room for `places`, `share` of them from one address.
    pub(super) fn new(places: usize, share: usize) -> Self {
        Self { places: places.max(1), share: share.max(1), next: 0, waiting: BTreeMap::new() }
    }

    /// Admits a connection from `address`; returns its number, and that of the one to close for it.
    pub(super) fn enter(&mut self, address: IpAddr) -> (u64, Option<u64>) {
        let from = Source::of(address);
        let gone = if self.count(from) >= self.share {
            self.least(|waiting| waiting.from == from)
        } else if self.waiting.len() >= self.places {
            let counts = self.counts();
            let most = counts.values().max().copied();
            self.least(|waiting| counts.get(&waiting.from).copied() == most)
        } else {
            None
        };
        gone.iter().for_each(|gone| self.leave(*gone));
        let number = self.next;
        self.next += 1;
        self.waiting.insert(number, Waiting { from, spoke: false });
        (number, gone)
    }

    /// Records that the connection `number` has sent something.
    pub(super) fn spoke(&mut self, number: u64) {
        if let Some(waiting) = self.waiting.get_mut(&number) {
            waiting.spoke = true;
        }
    }

    pub(super) fn leave(&mut self, number: u64) {
        self.waiting.remove(&number);
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// True if addresses should be validated first (QUIC Retry).
    pub(super) fn is_busy(&self) -> bool {
        self.waiting.len() >= self.places.div_ceil(4)
    }

    fn count(&self, from: Source) -> usize {
        self.waiting.values().filter(|waiting| waiting.from == from).count()
    }

    /// The one to close of those that are `meant`.
    fn least(&self, meant: impl Fn(&Waiting) -> bool) -> Option<u64> {
        let meant: Vec<_> = self.waiting.iter().filter(|(_, waiting)| meant(waiting)).collect();
        let silent = meant.iter().take(meant.len().div_ceil(2)).find(|(_, waiting)| !waiting.spoke);
        silent.or_else(|| meant.first()).map(|(number, _)| **number)
    }

    /// Number of connections of each source.
    fn counts(&self) -> BTreeMap<Source, usize> {
        let mut counts = BTreeMap::new();
        self.waiting.values().for_each(|waiting| *counts.entry(waiting.from).or_default() += 1);
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn who_is_silent_goes_for_who_comes() {
        let mut pool = Pool::new(64, 16);
        let (good, _) = pool.enter(address("10.0.0.1"));
        pool.spoke(good);
        // The same address: it has its share, and the silent ones among them go.
        for _ in 0..100_000 {
            assert_ne!(pool.enter(address("10.0.0.1")).1, Some(good));
            assert!(pool.len() <= 16);
        }
        let (later, gone) = pool.enter(address("10.0.0.1"));
        assert!(gone.is_some() && gone != Some(later));
    }

    #[test]
    fn who_has_just_come_has_time_to_speak() {
        let mut pool = Pool::new(64, 16);
        for _ in 0..16 {
            let (number, _) = pool.enter(address("10.0.0.1"));
            pool.spoke(number);
        }
        let (good, _) = pool.enter(address("10.0.0.1"));
        for _ in 0..7 {
            assert_ne!(pool.enter(address("10.0.0.1")).1, Some(good), "others have waited longer");
        }
        assert!(pool.waiting.contains_key(&good));
    }

    #[test]
    fn among_many_addresses_whoever_has_waited_longest_in_silence_gives_way() {
        let mut pool = Pool::new(64, 16);
        let source = |n: u16| IpAddr::from([10, 0, u8::try_from(n / 256).unwrap(), u8::try_from(n % 256).unwrap()]);
        for n in 0..200 {
            pool.enter(source(n));
        }
        let (good, _) = pool.enter(address("10.255.255.255"));
        for n in 200..231 {
            assert_ne!(pool.enter(source(n)).1, Some(good), "it has just come");
        }
        pool.spoke(good);
        for n in 231..1000 {
            assert_ne!(pool.enter(source(n)).1, Some(good), "it has spoken");
        }
    }

    #[test]
    fn the_address_that_has_most_gives_way() {
        let mut pool = Pool::new(64, 16);
        let (good, _) = pool.enter(address("10.9.9.9"));
        for n in 0..1000u32 {
            let from = IpAddr::from([10, 0, 0, u8::try_from(n % 8).unwrap()]);
            assert_ne!(pool.enter(from).1, Some(good), "it is the only one of its address");
            assert!(pool.len() <= 64);
        }
        assert!(pool.is_busy());
        assert!(pool.waiting.contains_key(&good));
    }

    #[test]
    fn one_host_has_one_share_whatever_address_it_takes() {
        let mut pool = Pool::new(64, 4);
        for n in 0..100u32 {
            pool.enter(address(&format!("2001:db8::{n:x}")));
        }
        assert_eq!(pool.len(), 4);
        pool.enter(address("::ffff:10.0.0.1"));
        (0..9).for_each(|_| assert!(pool.enter(address("10.0.0.1")).0 > 0));
        assert_eq!(pool.len(), 8);
        let (number, _) = pool.enter(address("10.0.0.2"));
        pool.leave(number);
        assert_eq!(pool.len(), 8);
    }
}
