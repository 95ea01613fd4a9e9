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
use super::transit::{InTransit, Transit};
use crate::agent::advisor::{Epoch, HintCaller};
use crate::agent::state::AgentState;
use crate::agent::user::user_name;
use crate::budget::Retained;
use crate::error::{Error, ErrorKind, Result};
use crate::name::Name;
use crate::placement::{Hint, HintRequest};
use crate::policy::LocalCaller;
use crate::repository::ReadableNames;
use crate::selector::Selector;
use crate::work::blocking;

/// Calls that are answered at a time. Further ones are refused: whoever may use the path must not make others wait.
static CALLS: Semaphore = Semaphore::const_new(8);
/// Time that a call has to arrive, on this machine.
const BODY_WITHIN: Duration = Duration::from_secs(2);
/// Time in which a client must have taken its answer, which is in memory until then.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// Calls that have arrived in part.
static ARRIVING: InTransit = InTransit::new(KUBE_BODY_LEN_MAX >> 10);
/// Answers that are not wholly sent.
static ANSWERS: InTransit = InTransit::new(ANSWERS_LEN_MAX >> 10);
/// Maximum bytes of an answer, and of all that are not sent.
const ANSWERS_LEN_MAX: usize = 32 << 20;

/// A call that is answered.
pub(super) struct UnauthenticatedCall {
    body: Bytes,
    held: Arc<CallHeld>,
    connection: Option<ConnectionEnd>,
}

/// Answer in memory until its last byte is sent.
struct AnswerInTransit {
    bytes: Vec<u8>,
    _transit: Transit,
    _sent: DropGuard,
}

impl AsRef<[u8]> for AnswerInTransit {
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
        let mut arriving = ARRIVING.begin();
        let displaced = arriving.displaced();
        let arrived = timeout(BODY_WITHIN, arrived(request, len_max, &mut arriving));
        let body = match displaced.run_until_cancelled(arrived).await {
            Some(Ok(arrived)) => arrived?,
            Some(Err(_)) => {
                let error = Error::unreachable("request did not arrive in time")
                    .expected(format!("all of it within {BODY_WITHIN:?}"));
                return Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, error));
            }
            None => return Err(too_many("arriving calls of schedulers")),
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

    /// Response with the JSON `bytes`. A client that has not taken it in [`ANSWER_WITHIN`], or keeps later answers out, loses its
    /// connection.
    ///
    /// # Errors
    /// Exhausted, if it is too long, or earlier answers do not make way.
    pub(super) async fn answered(self, bytes: Vec<u8>) -> Result<Response, ApiError> {
        let mut transit = ANSWERS.begin();
        if !matches!(timeout(ANSWER_WITHIN, transit.reserve(kib(bytes.len()))).await, Ok(true)) {
            return Err(too_many("unread or too long answers to schedulers"));
        }
        let (sent, displaced) = (CancellationToken::new(), transit.displaced());
        let answer = AnswerInTransit { bytes, _transit: transit, _sent: sent.clone().drop_guard() };
        if let Some(connection) = self.connection {
            tokio::spawn(async move {
                let taken = displaced.run_until_cancelled(timeout(ANSWER_WITHIN, sent.cancelled()));
                if !matches!(taken.await, Some(Ok(()))) {
                    connection.end();
                }
            });
        }
        Ok(([(CONTENT_TYPE, "application/json")], Bytes::from_owner(answer)).into_response())
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

/// The body of a request of at most `len_max` bytes.
///
/// # Errors
/// Usage, if it is too long or is cut off; exhausted, if too much arrives at once.
async fn arrived(request: Request, len_max: u64, arriving: &mut Transit) -> Result<Bytes, ApiError> {
    let too_long = || ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, Error::usage("request is too long"));
    let promised = request.headers().get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    if promised.is_some_and(|length: u64| length > len_max) {
        return Err(too_long());
    }
    let (mut body, mut parts) = (BytesMut::new(), request.into_body().into_data_stream());
    while let Some(part) = parts.next().await {
        let part = part.map_err(|source| {
            ApiError::new(StatusCode::BAD_REQUEST, Error::usage("cannot read the request").source(source))
        })?;
        let len = (body.len() + part.len()) as u64;
        if len > len_max {
            return Err(too_long());
        }
        if !arriving.reserve(kib(body.len() + part.len())).await {
            return Err(too_many("arriving calls of schedulers"));
        }
        body.extend_from_slice(&part);
    }
    Ok(body.freeze())
}

/// KiB that `len` bytes take.
const fn kib(len: usize) -> usize {
    len.div_ceil(1 << 10)
}

/// Error for a message that finds no place in transit.
fn too_many(what: &str) -> ApiError {
    let error = Error::exhausted(format!("too many {what} at once")).help("try again");
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error)
}

/// The hint for `request`, to a `caller` that may ask about the names that `may` permits; others are as absent.
///
/// # Errors
/// Not found, for an absent name; else as [`Advisor::hint`](crate::agent::advisor::Advisor::hint).
pub(in crate::agent) async fn hint_for_caller(
    state: &AgentState,
    caller: HintCaller,
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
    advisor.hint(&epoch, &reader, request, &names, (wait, caller)).await
}

#[cfg(test)]
mod tests {
    use axum::body::to_bytes;
    use futures::FutureExt as _;
    use futures::future::join_all;

    use super::*;
    use crate::budget::Budget;
    use crate::limits::{MEMORY_MIN, MIB};

    #[tokio::test]
    async fn an_answer_that_nobody_reads_keeps_no_other_out() {
        let budget = Budget::new(MEMORY_MIN).unwrap();
        let all = CALLS.available_permits();
        let call = || {
            let held = CallHeld { _permit: CALLS.try_acquire().unwrap(), _memory: budget.keep(MIB).unwrap() };
            UnauthenticatedCall { body: Bytes::new(), held: Arc::new(held), connection: None }
        };
        let answers: Vec<_> = (0..2).map(|_| call().answered(vec![7; ANSWERS_LEN_MAX / 2])).collect();
        let unread = join_all(answers).await;
        assert!(unread.iter().all(Result::is_ok));
        assert_eq!(CALLS.available_permits(), all, "an answer takes no turn of a call");
        {
            let mut third = Box::pin(call().answered(vec![7; 1]));
            assert!(third.as_mut().now_or_never().is_none(), "the first answer is displaced, and still there");
            drop(unread);
            let sent = to_bytes(third.await.unwrap().into_body(), usize::MAX).await.unwrap();
            assert_eq!(sent.len(), 1);
        }
        assert!(call().answered(vec![7; ANSWERS_LEN_MAX + 1]).await.is_err());
        assert_eq!(CALLS.available_permits(), all);
    }
}
