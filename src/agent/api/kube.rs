//! Scheduler extender of Kubernetes: filter and prioritize (docs/placement.md).

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::{CONTENT_LENGTH, ORIGIN};
use rustix::process::getuid;
use tokio::sync::{Semaphore, SemaphorePermit};

use super::error::{ApiError, body_within};
use crate::agent::advisor::{Epoch, HintDetail};
use crate::agent::kube::{ExtenderArgs, ExtenderFilterResult, HostPriority, KubeQuestion};
use crate::agent::state::AgentState;
use crate::agent::user::user_name;
use crate::budget::Retained;
use crate::error::{Error, ErrorKind, Result};
use crate::name::Name;
use crate::placement::Hint;
use crate::policy::LocalCaller;
use crate::repository::ReadableNames;
use crate::selector::Selector;
use crate::work::blocking;

/// Maximum bytes of a call: a thousand nodes whole, or far more by name.
pub(super) const KUBE_BODY_LEN_MAX: usize = 16 << 20;
/// Calls that are read or answered at a time. Further ones are refused: whoever may use the path must not make others wait.
static CALLS: Semaphore = Semaphore::const_new(8);
/// Time that a call has to arrive, on this machine.
const BODY_WITHIN: Duration = Duration::from_secs(2);
/// Memory of a call, as a multiple of its length: the body, its parts, and the answer.
const CALL_WEIGHT: u64 = 3;
/// Time that scores wait for the chunks of inputs that are new to this agent. The verdict needs none.
const SCORES_WAIT: Duration = Duration::from_millis(500);

/// Passes the nodes where the data of a pod may go, by the policy. Has the wire format of kube-scheduler's extenders.
#[utoipa::path(
    post,
    path = "/kube/filter",
    operation_id = "kubeFilter",
    request_body = serde_json::Value,
    responses((status = 200, description = "ExtenderFilterResult", body = serde_json::Value)),
)]
pub(super) async fn filter(
    State(state): State<Arc<AgentState>>,
    request: Request,
) -> Result<Json<ExtenderFilterResult>, ApiError> {
    let call = Call::read(&state, request).await?;
    // The scheduler shows the text of an answer alone.
    let answered = async {
        let question = call.question(&state).await?;
        let hint = hint(&state, &question, Duration::ZERO).await?;
        Ok(question.filter(hint.as_ref()))
    };
    let answer: Result<ExtenderFilterResult> = answered.await;
    Ok(Json(answer.unwrap_or_else(|error| ExtenderFilterResult::failed(format!("towline: {error}")))))
}

/// Scores nodes from 0 to 10 by what the data of a pod costs there. Has the wire format of kube-scheduler's extenders.
#[utoipa::path(
    post,
    path = "/kube/prioritize",
    operation_id = "kubePrioritize",
    request_body = serde_json::Value,
    responses((status = 200, description = "HostPriorityList", body = serde_json::Value)),
)]
pub(super) async fn prioritize(
    State(state): State<Arc<AgentState>>,
    request: Request,
) -> Result<Json<Vec<HostPriority>>, ApiError> {
    let call = Call::read(&state, request).await?;
    let question = call.question(&state).await?;
    let hint = hint(&state, &question, SCORES_WAIT).await;
    if let Err(error) = &hint {
        // The scheduler has other measures.
        tracing::debug!("no scores for a pod of {}: {error:?}", question.namespace);
    }
    Ok(Json(question.prioritize(hint.ok().flatten().as_ref())))
}

/// A call that is answered.
struct Call {
    body: Bytes,
    _permit: SemaphorePermit<'static>,
    _memory: Retained,
}

impl Call {
    async fn read(state: &AgentState, request: Request) -> Result<Self, ApiError> {
        if state.kube.0.is_empty() {
            return Err(Error::not_found("this agent answers no scheduler")
                .help("set [[advisor.kube]] in its settings (docs/placement.md)")
                .into());
        }
        // No token protects from what a web page makes a browser send.
        if request.headers().contains_key(ORIGIN) {
            return Err(Error::denied("requests of web pages are not answered").into());
        }
        let permit = CALLS.try_acquire().map_err(|_| {
            let error = Error::exhausted("too many calls of schedulers at once").help("try again");
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error)
        })?;
        let length = request.headers().get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
        let length: u64 = length.unwrap_or(KUBE_BODY_LEN_MAX as u64);
        let memory = state.origin(None)?.budget().keep(length.saturating_mul(CALL_WEIGHT))?;
        Ok(Self { body: body_within(request, &(), BODY_WITHIN).await?, _permit: permit, _memory: memory })
    }

    /// # Errors
    /// Usage, if it is not what a scheduler sends, or the pod has a malformed annotation.
    async fn question(&self, state: &AgentState) -> Result<KubeQuestion> {
        let (body, sites) = (self.body.clone(), state.advisor(state.origin(None)?)?.sites());
        blocking(move || {
            let args: ExtenderArgs = serde_json::from_slice(&body)
                .map_err(|source| Error::usage("request body is not ExtenderArgs of kube-scheduler").source(source))?;
            KubeQuestion::of(args, &sites.sites)
        })
        .await
    }
}

/// The hint that the answer follows from; none, if the pod names no inputs.
async fn hint(state: &AgentState, question: &KubeQuestion, wait: Duration) -> Result<Option<Hint>> {
    if question.inputs.is_empty() {
        return Ok(None);
    }
    let origin = state.origin(None)?;
    let (advisor, reader) = (state.advisor(origin)?, origin.for_caller(Some(LocalCaller::user(&user_name(getuid())))));
    let selectors: Vec<Selector> = question.inputs.iter().map(|name| name.parse()).collect::<Result<_>>()?;
    let mut epoch = advisor.epoch().await?;
    let may = |name: &_| state.kube.allow(&question.namespace, name);
    let choose = |epoch: &Epoch| -> Result<Vec<Name>> {
        let readable = ReadableNames::of(epoch.log(), may);
        selectors.iter().map(|selector| readable.choose(selector, origin.id())).collect()
    };
    let mut names = choose(&epoch);
    if names.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotFound) {
        // It may have been saved since the epoch.
        epoch = advisor.fresh_epoch().await?;
        names = choose(&epoch);
    }
    let names = names?;
    let how = (wait, HintDetail::Little);
    advisor.hint(&epoch, &reader, &question.request(), &names, how).await.map(Some)
}
