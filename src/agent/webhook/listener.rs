//! TLS connections for the API's accept loop.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::serve::Listener;
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// Handshakes at a time: of all addresses, and of one. A connection beyond is closed.
const HANDSHAKES_MAX: usize = 512;
const HANDSHAKES_EACH: usize = 32;
/// Time for a handshake.
const HANDSHAKE_MAX: Duration = Duration::from_secs(5);

/// Accepts connections whose handshake is done; slow ones do not delay others.
pub(super) struct HttpsListener {
    tcp: TcpListener,
    tls: TlsAcceptor,
    handshakes: JoinSet<(Option<TlsStream<TcpStream>>, SocketAddr)>,
    /// Handshakes by address.
    from: HashMap<IpAddr, usize>,
}

impl HttpsListener {
    pub(super) fn new(tcp: TcpListener, config: ServerConfig) -> Self {
        Self { tcp, tls: TlsAcceptor::from(Arc::new(config)), handshakes: JoinSet::new(), from: HashMap::new() }
    }

    fn begin(&mut self, stream: TcpStream, address: SocketAddr) {
        let own = self.from.entry(address.ip()).or_default();
        if *own >= HANDSHAKES_EACH || self.handshakes.len() >= HANDSHAKES_MAX {
            tracing::debug!(%address, "closed a connection to the webhook: too many handshakes");
            return;
        }
        *own += 1;
        let tls = self.tls.clone();
        self.handshakes.spawn(async move {
            let shaken = timeout(HANDSHAKE_MAX, tls.accept(stream)).await.unwrap_or_else(|late| Err(late.into()));
            if let Err(error) = &shaken {
                tracing::debug!(%address, "no TLS with a client of the webhook: {error}");
            }
            (shaken.ok(), address)
        });
    }

    fn end(&mut self, address: IpAddr) {
        if let Some(own) = self.from.get_mut(&address) {
            *own -= 1;
            if *own == 0 {
                self.from.remove(&address);
            }
        }
    }
}

impl Listener for HttpsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, SocketAddr) {
        loop {
            tokio::select! {
                Some(Ok((stream, address))) = self.handshakes.join_next() => {
                    self.end(address.ip());
                    if let Some(stream) = stream {
                        return (stream, address);
                    }
                }
                // Errors of `accept`, such as too many open files, are retried there.
                (stream, address) = Listener::accept(&mut self.tcp) => self.begin(stream, address),
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }
}
