//! TLS connections for the API's accept loop.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::serve::Listener;
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// Handshakes at a time. Beyond, new connections wait in the backlog of the socket.
const HANDSHAKES_MAX: usize = 64;
/// Time for a handshake.
const HANDSHAKE_MAX: Duration = Duration::from_secs(5);

/// Accepts connections whose handshake is done; slow ones do not delay others.
pub(super) struct HttpsListener {
    tcp: TcpListener,
    tls: TlsAcceptor,
    handshakes: JoinSet<Option<(TlsStream<TcpStream>, SocketAddr)>>,
}

impl HttpsListener {
    pub(super) fn new(tcp: TcpListener, config: ServerConfig) -> Self {
        Self { tcp, tls: TlsAcceptor::from(Arc::new(config)), handshakes: JoinSet::new() }
    }

    fn begin(&mut self, stream: TcpStream, address: SocketAddr) {
        let tls = self.tls.clone();
        self.handshakes.spawn(async move {
            match timeout(HANDSHAKE_MAX, tls.accept(stream)).await {
                Ok(Ok(stream)) => Some((stream, address)),
                Ok(Err(error)) => {
                    tracing::debug!(%address, "no TLS with a client of the webhook: {error}");
                    None
                }
                Err(_) => None,
            }
        });
    }
}

impl Listener for HttpsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, SocketAddr) {
        loop {
            let may_begin = self.handshakes.len() < HANDSHAKES_MAX;
            tokio::select! {
                Some(done) = self.handshakes.join_next() => {
                    if let Ok(Some(done)) = done {
                        return done;
                    }
                }
                // Errors of `accept`, such as too many open files, are retried there.
                (stream, address) = Listener::accept(&mut self.tcp), if may_begin => self.begin(stream, address),
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }
}
