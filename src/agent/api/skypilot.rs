//! Admin policy of `SkyPilot` (docs/placement.md).

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use super::error::ApiError;
use super::unauthenticated::{UnauthenticatedCall, hint_for_caller};
use crate::agent::advisor::HintCaller;
use crate::agent::skypilot::{SkyPilotTask, memory_of};
use crate::agent::state::AgentState;
use crate::budget::Retained;
use crate::error::{Error, ErrorKind, Result};
use crate::name::Name;

/// Maximum bytes of a request: a task with its files.
pub(super) const SKYPILOT_BODY_LEN_MAX: usize = 4 << 20;
/// Time that an answer waits for the chunks of inputs that are new to this agent; the client waits for 30 seconds.
const WAIT: Duration = Duration::from_secs(5);

/// Rewrites the places of a task to those where its data may go, the best first. Has the wire format of `SkyPilot`'s admin policies.
#[utoipa::path(
    post,
    path = "/skypilot",
    operation_id = "skypilotPolicy",
    request_body = serde_json::Value,
    responses(
        (status = 200, description = "MutatedUserRequest, as JSON in a string", body = serde_json::Value),
        (status = 400, description = "The task is rejected, with the reason", body = String),
    ),
)]
pub(super) async fn policy(State(state): State<Arc<AgentState>>, request: Request) -> Result<Response, ApiError> {
    if state.skypilot.0.is_empty() {
        return Err(Error::not_found("this agent answers no SkyPilot")
            .help("set [[advisor.skypilot]] in its settings (docs/placement.md)")
            .into());
    }
    let call = UnauthenticatedCall::read(&state, request, (SKYPILOT_BODY_LEN_MAX as u64, memory_of)).await?;
    let task = match call.parsed(|body| SkyPilotTask::read(body)).await {
        Ok(task) => task,
        Err(error) => return Ok(rejected(&error)),
    };
    match answer(&state, &task).await {
        Ok((answer, _memory)) => call.answered(answer.into_bytes()).await,
        // The task names something that does not exist, or may go nowhere.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Denied | ErrorKind::Usage) => {
            Ok(rejected(&error))
        }
        // Agents enforce the policy in any case.
        Err(error) => {
            tracing::warn!("a task of SkyPilot is placed without regard to its data: {error:?}");
            call.answered(task.unchanged()?.into_bytes()).await
        }
    }
}

/// The answer, and the memory that it takes beside that of the call.
async fn answer(state: &AgentState, task: &SkyPilotTask) -> Result<(String, Option<Retained>)> {
    if task.inputs().is_empty() {
        return Ok((task.unchanged()?, None));
    }
    let may = |name: &Name| state.skypilot.allow(task.user(), name);
    let caller = HintCaller::other("skypilot", task.user().unwrap_or_default());
    let hint = hint_for_caller(state, caller, &task.hint_request(), may, WAIT).await?;
    let origin = state.origin(None)?;
    let sites = state.advisor(origin)?.sites();
    let memory = origin.budget().keep(task.memory_with_places(&sites.sites))?;
    Ok((task.with_places(&hint, &sites.sites)?, Some(memory)))
}

/// `SkyPilot` shows the text to the user.
fn rejected(error: &Error) -> Response {
    (StatusCode::BAD_REQUEST, format!("towline: {error}")).into_response()
}
