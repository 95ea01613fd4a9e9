//! Sockets and settings of QUIC.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use quinn::congestion::BbrConfig;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{
    AckFrequencyConfig, ClientConfig, ConnectionError, Endpoint, EndpointConfig, ServerConfig, TokioRuntime,
    TransportConfig, VarInt,
};

use rustls::{AlertDescription, CertificateError};

use crate::error::{Error, Result};
use crate::limits::MIB;
use crate::transfer::identity::{Credentials, client_config, refused, server_config};
use crate::transfer::protocol::limits::{AHEAD_MAX, CONTROL_LEN_MAX, LANES_MAX};
use crate::transfer::transport::{GOOD_WINDOW, not_bound};

/// Bytes that the system may keep of a socket, each way. Its default of about 200 KiB holds less than 100 full packets.
const SOCKET_BUFFER: usize = 4 << 20;
/// Packets that are acknowledged together. One acknowledgement for every two (RFC 9000, 13.2.2) is a third of all packets, and the processor's time
/// goes by packets; a sender asks for fewer by <https://datatracker.ietf.org/doc/html/draft-ietf-quic-ack-frequency-04>.
const ACKNOWLEDGED: u32 = 10;
/// Connections that wait to be looked at, at most, and bytes of packets that each may have sent meanwhile.
const INCOMING_MAX: usize = 256;
const INCOMING_BYTES: u64 = 16 << 10;
/// A connection without a packet for so long is gone: longer than the protocol's own watchdogs take.
const IDLE_MAX: Duration = Duration::from_secs(40);

/// A socket of its own to connect to `address` from, and how to.
pub(super) fn client(address: SocketAddr, credentials: &Credentials, window: u64) -> Result<(Endpoint, ClientConfig)> {
    let any = if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let endpoint = endpoint(SocketAddr::new(any, 0), None)?;
    let crypto = QuicClientConfig::try_from(client_config(credentials)?);
    let crypto = crypto.map_err(|source| Error::other("QUIC is not at hand").source(source))?;
    let mut config = ClientConfig::new(Arc::new(crypto));
    let mut transport = transport(window)?;
    transport.max_concurrent_bidi_streams(0u8.into());
    transport.max_concurrent_uni_streams(LANES_MAX.into());
    config.transport_config(Arc::new(transport));
    Ok((endpoint, config))
}

/// A socket that listens at `address`.
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
    // Of those that were not looked at yet, which is done at once.
    config.max_incoming(INCOMING_MAX).incoming_buffer_size(INCOMING_BYTES);
    config.incoming_buffer_size_total(INCOMING_BYTES * INCOMING_MAX as u64);
    endpoint(address, Some(config))
}

/// QUIC's own window for one of the protocol, whose credit bounds what is on its way: it only must not be tighter.
pub(super) fn flow(window: u64) -> Result<VarInt> {
    VarInt::from_u64(window + MIB).map_err(|_| Error::usage("window is impossibly large").got(window))
}

/// For connections whose windows are `window` at most, and none until that is known.
fn transport(window: u64) -> Result<TransportConfig> {
    let mut transport = TransportConfig::default();
    transport
        .stream_receive_window(flow(window)?)
        .receive_window(flow(window.min(GOOD_WINDOW))?)
        .send_window(AHEAD_MAX);
    transport.datagram_receive_buffer_size(None);
    // Cubic takes each lost packet for a full line: of 300 Mbit/s over 50 ms with one lost in a thousand it fills a 30th
    // (benches/links). BBR goes by the rate at which packets arrive (<https://doi.org/10.1145/3009824>).
    transport.congestion_controller_factory(Arc::new(BbrConfig::default()));
    let mut acknowledging = AckFrequencyConfig::default();
    acknowledging.ack_eliciting_threshold((ACKNOWLEDGED - 1).into());
    transport.ack_frequency_config(Some(acknowledging));
    let idle = IDLE_MAX.try_into().map_err(|_| Error::other("idle time is out of range"))?;
    transport.max_idle_timeout(Some(idle));
    Ok(transport)
}

fn endpoint(address: SocketAddr, config: Option<ServerConfig>) -> Result<Endpoint> {
    let made = UdpSocket::bind(address).and_then(|socket| {
        // A system that grants less still works, if slower.
        let _ = rustix::net::sockopt::set_socket_recv_buffer_size(&socket, SOCKET_BUFFER);
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(&socket, SOCKET_BUFFER);
        Endpoint::new(EndpointConfig::default(), config, socket, Arc::new(TokioRuntime))
    });
    made.map_err(|error| not_bound(error, address))
}

/// Why a connection failed, in words.
pub(in crate::transfer) fn broken(error: ConnectionError) -> Error {
    let tls = match &error {
        // Found here; of the cause only the alert and its text are left.
        ConnectionError::TransportError(own) => alert(own.code.into()).map(found_here),
        ConnectionError::ConnectionClosed(close) => alert(close.error_code.into()).map(rustls::Error::AlertReceived),
        _ => None,
    };
    match (tls, &error) {
        (Some(tls), _) => refused(tls),
        (None, ConnectionError::TimedOut) => Error::unreachable("peer does not answer in time").source(error),
        (None, _) => Error::unreachable("peer cannot be reached").source(error),
    }
}

/// The TLS alert that an error code of QUIC stands for (RFC 9001, 4.8: 0x100 and the alert's number).
fn alert(code: u64) -> Option<AlertDescription> {
    u8::try_from(code.checked_sub(0x100)?).ok().map(Into::into)
}

/// Error by the alert that was sent because of it.
fn found_here(alert: AlertDescription) -> rustls::Error {
    match alert {
        AlertDescription::CertificateExpired => CertificateError::Expired.into(),
        AlertDescription::CertificateRevoked => CertificateError::Revoked.into(),
        AlertDescription::UnknownCA | AlertDescription::DecryptError => CertificateError::UnknownIssuer.into(),
        AlertDescription::CertificateRequired => rustls::Error::NoCertificatesPresented,
        AlertDescription::BadCertificate | AlertDescription::CertificateUnknown => {
            CertificateError::ApplicationVerificationFailure.into()
        }
        other => rustls::Error::General(format!("{other:?}")),
    }
}
