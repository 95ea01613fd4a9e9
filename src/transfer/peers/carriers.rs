//! QUIC or TCP: the one that turned out faster. Pure.

use std::fmt;
use std::time::Duration;

use super::Carriers;
use super::rate::Rate;
use crate::limits::MIB;

/// What QUIC has brought before TCP is tried, and how long its requests have taken together (several go on at the same time): so
/// much that changing over, which takes a second or two, costs little, and that what is known of QUIC is not how it began.
const KNOWN: (u64, Duration) = (512 * MIB, Duration::from_mins(3));
/// Bytes by which TCP is judged.
const TRIAL: u64 = 64 * MIB;
/// The one in use stays unless the other was so much faster.
const BETTER: f64 = 1.2;

/// Transport of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carrier {
    /// QUIC, over UDP.
    Quic,
    /// TCP with TLS.
    Tcp,
}

impl Carrier {
    /// As it is written: `quic` or `tcp`.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Quic => "quic",
            Self::Tcp => "tcp",
        }
    }
}

impl fmt::Display for Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// Knowledge of both transports to one peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Choice {
    allowed: Carriers,
    quic: Rate,
    tcp: Rate,
    /// Transport that could not connect last: it may be blocked.
    failed: Option<Carrier>,
}

impl Choice {
    pub(super) fn new(allowed: Carriers) -> Self {
        Self { allowed, quic: Rate::default(), tcp: Rate::default(), failed: None }
    }

    /// Transport to connect by.
    pub(super) fn next(&self) -> Carrier {
        match self.allowed {
            Carriers::Quic => Carrier::Quic,
            Carriers::Tcp => Carrier::Tcp,
            Carriers::Auto if self.failed == Some(Carrier::Quic) => Carrier::Tcp,
            Carriers::Auto if self.failed == Some(Carrier::Tcp) => Carrier::Quic,
            Carriers::Auto if self.quic.bytes < KNOWN.0 || self.quic.time < KNOWN.1 => Carrier::Quic,
            Carriers::Auto if self.tcp.bytes < TRIAL => Carrier::Tcp,
            Carriers::Auto => {
                let rate = |rate: &Rate| rate.get().unwrap_or(0.0);
                if rate(&self.tcp) > rate(&self.quic) * BETTER { Carrier::Tcp } else { Carrier::Quic }
            }
        }
    }

    /// `bytes` came over `carrier` in `time`.
    pub(super) fn measured(&mut self, carrier: Carrier, bytes: u64, time: Duration) {
        match carrier {
            Carrier::Quic => self.quic.add(bytes, time),
            Carrier::Tcp => self.tcp.add(bytes, time),
        }
    }

    /// `carrier` could not connect.
    pub(super) fn failed(&mut self, carrier: Carrier) {
        // If both are, they are tried in turn.
        self.failed = Some(carrier);
    }

    /// The rate of `carrier`, in bytes a second.
    pub(super) fn rate(&self, carrier: Carrier) -> Option<f64> {
        match carrier {
            Carrier::Quic => self.quic.get(),
            Carrier::Tcp => self.tcp.get(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn second() -> Duration {
        Duration::from_secs(1)
    }

    #[test]
    fn both_are_measured_and_the_better_stays() {
        let mut choice = Choice::new(Carriers::Auto);
        assert_eq!(choice.next(), Carrier::Quic);
        // Much at once may only be how it began.
        choice.measured(Carrier::Quic, KNOWN.0, second());
        assert_eq!(choice.next(), Carrier::Quic);
        choice.measured(Carrier::Quic, 100 * KNOWN.0, KNOWN.1);
        assert_eq!(choice.next(), Carrier::Tcp);
        choice.measured(Carrier::Tcp, TRIAL, second() * 2);
        assert_eq!(choice.next(), Carrier::Quic);
        (0..20).for_each(|_| choice.measured(Carrier::Quic, TRIAL, second() * 9));
        assert_eq!(choice.next(), Carrier::Tcp);
    }

    #[test]
    fn where_udp_is_blocked_it_is_tcp() {
        let mut choice = Choice::new(Carriers::Auto);
        choice.failed(Carrier::Quic);
        assert_eq!(choice.next(), Carrier::Tcp);
        choice.failed(Carrier::Tcp);
        assert_eq!(choice.next(), Carrier::Quic);
        // TCP alone is blocked: measuring it is given up.
        let mut other = Choice::new(Carriers::Auto);
        other.measured(Carrier::Quic, KNOWN.0, KNOWN.1);
        assert_eq!(other.next(), Carrier::Tcp);
        other.failed(Carrier::Tcp);
        assert_eq!(other.next(), Carrier::Quic);
        let mut only = Choice::new(Carriers::Quic);
        only.failed(Carrier::Quic);
        assert_eq!(only.next(), Carrier::Quic);
    }
}
