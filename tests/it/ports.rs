//! Ports for tests: one that refuses connections, and one that nobody is given by chance.

use std::net::{SocketAddr, TcpListener};

use tokio::net::TcpSocket;

/// A port that refuses connections, and that no other process is given while this lives.
pub(crate) struct ClosedPort(TcpSocket);

impl ClosedPort {
    pub(crate) fn new() -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        Self(socket)
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.0.local_addr().unwrap()
    }
}

/// An address that nobody is given by chance meanwhile: ports below those that the system hands out (from 32768), tried from one that
/// belongs to this process.
pub(crate) fn free_address() -> String {
    let own = std::process::id() % 12_000;
    let port = (0..12_000).map(|n| 20_000 + (own + n * 7) % 12_000);
    let mut free = port.filter_map(|port| {
        let address = format!("127.0.0.1:{port}");
        TcpListener::bind(&address).ok().map(|_| address)
    });
    free.next().unwrap()
}
