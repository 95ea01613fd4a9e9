//! The protocol over TCP with TLS: everything on one lane.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use super::calls::{ALPN_HTTP, Calls, Switch, switch};
use super::carrier::{CONNECTIONS_MAX, Dial, HANDSHAKE_MAX, broken};
use super::drive::{Client, Clockwork, Lanes, hello, serve};
use super::guarded::Guarded;
use super::identity::{Credentials, SERVER_NAME, Side, Standing, client_config, peer_identity, server_config};
use super::peers::Carrier;
use super::protocol::{Provider, Requester};
use super::wire::Counted;
use super::{Holdings, Wire};
use crate::error::{Error, Result};

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
    let wire = Arc::<Wire>::default();
    let connected = async {
        let begun = Instant::now();
        let stream = TcpStream::connect(address).await?;
        // A packet there and one back.
        let delay = begun.elapsed();
        stream.set_nodelay(true)?;
        Ok((TlsConnector::from(config).connect(name, Counted::new(stream, Arc::clone(&wire))).await?, delay))
    };
    let connected = timeout(HANDSHAKE_MAX, connected).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
    let (stream, delay) = connected.map_err(|error| broken(error).at(address))?;
    let shown = stream.get_ref().1.peer_certificates();
    let peer = peer_identity(shown, dial.expected).map_err(|error| error.at(address))?;
    let standing = Standing::of(credentials, shown, Side::Serves)?;
    let window = dial.window_for(delay);
    let memory = dial.memory_for(window).await.map_err(|error| error.at(address))?;
    let clock = Clockwork::start();
    let requester = Requester::new(hello(&credentials.identity(), window), peer, clock.now())?;
    let lanes = Lanes::both_ways(Guarded::new(stream, &standing));
    Ok(Client::start(requester, lanes, clock, (memory, wire)))
}

/// A place where peers connect.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    credentials: Credentials,
    calls: Option<Switch>,
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
        let socket = TcpListener::bind(address).await.map_err(|error| super::carrier::not_bound(error, address))?;
        Ok(Self { socket, credentials, calls: None })
    }

    /// Also takes calls from now on, for whoever holds what this returns to answer; else who calls is refused in the handshake.
    pub fn take_calls(&mut self) -> Calls {
        let (calls, taken) = switch();
        self.calls = Some(calls);
        taken
    }

    /// Where it listens.
    ///
    /// # Errors
    /// As the system says.
    pub fn address(&self) -> Result<SocketAddr> {
        self.socket.local_addr().map_err(|source| Error::other("socket has no address").source(source))
    }

    /// Serves whoever connects until `leaving`, and then until nobody has an open request.
    ///
    /// # Cancel safety
    /// Safe: every connection is dropped.
    pub async fn serve(self, holdings: Arc<dyn Holdings>, leaving: CancellationToken) -> Result<()> {
        let mut config = server_config(&self.credentials)?;
        config.alpn_protocols.extend(self.calls.as_ref().map(|_| ALPN_HTTP.to_vec()));
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        let mut connections = JoinSet::new();
        loop {
            // Those that are too many wait in the system's own queue.
            let accepted = tokio::select! {
                Ok(place) = Arc::clone(&places).acquire_owned() => tokio::select! {
                    accepted = self.socket.accept() => accepted.map(|(stream, from)| (stream, from, place)),
                    () = leaving.cancelled() => break,
                },
                () = leaving.cancelled() => break,
            };
            // Who is done is forgotten.
            while connections.try_join_next().is_some() {}
            match accepted {
                Ok((stream, from, place)) => {
                    let (acceptor, credentials) = (acceptor.clone(), self.credentials.clone());
                    let to = (Arc::clone(&holdings), self.calls.clone());
                    let leaving = leaving.clone();
                    connections.spawn(async move {
                        let _place = place;
                        if let Err(error) = attend(stream, acceptor, &credentials, to, leaving).await {
                            tracing::warn!(%from, "peer was refused: {error:?}");
                        }
                    });
                }
                // Such as too many open files: that passes, and must not make a busy loop.
                Err(error) => {
                    tracing::warn!("no connection can be accepted: {error}");
                    tokio::time::sleep(super::carrier::BREATH).await;
                }
            }
        }
        while connections.join_next().await.is_some() {}
        Ok(())
    }
}

async fn attend(
    stream: TcpStream,
    acceptor: TlsAcceptor,
    credentials: &Credentials,
    (holdings, calls): (Arc<dyn Holdings>, Option<Switch>),
    leaving: CancellationToken,
) -> Result<()> {
    let wire = Arc::<Wire>::default();
    let accepted = async {
        stream.set_nodelay(true)?;
        acceptor.accept(Counted::new(stream, Arc::clone(&wire))).await
    };
    let accepted = timeout(HANDSHAKE_MAX, accepted).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
    let stream = accepted.map_err(broken)?;
    let shown = stream.get_ref().1.peer_certificates();
    let peer = peer_identity(shown, None)?;
    let standing = Standing::of(credentials, shown, Side::Asks)?;
    let is_call = stream.get_ref().1.alpn_protocol() == Some(ALPN_HTTP);
    let stream = Guarded::new(stream, &standing);
    if let Some(calls) = calls.filter(|_| is_call) {
        tracing::debug!(%peer, "peer calls");
        holdings.called(&peer, wire);
        return calls.hand_over(Box::new(stream), peer);
    }
    holdings.opened(&peer, Carrier::Tcp, wire);
    let clock = Clockwork::start();
    let provider = Provider::new(hello(&credentials.identity(), 0), peer.clone(), 0, clock.now());
    let span = tracing::debug_span!("serving", %peer, carrier = "tcp");
    let closed = serve(provider, Lanes::both_ways(stream), clock, holdings, leaving).instrument(span).await;
    tracing::debug!(%peer, ?closed, "connection is over");
    Ok(())
}
