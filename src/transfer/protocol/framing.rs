//! Assembly of messages from pieces of a byte stream.
//!
//! ```text
//! 0  4  length of the body      4  1  kind      5  n  body
//! ```

use bytes::Bytes;

use super::limits::{FRAME_HEAD_MAX, HEADER_LEN};
use super::message::Kind;
use crate::blocks::Block;

/// Assembler of the messages of one stream.
#[derive(Debug, Default)]
pub(super) struct Assembler {
    header: [u8; HEADER_LEN],
    body: Block,
    /// Received bytes of header and body.
    filled: usize,
}

/// Length and kind in a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Announced {
    pub(super) kind: u8,
    pub(super) len: u32,
}

impl Announced {
    /// Bytes of the body that are received before the rest gets memory.
    fn first(self) -> usize {
        let head = u32::try_from(FRAME_HEAD_MAX).unwrap_or(u32::MAX);
        let first = if self.kind == Kind::Frame as u8 { self.len.min(head) } else { self.len };
        first as usize
    }
}

impl Assembler {
    /// Takes bytes from the front of `input` until a message is complete: its kind and body. None, once `input` is used
    /// up.
    ///
    /// `admit` is called before anything of the body is allocated; for a frame once more, with the beginning of the body, before the
    /// rest is.
    ///
    /// # Errors
    /// Errors of `admit`.
    pub(super) fn next<E>(
        &mut self,
        input: &mut &[u8],
        mut admit: impl FnMut(Announced, Option<&[u8]>) -> Result<(), E>,
    ) -> Result<Option<(u8, Bytes)>, E> {
        if self.filled < HEADER_LEN {
            let taken = take(input, HEADER_LEN - self.filled);
            for (to, from) in self.header.iter_mut().skip(self.filled).zip(taken) {
                *to = *from;
            }
            self.filled += taken.len();
            if self.filled < HEADER_LEN {
                return Ok(None);
            }
            admit(self.announced(), None)?;
            // `admit` has checked the length by now.
            self.body = Block::new(self.announced().first());
        }
        let announced = self.announced();
        if !self.fill(input) {
            return Ok(None);
        }
        if announced.kind == Kind::Frame as u8 && self.filled == HEADER_LEN + announced.first() {
            admit(announced, Some(&self.body))?;
            if announced.first() < announced.len as usize {
                let beginning = std::mem::replace(&mut self.body, Block::new(announced.len as usize));
                self.body[..beginning.len()].copy_from_slice(&beginning);
                if !self.fill(input) {
                    return Ok(None);
                }
            }
        }
        self.filled = 0;
        let body = std::mem::take(&mut self.body);
        Ok(Some((announced.kind, body.freeze())))
    }

    /// Fills the body from the front of `input`; true if it is full.
    fn fill(&mut self, input: &mut &[u8]) -> bool {
        let left = self.body.get_mut(self.filled - HEADER_LEN..).unwrap_or_default();
        let taken = take(input, left.len());
        left[..taken.len()].copy_from_slice(taken);
        self.filled += taken.len();
        taken.len() == left.len()
    }

    /// Kind of the message whose body is being received.
    pub(super) fn within(&self) -> Option<u8> {
        (self.filled >= HEADER_LEN).then(|| self.announced().kind)
    }

    fn announced(&self) -> Announced {
        let [a, b, c, d, kind] = self.header;
        Announced { kind, len: u32::from_le_bytes([a, b, c, d]) }
    }
}

/// Takes up to `most` bytes from the front of `input`.
fn take<'a>(input: &mut &'a [u8], most: usize) -> &'a [u8] {
    let (taken, rest) = input.split_at(most.min(input.len()));
    *input = rest;
    taken
}
