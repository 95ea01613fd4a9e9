//! Connections before the end of their handshake: a limited number, in all and from one address. Pure.
//!
//! A new connection is always admitted. If that exceeds the limit, another one is closed, chosen in this order: one
//! from an address that no agent was admitted from, if there is any; of these one of the network with the most
//! connections; of these, among the older half, the first that has sent nothing, else a random one. So silent
//! connections never keep out others; strangers never keep out agents from other addresses; a new connection has time
//! to send its first bytes; and no rate of connections from an address closes all others there before their handshakes
//! are done.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Maximum number of remembered addresses that an agent was admitted from.
const KNOWN_MAX: usize = 4096;

/// Source of a connection: an IPv4 address, or the /64 of an IPv6 address, within which one host can pick any address
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

    /// Network that may belong to one customer of a provider: 24 bits of IPv4, 48 of IPv6
    /// (<https://www.rfc-editor.org/rfc/rfc6177#section-2>).
    fn network(self) -> IpAddr {
        match self.0 {
            IpAddr::V4(address) => Ipv4Addr::from(u32::from(address) & (u32::MAX << 8)).into(),
            IpAddr::V6(address) => Ipv6Addr::from(u128::from(address) & (u128::MAX << 80)).into(),
        }
    }
}

/// Connections before the end of their handshake.
#[derive(Debug)]
pub(super) struct Pool {
    places: usize,
    share: usize,
    next: u64,
    waiting: BTreeMap<u64, Waiting>,
    /// Sources that agents were admitted from, with the number of the last such connection.
    known: BTreeMap<Source, u64>,
    /// State of the random number generator; never 0.
    rng: u64,
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    from: Source,
    sent_data: bool,
}

impl Pool {
    /// Pool of `places`, at most `share` of them from one address; at most half from one that an agent was admitted
    /// from. `seed` makes the random choices unpredictable.
    pub(super) fn new(places: usize, share: usize, seed: u64) -> Self {
        let (places, share) = (places.max(1), share.max(1));
        Self { places, share, next: 0, waiting: BTreeMap::new(), known: BTreeMap::new(), rng: seed | 1 }
    }

    /// Admits a connection from `address`; returns its number, and that of the one to close for it.
    pub(super) fn enter(&mut self, address: IpAddr) -> (u64, Option<u64>) {
        let from = Source::of(address);
        let share = if self.knows(from) { self.share.max(self.places / 2) } else { self.share };
        let rng = self.random();
        let gone = if self.count(from) >= share {
            self.least(rng, |waiting| waiting.from == from)
        } else if self.waiting.len() >= self.places {
            let strangers = self.waiting.values().any(|waiting| !self.knows(waiting.from));
            let meant = |waiting: &Waiting| !strangers || !self.knows(waiting.from);
            let mut counts: BTreeMap<IpAddr, usize> = BTreeMap::new();
            for waiting in self.waiting.values().filter(|waiting| meant(waiting)) {
                *counts.entry(waiting.from.network()).or_default() += 1;
            }
            let most = counts.values().max().copied();
            self.least(rng, |waiting| meant(waiting) && counts.get(&waiting.from.network()).copied() == most)
        } else {
            None
        };
        gone.iter().for_each(|gone| self.leave(*gone));
        let number = self.next;
        self.next += 1;
        self.waiting.insert(number, Waiting { from, sent_data: false });
        (number, gone)
    }

    /// Records that the connection `number` has sent something.
    pub(super) fn sent_data(&mut self, number: u64) {
        if let Some(waiting) = self.waiting.get_mut(&number) {
            waiting.sent_data = true;
        }
    }

    /// Remembers that an agent was admitted by the connection `number`.
    pub(super) fn admitted(&mut self, number: u64) {
        let Some(from) = self.waiting.get(&number).map(|waiting| waiting.from) else { return };
        self.known.insert(from, number);
        let oldest = self.known.iter().min_by_key(|(_, last)| **last).map(|(source, _)| *source);
        if let Some(oldest) = oldest.filter(|_| self.known.len() > KNOWN_MAX) {
            self.known.remove(&oldest);
        }
    }

    /// Origin under which a connection from `address` is counted, and whether an agent was admitted from there: its
    /// address then, else its network.
    pub(super) fn origin(&self, address: IpAddr) -> (IpAddr, bool) {
        let from = Source::of(address);
        if self.knows(from) { (from.0, true) } else { (from.network(), false) }
    }

    fn knows(&self, from: Source) -> bool {
        self.known.contains_key(&from)
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

    /// Connection to close among those that `meant` selects.
    fn least(&self, rng: usize, meant: impl Fn(&Waiting) -> bool) -> Option<u64> {
        let mut older: Vec<_> = self.waiting.iter().filter(|(_, waiting)| meant(waiting)).collect();
        older.truncate(older.len().div_ceil(2));
        let silent = older.iter().find(|(_, waiting)| !waiting.sent_data);
        silent.or_else(|| older.get(rng.checked_rem(older.len())?)).map(|(number, _)| **number)
    }

    /// Number that cannot be predicted in practice without the seed (xorshift,
    /// <https://doi.org/10.18637/jss.v008.i14>).
    fn random(&mut self) -> usize {
        self.rng ^= self.rng << 13;
        self.rng ^= self.rng >> 7;
        self.rng ^= self.rng << 17;
        usize::try_from(self.rng >> 16).unwrap_or_default()
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
        let mut pool = Pool::new(64, 16, 7);
        let (good, _) = pool.enter(address("10.0.0.1"));
        pool.sent_data(good);
        // The same address: it is limited to its share, and its silent connections are closed first.
        for _ in 0..100_000 {
            assert_ne!(pool.enter(address("10.0.0.1")).1, Some(good));
            assert!(pool.len() <= 16);
        }
        let (later, gone) = pool.enter(address("10.0.0.1"));
        assert!(gone.is_some() && gone != Some(later));
    }

    #[test]
    fn who_has_just_come_has_time_to_speak() {
        let mut pool = Pool::new(64, 16, 7);
        for _ in 0..16 {
            let (number, _) = pool.enter(address("10.0.0.1"));
            pool.sent_data(number);
        }
        let (good, _) = pool.enter(address("10.0.0.1"));
        for _ in 0..7 {
            assert_ne!(pool.enter(address("10.0.0.1")).1, Some(good), "others have waited longer");
        }
        assert!(pool.waiting.contains_key(&good));
    }

    #[test]
    fn among_many_addresses_whoever_has_waited_longest_in_silence_gives_way() {
        let mut pool = Pool::new(64, 16, 7);
        let source = |n: u16| IpAddr::from([10, 0, u8::try_from(n / 256).unwrap(), u8::try_from(n % 256).unwrap()]);
        for n in 0..200 {
            pool.enter(source(n));
        }
        let (good, _) = pool.enter(address("10.255.255.255"));
        for n in 200..231 {
            assert_ne!(pool.enter(source(n)).1, Some(good), "it has just come");
        }
        pool.sent_data(good);
        for n in 231..1000 {
            assert_ne!(pool.enter(source(n)).1, Some(good), "it has spoken");
        }
    }

    #[test]
    fn the_address_that_has_most_gives_way() {
        let mut pool = Pool::new(64, 16, 7);
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
    fn a_network_of_many_addresses_gives_way_to_others() {
        let mut pool = Pool::new(64, 16, 7);
        let (good, _) = pool.enter(address("2001:db8:1::1"));
        for n in 0..1000u32 {
            let gone = pool.enter(address(&format!("2001:db8:2:{n:x}::1"))).1;
            assert_ne!(gone, Some(good), "another network has more");
        }
        assert!(pool.waiting.contains_key(&good) && pool.len() == 64);
    }

    #[test]
    fn strangers_from_everywhere_do_not_keep_out_agents() {
        let mut pool = Pool::new(64, 16, 7);
        let agent = address("10.9.9.9");
        let (first, _) = pool.enter(agent);
        pool.admitted(first);
        pool.leave(first);
        let stranger = |n: u32| IpAddr::from(Ipv4Addr::from(0x0B00_0000 + n * 256));
        for n in 0..200 {
            pool.enter(stranger(n));
        }
        let (good, _) = pool.enter(agent);
        for n in 200..2000 {
            assert_ne!(pool.enter(stranger(n)).1, Some(good), "an agent was admitted from there");
        }
        assert!(pool.waiting.contains_key(&good));
        // An address of agents is limited to a share, too.
        for _ in 0..100 {
            pool.enter(agent);
        }
        assert_eq!(pool.count(Source::of(agent)), 32);
    }

    #[test]
    fn a_stranger_that_shares_an_agents_address_does_not_close_each_of_its_connections() {
        let mut pool = Pool::new(128, 32, 7);
        let shared = address("10.9.9.9");
        let (first, _) = pool.enter(shared);
        pool.admitted(first);
        let enter = |pool: &mut Pool| {
            let (number, _) = pool.enter(shared);
            pool.sent_data(number);
            number
        };
        let lasted = (0..100).filter(|_| {
            let good = enter(&mut pool);
            // Others of the same address begin while it is at its handshake, and all have sent something.
            for _ in 0..48 {
                enter(&mut pool);
            }
            let lasted = pool.waiting.contains_key(&good);
            pool.leave(good);
            lasted
        });
        let lasted = lasted.count();
        assert!(lasted > 30, "{lasted} of 100");
    }

    #[test]
    fn one_host_has_one_share_whatever_address_it_takes() {
        let mut pool = Pool::new(64, 4, 7);
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
