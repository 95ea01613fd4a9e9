//! A stream that breaks when its peer is trusted no more.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::identity::Standing;

/// A stream to or from a peer of some standing.
pub(super) struct Guarded<S> {
    stream: S,
    // One for each half: they may be polled by different tasks.
    reading: Watch,
    writing: Watch,
}

/// Waits for the end of a peer's standing.
struct Watch {
    ended: Pin<Box<dyn Future<Output = rustls::Error> + Send>>,
    why: Option<rustls::Error>,
}

impl Watch {
    fn new(standing: Standing) -> Self {
        Self { ended: Box::pin(async move { standing.ended().await }), why: None }
    }

    /// # Errors
    /// Permission denied, around what is wrong with the certificate.
    fn check(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if self.why.is_none()
            && let Poll::Ready(error) = self.ended.as_mut().poll(cx)
        {
            self.why = Some(error);
        }
        match &self.why {
            Some(error) => Err(broken(error.clone())),
            None => Ok(()),
        }
    }
}

/// The error of a connection whose peer is trusted no more.
pub(super) fn broken(error: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, error)
}

impl<S> Guarded<S> {
    pub(super) fn new(stream: S, standing: &Standing) -> Self {
        Self { stream, reading: Watch::new(standing.clone()), writing: Watch::new(standing.clone()) }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Guarded<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.reading.check(cx)?;
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Guarded<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.writing.check(cx)?;
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.writing.check(cx)?;
        Pin::new(&mut self.stream).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.writing.check(cx)?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
