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
        let own = self.from.get(&address.ip()).copied().unwrap_or_default();
        if own >= HANDSHAKES_EACH || self.handshakes.len() >= HANDSHAKES_MAX {
            tracing::debug!(%address, "closed a connection to the webhook: too many handshakes");
            return;
        }
        self.from.insert(address.ip(), own + 1);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::{Clock as _, SystemClock};
    use crate::identity::Identity;
    use crate::transfer::identity::{AGENT_DAYS, AUTHORITY_DAYS, Authority, https_config};

    #[tokio::test]
    async fn silent_connections_of_one_address_leave_room_for_others() {
        let dir = tempfile::tempdir().unwrap();
        let now = SystemClock.now();
        let authority = Authority::create(&dir.path().join("authority"), "test", AUTHORITY_DAYS, now).unwrap();
        let (identity, folder) = (Identity::new("home", "webhook").unwrap(), dir.path().join("served"));
        authority.issue(&(&identity).into(), &folder, (AGENT_DAYS, now), false).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = tcp.local_addr().unwrap();
        let mut listener = HttpsListener::new(tcp, https_config(&folder).unwrap());
        let address = |last| SocketAddr::from(([10, 0, 0, last], 1));
        let mut held = Vec::new();
        for last in std::iter::repeat_n(1, HANDSHAKES_EACH + 8).chain([2]) {
            let client = TcpStream::connect(at).await.unwrap();
            let (stream, _) = listener.tcp.accept().await.unwrap();
            listener.begin(stream, address(last));
            held.push(client);
        }
        assert_eq!(listener.from, [(address(1).ip(), HANDSHAKES_EACH), (address(2).ip(), 1)].into());
        listener.end(address(2).ip());
        assert_eq!(listener.from.len(), 1, "addresses without handshakes are forgotten");
    }
}
