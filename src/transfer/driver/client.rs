//! The asking side as a task, and the handles through which others use it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc::{self, Receiver, Sender};
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use super::Clockwork;
use super::lanes::{Incoming, Lanes};
use crate::budget::Budget;
use crate::codec::Encoded;
use crate::error::{Error, Result};
use crate::id::ManifestId;
use crate::transfer::ByteCounters;
use crate::transfer::identity::Identity;
use crate::transfer::protocol::{Closed, Event, How, Priority, Requester, Runs, Survey, Wanted};
use crate::transfer::transport::words;

/// Requests that wait to be made, at most.
const WAITING_MAX: usize = 16;

/// A connection to a peer that serves. Dropping it, and all that it is asked for, ends it at once.
pub struct Client {
    commands: Sender<Command>,
    peer: Identity,
    shared: Arc<Shared>,
    task: JoinHandle<Closed>,
}

/// State shared by handles and the driver.
#[derive(Debug)]
struct Shared {
    /// Bytes of frames that nobody has in memory any more.
    released: AtomicU64,
    orders: Mutex<Vec<Order>>,
    wake: Notify,
    closed: OnceLock<Closed>,
    /// Microseconds; 0 before it is known.
    rtt: AtomicU64,
    /// Byte counters of its socket.
    wire: Arc<ByteCounters>,
    /// The window, as it was taken out of the budget.
    _memory: Budget,
}

#[derive(Debug)]
enum Order {
    Cancel(u64),
    Untrue(String),
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
    /// Chunks that will not come, by ordinal.
    Missing(Runs),
    /// Nothing more comes.
    Ended {
        /// Reason.
        how: How,
        /// Ordinals that were not answered.
        left: Runs,
    },
}

/// A stored chunk that has arrived. While it exists its bytes count against the connection's window.
#[derive(Debug)]
pub struct Received {
    /// Ordinal of the chunk in the request.
    pub ordinal: u32,
    /// Bytes of the chunk.
    pub plain_len: u32,
    /// As it is stored.
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

/// A request under way. Dropping it cancels the request.
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
        // A driver that is gone tells nothing: then nothing is known to be answered but what came.
        let reply = self.replies.recv().await;
        self.ended = matches!(reply, Some(Reply::Ended { .. }) | None);
        reply
    }

    /// Says that a frame was not the chunk that it should be: ends the connection.
    pub fn untrue(&self, why: &Error) {
        self.shared.order(Order::Untrue(why.to_string()));
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
        // At most one for each request, and one for each frame that was untrue.
        self.orders.lock().unwrap_or_else(PoisonError::into_inner).push(order);
        self.wake.notify_one();
    }

    fn take_orders(&self) -> Vec<Order> {
        std::mem::take(&mut *self.orders.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Client {
    /// Drives `requester` over `lanes`; `memory` is its window's, `wire` counts what its socket carries.
    pub(in crate::transfer) fn start(
        requester: Requester,
        lanes: Lanes,
        clock: Clockwork,
        (memory, wire): (Budget, Arc<ByteCounters>),
    ) -> Self {
        let (commands, receiver) = mpsc::channel(WAITING_MAX);
        let shared = Arc::new(Shared {
            released: AtomicU64::new(0),
            orders: Mutex::default(),
            wake: Notify::new(),
            closed: OnceLock::new(),
            rtt: AtomicU64::new(0),
            wire,
            _memory: memory,
        });
        let peer = requester.peer().clone();
        let driver = Driver { requester, clock, shared: Arc::clone(&shared), routes: BTreeMap::new() };
        let task = tokio::spawn(driver.run(lanes, receiver));
        Self { commands, peer, shared, task }
    }

    /// Identity of the other side.
    #[must_use]
    pub fn peer(&self) -> &Identity {
        &self.peer
    }

    /// Asks for stored frames.
    ///
    /// # Errors
    /// Usage, for more than a request may name; unreachable, once the connection is over or about to be.
    ///
    /// # Cancel safety
    /// Safe: a request that was made meanwhile is cancelled.
    pub async fn fetch(&self, priority: Priority, manifest: ManifestId, wanted: Wanted) -> Result<Fetching> {
        let (begun, begins) = oneshot::channel();
        self.ask(Command::Fetch { priority, manifest, wanted, begun }).await?;
        begins.await.map_err(|_| self.gone())?
    }

    /// Asks which chunks of `manifest` the peer holds, from place `from` of its list on.
    ///
    /// # Errors
    /// Not found, if there is no such manifest for us; unreachable, once the connection is over or about to be.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn find(&self, manifest: ManifestId, from: u32) -> Result<Survey> {
        let (found, finds) = oneshot::channel();
        self.ask(Command::Find { manifest, from, found }).await?;
        finds.await.map_err(|_| self.gone())?
    }

    async fn ask(&self, command: Command) -> Result<()> {
        self.commands.send(command).await.map_err(|_| self.gone())
    }

    fn gone(&self) -> Error {
        let why = self.shared.closed.get().cloned().unwrap_or(Closed::Done);
        Error::from(why).at(&self.peer)
    }

    /// Why it is over, if it is.
    #[must_use]
    pub fn closed(&self) -> Option<&Closed> {
        self.shared.closed.get()
    }

    /// Byte counters of its socket.
    #[must_use]
    pub fn wire(&self) -> &Arc<ByteCounters> {
        &self.shared.wire
    }

    /// The delay to the peer and back, once it was measured.
    #[must_use]
    pub fn rtt(&self) -> Option<Duration> {
        let micros = self.shared.rtt.load(Ordering::Relaxed);
        (micros > 0).then(|| Duration::from_micros(micros))
    }

    /// Says goodbye and waits for the end: open requests are still served.
    ///
    /// # Cancel safety
    /// Safe: the connection is dropped.
    pub async fn goodbye(mut self) -> Closed {
        self.shared.order(Order::Goodbye);
        self.end().await
    }

    /// Waits until the connection is over; says why.
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
    /// Room for every answer there can be: nobody who is slow to take them holds up the others.
    Replies(Sender<Reply>),
    Survey(Option<oneshot::Sender<Result<Survey>>>),
}

struct Driver {
    requester: Requester,
    clock: Clockwork,
    shared: Arc<Shared>,
    routes: BTreeMap<u64, Route>,
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
                    Some(Incoming::Ended(error)) => self.requester.lost(&words(&error)),
                    None => {}
                },
                Some(command) = commands.recv(), if self.requester.room() > 0 => self.carry_out(command),
                () = wake.wake.notified() => {}
                () = sleep_until(timeout) => self.requester.expire(clock.now()),
            }
        };
        let clock = self.clock;
        lanes.finish(|| self.requester.transmit(clock.now())).await;
        closed
    }

    /// Does what handles have told meanwhile.
    fn obey(&mut self) {
        let released = self.shared.released.swap(0, Ordering::AcqRel);
        if released > 0 {
            self.requester.release(released, self.clock.now());
        }
        for order in self.shared.take_orders() {
            match order {
                Order::Cancel(request) => self.requester.cancel(request),
                Order::Untrue(text) => self.requester.untrue(&text),
                Order::Goodbye => self.requester.goodbye("nothing more is needed"),
            }
        }
    }

    fn carry_out(&mut self, command: Command) {
        let now = self.clock.now();
        match command {
            Command::Fetch { priority, manifest, wanted, begun } => {
                // Each ordinal is answered once, by a frame or among the missing; and there is the end.
                let room = usize::try_from(wanted.len()).unwrap_or(usize::MAX).saturating_add(1);
                let fetching = self.requester.request(priority, manifest, wanted, now).map(|request| {
                    let (sender, replies) = mpsc::channel(room);
                    self.routes.insert(request, Route::Replies(sender));
                    Fetching { request, replies, shared: Arc::clone(&self.shared), ended: false }
                });
                // Dropped with its channel, it cancels itself.
                drop(begun.send(fetching));
            }
            Command::Find { manifest, from, found } => match self.requester.find(manifest, from, now) {
                Ok(request) => drop(self.routes.insert(request, Route::Survey(Some(found)))),
                Err(error) => drop(found.send(Err(error))),
            },
        }
    }

    /// Passes events on; says when the connection is over.
    fn deliver(&mut self) -> Option<Closed> {
        while let Some(event) = self.requester.poll() {
            match event {
                Event::Opened => tracing::debug!(peer = %self.requester.peer(), "connected"),
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
                    // There is only one.
                    let _ = self.shared.closed.set(closed.clone());
                    return Some(closed);
                }
            }
        }
        None
    }

    fn reply(&self, request: u64, reply: Reply) {
        if let Some(Route::Replies(replies)) = self.routes.get(&request) {
            // It has room, or nobody listens any more; then dropping it gives its memory back.
            drop(replies.try_send(reply));
        }
    }

    fn ended(&mut self, request: u64, how: How, left: Runs) {
        match self.routes.remove(&request) {
            Some(Route::Replies(replies)) => drop(replies.try_send(Reply::Ended { how, left })),
            Some(Route::Survey(Some(found))) => {
                let error = match how {
                    How::Refused(code, _) => {
                        Error::not_found(format!("peer does not tell of the manifest: {}", code.word()))
                    }
                    _ => Error::from(self.requester.why_over().cloned().unwrap_or(Closed::Done)),
                };
                drop(found.send(Err(error.at(self.requester.peer()))));
            }
            Some(Route::Survey(None)) | None => {}
        }
    }
}
