//! Handshakes that began and did not succeed: QUIC keeps the state of a connection for some round trips after it is
//! closed (<https://www.rfc-editor.org/rfc/rfc9000#section-10.2>), so they cost memory beyond their place in the pool.
//! Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;

/// Maximum number of unfinished handshakes at one time: some tens of KiB each.
pub(super) const MAX: usize = 1024;
/// Maximum number of these from one network, or from one address that an agent was admitted from.
pub(super) const SHARE: usize = 64;

/// Counts of unfinished handshakes, by network.
#[derive(Debug, Default)]
pub(super) struct Counts {
    strangers: BTreeMap<IpAddr, usize>,
    known: BTreeMap<IpAddr, usize>,
    total: usize,
}

impl Counts {
    /// Counts one more from a stranger's `network`; false if that is too many.
    pub(super) fn enter(&mut self, network: IpAddr) -> bool {
        if self.total == MAX || !enter(&mut self.strangers, network) {
            return false;
        }
        self.total += 1;
        true
    }

    /// Counts one more from a known `address`, independent of strangers; false if that is too many.
    pub(super) fn enter_known(&mut self, address: IpAddr) -> bool {
        enter(&mut self.known, address)
    }

    pub(super) fn leave(&mut self, from: IpAddr, known: bool) {
        let counts = if known { &mut self.known } else { &mut self.strangers };
        if !known {
            self.total = self.total.saturating_sub(1);
        }
        if let Some(count) = counts.get_mut(&from) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&from);
            }
        }
    }
}

fn enter(counts: &mut BTreeMap<IpAddr, usize>, from: IpAddr) -> bool {
    let count = counts.entry(from).or_default();
    if *count == SHARE {
        return false;
    }
    *count += 1;
    true
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn one_network_takes_its_share_and_all_no_more_than_there_are() {
        let network = |n: u8| IpAddr::from(Ipv4Addr::new(10, 0, n, 0));
        let mut counts = Counts::default();
        assert_eq!((0..1000).filter(|_| counts.enter(network(0))).count(), SHARE);
        assert!(counts.enter(network(1)));
        for n in 2..=u8::MAX {
            while counts.enter(network(n)) {}
        }
        assert_eq!(counts.total, MAX);
        assert!(!counts.enter(network(1)) && counts.enter_known(network(1)));
        assert_eq!((1..1000).filter(|_| counts.enter_known(network(1))).count(), SHARE - 1);
        counts.leave(network(0), false);
        assert!(counts.enter(network(1)) && !counts.enter(network(0)));
    }

    #[test]
    fn nothing_is_kept_of_who_went() {
        let address = IpAddr::from(Ipv4Addr::LOCALHOST);
        let mut counts = Counts::default();
        assert!(counts.enter(address) && counts.enter_known(address));
        counts.leave(address, false);
        counts.leave(address, true);
        assert!(counts.strangers.is_empty() && counts.known.is_empty() && counts.total == 0);
    }
}
