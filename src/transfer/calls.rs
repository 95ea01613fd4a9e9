//! Calls: HTTP requests of one agent to another one's API, over the TCP port for peers, with the same certificates.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use rustls::ClientConfig;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::byte_counters::CountedStream;
use super::connection_error::broken;
use super::guarded::Guarded;
use super::identity::{CertificateCheck, Credentials, SERVER_NAME, Side, client_config, peer_identity, refused};
use super::transport::HANDSHAKE_MAX;
use super::{ByteCounters, ConnectionPermit};
use crate::error::{Error, Result};
use crate::identity::Identity;

/// ALPN name of a connection for calls (<https://www.rfc-editor.org/rfc/rfc7301#section-6>).
pub const ALPN_HTTP: &[u8] = b"http/1.1";
/// Maximum number of calls that wait to be accepted; more are refused.
const WAITING_MAX: usize = 16;
/// Time limit for a refused caller to read the answer, and limit of the request bytes read meanwhile.
const LINGER: Duration = Duration::from_secs(2);
const REQUEST_LEN_MAX: u64 = 64 << 10;

/// Stream in both directions.
pub trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Duplex for S {}

/// Connection for a call; the other side has been verified.
pub type CallStream = Box<dyn Duplex>;

/// Incoming calls.
#[derive(Debug)]
pub struct Calls(mpsc::Receiver<(CallStream, RemoteCaller)>);

/// Calling agent. Clones share its connection's admission.
#[derive(Clone, Debug)]
pub struct RemoteCaller {
    identity: Identity,
    permit: Arc<ConnectionPermit>,
}

/// Stream that counts as its caller's connection until it and all clones of the caller are dropped.
#[derive(Debug)]
struct PermittedStream<S> {
    line: S,
    _pass: Arc<ConnectionPermit>,
}

/// Sender of incoming calls.
#[derive(Clone, Debug)]
pub(super) struct CallSender(mpsc::Sender<(CallStream, RemoteCaller)>);

/// Channel from the task that accepts connections to the one that answers calls.
pub(super) fn channel() -> (CallSender, Calls) {
    let (sender, receiver) = mpsc::channel(WAITING_MAX);
    (CallSender(sender), Calls(receiver))
}

impl RemoteCaller {
    /// Identity of the agent.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Counts a request against the agent's `requests_per_second`, over all of its connections.
    ///
    /// # Errors
    /// Exhausted, if the agent makes too many.
    pub fn admit_request(&self) -> Result<()> {
        let busy = |why: String| Error::exhausted(why).help("try again in a second, or raise requests_per_second");
        self.permit.admit_request().map_err(busy)
    }

    /// Caller whose requests are not limited.
    #[cfg(test)]
    pub(crate) fn uncounted(identity: Identity) -> Self {
        Self { identity, permit: Arc::new(ConnectionPermit::of_this_node()) }
    }
}

impl CallSender {
    /// Hands over a call of `caller`.
    ///
    /// # Errors
    /// Exhausted, if too many calls wait: a slow server of calls must not keep peers from their chunks.
    pub(super) fn send(&self, line: impl Duplex + 'static, identity: Identity, permit: ConnectionPermit) -> Result<()> {
        let caller = RemoteCaller { identity, permit: Arc::new(permit) };
        let line: CallStream = Box::new(PermittedStream { line, _pass: Arc::clone(&caller.permit) });
        let refused = |_| Error::exhausted("too many calls are waiting").expected(format!("at most {WAITING_MAX}"));
        self.0.try_send((line, caller)).map_err(refused)
    }
}

/// Refuses a call beyond a limit with status 429, and ends it.
///
/// # Cancel safety
/// Safe: the call ends without an answer.
pub(super) async fn refuse_call(mut line: impl Duplex, why: &str) {
    let error = Error::exhausted(why.to_owned()).help("try again later");
    let body = serde_json::json!({ "error": error }).to_string();
    let head = "HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nRetry-After: 1\r\n\
                Connection: close\r\nContent-Length";
    let said = async {
        line.write_all(format!("{head}: {}\r\n\r\n{body}", body.len()).as_bytes()).await?;
        line.shutdown().await?;
        // Closing before the request was read might discard the answer.
        tokio::io::copy(&mut line.take(REQUEST_LEN_MAX), &mut tokio::io::sink()).await
    };
    // No wait for a caller that does not read.
    let _ = timeout(LINGER, said).await;
}

impl<S: AsyncRead + Unpin> AsyncRead for PermittedStream<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.line).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for PermittedStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.line).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.line).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.line).poll_shutdown(cx)
    }
}

impl Calls {
    /// Next call and its caller; None once nobody listens any more.
    ///
    /// # Cancel safety
    /// Safe: no call is lost.
    pub async fn next(&mut self) -> Option<(CallStream, RemoteCaller)> {
        self.0.recv().await
    }
}

/// Calls the agent `callee` at `address` (`host:port`); `wire` counts the bytes.
///
/// # Errors
/// Unreachable, if nobody answers there in time; denied, if either side refuses the other's certificate, another agent
/// answers, or it accepts no calls. A refusal by the other side may surface only at the first read: see [`lost`].
///
/// # Cancel safety
/// Safe: the connection is dropped.
pub async fn call(
    address: &str,
    credentials: &Credentials,
    callee: &Identity,
    wire: &Arc<ByteCounters>,
) -> Result<CallStream> {
    let mut config = client_config(credentials)?;
    config.alpn_protocols = vec![ALPN_HTTP.to_vec()];
    let config = Arc::new(config);
    let called = async {
        let mut last = io::Error::new(io::ErrorKind::NotFound, "name has no address");
        for address in tokio::net::lookup_host(address).await? {
            match connect(address, Arc::clone(&config), Arc::clone(wire)).await {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    };
    let called = timeout(HANDSHAKE_MAX, called).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
    let stream = called.map_err(|error| broken(error).at(address))?;
    let shown = stream.get_ref().1.peer_certificates();
    peer_identity(shown, Some(callee)).map_err(|error| error.at(address))?;
    let certificate_check = CertificateCheck::of(credentials, shown, Side::Server)?;
    Ok(Box::new(Guarded::new(stream, &certificate_check)))
}

async fn connect(
    address: SocketAddr,
    config: Arc<ClientConfig>,
    wire: Arc<ByteCounters>,
) -> io::Result<tokio_rustls::client::TlsStream<CountedStream<TcpStream>>> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let name = SERVER_NAME.try_into().map_err(io::Error::other)?;
    TlsConnector::from(config).connect(name, CountedStream::new(stream, wire)).await
}

/// Error of a call that broke: denied, if the other side refused the certificate, which it can report only after the
/// handshake (<https://www.rfc-editor.org/rfc/rfc8446#section-4.4.2.4>); else unreachable.
#[must_use]
pub fn lost(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(inner) = cause {
        // `source` of an I/O error skips the error that it wraps.
        let wrapped = inner.downcast_ref::<io::Error>().and_then(|io| io.get_ref());
        let tls = wrapped.and_then(|wrapped| wrapped.downcast_ref::<rustls::Error>());
        if let Some(tls) = tls.or_else(|| inner.downcast_ref::<rustls::Error>()) {
            return refused(tls.clone());
        }
        cause = inner.source();
    }
    Error::unreachable("the other agent closed the connection").source(error)
}
