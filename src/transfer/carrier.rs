//! What the carriers have in common: how to dial, what to bear, what errors mean.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use super::identity::{Identity, refused};
use crate::budget::Budget;
use crate::error::{Error, ErrorKind};

/// Connecting and the handshake together must be done within this.
pub(super) const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
/// Connections that a listener serves at the same time, at most.
pub(super) const CONNECTIONS_MAX: usize = 256;
/// How long a listener waits when it cannot accept.
pub(super) const BREATH: Duration = Duration::from_millis(100);

/// How to connect to a peer.
#[derive(Debug)]
pub struct Dial<'a> {
    /// Who must answer; anybody with a good certificate, if it is not said.
    pub expected: Option<&'a Identity>,
    /// What the window is taken out of.
    pub budget: &'a Budget,
    /// Bytes of frames that may be on their way or in memory: at least the line's rate times its delay, or it is not filled.
    pub window: u64,
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

/// A port that cannot be listened at.
pub(super) fn not_bound(error: io::Error, address: SocketAddr) -> Error {
    let kind = match error.kind() {
        io::ErrorKind::AddrInUse => ErrorKind::Conflict,
        io::ErrorKind::PermissionDenied => ErrorKind::Denied,
        _ => ErrorKind::Other,
    };
    let cure = match kind {
        ErrorKind::Conflict => "another process listens there: choose another port, or end it",
        _ => "choose an address of this machine, and a port above 1023",
    };
    Error::new(kind, "port cannot be listened at").at(address).cure(cure).source(error)
}
