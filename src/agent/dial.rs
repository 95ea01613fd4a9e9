//! Connection to the API of another agent.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use http_body_util::{BodyExt as _, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio_util::task::AbortOnDropHandle;

use super::state::AgentState;
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::transfer::ByteCounters;
use crate::transfer::calls::{call, lost};

/// Timeout of a silent connection. Streams of events send a keep-alive every 15 seconds.
pub(super) const SILENCE_MAX: Duration = Duration::from_mins(1);
/// Limit of a response that is read at once, in bytes.
const ANSWER_LEN_MAX: usize = 1 << 20;

/// Open connection, closed on drop.
#[derive(Debug)]
pub(super) struct Dialled {
    sender: http1::SendRequest<Body>,
    _connection: AbortOnDropHandle<hyper::Result<()>>,
}

impl Dialled {
    /// Connects to the agent `callee` at `address`, with the certificate of this agent.
    ///
    /// # Errors
    /// Usage, without an identity; as [`call`].
    ///
    /// # Cancel safety
    /// Safe: the connection is closed.
    pub(super) async fn to(state: &AgentState, callee: &Identity, address: &str) -> Result<Self> {
        let credentials = state.credentials()?;
        let wire = Arc::<ByteCounters>::default();
        let line = call(address, credentials, callee, &wire).await?;
        state.exchange()?.peers().ledger().called(callee, wire);
        let (sender, connection) = http1::handshake(TokioIo::new(line)).await.map_err(lost)?;
        Ok(Self { sender, _connection: AbortOnDropHandle::new(tokio::spawn(connection)) })
    }

    /// Sends `request`; returns when the head of the response has arrived.
    ///
    /// # Errors
    /// As [`lost`].
    pub(super) async fn send(&mut self, request: Request<Body>) -> Result<Response<Incoming>> {
        self.sender.send_request(request).await.map_err(lost)
    }

    /// Sends `request` and reads the whole response.
    ///
    /// # Errors
    /// As [`lost`].
    pub(super) async fn ask(&mut self, request: Request<Body>) -> Result<(StatusCode, Bytes)> {
        let (head, body) = self.send(request).await?.into_parts();
        let body = Limited::new(body, ANSWER_LEN_MAX).collect().await;
        let body = body.map_err(|source| Error::unreachable("response was cut off, or is too long").source(source))?;
        Ok((head.status, body.to_bytes()))
    }
}
