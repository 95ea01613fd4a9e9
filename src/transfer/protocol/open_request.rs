//! Open request of a requester: what it asked for, and what has been answered.

use super::closed::Violation;
use super::message::{FrameHead, Wanted};
use super::runs::Runs;

/// Open request.
#[derive(Debug)]
pub(super) struct OpenRequest {
    pub(super) what: RequestKind,
    /// Cancelled: later answers are dropped.
    pub(super) cancelled: bool,
}

#[derive(Debug)]
pub(super) enum RequestKind {
    /// Request for frames, each to be answered once.
    Frames(Answered),
    /// Question for held chunks, from this place on.
    Survey { from: u32 },
}

/// Ordinals of a request that were answered.
#[derive(Debug)]
pub(super) struct Answered {
    words: Vec<u64>,
    len: u32,
    left: u32,
    /// Plain lengths of the chunks; empty if they are not known.
    lens: Vec<u32>,
}

impl Answered {
    /// Creates a set of `len` ordinals without an answer, whose chunks have the plain lengths `lens`.
    pub(super) fn none_of(len: u32, lens: Vec<u32>) -> Self {
        Self { words: vec![0; len.div_ceil(64) as usize], len, left: len, lens }
    }

    /// Plain length of the chunk of a frame that begins so.
    pub(super) fn expected(&self, head: &FrameHead) -> Result<u32, Violation> {
        self.check(head.ordinal)?;
        let got = head.plain_len;
        match self.lens.get(head.ordinal as usize) {
            Some(&expected) if expected != got => Err(Violation::Length { expected, got }),
            _ => Ok(got),
        }
    }

    /// Checks that `ordinal` has no answer yet.
    fn check(&self, ordinal: u32) -> Result<(), Violation> {
        if ordinal >= self.len {
            return Err(Violation::Unexpected("answer to a chunk that was not requested"));
        }
        let word = self.words.get(ordinal as usize / 64).copied().unwrap_or(u64::MAX);
        let answered = word & (1 << (ordinal % 64)) != 0;
        if answered { Err(Violation::Unexpected("chunk was answered twice")) } else { Ok(()) }
    }

    /// Marks one more as answered.
    pub(super) fn insert(&mut self, ordinal: u32) -> Result<(), Violation> {
        self.check(ordinal)?;
        if let Some(word) = self.words.get_mut(ordinal as usize / 64) {
            *word |= 1 << (ordinal % 64);
            self.left -= 1;
        }
        Ok(())
    }

    pub(super) fn is_all(&self) -> bool {
        self.left == 0
    }

    /// The ordinals without an answer.
    pub(super) fn left(&self) -> Runs {
        let word = |ordinal: u32| self.words.get(ordinal as usize / 64).copied().unwrap_or(u64::MAX);
        (0..self.len).filter(|&ordinal| word(ordinal) & (1 << (ordinal % 64)) == 0).collect()
    }
}

impl Wanted {
    /// Request for the chunks with the given ordinals only, to ask again for those that did not come.
    #[must_use]
    pub fn only(&self, ordinals: &Runs) -> Self {
        let mut some = Self::default();
        for (place, ordinal) in (0..).zip(ordinals.iter()) {
            match self.chunks.get(ordinal.into()) {
                Some(chunk) => some.chunks.push(chunk..chunk.saturating_add(1)),
                None => some.bases.extend(self.base(ordinal.into())),
            }
            some.lens.extend(self.lens.get(ordinal as usize));
            if self.alone.contains(ordinal) {
                some.alone.push(place..place + 1);
            }
        }
        some
    }

    /// Bytes of memory.
    pub(super) fn memory(&self) -> u64 {
        (self.chunks.memory() + self.alone.memory() + self.bases.capacity() * size_of::<crate::id::ChunkId>()) as u64
    }

    /// Base with the ordinal `ordinal`, if it is one.
    #[must_use]
    pub fn base(&self, ordinal: u64) -> Option<crate::id::ChunkId> {
        let at = usize::try_from(ordinal.checked_sub(self.chunks.len())?).ok()?;
        self.bases.get(at).copied()
    }
}
