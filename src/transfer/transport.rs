//! Common parts of the transports: dialing, windows, errors.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::time::timeout;

use super::identity::{Identity, refused};
use super::log_limit::LogLimit;
use super::protocol::limits::WINDOW_MIN;
use crate::budget::Budget;
use crate::error::{Error, ErrorKind, Result};
use crate::limits::MIB;

/// Time limit of connecting and the handshake together. A listener has its own limit ([`Gate`](super::Gate)).
pub(super) const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
/// Lines about peers that were refused.
pub(super) static REFUSED: LogLimit = LogLimit::new();
/// Time that a new connection waits for the memory of its window: less than the other side waits for its first words.
const MEMORY_WITHIN: Duration = Duration::from_secs(5);
/// Pause of a listener that cannot accept.
pub(super) const BREATH: Duration = Duration::from_millis(100);

/// Bytes a second that one connection is to carry at least, if the line does: 2.5 Gbit/s, so that the four of a link fill 10.
const RATE: u64 = 312_500_000;
/// With less than this a connection waits for whoever verifies what came, however short the line.
pub(crate) const GOOD_WINDOW: u64 = 8 * MIB;

/// Options to connect to a peer.
#[derive(Debug)]
pub struct Dial<'a> {
    /// Expected identity; without one, anybody with a good certificate.
    pub expected: Option<&'a Identity>,
    /// Budget of the window.
    pub budget: &'a Budget,
    /// Bytes of frames that may be on their way or in memory, at most. It takes no more than its delay asks for.
    pub window: u64,
}

impl Dial<'_> {
    /// The largest window.
    pub(super) fn window_max(&self) -> u64 {
        self.window.max(WINDOW_MIN)
    }

    /// The window of a connection that takes `delay` there and back: what is on its way meanwhile, twice, since as much is being taken in.
    pub(super) fn window_for(&self, delay: Duration) -> u64 {
        let on_its_way = delay.as_micros() * u128::from(2 * RATE) / 1_000_000;
        let window = u64::try_from(on_its_way).unwrap_or(u64::MAX).div_ceil(MIB).saturating_mul(MIB);
        window.max(GOOD_WINDOW).min(self.window_max())
    }

    /// The memory for a window.
    ///
    /// # Errors
    /// Exhausted, if others have it.
    ///
    /// # Cancel safety
    /// Safe.
    pub(super) async fn memory_for(&self, window: u64) -> Result<Budget> {
        let late = |_| {
            Err(Error::exhausted("there is no memory for another connection")
                .expected(format!("{} MiB", window / MIB))
                .help("raise the agent's memory, or have fewer [peers] connections"))
        };
        timeout(MEMORY_WITHIN, self.budget.carve(window)).await.unwrap_or_else(late)
    }
}

/// A connection whose handshake was given up for others'.
pub(super) fn displaced() -> Error {
    Error::exhausted("too many connections wait for their handshake: one that waited longest gave way")
}

/// A connection that could not be made.
pub(super) fn broken(error: io::Error) -> Error {
    if error.kind() == io::ErrorKind::TimedOut {
        return Error::unreachable("peer does not answer in time").source(error);
    }
    match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()).cloned() {
        Some(tls) => refused(tls),
        None => Error::unreachable("peer cannot be reached").source(error),
    }
}

/// Why a connection broke, for whoever waited for it.
pub(super) fn words(error: &io::Error) -> String {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = error.get_ref().map(|inner| inner as _);
    while let Some(inner) = cause {
        if let Some(tls) = inner.downcast_ref::<rustls::Error>() {
            return refused(tls.clone()).to_string();
        }
        if let Some(quic) = inner.downcast_ref::<quinn::ConnectionError>() {
            return super::quic::broken(quic.clone()).to_string();
        }
        cause = inner.source();
    }
    match error.kind() {
        io::ErrorKind::UnexpectedEof => "the peer has ended it".to_owned(),
        _ => error.to_string(),
    }
}

/// The error about `address`, on which nobody can listen: `address in use: cannot listen on 127.0.0.1:7071`.
pub(crate) fn not_bound(error: io::Error, address: SocketAddr) -> Error {
    let (kind, lacking, help) = match error.kind() {
        io::ErrorKind::AddrInUse => {
            (ErrorKind::Conflict, "address in use", "another process listens there: choose another port, or end it")
        }
        io::ErrorKind::PermissionDenied => {
            (ErrorKind::Denied, "permission denied", "choose a port above 1023, or run as a user that may listen there")
        }
        io::ErrorKind::AddrNotAvailable => {
            (ErrorKind::Other, "not an address of this machine", "`ip address` lists those of this machine")
        }
        _ => (ErrorKind::Other, "not possible", "choose another address, and a port above 1023"),
    };
    Error::new(kind, format!("{lacking}: cannot listen on {address}")).help(help).source(error)
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
