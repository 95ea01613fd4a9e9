//! Assembly of messages from pieces of a byte stream.
//!
//! ```text
//! 0  4  length of the body      4  1  kind      5  n  body
//! ```

use bytes::Bytes;

use super::limits::HEADER_LEN;
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

impl Assembler {
    /// Takes bytes from the front of `input` until a message is complete: its kind and body. None, once `input` is used
    /// up.
    ///
    /// `admit` is called before the body is allocated.
    ///
    /// # Errors
    /// Errors of `admit`.
    pub(super) fn next<E>(
        &mut self,
        input: &mut &[u8],
        admit: impl FnOnce(Announced) -> Result<(), E>,
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
            admit(self.announced())?;
            // `admit` has checked the length by now.
            self.body = Block::new(self.announced().len as usize);
        }
        let left = self.body.get_mut(self.filled - HEADER_LEN..).unwrap_or_default();
        let taken = take(input, left.len());
        left[..taken.len()].copy_from_slice(taken);
        let whole = taken.len() == left.len();
        self.filled += taken.len();
        if !whole {
            return Ok(None);
        }
        self.filled = 0;
        let body = std::mem::take(&mut self.body);
        Ok(Some((self.announced().kind, body.freeze())))
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
