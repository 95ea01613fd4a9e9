//! Rate of a bare transport: bytes of memory sent over QUIC (quinn) or TLS on TCP (rustls), and read
//! away.
//!
//! `bare serve quinn|rustls ADDRESS CERT BYTES STREAMS` writes its certificate to CERT, serves one connection and ends;
//! `bare fetch quinn|rustls ADDRESS CERT` takes everything and prints bytes and seconds as JSON. One thread a side. QUIC's
//! windows are as wide as Towline's are, everything else is as the libraries have it.

#![expect(clippy::print_stdout, reason = "it answers its caller there")]

use std::io::{self, Error};
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{
    ClientConfig, Endpoint, EndpointConfig, RecvStream, SendStream, ServerConfig, TokioRuntime, TransportConfig,
};
use rustls::RootCertStore;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::{TlsAcceptor, TlsConnector};

const NAME: &str = "bare";
/// Bytes a write and a read are asked to move.
const PIECE: usize = 256 << 10;
/// QUIC's windows: more than one bandwidth-delay product of any link that is measured (1 Gbit/s, 50 ms: 6 MiB).
const WINDOW: u32 = 32 << 20;
/// As `src/transfer/quic/endpoint.rs` has it.
const SOCKET_BUFFER: usize = 4 << 20;

#[tokio::main(flavor = "current_thread")]
async fn main() -> io::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["serve", transport, address, cert, bytes, streams] => {
            let config = identity(Path::new(cert))?;
            let (bytes, streams) = (number(bytes)?, number(streams)?.max(1));
            match transport {
                "quinn" => serve_quic(parse(address)?, config, bytes, streams).await,
                "rustls" => serve_tls(parse(address)?, config, bytes).await,
                _ => Err(usage()),
            }
        }
        ["fetch", transport, address, cert] => {
            let config = trust(Path::new(cert))?;
            let began = Instant::now();
            let bytes = match transport {
                "quinn" => fetch_quic(parse(address)?, config).await?,
                "rustls" => fetch_tls(parse(address)?, config).await?,
                _ => return Err(usage()),
            };
            println!("{}", serde_json::json!({ "bytes": bytes, "seconds": began.elapsed().as_secs_f64() }));
            Ok(())
        }
        _ => Err(usage()),
    }
}

fn usage() -> Error {
    Error::other("usage: bare serve quinn|rustls ADDRESS CERT BYTES STREAMS | bare fetch quinn|rustls ADDRESS CERT")
}

fn number(text: &str) -> io::Result<u64> {
    text.parse().map_err(Error::other)
}

fn parse(text: &str) -> io::Result<SocketAddr> {
    text.parse().map_err(Error::other)
}

/// A certificate of its own; who is to connect reads it at `cert`.
fn identity(cert: &Path) -> io::Result<rustls::ServerConfig> {
    let own = rcgen::generate_simple_self_signed([NAME.to_owned()]).map_err(Error::other)?;
    std::fs::write(cert, own.cert.der())?;
    let key = PrivatePkcs8KeyDer::from(own.signing_key.serialize_der());
    let config = rustls::ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()));
    let config = config.with_protocol_versions(&[&rustls::version::TLS13]).map_err(Error::other)?.with_no_client_auth();
    config.with_single_cert(vec![own.cert.der().clone()], key.into()).map_err(Error::other)
}

fn trust(cert: &Path) -> io::Result<rustls::ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from(std::fs::read(cert)?)).map_err(Error::other)?;
    let config = rustls::ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()));
    let config = config.with_protocol_versions(&[&rustls::version::TLS13]).map_err(Error::other)?;
    Ok(config.with_root_certificates(roots).with_no_client_auth())
}

fn transport() -> Arc<TransportConfig> {
    let mut transport = TransportConfig::default();
    transport.stream_receive_window(WINDOW.into()).receive_window(WINDOW.into()).send_window(WINDOW.into());
    Arc::new(transport)
}

fn endpoint(address: SocketAddr, config: Option<ServerConfig>) -> io::Result<Endpoint> {
    let socket = UdpSocket::bind(address)?;
    rustix::net::sockopt::set_socket_recv_buffer_size(&socket, SOCKET_BUFFER)?;
    rustix::net::sockopt::set_socket_send_buffer_size(&socket, SOCKET_BUFFER)?;
    Endpoint::new(EndpointConfig::default(), config, socket, Arc::new(TokioRuntime))
}

async fn serve_quic(address: SocketAddr, config: rustls::ServerConfig, bytes: u64, streams: u64) -> io::Result<()> {
    let mut server = ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(config).map_err(Error::other)?));
    server.transport_config(transport());
    let endpoint = endpoint(address, Some(server))?;
    ready();
    let incoming = endpoint.accept().await.ok_or_else(|| Error::other("closed"))?;
    let connection = incoming.await?;
    let mut sending = JoinSet::new();
    for _ in 0..streams {
        let mut stream: SendStream = connection.open_uni().await?;
        sending.spawn(async move {
            send(&mut stream, bytes / streams).await?;
            stream.finish().map_err(Error::other)
        });
    }
    finished(sending).await?;
    connection.closed().await;
    endpoint.wait_idle().await;
    Ok(())
}

async fn fetch_quic(address: SocketAddr, config: rustls::ClientConfig) -> io::Result<u64> {
    let mut client = ClientConfig::new(Arc::new(QuicClientConfig::try_from(config).map_err(Error::other)?));
    client.transport_config(transport());
    let endpoint = endpoint((Ipv4Addr::UNSPECIFIED, 0).into(), None)?;
    let connection = endpoint.connect_with(client, address, NAME).map_err(Error::other)?.await?;
    let mut taken = JoinSet::new();
    let mut open = 0;
    let mut bytes = 0;
    loop {
        tokio::select! {
            stream = connection.accept_uni() => {
                let stream: RecvStream = stream?;
                open += 1;
                taken.spawn(take(stream));
            }
            Some(done) = taken.join_next() => {
                bytes += done.map_err(Error::other)??;
                open -= 1;
                // Every stream is opened before the first is over: the pieces are large.
                if open == 0 {
                    break;
                }
            }
        }
    }
    connection.close(0u8.into(), b"over");
    endpoint.wait_idle().await;
    Ok(bytes)
}

async fn serve_tls(address: SocketAddr, config: rustls::ServerConfig, bytes: u64) -> io::Result<()> {
    let listener = TcpListener::bind(address).await?;
    ready();
    let (stream, _) = listener.accept().await?;
    stream.set_nodelay(true)?;
    let mut stream = TlsAcceptor::from(Arc::new(config)).accept(stream).await?;
    send(&mut stream, bytes).await?;
    stream.shutdown().await
}

async fn fetch_tls(address: SocketAddr, config: rustls::ClientConfig) -> io::Result<u64> {
    let stream = TcpStream::connect(address).await?;
    let name = NAME.try_into().map_err(Error::other)?;
    take(TlsConnector::from(Arc::new(config)).connect(name, stream).await?).await
}

/// Says that connections may come.
fn ready() {
    println!("ready");
}

async fn send(to: &mut (impl AsyncWrite + Unpin), bytes: u64) -> io::Result<()> {
    let piece = vec![0x5a; PIECE];
    let mut left = bytes;
    while left > 0 {
        let len = usize::try_from(left).unwrap_or(PIECE).min(PIECE);
        to.write_all(&piece[..len]).await?;
        left -= len as u64;
    }
    to.flush().await
}

async fn take(mut from: impl AsyncRead + Unpin) -> io::Result<u64> {
    let mut piece = vec![0; PIECE];
    let mut bytes = 0;
    loop {
        match from.read(&mut piece).await? {
            0 => return Ok(bytes),
            len => bytes += len as u64,
        }
    }
}

async fn finished(mut tasks: JoinSet<io::Result<()>>) -> io::Result<()> {
    while let Some(done) = tasks.join_next().await {
        done.map_err(Error::other)??;
    }
    Ok(())
}
