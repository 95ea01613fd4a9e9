//! One other agent: its link, what it holds, how fast it is.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::transport::{Choice, Transport};
use super::{Dialing, Transports};
use crate::error::{Error, ErrorKind, Result};
use crate::id::ManifestId;
use crate::limits::MIB;
use crate::transfer::driver::Client;
use crate::transfer::identity::Identity;
use crate::transfer::protocol::Runs;
use crate::transfer::transport::Dial;
use crate::transfer::{quic, tcp};

/// Requests to one peer at the same time: enough for one to be served while others wait for what is further away.
const REQUESTS_MAX: usize = 6;
/// The first pause after a failure; it doubles up to the last.
const PAUSE: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// Time that a peer is avoided after it lied, or proved to be somebody else.
const SHUNNED: Duration = Duration::from_mins(10);
/// Time after which a slow peer is tried again.
const SLOW: Duration = Duration::from_secs(30);
/// Bytes by which it is known whether a peer is slow.
const KNOWN: u64 = 2 * MIB;
/// A peer is of no use if it gives fewer bytes a second than this for a request, and less than such a share of what going further
/// gives. Not for less: that it is asked spares the origin a copy.
const CRAWL: f64 = 4.0 * (1 << 20) as f64;
const CRAWL_SHARE: f64 = 8.0;
/// Connecting to a peer takes no longer: the memory for its window may never be free.
const CONNECT_MAX: Duration = Duration::from_secs(30);
/// Age at which a survey of a peer is renewed.
const SURVEY_FRESH: Duration = Duration::from_secs(3);
/// A survey that takes longer is done without.
const SURVEY_MAX: Duration = Duration::from_secs(5);
/// Interval of checks of a link.
const LOOK: Duration = Duration::from_millis(100);

/// Another agent.
#[derive(Debug)]
pub struct Peer {
    address: Arc<str>,
    requests: Arc<Semaphore>,
    tried: watch::Sender<bool>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    identity: Option<Identity>,
    link: Option<Link>,
    choice: Choice,
    shunned: Option<Instant>,
    error: Option<String>,
    surveys: HashMap<ManifestId, (Instant, Arc<Runs>)>,
    received: u64,
    /// When something came from it last.
    last: Option<Instant>,
}

/// The rate below which a peer is of no use beside something that gives `rate`, both in bytes a second.
#[must_use]
pub(in crate::transfer) fn crawl(rate: f64) -> f64 {
    (rate / CRAWL_SHARE).min(CRAWL)
}

/// Connections to one peer.
#[derive(Debug)]
struct Link {
    transport: Transport,
    clients: Vec<Arc<Client>>,
    next: AtomicUsize,
}

/// State of a peer.
#[derive(Clone, Debug, PartialEq)]
pub struct PeerStat {
    /// Configured or announced address.
    pub address: String,
    /// Identity, once it has shown its certificate.
    pub identity: Option<Identity>,
    /// Transport of its link, if that is up.
    pub transport: Option<Transport>,
    /// Connections of the link.
    pub connections: usize,
    /// The delay there and back.
    pub rtt: Option<Duration>,
    /// Bytes a second that came from it lately.
    pub rate: Option<f64>,
    /// Bytes of frames that came from it.
    pub received: u64,
    /// Last error.
    pub error: Option<String>,
}

impl Peer {
    pub(super) fn new(address: Arc<str>, transports: Transports) -> Self {
        let state = State {
            identity: None,
            link: None,
            choice: Choice::new(transports),
            shunned: None,
            error: None,
            surveys: HashMap::new(),
            received: 0,
            last: None,
        };
        let (tried, _) = watch::channel(false);
        Self { address, requests: Arc::new(Semaphore::new(REQUESTS_MAX)), tried, state: Mutex::new(state) }
    }

    /// Configured or announced address.
    #[must_use]
    pub fn address(&self) -> &Arc<str> {
        &self.address
    }

    /// Identity, once it has shown its certificate.
    #[must_use]
    pub fn identity(&self) -> Option<Identity> {
        self.state().identity.clone()
    }

    /// True if it is at the site of `own`.
    #[must_use]
    pub fn is_near(&self, own: &Identity) -> bool {
        self.state().identity.as_ref().is_some_and(|identity| identity.site() == own.site())
    }

    /// True while it is avoided, since it sent wrong data.
    #[must_use]
    pub fn is_shunned(&self) -> bool {
        self.state().shunned.is_some_and(|until| until > Instant::now())
    }

    /// True if it was recently too slow to help a source of `rate` bytes a second. It is tried again later.
    #[must_use]
    pub fn is_slower_than(&self, rate: f64) -> bool {
        let state = self.state();
        let lately = state.last.is_some_and(|last| last.elapsed() < SLOW);
        let own = state.link.as_ref().and_then(|link| state.choice.rate(link.transport));
        lately && state.received >= KNOWN && own.is_some_and(|own| own < crawl(rate))
    }

    /// One of its connections.
    ///
    /// # Errors
    /// Unreachable, if there is none.
    pub fn link(&self) -> Result<Arc<Client>> {
        let state = self.state();
        let client = state.link.as_ref().and_then(|link| {
            let first = link.next.fetch_add(1, Ordering::Relaxed);
            let clients = link.clients.iter().cycle().skip(first % link.clients.len().max(1)).take(link.clients.len());
            clients.into_iter().find(|client| client.closed().is_none()).cloned()
        });
        client.ok_or_else(|| Error::unreachable("peer has no link").at(&self.address))
    }

    /// Leave to ask it for something: there are few at a time.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn acquire(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.requests).acquire_owned().await.ok()
    }

    /// Places of a manifest's list of `chunks` that it holds, as of a moment ago; none if it does not say.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn survey(&self, manifest: ManifestId, chunks: u32) -> Arc<Runs> {
        let kept = self.state().surveys.get(&manifest).filter(|(when, _)| when.elapsed() < SURVEY_FRESH).cloned();
        if let Some((_, held)) = kept {
            return held;
        }
        let asked = timeout(SURVEY_MAX, self.ask_what_it_holds(manifest, chunks)).await;
        let held = Arc::new(asked.ok().and_then(Result::ok).unwrap_or_default());
        let mut state = self.state();
        state.surveys.retain(|_, (when, _)| when.elapsed() < SURVEY_FRESH);
        state.surveys.insert(manifest, (Instant::now(), Arc::clone(&held)));
        held
    }

    async fn ask_what_it_holds(&self, manifest: ManifestId, chunks: u32) -> Result<Runs> {
        let link = self.link()?;
        let (mut held, mut from) = (Runs::default(), 0);
        while from < chunks {
            let survey = link.find(manifest, from).await?;
            survey.held.ranges().iter().for_each(|range| held.push(range.clone()));
            if survey.upto <= from {
                break;
            }
            from = survey.upto;
        }
        Ok(held)
    }

    /// `bytes` of frames came, in `time` if that was the peer's own doing.
    pub fn measured(&self, bytes: u64, time: Option<Duration>) {
        let mut state = self.state();
        state.received += bytes;
        let Some(time) = time else { return };
        state.last = Some(Instant::now());
        if let Some(transport) = state.link.as_ref().map(|link| link.transport) {
            state.choice.measured(transport, bytes, time);
        }
    }

    /// It did not give what it was asked for.
    pub fn failed(&self, error: &Error) {
        self.state().error = Some(error.to_string());
    }

    /// It gave something that was not what it was said to be: it is not asked again for long.
    pub fn lied(&self, error: &Error) {
        let mut state = self.state();
        state.error = Some(error.to_string());
        state.shunned = Some(Instant::now() + SHUNNED);
        state.link = None;
    }

    /// Waits until it was tried once.
    pub(super) async fn tried(&self) {
        // The sender lives as long as the peer.
        let _ = self.tried.subscribe().wait_for(|tried| *tried).await;
    }

    pub(super) fn give_up_waiting(&self) {
        self.tried.send_replace(true);
    }

    pub(super) fn stat(&self) -> PeerStat {
        let state = self.state();
        let link = state.link.as_ref();
        let open = |link: &Link| link.clients.iter().filter(|client| client.closed().is_none()).count();
        // A link none of whose connections is open is down until it is made again.
        let link = link.filter(|link| open(link) > 0);
        PeerStat {
            address: self.address.to_string(),
            identity: state.identity.clone(),
            transport: link.map(|link| link.transport),
            connections: link.map_or(0, open),
            rtt: link.and_then(|link| link.clients.iter().find_map(|client| client.rtt())),
            rate: link.and_then(|link| state.choice.rate(link.transport)),
            received: state.received,
            error: state.error.clone(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if the link is up, over the right transport.
    fn is_fine(&self) -> bool {
        let state = self.state();
        let next = state.choice.next();
        state
            .link
            .as_ref()
            .is_some_and(|link| link.transport == next && link.clients.iter().any(|client| client.closed().is_none()))
    }

    async fn connect(&self, dialing: &Dialing) -> Result<()> {
        let transport = self.state().choice.next();
        let late = |_| {
            Err(Error::exhausted("link to a peer was not made in time")
                .at(&self.address)
                .help("raise the agent's memory: each connection takes a window of it"))
        };
        let linked = timeout(CONNECT_MAX, self.connect_by(transport, dialing)).await.unwrap_or_else(late);
        let mut state = self.state();
        match linked {
            Ok(link) => {
                state.identity = link.clients.first().map(|client| client.peer().clone());
                state.error = None;
                state.link = Some(link);
                Ok(())
            }
            Err(error) => {
                // The other transport says whether it is the transport.
                if error.kind() == ErrorKind::Unreachable {
                    state.choice.failed(transport);
                }
                state.error = Some(error.to_string());
                Err(error)
            }
        }
    }

    async fn connect_by(&self, transport: Transport, dialing: &Dialing) -> Result<Link> {
        let unknown = |source| Error::unreachable("peer's address is not known").at(&self.address).source(source);
        let resolved = tokio::net::lookup_host(&*self.address).await.map_err(unknown)?.next();
        let address = resolved.ok_or_else(|| Error::unreachable("peer's name has no address").at(&self.address))?;
        let mut clients: Vec<Arc<Client>> = Vec::new();
        for _ in 0..dialing.options.connections.max(1) {
            let first = clients.first().map(|client| client.peer().clone());
            let dial = Dial { expected: first.as_ref(), budget: &dialing.budget, window: dialing.options.window };
            let client = match transport {
                Transport::Quic => quic::connect(address, &dialing.credentials, &dial).await?,
                Transport::Tcp => tcp::connect(address, &dialing.credentials, &dial).await?,
            };
            if *client.peer() == dialing.credentials.identity() {
                return Err(Error::conflict("the peer is this agent itself").at(&self.address));
            }
            dialing.ledger.opened(client.peer(), transport, Arc::clone(client.wire()));
            clients.push(Arc::new(client));
        }
        tracing::info!(address = %self.address, %transport, connections = clients.len(), "linked to a peer");
        Ok(Link { transport, clients, next: AtomicUsize::new(0) })
    }
}

/// Keeps the link of `peer` up until `over`.
pub(super) async fn keep_up(peer: Arc<Peer>, dialing: Arc<Dialing>, over: CancellationToken) {
    let mut pause = PAUSE;
    let kept = async {
        loop {
            if peer.is_shunned() || peer.is_fine() {
                sleep(LOOK).await;
                continue;
            }
            match peer.connect(&dialing).await {
                Ok(()) => {
                    pause = PAUSE;
                    peer.give_up_waiting();
                }
                // Headless services name everybody.
                Err(error) if error.kind() == ErrorKind::Conflict => {
                    tracing::debug!(address = %peer.address, "not a peer: {error}");
                    peer.give_up_waiting();
                    return std::future::pending::<()>().await;
                }
                Err(error) => {
                    tracing::info!(address = %peer.address, "no link to a peer: {error:?}");
                    peer.give_up_waiting();
                    tokio::select! {
                        () = sleep(pause) => pause = (pause * 2).min(PAUSE_MAX),
                        () = dialing.woken.notified() => pause = PAUSE,
                    }
                }
            }
        }
    };
    tokio::select! {
        () = kept => {}
        () = over.cancelled() => {}
    }
    peer.state().link = None;
}
