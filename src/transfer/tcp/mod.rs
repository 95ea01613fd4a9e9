//! The protocol over TCP with TLS: everything on one lane.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tokio_rustls::server::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use super::byte_counters::CountedStream;
use super::calls::{ALPN_HTTP, CallSender, Calls, channel, refuse_call};
use super::connection_error::{broken, displaced, not_bound};
use super::driver::{Client, ConnectionClock, Lanes, ServedConnection, Window, hello_of, serve};
use super::gate::PendingConnection;
use super::guarded::Guarded;
use super::identity::{CertificateCheck, Credentials, SERVER_NAME, Side, client_config, peer_identity, server_config};
use super::protocol::{Provider, Requester};
use super::transport::{Dial, HANDSHAKE_MAX, REFUSED, Transport};
use super::{ByteCounters, ConnectionPermit, Gate, ServedChunks};
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::policy::Route;

/// Connects to a peer at `address`.
///
/// # Errors
/// Unreachable, if nobody answers there in time; denied, if either side refuses the other's certificate, or another agent than
/// `dial.expected` answers.
///
/// # Cancel safety
/// Safe: the connection is dropped.
pub async fn connect(address: SocketAddr, credentials: &Credentials, dial: &Dial<'_>) -> Result<Client> {
    let config = Arc::new(client_config(credentials)?);
    let name =
        SERVER_NAME.try_into().map_err(|source| Error::other("name of the server is malformed").source(source))?;
    let wire = Arc::<ByteCounters>::default();
    let connected = async {
        let begun = Instant::now();
        let stream = TcpStream::connect(address).await?;
        // One round trip.
        let delay = begun.elapsed();
        stream.set_nodelay(true)?;
        let way = route(&stream);
        Ok((TlsConnector::from(config).connect(name, CountedStream::new(stream, Arc::clone(&wire))).await?, delay, way))
    };
    let connected = timeout(HANDSHAKE_MAX, connected).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
    let (stream, delay, way) = connected.map_err(|error| broken(error).at(address))?;
    let shown = stream.get_ref().1.peer_certificates();
    let peer = peer_identity(shown, dial.expected).map_err(|error| error.at(address))?;
    let certificate_check = CertificateCheck::of(credentials, shown, Side::Server)?;
    let window = dial.window_for(delay);
    let memory = dial.memory_for(window).await.map_err(|error| error.at(address))?;
    let clock = ConnectionClock::start();
    let requester = Requester::new(hello_of(credentials, window), peer, clock.now())?;
    let lanes = Lanes::both_ways(Guarded::new(stream, &certificate_check));
    let window = Window { memory, wire, versions: Some(Arc::clone(credentials.versions())) };
    Ok(Client::start(requester, lanes, clock, window).over(way))
}

/// Route of a connection.
fn route(stream: &TcpStream) -> Route {
    match (stream.local_addr(), stream.peer_addr()) {
        (Ok(local), Ok(remote)) => Route::Connection { local: local.ip(), remote: remote.ip() },
        _ => Route::Unknown,
    }
}

/// TCP listener for peers.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    credentials: Credentials,
    gate: Gate,
    calls: Option<CallSender>,
}

/// Parts of a listener that each connection needs.
#[derive(Clone)]
struct Listening {
    acceptor: TlsAcceptor,
    credentials: Credentials,
    gate: Gate,
    served_chunks: Arc<dyn ServedChunks>,
    calls: Option<CallSender>,
    leaving: CancellationToken,
}

impl Listener {
    /// Listens at `address`.
    ///
    /// # Errors
    /// Conflict, if the port is taken; denied or other, as the system says.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn bind(address: SocketAddr, credentials: Credentials) -> Result<Self> {
        let socket = TcpListener::bind(address).await.map_err(|error| not_bound(error, address))?;
        Ok(Self { socket, credentials, gate: Gate::default(), calls: None })
    }

    /// Admits connections through `gate` from now on, which other listeners may share.
    #[must_use]
    pub fn through(self, gate: Gate) -> Self {
        Self { gate, ..self }
    }

    /// Also accepts calls from now on, which the returned receiver must answer; otherwise calls are refused in the
    /// handshake.
    pub fn take_calls(&mut self) -> Calls {
        let (calls, taken) = channel();
        self.calls = Some(calls);
        taken
    }

    /// Listening address.
    ///
    /// # Errors
    /// As the system says.
    pub fn address(&self) -> Result<SocketAddr> {
        self.socket.local_addr().map_err(|source| Error::other("socket has no address").source(source))
    }

    /// Serves connections until `leaving`, and then until nobody has an open request.
    ///
    /// # Cancel safety
    /// Safe: every connection is dropped.
    pub async fn serve(self, served_chunks: Arc<dyn ServedChunks>, leaving: CancellationToken) -> Result<()> {
        let mut config = server_config(&self.credentials)?;
        config.alpn_protocols.extend(self.calls.as_ref().map(|_| ALPN_HTTP.to_vec()));
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let Self { socket, credentials, gate, calls } = self;
        let listening = Listening { acceptor, credentials, gate, served_chunks, calls, leaving: leaving.clone() };
        let mut connections = JoinSet::new();
        loop {
            let accepted = tokio::select! {
                accepted = socket.accept() => accepted,
                () = leaving.cancelled() => break,
            };
            // Reaps finished connections.
            while connections.try_join_next().is_some() {}
            match accepted {
                Ok((stream, from)) => {
                    let (pending, listening) = (listening.gate.accept(from.ip()), listening.clone());
                    connections.spawn(async move {
                        if let Err(error) = Box::pin(listening.serve_local(stream, pending)).await
                            && let Some(kept_back) = REFUSED.may()
                        {
                            tracing::warn!(%from, kept_back, "peer was refused: {error:?}");
                        }
                    });
                }
                // For example too many open files: that passes, and must not make a busy loop.
                Err(error) => {
                    if let Some(kept_back) = REFUSED.may() {
                        tracing::warn!(kept_back, "cannot accept a connection: {error}");
                    }
                    tokio::time::sleep(super::transport::BREATH).await;
                }
            }
        }
        drop(socket);
        while connections.join_next().await.is_some() {}
        Ok(())
    }
}

/// Sends a refusal to a connection. It keeps its handshake place meanwhile, and ends at once if another connection
/// needs the place.
async fn unless_displaced(served: impl Future<Output = ()>, pending: &PendingConnection) {
    tokio::select! {
        () = served => {}
        () = pending.displaced() => {}
    }
}

impl Listening {
    /// Serves a connection from its beginning to its end.
    async fn serve_local(self, stream: TcpStream, pending: PendingConnection) -> Result<()> {
        let (wire, way) = (Arc::<ByteCounters>::default(), route(&stream));
        let accepted = async {
            stream.set_nodelay(true)?;
            // A silent connection costs no more than a socket.
            stream.readable().await?;
            pending.sent_data();
            self.acceptor.accept(CountedStream::new(stream, Arc::clone(&wire))).await
        };
        let accepted = tokio::select! {
            accepted = timeout(self.gate.handshake_timeout(), accepted) => accepted,
            () = pending.displaced() => return Err(displaced()),
        };
        let stream = accepted.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())).map_err(broken)?;
        let shown = stream.get_ref().1.peer_certificates();
        let peer = peer_identity(shown, None)?;
        let certificate_check = CertificateCheck::of(&self.credentials, shown, Side::Client)?;
        let calls = self.calls.clone().filter(|_| stream.get_ref().1.alpn_protocol() == Some(ALPN_HTTP));
        let stream = Guarded::new(stream, &certificate_check);
        match (self.gate.admit(&peer, &pending), calls) {
            (Ok(permit), Some(calls)) => {
                drop(pending);
                tracing::debug!(%peer, "peer calls");
                self.served_chunks.called(&peer, wire);
                calls.send(stream, peer, permit)
            }
            (Ok(permit), None) => {
                drop(pending);
                self.served_chunks.opened(&peer, Transport::Tcp, wire);
                self.serve(stream, peer, way, Ok(permit)).await;
                Ok(())
            }
            (Err(why), calls) => {
                let served = async {
                    match calls {
                        Some(_) => refuse_call(stream, &why).await,
                        None => self.serve(stream, peer.clone(), way, Err(why.clone())).await,
                    }
                };
                unless_displaced(served, &pending).await;
                Err(Error::exhausted(why).at(peer))
            }
        }
    }

    /// Serves `peer`, or refuses it with the reason.
    async fn serve(
        self,
        stream: Guarded<TlsStream<CountedStream<TcpStream>>>,
        peer: Identity,
        route: Route,
        permit: Result<ConnectionPermit, String>,
    ) {
        let clock = ConnectionClock::start();
        let mut provider = Provider::new(hello_of(&self.credentials, 0), peer.clone(), 0, clock.now());
        let permit = permit.unwrap_or_else(|why| {
            provider.refuse_call(&why);
            ConnectionPermit::of_this_node()
        });
        let versions = Some(Arc::clone(self.credentials.versions()));
        let served =
            ServedConnection { served_chunks: self.served_chunks, permit, route, leaving: self.leaving, versions };
        let span = tracing::debug_span!("serving", %peer, transport = "tcp");
        let closed = serve(provider, Lanes::both_ways(stream), clock, served).instrument(span).await;
        tracing::debug!(%peer, ?closed, "connection is over");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transfer::Admission;

    #[tokio::test]
    async fn who_is_refused_gives_its_place_to_who_comes() {
        let gate = Gate::new(Admission { handshakes: 1, handshakes_per_address: 1, ..Admission::default() });
        let address = std::net::Ipv4Addr::LOCALHOST.into();
        let refused = gate.accept(address);
        let served = unless_displaced(std::future::pending(), &refused);
        let _next = gate.accept(address);
        // Returns, although the answer is never sent.
        served.await;
    }
}
