//! Admission of connections to a listening agent: bounds the cost of a peer without rights, before it has shown a
//! certificate and after.
//!
//! ```text
//! accept -> PendingConnection (pool.rs: limits in total and per address) -> handshake -> ConnectionPermit (agents.rs: limits per agent)
//! ```

mod agents;
mod bucket;
mod pool;
mod unfinished;

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use self::agents::Agents;
pub use self::agents::ConnectionPermit;
use self::pool::Pool;
use crate::identity::Identity;

/// Limits for connecting peers, as in docs/operations.md.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admission {
    /// Maximum number of connections whose other side has not shown a certificate yet.
    pub handshakes: usize,
    /// Maximum number of these from one address.
    pub handshakes_per_address: usize,
    /// Time limit of a handshake.
    pub handshake: Duration,
    /// Maximum number of connections with a certificate.
    pub links: usize,
    /// Maximum number of these of one agent.
    pub links_per_agent: usize,
    /// Requests a second of one agent, over all of its connections, with a burst of twice as many. A connection counts
    /// as one.
    pub requests_per_second: u32,
}

impl Default for Admission {
    fn default() -> Self {
        Self {
            handshakes: 128,
            handshakes_per_address: 32,
            handshake: Duration::from_secs(5),
            links: 512,
            links_per_agent: 64,
            requests_per_second: 1000,
        }
    }
}

/// Counts of connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GateStat {
    /// Connections that have not shown a certificate yet.
    pub handshakes: usize,
    /// Connections that have.
    pub links: usize,
    /// Connections that were refused or displaced, since the start.
    pub refused: u64,
}

/// Admission control of all listeners of an agent. Clones share it.
#[derive(Clone, Debug)]
pub struct Gate {
    limits: Admission,
    waiting: Arc<Mutex<Waiting>>,
    agents: Arc<Agents>,
}

#[derive(Debug)]
struct Waiting {
    pool: Pool,
    ends: HashMap<u64, CancellationToken>,
    unfinished: unfinished::Counts,
    refused: u64,
}

/// Handshake that has begun; it counts until this is dropped, once no state of the connection is left.
#[derive(Debug)]
pub(super) struct Unfinished {
    from: IpAddr,
    known: bool,
    waiting: Arc<Mutex<Waiting>>,
}

/// Connection before the end of its handshake; it counts until this is dropped.
#[derive(Debug)]
pub(super) struct PendingConnection {
    number: u64,
    gone: CancellationToken,
    waiting: Arc<Mutex<Waiting>>,
}

impl Default for Gate {
    fn default() -> Self {
        Self::new(Admission::default())
    }
}

impl Gate {
    /// Creates a gate with these limits. Needs a runtime.
    #[must_use]
    pub fn new(limits: Admission) -> Self {
        let pool = Pool::new(limits.handshakes, limits.handshakes_per_address, seed());
        let waiting = Arc::new(Mutex::new(Waiting {
            pool,
            ends: HashMap::new(),
            unfinished: unfinished::Counts::default(),
            refused: 0,
        }));
        Self { limits, waiting, agents: Arc::new(Agents::new(limits)) }
    }

    /// Time limit of a handshake.
    pub(super) fn handshake_timeout(&self) -> Duration {
        self.limits.handshake
    }

    /// Admits a connection from `address`. If that makes too many, another one is displaced.
    pub(super) fn accept(&self, address: IpAddr) -> PendingConnection {
        let mut waiting = lock(&self.waiting);
        let (number, gone) = waiting.pool.enter(address);
        if let Some(end) = gone.and_then(|gone| waiting.ends.remove(&gone)) {
            waiting.refused += 1;
            end.cancel();
        }
        let gone = CancellationToken::new();
        waiting.ends.insert(number, gone.clone());
        PendingConnection { number, gone, waiting: Arc::clone(&self.waiting) }
    }

    /// Place for a handshake with `address` that may fail; None if too many did lately.
    pub(super) fn begin(&self, address: IpAddr) -> Option<Unfinished> {
        let mut waiting = lock(&self.waiting);
        let (from, known) = waiting.pool.origin(address);
        let counts = &mut waiting.unfinished;
        if !(if known { counts.enter_known(from) } else { counts.enter(from) }) {
            waiting.refused += 1;
            return None;
        }
        Some(Unfinished { from, known, waiting: Arc::clone(&self.waiting) })
    }

    /// True if so many connections wait that addresses should be validated first.
    pub(super) fn is_busy(&self) -> bool {
        lock(&self.waiting).pool.is_busy()
    }

    /// Admits `agent`, named by its certificate, on the connection of `accept`; else returns the reason to send it.
    pub(super) fn admit(&self, agent: &Identity, pending: &PendingConnection) -> Result<ConnectionPermit, String> {
        let admitted = self.agents.admit(agent);
        let mut waiting = lock(&self.waiting);
        match &admitted {
            Ok(_) => waiting.pool.admitted(pending.number),
            Err(_) => waiting.refused += 1,
        }
        admitted
    }

    /// Current counts.
    #[must_use]
    pub fn stat(&self) -> GateStat {
        let waiting = lock(&self.waiting);
        GateStat { handshakes: waiting.pool.len(), links: self.agents.links(), refused: waiting.refused }
    }
}

impl PendingConnection {
    /// Records that the other side has sent something.
    pub(super) fn sent_data(&self) {
        lock(&self.waiting).pool.sent_data(self.number);
    }

    /// Waits until the connection is displaced.
    ///
    /// # Cancel safety
    /// Safe.
    pub(super) async fn displaced(&self) {
        self.gone.cancelled().await;
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        lock(&self.waiting).unfinished.leave(self.from, self.known);
    }
}

impl Drop for PendingConnection {
    fn drop(&mut self) {
        let mut waiting = lock(&self.waiting);
        waiting.pool.leave(self.number);
        waiting.ends.remove(&self.number);
    }
}

/// Seed that differs in each process.
fn seed() -> u64 {
    RandomState::new().hash_one(0)
}

fn lock(waiting: &Mutex<Waiting>) -> MutexGuard<'_, Waiting> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn who_gives_way_is_told_and_nothing_is_kept_of_who_went() {
        let gate = Gate::new(Admission { handshakes: 8, handshakes_per_address: 4, ..Admission::default() });
        let address: IpAddr = "10.0.0.1".parse().unwrap();
        let pending: Vec<PendingConnection> = (0..10).map(|_| gate.accept(address)).collect();
        assert_eq!(gate.stat(), GateStat { handshakes: 4, links: 0, refused: 6 });
        pending[5].displaced().await;
        assert!(!pending[6].gone.is_cancelled());
        assert_eq!(lock(&gate.waiting).ends.len(), 4);
        drop(pending);
        assert_eq!((gate.stat().handshakes, lock(&gate.waiting).ends.len()), (0, 0));
    }
}
