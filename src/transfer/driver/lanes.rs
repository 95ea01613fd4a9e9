//! Lanes as tasks: a reader and a writer for each stream, with small bounded queues to the driver.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, WriteHalf};
use tokio::sync::Notify;
use tokio::sync::mpsc::{self, Receiver, Sender};
use tokio::task::JoinSet;

use crate::transfer::protocol::{CONTROL, Transmit};

/// Maximum number of bytes for one read of a stream.
const READ_MAX: usize = 128 << 10;
/// Minimum free space of a buffer; with less, a new one is allocated.
const READ_MIN: usize = 16 << 10;
/// Maximum number of bytes for one write to a stream; after each the progress of the other side is seen.
const WRITE_MAX: usize = 64 << 10;
/// Maximum number of pieces that wait for the driver, over all lanes.
const WAITING_MAX: usize = 8;
/// Maximum number of messages that wait for a lane's stream.
const AHEAD: usize = 1;
/// Time limit for sending the last messages of a connection that is over.
const LINGER: Duration = Duration::from_secs(2);

/// Input of a stream.
#[derive(Debug)]
pub(in crate::transfer) enum Incoming {
    /// Bytes on a lane.
    Bytes(u32, Bytes),
    /// The transport ended or broke.
    Ended(io::Error),
}

/// The streams of one connection.
#[derive(Debug)]
pub(in crate::transfer) struct Lanes {
    inbox: Receiver<Incoming>,
    feeder: Feeder,
    outboxes: Vec<Sender<Transmit>>,
    moved: Arc<ProgressFlag>,
    readers: JoinSet<()>,
    writers: JoinSet<()>,
    /// Set once the end of the transport was reported.
    ended: bool,
}

/// Stream that a lane is written to.
pub(in crate::transfer) trait LaneStream: Send + 'static {
    /// Writes a piece of a head, or of a control message. What the transport keeps of it counts nowhere else.
    ///
    /// # Cancel safety
    /// Part of it may have been written: drop it only with the connection.
    fn write_head(&mut self, piece: Bytes) -> impl Future<Output = io::Result<()>> + Send;

    /// Writes a piece of stored bytes, whose memory is released when its last clone is dropped.
    ///
    /// # Cancel safety
    /// As [`LaneStream::write_head`].
    fn write_body(&mut self, piece: Bytes) -> impl Future<Output = io::Result<()>> + Send;

    /// Sends what is buffered.
    fn flush(&mut self) -> impl Future<Output = io::Result<()>> + Send;

    /// Ends the stream, once all is sent.
    fn end(&mut self) -> impl Future<Output = io::Result<()>> + Send;
}

/// Half of a stream of bytes, which copies what is written.
impl<S: AsyncRead + AsyncWrite + Send + 'static> LaneStream for Pin<Box<WriteHalf<S>>> {
    async fn write_head(&mut self, piece: Bytes) -> io::Result<()> {
        self.write_all(&piece).await
    }

    async fn write_body(&mut self, piece: Bytes) -> io::Result<()> {
        self.write_all(&piece).await
    }

    async fn flush(&mut self) -> io::Result<()> {
        tokio::io::AsyncWriteExt::flush(self).await
    }

    async fn end(&mut self) -> io::Result<()> {
        self.shutdown().await
    }
}

/// Queue that readers write to.
#[derive(Clone, Debug)]
pub(in crate::transfer) struct Feeder(Sender<Incoming>);

/// Records whether any stream took bytes since the last check.
#[derive(Debug, Default)]
struct ProgressFlag {
    flag: AtomicBool,
    wake: Notify,
}

impl ProgressFlag {
    fn tell(&self) {
        self.flag.store(true, Ordering::Release);
        self.wake.notify_one();
    }
}

impl Feeder {
    /// Reads `stream` to its end, as `lane`.
    ///
    /// # Cancel safety
    /// Bytes that were read and not taken are lost: drop it only with the connection.
    pub(in crate::transfer) async fn read(self, lane: u32, mut stream: impl AsyncRead + Unpin + Send) {
        let mut buffer = BytesMut::new();
        loop {
            // Earlier buffers may still be in use, so each read has less space.
            if buffer.capacity() < READ_MIN {
                buffer.reserve(READ_MAX);
            }
            let read = stream.read_buf(&mut buffer).await;
            let incoming = match read {
                // Nothing more comes on it; the control lane reports the state of the connection.
                Ok(0) if lane != CONTROL => return,
                Ok(0) => Incoming::Ended(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => Incoming::Bytes(lane, buffer.split().freeze()),
                Err(error) => Incoming::Ended(error),
            };
            let ended = matches!(incoming, Incoming::Ended(_));
            // A gone receiver means that the connection has ended, too.
            if self.0.send(incoming).await.is_err() || ended {
                return;
            }
        }
    }

    /// Reports that the connection itself has failed.
    pub(in crate::transfer) async fn fail(self, error: io::Error) {
        // As above.
        let _ = self.0.send(Incoming::Ended(error)).await;
    }
}

impl Lanes {
    /// Lanes without a stream yet.
    pub(in crate::transfer) fn new() -> Self {
        let (sender, inbox) = mpsc::channel(WAITING_MAX);
        Self {
            inbox,
            feeder: Feeder(sender),
            outboxes: Vec::new(),
            moved: Arc::default(),
            readers: JoinSet::new(),
            writers: JoinSet::new(),
            ended: false,
        }
    }

    /// One lane, both ways on `stream`.
    pub(in crate::transfer) fn both_ways(stream: impl AsyncRead + AsyncWrite + Send + 'static) -> Self {
        let (reader, writer) = tokio::io::split(stream);
        let mut lanes = Self::new();
        let feeder = lanes.feeder();
        lanes.spawn(feeder.read(CONTROL, Box::pin(reader)));
        lanes.write(Box::pin(writer));
        lanes
    }

    /// For lanes that begin later.
    pub(in crate::transfer) fn feeder(&self) -> Feeder {
        self.feeder.clone()
    }

    /// Runs `task` until the connection ends.
    pub(in crate::transfer) fn spawn(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.readers.spawn(task);
    }

    /// Writes the next lane to `stream`: 0 first, then 1, ...
    pub(in crate::transfer) fn write(&mut self, stream: impl LaneStream) {
        let (sender, receiver) = mpsc::channel(AHEAD);
        self.outboxes.push(sender);
        let moved = Arc::clone(&self.moved);
        self.writers.spawn(async move {
            if let Err(error) = write(receiver, stream, &moved).await {
                // The reader of the lane reports the error, too, and ends the connection.
                tracing::debug!("stream to a peer broke: {error}");
            }
        });
    }

    /// Next input, or None: some stream took bytes, so more can be sent.
    ///
    /// # Cancel safety
    /// Safe.
    pub(super) async fn next(&mut self) -> Option<Incoming> {
        tokio::select! {
            // Cannot end: the feeder that is kept here keeps the channel open.
            incoming = self.inbox.recv() => {
                self.ended |= matches!(incoming, Some(Incoming::Ended(_)));
                incoming
            }
            () = self.moved.wake.notified() => None,
        }
    }

    /// Takes what can be sent, lane by lane; returns true if any stream took bytes since the last call.
    pub(super) fn flush(&mut self, mut transmit: impl FnMut(u32) -> Option<Transmit>) -> bool {
        for (lane, outbox) in (0..).zip(&self.outboxes) {
            while let Ok(place) = outbox.try_reserve() {
                match transmit(lane) {
                    Some(bytes) => place.send(bytes),
                    None => break,
                }
            }
        }
        self.moved.flag.swap(false, Ordering::AcqRel)
    }

    /// Sends what is left on lane 0, then ends the streams and waits until they have taken all of it: briefly, and not
    /// if the other side has ended.
    ///
    /// # Cancel safety
    /// Safe: unsent messages are dropped.
    pub(super) async fn finish(mut self, mut transmit: impl FnMut() -> Option<Transmit>) {
        let finished = async {
            if let Some(control) = self.outboxes.first() {
                while let Some(bytes) = transmit() {
                    if control.send(bytes).await.is_err() {
                        break;
                    }
                }
            }
            self.outboxes.clear();
            if self.ended {
                return;
            }
            while self.writers.join_next().await.is_some() {}
            // The other side ends its streams after it has read everything; closing earlier might discard the last
            // messages.
            loop {
                match self.inbox.recv().await {
                    Some(Incoming::Bytes(..)) => {}
                    Some(Incoming::Ended(_)) | None => return,
                }
            }
        };
        if tokio::time::timeout(LINGER, finished).await.is_err() {
            tracing::debug!("a peer did not take the last words");
        }
    }
}

/// Writes messages to `stream` until there are no more to come, then ends it.
async fn write(mut messages: Receiver<Transmit>, mut stream: impl LaneStream, moved: &ProgressFlag) -> io::Result<()> {
    while let Some(Transmit { mut head, mut body }) = messages.recv().await {
        moved.tell();
        while !head.is_empty() {
            stream.write_head(head.split_to(head.len().min(WRITE_MAX))).await?;
            moved.tell();
        }
        while !body.is_empty() {
            stream.write_body(body.split_to(body.len().min(WRITE_MAX))).await?;
            moved.tell();
        }
        if messages.is_empty() {
            stream.flush().await?;
        }
    }
    stream.end().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn who_is_gone_is_not_waited_for() {
        let (near, far) = tokio::io::duplex(64);
        let mut lanes = Lanes::both_ways(near);
        drop(far);
        assert!(matches!(lanes.next().await, Some(Incoming::Ended(_))));
        let turns = async {
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            biased;
            () = lanes.finish(|| None) => {}
            () = turns => panic!("it waits for something"),
        }
    }
}
