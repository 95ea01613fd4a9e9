//! Memory for parts of files that are being sent.

use bytes::Bytes;

use super::shares::{Share, Shares};
use crate::budget::{Budget, Buffer};
use crate::error::Result;
use crate::limits::MIB;

/// Approximate size of a window, in bytes.
pub(super) const WINDOW: u64 = 8 * MIB;

/// Windows of all files that are being sent. Their memory is separate from that of fetches, so that a slow client cannot block a
/// fetch. Tenants and tokens share half of it, so that their slow clients block neither users of the machine nor each other.
#[derive(Debug)]
pub(super) struct FileWindows {
    memory: Budget,
    limited: Shares,
}

/// Part of a file that is being read.
#[derive(Debug)]
pub(super) struct Window {
    pub(super) buffer: Buffer,
    share: Option<Share>,
}

impl Window {
    /// Its bytes, whose last slice releases the memory.
    pub(super) fn freeze(self) -> Bytes {
        let bytes = self.buffer.freeze();
        match self.share {
            Some(share) => share.of(bytes),
            None => bytes,
        }
    }
}

impl FileWindows {
    /// Windows of `bytes` of memory together.
    ///
    /// # Errors
    /// As [`Budget::new`].
    pub(super) fn new(bytes: u64) -> Result<Self> {
        Ok(Self { memory: Budget::new(bytes)?, limited: Shares::new((bytes / 2).max(WINDOW)) })
    }

    /// Memory for a window of `len` bytes that is sent to a tenant or token, or to a caller without limits. Waits for the memory.
    ///
    /// # Errors
    /// Exhausted, if it can never fit.
    ///
    /// # Cancel safety
    /// Safe: a dropped wait holds nothing.
    pub(super) async fn window(&self, limited: Option<&str>, len: usize) -> Result<Window> {
        let share = match limited {
            Some(caller) => Some(self.limited.take(caller, (len as u64).max(WINDOW)).await),
            None => None,
        };
        Ok(Window { buffer: self.memory.buffer(len).await?, share })
    }

    /// True if a tenant or token waits for a window.
    pub(super) fn is_wanted(&self) -> bool {
        self.limited.is_wanted()
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;

    #[tokio::test]
    async fn tokens_share_half_of_the_windows_and_others_go_on() {
        let windows = FileWindows::new(128 * MIB).unwrap();
        let len = usize::try_from(WINDOW).unwrap();
        let mut held = Vec::new();
        for _ in 0..4 {
            held.push(windows.window(Some("slow"), len).await.unwrap().freeze());
        }
        let mut fifth = pin!(windows.window(Some("slow"), len));
        assert!(futures::poll!(&mut fifth).is_pending() && windows.is_wanted(), "its share is used up");
        let mut others = Vec::new();
        for token in ["b", "b", "c", "d"] {
            others.push(windows.window(Some(token), len).await.unwrap());
        }
        for _ in 0..8 {
            others.push(windows.window(None, len).await.unwrap());
        }
        // A piece that is still being sent keeps the memory, and so the share.
        let piece = held.pop().unwrap().split_off(len - 1);
        assert!(futures::poll!(&mut fifth).is_pending());
        others.clear();
        drop(piece);
        fifth.await.unwrap();
    }

    #[tokio::test]
    async fn a_chunk_larger_than_a_share_is_read_alone() {
        let windows = FileWindows::new(64 * MIB).unwrap();
        let large = windows.window(Some("a"), 48 << 20).await.unwrap();
        let mut second = pin!(windows.window(Some("a"), 1));
        assert!(futures::poll!(&mut second).is_pending());
        drop(large);
        second.await.unwrap();
    }
}
