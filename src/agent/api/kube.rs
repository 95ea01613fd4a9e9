//! Scheduler extender of Kubernetes: filter and prioritize (docs/placement.md).

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::response::Response;
use serde::Serialize;

use super::error::ApiError;
use super::unauthenticated::{UnauthenticatedCall, hint_for_caller};
use crate::agent::advisor::HintCaller;
use crate::agent::kube::{ExtenderArgs, ExtenderFilterResult, HostPriority, KubeQuestion};
use crate::agent::state::AgentState;
use crate::error::{Error, Result};
use crate::name::Name;
use crate::placement::Hint;

/// Maximum bytes of a call: a thousand nodes whole, or far more by name.
pub(super) const KUBE_BODY_LEN_MAX: usize = 16 << 20;
/// Memory of a call, as a multiple of its length: the body, its parts, and the answer.
const CALL_WEIGHT: u64 = 3;
/// Memory of the reasons of an answer, as a multiple of their length: as they are, and in an answer that grows as it is written.
const REASONS_WEIGHT: u64 = 3;
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
pub(super) async fn filter(State(state): State<Arc<AgentState>>, request: Request) -> Result<Response, ApiError> {
    let call = read(&state, request).await?;
    // The scheduler shows the text of an answer alone.
    let answering = async {
        let question = question(&state, &call).await?;
        let hint = hint(&state, &question, Duration::ZERO).await?;
        let memory =
            state.origin(None)?.budget().keep(question.reasons_len(hint.as_ref()).saturating_mul(REASONS_WEIGHT))?;
        let answer = json(&question.filter(hint.as_ref()));
        drop(memory);
        answer
    };
    let answer: Result<Vec<u8>> = answering.await;
    let answer = match answer {
        Ok(answer) => answer,
        Err(error) => json(&ExtenderFilterResult::failed(format!("towline: {error}")))?,
    };
    call.answered(answer).await
}

/// Scores nodes from 0 to 10 by what the data of a pod costs there. Has the wire format of kube-scheduler's extenders.
#[utoipa::path(
    post,
    path = "/kube/prioritize",
    operation_id = "kubePrioritize",
    request_body = serde_json::Value,
    responses((status = 200, description = "HostPriorityList", body = serde_json::Value)),
)]
pub(super) async fn prioritize(State(state): State<Arc<AgentState>>, request: Request) -> Result<Response, ApiError> {
    let call = read(&state, request).await?;
    let question = question(&state, &call).await?;
    let hint = hint(&state, &question, SCORES_WAIT).await;
    if let Err(error) = &hint {
        // The scheduler has other measures.
        tracing::debug!("no scores for a pod of {}: {error:?}", question.namespace);
    }
    let scores: Vec<HostPriority> = question.prioritize(hint.ok().flatten().as_ref());
    let scores = json(&scores)?;
    call.answered(scores).await
}

fn json(answer: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(answer).map_err(|source| Error::other("answer cannot be written").source(source))
}

/// Reads a call, if pods of any namespace may ask.
async fn read(state: &AgentState, request: Request) -> Result<UnauthenticatedCall, ApiError> {
    if state.kube.0.is_empty() {
        return Err(Error::not_found("this agent answers no scheduler")
            .help("set [[advisor.kube]] in its settings (docs/placement.md)")
            .into());
    }
    UnauthenticatedCall::read(state, request, (KUBE_BODY_LEN_MAX as u64, |len| len as u64 * CALL_WEIGHT)).await
}

/// The question that a call asks.
///
/// # Errors
/// Usage, if it is not what a scheduler sends, or the pod has a malformed annotation.
async fn question(state: &AgentState, call: &UnauthenticatedCall) -> Result<KubeQuestion> {
    let sites = state.advisor(state.origin(None)?)?.sites();
    call.parsed(move |body| {
        let args: ExtenderArgs = serde_json::from_slice(body)
            .map_err(|source| Error::usage("request body is not ExtenderArgs of kube-scheduler").source(source))?;
        KubeQuestion::of(args, &sites.sites)
    })
    .await
}

/// The hint that the answer follows from; none, if the pod names no inputs.
async fn hint(state: &AgentState, question: &KubeQuestion, wait: Duration) -> Result<Option<Hint>> {
    if question.inputs.is_empty() {
        return Ok(None);
    }
    let may = |name: &Name| state.kube.allow(&question.namespace, name);
    hint_for_caller(state, HintCaller::namespace(&question.namespace), &question.request(), may, wait).await.map(Some)
}
