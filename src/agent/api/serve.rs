//! Accept loop of the API, with connection limits, timeouts and graceful shutdown.

use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::serve::Listener;
use futures::TryFutureExt as _;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::process::Uid;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{UnixListener, UnixStream};
use tokio_io_timeout::TimeoutStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::slots::{Client, ConnectionSlot, ConnectionSlots, with_guard};
use crate::agent::socket::may_connect;
use crate::transfer::calls::{CallStream, Calls, RemoteCaller};

/// Limit of concurrent connections of one listener. Beyond it, a new connection replaces another, see [`ConnectionSlots::take`].
const CONNECTIONS_MAX: usize = 256;
/// Timeout for the head of a request; also the keep-alive timeout.
const HEAD_WITHIN: Duration = Duration::from_secs(30);
/// Timeout for a client that reads nothing of a response.
const STALL: Duration = Duration::from_mins(1);
/// Buffer size of a connection in each direction, in bytes; a longer head is refused.
const BUFFERED_MAX: usize = 64 << 10;

/// Calls from other agents are accepted like any other connection.
impl Listener for Calls {
    type Io = CallStream;
    type Addr = RemoteCaller;

    async fn accept(&mut self) -> (CallStream, RemoteCaller) {
        match self.next().await {
            Some(call) => call,
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<RemoteCaller> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Unix socket. It checks the peer's credentials (<https://man7.org/linux/man-pages/man7/unix.7.html>, `SO_PEERCRED`), so that
/// only the agent's user and root can use it, even if its file changes its owner.
pub(in crate::agent) struct Local(pub(in crate::agent) UnixListener);

impl Listener for Local {
    type Io = UnixStream;
    type Addr = Uid;

    async fn accept(&mut self) -> (UnixStream, Uid) {
        loop {
            let (stream, _) = Listener::accept(&mut self.0).await;
            match stream.peer_cred() {
                Ok(peer) if may_connect(Uid::from_raw(peer.uid())) => return (stream, Uid::from_raw(peer.uid())),
                Ok(peer) => tracing::warn!(
                    "refused a process of user {} at the socket: the owner of its folder has changed",
                    peer.uid()
                ),
                Err(error) => tracing::debug!("a connection to the socket was closed at once: {error}"),
            }
        }
    }

    fn local_addr(&self) -> io::Result<Uid> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Accepts connections from `listener` until `leaving` is cancelled, then finishes requests in progress. `caller` maps a peer
/// address to the origin of its requests, which handlers get as an extension.
///
/// # Cancel safety
/// Safe: open connections are dropped.
pub(in crate::agent) async fn serve<L: Listener, C: Client + Clone + Send + Sync + 'static>(
    mut listener: L,
    caller: impl Fn(L::Addr) -> C,
    router: Router,
    leaving: CancellationToken,
) {
    let (slots, connections) = (ConnectionSlots::new(CONNECTIONS_MAX), TaskTracker::new());
    loop {
        let next = async {
            // Displace only when a new connection arrives.
            let (stream, from) = listener.accept().await;
            let caller = caller(from);
            let slot = slots.take(caller.origin()).await;
            (stream, caller, slot)
        };
        let (stream, caller, slot) = tokio::select! {
            next = next => next,
            () = leaving.cancelled() => break,
        };
        let Some(slot) = slot else {
            tracing::debug!("closed a new connection to the API: its client has the most, and all are served");
            continue;
        };
        let (router, leaving) = (router.clone(), leaving.clone());
        connections.spawn(async move {
            let slot = Arc::new(slot);
            let served = connection(unless_stalled(stream, STALL), router, caller, &slot, leaving);
            tokio::select! {
                () = served => {}
                () = slot.displaced() => tracing::debug!("closed a connection to the API, for a new one or a client that reads too slowly"),
            }
        });
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}

/// Wraps `stream`: a write without progress for `stall` is an error.
fn unless_stalled<S: AsyncRead + AsyncWrite>(stream: S, stall: Duration) -> Pin<Box<TimeoutStream<S>>> {
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(stall));
    Box::pin(stream)
}

async fn connection<C: Clone + Send + Sync + 'static>(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    caller: C,
    slot: &Arc<ConnectionSlot>,
    leaving: CancellationToken,
) {
    let (router, slot) = (TowerToHyperService::new(router), Arc::clone(slot));
    let router = service_fn(move |mut request: Request<Incoming>| {
        let busy = slot.busy();
        request.extensions_mut().insert(caller.clone());
        request.extensions_mut().insert(slot.ending());
        router.call(request).map_ok(|response| with_guard(response, busy))
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_WITHIN).max_buf_size(BUFFERED_MAX);
    let served = http.serve_connection(TokioIo::new(stream), router).with_upgrades();
    let mut served = pin!(served);
    let ended = tokio::select! {
        ended = served.as_mut() => ended,
        () = leaving.cancelled() => {
            served.as_mut().graceful_shutdown();
            served.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!("a connection to the API failed: {error}");
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::routing::get;
    use futures::stream;
    use hyper::body::Bytes;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
    use tokio::time::timeout;

    use super::super::caller::Caller;
    use super::*;

    #[tokio::test]
    async fn who_takes_nothing_of_an_answer_is_let_go() {
        let endless =
            || async { Body::from_stream(stream::repeat_with(|| Ok::<_, io::Error>(Bytes::from_static(&[7; 1000])))) };
        let router = Router::new().route("/", get(endless));
        let (mut ours, theirs) = duplex(4096);
        let served = tokio::spawn(async move {
            let slot = Arc::new(ConnectionSlots::new(1).take(None).await.unwrap());
            let stream = unless_stalled(theirs, Duration::from_millis(50));
            connection(stream, router, Caller::Loopback, &slot, CancellationToken::new()).await;
        });
        ours.write_all(b"GET / HTTP/1.1\r\nhost: agent\r\n\r\n").await.unwrap();
        ours.read_exact(&mut [0; 4096]).await.unwrap();
        timeout(Duration::from_mins(1), served).await.expect("it does not wait for ever").unwrap();
    }
}
