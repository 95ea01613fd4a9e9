//! The protocol over QUIC: control on one stream, frames on several, so that a lost packet delays only one of them.

mod congestion;
mod endpoint;
mod reset;
mod streams;

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use quinn::{Connection, Endpoint, Incoming};
use rustls::pki_types::CertificateDer;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use self::endpoint::{client, flow, server};
use self::streams::{StreamWriter, UnacknowledgedMemory, gather};
use super::connection_error::{broken_quic, displaced};
use super::driver::{Client, ConnectionClock, Lanes, ServedConnection, Window, hello_of, serve};
use super::gate::{PendingConnection, Unfinished};
use super::guarded;
use super::identity::{CertificateCheck, Credentials, SERVER_NAME, Side, peer_identity, refused};
use super::protocol::limits::LANES_MAX;
use super::protocol::{CONTROL, Closed, Provider, Requester};
use super::transport::{Dial, HANDSHAKE_MAX, REFUSED, Transport};
use super::{ByteCounters, ConnectionPermit, Gate, ServedChunks};
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::policy::Route;

/// Interval of updates of a connection's byte counters.
const COUNT_EVERY: Duration = Duration::from_millis(200);
/// Code that closes a connection whose peer's certificate is no longer accepted.
const DISTRUSTED: u8 = 1;
/// Streams that a provider opens for frames.
const LANES: u32 = 4;
/// Time for which QUIC keeps the state of a connection that was closed before any measurement: three probe timeouts of
/// a second (<https://www.rfc-editor.org/rfc/rfc9002#section-6.2.2>), and some margin.
const DRAINED: Duration = Duration::from_secs(4);

/// Connects to a peer at `address`.
///
/// # Errors
/// Unreachable, if nobody answers there in time; denied, if either side refuses the other's certificate, or another agent than
/// `dial.expected` answers.
///
/// # Cancel safety
/// Safe: the connection is dropped.
pub async fn connect(address: SocketAddr, credentials: &Credentials, dial: &Dial<'_>) -> Result<Client> {
    let (endpoint, config) = client(address, credentials, dial.window_max())?;
    let connecting = endpoint.connect_with(config, address, SERVER_NAME);
    let connecting =
        connecting.map_err(|source| Error::usage("cannot connect to the address").at(address).source(source))?;
    let late = || Error::unreachable("peer does not answer in time").at(address);
    let connected = timeout(HANDSHAKE_MAX, connecting).await.map_err(|_| late())?;
    let connection = connected.map_err(|error| broken_quic(error).at(address))?;
    let (peer, certificate_check) =
        who(&connection, credentials, dial.expected, Side::Server).map_err(|error| error.at(address))?;
    let window = dial.window_for(connection.rtt());
    let memory = dial.memory_for(window).await.map_err(|error| error.at(address))?;
    connection.set_receive_window(flow(window)?);
    let opened = connection.open_bi().await;
    let (writer, reader) = opened.map_err(|error| broken_quic(error).at(address))?;
    let mut lanes = Lanes::new();
    lanes.write(StreamWriter::new(writer, UnacknowledgedMemory::default()));
    let feeder = lanes.feeder();
    lanes.spawn(feeder.read(CONTROL, reader));
    let feeder = lanes.feeder();
    let wire = Arc::<ByteCounters>::default();
    let way = route(&connection);
    let counting = count(connection.clone(), Arc::clone(&wire));
    lanes.spawn(async move {
        // The endpoint lives as long as its connection is used.
        let _endpoint = endpoint;
        tokio::select! {
            () = gather(connection.clone(), feeder.clone()) => {}
            () = counting => {}
            error = certificate_check.ended() => {
                // The reason first: the streams would only report that the connection was closed on this side.
                feeder.fail(guarded::broken(error)).await;
                connection.close(DISTRUSTED.into(), b"certificate is not accepted any more");
            }
        }
    });
    let clock = ConnectionClock::start();
    let requester = Requester::new(hello_of(credentials, window), peer, clock.now())?;
    let window = Window { memory, wire, versions: Some(Arc::clone(credentials.versions())) };
    Ok(Client::start(requester, lanes, clock, window).over(way))
}

/// Copies the counters of `connection` to `wire` at intervals, and once more when it is dropped.
async fn count(connection: Connection, wire: Arc<ByteCounters>) {
    struct Counting(Connection, Arc<ByteCounters>);
    impl Counting {
        fn copy(&self) {
            let stats = self.0.stats();
            self.1.set(stats.udp_tx.bytes, stats.udp_rx.bytes);
        }
    }
    impl Drop for Counting {
        fn drop(&mut self) {
            self.copy();
        }
    }
    let counting = Counting(connection, wire);
    loop {
        counting.copy();
        sleep(COUNT_EVERY).await;
    }
}

/// Route of a connection.
fn route(connection: &Connection) -> Route {
    let remote = connection.remote_address();
    // quinn does not report it to clients: it is the address that the kernel chooses for the peer's address.
    let chosen = || {
        let any: SocketAddr =
            if remote.is_ipv4() { (Ipv4Addr::UNSPECIFIED, 0).into() } else { (Ipv6Addr::UNSPECIFIED, 0).into() };
        let socket = UdpSocket::bind(any).ok()?;
        socket.connect(remote).ok()?;
        Some(socket.local_addr().ok()?.ip())
    };
    let local = connection.local_ip().or_else(chosen);
    local.map_or(Route::Unknown, |local| Route::Connection { local, remote: remote.ip() })
}

/// Identity and standing of the peer.
fn who(
    connection: &Connection,
    credentials: &Credentials,
    expected: Option<&Identity>,
    side: Side,
) -> Result<(Identity, CertificateCheck)> {
    let shown = connection.peer_identity().and_then(|any| any.downcast::<Vec<CertificateDer<'static>>>().ok());
    let shown = shown.as_ref().map(|certificates| certificates.as_slice());
    Ok((peer_identity(shown, expected)?, CertificateCheck::of(credentials, shown, side)?))
}

/// QUIC listener for peers.
#[derive(Debug)]
pub struct Listener {
    endpoint: Endpoint,
    credentials: Credentials,
    gate: Gate,
}

/// Parts of a listener that each connection needs.
#[derive(Clone)]
struct Listening {
    credentials: Credentials,
    gate: Gate,
    served_chunks: Arc<dyn ServedChunks>,
    leaving: CancellationToken,
}

impl Listener {
    /// Listens at `address`.
    ///
    /// # Errors
    /// Conflict, if the port is taken; denied or other, as the system says.
    pub fn bind(address: SocketAddr, credentials: Credentials) -> Result<Self> {
        let endpoint = server(address, &credentials)?;
        Ok(Self { endpoint, credentials, gate: Gate::default() })
    }

    /// Admits connections through `gate` from now on, which other listeners may share.
    #[must_use]
    pub fn through(self, gate: Gate) -> Self {
        Self { gate, ..self }
    }

    /// Listening address.
    ///
    /// # Errors
    /// As the system says.
    pub fn address(&self) -> Result<SocketAddr> {
        self.endpoint.local_addr().map_err(|source| Error::other("socket has no address").source(source))
    }

    /// Serves connections until `leaving`, and then until nobody has an open request.
    ///
    /// # Cancel safety
    /// Safe: every connection is dropped.
    pub async fn serve(self, served_chunks: Arc<dyn ServedChunks>, leaving: CancellationToken) -> Result<()> {
        let Self { endpoint, credentials, gate } = self;
        let listening = Listening { credentials, gate, served_chunks, leaving: leaving.clone() };
        let mut connections = JoinSet::new();
        loop {
            let incoming = tokio::select! {
                incoming = endpoint.accept() => incoming,
                () = leaving.cancelled() => break,
            };
            let Some(incoming) = incoming else { break };
            while connections.try_join_next().is_some() {}
            // A retry token keeps no state here, but costs the peer a round trip: used only when many wait. Without it,
            // packets with forged source addresses could use up the shares of others.
            if !incoming.remote_address_validated() && listening.gate.is_busy() {
                // Retry cannot fail: the address is not validated.
                let _ = incoming.retry();
                continue;
            }
            let from = incoming.remote_address();
            let Some(unfinished) = listening.gate.begin(from.ip()) else {
                // Ignoring it costs nothing, and a real peer retries.
                incoming.ignore();
                continue;
            };
            let (validated, pending) = (incoming.remote_address_validated(), listening.gate.accept(from.ip()));
            if validated {
                // The peer has answered.
                pending.sent_data();
            }
            let listening = listening.clone();
            connections.spawn(async move {
                if let Err(error) = listening.serve_local(incoming, pending, unfinished).await
                    && let Some(kept_back) = REFUSED.may()
                {
                    tracing::warn!(%from, kept_back, "peer was refused: {error:?}");
                }
            });
        }
        while connections.join_next().await.is_some() {}
        endpoint.wait_idle().await;
        Ok(())
    }
}

impl Listening {
    /// Serves a connection from its beginning to its end.
    async fn serve_local(self, incoming: Incoming, pending: PendingConnection, unfinished: Unfinished) -> Result<()> {
        let late = |_| Error::unreachable("peer does not answer in time");
        let shaken = tokio::select! {
            shaken = timeout(self.gate.handshake_timeout(), incoming.into_future()) => {
                shaken.map_err(late).and_then(|shaken| shaken.map_err(broken_quic))
            }
            () = pending.displaced() => Err(displaced()),
        };
        let connection = match shaken {
            Ok(connection) => connection,
            Err(error) => {
                tokio::spawn(async move {
                    sleep(DRAINED).await;
                    drop(unfinished);
                });
                return Err(error);
            }
        };
        drop(unfinished);
        let (peer, certificate_check) = who(&connection, &self.credentials, None, Side::Client)?;
        let permit = self.gate.admit(&peer, &pending);
        // A refused connection keeps its handshake place until the refusal is sent.
        let pending = permit.is_err().then_some(pending);
        let gave_way = async {
            match &pending {
                Some(pending) => pending.displaced().await,
                None => std::future::pending().await,
            }
        };
        let mut gave_way = std::pin::pin!(gave_way);
        let opened = tokio::select! {
            opened = timeout(self.gate.handshake_timeout(), open(&connection)) => opened,
            () = &mut gave_way => return Err(displaced()),
        };
        let lanes = opened.map_err(late)?.map_err(broken_quic)?;
        let clock = ConnectionClock::start();
        let hello = hello_of(&self.credentials, 0);
        let mut provider = Provider::new(hello, peer.clone(), LANES, clock.now());
        let turned_away = permit.as_ref().err().map(|why| Error::exhausted(why.clone()).at(&peer));
        let wire = Arc::<ByteCounters>::default();
        let permit = permit.unwrap_or_else(|why| {
            provider.refuse_call(&why);
            ConnectionPermit::of_this_node()
        });
        if turned_away.is_none() {
            self.served_chunks.opened(&peer, Transport::Quic, Arc::clone(&wire));
        }
        let (versions, route) = (Some(Arc::clone(self.credentials.versions())), route(&connection));
        let served =
            ServedConnection { served_chunks: self.served_chunks, permit, route, leaving: self.leaving, versions };
        let span = tracing::debug_span!("serving", %peer, transport = "quic");
        let closed = tokio::select! {
            closed = serve(provider, lanes, clock, served).instrument(span) => closed,
            () = count(connection.clone(), wire) => Closed::Done,
            () = &mut gave_way => Closed::Done,
            error = certificate_check.ended() => {
                connection.close(DISTRUSTED.into(), b"certificate is not accepted any more");
                Closed::Lost(refused(error).to_string())
            }
        };
        connection.close(0u8.into(), b"over");
        tracing::debug!(%peer, ?closed, "connection is over");
        turned_away.map_or(Ok(()), Err)
    }
}

/// Streams of a connection: the one that its peer opens, and those for frames.
async fn open(connection: &Connection) -> Result<Lanes, quinn::ConnectionError> {
    let (writer, reader) = connection.accept_bi().await?;
    let (mut lanes, memory) = (Lanes::new(), UnacknowledgedMemory::default());
    lanes.write(StreamWriter::new(writer, memory.clone()));
    let feeder = lanes.feeder();
    lanes.spawn(feeder.read(CONTROL, reader));
    for _ in 0..LANES.min(LANES_MAX) {
        lanes.write(StreamWriter::new(connection.open_uni().await?, memory.clone()));
    }
    Ok(lanes)
}
