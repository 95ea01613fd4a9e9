//! Stream that breaks when its peer is no longer trusted.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::identity::CertificateCheck;

/// Stream to or from a peer whose certificate is checked again and again.
pub(super) struct Guarded<S> {
    stream: S,
    // One for each half: different tasks may poll them.
    reading: Watch,
    writing: Watch,
}

/// Waits until the peer is no longer trusted.
struct Watch {
    ended: Pin<Box<dyn Future<Output = rustls::Error> + Send>>,
    why: Option<rustls::Error>,
}

impl Watch {
    fn new(certificate_check: CertificateCheck) -> Self {
        Self { ended: Box::pin(async move { certificate_check.ended().await }), why: None }
    }

    /// # Errors
    /// Permission denied, wrapping the error of the certificate.
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

/// Error of a connection whose peer is no longer trusted.
pub(super) fn broken(error: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, error)
}

impl<S> Guarded<S> {
    pub(super) fn new(stream: S, certificate_check: &CertificateCheck) -> Self {
        Self { stream, reading: Watch::new(certificate_check.clone()), writing: Watch::new(certificate_check.clone()) }
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
