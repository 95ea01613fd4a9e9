//! Connections: taken in while there is room, and let go when the agent ends.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::serve::Listener;
use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::guard::Door;

/// Connections at one door at the same time, at most.
const CONNECTIONS_MAX: usize = 256;
/// A request's head must be there within this, and a connection without one is closed.
const HEAD_WITHIN: Duration = Duration::from_secs(30);

/// Serves at `listener` until `leaving`, and what was begun by then to its end.
///
/// # Cancel safety
/// Safe: what was begun is dropped.
pub(in crate::agent) async fn serve(
    mut listener: impl Listener,
    door: Door,
    router: Router,
    leaving: CancellationToken,
) {
    let router = router.layer(Extension(door));
    let (places, connections) = (Arc::new(Semaphore::new(CONNECTIONS_MAX)), TaskTracker::new());
    loop {
        let next = async {
            // Never closed.
            let place = Arc::clone(&places).acquire_owned().await;
            (listener.accept().await.0, place)
        };
        let (stream, place) = tokio::select! {
            next = next => next,
            () = leaving.cancelled() => break,
        };
        let (router, leaving) = (router.clone(), leaving.clone());
        connections.spawn(async move {
            connection(stream, router, leaving).await;
            drop(place);
        });
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}

async fn connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    leaving: CancellationToken,
) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_WITHIN);
    let served = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router)).with_upgrades();
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
