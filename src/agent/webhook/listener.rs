//! TLS connections for the API's accept loop.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::serve::Listener;
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, Id, JoinSet};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// Handshakes at a time: of all addresses, and of one. A connection beyond displaces another.
const HANDSHAKES_MAX: usize = 512;
const HANDSHAKES_EACH: usize = 32;
/// Time for a handshake.
const HANDSHAKE_MAX: Duration = Duration::from_secs(3);

/// Accepts connections whose handshake is done; slow ones do not delay others.
pub(super) struct HttpsListener {
    tcp: TcpListener,
    tls: TlsAcceptor,
    handshakes: JoinSet<(Option<TlsStream<TcpStream>>, SocketAddr)>,
    /// Handshakes in progress, the oldest first; displaced ones are removed.
    begun: Vec<Handshake>,
}

struct Handshake {
    from: IpAddr,
    task: AbortHandle,
}

impl HttpsListener {
    pub(super) fn new(tcp: TcpListener, config: ServerConfig) -> Self {
        Self { tcp, tls: TlsAcceptor::from(Arc::new(config)), handshakes: JoinSet::new(), begun: Vec::new() }
    }

    fn begin(&mut self, stream: TcpStream, address: SocketAddr) {
        if let Some(displaced) = displaced_for(address.ip(), &self.begun) {
            let Handshake { from, task } = self.begun.remove(displaced);
            tracing::debug!(%from, "closed a connection to the webhook: too many handshakes");
            task.abort();
        }
        let tls = self.tls.clone();
        let task = self.handshakes.spawn(async move {
            let shaken = timeout(HANDSHAKE_MAX, tls.accept(stream)).await.unwrap_or_else(|late| Err(late.into()));
            if let Err(error) = &shaken {
                tracing::debug!(%address, "no TLS with a client of the webhook: {error}");
            }
            (shaken.ok(), address)
        });
        self.begun.push(Handshake { from: address.ip(), task });
    }

    fn end(&mut self, task: Id) {
        self.begun.retain(|one| one.task.id() != task);
    }
}

/// Place of the handshake that gives way to one from `address`: the oldest one of that address if it has its share or the most, else
/// of the addresses with the most; none if there is room.
fn displaced_for(address: IpAddr, begun: &[Handshake]) -> Option<usize> {
    let mut counts: HashMap<IpAddr, usize> = HashMap::new();
    begun.iter().for_each(|one| *counts.entry(one.from).or_default() += 1);
    let own = counts.get(&address).copied().unwrap_or_default();
    if own < HANDSHAKES_EACH && begun.len() < HANDSHAKES_MAX {
        return None;
    }
    let most = counts.values().copied().max()?;
    let own_gives_way = own >= HANDSHAKES_EACH || own == most;
    begun.iter().position(|one| if own_gives_way { one.from == address } else { counts[&one.from] == most })
}

impl Listener for HttpsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, SocketAddr) {
        loop {
            tokio::select! {
                Some(done) = self.handshakes.join_next_with_id() => match done {
                    Ok((task, (stream, address))) => {
                        self.end(task);
                        if let Some(stream) = stream {
                            return (stream, address);
                        }
                    }
                    Err(displaced) => self.end(displaced.id()),
                },
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

    /// A listener for 127.0.0.1.
    async fn listener() -> HttpsListener {
        let dir = tempfile::tempdir().unwrap();
        let now = SystemClock.now();
        let authority = Authority::create(&dir.path().join("authority"), "test", AUTHORITY_DAYS, now).unwrap();
        let (identity, folder) = (Identity::new("home", "webhook").unwrap(), dir.path().join("served"));
        authority.issue(&(&identity).into(), &folder, (AGENT_DAYS, now), false).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        HttpsListener::new(tcp, https_config(&folder).unwrap())
    }

    fn address(last: u16) -> SocketAddr {
        let [high, low] = last.to_be_bytes();
        SocketAddr::from(([10, 0, high, low], 1))
    }

    /// Begins handshakes of silent clients, of these addresses.
    async fn begin(listener: &mut HttpsListener, from: impl IntoIterator<Item = u16>) -> Vec<TcpStream> {
        let at = listener.tcp.local_addr().unwrap();
        let mut held = Vec::new();
        for last in from {
            held.push(TcpStream::connect(at).await.unwrap());
            let (stream, _) = listener.tcp.accept().await.unwrap();
            listener.begin(stream, address(last));
        }
        held
    }

    fn count(listener: &HttpsListener, last: u16) -> usize {
        listener.begun.iter().filter(|one| one.from == address(last).ip()).count()
    }

    #[tokio::test]
    async fn silent_connections_of_one_address_leave_room_for_others() {
        let mut listener = listener().await;
        let _held = begin(&mut listener, std::iter::repeat_n(1, HANDSHAKES_EACH + 8).chain([2])).await;
        assert_eq!([count(&listener, 1), count(&listener, 2)], [HANDSHAKES_EACH, 1]);
        let task = listener.begun.last().unwrap().task.id();
        listener.end(task);
        assert_eq!(count(&listener, 2), 0);
    }

    #[test]
    fn silent_connections_of_many_addresses_keep_nobody_out() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let mut tasks = JoinSet::new();
        let mut begun = |from: u16| Handshake {
            from: address(from).ip(),
            task: tasks.spawn_on(std::future::pending::<()>(), runtime.handle()),
        };
        // 16 addresses with 32 each: one of the first makes room.
        let few: Vec<Handshake> = (0..512).map(|n| begun(n % 16)).collect();
        assert_eq!(displaced_for(address(99).ip(), &few), Some(0));
        assert_eq!(displaced_for(address(5).ip(), &few), Some(5), "its own, with as many as any");
        assert_eq!(displaced_for(address(5).ip(), &few[..500]), None);
        // As many addresses as there are places: the oldest one makes room.
        let many: Vec<Handshake> = (0..512).map(&mut begun).collect();
        assert_eq!(displaced_for(address(600).ip(), &many), Some(0));
        let mixed: Vec<Handshake> = (0..510).chain([7, 8]).map(&mut begun).collect();
        assert_eq!(displaced_for(address(600).ip(), &mixed), Some(7), "of those with the most");
    }
}
