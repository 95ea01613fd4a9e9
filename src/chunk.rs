//! A chunk: bytes that have been proven to match their id.

use crate::error::{Error, Result};
use crate::id::ChunkId;

/// Verified bytes, wherever they lie. There is no way to make one whose bytes do not match its id.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Chunk<'a> {
    id: ChunkId,
    bytes: &'a [u8],
}

impl<'a> Chunk<'a> {
    /// Names `bytes` by hashing them.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { id: ChunkId::of(bytes), bytes }
    }

    /// Accepts `bytes` only if they are the chunk called `id`.
    ///
    /// # Errors
    /// Damaged, if they are not.
    pub fn verify(id: ChunkId, bytes: &'a [u8]) -> Result<Self> {
        let got = ChunkId::of(bytes);
        if got == id {
            return Ok(Self { id, bytes });
        }
        Err(Error::damaged("chunk does not match its id").expected(format!("{id:.16}")).got(format!("{got:.16}")))
    }

    /// Its id.
    #[must_use]
    pub fn id(&self) -> ChunkId {
        self.id
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

impl std::fmt::Debug for Chunk<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Chunk({:.16}, {} bytes)", self.id, self.bytes.len())
    }
}
