//! Request that a provider serves: what is left to read, and what is ready to send.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use super::limits::{FRAME_HEAD_MAX, HEADER_LEN, RUNS_MAX};
use super::link::Transmit;
use super::message::{EndCode, Ended, Frame, Message, Missing, Priority, Wanted};
use super::runs::Runs;
use crate::codec::Encoded;
use crate::format::ChunkList;
use crate::id::{ChunkId, ManifestId};

/// Chunks that a peer may read through one manifest.
#[derive(Clone, Debug, Default)]
pub struct Grant {
    /// The manifest's own list.
    pub chunks: Arc<ChunkList>,
    /// Bases of the stored frames of these, bases of bases included, with plain lengths; sorted by id.
    pub bases: Vec<(ChunkId, u32)>,
}

/// Chunk that a request asks for, with its plain length; none if the grant does not cover it.
pub(super) type GrantedChunk = Option<(ChunkId, u32)>;

impl Grant {
    /// Chunks of `wanted`, in its order. A request keeps these, not the list of its whole tree: how long it is open is up to its peer.
    pub(super) fn chunks_of(&self, wanted: &Wanted) -> Vec<GrantedChunk> {
        (0..wanted.len()).map(|ordinal| self.find(wanted, ordinal)).collect()
    }

    fn find(&self, wanted: &Wanted, ordinal: u64) -> Option<(ChunkId, u32)> {
        if let Some(base) = wanted.base(ordinal) {
            let at = self.bases.binary_search_by_key(&base, |(id, _)| *id).ok()?;
            return self.bases.get(at).copied();
        }
        let place = wanted.chunks.get(ordinal)? as usize;
        Some((*self.chunks.ids.get(place)?, *self.chunks.lens.get(place)?))
    }
}

/// Contents of a request, for the reader of its chunks: it shows which ones are wanted next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrameRequest {
    /// Priority.
    pub priority: Priority,
    /// Manifest of the chunks.
    pub manifest: ManifestId,
    /// Chunks.
    pub wanted: Arc<Wanted>,
}

/// One chunk of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AskedChunk {
    /// Id.
    pub id: ChunkId,
    /// True if its frame must have no base.
    pub alone: bool,
}

/// Stored chunk to send to a peer.
#[derive(Clone, Debug)]
pub struct OutgoingFrame {
    /// Stored form.
    pub encoded: Encoded,
    /// Bytes of the chunk.
    pub plain_len: u32,
}

/// Request that is being served.
#[derive(Debug)]
pub(super) struct Serving {
    pub(super) request: u64,
    pub(super) priority: Priority,
    pub(super) what: Work,
    /// Messages ready to send, in order.
    out: VecDeque<Message>,
    /// Ordinals to report as missing.
    missing: BTreeSet<u32>,
    /// Frames being read.
    reading: usize,
    /// Next ordinal to examine.
    next: u64,
    /// True once no more answers are made.
    ended: bool,
    /// True while rights or chunks are looked up: until then nothing is sent, and the request counts.
    working: bool,
    /// Bytes of memory of its lists, until it has ended.
    memory: u64,
}

#[derive(Debug)]
pub(super) enum Work {
    /// Frames, once a grant says which.
    Frames { asked: FrameRequest, chunks: Option<Vec<GrantedChunk>> },
    /// A survey.
    Survey,
    /// Nothing: it has ended early, or was answered.
    Nothing,
}

/// Next action for a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NextAction {
    /// Read this chunk; its frame is charged with at most `bound` bytes.
    Read { ordinal: u32, chunk: AskedChunk, bound: u64 },
    /// Nothing for now.
    Nothing,
}

impl Serving {
    pub(super) fn new(request: u64, priority: Priority, what: Work) -> Self {
        let memory = match &what {
            Work::Frames { asked, .. } => asked.wanted.memory() + asked.wanted.len() * size_of::<GrantedChunk>() as u64,
            Work::Survey | Work::Nothing => 0,
        };
        let (out, missing) = (VecDeque::new(), BTreeSet::new());
        Self { request, priority, what, out, missing, reading: 0, next: 0, ended: false, working: false, memory }
    }

    /// Bytes of memory of its lists.
    pub(super) fn memory(&self) -> u64 {
        self.memory
    }

    /// True if it requests frames and a grant was found.
    pub(super) fn is_granted(&self) -> bool {
        matches!(&self.what, Work::Frames { chunks: Some(_), .. })
    }

    /// Next read. Notes chunks that will not be sent, among them those larger than `most` bytes.
    pub(super) fn next(&mut self, most: u64) -> NextAction {
        let Work::Frames { asked, chunks: Some(chunks) } = &self.what else { return NextAction::Nothing };
        let wanted = &asked.wanted;
        // Pending reports of missing chunks are bounded, too.
        while !self.ended && self.next < wanted.len() && self.missing.len() < RUNS_MAX {
            let ordinal = u32::try_from(self.next).unwrap_or(u32::MAX);
            let found = chunks.get(ordinal as usize).copied().flatten();
            match found.map(|(id, plain_len)| (id, bound(plain_len))) {
                Some((id, bound)) if bound <= most => {
                    let chunk = AskedChunk { id, alone: wanted.alone.contains(ordinal) };
                    return NextAction::Read { ordinal, chunk, bound };
                }
                _ => self.missing.insert(ordinal),
            };
            self.next += 1;
        }
        NextAction::Nothing
    }

    /// Contents, unless it is a survey.
    pub(super) fn asked(&self) -> Option<&FrameRequest> {
        match &self.what {
            Work::Frames { asked, .. } => Some(asked),
            Work::Survey | Work::Nothing => None,
        }
    }

    /// Records that the chunk of [`Serving::next`] is being read.
    pub(super) fn begin_read(&mut self) {
        self.next += 1;
        self.reading += 1;
    }

    /// Ends a read; returns the bytes queued because of it.
    pub(super) fn supply(&mut self, ordinal: u32, supply: Option<OutgoingFrame>, bound: u64) -> u64 {
        self.reading -= 1;
        if self.ended {
            return 0;
        }
        let frame = supply.map(|OutgoingFrame { encoded: Encoded { codec, bytes, base }, plain_len }| Frame {
            request: self.request,
            ordinal,
            codec: codec.byte(),
            plain_len,
            base,
            stored: bytes,
        });
        // A frame longer than its chunk would be rejected, and would exceed the space reserved for it.
        match frame.filter(|frame| frame.stored.len() <= frame.plain_len as usize && frame.charge() <= bound) {
            Some(frame) => {
                let charge = frame.charge();
                self.out.push_back(Message::Frame(frame));
                charge
            }
            None => {
                self.missing.insert(ordinal);
                0
            }
        }
    }

    /// Answers a survey, or ends the request early; drops queued frames and returns their bytes.
    pub(super) fn end(&mut self, last: Message) -> u64 {
        let dropped = self.out.iter().map(charge).sum();
        self.out.clear();
        self.missing.clear();
        self.ended = true;
        (self.what, self.memory) = (Work::Nothing, 0);
        self.out.push_back(last);
        dropped
    }

    pub(super) fn refuse(&mut self, code: EndCode, text: &str) -> u64 {
        self.end(Message::Ended(Ended { request: self.request, code, text: text.to_owned() }))
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }

    /// Records that work for it begins or is over.
    pub(super) fn set_working(&mut self, working: bool) {
        self.working = working;
    }

    /// True if work for it is in progress.
    pub(super) fn is_working(&self) -> bool {
        self.working
    }

    /// True if anything is ready to send.
    pub(super) fn is_ready(&self) -> bool {
        !self.working && (!self.out.is_empty() || !self.missing.is_empty())
    }

    /// Next message to send, and its charge against the credit.
    pub(super) fn transmit(&mut self) -> Option<(Transmit, u64)> {
        let message = self.out.pop_front().or_else(|| self.queue_missing())?;
        let (head, body) = message.write();
        Some((Transmit { head, body }, charge(&message)))
    }

    fn queue_missing(&mut self) -> Option<Message> {
        let ordinals: Runs = self.missing.iter().copied().take(RUNS_MAX).collect();
        self.missing.retain(|ordinal| ordinals.ranges().last().is_some_and(|last| *ordinal >= last.end));
        (!ordinals.is_empty()).then_some(Message::Missing(Missing { request: self.request, ordinals }))
    }

    /// True if everything was answered.
    pub(super) fn is_done(&self) -> bool {
        let all = match &self.what {
            Work::Frames { asked, chunks } => chunks.is_some() && self.next >= asked.wanted.len(),
            Work::Survey | Work::Nothing => false,
        };
        !self.working && !self.is_ready() && (self.ended || (all && self.reading == 0))
    }
}

/// Maximum charge of the frame of a chunk.
fn bound(plain_len: u32) -> u64 {
    HEADER_LEN as u64 + FRAME_HEAD_MAX + u64::from(plain_len)
}

fn charge(message: &Message) -> u64 {
    match message {
        Message::Frame(frame) => frame.charge(),
        _ => 0,
    }
}
