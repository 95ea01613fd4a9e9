//! Calls of schedulers on loopback, which cannot send a token.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE, ORIGIN};
use axum::response::{IntoResponse as _, Response};
use bytes::BytesMut;
use futures::StreamExt as _;
use rustix::process::getuid;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::error::ApiError;
use super::kube::KUBE_BODY_LEN_MAX;
use super::slots::ConnectionEnd;
use crate::agent::advisor::{Epoch, HintDetail};
use crate::agent::state::AgentState;
use crate::agent::user::user_name;
use crate::budget::Retained;
use crate::error::{Error, ErrorKind, Result};
use crate::limits::KIB;
use crate::name::Name;
use crate::placement::{Hint, HintRequest};
use crate::policy::LocalCaller;
use crate::repository::ReadableNames;
use crate::selector::Selector;
use crate::work::blocking;

/// Calls that are read or answered at a time. Further ones are refused: whoever may use the path must not make others wait.
static CALLS: Semaphore = Semaphore::const_new(8);
/// Time that a call has to arrive, on this machine.
const BODY_WITHIN: Duration = Duration::from_secs(2);
/// Time in which a client must have taken its answer, which is in memory until then.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// KiB of all calls that have arrived in part, at a time. They count apart from the memory that others need, as there is nothing to
/// answer yet. What a head promises does not count: it would take the place of calls that come.
static ARRIVING: Semaphore = Semaphore::const_new(KUBE_BODY_LEN_MAX >> 10);

/// A call that is answered. It counts until its answer is sent, or its client is cut off.
pub(super) struct UnauthenticatedCall {
    body: Bytes,
    held: Arc<CallHeld>,
    connection: Option<ConnectionEnd>,
}

/// Answer in memory, and what it holds until its last byte is sent.
struct HeldAnswer {
    bytes: Vec<u8>,
    _held: (Arc<CallHeld>, Option<Retained>),
    _sent: DropGuard,
}

impl AsRef<[u8]> for HeldAnswer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Permit and memory of a call.
struct CallHeld {
    _permit: SemaphorePermit<'static>,
    _memory: Retained,
}

impl UnauthenticatedCall {
    /// Reads a call of at most `len_max` bytes, which takes `memory` bytes for a length until it is answered.
    ///
    /// # Errors
    /// Denied, for a request of a web page; exhausted, if there are too many calls at once, or too little memory; unreachable, if it
    /// does not arrive in time.
    pub(super) async fn read(
        state: &AgentState,
        request: Request,
        (len_max, memory): (u64, fn(usize) -> u64),
    ) -> Result<Self, ApiError> {
        // No token protects from what a web page makes a browser send.
        if request.headers().contains_key(ORIGIN) {
            return Err(Error::denied("requests of web pages are not answered").into());
        }
        let connection = request.extensions().get().cloned();
        let (body, arriving) = match timeout(BODY_WITHIN, arrived(request, len_max)).await {
            Ok(arrived) => arrived?,
            Err(_) => {
                let error = Error::unreachable("request did not arrive in time")
                    .expected(format!("all of it within {BODY_WITHIN:?}"));
                return Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, error));
            }
        };
        // Only now: calls that do not arrive would take the places of others.
        let permit = CALLS.try_acquire().map_err(|_| {
            let error = Error::exhausted("too many calls of schedulers at once").help("try again");
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error)
        })?;
        let memory = state.origin(None)?.budget().keep(memory(body.len()))?;
        drop(arriving);
        Ok(Self { body, held: Arc::new(CallHeld { _permit: permit, _memory: memory }), connection })
    }

    /// Response with the JSON `bytes`, which take `more` memory than the call. A client that has not taken it in [`ANSWER_WITHIN`] loses
    /// its connection.
    pub(super) fn answered(self, bytes: Vec<u8>, more: Option<Retained>) -> Response {
        let Self { body: _, held, connection } = self;
        let sent = CancellationToken::new();
        let answer = HeldAnswer { bytes, _held: (held, more), _sent: sent.clone().drop_guard() };
        if let Some(connection) = connection {
            tokio::spawn(async move {
                if timeout(ANSWER_WITHIN, sent.cancelled()).await.is_err() {
                    connection.end();
                }
            });
        }
        ([(CONTENT_TYPE, "application/json")], Bytes::from_owner(answer)).into_response()
    }

    /// The result of `parse` for the body, on a thread for work that blocks. The call counts until that has ended, also if its client is
    /// gone by then: others could otherwise be begun without end.
    ///
    /// # Errors
    /// As `parse`.
    ///
    /// # Cancel safety
    /// Safe: `parse` goes on, and its result is dropped.
    pub(super) async fn parsed<T: Send + 'static>(
        &self,
        parse: impl FnOnce(&Bytes) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (body, held) = (self.body.clone(), Arc::clone(&self.held));
        blocking(move || {
            let parsed = parse(&body);
            drop(held);
            parsed
        })
        .await
    }
}

/// The body of a request of at most `len_max` bytes, and the permits of [`ARRIVING`] for it.
///
/// # Errors
/// Usage, if it is too long or is cut off; exhausted, if too much arrives at once.
async fn arrived(request: Request, len_max: u64) -> Result<(Bytes, SemaphorePermit<'static>), ApiError> {
    let too_long = || ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, Error::usage("request is too long"));
    let too_many = || {
        let error = Error::exhausted("too many long calls of schedulers at once").help("try again");
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error)
    };
    let promised = request.headers().get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    if promised.is_some_and(|length: u64| length > len_max) {
        return Err(too_long());
    }
    let mut permit = ARRIVING.try_acquire_many(0).map_err(|_| too_many())?;
    let (mut body, mut parts) = (BytesMut::new(), request.into_body().into_data_stream());
    while let Some(part) = parts.next().await {
        let part = part.map_err(|source| {
            ApiError::new(StatusCode::BAD_REQUEST, Error::usage("cannot read the request").source(source))
        })?;
        let len = (body.len() + part.len()) as u64;
        if len > len_max {
            return Err(too_long());
        }
        let more = usize::try_from(len.div_ceil(KIB)).unwrap_or(usize::MAX).saturating_sub(permit.num_permits());
        let more = u32::try_from(more).ok().and_then(|kib| ARRIVING.try_acquire_many(kib).ok());
        permit.merge(more.ok_or_else(too_many)?);
        body.extend_from_slice(&part);
    }
    Ok((body.freeze(), permit))
}

/// The hint for `request`, to a caller that may ask about the names that `may` permits; others are as absent.
///
/// # Errors
/// Not found, for an absent name; else as [`Advisor::hint`](crate::agent::advisor::Advisor::hint).
pub(in crate::agent) async fn hint_for_caller(
    state: &AgentState,
    request: &HintRequest,
    may: impl Fn(&Name) -> bool + Copy,
    wait: Duration,
) -> Result<Hint> {
    let origin = state.origin(None)?;
    let (advisor, reader) = (state.advisor(origin)?, origin.for_caller(Some(LocalCaller::user(&user_name(getuid())))));
    let selectors: Vec<Selector> = request.inputs.iter().map(|input| input.reference.parse()).collect::<Result<_>>()?;
    let mut epoch = advisor.epoch().await?;
    let choose = |epoch: &Epoch| -> Result<Vec<Name>> {
        let mut readable = ReadableNames::of(epoch.log(), may);
        readable.choose_all(&selectors, format_args!("repository {}", origin.id())).map_err(|(_, error)| error)
    };
    let mut names = choose(&epoch);
    if names.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotFound) {
        // It may have been saved since the epoch.
        epoch = advisor.fresh_epoch().await?;
        names = choose(&epoch);
    }
    let names = names?;
    advisor.hint(&epoch, &reader, request, &names, (wait, HintDetail::Little)).await
}

#[cfg(test)]
mod tests {
    use axum::body::to_bytes;

    use super::*;
    use crate::budget::Budget;
    use crate::limits::{MEMORY_MIN, MIB};

    #[tokio::test]
    async fn a_call_counts_until_its_answer_is_sent() {
        let budget = Budget::new(MEMORY_MIN).unwrap();
        let all = CALLS.available_permits();
        let held = CallHeld { _permit: CALLS.try_acquire().unwrap(), _memory: budget.keep(MIB).unwrap() };
        let call = UnauthenticatedCall { body: Bytes::new(), held: Arc::new(held), connection: None };
        let response = call.answered(vec![7; 1 << 20], Some(budget.keep(MIB).unwrap()));
        let sent = to_bytes(response.into_body(), usize::MAX).await.unwrap();
        assert_eq!((sent.len(), CALLS.available_permits()), (1 << 20, all - 1));
        drop(sent);
        assert_eq!(CALLS.available_permits(), all);
    }
}
