//! Streams of a connection over QUIC as lanes.
//!
//! QUIC keeps what is sent until the peer acknowledges it, which a malicious one never does. Frames own their memory in the budget until
//! then; the rest, heads of frames and control messages, has a small limit for each connection.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use quinn::{Connection, RecvStream, SendStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;

use crate::transfer::driver::{Feeder, LaneStream};
use crate::transfer::protocol::CONTROL;
use crate::transfer::protocol::limits::LANES_MAX;

/// Maximum bytes of heads and control messages of one connection that are not acknowledged yet: enough for those of the frames that are
/// in transit on a long link.
const UNACKNOWLEDGED_MAX: usize = 128 << 10;
/// Bytes that QUIC takes to keep a piece of a stream, besides the piece.
const PIECE_OVERHEAD: usize = 96;

/// Writer of one stream.
pub(super) struct StreamWriter {
    stream: SendStream,
    unacknowledged: UnacknowledgedMemory,
}

/// Memory for heads and control messages of one connection that are not acknowledged yet. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct UnacknowledgedMemory(Arc<Semaphore>);

/// Bytes that own the memory they count as.
struct UnacknowledgedBytes {
    bytes: Bytes,
    _held: OwnedSemaphorePermit,
}

impl Default for UnacknowledgedMemory {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(UNACKNOWLEDGED_MAX)))
    }
}

impl UnacknowledgedMemory {
    /// The bytes, which hold their memory until the last clone is dropped, once there is enough.
    ///
    /// # Cancel safety
    /// Safe: a dropped wait holds nothing.
    async fn hold(&self, bytes: Bytes) -> io::Result<Bytes> {
        let len = (bytes.len() + PIECE_OVERHEAD).min(UNACKNOWLEDGED_MAX);
        let permits = u32::try_from(len).map_err(io::Error::other)?;
        let held = Arc::clone(&self.0).acquire_many_owned(permits).await.map_err(io::Error::other)?;
        Ok(Bytes::from_owner(UnacknowledgedBytes { bytes, _held: held }))
    }
}

impl AsRef<[u8]> for UnacknowledgedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl StreamWriter {
    pub(super) fn new(stream: SendStream, unacknowledged: UnacknowledgedMemory) -> Self {
        Self { stream, unacknowledged }
    }
}

impl LaneStream for StreamWriter {
    async fn write_head(&mut self, piece: Bytes) -> io::Result<()> {
        let piece = self.unacknowledged.hold(piece).await?;
        Ok(self.stream.write_chunk(piece).await?)
    }

    async fn write_body(&mut self, piece: Bytes) -> io::Result<()> {
        Ok(self.stream.write_chunk(piece).await?)
    }

    async fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    async fn end(&mut self) -> io::Result<()> {
        self.stream.finish().map_err(io::Error::other)
    }
}

/// Reads the streams that the provider opens, each as the lane of its number. Fails the connection if the provider opens more than a
/// connection has.
pub(super) async fn gather(connection: Connection, feeder: Feeder) {
    let mut streams = JoinSet::new();
    loop {
        let stream = match connection.accept_uni().await {
            Ok(stream) => stream,
            Err(error) => return feeder.fail(error.into()).await,
        };
        let lane = lane_of(&stream);
        if lane > LANES_MAX {
            let excess =
                io::Error::new(io::ErrorKind::InvalidData, format!("peer opened more than {LANES_MAX} streams"));
            return feeder.fail(excess).await;
        }
        streams.spawn(feeder.clone().read(lane, stream));
    }
}

/// Lane of a stream that a provider has opened.
fn lane_of(stream: &RecvStream) -> u32 {
    u32::try_from(stream.id().index()).map_or(u32::MAX, |index| index.saturating_add(CONTROL + 1))
}

#[cfg(test)]
mod tests {
    use futures::poll;
    use tokio::task::unconstrained;

    use super::*;

    #[tokio::test]
    async fn what_is_not_acknowledged_is_bounded() {
        let memory = UnacknowledgedMemory::default();
        let mut kept = Vec::new();
        loop {
            let mut piece = Box::pin(unconstrained(memory.hold(Bytes::from_static(b"pong"))));
            match poll!(&mut piece) {
                std::task::Poll::Ready(piece) => kept.push(piece.unwrap()),
                std::task::Poll::Pending => break,
            }
        }
        assert_eq!(kept.len(), UNACKNOWLEDGED_MAX / (PIECE_OVERHEAD + 4));
        // A message longer than the limit goes alone.
        let mut long = Box::pin(memory.hold(vec![0; 2 * UNACKNOWLEDGED_MAX].into()));
        assert!(poll!(&mut long).is_pending());
        kept.clear();
        assert_eq!(long.await.unwrap().len(), 2 * UNACKNOWLEDGED_MAX);
    }
}
