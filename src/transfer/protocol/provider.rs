//! The side that accepted the connection and serves.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::closed::{Closed, Violation};
use super::limits::{FETCHING_AFTER, READ_AHEAD_MAX, READS_MAX, REQUESTS_MAX, STALL_MAX, WINDOW_MIN};
use super::link::{CONTROL, Link, Transmit};
use super::message::{EndCode, ErrorCode, Found, FrameHead, Hello, Message, Priority, Survey};
use super::serving::{AskedChunk, FrameRequest, Grant, NextAction, OutgoingFrame, Serving, Work};
use crate::id::ManifestId;
use crate::identity::Identity;

/// Demand of a provider on its driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Demand {
    /// Find out what the peer may read through `manifest`: [`Provider::granted`].
    Authorise {
        /// Number of the request.
        request: u64,
        /// Manifest.
        manifest: ManifestId,
    },
    /// Find out which chunks of `manifest` are held, if the peer may read it: [`Provider::surveyed`].
    Survey {
        /// Number of the request.
        request: u64,
        /// Manifest.
        manifest: ManifestId,
        /// First place in its list.
        from: u32,
    },
    /// Abort the work of [`Demand::Authorise`] or [`Demand::Survey`], whose result nobody needs: [`Provider::over`],
    /// once no work is left. A result that is ready already may be delivered instead.
    Abort {
        /// Number of the request.
        request: u64,
    },
    /// Read a stored chunk: [`Provider::supply`], also if it is not held, or nobody needs it any more.
    Read {
        /// Number of the request.
        request: u64,
        /// Ordinal of the chunk in the request.
        ordinal: u32,
        /// The chunk.
        chunk: AskedChunk,
        /// Contents of the request.
        asked: FrameRequest,
        /// Maximum length of its frame.
        bound: u64,
    },
    /// The connection is over. The last demand.
    Closed(Closed),
}

/// The serving end of a connection.
#[derive(Debug)]
pub struct Provider {
    link: Link,
    /// Streams for frames besides the control lane; 0 if everything shares one.
    lanes: u32,
    serving: BTreeMap<u64, Serving>,
    last: u64,
    demands: VecDeque<Demand>,
    /// Maximum charge of each read in progress.
    reads: BTreeMap<(u64, u32), u64>,
    /// Bytes of frames that may have been sent, and those that were.
    credit: u64,
    sent: u64,
    /// Bytes of frames reserved for reads and queued, and the limit of both together.
    reserved: u64,
    queued: u64,
    ahead_max: u64,
    /// Time when the transport last accepted bytes, or when something was first queued for it.
    moved: Duration,
    /// Time of the last message about reads in progress, or of their start.
    reported: Duration,
    /// Bytes received from further away so far, and their number when FETCHING was last due, if it was since reading
    /// began.
    bytes_received: (u64, Option<u64>),
    closed: bool,
}

impl Provider {
    /// Creates the serving end of a connection that begins at `now` with `peer`, named by its certificate. Frames go on
    /// `lanes` streams of their own, or on the control lane if that is 0.
    #[must_use]
    pub fn new(hello: Hello, peer: Identity, lanes: u32, now: Duration) -> Self {
        Self {
            link: Link::new(hello, peer, now),
            lanes,
            serving: BTreeMap::new(),
            last: 0,
            demands: VecDeque::new(),
            reads: BTreeMap::new(),
            credit: 0,
            sent: 0,
            reserved: 0,
            queued: 0,
            ahead_max: READ_AHEAD_MAX,
            moved: now,
            reported: now,
            bytes_received: (0, None),
            closed: false,
        }
    }

    /// Identity of the other side.
    #[must_use]
    pub fn peer(&self) -> &Identity {
        self.link.peer()
    }

    /// The other side's hello, once it has arrived.
    #[must_use]
    pub fn theirs(&self) -> Option<&Hello> {
        self.link.theirs()
    }

    /// Bytes of frames in memory: being read or queued.
    #[must_use]
    pub fn in_memory(&self) -> u64 {
        self.reserved + self.queued
    }

    /// Bytes of memory of open requests.
    #[must_use]
    pub fn requested(&self) -> u64 {
        self.serving.values().map(Serving::memory).sum()
    }

    /// True if granted frames are ready to send.
    #[must_use]
    pub fn has_open_requests(&self) -> bool {
        self.serving.values().any(Serving::is_granted)
    }

    /// Limits the frames read ahead to `bytes` bytes, or one frame, from now on. Frames already read stay.
    pub fn read_ahead(&mut self, bytes: u64) {
        self.ahead_max = bytes.min(READ_AHEAD_MAX);
    }

    /// Handles bytes that arrived on `lane`.
    pub fn handle(&mut self, lane: u32, mut input: &[u8], now: Duration) {
        self.wake(now);
        while self.link.over().is_none() {
            // It grants no credit, so none is even begun.
            let no_frame = |_: &FrameHead| Err(Violation::Unexpected("message is for a requester"));
            let done = match self.link.next(lane, &mut input, now, &no_frame) {
                Ok(Some(message)) => self.take(message),
                Ok(None) => break,
                Err(violation) => Err(violation),
            };
            if let Err(violation) = done {
                self.link.close_for_violation(violation);
            }
        }
    }

    fn take(&mut self, message: Message) -> Result<(), Violation> {
        match message {
            Message::Hello(hello) if (1..WINDOW_MIN).contains(&hello.window) => {
                return Err(Violation::Limit("window is too small"));
            }
            Message::Hello(_) | Message::Goodbye { .. } => {}
            Message::Request(asked) => {
                let (request, priority, manifest) = (asked.request, asked.priority, asked.manifest);
                let asked = FrameRequest { priority, manifest, wanted: Arc::new(asked.wanted) };
                if self.begin(request, priority, Work::Frames { asked, chunks: None })? {
                    self.demands.push_back(Demand::Authorise { request, manifest });
                }
            }
            Message::Find(find) => {
                if self.begin(find.request, Priority::Restore, Work::Survey)? {
                    let (request, manifest, from) = (find.request, find.manifest, find.from);
                    self.demands.push_back(Demand::Survey { request, manifest, from });
                }
            }
            Message::Cancel { request } if request > self.last => {
                return Err(Violation::Unexpected("cancel of an unknown request"));
            }
            Message::Cancel { request } => self.cancel(request),
            Message::Credit { granted } => {
                if granted < self.credit {
                    return Err(Violation::Unexpected("credit decreases"));
                }
                self.credit = granted;
            }
            _ => return Err(Violation::Unexpected("message is for a requester")),
        }
        self.part();
        Ok(())
    }

    /// Accepts a request; false if it was answered already.
    fn begin(&mut self, request: u64, priority: Priority, work: Work) -> Result<bool, Violation> {
        if request <= self.last {
            return Err(Violation::Unexpected("request number does not increase"));
        }
        self.last = request;
        // A request counts until its last message has been sent, which is not before all work for it is over: a peer
        // that does not read cannot pile up answers, and one that cancels cannot pile up work.
        if self.serving.len() >= self.link.ours().requests.min(REQUESTS_MAX) as usize {
            return Err(Violation::Limit("too many open requests"));
        }
        self.serving.insert(request, Serving::new(request, priority, work));
        let open = self.link.is_open();
        if !open {
            self.refuse(request, EndCode::Leaving, "shutting down");
        }
        Ok(open)
    }

    /// Ends `request` early, unless it has ended.
    fn refuse(&mut self, request: u64, code: EndCode, text: &str) {
        if let Some(serving) = self.serving.get_mut(&request).filter(|serving| !serving.has_ended()) {
            self.queued -= serving.refuse(code, &super::link::clipped(text));
            self.demands.retain(|demand| !is_for(demand, request));
        }
    }

    /// Cancels `request`; it counts until all work for it is over.
    fn cancel(&mut self, request: u64) {
        let works = self.serving.get(&request).is_some_and(|serving| serving.is_working() && !serving.has_ended());
        self.refuse(request, EndCode::Cancelled, "");
        if works {
            self.demands.push_back(Demand::Abort { request });
        }
    }

    /// Reports that work for `request` was aborted and nothing of it is left.
    pub fn over(&mut self, request: u64, now: Duration) {
        self.wake(now);
        self.settled(request);
        self.refuse(request, EndCode::Cancelled, "");
    }

    /// Refuses `request`, as its peer is over its limits.
    pub fn busy(&mut self, request: u64, text: &str, now: Duration) {
        self.wake(now);
        self.settled(request);
        self.refuse(request, EndCode::Busy, text);
    }

    /// Refuses the connection, as the other side has too many.
    pub fn refuse_call(&mut self, text: &str) {
        self.link.close_with_error(ErrorCode::Busy, text);
    }

    /// Records that work for `request` is over.
    fn settled(&mut self, request: u64) {
        if let Some(serving) = self.serving.get_mut(&request) {
            serving.set_working(false);
        }
    }

    /// Sets what the peer may read for `request`: None if there is no such manifest, or none that it may read.
    pub fn granted(&mut self, request: u64, grant: Option<Arc<Grant>>, now: Duration) {
        self.wake(now);
        self.settled(request);
        match (self.serving.get_mut(&request), grant) {
            (Some(Serving { what: Work::Frames { asked, chunks }, .. }), Some(found)) => {
                *chunks = Some(found.chunks_of(&asked.wanted));
            }
            _ => self.refuse(request, EndCode::NotHere, ""),
        }
    }

    /// Answers a survey: None if there is no such manifest, or none that the peer may read.
    pub fn surveyed(&mut self, request: u64, survey: Option<Survey>, now: Duration) {
        self.wake(now);
        self.settled(request);
        let Some(survey) = survey else { return self.refuse(request, EndCode::NotHere, "") };
        if let Some(serving) = self.serving.get_mut(&request).filter(|serving| !serving.has_ended()) {
            serving.end(Message::Found(Found { request, survey }));
        }
    }

    /// Reports an error while `request` was served.
    pub fn failed(&mut self, request: u64, text: &str, now: Duration) {
        self.wake(now);
        self.settled(request);
        self.refuse(request, EndCode::Failed, text);
    }

    /// Ends a read: the stored chunk, or None if it is not held. Each demand to read gets one call.
    pub fn supply(&mut self, request: u64, ordinal: u32, supply: Option<OutgoingFrame>, now: Duration) {
        self.wake(now);
        let Some(bound) = self.reads.remove(&(request, ordinal)) else { return };
        self.reserved -= bound;
        if let Some(serving) = self.serving.get_mut(&request) {
            self.queued += serving.supply(ordinal, supply, bound);
            self.forget(request);
        }
    }

    /// Next demand, if any.
    pub fn poll(&mut self) -> Option<Demand> {
        if let Some(why) = self.link.over() {
            let closed = Demand::Closed(why.clone());
            return (!std::mem::replace(&mut self.closed, true)).then_some(closed);
        }
        let demand = self.demands.pop_front().or_else(|| self.next_read());
        if let Some(Demand::Authorise { request, .. } | Demand::Survey { request, .. }) = &demand
            && let Some(serving) = self.serving.get_mut(request)
        {
            serving.set_working(true);
        }
        demand
    }

    /// Read of the most urgent chunk, if there is credit and memory for it. No other goes before it, or it would wait
    /// for ever.
    fn next_read(&mut self) -> Option<Demand> {
        let window = self.link.theirs()?.window;
        let most = window - window / 4;
        let mut urgent: Vec<(Priority, u64)> = self.serving.values().map(|s| (s.priority, s.request)).collect();
        urgent.sort_unstable();
        for (_, request) in urgent {
            let Some(serving) = self.serving.get_mut(&request) else { continue };
            let NextAction::Read { ordinal, chunk, bound } = serving.next(most) else { continue };
            let ahead = self.reserved + self.queued;
            let credit = self.credit.saturating_sub(self.sent + ahead);
            let fits = ahead == 0 || ahead + bound <= self.ahead_max;
            if bound > credit || !fits || self.reads.len() >= READS_MAX {
                return None;
            }
            let Some(asked) = serving.asked().cloned() else { continue };
            serving.begin_read();
            self.reserved += bound;
            self.reads.insert((request, ordinal), bound);
            return Some(Demand::Read { request, ordinal, chunk, asked, bound });
        }
        None
    }

    /// Next bytes to send on `lane`: control messages first, then the most urgent.
    pub fn transmit(&mut self, lane: u32, now: Duration) -> Option<Transmit> {
        let control = if lane == CONTROL { self.link.transmit(now) } else { None };
        let transmit = match control {
            Some(control) => control,
            None => {
                let answer = self.transmit_answer(lane)?;
                self.reported = now;
                answer
            }
        };
        self.wrote(now);
        Some(transmit)
    }

    fn transmit_answer(&mut self, lane: u32) -> Option<Transmit> {
        if self.link.over().is_some() {
            return None;
        }
        let lanes = self.lanes;
        let ready = self.serving.values_mut().filter(|s| s.is_ready() && lane_of(s.request, lanes) == lane);
        let serving = ready.min_by_key(|serving| (serving.priority, serving.request))?;
        let (transmit, charge) = serving.transmit()?;
        let request = serving.request;
        self.sent += charge;
        self.queued -= charge;
        self.forget(request);
        Some(transmit)
    }

    /// Forgets a request that is completely answered.
    fn forget(&mut self, request: u64) {
        if self.serving.get(&request).is_some_and(Serving::is_done) {
            self.serving.remove(&request);
            self.part();
        }
    }

    /// Ends the connection, once one side has said goodbye and nothing is open.
    fn part(&mut self) {
        if self.serving.is_empty() && self.link.goodbye_heard {
            self.link.goodbye("nothing is open");
            self.link.end(Closed::Done, None);
        }
    }

    /// Sends GOODBYE: open requests are served to their end, then the connection is over.
    pub fn goodbye(&mut self, text: &str, now: Duration) {
        self.wake(now);
        self.link.goodbye(text);
        self.part();
    }

    /// Reports that the transport broke, or ended.
    pub fn lost(&mut self, text: &str) {
        self.link.end(Closed::Lost(text.to_owned()), None);
    }

    /// Reports that the transport has accepted bytes: the other side reads.
    pub fn wrote(&mut self, now: Duration) {
        (self.moved, self.link.spoken) = (now, now);
    }

    /// Reports the total `bytes` of chunks received from further away: if it has grown by the next
    /// [`Provider::expire`], FETCHING is sent.
    pub fn bytes_received(&mut self, bytes: u64) {
        self.bytes_received.0 = bytes;
    }

    /// True once the connection is over.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.link.over().is_some()
    }

    /// Time at which [`Provider::expire`] must be called, if nothing happens before.
    #[must_use]
    pub fn timeout(&self) -> Option<Duration> {
        let stall = self.has_output().then_some(self.moved + STALL_MAX);
        let fetching = (!self.reads.is_empty()).then_some(self.reported + FETCHING_AFTER);
        [self.link.timeout(false)?].into_iter().chain(stall).chain(fetching).min()
    }

    /// Handles timeouts at the time `now`.
    pub fn expire(&mut self, now: Duration) {
        if self.has_output() && now >= self.moved + STALL_MAX {
            self.link.close_with_error(ErrorCode::Stalled, "peer does not read the answers");
        }
        if !self.reads.is_empty() && now >= self.reported + FETCHING_AFTER {
            let (received, before) = self.bytes_received;
            if before.is_some_and(|before| received > before) && !self.has_output() {
                self.link.send(Message::Fetching);
            }
            (self.reported, self.bytes_received.1) = (now, Some(received));
        }
        self.link.expire(now, false);
    }

    fn has_output(&self) -> bool {
        self.link.over().is_none() && (self.link.has_control() || self.serving.values().any(Serving::is_ready))
    }

    /// Starts the timers of queued output and of reads.
    fn wake(&mut self, now: Duration) {
        if !self.has_output() {
            self.moved = now;
        }
        if self.reads.is_empty() {
            (self.reported, self.bytes_received.1) = (now, None);
        }
    }
}

/// Lane of all answers to `request`.
fn lane_of(request: u64, lanes: u32) -> u32 {
    if lanes == 0 { CONTROL } else { 1 + u32::try_from(request % u64::from(lanes)).unwrap_or(0) }
}

/// True if `demand` is about `request` and is not a read, which still gets its answer.
fn is_for(demand: &Demand, request: u64) -> bool {
    matches!(demand, Demand::Authorise { request: of, .. } | Demand::Survey { request: of, .. } if *of == request)
}
