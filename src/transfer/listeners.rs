//! Listeners of both transports at one port.

use std::net::SocketAddr;

use super::identity::Credentials;
use super::{quic, tcp};
use crate::error::{ErrorKind, Result};

/// Tries for a port that is free for both, where the system chooses it.
const PORT_TRIES: u32 = 16;

/// Listeners of both transports at `address`, at the same port also where the system chooses it (port 0).
///
/// # Errors
/// Conflict, if the port is taken; denied or other, as the system says.
///
/// # Cancel safety
/// Safe.
pub async fn listen(address: SocketAddr, credentials: &Credentials) -> Result<(tcp::Listener, quic::Listener)> {
    let mut tries = 0;
    loop {
        let tcp = tcp::Listener::bind(address, credentials.clone()).await?;
        tries += 1;
        match quic::Listener::bind(tcp.address()?, credentials.clone()) {
            Ok(quic) => return Ok((tcp, quic)),
            // A port that the system chose for TCP may be taken for UDP.
            Err(error) if address.port() == 0 && error.kind() == ErrorKind::Conflict && tries < PORT_TRIES => {}
            Err(error) => return Err(error),
        }
    }
}
