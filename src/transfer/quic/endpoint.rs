//! Sockets and settings of QUIC.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{
    AckFrequencyConfig, ClientConfig, Endpoint, EndpointConfig, ServerConfig, TokioRuntime, TransportConfig, VarInt,
};

use super::congestion::BbrFactory;
use super::reset::endpoint_config;
use crate::error::{Error, Result};
use crate::limits::MIB;
use crate::transfer::connection_error::not_bound;
use crate::transfer::identity::{Credentials, client_config, server_config};
use crate::transfer::protocol::limits::{CONTROL_LEN_MAX, LANES_MAX, READ_AHEAD_MAX};
use crate::transfer::transport::GOOD_WINDOW;

/// Socket buffer in bytes, each way. The system's default of about 200 KiB holds less than 100 full packets.
const SOCKET_BUFFER: usize = 4 << 20;
/// Packets for each acknowledgement. One for every two (RFC 9000, 13.2.2) would be a third of all packets, and CPU time
/// depends on the number of packets; the sender requests fewer with
/// <https://datatracker.ietf.org/doc/html/draft-ietf-quic-ack-frequency-04>.
const ACKNOWLEDGED: u32 = 10;
/// Maximum number of connections that wait to be accepted, and bytes of packets that each may have sent meanwhile.
const INCOMING_MAX: usize = 256;
const INCOMING_BYTES: u64 = 16 << 10;
/// Time without a packet after which a connection is lost: longer than the protocol's own timeouts.
const IDLE_MAX: Duration = Duration::from_secs(40);

/// Socket of its own to connect to `address` from, and its configuration.
pub(super) fn client(address: SocketAddr, credentials: &Credentials, window: u64) -> Result<(Endpoint, ClientConfig)> {
    let any = if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let endpoint = endpoint(SocketAddr::new(any, 0), EndpointConfig::default(), None)?;
    let crypto = QuicClientConfig::try_from(client_config(credentials)?);
    let crypto = crypto.map_err(|source| Error::other("QUIC is not at hand").source(source))?;
    let mut config = ClientConfig::new(Arc::new(crypto));
    let mut transport = transport(window)?;
    transport.max_concurrent_bidi_streams(0u8.into());
    transport.max_concurrent_uni_streams(LANES_MAX.into());
    config.transport_config(Arc::new(transport));
    Ok((endpoint, config))
}

/// Socket that listens at `address`.
pub(super) fn server(address: SocketAddr, credentials: &Credentials) -> Result<Endpoint> {
    let crypto = QuicServerConfig::try_from(server_config(credentials)?);
    let crypto = crypto.map_err(|source| Error::other("QUIC is not at hand").source(source))?;
    let mut config = ServerConfig::with_crypto(Arc::new(crypto));
    // A requester sends control messages only.
    let mut transport = transport(2 * CONTROL_LEN_MAX)?;
    let window = VarInt::try_from(2 * CONTROL_LEN_MAX).map_err(|_| Error::other("window is out of range"))?;
    transport.stream_receive_window(window).receive_window(window);
    transport.max_concurrent_bidi_streams(1u8.into());
    transport.max_concurrent_uni_streams(0u8.into());
    config.transport_config(Arc::new(transport));
    // The policy rules on the addresses of a connection, which therefore stay: one that moves is made anew.
    config.migration(false);
    // Of those that were not looked at yet, which is done at once.
    config.max_incoming(INCOMING_MAX).incoming_buffer_size(INCOMING_BYTES);
    config.incoming_buffer_size_total(INCOMING_BYTES * INCOMING_MAX as u64);
    endpoint(address, endpoint_config(&credentials.reset_secret()), Some(config))
}

/// QUIC's flow control window for one of the protocol, whose credit bounds the bytes in transit: QUIC's only must not
/// be smaller.
pub(super) fn flow(window: u64) -> Result<VarInt> {
    VarInt::from_u64(window + MIB).map_err(|_| Error::usage("window is too large").got(window))
}

/// Settings for connections with windows of at most `window`, and no window until that is known.
fn transport(window: u64) -> Result<TransportConfig> {
    let mut transport = TransportConfig::default();
    transport
        .stream_receive_window(flow(window)?)
        .receive_window(flow(window.min(GOOD_WINDOW))?)
        .send_window(READ_AHEAD_MAX);
    transport.datagram_receive_buffer_size(None);
    // Cubic takes each lost packet for congestion: at 300 Mbit/s over 50 ms with one packet in a thousand lost it uses
    // a 30th (benches/links).
    transport.congestion_controller_factory(Arc::new(BbrFactory::default()));
    let mut acknowledging = AckFrequencyConfig::default();
    acknowledging.ack_eliciting_threshold((ACKNOWLEDGED - 1).into());
    transport.ack_frequency_config(Some(acknowledging));
    let idle = IDLE_MAX.try_into().map_err(|_| Error::other("idle time is out of range"))?;
    transport.max_idle_timeout(Some(idle));
    Ok(transport)
}

fn endpoint(address: SocketAddr, settings: EndpointConfig, config: Option<ServerConfig>) -> Result<Endpoint> {
    let made = UdpSocket::bind(address).and_then(|socket| {
        // A smaller buffer still works, only slower.
        let _ = rustix::net::sockopt::set_socket_recv_buffer_size(&socket, SOCKET_BUFFER);
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(&socket, SOCKET_BUFFER);
        Endpoint::new(settings, config, socket, Arc::new(TokioRuntime))
    });
    made.map_err(|error| not_bound(error, address))
}
