//! Choice between QUIC and TCP by measured speed. Pure.

use std::time::Duration;

use tokio::time::Instant;

use super::Transports;
use super::rate::Rate;
use crate::limits::MIB;
use crate::transfer::transport::Transport;

/// Bytes that QUIC has transferred before TCP is tried, and the total time of its requests (several run at the same
/// time): enough that the change, which takes a second or two, costs little, and that QUIC's slow start does not count.
const KNOWN: (u64, Duration) = (512 * MIB, Duration::from_mins(3));
/// Bytes by which TCP is measured.
const TRIAL: u64 = 64 * MIB;
/// Time for which the other transport is preferred to one that failed: a network that blocks it seldom changes, but a lost packet
/// looks the same.
const FAILED_FOR: Duration = Duration::from_mins(10);
/// Factor by which TCP must be faster to replace QUIC.
const BETTER: f64 = 1.2;

/// Measurements of both transports to one peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Choice {
    allowed: Transports,
    quic: Rate,
    tcp: Rate,
    /// Transport that failed to connect last, and when it is tried again: it may be blocked.
    failed: Option<(Transport, Instant)>,
}

impl Choice {
    pub(super) fn new(allowed: Transports) -> Self {
        Self { allowed, quic: Rate::default(), tcp: Rate::default(), failed: None }
    }

    /// Transport to connect by at `now`.
    pub(super) fn next(&self, now: Instant) -> Transport {
        let failed = self.failed.filter(|(_, until)| *until > now).map(|(transport, _)| transport);
        match self.allowed {
            Transports::Quic => Transport::Quic,
            Transports::Tcp => Transport::Tcp,
            Transports::Auto if failed == Some(Transport::Quic) => Transport::Tcp,
            Transports::Auto if failed == Some(Transport::Tcp) => Transport::Quic,
            Transports::Auto if self.quic.bytes < KNOWN.0 || self.quic.time < KNOWN.1 => Transport::Quic,
            Transports::Auto if self.tcp.bytes < TRIAL => Transport::Tcp,
            Transports::Auto => {
                let rate = |rate: &Rate| rate.get().unwrap_or(0.0);
                if rate(&self.tcp) > rate(&self.quic) * BETTER { Transport::Tcp } else { Transport::Quic }
            }
        }
    }

    /// Transport to connect by as well, if the next one does not answer soon: TCP is blocked less often than QUIC.
    pub(super) fn fallback(&self, now: Instant) -> Option<Transport> {
        (self.allowed == Transports::Auto && self.next(now) == Transport::Quic).then_some(Transport::Tcp)
    }

    /// Records that `bytes` came over `transport` in `time`.
    pub(super) fn measured(&mut self, transport: Transport, bytes: u64, time: Duration) {
        match transport {
            Transport::Quic => self.quic.add(bytes, time),
            Transport::Tcp => self.tcp.add(bytes, time),
        }
    }

    /// Records that `transport` failed to connect at `now`.
    pub(super) fn failed(&mut self, transport: Transport, now: Instant) {
        // If both fail, they are tried in turn.
        self.failed = Some((transport, now + FAILED_FOR));
    }

    /// Rate of `transport`, in bytes a second.
    pub(super) fn rate(&self, transport: Transport) -> Option<f64> {
        match transport {
            Transport::Quic => self.quic.get(),
            Transport::Tcp => self.tcp.get(),
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
        let now = Instant::now();
        let mut choice = Choice::new(Transports::Auto);
        assert_eq!(choice.next(now), Transport::Quic);
        // A single large transfer may only be the slow start.
        choice.measured(Transport::Quic, KNOWN.0, second());
        assert_eq!(choice.next(now), Transport::Quic);
        choice.measured(Transport::Quic, 100 * KNOWN.0, KNOWN.1);
        assert_eq!(choice.next(now), Transport::Tcp);
        choice.measured(Transport::Tcp, TRIAL, second() * 2);
        assert_eq!(choice.next(now), Transport::Quic);
        (0..20).for_each(|_| choice.measured(Transport::Quic, TRIAL, second() * 9));
        assert_eq!(choice.next(now), Transport::Tcp);
    }

    #[test]
    fn where_udp_is_blocked_it_is_tcp() {
        let now = Instant::now();
        let mut choice = Choice::new(Transports::Auto);
        choice.failed(Transport::Quic, now);
        assert_eq!(choice.next(now), Transport::Tcp);
        choice.failed(Transport::Tcp, now);
        assert_eq!(choice.next(now), Transport::Quic);
        assert_eq!(choice.fallback(now), Some(Transport::Tcp));
        choice.failed(Transport::Quic, now);
        assert_eq!(choice.fallback(now), None);

        // Only TCP is blocked: measuring it is given up.
        let mut other = Choice::new(Transports::Auto);
        other.measured(Transport::Quic, KNOWN.0, KNOWN.1);
        assert_eq!(other.next(now), Transport::Tcp);
        other.failed(Transport::Tcp, now);
        assert_eq!(other.next(now), Transport::Quic);
        let mut only = Choice::new(Transports::Quic);
        only.failed(Transport::Quic, now);
        assert_eq!((only.next(now), only.fallback(now)), (Transport::Quic, None));
        // A lost packet is forgotten.
        let mut lossy = Choice::new(Transports::Auto);
        lossy.failed(Transport::Quic, now);
        assert_eq!(lossy.next(now + FAILED_FOR / 2), Transport::Tcp);
        assert_eq!(lossy.next(now + FAILED_FOR), Transport::Quic);
    }
}
