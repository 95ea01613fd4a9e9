//! The requesting side as a task, and the handles that use it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc::{self, Receiver, Sender};
use tokio::sync::{Notify, SetOnce, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use super::ConnectionClock;
use super::lanes::{Incoming, Lanes};
use crate::budget::Budget;
use crate::codec::Encoded;
use crate::error::{Error, Result};
use crate::id::ManifestId;
use crate::identity::Identity;
use crate::policy;
use crate::transfer::ByteCounters;
use crate::transfer::connection_error::describe;
use crate::transfer::policy_versions::PolicyVersions;
use crate::transfer::protocol::{Closed, Event, Hello, Priority, RequestOutcome, Requester, Runs, Survey, Wanted};

/// Maximum number of requests that wait to be sent.
const WAITING_MAX: usize = 16;

/// Connection to a provider. Dropping it and all of its requests closes it at once.
pub struct Client {
    commands: Sender<Command>,
    peer: Identity,
    way: policy::Route,
    shared: Arc<Shared>,
    task: JoinHandle<Closed>,
}

/// Parts of a connection besides its lanes.
pub(in crate::transfer) struct Window {
    /// Memory of the window.
    pub(in crate::transfer) memory: Budget,
    /// Byte counters of the socket.
    pub(in crate::transfer) wire: Arc<ByteCounters>,
    /// Place for the versions of policies that the peer tells.
    pub(in crate::transfer) versions: Option<Arc<PolicyVersions>>,
}

/// State shared by handles and the driver.
#[derive(Debug)]
struct Shared {
    /// Bytes of frames that were released from memory.
    released: AtomicU64,
    orders: Mutex<Vec<Order>>,
    wake: Notify,
    closed: SetOnce<Closed>,
    /// Microseconds; 0 while unknown.
    rtt: AtomicU64,
    /// True if the peer sends frames without their bases; set once its hello has arrived, or the connection is over.
    may_ask_alone: SetOnce<bool>,
    /// Byte counters of its socket.
    wire: Arc<ByteCounters>,
    /// Memory of the window.
    _memory: Budget,
}

#[derive(Debug)]
enum Order {
    Cancel(u64),
    Corrupt(String),
    Goodbye,
}

#[derive(Debug)]
enum Command {
    Fetch { priority: Priority, manifest: ManifestId, wanted: Wanted, begun: oneshot::Sender<Result<Fetching>> },
    Find { manifest: ManifestId, from: u32, found: oneshot::Sender<Result<Survey>> },
}

/// Reply to a request.
#[derive(Debug)]
pub enum Reply {
    /// A stored chunk, not verified yet.
    Frame(Received),
    /// Ordinals of chunks that will not come.
    Missing(Runs),
    /// End of the request.
    Ended {
        /// Reason.
        how: RequestOutcome,
        /// Ordinals that were not answered.
        left: Runs,
    },
}

/// Stored chunk that has arrived. While it exists its bytes count against the connection's window.
#[derive(Debug)]
pub struct Received {
    /// Ordinal of the chunk in the request.
    pub ordinal: u32,
    /// Bytes of the chunk.
    pub plain_len: u32,
    /// Stored form.
    pub encoded: Encoded,
    charge: u64,
    shared: Arc<Shared>,
}

impl Drop for Received {
    fn drop(&mut self) {
        self.shared.released.fetch_add(self.charge, Ordering::AcqRel);
        self.shared.wake.notify_one();
    }
}

/// Open request. Dropping it cancels the request.
#[derive(Debug)]
pub struct Fetching {
    request: u64,
    replies: Receiver<Reply>,
    shared: Arc<Shared>,
    ended: bool,
}

impl Fetching {
    /// The next reply; None after the end.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn next(&mut self) -> Option<Reply> {
        if self.ended {
            return None;
        }
        // The driver may be gone: then only the received replies count as answers.
        let reply = self.replies.recv().await;
        self.ended = matches!(reply, Some(Reply::Ended { .. }) | None);
        reply
    }

    /// Waits until the connection is over: then [`Client::closed`] has the reason of [`RequestOutcome::Lost`].
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn until_closed(&self) {
        self.shared.closed.wait().await;
    }

    /// Reports that a frame did not decode to its chunk: ends the connection.
    pub fn corrupt(&self, why: &Error) {
        self.shared.order(Order::Corrupt(why.to_string()));
    }
}

impl Drop for Fetching {
    fn drop(&mut self) {
        if !self.ended {
            self.shared.order(Order::Cancel(self.request));
        }
    }
}

impl Shared {
    fn order(&self, order: Order) {
        // At most one order for each request, and one for each wrong frame.
        self.orders.lock().unwrap_or_else(PoisonError::into_inner).push(order);
        self.wake.notify_one();
    }

    fn take_orders(&self) -> Vec<Order> {
        std::mem::take(&mut *self.orders.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Client {
    /// Drives `requester` over `lanes`.
    pub(in crate::transfer) fn start(
        requester: Requester,
        lanes: Lanes,
        clock: ConnectionClock,
        window: Window,
    ) -> Self {
        let Window { memory, wire, versions } = window;
        let (commands, receiver) = mpsc::channel(WAITING_MAX);
        let shared = Arc::new(Shared {
            released: AtomicU64::new(0),
            orders: Mutex::default(),
            wake: Notify::new(),
            closed: SetOnce::new(),
            rtt: AtomicU64::new(0),
            may_ask_alone: SetOnce::new(),
            wire,
            _memory: memory,
        });
        let peer = requester.peer().clone();
        let driver = Driver { requester, clock, shared: Arc::clone(&shared), routes: BTreeMap::new(), versions };
        let task = tokio::spawn(driver.run(lanes, receiver));
        Self { commands, peer, way: policy::Route::Unknown, shared, task }
    }

    /// Sets the route of the connection.
    #[must_use]
    pub(in crate::transfer) fn over(mut self, way: policy::Route) -> Self {
        self.way = way;
        self
    }

    /// Route to the other side.
    #[must_use]
    pub fn route(&self) -> policy::Route {
        self.way
    }

    /// Identity of the other side.
    #[must_use]
    pub fn peer(&self) -> &Identity {
        &self.peer
    }

    /// Requests stored frames.
    ///
    /// # Errors
    /// Usage, for more than a request may name; unreachable, once the connection is over or closing.
    ///
    /// # Cancel safety
    /// Safe: a request that was made meanwhile is cancelled.
    pub async fn fetch(&self, priority: Priority, manifest: ManifestId, wanted: Wanted) -> Result<Fetching> {
        let (begun, begins) = oneshot::channel();
        self.ask(Command::Fetch { priority, manifest, wanted, begun }).await?;
        self.answer(begins).await?
    }

    /// Asks which chunks of `manifest` the peer holds, from place `from` of its list on.
    ///
    /// # Errors
    /// Not found, if the peer has no such manifest or denies it; unreachable, once the connection is over or closing.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn find(&self, manifest: ManifestId, from: u32) -> Result<Survey> {
        let (found, finds) = oneshot::channel();
        self.ask(Command::Find { manifest, from, found }).await?;
        self.answer(finds).await?
    }

    /// Waits for the answer to a command. One that is sent while the driver ends stays in the channel as long as this handle: nobody
    /// answers it, and nobody drops it.
    async fn answer<T>(&self, answer: oneshot::Receiver<T>) -> Result<T> {
        tokio::select! {
            biased;
            answer = answer => answer.map_err(|_| self.gone()),
            // All requests that the driver has taken were answered before.
            _ = self.shared.closed.wait() => Err(self.gone()),
        }
    }

    async fn ask(&self, command: Command) -> Result<()> {
        self.commands.send(command).await.map_err(|_| self.gone())
    }

    fn gone(&self) -> Error {
        let why = self.shared.closed.get().cloned().unwrap_or(Closed::Done);
        Error::from(why).at(&self.peer)
    }

    /// Reason of the end, if the connection is over.
    #[must_use]
    pub fn closed(&self) -> Option<&Closed> {
        self.shared.closed.get()
    }

    /// True if the peer sends frames without their bases. Waits until its hello has arrived; false if the connection ends before.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn may_ask_alone(&self) -> bool {
        *self.shared.may_ask_alone.wait().await
    }

    /// Byte counters of its socket.
    #[must_use]
    pub fn wire(&self) -> &Arc<ByteCounters> {
        &self.shared.wire
    }

    /// Round trip time, once it was measured.
    #[must_use]
    pub fn rtt(&self) -> Option<Duration> {
        let micros = self.shared.rtt.load(Ordering::Relaxed);
        (micros > 0).then(|| Duration::from_micros(micros))
    }

    /// Says goodbye and waits for the end; open requests are still served.
    ///
    /// # Cancel safety
    /// Safe: the connection is dropped.
    pub async fn goodbye(mut self) -> Closed {
        self.shared.order(Order::Goodbye);
        self.end().await
    }

    /// Waits until the connection is over; returns the reason.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn end(&mut self) -> Closed {
        (&mut self.task).await.unwrap_or_else(|error| Closed::Lost(error.to_string()))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Client({})", self.peer)
    }
}

/// Receiver of the answers to a request.
enum Route {
    /// Has room for every possible answer, so a slow reader does not hold up others.
    Replies(Sender<Reply>),
    Survey(Option<oneshot::Sender<Result<Survey>>>),
}

struct Driver {
    requester: Requester,
    clock: ConnectionClock,
    shared: Arc<Shared>,
    routes: BTreeMap<u64, Route>,
    versions: Option<Arc<PolicyVersions>>,
}

impl Driver {
    async fn run(mut self, mut lanes: Lanes, mut commands: Receiver<Command>) -> Closed {
        let closed = loop {
            self.obey();
            if let Some(closed) = self.deliver() {
                break closed;
            }
            let clock = self.clock;
            lanes.flush(|_| self.requester.transmit(clock.now()));
            if let Some(rtt) = self.requester.rtt() {
                self.shared.rtt.store(u64::try_from(rtt.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
            }
            let timeout = self.requester.timeout().map_or_else(Instant::now, |at| clock.at(at));
            let wake = Arc::clone(&self.shared);
            tokio::select! {
                incoming = lanes.next() => match incoming {
                    Some(Incoming::Bytes(lane, bytes)) => self.requester.handle(lane, &bytes, clock.now()),
                    Some(Incoming::Ended(error)) => self.requester.lost(&describe(&error)),
                    None => {}
                },
                Some(command) = commands.recv(), if self.requester.free_requests() > 0 => self.execute(command),
                () = wake.wake.notified() => {}
                () = sleep_until(timeout) => self.requester.expire(clock.now()),
            }
        };
        let clock = self.clock;
        lanes.finish(|| self.requester.transmit(clock.now())).await;
        closed
    }

    /// Carries out the orders of handles.
    fn obey(&mut self) {
        let released = self.shared.released.swap(0, Ordering::AcqRel);
        if released > 0 {
            self.requester.release(released, self.clock.now());
        }
        for order in self.shared.take_orders() {
            match order {
                Order::Cancel(request) => self.requester.cancel(request),
                Order::Corrupt(text) => self.requester.corrupt(&text),
                Order::Goodbye => self.requester.goodbye("nothing more is needed"),
            }
        }
    }

    fn execute(&mut self, command: Command) {
        let now = self.clock.now();
        match command {
            Command::Fetch { priority, manifest, wanted, begun } => {
                // Each ordinal is answered once, by a frame or as missing; plus the end.
                let capacity = usize::try_from(wanted.len()).unwrap_or(usize::MAX).saturating_add(1);
                let fetching = self.requester.request(priority, manifest, wanted, now).map(|request| {
                    let (sender, replies) = mpsc::channel(capacity);
                    self.routes.insert(request, Route::Replies(sender));
                    Fetching { request, replies, shared: Arc::clone(&self.shared), ended: false }
                });
                // Cancels itself when dropped with its channel.
                drop(begun.send(fetching));
            }
            Command::Find { manifest, from, found } => match self.requester.find(manifest, from, now) {
                Ok(request) => drop(self.routes.insert(request, Route::Survey(Some(found)))),
                Err(error) => drop(found.send(Err(error))),
            },
        }
    }

    /// Passes events on; returns the reason once the connection is over.
    fn deliver(&mut self) -> Option<Closed> {
        while let Some(event) = self.requester.poll() {
            match event {
                Event::Opened => {
                    tracing::debug!(peer = %self.requester.peer(), "connected");
                    // Set once: it opens once.
                    let _ = self.shared.may_ask_alone.set(self.requester.may_ask_alone());
                    let told = self.requester.theirs().and_then(|hello| hello.extension(Hello::POLICY_VERSIONS));
                    if let Some((versions, told)) = self.versions.as_ref().zip(told) {
                        versions.record_announcement(told, Instant::now());
                    }
                }
                Event::Arrived(arrived) => {
                    let received = Received {
                        ordinal: arrived.ordinal,
                        plain_len: arrived.plain_len,
                        encoded: arrived.encoded,
                        charge: arrived.charge,
                        shared: Arc::clone(&self.shared),
                    };
                    self.reply(arrived.request, Reply::Frame(received));
                }
                Event::Missing { request, ordinals } => self.reply(request, Reply::Missing(ordinals)),
                Event::Found { request, survey } => {
                    if let Some(Route::Survey(found)) = self.routes.get_mut(&request)
                        && let Some(found) = found.take()
                    {
                        drop(found.send(Ok(survey)));
                    }
                }
                Event::Ended { request, how, left } => self.ended(request, how, left),
                Event::Leaving(text) => tracing::debug!(peer = %self.requester.peer(), "peer is leaving: {text}"),
                Event::Closed(closed) => {
                    // Set only once.
                    let _ = self.shared.closed.set(closed.clone());
                    let _ = self.shared.may_ask_alone.set(false);
                    return Some(closed);
                }
            }
        }
        None
    }

    fn reply(&self, request: u64, reply: Reply) {
        if let Some(Route::Replies(replies)) = self.routes.get(&request) {
            // There is room, or the receiver is gone; then dropping the reply releases its memory.
            drop(replies.try_send(reply));
        }
    }

    fn ended(&mut self, request: u64, how: RequestOutcome, left: Runs) {
        match self.routes.remove(&request) {
            Some(Route::Replies(replies)) => drop(replies.try_send(Reply::Ended { how, left })),
            Some(Route::Survey(Some(found))) => {
                let error = match how {
                    RequestOutcome::Refused(code, _) => {
                        Error::not_found(format!("peer does not serve the manifest: {}", code.word()))
                    }
                    _ => Error::from(self.requester.close_reason().cloned().unwrap_or(Closed::Done)),
                };
                drop(found.send(Err(error.at(self.requester.peer()))));
            }
            Some(Route::Survey(None)) | None => {}
        }
    }
}
