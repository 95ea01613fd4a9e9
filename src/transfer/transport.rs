//! Common parts of the transports: dialing, windows.

use std::fmt;
use std::time::Duration;

use tokio::time::timeout;

use super::protocol::limits::WINDOW_MIN;
use crate::budget::Budget;
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::limits::MIB;
use crate::log_limit::LogLimit;

/// Transport of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// QUIC, over UDP.
    Quic,
    /// TCP with TLS.
    Tcp,
}

impl Transport {
    /// Name: `quic` or `tcp`.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Quic => "quic",
            Self::Tcp => "tcp",
        }
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// Time limit of connecting and the handshake together. A listener has its own limit ([`Gate`](super::Gate)).
pub(super) const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
/// Rate limit of log lines about refused peers.
pub(super) static REFUSED: LogLimit = LogLimit::new();
/// Time limit of a new connection for the memory of its window: less than the other side waits for the hello.
const MEMORY_WITHIN: Duration = Duration::from_secs(5);
/// Pause of a listener after a failed accept.
pub(super) const BREATH: Duration = Duration::from_millis(100);

/// Target rate of one connection in bytes a second: 2.5 Gbit/s, so that the four of a link fill 10.
const RATE: u64 = 312_500_000;
/// Minimum useful window: with less, a connection waits for the verification of frames, however short the round trip.
pub(crate) const GOOD_WINDOW: u64 = 8 * MIB;

/// Options to connect to a peer.
#[derive(Debug)]
pub struct Dial<'a> {
    /// Expected identity; without one, any agent with a valid certificate.
    pub expected: Option<&'a Identity>,
    /// Budget of the window.
    pub budget: &'a Budget,
    /// Maximum number of bytes of frames in transit or in memory. The connection takes only what its round trip time
    /// needs.
    pub window: u64,
}

impl Dial<'_> {
    /// Largest window.
    pub(super) fn window_max(&self) -> u64 {
        self.window.max(WINDOW_MIN)
    }

    /// Window of a connection with the round trip time `delay`: twice the bytes in transit, since as many are being
    /// processed.
    pub(super) fn window_for(&self, delay: Duration) -> u64 {
        let on_its_way = delay.as_micros() * u128::from(2 * RATE) / 1_000_000;
        let window = u64::try_from(on_its_way).unwrap_or(u64::MAX).div_ceil(MIB).saturating_mul(MIB);
        window.max(GOOD_WINDOW).min(self.window_max())
    }

    /// Memory for a window.
    ///
    /// # Errors
    /// Exhausted, if other connections use it.
    ///
    /// # Cancel safety
    /// Safe.
    pub(super) async fn memory_for(&self, window: u64) -> Result<Budget> {
        let late = |_| {
            Err(Error::exhausted("no memory for another connection")
                .expected(format!("{} MiB", window / MIB))
                .help("raise the agent's memory, or have fewer [peers] connections"))
        };
        timeout(MEMORY_WITHIN, self.budget.carve(window)).await.unwrap_or_else(late)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::MEMORY_MIN;

    #[test]
    fn a_longer_line_has_a_larger_window() {
        let budget = Budget::new(MEMORY_MIN).unwrap();
        let dial = |window| Dial { expected: None, budget: &budget, window };
        let in_mib = |most: u64, millis| dial(most * MIB).window_for(Duration::from_millis(millis)) / MIB;
        assert_eq!([0, 1, 20, 50, 100, 100_000].map(|millis| in_mib(64, millis)), [8, 8, 12, 30, 60, 64]);
        assert_eq!([1, 50].map(|millis| in_mib(16, millis)), [8, 16]);
        assert_eq!([0, 50].map(|millis| in_mib(5, millis)), [5, 5], "memory is short");
        assert_eq!(in_mib(1, 50), 4, "a frame must fit");
    }
}
