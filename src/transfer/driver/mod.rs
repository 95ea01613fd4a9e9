//! The protocol's state machines on tokio: the same for every transport.

mod client;
mod lanes;
mod server;

use std::time::Duration;

use tokio::time::Instant;

pub(super) use self::client::Window;
pub use self::client::{Client, Fetching, Received, Reply};
pub(super) use self::lanes::{Feeder, LaneStream, Lanes};
pub(super) use self::server::{ServedConnection, serve};
use super::identity::Credentials;
use super::protocol::Hello;
use super::protocol::limits::{REQUESTS_MAX, VERSIONS};
use crate::identity::Identity;

/// Clock of the protocol: the time since the connection began.
#[derive(Clone, Copy, Debug)]
pub(super) struct ConnectionClock(Instant);

impl ConnectionClock {
    /// Starts the clock of a new connection.
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

/// Hello of an agent: by its certificate, and with the versions of policies that it has seen.
pub(super) fn hello_of(credentials: &Credentials, window: u64) -> Hello {
    let mut hello = hello(&credentials.identity(), window);
    hello.extensions.extend(credentials.versions().announcement_to_send().map(|value| (Hello::POLICY_VERSIONS, value)));
    hello
}

/// Hello of `identity`.
pub(super) fn hello(identity: &Identity, window: u64) -> Hello {
    let (site, agent) = Hello::names_of(identity);
    Hello {
        versions: VERSIONS.to_vec(),
        software: env!("CARGO_PKG_VERSION").to_owned(),
        site,
        agent,
        window,
        requests: if window == 0 { REQUESTS_MAX } else { 0 },
        extensions: if window == 0 { vec![(Hello::ALONE, Vec::new())] } else { Vec::new() },
    }
}
