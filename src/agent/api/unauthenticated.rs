//! Calls of schedulers on loopback, which cannot send a token.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::http::header::{CONTENT_LENGTH, ORIGIN};
use rustix::process::getuid;
use tokio::sync::{Semaphore, SemaphorePermit};

use super::error::{ApiError, body_within};
use super::kube::KUBE_BODY_LEN_MAX;
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
/// KiB of all calls that arrive at a time. A head promises a length before there is anything to answer, so it takes none of the
/// memory that others need.
static ARRIVING: Semaphore = Semaphore::const_new(KUBE_BODY_LEN_MAX >> 10);
/// Memory of a call, as a multiple of its length: the body, its parts, and the answer.
const CALL_WEIGHT: u64 = 3;

/// A call that is answered.
pub(super) struct UnauthenticatedCall {
    body: Bytes,
    held: Arc<CallHeld>,
}

/// Permit and memory of a call.
struct CallHeld {
    _permit: SemaphorePermit<'static>,
    _memory: Retained,
}

impl UnauthenticatedCall {
    /// Reads a call of at most `len_max` bytes.
    ///
    /// # Errors
    /// Denied, for a request of a web page; exhausted, if there are too many calls at once, or too little memory; unreachable, if it
    /// does not arrive in time.
    pub(super) async fn read(state: &AgentState, request: Request, len_max: u64) -> Result<Self, ApiError> {
        // No token protects from what a web page makes a browser send.
        if request.headers().contains_key(ORIGIN) {
            return Err(Error::denied("requests of web pages are not answered").into());
        }
        let permit = CALLS.try_acquire().map_err(|_| {
            let error = Error::exhausted("too many calls of schedulers at once").help("try again");
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error)
        })?;
        let length = request.headers().get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
        let length = u64::min(length.unwrap_or(len_max), len_max);
        let arriving = u32::try_from(length.div_ceil(KIB)).ok().and_then(|kib| ARRIVING.try_acquire_many(kib).ok());
        let arriving = arriving.ok_or_else(|| {
            let error = Error::exhausted("too many long calls of schedulers at once").help("try again");
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error)
        })?;
        let body = body_within(request, &(), BODY_WITHIN).await?;
        let memory = state.origin(None)?.budget().keep((body.len() as u64).saturating_mul(CALL_WEIGHT))?;
        drop(arriving);
        Ok(Self { body, held: Arc::new(CallHeld { _permit: permit, _memory: memory }) })
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
