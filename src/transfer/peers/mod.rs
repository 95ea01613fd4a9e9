//! Other agents: their addresses, connections and speed.
//!
//! A task for each known address keeps a link up (peer.rs), with a growing pause after each failure. The certificate
//! says who is behind an address, never the source of the address.

mod choice;
mod discovery;
mod peer;
mod rate;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, Semaphore};
use tokio::time::{Instant, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};

pub use self::discovery::{Discovery, discover};
use self::peer::Origin;
pub(super) use self::peer::min_useful_rate;
pub use self::peer::{Peer, PeerRequest, PeerStat};
pub(super) use self::rate::Rate;
use super::identity::Credentials;
use super::ledger::Ledger;
use super::protocol::limits::WINDOW_MIN;
use super::transport::GOOD_WINDOW;
use crate::budget::Budget;
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::limits::MIB;

/// Time that the first requester waits for peers that were not tried yet.
const SETTLING: Duration = Duration::from_secs(4);

/// Announced addresses that are dialled at a time; one that does not answer takes half a minute.
const DIALS_MAX: usize = 32;

/// Time for which links that hold much memory give way after another found none.
const CROWDED_FOR: Duration = Duration::from_mins(1);

/// Transports of links.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transports {
    /// The faster of QUIC and TCP, by measurement.
    #[default]
    Auto,
    /// Only QUIC.
    Quic,
    /// Only TCP with TLS.
    Tcp,
}

/// Options of links to peers.
#[derive(Clone, Debug)]
pub struct PeersOptions {
    /// Transports of links.
    pub transports: Transports,
    /// Connections of a link; fewer while there are more than `planned` peers.
    pub connections: usize,
    /// Maximum number of bytes of frames in transit or in memory, for each connection; likewise.
    pub window: u64,
    /// Number of peers for which the memory is enough with these.
    pub planned: usize,
}

impl Default for PeersOptions {
    fn default() -> Self {
        // At 1 Gbit/s with 50 ms and 0.1 % loss, two connections fill half of the line and four three quarters
        // (benches/links).
        Self { transports: Transports::Auto, connections: 4, window: 64 * MIB, planned: 8 }
    }
}

/// Known agents. Dropping it closes all links.
#[derive(Debug)]
pub struct Peers {
    ledger: Arc<Ledger>,
    dialing: Option<Arc<Dialing>>,
    known: Mutex<BTreeMap<Arc<str>, KnownPeer>>,
}

/// Context of every link.
#[derive(Debug)]
struct Dialing {
    credentials: Credentials,
    budget: Budget,
    options: PeersOptions,
    ledger: Arc<Ledger>,
    woken: Notify,
    /// Number of known peers; of the announced ones, those that have answered.
    known: AtomicUsize,
    /// Limits how many announced addresses are dialled at a time: anybody who may write to the store can announce some.
    dials: Semaphore,
    /// Time of the last connection that found no memory.
    crowded: Mutex<Option<Instant>>,
}

impl Dialing {
    /// Connections of a new link, and the largest window of each. If there are more peers than planned, all of them, and half as many
    /// again, can have a link at the same time, as long as a window holds a frame.
    fn link_shape(&self) -> (usize, u64) {
        let PeersOptions { connections, window, planned, .. } = self.options;
        let known = self.known.load(Ordering::Relaxed);
        if known <= planned {
            return (connections, window);
        }
        let each = self.budget.total() / (known + known.div_ceil(2)) as u64;
        let connections = usize::try_from(each / GOOD_WINDOW).unwrap_or(usize::MAX).clamp(1, connections.max(1));
        let fair = each / connections as u64 / MIB * MIB;
        (connections, fair.clamp(WINDOW_MIN, window.max(WINDOW_MIN)))
    }

    /// True if a connection found no memory lately.
    fn is_crowded(&self) -> bool {
        let crowded = self.crowded.lock().unwrap_or_else(PoisonError::into_inner);
        crowded.is_some_and(|since| since.elapsed() < CROWDED_FOR)
    }

    fn mark_crowded(&self) {
        *self.crowded.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }
}

#[derive(Debug)]
struct KnownPeer {
    peer: Arc<Peer>,
    _link_up: DropGuard,
}

/// Peers that may need a link: announced ones only if they have answered.
fn counted(known: &BTreeMap<Arc<str>, KnownPeer>) -> usize {
    known.values().filter(|known| known.peer.counts()).count()
}

impl Peers {
    /// Creates an empty set; links will show `credentials` and take their windows from `budget`.
    #[must_use]
    pub fn new(credentials: Credentials, budget: Budget, options: PeersOptions) -> Arc<Self> {
        let ledger = Arc::<Ledger>::default();
        let (woken, own) = (Notify::new(), Arc::clone(&ledger));
        let (known, crowded) = (AtomicUsize::new(0), Mutex::default());
        let dials = Semaphore::new(DIALS_MAX);
        let dialing =
            Some(Arc::new(Dialing { credentials, budget, options, ledger: own, woken, known, dials, crowded }));
        Arc::new(Self { ledger, dialing, known: Mutex::default() })
    }

    /// Empty set of an agent without a certificate.
    #[must_use]
    pub fn nobody() -> Arc<Self> {
        Arc::new(Self { ledger: Arc::default(), dialing: None, known: Mutex::default() })
    }

    /// Ledger of chunks exchanged with them.
    #[must_use]
    pub fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// Adds `address` (`host:port`), if it is new. Needs a runtime.
    ///
    /// # Errors
    /// Usage, without a certificate or for a malformed address.
    pub fn add(&self, address: &str) -> Result<()> {
        self.add_of(address, Origin::Settings)
    }

    /// As [`Peers::add`]. Few announced addresses are dialled at a time.
    fn add_of(&self, address: &str, origin: Origin) -> Result<()> {
        let Some(dialing) = &self.dialing else {
            return Err(Error::usage("an agent without an identity cannot have peers")
                .help("towline identity issue SITE/AGENT makes one"));
        };
        let port = address.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?)));
        if port.is_none_or(|(host, _)| host.is_empty()) {
            return Err(Error::usage("address of a peer is malformed").expected("HOST:PORT").got(address));
        }
        let address: Arc<str> = address.into();
        let mut known = self.known();
        known.entry(Arc::clone(&address)).or_insert_with(|| {
            let (peer, over) =
                (Arc::new(Peer::new(address, origin, dialing.options.transports)), CancellationToken::new());
            let link_up = over.clone().drop_guard();
            tokio::spawn(peer::keep_connected(Arc::clone(&peer), Arc::clone(dialing), over));
            KnownPeer { peer, _link_up: link_up }
        });
        dialing.known.store(counted(&known), Ordering::Relaxed);
        Ok(())
    }

    /// Removes `address` and closes its link.
    pub fn remove(&self, address: &str) {
        let mut known = self.known();
        known.remove(address);
        if let Some(dialing) = &self.dialing {
            dialing.known.store(counted(&known), Ordering::Relaxed);
        }
    }

    /// Peers with a link that is up. Waits briefly for peers that were just added.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn live(&self) -> Vec<Arc<Peer>> {
        let known: Vec<Arc<Peer>> = self.known().values().map(|known| Arc::clone(&known.peer)).collect();
        let tried = async {
            for peer in &known {
                peer.tried().await;
            }
        };
        // Later calls do not wait for slow peers again.
        if timeout(SETTLING, tried).await.is_err() {
            known.iter().for_each(|peer| peer.mark_tried());
        }
        known.into_iter().filter(|peer| peer.link().is_ok()).collect()
    }

    /// Retries at once all peers that are in a pause: an agent has just connected to this one, and may be one of them.
    /// So agents that start together find each other as soon as the last one is up.
    pub(in crate::transfer) fn wake(&self) {
        if let Some(dialing) = &self.dialing {
            dialing.woken.notify_waiters();
        }
    }

    /// Tries peers without a link again, at once, and waits briefly for them: one may have just been restarted.
    ///
    /// # Cancel safety
    /// Safe: they are tried in any case.
    pub async fn retry(&self) {
        self.known().values().filter(|known| known.peer.link().is_err()).for_each(|known| known.peer.mark_untried());
        self.wake();
        self.live().await;
    }

    /// Peers that are avoided at present, as they sent wrong data.
    #[must_use]
    pub fn banned(&self) -> BTreeSet<Identity> {
        self.identities(Peer::is_banned)
    }

    /// Peers that are left out at present, as they did not answer a request in time, at one address or another.
    #[must_use]
    pub fn late(&self) -> BTreeSet<Identity> {
        self.identities(Peer::is_late)
    }

    /// Peers at `addresses`.
    #[must_use]
    pub fn identities_at(&self, addresses: &[Arc<str>]) -> BTreeSet<Identity> {
        self.identities(|peer| addresses.contains(peer.address()))
    }

    fn identities(&self, are_meant: impl Fn(&Peer) -> bool) -> BTreeSet<Identity> {
        let known = self.known();
        known.values().filter(|known| are_meant(&known.peer)).filter_map(|known| known.peer.identity()).collect()
    }

    /// State of each peer. A name that resolves to all agents of a site lists this one, too, which is no peer.
    #[must_use]
    pub fn list(&self) -> Vec<PeerStat> {
        self.known().values().filter(|known| !known.peer.is_own()).map(|known| known.peer.stat()).collect()
    }

    fn known(&self) -> std::sync::MutexGuard<'_, BTreeMap<Arc<str>, KnownPeer>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
