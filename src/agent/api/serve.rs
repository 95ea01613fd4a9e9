//! Connections: taken in while there is room, and let go when the agent ends.

use std::io;
use std::pin::pin;
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
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::auth::Caller;
use super::slots::{ConnectionSlot, ConnectionSlots};
use crate::agent::socket::may_connect;
use crate::transfer::calls::{Calls, Line, RemoteCaller};

/// Connections at one caller at the same time, at most. One more takes the place of the one that has been silent longest.
const CONNECTIONS_MAX: usize = 256;
/// A request's head must be there within this, and a connection without one is closed.
const HEAD_WITHIN: Duration = Duration::from_secs(30);
/// Bytes of a connection that are buffered each way, at most: a head that is longer is refused.
const BUFFERED_MAX: usize = 64 << 10;

/// Other agents call as others connect.
impl Listener for Calls {
    type Io = Line;
    type Addr = RemoteCaller;

    async fn accept(&mut self) -> (Line, RemoteCaller) {
        match self.next().await {
            Some(call) => call,
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<RemoteCaller> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// The Unix socket; the agent's user and root may use it, whatever becomes of its file's owner. Who connects is told by the kernel (<https://man7.org/linux/man-pages/man7/unix.7.html>, `SO_PEERCRED`).
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
                    "a process of user {} was refused at the socket: its folder has changed hands",
                    peer.uid()
                ),
                Err(error) => tracing::debug!("a connection to the socket is gone already: {error}"),
            }
        }
    }

    fn local_addr(&self) -> io::Result<Uid> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Serves at `listener` until `leaving`, and what was begun by then to its end. Who connects from where has come through which `caller`.
///
/// # Cancel safety
/// Safe: what was begun is dropped.
pub(in crate::agent) async fn serve<L: Listener>(
    mut listener: L,
    caller: impl Fn(L::Addr) -> Caller,
    router: Router,
    leaving: CancellationToken,
) {
    let (places, connections) = (ConnectionSlots::new(CONNECTIONS_MAX), TaskTracker::new());
    loop {
        let next = async {
            // Displace only when a new connection arrives.
            let (stream, from) = listener.accept().await;
            (stream, from, places.take().await)
        };
        let (stream, from, place) = tokio::select! {
            next = next => next,
            () = leaving.cancelled() => break,
        };
        let (router, caller, leaving) = (router.clone(), caller(from), leaving.clone());
        connections.spawn(async move {
            let place = Arc::new(place);
            let served = connection(stream, router, caller, (&place, leaving));
            tokio::select! {
                () = served => {}
                () = place.given_away() => tracing::debug!("a silent connection to the API gave way to a new one"),
            }
        });
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}

async fn connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    caller: Caller,
    (place, leaving): (&Arc<ConnectionSlot>, CancellationToken),
) {
    let (router, place) = (TowerToHyperService::new(router), Arc::clone(place));
    let router = service_fn(move |mut request: Request<Incoming>| {
        let busy = place.busy();
        request.extensions_mut().insert(caller.clone());
        router.call(request).map_ok(|response| busy.until_answered(response))
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
        tracing::debug!("a connection to the API broke: {error}");
    }
}
