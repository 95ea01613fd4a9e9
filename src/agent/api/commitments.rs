//! Commits of hints: commit, show, renew and end.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Extension, Path, State};
use axum::http::StatusCode;
use serde::Deserialize;
use utoipa::ToSchema;

use super::auth::check_scope;
use super::caller::Caller;
use super::error::{ApiError, JsonBody};
use super::recorded::{AccessRequest, check_entries};
use super::rights::Need;
use crate::agent::audit::{self, follow_with};
use crate::agent::commitments::{CommitRequest, CommitTree, Commitments, GpusNotIdle, Pending};
use crate::agent::config::Span;
use crate::agent::state::AgentState;
use crate::agent::tasks::{resolve, warm_commitment, without_offers};
use crate::agent::view;
use crate::agent::warm::needed_chunks;
use crate::audit::{Action, Repeats, Request};
use crate::cache::PinLimit;
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::name::Name;
use crate::placement::{INPUTS_MAX, check_hint_id};
use crate::policy::Scope;
use crate::repository::Repository;
use crate::selector::Selector;
use crate::transfer::ledger::NamedTree;
use crate::work::blocking;

/// Lease of a commitment, if the request names none.
const LEASE: Duration = Duration::from_hours(1);
/// Maximum number of GPUs of a job.
const GPUS_MAX: u64 = 1_000_000;

/// Body of a commit: the hint's `inputs` and the chosen site.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Commit {
    /// Site, which must be this agent's.
    site: String,
    /// Names, as in the hint's `inputs`.
    inputs: Vec<String>,
    /// Time that they are held, such as `2h`; an hour if absent.
    #[schema(value_type = Option<String>)]
    lease: Option<Span>,
    /// Repository; the default one if absent.
    repository: Option<String>,
    /// GPUs of the job that waits for them, for `towline usage`.
    #[serde(default)]
    gpus: u64,
}

/// Body of an outcome.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct HintOutcome {
    /// New lease, from now on; if absent, the commitment ends, unless the job has `started`.
    #[schema(value_type = Option<String>)]
    lease: Option<Span>,
    /// True once the job has its GPUs. The first time, those that the commit told count as GPUs that did not idle while the bytes came.
    #[serde(default)]
    started: bool,
}

/// Lists the hints that are committed here; to another agent or a token, its own.
#[utoipa::path(
    get,
    path = "/v1/hints",
    operation_id = "listCommitments",
    responses((status = 200, description = "By hint", body = view::CommitmentList)),
)]
pub(super) async fn list(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<view::CommitmentList>, ApiError> {
    let requester = caller.requester();
    let is_own = |owner: &str| requester.as_ref().is_none_or(|requester| requester.owns(owner));
    Ok(Json(view::CommitmentList { commitments: state.commitments()?.list(is_own).await? }))
}

/// Commits a hint here: reserves space for the inputs, pins them until the lease ends, and starts to fetch them.
///
/// All or nothing, and idempotent: a repetition renews the lease, and fetches what is still missing.
#[utoipa::path(
    post,
    path = "/v1/hints/{id}/commit",
    operation_id = "commitHint",
    params(("id" = String, Path, description = "Id of the hint")),
    request_body = Commit,
    responses((status = 202, description = "It is committed, which survives a power loss", body = view::Commitment)),
)]
pub(super) async fn commit(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    Path(hint): Path<String>,
    JsonBody(body): JsonBody<Commit>,
) -> Result<(StatusCode, Json<view::Commitment>), ApiError> {
    check_hint_id(&hint)?;
    caller.check_repository_name(body.repository.as_deref())?;
    check_site(&state, &body.site)?;
    if body.inputs.is_empty() || body.inputs.len() > INPUTS_MAX {
        let expected = format!("1 to {INPUTS_MAX} names");
        return Err(Error::usage("hint cannot be committed").at("inputs").expected(expected).into());
    }
    if body.gpus > GPUS_MAX {
        return Err(Error::usage("hint cannot be committed")
            .at("gpus")
            .expected(format!("at most {GPUS_MAX}"))
            .got(body.gpus)
            .into());
    }
    let commitments = state.commitments()?;
    if let Some(grant) = caller.grant() {
        check_scope(grant, Need::Scope(Scope::Pins))?;
    }
    let repository = state.repository(body.repository.as_deref())?.for_caller(caller.local());
    let committing = Committing { state: &state, caller: &caller, repository: &repository };
    let names = committing.names(&body.inputs).await?;
    let lease = body.lease.map_or(LEASE, |span| span.0);
    let (expires, limit) = match state.pin_bounds(caller.requester().as_ref(), Some(lease)) {
        Ok(bounds) => bounds,
        Err(error) => return Err(committing.refused(&names[0], error).await.into()),
    };
    // Each name is warmed and pinned; the request itself is counted already.
    check_entries(&state, &caller, u32::try_from(2 * names.len() - 1).unwrap_or(u32::MAX))?;
    let requests = committing.allow(&names).await?;
    let made = committing.make((&hint, &names), body.gpus, (expires, limit)).await;
    match made {
        Ok(Some(pending)) => committing.begin(&hint, pending, requests).await?,
        Ok(None) => requests.iter().for_each(|request| request.end("done: renewed")),
        Err(error) => {
            requests.iter().for_each(|request| request.end(audit::outcome(&error)));
            return Err(error.into());
        }
    }
    let shown = commitments.look(&hint, &caller.owner(None)).await?;
    Ok((StatusCode::ACCEPTED, Json(shown)))
}

/// Shows how much of a committed hint is here.
#[utoipa::path(
    get,
    path = "/v1/hints/{id}",
    operation_id = "showHint",
    params(("id" = String, Path, description = "Id of the hint")),
    responses((status = 200, description = "As it is now", body = view::Commitment)),
)]
pub(super) async fn show(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    Path(hint): Path<String>,
) -> Result<Json<view::Commitment>, ApiError> {
    check_hint_id(&hint)?;
    let (commitments, owner) = (state.commitments()?, caller.owner(None));
    Ok(Json(commitments.look(&hint, &owner).await?))
}

/// Renews the lease of a committed hint, ends it, or tells that its job has started. What was fetched stays in the cache as long as there is space.
#[utoipa::path(
    post,
    path = "/v1/hints/{id}/outcome",
    operation_id = "endHint",
    params(("id" = String, Path, description = "Id of the hint")),
    request_body = HintOutcome,
    responses((status = 200, description = "As it is now, or was at its end", body = view::Commitment)),
)]
pub(super) async fn outcome(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    Path(hint): Path<String>,
    JsonBody(HintOutcome { lease, started }): JsonBody<HintOutcome>,
) -> Result<Json<view::Commitment>, ApiError> {
    check_hint_id(&hint)?;
    let (commitments, owner) = (state.commitments()?, caller.owner(None));
    if started {
        count_start(&state, (&hint, &owner)).await?;
        if lease.is_none() {
            return Ok(Json(commitments.look(&hint, &owner).await?));
        }
    }
    let action = if lease.is_some() { Action::Pin } else { Action::Unpin };
    let recorded = AccessRequest { caller: &caller, action, repository: None, repeats: Repeats::Separate };
    let expires = match lease.map(|Span(lease)| state.pin_bounds(caller.requester().as_ref(), Some(lease))) {
        None => None,
        Some(Ok((expires, _))) => expires,
        Some(Err(error)) => return Err(recorded.refuse(&state, format!("hint {hint}"), error).await.into()),
    };
    if lease.is_some() {
        check_still_readable(&state, &caller, (&hint, &owner)).await?;
    }
    let request = recorded.allow(&state, format!("hint {hint}")).await?;
    let changed = changed(&commitments, (&hint, &owner), lease.map(|_| expires)).await;
    if let Some(request) = request {
        request.end(changed.as_ref().map_or_else(audit::outcome, |_| "done".to_owned()));
    }
    Ok(Json(changed?))
}

/// Counts the GPUs of a commitment's job that did not idle, the first time.
async fn count_start(state: &AgentState, (hint, owner): (&str, &str)) -> Result<()> {
    let commitments = state.commitments()?;
    let (hint, owner) = (hint.to_owned(), owner.to_owned());
    let first = blocking(move || commitments.job_started(&hint, &owner)).await?;
    if let Some(GpusNotIdle { repository, name, gpu_seconds }) = first {
        let tree = NamedTree { repository: state.repository(Some(&repository))?.id(), name };
        state.exchange()?.peers().ledger().gpus_did_not_idle(tree, gpu_seconds);
    }
    Ok(())
}

/// Sets the end of a lease, or ends the commitment. Returns it as it is then, or was.
#[expect(clippy::option_option, reason = "a lease without an end is none at all")]
async fn changed(
    commitments: &Arc<Commitments>,
    (hint, owner): (&str, &str),
    expires: Option<Option<Timestamp>>,
) -> Result<view::Commitment> {
    let (all, of, by) = (Arc::clone(commitments), hint.to_owned(), owner.to_owned());
    let Some(expires) = expires else {
        let shown = commitments.look(hint, owner).await?;
        blocking(move || all.release(&of, &by)).await?;
        return Ok(shown);
    };
    blocking(move || all.renew(&of, &by, expires)).await?;
    commitments.look(hint, owner).await
}

/// Checks that the caller may still read the inputs of a commitment: a lease goes on only with the right to it.
///
/// # Errors
/// Not found, if the commitment, a name, or the right to read it is gone; denied, if the policy does not let its tree be here any more.
async fn check_still_readable(state: &AgentState, caller: &Caller, (hint, owner): (&str, &str)) -> Result<()> {
    let commitments = state.commitments()?;
    let (of, by) = (hint.to_owned(), owner.to_owned());
    let (repository, inputs) = blocking(move || commitments.inputs(&of, &by)).await?;
    let repository = state.repository(Some(&repository))?.for_caller(caller.local());
    let committing = Committing { state, caller, repository: &repository };
    let names = committing.names(&inputs).await?;
    let log = repository.state().await?;
    for name in &names {
        if let Some(value) = log.refs.get(name) {
            repository.check_readable(name, &value.manifest).await?;
        }
    }
    Ok(())
}

/// Checks that this agent is of the site.
///
/// # Errors
/// Usage, if it has no site; conflict, if it is of another one.
fn check_site(state: &AgentState, site: &str) -> Result<()> {
    let own = state.credentials()?.identity();
    if own.site() == site {
        return Ok(());
    }
    Err(Error::conflict("agent is of another site")
        .expected(site)
        .got(own.path())
        .help(format!("the header `Towline-At: {site}` forwards the request to an agent of that site")))
}

/// A commit, on behalf of a caller.
struct Committing<'a> {
    state: &'a AgentState,
    caller: &'a Caller,
    repository: &'a Repository,
}

impl Committing<'_> {
    fn request(&self, action: Action) -> AccessRequest<'_> {
        AccessRequest { caller: self.caller, action, repository: Some(self.repository), repeats: Repeats::Separate }
    }

    async fn refused(&self, name: impl std::fmt::Display, error: Error) -> Error {
        self.request(Action::Warm).refuse(self.state, name, error).await
    }

    /// Names that the caller may warm.
    async fn names(&self, inputs: &[String]) -> Result<Vec<Name>> {
        let mut names = Vec::with_capacity(inputs.len());
        for input in inputs {
            let selector: Selector = input.parse()?;
            let requester = self.caller.requester();
            match resolve(self.state.exchange()?, self.repository, requester.as_ref(), &selector).await {
                Ok(name) => names.push(name),
                Err(error) => return Err(self.refused(&selector, error).await),
            }
        }
        names.sort_unstable();
        names.dedup();
        Ok(names)
    }

    /// Records that the caller warms and pins `names`: a warm is the first entry.
    async fn allow(&self, names: &[Name]) -> Result<Vec<Request>> {
        let mut requests = Vec::new();
        for name in names {
            requests.extend(self.request(Action::Warm).allow(self.state, name).await?);
            requests.extend(self.request(Action::Pin).allow(self.state, name).await?);
        }
        Ok(requests)
    }

    /// Opens the trees of `names`, and pins them until `expires`, within `limit`.
    async fn make(
        &self,
        (hint, names): (&str, &[Name]),
        gpus: u64,
        (expires, limit): (Option<Timestamp>, Option<PinLimit>),
    ) -> Result<Option<Pending>> {
        let requester = self.caller.requester();
        // Lists of chunks take memory until the commitment is made, also while it waits for its turn.
        let place = self.state.large_trees.place_of_pin(self.repository, names, requester.as_ref()).await?;
        let mut trees = Vec::with_capacity(names.len());
        for name in names {
            match self.state.open_trees.open(self.repository, name).await {
                Ok(saved) => trees.push(saved),
                Err(error) if requester.is_some() => {
                    return Err(without_offers(self.repository, name, error).await);
                }
                Err(error) => return Err(error),
            }
        }
        let opened: Vec<_> = trees.iter().map(|tree| Arc::clone(tree)).collect();
        let chunks = needed_chunks(self.state.exchange()?, self.repository, &opened).await?;
        drop(opened);
        let trees = trees.into_iter().zip(chunks).map(|(saved, chunks)| CommitTree { saved, chunks }).collect();
        let request = CommitRequest {
            hint: hint.to_owned(),
            owner: self.caller.owner(None),
            repository: self.repository.id().to_string(),
            gpus,
            trees,
            expires,
            limit,
        };
        let commitments = self.state.commitments()?;
        let _turn = self.state.cache()?.limit_turn(request.limit.as_ref()).await;
        let caller = self.caller.clone();
        let made = blocking(move || {
            // Held until the commitment is made, also if the request is dropped.
            let _place = place;
            caller.holding(|| commitments.commit(&request))
        });
        made.await
    }

    /// Begins to fetch what is missing. A commitment that was made for it is undone if that cannot begin.
    async fn begin(&self, hint: &str, pending: Pending, requests: Vec<Request>) -> Result<()> {
        let inputs = (hint, pending.inputs.clone());
        let begun = self.caller.begin(|| warm_commitment(self.state, self.repository, inputs, self.caller.requester()));
        let commitments = self.state.commitments()?;
        let mut requests = requests.into_iter();
        match follow_with(requests.next(), requests.collect(), begun) {
            Ok(task) => {
                commitments.fetch_started(&pending, task);
                Ok(())
            }
            Err(error) => {
                let undone = move || {
                    commitments.undo(&pending);
                    Ok(())
                };
                blocking(undone).await?;
                Err(error)
            }
        }
    }
}
