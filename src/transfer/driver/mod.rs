//! The protocol's state machines on tokio: the same for every transport.

mod client;
mod lanes;
mod server;

use std::time::Duration;

use tokio::time::Instant;

pub use self::client::{Client, Fetching, Received, Reply};
pub(super) use self::lanes::{Feeder, Lanes};
pub(super) use self::server::{Served, serve};
use super::identity::Identity;
use super::protocol::Hello;
use super::protocol::limits::{REQUESTS_MAX, VERSIONS};

/// The time since a connection began, which is what the protocol counts in.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clockwork(Instant);

impl Clockwork {
    /// A connection begins.
    pub(super) fn start() -> Self {
        Self(Instant::now())
    }

    pub(super) fn now(self) -> Duration {
        self.0.elapsed()
    }

    fn at(self, time: Duration) -> Instant {
        self.0 + time
    }
}

/// Hello of `identity`.
pub(super) fn hello(identity: &Identity, window: u64) -> Hello {
    Hello {
        versions: VERSIONS.to_vec(),
        software: env!("CARGO_PKG_VERSION").to_owned(),
        site: identity.site().to_owned(),
        agent: identity.agent().to_owned(),
        window,
        requests: if window == 0 { REQUESTS_MAX } else { 0 },
        extensions: Vec::new(),
    }
}
