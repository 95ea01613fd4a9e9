//! A chunk: bytes that have been proven to match their id.

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::id::ChunkId;

/// Verified bytes. There is no way to make one whose bytes do not match its id.
#[derive(Clone, PartialEq, Eq)]
pub struct Chunk {
    id: ChunkId,
    bytes: Bytes,
}

impl Chunk {
    /// Names `bytes` by hashing them.
    #[must_use]
    pub fn new(bytes: Bytes) -> Self {
        Self { id: ChunkId::of(&bytes), bytes }
    }

    /// Accepts `bytes` only if they are the chunk called `id`.
    ///
    /// # Errors
    /// Damaged, if they are not.
    pub fn verify(id: ChunkId, bytes: Bytes) -> Result<Self> {
        let got = ChunkId::of(&bytes);
        if got == id {
            return Ok(Self { id, bytes });
        }
        Err(Error::damaged("chunk does not match its id").expected(id).got(got))
    }

    /// Its id.
    #[must_use]
    pub fn id(&self) -> ChunkId {
        self.id
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Gives the bytes up.
    #[must_use]
    pub fn into_bytes(self) -> Bytes {
        self.bytes
    }
}

impl std::fmt::Debug for Chunk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Chunk({:.16}, {} bytes)", self.id, self.bytes.len())
    }
}
