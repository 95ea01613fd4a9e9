//! Another agent: its link, its chunks, its speed.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::future::{Either, select, try_join_all};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::choice::Choice;
use super::rate::BusyRate;
use super::{Dialing, Transports};
use crate::backoff::Backoff;
use crate::error::{Error, ErrorKind, Result};
use crate::id::ManifestId;
use crate::identity::Identity;
use crate::limits::MIB;
use crate::transfer::driver::Client;
use crate::transfer::protocol::Runs;
use crate::transfer::transport::{Dial, Transport};
use crate::transfer::{quic, tcp};

/// Maximum number of requests to one peer at a time: enough that one is served while others wait for chunks from
/// further away.
const REQUESTS_MAX: usize = 6;
/// Pause after a failure: the first, which doubles up to the last.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(30));
/// Minimum lifetime of a link that counts as a success.
const LINK_LIFETIME_MIN: Duration = Duration::from_secs(10);
/// Time that a peer is avoided after it sent wrong data, or proved to be another agent.
const BAN_TIME: Duration = Duration::from_mins(10);
/// Time after which a slow peer is tried again.
const SLOW_RETRY: Duration = Duration::from_secs(30);
/// Time that a peer is not chosen after it was too late, or silent: the first, which doubles up to the last.
const LATE_TIME: (Duration, Duration) = (Duration::from_secs(30), Duration::from_mins(10));
/// Bytes needed to tell whether a peer is slow.
const RATE_SAMPLE_MIN: u64 = 2 * MIB;
/// Rate in bytes a second, and share of the rate of a more distant source; a peer below both is not used. Both are low,
/// because using a peer spares the origin a copy.
const MIN_RATE: f64 = 4.0 * (1 << 20) as f64;
const MIN_RATE_DIVISOR: f64 = 8.0;
/// Time limit to connect to a peer: the memory for its window may never become free.
const CONNECT_MAX: Duration = Duration::from_secs(30);
/// Time after which the other transport is tried as well: long enough for the handshakes of all connections over most links, or for
/// the repetition of a lost packet, which QUIC sends after a second (<https://www.rfc-editor.org/rfc/rfc9002#section-6.2.2>). So short
/// that a job at a cold site, which waits for its peers only for a while ([`super::SETTLING`]), has them.
const HEAD_START: Duration = Duration::from_millis(1500);
/// Age at which a survey of a peer is renewed.
const SURVEY_FRESH: Duration = Duration::from_secs(3);
/// Time limit of a survey, after which the peer is used without it.
const SURVEY_MAX: Duration = Duration::from_secs(5);
/// Time of failures after which one is a warning: agents that start together fail for a moment.
const WARN_AFTER: Duration = Duration::from_mins(1);
/// Interval of checks of a link.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Source of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// Settings of this agent, DNS included.
    Settings,
    /// Objects in a repository.
    Announced,
}

/// Another agent.
#[derive(Debug)]
pub struct Peer {
    address: Arc<str>,
    origin: Origin,
    requests: Arc<Semaphore>,
    tried: watch::Sender<bool>,
    /// Number of calls of [`Peer::mark_untried`].
    asked: AtomicUsize,
    /// Set if the address is that of this agent itself.
    own: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    identity: Option<Identity>,
    link: Option<Link>,
    choice: Choice,
    banned_until: Option<Instant>,
    late: Late,
    error: Option<String>,
    surveys: HashMap<ManifestId, (Instant, Arc<Runs>)>,
    received: u64,
    busy: BusyRate,
    /// Time of the last bytes from it.
    last: Option<Instant>,
}

impl State {
    fn is_banned(&self) -> bool {
        self.banned_until.is_some_and(|until| until > Instant::now())
    }
}

/// Requests in a row that a peer did not answer in time.
#[derive(Clone, Copy, Debug, Default)]
struct Late {
    times: u32,
    until: Option<Instant>,
}

/// Rate below which a peer is not used beside a source of `rate`, both in bytes a second.
#[must_use]
pub(in crate::transfer) fn min_useful_rate(rate: f64) -> f64 {
    (rate / MIN_RATE_DIVISOR).min(MIN_RATE)
}

/// Connections to one peer.
#[derive(Debug)]
struct Link {
    transport: Transport,
    clients: Vec<Arc<Client>>,
    next: AtomicUsize,
    /// Bytes of all windows, at most.
    windows: u64,
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
    /// Round trip time.
    pub rtt: Option<Duration>,
    /// Recent rate of its frames, in bytes a second, over all requests that run at the same time.
    pub rate: Option<f64>,
    /// Bytes of its frames.
    pub received: u64,
    /// Last error.
    pub error: Option<String>,
}

impl Late {
    /// A request that began at `begun` was not answered in time. Those that ran beside an earlier one count once.
    fn add(&mut self, begun: Instant, now: Instant) {
        if self.until.is_some_and(|until| begun < until) {
            return;
        }
        let (first, most) = LATE_TIME;
        self.until = Some(now + (first * 2u32.saturating_pow(self.times)).min(most));
        self.times = self.times.saturating_add(1);
    }

    fn is_over(self, now: Instant) -> bool {
        self.until.is_none_or(|until| until <= now)
    }
}

impl Peer {
    pub(super) fn new(address: Arc<str>, origin: Origin, transports: Transports) -> Self {
        let state = State {
            identity: None,
            link: None,
            choice: Choice::new(transports),
            banned_until: None,
            late: Late::default(),
            error: None,
            surveys: HashMap::new(),
            received: 0,
            busy: BusyRate::default(),
            last: None,
        };
        let (tried, _) = watch::channel(false);
        let (requests, own) = (Arc::new(Semaphore::new(REQUESTS_MAX)), AtomicBool::new(false));
        Self { address, origin, requests, tried, asked: AtomicUsize::new(0), own, state: Mutex::new(state) }
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

    /// True if it may need a link: an announced one only if it has answered.
    pub(super) fn counts(&self) -> bool {
        self.origin == Origin::Settings || self.state().identity.is_some()
    }

    /// True while it is avoided, since it sent wrong data.
    #[must_use]
    pub fn is_banned(&self) -> bool {
        self.state().is_banned()
    }

    /// True for a while after it did not answer a request in time. It is tried again later.
    #[must_use]
    pub fn is_late(&self) -> bool {
        !self.state().late.is_over(Instant::now())
    }

    /// Records that it did not answer in time a request that began at `begun`.
    pub fn was_late(&self, begun: Instant) {
        self.state().late.add(begun, Instant::now());
    }

    /// Records that it answered a request in time.
    pub fn was_in_time(&self) {
        self.state().late = Late::default();
    }

    /// True if it was recently too slow to help a source of `rate` bytes a second. It is tried again later.
    #[must_use]
    pub fn is_slower_than(&self, rate: f64) -> bool {
        let state = self.state();
        let lately = state.last.is_some_and(|last| last.elapsed() < SLOW_RETRY);
        let own = state.link.as_ref().and_then(|link| state.choice.rate(link.transport));
        lately && state.received >= RATE_SAMPLE_MIN && own.is_some_and(|own| own < min_useful_rate(rate))
    }

    /// Open connection to it.
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

    /// Permit for a request to it: there are few at a time.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn acquire(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.requests).acquire_owned().await.ok()
    }

    /// Recently known places of a manifest's list of `chunks` that it holds; none if it does not answer.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn survey(&self, manifest: ManifestId, chunks: u32) -> Arc<Runs> {
        if let Some(held) = self.surveyed(&manifest) {
            return held;
        }
        let asked = timeout(SURVEY_MAX, self.ask_what_it_holds(manifest, chunks)).await;
        let held = Arc::new(asked.ok().and_then(Result::ok).unwrap_or_default());
        let mut state = self.state();
        state.surveys.retain(|_, (when, _)| when.elapsed() < SURVEY_FRESH);
        state.surveys.insert(manifest, (Instant::now(), Arc::clone(&held)));
        held
    }

    /// Result of a recent survey.
    #[must_use]
    pub fn surveyed(&self, manifest: &ManifestId) -> Option<Arc<Runs>> {
        let state = self.state();
        let (when, held) = state.surveys.get(manifest)?;
        (when.elapsed() < SURVEY_FRESH).then(|| Arc::clone(held))
    }

    async fn ask_what_it_holds(&self, manifest: ManifestId, chunks: u32) -> Result<Runs> {
        let link = self.link()?;
        let (mut held, mut from) = (Runs::default(), 0);
        while from < chunks {
            let survey = link.find(manifest, from).await?;
            // A peer may list more than there is.
            for range in survey.held.ranges().iter().filter(|range| range.start < chunks) {
                held.push(range.start..range.end.min(chunks));
            }
            if survey.upto <= from {
                break;
            }
            from = survey.upto;
        }
        Ok(held)
    }

    /// Counts a request for chunks that it has, until the value is dropped.
    pub fn begin_request(&self) -> PeerRequest<'_> {
        self.state().busy.begin(Instant::now());
        PeerRequest { peer: self }
    }

    /// Records that `bytes` of frames came, in `time` if the peer alone took that time.
    pub fn measured(&self, bytes: u64, time: Option<Duration>) {
        let mut state = self.state();
        state.received += bytes;
        let Some(time) = time else { return };
        state.last = Some(Instant::now());
        if let Some(transport) = state.link.as_ref().map(|link| link.transport) {
            state.choice.measured(transport, bytes, time);
        }
    }

    /// Records a failed request.
    pub fn failed(&self, error: &Error) {
        self.state().error = Some(error.to_string());
    }

    /// Records wrong data from it: it is avoided for a while.
    pub fn sent_wrong_data(&self, error: &Error) {
        let mut state = self.state();
        state.error = Some(error.to_string());
        state.banned_until = Some(Instant::now() + BAN_TIME);
        state.link = None;
    }

    /// Waits until the first attempt to connect has ended, or the first after [`Peer::mark_untried`].
    pub(super) async fn tried(&self) {
        // The sender lives as long as the peer.
        let _ = self.tried.subscribe().wait_for(|tried| *tried).await;
    }

    pub(super) fn mark_tried(&self) {
        self.tried.send_replace(true);
    }

    /// Makes [`Peer::tried`] wait for an attempt that begins from now on, or one that succeeds.
    pub(super) fn mark_untried(&self) {
        self.asked.fetch_add(1, Ordering::Relaxed);
        self.tried.send_replace(false);
    }

    pub(super) fn stat(&self) -> PeerStat {
        let state = self.state();
        let link = state.link.as_ref();
        let open = |link: &Link| link.clients.iter().filter(|client| client.closed().is_none()).count();
        // A link without an open connection is down until it is made again.
        let link = link.filter(|link| open(link) > 0);
        PeerStat {
            address: self.address.to_string(),
            identity: state.identity.clone(),
            transport: link.map(|link| link.transport),
            connections: link.map_or(0, open),
            rtt: link.and_then(|link| link.clients.iter().find_map(|client| client.rtt())),
            rate: link.and(state.busy.get()),
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
        let next = state.choice.next(Instant::now());
        state
            .link
            .as_ref()
            .is_some_and(|link| link.transport == next && link.clients.iter().any(|client| client.closed().is_none()))
    }

    /// True if the link has more memory than new ones get, nobody uses it, and other peers have none.
    fn holds_too_much(&self, dialing: &Dialing) -> bool {
        let (connections, window) = dialing.link_shape();
        dialing.is_crowded()
            && self.requests.available_permits() == REQUESTS_MAX
            && self.state().link.as_ref().is_some_and(|link| link.windows > connections as u64 * window)
    }

    /// True if the address is that of this agent itself.
    pub(super) fn is_own(&self) -> bool {
        self.own.load(Ordering::Relaxed)
    }

    async fn connect(&self, dialing: &Dialing) -> Result<()> {
        let _dial = match self.origin {
            // Never closed.
            Origin::Announced if !self.counts() => dialing.dials.acquire().await.ok(),
            Origin::Announced | Origin::Settings => None,
        };
        let (choice, now) = (self.state().choice, Instant::now());
        let (transport, fallback) = (choice.next(now), choice.fallback(now));
        let late = |_| {
            Err(Error::exhausted("connecting to the peer timed out")
                .at(&self.address)
                .help("raise the agent's memory: each connection takes a window of it"))
        };
        let linked = timeout(CONNECT_MAX, self.connect_first(transport, fallback, dialing)).await.unwrap_or_else(late);
        let mut state = self.state();
        if linked.as_ref().is_ok_and(|link| link.transport != transport) {
            state.choice.failed(transport, Instant::now());
        }
        match linked {
            // It sent wrong data over an earlier link, while this one was made.
            Ok(_) if state.is_banned() => Ok(()),
            Ok(link) => {
                if self.origin == Origin::Announced && state.identity.is_none() {
                    dialing.known.fetch_add(1, Ordering::Relaxed);
                }
                state.identity = link.clients.first().map(|client| client.peer().clone());
                state.error = None;
                state.link = Some(link);
                Ok(())
            }
            Err(error) => {
                // The other transport will show whether the transport is the cause.
                if error.kind() == ErrorKind::Unreachable {
                    state.choice.failed(transport, Instant::now());
                }
                state.error = Some(error.to_string());
                Err(error)
            }
        }
    }

    /// One connection.
    async fn dial(
        &self,
        address: SocketAddr,
        transport: Transport,
        (expected, window): (Option<&Identity>, u64),
        dialing: &Dialing,
    ) -> Result<Arc<Client>> {
        let dial = Dial { expected, budget: &dialing.budget, window };
        let client = match transport {
            Transport::Quic => quic::connect(address, &dialing.credentials, &dial).await?,
            Transport::Tcp => tcp::connect(address, &dialing.credentials, &dial).await?,
        };
        if *client.peer() == dialing.credentials.identity() {
            return Err(Error::conflict("the peer is this agent itself").at(&self.address));
        }
        dialing.ledger.opened(client.peer(), transport, Arc::clone(client.wire()));
        Ok(Arc::new(client))
    }

    /// Connects by `transport`. If that does not answer soon, dials by `fallback` as well, and takes the first link, as
    /// <https://www.rfc-editor.org/rfc/rfc8305> does for addresses: many networks drop UDP silently. If the fallback fails, the attempt
    /// ends soon, so that the next one finds an agent that has just started.
    async fn connect_first(
        &self,
        transport: Transport,
        fallback: Option<Transport>,
        dialing: &Dialing,
    ) -> Result<Link> {
        let mut linking = Box::pin(self.connect_by(transport, dialing));
        let Some(other) = fallback else { return linking.await };
        if let Ok(linked) = timeout(HEAD_START, &mut linking).await {
            return linked;
        }
        match select(linking, Box::pin(self.connect_by(other, dialing))).await {
            Either::Left((Ok(link), _)) | Either::Right((Ok(link), _)) => Ok(link),
            Either::Left((Err(_), other)) => other.await,
            Either::Right((Err(error), linking)) => timeout(HEAD_START, linking).await.unwrap_or(Err(error)),
        }
    }

    async fn connect_by(&self, transport: Transport, dialing: &Dialing) -> Result<Link> {
        let unknown = |source| Error::unreachable("cannot resolve the peer's address").at(&self.address).source(source);
        let resolved = tokio::net::lookup_host(&*self.address).await.map_err(unknown)?.next();
        let address = resolved.ok_or_else(|| Error::unreachable("peer's name has no address").at(&self.address))?;
        let (connections, window) = dialing.link_shape();
        // The first tells which agent it is: the others must be of the same one.
        let first = self.dial(address, transport, (None, window), dialing).await?;
        let expected = Some(first.peer());
        let others = (1..connections.max(1)).map(|_| self.dial(address, transport, (expected, window), dialing));
        let others = try_join_all(others).await?;
        let clients: Vec<Arc<Client>> = std::iter::once(Arc::clone(&first)).chain(others).collect();
        tracing::info!(address = %self.address, %transport, connections = clients.len(), "linked to a peer");
        let windows = clients.len() as u64 * window;
        Ok(Link { transport, clients, next: AtomicUsize::new(0), windows })
    }
}

/// A request to a peer that is in progress.
#[derive(Debug)]
pub struct PeerRequest<'p> {
    peer: &'p Peer,
}

impl PeerRequest<'_> {
    /// Counts bytes of frames that came.
    pub fn received(&self, bytes: u64) {
        self.peer.state().busy.came(bytes, Instant::now());
    }
}

impl Drop for PeerRequest<'_> {
    fn drop(&mut self) {
        self.peer.state().busy.end(Instant::now());
    }
}

/// Keeps the link of `peer` up until `over`.
pub(super) async fn keep_connected(peer: Arc<Peer>, dialing: Arc<Dialing>, over: CancellationToken) {
    let mut backoff = BACKOFF;
    let mut linked: Option<Instant> = None;
    let mut failing_since: Option<Instant> = None;
    let mut is_warned = false;
    let kept = async {
        loop {
            if peer.is_fine() && peer.holds_too_much(&dialing) {
                peer.state().link = None;
            }
            if peer.is_banned() || peer.is_fine() {
                sleep(CHECK_INTERVAL).await;
                continue;
            }
            match linked.take().map(|since| since.elapsed()) {
                // The peer may have refused us: in TLS 1.3 the server checks our certificate after the handshake.
                Some(lasted) if lasted < LINK_LIFETIME_MIN => sleep(backoff.pause()).await,
                Some(_) => backoff = BACKOFF,
                None => {}
            }
            let asked = peer.asked.load(Ordering::Relaxed);
            match peer.connect(&dialing).await {
                Ok(()) => {
                    linked = Some(Instant::now());
                    (failing_since, is_warned) = (None, false);
                    peer.mark_tried();
                }
                // Headless services list all agents, this one included.
                Err(error) if error.kind() == ErrorKind::Conflict => {
                    tracing::debug!(address = %peer.address, "not a peer: {error}");
                    peer.own.store(true, Ordering::Relaxed);
                    peer.mark_tried();
                    return std::future::pending::<()>().await;
                }
                Err(error) => {
                    if error.kind() == ErrorKind::Exhausted {
                        dialing.mark_crowded();
                    }
                    let since = *failing_since.get_or_insert_with(Instant::now);
                    if !is_warned && since.elapsed() > WARN_AFTER {
                        is_warned = true;
                        tracing::warn!(address = %peer.address, "failed to connect to the peer for a minute: {error:?}");
                    } else {
                        tracing::info!(address = %peer.address, "cannot connect to the peer: {error:?}");
                    }
                    if peer.asked.load(Ordering::Relaxed) != asked {
                        // The agent may have started since the attempt began.
                        continue;
                    }
                    peer.mark_tried();
                    tokio::select! {
                        () = sleep(backoff.pause()) => {}
                        () = dialing.woken.notified() => backoff = BACKOFF,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_is_late_is_left_out_for_longer_each_time() {
        let (mut late, begun) = (Late::default(), Instant::now());
        let mut now = begun;
        let mut times = Vec::new();
        for _ in 0..7 {
            late.add(now, now);
            // Requests that ran beside it.
            late.add(now, now);
            let until = late.until.unwrap();
            times.push((until - now).as_secs());
            assert!(!late.is_over(now) && late.is_over(until));
            now = until;
        }
        assert_eq!(times, [30, 60, 120, 240, 480, 600, 600]);
    }
}
