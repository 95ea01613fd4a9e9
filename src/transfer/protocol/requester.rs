//! The side that opened the connection and requests.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::closed::{Closed, Violation};
use super::limits::{BASES_MAX, CHUNKS_MAX, FETCHING_MAX, REQUESTS_MAX, RUNS_MAX, STALL_MAX, WINDOW_MIN};
use super::link::{Link, Transmit};
use super::message::{
    EndCode, ErrorCode, Find, Found, Frame, FrameHead, Hello, Message, Missing, Priority, Request, Survey, Wanted,
};
use super::open_request::{Answered, OpenRequest, RequestKind};
use super::runs::Runs;
use crate::codec::{Codec, Encoded};
use crate::error::{Error, Result};
use crate::id::ManifestId;
use crate::identity::Identity;

/// Event of a requester for its driver.
#[derive(Clone, Debug)]
pub enum Event {
    /// The other side's hello has arrived: requests may be made.
    Opened,
    /// A chunk has arrived, not verified yet.
    Arrived(Arrived),
    /// Chunks of a request that will not come from this peer.
    Missing {
        /// Number of the request.
        request: u64,
        /// Ordinals of the chunks.
        ordinals: Runs,
    },
    /// Chunks of a manifest that the other side holds.
    Found {
        /// Number of the question.
        request: u64,
        /// The answer.
        survey: Survey,
    },
    /// End of a request. Each request ends exactly once.
    Ended {
        /// Number of the request.
        request: u64,
        /// Result.
        how: RequestOutcome,
        /// Ordinals that were not answered.
        left: Runs,
    },
    /// The other side begins nothing new; open requests are served to their end.
    Leaving(String),
    /// The connection is over. The last event.
    Closed(Closed),
}

/// Stored chunk that has arrived.
#[derive(Clone, Debug)]
pub struct Arrived {
    /// Number of the request.
    pub request: u64,
    /// Ordinal of the chunk in the request.
    pub ordinal: u32,
    /// Bytes of the chunk.
    pub plain_len: u32,
    /// Stored bytes. Whoever decodes them checks that they are the requested chunk.
    pub encoded: Encoded,
    /// Argument of [`Requester::release`] once the bytes are released.
    pub charge: u64,
}

/// Result of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestOutcome {
    /// Every chunk was answered.
    Complete,
    /// The other side ended it early.
    Refused(EndCode, String),
    /// The connection ended first.
    Lost,
}

/// The requesting end of a connection.
#[derive(Debug)]
pub struct Requester {
    link: Link,
    requests: BTreeMap<u64, OpenRequest>,
    last: u64,
    /// Bytes of frames that may be in transit or wait to be released.
    window: u64,
    /// Bytes of frames handed out and not released yet.
    held: u64,
    /// Bytes of released frames.
    released: u64,
    /// Reason for leaving; GOODBYE is sent once nothing is open.
    leaving: Option<String>,
    /// Time since when only FETCHING came, and time of the last one.
    fetching: Option<(Duration, Duration)>,
    events: VecDeque<Event>,
    closed: bool,
}

impl Requester {
    /// Creates the requesting end of a connection that begins at `now` with `peer`, named by its certificate.
    ///
    /// # Errors
    /// Usage, if `hello.window` is less than [`WINDOW_MIN`].
    pub fn new(hello: Hello, peer: Identity, now: Duration) -> Result<Self> {
        let window = hello.window;
        if window < WINDOW_MIN {
            let error = Error::usage("window is too small to request anything");
            return Err(error.expected(format!("at least {WINDOW_MIN}")).got(window));
        }
        let mut link = Link::new(hello, peer, now);
        link.granted = window;
        link.send(Message::Credit { granted: window });
        let (requests, events) = (BTreeMap::new(), VecDeque::new());
        Ok(Self {
            link,
            requests,
            last: 0,
            window,
            held: 0,
            released: 0,
            leaving: None,
            fetching: None,
            events,
            closed: false,
        })
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

    /// True if the other side sends frames without their bases ([`Hello::ALONE`]).
    #[must_use]
    pub fn may_ask_alone(&self) -> bool {
        self.theirs().is_some_and(|hello| hello.extension(Hello::ALONE).is_some())
    }

    /// Common version; 0 before the hello.
    #[must_use]
    pub fn version(&self) -> u8 {
        self.link.version()
    }

    /// Shortest measured round trip time.
    #[must_use]
    pub fn rtt(&self) -> Option<Duration> {
        self.link.rtt()
    }

    /// Bytes of frames in memory: handed out and not released, or arriving.
    #[must_use]
    pub fn in_memory(&self) -> u64 {
        self.link.admitted - self.released
    }

    /// Number of requests that may be made now.
    #[must_use]
    pub fn free_requests(&self) -> usize {
        let most = self.link.theirs().map_or(0, |hello| hello.requests.min(REQUESTS_MAX)) as usize;
        let open = self.link.is_open() && self.leaving.is_none();
        if open { most.saturating_sub(self.requests.len()) } else { 0 }
    }

    /// Requests the stored frames of chunks; returns the request's number.
    ///
    /// # Errors
    /// Usage, for more than a request may name, or lengths of other chunks than it names; unsupported, if it names chunks without bases
    /// and the other side does not know that; unreachable, while no request may be made ([`Requester::free_requests`]).
    pub fn request(
        &mut self,
        priority: Priority,
        manifest: ManifestId,
        mut wanted: Wanted,
        now: Duration,
    ) -> Result<u64> {
        let limits = [
            ("chunks in one request", wanted.chunks.len(), CHUNKS_MAX),
            ("runs in one request", wanted.chunks.ranges().len() as u64, RUNS_MAX as u64),
            ("bases in one request", wanted.bases.len() as u64, BASES_MAX as u64),
            ("runs in one request", wanted.alone.ranges().len() as u64, RUNS_MAX as u64),
        ];
        for (what, got, most) in limits {
            if got > most {
                return Err(Error::usage(format!("too many {what}")).expected(format!("at most {most}")).got(got));
            }
        }
        if !wanted.alone.is_empty() && !self.may_ask_alone() {
            return Err(Error::unsupported("peer does not send chunks without their bases").at(self.peer()));
        }
        let len = u32::try_from(wanted.len()).ok().filter(|&len| len > 0);
        let len = len.ok_or_else(|| Error::usage("request names no chunk"))?;
        if !wanted.lens.is_empty() && wanted.lens.len() != len as usize {
            let error = Error::usage("request does not have one length for each chunk");
            return Err(error.expected(len).got(wanted.lens.len()));
        }
        let what = RequestKind::Frames(Answered::none_of(len, std::mem::take(&mut wanted.lens)));
        let request = self.begin(what, now)?;
        self.link.send(Message::Request(Request { request, priority, manifest, wanted }));
        Ok(request)
    }

    /// Asks which chunks of `manifest` the other side holds, from place `from` of its list on.
    ///
    /// # Errors
    /// Unreachable, while no request may be made.
    pub fn find(&mut self, manifest: ManifestId, from: u32, now: Duration) -> Result<u64> {
        let request = self.begin(RequestKind::Survey { from }, now)?;
        self.link.send(Message::Find(Find { request, manifest, from }));
        Ok(request)
    }

    fn begin(&mut self, what: RequestKind, now: Duration) -> Result<u64> {
        if self.free_requests() == 0 {
            return Err(Error::unreachable("peer takes no more requests now").at(self.peer()));
        }
        if self.requests.is_empty() {
            // An unrequested answer cannot make progress.
            self.link.progress = now;
        }
        self.last += 1;
        self.requests.insert(self.last, OpenRequest { what, cancelled: false });
        Ok(self.last)
    }

    /// Cancels `request`. It ends once the other side has confirmed that.
    pub fn cancel(&mut self, request: u64) {
        if let Some(asked) = self.requests.get_mut(&request).filter(|asked| !asked.cancelled) {
            asked.cancelled = true;
            self.link.send(Message::Cancel { request });
        }
    }

    /// Releases `bytes` of [`Arrived::charge`]: as many more may come.
    pub fn release(&mut self, bytes: u64, now: Duration) {
        let owed = self.owed();
        self.let_go(bytes);
        if !owed {
            // Until now the window was too full for progress.
            self.link.progress = now;
        }
    }

    fn let_go(&mut self, bytes: u64) {
        let bytes = bytes.min(self.held);
        self.held -= bytes;
        self.released += bytes;
        self.grant();
    }

    /// Grants new credit, unless it is too little for a message. Less than a quarter of the window is held back, so a
    /// frame that fits three quarters of it always gets through.
    fn grant(&mut self) {
        let granted = self.released + self.window;
        if granted >= self.link.granted + self.window / 4 {
            self.link.granted = granted;
            self.link.send(Message::Credit { granted });
        }
    }

    /// Begins nothing new: open requests are served to their end, then GOODBYE is sent, and the connection is over.
    pub fn goodbye(&mut self, text: &str) {
        self.leaving.get_or_insert_with(|| text.to_owned());
        self.part();
    }

    /// Reports a frame that did not decode to its chunk: ends the connection.
    pub fn corrupt(&mut self, text: &str) {
        self.link.close_with_error(ErrorCode::Corrupt, text);
    }

    /// Reports that the transport broke, or ended.
    pub fn lost(&mut self, text: &str) {
        self.link.end(Closed::Lost(text.to_owned()), None);
    }

    /// Handles bytes that arrived on `lane`.
    pub fn handle(&mut self, lane: u32, mut input: &[u8], now: Duration) {
        while self.link.over().is_none() {
            let expected = |head: &FrameHead| match self.requests.get(&head.request) {
                Some(OpenRequest { what: RequestKind::Frames(answered), .. }) => answered.expected(head),
                _ => Err(Violation::Unexpected("answer to an unknown request")),
            };
            let done = match self.link.next(lane, &mut input, now, &expected) {
                Ok(Some(message)) => self.take(message, now),
                Ok(None) => break,
                Err(violation) => Err(violation),
            };
            if let Err(violation) = done {
                self.link.close_for_violation(violation);
            }
        }
    }

    fn take(&mut self, message: Message, now: Duration) -> Result<(), Violation> {
        match message {
            Message::Hello(_) => self.events.push_back(Event::Opened),
            Message::Frame(frame) => self.arrived(frame)?,
            Message::Missing(missing) => {
                self.link.progress = now;
                self.missing(missing)?;
            }
            Message::Found(found) => {
                self.link.progress = now;
                self.found(found)?;
            }
            Message::Ended(ended) => {
                self.link.progress = now;
                let asked = self.requests.remove(&ended.request);
                let asked = asked.ok_or(Violation::Unexpected("end of an unknown request"))?;
                self.end(ended.request, &asked, RequestOutcome::Refused(ended.code, ended.text));
            }
            Message::Goodbye { text } => self.events.push_back(Event::Leaving(text)),
            Message::Fetching => self.fetching(now),
            _ => return Err(Violation::Unexpected("message is for a provider")),
        }
        self.part();
        Ok(())
    }

    /// Handles FETCHING: progress, unless there has been no other for very long.
    fn fetching(&mut self, now: Duration) {
        let only = self.fetching.filter(|(_, last)| *last == self.link.progress);
        let since = only.map_or(now, |(since, _)| since);
        if now < since + FETCHING_MAX {
            (self.fetching, self.link.progress) = (Some((since, now)), now);
        }
    }

    fn arrived(&mut self, frame: Frame) -> Result<(), Violation> {
        let request = frame.request;
        let charge = frame.charge();
        let cancelled = self.answer(request, std::iter::once(frame.ordinal))?;
        self.held += charge;
        if cancelled {
            self.let_go(charge);
        } else if let Ok(codec) = Codec::from_byte(frame.codec) {
            if codec.has_base() != frame.base.is_some() {
                return Err(Violation::Unexpected("frame lacks its base, or has one without need"));
            }
            let encoded = Encoded { codec, bytes: frame.stored, base: frame.base };
            let Frame { ordinal, plain_len, .. } = frame;
            self.events.push_back(Event::Arrived(Arrived { request, ordinal, plain_len, encoded, charge }));
        } else {
            // Stored by a newer program: missing for this one.
            self.let_go(charge);
            let ordinals = Runs::of(frame.ordinal..frame.ordinal + 1);
            self.events.push_back(Event::Missing { request, ordinals });
        }
        self.finish(request);
        Ok(())
    }

    fn missing(&mut self, missing: Missing) -> Result<(), Violation> {
        let Missing { request, ordinals } = missing;
        if !self.answer(request, ordinals.iter())? {
            self.events.push_back(Event::Missing { request, ordinals });
        }
        self.finish(request);
        Ok(())
    }

    /// Marks ordinals as answered; returns true if the request was cancelled.
    fn answer(&mut self, request: u64, ordinals: impl Iterator<Item = u32>) -> Result<bool, Violation> {
        match self.requests.get_mut(&request) {
            Some(OpenRequest { what: RequestKind::Frames(answered), cancelled }) => {
                for ordinal in ordinals {
                    answered.insert(ordinal)?;
                }
                Ok(*cancelled)
            }
            _ => Err(Violation::Unexpected("answer to an unknown request")),
        }
    }

    /// Ends `request` if all of it was answered.
    fn finish(&mut self, request: u64) {
        let whole = |asked: &OpenRequest| matches!(&asked.what, RequestKind::Frames(answered) if answered.is_all());
        if self.requests.get(&request).is_some_and(whole)
            && let Some(asked) = self.requests.remove(&request)
        {
            self.end(request, &asked, RequestOutcome::Complete);
        }
    }

    fn found(&mut self, found: Found) -> Result<(), Violation> {
        let Found { request, survey } = found;
        let asked = self.requests.remove(&request).ok_or(Violation::Unexpected("answer to an unknown question"))?;
        let RequestKind::Survey { from } = asked.what else {
            return Err(Violation::Unexpected("answer to an unknown question"));
        };
        let begins = survey.held.ranges().first().map_or(from, |first| first.start);
        if begins < from || (survey.upto <= from && from < survey.chunks) {
            return Err(Violation::Unexpected("answer to another question"));
        }
        if !asked.cancelled {
            self.events.push_back(Event::Found { request, survey });
        }
        self.end(request, &asked, RequestOutcome::Complete);
        Ok(())
    }

    fn end(&mut self, request: u64, asked: &OpenRequest, how: RequestOutcome) {
        let left = match &asked.what {
            RequestKind::Frames(answered) => answered.left(),
            RequestKind::Survey { .. } => Runs::default(),
        };
        self.events.push_back(Event::Ended { request, how, left });
    }

    /// Sends GOODBYE, once one side wants to leave and nothing is open: not before, since frames on other lanes may
    /// come after the other side's goodbye. After goodbyes of both the connection is over.
    fn part(&mut self) {
        if !self.requests.is_empty() {
            return;
        }
        if let Some(text) = &self.leaving {
            self.link.goodbye(text);
        }
        if self.link.goodbye_heard {
            self.link.goodbye("nothing is open");
            self.link.end(Closed::Done, None);
        }
    }

    /// Next event, if any.
    pub fn poll(&mut self) -> Option<Event> {
        if let Some(event) = self.events.pop_front() {
            return Some(event);
        }
        let why = self.link.over()?.clone();
        if let Some((request, asked)) = self.requests.pop_first() {
            self.end(request, &asked, RequestOutcome::Lost);
            return self.events.pop_front();
        }
        (!std::mem::replace(&mut self.closed, true)).then_some(Event::Closed(why))
    }

    /// Next bytes to send, all on the control lane.
    pub fn transmit(&mut self, now: Duration) -> Option<Transmit> {
        self.link.transmit(now)
    }

    /// Reason for the end, if the connection is over.
    #[must_use]
    pub fn close_reason(&self) -> Option<&Closed> {
        self.link.over()
    }

    /// True once the connection is over.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.link.over().is_some()
    }

    /// Time at which [`Requester::expire`] must be called, if nothing happens before.
    #[must_use]
    pub fn timeout(&self) -> Option<Duration> {
        let stall = self.owed().then_some(self.link.progress + STALL_MAX);
        let link = self.link.timeout(self.owed())?;
        Some(stall.map_or(link, |stall| stall.min(link)))
    }

    /// Handles timeouts at the time `now`.
    pub fn expire(&mut self, now: Duration) {
        if self.owed() && now >= self.link.progress + STALL_MAX {
            self.link.close_with_error(ErrorCode::Stalled, "open requests made no progress");
        }
        self.link.expire(now, self.owed());
    }

    /// True if the other side owes an answer; false while so much of the window is in use that a frame may not fit.
    fn owed(&self) -> bool {
        let credit = self.link.granted - self.link.admitted;
        let free = credit >= self.window - self.window / 4 || self.link.is_within_frame();
        self.link.over().is_none() && !self.requests.is_empty() && free
    }
}
