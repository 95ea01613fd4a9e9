//! Memory for parts of files that are being sent.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use ulid::Ulid;

use crate::budget::{Budget, Buffer};
use crate::error::{Error, Result};
use crate::limits::MIB;

/// Approximate size of a window, in bytes.
pub(super) const WINDOW: u64 = 8 * MIB;

/// Windows of all files that are being sent. Their memory is separate from that of fetches, so that a slow client cannot block a
/// fetch, and one token gets half of it at most, so that its slow clients cannot block others.
#[derive(Debug)]
pub(super) struct FileWindows {
    memory: Budget,
    shares: Mutex<HashMap<Ulid, Weak<Semaphore>>>,
}

/// Part of a file that is being read.
#[derive(Debug)]
pub(super) struct Window {
    pub(super) buffer: Buffer,
    share: Option<OwnedSemaphorePermit>,
}

/// Bytes of a window, and the permit that ends with the last of them.
struct Frozen {
    bytes: Bytes,
    _share: Option<OwnedSemaphorePermit>,
}

impl AsRef<[u8]> for Frozen {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Window {
    /// Its bytes, whose last slice releases the memory.
    pub(super) fn freeze(self) -> Bytes {
        Bytes::from_owner(Frozen { bytes: self.buffer.freeze(), _share: self.share })
    }
}

impl FileWindows {
    /// Windows of `bytes` of memory together.
    ///
    /// # Errors
    /// As [`Budget::new`].
    pub(super) fn new(bytes: u64) -> Result<Self> {
        Ok(Self { memory: Budget::new(bytes)?, shares: Mutex::default() })
    }

    /// Memory for a window of `len` bytes that is sent to `token`, or to a caller without one. Waits for the memory.
    ///
    /// # Errors
    /// Exhausted, if it can never fit.
    ///
    /// # Cancel safety
    /// Safe: a dropped wait holds nothing.
    pub(super) async fn window(&self, token: Option<Ulid>, len: usize) -> Result<Window> {
        let share = match token {
            None => None,
            Some(token) => {
                // More than a share is a chunk larger than all of them, which only one request may hold.
                let windows = (len as u64).div_ceil(WINDOW).clamp(1, self.windows_of_each());
                let permits = u32::try_from(windows).unwrap_or(u32::MAX);
                let closed = |_| Error::other("memory of file windows was closed");
                Some(self.share_of(token).acquire_many_owned(permits).await.map_err(closed)?)
            }
        };
        Ok(Window { buffer: self.memory.buffer(len).await?, share })
    }

    /// Windows that one token may hold.
    fn windows_of_each(&self) -> u64 {
        (self.memory.total() / 2 / WINDOW).max(1)
    }

    fn share_of(&self, token: Ulid) -> Arc<Semaphore> {
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(share) = shares.get(&token).and_then(Weak::upgrade) {
            return share;
        }
        shares.retain(|_, share| share.strong_count() > 0);
        let permits = usize::try_from(self.windows_of_each()).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        let share = Arc::new(Semaphore::new(permits));
        shares.insert(token, Arc::downgrade(&share));
        share
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;

    #[tokio::test]
    async fn a_token_takes_half_of_the_windows_at_most_and_others_go_on() {
        let windows = FileWindows::new(64 * MIB).unwrap();
        let (slow, other) = (Some(Ulid(1)), Some(Ulid(2)));
        let len = usize::try_from(WINDOW).unwrap();
        let mut held = Vec::new();
        for _ in 0..4 {
            held.push(windows.window(slow, len).await.unwrap().freeze());
        }
        let mut fifth = pin!(windows.window(slow, len));
        assert!(futures::poll!(&mut fifth).is_pending(), "its share is used up");
        windows.window(other, len).await.unwrap();
        windows.window(None, len).await.unwrap();
        // A piece that is still being sent keeps the memory, and so the share.
        let piece = held.pop().unwrap().split_off(len - 1);
        assert!(futures::poll!(&mut fifth).is_pending());
        drop(piece);
        fifth.await.unwrap();
    }

    #[tokio::test]
    async fn a_chunk_larger_than_a_share_is_read_alone() {
        let windows = FileWindows::new(64 * MIB).unwrap();
        let large = windows.window(Some(Ulid(1)), 48 << 20).await.unwrap();
        let mut second = pin!(windows.window(Some(Ulid(1)), 1));
        assert!(futures::poll!(&mut second).is_pending());
        drop(large);
        second.await.unwrap();
        assert_eq!(windows.shares.lock().unwrap().len(), 1, "shares that nobody holds are dropped");
    }
}
