//! Common part of both sides of a connection: hello, framing, liveness, goodbye.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use bytes::Bytes;

use super::closed::{Closed, Violation};
use super::framing::{Announced, Assembler};
use super::limits::{
    ANSWER_PING_AFTER, ANSWER_SILENCE_MAX, CONTROL_LEN_MAX, FRAME_LEN_MAX, GREETING_MAX, HEADER_LEN, IGNORABLE_FROM,
    LANES_MAX, PING_AFTER, PROGRESS_MIN, SILENCE_MAX, TEXT_LEN_MAX,
};
use super::message::{ErrorCode, FrameHead, Hello, Kind, Message};
use crate::format::wire::Reader;
use crate::identity::Identity;

/// Bytes to put on a lane: first `head`, then `body` (empty, but for frames).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// All bytes but the stored ones.
    pub head: Bytes,
    /// Stored bytes, shared with their source.
    pub body: Bytes,
}

/// Plain length of the chunk of a frame that begins so; a violation, if the frame is not expected.
pub(super) type Expected<'r> = &'r dyn Fn(&FrameHead) -> Result<u32, Violation>;

/// Lane of control messages: the whole of a TCP connection, the first stream of a QUIC connection.
pub const CONTROL: u32 = 0;

/// Common state of one end of a connection.
#[derive(Debug)]
pub(super) struct Link {
    ours: Hello,
    /// Identity of the other side, by its certificate.
    peer: Identity,
    theirs: Option<Hello>,
    version: u8,
    lanes: BTreeMap<u32, Assembler>,
    control: VecDeque<Message>,
    pong: Option<u64>,
    /// Total credit: bytes of frame messages that the other side may send.
    pub(super) granted: u64,
    /// Bytes of frame messages whose headers have arrived.
    pub(super) admitted: u64,
    /// Received bytes of incomplete frames.
    partial: u64,
    heard: Duration,
    /// Time when the transport last accepted bytes.
    pub(super) spoken: Duration,
    /// Last progress on what was asked for.
    pub(super) progress: Duration,
    ping: Option<(u64, Duration)>,
    pings: u64,
    rtt: Option<Duration>,
    pub(super) goodbye_sent: bool,
    pub(super) goodbye_heard: bool,
    over: Option<Closed>,
}

impl Link {
    pub(super) fn new(ours: Hello, peer: Identity, now: Duration) -> Self {
        let hello = Message::Hello(ours.clone());
        Self {
            ours,
            peer,
            theirs: None,
            version: 0,
            lanes: BTreeMap::new(),
            control: VecDeque::from([hello]),
            pong: None,
            granted: 0,
            admitted: 0,
            partial: 0,
            heard: now,
            spoken: now,
            progress: now,
            ping: None,
            pings: 0,
            rtt: None,
            goodbye_sent: false,
            goodbye_heard: false,
            over: None,
        }
    }

    pub(super) fn ours(&self) -> &Hello {
        &self.ours
    }

    pub(super) fn peer(&self) -> &Identity {
        &self.peer
    }

    /// The other side's hello, once it has arrived.
    pub(super) fn theirs(&self) -> Option<&Hello> {
        self.theirs.as_ref()
    }

    pub(super) fn version(&self) -> u8 {
        self.version
    }

    pub(super) fn rtt(&self) -> Option<Duration> {
        self.rtt
    }

    pub(super) fn over(&self) -> Option<&Closed> {
        self.over.as_ref()
    }

    /// True if new requests may begin.
    pub(super) fn is_open(&self) -> bool {
        self.theirs.is_some() && !self.goodbye_sent && !self.goodbye_heard && self.over.is_none()
    }

    /// Next message of `lane` that is not for this layer; None, once `input` is used up. Frames are as `expected`.
    pub(super) fn next(
        &mut self,
        lane: u32,
        input: &mut &[u8],
        now: Duration,
        expected: Expected<'_>,
    ) -> Result<Option<Message>, Violation> {
        while !input.is_empty() && self.over.is_none() {
            let Some((byte, body)) = self.assemble(lane, input, now, expected)? else { return Ok(None) };
            let Some(kind) = Kind::from_byte(byte) else { continue };
            let read = Message::read(kind, &body);
            let message = read.map_err(|source| Violation::Malformed { kind: kind.word(), source })?;
            if let Some(message) = self.settle(message, now)? {
                return Ok(Some(message));
            }
        }
        Ok(None)
    }

    /// Assembles one message, checking its header first, and the beginning of a frame before its stored bytes.
    fn assemble(
        &mut self,
        lane: u32,
        input: &mut &[u8],
        now: Duration,
        expected: Expected<'_>,
    ) -> Result<Option<(u8, Bytes)>, Violation> {
        if lane > LANES_MAX {
            return Err(Violation::Limit("too many streams"));
        }
        self.heard = now;
        let greeted = self.theirs.is_some();
        let credit = self.granted - self.admitted;
        let (admitted, assembler) = (&mut self.admitted, self.lanes.entry(lane).or_default());
        let before = input.len();
        let whole = assembler.next(input, |announced, beginning| {
            if let Some(beginning) = beginning {
                return check_frame(announced, beginning, expected);
            }
            let charge = admit(announced, lane, greeted, credit)?;
            *admitted += charge;
            Ok(())
        })?;
        match &whole {
            Some((byte, _)) if *byte == Kind::Frame as u8 => (self.partial, self.progress) = (0, now),
            None if assembler.within() == Some(Kind::Frame as u8) => {
                self.check_progress((before - input.len()) as u64, now);
            }
            _ => {}
        }
        Ok(whole)
    }

    /// Records the arrival of a part of a frame.
    fn check_progress(&mut self, bytes: u64, now: Duration) {
        self.partial += bytes;
        if self.partial >= PROGRESS_MIN {
            (self.partial, self.progress) = (0, now);
        }
    }

    /// True while a frame is being received.
    pub(super) fn is_within_frame(&self) -> bool {
        self.lanes.values().any(|lane| lane.within() == Some(Kind::Frame as u8))
    }

    /// Handles messages about the connection as a whole; returns the others.
    fn settle(&mut self, message: Message, now: Duration) -> Result<Option<Message>, Violation> {
        match message {
            Message::Hello(hello) => self.greet(hello, now).map(|()| self.theirs.clone().map(Message::Hello)),
            Message::Ping { nonce } => {
                // Only one answer is owed at a time: a side that pings without reading gets no queue.
                self.pong = Some(nonce);
                Ok(None)
            }
            Message::Pong { nonce } => {
                if let Some((_, sent)) = self.ping.take_if(|(asked, _)| *asked == nonce) {
                    let measured = now.saturating_sub(sent);
                    self.rtt = Some(self.rtt.map_or(measured, |rtt| rtt.min(measured)));
                }
                Ok(None)
            }
            Message::Goodbye { text } => {
                self.goodbye_heard = true;
                Ok(Some(Message::Goodbye { text }))
            }
            Message::Error { code, text } => {
                self.over = Some(Closed::ByPeer { code, text });
                self.keep_alive();
                Ok(None)
            }
            other => Ok(Some(other)),
        }
    }

    fn greet(&mut self, hello: Hello, now: Duration) -> Result<(), Violation> {
        if self.theirs.is_some() {
            return Err(Violation::Unexpected("second hello"));
        }
        let shared = self.ours.versions.iter().rfind(|&version| hello.versions.contains(version));
        let none = || Violation::Version { ours: self.ours.versions.clone(), theirs: hello.versions.clone() };
        self.version = *shared.ok_or_else(none)?;
        let (site, agent) = Hello::names_of(&self.peer);
        if (&hello.site, &hello.agent) != (&site, &agent) {
            let got = format!("{}/{}", hello.site, hello.agent);
            return Err(Violation::Identity { expected: self.peer.to_string(), got });
        }
        self.theirs = Some(hello);
        self.progress = now;
        self.ping(now);
        Ok(())
    }

    pub(super) fn send(&mut self, message: Message) {
        if self.over.is_none() {
            self.control.push_back(message);
        }
    }

    /// Sends GOODBYE: nothing new begins.
    pub(super) fn goodbye(&mut self, text: &str) {
        if !std::mem::replace(&mut self.goodbye_sent, true) {
            self.send(Message::Goodbye { text: clipped(text) });
        }
    }

    /// True if the control lane has something to send.
    pub(super) fn has_control(&self) -> bool {
        !self.control.is_empty() || self.pong.is_some()
    }

    /// The next control message.
    pub(super) fn transmit(&mut self, now: Duration) -> Option<Transmit> {
        let message = match self.control.front() {
            // Nothing is sent before the hello.
            Some(Message::Hello(_)) => self.control.pop_front(),
            _ => self.pong.take().map(|nonce| Message::Pong { nonce }).or_else(|| self.control.pop_front()),
        };
        message.map(|message| {
            self.spoken = now;
            let (head, body) = message.write();
            Transmit { head, body }
        })
    }

    fn ping(&mut self, now: Duration) {
        self.pings += 1;
        self.ping = Some((self.pings, now));
        self.send(Message::Ping { nonce: self.pings });
    }

    /// Time at which [`Link::expire`] must be called. `awaits_answer` is true if the other side owes one.
    pub(super) fn timeout(&self, awaits_answer: bool) -> Option<Duration> {
        if self.over.is_some() {
            return None;
        }
        if self.theirs.is_none() {
            return Some(self.progress + GREETING_MAX);
        }
        let end = self.silence_end(awaits_answer);
        Some(self.ping_due(awaits_answer).map_or(end, |ping| ping.min(end)))
    }

    /// Time at which a side that stays silent is given up.
    fn silence_end(&self, awaits_answer: bool) -> Duration {
        let end = self.heard + SILENCE_MAX;
        if awaits_answer { end.min(self.awaiting_since() + ANSWER_SILENCE_MAX) } else { end }
    }

    /// Time since which an answer is owed, if one is, and nothing came.
    fn awaiting_since(&self) -> Duration {
        self.heard.max(self.progress)
    }

    /// Time of the next PING: it detects a silent side even if this side only listens.
    fn ping_due(&self, awaits_answer: bool) -> Option<Duration> {
        // One PING in the queue is enough.
        if self.control.iter().any(|message| matches!(message, Message::Ping { .. })) {
            return None;
        }
        let due = self.spoken + PING_AFTER;
        let is_asked = self.ping.is_some();
        Some(if awaits_answer && !is_asked { due.min(self.awaiting_since() + ANSWER_PING_AFTER) } else { due })
    }

    pub(super) fn expire(&mut self, now: Duration, awaits_answer: bool) {
        if self.over.is_some() {
            return;
        }
        if self.theirs.is_none() {
            // `progress` does not change before the hello, so other messages gain no time.
            if now >= self.progress + GREETING_MAX {
                self.close_with_error(ErrorCode::Silent, "no hello");
            }
        } else if now >= self.silence_end(awaits_answer) {
            self.close_with_error(ErrorCode::Silent, "nothing received");
        } else if self.ping_due(awaits_answer).is_some_and(|due| now >= due) {
            self.ping(now);
        }
    }

    /// Ends the connection and reports the reason to the other side.
    pub(super) fn close_with_error(&mut self, code: ErrorCode, text: &str) {
        self.end(Closed::GaveUp { code, text: text.to_owned() }, Some((code, text.to_owned())));
    }

    pub(super) fn close_for_violation(&mut self, violation: Violation) {
        let text = match &violation {
            Violation::Malformed { source, .. } => format!("{violation}: {source}"),
            _ => violation.to_string(),
        };
        let code = violation.code();
        self.end(Closed::Violated(violation), Some((code, text)));
    }

    /// Ends the connection; the first reason stays.
    pub(super) fn end(&mut self, why: Closed, last_words: Option<(ErrorCode, String)>) {
        if self.over.is_some() {
            return;
        }
        self.keep_alive();
        if let Some((code, text)) = last_words {
            self.control.push_back(Message::Error { code, text: clipped(&text) });
        }
        self.over = Some(why);
    }

    /// Drops all pending messages except the hello, which may explain the error.
    fn keep_alive(&mut self) {
        self.control.retain(|message| matches!(message, Message::Hello(_) | Message::Goodbye { .. }));
        self.pong = None;
        self.lanes.clear();
    }
}

/// Admits a message `announced` on `lane`; returns its charge against the credit.
fn admit(announced: Announced, lane: u32, greeted: bool, credit: u64) -> Result<u64, Violation> {
    let len = u64::from(announced.len);
    let kind = Kind::from_byte(announced.kind);
    let word = kind.map_or("message", Kind::word);
    if !greeted && kind != Some(Kind::Hello) {
        return Err(Violation::Unexpected("the first message is not a hello"));
    }
    match kind {
        None if announced.kind < IGNORABLE_FROM => Err(Violation::Unknown(announced.kind)),
        Some(Kind::Frame) => {
            let charge = len + HEADER_LEN as u64;
            let limit = FRAME_LEN_MAX.min(credit.saturating_sub(HEADER_LEN as u64));
            // Even an empty frame takes its header's bytes.
            let fits = len <= limit && charge <= credit;
            if fits { Ok(charge) } else { Err(Violation::TooLong { kind: word, len, limit }) }
        }
        Some(Kind::Missing | Kind::Ended | Kind::Found) | None => control_len(word, len),
        Some(_) if lane != CONTROL => Err(Violation::Unexpected("message on the wrong stream")),
        Some(_) => control_len(word, len),
    }
}

/// Checks the `beginning` of the body of a frame: that it was asked for, and that no more follows than its chunk can take.
fn check_frame(announced: Announced, beginning: &[u8], expected: Expected<'_>) -> Result<(), Violation> {
    let kind = Kind::Frame.word();
    let mut reader = Reader::new(beginning);
    let head = FrameHead::read(&mut reader).map_err(|source| Violation::Malformed { kind, source })?;
    let len = u64::from(announced.len) - (beginning.len() - reader.remaining()) as u64;
    let limit = u64::from(expected(&head)?);
    if len <= limit { Ok(()) } else { Err(Violation::TooLong { kind, len, limit }) }
}

fn control_len(kind: &'static str, len: u64) -> Result<u64, Violation> {
    if len <= CONTROL_LEN_MAX { Ok(0) } else { Err(Violation::TooLong { kind, len, limit: CONTROL_LEN_MAX }) }
}

/// Text clipped to the limit of a message.
pub(super) fn clipped(text: &str) -> String {
    let mut end = text.len().min(TEXT_LEN_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end).unwrap_or_default().replace(char::is_control, " ")
}
