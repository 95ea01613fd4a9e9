//! The protocol between processes of one node: over a stream that only the agent's user can open, so without TLS.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use async_trait::async_trait;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;

use super::driver::{Client, ConnectionClock, Lanes, Reply, ServedConnection, Window, hello, serve};
use super::frame_request::{REQUEST_CHUNKS_MAX, frame_request};
use super::protocol::limits::WINDOW_MIN;
use super::protocol::{Closed, EndCode, Priority, Provider, RequestOutcome, Requester};
use super::{ConnectionPermit, ServedChunks};
use crate::budget::Budget;
use crate::codec::Encoded;
use crate::error::{Error, ErrorKind, Result};
use crate::identity::Identity;
use crate::policy::Route;
use crate::repository::{ChunkSource, FramePlace, Repository, Saved, SourceBytes};

/// Identity of a local process for its agent, and of the agent for the process: neither needs a name.
fn local_identity() -> Result<Identity> {
    Identity::new("local", "process")
}

/// Serves a process of this node over `stream` until it disconnects, or until `leaving`.
///
/// # Errors
/// None in practice.
///
/// # Cancel safety
/// Safe: the connection is dropped.
pub async fn serve_local(
    stream: impl AsyncRead + AsyncWrite + Send + 'static,
    served_chunks: Arc<dyn ServedChunks>,
    leaving: CancellationToken,
) -> Result<Closed> {
    let clock = ConnectionClock::start();
    let provider = Provider::new(hello(&local_identity()?, 0), local_identity()?, 0, clock.now());
    let served = ServedConnection {
        served_chunks,
        permit: ConnectionPermit::of_this_node(),
        route: Route::Node,
        leaving,
        versions: None,
    };
    Ok(serve(provider, Lanes::both_ways(stream), clock, served).await)
}

/// The agent of this node, as a source of chunks.
#[derive(Debug)]
pub struct LocalSource {
    clients: Vec<Client>,
    next: AtomicUsize,
    /// True once the user was warned that the agent refuses or fails.
    warned: AtomicBool,
}

impl LocalSource {
    /// Connects to the agent over `streams`, each with a window of `window` bytes out of `budget`.
    ///
    /// # Errors
    /// Exhausted, if the budget is less than the windows.
    ///
    /// # Cancel safety
    /// Safe: the streams are dropped.
    pub async fn new<S>(streams: Vec<S>, budget: &Budget, window: u64) -> Result<Self>
    where
        S: AsyncRead + AsyncWrite + Send + 'static,
    {
        let window = window.max(WINDOW_MIN);
        let mut clients = Vec::with_capacity(streams.len());
        for stream in streams {
            let memory = budget.carve(window).await?;
            let clock = ConnectionClock::start();
            let requester = Requester::new(hello(&local_identity()?, window), local_identity()?, clock.now())?;
            let window = Window { memory, wire: Arc::default(), versions: None };
            clients.push(Client::start(requester, Lanes::both_ways(stream), clock, window));
        }
        Ok(Self { clients, next: AtomicUsize::new(0), warned: AtomicBool::new(false) })
    }

    /// Open connection.
    fn client(&self) -> Option<&Client> {
        let first = self.next.fetch_add(1, Ordering::Relaxed) % self.clients.len().max(1);
        let turned = self.clients.iter().cycle().skip(first).take(self.clients.len());
        turned.into_iter().find(|client| client.closed().is_none())
    }

    /// Says why the agent gave fewer chunks than requested; an absent name is no news, as the caller reads it elsewhere.
    fn warn(&self, saved: &Saved, error: &Error) {
        if error.kind() == ErrorKind::NotFound {
            tracing::info!(name = %saved.name, "the agent lacks some chunks: {error:?}");
        } else if !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(name = %saved.name, "the agent does not give some chunks, which are read from the repository: {error}");
        }
    }

    /// Requests some chunks: no more than one request may name.
    async fn fetch(&self, saved: &Saved, mut chunks: Vec<u32>, place: FramePlace<'_>) -> Result<()> {
        let Some(client) = self.client() else { return Ok(()) };
        let wanted = frame_request(saved, &mut chunks, &HashSet::new())?;
        let mut fetching = client.fetch(Priority::Restore, saved.value.manifest, wanted).await?;
        while let Some(reply) = fetching.next().await {
            match reply {
                Reply::Frame(received) => {
                    if let Some(&chunk) = chunks.get(received.ordinal as usize) {
                        place(chunk, &received.encoded);
                    }
                }
                Reply::Ended { how: RequestOutcome::Refused(code, text), .. } if code != EndCode::NotHere => {
                    return Err(Error::unreachable("agent ended the request early").got(text));
                }
                Reply::Missing(_) | Reply::Ended { .. } => {}
            }
        }
        Ok(())
    }
}

#[async_trait]
impl ChunkSource for LocalSource {
    async fn frames(&self, _: &Repository, saved: &Arc<Saved>, chunks: &[u32], place: FramePlace<'_>) -> SourceBytes {
        let mut moved = SourceBytes::default();
        for some in chunks.chunks(REQUEST_CHUNKS_MAX) {
            let mut counted = |chunk: u32, encoded: &Encoded| {
                moved.agent += encoded.bytes.len() as u64;
                place(chunk, encoded);
            };
            if let Err(error) = self.fetch(saved, some.to_vec(), &mut counted).await {
                self.warn(saved, &error);
            }
        }
        moved
    }
}
