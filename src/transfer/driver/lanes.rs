//! Lanes as tasks: one that reads and one that writes for each stream, with small bounded queues to the driver between.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::Notify;
use tokio::sync::mpsc::{self, Receiver, Sender};
use tokio::task::JoinSet;

use crate::transfer::protocol::{CONTROL, Transmit};

/// Bytes that are read from a stream at once, at most.
const READ_MAX: usize = 128 << 10;
/// With less room than this a new block is begun.
const READ_MIN: usize = 16 << 10;
/// Bytes that are handed to a stream at once, at most: how often it is seen that the other side reads.
const WRITE_MAX: usize = 64 << 10;
/// Pieces that wait for the driver, at most, of all lanes together.
const WAITING_MAX: usize = 8;
/// Messages that wait for a lane's stream, at most.
const AHEAD: usize = 1;
/// A connection that is over is kept no longer for its last words.
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
    moved: Arc<Moved>,
    readers: JoinSet<()>,
    writers: JoinSet<()>,
    /// The transport has ended, which it tells once.
    ended: bool,
}

/// Queue that readers write to.
#[derive(Clone, Debug)]
pub(in crate::transfer) struct Feeder(Sender<Incoming>);

/// Whether some stream took bytes since somebody asked.
#[derive(Debug, Default)]
struct Moved {
    flag: AtomicBool,
    wake: Notify,
}

impl Moved {
    fn tell(&self) {
        self.flag.store(true, Ordering::Release);
        self.wake.notify_one();
    }
}

impl Feeder {
    /// Reads `stream` to its end, as `lane`.
    ///
    /// # Cancel safety
    /// Bytes that were read and not taken are lost: only to be dropped with the connection.
    pub(in crate::transfer) async fn read(self, lane: u32, mut stream: impl AsyncRead + Unpin + Send) {
        let mut buffer = BytesMut::new();
        loop {
            // Earlier buffers may still be in use, so each read has less space.
            if buffer.capacity() < READ_MIN {
                buffer.reserve(READ_MAX);
            }
            let read = stream.read_buf(&mut buffer).await;
            let incoming = match read {
                // Nothing more goes on it; how the connection stands is told on the control lane.
                Ok(0) if lane != CONTROL => return,
                Ok(0) => Incoming::Ended(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => Incoming::Bytes(lane, buffer.split().freeze()),
                Err(error) => Incoming::Ended(error),
            };
            let ended = matches!(incoming, Incoming::Ended(_));
            // A receiver that is gone has ended, too.
            if self.0.send(incoming).await.is_err() || ended {
                return;
            }
        }
    }

    /// The connection itself has failed.
    pub(in crate::transfer) async fn fail(self, error: io::Error) {
        // As above.
        let _ = self.0.send(Incoming::Ended(error)).await;
    }
}

impl Lanes {
    /// No lane yet.
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

    /// Runs along with the connection, and ends with it.
    pub(in crate::transfer) fn spawn(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.readers.spawn(task);
    }

    /// Writes the next lane to `stream`: 0 first, then 1, ...
    pub(in crate::transfer) fn write(&mut self, stream: impl AsyncWrite + Unpin + Send + 'static) {
        let (sender, receiver) = mpsc::channel(AHEAD);
        self.outboxes.push(sender);
        let moved = Arc::clone(&self.moved);
        self.writers.spawn(async move {
            if let Err(error) = write(receiver, stream, &moved).await {
                // The lane that reads tells it, too, and ends the connection.
                tracing::debug!("stream to a peer broke: {error}");
            }
        });
    }

    /// The next input, or None: some stream took something, so more can be sent.
    ///
    /// # Cancel safety
    /// Safe.
    pub(super) async fn next(&mut self) -> Option<Incoming> {
        tokio::select! {
            // The feeder that is kept here keeps the channel open.
            incoming = self.inbox.recv() => {
                self.ended |= matches!(incoming, Some(Incoming::Ended(_)));
                incoming
            }
            () = self.moved.wake.notified() => None,
        }
    }

    /// Takes what can be sent, lane by lane; did any stream take bytes since the last time?
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

    /// Sends what is left on lane 0, then ends the streams and waits until they have taken all of it: not for long, and not if the
    /// other side has ended.
    ///
    /// # Cancel safety
    /// Safe: what was not sent is not.
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
            // The other side ends its streams when it has read that; to break off before might take the last words back.
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
async fn write(mut messages: Receiver<Transmit>, mut stream: impl AsyncWrite + Unpin, moved: &Moved) -> io::Result<()> {
    while let Some(Transmit { head, body }) = messages.recv().await {
        moved.tell();
        for part in [head, body] {
            for piece in part.chunks(WRITE_MAX) {
                stream.write_all(piece).await?;
                moved.tell();
            }
        }
        if messages.is_empty() {
            stream.flush().await?;
        }
    }
    stream.shutdown().await
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
